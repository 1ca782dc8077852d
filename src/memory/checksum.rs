//! Checksums of exposed memory.

use super::{IoVec, ReadAccess, WriteAccess};

/// Bytes copied out at a time, so that no reference to the memory is made. The copy fits into the L1 cache.
const STEP: usize = 4 << 10;

impl ReadAccess<'_> {
    /// Continues the checksum `sum` with `len` bytes from `skip` on.
    pub(crate) fn checksum(&self, skip: usize, len: usize, sum: u32) -> u32 {
        of_pieces(self.range(skip, len), sum)
    }
}

impl WriteAccess<'_> {
    /// As [`ReadAccess::checksum`].
    pub(crate) fn checksum(&self, skip: usize, len: usize, sum: u32) -> u32 {
        of_pieces(self.range(skip, len), sum)
    }
}

/// CRC-32C of the pieces, continued from `sum`. The pieces are those of an access that is held.
fn of_pieces(pieces: impl Iterator<Item = IoVec>, mut sum: u32) -> u32 {
    let mut copy = [0u8; STEP];
    for piece in pieces {
        let mut at = 0;
        while at < piece.iov_len {
            let step = STEP.min(piece.iov_len - at);
            let source = piece.iov_base.cast::<u8>().wrapping_add(at);
            // SAFETY: `step` bytes from there on lie in the piece, in a segment that is valid for reads, and that no thread of
            // this process writes while the access lasts; the copy is a local array of at least that length.
            unsafe { crate::copy::bytes(source, copy.as_mut_ptr(), step) };
            sum = crc32c::crc32c_append(sum, &copy[..step]);
            at += step;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::super::{Region, Slice};

    #[test]
    fn checksum_of_several_segments_is_that_of_their_concatenation() {
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i * 7) as u8).collect();
        let mut parts = [bytes[..5].to_vec(), Vec::new(), bytes[5..9000].to_vec(), bytes[9000..].to_vec()];
        // SAFETY: the test leaves the parts untouched while the region is used.
        let region = unsafe { Region::new(parts.iter_mut().map(|part| (part.as_mut_ptr(), part.len()))) };
        let slice = Slice::whole(&region).part(3, 19_000).unwrap();
        for (skip, len) in [(0, 0), (0, 19_000), (1, 4096), (2, 4097), (5000, 14_000), (19_000, 0)] {
            let expected = crc32c::crc32c_append(9, &bytes[3 + skip..3 + skip + len]);
            assert_eq!(slice.read_access().unwrap().checksum(skip, len, 9), expected);
            assert_eq!(slice.write_access().unwrap().checksum(skip, len, 9), expected);
        }
    }
}
