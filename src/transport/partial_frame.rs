//! The buffer of a partial frame, kept until its rest arrives.

/// Removes the first `used` bytes, and shrinks the buffer if the rest needs far less: so a link does not keep the capacity of a
/// long frame, and an idle link has no buffer at all.
pub(super) fn keep_partial_frame(partial: &mut Vec<u8>, used: usize) {
    const SPARE: usize = 4 << 10;
    if used > 0 {
        partial.drain(..used);
        if partial.is_empty() || partial.capacity() > 2 * partial.len() + SPARE {
            partial.shrink_to_fit();
        }
    }
}
