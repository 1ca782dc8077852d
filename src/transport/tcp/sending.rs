//! A send that is not all out yet.

#[cfg(feature = "tls")]
use std::ops::Range;

use crate::memory::Slice;

/// Behind a payload that was whole. Behind one that was not there goes a zero.
pub(super) const WHOLE: u8 = 1;

pub(super) struct Sending {
    pub bytes: Vec<u8>,
    pub payload: Option<Slice>,
    pub written: usize,
    /// The payload's memory was there whenever some of it was sent.
    pub valid: bool,
}

impl Sending {
    pub(super) fn new(bytes: Vec<u8>, payload: Option<Slice>) -> Sending {
        Sending { bytes, payload, written: 0, valid: true }
    }

    pub(super) fn is_done(&self) -> bool {
        self.written == self.bytes.len() + self.payload.as_ref().map_or(0, |slice| slice.len + 1)
    }

    /// The next bytes to go out, so many at most: a part of `bytes`, and behind that `staged`, to where the payload's are
    /// copied.
    #[cfg(feature = "tls")]
    pub(super) fn stage(&mut self, most: usize, staged: &mut Vec<u8>) -> Range<usize> {
        staged.clear();
        let head = self.bytes.len();
        let begin = self.written.min(head);
        let end = head.min(begin + most);
        let Some(payload) = self.payload.as_ref().filter(|_| end == head) else { return begin..end };
        let skip = self.written.saturating_sub(head);
        let room = most - (end - begin);
        let n = room.min(payload.len.saturating_sub(skip));
        staged.resize(n, 0);
        if n > 0 && self.valid {
            self.valid = payload.part(skip, n).is_some_and(|part| part.read(staged));
        }
        if n < room && skip + n == payload.len {
            staged.push(if self.valid { WHOLE } else { 0 });
        }
        begin..end
    }

    /// So many of those are encrypted.
    #[cfg(feature = "tls")]
    pub(super) fn took(&mut self, n: usize) {
        self.written += n;
    }
}
