//! Futures that drive while they are polled.
//!
//! To wake a thread takes longer than most calls take. So of the futures that wait for an engine one *leads*: its polls drive
//! for a moment, and ask to be polled again, so that the other tasks of the runtime's thread run in between. The wakers of those
//! are called on their own thread, many at a time, and frames of calls that they start go out together.
//!
//! ```text
//!   no leader ──poll of a future that waits──▶ it leads ──its operation ends, or it is dropped──▶ no leader
//!                                                 └──it has driven in vain, again and again──▶ the progress thread drives
//! ```
//!
//! The leader holds the driver lock while it drives only, so nothing is lost if it is not polled again. Between its polls, and when
//! its operation has ended, the lock may be free, as it is between calls of a thread that blocks. The progress thread looks for
//! that every 0.25 ms then, and acquires it when no caller has meanwhile.
//!
//! A future may be polled once and kept, as a branch of `select!` is. So an operation that is polled twice while the leader is not
//! polled takes its place; the first that find a leader which does not drive ask to be polled again.

use std::task::Waker;
use std::time::Duration;

use super::completion::{Completion, wake_by_ref_quietly, with_sleeper};
use super::drive::{AWAKE, DriveGoal, drives_any};
use super::driver_lock::Acquired;
use super::{Core, workers};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// So many polls of one operation lead. Each drives for `AWAKE`, and longer only where it has found something to do: what a
/// driver does at a time, such as to copy a chunk of a transfer, is not cut short.
pub(super) const LEADING_POLLS: u32 = 8;
/// How many polls a crowd is remembered, and after how many a future that waits alone lets other tasks of its thread run.
const CROWDED_POLLS: u32 = 32;
/// After so many operations have led, and for so long, there is a break, in which the progress thread drives: a runtime looks for
/// other events when it has nothing to poll, or after many polls.
const TURN_OPERATIONS: u32 = 32;
const TURN: Duration = Duration::from_millis(1);
const BREAK: Duration = Duration::from_micros(50);
/// After operations that have led in vain, or calls that were held in vain, up to two to the power of this many do not lead, or are
/// not held.
const MOST_MISSES: u32 = 6;
/// So many polls after one that led, futures ask to be polled again, since the leader may be gone.
const STANDING_BY: u32 = 4;

/// Which future leads, and whether it pays that one does. Races between threads cost time only.
#[derive(Default)]
pub(super) struct Polls {
    /// Polls of futures that wait.
    count: AtomicU32,
    /// The address of the operation that leads, 0 for none, and the count at its last poll.
    leader: AtomicUsize,
    led_at: AtomicU32,
    /// The count at the last poll at which several operations were in progress.
    crowded_at: AtomicU32,
    /// When the turn began, on the clock of the pacer, and how many operations have led in it.
    turn: AtomicU64,
    turn_operations: AtomicU32,
    /// Of operations that lead.
    leading: Misses,
    /// Of calls that are held.
    holding: Misses,
    /// A leader has held the driver lock in such a way that no thread holds it between polls.
    leaves_lock_free: AtomicBool,
}

/// What was done in vain since it last was not, and how many times it is not to be done again.
#[derive(Default)]
struct Misses {
    count: AtomicU32,
    skip: AtomicU32,
}

impl Misses {
    /// It was of use, or was not.
    fn note(&self, of_use: bool) {
        if of_use {
            return self.count.store(0, Ordering::Relaxed);
        }
        let count = (self.count.load(Ordering::Relaxed) + 1).min(MOST_MISSES);
        self.count.store(count, Ordering::Relaxed);
        self.skip.store((1 << count) - 1, Ordering::Relaxed);
    }

    /// True when it is not to be done this time.
    fn skips(&self) -> bool {
        let skips = self.skip.load(Ordering::Relaxed);
        self.skip.store(skips.saturating_sub(1), Ordering::Relaxed);
        skips > 0
    }
}

fn address(operation: &Completion) -> usize {
    std::ptr::from_ref(operation).addr()
}

impl Polls {
    /// Whether this poll of the operation leads. `drives` is true while another thread does drive.
    fn lead(&self, operation: &Completion, clock: u64, drives: impl FnOnce() -> bool) -> bool {
        let count = self.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let leader = self.leader.load(Ordering::Relaxed);
        if leader != 0 && leader != address(operation) {
            let led_at = self.led_at.load(Ordering::Relaxed);
            if operation.found_led_at.swap(led_at, Ordering::Relaxed) != led_at || drives() {
                return false;
            }
        }
        let mut polls = operation.polls.fetch_add(1, Ordering::Relaxed);
        if polls == 0 && (self.leading.skips() || self.is_break(clock)) {
            polls = LEADING_POLLS + 1;
            operation.polls.store(polls, Ordering::Relaxed);
        } else if polls == LEADING_POLLS {
            self.leading.note(false);
        }
        let leads = polls < LEADING_POLLS;
        self.leader.store(if leads { address(operation) } else { 0 }, Ordering::Relaxed);
        self.led_at.store(count, Ordering::Relaxed);
        leads
    }

    /// One more operation is to lead; true when it must not, as others have for long enough.
    fn is_break(&self, clock: u64) -> bool {
        let turn = self.turn.load(Ordering::Relaxed);
        let operations = self.turn_operations.fetch_add(1, Ordering::Relaxed);
        if operations >= TURN_OPERATIONS && clock.saturating_sub(turn) >= TURN.as_nanos() as u64 {
            self.turn.store(clock + BREAK.as_nanos() as u64, Ordering::Relaxed);
            self.turn_operations.store(0, Ordering::Relaxed);
            return true;
        }
        clock < turn
    }

    /// Whether the leader waits alone, and whether it is time to ask: it lets other tasks run, which may be about to call. Those
    /// whose operations have just ended are not in progress, so some polls back count, too.
    fn is_alone(&self, in_progress: usize) -> (bool, bool) {
        let count = self.count.load(Ordering::Relaxed);
        if in_progress > 1 {
            self.crowded_at.store(count, Ordering::Relaxed);
        }
        let alone = count.wrapping_sub(self.crowded_at.load(Ordering::Relaxed)) > CROWDED_POLLS;
        (alone, alone && count.is_multiple_of(CROWDED_POLLS))
    }

    /// Whether a future that found another to lead is to be polled again, in case that is not.
    fn stands_by(&self) -> bool {
        self.count.load(Ordering::Relaxed).wrapping_sub(self.led_at.load(Ordering::Relaxed)) <= STANDING_BY
    }

    /// Whether the progress thread has to look for a free lock often.
    pub(super) fn leaves_lock_free(&self) -> bool {
        self.leaves_lock_free.load(Ordering::Relaxed)
    }

    /// The progress thread has found the lock free for a while: no future leads.
    pub(super) fn lock_was_free(&self) {
        self.leaves_lock_free.store(false, Ordering::Relaxed);
        self.leader.store(0, Ordering::Relaxed);
    }

    /// Whether calls that may wait for more are held now. To be followed by `hold_ended`, where it is known how it ended.
    pub(super) fn begins_hold(&self) -> bool {
        !self.holding.skips()
    }

    /// An event came while calls were held, or none did.
    pub(super) fn hold_ended(&self, by_event: bool) {
        self.holding.note(by_event);
    }

    /// How many times in a row calls were held in vain.
    #[cfg(test)]
    pub(super) fn holds_in_vain(&self) -> u32 {
        self.holding.count.load(Ordering::Relaxed)
    }

    fn has_leader(&self) -> bool {
        self.leader.load(Ordering::Relaxed) != 0
    }

    /// The operation does not lead any more, if it did. True if it did.
    fn resign(&self, operation: &Completion) -> bool {
        let led = self.leader.load(Ordering::Relaxed) == address(operation);
        if led {
            self.leader.store(0, Ordering::Relaxed);
        }
        led
    }
}

impl Core {
    /// For the poll of a future: true when the operation has ended; else the task is woken when it ends. It drives if it is
    /// `short`.
    pub(crate) fn poll_operation(&self, operation: &Completion, waker: &Waker, short: bool) -> bool {
        if operation.is_ready() {
            return self.ended(operation);
        }
        let may_lead = short && self.may_lead();
        let leads =
            may_lead && self.polls.lead(operation, self.pacer.clock.load(Ordering::Relaxed), || !self.driver_lock.is_free());
        if leads && self.drive_in_poll(operation) || !operation.wake_task(waker) {
            return self.ended(operation);
        }
        if leads {
            wake_by_ref_quietly(waker);
            return false;
        }
        let holder = self.driver_lock.holder_is_awake();
        if holder == Some(true) && !self.threads.is_handling() {
            // The driver sends what is queued.
            return false;
        }
        if self.polls.has_leader() {
            if may_lead && self.polls.stands_by() {
                wake_by_ref_quietly(waker);
            }
            if holder.is_none() {
                // The leader sends it.
                return false;
            }
        } else if holder.is_none() {
            self.threads.take_over();
        }
        self.uncork();
        false
    }

    fn ended(&self, operation: &Completion) -> bool {
        if self.polls.resign(operation) {
            self.polls.leading.note(true);
            self.has_driven();
        }
        true
    }

    /// The future that waits for the operation is dropped.
    pub(crate) fn forget_polls(&self, operation: &Completion) {
        self.polls.resign(operation);
    }

    fn may_lead(&self) -> bool {
        // A job is polled where others wait behind it. User code that the driver of any engine calls may poll, too.
        self.spin.is_some() && !workers::in_any_job() && !drives_any()
    }

    /// Drives for a moment; true when the operation has ended.
    fn drive_in_poll(&self, operation: &Completion) -> bool {
        let ready = || operation.is_ready();
        let in_progress = self.proto.lock().operations_in_progress();
        let (alone, yields) = self.polls.is_alone(in_progress);
        if yields {
            return false;
        }
        let Some(acquired) = self.acquire_briefly(&ready) else { return ready() };
        if !alone && acquired == Acquired::Borrowed && !self.is_external() && self.driver_lock.take_from_progress() {
            // Once the progress thread is awake, calls that are started may wait for others: see `exec_start`.
            self.ring();
        }
        if acquired != Acquired::Borrowed || !alone {
            self.polls.leaves_lock_free.store(true, Ordering::Relaxed);
        }
        // At the first poll other tasks are likely to have something to do.
        let waits = alone || operation.polls.load(Ordering::Relaxed) > 1;
        let stop = || !waits || ready();
        let deadline = Some(self.pacer.read_clock() + AWAKE);
        let goal = DriveGoal { stop: &stop, announce: &|_| true, deadline, progress: false, until_event: !alone };
        self.drive_as_caller(acquired, &goal);
        ready()
    }

    /// Acquires the driver lock, also from a progress thread that is awake. `None` when another caller drives, or `done` first.
    fn acquire_briefly(&self, done: &dyn Fn() -> bool) -> Option<Acquired> {
        self.driver_lock.try_acquire().or_else(|| {
            with_sleeper(|sleeper| match self.driver_lock.acquire_or_queue(&sleeper.waiter) {
                Acquired::Queued { soon } => {
                    if soon {
                        self.wait_awake(&|| done() || self.driver_lock.is_free());
                    }
                    let acquired = self.driver_lock.try_acquire();
                    self.driver_lock.leave_queue(&sleeper.waiter);
                    acquired
                }
                acquired => Some(acquired),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_in_vain_is_done_ever_more_rarely_until_it_is_of_use() {
        let misses = Misses::default();
        let skipped = || (0..).take_while(|_| misses.skips()).count();
        for expected in [1, 3, 7, 15, 31, 63, 63] {
            misses.note(false);
            assert_eq!(skipped(), expected);
        }
        misses.note(true);
        assert_eq!(skipped(), 0);
        misses.note(false);
        assert_eq!(skipped(), 1);
    }
}
