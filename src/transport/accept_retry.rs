//! Retries of failed `accept` calls, which mostly fail because the process is out of descriptors.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::deferred_log::defer;
use crate::sync::Mutex;

/// Least time between a failed accept and its retry, so that a spinning driver does not make a system call in each round.
const RETRY: Duration = Duration::from_millis(1);

#[derive(Default)]
/// The listeners whose last `accept` has failed.
pub(super) struct AcceptRetry {
    any: AtomicBool,
    state: Mutex<AcceptRetryState>,
}

#[derive(Default)]
struct AcceptRetryState {
    tokens: Vec<usize>,
    since: Option<Instant>,
    /// Failed accepts since the start.
    count: u64,
}

impl AcceptRetry {
    /// Adds a listener whose `accept` failed. Logs when the count is a power of two.
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
            defer(move || tracing::warn!(target: "calomel::transport", error, count, "can't accept a connection"));
        }
    }

    pub(super) fn is_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// When [`AcceptRetry::due`] returns the listeners.
    pub(super) fn next(&self) -> Option<Instant> {
        if self.is_any() { self.state.lock().since.map(|since| since + RETRY) } else { None }
    }

    /// Removes and returns the listeners to try again now.
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
    fn failed_accept_is_due_once_after_the_retry_time() {
        let retry = AcceptRetry::default();
        assert!(!retry.is_any() && retry.due().is_empty());
        retry.note(7, &io::ErrorKind::OutOfMemory.into());
        retry.note(7, &io::ErrorKind::OutOfMemory.into());
        let noted = Instant::now();
        let due = loop {
            assert!(retry.is_any());
            let due = retry.due();
            if !due.is_empty() {
                break due;
            }
        };
        assert!(noted.elapsed() >= RETRY / 2);
        assert_eq!(due, [7]);
        assert!(!retry.is_any() && retry.due().is_empty());
    }
}
