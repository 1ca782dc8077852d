//! Reused buffers for large messages: fresh ones cost a page fault for every 4 KiB, or the zeroing.

use std::ops::Deref;

use parking_lot::Mutex;

use super::shared::Mapping;

/// How many spare buffers the process keeps.
const KEPT: usize = 2;
/// The lengths that are kept: the allocator reuses smaller buffers well, and larger ones would take too much memory.
const WORTH_KEEPING: std::ops::RangeInclusive<usize> = 32 << 10..=1 << 20;

/// Used with `try_lock` only: in a forked child, a thread that does not exist there may hold the lock.
static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Memory of a message.
pub(super) enum MessageBuffer {
    Heap(Vec<u8>),
    /// Fresh from the kernel, which zeroes each page when it is touched. The allocator might reuse memory that it has to zero
    /// at once: peers that announce large messages and send nothing would cost this engine that time.
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

/// A buffer of this length for a message to come; it holds zeros, or bytes of an earlier message.
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

/// A complete message that has arrived. `None`: an empty one.
pub(crate) struct ReceivedMessage(pub(super) Option<MessageBuffer>);

impl Deref for ReceivedMessage {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Some(MessageBuffer::Heap(bytes)) => bytes,
            // SAFETY: this value alone owns the mapping, whose memory is initialized and stays until it is dropped; it was
            // taken out of its region after the gate had closed, so it is not written any more.
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
    fn new_or_reused_buffer_has_the_length_asked_for() {
        for len in [0, 1, 32 << 10, 100_000, 50_000, 100_000, 1 << 20, (1 << 20) + 1] {
            let buffer = buffer(len);
            assert_eq!(buffer.len(), len);
            keep(buffer);
        }
    }
}
