//! Futures that drive while they are polled.
//!
//! To wake a thread takes longer than most calls take. So of the futures that wait for an engine one *leads*: its polls drive
//! for a moment, and ask to be polled again, so that the other tasks of the runtime's thread run in between. The wakers of those
//! are called on their own thread, many at a time, and frames of calls that they start go out together.
//!
//! ```text
//!   no leader ──poll of a future that waits──▶ it leads ──its operation ends, or it is dropped──▶ no leader; a successor is woken
//!                                                 └──it has driven in vain, again and again──▶ the progress thread drives
//! ```
//!
//! The leader holds the driver lock while it drives only, so nothing is lost if it is not polled again. Between its polls, and when
//! its operation has ended, the lock may be free, as it is between calls of a thread that blocks. The progress thread looks for
//! that every 0.5 ms (0.25 ms at first), and acquires it when no caller has meanwhile. Those that wait behind a leader are not polled
//! again before their operations end. So when that of a leader has ended, a task that waits for another one is woken, and leads if
//! none does by then. Where calls follow one another all the time, some does: then only one such end in 64 wakes a task, after a while.
//!
//! A task that wakes itself is always ready, and a runtime then looks for what comes from elsewhere (other threads, sockets, timers) once
//! in so many polls of tasks. So in each round of 200 us at least 64 polls return to the runtime, if need be at once. If it then takes
//! longer than that does until the next poll, others have run: there are others for the next 2 ms. While there are, a poll that leads
//! drives for less than a microsecond, and those that follow return at once for about as long as it took. This is not for a borrowed
//! lock, which it takes time to return and to borrow again, so not for rare calls, nor for the first ones of a task that calls alone; and
//! not where tasks move between threads: each time that one wakes itself, such a runtime wakes a thread that may take it.
//!
//! A future may be polled once and kept, as a branch of `select!` is. So an operation that is polled twice while the leader is not
//! polled takes its place; the first that find a leader which does not drive ask to be polled again.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::sync::Instant;

use super::completion::{Completion, wake_by_ref_quietly, with_sleeper};
use super::drive::{AWAKE, DriveGoal, drives_any, this_thread};
use super::driver_lock::Acquired;
use super::{Core, RETURNS, workers};
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// For so many microseconds of its polls, about, an operation leads. What a driver does at a time, such as to copy a chunk of a transfer,
/// is not cut short.
pub(super) const LEADS_FOR_US: u32 = 160;
/// `Completion::led_us` of an operation that leaves driving to the progress thread.
const GIVEN_UP: u32 = u32::MAX;
/// For how long a poll drives where the next one costs little, and as what it counts with what the runtime does in between.
const BRIEF: Duration = Duration::from_nanos(600);
const BRIEF_US: u32 = 2;
const AWAKE_US: u32 = AWAKE.as_micros() as u32;
/// In such a round `RETURNS` polls return to their runtime, at least.
const ROUND: Duration = Duration::from_micros(200);
/// While so many polls return at once, the tasks that the last events have woken may still be ready.
const SETTLED: u32 = 8;
/// If it takes so long from such a poll to the next one, another task was ready; and others are taken to be now and then for so long.
const OTHERS_RAN: Duration = Duration::from_micros(2);
const OTHERS: Duration = Duration::from_millis(2);
/// While they are, at most so many polls return at once after one that has driven.
const BRIEF_RETURNS: u32 = 15;
/// What a poll that returns at once takes, at the least, with what the runtime does for it.
const RETURN: Duration = Duration::from_nanos(64);
/// When operations have led for so long, without a pause as long as this, the lock is taken from the progress thread, and polls become
/// brief.
const BUSY_AFTER: Duration = Duration::from_micros(160);
/// For so many polls after one that led on another thread than before, none is brief: a task that wakes itself, to be polled again,
/// makes its runtime wake a thread that may take it.
const MOVED_POLLS: u32 = 1 << 16;
/// How many polls a crowd is remembered.
const CROWDED_POLLS: u32 = 128;
/// Of the time between two polls that lead, so much counts as time for which the task kept its thread: it may have slept.
const LONGEST_PAUSE: Duration = Duration::from_micros(10);
/// When operations have led for so long, one leaves driving to the progress thread, and its task sleeps until it has ended: there are
/// runtimes that poll a future which has woken itself again before they look for anything else.
const REST_AFTER: Duration = Duration::from_millis(64);
/// After operations that have led in vain, or calls that were held in vain, up to two to the power of this many do not lead, or are
/// not held.
const MOST_MISSES: u32 = 6;
/// So many successors in a row may be of no use, since another operation leads already, before some are skipped: one that is missed costs
/// as much as thousands of these.
const VAIN_SUCCESSORS: u32 = 32;
/// So many polls after one that led, futures ask to be polled again, since the leader may be gone.
const STANDING_BY: u32 = 4;

/// Which future leads, and whether it pays that one does. Races between threads cost time only.
#[derive(Default)]
pub(super) struct Polls {
    /// Polls of futures that wait.
    count: AtomicU32,
    /// The address of the operation that leads, 0 for none, and the count and the thread at its last poll.
    leader: AtomicUsize,
    led_at: AtomicU32,
    led_on: AtomicUsize,
    /// The address of the operation that was woken to lead when a leader had ended; 0 for none.
    successor: AtomicUsize,
    /// The count at the last poll at which several operations were in progress.
    crowded_at: AtomicU32,
    /// When the last one led, on the clock of the pacer; and for how long those that led have let no others run.
    kept_at: AtomicU64,
    kept_for: AtomicU64,
    /// For how long operations have led since one last left driving to the progress thread.
    led_for: AtomicU64,
    /// For how long operations have led without a longer pause.
    busy_for: AtomicU64,
    /// How many polls of futures have returned to their runtimes without the end of their operations.
    returned: AtomicU32,
    /// From which of these on, and up to which, polls return at once; since when, on the clock of the pacer; and when the last one did.
    returned_before: AtomicU32,
    returns_until: AtomicU32,
    returns_since: AtomicU64,
    returned_at: AtomicU64,
    /// When this round began, and how many had returned then.
    round_at: AtomicU64,
    round_returned: AtomicU32,
    /// Until when others are taken to be ready now and then.
    others_until: AtomicU64,
    /// The count up to which no poll is brief.
    moved_until: AtomicU32,
    /// How many times threads that drive for themselves have received requests, for others to handle.
    pub(super) received: AtomicU32,
    /// Since when calls are held; 0 when none are.
    held_since: AtomicU64,
    /// Of operations that lead.
    leading: Misses,
    /// Of operations that are woken to lead.
    succeeding: Misses,
    /// Of calls that are held.
    holding: Misses,
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
        self.note_beyond(0, of_use);
    }

    /// As `note`, where so many misses in a row are no reason to skip the next time.
    fn note_beyond(&self, tolerated: u32, of_use: bool) {
        if of_use {
            return self.count.store(0, Ordering::Relaxed);
        }
        let count = (self.count.load(Ordering::Relaxed) + 1).min(tolerated + MOST_MISSES);
        self.count.store(count, Ordering::Relaxed);
        self.skip.store((1 << count.saturating_sub(tolerated)) - 1, Ordering::Relaxed);
    }

    fn forget(&self) {
        self.count.store(0, Ordering::Relaxed);
        self.skip.store(0, Ordering::Relaxed);
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
    fn lead(&self, operation: &Completion, drives: impl FnOnce() -> bool) -> bool {
        let count = self.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let leader = self.leader.load(Ordering::Relaxed);
        if leader != 0 && leader != address(operation) {
            let led_at = self.led_at.load(Ordering::Relaxed);
            if operation.found_led_at.swap(led_at, Ordering::Relaxed) != led_at || drives() {
                return false;
            }
        }
        let mut led_us = operation.led_us.load(Ordering::Relaxed);
        let gives_up = led_us >= LEADS_FOR_US && led_us != GIVEN_UP;
        if gives_up {
            self.leading.note(false);
        }
        if gives_up || led_us == 0 && (self.leading.skips() || self.rests()) {
            led_us = GIVEN_UP;
            operation.led_us.store(led_us, Ordering::Relaxed);
        }
        let leads = led_us < LEADS_FOR_US;
        let thread = this_thread();
        let before = operation.led_on.load(Ordering::Relaxed);
        self.led_on.store(thread, Ordering::Relaxed);
        if leads && before != thread {
            operation.led_on.store(thread, Ordering::Relaxed);
            if before != 0 {
                self.moved_until.store(count.wrapping_add(MOVED_POLLS), Ordering::Relaxed);
            }
        }
        self.leader.store(if leads { address(operation) } else { 0 }, Ordering::Relaxed);
        self.led_at.store(count, Ordering::Relaxed);
        leads
    }

    /// True for one operation each time that operations have led for `REST_AFTER`.
    fn rests(&self) -> bool {
        let rests = self.led_for.load(Ordering::Relaxed) >= REST_AFTER.as_nanos() as u64;
        if rests {
            self.led_for.store(0, Ordering::Relaxed);
        }
        rests
    }

    /// Whether the leader waits alone. Those whose operations have just ended are not in progress, so some polls back count, too.
    fn is_alone(&self, in_progress: usize) -> bool {
        if in_progress > 1 {
            self.crowded_at.store(self.count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.was_alone()
    }

    fn was_alone(&self) -> bool {
        let count = self.count.load(Ordering::Relaxed);
        count.wrapping_sub(self.crowded_at.load(Ordering::Relaxed)) > CROWDED_POLLS
    }

    /// The task that leads has its thread still, or again. Returns for how long it has kept that, since the last time.
    fn goes_on(&self, clock: u64) -> u64 {
        let paused = Duration::from_nanos(clock.saturating_sub(self.kept_at.load(Ordering::Relaxed)));
        let kept = paused.min(LONGEST_PAUSE).as_nanos() as u64;
        let busy_for = if paused < BUSY_AFTER { self.busy_for.load(Ordering::Relaxed) + kept } else { 0 };
        self.kept_at.store(clock, Ordering::Relaxed);
        self.busy_for.store(busy_for, Ordering::Relaxed);
        self.led_for.store(self.led_for.load(Ordering::Relaxed) + kept, Ordering::Relaxed);
        kept
    }

    /// Whether it is time for the task that leads to let others run. They may be about to call, and a runtime looks for timers and
    /// sockets after so many polls of tasks: one whose calls end while it is polled would go on calling in a single poll.
    fn lets_others_run(&self, clock: u64) -> bool {
        let kept_for = self.kept_for.load(Ordering::Relaxed) + self.goes_on(clock);
        self.kept_for.store(kept_for, Ordering::Relaxed);
        kept_for >= AWAKE.as_nanos() as u64
    }

    /// A poll that has led returns to its runtime.
    fn has_let_others_run(&self, clock: u64) {
        self.goes_on(clock);
        self.kept_for.store(0, Ordering::Relaxed);
    }

    /// Whether operations have led for so long that others may wait for their turn on that thread.
    fn is_busy(&self) -> bool {
        self.busy_for.load(Ordering::Relaxed) >= BUSY_AFTER.as_nanos() as u64
    }

    /// How many polls there are until the count is reached.
    fn polls_until(&self, count: &AtomicU32, most: u32) -> u32 {
        let left = count.load(Ordering::Relaxed).wrapping_sub(self.count.load(Ordering::Relaxed));
        if left <= most { left } else { 0 }
    }

    /// Whether futures that lead have moved between threads lately.
    fn moves(&self) -> bool {
        self.polls_until(&self.moved_until, MOVED_POLLS) > 0
    }

    /// Whether others than those that call are ready now and then.
    fn has_others(&self, clock: u64) -> bool {
        clock < self.others_until.load(Ordering::Relaxed)
    }

    /// A poll returns to its runtime without the end of its operation.
    fn returns(&self) {
        self.returned.store(self.returned.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether the poll is to return at once, to let the runtime look for others. If these compute, the next one drives again.
    fn returns_at_once(&self, read_clock: impl FnOnce() -> u64) -> bool {
        let left = self.returns_until.load(Ordering::Relaxed).wrapping_sub(self.returned.load(Ordering::Relaxed));
        if left == 0 || left > RETURNS {
            return false;
        }
        let clock = read_clock();
        let pause = Duration::from_nanos(clock.saturating_sub(self.returned_at.load(Ordering::Relaxed)));
        self.returned_at.store(clock, Ordering::Relaxed);
        // At first those run that the last events have woken.
        if pause >= OTHERS_RAN
            && self.returned.load(Ordering::Relaxed).wrapping_sub(self.returned_before.load(Ordering::Relaxed)) >= SETTLED
        {
            self.others_until.store(clock + OTHERS.as_nanos() as u64, Ordering::Relaxed);
        }
        clock.saturating_sub(self.returns_since.load(Ordering::Relaxed)) < AWAKE.as_nanos() as u64
    }

    /// A poll has driven. If others are ready now and then, the next ones return at once, for about as long; else once a round, if few
    /// have returned in it.
    fn has_driven_for(&self, time: Duration, clock: u64) {
        let returned = self.returned.load(Ordering::Relaxed);
        let mut returns = 0;
        if self.has_others(clock) {
            returns = (time.saturating_sub(BRIEF).as_nanos() / RETURN.as_nanos()).min(BRIEF_RETURNS.into()) as u32;
        } else if clock.saturating_sub(self.round_at.load(Ordering::Relaxed)) >= ROUND.as_nanos() as u64 {
            let enough = returned.wrapping_sub(self.round_returned.load(Ordering::Relaxed)) >= RETURNS;
            returns = if enough { 0 } else { RETURNS };
            self.round_at.store(clock, Ordering::Relaxed);
            self.round_returned.store(returned.wrapping_add(returns), Ordering::Relaxed);
        }
        self.returned_before.store(returned, Ordering::Relaxed);
        self.returns_until.store(returned.wrapping_add(returns), Ordering::Relaxed);
        self.returns_since.store(clock, Ordering::Relaxed);
        self.returned_at.store(clock, Ordering::Relaxed);
    }

    /// Whether a future that found another to lead is to be polled again, in case that is not.
    fn stands_by(&self) -> bool {
        self.count.load(Ordering::Relaxed).wrapping_sub(self.led_at.load(Ordering::Relaxed)) <= STANDING_BY
    }

    /// The progress thread has found the lock free for a while: no future leads.
    pub(super) fn lock_was_free(&self) {
        self.leader.store(0, Ordering::Relaxed);
        self.succeeding.forget();
    }

    /// Whether calls that may wait for more are held now, if there are `any`. None are at an `event`, since they are sent later anyway,
    /// unless others are already. `hold_ended` tells how it ended.
    pub(super) fn holds(&self, any: bool, event: bool, clock: u64) -> bool {
        let held = self.held_since.load(Ordering::Relaxed) != 0;
        let holds = any && (held || !event && !self.holding.skips());
        if holds != held {
            self.held_since.store(if holds { clock.max(1) } else { 0 }, Ordering::Relaxed);
        }
        holds
    }

    /// For how long calls have been held.
    pub(super) fn held_for(&self, clock: u64) -> Duration {
        Duration::from_nanos(clock.saturating_sub(self.held_since.load(Ordering::Relaxed)))
    }

    /// An event came while calls were held, or none did.
    pub(super) fn hold_ended(&self, by_event: bool) {
        self.held_since.store(0, Ordering::Relaxed);
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

    /// Whether a future leads that this thread polls again soon.
    pub(super) fn leads_here(&self) -> bool {
        self.has_leader() && self.led_on.load(Ordering::Relaxed) == this_thread() && !self.moves()
    }

    /// An operation that was woken to lead does, or there was no need; or none was found.
    fn succeeded(&self, leads: bool) {
        self.succeeding.note_beyond(VAIN_SUCCESSORS, leads);
    }

    /// Whether the operation was woken to lead. It is not any more.
    fn succeeds(&self, operation: &Completion) -> bool {
        let succeeds = self.successor.load(Ordering::Relaxed) == address(operation);
        if succeeds {
            self.successor.store(0, Ordering::Relaxed);
        }
        succeeds
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
        let leads = may_lead && self.polls.lead(operation, || !self.driver_lock.is_free());
        operation.may_lead.store(may_lead, Ordering::Relaxed);
        if self.polls.succeeds(operation) {
            self.polls.succeeded(leads);
        }
        if leads && self.drive_in_poll(operation) || !operation.wake_task(waker) {
            return self.ended(operation);
        }
        self.polls.returns();
        if leads {
            self.polls.has_let_others_run(self.pacer.nanos());
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
        if !self.is_corked_for(waker) {
            self.uncork();
        }
        false
    }

    fn ended(&self, operation: &Completion) -> bool {
        let led = self.polls.resign(operation);
        if led {
            self.polls.leading.note(true);
            self.has_driven();
        }
        if led || self.polls.succeeds(operation) {
            self.pass_on_lead(operation);
        }
        true
    }

    /// The future that waits for the operation is dropped.
    pub(crate) fn forget_polls(&self, operation: &Completion) {
        if self.polls.resign(operation) || self.polls.succeeds(operation) {
            self.pass_on_lead(operation);
        }
    }

    /// The operation does not lead any more. If none does, the task of another one is woken to lead, and else what has waited for the next
    /// poll is sent, which may never come.
    fn pass_on_lead(&self, operation: &Completion) {
        // A child has no other threads, and locks may be held by those of its parent.
        if !self.polls.was_alone()
            && !self.is_forked()
            && !self.leads_or_drives(operation)
            && !self.unsent_may_wait.load(Ordering::Relaxed)
        {
            self.uncork();
        }
    }

    /// Whether another operation leads, or will, or a thread drives. Tasks that wait are not polled before their operations end, so one of
    /// them is woken.
    fn leads_or_drives(&self, operation: &Completion) -> bool {
        if self.polls.has_leader() {
            return true;
        }
        if let Some(awake) = self.driver_lock.holder_is_awake() {
            return !(awake && self.threads.is_handling());
        }
        let earlier = self.polls.successor.swap(0, Ordering::Relaxed);
        if earlier != 0 {
            // It has not been polled, and may be kept.
            self.polls.succeeded(false);
        }
        if self.polls.succeeding.skips() {
            return false;
        }
        let may_lead = |waiter: &Completion| {
            waiter.may_lead.load(Ordering::Relaxed)
                && waiter.led_us.load(Ordering::Relaxed) != GIVEN_UP
                && ![earlier, address(operation)].contains(&address(waiter))
                && waiter.has_task()
        };
        let next = self.proto.lock().find_waiter(|waiter: &Arc<Completion>| may_lead(waiter).then(|| waiter.clone()));
        match &next {
            Some(next) => {
                // Should it be dropped meanwhile, another operation in its place is taken for it: that costs time only.
                self.polls.successor.store(address(next), Ordering::Relaxed);
                next.wake_early();
            }
            None => self.polls.succeeded(false),
        }
        next.is_some()
    }

    fn may_lead(&self) -> bool {
        // A job is polled where others wait behind it. User code that the driver of any engine calls may poll, too.
        self.spin.is_some() && !workers::in_any_job() && !drives_any()
    }

    /// Drives for a moment; true when the operation has ended.
    fn drive_in_poll(&self, operation: &Completion) -> bool {
        if self.polls.returns_at_once(|| self.pacer.note(Instant::now())) {
            return false;
        }
        let ready = || operation.is_ready();
        let alone = self.polls.is_alone(self.proto.lock().operations_in_progress());
        let lets_others_run = self.polls.lets_others_run(self.pacer.nanos());
        // Whether the runtime gets time to look for others.
        let looks = !self.polls.moves() && (!alone || self.polls.is_busy() || self.is_external());
        if lets_others_run {
            if looks {
                self.polls.has_driven_for(Duration::ZERO, self.pacer.note(Instant::now()));
            }
            return false;
        }
        let led_us = operation.led_us.load(Ordering::Relaxed);
        let led_for = |us: u32| operation.led_us.store(led_us + us, Ordering::Relaxed);
        // Also if another caller drives meanwhile.
        led_for(AWAKE_US);
        let Some(acquired) = self.acquire_briefly(&ready) else {
            if self.threads.is_handling() {
                // The thread that has the lock runs a handler.
                self.uncork();
            }
            return ready();
        };
        let takes = !self.is_external() && (!alone || self.polls.is_busy());
        if takes && acquired == Acquired::Borrowed && self.driver_lock.take_from_progress() {
            // Once the progress thread is awake, calls that are started may wait for others: see `exec_start`.
            self.ring();
        }
        let first = led_us == 0;
        if first {
            self.pacer.found.store(true, Ordering::Relaxed);
        }
        // At the first poll others are likely to have something to do.
        let stop = || first && !alone || ready();
        // A borrowed lock is not to be returned, and borrowed again, all the time.
        let began = self.pacer.read_clock();
        let brief = !self.driver_lock.is_borrowed() && !self.polls.moves() && self.polls.has_others(self.pacer.nanos());
        let deadline = Some(began + if brief { BRIEF } else { AWAKE });
        let goal = DriveGoal { stop: &stop, announce: &|_| true, deadline, progress: false, until_event: !alone, brief };
        let received = self.polls.received.load(Ordering::Relaxed);
        let found = self.drive_as_caller(acquired, &goal, None) && !alone && !first;
        // What comes for others is not in vain, but for requests, which the progress thread would handle itself.
        let found = found && self.polls.received.load(Ordering::Relaxed) == received;
        let looks = looks && (!alone || !ready());
        if brief || looks {
            let took = self.pacer.read_clock().saturating_duration_since(began);
            if brief && !found {
                led_for((took.as_micros() as u32).clamp(BRIEF_US, AWAKE_US));
            }
            if looks {
                self.polls.has_driven_for(took, self.pacer.nanos());
            }
        }
        if found {
            operation.led_us.store(if self.polls.rests() { GIVEN_UP } else { AWAKE_US }, Ordering::Relaxed);
        }
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

    /// How many polls, so far apart, lead before others run.
    fn polls_until_others_run(polls: &Polls, clock: &mut u64, apart: Duration) -> usize {
        let due = || {
            *clock += apart.as_nanos() as u64;
            polls.lets_others_run(*clock)
        };
        let count = std::iter::repeat_with(due).take_while(|due| !due).count();
        polls.has_let_others_run(*clock);
        count
    }

    #[test]
    fn task_that_leads_lets_others_run_every_20_us() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        polls.has_let_others_run(clock);
        for _ in 0..3 {
            assert_eq!(polls_until_others_run(&polls, &mut clock, Duration::from_micros(2)), 9);
            assert_eq!(polls_until_others_run(&polls, &mut clock, Duration::from_micros(7)), 2);
        }
    }

    /// A task that has slept has let others run; one that computes has not.
    #[test]
    fn long_pause_between_two_polls_counts_in_part() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        polls.has_let_others_run(clock);
        assert_eq!(polls_until_others_run(&polls, &mut clock, Duration::from_millis(20)), 1);
        assert_eq!(polls_until_others_run(&polls, &mut clock, Duration::from_millis(20)), 1);
    }

    /// How many polls return at once, each so long after the last one.
    fn returns(polls: &Polls, clock: &mut u64, pause: Duration) -> u32 {
        let returns = || {
            *clock += pause.as_nanos() as u64;
            polls.returns_at_once(|| *clock).then(|| polls.returns())
        };
        std::iter::repeat_with(returns).take_while(Option::is_some).count() as u32
    }

    const QUICK: Duration = Duration::from_nanos(100);

    #[test]
    fn in_each_round_some_polls_return_at_once() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        assert_eq!(returns(&polls, &mut clock, QUICK), 0);
        for _ in 0..3 {
            clock += ROUND.as_nanos() as u64;
            polls.has_driven_for(AWAKE, clock);
            assert_eq!(returns(&polls, &mut clock, QUICK), RETURNS);
            assert!(!polls.has_others(clock));
            polls.has_driven_for(AWAKE, clock);
            assert_eq!(returns(&polls, &mut clock, QUICK), 0, "not twice in a round");
        }
        (0..RETURNS).for_each(|_| polls.returns());
        clock += ROUND.as_nanos() as u64;
        polls.has_driven_for(AWAKE, clock);
        assert_eq!(returns(&polls, &mut clock, QUICK), 0, "enough have");
    }

    #[test]
    fn while_there_are_others_polls_return_at_once_for_as_long_as_one_has_driven() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        polls.has_driven_for(AWAKE, clock);
        assert_eq!(returns(&polls, &mut clock, OTHERS_RAN), 9, "for 20 us");
        assert!(polls.has_others(clock));
        for (driven, expected) in [(BRIEF, 0), (BRIEF + 5 * RETURN, 5), (AWAKE, BRIEF_RETURNS), (BRIEF + RETURN, 1)] {
            polls.has_driven_for(driven, clock);
            assert_eq!(returns(&polls, &mut clock, QUICK), expected);
        }
        clock += OTHERS.as_nanos() as u64;
        assert!(!polls.has_others(clock));
    }

    /// Those that the last events have woken, before the runtime can have looked for others.
    #[test]
    fn tasks_that_run_at_first_are_no_others() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        polls.has_driven_for(AWAKE, clock);
        for _ in 0..SETTLED {
            clock += OTHERS_RAN.as_nanos() as u64;
            assert!(polls.returns_at_once(|| clock));
            polls.returns();
        }
        assert!(returns(&polls, &mut clock, QUICK) > 0 && !polls.has_others(clock));
    }

    #[test]
    fn successor_is_woken_each_time_unless_it_was_of_no_use_many_times() {
        let polls = Polls::default();
        let is_woken = |of_use: bool| {
            let woken = !polls.succeeding.skips();
            if woken {
                polls.succeeded(of_use);
            }
            woken
        };
        for _ in 0..2 {
            assert!((0..=VAIN_SUCCESSORS).all(|_| is_woken(false)) && !is_woken(false));
            assert!(is_woken(true));
            assert!((0..=VAIN_SUCCESSORS).all(|_| is_woken(false)) && !is_woken(false), "no fewer than before");
            // The progress thread has found the lock free.
            polls.lock_was_free();
        }
    }

    #[test]
    fn operation_succeeds_once() {
        let (polls, operation) = (Polls::default(), Completion::new());
        assert!(!polls.succeeds(&operation));
        polls.successor.store(address(&operation), Ordering::Relaxed);
        assert!(!polls.succeeds(&Completion::new()) && polls.succeeds(&operation) && !polls.succeeds(&operation));
    }

    #[test]
    fn future_leads_on_the_thread_that_has_polled_it() {
        let (polls, operation) = (Polls::default(), Completion::new());
        assert!(!polls.leads_here());
        assert!(polls.lead(&operation, || false) && polls.leads_here());
        std::thread::scope(|scope| assert!(!scope.spawn(|| polls.leads_here()).join().unwrap()));
        leads_elsewhere(&polls, &operation);
        assert!(!polls.leads_here());
        assert!(polls.lead(&operation, || false) && !polls.leads_here(), "it moves");
        polls.moved_until.store(0, Ordering::Relaxed);
        assert!(polls.leads_here() && polls.resign(&operation) && !polls.leads_here());
    }

    fn leads_elsewhere(polls: &Polls, operation: &Completion) {
        std::thread::scope(|scope| assert!(scope.spawn(|| polls.lead(operation, || false)).join().unwrap()));
    }

    #[test]
    fn operation_that_leads_on_two_threads_moves() {
        let (polls, operation, other) = (Polls::default(), Completion::new(), Completion::new());
        assert!(polls.lead(&operation, || false) && polls.lead(&operation, || false) && !polls.moves());
        leads_elsewhere(&polls, &operation);
        for _ in 1..MOVED_POLLS {
            assert!(polls.moves());
            polls.resign(&operation);
            assert!(polls.lead(&other, || false));
        }
        assert!(polls.lead(&other, || false) && !polls.moves());
        // Tasks of two threads, which stay where they are.
        polls.resign(&other);
        leads_elsewhere(&polls, &Completion::new());
        assert!(!polls.moves());
    }

    #[test]
    fn operation_that_has_led_in_vain_gives_up_and_so_does_the_next() {
        let (polls, operation) = (Polls::default(), Completion::new());
        operation.led_us.store(LEADS_FOR_US - 1, Ordering::Relaxed);
        assert!(polls.lead(&operation, || false));
        operation.led_us.store(LEADS_FOR_US, Ordering::Relaxed);
        let leads = |operation: &Completion| (0..3).any(|_| polls.lead(operation, || false));
        assert!(!leads(&operation) && !polls.has_leader());
        assert!(!leads(&Completion::new()) && leads(&Completion::new()));
    }

    #[test]
    fn hold_goes_on_from_one_drive_to_the_next() {
        let polls = Polls::default();
        assert!(!polls.holds(false, false, 3) && !polls.holds(true, true, 4) && polls.holds(true, false, 5));
        assert!(polls.holds(true, false, 9) && polls.holds(true, true, 9));
        assert_eq!(polls.held_for(15), Duration::from_nanos(10));
        assert!(!polls.holds(false, false, 16) && polls.holds(true, false, 17), "they were sent, and then there are others");
        assert_eq!(polls.held_for(18), Duration::from_nanos(1));
        polls.hold_ended(false);
        assert!(!polls.holds(true, true, 19), "an event is no chance to hold that is skipped");
        assert!(!polls.holds(true, false, 20) && polls.holds(true, false, 21), "one that was in vain is followed by none");
    }

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

    #[test]
    fn operations_that_lead_without_a_pause_are_busy() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        let mut goes_on = |pause: Duration| {
            clock += pause.as_nanos() as u64;
            polls.has_let_others_run(clock);
            polls.is_busy()
        };
        let rare = || Duration::from_millis(20);
        assert!(!goes_on(rare()) && (0..15).all(|_| !goes_on(LONGEST_PAUSE)) && goes_on(LONGEST_PAUSE));
        assert!(!goes_on(rare()), "the runtime has slept");
    }

    #[test]
    fn one_operation_rests_after_others_have_led_for_64_ms() {
        let (polls, mut clock) = (Polls::default(), 1 << 40);
        for _ in 0..3 {
            for _ in 0..6400 {
                let operation = Completion::new();
                assert!(polls.lead(&operation, || false));
                clock += 20_000_000;
                polls.lets_others_run(clock);
                assert!(polls.resign(&operation));
            }
            let rests = Completion::new();
            assert!(!polls.lead(&rests, || false) && !polls.has_leader(), "the progress thread drives");
            assert!(!polls.lead(&rests, || false), "until it has ended");
        }
    }
}
