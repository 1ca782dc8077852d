//! CRC-32C of frames. Their heads are of some fifty bytes, for which the crate `crc32c`, made for long inputs, takes three times as
//! many instructions, and waits for one byte after the other where they are not aligned.

#![allow(unsafe_code)]

/// Longer inputs are left to the crate, which computes three parts of them at a time.
#[cfg(target_arch = "x86_64")]
const SHORT: usize = 192;

/// The CRC-32C of some bytes.
#[inline]
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() <= SHORT && is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions that it is compiled for, as was just found.
        return unsafe { short(bytes) };
    }
    crc32c::crc32c(bytes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn short(bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64};
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(u64::from(u32::MAX), |sum, word| _mm_crc32_u64(sum, u64::from_le_bytes(*word)));
    let (half, rest) = rest.as_chunks::<4>();
    let sum = half.iter().fold(sum as u32, |sum, word| _mm_crc32_u32(sum, u32::from_le_bytes(*word)));
    !rest.iter().fold(sum, |sum, byte| _mm_crc32_u8(sum, *byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_all_lengths_are_those_of_the_crate() {
        let bytes: Vec<u8> = (0..400u32).map(|i| ((i * i) >> 3) as u8).collect();
        for begin in 0..9 {
            for end in begin..bytes.len() {
                assert_eq!(crc32c(&bytes[begin..end]), crc32c::crc32c(&bytes[begin..end]), "{begin}..{end}");
            }
        }
        assert_eq!(crc32c(b"123456789"), 0xe306_9283, "the check value of CRC-32C");
    }
}
