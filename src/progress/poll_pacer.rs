//! How often whoever drives looks at what: the clock, the reactor, the timers.

use std::time::Duration;

use crate::sync::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What goes on from one drive to the next, so that the clock is looked at rarely, and still often enough. Only whoever
/// drives changes it, but for the time.
pub(super) struct PollPacer {
    start: Instant,
    /// The time when somebody last looked, in nanoseconds after `start`: good enough for what has just arrived.
    pub clock: AtomicU64,
    /// When the reactor is to be looked at, and when something last happened, on the same clock.
    pub next_look: AtomicU64,
    pub active: AtomicU64,
    /// Something has happened since the clock was looked at.
    pub found: AtomicBool,
    /// Polls between two looks at the clock, and how many of them are left.
    pub pace: AtomicU32,
    pub left: AtomicU32,
    /// How many more times to let others run at once.
    pub yields: AtomicU32,
}

impl PollPacer {
    pub(super) fn new() -> PollPacer {
        PollPacer {
            start: Instant::now(),
            clock: AtomicU64::new(0),
            next_look: AtomicU64::new(0),
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

    /// The time that something which has just arrived is taken to have arrived at.
    pub(super) fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.clock.load(Ordering::Relaxed))
    }

    /// Somebody has looked at the clock. What it says, in nanoseconds.
    pub(super) fn note(&self, now: Instant) -> u64 {
        let nanos = self.nanos(now);
        self.clock.store(nanos, Ordering::Relaxed);
        nanos
    }

    pub(super) fn look_at_clock(&self) -> Instant {
        let now = Instant::now();
        self.note(now);
        now
    }
}
