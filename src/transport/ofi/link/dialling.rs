//! A link that is dialled: the hello is repeated, and a refusal is found out.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::super::limits::{HELLO_AGAIN, RETRY, RETRY_SLOWLY};
use crate::address::OfiProvider;

/// How long an answer may take before a refusal is looked for.
const PATIENCE: Duration = Duration::from_millis(60);

pub(super) struct Dialling {
    since: Instant,
    next_hello: Instant,
    /// Where to look: providers that use TCP try to connect without end, and don't report that no program listens.
    socket: Option<SocketAddr>,
    /// A connection that is made only to see whether it is refused.
    probe: Option<mio::net::TcpStream>,
}

impl Dialling {
    pub(super) fn new(now: Instant, provider: OfiProvider, remote: SocketAddr) -> Dialling {
        let uses_tcp = matches!(provider, OfiProvider::Tcp | OfiProvider::TcpRxm);
        Dialling { since: now, next_hello: now + HELLO_AGAIN, socket: uses_tcp.then_some(remote), probe: None }
    }

    /// True when the hello is to be sent again. An error when no program listens there.
    pub(super) fn is_due(&mut self, now: Instant) -> io::Result<bool> {
        if let Some(socket) = self.socket.filter(|_| now >= self.since + PATIENCE) {
            let probe = match &mut self.probe {
                Some(probe) => probe,
                None => self.probe.insert(mio::net::TcpStream::connect(socket)?),
            };
            if let Some(error) = probe.take_error()? {
                return Err(error);
            }
            if probe.peer_addr().is_ok() {
                // One does. A hello may be repeated when that was long ago.
                (self.socket, self.probe) = (None, None);
            }
        }
        let due = now >= self.next_hello;
        if due {
            self.next_hello = now + HELLO_AGAIN;
        }
        Ok(due)
    }

    /// When to call `is_due` again.
    pub(super) fn next(&self, now: Instant) -> Instant {
        match (&self.socket, &self.probe) {
            (Some(_), None) => self.next_hello.min(self.since + PATIENCE),
            (Some(_), Some(_)) => now + if now < self.since + 2 * PATIENCE { RETRY } else { RETRY_SLOWLY },
            (None, _) => self.next_hello,
        }
    }
}
