//! Fuzz target: a segment with arbitrary content that changes at any moment, and records, loans and blocks of a hostile peer.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::super::{Consumed, Link, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use super::super::connection::{Connection, MAX_BODY};
use super::super::mailbox::{ExportedPart, KernelCopyPolicy, ShmInbox, ShmOutbox, ShmSend, Turn, Written};
use super::super::process::ShmPeer;
use super::super::segment::{LEN, RING, SLOTS, SharedSegment, Words};
use super::pair;
use crate::Address;
use crate::fuzzing::script::{read_all, script, written};
use crate::memory::{CopyPath, Region, RegionBuffer, Segments, Slice, shared};

script! {
    enum Number {
        Small { n: u8 },
        Middle { n: u16 },
        /// Close to the longest body of a record.
        Longest { more: u8 },
        Top { below: u8 },
        Any { n: u64 },
    }
}

script! {
    enum Far {
        /// In this process, in readable memory.
        There { offset: u16 },
        Any { n: Number },
    }
}

script! {
    struct Piece { block: u8, address: Far, len: Number }
}

script! {
    enum Event {
        /// Frames for the sink, see [`RingSink`], in a well-formed record.
        Frames { bytes: Vec<u8> },
        /// A part of a payload.
        Payload { len: Number },
        /// A loan, granted or not.
        Loan { slot: u8, id: u8, first: Piece, second: Piece, pieces: u8, granted: bool },
        Gone,
        Forget { id: u8 },
        /// A record of any kind and length that begins with these bytes.
        Record { kind: u8, len: Number, bytes: Vec<u8> },
        /// A header at the next record's position, or anywhere.
        Header { at: Number, next: bool, word: u64 },
        Overwrite { at: Number, bytes: Vec<u8> },
        Word { which: u8, slot: u8, value: Number },
        /// A shared block of `len` bytes, announced with a length of `claim`.
        Block { id: u8, len: u16, claim: Number, sealed: bool },
        /// The victim polls its inbox.
        Turn,
        /// So many of the next events happen during the next poll.
        During { events: u8 },
        /// The victim closes the gate of a target.
        CloseTarget { which: u8 },
        /// The victim sends, as much as there is room for.
        Send { bytes: Number, payload: Number },
        /// The victim continues the send, or closes the gate of its payload.
        Resume,
        Withdraw,
    }
}

const EVENTS: usize = 200;
/// Longest payload that a frame announces.
const LONGEST: usize = 300_000;
/// Guard bytes on either side of a payload's target.
const AROUND: usize = 32;
const SECRET: u8 = 0xd5;
/// Memory of this process that loans may name.
static THERE: [u8; 1 << 16] = [0x66; 1 << 16];

/// The hostile peer: writes the segment that the victim reads.
struct Adversary {
    /// Writable; the victim has a read-only mapping of it.
    segment: Arc<SharedSegment>,
    /// Where its next record goes.
    at: u64,
    blocks: VecDeque<(u64, u64, OwnedFd)>,
    events: VecDeque<Event>,
    during: usize,
}

impl Adversary {
    fn record(&mut self, kind: u64, len: usize, fill: impl FnOnce(&SharedSegment, u64)) {
        if len <= MAX_BODY {
            fill(&self.segment, self.at + 8);
        }
        let next = self.at + (8 + len.min(MAX_BODY) as u64).next_multiple_of(64);
        self.segment.header(next).store(0, Ordering::Relaxed);
        self.segment.header(self.at).store(kind << 32 | len as u64, Ordering::Release);
        self.at = next;
    }

    fn bytes(&mut self, kind: u64, bytes: &[u8]) {
        self.record(kind, bytes.len(), |segment, at| segment.write(at, bytes, CopyPath::Cached));
    }

    /// Executes an event of the adversary.
    fn act(&mut self, event: &Event) {
        match event {
            Event::Frames { bytes } => self.bytes(1, bytes),
            Event::Payload { len } => {
                let len = number(len) as usize % (MAX_BODY + 2);
                self.record(if len.is_multiple_of(2) { 3 } else { 6 }, len, |segment, at| {
                    segment.write(at, &vec![0x77; len], CopyPath::Cached)
                });
            }
            Event::Loan { slot, id, first, second, pieces, granted } => {
                let slot = usize::from(*slot) % (SLOTS + 1);
                let list: Vec<(u64, u64, u64)> = (0..u64::from(*pieces % 70))
                    .map(|n| if n % 2 == 0 { first } else { second })
                    .map(|piece| (u64::from(piece.block % 4), far(&piece.address), number(&piece.len)))
                    .collect();
                let mut words = Vec::new();
                ExportedPart::encode(slot, u64::from(*id), list.into_iter(), &mut words);
                if *granted && slot < SLOTS {
                    self.segment.words().granted[slot].store(u64::from(*id), Ordering::Release);
                }
                self.bytes(2, &words);
            }
            Event::Gone => self.bytes(4, &[]),
            Event::Forget { id } => self.bytes(5, &u64::from(*id).to_le_bytes()),
            Event::Record { kind, len, bytes } => {
                let len = number(len) as usize % (RING as usize);
                self.record((*kind).into(), len, |segment, at| segment.write(at, bytes, CopyPath::Cached));
            }
            Event::Header { at, next, word } => {
                let at = if *next { self.at } else { number(at) & !7 };
                self.segment.header(at).store(*word, Ordering::Release);
            }
            Event::Overwrite { at, bytes } => {
                // Anywhere in the ring.
                self.segment.write(number(at), bytes, CopyPath::Cached);
            }
            Event::Word { which, slot, value } => {
                let (words, slot) = (self.segment.words(), usize::from(*slot) % SLOTS);
                let Words { taken, asleep, waiting, granted, finished, wanted, .. } = words;
                // `reading` is left out: closing a gate would wait a second for it.
                let word = [&taken.0, &asleep.0, &waiting.0, &granted[slot], &finished[slot], &wanted.0];
                word[usize::from(*which) % word.len()].store(number(value), Ordering::Release);
            }
            Event::Block { id, len, claim, sealed } => {
                let fd = if *sealed {
                    shared::create(usize::from(*len).max(1), false).map(|(fd, _)| fd).ok()
                } else {
                    rustix::fs::memfd_create("any", rustix::fs::MemfdFlags::CLOEXEC).ok()
                };
                self.blocks.extend(fd.map(|fd| (u64::from(*id % 4), number(claim), fd)));
            }
            _ => {}
        }
    }

    /// Executes the events that happen during a poll of the victim.
    fn interfere(&mut self) {
        for _ in 0..std::mem::take(&mut self.during) {
            if let Some(event) = self.events.pop_front() {
                self.act(&event);
            }
        }
    }
}

fn number(number: &Number) -> u64 {
    match *number {
        Number::Small { n } => n.into(),
        Number::Middle { n } => u64::from(n),
        Number::Longest { more } => MAX_BODY as u64 + u64::from(more) - 100,
        Number::Top { below } => u64::MAX - u64::from(below),
        Number::Any { n } => n,
    }
}

fn far(far: &Far) -> u64 {
    match far {
        Far::There { offset } => THERE.as_ptr().addr() as u64 + u64::from(*offset),
        Far::Any { n } => number(n),
    }
}

/// The sink of the victim. Its frames are single bytes; some announce a payload, or close the link.
struct RingSink<'a> {
    adversary: &'a mut Adversary,
    regions: &'a mut Vec<RingTarget>,
    announced: usize,
    done: usize,
}

/// A payload's target, between guard bytes.
struct RingTarget {
    memory: RegionBuffer<Segments<Vec<u8>>>,
    len: usize,
}

impl RingTarget {
    fn new(len: usize, piece: usize) -> RingTarget {
        let whole = vec![SECRET; len + 2 * AROUND];
        let segments = Segments(whole.chunks(piece).map(<[u8]>::to_vec).collect());
        RingTarget { memory: RegionBuffer::writable(segments), len }
    }

    fn slice(&self) -> Option<Slice> {
        Slice::whole(self.memory.region()).part(AROUND, self.len)
    }

    fn check(&self) {
        let mut all = vec![0; self.len + 2 * AROUND];
        if Slice::whole(self.memory.region()).read(&mut all) {
            let around = all[..AROUND].iter().chain(&all[AROUND + self.len..]);
            assert!(around.copied().all(|byte| byte == SECRET), "memory around a payload's target was written");
        }
    }
}

impl Sink for RingSink<'_> {
    fn accepted(&mut self, _: Address) -> LinkKey {
        unreachable!("this sink accepts no links")
    }
    fn attach(&mut self, _: LinkKey, _: Arc<dyn Link>) {}
    fn connected(&mut self, _: LinkKey) {}
    fn chunk(&mut self, _: LinkKey, _: usize) {}
    /// 0: a payload; two bytes give its length, one its target. 1: an incomplete frame. 2: closes the link. Others: one byte is
    /// consumed.
    fn bytes(&mut self, _: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.adversary.interfere();
        let mut used = 0;
        while let Some(frame) = bytes.get(used) {
            match frame % 16 {
                0 => {
                    let Some([low, high, how]) = bytes.get(used + 1..used + 4) else { break };
                    let len = (usize::from(u16::from_le_bytes([*low, *high])) * (1 + usize::from(how % 5))).min(LONGEST);
                    let piece = [usize::MAX, 1 << 12, 1000, 33][usize::from(how >> 4) % 4].max(len / 200);
                    let target = (how & 8 == 0).then(|| RingTarget::new(len, piece));
                    let receive_target = ReceiveTarget { memory: target.as_ref().and_then(RingTarget::slice), len, total: len };
                    self.regions.extend(target);
                    self.announced += 1;
                    return Some(Consumed { used: used + 4, target: Some(receive_target) });
                }
                1 if bytes.len() < 100_000 => break,
                1 | 2 => return None,
                _ => used += 1,
            }
        }
        Some(Consumed { used, target: None })
    }
    fn payload_done(&mut self, _: LinkKey, _: PayloadStatus) {
        self.adversary.interfere();
        self.done += 1;
        assert!(self.done <= self.announced, "a payload was reported that no frame has announced");
    }
    fn heard(&mut self, _: LinkKey) {
        self.adversary.interfere();
    }
    fn sent(&mut self, _: LinkKey, _: Vec<u8>, _: bool) {}
    fn returned(&mut self, _: LinkKey) {}
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: std::io::Result<()>) {}
    fn closed(&mut self, _: LinkKey, _: std::io::Error) {}
}

/// The victim's side of a link, and the segment and socket of the adversary.
fn link_to_adversary(nonce: &u64) -> (Arc<Connection>, Arc<SharedSegment>, OwnedFd) {
    let (_, mine) = SharedSegment::create().expect("a segment");
    let (fd, theirs) = SharedSegment::create().expect("a segment");
    let (socket, other) = pair();
    let peer = ShmPeer {
        own_user: true,
        socket: Arc::new(socket),
        pid: std::process::id() as i32,
        handle: None,
        nonce: (*nonce, (&raw const *nonce).addr() as u64),
        doorbell: None,
        cut: AtomicBool::new(false),
    };
    let connection = Arc::new(Connection::new(mine, SharedSegment::attach(fd.as_fd()).expect("a segment"), peer, true));
    connection.lends.store(true, Ordering::Relaxed);
    (connection, theirs, other)
}

/// Runs a script of events against one side of a link with a hostile peer.
pub fn ring(bytes: &[u8]) {
    let nonce = 0x1234_5678_9abc_def0;
    let (connection, segment, _socket) = link_to_adversary(&nonce);
    let mut inbox = ShmInbox::new(&connection);
    let mut outbox = ShmOutbox::new(&connection, KernelCopyPolicy::Always);
    let mut sending: Option<(ShmSend, Arc<Region>)> = None;
    let mut scratch = vec![0; MAX_BODY];
    let events = read_all::<Event>(bytes, EVENTS).into();
    let mut adversary = Adversary { segment, at: 0, blocks: VecDeque::new(), events, during: 0 };
    let (mut regions, mut announced, mut done) = (Vec::new(), 0, 0);
    while let Some(event) = adversary.events.pop_front() {
        match &event {
            Event::Turn => {
                let mut blocks = std::mem::take(&mut adversary.blocks);
                let mut sink = RingSink { adversary: &mut adversary, regions: &mut regions, announced, done };
                let fetch = &mut |inbox: &mut ShmInbox| {
                    while let Some((id, len, fd)) = blocks.pop_front() {
                        let _ = inbox.add_block(id, len, &fd);
                    }
                };
                let turn = inbox.turn(LinkKey(1), &connection, &mut scratch, &mut sink, fetch);
                (announced, done) = (sink.announced, sink.done);
                let reading = connection.mine.words().reading.iter().any(|word| word.load(Ordering::Relaxed) != 0);
                assert!(!reading, "a read that is over is still announced");
                regions.iter().for_each(RingTarget::check);
                match turn {
                    Ok(Turn::Nothing) => {
                        assert!(!inbox.has_work() || !adversary.events.is_empty() || connection.peer.is_gone());
                    }
                    Ok(Turn::Something) => {}
                    Ok(Turn::Closed) | Err(_) => break,
                }
                adversary.blocks.append(&mut blocks);
            }
            Event::During { events } => adversary.during = usize::from(*events % 8),
            Event::CloseTarget { which } => {
                if let Some(target) = regions.len().checked_sub(1).map(|last| &regions[usize::from(*which).min(last)]) {
                    target.memory.region().close();
                }
            }
            Event::Send { bytes, payload } if sending.is_none() => {
                let region = Region::from_vec(vec![0x11; number(payload) as usize % LONGEST]);
                let bytes = vec![0x22; number(bytes) as usize % 50_000];
                sending = Some((outbox.begin(bytes, Some(Slice::whole(&region))), region));
            }
            Event::Send { .. } | Event::Resume => {
                let _ = (outbox.can_continue(&connection), outbox.loans.sweep(&connection));
                if let Some((mut now, region)) = sending.take() {
                    match outbox.write(&connection, &mut now, || adversary.during == 0) {
                        Ok(Written::All | Written::Lent) => {}
                        Ok(Written::Part) => sending = Some((now, region)),
                        Err(_) => break,
                    }
                }
            }
            Event::Withdraw => {
                if let Some((_, region)) = &sending {
                    region.close();
                }
            }
            event => adversary.act(event),
        }
    }
    drop(outbox.end(&connection));
    regions.iter().for_each(RingTarget::check);
}

pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    const { assert!(LEN > RING as usize) };
    let frames = |bytes: &[u8]| Event::Frames { bytes: bytes.to_vec() };
    // Announces a payload of `len` bytes, into memory in one piece.
    let announce = |len: u16| frames(&[&[3, 3, 0][..], &len.to_le_bytes(), &[0]].concat());
    let middle = |n| Number::Middle { n };
    let piece = |offset, n| Piece { block: 0, address: Far::There { offset }, len: middle(n) };
    let lends = |slot, id, first, pieces| Event::Loan { slot, id, first, second: piece(100, 50), pieces, granted: true };
    let of_block = Piece { block: 1, address: Far::Any { n: middle(10) }, len: middle(500) };
    let plain = [
        frames(&[3; 20]),
        Event::Turn,
        announce(1000),
        Event::Payload { len: middle(600) },
        Event::Payload { len: middle(400) },
        frames(&[1, 3]),
        Event::Turn,
        frames(&[3]),
        Event::Turn,
    ];
    let lent = [
        announce(1050),
        lends(2, 7, piece(0, 1000), 2),
        Event::Turn,
        announce(60_000),
        lends(3, 8, piece(0, 50_000), 1),
        Event::CloseTarget { which: 1 },
        Event::Gone,
        Event::Turn,
    ];
    let blocks = [
        Event::Block { id: 1, len: 4096, claim: middle(4096), sealed: true },
        announce(500),
        lends(0, 9, of_block, 1),
        Event::Turn,
        Event::Forget { id: 1 },
        Event::Turn,
    ];
    let changing = [
        announce(200),
        Event::During { events: 3 },
        lends(1, 5, piece(0, 200), 1),
        Event::Turn,
        Event::Word { which: 3, slot: 1, value: Number::Small { n: 0 } },
        Event::Overwrite { at: middle(64), bytes: vec![9; 40] },
        Event::Header { at: Number::Small { n: 0 }, next: true, word: 1 << 32 | 8 },
        Event::Turn,
    ];
    let sends = [
        Event::Send { bytes: middle(40_000), payload: Number::Any { n: 200_000 } },
        Event::Resume,
        Event::Word { which: 0, slot: 0, value: middle(32_768) },
        Event::Resume,
        Event::Word { which: 4, slot: 0, value: Number::Small { n: 1 } },
        Event::Resume,
        Event::Withdraw,
        Event::Resume,
    ];
    vec![
        ("plain", written(&plain)),
        ("lent", written(&lent)),
        ("blocks", written(&blocks)),
        ("changing", written(&changing)),
        ("sends", written(&sends)),
    ]
}
