//! Counts of what goes over connections.

use serde::{Deserialize, Serialize};

use crate::Transport;

/// Durations as numbers, for what people read as JSON.
pub(crate) mod nanoseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_nanos)
    }
}

/// What went over connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes received: messages with their heads, and bulk data; without what TLS and the network add.
    pub received_bytes: u64,
    /// The same, sent.
    pub sent_bytes: u64,
    /// Calls that this engine made.
    pub calls: u64,
    /// Calls that peers made, and that were accepted.
    pub requests: u64,
    /// Pulls and pushes that this engine made, and that succeeded. Those within the engine, and those whose data came with a
    /// call, take no connection, and are not among them.
    pub transfers: u64,
    /// Bytes of these transfers, including those that a device moved.
    pub transferred_bytes: u64,
    /// Pulls and pushes that peers began, without those that a device carries out alone.
    pub served_transfers: u64,
}

impl Traffic {
    pub(super) fn add(&mut self, other: &Traffic) {
        let Traffic { received_bytes, sent_bytes, calls, requests, transfers, transferred_bytes, served_transfers } = *other;
        self.received_bytes += received_bytes;
        self.sent_bytes += sent_bytes;
        self.calls += calls;
        self.requests += requests;
        self.transfers += transfers;
        self.transferred_bytes += transferred_bytes;
        self.served_transfers += served_transfers;
    }
}

/// The connections over one transport since the engine was made, as [`Stats`](crate::Stats) has them. Further connections for
/// bulk data ([`EngineBuilder::bulk_connections`](crate::EngineBuilder::bulk_connections)) count too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TransportStats {
    /// The transport that carries them. It differs from that of a peer's address where the same-host upgrade takes effect.
    pub transport: Transport,
    /// Connections that are open now.
    pub open: u64,
    /// Connections that this engine dialled, and that were opened.
    pub dialled: u64,
    /// Connections that were accepted and opened.
    pub accepted: u64,
    /// Connections, of either direction, that ended before they were open: unreachable, refused, too slow.
    pub failed: u64,
    /// Open connections that have ended, by either side.
    pub ended: u64,
    /// What went over them, including those that have ended.
    pub traffic: Traffic,
}

/// The counts of each transport that has had a connection.
#[derive(Default)]
pub(super) struct TransportTable(pub Vec<TransportStats>);

impl TransportTable {
    pub(super) fn of(&mut self, transport: Transport) -> &mut TransportStats {
        let index = self.0.iter().position(|known| known.transport == transport).unwrap_or_else(|| {
            let traffic = Traffic::default();
            self.0.push(TransportStats { transport, open: 0, dialled: 0, accepted: 0, failed: 0, ended: 0, traffic });
            self.0.len() - 1
        });
        &mut self.0[index]
    }
}
