//! The two sides of a link: the rings that carry records from one to the other, and the sleep and doorbell logic.
//!
//! Records go through a ring without a lock, with one copy in and one copy out. A record is a header of 8 bytes (kind and body
//! length) and the body, and begins on a cache line. Its header is written last, after the next header is set to 0. So the
//! receiver polls one word, which lies on the record's first cache line, and does not see what an earlier lap has left. The
//! receiver reports how much it has read once per quarter of the ring.
//!
//! A line takes longer to get from one processor to the other than a short record to be written. While the sender waits for one, the
//! receiver, which polls, takes back the one that the sender has just begun to write. So after a short record behind which nothing
//! follows, the sender sets headers to 0 ahead, while the receiver is busy: the next short record then writes to no other line
//! between its body and its header.

use std::sync::Arc;

use super::process::ShmPeer;
use super::ring_path::RingPath;
use super::segment::{RING, SharedSegment, see};
use crate::memory::CopyPath;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// Frames, or a part of one.
    Bytes = 1,
    /// A loan: where a part of a payload lies in the sender's memory.
    Loan = 2,
    /// A part of a payload itself.
    Payload = 3,
    /// The rest of a payload is not sent: its memory is gone.
    Gone = 4,
    /// Blocks of shared memory that no longer exist.
    Forget = 5,
    /// As `Payload`, written past the sender's caches.
    PayloadPastCaches = 6,
}

/// Records begin at multiples of this.
const ALIGN: u64 = 64;
const HEADER: u64 = 8;
/// Longest body of a record. Shorter than a quarter of the ring, so that the sender does not wait for progress that the
/// receiver has made but not reported.
pub(super) const MAX_BODY: usize = (RING / 4 - ALIGN) as usize;
/// The receiver reports its progress each time it has read this much.
const REPORT_EVERY: u64 = RING / 4;
/// How far ahead of the next record lines are cleared. Twice as far made no difference.
const CLEARED_AHEAD: usize = 9 * ALIGN as usize;

/// The peer's segment, or a packet of the peer, violates the protocol.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProtocolViolation;

impl From<ProtocolViolation> for std::io::Error {
    fn from(_: ProtocolViolation) -> Self {
        let reason = "it violated the protocol of the shared-memory transport";
        std::io::Error::new(std::io::ErrorKind::InvalidData, reason)
    }
}

fn space(len: usize) -> u64 {
    (HEADER + len as u64).next_multiple_of(ALIGN)
}

/// The sending end.
pub(super) struct Producer {
    mine: Arc<SharedSegment>,
    theirs: Arc<SharedSegment>,
    /// Where the next record goes; not reduced to the ring's length.
    at: u64,
    /// Up to here, the line of the next header and those behind it begin with a 0.
    cleared: u64,
    /// How much the receiver had read at the last check.
    taken: u64,
    path: RingPath,
}

impl Producer {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>) -> Producer {
        Producer { mine, theirs, at: 0, cleared: 0, taken: 0, path: RingPath::default() }
    }

    /// Whether a record with a body of this length fits now.
    pub(super) fn has_room(&mut self, len: usize) -> Result<bool, ProtocolViolation> {
        debug_assert!(len <= MAX_BODY);
        // The header behind the record is written too.
        let end = self.at + space(len) + ALIGN;
        if end - self.taken <= RING {
            return Ok(true);
        }
        let taken = see(&self.theirs.words().taken.0);
        if taken < self.taken || taken > self.at {
            return Err(ProtocolViolation);
        }
        self.taken = taken;
        Ok(end - self.taken <= RING)
    }

    /// Writes a record for which there is room; `fill` writes the body at the position, and by the path, that it is given.
    #[inline]
    pub(super) fn put(&mut self, kind: RecordKind, len: usize, fill: impl FnOnce(&SharedSegment, u64, CopyPath)) {
        let writing = self.path.begin(len);
        self.put_by(writing.path, kind, len, fill);
        self.path.end(&writing, len);
    }

    /// As `put`, by this path.
    #[inline]
    pub(super) fn put_by(
        &mut self,
        path: CopyPath,
        kind: RecordKind,
        len: usize,
        fill: impl FnOnce(&SharedSegment, u64, CopyPath),
    ) {
        fill(&self.mine, self.at + HEADER, path);
        let next = self.at + space(len);
        if next >= self.cleared {
            self.cleared = next;
            self.clear_to(next + ALIGN);
        }
        let header = (kind as u64) << 32 | len as u64;
        self.mine.header(self.at).store(header, Ordering::Release);
        self.at = next;
    }

    /// Prepares for the next record, when nothing follows one with a body of this length. It is mostly as short: a longer one, which
    /// may be written past the caches, would rather not find lines of its body in them.
    pub(super) fn clear_ahead(&mut self, len: usize) {
        if len < CLEARED_AHEAD {
            // Beyond what it had read at the last check, the receiver may still read.
            self.clear_to((self.at + CLEARED_AHEAD as u64).min(self.taken + RING));
        }
    }

    fn clear_to(&mut self, end: u64) {
        while self.cleared < end {
            self.mine.header(self.cleared).store(0, Ordering::Relaxed);
            self.cleared += ALIGN;
        }
    }
}

/// A record that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub kind: RecordKind,
    pub len: usize,
}

/// The receiving end.
pub(super) struct Consumer {
    mine: Arc<SharedSegment>,
    theirs: Arc<SharedSegment>,
    at: u64,
    reported: u64,
}

impl Consumer {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>) -> Consumer {
        Consumer { mine, theirs, at: 0, reported: 0 }
    }

    /// The record that is next, if it has arrived.
    pub(super) fn next(&self) -> Result<Option<Record>, ProtocolViolation> {
        let header = self.theirs.header(self.at).load(Ordering::Relaxed);
        if header == 0 {
            return Ok(None);
        }
        // As in `see`; an empty ring needs no ordering.
        fence(Ordering::Acquire);
        let kind = match header >> 32 {
            1 => RecordKind::Bytes,
            2 => RecordKind::Loan,
            3 => RecordKind::Payload,
            4 => RecordKind::Gone,
            5 => RecordKind::Forget,
            6 => RecordKind::PayloadPastCaches,
            _ => return Err(ProtocolViolation),
        };
        let len = header as u32 as usize;
        if len > MAX_BODY {
            return Err(ProtocolViolation);
        }
        Ok(Some(Record { kind, len }))
    }

    /// The other side's segment, and where the body of the next record begins in it.
    pub(super) fn body(&self) -> (&SharedSegment, u64) {
        (&self.theirs, self.at + HEADER)
    }

    /// How many bytes have been read since the link opened.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Advances behind a record. True when the progress was reported to the other side.
    pub(super) fn pass(&mut self, record: Record) -> bool {
        self.at += space(record.len);
        let report = self.at - self.reported >= REPORT_EVERY;
        if report {
            self.reported = self.at;
            self.mine.words().taken.0.store(self.at, Ordering::Release);
        }
        report
    }
}

/// Both sides: their segments, and the peer's process.
pub(super) struct Connection {
    pub mine: Arc<SharedSegment>,
    pub theirs: Arc<SharedSegment>,
    pub peer: ShmPeer,
    /// This side can read the peer's memory.
    pub reads: bool,
    /// The peer can read this side's memory.
    pub lends: AtomicBool,
    /// The peer's `asleep` number at which this side last rang.
    rung: AtomicU64,
}

impl Connection {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>, peer: ShmPeer, reads: bool) -> Connection {
        Connection { mine, theirs, peer, reads, lends: AtomicBool::new(false), rung: AtomicU64::new(0) }
    }

    /// Wakes a sleeping peer for which there is something, once for each of its sleeps.
    pub(super) fn wake_peer(&self) {
        if let Some(asleep) = self.peer_sleeps()
            && self.rung.swap(asleep, Ordering::Relaxed) != asleep
        {
            self.peer.ring();
        }
    }

    /// The number of the peer's sleep, if it may not see what was written, and this side has not rung in that sleep.
    pub(super) fn peer_sleeps(&self) -> Option<u64> {
        // Either the peer sees what was written, or this side sees that the peer sleeps.
        fence(Ordering::SeqCst);
        let asleep = self.theirs.words().asleep.0.load(Ordering::Relaxed);
        (asleep % 2 == 1 && self.rung.load(Ordering::Relaxed) != asleep).then_some(asleep)
    }

    /// As `wake_peer`, but only if the peer waits for room or for the end of a loan.
    pub(super) fn wake_waiting_peer(&self) {
        fence(Ordering::SeqCst);
        if self.theirs.words().waiting.0.load(Ordering::Relaxed) != 0 {
            self.wake_peer();
        }
    }

    /// Marks this side as asleep: the peer rings from now on. The caller must then check for what came before.
    pub(super) fn fall_asleep(&self) {
        let asleep = &self.mine.words().asleep.0;
        let before = asleep.load(Ordering::Relaxed);
        if before.is_multiple_of(2) {
            asleep.store(before + 1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    pub(super) fn is_asleep(&self) -> bool {
        !self.mine.words().asleep.0.load(Ordering::Relaxed).is_multiple_of(2)
    }

    pub(super) fn awake(&self) {
        let asleep = &self.mine.words().asleep.0;
        let before = asleep.load(Ordering::Relaxed);
        if !before.is_multiple_of(2) {
            asleep.store(before + 1, Ordering::Relaxed);
        }
    }

    /// Sets whether this side waits for room, or for the end of a loan.
    pub(super) fn set_waiting(&self, waiting: bool) {
        let word = &self.mine.words().waiting.0;
        if word.load(Ordering::Relaxed) != u64::from(waiting) {
            word.store(u64::from(waiting), Ordering::Relaxed);
        }
        if waiting {
            // This side checks after this, and sees what the peer did before; for what it does later, the peer rings.
            fence(Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (Producer, Consumer) {
        let (fd_a, a) = SharedSegment::create().unwrap();
        let (fd_b, b) = SharedSegment::create().unwrap();
        let (far_a, far_b) = (SharedSegment::attach(borrow(&fd_a)).unwrap(), SharedSegment::attach(borrow(&fd_b)).unwrap());
        (Producer::new(a, far_b), Consumer::new(b, far_a))
    }

    fn borrow(fd: &std::os::fd::OwnedFd) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(fd)
    }

    fn put(producer: &mut Producer, bytes: &[u8]) {
        producer.put(RecordKind::Bytes, bytes.len(), |segment, at, path| segment.write(at, bytes, path));
        producer.clear_ahead(bytes.len());
    }

    fn take(consumer: &mut Consumer) -> Option<Vec<u8>> {
        let record = consumer.next().unwrap()?;
        let mut out = vec![0; record.len];
        let (segment, at) = consumer.body();
        segment.read(at, &mut out);
        consumer.pass(record);
        Some(out)
    }

    #[test]
    fn records_written_over_many_laps_are_read_in_order() {
        let (mut producer, mut consumer) = ends();
        let lens = [0, 1, 55, 56, 57, 64, 1000, 4096, MAX_BODY - 1, MAX_BODY];
        let mut waiting = std::collections::VecDeque::new();
        for round in 0..500usize {
            let len = lens[round * 7 % lens.len()];
            let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + round) as u8).collect();
            while !producer.has_room(len).unwrap() {
                assert_eq!(take(&mut consumer), waiting.pop_front());
            }
            put(&mut producer, &bytes);
            waiting.push_back(bytes);
        }
        while let Some(bytes) = waiting.pop_front() {
            assert_eq!(take(&mut consumer), Some(bytes));
        }
        assert_eq!(take(&mut consumer), None);
    }

    /// A body that looks like a header must not be read as one on the next lap.
    #[test]
    fn header_like_body_of_an_earlier_lap_is_not_read_as_a_record() {
        let (mut producer, mut consumer) = ends();
        let header = ((RecordKind::Bytes as u64) << 32 | 8).to_le_bytes();
        let bytes: Vec<u8> = header.repeat(MAX_BODY / header.len());
        for _ in 0..40 {
            assert!(producer.has_room(bytes.len()).unwrap());
            put(&mut producer, &bytes);
            assert_eq!(take(&mut consumer).unwrap(), bytes);
            assert_eq!(take(&mut consumer), None);
            put(&mut producer, b"");
            assert_eq!(take(&mut consumer).unwrap(), b"");
            assert_eq!(take(&mut consumer), None);
        }
    }

    /// Lines are cleared ahead, and not those that the receiver has still to read.
    #[test]
    fn full_ring_of_short_records_is_read_to_its_end() {
        for len in [0, 56, 120, 440] {
            let (mut producer, mut consumer) = ends();
            let mut records = 0;
            while producer.has_room(len).unwrap() {
                put(&mut producer, &vec![records as u8; len]);
                records += 1;
            }
            assert!(records > 100);
            (0..records).for_each(|record| assert_eq!(take(&mut consumer), Some(vec![record as u8; len]), "{len}"));
            assert_eq!(take(&mut consumer), None, "{len}");
        }
    }

    /// Also where the record ends at the last line that was cleared ahead, or behind it.
    #[test]
    fn nothing_of_an_earlier_lap_is_behind_a_record() {
        let header = ((RecordKind::Bytes as u64) << 32 | 8).to_le_bytes();
        let (mut producer, mut consumer) = ends();
        for lines in (1..=12).cycle().take(10_000) {
            for len in [56, lines * ALIGN as usize - 8] {
                let bytes = header.repeat(len / 8);
                assert!(producer.has_room(len).unwrap());
                put(&mut producer, &bytes);
                assert_eq!(take(&mut consumer), Some(bytes));
                assert_eq!(take(&mut consumer), None, "{lines}");
            }
        }
    }

    #[test]
    fn sender_has_room_when_the_receiver_has_read_all() {
        let (mut producer, mut consumer) = ends();
        for len in (0..MAX_BODY).step_by(97) {
            assert!(producer.has_room(len).unwrap(), "{len}");
            put(&mut producer, &vec![1; len]);
            assert!(take(&mut consumer).is_some());
        }
    }

    #[test]
    fn invalid_header_or_progress_is_a_protocol_violation() {
        let (fd, theirs) = SharedSegment::create().unwrap();
        let (_, mine) = SharedSegment::create().unwrap();
        let far = SharedSegment::attach(borrow(&fd)).unwrap();
        let consumer = Consumer::new(mine.clone(), far.clone());
        for header in [9 << 32, u64::MAX, (RecordKind::Bytes as u64) << 32 | (MAX_BODY as u64 + 1), 7] {
            theirs.header(0).store(header, Ordering::Release);
            assert_eq!(consumer.next(), Err(ProtocolViolation), "{header:x}");
        }
        let mut producer = Producer::new(mine, far);
        while producer.has_room(MAX_BODY).unwrap() {
            put(&mut producer, &[0; MAX_BODY]);
        }
        for taken in [producer.at + 1, u64::MAX] {
            theirs.words().taken.0.store(taken, Ordering::Release);
            assert_eq!(producer.has_room(MAX_BODY), Err(ProtocolViolation), "{taken:x}");
        }
    }
}
