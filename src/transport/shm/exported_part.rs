//! A part of a payload that the peer has lent: its record in the ring, and how its bytes are copied.

use std::collections::{HashMap, VecDeque};
use std::io;

use super::super::{PayloadStatus, closed_by_peer};
use super::blocks;
use super::connection::Connection;
use super::ring::{MAX_BODY, ProtocolViolation};
use super::segment::{CLOSED, SLOTS, see};
use super::sys::{self, MAX_PIECES, RemoteIoVec};
use crate::memory::{Slice, shared::Mapping};
use crate::sync::atomic::{Ordering, fence};

pub(super) struct ExportedPart {
    pub slot: usize,
    pub id: u64,
    pub pieces: VecDeque<ExportedPiece>,
}

#[derive(Clone, Copy)]
pub(super) struct ExportedPiece {
    /// The block that the address is an offset in; 0 for the memory of the process.
    pub block: u64,
    far: RemoteIoVec,
}

/// The outcome of copying some of a part.
pub(super) enum PartCopy {
    Bytes(usize),
    Failed(PayloadStatus),
}

impl ExportedPart {
    /// Decodes the record of a loan: slot, id, and pieces of block, address and length.
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

    pub(super) fn len(&self) -> Option<usize> {
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
    pub(super) fn copy(
        &mut self,
        connection: &Connection,
        blocks: &HashMap<u64, Mapping>,
        target: &Slice,
        skip: usize,
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
                block => Ok(blocks.get(&block).is_some_and(|mapping| blocks::read(mapping, &far, &access, skip))),
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

/// Encodes the record of a loan: what [`ExportedPart::parse`] decodes.
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
