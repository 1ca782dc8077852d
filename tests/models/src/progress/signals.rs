//! Models of the signal of an event loop: the loop finds each job, and goes back to sleep.

use std::sync::Arc;

use loom::thread;

use super::signal::{Counter, Signal};
use crate::model;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Condvar, Mutex};

/// An `eventfd`, and the `epoll` of a loop that waits for it.
#[derive(Default)]
struct Watched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    readable: bool,
    /// There has been a write since `epoll_wait` last looked.
    edge: bool,
}

#[derive(Clone, Default)]
struct EventFd(Arc<Watched>);

impl Counter for EventFd {
    fn write(&self) {
        *self.0.state.lock() = State { readable: true, edge: true };
        self.0.changed.notify_one();
    }

    fn read(&self) {
        self.0.state.lock().readable = false;
    }
}

impl EventFd {
    /// `epoll_wait`, edge-triggered or level-triggered.
    fn wait(&self, edges: bool) {
        let mut state = self.0.state.lock();
        loop {
            // A write whose counter has been read meanwhile is no event.
            let event = state.readable && (!edges || state.edge);
            state.edge = false;
            if event {
                return;
            }
            state = self.0.changed.wait(state).unwrap();
        }
    }
}

struct Loop {
    signal: Signal<EventFd>,
    eventfd: EventFd,
    /// Jobs that wait, and those that `progress` has run.
    jobs: AtomicU32,
    done: AtomicU32,
}

impl Loop {
    fn new() -> Arc<Loop> {
        let eventfd = EventFd::default();
        Arc::new(Loop { signal: Signal::new(eventfd.clone()), eventfd, jobs: AtomicU32::new(0), done: AtomicU32::new(0) })
    }

    fn give(&self) {
        self.jobs.fetch_add(1, Ordering::SeqCst);
        self.signal.set();
    }

    fn run_jobs(&self) -> bool {
        let found = self.jobs.swap(0, Ordering::SeqCst);
        self.done.fetch_add(found, Ordering::SeqCst);
        found > 0
    }

    /// Like calomel's, without a timeout.
    fn progress(&self) -> bool {
        loop {
            self.signal.clear();
            if self.run_jobs() {
                return true;
            }
            if !self.signal.clear_late() {
                return false;
            }
        }
    }

    fn serve(&self, edges: bool, jobs: u32) {
        while self.done.load(Ordering::SeqCst) < jobs {
            self.eventfd.wait(edges);
            while self.progress() && edges {}
        }
    }
}

fn each_job_is_run(edges: bool) {
    model(3, move || {
        let served = Loop::new();
        let givers = [1, 2].map(|times| {
            let served = served.clone();
            thread::spawn(move || (0..times).for_each(|_| served.give()))
        });
        served.serve(edges, 3);
        givers.into_iter().for_each(|giver| giver.join().unwrap());
        // A write that came late does not keep the loop awake.
        assert!(!served.progress());
        assert!(!served.eventfd.0.state.lock().readable);
    });
}

pub(crate) fn edge_triggered_loop_misses_no_signal() {
    each_job_is_run(true);
}

pub(crate) fn level_triggered_loop_goes_back_to_sleep() {
    each_job_is_run(false);
}

/// Another thread calls `progress`, at any time.
pub(crate) fn loop_beside_another_thread_misses_no_signal() {
    for edges in [true, false] {
        model(3, move || {
            let served = Loop::new();
            let giver = {
                let served = served.clone();
                thread::spawn(move || (0..2).for_each(|_| served.give()))
            };
            let other = {
                let served = served.clone();
                thread::spawn(move || while served.progress() {})
            };
            // Once both jobs are there, the other thread has run them, or the loop gets an event.
            giver.join().unwrap();
            other.join().unwrap();
            served.serve(edges, 2);
        });
    }
}
