//! Records in a ring, from one side to the other, with no lock and no copy but the one in and the one out.
//!
//! A record is a header of 8 bytes (what it is, and how long its body) and the body, and begins on a cache line. Its header
//! is written last, and the one behind it is set to 0 before that: so the receiver looks at one word, which lies with the
//! record itself, and never sees what an earlier lap has left. The receiver says how much it has taken only now and then.

use super::segment::{RING, SharedSegment, see};
use crate::sync::atomic::{Ordering, fence};
use std::sync::Arc;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// Frames, or a part of one.
    Bytes = 1,
    /// Where a part of a payload lies in the sender's memory.
    Loan = 2,
    /// A part of a payload itself.
    Payload = 3,
    /// The rest of a payload will not come: its memory is gone.
    Gone = 4,
    /// Blocks of shared memory that are no more.
    Forget = 5,
}

/// Records begin at multiples of this.
const ALIGN: u64 = 64;
const HEADER: u64 = 8;
/// Longest body of a record. Shorter than a quarter of the ring, so that the sender never waits for what the receiver has
/// taken and not yet told.
pub(super) const MAX_BODY: usize = (RING / 4 - ALIGN) as usize;
/// The receiver tells what it has taken when it is this much.
const TELL: u64 = RING / 4;

/// The peer's segment holds what can't be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProtocolViolation;

impl From<ProtocolViolation> for std::io::Error {
    fn from(_: ProtocolViolation) -> Self {
        let broken = "it broke the protocol of the shared-memory transport";
        std::io::Error::new(std::io::ErrorKind::InvalidData, broken)
    }
}

fn space(len: usize) -> u64 {
    (HEADER + len as u64).next_multiple_of(ALIGN)
}

/// The sending end.
pub(super) struct Producer {
    mine: Arc<SharedSegment>,
    theirs: Arc<SharedSegment>,
    /// Where the next record goes; goes on beyond the ring's end.
    at: u64,
    /// How much the other side has taken, when last looked.
    taken: u64,
}

impl Producer {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>) -> Producer {
        Producer { mine, theirs, at: 0, taken: 0 }
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

    /// Writes a record for which there is room; `fill` writes the body, from the place that it is given.
    pub(super) fn put(&mut self, kind: RecordKind, len: usize, fill: impl FnOnce(&SharedSegment, u64)) {
        fill(&self.mine, self.at + HEADER);
        let next = self.at + space(len);
        self.mine.header(next).store(0, Ordering::Relaxed);
        let header = (kind as u64) << 32 | len as u64;
        self.mine.header(self.at).store(header, Ordering::Release);
        self.at = next;
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
    told: u64,
}

impl Consumer {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>) -> Consumer {
        Consumer { mine, theirs, at: 0, told: 0 }
    }

    /// The record that is next, if it has arrived.
    pub(super) fn next(&self) -> Result<Option<Record>, ProtocolViolation> {
        let header = self.theirs.header(self.at).load(Ordering::Relaxed);
        if header == 0 {
            return Ok(None);
        }
        // As `see` does; where there is nothing, nothing has to be in order.
        fence(Ordering::Acquire);
        let kind = match header >> 32 {
            1 => RecordKind::Bytes,
            2 => RecordKind::Loan,
            3 => RecordKind::Payload,
            4 => RecordKind::Gone,
            5 => RecordKind::Forget,
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

    /// How much of the ring has been taken, ever.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Goes on behind a record. True when the other side was told how much has been taken.
    pub(super) fn pass(&mut self, record: Record) -> bool {
        self.at += space(record.len);
        let tell = self.at - self.told >= TELL;
        if tell {
            self.told = self.at;
            self.mine.words().taken.0.store(self.at, Ordering::Release);
        }
        tell
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
        producer.put(RecordKind::Bytes, bytes.len(), |segment, at| segment.write(at, bytes));
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
    fn what_goes_in_comes_out_over_many_laps() {
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

    /// A record whose content looks like a header must not be taken for one on the next lap.
    #[test]
    fn bytes_of_an_earlier_lap_are_no_record() {
        let (mut producer, mut consumer) = ends();
        let header = ((RecordKind::Bytes as u64) << 32 | 8).to_le_bytes();
        let bytes: Vec<u8> = header.iter().copied().cycle().take(MAX_BODY).collect();
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

    #[test]
    fn the_sender_never_waits_for_a_receiver_that_has_taken_all() {
        let (mut producer, mut consumer) = ends();
        for len in (0..MAX_BODY).step_by(97) {
            assert!(producer.has_room(len).unwrap(), "{len}");
            put(&mut producer, &vec![1; len]);
            assert!(take(&mut consumer).is_some());
        }
    }

    #[test]
    fn nonsense_is_seen_as_such() {
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
