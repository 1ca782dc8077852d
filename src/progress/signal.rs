//! The signal that makes the descriptor of an event loop readable until [`Core::progress`](super::Core::progress) has looked.
//!
//! An event loop may be told of changes only, so what `progress` has to look at needs a write after it, unless a look is certain
//! to follow. While the signal is *given*, one is: the thread that gave it writes next, and `progress` takes it back only before
//! it looks. That write may come late, when all has been looked at. It leaves the counter readable, and a loop that is told as
//! long as it is would not come to rest: so a `progress` that has found nothing reads the counter, too.
//!
//! ```text
//!   a change   give: [given ← true]  [write, if it was false]
//!   progress   clear: [given?]  [read]  [given ← false]    look    [read, and again if given]
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
    given: AtomicBool,
}

impl<C: Counter> Signal<C> {
    pub(super) fn new(counter: C) -> Signal<C> {
        Signal { counter, given: AtomicBool::new(false) }
    }

    /// A look is needed at what has changed before this.
    pub(super) fn give(&self) {
        if !self.given.swap(true, Ordering::SeqCst) {
            self.counter.write();
        }
    }

    /// To be called before each look.
    pub(super) fn clear(&self) {
        if self.given.load(Ordering::SeqCst) {
            self.counter.read();
            // A load and a store in one: this thread sees all that changed before the signal was last given.
            self.given.swap(false, Ordering::SeqCst);
        }
    }

    /// To be called after a look in vain. True if another look is needed.
    pub(super) fn clear_late(&self) -> bool {
        self.counter.read();
        self.given.load(Ordering::SeqCst)
    }
}
