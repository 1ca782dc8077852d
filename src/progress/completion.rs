//! Completions: the thread or task that waits for a call or a transfer learns exactly once that it has ended.

use std::sync::Arc;
use std::task::Waker;

use super::{Core, EngineEnv};
use crate::deferred_log::defer;
use crate::proto::{Answer, Failure, PeerId, Placed};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use crate::sync::{Instant, Mutex, Parker, Unparker, thread_local};

/// The end of an operation, with its time on [`Core::clock`], where the engine measures.
pub(crate) enum OperationOutcome {
    Answered(Result<Placed<Answer<EngineEnv>>, Box<Failure>>, Option<u64>),
    Transferred(Result<usize, Box<Failure>>, Option<u64>),
}

/// What a thread waits for, as far as its end may depend on jobs behind it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// The answer of this peer, which may call this engine before it answers.
    Answer(PeerId),
    /// The end of a transfer, in which no handler takes part.
    Transfer,
    /// Anything else.
    Other,
}

/// ```text
///   waiting ──set()──▶ ready ──take()──▶ taken
/// ```
#[derive(Default)]
pub(crate) struct Completion {
    ready: AtomicBool,
    state: Mutex<CompletionState>,
    /// For how many microseconds, about, a future has led in vain; and the thread of its last poll that led; 0 for none. See `polls`.
    pub(super) led_us: AtomicU32,
    pub(super) led_on: AtomicUsize,
    /// At its last poll a future could lead.
    pub(super) may_lead: AtomicBool,
    /// When the last poll of a future that led was, at the last poll of this one that found another leader.
    pub(super) found_led_at: AtomicU32,
}

#[derive(Default)]
struct CompletionState {
    outcome: Option<OperationOutcome>,
    wake: Wake,
}

/// The waiter to wake.
#[derive(Default)]
enum Wake {
    #[default]
    None,
    Thread(Arc<ThreadWaiter>),
    Task(Waker),
}

impl Completion {
    pub(crate) fn new() -> Arc<Completion> {
        Arc::default()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Stores the outcome, and wakes the waiter. Called once.
    pub(crate) fn set(&self, outcome: OperationOutcome) {
        let wake = {
            let mut state = self.state.lock();
            debug_assert!(!self.is_ready(), "an operation ends once");
            state.outcome = Some(outcome);
            self.ready.store(true, Ordering::Release);
            std::mem::take(&mut state.wake)
        };
        match wake {
            Wake::None => {}
            Wake::Thread(thread) => thread.wake(),
            Wake::Task(waker) => wake_quietly(waker),
        }
    }

    /// Waits, driving if no other thread does; false when the deadline came first.
    pub(crate) fn wait(&self, core: &Core, deadline: Option<Instant>, awaited: Awaited) -> bool {
        core.wait(&|| self.is_ready(), &|thread| self.wake_thread(thread), deadline, awaited)
    }

    /// True when the outcome is there, and was not taken.
    pub(crate) fn holds_outcome(&self) -> bool {
        self.is_ready() && self.state.lock().outcome.is_some()
    }

    pub(crate) fn take(&self) -> Option<OperationOutcome> {
        self.state.lock().outcome.take()
    }

    /// Registers the thread to be woken by `set`; false when the outcome is there already.
    pub(crate) fn wake_thread(&self, thread: &Arc<ThreadWaiter>) -> bool {
        let mut state = self.state.lock();
        if self.is_ready() {
            return false;
        }
        let earlier = std::mem::replace(&mut state.wake, Wake::Thread(thread.clone()));
        drop(state);
        // Unlocked first: dropping a waker runs user code.
        drop(earlier);
        true
    }

    /// Whether a task is registered.
    pub(super) fn has_task(&self) -> bool {
        matches!(self.state.lock().wake, Wake::Task(_))
    }

    /// Wakes the task that is registered, if one is, before the operation has ended. It stays registered.
    pub(crate) fn wake_early(&self) {
        let mut state = self.state.lock();
        let waker = match std::mem::take(&mut state.wake) {
            Wake::Task(waker) => waker,
            other => {
                state.wake = other;
                return;
            }
        };
        drop(state);
        // Cloning, waking and dropping a waker run user code, so no lock is held.
        quietly(|| {
            let again = waker.clone();
            let mut state = self.state.lock();
            // If it has ended meanwhile, or another waiter has been registered, the wake-up below is all that is left to do.
            if !self.is_ready() && matches!(state.wake, Wake::None) {
                state.wake = Wake::Task(again);
            } else {
                drop(state);
            }
        });
        wake_quietly(waker);
    }

    /// Registers the task to be woken by `set`; false when the outcome is there already.
    pub(crate) fn wake_task(&self, waker: &Waker) -> bool {
        let state = self.state.lock();
        if self.is_ready() {
            return false;
        }
        if matches!(&state.wake, Wake::Task(known) if known.will_wake(waker)) {
            return true;
        }
        drop(state);
        // Cloning a waker and dropping the earlier one run user code, so no lock is held.
        let waker = waker.clone();
        let mut state = self.state.lock();
        if self.is_ready() {
            return false;
        }
        let earlier = std::mem::replace(&mut state.wake, Wake::Task(waker));
        drop(state);
        drop(earlier);
        true
    }
}

/// Blocks until one of the operations is over, and returns its index. `completion` returns what an operation waits for, and
/// `None` for one that was over when it was started. The list must not be empty.
pub(crate) fn wait_any<T>(
    operations: &[T],
    is_over: fn(&T) -> bool,
    completion: fn(&T) -> Option<(&Core, &Completion)>,
) -> usize {
    let ready = || operations.iter().position(is_over);
    if let Some(index) = ready() {
        return index;
    }
    let waited = || operations.iter().filter_map(completion);
    // Operations of other engines have their own drivers, and wake this thread.
    waited().for_each(|(core, _)| core.uncork_unless_forked());
    if let Some((first, _)) = waited().next() {
        let announce = |thread: &_| waited().all(|(_, completion)| completion.wake_thread(thread));
        first.wait(&|| ready().is_some(), &announce, None, Awaited::Other);
    }
    ready().unwrap_or(0)
}

/// Wakes a task. Wakers are user code: one that panics must not end the thread that delivers the event.
pub(crate) fn wake_quietly(waker: Waker) {
    quietly(|| waker.wake());
}

/// As `wake_quietly`, for a waker that is lent.
pub(super) fn wake_by_ref_quietly(waker: &Waker) {
    quietly(|| waker.wake_by_ref());
}

fn quietly(wake: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(wake)).is_err() {
        tracing::error!(target: "calomel::progress", "a waker panicked");
    }
}

/// A waiting thread, as other threads see it.
pub(crate) struct ThreadWaiter {
    unparker: Unparker,
    /// The reactor that the thread blocks in, or is about to block in.
    blocks_in: Mutex<Option<Arc<mio::Waker>>>,
}

/// Wakes the thread that blocks in the reactor.
pub(super) fn ring(reactor: &mio::Waker) {
    if let Err(error) = reactor.wake() {
        // Deferred, since some callers hold a lock.
        defer(move || tracing::error!(target: "calomel::progress", %error, "can't wake the reactor"));
    }
}

/// A waiting thread, as it sees itself.
pub(crate) struct ThreadSleeper {
    parker: Parker,
    pub(crate) waiter: Arc<ThreadWaiter>,
}

impl ThreadWaiter {
    pub(crate) fn wake(&self) {
        self.unparker.unpark();
        if let Some(reactor) = &*self.blocks_in.lock() {
            ring(reactor);
        }
    }

    /// Between this and blocking, the thread must check for what it waits for.
    pub(super) fn set_blocks_in(&self, reactor: Option<Arc<mio::Waker>>) {
        *self.blocks_in.lock() = reactor;
    }
}

impl ThreadSleeper {
    pub(crate) fn new() -> ThreadSleeper {
        let parker = Parker::new();
        let unparker = parker.unparker().clone();
        ThreadSleeper { parker, waiter: Arc::new(ThreadWaiter { unparker, blocks_in: Mutex::default() }) }
    }

    /// Sleeps until woken, or until the deadline; spurious wake-ups happen.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) {
        match deadline {
            Some(deadline) => self.parker.park_deadline(deadline),
            None => self.parker.park(),
        }
    }
}

thread_local! {
    static SLEEPER: ThreadSleeper = ThreadSleeper::new();
}

/// Calls `f` with the current thread's sleeper, which is made once.
pub(crate) fn with_sleeper<R>(f: impl FnOnce(&ThreadSleeper) -> R) -> R {
    let mut f = Some(f);
    let done = SLEEPER.try_with(|sleeper| f.take().map(|f| f(sleeper)));
    match (done, f) {
        (Ok(Some(result)), _) => result,
        // The thread is ending, and a destructor waits: it gets a sleeper of its own.
        (_, Some(f)) => f(&ThreadSleeper::new()),
        (_, None) => unreachable!("the function is called once"),
    }
}
