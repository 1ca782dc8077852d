//! What one side of a link shows the other: a ring of what it says, and words that say how far it is.
//!
//! Each side writes its own segment only, and reads the other's; the system does not let it write there. So the worst that a
//! broken or hostile peer can do is to show nonsense, and whatever is read is copied once and checked.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::memory::{ReadAccess, WriteAccess, shared};

/// Bytes of a ring. Messages of up to the eager limit fit several times; what is larger than a quarter goes in pieces.
pub(super) const RING: u64 = 128 << 10;
/// Memory that may be lent to the other side at a time, in pieces of one record each.
pub(super) const SLOTS: usize = 16;
/// Where the ring begins: behind the words, on a page of its own.
const HEAD: usize = 4096;
pub(super) const LEN: usize = HEAD + RING as usize;

/// Stands for the number of a loan when the link is closed.
pub(super) const CLOSED: u64 = u64::MAX;

/// A word with a cache line of its own.
#[repr(C, align(64))]
pub(super) struct CacheLine(pub AtomicU64);

/// The words of a segment, written by its owner. Zero at first.
#[repr(C)]
pub(super) struct Words {
    /// How much this side has taken out of the other's ring.
    pub taken: CacheLine,
    /// Odd while this side sleeps: whoever has something for it then rings, once for each number.
    pub asleep: CacheLine,
    /// Not 0 while this side waits for room in its ring, or for what it has lent: also that is worth ringing for.
    pub waiting: CacheLine,
    /// What the other side may read, by slot: the number of the loan, or 0, or [`CLOSED`].
    pub granted: [AtomicU64; SLOTS],
    /// Which loan of the other side this side is reading at this moment, by slot, or 0.
    pub reading: [AtomicU64; SLOTS],
    /// Which loan of the other side this side has last done with, by slot.
    pub finished: [AtomicU64; SLOTS],
    /// On which processor this side was when it last rang; one more than its number, and 0 for not known.
    pub processor: CacheLine,
}

const _: () = assert!(size_of::<Words>() <= HEAD);

/// What a word of the other side's segment says, and all that the other side has written before it. For atomics in memory that
/// can only be read, std promises loads that are `Relaxed`, and no others.
pub(super) fn see(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

pub(super) struct SharedSegment {
    mapping: shared::Mapping,
}

impl SharedSegment {
    /// This side's own, with the descriptor by which the other side maps it.
    pub(super) fn create() -> io::Result<(OwnedFd, Arc<SharedSegment>)> {
        let (fd, mapping) = shared::create(LEN, true)?;
        Ok((fd, Arc::new(SharedSegment { mapping })))
    }

    /// The other side's.
    pub(super) fn attach(fd: BorrowedFd<'_>) -> io::Result<Arc<SharedSegment>> {
        if size_of::<usize>() < size_of::<u64>() {
            // There a load of a word may be done by writing it.
            return Err(io::Error::new(io::ErrorKind::Unsupported, "words of 64 bits can't be read from read-only memory here"));
        }
        Ok(Arc::new(SharedSegment { mapping: shared::attach(fd, LEN)? }))
    }

    pub(super) fn words(&self) -> &Words {
        let words = self.mapping.address().cast::<Words>();
        // SAFETY: the mapping begins on a page, is longer than `Words`, and lives as long as `self`. All of it is atomic, so it
        // may change at any time; the other side's is only loaded from, `Relaxed`, which read-only memory allows.
        unsafe { &*words }
    }

    /// The word at a place of the ring, which is a multiple of 8.
    pub(super) fn header(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8));
        let word = self.place(at).cast::<AtomicU64>();
        // SAFETY: the place lies in the mapping, aligned to 8 bytes, and a word of it does too, because the ring's length is a
        // multiple of 8. Headers are accessed as atomics; bodies are never where the other side looks for a header.
        unsafe { &*word }
    }

    fn place(&self, at: u64) -> *mut u8 {
        self.mapping.address().wrapping_add(HEAD + (at % RING) as usize)
    }

    /// The stretches that `len` bytes from `at` on lie in: two, when they go over the ring's end.
    fn stretches(&self, at: u64, len: usize) -> [(*mut u8, usize); 2] {
        assert!(len as u64 <= RING);
        let first = len.min((RING - at % RING) as usize);
        [(self.place(at), first), (self.place(0), len - first)]
    }

    /// Writes into this side's own ring.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        let mut from = bytes;
        for (place, len) in self.stretches(at, bytes.len()) {
            let (now, rest) = from.split_at(len);
            // SAFETY: the stretch lies in the mapping, which is this side's own and writable, and `now` is as long. The other
            // side does not look there before the header says so.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), place, len) };
            from = rest;
        }
    }

    /// Writes `len` bytes of exposed memory, from `skip` on, into this side's own ring.
    pub(super) fn write_memory(&self, at: u64, access: &ReadAccess<'_>, skip: usize, len: usize) {
        let mut pieces = smallvec::SmallVec::new();
        access.pieces(skip, usize::MAX, &mut pieces);
        let (mut at, mut left) = (at, len);
        for piece in pieces {
            let mut source = piece.iov_base.cast::<u8>().cast_const();
            for (place, len) in self.stretches(at, piece.iov_len.min(left)) {
                // SAFETY: the stretch is this side's own, as above; the source is memory that the access keeps valid for reads,
                // and at least as long.
                unsafe { std::ptr::copy_nonoverlapping(source, place, len) };
                source = source.wrapping_add(len);
                at += len as u64;
                left -= len;
            }
        }
        assert_eq!(left, 0, "the memory is shorter than what is to be written");
    }

    /// Copies out of a ring; of the other side's, in which anything may stand, and change meanwhile.
    pub(super) fn read(&self, at: u64, out: &mut [u8]) {
        let mut out = out;
        for (place, len) in self.stretches(at, out.len()) {
            let (now, rest) = std::mem::take(&mut out).split_at_mut(len);
            // SAFETY: the stretch lies in the mapping, and `now` is as long. An honest peer does not write there now; what a
            // dishonest one makes of it are bytes all the same, and they are checked in the copy.
            unsafe { std::ptr::copy_nonoverlapping(place, now.as_mut_ptr(), len) };
            out = rest;
        }
    }

    /// Copies out of a ring into exposed memory, from `skip` on.
    pub(super) fn read_memory(&self, at: u64, access: &WriteAccess<'_>, skip: usize, len: usize) {
        let mut pieces = smallvec::SmallVec::new();
        access.pieces(skip, usize::MAX, &mut pieces);
        let (mut at, mut left) = (at, len);
        for piece in pieces {
            let mut target = piece.iov_base.cast::<u8>();
            for (place, len) in self.stretches(at, piece.iov_len.min(left)) {
                // SAFETY: as above for the stretch; the target is memory that the access keeps valid for writes, and others out
                // of, and at least as long.
                unsafe { std::ptr::copy_nonoverlapping(place, target, len) };
                target = target.wrapping_add(len);
                at += len as u64;
                left -= len;
            }
        }
        assert_eq!(left, 0, "the memory is shorter than what is to be read");
    }
}
