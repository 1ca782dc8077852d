//! Memory that loom watches: it fails when conflicting accesses overlap or are not ordered.

use loom::cell::UnsafeCell;
use loom::thread;

use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct Watched {
    cell: UnsafeCell<u8>,
    /// Memory that its owner changes while others may read it.
    loose: AtomicU64,
    /// The value read last, for the model alone.
    seen: std::sync::atomic::AtomicU64,
}

// SAFETY: loom checks that accesses are ordered.
unsafe impl Sync for Watched {}
// SAFETY: as above.
unsafe impl Send for Watched {}

impl Watched {
    /// A long read, during which any other thread may run.
    pub(crate) fn read(&self) {
        self.seen.store(self.loose.load(Ordering::Relaxed), Ordering::Relaxed);
        self.cell.with(|_| thread::yield_now());
    }

    /// A long write; also stands for exclusive use by the owner.
    pub(crate) fn write(&self) {
        self.cell.with_mut(|_| thread::yield_now());
    }

    /// Writes, even while others read.
    pub(crate) fn change(&self) {
        self.loose.store(1, Ordering::Relaxed);
    }

    /// Whether the value read last had been changed before.
    pub(crate) fn was_read_changed(&self) -> bool {
        self.seen.load(Ordering::Relaxed) != 0
    }
}
