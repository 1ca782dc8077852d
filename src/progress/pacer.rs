//! The driver's clock, and when it yields its processor or leaves it.

use std::time::Duration;

use super::processor;
use crate::sync::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A driver that has spun for this long without an event yields its processor: perhaps to the thread that it waits for.
pub(super) const YIELD_AFTER: Duration = Duration::from_micros(10);
/// A yield that took so long has let another thread run.
const SWITCH_NS: u64 = 2_000;
/// After so many events in a row that came when another thread had run on this processor, the progress thread moves to another one.
/// Each of them takes some 15 µs longer than it does there, and the move takes some 45. Of two engines that share a processor the one
/// that serves has such a thread; those of callers are the user's, who may have bound them.
const CROWDED_EVENTS: u32 = 4;
/// Least time between two such moves. It grows fourfold, up to this, each time that a thread which computes has the other processor:
/// a move to that costs some 3 ms.
const MOVE_INTERVAL: Duration = Duration::from_millis(1);
const MAX_MOVE_INTERVAL: Duration = Duration::from_millis(256);
/// A yield that took so long has let a thread run that computes, and does not wait for this one.
const COMPUTED_NS: u64 = 500_000;

/// How often the driver reads the clock, and polls the reactor and the timers.
///
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
    /// How many more times to yield without spinning first; when a driver last yielded, on the same clock; and of a brief drive, whether
    /// it did so last (1), after a long time without events (2).
    pub yields: AtomicU32,
    yielded_at: AtomicU64,
    pub yielded: AtomicU32,
    /// How many events in a row have come when another thread had run on this processor, and when the driver may move, on the same
    /// clock.
    crowded: std::sync::atomic::AtomicU32,
    next_move: std::sync::atomic::AtomicU64,
    /// The time between two moves, in nanoseconds; and whether no thread has computed where the last one led.
    move_interval: std::sync::atomic::AtomicU64,
    moved: std::sync::atomic::AtomicBool,
    /// How often a thread has slept in the reactor. What is right depends on none of these five, so they are not for the models.
    pub sleeps: std::sync::atomic::AtomicU64,
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
            yielded_at: AtomicU64::new(0),
            yielded: AtomicU32::new(0),
            crowded: Default::default(),
            next_move: Default::default(),
            move_interval: Default::default(),
            moved: Default::default(),
            sleeps: Default::default(),
        }
    }

    /// The arrival time of what has just arrived: the last reading of the clock.
    pub(super) fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.nanos())
    }

    /// The last reading of the clock, in nanoseconds.
    pub(super) fn nanos(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// How long there has been no event, as of the last reading of the clock.
    pub(super) fn quiet(&self) -> Duration {
        Duration::from_nanos(self.nanos().saturating_sub(self.active.load(Ordering::Relaxed)))
    }

    /// A reading of the clock in nanoseconds.
    pub(super) fn nanos_at(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_nanos() as u64
    }

    /// Stores a reading of the clock; returns it in nanoseconds.
    pub(super) fn note(&self, now: Instant) -> u64 {
        let nanos = self.nanos_at(now);
        self.clock.store(nanos, Ordering::Relaxed);
        nanos
    }

    pub(super) fn read_clock(&self) -> Instant {
        let now = Instant::now();
        self.note(now);
        now
    }

    /// An event was found: at once after another thread had run on this processor, or not.
    pub(super) fn note_crowded(&self, crowded: bool) {
        let before = self.crowded.load(Ordering::Relaxed);
        if crowded {
            self.crowded.store(before.saturating_add(1), Ordering::Relaxed);
        } else if before > 0 {
            self.crowded.store(0, Ordering::Relaxed);
        }
    }

    /// Whether a driver that spins is to yield its processor. Brief drives read the clock more often than it is to.
    pub(super) fn is_to_yield(&self, quiet: Duration, now: u64, brief: bool) -> bool {
        let pause = || Duration::from_nanos(now.saturating_sub(self.yielded_at.load(Ordering::Relaxed)));
        self.yields.load(Ordering::Relaxed) > 0 || quiet >= YIELD_AFTER && (!brief || pause() >= YIELD_AFTER)
    }

    /// Lets other threads have this processor for a moment; true when one has run. The thread that this one waits for may be one of
    /// them: the kernel often wakes a thread on the processor of its waker, which goes on running, and leaves the two there for tens
    /// of milliseconds. So the progress thread leaves the processor if that is how its events come; and comes back if it finds a
    /// thread that computes on the other one, which would keep it waiting for milliseconds.
    pub(super) fn yield_processor(&self, now: u64, progress: bool) -> bool {
        self.yielded_at.store(now, Ordering::Relaxed);
        let crowded = progress && self.crowded.load(Ordering::Relaxed) >= CROWDED_EVENTS;
        if crowded && now >= self.next_move.load(Ordering::Relaxed) {
            self.crowded.store(0, Ordering::Relaxed);
            if self.moved.swap(true, Ordering::Relaxed) {
                self.move_interval.store(0, Ordering::Relaxed);
            }
            self.move_on(now, 1);
            return false;
        }
        std::thread::yield_now();
        self.note_yield(now, self.note(Instant::now()), progress)
    }

    /// A yield has begun and ended; true when another thread has run.
    fn note_yield(&self, began: u64, ended: u64, progress: bool) -> bool {
        let took = ended.saturating_sub(began);
        if progress && took >= COMPUTED_NS && self.moved.swap(false, Ordering::Relaxed) {
            self.move_on(ended, 4);
        }
        took >= SWITCH_NS
    }

    /// Leaves the processor; the next such move may be so many times as far off as the last one was.
    fn move_on(&self, now: u64, factor: u64) {
        let interval = self.move_interval.load(Ordering::Relaxed).saturating_mul(factor);
        let interval = interval.clamp(MOVE_INTERVAL.as_nanos() as u64, MAX_MOVE_INTERVAL.as_nanos() as u64);
        self.move_interval.store(interval, Ordering::Relaxed);
        self.next_move.store(now + interval, Ordering::Relaxed);
        processor::leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a pacer has wanted to leave the processor at this yield.
    fn moves(pacer: &PollPacer, now: u64, progress: bool) -> bool {
        let before = pacer.next_move.load(Ordering::Relaxed);
        pacer.yield_processor(now, progress);
        pacer.next_move.load(Ordering::Relaxed) != before
    }

    /// Whether a pacer that others crowd wants to leave the processor now.
    fn moves_when_crowded(pacer: &PollPacer, now: u64) -> bool {
        (0..CROWDED_EVENTS).for_each(|_| pacer.note_crowded(true));
        moves(pacer, now, true)
    }

    const INTERVAL: u64 = MOVE_INTERVAL.as_nanos() as u64;
    /// Later than the clock will be, so that no real yield seems long.
    const START: u64 = 1 << 50;

    #[test]
    fn a_progress_thread_whose_events_come_when_others_have_run_leaves_the_processor() {
        let pacer = PollPacer::new();
        (1..CROWDED_EVENTS).for_each(|_| pacer.note_crowded(true));
        assert!(!moves(&pacer, START, true));
        pacer.note_crowded(true);
        assert!(!moves(&pacer, START, false), "a thread of the user's stays");
        assert!(moves(&pacer, START, true));
        let again = START + INTERVAL;
        assert!(!moves_when_crowded(&pacer, again - 1));
        assert!(moves_when_crowded(&pacer, again));
    }

    #[test]
    fn an_event_that_comes_without_others_keeps_a_progress_thread_where_it_is() {
        let pacer = PollPacer::new();
        (1..CROWDED_EVENTS).for_each(|_| pacer.note_crowded(true));
        pacer.note_crowded(false);
        pacer.note_crowded(true);
        assert!(!moves(&pacer, START, true));
    }

    #[test]
    fn a_progress_thread_that_meets_one_that_computes_comes_back_and_stays_longer_each_time() {
        let pacer = PollPacer::new();
        let mut now = START;
        let mut interval = INTERVAL;
        for _ in 0..8 {
            assert!(moves_when_crowded(&pacer, now));
            assert!(pacer.note_yield(now, now + SWITCH_NS, true) && pacer.moved.load(Ordering::Relaxed), "a short turn");
            assert!(pacer.note_yield(now, now + COMPUTED_NS, false) && pacer.moved.load(Ordering::Relaxed), "a caller's yield");
            assert!(pacer.note_yield(now, now + COMPUTED_NS, true) && !pacer.moved.load(Ordering::Relaxed));
            interval = (4 * interval).min(MAX_MOVE_INTERVAL.as_nanos() as u64);
            now += COMPUTED_NS + interval;
            assert!(!moves_when_crowded(&pacer, now - 1), "too early");
            // Where it has not moved by itself, it does not come back.
            let next = pacer.next_move.load(Ordering::Relaxed);
            assert!(pacer.note_yield(now, now + COMPUTED_NS, true) && pacer.next_move.load(Ordering::Relaxed) == next);
        }
        // Two moves that led to no such thread: the second sees that the first one was right.
        assert!(moves_when_crowded(&pacer, now));
        now += interval;
        assert!(moves_when_crowded(&pacer, now) && !moves_when_crowded(&pacer, now + INTERVAL - 1));
        assert!(moves_when_crowded(&pacer, now + INTERVAL));
    }
}
