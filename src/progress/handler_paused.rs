//! Handlers of the progress thread that wait inside a call of this library.
//!
//! The jobs behind such a handler stay while its wait is brief: a nested call over shared memory takes a few microseconds, and to wake
//! a handler thread for each of them, and again for each of its answers, takes ten times as long. In a longer wait they go to the handler
//! threads, ever more of them at a time. If all went at once, a peer that is late once, for want of a processor, would get
//! dozens of threads as competitors, and be late again.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::completion::Awaited;
use super::workers::{Job, nanos, waited_in_job};
use super::{Core, SPIN};
use crate::proto::Incoming;

/// How long all jobs stay behind a handler that waits. After this time, twice and three times it, 1, 3 and 7 of them have been passed on,
/// and after `ALL_AFTER` times it all.
const STAY: Duration = Duration::from_micros(25);
const ALL_AFTER: u32 = 4;
/// With fewer than `PROCESSORS` processors the handler threads are likely to take the one that the awaited peer needs, and all jobs
/// stay for this long.
const STAY_ON_FEW: Duration = Duration::from_micros(100);
const PROCESSORS: usize = 4;
/// A thread that drives sleeps after `SPIN`. It would then pass them on late, when its timer wakes it.
const _: () = assert!(STAY_ON_FEW.as_nanos() * ALL_AFTER as u128 <= SPIN.as_nanos());

/// How long jobs stay behind a handler that waits, on a machine with so many processors.
pub(super) fn stay(processors: usize) -> Duration {
    if processors < PROCESSORS { STAY_ON_FEW } else { STAY }
}

/// While it lives, the handler that this thread runs waits inside a call of this library, if it runs one as the progress thread. It
/// drives meanwhile, so the watcher need not replace it.
pub(super) struct HandlerPaused<'a> {
    core: &'a Core,
    stay: Duration,
    is_progress: bool,
    /// `None` where all jobs are passed on.
    keeping: Cell<Option<Keeping>>,
}

#[derive(Clone, Copy)]
struct Keeping {
    awaited: Awaited,
    /// When the handler began to wait; if it has waited before, by so much earlier.
    since: Instant,
    /// So many times `stay` have passed.
    steps: u32,
    passed_on: u32,
}

impl HandlerPaused<'_> {
    /// The thread is the progress thread.
    pub(super) fn is_progress(&self) -> bool {
        self.is_progress
    }

    /// Until when this thread drives before it calls [`HandlerPaused::keep_or_pass_on`].
    pub(super) fn keeps_jobs_until(&self) -> Option<Instant> {
        self.keeping.get().map(|keeping| keeping.since + self.stay * (keeping.steps + 1))
    }

    /// Keeps these new jobs, or passes them on; and if the handler waits on, those whose time has come.
    pub(super) fn keep_or_pass_on(&self, new: &mut Vec<Job>, waits_on: bool) {
        let Some(mut keeping) = self.keeping.get() else {
            return new.drain(..).for_each(|job| self.core.dispatch(job));
        };
        new.extract_if(.., |job| !self.may_stay(job, keeping.awaited)).for_each(|job| self.core.dispatch(job));
        let threads = &self.core.threads;
        if self.core.is_stopping() {
            // The queue may have been emptied for good. To drop a request answers it.
            new.clear();
        } else if !new.is_empty() {
            threads.enqueue(new);
        }
        if !waits_on {
            return;
        }
        keeping.steps = (nanos(keeping.since.elapsed()) / nanos(self.stay)).min(ALL_AFTER.into()) as u32;
        if keeping.steps >= ALL_AFTER {
            return self.pass_on_all();
        }
        while keeping.passed_on < (1 << keeping.steps) - 1
            && let Some((job, _)) = threads.next_job()
        {
            self.core.dispatch(job);
            keeping.passed_on += 1;
        }
        self.keeping.set(Some(keeping));
    }

    fn may_stay(&self, job: &Job, awaited: Awaited) -> bool {
        self.core.runs_inline(job)
            && match awaited {
                Awaited::Answer(peer) => {
                    let of_others = |request: &Incoming<_>| !self.core.with_proto(|proto| proto.leads_to(request.link, peer));
                    job.request().is_some_and(of_others)
                }
                Awaited::Transfer => true,
                Awaited::Other => false,
            }
    }

    /// Passes on all jobs, from now on.
    pub(super) fn pass_on_all(&self) {
        if self.keeping.take().is_some() {
            self.core.leave_jobs_to_others();
        }
    }
}

impl Core {
    /// Lets the handler that this thread runs wait, if it runs one as the progress thread or in an event loop.
    pub(super) fn pause_handler(&self, awaited: Awaited) -> HandlerPaused<'_> {
        let threads = &self.threads;
        // No watcher takes over for a loop whose handler blocks after its wait.
        self.pass_on_jobs_of_loop();
        let mut paused = HandlerPaused { core: self, stay: self.stay, is_progress: false, keeping: Cell::default() };
        let Some(holds_lock) = threads.pause() else { return paused };
        if holds_lock {
            self.driver_lock.release_as_progress();
        }
        if self.handlers_inline {
            // Without handler threads, another progress thread has to run new requests: the watcher starts one.
            threads.resume();
            return paused;
        }
        paused.is_progress = true;
        // Without spinning, the thread would sleep at once.
        if awaited == Awaited::Other || self.spin.is_none() {
            self.leave_jobs_to_others();
            return paused;
        }
        // A woken task may belong to the handler of a call that the peer makes meanwhile.
        if awaited != Awaited::Transfer {
            threads.refuse_tasks();
        }
        // One that waits many times, each time briefly, would else keep them all the time.
        let now = Instant::now();
        let since = now.checked_sub(waited_in_job()).unwrap_or(now);
        paused.keeping.set(Some(Keeping { awaited, since, steps: 0, passed_on: 0 }));
        paused.keep_or_pass_on(&mut Vec::new(), true);
        paused
    }
}

impl Drop for HandlerPaused<'_> {
    fn drop(&mut self) {
        if self.is_progress {
            self.core.threads.resume();
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/handler_paused.rs"]
mod tests;
