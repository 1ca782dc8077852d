//! The event loop, run by the thread that holds the driver lock.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::Core;
use super::completion::{Awaited, ThreadSleeper, ThreadWaiter, with_sleeper};
use super::driver_lock::Acquired;
use super::handler_paused::HandlerPaused;
use super::pacer::YIELD_AFTER;
use super::steps::{CoreSink, Outputs, PendingOutputs, collect};
use super::workers::{self, Job};
use crate::deferred_log::defer;
use crate::sync::atomic::Ordering;
use crate::sync::{Instant, thread_local};

const WAKER: mio::Token = mio::Token(usize::MAX);
/// The upper bits of a token are the index of its transport.
const TOKEN_SHIFT: u32 = usize::BITS - 8;
/// How often an awake driver polls the reactor and the timers. It polls busy transports directly, and the others can wait
/// this long.
const CHECK_INTERVAL: Duration = Duration::from_micros(40);
/// Reading the clock takes as long as polling an idle transport, or longer. At most this many polls are made between two
/// readings, and fewer if they take longer than about `CLOCK_INTERVAL_NS`.
const MAX_POLLS: u32 = 64;
const CLOCK_INTERVAL_NS: u64 = 3_000;
/// So many polls a brief drive makes between two readings.
const BRIEF_POLLS: u32 = 2;
/// What a poll that finds something counts as, in polls that find nothing: it takes longer.
const BUSY_POLL: u32 = 8;
/// After a yield that brought an event, the next so many yields happen without spinning first: two threads that share a
/// processor would else spin in vain in turn.
const IMMEDIATE_YIELDS: u32 = 16;
/// How long a future that leads in a crowd holds calls that may wait for more, while the answers to others may come.
const HOLD: Duration = Duration::from_micros(10);
/// How long a caller stays awake while another thread drives, how long the poll of a future drives, and after which time a task
/// that drives lets others run.
pub(super) const AWAKE: Duration = Duration::from_micros(20);

pub(super) fn first_token(transport: usize) -> usize {
    transport << TOKEN_SHIFT
}

/// The reactor, which the driver polls and blocks in.
pub(super) struct Driver {
    poll: mio::Poll,
    events: mio::Events,
    /// `events` are not handled yet: a thread has lost the driver lock while it slept. The reactor reports each event once.
    unhandled: bool,
}

impl Driver {
    pub(super) fn new() -> io::Result<Driver> {
        Ok(Driver { poll: mio::Poll::new()?, events: mio::Events::with_capacity(256), unhandled: false })
    }

    pub(super) fn waker(&self) -> io::Result<mio::Waker> {
        mio::Waker::new(self.poll.registry(), WAKER)
    }

    pub(super) fn registry(&self) -> io::Result<mio::Registry> {
        self.poll.registry().try_clone()
    }

    /// The reactor's own descriptor, which is readable when it has events.
    pub(super) fn reactor(&self) -> &mio::Registry {
        self.poll.registry()
    }

    /// Polls the reactor; false when it has no event but wake-ups. The timeout is rounded up to what the system can do.
    fn poll_events(&mut self, timeout: Option<Duration>) -> bool {
        match self.poll.poll(&mut self.events, timeout) {
            Ok(()) => self.events.iter().any(|event| event.token() != WAKER),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                self.events.clear();
                false
            }
            Err(error) => {
                defer(move || tracing::error!(target: "calomel::progress", %error, "the reactor failed"));
                self.events.clear();
                false
            }
        }
    }
}

thread_local! {
    /// The engine that this thread drives; 0 for none.
    static DRIVING: Cell<usize> = const { Cell::new(0) };
}

/// True on a thread that drives an engine, and on one that is ending.
pub(super) fn drives_any() -> bool {
    DRIVING.try_with(|driving| driving.get() != 0).unwrap_or(true)
}

/// Identifies the calling thread among those that live; 0 for one that is ending.
pub(super) fn this_thread() -> usize {
    DRIVING.try_with(|driving| std::ptr::from_ref(driving).addr()).unwrap_or(0)
}

/// Marks the thread as driving while it lives.
struct Driving {
    outer: usize,
}

impl Driving {
    fn enter(core: &Core) -> Driving {
        Driving { outer: DRIVING.replace(core.identity()) }
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        DRIVING.set(self.outer);
    }
}

/// A caller holds the driver lock; dropping this releases it.
pub(super) struct DriverGuard<'a>(&'a Core);

impl Drop for DriverGuard<'_> {
    fn drop(&mut self) {
        self.0.release_driver();
    }
}

/// Why a drive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriveEnd {
    /// `DriveGoal::stop` returned true.
    Stopped,
    Deadline,
    /// There are jobs to run.
    Jobs,
    /// A caller has taken the driver lock while the progress thread slept.
    LockTaken,
}

/// What a thread drives for.
#[derive(Clone, Copy)]
pub(super) struct DriveGoal<'a> {
    /// True when the thread has what it waits for, or has to release the driver lock.
    pub stop: &'a dyn Fn() -> bool,
    /// Registers the thread to be woken when `stop` turns true; false when it is true already.
    pub announce: &'a dyn Fn(&Arc<ThreadWaiter>) -> bool,
    pub deadline: Option<Instant>,
    /// The progress thread drives, not a caller.
    pub progress: bool,
    /// Any event ends the drive.
    pub until_event: bool,
    /// The deadline is at hand, and such drives follow one another: this one does not sleep.
    pub brief: bool,
}

/// How a sleep ended.
enum WakeCause {
    Event,
    NoEvent,
    LockTaken,
}

impl Core {
    /// Waits until `ready`, driving if no other thread does. Before the thread sleeps, `announce` has to register it to be
    /// woken when `ready` turns true; it returns false when that is so already. False when the deadline came first.
    pub(crate) fn wait(
        &self,
        ready: &dyn Fn() -> bool,
        announce: &dyn Fn(&Arc<ThreadWaiter>) -> bool,
        deadline: Option<Instant>,
        awaited: Awaited,
    ) -> bool {
        if ready() {
            return true;
        }
        if self.is_driving() {
            // A waker, or the drop of what a lease keeps, waits on the thread that must deliver the event: a deadlock.
            tracing::error!(target: "calomel::progress", "user code that runs on the driver must not wait for the engine");
            return false;
        }
        // The peer must get what this thread has queued, and other threads may run jobs in place of this one while it waits.
        self.uncork();
        let _blocking = workers::Blocking::enter();
        let paused = self.pause_handler(awaited);
        let goal = DriveGoal { stop: ready, announce, deadline, progress: false, until_event: false, brief: false };
        let ready = match self.driver_lock.try_acquire() {
            Some(acquired) => self.drive_as_caller(acquired, &goal, Some(&paused)),
            None => with_sleeper(|sleeper| {
                announce(&sleeper.waiter);
                self.wait_in_queue(sleeper, &goal, &paused)
            }),
        };
        if !paused.is_progress() {
            self.has_driven();
        }
        ready
    }

    fn wait_in_queue(&self, sleeper: &ThreadSleeper, goal: &DriveGoal<'_>, paused: &HandlerPaused<'_>) -> bool {
        let DriveGoal { stop: ready, deadline, .. } = *goal;
        // Not queued yet: a release need not wake a thread that is awake.
        self.wait_awake(&|| ready() || self.driver_lock.is_free());
        if ready() {
            return true;
        }
        // This thread may sleep now.
        paused.pass_on_all();
        let over = || ready() || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        match self.acquire_queued(sleeper, &over, deadline) {
            Some(acquired) => self.drive_as_caller(acquired, goal, None),
            None => ready(),
        }
    }

    /// Acquires the driver lock when other threads release it; `None` when it is `over` before.
    pub(super) fn acquire_queued(
        &self,
        sleeper: &ThreadSleeper,
        over: &dyn Fn() -> bool,
        deadline: Option<Instant>,
    ) -> Option<Acquired> {
        let me = &sleeper.waiter;
        let mut queued = false;
        while !over() {
            match self.driver_lock.acquire_or_queue(me) {
                Acquired::Queued { soon } => {
                    queued = true;
                    if !(soon && self.wait_awake(&|| over() || self.driver_lock.is_free())) {
                        sleeper.sleep(deadline);
                    }
                }
                acquired => return Some(acquired),
            }
        }
        if queued {
            self.driver_lock.leave_queue(me);
        }
        None
    }

    /// Waits for `done` without sleeping, for a moment at most; whether it came. Waking a thread takes longer than most calls.
    /// The thread that drives may want this processor, so it is yielded all the time.
    pub(super) fn wait_awake(&self, done: &dyn Fn() -> bool) -> bool {
        if self.spin.is_none() {
            return done();
        }
        let end = Instant::now() + AWAKE;
        while !done() {
            if Instant::now() >= end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// True on the thread that drives this engine, while it does: user code on it is a waker or a hook.
    pub(crate) fn is_driving(&self) -> bool {
        DRIVING.try_with(|driving| driving.get() == self.identity()).unwrap_or(true)
    }

    /// The calling thread has acquired the driver lock, and releases it by dropping the guard.
    pub(super) fn begin_driving(&self, acquired: Acquired) -> DriverGuard<'_> {
        if acquired == Acquired::Borrowed {
            // The thread that sleeps in the reactor asked them to wake it; now this thread polls them.
            self.transports.iter().for_each(|transport| transport.unpark());
            // The engine slept, so the peer may sleep too: the system may well wake it on this processor.
            self.pacer.yields.store(IMMEDIATE_YIELDS, Ordering::Relaxed);
            if self.is_external() {
                // It is awake, and need not be rung for an earlier deadline.
                self.asleep_until.store(0, Ordering::SeqCst);
            }
        }
        DriverGuard(self)
    }

    /// Drives until the goal is reached; false when the deadline came first. `paused`: the handler that waits for it, if one does.
    pub(super) fn drive_as_caller(&self, acquired: Acquired, goal: &DriveGoal<'_>, paused: Option<&HandlerPaused<'_>>) -> bool {
        let _guard = self.begin_driving(acquired);
        if acquired == Acquired::Borrowed && self.outlasts_a_wake_up(goal.deadline) {
            self.transports.iter().for_each(|transport| transport.mute());
        }
        if !goal.brief {
            // The thread has just sent something, and an answer may come soon.
            self.pacer.found.store(true, Ordering::Relaxed);
        }
        let mut jobs = Vec::new();
        loop {
            let kept_until = paused.and_then(HandlerPaused::keeps_jobs_until);
            let deadline = [goal.deadline, kept_until].into_iter().flatten().min();
            let ended = self.drive(&mut jobs, &DriveGoal { deadline, ..*goal });
            // User code waits on this thread, and may hold locks that a handler wants: handlers must not run here.
            match paused {
                Some(paused) => paused.keep_or_pass_on(&mut jobs, ended != DriveEnd::Stopped),
                None => {
                    if !jobs.is_empty() {
                        self.polls.received.fetch_add(1, Ordering::Relaxed);
                    }
                    jobs.drain(..).for_each(|job| self.dispatch(job));
                }
            }
            match ended {
                DriveEnd::Stopped => return true,
                // Requests may arrive faster than the clock is read.
                DriveEnd::Deadline | DriveEnd::Jobs => {
                    if goal.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return (goal.stop)();
                    }
                }
                DriveEnd::LockTaken => {}
            }
        }
    }

    /// Whether the peer is likely to sleep, as this engine did, and a thread that drives until the deadline will see the answer of a
    /// peer that has to wake up. Then that should not wake the progress thread of this engine as well.
    fn outlasts_a_wake_up(&self, deadline: Option<Instant>) -> bool {
        let time = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(self.pacer.now()));
        self.spin.is_some_and(|spin| self.pacer.quiet() >= spin && time >= spin)
    }

    /// Releases the driver lock for a caller, or returns it to the progress thread that it was borrowed from.
    fn release_driver(&self) {
        if self.driver_lock.is_borrowed() {
            // The progress thread goes on sleeping, and has to be woken by the next event.
            let all_idle = self.transports.iter().filter(|transport| !transport.park()).count() == 0;
            if let Some(external) = &self.external {
                self.set_timer(external);
            }
            if self.driver_lock.release_borrowed() {
                self.send_left_answers();
                if !all_idle || self.unsent.load(Ordering::SeqCst) {
                    self.ring();
                }
                if let Some(external) = &self.external {
                    self.repeat_refused(external);
                }
                return self.check_alarm();
            }
            self.transports.iter().for_each(|transport| transport.unpark());
        }
        self.driver_lock.release();
        self.send_left_answers();
    }

    /// Polls for events until the goal is reached, or there are jobs. The calling thread holds the driver lock.
    pub(super) fn drive(&self, jobs: &mut Vec<Job>, goal: &DriveGoal<'_>) -> DriveEnd {
        let _driving = Driving::enter(self);
        let mut pending = PendingOutputs::new();
        // These go on from one drive to the next: the clock must be read even when each drive takes a poll or two.
        let pacer = &self.pacer;
        let mut pace = pacer.pace.load(Ordering::Relaxed);
        let mut left = if goal.brief { BRIEF_POLLS } else { pacer.left.load(Ordering::Relaxed) };
        if goal.until_event || goal.brief || (goal.stop)() {
            // It may well end before the reactor is polled below, again and again where jobs follow one another.
            self.poll_reactor_if_due(pacer.clock.load(Ordering::Relaxed), &mut pending, jobs);
        }
        let mut held_in_vain = false;
        // After a yield: whether it came after a long time without events.
        let mut yielded = match pacer.yielded.load(Ordering::Relaxed) {
            0 => None,
            how => Some(how == 2),
        };
        // The last poll found nothing; another thread has run on this processor since.
        let (mut in_vain, mut switched) = (false, false);
        let ended = loop {
            let mut any = false;
            for transport in &self.transports {
                any |= transport.poll(&mut CoreSink { core: self, pending: &mut pending });
            }
            // Tasks that are woken may have more to send, and an answer may come soon that wakes others.
            let may_hold = !held_in_vain && self.unsent.load(Ordering::Relaxed) && self.unsent_may_wait.load(Ordering::Relaxed);
            let holds = goal.until_event && self.polls.holds(may_hold, any, pacer.clock.load(Ordering::Relaxed));
            let sends_later = goal.until_event && any || holds;
            if !sends_later && self.unsent.load(Ordering::Relaxed) {
                any = true;
                self.send_unsent(jobs);
            }
            if pending.has_any() {
                self.execute_deferred(&mut pending, jobs);
            }
            if any {
                pacer.found.store(true, Ordering::Relaxed);
                if holds {
                    self.polls.hold_ended(true);
                }
                // Only the progress thread moves.
                if in_vain && goal.progress {
                    pacer.note_crowded(switched);
                }
                if let Some(waited) = yielded.take() {
                    let yields = pacer.yields.load(Ordering::Relaxed);
                    let yields = if waited { IMMEDIATE_YIELDS } else { yields.saturating_sub(1) };
                    pacer.yields.store(yields, Ordering::Relaxed);
                }
            }
            (in_vain, switched) = (!any, false);
            if (goal.stop)() || any && goal.until_event {
                break DriveEnd::Stopped;
            }
            if !jobs.is_empty() {
                break DriveEnd::Jobs;
            }
            left = left.saturating_sub(if any { BUSY_POLL } else { 1 });
            if left > 0 {
                if !any && self.spin.is_some() {
                    std::hint::spin_loop();
                }
                continue;
            }
            let before = pacer.clock.load(Ordering::Relaxed);
            let now = Instant::now();
            let now_ns = pacer.note(now);
            let took = now_ns.saturating_sub(before);
            if !goal.brief && took < CLOCK_INTERVAL_NS / 2 {
                pace = (2 * pace).min(MAX_POLLS);
            } else if !goal.brief && took > CLOCK_INTERVAL_NS * 2 {
                pace = (pace / 2).max(1);
            }
            left = if goal.brief { BRIEF_POLLS } else { pace };
            if self.poll_reactor_if_due(now_ns, &mut pending, jobs) {
                left = 1;
                continue;
            }
            if holds && self.polls.held_for(now_ns) >= HOLD {
                self.polls.hold_ended(false);
                (held_in_vain, left) = (true, 1);
                continue;
            }
            let over = goal.deadline.is_some_and(|deadline| now >= deadline);
            if over && !goal.brief {
                break DriveEnd::Deadline;
            }
            let found = pacer.found.load(Ordering::Relaxed);
            if found {
                pacer.found.store(false, Ordering::Relaxed);
                pacer.active.store(now_ns, Ordering::Relaxed);
            }
            let quiet = pacer.quiet();
            let spins = self.spin.is_some_and(|spin| quiet < spin);
            if !found && spins && pacer.is_to_yield(quiet, now_ns, goal.brief) {
                yielded = Some(quiet >= YIELD_AFTER);
                switched = pacer.yield_processor(now_ns, goal.progress);
            }
            if over {
                break DriveEnd::Deadline;
            }
            if found || spins || goal.brief {
                continue;
            }
            match self.sleep(&mut pending, jobs, goal) {
                WakeCause::Event => {
                    pacer.found.store(true, Ordering::Relaxed);
                    pacer.yields.store(IMMEDIATE_YIELDS, Ordering::Relaxed);
                }
                // A timer may be due.
                WakeCause::NoEvent => pacer.next_check.store(0, Ordering::Relaxed),
                WakeCause::LockTaken => break DriveEnd::LockTaken,
            }
            left = 1;
        };
        pacer.pace.store(pace, Ordering::Relaxed);
        pacer.left.store(left, Ordering::Relaxed);
        pacer.yielded.store(if goal.brief { yielded.map_or(0, |waited| 1 + u32::from(waited)) } else { 0 }, Ordering::Relaxed);
        pending.keep();
        ended
    }

    /// Sends what other threads have left for the driver.
    fn send_unsent(&self, jobs: &mut Vec<Job>) {
        let mut outputs = Outputs::new();
        collect(self, &mut self.proto.lock(), &mut outputs);
        self.execute_outputs(outputs, Some(jobs));
    }

    /// Polls the reactor and the timers every `CHECK_INTERVAL`. True when there was any event.
    fn poll_reactor_if_due(&self, now: u64, pending: &mut PendingOutputs, jobs: &mut Vec<Job>) -> bool {
        let pacer = &self.pacer;
        if now < pacer.next_check.load(Ordering::Relaxed) {
            return false;
        }
        pacer.next_check.store(now + CHECK_INTERVAL.as_nanos() as u64, Ordering::Relaxed);
        let any = self.poll_reactor(pacer.now(), pending, jobs);
        if any {
            pacer.found.store(true, Ordering::Relaxed);
        }
        any
    }

    /// Handles the events of the reactor, if no thread sleeps in it, and the timers that are due. True when there was any.
    pub(super) fn poll_reactor(&self, now: Instant, pending: &mut PendingOutputs, jobs: &mut Vec<Job>) -> bool {
        let mut any = false;
        if let Some(mut driver) = self.driver.try_lock() {
            any = std::mem::take(&mut driver.unhandled) || driver.poll_events(Some(Duration::ZERO));
            driver.events.iter().for_each(|event| self.take_event(event, pending));
        }
        self.execute_deferred(pending, jobs);
        any | self.expire(now, jobs)
    }

    fn take_event(&self, event: &mio::event::Event, pending: &mut PendingOutputs) {
        let token = event.token();
        if token != WAKER
            && let Some(transport) = self.transports.get(token.0 >> TOKEN_SHIFT)
        {
            transport.ready(token.0, event, &mut CoreSink { core: self, pending });
        }
    }

    /// Blocks in the reactor, unless an event has arrived meanwhile.
    fn sleep(&self, pending: &mut PendingOutputs, jobs: &mut Vec<Job>, goal: &DriveGoal<'_>) -> WakeCause {
        // An event loop does not sleep in the reactor.
        if !self.is_external() && self.driver_lock.take_from_progress() {
            self.ring();
        }
        let Some(mut driver) = self.reactor(goal.deadline) else { return WakeCause::NoEvent };
        if driver.unhandled {
            // The next check is due at once.
            return WakeCause::NoEvent;
        }
        let announced = with_sleeper(|sleeper| {
            // Each of these steps makes other threads ring the reactor from then on; what they did before that is checked
            // afterwards.
            sleeper.waiter.set_blocks_in(Some(self.waker.clone()));
            (goal.announce)(&sleeper.waiter)
        });
        let all_idle = self.transports.iter().filter(|transport| !transport.park()).count() == 0;
        self.asleep_until.store(u64::MAX, Ordering::SeqCst);
        let next = [self.next_alarm(), goal.deadline].into_iter().flatten().min();
        self.asleep_until.store(next.map_or(u64::MAX, |next| self.micros(next)), Ordering::SeqCst);
        let mut any = true;
        let mut has_lock = true;
        // Once the lock is parked, callers borrow it from a progress thread without waking that.
        if announced && all_idle && self.driver_lock.park() {
            if !(goal.stop)() && !self.is_stopping() && !self.unsent.load(Ordering::SeqCst) {
                let timeout = next.map(|next| next.saturating_duration_since(Instant::now()));
                // The driver alone changes it: no other thread has the reactor.
                self.pacer.sleeps.store(self.pacer.sleeps.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                any = driver.poll_events(timeout);
                if goal.progress {
                    // Rare calls would not pay for a move.
                    self.pacer.note_crowded(false);
                }
            } else {
                driver.events.clear();
            }
            if goal.progress {
                has_lock = self.driver_lock.unpark_progress();
            } else {
                self.driver_lock.unpark();
            }
        } else {
            driver.events.clear();
        }
        self.asleep_until.store(0, Ordering::SeqCst);
        with_sleeper(|sleeper| sleeper.waiter.set_blocks_in(None));
        self.pacer.read_clock();
        if !has_lock {
            let unhandled = driver.events.iter().any(|event| event.token() != WAKER);
            driver.unhandled = unhandled;
            if unhandled {
                // The thread that drives now is to look soon. It does in any case before it sleeps.
                self.pacer.next_check.store(0, Ordering::Relaxed);
            }
            return WakeCause::LockTaken;
        }
        self.transports.iter().for_each(|transport| transport.unpark());
        driver.events.iter().for_each(|event| self.take_event(event, pending));
        drop(driver);
        self.execute_deferred(pending, jobs);
        if any { WakeCause::Event } else { WakeCause::NoEvent }
    }

    pub(super) fn next_alarm(&self) -> Option<Instant> {
        let proto = self.proto.lock().next_timeout();
        let timers = self.timers.lock().pending.first_key_value().map(|((at, _), _)| *at);
        let transports = self.transports.iter().filter_map(|transport| transport.next_alarm());
        transports.chain(proto).chain(timers).min()
    }

    /// Runs the timers that are due. True when any was.
    fn expire(&self, now: Instant, jobs: &mut Vec<Job>) -> bool {
        let mut due = Vec::new();
        {
            let mut timers = self.timers.lock();
            while let Some(entry) = timers.pending.first_entry() {
                if entry.key().0 > now {
                    break;
                }
                due.push(entry.remove());
            }
        }
        let mut any = !due.is_empty();
        due.into_iter().for_each(|f| self.run_timer(f, jobs));
        let mut outputs = Outputs::new();
        {
            let mut proto = self.proto.lock();
            if proto.next_timeout().is_some_and(|at| at <= now) {
                any = true;
                proto.handle_timeout(now);
                collect(self, &mut proto, &mut outputs);
            }
        }
        self.execute_outputs(outputs, Some(jobs));
        any
    }
}
