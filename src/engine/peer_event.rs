//! Events of peers: connected, and lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Endpoint, Engine, EngineShared};
use crate::Error;
use crate::progress::{PeerChange, error_of};
use crate::proto::PeerTag;
use crate::sync::Mutex;

/// A change of the connection to a peer; see [`EngineBuilder::on_peer_event`](crate::EngineBuilder::on_peer_event).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PeerEvent {
    /// There is a connection to an engine, dialled by either side.
    Connected(Endpoint),
    /// The connection has ended. A call connects again, if the peer can be dialled.
    Lost {
        /// The peer.
        endpoint: Endpoint,
        /// Why: the peer was finalized or died, exceeded the peer timeout, or violated the protocol, or this engine is being
        /// finalized.
        error: Error,
    },
    /// The connection was closed, as it was idle: nothing has failed. A call connects again. See
    /// [`EngineBuilder::idle_timeout`](crate::EngineBuilder::idle_timeout).
    Idle(Endpoint),
}

pub(crate) type PeerHook = Box<dyn Fn(PeerEvent) + Send + Sync>;

/// Lines about connections that are logged in a [`LOG_PERIOD`]: a peer that connects again and again must not fill a disk.
const LOG_LINES: u32 = 100;
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// Which lines about connections are logged.
#[derive(Default)]
pub(super) struct ConnectionLog(Mutex<LoggedLines>);

#[derive(Default)]
struct LoggedLines {
    /// Since when lines are counted.
    since: Option<Instant>,
    logged: u32,
    /// Lines that were left out since the last one.
    omitted: u64,
}

impl LoggedLines {
    /// How many lines were left out before this one; `None` if it is left out, too.
    fn next(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= LOG_PERIOD) {
            (self.since, self.logged) = (Some(now), 0);
        }
        if self.logged == LOG_LINES {
            self.omitted += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.omitted))
    }
}

impl ConnectionLog {
    fn write(&self, event: &PeerEvent) {
        if !tracing::enabled!(target: "calomel::engine", tracing::Level::INFO) {
            return;
        }
        let next = self.0.lock().next(Instant::now());
        let Some(omitted) = next else { return };
        match event {
            PeerEvent::Connected(endpoint) => {
                let transport = endpoint.transport().map(tracing::field::display);
                tracing::info!(target: "calomel::engine", peer = %endpoint.address(), transport, omitted, "connected");
            }
            PeerEvent::Lost { endpoint, error } => {
                tracing::info!(target: "calomel::engine", peer = %endpoint.address(), %error, omitted, "connection lost");
            }
            PeerEvent::Idle(endpoint) => {
                tracing::info!(target: "calomel::engine", peer = %endpoint.address(), omitted, "idle connection closed");
            }
        }
    }
}

impl EngineShared {
    /// Reports a change to the log, and to the program's hook. One that panics does not end the thread that reports.
    pub(crate) fn report_peer(self: &Arc<Self>, peer: Arc<PeerTag>, change: PeerChange) {
        let endpoint = Endpoint::new(self.clone(), peer, 0);
        let event = match change {
            PeerChange::Connected => PeerEvent::Connected(endpoint),
            PeerChange::Idle => PeerEvent::Idle(endpoint),
            PeerChange::Lost(failure) => {
                let what = "connection".to_owned();
                let error = error_of(failure, &endpoint.address(), what, "connection", Duration::ZERO, 0);
                PeerEvent::Lost { endpoint, error }
            }
        };
        self.connection_log.write(&event);
        let Some(hook) = &self.peer_hook else { return };
        if catch_unwind(AssertUnwindSafe(|| hook(event))).is_err() {
            tracing::error!(target: "calomel::engine", "the hook for peer events panicked");
        }
    }
}

impl Engine {
    /// The peers that there is a connection to now, dialled by either side.
    pub fn peers(&self) -> Vec<Endpoint> {
        if self.shared.core.is_forked() {
            return Vec::new();
        }
        let tags = self.shared.core.with_proto(|proto| proto.connected_peers());
        tags.into_iter().map(|tag| Endpoint::new(self.shared.clone(), tag, 0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_and_told_later() {
        let mut lines = LoggedLines::default();
        let begin = Instant::now();
        for _ in 0..LOG_LINES {
            assert_eq!(lines.next(begin), Some(0));
        }
        for _ in 0..3 {
            assert_eq!(lines.next(begin + LOG_PERIOD / 2), None);
        }
        assert_eq!(lines.next(begin + LOG_PERIOD), Some(3));
        assert_eq!(lines.next(begin + LOG_PERIOD), Some(0));
    }
}
