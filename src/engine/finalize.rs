//! How an engine ends.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::EngineShared;
use crate::progress::in_job;
use crate::{Error, Result};

type Callback = Box<dyn FnOnce() + Send>;

/// ```text
///   RUNNING ──finalize──▶ BEGUN ──handlers have ended──▶ CLOSED ──callbacks have run──▶ DONE
/// ```
#[derive(Default)]
pub(crate) struct Finalizing {
    stage: AtomicU8,
    /// Handlers that run.
    running: AtomicUsize,
    state: Mutex<FinalizeState>,
    changed: Condvar,
}

const RUNNING: u8 = 0;
const BEGUN: u8 = 1;
const CLOSED: u8 = 2;
const DONE: u8 = 3;

struct FinalizeState {
    /// `None` once they run: what comes later never does.
    before: Option<Vec<Callback>>,
    after: Option<Vec<Callback>>,
    /// Handlers that had not ended in time.
    overdue: usize,
}

impl Default for FinalizeState {
    fn default() -> FinalizeState {
        FinalizeState { before: Some(Vec::new()), after: Some(Vec::new()), overdue: 0 }
    }
}

/// Peers that take nothing of what has been said for this long, or do not end their side of the connection, are given up. One that
/// does take it has as much time as handlers have.
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
        let late = add(&mut self.state.lock().before, f);
        drop(late);
    }

    pub(crate) fn on_finalize(&self, f: Callback) {
        let late = add(&mut self.state.lock().after, f);
        drop(late);
    }

    /// A handler begins.
    pub(crate) fn enter(&self) {
        self.running.fetch_add(1, Ordering::SeqCst);
    }

    /// It has returned.
    pub(crate) fn leave(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
        self.look_again();
    }

    /// Something has ended that finalizing may be waiting for.
    pub(crate) fn look_again(&self) {
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

/// A callback that comes too late is handed back, to be dropped where nothing is locked: kept, it might keep the engine.
fn add(callbacks: &mut Option<Vec<Callback>>, f: Callback) -> Option<Callback> {
    match callbacks {
        Some(callbacks) => callbacks.push(f),
        None => return Some(f),
    }
    None
}

pub(super) fn finalize(shared: &Arc<EngineShared>) -> Result<()> {
    let finalizing = &shared.finalizing;
    if shared.core.is_forked() {
        // The parent's engine is the parent's to end.
        return Ok(());
    }
    let first = finalizing.stage.compare_exchange(RUNNING, BEGUN, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    // A handler can't wait for itself, and neither can a callback of what follows.
    let inside = in_job(&shared.core)
        || shared.core.is_driving()
        || CALLBACK_OF.try_with(Cell::get).is_ok_and(|engine| engine == shared.incarnation);
    if first && inside {
        let shared = shared.clone();
        let name = "calomel-finalize".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || end(&shared));
        return spawned.map(drop).map_err(|error| {
            finalizing.stage.store(RUNNING, Ordering::SeqCst);
            Error::io("can't start the thread that finalizes", error)
        });
    }
    if inside {
        return Ok(());
    }
    if first {
        end(shared);
    } else {
        finalizing.wait();
    }
    match finalizing.state.lock().overdue {
        0 => Ok(()),
        overdue => Err(Error::Timeout {
            peer: shared.addresses.first().cloned().unwrap_or_else(crate::Address::nowhere),
            what: format!("finalize, waiting for {overdue} requests in progress"),
            after: shared.limits.finalize_timeout,
        }),
    }
}

thread_local! {
    /// The engine whose callback this thread runs; 0 for none.
    static CALLBACK_OF: Cell<u64> = const { Cell::new(0) };
    /// Handles of that engine that were dropped on this thread meanwhile.
    static HANDLES_DROPPED: Cell<usize> = const { Cell::new(0) };
}

/// A handle that keeps an engine alive is dropped.
pub(super) fn note_dropped(shared: &EngineShared) {
    if CALLBACK_OF.try_with(Cell::get).is_ok_and(|engine| engine == shared.incarnation) {
        let _ = HANDLES_DROPPED.try_with(|dropped| dropped.set(dropped.get() + 1));
    }
}

fn run(shared: &EngineShared, callbacks: Vec<Callback>) {
    for callback in callbacks {
        quietly(shared, callback);
    }
}

/// Runs user code that must not keep the engine from its end.
fn quietly(shared: &EngineShared, work: impl FnOnce()) {
    let outer = CALLBACK_OF.replace(shared.incarnation);
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        tracing::error!(target: "calomel::engine", "user code panicked while its engine was finalized");
    }
    CALLBACK_OF.set(outer);
}

/// Waits until the peers have taken what has been said, and have ended the connections.
fn flush(shared: &EngineShared) {
    let core = &shared.core;
    let begin = Instant::now();
    let (mut seen, mut since, mut look) = (None, begin, begin);
    // Nothing wakes this thread when the last link goes while another one drives, so it looks again after a moment.
    while !core.with_proto(|proto| proto.links_gone()) {
        let now = Instant::now();
        // A chunk that has been handed to the system may take long to leave it.
        if now >= look {
            look = now + FLUSH / 10;
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

fn end(shared: &Arc<EngineShared>) {
    let finalizing = &shared.finalizing;
    let core = &shared.core;
    let before = finalizing.state.lock().before.take();
    run(shared, before.unwrap_or_default());
    core.stop_listening();
    core.exec(|proto| proto.begin_shutdown());
    let deadline = Instant::now() + shared.limits.finalize_timeout;
    {
        // What a caller waits for, and what runs though nobody waits for it.
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
    // Closures and futures of the user's are dropped here.
    let handles = HANDLES_DROPPED.get();
    quietly(shared, || shared.registry.clear());
    let handles = HANDLES_DROPPED.get() - handles;
    if handles > 0 {
        tracing::warn!(
            target: "calomel::engine", handles,
            "handlers held handles of the engine that they were defined on: it could not end by being dropped; see Engine::downgrade"
        );
    }
    let tasks = std::mem::take(&mut *shared.tasks.lock());
    quietly(shared, || drop(tasks));
    core.begin_stop();
    quietly(shared, || core.clear_timers());
    quietly(shared, || core.stop());
    let after = finalizing.state.lock().after.take();
    run(shared, after.unwrap_or_default());
    finalizing.set(DONE);
}
