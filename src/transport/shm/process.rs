//! The process at the other end of a link.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SendFlags;

/// The packet that wakes a peer.
pub(super) const BELL: [u8; 1] = [0];

pub(super) struct Process {
    pub socket: Arc<OwnedFd>,
    /// As it is seen from here; 0 when it is not.
    pub pid: i32,
    /// Tells when it is dead, also when a child of it keeps the socket open.
    pub handle: Option<OwnedFd>,
    /// A random word, and where in its memory that lies: so a successor under the same number is noticed.
    pub nonce: (u64, u64),
    pub cut: AtomicBool,
}

impl Process {
    /// Wakes it.
    pub(super) fn ring(&self) {
        // A full socket holds bells enough, and a broken one is noticed by whoever drives.
        let _ = rustix::net::send(&*self.socket, &BELL, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

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
