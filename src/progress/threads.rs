//! The engine's own threads.
//!
//! The *progress thread* drives when no caller does, and runs short handlers itself. The *watcher* looks after it: when a
//! handler keeps it for too long, the watcher starts another progress thread, and the first one ends when its handler
//! returns. Both sleep without a timeout while the engine is idle.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Core;
#[cfg(test)]
use super::PendingOutputs;
use super::completion::{ThreadSleeper, ThreadWaiter, with_sleeper};
use super::drive::{DriveEnd, DriveGoal};
use super::workers::{HandlerClass, Job};

/// How long progress may rest with a handler, or with nobody: the watcher and the progress thread look that often.
const TICK: Duration = Duration::from_micros(500);
/// How long a progress thread that has been told to end is waited for: one that takes longer is kept by a handler.
const GRACE: Duration = Duration::from_millis(50);
/// Answers wait no longer than this to go out with others, if handlers are short.
const HELD_BACK: Duration = Duration::from_micros(50);
/// While so many handlers begin between two looks, the watcher looks that often; else it sleeps until the next one begins.
const MANY: u64 = 4;

#[derive(Default)]
pub(super) struct Threads {
    /// The progress thread in office; earlier ones end.
    generation: AtomicU64,
    /// Counts handlers run by the progress thread: odd while one runs.
    handling: AtomicU64,
    /// Jobs that the progress thread has taken on; its successor goes on with them.
    jobs: Mutex<VecDeque<Job>>,
    /// There are some, or there have been.
    has_jobs: AtomicBool,
    /// The progress thread, as the system lists it.
    progress_task: Mutex<Option<PathBuf>>,
    /// What the handler that runs is one of.
    running: Mutex<Option<Arc<HandlerClass>>>,
    running_address: AtomicUsize,
    /// The watcher sleeps until it is woken.
    watcher_asleep: AtomicBool,
    watcher: Mutex<Option<Arc<ThreadWaiter>>>,
    progress: Mutex<Option<Arc<ThreadWaiter>>>,
    /// The watcher, and each term's progress thread.
    handles: Mutex<Vec<(Option<u64>, JoinHandle<()>)>>,
}

impl Threads {
    /// Tells the engines of a process apart.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// True when the watcher had to be woken, which takes its time.
    fn begin_handling(&self, in_seat: bool) -> bool {
        let number = self.handling.fetch_add(1, Ordering::SeqCst) + 1;
        HANDLING.set(Some(Handling { engine: self.identity(), number, in_seat }));
        // The count has been changed before, so either this is seen by the watcher, or that by this thread.
        let asleep = self.watcher_asleep.load(Ordering::SeqCst) && self.watcher_asleep.swap(false, Ordering::SeqCst);
        if asleep && let Some(watcher) = &*self.watcher.lock() {
            watcher.wake();
        }
        asleep
    }

    /// Whether the thread still has the seat. `None` when the watcher has counted the handler as done already: then the
    /// seat, and the office, are another's.
    fn end_handling(&self) -> Option<bool> {
        let Handling { number, in_seat, .. } = HANDLING.take()?;
        let ended = self.handling.compare_exchange(number, number + 1, Ordering::SeqCst, Ordering::SeqCst);
        ended.is_ok().then_some(in_seat)
    }

    /// What runs now is of this kind.
    fn note_running(&self, kind: &Arc<HandlerClass>) {
        let address = Arc::as_ptr(kind).addr();
        // What stands there is kept alive by standing there, so its address is nobody else's.
        if self.running_address.load(Ordering::Relaxed) != address {
            *self.running.lock() = Some(kind.clone());
            self.running_address.store(address, Ordering::Relaxed);
        }
    }

    /// Leaves a job to the progress thread.
    pub(super) fn give(&self, core: &Core, job: Job) {
        {
            let mut jobs = self.jobs.lock();
            if core.is_stopping() {
                drop(jobs);
                return drop(job);
            }
            jobs.push_back(job);
            self.has_jobs.store(true, Ordering::SeqCst);
        }
        // Wherever it sleeps, in the seat or out of it.
        if let Some(progress) = &*self.progress.lock() {
            progress.wake();
        }
    }

    fn has_jobs(&self) -> bool {
        self.has_jobs.load(Ordering::SeqCst)
    }

    /// The next job, and whether there are more.
    fn next_job(&self) -> Option<(Job, bool)> {
        if !self.has_jobs() {
            return None;
        }
        let mut jobs = self.jobs.lock();
        let job = jobs.pop_front();
        let more = !jobs.is_empty();
        self.has_jobs.store(more, Ordering::SeqCst);
        job.map(|job| (job, more))
    }

    fn take_on(&self, taken: &mut Vec<Job>) {
        let mut jobs = self.jobs.lock();
        jobs.extend(taken.drain(..));
        self.has_jobs.store(true, Ordering::SeqCst);
    }

    /// Ends the threads, and waits for those that are not the calling one, or kept by a handler.
    pub(super) fn stop(&self) {
        for waiter in [&self.watcher, &self.progress] {
            if let Some(waiter) = &*waiter.lock() {
                waiter.wake();
            }
        }
        let handles = std::mem::take(&mut *self.handles.lock());
        let me = std::thread::current().id();
        let deadline = Instant::now() + GRACE;
        for (term, handle) in handles {
            if handle.thread().id() == me {
                continue;
            }
            // One that a handler keeps, or was kept by when it was replaced, ends when the handler does.
            while term.is_some() && !handle.is_finished() && Instant::now() < deadline {
                std::thread::yield_now();
            }
            if term.is_none() || handle.is_finished() {
                let _ = handle.join();
            }
        }
        let jobs = std::mem::take(&mut *self.jobs.lock());
        drop(jobs);
        // A kind may keep a pool.
        let running = self.running.lock().take();
        drop(running);
    }
}

/// A handler that a progress thread runs.
#[derive(Clone, Copy)]
struct Handling {
    engine: usize,
    /// What the engine's `Threads::handling` counts it as.
    number: u64,
    /// The thread has the seat meanwhile.
    in_seat: bool,
}

thread_local! {
    /// On a progress thread, while it runs a handler.
    static HANDLING: Cell<Option<Handling>> = const { Cell::new(None) };
}

/// While it lives, a handler of the progress thread waits inside a call of this library. It drives meanwhile, so it need
/// not be replaced, and what it was to run next is left to the handler threads.
pub(super) struct HandlerPaused<'a> {
    threads: Option<&'a Threads>,
}

impl<'a> HandlerPaused<'a> {
    pub(super) fn enter(core: &'a Core) -> HandlerPaused<'a> {
        let threads = &core.threads;
        // When the handler waits for another engine, the watcher sees to this one.
        let own = HANDLING.get().is_some_and(|handling| handling.engine == threads.identity());
        let Some(in_seat) = own.then(|| threads.end_handling()).flatten() else { return HandlerPaused { threads: None } };
        if in_seat {
            core.driver_lock.release_as_progress();
        }
        if core.handlers_inline {
            // Without handler threads, somebody else has to run what comes in: the watcher sees to that.
            threads.begin_handling(false);
            return HandlerPaused { threads: None };
        }
        let left = std::mem::take(&mut *threads.jobs.lock());
        left.into_iter().for_each(|job| core.hand_over(job));
        HandlerPaused { threads: Some(threads) }
    }
}

impl Drop for HandlerPaused<'_> {
    fn drop(&mut self) {
        if let Some(threads) = self.threads {
            threads.begin_handling(false);
        }
    }
}

pub(super) fn spawn(core: &Arc<Core>) -> io::Result<()> {
    spawn_progress(core, 0)?;
    let watched = core.clone();
    let handle = std::thread::Builder::new().name("calomel-watcher".to_owned()).spawn(move || watch(&watched))?;
    core.threads.handles.lock().push((None, handle));
    Ok(())
}

fn spawn_progress(core: &Arc<Core>, term: u64) -> io::Result<()> {
    let driven = core.clone();
    let handle = std::thread::Builder::new().name("calomel-progress".to_owned()).spawn(move || progress(&driven, term))?;
    let mut handles = core.threads.handles.lock();
    handles.retain(|(_, handle)| !handle.is_finished());
    handles.push((Some(term), handle));
    Ok(())
}

fn progress(core: &Core, term: u64) {
    with_sleeper(|sleeper| {
        *core.threads.progress.lock() = Some(sleeper.waiter.clone());
        *core.threads.progress_task.lock() = std::fs::read_link("/proc/thread-self").ok();
        let in_office = || core.threads.generation.load(Ordering::SeqCst) == term && !core.is_stopping();
        let mut seen = u64::MAX;
        // It sits down again at once when it got up for a job, and after a while when it got up for somebody else.
        let mut at_once = true;
        while in_office() {
            // What a predecessor has left unsaid, or a caller that has not looked again.
            core.uncork();
            if run_jobs(core, &in_office, None, ServeEnd::Left) == ServeEnd::Replaced || !in_office() {
                break;
            }
            let sat = if at_once { core.driver_lock.try_acquire_as_progress() } else { wait_for_lock(core, sleeper, &mut seen) };
            at_once = false;
            if sat {
                match serve(core, &in_office) {
                    ServeEnd::Replaced => break,
                    left => at_once = left == ServeEnd::Left,
                }
                // Whoever wants the seat is woken now, and has not sat yet.
                seen = u64::MAX;
            }
        }
    });
}

/// How a progress thread has come out of running handlers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ServeEnd {
    /// In the seat.
    Still,
    /// A handler has left it, to wait.
    Left,
    /// It was given to somebody who wanted it, or taken.
    Wanted,
    /// Seat and office are another's: a handler took too long.
    Replaced,
}

/// Leaves the seat when the progress thread unwinds: callers then drive by themselves.
struct ReleaseOnPanic<'a>(&'a Core);

impl Drop for ReleaseOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.driver_lock.release_as_progress();
        }
    }
}

/// Drives, and runs the handlers of what comes, until the seat is left.
fn serve(core: &Core, in_office: &dyn Fn() -> bool) -> ServeEnd {
    let _leave = ReleaseOnPanic(core);
    let mut jobs = Vec::new();
    let stop = || core.driver_lock.is_wanted() || core.is_stopping() || core.threads.has_jobs();
    let purpose = DriveGoal { stop: &stop, announce: &|_| true, deadline: None, progress: true };
    loop {
        let ended = core.drive(&mut jobs, &purpose);
        // One job that nobody else has to know of goes without saying.
        let only = if jobs.len() == 1 && !core.threads.has_jobs() { jobs.pop() } else { None };
        if !jobs.is_empty() {
            core.threads.take_on(&mut jobs);
        }
        let seated = if ended == DriveEnd::LockTaken { ServeEnd::Wanted } else { ServeEnd::Still };
        let seated = run_jobs(core, in_office, only, seated);
        if seated != ServeEnd::Still {
            return seated;
        }
        if core.driver_lock.is_wanted() || core.is_stopping() {
            core.driver_lock.release_as_progress();
            return ServeEnd::Wanted;
        }
    }
}

/// Sleeps for a while, and sits down if nobody has sat meanwhile.
fn wait_for_lock(core: &Core, sleeper: &ThreadSleeper, seen: &mut u64) -> bool {
    match core.driver_lock.acquire_as_progress(*seen, &sleeper.waiter) {
        Ok(()) => true,
        Err(occupied) => {
            // After a long sleep, whoever drove until now has a moment to come back before this thread sits down.
            *seen = if occupied.for_long { u64::MAX } else { occupied.epoch };
            sleeper.sleep((!occupied.for_long).then(|| Instant::now() + TICK));
            false
        }
    }
}

/// Runs what has arrived: short handlers here, one after the other, with their answers going out together. The thread keeps
/// the seat if it has it, until somebody wants it.
fn run_jobs(core: &Core, in_office: &dyn Fn() -> bool, first: Option<Job>, mut seated: ServeEnd) -> ServeEnd {
    let threads = &core.threads;
    let mut ran = false;
    let mut corked_since = None;
    let mut next = first.map(|job| (job, false));
    while let Some((job, more)) = next.take().or_else(|| threads.next_job()) {
        if job.kind().pool.is_some() || (job.kind().is_slow() && !core.handlers_inline) {
            core.hand_over(job);
            continue;
        }
        ran = true;
        threads.note_running(job.kind());
        // Waking somebody takes its time, which is not the handler's.
        let began = if threads.begin_handling(seated == ServeEnd::Still) { core.pacer.look_at_clock() } else { core.pacer.now() };
        let ended = if more { core.corked(|| job.run(began)) } else { job.run(began) };
        core.pacer.note(ended);
        // The first answers of a long batch must not wait for the last.
        let since = *corked_since.get_or_insert(began);
        if more && ended.saturating_duration_since(since) >= HELD_BACK {
            core.uncork();
            corked_since = None;
        }
        match threads.end_handling() {
            Some(true) => {}
            Some(false) if seated == ServeEnd::Still => seated = ServeEnd::Left,
            Some(false) => {}
            None => {
                // What it said last may wait for more that this thread will not say.
                core.uncork();
                return ServeEnd::Replaced;
            }
        }
        if seated == ServeEnd::Still && core.driver_lock.is_wanted() {
            core.driver_lock.release_as_progress();
            seated = ServeEnd::Wanted;
        }
        if !in_office() {
            break;
        }
    }
    if ran {
        core.uncork();
    }
    seated
}

fn watch(core: &Arc<Core>) {
    let threads = &core.threads;
    with_sleeper(|sleeper| {
        *threads.watcher.lock() = Some(sleeper.waiter.clone());
        let mut before = 0;
        while !core.is_stopping() {
            let now = threads.handling.load(Ordering::SeqCst);
            if now % 2 == 1 && now == before {
                replace(core, now);
            }
            // The count goes up by two with each handler.
            let many = now.wrapping_sub(before) >= 2 * MANY;
            before = now;
            if now % 2 == 1 || many {
                sleeper.sleep(Some(Instant::now() + TICK));
                continue;
            }
            threads.watcher_asleep.store(true, Ordering::SeqCst);
            // A handler that began before the line above would have woken nobody.
            if threads.handling.load(Ordering::SeqCst) == before && !core.is_stopping() {
                sleeper.sleep(None);
            }
            threads.watcher_asleep.store(false, Ordering::SeqCst);
        }
    });
}

/// A handler keeps the progress thread: another one takes over.
fn replace(core: &Arc<Core>, handling: u64) {
    let threads = &core.threads;
    // Asked while the handler is certain to run still, if the next line finds it so.
    let sleeps = sleeps(&threads.progress_task.lock());
    // The handler that is still running counts for the thread that it keeps, not for the next one.
    if threads.handling.compare_exchange(handling, handling + 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    // One that computes, or that the system gives no processor, is not moved: that would not make it faster.
    if sleeps && let Some(kind) = &*threads.running.lock() {
        kind.set_slow();
    }
    let term = threads.generation.fetch_add(1, Ordering::SeqCst) + 1;
    core.driver_lock.release_as_progress();
    tracing::debug!(target: "calomel::progress", term, "a handler blocks; another progress thread takes over");
    if let Err(error) = spawn_progress(core, term) {
        tracing::error!(target: "calomel::progress", %error, "can't start another progress thread");
    }
}

/// Whether a thread waits for something; where the system does not tell, it is taken to.
fn sleeps(task: &Option<PathBuf>) -> bool {
    let Some(task) = task else { return true };
    let Ok(stat) = std::fs::read_to_string(Path::new("/proc").join(task).join("stat")) else { return true };
    // The name before the state stands in parentheses, and may hold any character.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state != Some('R')
}

/// An engine that moves by hand, so that one thread can run both sides of a call, and do the same in every run.
#[cfg(test)]
impl Core {
    /// Sends the progress thread home, for good.
    pub(crate) fn retire_progress(&self) {
        self.threads.generation.fetch_add(1, Ordering::SeqCst);
        let gone = || self.threads.handles.lock().iter().all(|(term, handle)| term.is_none() || handle.is_finished());
        while !gone() {
            // Wherever it sleeps, in the seat or out of it.
            self.driver_lock.release_as_progress();
            self.ring();
            if let Some(progress) = &*self.threads.progress.lock() {
                progress.wake();
            }
            std::thread::yield_now();
        }
    }

    /// Fails when the calling thread drives, and holds a lock that it drives with.
    pub(crate) fn assert_unlocked(&self) {
        assert!(self.driver.try_lock_for(Duration::from_secs(5)).is_some(), "the reactor is locked");
        for transport in &self.transports {
            assert!(!transport.is_locked(), "{:?} is locked", transport.capabilities());
        }
        self.with_proto(|_| ());
    }

    /// One look at the transports, at the reactor too if so wished, and the handlers of what they bring.
    pub(crate) fn turn(&self, at_reactor: bool) {
        assert!(self.driver_lock.try_acquire_as_progress(), "somebody else drives");
        let mut jobs = Vec::new();
        if at_reactor {
            self.look_around(Instant::now(), &mut PendingOutputs::default(), &mut jobs);
        }
        let purpose = DriveGoal { stop: &|| true, announce: &|_| true, deadline: None, progress: true };
        self.drive(&mut jobs, &purpose);
        for job in jobs {
            job.run(self.pacer.now());
        }
        self.driver_lock.release_as_progress();
    }
}
