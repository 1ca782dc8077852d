//! What arrives: frames out of the ring, and payloads, which are copied from the peer's memory a step at a time, so that
//! frames behind them do not wait for them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::super::partial_frame::keep_partial_frame;
use super::super::{Consumed, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use super::blocks;
use super::connection::Connection;
use super::ring::{Consumer, MAX_BODY, ProtocolViolation, Record, RecordKind};
use super::segment::{CLOSED, SLOTS, see};
use super::sys::{self, MAX_PIECES, RemoteIoVec};
use crate::memory::{Slice, WriteAccess, shared::Mapping};
use crate::sync::atomic::{Ordering, fence};

/// Bytes copied in one step: what a frame may have to wait for, and whoever takes memory back (some 10 µs).
const STEP: usize = 128 << 10;
/// Records taken in one turn, and bytes of frames in them, so that other links have theirs.
const RECORDS: usize = 64;
const FRAMES: usize = 32 << 10;
/// Blocks of a peer that are mapped at a time.
const MAX_BLOCKS: usize = 256;
/// Bytes of a peer's blocks that are mapped at a time: a block may be longer than all memory, and cost nothing but addresses.
pub(super) const MAX_MAPPED: usize = 1 << 40;

pub(super) struct ShmInbox {
    consumer: Consumer,
    /// The beginning of a frame.
    partial: Vec<u8>,
    /// In the order in which they were announced; only the last may have parts that are still to come.
    payloads: VecDeque<ShmPayload>,
    /// The peer's shared blocks, by its numbers.
    blocks: HashMap<u64, Mapping>,
}

struct ShmPayload {
    place: ReceiveTarget<Slice>,
    /// How much of it the peer has told the whereabouts of, or sent.
    announced: usize,
    done: usize,
    parts: VecDeque<ExportedPart>,
    landed: PayloadStatus,
}

/// A part of a payload that is lent.
struct ExportedPart {
    slot: usize,
    id: u64,
    pieces: VecDeque<ExportedPiece>,
}

#[derive(Clone, Copy)]
struct ExportedPiece {
    /// The block that the address is an offset in; 0 for the memory of the process.
    block: u64,
    far: RemoteIoVec,
}

/// What came of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nothing,
    Something,
    /// The link was closed because of what arrived.
    Closed,
}

impl ShmInbox {
    pub(super) fn new(line: &Connection) -> ShmInbox {
        ShmInbox {
            consumer: Consumer::new(line.mine.clone(), line.theirs.clone()),
            partial: Vec::new(),
            payloads: VecDeque::new(),
            blocks: HashMap::new(),
        }
    }

    /// How much of the peer's ring has been taken, ever.
    pub(super) fn taken(&self) -> u64 {
        self.consumer.at()
    }

    /// True when there is something to do.
    pub(super) fn has_work(&self) -> bool {
        !matches!(self.consumer.next(), Ok(None)) || self.has_parts()
    }

    /// Something is lent and not copied yet. A payload of which nothing has come is no work: its sender may be gone.
    fn has_parts(&self) -> bool {
        self.payloads.iter().any(|payload| !payload.parts.is_empty())
    }

    /// Maps a block that the peer has sent the descriptor of.
    pub(super) fn add_block(&mut self, id: u64, len: u64, fd: &OwnedFd) -> io::Result<()> {
        if self.blocks.len() >= MAX_BLOCKS {
            return Err(io::Error::other("more blocks of shared memory than are taken"));
        }
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?;
        let mapped: usize = self.blocks.values().map(Mapping::len).sum();
        if len > MAX_MAPPED - mapped {
            return Err(io::Error::other("more memory is shared than can be mapped"));
        }
        self.blocks.insert(id, crate::memory::shared::attach(fd.as_fd(), len)?);
        Ok(())
    }

    /// Takes a number of records, and copies a step of what is lent. `fetch` brings blocks that are not known yet.
    pub(super) fn turn(
        &mut self,
        key: LinkKey,
        line: &Connection,
        scratch: &mut [u8],
        sink: &mut dyn Sink,
        fetch: &mut dyn FnMut(&mut ShmInbox),
    ) -> io::Result<Turn> {
        let mut turn = Turn::Nothing;
        let mut frames = 0;
        for _ in 0..RECORDS {
            let Some(record) = self.consumer.next()? else { break };
            turn = Turn::Something;
            let (segment, at) = self.consumer.body();
            if record.kind != RecordKind::Payload {
                segment.read(at, &mut scratch[..record.len]);
            }
            let open = self.take(key, line, record, &scratch[..record.len], sink, fetch)?;
            if self.consumer.pass(record) {
                line.wake_waiting_peer();
            }
            if !open {
                return Ok(Turn::Closed);
            }
            frames += if record.kind == RecordKind::Payload { 0 } else { record.len };
            if frames >= FRAMES {
                break;
            }
        }
        if self.has_parts() {
            turn = Turn::Something;
            self.step(line, STEP)?;
            self.report(key, sink);
        }
        Ok(turn)
    }

    /// False when the link was closed because of the record.
    fn take(
        &mut self,
        key: LinkKey,
        line: &Connection,
        record: Record,
        body: &[u8],
        sink: &mut dyn Sink,
        fetch: &mut dyn FnMut(&mut ShmInbox),
    ) -> io::Result<bool> {
        let open = self.payloads.back().is_some_and(|last| last.announced < last.place.len);
        match record.kind {
            RecordKind::Bytes if open => return Err(ProtocolViolation.into()),
            RecordKind::Bytes => return self.frames(key, body, sink),
            RecordKind::Forget => {
                body.as_chunks::<8>().0.iter().for_each(|id| drop(self.blocks.remove(&u64::from_le_bytes(*id))));
            }
            RecordKind::Loan | RecordKind::Payload | RecordKind::Gone if !open => return Err(ProtocolViolation.into()),
            RecordKind::Loan => {
                let part = ExportedPart::parse(body).ok_or(ProtocolViolation)?;
                // A slot is lent again when this side has said that it is done with it: so there are never many parts.
                if self.payloads.iter().flat_map(|payload| &payload.parts).any(|other| other.slot == part.slot) {
                    return Err(ProtocolViolation.into());
                }
                if part.pieces.iter().any(|piece| piece.block != 0 && !self.blocks.contains_key(&piece.block)) {
                    fetch(self);
                }
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                let len = part.len().filter(|len| *len <= last.place.len - last.announced).ok_or(ProtocolViolation)?;
                last.announced += len;
                last.parts.push_back(part);
            }
            RecordKind::Payload => {
                // What was lent before this goes first: payloads land in order.
                self.settle(line)?;
                self.report(key, sink);
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                if record.len == 0 || record.len > last.place.len - last.announced {
                    return Err(ProtocolViolation.into());
                }
                let (segment, at) = self.consumer.body();
                last.write(record.len, |access, skip| segment.read_memory(at, access, skip, record.len));
                last.announced += record.len;
                sink.heard(key);
            }
            RecordKind::Gone => {
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                last.announced = last.place.len;
                last.landed = PayloadStatus::SourceGone;
            }
        }
        self.report(key, sink);
        Ok(true)
    }

    /// Offers frames to the sink. False when the link was closed because of them.
    fn frames(&mut self, key: LinkKey, bytes: &[u8], sink: &mut dyn Sink) -> io::Result<bool> {
        let (taken, len) = if self.partial.is_empty() {
            (sink.bytes(key, bytes), bytes.len())
        } else {
            self.partial.extend_from_slice(bytes);
            (sink.bytes(key, &self.partial), self.partial.len())
        };
        let Some(Consumed { used, target: place }) = taken else { return Ok(false) };
        if place.is_some() && used < len {
            // A payload has records of its own.
            return Err(ProtocolViolation.into());
        }
        if self.partial.is_empty() {
            self.partial.extend_from_slice(&bytes[used..]);
        } else {
            keep_partial_frame(&mut self.partial, used);
        }
        if let Some(place) = place {
            self.payloads.push_back(ShmPayload {
                place,
                announced: 0,
                done: 0,
                parts: VecDeque::new(),
                landed: PayloadStatus::Whole,
            });
            self.report(key, sink);
        }
        Ok(true)
    }

    /// Reports the payloads that have landed, or will not.
    fn report(&mut self, key: LinkKey, sink: &mut dyn Sink) {
        while let Some(payload) = self.payloads.pop_front_if(|payload| payload.is_over()) {
            sink.payload_done(key, payload.landed);
        }
    }

    /// Copies all that has been lent so far.
    fn settle(&mut self, line: &Connection) -> io::Result<()> {
        while self.has_parts() {
            self.step(line, STEP)?;
        }
        Ok(())
    }

    /// Copies up to `budget` bytes of the first payload of which anything is lent.
    fn step(&mut self, line: &Connection, budget: usize) -> io::Result<()> {
        let Some(payload) = self.payloads.iter_mut().find(|payload| !payload.parts.is_empty()) else { return Ok(()) };
        let Some(part) = payload.parts.front_mut() else { return Ok(()) };
        let finished = match &payload.place.memory {
            Some(target) if payload.landed == PayloadStatus::Whole => {
                match part.copy(line, &self.blocks, target, payload.done, budget)? {
                    PartCopy::Bytes(n) => {
                        payload.done += n;
                        part.pieces.is_empty()
                    }
                    PartCopy::Not(landed) => {
                        payload.landed = landed;
                        true
                    }
                }
            }
            // Nobody wants it, or the rest of it.
            _ => true,
        };
        if finished {
            line.mine.words().finished[part.slot].store(part.id, Ordering::Release);
            payload.parts.pop_front();
            line.wake_waiting_peer();
        }
        Ok(())
    }
}

/// What came of copying some of a part.
enum PartCopy {
    Bytes(usize),
    Not(PayloadStatus),
}

impl ShmPayload {
    fn is_over(&self) -> bool {
        self.announced == self.place.len && self.parts.is_empty()
    }

    /// Writes what has come through the ring.
    fn write(&mut self, len: usize, copy: impl FnOnce(&WriteAccess<'_>, usize)) {
        if let Some(target) = self.place.memory.as_ref().filter(|_| self.landed == PayloadStatus::Whole) {
            match target.write_access() {
                Some(access) => copy(&access, self.done),
                None => self.landed = PayloadStatus::TargetGone,
            }
        }
        self.done += len;
    }
}

impl ExportedPart {
    /// Slot, number, and pieces of block, address and length.
    pub(super) fn parse(body: &[u8]) -> Option<ExportedPart> {
        let (words, []) = body.as_chunks::<8>() else { return None };
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let slot = usize::try_from(words.next()?).ok().filter(|slot| *slot < SLOTS)?;
        let id = words.next().filter(|id| *id != 0)?;
        let mut pieces = VecDeque::new();
        while let Some(block) = words.next() {
            let far = RemoteIoVec { address: words.next()?, len: words.next()? };
            if far.len == 0 || far.address.checked_add(far.len).is_none() || pieces.len() == MAX_PIECES {
                return None;
            }
            pieces.push_back(ExportedPiece { block, far });
        }
        Some(ExportedPart { slot, id, pieces }).filter(|part| !part.pieces.is_empty())
    }

    fn len(&self) -> Option<usize> {
        let total = self.pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.far.len));
        total.and_then(|total| usize::try_from(total).ok())
    }

    /// Takes pieces of the same kind off the front, up to `budget` bytes together.
    fn next(&mut self, budget: usize) -> (u64, smallvec::SmallVec<[RemoteIoVec; 8]>) {
        let mut next = smallvec::SmallVec::new();
        let Some(block) = self.pieces.front().map(|piece| piece.block) else { return (0, next) };
        let mut left = budget as u64;
        while let Some(piece) = self.pieces.front_mut().filter(|piece| piece.block == block && left > 0) {
            let len = piece.far.len.min(left);
            next.push(RemoteIoVec { address: piece.far.address, len });
            left -= len;
            piece.far.address += len;
            piece.far.len -= len;
            if piece.far.len == 0 {
                self.pieces.pop_front();
            }
        }
        (block, next)
    }

    /// Copies up to `budget` bytes to `skip` bytes into the target. An error: what is lent can't be read.
    fn copy(
        &mut self,
        line: &Connection,
        blocks: &HashMap<u64, Mapping>,
        target: &Slice,
        skip: usize,
        budget: usize,
    ) -> io::Result<PartCopy> {
        let Some(access) = target.write_access() else { return Ok(PartCopy::Not(PayloadStatus::TargetGone)) };
        let (block, far) = self.next(budget.min(sys::reach(&access, skip)));
        let len = far.iter().map(|piece| piece.len as usize).sum();
        let reading = &line.mine.words().reading[self.slot];
        let granted = &line.theirs.words().granted[self.slot];
        reading.store(self.id, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut now_granted = see(granted);
        let mut read = Ok(true);
        if now_granted == self.id {
            read = match block {
                0 if line.reads => sys::read_process(line.peer.pid, &far, &access, skip, line.peer.nonce),
                0 => Ok(false),
                block => Ok(blocks.get(&block).is_some_and(|mapping| blocks::read(mapping, &far, &access, skip))),
            };
            // What was read before the owner took it back counts, what was read while it did does not.
            fence(Ordering::SeqCst);
            now_granted = see(granted);
        }
        reading.store(0, Ordering::Release);
        match read {
            _ if now_granted == CLOSED => Err(super::link::closed_by_peer()),
            _ if now_granted != self.id => Ok(PartCopy::Not(PayloadStatus::SourceGone)),
            Ok(true) => Ok(PartCopy::Bytes(len)),
            // The process is dead, or has lent what it does not have: either is the end of the link.
            _ if line.peer.is_gone() => Err(io::Error::new(io::ErrorKind::ConnectionReset, "the process died")),
            Ok(false) => Err(ProtocolViolation.into()),
            Err(error) => Err(io::Error::new(error.kind(), format!("what it lent can't be read: {error}"))),
        }
    }
}

/// The words of a loan's record.
pub(super) fn loan(slot: usize, id: u64, pieces: impl Iterator<Item = (u64, u64, u64)>, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&(slot as u64).to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
    for (block, address, len) in pieces {
        for word in [block, address, len] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    debug_assert!(out.len() <= MAX_BODY);
}
