//! Memory for large messages. Buffers are reused: fresh ones cost a page fault for every 4 KiB, or the zeroing. A list that a
//! message ends with arrives in a vector, which becomes the program's.

use std::any::Any;
use std::mem;
use std::ops::Deref;

use crate::sync::Mutex;

use super::shared::Mapping;
use crate::copy;

/// Where a message begins in its buffer. A list of numbers lies a few bytes behind that, and would else often lie as few bytes
/// behind where its sender has it, by the last bits of the addresses: both allocators put long memory at the same place of a page.
/// Such copies are slow: see `crate::copy`.
pub(super) const BEGIN: usize = 256;
/// How many spare mappings the process keeps, and how many spare buffers of the allocator's.
const KEPT: [usize; 2] = [4, 2];
/// How many bytes they have together: as many as the longest message takes, unless the program allows longer ones.
const KEPT_BYTES: usize = BEGIN + (64 << 20);
/// The allocator reuses smaller buffers well, and larger ones would take too much memory.
const WORTH_KEEPING: std::ops::RangeInclusive<usize> = 32 << 10..=KEPT_BYTES;
/// Larger ones are mapped. Such a buffer of the allocator's, which a sender has, would keep it from giving memory back: with two
/// of them a server under a mixed load grew from 100 to 180 MiB.
const LONGEST_ON_HEAP: usize = BEGIN + (1 << 20);
/// From here on the allocator maps each allocation by itself, and unmaps it when it is freed: glibc does not raise that limit
/// beyond 32 MiB. Such a buffer of a sender costs its pages for each message, and does not lie between other allocations.
pub(crate) const MAPPED_BY_ALLOCATOR: usize = 32 << 20;
/// A buffer is used for a message that fills so much of it at least, as a divisor.
const LEAST_USED: usize = 4;

/// The oldest first. Used with `try_lock` only: in a forked child, a thread that does not exist there may hold the lock.
static SPARE: Mutex<Vec<MessageBuffer>> = Mutex::new(Vec::new());

/// Memory of a message.
pub(super) enum MessageBuffer {
    Heap(Vec<u8>),
    /// Fresh from the kernel, which zeroes each page when it is touched. The allocator might reuse memory that it has to zero
    /// at once: peers that announce large messages and send nothing would cost this engine that time.
    Mapped {
        mapping: Mapping,
        len: usize,
    },
    List(ArrivingList),
}

impl MessageBuffer {
    pub(super) fn address(&mut self) -> *mut u8 {
        match self {
            MessageBuffer::Heap(bytes) => bytes.as_mut_ptr(),
            MessageBuffer::Mapped { mapping, .. } => mapping.address(),
            MessageBuffer::List(list) => list.elements.address(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            MessageBuffer::Heap(bytes) => bytes.len(),
            MessageBuffer::Mapped { len, .. } => *len,
            MessageBuffer::List(list) => list.len(),
        }
    }

    /// The longest message that it has initialized memory for.
    fn room(&self) -> usize {
        match self {
            MessageBuffer::Heap(bytes) => bytes.len(),
            MessageBuffer::Mapped { mapping, .. } => mapping.len(),
            MessageBuffer::List(_) => 0,
        }
    }

    /// How much memory it takes.
    fn size(&self) -> usize {
        match self {
            MessageBuffer::Heap(bytes) => bytes.capacity(),
            MessageBuffer::Mapped { mapping, .. } => mapping.len(),
            MessageBuffer::List(_) => 0,
        }
    }

    fn resize(&mut self, new: usize) {
        match self {
            MessageBuffer::Heap(bytes) => bytes.truncate(new),
            MessageBuffer::Mapped { len, .. } => *len = new,
            MessageBuffer::List(_) => unreachable!("it is not kept"),
        }
    }
}

/// A message that ends with a list or text. (Both vectors keep their place when this value moves, which a `Box` may not be relied on for.)
pub(crate) struct ArrivingList {
    /// What comes before the elements.
    head: Vec<u8>,
    elements: Elements,
    /// How many bytes the elements have.
    len: usize,
    /// The vector knows of them.
    is_complete: bool,
}

/// The memory of a list's elements, in a vector for as much as arrives: what they consist of decides the alignment, and with it whose
/// vector it can become.
enum Elements {
    Bytes(Vec<u8>),
    Singles(Vec<f32>),
    Doubles(Vec<f64>),
}

impl Elements {
    fn address(&mut self) -> *mut u8 {
        match self {
            Elements::Bytes(list) => list.as_mut_ptr(),
            Elements::Singles(list) => list.as_mut_ptr().cast(),
            Elements::Doubles(list) => list.as_mut_ptr().cast(),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Elements::Bytes(list) => list,
            Elements::Singles(list) => bytemuck::cast_slice(list),
            Elements::Doubles(list) => bytemuck::cast_slice(list),
        }
    }
}

impl ArrivingList {
    /// Memory for so many bytes of elements, which consist of numbers of 1, 4 or 8 bytes each, behind a head. Its pages are not touched.
    fn new(head: usize, len: usize, width: usize) -> ArrivingList {
        assert!(len.is_multiple_of(width));
        let elements = match width {
            1 => Elements::Bytes(Vec::with_capacity(len)),
            4 => Elements::Singles(Vec::with_capacity(len / 4)),
            8 => Elements::Doubles(Vec::with_capacity(len / 8)),
            _ => unreachable!("there are no numbers of {width} bytes"),
        };
        ArrivingList { head: vec![0; head], elements, len, is_complete: false }
    }

    /// # Safety
    /// Each byte of the elements' memory must have been written.
    unsafe fn complete(&mut self) {
        // Not again: the elements may have been taken since.
        if mem::replace(&mut self.is_complete, true) {
            return;
        }
        let len = self.len;
        match &mut self.elements {
            // SAFETY: it has capacity for so many bytes, which have been written.
            Elements::Bytes(list) => unsafe { list.set_len(len) },
            // SAFETY: it has capacity for so many numbers, whose bytes have been written; any bytes are a number.
            Elements::Singles(list) => unsafe { list.set_len(len / 4) },
            // SAFETY: as above.
            Elements::Doubles(list) => unsafe { list.set_len(len / 8) },
        }
    }

    /// Length of the message in bytes.
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.len
    }

    /// The head, and the vector of the elements, of type `Vec<u8>`, `Vec<f32>` or `Vec<f64>`.
    pub(crate) fn parts(&mut self) -> (&[u8], &mut (dyn Any + Send)) {
        let vector: &mut (dyn Any + Send) = match &mut self.elements {
            Elements::Bytes(list) => list,
            Elements::Singles(list) => list,
            Elements::Doubles(list) => list,
        };
        (&self.head, vector)
    }
}

/// A spare buffer to encode a message of about this length into, if it is so long that the allocator would map its memory anew.
/// It is empty.
pub(crate) fn spare_to_encode(len: usize) -> Option<Vec<u8>> {
    let fitting = len.max(MAPPED_BY_ALLOCATOR)..=KEPT_BYTES;
    let mut spare = SPARE.try_lock().filter(|_| !fitting.is_empty())?;
    let at =
        spare.iter().rposition(|buffer| matches!(buffer, MessageBuffer::Heap(bytes) if fitting.contains(&bytes.capacity())))?;
    let MessageBuffer::Heap(mut bytes) = spare.remove(at) else { return None };
    bytes.clear();
    Some(bytes)
}

/// Takes the newest spare buffer that has room for a message of this length, and is not much longer.
fn spare(len: usize) -> Option<MessageBuffer> {
    if !WORTH_KEEPING.contains(&len) {
        return None;
    }
    let fitting = len..=len.saturating_mul(LEAST_USED);
    let mut spare = SPARE.try_lock()?;
    let at = spare.iter().rposition(|buffer| fitting.contains(&buffer.room()))?;
    Some(spare.remove(at))
}

/// A buffer for a message to come of this length, from [`BEGIN`] on; it holds zeros, or bytes of an earlier message.
pub(super) fn buffer(message: usize) -> MessageBuffer {
    let len = message.saturating_add(BEGIN);
    if let Some(mut buffer) = spare(len) {
        buffer.resize(len);
        return buffer;
    }
    if len > LONGEST_ON_HEAP {
        // A little longer, so that it fits messages of about this length. Pages that are not touched cost nothing.
        let room = message.checked_next_multiple_of(1 << (message.ilog2() - 3)).and_then(|room| room.checked_add(BEGIN));
        if let Ok(mapping) = Mapping::anonymous(room.unwrap_or(len)) {
            return MessageBuffer::Mapped { mapping, len };
        }
    }
    MessageBuffer::Heap(vec![0; len])
}

/// A buffer for a message to come that ends with a list: see [`ArrivingList::new`]. The addresses are those of its head and of its elements.
pub(super) fn list_buffer(head: usize, elements: usize, width: usize) -> (MessageBuffer, [*mut u8; 2]) {
    let mut list = ArrivingList::new(head, elements, width);
    let addresses = [list.head.as_mut_ptr(), list.elements.address()];
    (MessageBuffer::List(list), addresses)
}

/// Takes back the buffer of a message that was complete.
pub(super) fn keep(buffer: MessageBuffer) {
    let is_kept = match &buffer {
        MessageBuffer::Heap(bytes) => match bytes.capacity() {
            MAPPED_BY_ALLOCATOR..=KEPT_BYTES => true,
            capacity => capacity <= (2 * bytes.len()).min(LONGEST_ON_HEAP),
        },
        MessageBuffer::Mapped { .. } => true,
        MessageBuffer::List(_) => false,
    };
    if !is_kept || !WORTH_KEEPING.contains(&buffer.room()) {
        return;
    }
    let Some(mut spare) = SPARE.try_lock() else { return };
    spare.push(buffer);
    let mut dropped = Vec::new();
    while let Some(excess) = excess(&spare) {
        dropped.push(spare.remove(excess));
    }
    // Unmapped where the lock is not held.
    drop(spare);
    drop(dropped);
}

/// The oldest of too many spare buffers.
fn excess(spare: &[MessageBuffer]) -> Option<usize> {
    let is_mapped = |buffer: &&MessageBuffer| matches!(buffer, MessageBuffer::Mapped { .. });
    let mapped = spare.iter().filter(is_mapped).count();
    let [most_mapped, most_on_heap] = KEPT;
    if mapped > most_mapped {
        spare.iter().position(|buffer| is_mapped(&buffer))
    } else if spare.len() - mapped > most_on_heap {
        spare.iter().position(|buffer| !is_mapped(&buffer))
    } else {
        (spare.iter().map(MessageBuffer::size).sum::<usize>() > KEPT_BYTES).then_some(0)
    }
}

/// A complete message that has arrived.
pub(crate) struct ReceivedMessage {
    /// `None`: it was taken out before.
    pub(super) buffer: Option<MessageBuffer>,
    /// Where the message begins in the buffer.
    pub(super) begin: usize,
}

impl ReceivedMessage {
    /// # Safety
    /// Each byte of it must have been written.
    pub(super) unsafe fn complete(&mut self) {
        if let Some(MessageBuffer::List(list)) = &mut self.buffer {
            // SAFETY: as the caller promises.
            unsafe { list.complete() };
        }
    }

    /// The list, if it has arrived as one and was not joined.
    pub(crate) fn list(&mut self) -> Option<&mut ArrivingList> {
        match &mut self.buffer {
            Some(MessageBuffer::List(list)) => Some(list),
            _ => None,
        }
    }

    /// Makes a list's message one piece, so that it can be read as such.
    pub(crate) fn join(&mut self) {
        if let Some(MessageBuffer::List(list)) = &mut self.buffer {
            let mut joined = Vec::with_capacity(list.len());
            joined.extend_from_slice(&list.head);
            copy::append(list.elements.bytes(), &mut joined);
            self.buffer = Some(MessageBuffer::Heap(joined));
        }
    }
}

impl Deref for ReceivedMessage {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let buffer = match &self.buffer {
            Some(MessageBuffer::Heap(bytes)) => bytes,
            // SAFETY: this value alone owns the mapping, which is at least so long, and whose memory is initialized and stays
            // until it is dropped; it was taken out of its region after the gate had closed, so it is not written any more.
            Some(MessageBuffer::Mapped { mapping, len }) => unsafe { std::slice::from_raw_parts(mapping.address(), *len) },
            Some(MessageBuffer::List(_)) => unreachable!("a list is joined before it is read"),
            None => &[][..],
        };
        &buffer[self.begin..]
    }
}

impl Drop for ReceivedMessage {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            keep(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_or_reused_buffer_has_the_length_asked_for() {
        for len in [0, 1, 32 << 10, 100_000, 50_000, 100_000, 1 << 20, (1 << 20) + 1, 3 << 20, 2 << 20, KEPT_BYTES + 1] {
            let mut buffer = buffer(len);
            assert_eq!(buffer.len(), BEGIN + len);
            assert!(buffer.room() >= BEGIN + len);
            // SAFETY: the buffer is at least so long, and is used by this thread only.
            unsafe { buffer.address().write_bytes(1, BEGIN + len) };
            keep(buffer);
        }
    }

    /// Programs may allow messages of any length.
    #[test]
    #[cfg_attr(miri, ignore = "Miri ends where the system refuses memory")]
    fn message_that_no_memory_can_hold_gets_none() {
        for len in [usize::MAX, usize::MAX - 1, usize::MAX - BEGIN, usize::MAX - 2 * BEGIN, usize::MAX / 2 + 1] {
            assert!(std::panic::catch_unwind(|| buffer(len).len()).is_err(), "{len}");
        }
    }

    /// Other tests of this process use the spare buffers, too: so many of them are always allowed.
    #[test]
    fn spare_buffers_are_bounded() {
        for round in 0..100 {
            let len = (1 << 20) + (round % 7) * (5 << 20);
            let buffers: Vec<_> = (0..6).map(|_| buffer(len)).collect();
            buffers.into_iter().for_each(keep);
            let spare = SPARE.lock();
            assert!(spare.len() <= KEPT[0] + KEPT[1]);
            assert!(spare.iter().map(MessageBuffer::size).sum::<usize>() <= KEPT_BYTES);
        }
    }

    #[test]
    fn only_memory_that_the_allocator_would_map_is_kept_for_encoding() {
        // Other tests may take the lock, or push the buffer out.
        let reused = |len: usize| {
            (0..100).any(|_| {
                let mut first = vec![1; len];
                let address = first.as_mut_ptr();
                keep(MessageBuffer::Heap(first));
                spare_to_encode(len - 1000).is_some_and(|mut next| next.is_empty() && next.as_mut_ptr() == address)
            })
        };
        assert!(reused(MAPPED_BY_ALLOCATOR + 5));
        assert!(!reused(MAPPED_BY_ALLOCATOR / 2));
        assert!(!reused(KEPT_BYTES + 1));
    }

    #[test]
    fn mapping_is_used_for_the_next_message() {
        // A length of its own. Other tests may take the lock, or push the mapping out.
        const LEN: usize = 40 << 20;
        // The longest message by default, too.
        for len in [LEN, 64 << 20] {
            let reused = (0..100).any(|_| {
                let mut first = buffer(len);
                let address = first.address();
                keep(first);
                let mut second = buffer(len - 1000);
                second.len() == BEGIN + len - 1000 && second.address() == address
            });
            assert!(reused, "{len}");
        }
        let too_long = (0..100).any(|_| {
            keep(buffer(LEN));
            buffer(LEN / LEAST_USED / 2).room() >= LEN
        });
        assert!(!too_long, "a short message takes a long buffer");
    }
}
