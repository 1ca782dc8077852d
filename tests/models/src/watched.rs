//! Memory that loom watches: it fails when accesses overlap that must not, or are not ordered.

use loom::cell::UnsafeCell;
use loom::thread;

use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct Watched {
    cell: UnsafeCell<u8>,
    /// Memory that its owner changes while others may read it.
    loose: AtomicU64,
    /// What was read of that last: for the model alone.
    seen: std::sync::atomic::AtomicU64,
}

// SAFETY: that accesses are ordered is what loom checks.
unsafe impl Sync for Watched {}
// SAFETY: as above.
unsafe impl Send for Watched {}

impl Watched {
    /// Reads for a while, in which anything may happen.
    pub(crate) fn read(&self) {
        self.seen.store(self.loose.load(Ordering::Relaxed), Ordering::Relaxed);
        self.cell.with(|_| thread::yield_now());
    }

    /// Writes for a while; also: its owner has it for itself again.
    pub(crate) fn write(&self) {
        self.cell.with_mut(|_| thread::yield_now());
    }

    /// Writes, whoever may read.
    pub(crate) fn change(&self) {
        self.loose.store(1, Ordering::Relaxed);
    }

    /// Whether what was read last has been changed before.
    pub(crate) fn was_read_changed(&self) -> bool {
        self.seen.load(Ordering::Relaxed) != 0
    }
}
