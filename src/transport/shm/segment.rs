//! The shared-memory segment of one side of a link: a ring with what the side sends, and words that report its progress.
//!
//! Each side writes its own segment only; the kernel permits it only to read the other's. So the worst that a broken or hostile
//! peer can do is to show invalid data: what is read is copied once, and the copy is checked.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::copy;
use crate::memory::{CopyPath, ReadAccess, WriteAccess, shared};

/// Bytes of a ring. Several messages of the eager limit fit; what is larger than a quarter of the ring is split.
pub(super) const RING: u64 = 128 << 10;
/// Loans that a side may have at a time; each has one record.
pub(super) const SLOTS: usize = 16;
/// Offset of the ring: behind the words, at the next page.
const HEAD: usize = 4096;
pub(super) const LEN: usize = HEAD + RING as usize;

/// Takes the place of a loan's id when the link is closed.
pub(super) const CLOSED: u64 = u64::MAX;

/// Shorter pieces of memory are written through the caches in any case: each would wait for its stores, and shares lines with
/// others.
const LEAST_PAST_CACHES: usize = 512;

/// A word with a cache line of its own.
#[repr(C, align(64))]
pub(super) struct CacheLine(pub AtomicU64);

/// The words of a segment, written by its owner. Zero at first.
#[repr(C)]
pub(super) struct Words {
    /// How many bytes this side has read from the other's ring.
    pub taken: CacheLine,
    /// Odd while this side sleeps: a peer that has something for it then rings, once for each odd value.
    pub asleep: CacheLine,
    /// Not 0 while this side waits for room in its ring, or for the end of a loan: the peer rings for these, too.
    pub waiting: CacheLine,
    /// What the other side may read, by slot: the id of the loan, 0, or [`CLOSED`].
    pub granted: [AtomicU64; SLOTS],
    /// The loan of the other side that this side is reading at this moment, by slot, or 0.
    pub reading: [AtomicU64; SLOTS],
    /// The loan of the other side that this side has finished last, by slot.
    pub finished: [AtomicU64; SLOTS],
    /// By size class, two bits: this side would rather have payloads lent than through the ring; and written into the ring within
    /// the caches than past them.
    pub wanted: CacheLine,
}

const _: () = assert!(size_of::<Words>() <= HEAD);

/// Loads a word of the other side's segment with acquire ordering. For atomics in read-only memory std permits only `Relaxed`
/// loads, so a fence follows.
pub(super) fn see(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

pub(super) struct SharedSegment {
    mapping: shared::Mapping,
}

impl SharedSegment {
    /// Creates this side's own, with the descriptor by which the other side maps it.
    pub(super) fn create() -> io::Result<(OwnedFd, Arc<SharedSegment>)> {
        let (fd, mapping) = shared::create(LEN, true)?;
        Ok((fd, Arc::new(SharedSegment { mapping })))
    }

    /// Maps the other side's.
    pub(super) fn attach(fd: BorrowedFd<'_>) -> io::Result<Arc<SharedSegment>> {
        if size_of::<usize>() < size_of::<u64>() {
            // On such a platform an atomic load of 64 bits may be implemented as a write.
            return Err(io::Error::new(io::ErrorKind::Unsupported, "words of 64 bits can't be read from read-only memory here"));
        }
        Ok(Arc::new(SharedSegment { mapping: shared::attach(fd, LEN)? }))
    }

    pub(super) fn words(&self) -> &Words {
        let words = self.mapping.address().cast::<Words>();
        // SAFETY: the mapping begins on a page, is longer than `Words`, and lives as long as `self`. All of it is atomic, so it
        // may change at any time; the other side's words are only loaded, `Relaxed`, which read-only memory permits.
        unsafe { &*words }
    }

    /// The word at a position of the ring, which is a multiple of 8.
    pub(super) fn header(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8));
        let word = self.address_of(at).cast::<AtomicU64>();
        // SAFETY: the position lies in the mapping, aligned to 8 bytes, and a word of it does too, because the ring's length is
        // a multiple of 8. Headers are accessed as atomics; bodies do not lie where the other side reads a header.
        unsafe { &*word }
    }

    fn address_of(&self, at: u64) -> *mut u8 {
        self.mapping.address().wrapping_add(HEAD + (at % RING) as usize)
    }

    /// The ranges that hold `len` bytes from `at` on: the second is empty unless they wrap around the ring's end.
    #[inline]
    fn ranges(&self, at: u64, len: usize) -> [(*mut u8, usize); 2] {
        assert!(len as u64 <= RING);
        let first = len.min((RING - at % RING) as usize);
        [(self.address_of(at), first), (self.address_of(0), len - first)]
    }

    /// Writes into this side's own ring.
    pub(super) fn write(&self, at: u64, bytes: &[u8], path: CopyPath) {
        let mut from = bytes;
        for (address, len) in self.ranges(at, bytes.len()) {
            let (now, rest) = from.split_at(len);
            // SAFETY: the range lies in the mapping, which is this side's own and writable, and `now` is as long. The other
            // side does not read there before the header is written.
            unsafe { path.copy(now.as_ptr(), address, len) };
            from = rest;
        }
    }

    /// Writes `len` bytes of exposed memory, from offset `skip` on, into this side's own ring.
    pub(super) fn write_memory(&self, at: u64, access: &ReadAccess<'_>, skip: usize, len: usize, path: CopyPath) {
        let (mut at, mut left) = (at, len);
        for piece in access.range(skip, len) {
            let mut source = piece.iov_base.cast::<u8>().cast_const();
            let path = if piece.iov_len < LEAST_PAST_CACHES { CopyPath::Cached } else { path };
            for (address, len) in self.ranges(at, piece.iov_len) {
                // SAFETY: the range is this side's own, as above; the source is memory that the access keeps valid for reads,
                // and at least as long.
                unsafe { path.copy(source, address, len) };
                source = source.wrapping_add(len);
                at += len as u64;
                left -= len;
            }
        }
        assert_eq!(left, 0, "the memory is shorter than what is to be written");
    }

    /// Copies out of the other side's ring, whose content is untrusted and may change at any time.
    pub(super) fn read(&self, at: u64, out: &mut [u8]) {
        let mut out = out;
        for (address, len) in self.ranges(at, out.len()) {
            let (now, rest) = std::mem::take(&mut out).split_at_mut(len);
            // SAFETY: the range lies in the mapping, and `now` is as long. An honest peer does not write there now; whatever a
            // hostile one writes is valid as bytes, and the copy is checked.
            unsafe { copy::bytes(address, now.as_mut_ptr(), len) };
            out = rest;
        }
    }

    /// Copies out of a ring into exposed memory, from offset `skip` on.
    pub(super) fn read_memory(&self, at: u64, access: &WriteAccess<'_>, skip: usize, len: usize) {
        let (mut at, mut left) = (at, len);
        for piece in access.range(skip, len) {
            let mut target = piece.iov_base.cast::<u8>();
            for (address, len) in self.ranges(at, piece.iov_len) {
                // SAFETY: as above for the range; the target is memory that the access keeps valid for writes, exclusively, and
                // at least as long.
                unsafe { copy::bytes(address, target, len) };
                target = target.wrapping_add(len);
                at += len as u64;
                left -= len;
            }
        }
        assert_eq!(left, 0, "the memory is shorter than what is to be read");
    }
}
