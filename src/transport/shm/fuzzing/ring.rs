//! A segment in which anything stands, and changes at any moment; records, loans and blocks that are lies.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::super::{Consumed, Link, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use super::super::connection::Connection;
use super::super::inbox::{ShmInbox, Turn, loan};
use super::super::outbox::{KernelCopyPolicy, ShmOutbox, ShmSend, Traffic, Written};
use super::super::process::ShmPeer;
use super::super::ring::MAX_BODY;
use super::super::segment::{LEN, RING, SLOTS, SharedSegment, Words};
use super::pair;
use crate::Address;
use crate::fuzzing::script::{read_all, script, written};
use crate::memory::{Region, RegionBuffer, Segments, Slice, shared};

script! {
    enum Number {
        Small { n: u8 },
        Middle { n: u16 },
        /// About the longest record.
        Longest { more: u8 },
        Top { below: u8 },
        Any { n: u64 },
    }
}

script! {
    enum Far {
        /// In the process, where there is something.
        There { offset: u16 },
        Any { n: Number },
    }
}

script! {
    struct Piece { block: u8, address: Far, len: Number }
}

script! {
    enum Event {
        /// Frames for the sink, see `Listener`, in a record as it should be.
        Frames { bytes: Vec<u8> },
        /// A part of a payload.
        Payload { len: Number },
        /// Memory is lent, and stays so or not.
        Loan { slot: u8, id: u8, first: Piece, second: Piece, pieces: u8, granted: bool },
        Gone,
        Forget { id: u8 },
        /// A record of any sort, of which so many bytes are these.
        Record { kind: u8, len: Number, bytes: Vec<u8> },
        /// A header where the next one belongs, or anywhere.
        Header { at: Number, next: bool, word: u64 },
        Scribble { at: Number, bytes: Vec<u8> },
        Word { which: u8, slot: u8, value: Number },
        /// Memory with a descriptor: of so many bytes, said to be of that many.
        Block { id: u8, len: u16, claim: Number, sealed: bool },
        /// The other side looks at what is there.
        Turn,
        /// So many of the next events happen while it does.
        During { events: u8 },
        /// The receiver takes back what it has made room in.
        TakeBack { which: u8 },
        /// The other side sends, as much as there is room for.
        Send { bytes: Number, payload: Number },
        /// It goes on with that, or gives up what it has sent from.
        Resume,
        Withdraw,
    }
}

const EVENTS: usize = 200;
/// Longest payload that is asked for.
const LONGEST: usize = 300_000;
/// Bytes on either side of a payload's target.
const AROUND: usize = 32;
const SECRET: u8 = 0xd5;
/// What can be read in this process.
static THERE: [u8; 1 << 16] = [0x66; 1 << 16];

/// The one who writes what the other side reads.
struct Liar {
    /// Writable; the other side has its own, read-only mapping of it.
    segment: Arc<SharedSegment>,
    /// Where its next record goes.
    at: u64,
    blocks: VecDeque<(u64, u64, OwnedFd)>,
    events: VecDeque<Event>,
    during: usize,
}

impl Liar {
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
        self.record(kind, bytes.len(), |segment, at| segment.write(at, bytes));
    }

    /// What it does by itself.
    fn act(&mut self, event: &Event) {
        match event {
            Event::Frames { bytes } => self.bytes(1, bytes),
            Event::Payload { len } => {
                let len = number(len) as usize % (MAX_BODY + 2);
                self.record(3, len, |segment, at| segment.write(at, &vec![0x77; len]));
            }
            Event::Loan { slot, id, first, second, pieces, granted } => {
                let slot = usize::from(*slot) % (SLOTS + 1);
                let list: Vec<(u64, u64, u64)> = (0..u64::from(*pieces % 70))
                    .map(|n| if n % 2 == 0 { first } else { second })
                    .map(|piece| (u64::from(piece.block % 4), far(&piece.address), number(&piece.len)))
                    .collect();
                let mut words = Vec::new();
                loan(slot, u64::from(*id), list.into_iter(), &mut words);
                if *granted && slot < SLOTS {
                    self.segment.words().granted[slot].store(u64::from(*id), Ordering::Release);
                }
                self.bytes(2, &words);
            }
            Event::Gone => self.bytes(4, &[]),
            Event::Forget { id } => self.bytes(5, &u64::from(*id).to_le_bytes()),
            Event::Record { kind, len, bytes } => {
                let len = number(len) as usize % (RING as usize);
                self.record((*kind).into(), len, |segment, at| segment.write(at, bytes));
            }
            Event::Header { at, next, word } => {
                let at = if *next { self.at } else { number(at) & !7 };
                self.segment.header(at).store(*word, Ordering::Release);
            }
            Event::Scribble { at, bytes } => {
                // Any place of the ring, and as many as come.
                self.segment.write(number(at), bytes);
            }
            Event::Word { which, slot, value } => {
                let (words, slot) = (self.segment.words(), usize::from(*slot) % SLOTS);
                let Words { taken, asleep, waiting, granted, finished, processor, .. } = words;
                // Not which loan it reads: who takes memory back waits a second for that.
                let word = [&taken.0, &asleep.0, &waiting.0, &granted[slot], &finished[slot], &processor.0];
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

    /// What happens while the other side is in the middle of something.
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

/// Who is told what arrives: a protocol of its own, of which each byte means something.
struct RingSink<'a> {
    liar: &'a mut Liar,
    regions: &'a mut Vec<RingTarget>,
    asked: usize,
    placed: usize,
}

/// Room for a payload, in the middle of other memory.
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
            assert!(around.copied().all(|byte| byte == SECRET), "memory around a payload's place was written");
        }
    }
}

impl Sink for RingSink<'_> {
    fn accepted(&mut self, _: Address) -> LinkKey {
        unreachable!("nobody is accepted")
    }
    fn attach(&mut self, _: LinkKey, _: Arc<dyn Link>) {}
    fn connected(&mut self, _: LinkKey) {}
    fn chunk(&mut self, _: LinkKey, _: usize) {}
    /// 0: a payload, whose length and target two and one more bytes say. 1: more is needed. 2: the end. Else one is taken.
    fn bytes(&mut self, _: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.liar.interfere();
        let mut used = 0;
        while let Some(what) = bytes.get(used) {
            match what % 16 {
                0 => {
                    let Some([low, high, how]) = bytes.get(used + 1..used + 4) else { break };
                    let len = (usize::from(u16::from_le_bytes([*low, *high])) * (1 + usize::from(how % 5))).min(LONGEST);
                    let piece = [usize::MAX, 1 << 12, 1000, 33][usize::from(how >> 4) % 4].max(len / 200);
                    let target = (how & 8 == 0).then(|| RingTarget::new(len, piece));
                    let place = ReceiveTarget { memory: target.as_ref().and_then(RingTarget::slice), len };
                    self.regions.extend(target);
                    self.asked += 1;
                    return Some(Consumed { used: used + 4, target: Some(place) });
                }
                1 if bytes.len() < 100_000 => break,
                1 | 2 => return None,
                _ => used += 1,
            }
        }
        Some(Consumed { used, target: None })
    }
    fn payload_done(&mut self, _: LinkKey, _: PayloadStatus) {
        self.liar.interfere();
        self.placed += 1;
        assert!(self.placed <= self.asked, "a payload has landed that nobody asked for");
    }
    fn heard(&mut self, _: LinkKey) {
        self.liar.interfere();
    }
    fn sent(&mut self, _: LinkKey, _: Vec<u8>, _: bool) {}
    fn returned(&mut self, _: LinkKey) {}
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: std::io::Result<()>) {}
    fn closed(&mut self, _: LinkKey, _: std::io::Error) {}
}

/// A side of a link to a liar, and the liar.
fn line(nonce: &u64) -> (Arc<Connection>, Arc<SharedSegment>, OwnedFd) {
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
    let line = Arc::new(Connection::new(mine, SharedSegment::attach(fd.as_fd()).expect("a segment"), peer, true));
    line.lends.store(true, Ordering::Relaxed);
    (line, theirs, other)
}

/// A side of a link, and a hostile one at its other end: what that shows is a script.
pub fn ring(bytes: &[u8]) {
    let nonce = 0x1234_5678_9abc_def0;
    let (line, segment, _other) = line(&nonce);
    let mut inbox = ShmInbox::new(&line);
    let mut outbox = ShmOutbox::new(&line, Arc::new(Traffic::new(KernelCopyPolicy::Always)));
    let mut sending: Option<(ShmSend, Arc<Region>)> = None;
    let mut scratch = vec![0; MAX_BODY];
    let events = read_all::<Event>(bytes, EVENTS).into();
    let mut liar = Liar { segment, at: 0, blocks: VecDeque::new(), events, during: 0 };
    let (mut regions, mut asked, mut placed) = (Vec::new(), 0, 0);
    while let Some(event) = liar.events.pop_front() {
        match &event {
            Event::Turn => {
                let mut blocks = std::mem::take(&mut liar.blocks);
                let mut sink = RingSink { liar: &mut liar, regions: &mut regions, asked, placed };
                let fetch = &mut |inbox: &mut ShmInbox| {
                    while let Some((id, len, fd)) = blocks.pop_front() {
                        let _ = inbox.add_block(id, len, &fd);
                    }
                };
                let turn = inbox.turn(LinkKey(1), &line, &mut scratch, &mut sink, fetch);
                (asked, placed) = (sink.asked, sink.placed);
                let held = line.mine.words().reading.iter().any(|word| word.load(Ordering::Relaxed) != 0);
                assert!(!held, "a read is announced that is over");
                regions.iter().for_each(RingTarget::check);
                match turn {
                    Ok(Turn::Nothing) => assert!(!inbox.has_work() || !liar.events.is_empty() || line.peer.is_gone()),
                    Ok(Turn::Something) => {}
                    Ok(Turn::Closed) | Err(_) => break,
                }
                liar.blocks.append(&mut blocks);
            }
            Event::During { events } => liar.during = usize::from(*events % 8),
            Event::TakeBack { which } => {
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
                let _ = (outbox.could_go_on(&line), outbox.loans.sweep(&line));
                if let Some((mut now, region)) = sending.take() {
                    match outbox.write(&line, &mut now) {
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
            event => liar.act(event),
        }
    }
    drop(outbox.end(&line));
    regions.iter().for_each(RingTarget::check);
}

pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    const { assert!(LEN > RING as usize) };
    let frames = |bytes: &[u8]| Event::Frames { bytes: bytes.to_vec() };
    // A payload of so many bytes, into memory in one piece.
    let place = |len: u16| frames(&[&[3, 3, 0][..], &len.to_le_bytes(), &[0]].concat());
    let middle = |n| Number::Middle { n };
    let piece = |offset, n| Piece { block: 0, address: Far::There { offset }, len: middle(n) };
    let lends = |slot, id, first, pieces| Event::Loan { slot, id, first, second: piece(100, 50), pieces, granted: true };
    let of_block = Piece { block: 1, address: Far::Any { n: middle(10) }, len: middle(500) };
    let plain = [
        frames(&[3; 20]),
        Event::Turn,
        place(1000),
        Event::Payload { len: middle(600) },
        Event::Payload { len: middle(400) },
        frames(&[1, 3]),
        Event::Turn,
        frames(&[3]),
        Event::Turn,
    ];
    let lent = [
        place(1050),
        lends(2, 7, piece(0, 1000), 2),
        Event::Turn,
        place(60_000),
        lends(3, 8, piece(0, 50_000), 1),
        Event::TakeBack { which: 1 },
        Event::Gone,
        Event::Turn,
    ];
    let blocks = [
        Event::Block { id: 1, len: 4096, claim: middle(4096), sealed: true },
        place(500),
        lends(0, 9, of_block, 1),
        Event::Turn,
        Event::Forget { id: 1 },
        Event::Turn,
    ];
    let changing = [
        place(200),
        Event::During { events: 3 },
        lends(1, 5, piece(0, 200), 1),
        Event::Turn,
        Event::Word { which: 3, slot: 1, value: Number::Small { n: 0 } },
        Event::Scribble { at: middle(64), bytes: vec![9; 40] },
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
