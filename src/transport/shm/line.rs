//! Both sides of a link: their segments, who the peer is, and the bell.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SendFlags;

use super::segment::Segment;

/// The packet that wakes a peer.
pub(super) const BELL: [u8; 1] = [0];

pub(super) struct Line {
    pub mine: Arc<Segment>,
    pub theirs: Arc<Segment>,
    pub peer: Process,
    /// Whether this side can read the peer's memory.
    pub reads: bool,
    /// Whether the peer can read this side's.
    pub lends: AtomicBool,
    /// For which sleep of the peer it has been rung for.
    rung: AtomicU64,
}

/// The process at the other end.
pub(super) struct Process {
    pub socket: Arc<OwnedFd>,
    /// As it is seen from here; 0 when it is not.
    pub pid: i32,
    /// Tells when it is dead, also when a child of it keeps the socket open.
    pub handle: Option<OwnedFd>,
    /// A random word, and where in its memory that lies: so a successor under the same number is noticed.
    pub nonce: (u64, u64),
}

impl Process {
    /// True when the process is dead, or has closed its socket.
    pub(super) fn is_gone(&self) -> bool {
        let ended = |fd: &OwnedFd, what: PollFlags| {
            let mut poll = [PollFd::new(fd, what)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|n| n > 0) && poll[0].revents().intersects(what)
        };
        match &self.handle {
            Some(handle) => ended(handle, PollFlags::IN),
            None => ended(&self.socket, PollFlags::HUP),
        }
    }

    /// Ends the connection, so that both sides notice.
    pub(super) fn cut(&self) {
        // A socket that is not connected any more is cut already.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}

impl Line {
    pub(super) fn new(mine: Arc<Segment>, theirs: Arc<Segment>, peer: Process, reads: bool) -> Line {
        Line { mine, theirs, peer, reads, lends: AtomicBool::new(false), rung: AtomicU64::new(0) }
    }

    /// Something is there for the peer: wakes it, if it sleeps and was not rung for already.
    pub(super) fn wake_peer(&self) {
        // What is there must be seen by a peer that is not seen to sleep.
        fence(Ordering::SeqCst);
        let asleep = self.theirs.words().asleep.0.load(Ordering::Relaxed);
        if asleep % 2 == 1 && self.rung.swap(asleep, Ordering::Relaxed) != asleep {
            // A full socket holds bells enough, and a broken one is noticed by whoever drives.
            let _ = rustix::net::send(&*self.peer.socket, &BELL, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
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
