//! The process at the other end of a link.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::net::SendFlags;

/// The packet that wakes a peer that has no bell.
pub(super) const DOORBELL: [u8; 1] = [0];

pub(super) struct ShmPeer {
    /// It runs as this process's user. Only then memory may be mapped, and read where it lies: a read of another process's memory
    /// lasts as long as that process likes.
    pub own_user: bool,
    pub socket: Arc<OwnedFd>,
    /// As it is seen from here; 0 when it is not.
    pub pid: i32,
    /// Tells when it is dead, also when a child of it keeps the socket open.
    pub handle: Option<OwnedFd>,
    /// A random word, and where in its memory that lies: so a successor under the same number is noticed.
    pub nonce: (u64, u64),
    pub doorbell: Option<Doorbell>,
    pub cut: AtomicBool,
}

/// An `eventfd` of the peer's. A write to the socket would do, but there the system takes it that the writer is about to
/// sleep, and puts the woken thread on the writer's processor: two threads that want to spin then share one.
pub(super) struct Doorbell(OwnedFd);

impl Doorbell {
    /// `None` for what is no `eventfd`: nobody else has the writing of it wait.
    pub(super) fn new(fd: OwnedFd) -> Option<Doorbell> {
        let what = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).ok()?;
        if what.as_bytes() != b"anon_inode:[eventfd]" {
            return None;
        }
        let flags = rustix::fs::fcntl_getfl(&fd).ok()?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).ok()?;
        Some(Doorbell(fd))
    }
}

impl ShmPeer {
    /// Wakes it.
    pub(super) fn ring(&self) {
        if let Some(Doorbell(fd)) = &self.doorbell {
            // One that can't be counted any higher has been rung.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
            return;
        }
        // A full socket holds bells enough, and a broken one is noticed by whoever drives.
        let _ = rustix::net::send(&*self.socket, &DOORBELL, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// True when the process is dead, or has closed its socket.
    pub(super) fn is_gone(&self) -> bool {
        let ended = |fd: &OwnedFd, what: PollFlags| {
            let mut poll = [PollFd::new(fd, what)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            // Even a poll that does not wait may be broken off by a signal.
            let found = rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&now)));
            found.is_ok_and(|n| n > 0) && poll[0].revents().intersects(what)
        };
        match &self.handle {
            Some(handle) => ended(handle, PollFlags::IN),
            None => ended(&self.socket, PollFlags::HUP),
        }
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Ends the connection, so that both sides notice.
    pub(super) fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        // A socket that is not connected any more is cut already.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}
