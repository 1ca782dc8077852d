//! Events of peers: connected, and lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::log_limit::LogLimit;
use super::{Endpoint, Engine, EngineShared};
use crate::Error;
use crate::progress::{PeerChange, error_of};
use crate::proto::PeerTag;

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

/// The log lines about connections.
#[derive(Default)]
pub(super) struct ConnectionLog(LogLimit);

impl ConnectionLog {
    fn write(&self, event: &PeerEvent) {
        if !tracing::enabled!(target: "calomel::engine", tracing::Level::INFO) {
            return;
        }
        let Some(omitted) = self.0.next(Instant::now()) else { return };
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
