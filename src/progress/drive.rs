//! The event loop, as whoever has the seat runs it.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::completion::{ThreadWaiter, with_sleeper};
use super::driver_lock::Acquired;
use super::sink::CoreSink;
use super::threads::HandlerPaused;
use super::workers::{self, Job, JobKind};
use super::{Core, HANDED_OFF, Outputs, PendingOutputs, UNSENT, collect};
use crate::deferred_log::defer;
use crate::sync::atomic::Ordering;
use crate::sync::{Instant, thread_local};

const WAKER: mio::Token = mio::Token(usize::MAX);
/// Transports are told apart by the upper bits of their tokens.
const TOKEN_SHIFT: u32 = usize::BITS - 8;
/// So often the reactor and the timers are looked at, when whoever drives is awake: transports that are busy are polled
/// directly, and the others can wait so long.
const LOOK: Duration = Duration::from_micros(40);
/// Asking for the time takes as long as polling an idle transport, or longer. So many polls are made in between at most, and
/// so few that they take about this many nanoseconds.
const MAX_POLLS: u32 = 64;
const BETWEEN_LOOKS_AT_CLOCK: u64 = 3_000;
/// A poll that finds something takes longer than one that does not.
const BUSY_POLL: u32 = 8;
/// Whoever has spun for this long for nothing lets others run on its processor: the one that it waits for, perhaps.
const YIELD_AFTER: Duration = Duration::from_micros(10);
/// Where that has brought what was waited for, it is done without delay so many times: two threads that share a processor
/// would else spin in vain in turn.
const YIELD_AT_ONCE: u32 = 16;
/// A caller that wants the seat from a progress thread which is awake gets it within this, or sleeps.
const SOON: Duration = Duration::from_micros(20);

pub(super) fn first_token(transport: usize) -> usize {
    transport << TOKEN_SHIFT
}

/// The reactor's side that blocks.
pub(super) struct Driver {
    poll: mio::Poll,
    events: mio::Events,
}

impl Driver {
    pub(super) fn new() -> io::Result<Driver> {
        Ok(Driver { poll: mio::Poll::new()?, events: mio::Events::with_capacity(256) })
    }

    pub(super) fn waker(&self) -> io::Result<mio::Waker> {
        mio::Waker::new(self.poll.registry(), WAKER)
    }

    pub(super) fn registry(&self) -> io::Result<mio::Registry> {
        self.poll.registry().try_clone()
    }

    /// Asks the reactor; false when nothing came, but to wake whoever sleeps. The timeout is rounded up to what the system can do.
    fn ask(&mut self, timeout: Option<Duration>) -> bool {
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

/// While it lives, the thread drives.
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

/// While it lives, a caller sits.
struct DriverGuard<'a>(&'a Core);

impl Drop for DriverGuard<'_> {
    fn drop(&mut self) {
        self.0.release_driver();
    }
}

/// Why a drive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriveEnd {
    /// What was waited for is there, or the sitter is to get up.
    Asked,
    Deadline,
    /// There are jobs to do.
    Jobs,
    /// A caller has taken the seat while the progress thread slept.
    LockTaken,
}

/// What whoever drives does it for.
pub(super) struct DriveGoal<'a> {
    /// It is there, or the sitter is to get up.
    pub stop: &'a dyn Fn() -> bool,
    /// Sees to it that this thread is woken when it is there; false when it is already.
    pub announce: &'a dyn Fn(&Arc<ThreadWaiter>) -> bool,
    pub deadline: Option<Instant>,
    /// The progress thread drives, not a caller.
    pub progress: bool,
}

/// How a sleep ended.
enum WakeCause {
    BySomething,
    ByNothing,
    SeatTaken,
}

impl Core {
    /// Waits until `ready`, driving if nobody else does. Before the thread sleeps, `announce` has to see to it that it is
    /// woken when `ready` turns true; it says false when that is so already. False when the deadline came first.
    pub(crate) fn wait(
        &self,
        ready: &dyn Fn() -> bool,
        announce: &dyn Fn(&Arc<ThreadWaiter>) -> bool,
        deadline: Option<Instant>,
    ) -> bool {
        if ready() {
            return true;
        }
        if self.is_driving() {
            // A waker, or what a lease keeps, waits on the thread that is to bring the news: that would be for ever.
            tracing::error!(target: "calomel::progress", "a waker must not wait");
            return false;
        }
        // What this thread has said must be out, and others may do what it does not while it waits.
        self.uncork();
        let _blocking = workers::Blocking::enter();
        let _resting = HandlerPaused::enter(self);
        let purpose = DriveGoal { stop: ready, announce, deadline, progress: false };
        match self.driver_lock.try_acquire() {
            Some(sat) => self.drive_as_caller(sat, &purpose),
            None => with_sleeper(|sleeper| {
                announce(&sleeper.waiter);
                self.wait_in_queue(sleeper, &purpose)
            }),
        }
    }

    fn wait_in_queue(&self, sleeper: &super::completion::ThreadSleeper, purpose: &DriveGoal<'_>) -> bool {
        let me = &sleeper.waiter;
        let DriveGoal { stop: ready, deadline, .. } = *purpose;
        let mut queued = false;
        let done = loop {
            if ready() {
                break true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break false;
            }
            match self.driver_lock.acquire_or_queue(me) {
                Acquired::Queued { soon } => {
                    queued = true;
                    if !(soon && self.spin.is_some() && self.spin_until(SOON, &|| ready() || self.driver_lock.is_free())) {
                        sleeper.sleep(deadline);
                    }
                }
                sat => return self.drive_as_caller(sat, purpose),
            }
        };
        if queued {
            self.driver_lock.leave_queue(me);
        }
        done
    }

    /// Spins until `done`, for a moment at most; whether it was.
    fn spin_until(&self, moment: Duration, done: &dyn Fn() -> bool) -> bool {
        let end = Instant::now() + moment;
        loop {
            for _ in 0..16 {
                if done() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= end {
                return false;
            }
        }
    }

    /// True on the thread that drives this engine, while it does: in wakers, that is.
    pub(crate) fn is_driving(&self) -> bool {
        DRIVING.try_with(|driving| driving.get() == self.identity()).unwrap_or(true)
    }

    fn drive_as_caller(&self, sat: Acquired, purpose: &DriveGoal<'_>) -> bool {
        let _sitting = DriverGuard(self);
        if sat == Acquired::Borrowed {
            // Who sleeps in the reactor had them ring when something comes: now somebody looks.
            self.transports.iter().for_each(|transport| transport.unpark());
            // Everybody sleeps, the peer too: the system may well wake it on this processor.
            self.pacer.yields.store(YIELD_AT_ONCE, Ordering::Relaxed);
        }
        // It has just said something, and an answer may come soon.
        self.pacer.found.store(true, Ordering::Relaxed);
        let mut jobs = Vec::new();
        loop {
            let ended = self.drive(&mut jobs, purpose);
            // User code waits on this thread, with locks held, for all we know: other user code must not run here.
            jobs.drain(..).for_each(|job| self.hand_over(job));
            match ended {
                DriveEnd::Asked => return true,
                DriveEnd::Deadline => return (purpose.stop)(),
                DriveEnd::Jobs | DriveEnd::LockTaken => {}
            }
        }
    }

    /// A caller gets up.
    fn release_driver(&self) {
        if self.driver_lock.is_borrowed() {
            // The progress thread goes on sleeping, and has to be woken when something comes.
            let nothing = self.transports.iter().filter(|transport| !transport.park()).count() == 0;
            if self.driver_lock.release_borrowed() {
                if !nothing || self.pending_flags.load(Ordering::SeqCst) != 0 {
                    self.ring();
                }
                return self.check_alarm();
            }
            self.transports.iter().for_each(|transport| transport.unpark());
        }
        self.driver_lock.release();
    }

    /// Looks for events until asked to stop, or the deadline, or until there are jobs. The calling thread has the seat.
    pub(super) fn drive(&self, jobs: &mut Vec<Job>, purpose: &DriveGoal<'_>) -> DriveEnd {
        let _driving = Driving::enter(self);
        let mut news = self.take_pending();
        // These go on from one drive to the next: the clock must be looked at even when each drive takes a poll or two.
        let rhythm = &self.pacer;
        let mut pace = rhythm.pace.load(Ordering::Relaxed);
        let mut left = rhythm.left.load(Ordering::Relaxed);
        // Others were let run; because nothing had come for long?
        let mut yielded = None;
        let ended = loop {
            let mut any = false;
            for transport in &self.transports {
                any |= transport.poll(&mut CoreSink { core: self, news: &mut news });
            }
            if self.pending_flags.load(Ordering::Relaxed) != 0 {
                any |= self.attend(&mut news, jobs);
            }
            if news.has_any() {
                self.pass_on(&mut news, jobs);
            }
            if any {
                rhythm.found.store(true, Ordering::Relaxed);
                if let Some(waited) = yielded.take() {
                    let yields = rhythm.yields.load(Ordering::Relaxed);
                    let yields = if waited { YIELD_AT_ONCE } else { yields.saturating_sub(1) };
                    rhythm.yields.store(yields, Ordering::Relaxed);
                }
            }
            if (purpose.stop)() {
                break DriveEnd::Asked;
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
            let before = rhythm.clock.load(Ordering::Relaxed);
            let now = Instant::now();
            let now_ns = rhythm.note(now);
            let took = now_ns.saturating_sub(before);
            if took < BETWEEN_LOOKS_AT_CLOCK / 2 {
                pace = (2 * pace).min(MAX_POLLS);
            } else if took > BETWEEN_LOOKS_AT_CLOCK * 2 {
                pace = (pace / 2).max(1);
            }
            left = pace;
            if now_ns >= rhythm.next_look.load(Ordering::Relaxed) {
                rhythm.next_look.store(now_ns + LOOK.as_nanos() as u64, Ordering::Relaxed);
                if self.look_around(now, &mut news, jobs) {
                    rhythm.found.store(true, Ordering::Relaxed);
                    left = 1;
                    continue;
                }
            }
            if purpose.deadline.is_some_and(|deadline| now >= deadline) {
                break DriveEnd::Deadline;
            }
            if rhythm.found.load(Ordering::Relaxed) {
                rhythm.found.store(false, Ordering::Relaxed);
                rhythm.active.store(now_ns, Ordering::Relaxed);
                continue;
            }
            let quiet = Duration::from_nanos(now_ns.saturating_sub(rhythm.active.load(Ordering::Relaxed)));
            if self.spin.is_some_and(|spin| quiet < spin) {
                if quiet >= YIELD_AFTER || rhythm.yields.load(Ordering::Relaxed) > 0 {
                    yielded = Some(quiet >= YIELD_AFTER);
                    std::thread::yield_now();
                }
                continue;
            }
            match self.sleep(&mut news, jobs, purpose) {
                WakeCause::BySomething => {
                    rhythm.found.store(true, Ordering::Relaxed);
                    rhythm.yields.store(YIELD_AT_ONCE, Ordering::Relaxed);
                }
                // A timer, perhaps.
                WakeCause::ByNothing => rhythm.next_look.store(0, Ordering::Relaxed),
                WakeCause::SeatTaken => break DriveEnd::LockTaken,
            }
            left = 1;
        };
        rhythm.pace.store(pace, Ordering::Relaxed);
        rhythm.left.store(left, Ordering::Relaxed);
        self.keep_pending(news);
        ended
    }

    /// What others have left for whoever drives. True when there was something.
    fn attend(&self, news: &mut PendingOutputs, jobs: &mut Vec<Job>) -> bool {
        let attention = self.pending_flags.load(Ordering::SeqCst);
        if attention & UNSENT != 0 {
            let mut outputs = Outputs::new();
            collect(self, &mut self.proto.lock(), &mut outputs);
            self.execute_outputs(outputs, Some(jobs));
        }
        if attention & HANDED_OFF != 0 {
            let events = {
                let mut mislaid = self.handed_off_events.lock();
                self.pending_flags.fetch_and(!HANDED_OFF, Ordering::SeqCst);
                std::mem::take(&mut *mislaid)
            };
            events.iter().for_each(|event| self.take_event(event, news));
        }
        true
    }

    /// Takes what the reactor has, if nobody sleeps in it, and does what is due. True when there was something.
    pub(super) fn look_around(&self, now: Instant, news: &mut PendingOutputs, jobs: &mut Vec<Job>) -> bool {
        let mut any = false;
        if let Some(mut driver) = self.driver.try_lock() {
            any = driver.ask(Some(Duration::ZERO));
            driver.events.iter().for_each(|event| self.take_event(event, news));
        }
        self.pass_on(news, jobs);
        any | self.expire(now, jobs)
    }

    fn take_event(&self, event: &mio::event::Event, news: &mut PendingOutputs) {
        let token = event.token();
        if token != WAKER
            && let Some(transport) = self.transports.get(token.0 >> TOKEN_SHIFT)
        {
            transport.ready(token.0, event, &mut CoreSink { core: self, news });
        }
    }

    /// Blocks in the reactor, unless something has happened meanwhile.
    fn sleep(&self, news: &mut PendingOutputs, jobs: &mut Vec<Job>, purpose: &DriveGoal<'_>) -> WakeCause {
        if self.driver_lock.take_from_progress() {
            self.ring();
        }
        let Some(mut driver) = self.reactor(purpose.deadline) else { return WakeCause::ByNothing };
        let announced = with_sleeper(|sleeper| {
            // Each of the steps announces the sleep to somebody, who rings from then on; what was done before is looked for
            // after that.
            sleeper.waiter.set_blocks_in(Some(self.waker.clone()));
            (purpose.announce)(&sleeper.waiter)
        });
        let nothing = self.transports.iter().filter(|transport| !transport.park()).count() == 0;
        self.asleep_until.store(u64::MAX, Ordering::SeqCst);
        let next = [self.next_alarm(), purpose.deadline].into_iter().flatten().min();
        self.asleep_until.store(next.map_or(u64::MAX, |next| self.micros(next)), Ordering::SeqCst);
        let mut any = true;
        let mut has_seat = true;
        // From here on, callers take the seat from a progress thread without a word.
        if announced && nothing && self.driver_lock.park() {
            if !(purpose.stop)() && !self.is_stopping() && self.pending_flags.load(Ordering::SeqCst) == 0 {
                let timeout = next.map(|next| next.saturating_duration_since(Instant::now()));
                any = driver.ask(timeout);
            } else {
                driver.events.clear();
            }
            if purpose.progress {
                has_seat = self.driver_lock.unpark_progress();
            } else {
                self.driver_lock.unpark();
            }
        } else {
            driver.events.clear();
        }
        self.asleep_until.store(0, Ordering::SeqCst);
        with_sleeper(|sleeper| sleeper.waiter.set_blocks_in(None));
        self.pacer.look_at_clock();
        if !has_seat {
            // The reactor tells once: whoever drives now has to know, before it sleeps in there.
            let news = driver.events.iter().filter(|event| event.token() != WAKER);
            let mut mislaid = self.handed_off_events.lock();
            mislaid.extend(news.cloned());
            if !mislaid.is_empty() {
                self.pending_flags.fetch_or(HANDED_OFF, Ordering::SeqCst);
            }
            return WakeCause::SeatTaken;
        }
        self.transports.iter().for_each(|transport| transport.unpark());
        driver.events.iter().for_each(|event| self.take_event(event, news));
        drop(driver);
        self.pass_on(news, jobs);
        if any { WakeCause::BySomething } else { WakeCause::ByNothing }
    }

    fn next_alarm(&self) -> Option<Instant> {
        let proto = self.proto.lock().next_timeout();
        let timers = self.timers.lock().pending.first_key_value().map(|((at, _), _)| *at);
        [proto, timers].into_iter().flatten().min()
    }

    /// Does what is due. True when anything was.
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
        due.into_iter().for_each(|f| self.timer_workers.push(Job::new(self, JobKind::Run(f))));
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
