//! Pools of threads that run the handlers which would block the progress thread.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::sync::{Condvar, Mutex, MutexGuard};

use super::completion::{ThreadWaiter, with_sleeper};
use super::{Core, CreatorProcess, EngineEnv};
use crate::deferred_log::{self, defer};
use crate::proto::{Incoming, Placed};

/// A piece of user code to run: a handler, a task or a timer.
pub(crate) struct Job {
    /// The identity of its engine.
    engine: usize,
    /// `None` once it has begun.
    work: Option<JobKind>,
}

pub(crate) enum JobKind {
    Request(Arc<dyn Handler>, Placed<Incoming<EngineEnv>>),
    Task(async_task::Runnable, Arc<HandlerClass>),
    Run(Box<dyn FnOnce() + Send>),
}

impl JobKind {
    fn class(&self) -> &Arc<HandlerClass> {
        match self {
            JobKind::Request(handler, _) => handler.class(),
            JobKind::Task(_, class) => class,
            JobKind::Run(_) => &TIMER_CLASS,
        }
    }
}

/// Answers requests.
pub(crate) trait Handler: Send + Sync {
    fn class(&self) -> &Arc<HandlerClass>;
    fn handle(&self, incoming: Placed<Incoming<EngineEnv>>);
    /// `handle` has returned, on this thread. The times are those that the request has waited for a thread, and that `handle` took, both in
    /// nanoseconds. The first is as exact as the driver's clock, which it reads every few microseconds.
    fn returned(&self, waited: u64, ran: u64);
    /// Answers a request that no thread will handle.
    fn abandon(&self, incoming: Placed<Incoming<EngineEnv>>);
}

/// The threads that run handlers, as [`EngineDump`](crate::EngineDump) has them; without those of the program's own
/// [`HandlerPool`](crate::HandlerPool)s.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ThreadsDump {
    /// Handlers that wait for a handler thread.
    pub queued: u64,
    /// Handler threads that exist.
    pub alive: u64,
    /// Those of them that wait for a handler to run.
    pub idle: u64,
    /// Those of them whose handler waits inside a call of this library.
    pub blocked: u64,
    /// Handlers that wait for the progress thread.
    pub queued_for_progress: u64,
    /// The progress thread runs a handler at this moment.
    pub handling: bool,
}

/// What is known of the jobs of one procedure.
pub(crate) struct HandlerClass {
    /// The pool that the user has chosen for them.
    pub pool: Option<Arc<Workers>>,
    /// One has blocked, or several in a row have taken long: they start on handler threads.
    slow: AtomicBool,
    /// How many in a row have been quick since the class was marked slow.
    quick: AtomicU32,
    /// How many more have to be quick before the watcher need not be awake when one begins.
    untrusted: AtomicU32,
    /// How many in a row have taken long.
    long: AtomicU32,
}

/// A handler that takes longer than this is not run on the progress thread: all other events would wait.
const LONG: Duration = Duration::from_micros(100);
/// So many in a row have to take long: the kernel may have preempted a single one.
const LONG_IN_A_ROW: u32 = 3;
/// After so many quick ones in a row, a class is not slow any more.
const FORGIVEN_AFTER: u32 = 64;
/// After so many quick ones, the watcher need not be awake when one begins; and after so many since one took as long as `HOLDS_UP`.
const TRUSTED_AFTER: u32 = 64;
const TRUSTED_AGAIN_AFTER: u32 = 4096;
const HOLDS_UP: Duration = Duration::from_millis(1);
/// How long `stop` waits for the threads: one that takes longer is blocked by a handler.
const GRACE: Duration = Duration::from_millis(50);
/// A thread ends after this long without work.
const LINGER: Duration = Duration::from_secs(10);

impl Default for HandlerClass {
    fn default() -> HandlerClass {
        let (slow, quick, long) = Default::default();
        HandlerClass { pool: None, slow, quick, untrusted: AtomicU32::new(TRUSTED_AFTER), long }
    }
}

impl HandlerClass {
    pub(crate) fn in_pool(pool: Option<Arc<Workers>>) -> Arc<HandlerClass> {
        Arc::new(HandlerClass { pool, ..HandlerClass::default() })
    }

    #[cfg(test)]
    pub(super) fn trusted() -> HandlerClass {
        HandlerClass { untrusted: AtomicU32::new(0), ..HandlerClass::default() }
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// True for jobs of which many have been quick, since one has last held up the progress thread.
    pub(super) fn is_trusted(&self) -> bool {
        self.untrusted.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn set_slow(&self) {
        self.slow.store(true, Ordering::Relaxed);
        self.quick.store(0, Ordering::Relaxed);
    }

    /// Learns from a job that began at `began` and has just ended; returns the time of its end, and how long it took.
    fn learn(&self, began: Instant) -> (Instant, Duration) {
        let ended = Instant::now();
        let took = ended.saturating_duration_since(began);
        self.learn_length(took.saturating_sub(WAITED.get()));
        (ended, took)
    }

    fn learn_length(&self, took: Duration) {
        if took >= LONG {
            if !self.is_slow() && waited_for_processor() >= took / 2 {
                return;
            }
            if took >= HOLDS_UP {
                self.untrusted.store(TRUSTED_AGAIN_AFTER, Ordering::Relaxed);
            }
            if self.long.fetch_add(1, Ordering::Relaxed) + 1 >= LONG_IN_A_ROW {
                self.set_slow();
            }
            return;
        }
        if self.long.load(Ordering::Relaxed) > 0 {
            self.long.store(0, Ordering::Relaxed);
        }
        if self.is_slow() && self.quick.fetch_add(1, Ordering::Relaxed) + 1 >= FORGIVEN_AFTER {
            self.slow.store(false, Ordering::Relaxed);
        }
        if !self.is_trusted() {
            let _ = self.untrusted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
        }
    }
}

/// Whole nanoseconds, for up to 584 years.
#[inline]
pub(crate) fn nanos(time: Duration) -> u64 {
    time.as_secs().wrapping_mul(1_000_000_000).wrapping_add(u64::from(time.subsec_nanos()))
}

/// How long this thread has waited for a processor since the last call on it; zero where the kernel does not report it.
fn waited_for_processor() -> Duration {
    thread_local! {
        static PROCESSOR_WAIT: Cell<u64> = const { Cell::new(0) };
    }
    let report = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let total = report.split_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_nanos(total.saturating_sub(PROCESSOR_WAIT.replace(total)))
}

/// The class of timers.
static TIMER_CLASS: LazyLock<Arc<HandlerClass>> = LazyLock::new(Arc::default);

impl Job {
    pub(crate) fn new(core: &Core, mut work: JobKind) -> Job {
        if let JobKind::Request(_, incoming) = &mut work {
            incoming.stamp = core.pacer.nanos();
        }
        Job { engine: core.identity(), work: Some(work) }
    }

    /// How long a request has waited until `now`, on the clock of the engine's driver; in nanoseconds.
    #[inline]
    pub(super) fn waited(&self, now: u64) -> u64 {
        self.request().map_or(0, |incoming| now.saturating_sub(incoming.stamp))
    }

    pub(super) fn class(&self) -> &Arc<HandlerClass> {
        self.work.as_ref().map_or(&TIMER_CLASS, JobKind::class)
    }

    /// The request that it handles, if it handles one.
    pub(super) fn request(&self) -> Option<&Incoming<EngineEnv>> {
        match &self.work {
            Some(JobKind::Request(_, incoming)) => Some(incoming),
            _ => None,
        }
    }

    pub(super) fn is_task(&self) -> bool {
        matches!(self.work, Some(JobKind::Task(..)))
    }

    pub(super) fn is_timer(&self) -> bool {
        matches!(self.work, Some(JobKind::Run(_)))
    }

    /// Runs the job, which begins at `began` and has waited for so many nanoseconds; returns the time of its end.
    pub(crate) fn run(mut self, began: Instant, waited_ns: u64) -> Instant {
        let process = CreatorProcess::this();
        let outer = CURRENT_ENGINE.replace(self.engine);
        let waited = WAITED.take();
        let ended = match self.work.take() {
            Some(JobKind::Request(handler, incoming)) => {
                quietly(|| handler.handle(incoming));
                let (ended, took) = handler.class().learn(began);
                handler.returned(waited_ns, nanos(took));
                ended
            }
            Some(JobKind::Task(task, class)) => {
                quietly(|| {
                    task.run();
                });
                class.learn(began).0
            }
            Some(JobKind::Run(f)) => {
                quietly(f);
                TIMER_CLASS.learn(began).0
            }
            None => began,
        };
        if process.is_forked_child() {
            // It would go on running the parent's engine, on the parent's sockets.
            tracing::error!(target: "calomel::handler", "a forked child returned from a handler of its parent; aborting");
            std::process::abort();
        }
        CURRENT_ENGINE.set(outer);
        WAITED.set(waited);
        ended
    }
}

/// Catches panics. Handlers catch their own, so this is for timers and tasks, which no caller waits for.
fn quietly(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!(target: "calomel::handler", "a timer or a task panicked");
    }
}

impl Drop for Job {
    /// Answers a request that was queued and never begun, so that its caller does not wait in vain.
    fn drop(&mut self) {
        if let Some(JobKind::Request(handler, incoming)) = self.work.take() {
            handler.abandon(incoming);
        }
    }
}

thread_local! {
    /// The identity of the engine whose job this thread runs; 0 for none.
    static CURRENT_ENGINE: Cell<usize> = const { Cell::new(0) };
    /// How long the job that this thread runs has waited inside calls of this library.
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The pool that this thread belongs to.
    static CURRENT_POOL: RefCell<Option<Arc<Workers>>> = const { RefCell::new(None) };
}

/// How long the job that this thread runs has waited inside this library, or copied data.
pub(super) fn waited_in_job() -> Duration {
    WAITED.try_with(Cell::get).unwrap_or_default()
}

/// True on a thread that runs a job of any engine, and on one that is ending.
pub(crate) fn in_any_job() -> bool {
    CURRENT_ENGINE.try_with(|engine| engine.get() != 0).unwrap_or(true)
}

/// True on a thread that runs a job of this engine, and on a thread that is ending, where this is unknown.
pub(crate) fn in_job(core: &Core) -> bool {
    CURRENT_ENGINE.try_with(|engine| engine.get() == core.identity()).unwrap_or(true)
}

/// A pool of threads, started when they are needed.
pub(crate) struct Workers {
    name: &'static str,
    /// How many threads may run jobs at a time; those that wait inside a call of this library don't count.
    limit: usize,
    state: Mutex<PoolState>,
    ended: Condvar,
    /// The process that has the threads.
    process: CreatorProcess,
}

/// Jobs that wait, with the times at which they came. Their classes take turns, so calls of one procedure do not wait behind all
/// those of another: one that was quick, and is taken for slow since the machine was busy, would stay so among many slow ones.
#[derive(Default)]
struct JobQueue {
    /// The classes that have jobs; the first one is next.
    turns: VecDeque<ClassQueue>,
    len: usize,
    /// Memory that is used again.
    spare: VecDeque<(Job, Instant)>,
}

struct ClassQueue {
    /// The address of the class, which its jobs keep alive.
    class: usize,
    jobs: VecDeque<(Job, Instant)>,
}

impl JobQueue {
    fn push(&mut self, job: Job, waited: u64) {
        let class = Arc::as_ptr(job.class()).addr();
        let now = Instant::now();
        let came = now.checked_sub(Duration::from_nanos(waited)).unwrap_or(now);
        self.len += 1;
        if let Some(queue) = self.turns.iter_mut().find(|queue| queue.class == class) {
            return queue.jobs.push_back((job, came));
        }
        let mut jobs = std::mem::take(&mut self.spare);
        jobs.push_back((job, came));
        self.turns.push_back(ClassQueue { class, jobs });
    }

    fn pop(&mut self) -> Option<(Job, Instant)> {
        let mut queue = self.turns.pop_front()?;
        let job = queue.jobs.pop_front();
        if queue.jobs.is_empty() {
            self.spare = queue.jobs;
        } else {
            self.turns.push_back(queue);
        }
        self.len -= usize::from(job.is_some());
        job
    }
}

#[derive(Default)]
struct PoolState {
    queue: JobQueue,
    threads: Vec<std::thread::JoinHandle<()>>,
    /// Threads that sleep until a job comes for them. The last one is woken first: its memory is in a cache, and the first ones
    /// end where fewer are needed.
    idle: Vec<Arc<ThreadWaiter>>,
    /// Threads that exist.
    alive: usize,
    /// Threads that wait inside a call of this library.
    blocked: usize,
    stopped: bool,
}

impl Workers {
    pub(crate) fn new(name: &'static str, limit: usize) -> Arc<Workers> {
        Arc::new(Workers {
            name,
            limit: limit.max(1),
            state: Mutex::default(),
            ended: Condvar::default(),
            process: CreatorProcess::this(),
        })
    }

    /// `waited`: for so many nanoseconds the job has waited elsewhere.
    pub(super) fn push(self: &Arc<Self>, job: Job, waited: u64) {
        let mut state = self.state.lock();
        if state.stopped {
            drop(state);
            return drop(job);
        }
        state.queue.push(job, waited);
        self.engage(state);
    }

    /// Has a thread run a queued job: one that is idle, or a new one.
    fn engage(self: &Arc<Self>, mut state: MutexGuard<'_, PoolState>) {
        let woken = if state.queue.len == 0 { None } else { state.idle.pop() };
        if woken.is_none() {
            self.spawn_if_needed(&mut state);
        }
        // Unlocked first: the woken thread would else wait for the lock.
        drop(state);
        if let Some(thread) = woken {
            thread.wake();
        }
        deferred_log::flush();
    }

    /// Starts a thread for queued jobs, if there may be another. The caller flushes the deferred log when `state` is unlocked.
    fn spawn_if_needed(self: &Arc<Self>, state: &mut PoolState) {
        if state.queue.len > 0 && !state.stopped && state.alive - state.blocked < self.limit {
            let pool = self.clone();
            let spawned = std::thread::Builder::new().name(format!("calomel-{}", self.name)).spawn(move || pool.work());
            match spawned {
                Ok(thread) => {
                    state.alive += 1;
                    // Ended threads need not be joined.
                    state.threads.retain(|thread| !thread.is_finished());
                    state.threads.push(thread);
                }
                Err(error) => {
                    let alive = state.alive;
                    defer(
                        move || tracing::warn!(target: "calomel::handler", %error, alive, "can't start another handler thread"),
                    );
                }
            }
        }
    }

    fn work(self: Arc<Self>) {
        CURRENT_POOL.set(Some(self.clone()));
        let me = with_sleeper(|sleeper| sleeper.waiter.clone());
        let mut state = self.state.lock();
        loop {
            // When jobs that waited go on, more threads may run than the limit allows.
            let surplus = state.alive - state.blocked > self.limit;
            if let Some((job, came)) = if surplus { None } else { state.queue.pop() } {
                drop(state);
                let now = Instant::now();
                job.run(now, nanos(now.saturating_duration_since(came)));
                state = self.state.lock();
                continue;
            }
            if state.stopped || surplus {
                break;
            }
            let deadline = Instant::now() + LINGER;
            state.idle.push(me.clone());
            drop(state);
            with_sleeper(|sleeper| sleeper.sleep(Some(deadline)));
            state = self.state.lock();
            let was_idle = state.idle.len();
            state.idle.retain(|other| !Arc::ptr_eq(other, &me));
            if state.idle.len() < was_idle && state.queue.len == 0 && Instant::now() >= deadline {
                break;
            }
        }
        state.alive -= 1;
        self.ended.notify_all();
        CURRENT_POOL.set(None);
        // It may have been woken for a job, and be one too many now.
        self.engage(state);
    }

    pub(super) fn dump(&self) -> ThreadsDump {
        let state = self.state.lock();
        let [queued, alive, idle, blocked] =
            [state.queue.len, state.alive, state.idle.len(), state.blocked].map(|count| count as u64);
        ThreadsDump { queued, alive, idle, blocked, ..ThreadsDump::default() }
    }

    /// Drops the queued jobs and ends the threads. Waits for them, except for the calling one and those blocked by a handler.
    pub(crate) fn stop(&self) {
        if self.process.is_forked_child() {
            return;
        }
        let me = std::thread::current().id();
        let mut state = self.state.lock();
        state.stopped = true;
        let queue = std::mem::take(&mut state.queue);
        let threads = std::mem::take(&mut state.threads);
        state.idle.iter().for_each(|thread| thread.wake());
        let deadline = Instant::now() + GRACE;
        let own = usize::from(threads.iter().any(|thread| thread.thread().id() == me));
        let mut timed_out = false;
        while state.alive > own && !timed_out {
            (state, timed_out) = self.ended.wait_until(state, deadline);
        }
        let all = state.alive <= own;
        drop(state);
        drop(queue);
        for thread in threads {
            if thread.thread().id() != me && (all || thread.is_finished()) {
                let _ = thread.join();
            }
        }
    }
}

/// While it lives, the thread copies data in a call of this library. The time does not count as the handler's own, since this
/// is progress too.
pub(crate) struct Copying {
    began: Instant,
    before: Duration,
}

impl Copying {
    pub(crate) fn enter() -> Copying {
        Copying { began: Instant::now(), before: waited_in_job() }
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        // Waits in between are part of the time. A thread that is ending runs no job.
        let _ = WAITED.try_with(|waited| waited.set(self.before + self.began.elapsed()));
    }
}

/// While it lives, the thread waits inside a call of this library, driving if no other thread does: its pool may run another
/// thread meanwhile, and the time does not count as the handler's own.
pub(crate) struct Blocking {
    pool: Option<Arc<Workers>>,
    /// `None` where no job runs.
    began: Option<Instant>,
}

impl Blocking {
    pub(crate) fn enter() -> Blocking {
        let pool = CURRENT_POOL.try_with(|pool| pool.borrow().clone()).ok().flatten();
        if let Some(pool) = &pool {
            let mut state = pool.state.lock();
            state.blocked += 1;
            pool.engage(state);
        }
        let in_job = CURRENT_ENGINE.try_with(|engine| engine.get() != 0).unwrap_or(false);
        Blocking { pool, began: in_job.then(Instant::now) }
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        // A thread that is ending runs no job.
        if let Some(began) = self.began {
            let _ = WAITED.try_with(|waited| waited.set(waited.get() + began.elapsed()));
        }
        if let Some(pool) = &self.pool {
            pool.state.lock().blocked -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Else each of many threads would be needed once in a while, and none would end.
    #[test]
    fn thread_that_became_idle_last_runs_the_next_job() {
        const THREADS: usize = 3;
        let pool = Workers::new("test", THREADS);
        let push = |work: Box<dyn FnOnce() + Send>| pool.push(Job { engine: 0, work: Some(JobKind::Run(work)) }, 0);
        let all_are_idle = || {
            let end = Instant::now() + Duration::from_secs(10);
            while pool.dump().idle < THREADS as u64 {
                assert!(Instant::now() < end, "{:?}", pool.dump());
                std::thread::yield_now();
            }
        };
        let barrier = Arc::new(std::sync::Barrier::new(THREADS));
        for _ in 0..THREADS {
            let barrier = barrier.clone();
            push(Box::new(move || _ = barrier.wait()));
        }
        let mut last = None;
        for _ in 0..20 {
            all_are_idle();
            let (sender, receiver) = std::sync::mpsc::channel();
            push(Box::new(move || sender.send(std::thread::current().id()).unwrap()));
            let ran = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
            assert_eq!(*last.get_or_insert(ran), ran);
        }
        pool.stop();
        assert_eq!(pool.dump().alive, 0);
    }

    #[test]
    fn class_is_trusted_after_many_quick_jobs_and_again_after_very_many() {
        let class = HandlerClass::default();
        let run = |count: u32, took| (0..count).for_each(|_| class.learn_length(took));
        run(TRUSTED_AFTER - 1, Duration::ZERO);
        assert!(!class.is_trusted());
        run(1, Duration::ZERO);
        assert!(class.is_trusted());
        class.set_slow();
        run(FORGIVEN_AFTER, Duration::ZERO);
        assert_eq!((class.is_slow(), class.is_trusted()), (false, true));
        // More than this thread can have waited for a processor.
        run(1, Duration::from_secs(3600));
        run(TRUSTED_AGAIN_AFTER - 1, Duration::ZERO);
        assert_eq!((class.is_slow(), class.is_trusted()), (false, false));
        run(1, Duration::ZERO);
        assert!(class.is_trusted());
    }
}
