//! What several layers handle: keys of remote memory, the frames and payloads that arrive, and what a body ends with.

use std::sync::Arc;

/// What a device reaches a peer's memory by. The transport that made them reads them; every other layer passes them on.
pub(crate) type RemoteKeys = Arc<[u8]>;

/// A body that ends with the elements of a long list or text, as they lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrailingList {
    /// How many bytes come before the elements.
    pub head: u64,
    /// Bytes of each number that the elements consist of: 1, 4 or 8.
    pub width: u8,
}

/// Shorter lists are not worth memory of their own.
pub(crate) const LONG_LIST: usize = 16 << 10;
/// Nor is one behind so much, which gets fresh memory, too: more bytes than that, or more than the elements have, by this divisor.
const LONGEST_HEAD: usize = 64 << 10;
const HEAD_OF_ELEMENTS: usize = 4;

impl TrailingList {
    /// How many bytes come before the elements, and the width of a number, if a body of so many bytes may end so, and the list is worth
    /// memory of its own. (A peer may say anything.)
    pub(crate) fn head_of(&self, body: usize) -> Option<(usize, usize)> {
        let (head, width) = (usize::try_from(self.head).ok()?, usize::from(self.width));
        let elements = body.checked_sub(head)?;
        let is_usable = matches!(width, 1 | 4 | 8) && (width == 1 || cfg!(target_endian = "little"));
        let is_worth_it = elements >= LONG_LIST && head <= LONGEST_HEAD.min(elements / HEAD_OF_ELEMENTS);
        (is_usable && is_worth_it && head > 0 && elements.is_multiple_of(width)).then_some((head, width))
    }
}

/// Where a payload belongs.
pub(crate) struct ReceiveTarget<M> {
    /// `None`: it is discarded.
    pub memory: Option<M>,
    pub len: usize,
    /// How many bytes the transfer or the message has that the payload is a part of.
    pub total: usize,
}

/// How a payload arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadStatus {
    Whole,
    /// The sender lost the memory meanwhile: the bytes mean nothing.
    SourceGone,
    /// The memory that they were for is gone.
    TargetGone,
    /// The bytes are not those that were sent: their checksum does not match.
    Damaged,
}

/// What became of bytes that a transport brought.
pub(crate) struct Consumed<M> {
    /// So many are done with; the rest begins an incomplete frame, and comes again with more behind it.
    pub used: usize,
    /// The bytes behind those are payload.
    pub target: Option<ReceiveTarget<M>>,
}

/// Whether bytes were sent at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Injected {
    No,
    Yes,
    /// They were, and the peer sleeps: it has to be woken.
    PeerSleeps,
}

/// The beginning of a frame whose rest has not arrived.
#[derive(Default)]
pub(crate) struct PartialFrame(Vec<u8>);

impl PartialFrame {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn buffer(&self) -> &Vec<u8> {
        &self.0
    }

    /// Offers this and the bytes behind it, and keeps what is not consumed. Returns the target of the payload that the frames
    /// announce, and those of the bytes that belong to it. `None`: the link was closed because of the bytes.
    #[inline]
    pub(crate) fn offer<'a, M>(
        &mut self,
        bytes: &'a [u8],
        consume: impl FnOnce(&[u8]) -> Option<Consumed<M>>,
    ) -> Option<(Option<ReceiveTarget<M>>, &'a [u8])> {
        let before = self.0.len();
        let Consumed { used, target } = if before == 0 {
            consume(bytes)?
        } else {
            self.0.extend_from_slice(bytes);
            consume(&self.0)?
        };
        if target.is_some() {
            // A frame that was not complete before ends within the new bytes.
            self.0 = Vec::new();
            return Some((target, &bytes[used.saturating_sub(before)..]));
        }
        if before == 0 {
            self.0.extend_from_slice(&bytes[used..]);
        } else {
            self.drop_front(used);
        }
        Some((None, &[]))
    }

    /// Removes the first bytes, and shrinks the buffer if the rest needs far less: so a link does not keep the capacity of a long
    /// frame, and an idle link has no buffer at all.
    fn drop_front(&mut self, used: usize) {
        const SPARE: usize = 4 << 10;
        if used > 0 {
            self.0.drain(..used);
            if self.0.is_empty() || self.0.capacity() > 2 * self.0.len() + SPARE {
                self.0.shrink_to_fit();
            }
        }
    }
}
