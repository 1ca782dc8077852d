//! Who drives: one thread at a time, in a seat.
//!
//! ```text
//!   a thread that waits for a call or a transfer sits down, if nobody sits; gets up when it has what it waits for
//!   the progress thread sits when nobody else does, and gets up when a waiting thread wants the seat
//!   whoever gets up wakes the next thread that waits
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::completion::ThreadWaiter;

#[derive(Default)]
pub(crate) struct Seat {
    state: Mutex<State>,
    /// A waiting thread wants the seat from the progress thread.
    wanted: AtomicBool,
}

#[derive(Default)]
struct State {
    taken: Option<Sitter>,
    /// Threads that wait for an operation while somebody else drives.
    queue: VecDeque<Arc<ThreadWaiter>>,
    /// Counts sittings.
    epoch: u64,
    /// The sitter blocks in the reactor.
    parked: bool,
    /// Woken when a caller that had blocked gets up: the progress thread, which sleeps as long as somebody drives.
    heir: Option<Arc<ThreadWaiter>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sitter {
    Caller,
    Progress,
}

/// What a thread found that wanted to sit.
pub(crate) enum Sat {
    /// It drives now.
    Yes,
    /// It is in the queue. When `wake`, the sitter must be woken to see that it is wanted.
    Queued { wake: bool },
}

impl Seat {
    /// A caller sits down, or gets in the queue.
    pub(crate) fn sit_or_queue(&self, me: &Arc<ThreadWaiter>) -> Sat {
        let mut state = self.state.lock();
        match state.taken {
            None => {
                state.taken = Some(Sitter::Caller);
                state.epoch += 1;
                // Others must not be led to believe that this thread still waits for its turn.
                state.queue.retain(|other| !Arc::ptr_eq(other, me));
                self.wanted.store(false, Ordering::Relaxed);
                Sat::Yes
            }
            Some(sitter) => {
                if !state.queue.iter().any(|other| Arc::ptr_eq(other, me)) {
                    state.queue.push_back(me.clone());
                }
                let ask = sitter == Sitter::Progress;
                if ask {
                    self.wanted.store(true, Ordering::Relaxed);
                }
                Sat::Queued { wake: ask && state.parked }
            }
        }
    }

    /// A caller that was in the queue goes away. If it was its turn, it is the next one's now.
    pub(crate) fn leave_queue(&self, me: &Arc<ThreadWaiter>) {
        let mut state = self.state.lock();
        let before = state.queue.len();
        state.queue.retain(|other| !Arc::ptr_eq(other, me));
        if state.queue.len() == before && state.taken.is_none() {
            self.wake_next(&mut state);
        }
        if state.queue.is_empty() {
            self.wanted.store(false, Ordering::Relaxed);
        }
    }

    /// The progress thread sits down if the seat is free, and nobody has sat since `seen`, or waits to. Else what it needs
    /// to know to ask again.
    pub(crate) fn sit_as_progress(&self, seen: u64, me: &Arc<ThreadWaiter>) -> Result<(), Occupied> {
        let mut state = self.state.lock();
        if state.taken.is_none() && state.queue.is_empty() && state.epoch == seen {
            state.taken = Some(Sitter::Progress);
            self.wanted.store(false, Ordering::Relaxed);
            return Ok(());
        }
        let for_long = state.taken.is_some() && state.parked;
        state.heir = for_long.then(|| me.clone());
        Err(Occupied { epoch: state.epoch, for_long })
    }

    /// As `sit_as_progress`, right away when the seat is free.
    pub(crate) fn sit_back(&self) -> bool {
        let mut state = self.state.lock();
        let free = state.taken.is_none() && state.queue.is_empty();
        if free {
            state.taken = Some(Sitter::Progress);
            self.wanted.store(false, Ordering::Relaxed);
        }
        free
    }

    /// To be held while the thread drives: dropped, it gets up, also when it is unwinding.
    pub(crate) fn sitting(&self) -> Sitting<'_> {
        Sitting(self)
    }

    fn get_up(&self) {
        let mut state = self.state.lock();
        state.taken = None;
        state.parked = false;
        self.wake_next(&mut state);
        if let Some(heir) = state.heir.take() {
            heir.wake();
        }
    }

    fn wake_next(&self, state: &mut State) {
        if let Some(next) = state.queue.pop_front() {
            next.wake();
        }
    }

    /// The sitter is going to block in the reactor, or has been.
    pub(crate) fn set_parked(&self, parked: bool) {
        self.state.lock().parked = parked;
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.state.lock().parked
    }

    /// A caller wants the progress thread to get up.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }
}

pub(crate) struct Sitting<'a>(&'a Seat);

impl Drop for Sitting<'_> {
    fn drop(&mut self) {
        self.0.get_up();
    }
}

/// The seat is not for the progress thread now.
pub(crate) struct Occupied {
    pub epoch: u64,
    /// Sleep until woken; else look again after a moment.
    pub for_long: bool,
}
