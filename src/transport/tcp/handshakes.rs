//! Who has connected, and not shown yet who it is.
//!
//! Nobody else hears of these connections. There are so many at most, and each has so much time; where there is no room for
//! one more, the oldest goes: a handshake takes milliseconds, and who has taken longest is least likely to mean it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use parking_lot::Mutex;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};

use super::session::{Secure, Session};
use super::sys;
use crate::deferred_log::defer;
use crate::{Error, Result};

/// At a time. Each takes up to 100 KiB.
const MAX_HANDSHAKES: usize = 256;
/// What is thrown away of what somebody says who was refused, before the connection ends: what had been sent when the refusal
/// came. Would it end with that unread, the system would take back the refusal.
const THROWN_AWAY: usize = 64 << 10;

pub(super) struct Handshakes {
    pub secure: Secure,
    /// How long one may take.
    limit: Duration,
    /// Rings when the time of the oldest is up.
    timer: OwnedFd,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    waiting: HashMap<usize, Waiting>,
    /// Until when, and which, the oldest first.
    order: VecDeque<(Instant, usize)>,
}

struct Waiting {
    stream: mio::net::TcpStream,
    remote: SocketAddr,
    session: Session,
    /// It was told that it is refused; so much it has said since then.
    refused: Option<usize>,
}

/// Somebody who has shown who it is.
pub(super) struct KnownSource {
    pub stream: mio::net::TcpStream,
    pub remote: SocketAddr,
    pub session: Session,
}

impl Handshakes {
    pub(super) fn new(secure: Secure, limit: Duration, registry: &Registry, token: usize) -> Result<Handshakes> {
        let failed = |error: io::Error| Error::io("can't make the timer of TLS handshakes", error);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(|error| failed(error.into()))?;
        let registered = registry.register(&mut SourceFd(&timer.as_raw_fd()), Token(token), Interest::READABLE);
        registered.map_err(failed)?;
        Ok(Handshakes { secure, limit, timer, table: Mutex::default() })
    }

    /// Somebody has connected; the reactor tells of it by the token.
    pub(super) fn add(&self, token: usize, mut stream: mio::net::TcpStream, remote: SocketAddr, registry: &Registry) {
        let session = self.secure.accept();
        let registered = registry.register(&mut stream, Token(token), Interest::READABLE | Interest::WRITABLE);
        let session = match session.and_then(|session| registered.map(|()| session)) {
            Ok(session) => session,
            Err(error) => {
                return defer(move || tracing::warn!(target: "calomel::tcp", %remote, %error, "a connection can't be taken"));
            }
        };
        let mut table = self.table.lock();
        if table.waiting.len() >= MAX_HANDSHAKES {
            let oldest = table.order.front().map(|(_, token)| *token);
            oldest.into_iter().for_each(|token| table.give_up(token, registry));
        }
        table.waiting.insert(token, Waiting { stream, remote, session, refused: None });
        table.order.push_back((Instant::now() + self.limit, token));
        if table.order.len() == 1 {
            self.set_timer(self.limit);
        }
    }

    fn set_timer(&self, after: Duration) {
        // Zero would stop it.
        let after = after.max(Duration::from_millis(1));
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: after.as_secs() as i64, tv_nsec: after.subsec_nanos().into() };
        let value = Itimerspec { it_interval: once, it_value: value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value) {
            defer(move || tracing::error!(target: "calomel::tcp", %error, "TLS handshakes are not given up"));
        }
    }

    /// The timer has rung: gives up whose time is over.
    pub(super) fn expire(&self, registry: &Registry) {
        let mut table = self.table.lock();
        let now = Instant::now();
        while let Some((until, token)) = table.order.front().copied() {
            if until > now {
                return self.set_timer(until - now);
            }
            table.give_up(token, registry);
        }
    }

    /// There is news of a connection; `None` where it is none of these, or has to wait on.
    pub(super) fn go_on(&self, token: usize, registry: &Registry) -> Option<KnownSource> {
        let mut table = self.table.lock();
        let waiting = table.waiting.get_mut(&token)?;
        if waiting.refused.is_none() {
            match waiting.session.shake(waiting.stream.as_raw_fd()) {
                Ok(true) => {
                    let Waiting { stream, remote, session, .. } = table.remove(token)?;
                    return Some(KnownSource { stream, remote, session });
                }
                Ok(false) => return None,
                Err(error) => {
                    // It has been told why, and is to hear that before it finds the connection closed.
                    let _ = waiting.stream.shutdown(Shutdown::Write);
                    waiting.refused = Some(0);
                    let remote = waiting.remote;
                    defer(move || tracing::warn!(target: "calomel::security", %remote, %error, "a connection is refused"));
                }
            }
        }
        if waiting.has_left() {
            table.give_up(token, registry);
        }
        None
    }

    pub(super) fn has(&self, token: usize) -> bool {
        self.table.lock().waiting.contains_key(&token)
    }

    pub(super) fn clear(&self, registry: &Registry) {
        let mut table = self.table.lock();
        let all: Vec<usize> = table.waiting.keys().copied().collect();
        all.into_iter().for_each(|token| table.give_up(token, registry));
    }
}

impl Table {
    fn remove(&mut self, token: usize) -> Option<Waiting> {
        self.order.retain(|(_, other)| *other != token);
        self.waiting.remove(&token)
    }

    fn give_up(&mut self, token: usize, registry: &Registry) {
        if let Some(mut waiting) = self.remove(token) {
            // It is closed right away, which deregisters it as well.
            let _ = registry.deregister(&mut waiting.stream);
        }
    }
}

impl Waiting {
    /// Throws away what somebody says who was refused. True when the connection may end.
    fn has_left(&mut self) -> bool {
        let mut thrown = [0; 4 << 10];
        while let Some(total) = self.refused.filter(|total| *total < THROWN_AWAY) {
            match sys::receive_plain(self.stream.as_raw_fd(), &mut thrown) {
                Ok(0) => return true,
                Ok(n) => self.refused = Some(total + n),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}
