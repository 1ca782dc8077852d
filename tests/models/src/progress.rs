//! A model of an engine's core, around calomel's own driver lock, completions and driver.

pub(crate) mod alone;
#[path = "../../../src/progress/completion.rs"]
mod completion;
#[path = "../../../src/progress/drive.rs"]
mod drive;
#[path = "../../../src/progress/driver_lock.rs"]
mod driver_lock;
#[path = "../../../src/progress/pacer.rs"]
mod pacer;
#[path = "../../../src/progress/polls.rs"]
mod polls;
#[path = "../../../src/progress/signal.rs"]
mod signal;
pub(crate) mod signals;

use std::collections::{BTreeMap, VecDeque};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::mio;
use crate::proto::{self, Proto};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Instant, Mutex, MutexGuard};
pub(crate) use completion::{Awaited, Completion, OperationOutcome, ThreadSleeper, ThreadWaiter, with_sleeper};
use drive::{DriveEnd, DriveGoal};
use handler_paused::HandlerPaused;
use steps::{CoreSink, Outputs, PendingOutputs};
use workers::Job;

pub(crate) enum EngineEnv {}

pub(crate) struct Core {
    proto: Mutex<Proto>,
    transports: Vec<Inbox>,
    driver_lock: driver_lock::DriverLock,
    driver: Mutex<drive::Driver>,
    waker: Arc<mio::Waker>,
    pacer: pacer::PollPacer,
    polls: polls::Polls,
    unsent: AtomicBool,
    unsent_may_wait: AtomicBool,
    asleep_until: AtomicU64,
    start: Instant,
    timers: Mutex<Timers>,
    spin: Option<Duration>,
    external: Option<External>,
    stopping: AtomicBool,
    threads: Threads,
}

#[derive(Default)]
struct Threads {
    /// Where the progress thread sleeps without the driver lock.
    progress: Mutex<Option<Arc<ThreadWaiter>>>,
    takes_over: AtomicBool,
}

impl Threads {
    fn is_handling(&self) -> bool {
        false
    }

    /// Like calomel's.
    fn take_over(&self) {
        if !self.takes_over.swap(true, Ordering::SeqCst) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(progress) = &*self.progress.lock() {
            progress.wake();
        }
    }
}

#[derive(Default)]
struct Timers {
    pending: BTreeMap<(Instant, u64), Box<dyn FnOnce() + Send>>,
}

/// No model has the caller's event loop.
struct External;

/// Fewer than calomel's: each is many steps.
const RETURNS: u32 = 2;

impl Core {
    pub(crate) fn new() -> Arc<Core> {
        Core::with_spin(None)
    }

    /// One that leads in polls, and sleeps without spinning.
    pub(crate) fn leading() -> Arc<Core> {
        Core::with_spin(Some(Duration::ZERO))
    }

    fn with_spin(spin: Option<Duration>) -> Arc<Core> {
        let driver = drive::Driver::new().unwrap();
        let waker = Arc::new(driver.waker().unwrap());
        let inbox = || Inbox { state: Mutex::default(), waker: waker.clone() };
        Arc::new(Core {
            proto: Mutex::default(),
            transports: vec![inbox(), inbox()],
            driver_lock: driver_lock::DriverLock::default(),
            driver: Mutex::new(driver),
            waker: waker.clone(),
            pacer: pacer::PollPacer::new(),
            polls: polls::Polls::default(),
            unsent: AtomicBool::new(false),
            unsent_may_wait: AtomicBool::new(false),
            asleep_until: AtomicU64::new(0),
            start: Instant::now(),
            timers: Mutex::default(),
            spin,
            external: None,
            stopping: AtomicBool::new(false),
            threads: Threads::default(),
        })
    }

    /// An event arrives, as over `loop://`.
    pub(crate) fn arrive(&self, event: Event) {
        self.transports[0].put(event);
    }

    /// An event arrives, as over `tcp://`.
    pub(crate) fn arrive_by_reactor(&self, event: Event) {
        self.transports[1].state.lock().hidden.push_back(event);
        self.waker.notify(mio::Token(drive::first_token(1)));
    }

    fn identity(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn uncork(&self) {}
    fn is_corked_for(&self, _: &std::task::Waker) -> bool {
        false
    }
    fn uncork_unless_forked(&self) {}
    fn is_forked(&self) -> bool {
        false
    }

    fn pause_handler(&self, _: Awaited) -> HandlerPaused<'_> {
        HandlerPaused(PhantomData)
    }

    /// No model has handlers, for whose next requests the progress thread would take over.
    fn has_driven(&self) {}

    /// Nor any that are answered.
    fn send_left_answers(&self) {}

    fn dispatch(&self, _: Job) {}

    fn execute_outputs(&self, outputs: Outputs, _: Option<&mut Vec<Job>>) {
        outputs.iter().for_each(|completion| proto::end(completion));
    }

    fn execute_deferred(&self, _: &mut PendingOutputs, _: &mut [Job]) {}

    fn reactor(&self, _: Option<Instant>) -> Option<MutexGuard<'_, drive::Driver>> {
        Some(self.driver.lock())
    }

    fn ring(&self) {
        completion::ring(&self.waker);
    }

    fn is_external(&self) -> bool {
        self.external.is_some()
    }

    fn set_timer(&self, _: &External) {}
    fn repeat_refused(&self, _: &External) {}
    fn run_timer(&self, _: Box<dyn FnOnce() + Send>, _: &mut [Job]) {}

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn micros(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_micros() as u64 + 1
    }

    /// Like calomel's: one step of the protocol; wakes a driver that would sleep too long.
    pub(crate) fn exec(&self, step: impl FnOnce(&mut Proto)) {
        step(&mut self.proto.lock());
        self.check_alarm();
    }

    fn check_alarm(&self) {
        let until = self.asleep_until.load(Ordering::SeqCst);
        if until == 0 {
            return;
        }
        let next = self.proto.lock().next_timeout();
        if next.is_some_and(|next| self.micros(next) < until) {
            self.ring();
        }
    }

    /// Like calomel's progress thread.
    pub(crate) fn progress(&self) {
        with_sleeper(|sleeper| {
            *self.threads.progress.lock() = Some(sleeper.waiter.clone());
            let mut seen = u64::MAX;
            let mut at_once = true;
            while !self.is_stopping() {
                let acquired = if at_once {
                    self.driver_lock.try_acquire_as_progress()
                } else {
                    self.wait_for_driver_lock(sleeper, &mut seen)
                };
                at_once = false;
                if acquired {
                    self.serve();
                    seen = u64::MAX;
                }
            }
        });
    }

    fn serve(&self) {
        let mut jobs = Vec::new();
        let stop = || self.driver_lock.is_wanted() || self.is_stopping();
        let goal =
            DriveGoal { stop: &stop, announce: &|_| true, deadline: None, progress: true, until_event: false, brief: false };
        loop {
            if self.drive(&mut jobs, &goal) == DriveEnd::LockTaken {
                return;
            }
            if self.driver_lock.is_wanted() || self.is_stopping() {
                return self.driver_lock.release_as_progress();
            }
        }
    }

    fn wait_for_driver_lock(&self, sleeper: &ThreadSleeper, seen: &mut u64) -> bool {
        if self.threads.takes_over.swap(false, Ordering::SeqCst) {
            if self.driver_lock.try_acquire_as_progress() {
                return true;
            }
            self.threads.takes_over.store(true, Ordering::SeqCst);
        }
        match self.driver_lock.acquire_as_progress(*seen, &sleeper.waiter) {
            Ok(()) => {
                self.polls.lock_was_free();
                true
            }
            Err(contended) => {
                *seen = if contended.until_woken { u64::MAX } else { contended.epoch };
                sleeper.sleep((!contended.until_woken).then_some(self.start));
                false
            }
        }
    }

    /// Like calomel's `stop`.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.ring();
        self.threads.wake();
    }
}

impl Completion {
    /// The next poll that drives is the last one that leads, or the next one does not lead.
    pub(crate) fn set_polls(&self, leads: bool) {
        self.led_us.store(polls::LEADS_FOR_US - u32::from(leads), Ordering::Relaxed);
    }
}

pub(crate) enum Event {
    Ends(Arc<Completion>),
    /// An event that ends no thread's wait.
    Stop,
}

impl Event {
    fn happen(self, core: &Core) {
        match self {
            Event::Ends(completion) => proto::end(&completion),
            Event::Stop => core.stop(),
        }
    }
}

/// A transport, like `loop://`.
struct Inbox {
    state: Mutex<InboxState>,
    waker: Arc<mio::Waker>,
}

#[derive(Default)]
struct InboxState {
    items: VecDeque<Event>,
    /// Events that only the reactor reports.
    hidden: VecDeque<Event>,
    parked: bool,
}

impl Inbox {
    fn put(&self, event: Event) {
        let wake = {
            let mut state = self.state.lock();
            state.items.push_back(event);
            std::mem::take(&mut state.parked)
        };
        if wake {
            self.waker.wake().unwrap();
        }
    }

    fn poll(&self, sink: &mut CoreSink) -> bool {
        let event = self.state.lock().items.pop_front();
        let any = event.is_some();
        event.into_iter().for_each(|event| event.happen(sink.core));
        any
    }

    fn ready(&self, _: usize, _: &mio::event::Event, sink: &mut CoreSink) {
        let hidden = std::mem::take(&mut self.state.lock().hidden);
        hidden.into_iter().for_each(|event| event.happen(sink.core));
    }

    fn next_alarm(&self) -> Option<Instant> {
        None
    }

    fn park(&self) -> bool {
        let mut state = self.state.lock();
        state.parked = state.items.is_empty();
        state.parked
    }

    fn unpark(&self) {
        self.state.lock().parked = false;
    }

    /// It does not wake the reactor any more, since it was unparked.
    fn mute(&self) {}
}

mod processor {
    pub(super) fn leave() {}
}

mod steps {
    use super::{Arc, Completion, Core, Proto};

    pub(super) type Outputs = Vec<Arc<Completion>>;

    /// The outputs that wait until the transports have returned: none, since events happen at once here.
    pub(super) struct PendingOutputs;

    impl PendingOutputs {
        pub(super) fn new() -> PendingOutputs {
            PendingOutputs
        }

        pub(super) fn keep(self) {}

        pub(super) fn has_any(&self) -> bool {
            false
        }
    }

    pub(super) struct CoreSink<'a> {
        pub core: &'a Core,
        #[allow(dead_code, reason = "events happen at once here")]
        pub pending: &'a mut PendingOutputs,
    }

    pub(super) fn collect(_: &Core, proto: &mut Proto, outputs: &mut Outputs) {
        outputs.extend(proto.poll());
    }
}

/// No model has handlers on the progress thread.
mod handler_paused {
    use std::marker::PhantomData;

    use super::workers::Job;
    use crate::sync::Instant;

    pub(super) struct HandlerPaused<'a>(pub PhantomData<&'a ()>);

    impl HandlerPaused<'_> {
        pub(super) fn is_progress(&self) -> bool {
            false
        }

        pub(super) fn keeps_jobs_until(&self) -> Option<Instant> {
            None
        }

        pub(super) fn keep_or_pass_on(&self, _: &mut Vec<Job>, _: bool) {}

        pub(super) fn pass_on_all(&self) {}
    }
}

mod workers {
    pub(super) struct Job;
    pub(super) struct Blocking;

    pub(super) fn in_any_job() -> bool {
        false
    }

    impl Blocking {
        pub(super) fn enter() -> Blocking {
            Blocking
        }
    }
}
