//! The receiving side of a link: frames from the ring, and payloads. Payloads on loan are copied a step at a time, so that
//! frames behind them do not wait for all of it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::super::{LinkKey, PartialFrame, PayloadStatus, ReceiveTarget, Sink};
use super::blocks::{MAX_BLOCKS, MAX_MAPPED};
use super::connection::Connection;
use super::exported_part::{ExportedPart, PartCopy};
use super::ring::{Consumer, ProtocolViolation, Record, RecordKind};
use crate::memory::{Slice, WriteAccess, shared::Mapping};
use crate::sync::atomic::Ordering;

/// Bytes copied in one step: the most that a frame, or an owner that reclaims memory, waits for (some 10 µs).
const STEP: usize = 128 << 10;
/// Records read in one turn, and bytes of frames in them, so that other links get their turns.
const RECORDS: usize = 64;
const FRAMES: usize = 32 << 10;
pub(super) struct ShmInbox {
    consumer: Consumer,
    partial: PartialFrame,
    /// In the order of their announcement; only the last may have parts that are still to arrive.
    payloads: VecDeque<ShmPayload>,
    /// The peer's shared blocks, by its numbers.
    blocks: HashMap<u64, Mapping>,
}

struct ShmPayload {
    receive_target: ReceiveTarget<Slice>,
    /// Bytes that the peer has lent or sent so far.
    announced: usize,
    done: usize,
    parts: VecDeque<ExportedPart>,
    status: PayloadStatus,
}

/// The outcome of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nothing,
    Something,
    /// The link was closed because of what arrived.
    Closed,
}

impl ShmInbox {
    pub(super) fn new(connection: &Connection) -> ShmInbox {
        ShmInbox {
            consumer: Consumer::new(connection.mine.clone(), connection.theirs.clone()),
            partial: PartialFrame::default(),
            payloads: VecDeque::new(),
            blocks: HashMap::new(),
        }
    }

    /// Position in the peer's ring: how many bytes have been read since the link opened.
    pub(super) fn taken(&self) -> u64 {
        self.consumer.at()
    }

    /// True when there is a record to read or a loan to copy.
    pub(super) fn has_work(&self) -> bool {
        !matches!(self.consumer.next(), Ok(None)) || self.has_parts()
    }

    /// A loan is not copied yet. A payload of which nothing has arrived is no work: its sender may be gone.
    fn has_parts(&self) -> bool {
        self.payloads.iter().any(|payload| !payload.parts.is_empty())
    }

    /// Maps a block whose descriptor the peer has sent.
    pub(super) fn add_block(&mut self, id: u64, len: u64, fd: &OwnedFd) -> io::Result<()> {
        if self.blocks.len() >= MAX_BLOCKS {
            return Err(io::Error::other(format!("it shares more than {MAX_BLOCKS} blocks of memory")));
        }
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?;
        let mapped: usize = self.blocks.values().map(Mapping::len).sum();
        if len > MAX_MAPPED - mapped {
            return Err(io::Error::other(format!("it shares more than {MAX_MAPPED} bytes of memory")));
        }
        self.blocks.insert(id, crate::memory::shared::attach(fd.as_fd(), len)?);
        Ok(())
    }

    /// Reads up to [`RECORDS`] records, and copies one step of a loan. `fetch` receives blocks that are not known yet.
    pub(super) fn turn(
        &mut self,
        key: LinkKey,
        connection: &Connection,
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
            let open = self.take(key, connection, record, &scratch[..record.len], sink, fetch)?;
            if self.consumer.pass(record) {
                connection.wake_waiting_peer();
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
            self.step(connection, STEP)?;
            self.report(key, sink);
        }
        Ok(turn)
    }

    /// Handles a record. False when the link was closed because of it.
    fn take(
        &mut self,
        key: LinkKey,
        connection: &Connection,
        record: Record,
        body: &[u8],
        sink: &mut dyn Sink,
        fetch: &mut dyn FnMut(&mut ShmInbox),
    ) -> io::Result<bool> {
        let open = self.payloads.back().is_some_and(|last| last.announced < last.receive_target.len);
        match record.kind {
            RecordKind::Bytes if open => return Err(ProtocolViolation.into()),
            RecordKind::Bytes => return self.frames(key, body, sink),
            RecordKind::Forget => {
                body.as_chunks::<8>().0.iter().for_each(|id| drop(self.blocks.remove(&u64::from_le_bytes(*id))));
            }
            RecordKind::Loan | RecordKind::Payload | RecordKind::Gone if !open => return Err(ProtocolViolation.into()),
            RecordKind::Loan => {
                let part = ExportedPart::parse(body).ok_or(ProtocolViolation)?;
                // A slot is reused only after this side has finished its loan, so there are at most `SLOTS` parts.
                if self.payloads.iter().flat_map(|payload| &payload.parts).any(|other| other.slot == part.slot) {
                    return Err(ProtocolViolation.into());
                }
                if part.pieces.iter().any(|piece| piece.block != 0 && !self.blocks.contains_key(&piece.block)) {
                    fetch(self);
                }
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                let len = part.len().filter(|len| *len <= last.receive_target.len - last.announced).ok_or(ProtocolViolation)?;
                last.announced += len;
                last.parts.push_back(part);
            }
            RecordKind::Payload => {
                // Loans before this record are copied first: payloads complete in order.
                self.settle(connection)?;
                self.report(key, sink);
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                if record.len == 0 || record.len > last.receive_target.len - last.announced {
                    return Err(ProtocolViolation.into());
                }
                let (segment, at) = self.consumer.body();
                last.write(record.len, |access, skip| segment.read_memory(at, access, skip, record.len));
                last.announced += record.len;
                sink.heard(key);
            }
            RecordKind::Gone => {
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                last.announced = last.receive_target.len;
                last.status = PayloadStatus::SourceGone;
            }
        }
        self.report(key, sink);
        Ok(true)
    }

    /// Offers frames to the sink. False when the link was closed because of them.
    fn frames(&mut self, key: LinkKey, bytes: &[u8], sink: &mut dyn Sink) -> io::Result<bool> {
        let offered = self.partial.offer(bytes, |bytes| sink.bytes(key, bytes));
        let Some((receive_target, behind)) = offered else { return Ok(false) };
        if !behind.is_empty() {
            // A payload has records of its own, so no bytes follow the frame that announces it.
            return Err(ProtocolViolation.into());
        }
        if let Some(receive_target) = receive_target {
            self.payloads.push_back(ShmPayload {
                receive_target,
                announced: 0,
                done: 0,
                parts: VecDeque::new(),
                status: PayloadStatus::Whole,
            });
            self.report(key, sink);
        }
        Ok(true)
    }

    /// Reports the payloads that are complete, or have failed.
    fn report(&mut self, key: LinkKey, sink: &mut dyn Sink) {
        while let Some(payload) = self.payloads.front().filter(|payload| payload.is_over()) {
            sink.payload_done(key, payload.status);
            self.payloads.pop_front();
        }
    }

    /// Copies all loans announced so far.
    fn settle(&mut self, connection: &Connection) -> io::Result<()> {
        while self.has_parts() {
            self.step(connection, STEP)?;
        }
        Ok(())
    }

    /// Copies up to `budget` bytes of the first payload that has a loan.
    fn step(&mut self, connection: &Connection, budget: usize) -> io::Result<()> {
        let Some(payload) = self.payloads.iter_mut().find(|payload| !payload.parts.is_empty()) else { return Ok(()) };
        let Some(part) = payload.parts.front_mut() else { return Ok(()) };
        let finished = match &payload.receive_target.memory {
            Some(target) if payload.status == PayloadStatus::Whole => {
                match part.copy(connection, &self.blocks, target, payload.done, budget)? {
                    PartCopy::Bytes(n) => {
                        payload.done += n;
                        part.pieces.is_empty()
                    }
                    PartCopy::Failed(status) => {
                        payload.status = status;
                        true
                    }
                }
            }
            // The payload has no target, or has failed: the rest is not copied.
            _ => true,
        };
        if finished {
            connection.mine.words().finished[part.slot].store(part.id, Ordering::Release);
            payload.parts.pop_front();
            connection.wake_waiting_peer();
        }
        Ok(())
    }
}

impl ShmPayload {
    fn is_over(&self) -> bool {
        self.announced == self.receive_target.len && self.parts.is_empty()
    }

    /// Writes bytes that arrived through the ring.
    fn write(&mut self, len: usize, copy: impl FnOnce(&WriteAccess<'_>, usize)) {
        if let Some(target) = self.receive_target.memory.as_ref().filter(|_| self.status == PayloadStatus::Whole) {
            match target.write_access() {
                Some(access) => copy(&access, self.done),
                None => self.status = PayloadStatus::TargetGone,
            }
        }
        self.done += len;
    }
}
