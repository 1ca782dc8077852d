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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Core;
use super::completion::{ThreadSleeper, ThreadWaiter, with_sleeper};
use super::workers::{Job, Kind};

/// How long progress may rest with a handler, or with nobody: the watcher and the progress thread look that often.
const TICK: Duration = Duration::from_micros(500);
/// How long a progress thread that has been told to end is waited for: one that takes longer is kept by a handler.
const GRACE: Duration = Duration::from_millis(50);
/// The watcher goes to sleep after so many looks at which nothing ran.
const QUIET_TICKS: u32 = 20;

#[derive(Default)]
pub(super) struct Threads {
    /// The progress thread in office; earlier ones end.
    term: AtomicU64,
    /// Counts handlers run by the progress thread: odd while one runs.
    handling: AtomicU64,
    /// Jobs that the progress thread has taken on; its successor goes on with them.
    jobs: Mutex<VecDeque<Job>>,
    /// The progress thread, as the system lists it.
    progress_task: Mutex<Option<PathBuf>>,
    /// What the handler that runs is one of.
    running: Mutex<Option<Arc<Kind>>>,
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

    fn begin_handling(&self) {
        HANDLING.set(Some((self.identity(), self.handling.fetch_add(1, Ordering::SeqCst) + 1)));
    }

    /// False when the watcher has counted the handler as done already, and this thread is out of office.
    fn end_handling(&self) -> bool {
        let Some((_, mine)) = HANDLING.take() else { return false };
        self.handling.compare_exchange(mine, mine + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
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
        }
        // Wherever it sleeps, in the seat or out of it.
        if let Some(progress) = &*self.progress.lock() {
            progress.wake();
        }
    }

    fn has_jobs(&self) -> bool {
        !self.jobs.lock().is_empty()
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
    }
}

thread_local! {
    /// On a progress thread, while it runs a handler: of which engine, and what its `Threads::handling` counts it as.
    static HANDLING: Cell<Option<(usize, u64)>> = const { Cell::new(None) };
}

/// While it lives, a handler of the progress thread waits inside a call of this library. It drives meanwhile, so it need
/// not be replaced, and what it was to run next is left to the handler threads.
pub(super) struct Resting<'a> {
    threads: Option<&'a Threads>,
}

impl<'a> Resting<'a> {
    pub(super) fn enter(core: &'a Core) -> Resting<'a> {
        // Without handler threads, somebody else has to run what comes in: the watcher sees to that. So it does when the
        // handler waits for another engine.
        let own = HANDLING.get().is_some_and(|(engine, _)| engine == core.threads.identity());
        if !own || core.handlers_inline || !core.threads.end_handling() {
            return Resting { threads: None };
        }
        let left = std::mem::take(&mut *core.threads.jobs.lock());
        left.into_iter().for_each(|job| core.hand_over(job));
        Resting { threads: Some(&core.threads) }
    }
}

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        if let Some(threads) = self.threads {
            threads.begin_handling();
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
        let in_office = || core.threads.term.load(Ordering::SeqCst) == term && !core.is_stopping();
        // What a predecessor has left unsaid.
        core.uncork();
        let mut seen = u64::MAX;
        // It sits down again at once when it got up for a job, and after a while when it got up for somebody else.
        let mut at_once = true;
        while in_office() {
            run_jobs(core, &in_office);
            if !in_office() {
                break;
            }
            let sat = if at_once { core.seat.sit_back() } else { wait_for_seat(core, sleeper, &mut seen) };
            at_once = false;
            if sat {
                let mut jobs = Vec::new();
                let sitting = core.seat.sitting();
                let stop = || core.seat.is_wanted() || core.is_stopping() || core.threads.has_jobs();
                core.drive(&mut jobs, &stop, None);
                at_once = !core.seat.is_wanted();
                // Whoever wants the seat is woken now, and has not sat yet.
                seen = u64::MAX;
                core.threads.jobs.lock().extend(jobs);
                drop(sitting);
            }
        }
    });
}

/// Sleeps for a while, and sits down if nobody has sat meanwhile.
fn wait_for_seat(core: &Core, sleeper: &ThreadSleeper, seen: &mut u64) -> bool {
    match core.seat.sit_as_progress(*seen, &sleeper.waiter) {
        Ok(()) => true,
        Err(occupied) => {
            // After a long sleep, whoever drove until now has a moment to come back before this thread sits down.
            *seen = if occupied.for_long { u64::MAX } else { occupied.epoch };
            sleeper.sleep((!occupied.for_long).then(|| Instant::now() + TICK));
            false
        }
    }
}

/// Runs what has arrived: short handlers here, one after the other, with their answers going out together.
fn run_jobs(core: &Core, in_office: &dyn Fn() -> bool) {
    let threads = &core.threads;
    let mut ran = false;
    while in_office() {
        let (job, more) = {
            let mut jobs = threads.jobs.lock();
            let Some(job) = jobs.pop_front() else { break };
            (job, !jobs.is_empty())
        };
        if job.kind.pool.is_some() || (job.kind.is_slow() && !core.handlers_inline) {
            core.hand_over(job);
            continue;
        }
        ran = true;
        *threads.running.lock() = Some(job.kind.clone());
        threads.begin_handling();
        wake_watcher(threads);
        if more {
            core.corked(|| job.run());
        } else {
            job.run();
        }
        threads.end_handling();
    }
    if ran {
        core.uncork();
    }
}

fn wake_watcher(threads: &Threads) {
    if threads.watcher_asleep.swap(false, Ordering::SeqCst)
        && let Some(watcher) = &*threads.watcher.lock()
    {
        watcher.wake();
    }
}

fn watch(core: &Arc<Core>) {
    let threads = &core.threads;
    with_sleeper(|sleeper| {
        *threads.watcher.lock() = Some(sleeper.waiter.clone());
        let mut quiet = 0;
        let mut before = 0;
        while !core.is_stopping() {
            let now = threads.handling.load(Ordering::SeqCst);
            if now % 2 == 1 && now == before {
                replace(core, now);
            }
            quiet = if now == before { quiet + 1 } else { 0 };
            before = now;
            if quiet < QUIET_TICKS {
                sleeper.sleep(Some(Instant::now() + TICK));
                continue;
            }
            threads.watcher_asleep.store(true, Ordering::SeqCst);
            // A handler that began before the line above would have woken nobody.
            if threads.handling.load(Ordering::SeqCst) == before && !core.is_stopping() {
                sleeper.sleep(None);
            }
            threads.watcher_asleep.store(false, Ordering::SeqCst);
            quiet = 0;
        }
    });
}

/// A handler keeps the progress thread: another one takes over.
fn replace(core: &Arc<Core>, handling: u64) {
    let threads = &core.threads;
    // The handler that is still running counts for the thread that it keeps, not for the next one.
    if threads.handling.compare_exchange(handling, handling + 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    // One that computes, or that the system gives no processor, is not moved: that would not make it faster.
    if sleeps(&threads.progress_task.lock())
        && let Some(kind) = &*threads.running.lock()
    {
        kind.set_slow();
    }
    let term = threads.term.fetch_add(1, Ordering::SeqCst) + 1;
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
