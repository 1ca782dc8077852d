//! The bytes of large messages, in buffers that are used again: fresh ones cost a page fault for every 4 KiB, or the zeroing.

use std::ops::Deref;

use parking_lot::Mutex;

use super::shared::Mapping;

/// So many buffers wait to be used again, in the whole process.
const KEPT: usize = 2;
/// Smaller ones are the allocator's business, and larger ones are not worth the memory.
const WORTH_KEEPING: std::ops::RangeInclusive<usize> = 32 << 10..=1 << 20;

/// Never waited for: in a forked child it may be held by a thread that is not there.
static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Memory of a message.
pub(super) enum MessageBuffer {
    Heap(Vec<u8>),
    /// Fresh from the system, which zeroes each page when it is touched. The allocator may have memory of that size that it
    /// would have to zero at once: a peer that announces much, and sends nothing, could make this engine do just that.
    Mapped(Mapping),
}

impl MessageBuffer {
    pub(super) fn address(&mut self) -> *mut u8 {
        match self {
            MessageBuffer::Heap(bytes) => bytes.as_mut_ptr(),
            MessageBuffer::Mapped(mapping) => mapping.address(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            MessageBuffer::Heap(bytes) => bytes.len(),
            MessageBuffer::Mapped(mapping) => mapping.len(),
        }
    }
}

/// A buffer of this length for what is to arrive; it holds zeros, or what an earlier message has left.
pub(super) fn buffer(len: usize) -> MessageBuffer {
    if len > *WORTH_KEEPING.end()
        && let Ok(mapping) = Mapping::anonymous(len)
    {
        return MessageBuffer::Mapped(mapping);
    }
    let spare = if WORTH_KEEPING.contains(&len) { SPARE.try_lock() } else { None };
    let spare = spare.and_then(|mut spare| {
        let fits = spare.iter().position(|buffer| buffer.len() >= len);
        fits.map(|at| spare.swap_remove(at))
    });
    MessageBuffer::Heap(match spare {
        Some(mut buffer) => {
            buffer.truncate(len);
            buffer
        }
        None => vec![0; len],
    })
}

pub(super) fn keep(buffer: MessageBuffer) {
    if let MessageBuffer::Heap(buffer) = buffer
        && WORTH_KEEPING.contains(&buffer.len())
        && buffer.capacity() <= 2 * buffer.len()
        && let Some(mut spare) = SPARE.try_lock()
        && spare.len() < KEPT
    {
        spare.push(buffer);
    }
}

/// A message that has arrived, whole. `None`: an empty one.
pub(crate) struct ReceivedMessage(pub(super) Option<MessageBuffer>);

impl Deref for ReceivedMessage {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Some(MessageBuffer::Heap(bytes)) => bytes,
            // SAFETY: nobody else has the mapping, whose memory is initialized and there until it is dropped; it was taken out of
            // its region when the gate had closed, so nobody writes it any more.
            Some(MessageBuffer::Mapped(mapping)) => unsafe { std::slice::from_raw_parts(mapping.address(), mapping.len()) },
            None => &[],
        }
    }
}

impl Drop for ReceivedMessage {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            keep(buffer);
        }
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
