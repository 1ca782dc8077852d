//! Peers that violate the transport's protocol: the engine hangs up and logs the violation, and nothing else of it is affected.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use calomel::{Bulk, Error, Request};

use crate::common::wire;
use crate::forged::*;
use crate::roles::{Far, start};
use crate::support::*;

/// A victim, and an honest client of it.
struct Scene {
    child: Child,
    address: String,
    far: Far,
    canary: Bulk,
    before: (usize, usize, usize),
}

const CANARY: usize = 200_000;

impl Scene {
    fn new() -> Scene {
        let (child, address) = start(&[]);
        let far = Far::new(&client(), &address);
        let canary = far.open(42, CANARY, false);
        let shared = far.open(42, CANARY, true);
        let mut copy = vec![0u8; CANARY];
        shared.on(&far.to).pull_into(&mut copy).unwrap();
        // What is made once and kept does not count.
        far.assert_serves();
        Forged::after_handshake(&address, true);
        let scene = Scene { before: (0, 0, 0), child, address, far, canary };
        let mut before = holdings(scene.child.pid());
        // Until the first connection is gone.
        eventually("it settles", || {
            std::thread::sleep(Duration::from_millis(100));
            let now = holdings(scene.child.pid());
            std::mem::replace(&mut before, now) == now
        });
        Scene { before, ..scene }
    }

    /// The victim is in the same state as before.
    #[track_caller]
    fn assert_unharmed(&self, after: &str) {
        let (begin, mut now) = (Instant::now(), holdings(self.child.pid()));
        while now.0 > self.before.0 || now.1 > self.before.1 || now.2 > self.before.2 + 3 {
            assert!(begin.elapsed() < Duration::from_secs(8), "after {after}: {:?} before, {now:?} now", self.before);
            std::thread::sleep(Duration::from_millis(2));
            now = holdings(self.child.pid());
        }
        assert!(self.far.to.is_connected(), "after {after}: another peer's connection has ended");
        assert_serves(&self.far.engine, &self.far.to);
        let mut copy = vec![0u8; CANARY];
        assert_eq!(self.canary.on(&self.far.to).pull_into(&mut copy).unwrap(), CANARY);
        assert!(all_are(&copy, 42), "after {after}");
    }
}

#[test]
fn handmade_peer_that_obeys_the_protocol_is_served() {
    let _watchdog = Watchdog::start("malformed::handmade_peer_that_obeys_the_protocol_is_served");
    let (_child, address) = over_shm(|| start(&[]));
    for reads in [true, false] {
        let mut peer = Forged::after_handshake(&address, reads);
        let arguments = [postcard::to_stdvec(&(100_000usize)).unwrap(), vec![1; 100_000]].concat();
        peer.call(1, "swallow", arguments.len(), &[]);
        let (here, through) = (60_000, arguments.len() - 60_000);
        peer.send_message(&Message::Data { stream: Stream::Request, id: 1, offset: 0, len: here as u32 }, &[]);
        peer.send_loan(0, 1, &[[0, arguments.as_ptr() as u64, 50_000], [0, arguments[50_000..].as_ptr() as u64, 10_000]]);
        peer.send_message(&Message::Data { stream: Stream::Request, id: 1, offset: here as u64, len: through as u32 }, &[]);
        for piece in arguments[here..].chunks(MAX_BODY) {
            peer.put(PAYLOAD, piece);
        }
        let answer = loop {
            let frame = peer.take(BYTES);
            if let Some((Message::Response { .. }, body)) = Message::take(&frame[wire::PREFIX_LEN..]) {
                break body.to_vec();
            }
        };
        assert_eq!(answer, postcard::to_stdvec(&100_000usize).unwrap());
        assert_eq!(peer.get(Word::Finished(0)), 1);
    }
}

/// Sets the carrier for the children and engines of this thread.
fn over_shm<T>(f: impl FnOnce() -> T) -> T {
    over(Carrier::Shm, || ());
    f()
}

type Case = (&'static str, fn(&str) -> Forged, Option<&'static str>);

/// Dials, and sends a hello packet with these descriptors.
fn hello_with(address: &str, fds: &[&OwnedFd]) -> Forged {
    let peer = Forged::dial(address);
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    peer.send(&Packet::Hello(Hello::valid()), &fds);
    peer
}

fn own_segment(peer: &Forged) -> OwnedFd {
    peer.segment().try_clone_to_owned().unwrap()
}

/// During the handshake: what the peer does, and part of the refusal that it gets.
const HANDSHAKE: &[Case] = &[
    (
        "another magic",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello { magic: *b"GET / HT", ..Hello::valid() }), &[peer.segment()]);
            peer
        },
        Some("not a calomel engine"),
    ),
    (
        "another version",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello { version: 7, ..Hello::valid() }), &[peer.segment()]);
            peer
        },
        Some("version 7"),
    ),
    ("no descriptor", |address| hello_with(address, &[]), Some("no shared memory")),
    ("a segment that is too short", |address| hello_with(address, &[&memory(LEN as u64 - 1, true)]), Some("announced")),
    ("a segment of no length", |address| hello_with(address, &[&memory(0, true)]), Some("announced")),
    ("a segment that can be made shorter", |address| hello_with(address, &[&memory(LEN as u64, false)]), Some("truncation")),
    ("a file", |address| hello_with(address, &[&std::fs::File::open("/proc/self/exe").unwrap().into()]), Some("sealed")),
    ("a folder", |address| hello_with(address, &[&std::fs::File::open("/tmp").unwrap().into()]), Some("sealed")),
    ("a device", |address| hello_with(address, &[&std::fs::File::open("/dev/zero").unwrap().into()]), Some("sealed")),
    (
        "a socket",
        |address| {
            let peer = Forged::dial(address);
            hello_with(address, &[&peer.socket])
        },
        Some("sealed"),
    ),
    (
        "twenty descriptors",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello::valid()), &[peer.segment(); 20]);
            peer
        },
        None,
    ),
    (
        "garbage",
        |address| {
            let peer = Forged::dial(address);
            peer.send_raw(&[0xff; 200], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a packet of nothing",
        |address| {
            let peer = Forged::dial(address);
            peer.send_raw(&[], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a packet that is too long",
        |address| {
            let peer = Forged::dial(address);
            peer.send_raw(&[1; 5000], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "half a hello",
        |address| {
            let peer = Forged::dial(address);
            let bytes = postcard::to_stdvec(&Packet::Hello(Hello::valid())).unwrap();
            peer.send_raw(&bytes[..10], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a welcome from the side that dials",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Welcome { hello: Hello::valid(), reads: true }, &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "ready before hello",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Ready { reads: true }, &[]);
            peer
        },
        None,
    ),
    (
        "a block before hello",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Block { id: 1, len: LEN as u64 }, &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "two hellos",
        |address| {
            let peer = hello_with(address, &[&own_segment(&Forged::dial(address))]);
            let fd = own_segment(&peer);
            peer.send(&Packet::Hello(Hello::valid()), &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "a hello, and the end",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello::valid()), &[peer.segment()]);
            rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).unwrap();
            peer
        },
        None,
    ),
    (
        "ready twice",
        |address| {
            let peer = Forged::connect(address, true);
            peer.send(&Packet::Ready { reads: true }, &[]);
            peer
        },
        None,
    ),
    (
        "refused after the handshake",
        |address| {
            let peer = Forged::connect(address, true);
            peer.send(&Packet::Refused { reason: "no".to_owned() }, &[]);
            peer
        },
        None,
    ),
    // These are disconnected after the connect timeout.
    ("no packet", |address| Forged::dial(address), None),
    (
        "doorbells and nothing else",
        |address| {
            let peer = Forged::dial(address);
            (0..100).for_each(|_| peer.ring_doorbell());
            peer
        },
        None,
    ),
    (
        "a hello and nothing else",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello::valid()), &[peer.segment()]);
            peer
        },
        None,
    ),
    ("no handshake in the ring", |address| Forged::connect(address, true), None),
];

#[test]
fn violations_in_the_handshake_are_refused() {
    let _watchdog = Watchdog::start("malformed::violations_in_the_handshake_are_refused");
    let scene = over_shm(Scene::new);
    for (name, run, reason) in HANDSHAKE {
        let begin = Instant::now();
        let refusal = run(&scene.address).hung_up();
        assert!(begin.elapsed() < Duration::from_secs(4), "{name}: {:?}", begin.elapsed());
        if let Some(reason) = reason {
            assert!(refusal.as_deref().is_some_and(|text| text.contains(reason)), "{name}: {refusal:?}");
        }
        scene.assert_unharmed(name);
    }
}

/// Announces a payload, and sends a loan for it.
fn send_loan_as(address: &str, announced: usize, slot: u64, id: u64, pieces: &[[u64; 3]]) -> Forged {
    let mut peer = Forged::after_handshake(address, true);
    peer.announce(announced);
    peer.send_loan(slot, id, pieces);
    peer
}

static BYTES_OF_MINE: [u8; 4096] = [6; 4096];

fn here() -> u64 {
    BYTES_OF_MINE.as_ptr() as u64
}

/// Announces a payload, and writes a record.
fn put_record(address: &str, announced: Option<usize>, kind: u64, len: usize) -> Forged {
    let mut peer = Forged::after_handshake(address, true);
    if let Some(announced) = announced {
        peer.announce(announced);
    }
    peer.put(kind, &vec![0; len]);
    peer
}

/// Writes a first record with this header.
fn header(address: &str, header: u64) -> Forged {
    let mut peer = Forged::after_handshake(address, true);
    peer.put_header(header, &[]);
    peer
}

/// Asks for more than the ring holds, and reports having read this much of it.
fn report_read(address: &str, steps: &[u64]) -> Forged {
    let mut peer = Forged::after_handshake(address, false);
    peer.call(1, "big", 3, &postcard::to_stdvec(&1_000_000usize).unwrap());
    for step in steps {
        // It has sent what there is room for, and checks again on a doorbell.
        std::thread::sleep(Duration::from_millis(20));
        peer.set(Word::Taken, *step);
    }
    peer
}

const RECORDS: &[Case] = &[
    ("a record of unknown kind", |address| header(address, 7), None),
    ("a record of kind 7", |address| header(address, 7 << 32 | 8), None),
    ("a record of the last kind", |address| header(address, u64::MAX), None),
    ("a record longer than any", |address| header(address, BYTES << 32 | (MAX_BODY as u64 + 1)), None),
    ("a record longer than the ring", |address| header(address, PAYLOAD << 32 | 0xffff_ffff), None),
    ("taken: all", |address| report_read(address, &[u64::MAX]), None),
    ("taken: ahead", |address| report_read(address, &[RING as u64 * 2]), None),
    (
        "taken: back again",
        |address| {
            let mut peer = report_read(address, &[]);
            // More than the ring holds, so it has seen that something was read.
            while peer.theirs_at < RING + RING / 2 {
                peer.next();
            }
            peer.set(Word::Taken, 0);
            peer
        },
        None,
    ),
    ("slot 16", |address| send_loan_as(address, 4096, 16, 1, &[[0, here(), 4096]]), None),
    ("the last slot", |address| send_loan_as(address, 4096, u64::MAX, 1, &[[0, here(), 4096]]), None),
    ("loan 0", |address| send_loan_as(address, 4096, 0, 0, &[[0, here(), 4096]]), None),
    ("a loan of nothing", |address| send_loan_as(address, 4096, 0, 1, &[]), None),
    ("a piece of nothing", |address| send_loan_as(address, 4096, 0, 1, &[[0, here(), 0]]), None),
    ("a piece that wraps", |address| send_loan_as(address, 4096, 0, 1, &[[0, u64::MAX - 10, 4096]]), None),
    (
        "pieces that are too long together",
        |address| send_loan_as(address, 4096, 0, 1, &[[0, 16, 1 << 63], [0, 16, 1 << 63]]),
        None,
    ),
    ("a huge piece", |address| send_loan_as(address, 4096, 0, 1, &[[0, 16, u64::MAX - 16]]), None),
    ("one byte too much", |address| send_loan_as(address, 4095, 0, 1, &[[0, here(), 4096]]), None),
    ("65 pieces", |address| send_loan_as(address, 650, 0, 1, &[[0, here(), 10]; 65]), None),
    ("addresses of nothing", |address| send_loan_as(address, 4096, 0, 1, &[[0, 4096, 4096]]), None),
    ("addresses of the system", |address| send_loan_as(address, 4096, 0, 1, &[[0, 0xffff_8000_0000_0000, 4096]]), None),
    ("half of it is not there", |address| send_loan_as(address, 4096, 0, 1, &[[0, here(), 2048], [0, 4096, 2048]]), None),
    ("an unknown block", |address| send_loan_as(address, 4096, 0, 1, &[[99, 0, 4096]]), None),
    (
        "more than a block has",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.announce(4096);
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[fd.as_fd()]);
            peer.send_loan(0, 1, &[[3, 1, 4096]]);
            peer
        },
        None,
    ),
    (
        "a block that was forgotten",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[fd.as_fd()]);
            peer.announce(4096);
            peer.put(FORGET, &3u64.to_le_bytes());
            std::thread::sleep(Duration::from_millis(20));
            peer.put(FORGET, &3u64.to_le_bytes());
            peer.send_loan(0, 1, &[[3, 0, 4096]]);
            peer
        },
        None,
    ),
    (
        "a block longer than it is",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 3, len: 1 << 40 }, &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "a block of nothing",
        |address| {
            let peer = Forged::after_handshake(address, true);
            peer.send(&Packet::Block { id: 3, len: 0 }, &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a block without a descriptor",
        |address| {
            let peer = Forged::after_handshake(address, true);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[]);
            peer
        },
        None,
    ),
    (
        "a block that can be made shorter",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(4096, false);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "a block that would take up the addresses of others",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(8 << 40, true);
            peer.send(&Packet::Block { id: 1, len: 8 << 40 }, &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "blocks without end",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(4096, true);
            for id in 1..1000 {
                peer.send(&Packet::Block { id, len: 4096 }, &[fd.as_fd()]);
            }
            peer
        },
        None,
    ),
    (
        "one slot twice",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.announce(1 << 20);
            for id in 1..1000 {
                peer.send_loan(0, id, &[[0, here(), 1]]);
            }
            peer
        },
        None,
    ),
    ("a payload that was not announced", |address| put_record(address, None, PAYLOAD, 100), None),
    (
        "a loan that was not announced",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.send_loan(0, 1, &[[0, here(), 4096]]);
            peer
        },
        None,
    ),
    ("the end of nothing", |address| put_record(address, None, GONE, 0), None),
    ("one byte more than announced", |address| put_record(address, Some(100), PAYLOAD, 101), None),
    ("a payload of nothing", |address| put_record(address, Some(100), PAYLOAD, 0), None),
    ("a payload past the caches that was not announced", |address| put_record(address, None, PAYLOAD_PAST_CACHES, 100), None),
    ("one byte more, past the caches", |address| put_record(address, Some(100), PAYLOAD_PAST_CACHES, 101), None),
    ("a payload of nothing, past the caches", |address| put_record(address, Some(100), PAYLOAD_PAST_CACHES, 0), None),
    ("frames inside a payload", |address| put_record(address, Some(100), BYTES, 10), None),
    ("a loan of odd length", |address| put_record(address, Some(100), LOAN, 17), None),
    ("a loan of an odd number of words", |address| put_record(address, Some(100), LOAN, 32), None),
    (
        "a payload and a frame in one record",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.call(1, "swallow", 1 << 20, &[]);
            let frame = Message::Data { stream: Stream::Request, id: 1, offset: 0, len: 5 }.frame(&[]);
            peer.put(BYTES, &[frame.clone(), frame].concat());
            peer
        },
        None,
    ),
    (
        "an announcement, and the end",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.announce(1 << 20);
            rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).unwrap();
            peer
        },
        None,
    ),
    ("garbage in the ring", |address| put_record(address, None, BYTES, 1000), None),
];

#[test]
fn violations_in_the_ring_disconnect() {
    let _watchdog = Watchdog::start("malformed::violations_in_the_ring_disconnect");
    let scene = over_shm(Scene::new);
    for (name, run, _) in RECORDS {
        let begin = Instant::now();
        run(&scene.address).hung_up();
        // At once, and not because of the peer timeout.
        assert!(begin.elapsed() < HEARTBEAT * 9 / 10, "{name}: {:?}", begin.elapsed());
        scene.assert_unharmed(name);
    }
}

#[test]
fn loan_of_unmapped_memory_disconnects_and_harms_nothing() {
    // One half of the payload can be read; what has arrived of it must not count.
    let _watchdog = Watchdog::start("malformed::loan_of_unmapped_memory_disconnects_and_harms_nothing");
    let scene = over_shm(Scene::new);
    for pieces in [[[0, here(), 2048], [0, 4096, 2048]], [[0, 4096, 2048], [0, here(), 2048]]] {
        let mut peer = Forged::after_handshake(&scene.address, true);
        peer.announce(4096);
        peer.send_loan(0, 1, &pieces);
        peer.hung_up();
        scene.assert_unharmed("a missing piece");
    }
}

#[test]
fn floods_of_packets_delay_no_other_peer() {
    let _watchdog = Watchdog::start("malformed::floods_of_packets_delay_no_other_peer");
    let scene = over_shm(Scene::new);
    let floods: [fn(&Forged); 2] = [
        |peer| peer.ring_doorbell(),
        |peer| {
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 1, len: 4096 }, &[fd.as_fd()]);
        },
    ];
    for flood in floods {
        let (peer, begin, time) = (Forged::after_handshake(&scene.address, true), Instant::now(), Duration::from_millis(1500));
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while begin.elapsed() < time {
                        flood(&peer);
                    }
                });
            }
            while begin.elapsed() < time {
                let call = Instant::now();
                assert_serves(&scene.far.engine, &scene.far.to);
                assert!(call.elapsed() < Duration::from_millis(700), "{:?}", call.elapsed());
            }
        });
        drop(peer);
        scene.assert_unharmed("a flood");
    }
}

#[test]
fn peer_that_sends_after_its_disconnect_is_not_read() {
    let _watchdog = Watchdog::start("malformed::peer_that_sends_after_its_disconnect_is_not_read");
    let scene = over_shm(Scene::new);
    let mut peer = Forged::after_handshake(&scene.address, true);
    rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both).unwrap();
    // Pings: there is always something in the ring, as fast as it is read.
    let ping = Message::Ping.frame(&[]);
    let (begin, mut checked) = (Instant::now(), Instant::now());
    loop {
        peer.put(BYTES, &ping);
        // Not faster than the victim reads, as long as it does.
        while peer.get(Word::Taken) + (RING as u64) / 2 < peer.at as u64 && begin.elapsed() < Duration::from_secs(3) {
            std::hint::spin_loop();
        }
        if checked.elapsed() > Duration::from_millis(50) {
            checked = Instant::now();
            if holdings(scene.child.pid()).0 <= scene.before.0 {
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(3), "the victim reads on");
        }
    }
    scene.assert_unharmed("sending on");
}

#[test]
fn loan_for_cancelled_call_is_not_used_for_the_next_call() {
    const LEN: usize = 100_000;
    let _watchdog = Watchdog::start("malformed::loan_for_cancelled_call_is_not_used_for_the_next_call");
    let engine = |builder: calomel::EngineBuilder| builder.listen("shm://").build().unwrap();
    let (server, client) = (engine(calomel::Engine::builder()), engine(calomel::Engine::builder()));
    server.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    let echo = client.procedure::<Vec<u8>, Vec<u8>>("echo").on(client.lookup(server.address()).unwrap());
    let word = b"SECRET-OF-ANOTHER-PEER!";
    let secret: Vec<u8> = word.iter().copied().cycle().take(LEN - 3).collect();
    let memory = vec![6u8; LEN];
    for _ in 0..10 {
        // Buffers of messages are reused.
        let calls: Vec<_> = (0..4).map(|_| echo.start(&secret).unwrap()).collect();
        assert!(calls.into_iter().all(|call| call.wait().unwrap() == secret));
        let mut adversary = Forged::after_handshake(&server.address().to_string(), false);
        adversary.call(7, "echo", LEN, &[]);
        adversary.send_message(&Message::Data { stream: Stream::Request, id: 7, offset: 0, len: LEN as u32 }, &[]);
        adversary.set(Word::Granted(0), 1);
        let loan = [0, 1, 0, memory.as_ptr() as u64, LEN as u64];
        // In one poll, so that the loan is accepted for the first call, and read after the second has begun.
        let again = [Message::Cancel { call: 7 }.frame(&[]), Message::call(7, "echo", LEN).frame(&[])].concat();
        adversary.put_two((LOAN, &loan.map(u64::to_le_bytes).concat()), (BYTES, &again));
        let (begin, mut received) = (Instant::now(), Vec::new());
        while begin.elapsed() < Duration::from_millis(50) {
            received.extend(adversary.try_next().map(|(_, body)| body).unwrap_or_default());
        }
        assert!(!received.windows(word.len()).any(|bytes| bytes == word), "a peer received what another has sent");
    }
    assert_eq!(echo.call(&secret).unwrap(), secret);
}

#[test]
fn ring_overwritten_while_it_is_read_harms_nothing() {
    // Another thread of the peer overwrites a frame while it is read: the victim sees either version, or garbage, and is not
    // harmed.
    let _watchdog = Watchdog::start("malformed::ring_overwritten_while_it_is_read_harms_nothing");
    let scene = over_shm(Scene::new);
    for round in 0..30u64 {
        let mut peer = Forged::after_handshake(&scene.address, true);
        peer.announce(1 << 20);
        let mut random = Random(round);
        let begin = Instant::now();
        let base = peer.at;
        while begin.elapsed() < Duration::from_millis(10) {
            // Headers, bodies and words all over the ring, again and again, with values that are nearly valid.
            let at = (base + 64 * random.below(8)) % RING;
            let value = match random.below(4) {
                0 => LOAN << 32 | 40,
                1 => PAYLOAD << 32 | random.below(MAX_BODY + 2) as u64,
                2 => random.below(20) as u64,
                _ => here(),
            };
            peer.overwrite_word(at + 8 * random.below(6), value);
            peer.set([Word::Granted(0), Word::Reading(3), Word::Finished(0), Word::Waiting][random.below(4)], value % 5);
        }
        drop(peer);
        if round % 10 == 9 {
            scene.assert_unharmed("scribbling");
        }
    }
}

#[test]
fn call_to_server_that_violates_the_handshake_is_unreachable() {
    let _watchdog = Watchdog::start("malformed::call_to_server_that_violates_the_handshake_is_unreachable");
    over(Carrier::Shm, || ());
    // The last one sends nothing, which costs the connect timeout. The others answer at once, on an idle machine.
    let engine = configured().connect_timeout(Duration::from_secs(4)).build().unwrap();
    define_add(&engine);
    type Serve = fn(Forged);
    let cases: [(&str, Serve, &str); 7] = [
        (
            "another version",
            |peer| {
                peer.receive();
                let hello = Hello { version: 9, ..Hello::valid() };
                peer.send(&Packet::Welcome { hello, reads: true }, &[peer.segment()]);
                peer.hung_up();
            },
            "version 9",
        ),
        (
            "another magic",
            |peer| {
                peer.receive();
                let hello = Hello { magic: *b"SSH-2.0-", ..Hello::valid() };
                peer.send(&Packet::Welcome { hello, reads: true }, &[peer.segment()]);
                peer.hung_up();
            },
            "not a calomel engine",
        ),
        (
            "no segment",
            |peer| {
                peer.receive();
                peer.send(&Packet::Welcome { hello: Hello::valid(), reads: true }, &[]);
                peer.hung_up();
            },
            "no shared memory",
        ),
        (
            "a refusal",
            |peer| {
                peer.receive();
                peer.send(&Packet::Refused { reason: "it rains".to_owned() }, &[]);
                peer.hung_up();
            },
            "it rains",
        ),
        (
            "garbage",
            |peer| {
                peer.send_raw(&[0x77; 300], &[]);
                peer.hung_up();
            },
            "packet",
        ),
        ("nothing", drop, ""),
        ("no packet", |peer| drop(peer.hung_up()), ""),
    ];
    for (name, serve, reason) in cases {
        let address = format!("shm://malformed-{}-{}", std::process::id(), name.replace(' ', "-"));
        let listener = listen(&address);
        std::thread::scope(|s| {
            s.spawn(|| serve(Forged::accept(&listener)));
            let endpoint = engine.lookup(&address).unwrap();
            let begin = Instant::now();
            let error = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(8), "{name}: {:?}", begin.elapsed());
            let text = error.to_string();
            assert!(text.contains(reason) && text.contains(&address), "{name}: {text}");
            crate::assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
        });
    }
    assert_lives(&engine);
    let _ = engine.define("unused", |_: &Request, ()| ());
}
