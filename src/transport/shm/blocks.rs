//! Copies out of a peer's shared blocks.

#![allow(unsafe_code)]

use super::sys::RemoteIoVec;
use crate::memory::{CopyPath, WriteAccess, shared::Mapping};

/// Blocks of a peer that are mapped at a time. The peer gives at most half as many, since some that are gone may still be
/// mapped.
pub(super) const MAX_BLOCKS: usize = 256;
/// Bytes of a peer's blocks that are mapped at a time: a sparse block may be longer than all memory, and cost only
/// addresses. The peer gives at most half as many.
pub(super) const MAX_MAPPED: usize = 1 << 40;

/// Copies pieces of a peer's block into local memory, from offset `skip` on; false when a piece does not lie in the block.
pub(super) fn read(mapping: &Mapping, far: &[RemoteIoVec], target: &WriteAccess<'_>, skip: usize, path: CopyPath) -> bool {
    let inside = |piece: &RemoteIoVec| piece.address.checked_add(piece.len).is_some_and(|end| end <= mapping.len() as u64);
    if !far.iter().all(inside) {
        return false;
    }
    let mut near = smallvec::SmallVec::new();
    target.pieces(skip, usize::MAX, &mut near);
    let mut near = near.into_iter();
    let Some(mut to) = near.next() else { return far.is_empty() };
    for piece in far {
        let (mut address, mut left) = (piece.address as usize, piece.len as usize);
        while left > 0 {
            if to.iov_len == 0 {
                let Some(next) = near.next() else { return false };
                to = next;
                continue;
            }
            let len = left.min(to.iov_len);
            let from = mapping.address().wrapping_add(address);
            // SAFETY: the source lies in the mapping, as was checked, and the target in memory that the access keeps valid for
            // writes, and exclusive. The peer may write the source meanwhile: any bytes are valid, and if it withdrew the loan,
            // they are discarded.
            unsafe { path.copy(from, to.iov_base.cast::<u8>(), len) };
            address += len;
            left -= len;
            to.iov_base = to.iov_base.wrapping_byte_add(len);
            to.iov_len -= len;
        }
    }
    true
}
