//! Waiting with one time limit for all steps.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use crate::{Engine, Error, Pending, Result};

/// Longer limits are cut to a year, so that the clock can represent their ends.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long one turn of an engine's progress may take, between two looks at what is waited for.
pub(super) const TURN: Duration = Duration::from_millis(50);

/// A time limit that several steps share.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimit {
    /// As the caller gave it, for errors.
    pub timeout: Duration,
    until: Instant,
}

impl TimeLimit {
    pub(super) fn new(timeout: Duration) -> TimeLimit {
        TimeLimit { timeout, until: Instant::now() + timeout.min(LONGEST) }
    }

    pub(super) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    pub(super) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Runs `work`, which can't be interrupted, on a thread of its own. `None` when the limit comes first; then that thread ends
    /// when `work` does.
    pub(super) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<Option<T>> {
        let (send, receive) = mpsc::channel();
        let spawned = thread::Builder::new().name("calomel-launch".to_owned()).spawn(move || {
            // The caller may have given up.
            let _ = send.send(work());
        });
        spawned.map_err(|error| Error::io("can't start a thread that resolves names", error))?;
        match receive.recv_timeout(self.left()) {
            Ok(done) => Ok(Some(done)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }
}

/// The intervals between attempts: 1 ms at first, twice as long each time, 100 ms at most.
pub(super) struct Attempts(Duration);

impl Attempts {
    pub(super) fn new() -> Attempts {
        Attempts(Duration::from_millis(1))
    }

    pub(super) fn pause(&mut self, engine: &Engine, limit: TimeLimit) {
        let time = self.0.min(limit.left());
        if engine.progress(time).is_err() {
            thread::sleep(time);
        }
        self.0 = (2 * self.0).min(Duration::from_millis(100));
    }
}

/// As [`Pending::wait_any`]. An engine without threads of its own serves its peers meanwhile.
pub(super) fn wait_any<R: DeserializeOwned>(engine: &Engine, calls: &mut Vec<Pending<R>>) -> (usize, Result<R>) {
    loop {
        if let Some(index) = calls.iter().position(Pending::is_ready) {
            return (index, calls.remove(index).wait());
        }
        if engine.progress(TURN).is_err() {
            return Pending::wait_any(calls);
        }
    }
}
