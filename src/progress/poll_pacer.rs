//! How often the driver reads the clock, and polls the reactor and the timers.

use std::time::Duration;

use crate::sync::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// State that outlasts a single drive, so that the clock is read rarely and still often enough. Only the driver changes it,
/// but for `clock`.
pub(super) struct PollPacer {
    start: Instant,
    /// The last reading by any thread, in nanoseconds after `start`: exact enough to date what has just arrived.
    pub clock: AtomicU64,
    /// When the reactor is polled next, and when there last was an event, on the same clock.
    pub next_check: AtomicU64,
    pub active: AtomicU64,
    /// There has been an event since the clock was read.
    pub found: AtomicBool,
    /// Polls between two readings of the clock, and how many of them are left.
    pub pace: AtomicU32,
    pub left: AtomicU32,
    /// How many more times to yield without spinning first.
    pub yields: AtomicU32,
}

impl PollPacer {
    pub(super) fn new() -> PollPacer {
        PollPacer {
            start: Instant::now(),
            clock: AtomicU64::new(0),
            next_check: AtomicU64::new(0),
            active: AtomicU64::new(0),
            found: AtomicBool::new(true),
            pace: AtomicU32::new(1),
            left: AtomicU32::new(1),
            yields: AtomicU32::new(0),
        }
    }

    fn nanos(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_nanos() as u64
    }

    /// The arrival time of what has just arrived: the last reading of the clock.
    pub(super) fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.clock.load(Ordering::Relaxed))
    }

    /// Stores a reading of the clock; returns it in nanoseconds.
    pub(super) fn note(&self, now: Instant) -> u64 {
        let nanos = self.nanos(now);
        self.clock.store(nanos, Ordering::Relaxed);
        nanos
    }

    pub(super) fn read_clock(&self) -> Instant {
        let now = Instant::now();
        self.note(now);
        now
    }
}
