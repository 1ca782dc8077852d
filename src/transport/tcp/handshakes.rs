//! Accepted connections whose TLS handshake is not over.
//!
//! The protocol does not know them yet. Their number and their time are limited. When the table is full, a new connection
//! replaces the oldest: a handshake takes milliseconds, so the oldest is the least likely to complete.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};

use super::session::{Secure, Session};
use super::sys;
use crate::deferred_log::defer;
use crate::{Error, Result};

/// Most handshakes at a time. Each takes up to 100 KiB.
const MAX_HANDSHAKES: usize = 256;
/// Most bytes that are read and discarded from a refused peer before its connection is closed. A socket that is closed with
/// unread bytes would discard the refusal.
const MAX_DISCARDED: usize = 64 << 10;

pub(super) struct Handshakes {
    pub secure: Secure,
    /// How long a handshake may take.
    limit: Duration,
    /// Expires when the time of the oldest handshake is up.
    timer: OwnedFd,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<usize, PendingHandshake>,
    /// Deadline and token of each, the oldest first.
    order: VecDeque<(Instant, usize)>,
}

struct PendingHandshake {
    stream: mio::net::TcpStream,
    remote: SocketAddr,
    session: Session,
    /// Set when the peer was refused: how many bytes were discarded since then.
    refused: Option<usize>,
}

/// A connection whose TLS handshake is over.
pub(super) struct Authenticated {
    pub stream: mio::net::TcpStream,
    pub remote: SocketAddr,
    pub session: Session,
}

impl Handshakes {
    pub(super) fn new(secure: Secure, limit: Duration, registry: &Registry, token: usize) -> Result<Handshakes> {
        let failed = |error: io::Error| Error::io("can't create the timer of TLS handshakes", error);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(|error| failed(error.into()))?;
        let registered = registry.register(&mut SourceFd(&timer.as_raw_fd()), Token(token), Interest::READABLE);
        registered.map_err(failed)?;
        Ok(Handshakes { secure, limit, timer, table: Mutex::default() })
    }

    /// Adds an accepted connection, and registers it under the token.
    pub(super) fn add(&self, token: usize, mut stream: mio::net::TcpStream, remote: SocketAddr, registry: &Registry) {
        let session = self.secure.accept();
        let registered = registry.register(&mut stream, Token(token), Interest::READABLE | Interest::WRITABLE);
        let session = match session.and_then(|session| registered.map(|()| session)) {
            Ok(session) => session,
            Err(error) => {
                let what = "can't start a TLS handshake with an accepted connection";
                return defer(move || tracing::warn!(target: "calomel::tcp", %remote, %error, "{what}"));
            }
        };
        let mut table = self.table.lock();
        if table.entries.len() >= MAX_HANDSHAKES {
            let oldest = table.order.front().map(|(_, token)| *token);
            oldest.into_iter().for_each(|token| table.drop_entry(token, registry));
        }
        table.entries.insert(token, PendingHandshake { stream, remote, session, refused: None });
        table.order.push_back((Instant::now() + self.limit, token));
        if table.order.len() == 1 {
            self.set_timer(self.limit);
        }
    }

    fn set_timer(&self, after: Duration) {
        // Zero would disarm the timer.
        let after = after.max(Duration::from_millis(1));
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: after.as_secs() as i64, tv_nsec: after.subsec_nanos().into() };
        let value = Itimerspec { it_interval: once, it_value: value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value) {
            let what = "can't set the timer of TLS handshakes: they have no time limit";
            defer(move || tracing::error!(target: "calomel::tcp", %error, "{what}"));
        }
    }

    /// The timer has expired: drops the handshakes whose time is up.
    pub(super) fn expire(&self, registry: &Registry) {
        let mut table = self.table.lock();
        let now = Instant::now();
        while let Some((until, token)) = table.order.front().copied() {
            if until > now {
                return self.set_timer(until - now);
            }
            table.drop_entry(token, registry);
        }
    }

    /// Continues a handshake after an event of its socket; `None` if there is none under the token, or it is not over.
    pub(super) fn advance(&self, token: usize, registry: &Registry) -> Option<Authenticated> {
        let mut table = self.table.lock();
        let pending = table.entries.get_mut(&token)?;
        if pending.refused.is_none() {
            match pending.session.advance_handshake(pending.stream.as_raw_fd()) {
                Ok(true) => {
                    let PendingHandshake { stream, remote, session, .. } = table.remove(token)?;
                    return Some(Authenticated { stream, remote, session });
                }
                Ok(false) => return None,
                Err(error) => {
                    // The alert with the reason is sent; the peer must be able to read it before the connection is closed.
                    let _ = pending.stream.shutdown(Shutdown::Write);
                    pending.refused = Some(0);
                    let remote = pending.remote;
                    defer(move || tracing::warn!(target: "calomel::security", %remote, %error, "a TLS handshake is refused"));
                }
            }
        }
        if pending.discard_input() {
            table.drop_entry(token, registry);
        }
        None
    }

    pub(super) fn has(&self, token: usize) -> bool {
        self.table.lock().entries.contains_key(&token)
    }

    pub(super) fn clear(&self, registry: &Registry) {
        let mut table = self.table.lock();
        let all: Vec<usize> = table.entries.keys().copied().collect();
        all.into_iter().for_each(|token| table.drop_entry(token, registry));
    }
}

impl Table {
    fn remove(&mut self, token: usize) -> Option<PendingHandshake> {
        self.order.retain(|(_, other)| *other != token);
        self.entries.remove(&token)
    }

    fn drop_entry(&mut self, token: usize, registry: &Registry) {
        if let Some(mut pending) = self.remove(token) {
            // Dropping the stream closes it, which deregisters it too.
            let _ = registry.deregister(&mut pending.stream);
        }
    }
}

impl PendingHandshake {
    /// Discards what a refused peer sends. True when the connection may be closed.
    fn discard_input(&mut self) -> bool {
        let mut discarded = [0; 4 << 10];
        while let Some(total) = self.refused.filter(|total| *total < MAX_DISCARDED) {
            match sys::receive_plain(self.stream.as_raw_fd(), &mut discarded) {
                Ok(0) => return true,
                Ok(n) => self.refused = Some(total + n),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}
