//! Bytes determined by a seed and their position, so that wrong, missing and misplaced ones are detected.

use crate::support::{Random, pattern};

/// As in [`pattern`]: no power of two, so that a mistake by one does not hit the same bytes.
const BLOCK: usize = 4099;

/// The bytes from `offset` on. Each block begins with bytes derived from its number, so no two blocks are the same.
pub fn content(seed: u64, offset: usize, len: usize) -> Vec<u8> {
    let block = pattern(seed, BLOCK);
    let mut bytes = Vec::with_capacity(len + 2 * BLOCK);
    let first = offset / BLOCK;
    let mut number = first;
    while number * BLOCK < offset + len {
        let begin = bytes.len();
        bytes.extend_from_slice(&block);
        bytes[begin..begin + 8].copy_from_slice(&Random(seed ^ number as u64).next().to_le_bytes());
        number += 1;
    }
    let skip = offset - first * BLOCK;
    bytes.drain(..skip);
    bytes.truncate(len);
    bytes
}

/// Text of this length.
pub fn text(seed: u64, len: usize) -> String {
    let mut bytes = content(seed, 0, len);
    bytes.iter_mut().for_each(|byte| *byte &= 0x7f);
    String::from_utf8(bytes).unwrap()
}

/// Describes the first mismatch in bytes that should be those from `offset` on.
pub fn mistake(bytes: &[u8], seed: u64, offset: usize) -> Option<String> {
    let right = content(seed, offset, bytes.len());
    if bytes == right {
        return None;
    }
    let wrong: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != right[at]).collect();
    let (first, last) = (wrong[0], wrong[wrong.len() - 1]);
    let zeros = wrong.iter().filter(|&&at| bytes[at] == 0).count();
    let found = &bytes[first..bytes.len().min(first + 8)];
    Some(format!(
        "{} of {} bytes are wrong, from {first} to {last}, {zeros} of them zero; content {seed:x} from {offset}; found {found:?}",
        wrong.len(),
        bytes.len()
    ))
}

#[test]
fn any_part_matches_the_whole() {
    let whole = content(7, 0, 20_000);
    for (offset, len) in [(0, 0), (1, 1), (4098, 3), (4099, 4099), (5000, 15_000), (8198, 1)] {
        assert_eq!(content(7, offset, len), whole[offset..offset + len], "{offset}, {len}");
    }
    assert!(mistake(&whole[1..], 7, 1).is_none());
    assert!(mistake(&whole[1..], 7, 2).is_some());
    assert!(mistake(&whole, 8, 0).is_some());
    assert_eq!(text(7, 5000).len(), 5000);
}
