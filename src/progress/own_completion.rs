//! The waiting side's hold on a completion, whose memory goes to the thread's next operations.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::Arc;

use super::completion::Completion;

thread_local! {
    /// Completions without an outcome or a waker, which this thread alone refers to.
    static SPARE_COMPLETIONS: RefCell<Vec<Arc<Completion>>> = const { RefCell::new(Vec::new()) };
}

/// As many calls as this are in progress at most where most programs have several: each takes a few hundred bytes.
const KEEP: usize = 64;

/// A completion of the thread that began the operation, or of its future.
pub(crate) struct OwnCompletion {
    /// `Some` until this is dropped.
    completion: Option<Arc<Completion>>,
}

impl OwnCompletion {
    pub(crate) fn new() -> OwnCompletion {
        // Fails on a thread that is ending.
        let spare = SPARE_COMPLETIONS.try_with(|spare| spare.borrow_mut().pop()).ok().flatten();
        OwnCompletion { completion: Some(spare.unwrap_or_default()) }
    }
}

impl Deref for OwnCompletion {
    type Target = Arc<Completion>;

    fn deref(&self) -> &Arc<Completion> {
        self.completion.as_ref().expect("present until it is dropped")
    }
}

impl Drop for OwnCompletion {
    fn drop(&mut self) {
        let Some(mut completion) = self.completion.take() else { return };
        // Of an operation that was given up the engine may still refer to it.
        let Some(unique) = Arc::get_mut(&mut completion) else { return };
        // Before it is kept: the drop of what it holds may begin operations.
        *unique = Completion::default();
        let _ = SPARE_COMPLETIONS.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < KEEP {
                spare.push(completion);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::OperationOutcome;
    use super::*;

    fn spare() -> usize {
        SPARE_COMPLETIONS.with_borrow(Vec::len)
    }

    #[test]
    fn completion_is_used_again_as_if_it_were_new() {
        let first = OwnCompletion::new();
        let address = Arc::as_ptr(&first);
        first.set(OperationOutcome::Transferred(Ok(7), None));
        drop(first);
        assert_eq!(spare(), 1);
        let second = OwnCompletion::new();
        assert_eq!((Arc::as_ptr(&second), spare()), (address, 0));
        assert!(!second.is_ready() && second.take().is_none());
    }

    /// The engine sets the outcome of an operation that was given up, later.
    #[test]
    fn completion_that_the_engine_refers_to_is_not_used_again() {
        let first = OwnCompletion::new();
        let engines = Arc::clone(&first);
        drop(first);
        assert_eq!(spare(), 0);
        let second = OwnCompletion::new();
        engines.set(OperationOutcome::Transferred(Ok(7), None));
        assert!(!second.is_ready());
    }

    #[test]
    fn few_completions_are_kept() {
        let many: Vec<_> = (0..2 * KEEP).map(|_| OwnCompletion::new()).collect();
        drop(many);
        assert_eq!(spare(), KEEP);
    }
}
