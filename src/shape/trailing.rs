//! What the encoded value ends with, for a receiver that can have a long list arrive in memory of its own.

use std::cell::Cell;

use crate::payload::TrailingList;

/// A long list that has been encoded.
#[derive(Clone, Copy)]
pub(super) struct EncodedList {
    list: TrailingList,
    /// Where it ends.
    end: usize,
}

impl EncodedList {
    /// Of elements in so many bytes, which end where the message ends by now, and consist of numbers of `width` bytes.
    #[cold]
    pub(super) fn new(bytes: usize, width: u8, end: usize) -> EncodedList {
        EncodedList { list: TrailingList { head: (end - bytes) as u64, width }, end }
    }
}

thread_local! {
    static TRAILING: Cell<Option<TrailingList>> = const { Cell::new(None) };
}

/// A value has been encoded: its message has so many bytes, and `last` is the last long list in it.
#[inline]
pub(super) fn note_encoded(last: Option<EncodedList>, len: usize) {
    TRAILING.set(last.filter(|last| last.end == len).map(|last| last.list));
}

/// The list that the message ends with which this thread has just encoded.
pub(crate) fn trailing_list() -> Option<TrailingList> {
    TRAILING.get()
}
