//! The sending side of a link: frames go into the ring; payloads go through the ring, or are lent.
//!
//! Through the ring a payload is copied twice, by two threads at a time, each copy within the processor's caches; lent, it is
//! copied once, by the kernel, which pins every page. The former was measured at two to three times the speed of the latter
//! from 64 KiB to 256 MiB, and takes less processor time in all. But it occupies the sender's thread: when several peers fetch
//! at once, all but the first copy from loans. Blocks of shared memory that the peer has mapped, or may map, are always lent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::blocks::{MAX_BLOCKS, MAX_MAPPED};
use super::connection::Connection;
use super::exported_part;
use super::handshake::{self, ControlPacket};
use super::loans::{Lingering, Loans};
use super::ring::{MAX_BODY, Producer, ProtocolViolation, RecordKind};
use super::sys::MAX_PIECES;
use crate::memory::{ReadAccess, Slice, shared::Block};

/// A payload goes through the ring in pieces of this size: the peer copies one out while the next is copied in.
const PIECE: usize = 16 << 10;
/// Payloads up to this size are not lent: two copies through the ring cost less than the answer that ends a loan.
const SMALL: usize = 8 << 10;
/// Memory in pieces shorter than this on average is not lent: each would be a piece of its own in a system call.
const SHORT: usize = 512;

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
    traffic: Arc<Traffic>,
    /// `traffic` counts this link.
    streams: bool,
}

/// When the engine lends memory to peers that can read it, so that the kernel copies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelCopyPolicy {
    Never,
    /// While another payload goes through a ring.
    Crowded,
    /// Also chosen for `Crowded` on one core, where two threads can't copy at the same time.
    Always,
}

/// What the links of an engine share to decide between ring and loan.
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
    number: u64,
}

/// How far a send got.
pub(super) enum Written {
    /// All is written, the payload too.
    All,
    /// All is written, and the payload is on loan.
    Lent,
    /// There is no room for the rest.
    Part,
}

impl ShmOutbox {
    pub(super) fn new(connection: &Connection, traffic: Arc<Traffic>) -> ShmOutbox {
        ShmOutbox {
            producer: Producer::new(connection.mine.clone(), connection.theirs.clone()),
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

    /// Writes as much of a send as there is room for.
    pub(super) fn write(&mut self, connection: &Arc<Connection>, sending: &mut ShmSend) -> Result<Written, ProtocolViolation> {
        let written = self.write_some(connection, sending);
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

    /// Whether a payload is lent if it can be.
    fn prefers_lending(&self) -> bool {
        match self.traffic.lending {
            KernelCopyPolicy::Never => false,
            KernelCopyPolicy::Crowded => self.traffic.streams.load(Ordering::Relaxed) > usize::from(self.streams),
            KernelCopyPolicy::Always => true,
        }
    }

    fn write_some(&mut self, connection: &Arc<Connection>, sending: &mut ShmSend) -> Result<Written, ProtocolViolation> {
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
            let done = match self.lend(connection, &access, &payload, sending)? {
                Some(done) => done,
                None => self.copy(&access, payload.len, sending)?,
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
        if payload.len <= SMALL {
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
        if block.is_none() && !(connection.lends.load(Ordering::Relaxed) && self.prefers_lending()) {
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
        exported_part::encode(slot, id, list.into_iter(), &mut self.words);
        let words = &self.words;
        self.producer.put(RecordKind::Loan, words.len(), |segment, at| segment.write(at, words));
        sending.covered += covered;
        Ok(Some(true))
    }

    /// Copies the next piece into the ring. False: there is no room.
    fn copy(&mut self, access: &ReadAccess<'_>, len: usize, sending: &mut ShmSend) -> Result<bool, ProtocolViolation> {
        let (skip, now) = (sending.covered, PIECE.min(len - sending.covered));
        if !self.has_room(now)? {
            return Ok(false);
        }
        self.producer.put(RecordKind::Payload, now, |segment, at| segment.write_memory(at, access, skip, now));
        sending.covered += now;
        Ok(true)
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
            self.producer.put(RecordKind::Forget, words.len(), |segment, at| segment.write(at, &words));
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
        self.loans.has_finished(connection)
            || self.pending.is_some()
                && match self.needs {
                    Needs::Slot => self.loans.free_slot().is_some(),
                    // `write` reports a protocol violation.
                    Needs::Room(len) => self.producer.has_room(len).unwrap_or(true),
                }
    }

    /// Ends all loans of a link that is closed; those that the peer still reads come back.
    pub(super) fn end(&mut self, connection: &Arc<Connection>) -> Vec<Lingering> {
        self.pending = None;
        self.set_streams(false);
        self.loans.end(connection)
    }

    /// A send or a loan is not finished.
    pub(super) fn is_waiting(&self) -> bool {
        self.pending.is_some() || !self.loans.is_empty()
    }
}
