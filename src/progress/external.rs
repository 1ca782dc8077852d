//! Progress by the caller's own event loop: [`Progress::External`](super::Progress::External).
//!
//! The event loop stands in the place of the progress thread. While it waits for the descriptor, the driver lock is in the
//! state of a progress thread that sleeps in the reactor, so all that would wake that thread makes the descriptor readable:
//!
//! ```text
//!   descriptor ─┬─ the reactor: sockets, doorbells, and the waker, which other threads ring
//!               ├─ a timer, set to the next deadline whenever the driver lock is released
//!               └─ a signal: jobs wait, or `progress` has been refused the driver lock, which is free now
//! ```
//!
//! The thread that drives empties the reactor, also when it drives for a call of its own. What only [`Core::progress`] may take
//! has the signal instead, which stays until that takes it.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};

use super::Core;
use super::completion::{ThreadSleeper, ThreadWaiter, with_sleeper};
use super::drive::DriveGoal;
use super::driver_lock::Acquired;
use super::signal::{Counter, Signal};
use super::threads::{Cork, MAX_BATCH, MAX_JOBS};
use super::workers::{Job, nanos};
use crate::deferred_log::defer;

/// Most rounds of polling that found something, of one call: then the other sources of the event loop get their turn.
const MAX_ROUNDS: u32 = 64;

pub(super) struct External {
    /// What the event loop waits for.
    descriptor: OwnedFd,
    timer: OwnedFd,
    /// When the timer expires or has expired, in microseconds after `Core::start`; `u64::MAX` when it is not set. Only the
    /// driver changes it.
    timer_at: AtomicU64,
    signal: Signal<EventFd>,
    /// `progress` has found the driver lock taken: the driver gives the signal when it has released the lock.
    refused: AtomicBool,
    /// Threads within a `progress` that may sleep.
    sleepers: Mutex<Vec<Arc<ThreadWaiter>>>,
}

struct EventFd(OwnedFd);

impl Counter for EventFd {
    fn write(&self) {
        if let Err(error) = rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            defer(move || tracing::error!(target: "calomel::progress", %error, "can't wake the event loop"));
        }
    }

    fn read(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

thread_local! {
    /// The engine whose jobs this thread runs within `progress`; 0 for none.
    static RUNS_JOBS_OF: Cell<usize> = const { Cell::new(0) };
}

impl External {
    pub(super) fn new(reactor: &mio::Registry) -> io::Result<External> {
        let descriptor = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for source in [reactor.as_fd(), timer.as_fd(), signal.as_fd()] {
            epoll::add(&descriptor, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(External {
            descriptor,
            timer,
            timer_at: AtomicU64::new(u64::MAX),
            signal: Signal::new(EventFd(signal)),
            refused: AtomicBool::new(false),
            sleepers: Mutex::default(),
        })
    }

    /// Makes the descriptor readable until `progress` has looked, and wakes the threads that sleep in it. What it is about must
    /// be visible before.
    fn signal(&self) {
        self.signal.set();
        let sleepers = self.sleepers.lock().clone();
        sleepers.iter().for_each(|sleeper| sleeper.wake());
    }

    /// Makes an expired timer unreadable.
    fn read_timer(&self) {
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
    }

    /// Sets the timer; `None` stops it. Either way it is not readable until it expires.
    fn set_timer(&self, after: Option<Duration>) {
        // Zero would stop it.
        let after = after.map_or(Duration::ZERO, |after| after.max(Duration::from_nanos(1)));
        let seconds = after.as_secs().min(i32::MAX as u64) as i64;
        let value = Timespec { tv_sec: seconds, tv_nsec: after.subsec_nanos().into() };
        let value = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value) {
            defer(move || tracing::error!(target: "calomel::progress", %error, "can't set the timer of the event loop"));
        }
    }
}

/// Keeps a thread among the sleepers.
struct Sleeping<'a> {
    external: &'a External,
    waiter: &'a Arc<ThreadWaiter>,
}

impl<'a> Sleeping<'a> {
    fn enter(external: &'a External, waiter: &'a Arc<ThreadWaiter>) -> Sleeping<'a> {
        external.sleepers.lock().push(waiter.clone());
        Sleeping { external, waiter }
    }
}

impl Drop for Sleeping<'_> {
    fn drop(&mut self) {
        self.external.sleepers.lock().retain(|other| !Arc::ptr_eq(other, self.waiter));
    }
}

impl Core {
    /// True when the engine has no progress thread, and the caller's event loop takes its place.
    pub(crate) fn is_external(&self) -> bool {
        self.external.is_some()
    }

    /// The descriptor that is readable when [`Core::progress`] has something to do.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.external.as_ref().map(|external| external.descriptor.as_fd())
    }

    /// Makes the descriptor readable, if there is one. What it is about must be visible before.
    pub(super) fn signal_event_loop(&self) {
        if let Some(external) = &self.external {
            external.signal();
        }
    }

    /// Hands the driver lock, which no thread has used so far, to the event loop.
    pub(super) fn start_external(&self) {
        let taken = self.driver_lock.try_acquire_as_progress() && self.driver_lock.park();
        debug_assert!(taken, "no thread drives an engine before it is started");
        self.signal_event_loop();
    }

    /// The driver is about to release the lock to the event loop: sets the timer to the next deadline.
    pub(super) fn set_timer(&self, external: &External) {
        // From here on, a thread that sets an earlier deadline rings the reactor.
        self.asleep_until.store(u64::MAX, Ordering::SeqCst);
        let next = self.next_alarm();
        let now = Instant::now();
        let at = next.map_or(u64::MAX, |next| self.micros(next));
        let mut set = external.timer_at.load(Ordering::Relaxed);
        // A timer that expires early does no harm. One that has expired stays readable until it is set again.
        if at < set || set <= self.micros(now) {
            external.set_timer(next.map(|next| next.saturating_duration_since(now)));
            external.timer_at.store(at, Ordering::Relaxed);
            set = at;
        }
        self.asleep_until.store(set, Ordering::SeqCst);
    }

    /// The driver has released the lock.
    pub(super) fn repeat_refused(&self, external: &External) {
        if external.refused.load(Ordering::SeqCst) && external.refused.swap(false, Ordering::SeqCst) {
            external.signal();
        }
    }

    /// Drives until something was handled, or the timeout is over; true when something was. Runs handlers and timers.
    pub(crate) fn progress(&self, timeout: Duration) -> bool {
        let Some(external) = &self.external else { return false };
        let begin = Instant::now();
        let deadline = if timeout.is_zero() { Some(begin) } else { begin.checked_add(timeout) };
        with_sleeper(|sleeper| {
            let _sleeping = (!timeout.is_zero()).then(|| Sleeping::enter(external, &sleeper.waiter));
            loop {
                external.signal.clear();
                // Another thread may have left them while it drove for a call of its own.
                let ran = self.run_jobs_of_loop(&mut Vec::new());
                if self.is_stopping() {
                    // The loop has yet to learn that the engine ends.
                    external.signal();
                    return ran;
                }
                // Also after jobs, without waiting: the signal may have been about the driver lock too, and jobs that follow one
                // another for ever must not keep the engine from driving.
                let deadline = if ran { Some(begin) } else { deadline };
                let acquired = self.acquire_for_loop(external, sleeper, deadline);
                if acquired.is_some_and(|acquired| self.drive_for_loop(acquired, deadline)) || ran {
                    return true;
                }
                let over = !self.threads.has_jobs() && deadline.is_some_and(|deadline| Instant::now() >= deadline);
                if over && !external.signal.clear_late() {
                    return false;
                }
            }
        })
    }

    /// Acquires the driver lock. `None` when another thread drives until the deadline, and when there are jobs.
    fn acquire_for_loop(&self, external: &External, sleeper: &ThreadSleeper, deadline: Option<Instant>) -> Option<Acquired> {
        if let Some(acquired) = self.driver_lock.try_acquire() {
            return Some(acquired);
        }
        // The event loop must not spin while another thread drives. Read before `refused` is set: the deadline is seen by the thread
        // that drives, or by the `progress` that follows the signal.
        external.read_timer();
        // An event loop that is told of each change once has to be told again.
        external.refused.store(true, Ordering::SeqCst);
        if let Some(acquired) = self.driver_lock.try_acquire() {
            return Some(acquired);
        }
        let over =
            || self.threads.has_jobs() || self.is_stopping() || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if over() {
            // The descriptor may be readable until the driver has read the reactor, perhaps on this processor.
            std::thread::yield_now();
            return None;
        }
        self.acquire_queued(sleeper, &over, deadline)
    }

    /// Drives until nothing more is found, and runs the jobs. True when something was handled.
    fn drive_for_loop(&self, acquired: Acquired, deadline: Option<Instant>) -> bool {
        let pacer = &self.pacer;
        let rounds = Cell::new(0);
        let stop = || {
            if pacer.found.load(Ordering::Relaxed) {
                pacer.found.store(false, Ordering::Relaxed);
                pacer.active.store(pacer.clock.load(Ordering::Relaxed), Ordering::Relaxed);
                rounds.set(rounds.get() + 1);
                return rounds.get() >= MAX_ROUNDS;
            }
            rounds.get() > 0 || self.threads.has_jobs() || self.is_stopping()
        };
        let mut jobs = Vec::new();
        {
            let _guard = self.begin_driving(acquired);
            // One poll of everything, before the deadline is considered.
            pacer.found.store(false, Ordering::Relaxed);
            pacer.next_check.store(0, Ordering::Relaxed);
            pacer.left.store(1, Ordering::Relaxed);
            let goal = DriveGoal {
                stop: &stop,
                announce: &|_| !self.threads.has_jobs(),
                deadline,
                progress: false,
                until_event: false,
                brief: false,
            };
            self.drive(&mut jobs, &goal);
        }
        // After the lock is released: callers on other threads can drive while a handler runs.
        self.run_jobs_of_loop(&mut jobs) || rounds.get() > 0
    }

    /// Runs the jobs, and those that other threads have left, with their answers corked. True when there were any.
    fn run_jobs_of_loop(&self, jobs: &mut Vec<Job>) -> bool {
        if !jobs.is_empty() {
            self.threads.enqueue(jobs);
        }
        if !self.threads.has_jobs() {
            return false;
        }
        let outer = RUNS_JOBS_OF.replace(self.identity());
        let mut cork = Cork::default();
        let begun = self.pacer.note(Instant::now());
        for _ in 0..MAX_JOBS {
            let Some((job, more)) = self.threads.next_job() else { break };
            if !self.runs_inline(&job) {
                self.dispatch(job);
                continue;
            }
            let began = self.pacer.read_clock();
            self.run_job(job, began, more, &mut cork);
            if self.pacer.nanos().saturating_sub(begun) >= nanos(MAX_BATCH) {
                break;
            }
        }
        RUNS_JOBS_OF.set(outer);
        self.uncork();
        if self.threads.has_jobs() {
            self.signal_event_loop();
        }
        true
    }

    /// A job that this thread runs within `progress` waits inside this library: the jobs behind it must not wait with it.
    pub(super) fn pass_on_jobs_of_loop(&self) {
        if self.external.is_none() || RUNS_JOBS_OF.get() != self.identity() || !self.threads.has_jobs() {
            return;
        }
        if !self.handlers_inline {
            self.threads.take_jobs().into_iter().for_each(|job| self.dispatch(job));
        }
        // Other threads may call `progress` too.
        if self.threads.has_jobs() {
            self.signal_event_loop();
        }
    }
}
