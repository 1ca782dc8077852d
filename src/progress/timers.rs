//! Timers: functions that run after a delay.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Core;
use super::workers::{Job, JobKind};

/// How many timers may run at a time.
pub(super) const MAX_RUNNING: usize = 16;

#[derive(Default)]
pub(super) struct Timers {
    next: u64,
    pub pending: BTreeMap<(Instant, u64), Box<dyn FnOnce() + Send>>,
}

impl Core {
    /// Runs `f` after `delay`: see [`Core::run_timer`]. The key is for [`Core::remove_timer`].
    pub(crate) fn add_timer(&self, delay: Duration, f: Box<dyn FnOnce() + Send>) -> Option<(Instant, u64)> {
        let at = Instant::now().checked_add(delay)?;
        let key = {
            let mut timers = self.timers.lock();
            if self.is_stopping() {
                // It would never run, and keep its captures alive.
                drop(timers);
                drop(f);
                return None;
            }
            timers.next += 1;
            let key = (at, timers.next);
            timers.pending.insert(key, f);
            key
        };
        let until = self.asleep_until.load(Ordering::SeqCst);
        if until != 0 && self.micros(at) < until {
            self.ring();
        }
        Some(key)
    }

    /// False when the timer has fired already.
    pub(crate) fn remove_timer(&self, key: (Instant, u64)) -> bool {
        if self.is_forked() {
            return false;
        }
        let removed = self.timers.lock().pending.remove(&key);
        removed.is_some()
    }

    /// Runs the function of a timer that is due: on a thread for timers, or as a job of the event loop.
    pub(super) fn run_timer(&self, f: Box<dyn FnOnce() + Send>, jobs: &mut Vec<Job>) {
        let job = Job::new(self, JobKind::Run(f));
        if self.is_external() { jobs.push(job) } else { self.timer_workers.push(job, 0) }
    }

    pub(crate) fn clear_timers(&self) {
        let cleared = std::mem::take(&mut self.timers.lock().pending);
        drop(cleared);
    }
}
