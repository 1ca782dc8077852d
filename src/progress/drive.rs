//! The event loop, as whoever has the seat runs it.

use std::cell::Cell;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::completion::with_sleeper;
use super::seat::Sat;
use super::sink::CoreSink;
use super::threads::Resting;
use super::workers::{self, Job, Work};
use super::{Core, Outputs, collect};

const WAKER: mio::Token = mio::Token(usize::MAX);
/// Transports are told apart by the upper bits of their tokens.
const TOKEN_SHIFT: u32 = usize::BITS - 8;
/// Between two looks at the reactor, so many at the transports: those that are busy are polled directly, and the others
/// can wait for a few microseconds.
const POLLS_PER_LOOK: u32 = 16;

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

/// Why a drive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// What was waited for is there, or the sitter is to get up.
    Asked,
    Deadline,
    /// There are jobs to do.
    Jobs,
}

impl Core {
    /// Waits until `ready`, driving if nobody else does. The thread must have seen to it that it is woken when `ready`
    /// turns true. False when the deadline came first.
    pub(crate) fn wait(&self, ready: &dyn Fn() -> bool, deadline: Option<Instant>) -> bool {
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
        let _resting = Resting::enter(self);
        with_sleeper(|sleeper| {
            let me = &sleeper.waiter;
            let mut queued = false;
            let done = loop {
                if ready() {
                    break true;
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    break false;
                }
                match self.seat.sit_or_queue(me) {
                    Sat::Yes => {
                        let _sitting = self.seat.sitting();
                        return self.drive_as_caller(ready, deadline);
                    }
                    Sat::Queued { wake } => {
                        queued = true;
                        if wake {
                            self.ring();
                        }
                        if !ready() {
                            sleeper.sleep(deadline);
                        }
                    }
                }
            };
            if queued {
                self.seat.leave_queue(me);
            }
            done
        })
    }

    /// True on the thread that drives this engine, while it does: in wakers, that is.
    pub(crate) fn is_driving(&self) -> bool {
        DRIVING.try_with(|driving| driving.get() == self.identity()).unwrap_or(true)
    }

    fn drive_as_caller(&self, ready: &dyn Fn() -> bool, deadline: Option<Instant>) -> bool {
        let mut jobs = Vec::new();
        loop {
            let ended = self.drive(&mut jobs, ready, deadline);
            // User code waits on this thread, with locks held, for all we know: other user code must not run here.
            jobs.drain(..).for_each(|job| self.hand_over(job));
            match ended {
                Ended::Asked => return true,
                Ended::Deadline => return ready(),
                Ended::Jobs => {}
            }
        }
    }

    /// Looks for events until `stop`, or the deadline, or until there are jobs. The calling thread has the seat.
    pub(super) fn drive(&self, jobs: &mut Vec<Job>, stop: &dyn Fn() -> bool, deadline: Option<Instant>) -> Ended {
        let mut driver = self.driver.lock();
        let _driving = Driving::enter(self);
        let mut active = Instant::now();
        let mut polls = 0u32;
        loop {
            let now = Instant::now();
            let mut any = false;
            for transport in &self.transports {
                any |= transport.poll(&mut CoreSink { core: self, jobs, now });
            }
            if polls.is_multiple_of(POLLS_PER_LOOK) {
                any |= self.look_at_reactor(&mut driver, Some(Duration::ZERO), jobs);
                any |= self.expire(now, jobs);
            }
            polls = polls.wrapping_add(1);
            if any {
                active = now;
            }
            if stop() {
                return Ended::Asked;
            }
            if !jobs.is_empty() {
                return Ended::Jobs;
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ended::Deadline;
            }
            if any {
                continue;
            }
            if self.spin.is_some_and(|spin| now.saturating_duration_since(active) < spin) {
                std::hint::spin_loop();
            } else {
                if self.sleep(&mut driver, jobs, stop, deadline) {
                    active = Instant::now();
                }
                polls = 0;
            }
        }
    }

    /// Blocks in the reactor, unless something has happened meanwhile. True when something has.
    fn sleep(&self, driver: &mut Driver, jobs: &mut Vec<Job>, stop: &dyn Fn() -> bool, deadline: Option<Instant>) -> bool {
        // Each of the steps announces the sleep to somebody, who rings from then on; what was done before is looked for
        // after that.
        self.seat.set_parked(true);
        with_sleeper(|sleeper| sleeper.waiter.set_blocks_in(Some(self.waker.clone())));
        let parked = self.transports.iter().filter(|transport| !transport.park()).count() == 0;
        self.asleep_until.store(u64::MAX, Ordering::SeqCst);
        let next = [self.next_alarm(), deadline].into_iter().flatten().min();
        self.asleep_until.store(next.map_or(u64::MAX, |next| self.micros(next)), Ordering::SeqCst);
        let mut any = true;
        if parked && !stop() && !self.is_stopping() {
            let timeout = next.map(|next| next.saturating_duration_since(Instant::now()));
            any = self.look_at_reactor(driver, timeout, jobs);
        }
        self.asleep_until.store(0, Ordering::SeqCst);
        self.transports.iter().for_each(|transport| transport.unpark());
        with_sleeper(|sleeper| sleeper.waiter.set_blocks_in(None));
        self.seat.set_parked(false);
        any
    }

    fn next_alarm(&self) -> Option<Instant> {
        let proto = self.proto.lock().next_timeout();
        let timers = self.timers.lock().pending.first_key_value().map(|((at, _), _)| *at);
        [proto, timers].into_iter().flatten().min()
    }

    /// Takes what the reactor has. The timeout is rounded up to what the system can do.
    fn look_at_reactor(&self, driver: &mut Driver, timeout: Option<Duration>, jobs: &mut Vec<Job>) -> bool {
        let Driver { poll, events } = driver;
        match poll.poll(events, timeout) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(error) => {
                tracing::error!(target: "calomel::progress", %error, "the reactor failed");
                return false;
            }
        }
        let now = Instant::now();
        let mut any = false;
        for event in events.iter() {
            any = true;
            if event.token() != WAKER {
                let token = event.token().0;
                if let Some(transport) = self.transports.get(token >> TOKEN_SHIFT) {
                    transport.ready(token, event, &mut CoreSink { core: self, jobs, now });
                }
            }
        }
        any
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
        due.into_iter().for_each(|f| self.timer_workers.push(Job::new(self, workers::timer_kind(), Work::Run(f))));
        let mut outputs = Outputs::new();
        {
            let mut proto = self.proto.lock();
            if proto.next_timeout().is_some_and(|at| at <= now) {
                any = true;
                proto.handle_timeout(now);
                collect(&mut proto, &mut outputs);
            }
        }
        self.perform(outputs, Some(jobs));
        any
    }
}
