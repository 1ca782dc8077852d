//! The engine's own threads: progress thread and watcher.
//!
//! The *progress thread* drives when no caller does, and runs short handlers itself. When a handler blocks it for too long,
//! the *watcher* starts another progress thread, and the first one ends when its handler returns. Both sleep without a
//! timeout while the engine is idle.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::sync::Mutex;

use super::completion::{ThreadSleeper, ThreadWaiter, with_sleeper};
use super::drive::{DriveEnd, DriveGoal};
#[cfg(test)]
use super::steps::PendingOutputs;
use super::workers::{HandlerClass, Job, nanos};
use super::{Core, Service};
use crate::{Error, Result};

/// How long progress may stop because a handler runs, or no thread drives: so often the watcher and the progress thread check.
const TICK: Duration = Duration::from_micros(500);
/// So many times the progress thread looks for a free lock after half a `TICK`. When a task that has led ends, others may wait until
/// the next look: for much of a short burst of calls. Beside many calls each look takes time from the threads that drive.
const SHORT_TICKS: u32 = 8;
/// How long answers are corked at most, if handlers are short; and where a transport takes them at once, so that sending costs little.
const MAX_CORK: Duration = Duration::from_micros(50);
const MAX_INJECTED_CORK: Duration = Duration::from_micros(10);
/// While at least so many handlers begin per `TICK`, the watcher checks every `TICK`; else ever more rarely.
const BUSY_HANDLERS: u64 = 4;
/// While no handler begins, the watcher takes these naps, and then sleeps until one begins.
const NAPS: [Duration; 4] = [TICK, Duration::from_millis(2), Duration::from_millis(8), LONGEST_NAP];
const LONGEST_NAP: Duration = Duration::from_millis(16);
/// The watcher looks again within a `TICK`.
const AWAKE: u8 = 0;
/// It looks again within `LONGEST_NAP`. To wake it for each rare call would take longer than many handlers.
const NAPPING: u8 = 1;
/// It sleeps until it is woken.
const ASLEEP: u8 = 2;
/// Most jobs that run one after the other before the engine drives again: an async handler that wakes itself is one job after
/// the other.
pub(super) const MAX_JOBS: u32 = 256;
/// After so long the thread that runs jobs drives again: tasks that wake themselves or each other would else keep it from that.
pub(super) const MAX_BATCH: Duration = Duration::from_micros(200);
/// How long `stop` waits for a progress thread: one that takes longer is blocked by a handler.
const GRACE: Duration = Duration::from_millis(50);

/// What the engine's own threads share: the jobs of the progress thread, and the handler that it runs.
#[derive(Default)]
pub(super) struct Threads {
    /// The number of the current progress thread; earlier ones end.
    generation: AtomicU64,
    /// Counts the beginnings and ends of handlers on the progress thread: odd while one runs.
    handling: AtomicU64,
    /// Jobs for the progress thread; its successor goes on with them.
    jobs: Mutex<VecDeque<Job>>,
    /// `jobs` may hold some.
    has_jobs: AtomicBool,
    /// Tasks that are woken go to handler threads, since a handler of the progress thread waits inside a call of this library, or there
    /// is no such thread.
    paused: AtomicBool,
    /// The progress thread in `/proc`.
    progress_task: Mutex<Option<PathBuf>>,
    /// The class of the running handler, and its address.
    running: Mutex<Option<Arc<HandlerClass>>>,
    running_address: AtomicUsize,
    /// `AWAKE`, `NAPPING` or `ASLEEP`: how soon the watcher looks again, if it is not woken.
    watch: AtomicU8,
    watcher: Mutex<Option<Arc<ThreadWaiter>>>,
    progress: Mutex<Option<Arc<ThreadWaiter>>>,
    /// The caller that drove does not come back soon: the progress thread acquires the driver lock without waiting for that.
    takes_over: AtomicBool,
    /// `handling` when a caller last left the lock free.
    handled: AtomicU64,
    /// The watcher, and the progress threads by generation.
    handles: Mutex<Vec<(Option<u64>, JoinHandle<()>)>>,
}

impl Threads {
    /// Identifies the engine within its process.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// True when the watcher had to be woken, which takes some time.
    fn begin_handling(&self, holds_lock: bool, class: Option<&HandlerClass>) -> bool {
        let number = self.handling.fetch_add(1, Ordering::SeqCst) + 1;
        HANDLING.set(Some(Handling { engine: self.identity(), number, holds_lock }));
        // `handling` has changed already, so either the watcher sees that, or this thread sees that the watcher sleeps.
        let watch = self.watch.load(Ordering::SeqCst);
        let sees_in_time = watch == AWAKE || watch == NAPPING && class.is_some_and(HandlerClass::is_trusted);
        let wakes = !sees_in_time && self.watch.swap(AWAKE, Ordering::SeqCst) != AWAKE;
        if wakes && let Some(watcher) = &*self.watcher.lock() {
            watcher.wake();
        }
        wakes
    }

    /// True when the thread still holds the driver lock. `None` when the watcher has replaced this thread meanwhile: then it is
    /// not the progress thread any more.
    fn end_handling(&self) -> Option<bool> {
        let Handling { number, holds_lock, .. } = HANDLING.take()?;
        let ended = self.handling.compare_exchange(number, number + 1, Ordering::SeqCst, Ordering::SeqCst);
        ended.is_ok().then_some(holds_lock)
    }

    /// The handler that the calling thread runs as the progress thread waits: for the watcher it does not run. Returns whether the thread
    /// holds the driver lock; `None` for another thread. A handler that waits for another engine does not drive this one, so the
    /// watcher has to replace its thread.
    pub(super) fn pause(&self) -> Option<bool> {
        let own = HANDLING.get().is_some_and(|handling| handling.engine == self.identity());
        own.then(|| self.end_handling()).flatten()
    }

    /// The handler runs again.
    pub(super) fn resume(&self) {
        self.paused.store(false, Ordering::Relaxed);
        self.begin_handling(false, None);
    }

    /// Tasks that are woken go to handler threads from now on.
    pub(super) fn refuse_tasks(&self) {
        self.paused.store(true, Ordering::Relaxed);
    }

    /// Stores the class of the handler that runs now.
    fn note_running(&self, class: &Arc<HandlerClass>) {
        let address = Arc::as_ptr(class).addr();
        // `running` keeps the class alive, so no other class has its address.
        if self.running_address.load(Ordering::Relaxed) != address {
            *self.running.lock() = Some(class.clone());
            self.running_address.store(address, Ordering::Relaxed);
        }
    }

    /// Queues a job for the progress thread. Returns it where that runs none now.
    pub(super) fn give(&self, core: &Core, job: Job) -> Option<Job> {
        {
            let mut jobs = self.jobs.lock();
            if core.is_stopping() {
                drop(jobs);
                drop(job);
                return None;
            }
            if self.paused.load(Ordering::Relaxed) {
                return Some(job);
            }
            jobs.push_back(job);
            self.has_jobs.store(true, Ordering::SeqCst);
        }
        core.signal_event_loop();
        // It may sleep in the reactor, or wait for the driver lock.
        if let Some(progress) = &*self.progress.lock() {
            progress.wake();
        }
        None
    }

    /// How many jobs wait for the progress thread, and whether it runs one.
    pub(super) fn load(&self) -> (u64, bool) {
        (self.jobs.lock().len() as u64, self.is_handling())
    }

    /// True while a handler runs on the progress thread.
    pub(super) fn is_handling(&self) -> bool {
        self.handling.load(Ordering::SeqCst) % 2 == 1
    }

    /// Wakes the progress thread to acquire the driver lock.
    pub(super) fn take_over(&self) {
        if !self.takes_over.swap(true, Ordering::SeqCst)
            && let Some(progress) = &*self.progress.lock()
        {
            progress.wake();
        }
    }

    pub(super) fn has_jobs(&self) -> bool {
        self.has_jobs.load(Ordering::SeqCst)
    }

    /// The next job, and whether there are more.
    pub(super) fn next_job(&self) -> Option<(Job, bool)> {
        if !self.has_jobs() {
            return None;
        }
        let mut jobs = self.jobs.lock();
        let job = jobs.pop_front();
        let more = !jobs.is_empty();
        self.has_jobs.store(more, Ordering::SeqCst);
        job.map(|job| (job, more))
    }

    pub(super) fn take_jobs(&self) -> VecDeque<Job> {
        let mut jobs = self.jobs.lock();
        self.has_jobs.store(false, Ordering::SeqCst);
        std::mem::take(&mut *jobs)
    }

    pub(super) fn enqueue(&self, new: &mut Vec<Job>) {
        let mut jobs = self.jobs.lock();
        jobs.extend(new.drain(..));
        self.has_jobs.store(true, Ordering::SeqCst);
    }

    /// Ends the threads, and waits for them, except for the calling one and those blocked by a handler.
    fn stop(&self) {
        for waiter in [&self.watcher, &self.progress] {
            if let Some(waiter) = &*waiter.lock() {
                waiter.wake();
            }
        }
        let handles = std::mem::take(&mut *self.handles.lock());
        let me = std::thread::current().id();
        let deadline = Instant::now() + GRACE;
        for (generation, handle) in handles {
            if handle.thread().id() == me {
                continue;
            }
            // A thread blocked by a handler ends when the handler does.
            while generation.is_some() && !handle.is_finished() && Instant::now() < deadline {
                std::thread::yield_now();
            }
            if generation.is_none() || handle.is_finished() {
                let _ = handle.join();
            }
        }
        let jobs = std::mem::take(&mut *self.jobs.lock());
        drop(jobs);
        // A class may keep a pool alive.
        let running = self.running.lock().take();
        drop(running);
    }
}

/// A handler that a progress thread runs.
#[derive(Clone, Copy)]
struct Handling {
    engine: usize,
    /// The value of the engine's `Threads::handling` while it runs.
    number: u64,
    /// The thread holds the driver lock meanwhile.
    holds_lock: bool,
}

thread_local! {
    /// On a progress thread, while it runs a handler.
    static HANDLING: Cell<Option<Handling>> = const { Cell::new(None) };
}

impl Core {
    /// Takes up work: before this, nothing moves.
    pub(crate) fn run(self: &Arc<Self>, service: Box<dyn Service>) -> Result<()> {
        let _ = self.service.set(service);
        if self.is_external() {
            self.start_external();
            return Ok(());
        }
        spawn(self).map_err(|error| Error::io("can't start the engine's threads", error))
    }

    /// No jobs or timers are accepted from now on.
    pub(crate) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// Ends the engine's threads; the calling one, if it is one of them, ends when it returns to its loop.
    pub(crate) fn stop(&self) {
        self.begin_stop();
        self.ring();
        self.signal_event_loop();
        self.threads.stop();
        self.workers.stop();
        self.timer_workers.stop();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

fn spawn(core: &Arc<Core>) -> io::Result<()> {
    spawn_progress(core, 0)?;
    let core_of_watcher = core.clone();
    let handle = std::thread::Builder::new().name("calomel-watcher".to_owned()).spawn(move || watch(&core_of_watcher))?;
    core.threads.handles.lock().push((None, handle));
    Ok(())
}

fn spawn_progress(core: &Arc<Core>, generation: u64) -> io::Result<()> {
    let driven = core.clone();
    let handle = std::thread::Builder::new().name("calomel-progress".to_owned()).spawn(move || progress(&driven, generation))?;
    let mut handles = core.threads.handles.lock();
    handles.retain(|(_, handle)| !handle.is_finished());
    handles.push((Some(generation), handle));
    Ok(())
}

fn progress(core: &Core, generation: u64) {
    with_sleeper(|sleeper| {
        *core.threads.progress.lock() = Some(sleeper.waiter.clone());
        core.threads.paused.store(false, Ordering::Relaxed);
        *core.threads.progress_task.lock() = std::fs::read_link("/proc/thread-self").ok();
        let is_current = || core.threads.generation.load(Ordering::SeqCst) == generation && !core.is_stopping();
        let mut looks = Looks::default();
        // It acquires the lock again at once after it released it for a handler, and after a while when a caller wanted it.
        let mut at_once = true;
        while is_current() {
            // A predecessor, or a caller that does not drive any more, may have left frames unsent.
            core.uncork();
            // It drives between two batches of jobs, if it can.
            if !at_once && run_jobs(core, &is_current, None, LockState::ReleasedByHandler) == LockState::Replaced || !is_current()
            {
                break;
            }
            // Jobs that are left must not wait for the lock.
            let acquired = if at_once || core.threads.has_jobs() {
                core.driver_lock.try_acquire_as_progress()
            } else {
                wait_for_lock(core, sleeper, &mut looks)
            };
            at_once = false;
            if acquired {
                match serve(core, &is_current) {
                    LockState::Replaced => break,
                    left => at_once = left == LockState::ReleasedByHandler,
                }
                // The caller that wants the lock has been woken, and has not acquired it yet.
                looks = Looks::default();
            }
        }
    });
}

/// What became of the driver lock while a progress thread drove or ran handlers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LockState {
    /// The thread holds it.
    Holding,
    /// A handler that waits inside this library has released it.
    ReleasedByHandler,
    /// Released for a caller that wanted it, or taken by one.
    ReleasedForCaller,
    /// A handler took too long, and the watcher has replaced the thread.
    Replaced,
}

/// Releases the driver lock when the progress thread unwinds: callers then drive by themselves, and other threads run the jobs.
struct ReleaseOnPanic<'a>(&'a Core);

impl Drop for ReleaseOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.driver_lock.release_as_progress();
            self.0.leave_jobs_to_others();
        }
    }
}

/// Drives, and runs the handlers of the requests that arrive, until the driver lock is released.
fn serve(core: &Core, is_current: &dyn Fn() -> bool) -> LockState {
    let _release = ReleaseOnPanic(core);
    let mut jobs = Vec::new();
    let stop = || core.driver_lock.is_wanted() || core.is_stopping() || core.threads.has_jobs();
    let goal = DriveGoal { stop: &stop, announce: &|_| true, deadline: None, progress: true, until_event: false, brief: false };
    loop {
        let ended = core.drive(&mut jobs, &goal);
        // The common case, a single job, skips the queue.
        let only = if jobs.len() == 1 && !core.threads.has_jobs() { jobs.pop() } else { None };
        if !jobs.is_empty() {
            core.threads.enqueue(&mut jobs);
        }
        let lock = if ended == DriveEnd::LockTaken { LockState::ReleasedForCaller } else { LockState::Holding };
        let lock = run_jobs(core, is_current, only, lock);
        if lock != LockState::Holding {
            return lock;
        }
        if core.driver_lock.is_wanted() || core.is_stopping() {
            core.driver_lock.release_as_progress();
            return LockState::ReleasedForCaller;
        }
    }
}

/// The progress thread's looks for a free driver lock since callers drive.
#[derive(Default)]
struct Looks {
    count: u32,
    /// How often the lock had been acquired at the last one.
    epoch: Option<u64>,
}

/// Acquires the driver lock if no caller has acquired it since the last attempt; else sleeps for a while.
fn wait_for_lock(core: &Core, sleeper: &ThreadSleeper, looks: &mut Looks) -> bool {
    if core.threads.takes_over.swap(false, Ordering::SeqCst) {
        if core.driver_lock.try_acquire_as_progress() {
            return true;
        }
        core.threads.takes_over.store(true, Ordering::SeqCst);
    }
    match core.driver_lock.acquire_as_progress(looks.epoch.unwrap_or(u64::MAX), &sleeper.waiter) {
        Ok(()) => {
            core.polls.lock_was_free();
            true
        }
        Err(contended) => {
            // After a sleep without timeout, the caller that drove gets a `TICK` to come back before this thread acquires the
            // lock.
            if contended.until_woken {
                *looks = Looks::default();
                sleeper.sleep(None);
            } else {
                let tick = if looks.count < SHORT_TICKS { TICK / 2 } else { TICK };
                *looks = Looks { count: looks.count.saturating_add(1), epoch: Some(contended.epoch) };
                sleeper.sleep(Some(Instant::now() + tick));
            }
            false
        }
    }
}

/// Runs the jobs that have arrived: short handlers here, sequentially, with their answers corked. A thread that holds the
/// driver lock keeps it until a caller wants it.
fn run_jobs(core: &Core, is_current: &dyn Fn() -> bool, first: Option<Job>, mut lock: LockState) -> LockState {
    let threads = &core.threads;
    let mut ran = 0;
    let mut cork = Cork::default();
    let mut next = first.map(|job| (job, false)).or_else(|| threads.next_job());
    if next.as_ref().is_some_and(|(job, _)| lock != LockState::Holding || job.is_task()) {
        // The thread may have slept; and a task is often woken at the end of a transfer, by the poll that has copied the last of it.
        core.pacer.read_clock();
    }
    let begun = core.pacer.nanos();
    while let Some((job, more)) = next.take().or_else(|| threads.next_job()) {
        if !core.runs_inline(&job) {
            core.dispatch(job);
            continue;
        }
        ran += 1;
        threads.note_running(job.class());
        // The time it takes to wake the watcher does not count as the handler's.
        let class = Some(&**job.class()).filter(|_| !core.handlers_inline);
        let woke = threads.begin_handling(lock == LockState::Holding, class);
        core.send_left_answers();
        let began = if woke { core.pacer.read_clock() } else { core.pacer.now() };
        core.run_job(job, began, more, &mut cork);
        match threads.end_handling() {
            Some(true) => {}
            Some(false) if lock == LockState::Holding => lock = LockState::ReleasedByHandler,
            Some(false) => {}
            None => {
                // The last answer may be corked, and this thread sends no more.
                core.uncork();
                return LockState::Replaced;
            }
        }
        if lock == LockState::Holding && core.driver_lock.is_wanted() {
            core.driver_lock.release_as_progress();
            lock = LockState::ReleasedForCaller;
        }
        if !is_current() || ran >= MAX_JOBS || core.pacer.nanos().saturating_sub(begun) >= nanos(MAX_BATCH) {
            break;
        }
    }
    if ran > 0 {
        core.uncork();
    }
    lock
}

/// Since when the answers of a batch are corked: all of them, and those that may be injected.
#[derive(Default)]
pub(super) struct Cork {
    since: Option<Instant>,
    injected_since: Option<Instant>,
}

impl Core {
    /// Runs a job of a batch. While there are `more`, its answer waits for theirs.
    pub(super) fn run_job(&self, job: Job, began: Instant, more: bool, cork: &mut Cork) {
        let waited = job.waited(self.pacer.nanos());
        let ended = if more { self.corked(|| job.run(began, waited)) } else { job.run(began, waited) };
        self.pacer.note(ended);
        if !more {
            // Jobs that this one has made may follow. What is corked does not wait for them.
            self.uncork();
            *cork = Cork::default();
            return;
        }
        // The first answers of a long batch must not wait for the last.
        let waited = |since: &mut Option<Instant>| ended.saturating_duration_since(*since.get_or_insert(began));
        if waited(&mut cork.since) >= MAX_CORK {
            self.uncork();
            *cork = Cork::default();
        // Where threads do not spin, the peer sleeps again at once, and each time would wake it.
        } else if self.spin.is_some() && waited(&mut cork.injected_since) >= MAX_INJECTED_CORK {
            self.inject_unsent();
            cork.injected_since = None;
        }
    }
}

fn watch(core: &Arc<Core>) {
    let threads = &core.threads;
    with_sleeper(|sleeper| {
        *threads.watcher.lock() = Some(sleeper.waiter.clone());
        let (mut before, mut naps) = (0, NAPS.iter());
        while !core.is_stopping() {
            let now = threads.handling.load(Ordering::SeqCst);
            if now % 2 == 1 && now == before {
                replace(core, now);
            }
            // The count goes up by two with each handler.
            let many = now.wrapping_sub(before) >= 2 * BUSY_HANDLERS;
            if now != before {
                naps = NAPS.iter();
            }
            before = now;
            if now % 2 == 1 || many {
                sleeper.sleep(Some(Instant::now() + TICK));
                continue;
            }
            let nap = naps.next();
            threads.watch.store(if nap.is_some() { NAPPING } else { ASLEEP }, Ordering::SeqCst);
            // A handler that began before the line above has not woken this thread.
            if threads.handling.load(Ordering::SeqCst) == before && !core.is_stopping() {
                sleeper.sleep(nap.map(|nap| Instant::now() + *nap));
            }
            threads.watch.store(AWAKE, Ordering::SeqCst);
        }
    });
}

/// Starts another progress thread in place of one that a handler blocks.
fn replace(core: &Arc<Core>, handling: u64) {
    let threads = &core.threads;
    // Read before the exchange: if that succeeds, the handler still ran at this point.
    let sleeps = sleeps(&threads.progress_task.lock());
    // From here on the count is that of the next thread: the handler that still runs belongs to the old one.
    if threads.handling.compare_exchange(handling, handling + 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    // A handler that computes, or gets no processor, would not be faster elsewhere.
    if sleeps && let Some(class) = &*threads.running.lock() {
        class.set_slow();
    }
    let generation = threads.generation.fetch_add(1, Ordering::SeqCst) + 1;
    core.driver_lock.release_as_progress();
    tracing::debug!(target: "calomel::progress", generation, "a handler blocks; another progress thread takes over");
    if let Err(error) = spawn_progress(core, generation) {
        tracing::error!(target: "calomel::progress", %error, "can't start another progress thread");
        core.leave_jobs_to_others();
    }
}

/// True when a thread sleeps, and also where the system does not report its state.
fn sleeps(task: &Option<PathBuf>) -> bool {
    let Some(task) = task else { return true };
    let Ok(stat) = std::fs::read_to_string(Path::new("/proc").join(task).join("stat")) else { return true };
    // The name before the state stands in parentheses, and may hold any character.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state != Some('R')
}

impl Core {
    /// The calling thread has driven for an operation that has ended. If the progress thread has handled requests since that last
    /// happened, there may be more, and it drives now. An engine that only calls leaves the lock free for its next call.
    #[inline]
    pub(super) fn has_driven(&self) {
        let threads = &self.threads;
        let handling = threads.handling.load(Ordering::Relaxed);
        if handling != threads.handled.load(Ordering::Relaxed) && self.driver_lock.holder_is_awake().is_none() {
            threads.handled.store(handling, Ordering::Relaxed);
            threads.take_over();
        }
    }

    /// The calling thread has answered a request. If it, or another, has waited for a call meanwhile, perhaps no thread drives
    /// now; and more requests may come, so the progress thread does not wait for the next call.
    #[inline]
    pub(crate) fn answered(&self) {
        let is_progress = || HANDLING.get().is_some_and(|handling| handling.engine == self.threads.identity());
        if self.driver_lock.holder_is_awake().is_none() && !is_progress() {
            self.threads.take_over();
        }
    }

    /// The progress thread runs no jobs for now: those that wait for it go to handler threads, if there are any.
    pub(super) fn leave_jobs_to_others(&self) {
        if self.handlers_inline {
            return;
        }
        let left = {
            let mut jobs = self.threads.jobs.lock();
            self.threads.paused.store(true, Ordering::Relaxed);
            std::mem::take(&mut *jobs)
        };
        left.into_iter().for_each(|job| self.dispatch(job));
    }
}

/// Manual progress for tests: one thread can run both sides of a call, deterministically.
#[cfg(test)]
impl Core {
    /// Ends the progress thread for good.
    pub(crate) fn retire_progress(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        let late = || Instant::now() >= deadline;
        // It releases the driver lock as for any caller, or is woken out of the reactor without it.
        let acquired = with_sleeper(|sleeper| self.acquire_queued(sleeper, &late, Some(deadline)));
        assert!(acquired.is_some(), "the progress thread does not release the driver lock");
        self.driver_lock.take_from_progress();
        let gone = || self.threads.handles.lock().iter().all(|(number, handle)| number.is_none() || handle.is_finished());
        while !gone() {
            assert!(!late(), "the progress thread does not end");
            // The watcher may start a successor meanwhile.
            self.threads.generation.fetch_add(1, Ordering::SeqCst);
            self.ring();
            if let Some(progress) = &*self.threads.progress.lock() {
                progress.wake();
            }
            std::thread::yield_now();
        }
        self.driver_lock.release();
    }

    /// Whether the protocol has frames that are left for the driver; and how often such frames were held in vain, where futures drive.
    pub(crate) fn held_calls(&self) -> Option<(bool, u32)> {
        self.spin.map(|_| (self.unsent.load(Ordering::SeqCst), self.polls.holds_in_vain()))
    }

    /// Fails when the calling thread drives, and holds a lock that it drives with.
    pub(crate) fn assert_unlocked(&self) {
        assert!(self.driver.try_lock_for(Duration::from_secs(5)).is_some(), "the reactor is locked");
        for transport in &self.transports {
            assert!(!transport.is_locked(), "{:?} is locked", transport.capabilities());
        }
        self.with_proto(|_| ());
    }

    /// Runs `work` while this thread counts as the one that drives, as a caller does, and has just read the clock, however long it takes.
    pub(crate) fn while_driving<R>(&self, work: impl FnOnce() -> R) -> R {
        let acquired = self.driver_lock.try_acquire().expect("no other thread drives");
        let _guard = self.begin_driving(acquired);
        self.pacer.note(Instant::now() + Duration::from_secs(60));
        let result = work();
        self.pacer.read_clock();
        result
    }

    /// Polls the transports once, and the reactor if `at_reactor`, and runs the handlers of what has arrived, without the driver lock.
    pub(crate) fn turn(&self, at_reactor: bool) {
        assert!(self.driver_lock.try_acquire_as_progress(), "another thread drives");
        let mut jobs = Vec::new();
        if at_reactor {
            self.poll_reactor(Instant::now(), &mut PendingOutputs::default(), &mut jobs);
        }
        let goal =
            DriveGoal { stop: &|| true, announce: &|_| true, deadline: None, progress: true, until_event: false, brief: false };
        self.drive(&mut jobs, &goal);
        self.driver_lock.release_as_progress();
        jobs.extend(self.threads.take_jobs());
        let mut jobs = jobs.into_iter().peekable();
        while let Some(job) = jobs.next() {
            let waited = job.waited(self.pacer.nanos());
            let run = || job.run(self.pacer.now(), waited);
            if jobs.peek().is_some() {
                self.corked(run)
            } else {
                run()
            };
            // Begun and ended: the watcher, which would start another progress thread, does not see it run.
            self.threads.handling.fetch_add(2, Ordering::SeqCst);
        }
    }

    /// Whether the progress thread has been told to take over since this was last asked.
    pub(crate) fn takes_over(&self) -> bool {
        self.threads.takes_over.swap(false, Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handler_wakes_a_watcher_that_would_be_late() {
        let (unknown, trusted) = (HandlerClass::default(), HandlerClass::trusted());
        let cases = [
            (AWAKE, &unknown, false),
            (AWAKE, &trusted, false),
            (NAPPING, &unknown, true),
            (NAPPING, &trusted, false),
            (ASLEEP, &unknown, true),
            (ASLEEP, &trusted, true),
        ];
        for (watch, class, wakes) in cases {
            let threads = Threads::default();
            threads.watch.store(watch, Ordering::SeqCst);
            assert_eq!(threads.begin_handling(false, Some(class)), wakes, "{watch}, trusted: {}", class.is_trusted());
            assert!(threads.end_handling().is_some());
        }
    }
}
