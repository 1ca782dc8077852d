//! Threads that run handlers which must not run where progress is made.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Core, CreatorProcess, EngineEnv};
use crate::deferred_log::{self, defer};
use crate::proto::Incoming;

/// Work that user code does for a peer, and what is known of work like it.
pub(crate) struct Job {
    /// The engine that it belongs to.
    engine: usize,
    /// `None` once it has begun.
    work: Option<JobKind>,
}

pub(crate) enum JobKind {
    Request(Arc<dyn Handler>, Incoming<EngineEnv>),
    Task(async_task::Runnable, Arc<HandlerClass>),
    Run(Box<dyn FnOnce() + Send>),
}

impl JobKind {
    fn kind(&self) -> &Arc<HandlerClass> {
        match self {
            JobKind::Request(handler, _) => handler.kind(),
            JobKind::Task(_, kind) => kind,
            JobKind::Run(_) => &TIMER_KIND,
        }
    }
}

/// What answers a request.
pub(crate) trait Handler: Send + Sync {
    fn kind(&self) -> &Arc<HandlerClass>;
    fn handle(&self, incoming: Incoming<EngineEnv>);
    /// It will not be handled: whoever should have is gone.
    fn abandon(&self, incoming: Incoming<EngineEnv>);
}

/// What jobs of one procedure have in common.
#[derive(Default)]
pub(crate) struct HandlerClass {
    /// Where the user wants them to run.
    pub pool: Option<Arc<Workers>>,
    /// One of them has blocked, or taken long: the next start on handler threads.
    slow: AtomicBool,
    /// How many in a row have been quick since.
    quick: AtomicU32,
    /// How many in a row have taken long, with nothing else to say that they block.
    long: AtomicU32,
}

/// A handler that takes longer than this is not run where progress is made: everything else would wait.
const LONG: Duration = Duration::from_micros(100);
/// One that took long may have been kept by the system; so many in a row have not.
const LONG_IN_A_ROW: u32 = 3;
/// After so many quick ones in a row, a kind is given another chance.
const FORGIVEN_AFTER: u32 = 64;
/// How long threads that have been told to end are waited for: one that takes longer is kept by a handler.
const GRACE: Duration = Duration::from_millis(50);
/// A thread without work goes after this long.
const LINGER: Duration = Duration::from_secs(10);

impl HandlerClass {
    pub(crate) fn in_pool(pool: Option<Arc<Workers>>) -> Arc<HandlerClass> {
        Arc::new(HandlerClass { pool, ..HandlerClass::default() })
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    pub(crate) fn set_slow(&self) {
        self.slow.store(true, Ordering::Relaxed);
        self.quick.store(0, Ordering::Relaxed);
    }

    /// One of them began then, and is over; when that was.
    fn learn(&self, began: Instant) -> Instant {
        let ended = Instant::now();
        self.learn_length(ended.saturating_duration_since(began).saturating_sub(WAITED.get()));
        ended
    }

    fn learn_length(&self, took: Duration) {
        if took >= LONG {
            if !self.is_slow() && waited_for_processor() >= took / 2 {
                return;
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
    }
}

/// How long the system has let this thread wait for a processor since this was last asked on it; nothing where it does not
/// tell.
fn waited_for_processor() -> Duration {
    thread_local! {
        static BEFORE: Cell<u64> = const { Cell::new(0) };
    }
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let total = told.split_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_nanos(total.saturating_sub(BEFORE.replace(total)))
}

/// What timers are: unknown, and rare.
static TIMER_KIND: LazyLock<Arc<HandlerClass>> = LazyLock::new(Arc::default);

impl Job {
    pub(crate) fn new(core: &Core, work: JobKind) -> Job {
        Job { engine: core.identity(), work: Some(work) }
    }

    pub(super) fn kind(&self) -> &Arc<HandlerClass> {
        self.work.as_ref().map_or(&TIMER_KIND, JobKind::kind)
    }

    /// Runs, from `began` on; returns when that was over.
    pub(crate) fn run(mut self, began: Instant) -> Instant {
        let process = CreatorProcess::this();
        let outer = CURRENT_ENGINE.replace(self.engine);
        let waited = WAITED.take();
        let ended = match self.work.take() {
            Some(JobKind::Request(handler, incoming)) => {
                quietly(|| handler.handle(incoming));
                handler.kind().learn(began)
            }
            Some(JobKind::Task(task, kind)) => {
                quietly(|| {
                    task.run();
                });
                kind.learn(began)
            }
            Some(JobKind::Run(f)) => {
                quietly(f);
                TIMER_KIND.learn(began)
            }
            None => began,
        };
        if process.is_forked_child() {
            // It would go on with what its parent does, with its parent's sockets.
            tracing::error!(target: "calomel::handler", "a forked child has returned from its parent's handler");
            std::process::abort();
        }
        CURRENT_ENGINE.set(outer);
        WAITED.set(waited);
        ended
    }
}

/// Handlers answer for their own panics; what gets here is user code that runs for nobody.
fn quietly(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!(target: "calomel::handler", "a timer or a task panicked");
    }
}

impl Drop for Job {
    /// A caller must not wait in vain for what was queued and never begun.
    fn drop(&mut self) {
        if let Some(JobKind::Request(handler, incoming)) = self.work.take() {
            handler.abandon(incoming);
        }
    }
}

thread_local! {
    /// The engine whose job this thread runs; 0 for none.
    static CURRENT_ENGINE: Cell<usize> = const { Cell::new(0) };
    /// How long the job that this thread runs has waited inside calls of this library.
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The pool that this thread belongs to.
    static CURRENT_POOL: RefCell<Option<Arc<Workers>>> = const { RefCell::new(None) };
}

/// True on a thread that runs a job of this engine. Also while the thread is ending: then nobody can tell.
pub(crate) fn in_job(core: &Core) -> bool {
    CURRENT_ENGINE.try_with(|engine| engine.get() == core.identity()).unwrap_or(true)
}

/// A number of threads, started when they are needed.
pub(crate) struct Workers {
    name: &'static str,
    /// How many may run jobs at a time; those that wait inside a call of this library don't count.
    limit: usize,
    state: Mutex<PoolState>,
    available: Condvar,
    ended: Condvar,
    /// The one that has the threads.
    process: CreatorProcess,
}

#[derive(Default)]
struct PoolState {
    queue: VecDeque<Job>,
    threads: Vec<std::thread::JoinHandle<()>>,
    /// Threads that wait for a job.
    idle: usize,
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
            available: Condvar::new(),
            ended: Condvar::new(),
            process: CreatorProcess::this(),
        })
    }

    pub(crate) fn push(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        if state.stopped {
            drop(state);
            return drop(job);
        }
        state.queue.push_back(job);
        self.staff(&mut state);
        drop(state);
        deferred_log::flush();
    }

    /// Sees to it that what is queued is taken. What went wrong is for the log, when `state` is unlocked.
    fn staff(self: &Arc<Self>, state: &mut PoolState) {
        if state.queue.is_empty() || state.stopped {
            return;
        }
        if state.idle >= state.queue.len() {
            self.available.notify_one();
            return;
        }
        self.available.notify_one();
        if state.alive - state.blocked < self.limit {
            let pool = self.clone();
            let spawned = std::thread::Builder::new().name(format!("calomel-{}", self.name)).spawn(move || pool.work());
            match spawned {
                Ok(thread) => {
                    state.alive += 1;
                    // Those that have ended need no joining any more.
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
        let mut state = self.state.lock();
        loop {
            // After a wait inside a job there may be more threads at work than there should be.
            let surplus = state.alive - state.blocked > self.limit;
            if let Some(job) = if surplus { None } else { state.queue.pop_front() } {
                drop(state);
                job.run(Instant::now());
                state = self.state.lock();
                continue;
            }
            if state.stopped || surplus {
                break;
            }
            state.idle += 1;
            let timed_out = self.available.wait_for(&mut state, LINGER).timed_out();
            state.idle -= 1;
            if timed_out && state.queue.is_empty() {
                break;
            }
        }
        state.alive -= 1;
        drop(state);
        self.ended.notify_all();
        CURRENT_POOL.set(None);
    }

    /// No jobs any more; what is queued is dropped, and the threads end. They are waited for, but for the calling one, and
    /// for those that a handler keeps.
    pub(crate) fn stop(&self) {
        if self.process.is_forked_child() {
            return;
        }
        let me = std::thread::current().id();
        let mut state = self.state.lock();
        state.stopped = true;
        let queue = std::mem::take(&mut state.queue);
        let threads = std::mem::take(&mut state.threads);
        self.available.notify_all();
        let deadline = Instant::now() + GRACE;
        let own = usize::from(threads.iter().any(|thread| thread.thread().id() == me));
        while state.alive > own && !self.ended.wait_until(&mut state, deadline).timed_out() {}
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

/// While it lives, the thread moves data in a call of this library: that does not make the handler that called slow, because
/// the thread makes progress meanwhile.
pub(crate) struct Moving {
    began: Instant,
    before: Duration,
}

impl Moving {
    pub(crate) fn enter() -> Moving {
        Moving { began: Instant::now(), before: WAITED.try_with(Cell::get).unwrap_or_default() }
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        // What was waited in between is part of it. A thread that is ending runs no job.
        let _ = WAITED.try_with(|waited| waited.set(self.before + self.began.elapsed()));
    }
}

/// While it lives, the thread waits inside a call of this library, driving if nobody else does: its pool may use another
/// one meanwhile, and the time does not count as the handler's own.
pub(crate) struct Blocking {
    pool: Option<Arc<Workers>>,
    /// `None` where no handler runs.
    began: Option<Instant>,
}

impl Blocking {
    pub(crate) fn enter() -> Blocking {
        let pool = CURRENT_POOL.try_with(|pool| pool.borrow().clone()).ok().flatten();
        if let Some(pool) = &pool {
            let mut state = pool.state.lock();
            state.blocked += 1;
            pool.staff(&mut state);
            drop(state);
            deferred_log::flush();
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
