//! Finalizing: the stages in which an engine ends.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::EngineShared;
use crate::progress::in_job;
use crate::{Error, Result};

type Callback = Box<dyn FnOnce() + Send>;

/// The stage of an engine's end, and the callbacks:
///
/// ```text
///   RUNNING ──finalize──▶ BEGUN ──handlers have ended──▶ CLOSED ──callbacks have run──▶ DONE
/// ```
#[derive(Default)]
pub(crate) struct Finalizing {
    stage: AtomicU8,
    /// Number of running handlers.
    running: AtomicUsize,
    state: Mutex<FinalizeState>,
    changed: Condvar,
}

const RUNNING: u8 = 0;
const BEGUN: u8 = 1;
const CLOSED: u8 = 2;
const DONE: u8 = 3;

struct FinalizeState {
    /// `None` once they run: callbacks that are added later are dropped.
    before: Option<Vec<Callback>>,
    after: Option<Vec<Callback>>,
    /// Requests that were still in progress at the finalize timeout.
    overdue: usize,
}

impl Default for FinalizeState {
    fn default() -> FinalizeState {
        FinalizeState { before: Some(Vec::new()), after: Some(Vec::new()), overdue: 0 }
    }
}

/// A peer that reads nothing of what was sent for this long, or does not end its side of the connection, is disconnected. One
/// that does read has as much time as handlers have.
const FLUSH: Duration = Duration::from_secs(1);

impl Finalizing {
    pub(crate) fn is_closed(&self) -> bool {
        self.stage.load(Ordering::SeqCst) >= CLOSED
    }

    pub(crate) fn is_done(&self) -> bool {
        self.stage.load(Ordering::SeqCst) == DONE
    }

    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        while !self.is_done() {
            self.changed.wait(&mut state);
        }
    }

    pub(crate) fn on_prefinalize(&self, f: Callback) {
        let late = add_callback(&mut self.state.lock().before, f);
        drop(late);
    }

    pub(crate) fn on_finalize(&self, f: Callback) {
        let late = add_callback(&mut self.state.lock().after, f);
        drop(late);
    }

    /// A handler starts.
    pub(crate) fn enter(&self) {
        self.running.fetch_add(1, Ordering::SeqCst);
    }

    /// A handler has returned.
    pub(crate) fn leave(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
        self.recheck();
    }

    /// Wakes the thread that finalizes, after the end of a request or handler that it may be waiting for.
    pub(crate) fn recheck(&self) {
        if self.stage.load(Ordering::SeqCst) == BEGUN {
            drop(self.state.lock());
            self.changed.notify_all();
        }
    }

    fn set(&self, stage: u8) {
        let _state = self.state.lock();
        self.stage.store(stage, Ordering::SeqCst);
        self.changed.notify_all();
    }
}

/// Returns a callback that comes too late, to be dropped where no lock is held: stored, it could keep the engine alive.
fn add_callback(callbacks: &mut Option<Vec<Callback>>, f: Callback) -> Option<Callback> {
    match callbacks {
        Some(callbacks) => callbacks.push(f),
        None => return Some(f),
    }
    None
}

pub(super) fn finalize(shared: &Arc<EngineShared>) -> Result<()> {
    let finalizing = &shared.finalizing;
    if shared.core.is_forked() {
        // Only the parent can end its engine.
        return Ok(());
    }
    let first = finalizing.stage.compare_exchange(RUNNING, BEGUN, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    // A handler can't wait for itself, nor can a callback that runs while finalizing.
    let inside = in_job(&shared.core)
        || shared.core.is_driving()
        || CALLBACK_OF.try_with(Cell::get).is_ok_and(|engine| engine == shared.incarnation);
    if first && inside {
        let shared = shared.clone();
        let name = "calomel-finalize".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || shut_down(&shared));
        return spawned.map(drop).map_err(|error| {
            finalizing.stage.store(RUNNING, Ordering::SeqCst);
            Error::io("can't start the thread that finalizes", error)
        });
    }
    if inside {
        return Ok(());
    }
    if first {
        shut_down(shared);
    } else {
        finalizing.wait();
    }
    match finalizing.state.lock().overdue {
        0 => Ok(()),
        overdue => Err(Error::Timeout {
            peer: shared.own_address(),
            what: format!("finalize, waiting for {overdue} requests in progress"),
            after: shared.limits.finalize_timeout,
        }),
    }
}

thread_local! {
    /// The engine whose callback this thread runs; 0 for none.
    static CALLBACK_OF: Cell<u64> = const { Cell::new(0) };
    /// Number of handles of that engine that were dropped on this thread meanwhile.
    static HANDLES_DROPPED: Cell<usize> = const { Cell::new(0) };
}

/// Counts a dropped handle, where user code of the same engine is being run or dropped.
pub(super) fn note_dropped(shared: &EngineShared) {
    if CALLBACK_OF.try_with(Cell::get).is_ok_and(|engine| engine == shared.incarnation) {
        let _ = HANDLES_DROPPED.try_with(|dropped| dropped.set(dropped.get() + 1));
    }
}

fn run_callbacks(shared: &EngineShared, callbacks: Vec<Callback>) {
    for callback in callbacks {
        run_user_code(shared, callback);
    }
}

/// Runs user code, and logs its panic, so that finalizing goes on.
fn run_user_code(shared: &EngineShared, work: impl FnOnce()) {
    let outer = CALLBACK_OF.replace(shared.incarnation);
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        tracing::error!(target: "calomel::engine", "user code panicked while its engine was finalized");
    }
    CALLBACK_OF.set(outer);
}

/// Waits until the peers have read what was sent, and have ended the connections.
fn flush(shared: &EngineShared) {
    let core = &shared.core;
    let begin = Instant::now();
    let (mut seen, mut since, mut next_check) = (None, begin, begin);
    // This thread is not woken when the last link ends while another thread drives, so it polls.
    while !core.with_proto(|proto| proto.links_gone()) {
        let now = Instant::now();
        // A chunk may stay in the socket's buffer for long, so the peer's acknowledgements count as progress too.
        if now >= next_check {
            next_check = now + FLUSH / 10;
            let left = Some((core.with_proto(|proto| proto.unsent()), core.acknowledged()));
            if left != seen {
                (seen, since) = (left, now);
            }
        }
        if now >= since + FLUSH || now >= begin + shared.limits.finalize_timeout.max(FLUSH) {
            break;
        }
        core.wait(&|| core.with_proto(|proto| proto.links_gone()), &|_| true, Some(now + Duration::from_millis(1)));
    }
}

fn shut_down(shared: &Arc<EngineShared>) {
    let finalizing = &shared.finalizing;
    let core = &shared.core;
    let before = finalizing.state.lock().before.take();
    run_callbacks(shared, before.unwrap_or_default());
    core.stop_listening();
    core.exec(|proto| proto.begin_shutdown());
    let deadline = Instant::now() + shared.limits.finalize_timeout;
    {
        // Requests without a response, and handlers that run although their callers are gone.
        let in_progress = || core.with_proto(|proto| proto.requests()).max(finalizing.running.load(Ordering::SeqCst));
        let mut state = finalizing.state.lock();
        while in_progress() > 0 {
            if finalizing.changed.wait_until(&mut state, deadline).timed_out() {
                state.overdue = in_progress();
                break;
            }
        }
    }
    finalizing.set(CLOSED);
    core.exec(|proto| proto.finish_shutdown());
    flush(shared);
    core.exec(|proto| proto.abandon_links());
    // The user's closures and futures are dropped here.
    let handles = HANDLES_DROPPED.get();
    run_user_code(shared, || shared.registry.clear());
    let handles = HANDLES_DROPPED.get() - handles;
    if handles > 0 {
        tracing::warn!(
            target: "calomel::engine", handles,
            "handlers held handles of the engine that they were defined on, so dropping the other handles could not end it; see Engine::downgrade"
        );
    }
    let tasks = std::mem::take(&mut *shared.tasks.lock());
    run_user_code(shared, || drop(tasks));
    core.begin_stop();
    run_user_code(shared, || core.clear_timers());
    run_user_code(shared, || core.stop());
    let after = finalizing.state.lock().after.take();
    run_callbacks(shared, after.unwrap_or_default());
    finalizing.set(DONE);
}
