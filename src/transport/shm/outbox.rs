//! What is sent: frames into the ring, and payloads, through the ring or lent.
//!
//! Through the ring a payload is copied twice, by two threads at a time, each copy within the processor's caches; lent, it is
//! copied once, by the system, which pins every page. The former was measured at two to three times the speed of the latter
//! from 64 KiB to 256 MiB, and takes less processor time in all. But it keeps the sender's thread: when several peers fetch
//! at once, all but the first read for themselves. Blocks of shared memory that the peer has mapped, or may map, are lent
//! always.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::connection::Connection;
use super::handshake::{self, ControlPacket};
use super::inbox;
use super::loans::{Lingering, Loans};
use super::ring::{MAX_BODY, Producer, ProtocolViolation, RecordKind};
use super::sys::MAX_PIECES;
use crate::memory::{ReadAccess, Slice, shared::Block};

/// A payload goes through the ring in pieces of this size: the peer copies one out while the next is copied in.
const PIECE: usize = 16 << 10;
/// Up to this size two copies through the ring cost less than an answer, whatever else there is.
const SMALL: usize = 8 << 10;
/// Segments shorter than this on average are not worth a piece of their own in a system call.
const SHORT: usize = 512;
/// Blocks that the peer is told of at a time; it takes some more.
const MAX_BLOCKS: usize = 128;

pub(super) struct ShmOutbox {
    producer: Producer,
    pub pending: Option<ShmSend>,
    pub loans: Loans,
    payloads: u64,
    /// The blocks that the peer has been given, with their lengths.
    blocks: HashMap<u64, (Weak<Block>, usize)>,
    words: Vec<u8>,
    /// What the pending send waits for.
    needs: Needs,
    traffic: Arc<Traffic>,
    /// This one is among those that `traffic` counts.
    streams: bool,
}

/// When memory of the process is lent to peers that can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelCopyPolicy {
    Never,
    /// While another payload goes through a ring.
    Crowded,
    /// Also where two threads can't copy at a time: on one core.
    Always,
}

/// How the senders of an engine share it.
pub(super) struct Traffic {
    /// Links over which a payload goes through the ring at this moment.
    streams: AtomicUsize,
    lending: KernelCopyPolicy,
}

impl Traffic {
    pub(super) fn new(lending: KernelCopyPolicy) -> Traffic {
        Traffic { streams: AtomicUsize::new(0), lending }
    }
}

enum Needs {
    Slot,
    Room(usize),
}

/// A send, as far as it is.
pub(super) struct ShmSend {
    pub bytes: Vec<u8>,
    written: usize,
    payload: Option<Slice>,
    /// How much of the payload has been sent or lent.
    covered: usize,
    number: u64,
}

/// How far a send got.
pub(super) enum Written {
    All,
    /// All of it, but the payload is being read where it is.
    Lent,
    /// There is no room.
    Part,
}

impl ShmOutbox {
    pub(super) fn new(line: &Connection, traffic: Arc<Traffic>) -> ShmOutbox {
        ShmOutbox {
            producer: Producer::new(line.mine.clone(), line.theirs.clone()),
            pending: None,
            loans: Loans::default(),
            payloads: 0,
            blocks: HashMap::new(),
            words: Vec::new(),
            needs: Needs::Slot,
            traffic,
            streams: false,
        }
    }

    pub(super) fn begin(&mut self, bytes: Vec<u8>, payload: Option<Slice>) -> ShmSend {
        self.payloads += 1;
        ShmSend { bytes, written: 0, payload, covered: 0, number: self.payloads }
    }

    /// Sends what there is room for.
    pub(super) fn write(&mut self, line: &Arc<Connection>, sending: &mut ShmSend) -> Result<Written, ProtocolViolation> {
        let written = self.write_some(line, sending);
        let streams = matches!(written, Ok(Written::Part)) && sending.payload.is_some();
        self.set_streams(streams);
        written
    }

    fn set_streams(&mut self, streams: bool) {
        if std::mem::replace(&mut self.streams, streams) != streams {
            let count = &self.traffic.streams;
            if streams {
                count.fetch_add(1, Ordering::Relaxed)
            } else {
                count.fetch_sub(1, Ordering::Relaxed)
            };
        }
    }

    /// Whether payloads that can be lent are.
    fn prefers_lending(&self) -> bool {
        match self.traffic.lending {
            KernelCopyPolicy::Never => false,
            KernelCopyPolicy::Crowded => self.traffic.streams.load(Ordering::Relaxed) > usize::from(self.streams),
            KernelCopyPolicy::Always => true,
        }
    }

    fn write_some(&mut self, line: &Arc<Connection>, sending: &mut ShmSend) -> Result<Written, ProtocolViolation> {
        while sending.written < sending.bytes.len() {
            let rest = &sending.bytes[sending.written..];
            let now = &rest[..rest.len().min(MAX_BODY)];
            if !self.has_room(now.len())? {
                return Ok(Written::Part);
            }
            self.producer.put(RecordKind::Bytes, now.len(), |segment, at| segment.write(at, now));
            sending.written += now.len();
        }
        let Some(payload) = sending.payload.clone() else { return Ok(Written::All) };
        while sending.covered < payload.len {
            let Some(access) = payload.read_access() else {
                if !self.has_room(0)? {
                    return Ok(Written::Part);
                }
                self.producer.put(RecordKind::Gone, 0, |_, _| ());
                break;
            };
            let done = match self.lend(line, &access, &payload, sending)? {
                Some(done) => done,
                None => self.copy(&access, payload.len, sending)?,
            };
            if !done {
                return Ok(Written::Part);
            }
        }
        Ok(if self.loans.complete(sending.number) { Written::Lent } else { Written::All })
    }

    /// Lends the next part, if that is better than to send it; `Some(false)`: there is no room.
    fn lend(
        &mut self,
        line: &Arc<Connection>,
        access: &ReadAccess<'_>,
        payload: &Slice,
        sending: &mut ShmSend,
    ) -> Result<Option<bool>, ProtocolViolation> {
        if payload.len <= SMALL {
            return Ok(None);
        }
        let mut pieces = smallvec::SmallVec::new();
        let mut covered = access.pieces(sending.covered, MAX_PIECES, &mut pieces);
        if covered / pieces.len().max(1) < SHORT {
            return Ok(None);
        }
        // A part is memory of the process, or of one block.
        let block = pieces.first().and_then(|piece| payload.region.block(piece.iov_base.cast::<u8>()));
        let block = block.filter(|block| self.tell(line, block, payload.unrestricted));
        if block.is_none() && !(line.lends.load(Ordering::Relaxed) && self.prefers_lending()) {
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
        let id = self.loans.lend(line, slot, access, part, sending.number);
        inbox::loan(slot, id, list.into_iter(), &mut self.words);
        let words = &self.words;
        self.producer.put(RecordKind::Loan, words.len(), |segment, at| segment.write(at, words));
        sending.covered += covered;
        Ok(Some(true))
    }

    /// Sends the next piece itself. False: there is no room.
    fn copy(&mut self, access: &ReadAccess<'_>, len: usize, sending: &mut ShmSend) -> Result<bool, ProtocolViolation> {
        let (skip, now) = (sending.covered, PIECE.min(len - sending.covered));
        if !self.has_room(now)? {
            return Ok(false);
        }
        self.producer.put(RecordKind::Payload, now, |segment, at| segment.write_memory(at, access, skip, now));
        sending.covered += now;
        Ok(true)
    }

    /// Sees to it that the peer has a block; false when it can't be given it. A peer that has it reads it until the block is no
    /// more, so it is given to none that may not read all of it, nor to one of another user.
    fn tell(&mut self, line: &Connection, block: &Arc<Block>, unrestricted: bool) -> bool {
        if self.blocks.contains_key(&block.id) {
            return true;
        }
        if !unrestricted || !line.peer.own_user {
            return false;
        }
        let gone: Vec<u64> = self.blocks.iter().filter(|(_, (block, _))| block.strong_count() == 0).map(|(id, _)| *id).collect();
        if !gone.is_empty() && gone.len() * 8 <= MAX_BODY && matches!(self.producer.has_room(8 * gone.len()), Ok(true)) {
            let words: Vec<u8> = gone.iter().flat_map(|id| id.to_le_bytes()).collect();
            self.producer.put(RecordKind::Forget, words.len(), |segment, at| segment.write(at, &words));
            gone.iter().for_each(|id| drop(self.blocks.remove(id)));
        }
        // It may have some more mapped: those that it has not been told yet are gone.
        let mapped: usize = self.blocks.values().map(|(_, len)| len).sum();
        if self.blocks.len() >= MAX_BLOCKS || mapped.saturating_add(block.mapping.len()) > inbox::MAX_MAPPED / 2 {
            return false;
        }
        let packet = ControlPacket::Block { id: block.id, len: block.mapping.len() as u64 };
        // Before the record that refers to it: so the peer finds it when it looks.
        let sent = handshake::send(&line.peer.socket, &packet, &[block.give()]);
        if sent.is_ok() {
            self.blocks.insert(block.id, (Arc::downgrade(block), block.mapping.len()));
        }
        sent.is_ok()
    }

    fn has_room(&mut self, len: usize) -> Result<bool, ProtocolViolation> {
        self.needs = Needs::Room(len);
        self.producer.has_room(len)
    }

    /// True when something of what waits for the peer need not wait any more.
    pub(super) fn could_go_on(&mut self, line: &Connection) -> bool {
        self.loans.has_finished(line)
            || self.pending.is_some()
                && match self.needs {
                    Needs::Slot => self.loans.free_slot().is_some(),
                    // What makes no sense is found out by who goes on.
                    Needs::Room(len) => self.producer.has_room(len).unwrap_or(true),
                }
    }

    /// The link is closed.
    pub(super) fn end(&mut self, line: &Arc<Connection>) -> Vec<Lingering> {
        self.pending = None;
        self.set_streams(false);
        self.loans.end(line)
    }

    /// The peer has not taken all of it.
    pub(super) fn is_waiting(&self) -> bool {
        self.pending.is_some() || !self.loans.is_empty()
    }
}
