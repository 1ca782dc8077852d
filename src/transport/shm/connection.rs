//! The two sides of a link: their segments, the peer's process, and the sleep and doorbell logic.

use std::sync::Arc;

use super::process::ShmPeer;
use super::segment::SharedSegment;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

pub(super) struct Connection {
    pub mine: Arc<SharedSegment>,
    pub theirs: Arc<SharedSegment>,
    pub peer: ShmPeer,
    /// This side can read the peer's memory.
    pub reads: bool,
    /// The peer can read this side's memory.
    pub lends: AtomicBool,
    /// The peer's `asleep` number at which this side last rang.
    rung: AtomicU64,
}

impl Connection {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>, peer: ShmPeer, reads: bool) -> Connection {
        Connection { mine, theirs, peer, reads, lends: AtomicBool::new(false), rung: AtomicU64::new(0) }
    }

    /// Wakes a sleeping peer for which there is something, once for each of its sleeps.
    pub(super) fn wake_peer(&self) {
        // Either the peer sees what was written, or this side sees that the peer sleeps.
        fence(Ordering::SeqCst);
        let asleep = self.theirs.words().asleep.0.load(Ordering::Relaxed);
        if asleep % 2 == 1 && self.rung.swap(asleep, Ordering::Relaxed) != asleep {
            let processor = super::sys::processor().map_or(0, |number| number as u64 + 1);
            self.mine.words().processor.0.store(processor, Ordering::Relaxed);
            self.peer.ring();
        }
    }

    /// Whether the peer ran on this thread's processor when it last rang.
    pub(super) fn shares_processor(&self) -> bool {
        let theirs = self.theirs.words().processor.0.load(Ordering::Relaxed);
        theirs != 0 && super::sys::processor().is_some_and(|own| own as u64 + 1 == theirs)
    }

    /// As `wake_peer`, but only if the peer waits for room or for the end of a loan.
    pub(super) fn wake_waiting_peer(&self) {
        fence(Ordering::SeqCst);
        if self.theirs.words().waiting.0.load(Ordering::Relaxed) != 0 {
            self.wake_peer();
        }
    }

    /// Marks this side as asleep: the peer rings from now on. The caller must then check for what came before.
    pub(super) fn fall_asleep(&self) {
        let asleep = &self.mine.words().asleep.0;
        let before = asleep.load(Ordering::Relaxed);
        if before.is_multiple_of(2) {
            asleep.store(before + 1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    pub(super) fn is_asleep(&self) -> bool {
        !self.mine.words().asleep.0.load(Ordering::Relaxed).is_multiple_of(2)
    }

    pub(super) fn awake(&self) {
        let asleep = &self.mine.words().asleep.0;
        let before = asleep.load(Ordering::Relaxed);
        if !before.is_multiple_of(2) {
            asleep.store(before + 1, Ordering::Relaxed);
        }
    }

    /// Sets whether this side waits for room, or for the end of a loan.
    pub(super) fn set_waiting(&self, waiting: bool) {
        let word = &self.mine.words().waiting.0;
        if word.load(Ordering::Relaxed) != u64::from(waiting) {
            word.store(u64::from(waiting), Ordering::Relaxed);
        }
        if waiting {
            // This side checks after this, and sees what the peer did before; for what it does later, the peer rings.
            fence(Ordering::SeqCst);
        }
    }
}
