//! Both sides of a link: their segments, who the peer is, and the bell.

use std::sync::Arc;

use super::process::ShmPeer;
use super::segment::SharedSegment;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

pub(super) struct Connection {
    pub mine: Arc<SharedSegment>,
    pub theirs: Arc<SharedSegment>,
    pub peer: ShmPeer,
    /// Whether this side can read the peer's memory.
    pub reads: bool,
    /// Whether the peer can read this side's.
    pub lends: AtomicBool,
    /// For which sleep of the peer it has been rung for.
    rung: AtomicU64,
}

impl Connection {
    pub(super) fn new(mine: Arc<SharedSegment>, theirs: Arc<SharedSegment>, peer: ShmPeer, reads: bool) -> Connection {
        Connection { mine, theirs, peer, reads, lends: AtomicBool::new(false), rung: AtomicU64::new(0) }
    }

    /// Something is there for the peer: wakes it, if it sleeps and was not rung for already.
    pub(super) fn wake_peer(&self) {
        // What is there must be seen by a peer that is not seen to sleep.
        fence(Ordering::SeqCst);
        let asleep = self.theirs.words().asleep.0.load(Ordering::Relaxed);
        if asleep % 2 == 1 && self.rung.swap(asleep, Ordering::Relaxed) != asleep {
            self.mine.words().processor.0.store(super::sys::processor().map_or(0, |number| number as u64 + 1), Ordering::Relaxed);
            self.peer.ring();
        }
    }

    /// Whether the peer was on this thread's processor when it rang.
    pub(super) fn shares_processor(&self) -> bool {
        let theirs = self.theirs.words().processor.0.load(Ordering::Relaxed);
        theirs != 0 && super::sys::processor().is_some_and(|own| own as u64 + 1 == theirs)
    }

    /// As `wake_peer`, when what it may be waiting for is room, or memory that it has lent.
    pub(super) fn wake_waiting_peer(&self) {
        fence(Ordering::SeqCst);
        if self.theirs.words().waiting.0.load(Ordering::Relaxed) != 0 {
            self.wake_peer();
        }
    }

    /// This side goes to sleep: the peer rings from now on. What was there before has to be looked for after this.
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

    /// Whether this side waits for room, or for what it has lent.
    pub(super) fn set_waiting(&self, waiting: bool) {
        let word = &self.mine.words().waiting.0;
        if word.load(Ordering::Relaxed) != u64::from(waiting) {
            word.store(u64::from(waiting), Ordering::Relaxed);
        }
        if waiting {
            // What the peer has done before must be seen by whoever looks now; what it does later, it rings for.
            fence(Ordering::SeqCst);
        }
    }
}
