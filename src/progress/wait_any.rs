//! Waiting for the first of several operations.

use super::{Completion, Core};

/// Blocks until one of the operations is over, and returns its index. `completion` returns what an operation waits for, and
/// `None` for one that was over when it was started. The list must not be empty.
pub(crate) fn wait_any<T>(
    operations: &[T],
    is_over: fn(&T) -> bool,
    completion: fn(&T) -> Option<(&Core, &Completion)>,
) -> usize {
    let ready = || operations.iter().position(is_over);
    if let Some(index) = ready() {
        return index;
    }
    let waited = || operations.iter().filter_map(completion);
    // Operations of other engines have their own drivers, and wake this thread.
    waited().for_each(|(core, _)| core.uncork_unless_forked());
    if let Some((first, _)) = waited().next() {
        let announce = |thread: &_| waited().all(|(_, completion)| completion.wake_thread(thread));
        first.wait(&|| ready().is_some(), &announce, None);
    }
    ready().unwrap_or(0)
}
