//! Copies of bytes that stay off a slow path of some processors.
//!
//! From some 2 KiB up to the size of the L2 cache, the C library may copy by one instruction, `rep movsb`. AMD's Zen 3 and Zen 4
//! execute it a byte at a time where the target lies 1 to 31 bytes behind the source (1 to 15 on some machines), by the last 12 bits
//! of their addresses: 64 KiB then take 19 to 22 µs in place of 1.1 to 1.3 µs (measured with glibc 2.36; newer ones avoid the
//! instruction on these processors). Such addresses are common here: bodies lie behind heads of a few bytes, those of a ring 8 bytes
//! behind the beginning of a cache line, and those of a large allocation 16 bytes behind the beginning of a page. Copies between them
//! are made in pieces, which take no longer than others.
//! (The kernel's own copies are as slow there, whatever their length.)

#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::copy_nonoverlapping;

/// The C library copies so many bytes by other instructions.
const PIECE: usize = 2 << 10;
/// What the processor compares addresses by.
pub(crate) const PAGE: usize = 4 << 10;
/// How far behind the source a target lies that is slow to copy to.
const SLOW: Range<usize> = 1..32;

/// How far behind the source the target lies, by the last bits of their addresses.
#[inline]
pub(crate) fn distance(from: usize, to: usize) -> usize {
    to.wrapping_sub(from) % PAGE
}

/// Whether the processor copies a byte at a time between such addresses.
#[inline]
pub(crate) fn is_slow(from: usize, to: usize) -> bool {
    cfg!(target_arch = "x86_64") && SLOW.contains(&distance(from, to))
}

/// Copies `len` bytes.
///
/// # Safety
/// As for [`copy_nonoverlapping`].
#[inline]
pub(crate) unsafe fn bytes(from: *const u8, to: *mut u8, len: usize) {
    if len <= PIECE || !is_slow(from.addr(), to.addr()) {
        // SAFETY: as the caller promises.
        return unsafe { copy_nonoverlapping(from, to, len) };
    }
    for at in (0..len).step_by(PIECE) {
        // SAFETY: the piece is a part of what the caller promises.
        unsafe { copy_nonoverlapping(from.wrapping_add(at), to.wrapping_add(at), PIECE.min(len - at)) };
    }
}

/// Appends bytes.
#[inline]
pub(crate) fn append(bytes: &[u8], out: &mut Vec<u8>) {
    if bytes.len() <= PIECE {
        return out.extend_from_slice(bytes);
    }
    out.reserve(bytes.len());
    let to = out.as_ptr().addr() + out.len();
    let piece = if is_slow(bytes.as_ptr().addr(), to) { PIECE } else { bytes.len() };
    bytes.chunks(piece).for_each(|piece| out.extend_from_slice(piece));
}

/// Copies `bytes` to the beginning of `place`, and returns the rest of that; `None` where it is shorter.
#[inline]
pub(crate) fn into<'p>(bytes: &[u8], place: &'p mut [u8]) -> Option<&'p mut [u8]> {
    let (place, rest) = place.split_at_mut_checked(bytes.len())?;
    // SAFETY: both slices are as long, and a shared and an exclusive one do not overlap.
    unsafe { self::bytes(bytes.as_ptr(), place.as_mut_ptr(), bytes.len()) };
    Some(rest)
}

/// A copy of some bytes that is worth making here, since they are long.
#[inline]
pub(crate) fn of_long(bytes: &[u8]) -> Option<Vec<u8>> {
    (bytes.len() > PIECE).then(|| {
        let mut copy = Vec::new();
        append(bytes, &mut copy);
        copy
    })
}

/// As [`of_long`], for a text.
#[inline]
pub(crate) fn of_long_text(text: &str) -> Option<String> {
    // SAFETY: these are the bytes of a text.
    of_long(text.as_bytes()).map(|copy| unsafe { String::from_utf8_unchecked(copy) })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Miri takes minutes for more.
    const LEN: usize = if cfg!(miri) { 5 << 10 } else { 64 << 10 };

    /// Memory for `LEN` bytes at any distance.
    fn memory() -> Vec<u8> {
        vec![0xee; LEN + 2 * PAGE]
    }

    /// Where in `memory` to begin, so that it lies so far behind the source.
    fn begin(memory: *const u8, source: &[u8], behind: usize) -> usize {
        distance(memory.addr(), source.as_ptr().addr() + behind)
    }

    #[test]
    fn bytes_are_copied_alike_wherever_the_target_lies() {
        let source: Vec<u8> = (0..LEN as u32).map(|number| (number * 7 + number / 251) as u8).collect();
        let distances: &[usize] = if cfg!(miri) { &[1, 32] } else { &[0, 1, 8, 15, 16, 31, 32, 100, PAGE - 1] };
        for behind in distances.iter().copied() {
            for len in [0, 1, 100, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 5, LEN] {
                let (source, mut target) = (&source[..len], memory());
                let at = begin(target.as_ptr(), source, behind);
                let slow = is_slow(source.as_ptr().addr(), target[at..].as_ptr().addr());
                assert_eq!(slow, cfg!(target_arch = "x86_64") && (1..=31).contains(&behind));
                // SAFETY: both vectors are longer than offset and length together, and do not overlap.
                unsafe { bytes(source.as_ptr(), target.as_mut_ptr().wrapping_add(at), len) };
                assert_eq!(&target[at..at + len], source, "{behind} {len}");
                assert!(target[..at].iter().chain(&target[at + len..]).all(|byte| *byte == 0xee), "{behind} {len}");
                let mut appended = Vec::with_capacity(LEN + 2 * PAGE);
                let at = begin(appended.as_ptr(), source, behind);
                appended.resize(at, 7);
                append(source, &mut appended);
                assert_eq!(&appended[at..], source, "{behind} {len}");
            }
        }
    }

    /// The fastest of many copies, so that a busy machine makes no difference.
    fn fastest(mut once: impl FnMut()) -> Duration {
        let time = |_| {
            let begun = Instant::now();
            once();
            begun.elapsed()
        };
        (0..500).map(time).min().unwrap_or_default()
    }

    /// On a processor, or with a C library, without the slow path this holds anyway.
    #[test]
    #[cfg_attr(miri, ignore = "it measures time")]
    fn copies_take_as_long_wherever_the_target_lies() {
        let (source, mut target) = (vec![1; LEN], memory());
        let mut copied = |behind: usize| {
            let at = begin(target.as_ptr(), &source, behind);
            // SAFETY: the target is longer than offset and length together, and no part of the source.
            fastest(|| unsafe { bytes(source.as_ptr(), target.as_mut_ptr().wrapping_add(at), LEN) })
        };
        // Many distances, since processors differ in which are slow.
        let apart = copied(256);
        let slowest = (1..128).chain([PAGE - 31, PAGE - 1]).map(&mut copied).max().unwrap_or_default();
        // On the slow path it is 17 times as long.
        assert!(slowest < 8 * apart, "{apart:?}, {slowest:?}");
    }
}
