//! Descriptors of memory that peers get: only of blocks exposed as a whole for reading, without restrictions, and that hold
//! nothing else afterwards. The peer is made by hand, and keeps every descriptor that it gets.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, EngineBuffer, Exposed, Grant, Request};

use crate::common::wire::{self, Described, Range, Status};
use crate::forged::*;
use crate::support::*;

const LEN: usize = 256 << 10;
/// Longest time that a peer needs for a pull, on a busy machine.
const PATIENCE: Duration = BOUND;

/// A peer that reads the loans and payloads that it gets, and keeps all descriptors.
pub struct Collector {
    pub peer: Forged,
    pub kept: Vec<OwnedFd>,
    /// The bodies of the loans that it got.
    pub loans: Vec<Vec<u8>>,
    transfers: u64,
}

impl Collector {
    fn of(engine: &Engine) -> Collector {
        Collector::new(Forged::after_handshake(&engine.address().to_string(), false))
    }

    pub fn new(peer: Forged) -> Collector {
        Collector { peer, kept: Vec::new(), loans: Vec::new(), transfers: 0 }
    }

    /// Pulls a range, by loans and through the ring; returns the owner's final status: `Ok` when all has arrived.
    pub fn pull(&mut self, range: Range) -> Status {
        self.transfers += 1;
        self.peer.send_message(&Message::Pull(Range { transfer: self.transfers, ..range }), &[]);
        self.receive(range.len as usize)
    }

    /// Receives payloads of this many bytes, or a refusal.
    fn receive(&mut self, len: usize) -> Status {
        let (begin, mut came) = (Instant::now(), 0);
        while came < len {
            assert!(begin.elapsed() < PATIENCE, "{came} bytes of {len} came");
            let Some((kind, body)) = self.peer.try_next() else {
                self.peer.ring_doorbell();
                std::thread::yield_now();
                continue;
            };
            match kind {
                PAYLOAD | PAYLOAD_PAST_CACHES => came += body.len(),
                LOAN => {
                    let words: Vec<u64> = body.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
                    came += words[2..].chunks(3).map(|piece| piece[2] as usize).sum::<usize>();
                    self.peer.set(Word::Finished(words[0] as usize), words[1]);
                    self.loans.push(body);
                }
                BYTES => {
                    for message in frames(&body) {
                        match message {
                            Message::Done { status, .. } if status != Status::Ok => return status,
                            _ => {}
                        }
                    }
                }
                GONE => return Status::Revoked,
                _ => {}
            }
        }
        self.take_descriptors();
        Status::Ok
    }

    fn take_descriptors(&mut self) {
        while let Some((packet, fds)) = self.peer.receive_now() {
            if matches!(packet, Packet::Block { .. }) {
                self.kept.extend(fds);
            }
        }
    }

    /// True when this byte is visible through any of the descriptors.
    fn sees(&self, byte: u8) -> bool {
        self.kept.iter().any(|fd| Mapped::new(fd.as_fd(), LEN, false).bytes().contains(&byte))
    }
}

/// The messages of a record of frames, as far as they are defined here.
fn frames(mut bytes: &[u8]) -> Vec<Message> {
    let mut messages = Vec::new();
    while bytes.len() >= wire::PREFIX_LEN {
        let len = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let (frame, message) = (len(4), len(8));
        messages.extend(Message::take(&bytes[wire::PREFIX_LEN..][..message]).map(|(message, _)| message));
        bytes = &bytes[wire::PREFIX_LEN + frame..];
    }
    messages
}

fn engine() -> Engine {
    over(Carrier::Shm, || ());
    configured().listen("shm://").build().unwrap()
}

fn filled(engine: &Engine, byte: u8) -> EngineBuffer {
    let mut buffer = engine.alloc(LEN);
    buffer.fill(byte);
    buffer
}

#[test]
fn block_exposed_as_a_whole_is_mapped_by_the_peer() {
    let _watchdog = Watchdog::start("memory_descriptors::block_exposed_as_a_whole_is_mapped_by_the_peer");
    let engine = engine();
    let mut peer = Collector::of(&engine);
    let constant = engine.expose_read_only(filled(&engine, 1)).unwrap();
    let writable = engine.expose(filled(&engine, 2), BulkMode::ReadWrite).unwrap();
    for (number, bulk) in [constant.bulk(), writable.bulk(), constant.bulk()].iter().enumerate() {
        assert_eq!(peer.pull(Range::of(0, bulk)), Status::Ok);
        assert_eq!(peer.kept.len(), 2.min(number + 1), "expected one descriptor per block");
    }
    assert!(peer.sees(1) && peer.sees(2));
}

#[test]
fn memory_with_restrictions_is_mapped_by_no_peer() {
    let _watchdog = Watchdog::start("memory_descriptors::memory_with_restrictions_is_mapped_by_no_peer");
    let engine = engine();
    let long = Duration::from_secs(3600);
    let grants = [
        ("once", Grant::new().once()),
        ("quota", Grant::new().quota(LEN as u64)),
        ("a large quota", Grant::new().quota(u64::MAX)),
        ("expires", Grant::new().expires_after(long)),
        ("all restrictions", Grant::new().once().quota(LEN as u64).expires_after(long)),
    ];
    for (name, grant) in grants {
        for constant in [false, true] {
            let mut peer = Collector::of(&engine);
            let (bulk, _exposed): (Bulk, Box<dyn std::any::Any>) = if constant {
                let exposed = engine.expose_read_only_with(filled(&engine, 3), &grant).unwrap();
                (exposed.bulk(), Box::new(exposed))
            } else {
                let exposed = engine.expose_with(filled(&engine, 3), BulkMode::ReadWrite, &grant).unwrap();
                (exposed.bulk(), Box::new(exposed))
            };
            assert_eq!(peer.pull(Range::of(0, &bulk)), Status::Ok, "{name}");
            assert_eq!(peer.kept.len(), 0, "{name}: a descriptor arrived");
        }
    }
}

#[test]
fn memory_for_one_peer_or_one_call_is_mapped_by_no_peer() {
    let _watchdog = Watchdog::start("memory_descriptors::memory_for_one_peer_or_one_call_is_mapped_by_no_peer");
    let engine = engine();
    let address = format!("shm://given-{}", std::process::id());
    let listener = listen(&address);
    for name in ["one peer", "one call"] {
        std::thread::scope(|s| {
            let peer = s.spawn(|| {
                let mut peer = Forged::accept(&listener);
                peer.welcome(false);
                peer.shake_hands();
                assert!(peer.take(BYTES).starts_with(b"calomel\0"));
                peer
            });
            let endpoint = engine.lookup(&address).unwrap();
            let call = engine.procedure::<Bulk, ()>("take");
            let grant = if name == "one peer" { Grant::new().only(&endpoint) } else { Grant::new().for_one_call() };
            let exposed = engine.expose_with(filled(&engine, 4), BulkMode::ReadWrite, &grant).unwrap();
            let pending = call.on(&endpoint).start(&exposed.bulk()).unwrap();
            let mut peer = Collector::new(peer.join().unwrap());
            // The call has arrived, with its bulk.
            while !frames(&peer.peer.take(BYTES)).iter().any(|message| matches!(message, Message::Request { .. })) {}
            assert_eq!(peer.pull(Range::of(0, &exposed.bulk())), Status::Ok, "{name}");
            assert_eq!(peer.kept.len(), 0, "{name}: a descriptor arrived");
            drop(peer);
            pending.wait().unwrap_err();
        });
    }
}

#[test]
fn part_of_a_block_is_mapped_by_no_peer() {
    let _watchdog = Watchdog::start("memory_descriptors::part_of_a_block_is_mapped_by_no_peer");
    let engine = engine();
    let mut buffer = filled(&engine, 5);
    engine
        .scope(|scope| {
            let mut peer = Collector::of(&engine);
            let (some, rest) = buffer.split_at_mut(LEN / 2);
            let bulk = scope.expose(some, BulkMode::ReadWrite)?;
            assert_eq!(peer.pull(Range::of(0, &bulk)), Status::Ok);
            let bulk = scope.expose_read_only(&*rest)?;
            assert_eq!(peer.pull(Range::of(0, &bulk)), Status::Ok);
            assert_eq!(peer.kept.len(), 0, "a descriptor of the whole block arrived for a part of it");
            Ok(())
        })
        .unwrap();
    // All of it, but only for the time of a scope.
    engine
        .scope(|scope| {
            let mut peer = Collector::of(&engine);
            let bulk = scope.expose(&mut buffer[..], BulkMode::ReadWrite)?;
            assert_eq!(peer.pull(Range::of(0, &bulk)), Status::Ok);
            assert_eq!(peer.kept.len(), 0, "a descriptor arrived for borrowed memory");
            Ok(())
        })
        .unwrap();
}

/// The target of a push gets the bytes pushed, and access to nothing else of the memory that they come from.
#[test]
fn push_from_a_block_reveals_nothing_else_of_it() {
    let _watchdog = Watchdog::start("memory_descriptors::push_from_a_block_reveals_nothing_else_of_it");
    let engine = engine();
    let mut memory = filled(&engine, 6);
    memory[..LEN / 2].fill(9);
    engine
        .define("push", {
            move |request: &Request, (bulk, how): (Bulk, u8)| -> bool {
                let engine = request.engine();
                let remote = bulk.on(request.endpoint());
                let buffer = || {
                    let mut buffer = engine.alloc(LEN);
                    buffer[..LEN / 2].copy_from_slice(&memory[..LEN / 2]);
                    buffer[LEN / 2..].copy_from_slice(&memory[LEN / 2..]);
                    buffer
                };
                let pushed = match how {
                    0 => remote.push_from(&memory[LEN / 2..]),
                    1 => remote.push_from(&memory[..]),
                    2 => {
                        let exposed = engine.expose(buffer(), BulkMode::WriteOnly).unwrap();
                        remote.push_from(&exposed)
                    }
                    _ => {
                        let exposed = engine.expose_read_only(buffer()).unwrap();
                        remote.push_from(&exposed)
                    }
                };
                pushed.is_ok()
            }
        })
        .unwrap();
    for how in 0..4u8 {
        let mut peer = Collector::of(&engine);
        let len = if how == 0 { LEN / 2 } else { LEN };
        let bulk = Described::new([7; 16], len as u64, BulkMode::WriteOnly, peer.peer.incarnation);
        let arguments = postcard::to_stdvec(&(bulk, how)).unwrap();
        peer.peer.call(1, "push", arguments.len(), &arguments);
        assert_eq!(peer.receive(len), Status::Ok);
        assert!(!peer.sees(9) && peer.kept.is_empty(), "push {how}: a descriptor arrived");
    }
}

/// What a peer with an old descriptor sees, after each way to put other data into the memory.
#[test]
fn old_mapping_does_not_show_writes_after_reclaim() {
    let _watchdog = Watchdog::start("memory_descriptors::old_mapping_does_not_show_writes_after_reclaim");
    let engine = engine();
    type Refill = fn(&Engine, Exposed<EngineBuffer>) -> Box<dyn std::any::Any>;
    let refills: [(&str, Refill); 5] = [
        ("reclaim, fill", |_, exposed| {
            let mut buffer = exposed.reclaim();
            assert!(all_are(&buffer, 1), "its content is kept");
            buffer.fill(7);
            assert!(all_are(&buffer, 7));
            Box::new(buffer)
        }),
        ("reclaim, write a byte", |_, exposed| {
            let mut buffer = exposed.reclaim();
            buffer[LEN - 1] = 7;
            assert!(all_are(&buffer[..LEN - 1], 1) && buffer[LEN - 1] == 7);
            Box::new(buffer)
        }),
        ("reclaim, expose with restrictions, and the owner writes", |engine, exposed| {
            let exposed = engine.expose_with(exposed.reclaim(), BulkMode::ReadWrite, &Grant::new().once()).unwrap();
            exposed.write_at(0, &[7; LEN]).unwrap();
            Box::new(exposed)
        }),
        ("reclaim, expose for writing, and peers write", |engine, exposed| {
            let exposed = engine.expose(exposed.reclaim(), BulkMode::WriteOnly).unwrap();
            let other = configured().build().unwrap();
            let to = other.lookup(engine.address()).unwrap();
            exposed.bulk().on(&to).push_from(&[7u8; LEN][..]).unwrap();
            Box::new(exposed)
        }),
        ("reclaim, drop, allocate", |engine, exposed| {
            drop(exposed.reclaim());
            Box::new((0..8).map(|_| filled(engine, 7)).collect::<Vec<_>>())
        }),
    ];
    for (name, refill) in refills {
        let mut peer = Collector::of(&engine);
        let exposed = engine.expose(filled(&engine, 1), BulkMode::ReadWrite).unwrap();
        assert_eq!(peer.pull(Range::of(0, &exposed.bulk())), Status::Ok);
        assert_eq!(peer.kept.len(), 1, "{name}");
        // Mapped before, and again after.
        let mapped = Mapped::new(peer.kept[0].as_fd(), LEN, false);
        assert!(mapped.bytes().contains(&1));
        let _now = refill(&engine, exposed);
        assert!(!mapped.bytes().contains(&7) && !peer.sees(7), "{name}: a peer sees what was never exposed to it");
    }
}

#[test]
fn pooled_buffer_is_invisible_to_peers_of_its_last_user() {
    let _watchdog = Watchdog::start("memory_descriptors::pooled_buffer_is_invisible_to_peers_of_its_last_user");
    let engine = engine();
    let pool = engine.buffer_pool(LEN, 1);
    let mut peer = Collector::of(&engine);
    for round in 0..10 {
        let mut buffer = pool.take().unwrap();
        buffer.fill(10 + round);
        assert!(!peer.sees(10 + round), "round {round}: a peer sees what is not exposed");
        let exposed = engine.expose(buffer, BulkMode::ReadOnly).unwrap();
        assert_eq!(peer.pull(Range::of(0, &exposed.bulk())), Status::Ok);
    }
}
