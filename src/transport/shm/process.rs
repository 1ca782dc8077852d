//! The process at the other end of a link.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::net::SendFlags;

/// The packet that wakes a peer that has no doorbell.
pub(super) const DOORBELL: [u8; 1] = [0];

pub(super) struct ShmPeer {
    /// It runs as this process's user. Only then its memory is mapped or read: a read lasts as long as the owner of the memory
    /// likes.
    pub own_user: bool,
    pub socket: Arc<OwnedFd>,
    /// Its number in this process's namespace; 0 when it has none there.
    pub pid: i32,
    /// Its pidfd: readable once it is dead, also when a forked child keeps the socket open.
    pub handle: Option<OwnedFd>,
    /// A random word and its address in the peer, by which a successor under the same process number is noticed.
    pub nonce: (u64, u64),
    pub doorbell: Option<Doorbell>,
    /// This side has shut the connection down.
    pub cut: AtomicBool,
}

/// An `eventfd` of the peer. A packet on the socket would wake it too, but after that the kernel assumes that the writer is
/// about to sleep, and places the woken thread on the writer's processor: two spinning threads would then share one.
pub(super) struct Doorbell(OwnedFd);

impl Doorbell {
    /// `None` for anything but an `eventfd`: a write to another file could block.
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
            // A write fails only if the counter is full: then it has been rung.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
            return;
        }
        // A full socket wakes the peer anyway, and the driver notices a broken one.
        let _ = rustix::net::send(&*self.socket, &DOORBELL, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// True when the process is dead, or has closed its socket.
    pub(super) fn is_gone(&self) -> bool {
        let ended = |fd: &OwnedFd, what: PollFlags| {
            let mut poll = [PollFd::new(fd, what)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            // A signal may interrupt even a poll that does not wait.
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

    /// Shuts the connection down, which both sides notice.
    pub(super) fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        // Fails only if the socket is not connected any more.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}
