//! Memory that loom watches: it fails when accesses overlap that must not, or are not ordered.

use loom::cell::UnsafeCell;
use loom::thread;

#[derive(Default)]
pub(crate) struct Watched(UnsafeCell<u8>);

// SAFETY: that accesses are ordered is what loom checks.
unsafe impl Sync for Watched {}
// SAFETY: as above.
unsafe impl Send for Watched {}

impl Watched {
    /// Reads for a while, in which anything may happen.
    pub(crate) fn read(&self) {
        self.0.with(|_| thread::yield_now());
    }

    /// Writes for a while; also: its owner has it for itself again.
    pub(crate) fn write(&self) {
        self.0.with_mut(|_| thread::yield_now());
    }
}
