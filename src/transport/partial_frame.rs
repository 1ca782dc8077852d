//! The beginning of a frame, kept until the rest of it has come.

/// Keeps what is left behind the bytes that are done with: in a buffer of its own size, so that the few bytes that a link has
/// between turns do not hold on to what a long frame once took, and an idle link has no buffer at all.
pub(super) fn keep_partial_frame(partial: &mut Vec<u8>, used: usize) {
    const SPARE: usize = 4 << 10;
    if used > 0 {
        partial.drain(..used);
        if partial.is_empty() || partial.capacity() > 2 * partial.len() + SPARE {
            partial.shrink_to_fit();
        }
    }
}
