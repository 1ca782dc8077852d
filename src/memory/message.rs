//! The bytes of large messages, in buffers that are used again: fresh ones cost a page fault for every 4 KiB, or the zeroing.

use std::ops::Deref;

use parking_lot::Mutex;

/// So many buffers wait to be used again, in the whole process.
const KEPT: usize = 2;
/// Smaller ones are the allocator's business, and larger ones are not worth the memory.
const WORTH_KEEPING: std::ops::RangeInclusive<usize> = 32 << 10..=1 << 20;

static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// A buffer of this length for what is to arrive; it holds zeros, or what an earlier message has left.
pub(super) fn buffer(len: usize) -> Vec<u8> {
    let spare = if WORTH_KEEPING.contains(&len) {
        let mut spare = SPARE.lock();
        let fits = spare.iter().position(|buffer| buffer.len() >= len);
        fits.map(|at| spare.swap_remove(at))
    } else {
        None
    };
    match spare {
        Some(mut buffer) => {
            buffer.truncate(len);
            buffer
        }
        // Large ones come from the system, zeroed, and are not touched before they are used.
        None => vec![0; len],
    }
}

pub(super) fn keep(buffer: Vec<u8>) {
    if WORTH_KEEPING.contains(&buffer.len()) && buffer.capacity() <= 2 * buffer.len() {
        let mut spare = SPARE.lock();
        if spare.len() < KEPT {
            spare.push(buffer);
        }
    }
}

/// A message that has arrived, whole.
#[derive(Debug)]
pub(crate) struct Message(pub(super) Vec<u8>);

impl Deref for Message {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        keep(std::mem::take(&mut self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_as_long_as_it_should_be() {
        for len in [0, 1, 32 << 10, 100_000, 50_000, 100_000, 1 << 20, (1 << 20) + 1] {
            let buffer = buffer(len);
            assert_eq!(buffer.len(), len);
            keep(buffer);
        }
    }
}
