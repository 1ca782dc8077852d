//! Copies of bytes, through the caches or past them.

/// How the bytes of a transfer are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyPath {
    /// As the C library does it, mostly: see `crate::copy`.
    Cached,
    /// Past the caches: what is longer than they are would push itself out of them again, and each line would be read before it is
    /// overwritten. Also into memory that another processor reads next, see `transport/shm/ring_path.rs`.
    Streaming,
}

/// From this length on. Out of memory of `engine.alloc` 16 MiB were 1.8 to 2.5 times as fast, 256 MiB 2.4 to 3.7 times; within a
/// process 16 MiB 1.0 to 1.4 times, and 256 MiB 1.4 to 1.7 times (two processors that share a cache of 32 MiB).
const STREAM_FROM: usize = 16 << 20;

impl CopyPath {
    /// Whether there are stores that go past the caches.
    pub(crate) const STREAMS: bool = cfg!(all(target_arch = "x86_64", not(miri)));

    /// The path for the parts of a transfer of `total` bytes.
    pub(crate) fn for_transfer(total: usize) -> CopyPath {
        if total >= STREAM_FROM { CopyPath::Streaming } else { CopyPath::Cached }
    }

    /// Copies `len` bytes.
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`].
    pub(crate) unsafe fn copy(self, from: *const u8, to: *mut u8, len: usize) {
        match self {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: as the caller promises; every processor of this kind has the instructions.
            CopyPath::Streaming => unsafe { stream(from, to, len) },
            // SAFETY: as the caller promises.
            _ => unsafe { crate::copy::bytes(from, to, len) },
        }
    }
}

/// Copies by stores that go past the caches, a line of 64 bytes at a time. Other threads that learn of the copy see it whole.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "sse2")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;
    const LINE: usize = 64;
    const WORD: usize = size_of::<__m128i>();
    let head = to.align_offset(LINE).min(len);
    // SAFETY: `head` is no more than the caller's `len`.
    unsafe { copy_nonoverlapping(from, to, head) };
    let lines = (len - head) / LINE;
    for at in (0..lines * LINE).step_by(LINE).map(|at| head + at) {
        // A line is read whole before it is written: a load behind a store whose address has the same last 12 bits waits for it,
        // and the memory of a long `Vec` begins 16 bytes behind that of `engine.alloc`, by these bits.
        let words = [0, 1, 2, 3].map(|word| {
            // SAFETY: the line at `at` is within the caller's `len`, so it may be read.
            unsafe { _mm_loadu_si128(from.wrapping_add(at + word * WORD).cast()) }
        });
        for (word, value) in words.into_iter().enumerate() {
            // SAFETY: as above, for writing; the address is a multiple of 16 bytes, since `head` leads to one of 64.
            unsafe { _mm_stream_si128(to.wrapping_add(at + word * WORD).cast(), value) };
        }
    }
    // These stores take no part in the order of others, so what is stored next must not be seen before them.
    #[allow(unused_unsafe, reason = "it is safe in later versions")]
    // SAFETY: it accesses no memory.
    unsafe {
        _mm_sfence();
    }
    let done = head + lines * LINE;
    // SAFETY: the rest of the caller's `len`.
    unsafe { copy_nonoverlapping(from.wrapping_add(done), to.wrapping_add(done), len - done) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_alike_on_both_paths_whatever_their_alignment() {
        let source: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        for path in [CopyPath::Cached, CopyPath::Streaming] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (5, 63), (17, 40)] {
                for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 900] {
                    let mut target = vec![0xee; 1000];
                    // SAFETY: both vectors are of 1,000 bytes, which offset and length do not exceed, and do not overlap.
                    unsafe { path.copy(source.as_ptr().wrapping_add(from), target.as_mut_ptr().wrapping_add(to), len) };
                    assert_eq!(target[to..to + len], source[from..from + len], "{path:?} {from} {to} {len}");
                    assert!(
                        target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xee),
                        "{path:?} {from} {to} {len}"
                    );
                }
            }
        }
    }
}
