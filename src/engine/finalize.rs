//! Finalizing: the stages in which an engine ends.

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

use super::{Engine, EngineShared};
use crate::progress::{Awaited, in_job, wake_quietly};
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

#[derive(Default)]
struct FinalizeState {
    before: Callbacks,
    after: Callbacks,
    /// Number of callbacks so far.
    next: u64,
    /// Requests that were still in progress at the finalize timeout.
    overdue: usize,
    /// Wakers of tasks that wait for the end.
    wakers: Vec<Waker>,
}

/// The callbacks of one moment.
#[derive(Default)]
struct Callbacks {
    waiting: Vec<(u64, Callback)>,
    /// They run, or have run: those that are added now run at once.
    over: bool,
}

/// When a callback runs.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Before,
    After,
}

impl FinalizeState {
    fn callbacks(&mut self, moment: Moment) -> &mut Callbacks {
        match moment {
            Moment::Before => &mut self.before,
            Moment::After => &mut self.after,
        }
    }
}

/// A callback that runs when an engine is finalized: see [`Engine::on_finalize`]. Dropping this changes nothing.
#[derive(Clone, Debug)]
pub struct FinalizeHook {
    shared: Weak<EngineShared>,
    moment: Moment,
    number: u64,
}

impl FinalizeHook {
    /// Removes and drops the callback. False when it was removed before, and when it runs or has run.
    pub fn remove(&self) -> bool {
        let Some(shared) = self.shared.upgrade().filter(|shared| !shared.core.is_forked()) else { return false };
        let removed = {
            let mut state = shared.finalizing.state.lock();
            let waiting = &mut state.callbacks(self.moment).waiting;
            waiting.iter().position(|(number, _)| *number == self.number).map(|index| waiting.remove(index))
        };
        // Dropped where no lock is held: it is user code.
        removed.is_some()
    }
}

/// A peer that reads nothing of what was sent for this long, or does not end its side of the connection, is disconnected. One
/// that does read has as much time as handlers have.
const FLUSH: Duration = Duration::from_secs(1);
/// How often a thread that drives until the engine has nothing in progress looks whether that is so.
const POLL: Duration = Duration::from_millis(1);

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
            state = self.changed.wait(state);
        }
    }

    /// Resolves when the engine is finalized.
    fn done(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.is_done() {
            return Poll::Ready(());
        }
        // Cloned where no lock is held: wakers are user code.
        let waker = context.waker().clone();
        let mut state = self.state.lock();
        if self.is_done() {
            drop(state);
            return Poll::Ready(());
        }
        match state.wakers.iter().position(|known| known.will_wake(&waker)) {
            Some(_) => {
                drop(state);
                drop(waker);
            }
            None => state.wakers.push(waker),
        }
        Poll::Pending
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
        let mut state = self.state.lock();
        self.stage.store(stage, Ordering::SeqCst);
        self.changed.notify_all();
        let wakers = if stage == DONE { std::mem::take(&mut state.wakers) } else { Vec::new() };
        drop(state);
        wakers.into_iter().for_each(wake_quietly);
    }
}

impl Engine {
    /// Ends the engine: pre-finalize callbacks run, no new requests are taken, handlers in progress are waited for up to the
    /// finalize timeout, own calls and transfers that are still in progress end with [`Error::Finalized`], queued responses and
    /// one-way calls whose `notify` has returned `Ok` are sent, peers lose their access to exposed memory, connections and
    /// threads end, and finalize callbacks run.
    ///
    /// This returns when each peer has read what was sent and has ended the connection, which usually takes far less than a
    /// millisecond. A peer that reads nothing for a second is disconnected, and so is one that has not read all of it within
    /// the finalize timeout: then messages may be lost.
    ///
    /// It may be called any number of times, from any thread. From a handler or a callback it starts finalizing, and
    /// returns; elsewhere it returns when the engine is finalized.
    ///
    /// # Errors
    /// [`Error::Timeout`] when handlers in progress did not end within the finalize timeout; the engine is finalized all
    /// the same.
    pub fn finalize(&self) -> Result<()> {
        finalize(&self.shared)
    }

    /// As [`Engine::finalize`], for async code: a thread of its own does the waiting. Finalizing begins with this call; dropping
    /// the future does not stop it.
    ///
    /// # Errors
    /// As [`Engine::finalize`], and [`Error::Io`] when that thread can't be started.
    pub fn finalize_async(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        let shared = self.shared.clone();
        let started = if begin(&shared) { spawn_shut_down(&shared) } else { Ok(()) };
        let inside = is_inside(&shared);
        async move {
            started?;
            if inside || shared.core.is_forked() {
                return Ok(());
            }
            poll_fn(|context| shared.finalizing.done(context)).await;
            result(&shared)
        }
    }

    /// Blocks until the engine is finalized, by any thread or peer. In a forked child it returns at once.
    ///
    /// # Panics
    /// In a handler of the engine, in a future that the engine polls, and in a callback: finalizing waits for these.
    pub fn wait_for_finalize(&self) {
        if self.shared.core.is_forked() {
            return;
        }
        assert!(
            self.is_finalized() || !is_inside(&self.shared),
            "`wait_for_finalize` was called in a handler or a callback of the engine, which finalizing waits for"
        );
        while self.shared.core.is_external() && !self.shared.finalizing.is_closed() {
            self.shared.core.progress(FLUSH);
        }
        self.shared.finalizing.wait();
    }

    /// Resolves when the engine is finalized, by any thread or peer. In a forked child it resolves at once. A handler of the
    /// engine must not await it: finalizing would wait for that handler until the finalize timeout.
    pub async fn wait_for_finalize_async(&self) {
        if !self.shared.core.is_forked() {
            poll_fn(|context| self.shared.finalizing.done(context)).await;
        }
    }

    /// True when the engine has been finalized.
    pub fn is_finalized(&self) -> bool {
        self.shared.finalizing.is_done()
    }

    /// Runs `f` when finalizing begins, while the engine still works. What was added last runs first. A clone of the engine that
    /// `f` captures keeps it alive, so that only [`Engine::finalize`] ends it; a [`WeakEngine`](crate::WeakEngine) does not.
    /// When finalizing has begun already, `f` runs at once, on this thread.
    pub fn on_prefinalize(&self, f: impl FnOnce() + Send + 'static) -> FinalizeHook {
        self.add_callback(Moment::Before, Box::new(f))
    }

    /// Runs `f` when the engine is finalized, and no longer works. What was added last runs first. When the engine is finalized
    /// already, `f` runs at once, on this thread. For what `f` captures see [`Engine::on_prefinalize`].
    pub fn on_finalize(&self, f: impl FnOnce() + Send + 'static) -> FinalizeHook {
        self.add_callback(Moment::After, Box::new(f))
    }

    fn add_callback(&self, moment: Moment, f: Callback) -> FinalizeHook {
        let mut hook = FinalizeHook { shared: Arc::downgrade(&self.shared), moment, number: 0 };
        if self.shared.core.is_forked() {
            return hook;
        }
        let mut state = self.shared.finalizing.state.lock();
        state.next += 1;
        hook.number = state.next;
        let callbacks = state.callbacks(moment);
        if callbacks.over {
            drop(state);
            run_user_code(&self.shared, f);
        } else {
            callbacks.waiting.push((hook.number, f));
        }
        hook
    }
}

/// True for the one call that is to shut the engine down.
fn begin(shared: &EngineShared) -> bool {
    let stage = &shared.finalizing.stage;
    // Only the parent can end its engine.
    !shared.core.is_forked() && stage.compare_exchange(RUNNING, BEGUN, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Whether this thread runs what finalizing waits for: a handler can't wait for itself, nor can a callback.
fn is_inside(shared: &EngineShared) -> bool {
    in_job(&shared.core)
        || shared.core.is_driving()
        || CALLBACK_OF.try_with(Cell::get).is_ok_and(|engine| engine == shared.incarnation)
}

fn spawn_shut_down(shared: &Arc<EngineShared>) -> Result<()> {
    let ending = shared.clone();
    let name = "calomel-finalize".to_owned();
    let spawned = std::thread::Builder::new().name(name).spawn(move || shut_down(&ending));
    spawned.map(drop).map_err(|error| {
        shared.finalizing.stage.store(RUNNING, Ordering::SeqCst);
        Error::io("can't start the thread that finalizes", error)
    })
}

pub(super) fn finalize(shared: &Arc<EngineShared>) -> Result<()> {
    if shared.core.is_forked() {
        return Ok(());
    }
    match (begin(shared), is_inside(shared)) {
        (true, true) => return spawn_shut_down(shared),
        (false, true) => return Ok(()),
        (true, false) => shut_down(shared),
        (false, false) => shared.finalizing.wait(),
    }
    result(shared)
}

/// The result of finalizing, once it is done.
fn result(shared: &EngineShared) -> Result<()> {
    match shared.finalizing.state.lock().overdue {
        0 => Ok(()),
        overdue => Err(Error::Timeout {
            peer: shared.own_address(),
            what: format!("finalize, waiting for {overdue} requests in progress"),
            after: shared.config.finalize_timeout,
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

/// Runs the callbacks of a moment, the last one first.
fn run_callbacks(shared: &EngineShared, moment: Moment) {
    loop {
        let last = {
            let mut state = shared.finalizing.state.lock();
            let callbacks = state.callbacks(moment);
            let last = callbacks.waiting.pop();
            callbacks.over = last.is_none();
            last
        };
        match last {
            Some((_, callback)) => run_user_code(shared, callback),
            None => return,
        }
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
        if now >= since + FLUSH || now >= begin + shared.config.finalize_timeout.max(FLUSH) {
            break;
        }
        core.wait(&|| core.with_proto(|proto| proto.links_gone()), &|_| true, Some(now + POLL), Awaited::Other);
    }
}

fn shut_down(shared: &Arc<EngineShared>) {
    let finalizing = &shared.finalizing;
    let core = &shared.core;
    run_callbacks(shared, Moment::Before);
    core.stop_listening();
    core.exec(|proto| proto.begin_shutdown());
    let deadline = Instant::now() + shared.config.finalize_timeout;
    {
        // Requests without a response, and handlers that run although their callers are gone.
        let in_progress = || core.with_proto(|proto| proto.requests()).max(finalizing.running.load(Ordering::SeqCst));
        // No other thread may drive and run handlers.
        while core.is_external() && in_progress() > 0 && Instant::now() < deadline {
            core.progress(POLL);
        }
        let mut state = finalizing.state.lock();
        while in_progress() > 0 {
            let timed_out;
            (state, timed_out) = finalizing.changed.wait_until(state, deadline);
            if timed_out {
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
    shared.write_stats();
    run_callbacks(shared, Moment::After);
    finalizing.set(DONE);
}
