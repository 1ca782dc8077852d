//! The signal that makes the descriptor of an event loop readable until [`Core::progress`](super::Core::progress) has looked for
//! jobs and for the driver lock.
//!
//! An edge-triggered loop needs a write after each change, unless a `progress` is certain to look later. While the signal is
//! *set*, one is: the thread that set it writes next, and `progress` clears it only before it looks. That write may come late,
//! when all has been found. It leaves the counter readable, and a level-triggered loop would call `progress` for ever: so a
//! `progress` that has found nothing reads the counter, too.
//!
//! ```text
//!   a change   set: [is_set ← true]  [write, if it was false]
//!   progress   clear: [is_set?]  [read]  [is_set ← false]    look    [read, and again if is_set]
//! ```

use crate::sync::atomic::{AtomicBool, Ordering};

/// A counter that an event loop waits for: readable while it is not zero.
pub(super) trait Counter {
    /// Adds to the counter.
    fn write(&self);
    /// Sets it to zero.
    fn read(&self);
}

pub(super) struct Signal<C> {
    counter: C,
    is_set: AtomicBool,
}

impl<C: Counter> Signal<C> {
    pub(super) fn new(counter: C) -> Signal<C> {
        Signal { counter, is_set: AtomicBool::new(false) }
    }

    /// `progress` has to look for what has changed before this.
    pub(super) fn set(&self) {
        if !self.is_set.swap(true, Ordering::SeqCst) {
            self.counter.write();
        }
    }

    /// To be called before `progress` looks.
    pub(super) fn clear(&self) {
        if self.is_set.load(Ordering::SeqCst) {
            self.counter.read();
            // A load and a store in one: this thread sees all that changed before the signal was last set.
            self.is_set.swap(false, Ordering::SeqCst);
        }
    }

    /// To be called when `progress` has found nothing. True if it has to look again.
    pub(super) fn clear_late(&self) -> bool {
        self.counter.read();
        self.is_set.load(Ordering::SeqCst)
    }
}
