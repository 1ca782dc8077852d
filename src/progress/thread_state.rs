//! What the engine's own threads share: the jobs of the progress thread, and the handler that it runs.

use std::cell::Cell;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Core;
use super::completion::ThreadWaiter;
use super::workers::{HandlerClass, Job};

/// How long `stop` waits for a progress thread: one that takes longer is blocked by a handler.
const GRACE: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct Threads {
    /// The number of the current progress thread; earlier ones end.
    pub generation: AtomicU64,
    /// Counts the beginnings and ends of handlers on the progress thread: odd while one runs.
    pub handling: AtomicU64,
    /// Jobs for the progress thread; its successor goes on with them.
    jobs: Mutex<VecDeque<Job>>,
    /// `jobs` may hold some.
    has_jobs: AtomicBool,
    /// The progress thread in `/proc`.
    pub progress_task: Mutex<Option<PathBuf>>,
    /// The class of the running handler, and its address.
    pub running: Mutex<Option<Arc<HandlerClass>>>,
    running_address: AtomicUsize,
    /// The watcher sleeps until it is woken.
    pub watcher_asleep: AtomicBool,
    pub watcher: Mutex<Option<Arc<ThreadWaiter>>>,
    pub progress: Mutex<Option<Arc<ThreadWaiter>>>,
    /// The watcher, and the progress threads by generation.
    pub handles: Mutex<Vec<(Option<u64>, JoinHandle<()>)>>,
}

impl Threads {
    /// Identifies the engine within its process.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// True when the watcher had to be woken, which takes some time.
    pub(super) fn begin_handling(&self, holds_lock: bool) -> bool {
        let number = self.handling.fetch_add(1, Ordering::SeqCst) + 1;
        HANDLING.set(Some(Handling { engine: self.identity(), number, holds_lock }));
        // `handling` has changed already, so either the watcher sees that, or this thread sees that the watcher sleeps.
        let asleep = self.watcher_asleep.load(Ordering::SeqCst) && self.watcher_asleep.swap(false, Ordering::SeqCst);
        if asleep && let Some(watcher) = &*self.watcher.lock() {
            watcher.wake();
        }
        asleep
    }

    /// True when the thread still holds the driver lock. `None` when the watcher has replaced this thread meanwhile: then it is
    /// not the progress thread any more.
    pub(super) fn end_handling(&self) -> Option<bool> {
        let Handling { number, holds_lock, .. } = HANDLING.take()?;
        let ended = self.handling.compare_exchange(number, number + 1, Ordering::SeqCst, Ordering::SeqCst);
        ended.is_ok().then_some(holds_lock)
    }

    /// Stores the class of the handler that runs now.
    pub(super) fn note_running(&self, class: &Arc<HandlerClass>) {
        let address = Arc::as_ptr(class).addr();
        // `running` keeps the class alive, so no other class has its address.
        if self.running_address.load(Ordering::Relaxed) != address {
            *self.running.lock() = Some(class.clone());
            self.running_address.store(address, Ordering::Relaxed);
        }
    }

    /// Queues a job for the progress thread.
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
        core.signal_event_loop();
        // It may sleep in the reactor, or wait for the driver lock.
        if let Some(progress) = &*self.progress.lock() {
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
    pub(super) fn stop(&self) {
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

/// While it lives, a handler of the progress thread waits inside a call of this library. It drives meanwhile, so the watcher
/// need not replace it, and the jobs behind it go to the handler threads.
pub(super) struct HandlerPaused<'a> {
    threads: Option<&'a Threads>,
}

impl<'a> HandlerPaused<'a> {
    pub(super) fn enter(core: &'a Core) -> HandlerPaused<'a> {
        core.pass_on_jobs_of_loop();
        let threads = &core.threads;
        // If the handler waits for another engine, it does not drive this one, and the watcher has to replace the thread.
        let own = HANDLING.get().is_some_and(|handling| handling.engine == threads.identity());
        let Some(holds_lock) = own.then(|| threads.end_handling()).flatten() else { return HandlerPaused { threads: None } };
        if holds_lock {
            core.driver_lock.release_as_progress();
        }
        if core.handlers_inline {
            // Without handler threads, another progress thread has to run new requests: the watcher starts one.
            threads.begin_handling(false);
            return HandlerPaused { threads: None };
        }
        let left = std::mem::take(&mut *threads.jobs.lock());
        left.into_iter().for_each(|job| core.dispatch(job));
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
