//! Listeners whose next connection could not be taken, most likely for want of descriptors.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::deferred_log::defer;
use parking_lot::Mutex;

/// So long after a connection could not be taken, it is tried again, whenever the engine is awake: whoever spins must not ask
/// the system each time round.
const RETRY: Duration = Duration::from_millis(1);

#[derive(Default)]
pub(super) struct AcceptRetry {
    any: AtomicBool,
    state: Mutex<AcceptRetryState>,
}

#[derive(Default)]
struct AcceptRetryState {
    tokens: Vec<usize>,
    since: Option<Instant>,
    /// Of all time.
    count: u64,
}

impl AcceptRetry {
    /// This listener has one, for this reason. It is logged at powers of two of the count.
    pub(super) fn note(&self, token: usize, error: &io::Error) {
        let count = {
            let mut state = self.state.lock();
            if !state.tokens.contains(&token) {
                state.tokens.push(token);
            }
            state.since = Some(Instant::now());
            state.count += 1;
            state.count
        };
        self.any.store(true, Ordering::Release);
        if count.is_power_of_two() {
            let error = error.to_string();
            defer(move || tracing::warn!(target: "calomel::transport", error, count, "a connection can't be accepted"));
        }
    }

    pub(super) fn is_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Those that it is time to try again.
    pub(super) fn due(&self) -> Vec<usize> {
        let mut state = self.state.lock();
        if state.since.is_none_or(|since| since.elapsed() < RETRY) {
            return Vec::new();
        }
        self.any.store(false, Ordering::Release);
        state.since = None;
        std::mem::take(&mut state.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_tried_again_after_a_while() {
        let unaccepted = AcceptRetry::default();
        assert!(!unaccepted.is_any() && unaccepted.due().is_empty());
        unaccepted.note(7, &io::ErrorKind::OutOfMemory.into());
        unaccepted.note(7, &io::ErrorKind::OutOfMemory.into());
        let noted = Instant::now();
        let due = loop {
            assert!(unaccepted.is_any());
            let due = unaccepted.due();
            if !due.is_empty() {
                break due;
            }
        };
        assert!(noted.elapsed() >= RETRY / 2);
        assert_eq!(due, [7]);
        assert!(!unaccepted.is_any() && unaccepted.due().is_empty());
    }
}
