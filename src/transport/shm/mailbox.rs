//! What a link carries: the outbox sends frames and payloads, and the inbox receives them.
//!
//! Frames go into the ring; payloads go through the ring, or are lent. Payloads on loan are copied a step at a time, so that
//! frames behind them do not wait for all of it.
//!
//! Through the ring a payload is copied twice, by two threads at a time, within the processors' caches or past the sender's; lent,
//! it is copied once, by the kernel, which pins every page. Which is the fastest depends on the machine and on what else it does, so
//! the receiver measures all three, and asks for one (`copy_choice`). The sender decides whether it may lend. Blocks of shared memory
//! that the peer has mapped, or may map, are always lent.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::super::{LinkKey, PartialFrame, PayloadStatus, ReceiveTarget, Sink, closed_by_peer};
use super::blocks::{self, MAX_BLOCKS, MAX_MAPPED};
use super::connection::{Connection, Consumer, MAX_BODY, Producer, ProtocolViolation, Record, RecordKind};
use super::copy_choice::{CopyChoice, CopyWay};
use super::handshake::{self, ControlPacket};
use super::loans::{Lingering, Loans};
use super::segment::{CLOSED, SLOTS, see};
use super::sys::{self, MAX_PIECES, RemoteIoVec};
use crate::memory::{
    CopyPath, ReadAccess, Slice, WriteAccess,
    shared::{Block, Mapping},
};
use crate::sync::atomic::{Ordering, fence};

/// A payload goes through the ring in pieces of this size: the peer copies one out while the next is copied in. Twice as long
/// ones were measured to take 1.0 to 1.15 times as long.
const PIECE: usize = 8 << 10;
/// Payloads up to this size are not lent: two copies through the ring cost less than the answer that ends a loan.
const SMALL: usize = 8 << 10;
/// Memory in pieces shorter than this on average is not lent: each would be a piece of its own in a system call.
const SHORT: usize = 512;
/// Bytes copied in one step: the most that a frame, or an owner that reclaims memory, waits for (some 10 µs).
const STEP: usize = 128 << 10;
/// Records read in one turn, and bytes of frames in them, so that other links get their turns.
const RECORDS: usize = 64;
const FRAMES: usize = 32 << 10;
/// Bytes of a payload that are written before the sender looks whether something has arrived; and that are read before a turn ends
/// behind a frame.
const STRETCH: usize = 32 << 10;

pub(super) struct ShmOutbox {
    producer: Producer,
    pub pending: Option<ShmSend>,
    pub loans: Loans,
    payloads: u64,
    /// The blocks that the peer was given, with their lengths.
    blocks: HashMap<u64, (Weak<Block>, usize)>,
    /// The encoded record of a loan; kept for reuse.
    words: Vec<u8>,
    /// What the pending send waits for.
    needs: Needs,
    policy: KernelCopyPolicy,
}

/// When the engine lends memory to peers that can read it, so that the kernel copies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelCopyPolicy {
    Never,
    /// Where the peer asks for it.
    Measured,
    Always,
}

enum Needs {
    /// A free slot for a loan.
    Slot,
    /// Room in the ring for a record with a body of this length.
    Room(usize),
}

/// A send and its progress.
pub(super) struct ShmSend {
    pub bytes: Vec<u8>,
    written: usize,
    payload: Option<Slice>,
    /// How much of the payload has been sent or lent.
    covered: usize,
    /// The payload is lent where possible, and else written into the ring by this path.
    lends: bool,
    path: CopyPath,
    number: u64,
}

/// How far a send got.
pub(super) enum Written {
    /// All is written, the payload too.
    All,
    /// All is written, and the payload is on loan.
    Lent,
    /// There is no room for the rest, or the sender has stopped for what has arrived.
    Part,
}

impl ShmOutbox {
    pub(super) fn new(connection: &Connection, policy: KernelCopyPolicy) -> ShmOutbox {
        ShmOutbox {
            producer: Producer::new(connection.mine.clone(), connection.theirs.clone()),
            pending: None,
            loans: Loans::default(),
            payloads: 0,
            blocks: HashMap::new(),
            words: Vec::new(),
            needs: Needs::Slot,
            policy,
        }
    }

    pub(super) fn begin(&mut self, bytes: Vec<u8>, payload: Option<Slice>) -> ShmSend {
        self.payloads += 1;
        ShmSend { bytes, written: 0, payload, covered: 0, lends: false, path: CopyPath::Cached, number: self.payloads }
    }

    /// Whether a payload of this length is lent if it can be, and else how it is written into the ring.
    fn way(&self, connection: &Connection, len: usize) -> (bool, CopyPath) {
        let wanted = connection.theirs.words().wanted.0.load(Ordering::Relaxed) >> (WANTED_BITS * size_class(len));
        let prefers = match self.policy {
            KernelCopyPolicy::Never => false,
            KernelCopyPolicy::Measured => wanted & WANTS_LOANS != 0,
            KernelCopyPolicy::Always => true,
        };
        let path = if wanted & WANTS_CACHES != 0 { CopyPath::Cached } else { CopyPath::Streaming };
        (prefers && connection.lends.load(Ordering::Relaxed), path)
    }

    /// Writes a few bytes, if nothing waits for the peer and there is room for all of them.
    pub(super) fn inject(&mut self, bytes: &[u8]) -> bool {
        let now = bytes.len() <= MAX_BODY && !self.is_waiting() && self.producer.has_room(bytes.len()) == Ok(true);
        if now {
            self.producer.put(RecordKind::Bytes, bytes.len(), |segment, at, path| segment.write(at, bytes, path));
            self.producer.clear_ahead(bytes.len());
        }
        now
    }

    /// Writes as much of a send as there is room for, and while `goes_on` says so after each stretch of a payload.
    pub(super) fn write(
        &mut self,
        connection: &Arc<Connection>,
        sending: &mut ShmSend,
        goes_on: impl Fn() -> bool,
    ) -> Result<Written, ProtocolViolation> {
        loop {
            let written = self.write_stretch(connection, sending)?;
            if !matches!(written, Written::Part) || !self.has_what_it_needs() || !goes_on() {
                return Ok(written);
            }
        }
    }

    /// Writes as much of a send as there is room for, but of its payload [`STRETCH`] at most through the ring.
    fn write_stretch(&mut self, connection: &Arc<Connection>, sending: &mut ShmSend) -> Result<Written, ProtocolViolation> {
        while sending.written < sending.bytes.len() {
            let rest = &sending.bytes[sending.written..];
            let now = &rest[..rest.len().min(MAX_BODY)];
            if !self.has_room(now.len())? {
                return Ok(Written::Part);
            }
            self.producer.put(RecordKind::Bytes, now.len(), |segment, at, path| segment.write(at, now, path));
            sending.written += now.len();
        }
        let Some(payload) = sending.payload.clone() else { return Ok(Written::All) };
        if sending.covered == 0 {
            (sending.lends, sending.path) = self.way(connection, payload.len);
        }
        let end = sending.covered + STRETCH;
        while sending.covered < payload.len {
            let Some(access) = payload.read_access() else {
                if !self.has_room(0)? {
                    return Ok(Written::Part);
                }
                self.producer.put(RecordKind::Gone, 0, |_, _, _| ());
                break;
            };
            let done = match self.lend(connection, &access, &payload, sending)? {
                Some(done) => done,
                None => self.copy(&access, &payload, sending, end)?,
            };
            if !done {
                return Ok(Written::Part);
            }
        }
        Ok(if self.loans.complete(sending.number) { Written::Lent } else { Written::All })
    }

    /// Lends the next part, if that is better than the ring. `None`: it is not; `Some(false)`: there is no room.
    fn lend(
        &mut self,
        connection: &Arc<Connection>,
        access: &ReadAccess<'_>,
        payload: &Slice,
        sending: &mut ShmSend,
    ) -> Result<Option<bool>, ProtocolViolation> {
        if payload.len <= SMALL || !sending.lends && !payload.region.has_blocks() {
            return Ok(None);
        }
        let mut pieces = smallvec::SmallVec::new();
        let mut covered = access.pieces(sending.covered, MAX_PIECES, &mut pieces);
        if covered / pieces.len().max(1) < SHORT {
            return Ok(None);
        }
        // A part lies in one block, or outside of all blocks.
        let block = pieces.first().and_then(|piece| payload.region.block(piece.iov_base.cast::<u8>()));
        let block = block.filter(|block| self.share_block(connection, block, payload.unrestricted));
        if block.is_none() && !sending.lends {
            return Ok(None);
        }
        let words = 2 + 3 * pieces.len();
        let Some(slot) = self.loans.free_slot() else {
            self.needs = Needs::Slot;
            return Ok(Some(false));
        };
        if !self.has_room(8 * words)? {
            return Ok(Some(false));
        }
        let mut list: smallvec::SmallVec<[(u64, u64, u64); 8]> = smallvec::SmallVec::new();
        match &block {
            None => list.extend(pieces.iter().map(|piece| (0, piece.iov_base.addr() as u64, piece.iov_len as u64))),
            Some(block) => {
                covered = 0;
                let start = block.mapping.address().addr();
                for piece in &pieces {
                    let Some(offset) = piece.iov_base.addr().checked_sub(start) else { break };
                    if offset >= block.mapping.len() {
                        break;
                    }
                    list.push((block.id, offset as u64, piece.iov_len as u64));
                    covered += piece.iov_len;
                }
            }
        }
        let Some(part) = payload.part(sending.covered, covered) else { return Ok(None) };
        let id = self.loans.lend(connection, slot, access, part, sending.number);
        ExportedPart::encode(slot, id, list.into_iter(), &mut self.words);
        let words = &self.words;
        self.producer.put(RecordKind::Loan, words.len(), |segment, at, path| segment.write(at, words, path));
        sending.covered += covered;
        Ok(Some(true))
    }

    /// Copies pieces into the ring up to this offset, unless the next may be lent. False: there is no room, or this is the end.
    fn copy(
        &mut self,
        access: &ReadAccess<'_>,
        payload: &Slice,
        sending: &mut ShmSend,
        end: usize,
    ) -> Result<bool, ProtocolViolation> {
        loop {
            let (skip, now) = (sending.covered, PIECE.min(payload.len - sending.covered));
            if !self.has_room(now)? || skip >= end {
                return Ok(false);
            }
            if payload.len <= SMALL {
                self.producer
                    .put(RecordKind::Payload, now, |segment, at, path| segment.write_memory(at, access, skip, now, path));
            } else {
                let past_caches = sending.path == CopyPath::Streaming;
                let kind = if past_caches { RecordKind::PayloadPastCaches } else { RecordKind::Payload };
                self.producer
                    .put_by(sending.path, kind, now, |segment, at, path| segment.write_memory(at, access, skip, now, path));
            }
            sending.covered += now;
            if sending.covered == payload.len || payload.region.has_blocks() {
                return Ok(true);
            }
        }
    }

    /// Gives the peer the descriptor of a block, unless it has it; false when it must not have it. The peer can read the block
    /// as long as it exists, so only a peer of the own user that may read all of it gets the descriptor.
    fn share_block(&mut self, connection: &Connection, block: &Arc<Block>, unrestricted: bool) -> bool {
        if self.blocks.contains_key(&block.id) {
            return true;
        }
        if !unrestricted || !connection.peer.own_user {
            return false;
        }
        let is_gone = |block: &Weak<Block>| block.strong_count() == 0;
        let gone: Vec<u64> = self.blocks.iter().filter(|(_, (block, _))| is_gone(block)).map(|(id, _)| *id).collect();
        if !gone.is_empty() && gone.len() * 8 <= MAX_BODY && matches!(self.producer.has_room(8 * gone.len()), Ok(true)) {
            let words: Vec<u8> = gone.iter().flat_map(|id| id.to_le_bytes()).collect();
            self.producer.put(RecordKind::Forget, words.len(), |segment, at, path| segment.write(at, &words, path));
            gone.iter().for_each(|id| drop(self.blocks.remove(id)));
        }
        // The peer may have more mapped: blocks that are gone, for which it has no `Forget` yet.
        let mapped: usize = self.blocks.values().map(|(_, len)| len).sum();
        if self.blocks.len() >= MAX_BLOCKS / 2 || mapped.saturating_add(block.mapping.len()) > MAX_MAPPED / 2 {
            return false;
        }
        let packet = ControlPacket::Block { id: block.id, len: block.mapping.len() as u64 };
        // Sent before the record that refers to it, so that the peer finds it when it reads the record.
        let sent = handshake::send(&connection.peer.socket, &packet, &[block.give()]);
        if sent.is_ok() {
            self.blocks.insert(block.id, (Arc::downgrade(block), block.mapping.len()));
        }
        sent.is_ok()
    }

    fn has_room(&mut self, len: usize) -> Result<bool, ProtocolViolation> {
        self.needs = Needs::Room(len);
        self.producer.has_room(len)
    }

    /// True when a loan has ended, or the pending send can continue.
    pub(super) fn can_continue(&mut self, connection: &Connection) -> bool {
        self.loans.has_finished(connection) || self.pending.is_some() && self.has_what_it_needs()
    }

    fn has_what_it_needs(&mut self) -> bool {
        match self.needs {
            Needs::Slot => self.loans.free_slot().is_some(),
            // `write` reports a protocol violation.
            Needs::Room(len) => self.producer.has_room(len).unwrap_or(true),
        }
    }

    /// Ends all loans of a link that is closed; those that the peer still reads come back.
    pub(super) fn end(&mut self, connection: &Arc<Connection>) -> Vec<Lingering> {
        self.pending = None;
        self.loans.end(connection)
    }

    /// A send or a loan is not finished.
    pub(super) fn is_waiting(&self) -> bool {
        self.pending.is_some() || !self.loans.is_empty()
    }
}

pub(super) struct ShmInbox {
    consumer: Consumer,
    partial: PartialFrame,
    /// In the order of their announcement; only the last may have parts that are still to arrive.
    payloads: VecDeque<ShmPayload>,
    /// The peer's shared blocks, by its numbers.
    blocks: HashMap<u64, Mapping>,
    /// Which way payloads should take, by size class.
    choices: [CopyChoice; SIZE_CLASSES.len() + 1],
    last: Option<Measured>,
}

/// What a side asks for in its word `wanted`, for each size class.
const WANTS_LOANS: u64 = 1;
const WANTS_CACHES: u64 = 2;
const WANTED_BITS: usize = 2;

/// Payloads from these lengths on may want other ways than shorter ones. The kernel takes a fixed time first; those that fill a chunk
/// are parts of long transfers, where the pace counts, while shorter ones mostly arrive alone. Lengths of two to some power, and a
/// little more, are in one class.
const SIZE_CLASSES: [usize; 4] = [12 << 10, 24 << 10, 48 << 10, STEP];

fn size_class(len: usize) -> usize {
    SIZE_CLASSES.iter().filter(|least| len >= **least).count()
}

/// The payload that was measured last.
struct Measured {
    class: usize,
    way: Option<CopyWay>,
    done: Instant,
    /// The memory behind it: if the next payload goes there, it is the next of the same transfer.
    next: (usize, usize),
}

struct ShmPayload {
    receive_target: ReceiveTarget<Slice>,
    /// Bytes that the peer has lent or sent so far.
    announced: usize,
    done: usize,
    parts: VecDeque<ExportedPart>,
    status: PayloadStatus,
    /// When it was announced, if it is long enough to be measured.
    since: Option<Instant>,
    /// The way of all its parts; none, if they took different ones, or lie in a block.
    way: Option<CopyWay>,
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
            choices: [(); SIZE_CLASSES.len() + 1].map(|()| CopyChoice::new(connection.reads)),
            last: None,
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
        let (mut frames, mut payloads) = (0, 0);
        for _ in 0..RECORDS {
            let Some(record) = self.consumer.next()? else { break };
            turn = Turn::Something;
            let (segment, at) = self.consumer.body();
            let is_payload = matches!(record.kind, RecordKind::Payload | RecordKind::PayloadPastCaches);
            if !is_payload {
                segment.read(at, &mut scratch[..record.len]);
            }
            let open = self.take(key, connection, record, &scratch[..record.len], sink, fetch)?;
            if self.consumer.pass(record) {
                connection.wake_waiting_peer();
            }
            if !open {
                return Ok(Turn::Closed);
            }
            *(if is_payload { &mut payloads } else { &mut frames }) += record.len;
            // A frame behind a payload may be a request, and does not wait for the payloads behind it.
            if frames >= FRAMES || payloads >= STRETCH && record.kind == RecordKind::Bytes {
                break;
            }
        }
        if self.has_parts() {
            turn = Turn::Something;
            self.step(connection, STEP)?;
            self.report(key, connection, sink);
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
            RecordKind::Bytes => return self.frames(key, connection, body, sink),
            RecordKind::Forget => {
                body.as_chunks::<8>().0.iter().for_each(|id| drop(self.blocks.remove(&u64::from_le_bytes(*id))));
            }
            RecordKind::Loan | RecordKind::Payload | RecordKind::PayloadPastCaches | RecordKind::Gone if !open => {
                return Err(ProtocolViolation.into());
            }
            RecordKind::Loan => {
                let part = ExportedPart::parse(body).ok_or(ProtocolViolation)?;
                let in_block = part.pieces.iter().any(|piece| piece.block != 0);
                // A slot is reused only after this side has finished its loan, so there are at most `SLOTS` parts.
                if self.payloads.iter().flat_map(|payload| &payload.parts).any(|other| other.slot == part.slot) {
                    return Err(ProtocolViolation.into());
                }
                if part.pieces.iter().any(|piece| piece.block != 0 && !self.blocks.contains_key(&piece.block)) {
                    fetch(self);
                }
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                let len = part.len().filter(|len| *len <= last.receive_target.len - last.announced).ok_or(ProtocolViolation)?;
                last.note_way((!in_block).then_some(CopyWay::Kernel));
                last.announced += len;
                last.parts.push_back(part);
            }
            RecordKind::Payload | RecordKind::PayloadPastCaches => {
                // Loans before this record are copied first: payloads complete in order.
                self.settle(connection)?;
                self.report(key, connection, sink);
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                if record.len == 0 || record.len > last.receive_target.len - last.announced {
                    return Err(ProtocolViolation.into());
                }
                let (segment, at) = self.consumer.body();
                last.write(record.len, |access, skip| segment.read_memory(at, access, skip, record.len));
                last.note_way(Some(if record.kind == RecordKind::Payload { CopyWay::Ring } else { CopyWay::PastCaches }));
                last.announced += record.len;
                sink.heard(key);
            }
            RecordKind::Gone => {
                let last = self.payloads.back_mut().ok_or(ProtocolViolation)?;
                last.announced = last.receive_target.len;
                last.status = PayloadStatus::SourceGone;
            }
        }
        self.report(key, connection, sink);
        Ok(true)
    }

    /// Offers frames to the sink. False when the link was closed because of them.
    fn frames(&mut self, key: LinkKey, connection: &Connection, bytes: &[u8], sink: &mut dyn Sink) -> io::Result<bool> {
        let offered = self.partial.offer(bytes, |bytes| sink.bytes(key, bytes));
        let Some((receive_target, behind)) = offered else { return Ok(false) };
        if !behind.is_empty() {
            // A payload has records of its own, so no bytes follow the frame that announces it.
            return Err(ProtocolViolation.into());
        }
        if let Some(receive_target) = receive_target {
            let measured = receive_target.len > SMALL && receive_target.memory.is_some();
            self.payloads.push_back(ShmPayload {
                receive_target,
                announced: 0,
                done: 0,
                parts: VecDeque::new(),
                status: PayloadStatus::Whole,
                since: measured.then(Instant::now),
                way: None,
            });
            self.report(key, connection, sink);
        }
        Ok(true)
    }

    /// Reports the payloads that are complete, or have failed.
    fn report(&mut self, key: LinkKey, connection: &Connection, sink: &mut dyn Sink) {
        while self.payloads.front().is_some_and(ShmPayload::is_over) {
            let Some(payload) = self.payloads.pop_front() else { return };
            self.measure(connection, &payload);
            sink.payload_done(key, payload.status);
        }
    }

    /// Notes how long a payload took, and asks for the way that it finds faster. A payload is not counted if it overlaps with one
    /// of its class that came another way: part of it may have been copied into the ring meanwhile. Behind one of another class, which
    /// may always come another way, it is counted all the same, or it might never be.
    fn measure(&mut self, connection: &Connection, payload: &ShmPayload) {
        let (Some(since), Some(target)) = (payload.since, &payload.receive_target.memory) else { return };
        let (len, memory) = (payload.receive_target.len, Arc::as_ptr(&target.region).addr());
        let done = Instant::now();
        let (class, next) = (size_class(len), (memory, target.offset + len));
        let last = self.last.replace(Measured { class, way: payload.way, done, next });
        let Some(way) = payload.way.filter(|_| payload.status == PayloadStatus::Whole) else { return };
        let begun = match last {
            // What the sender needs between two payloads of a transfer counts too.
            Some(last) if last.next == (memory, target.offset) || last.done > since => {
                if last.way != payload.way && last.class == class {
                    return;
                }
                last.done
            }
            _ => since,
        };
        let choices = &mut self.choices;
        choices[class].arrived(way, len, (done - begun).as_nanos() as f64);
        let wanted = choices.iter().rev().fold(0, |bits, choice| {
            let loans = if choice.wanted() == CopyWay::Kernel { WANTS_LOANS } else { 0 };
            let caches = if choice.wants_caches() { WANTS_CACHES } else { 0 };
            bits << WANTED_BITS | loans | caches
        });
        let word = &connection.mine.words().wanted.0;
        if word.load(Ordering::Relaxed) != wanted {
            word.store(wanted, Ordering::Relaxed);
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
        let path = CopyPath::for_transfer(payload.receive_target.total);
        let Some(part) = payload.parts.front_mut() else { return Ok(()) };
        let finished = match &payload.receive_target.memory {
            Some(target) if payload.status == PayloadStatus::Whole => {
                match part.copy(connection, &self.blocks, (target, payload.done, path), budget)? {
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

    /// A part of it comes this way. The first part is not announced yet.
    fn note_way(&mut self, way: Option<CopyWay>) {
        self.way = way.filter(|way| self.announced == 0 || self.way == Some(*way));
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

/// A part of a payload that the peer has lent: its record in the ring, and how its bytes are copied.
pub(super) struct ExportedPart {
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

/// The outcome of copying some of a part.
enum PartCopy {
    Bytes(usize),
    Failed(PayloadStatus),
}

impl ExportedPart {
    /// Encodes the record of a loan: what `parse` decodes.
    pub(super) fn encode(slot: usize, id: u64, pieces: impl Iterator<Item = (u64, u64, u64)>, out: &mut Vec<u8>) {
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

    /// Decodes the record of a loan: slot, id, and pieces of block, address and length.
    fn parse(body: &[u8]) -> Option<ExportedPart> {
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

    /// Removes pieces of one block from the front, up to `budget` bytes together.
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

    /// Copies up to `budget` bytes into the target, from offset `skip` on. An error if the loan can't be read.
    fn copy(
        &mut self,
        connection: &Connection,
        blocks: &HashMap<u64, Mapping>,
        (target, skip, path): (&Slice, usize, CopyPath),
        budget: usize,
    ) -> io::Result<PartCopy> {
        let Some(access) = target.write_access() else { return Ok(PartCopy::Failed(PayloadStatus::TargetGone)) };
        let (block, far) = self.next(budget.min(sys::max_call_len(&access, skip)));
        let len = far.iter().map(|piece| piece.len as usize).sum();
        let reading = &connection.mine.words().reading[self.slot];
        let granted = &connection.theirs.words().granted[self.slot];
        reading.store(self.id, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut now_granted = see(granted);
        let mut read = Ok(true);
        if now_granted == self.id {
            read = match block {
                0 if connection.reads => sys::read_process(connection.peer.pid, &far, &access, skip, connection.peer.nonce),
                0 => Ok(false),
                block => Ok(blocks.get(&block).is_some_and(|mapping| blocks::read(mapping, &far, &access, skip, path))),
            };
            // Bytes count only if the loan was still granted after the read.
            fence(Ordering::SeqCst);
            now_granted = see(granted);
        }
        reading.store(0, Ordering::Release);
        match read {
            _ if now_granted == CLOSED => Err(closed_by_peer()),
            _ if now_granted != self.id => Ok(PartCopy::Failed(PayloadStatus::SourceGone)),
            Ok(true) => Ok(PartCopy::Bytes(len)),
            // The process is dead, or has lent memory that it does not have: either ends the link.
            _ if connection.peer.is_gone() => Err(io::Error::new(io::ErrorKind::ConnectionReset, "the peer's process died")),
            Ok(false) => Err(ProtocolViolation.into()),
            Err(error) => Err(io::Error::new(error.kind(), format!("can't read the memory that it lent: {error}"))),
        }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/mailbox.rs"]
mod tests;
