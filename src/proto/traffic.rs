//! Counts of what goes over connections.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Transport;
use crate::latency::{Histogram, Latency};

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
    /// The time from a call of this engine until its response had arrived, as in [`CallStats`](crate::CallStats): of calls to
    /// the peers that the engine knows, and that were last connected by this transport.
    pub time: Latency,
    /// How many of these calls have failed, by the name of the [`Error`](crate::Error).
    pub errors: BTreeMap<String, u64>,
}

/// The calls of this engine to one peer that have ended.
#[derive(Default)]
pub(crate) struct PeerCalls {
    pub time: Histogram,
    /// Errors by their names.
    pub errors: BTreeMap<String, u64>,
}

impl PeerCalls {
    pub(super) fn add(&mut self, other: &PeerCalls) {
        self.time.add(&other.time);
        other.errors.iter().for_each(|(kind, count)| *self.errors.entry(kind.clone()).or_default() += count);
    }
}

/// The counts of each transport that has had a connection.
#[derive(Clone, Default)]
pub(super) struct TransportTable(pub Vec<TransportStats>);

impl TransportTable {
    pub(super) fn of(&mut self, transport: Transport) -> &mut TransportStats {
        let index = self.0.iter().position(|known| known.transport == transport).unwrap_or_else(|| {
            self.0.push(TransportStats {
                transport,
                open: 0,
                dialled: 0,
                accepted: 0,
                failed: 0,
                ended: 0,
                traffic: Traffic::default(),
                time: Latency::default(),
                errors: BTreeMap::new(),
            });
            self.0.len() - 1
        });
        &mut self.0[index]
    }
}
