//! What peers and connections have counted, and what is in progress: for statistics, and for a dump of an engine that hangs.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::calls::InboundRequest;
use super::link::{LinkState, PeerLink};
use super::traffic::{PeerCalls, Traffic, TransportStats};
use super::{Env, LinkId, Memory, PeerId, Proto};
use crate::latency::{Latency, nanoseconds};
use crate::{Address, Transport};

/// A peer and what went over its connections, as [`Stats`](crate::Stats) has it. A peer that is not connected, and to which the
/// program holds no endpoint, is forgotten some time later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerStats {
    /// The peer's address, as [`Endpoint::address`](crate::Endpoint::address) returns it.
    pub address: Address,
    /// The transport of the open connection to it; `None` without one.
    pub transport: Option<Transport>,
    /// Calls and transfers that wait for the peer.
    pub waiting: u64,
    /// Requests of the peer that arrive, wait for their handlers, or are being handled.
    pub handling: u64,
    /// What went over its connections, one after the other.
    pub traffic: Traffic,
    /// The time from a call of this engine until its response had arrived, as in [`CallStats`](crate::CallStats).
    pub time: Latency,
    /// How many calls of this engine to the peer have failed, by the name of the [`Error`](crate::Error).
    pub errors: BTreeMap<String, u64>,
}

/// The direction of a transfer, as seen by the engine that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferDirection {
    /// From the peer's memory into this engine's.
    Pull,
    /// From this engine's memory into the peer's.
    Push,
}

impl TransferDirection {
    pub(crate) fn of(pull: bool) -> TransferDirection {
        if pull { TransferDirection::Pull } else { TransferDirection::Push }
    }
}

/// A call of this engine that has not ended, as [`EngineDump`](crate::EngineDump) has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CallDump {
    /// The procedure; `None` for what the library itself asks a peer, such as a ping.
    pub procedure: Option<String>,
    /// The provider that is called.
    pub provider: u16,
    /// The peer that is called.
    pub peer: Address,
    /// The transport of the connection, which may still be being made.
    pub transport: Transport,
    /// How long ago the call was made.
    #[serde(with = "nanoseconds")]
    pub age: Duration,
    /// The time until its deadline; zero when that has passed.
    #[serde(with = "nanoseconds")]
    pub left: Duration,
    /// There is no response to wait for.
    pub one_way: bool,
    /// Part of a large response has arrived.
    pub arriving: bool,
}

/// A call of a peer that has not been answered, as [`EngineDump`](crate::EngineDump) has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RequestDump {
    /// The procedure; `None` where the connection is gone, and for a name that was sent for one call only.
    pub procedure: Option<String>,
    /// The provider that is called.
    pub provider: u16,
    /// The caller; `None` when its connection is gone.
    pub peer: Option<Address>,
    /// How long ago the first of it arrived.
    #[serde(with = "nanoseconds")]
    pub age: Duration,
    /// The time until its deadline; zero when that has passed, [`Duration::MAX`] without one.
    #[serde(with = "nanoseconds")]
    pub left: Duration,
    /// What it waits for.
    pub state: RequestState,
}

/// What a call of a peer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RequestState {
    /// The rest of its arguments.
    Arriving,
    /// Memory for its arguments: see
    /// [`EngineBuilder::max_bytes_in_flight_per_peer`](crate::EngineBuilder::max_bytes_in_flight_per_peer).
    NoMemory,
    /// A thread, or its handler: it has been handed out.
    Handler,
    /// Its handler, though its caller no longer takes a response.
    Cancelled,
}

/// A transfer of this engine that has not ended, as [`EngineDump`](crate::EngineDump) has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TransferDump {
    /// Pull or push.
    pub direction: TransferDirection,
    /// The owner of the remote memory.
    pub peer: Address,
    /// The transport of the connection.
    pub transport: Transport,
    /// Its length, in bytes.
    pub bytes: u64,
    /// How much of a pull has arrived, in bytes.
    pub arrived: u64,
    /// A device carries it out.
    pub by_device: bool,
    /// How long ago it was started.
    #[serde(with = "nanoseconds")]
    pub age: Duration,
}

/// A connection, as [`EngineDump`](crate::EngineDump) has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ConnectionDump {
    /// The peer, or the address that was dialled or accepted, until the peer is known.
    pub peer: Address,
    /// Its transport.
    pub transport: Transport,
    /// Dialled by this engine; else accepted.
    pub dialled: bool,
    /// The handshake is done.
    pub open: bool,
    /// A further connection, for bulk data.
    pub for_bulk: bool,
    /// Calls and transfers of this engine that wait for the peer.
    pub waiting: u64,
    /// Requests of the peer that have not been answered.
    pub handling: u64,
    /// Pulls and pushes of the peer in progress.
    pub serving: u64,
    /// Bytes that wait to be sent: messages, and what is left of large ones and of bulk data.
    pub queued_bytes: u64,
    /// The transport has not taken all that it was given: the peer does not read, or the network is slow.
    pub sending: bool,
    /// Bytes of an incomplete message that has arrived.
    pub partial_bytes: u64,
    /// How long ago anything arrived from the peer.
    #[serde(with = "nanoseconds")]
    pub silent: Duration,
    /// What went over it.
    pub traffic: Traffic,
}

impl<E: Env> InboundRequest<E> {
    fn state(&self) -> RequestState {
        if self.body.is_some() {
            RequestState::Arriving
        } else if self.parked.is_some() {
            RequestState::NoMemory
        } else if self.cancelled {
            RequestState::Cancelled
        } else {
            RequestState::Handler
        }
    }
}

/// What the protocol has in progress.
pub(crate) struct ProtoDump {
    pub calls: Vec<CallDump>,
    pub requests: Vec<RequestDump>,
    pub transfers: Vec<TransferDump>,
    pub connections: Vec<ConnectionDump>,
}

impl<E: Env> Proto<E> {
    /// A link has been opened.
    pub(super) fn count_opened(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id) else { return };
        let counts = self.transports.of(link.transport);
        counts.open += 1;
        *(if link.dialled { &mut counts.dialled } else { &mut counts.accepted }) += 1;
    }

    /// A link has been removed.
    pub(super) fn count_closed(&mut self, link: &PeerLink<E>) {
        let counts = self.transports.of(link.transport);
        counts.traffic.add(&link.traffic);
        if link.is_open() {
            counts.open -= 1;
            counts.ended += 1;
        } else {
            counts.failed += 1;
        }
        if let Some(peer) = link.peer.and_then(|peer| self.peers.get_mut(peer)) {
            peer.traffic.add(&link.traffic);
        }
    }

    /// The counts of each transport, and of each peer that is known. `calls`: those to each peer, where they are measured.
    pub(crate) fn connection_stats(&self, calls: &HashMap<PeerId, PeerCalls>) -> (Vec<TransportStats>, Vec<PeerStats>) {
        let mut transports = self.transports.clone();
        let mut by_transport: HashMap<Transport, PeerCalls> = HashMap::new();
        let mut peers = HashMap::new();
        for (id, peer) in &self.peers {
            let calls = calls.get(&id);
            if let (Some(transport), Some(calls)) = (peer.transport, calls) {
                by_transport.entry(transport).or_default().add(calls);
            }
            let stats = PeerStats {
                address: peer.tag.address.clone(),
                transport: None,
                waiting: 0,
                handling: 0,
                traffic: peer.traffic,
                time: calls.map(|calls| Latency::new(&calls.time)).unwrap_or_default(),
                errors: calls.map(|calls| calls.errors.clone()).unwrap_or_default(),
            };
            peers.insert(id, stats);
        }
        for link in self.links.values() {
            transports.of(link.transport).traffic.add(&link.traffic);
            let Some(stats) = link.peer.and_then(|peer| peers.get_mut(&peer)) else { continue };
            stats.traffic.add(&link.traffic);
            stats.waiting += link.pending as u64;
            stats.handling += link.requests.len() as u64;
            if link.is_open() && link.main.is_none() {
                stats.transport = Some(link.transport);
            }
        }
        for (transport, PeerCalls { time, errors }) in by_transport {
            let stats = transports.of(transport);
            (stats.time, stats.errors) = (Latency::new(&time), errors);
        }
        let mut transports = transports.0;
        transports.sort_by_key(|stats| stats.transport);
        let mut peers: Vec<PeerStats> = peers.into_values().collect();
        peers.sort_by(|a, b| a.address.cmp(&b.address));
        (transports, peers)
    }

    /// How many regions are exposed, and their bytes.
    pub(crate) fn exposed_memory(&self) -> (usize, usize) {
        (self.exposures.len(), self.exposures.bytes)
    }

    /// The peer of a link, as far as it is known.
    fn address_of(&self, link: &PeerLink<E>) -> Address {
        let peer = link.peer.and_then(|peer| self.peers.get(peer));
        peer.map_or_else(|| link.remote.clone(), |peer| peer.tag.address.clone())
    }

    /// What is in progress. `names` has the procedures by their labels.
    pub(crate) fn dump(&self, names: &HashMap<u32, String>, now: Instant) -> ProtoDump {
        let since = |at: Instant| now.saturating_duration_since(at);
        let until = |at: Instant| at.saturating_duration_since(now);
        let calls = self.calls.values().filter_map(|call| {
            let link = self.links.get(call.link)?;
            Some(CallDump {
                procedure: names.get(&call.label).cloned(),
                provider: call.provider,
                peer: self.address_of(link),
                transport: link.transport,
                age: since(call.began),
                left: until(call.deadline),
                one_way: call.one_way,
                arriving: call.answer.is_some(),
            })
        });
        let requests = self.requests.values().map(|request| {
            let link = self.links.get(request.link).filter(|_| !request.is_orphan);
            RequestDump {
                procedure: link.and_then(|link| link.declarations.name_of(request.procedure)).map(str::to_owned),
                provider: request.provider,
                peer: link.map(|link| self.address_of(link)),
                age: since(request.began),
                left: request.deadline.map_or(Duration::MAX, until),
                state: request.state(),
            }
        });
        let transfers = self.transfers.values().filter_map(|transfer| {
            let link = self.links.get(transfer.link)?;
            Some(TransferDump {
                direction: TransferDirection::of(transfer.pull),
                peer: self.address_of(link),
                transport: link.transport,
                bytes: transfer.memory.len() as u64,
                arrived: transfer.arrived as u64,
                by_device: transfer.rma.is_some(),
                age: since(transfer.began),
            })
        });
        let connections = self.links.values().map(|link| ConnectionDump {
            peer: self.address_of(link),
            transport: link.transport,
            dialled: link.dialled,
            open: link.state == LinkState::Open,
            for_bulk: link.main.is_some(),
            waiting: link.pending as u64,
            handling: link.requests.len() as u64,
            serving: link.transfers() as u64,
            queued_bytes: link.queued_bytes() as u64,
            sending: link.is_sending(),
            partial_bytes: link.account.partial as u64,
            silent: since(link.last_heard),
            traffic: link.traffic,
        });
        ProtoDump {
            calls: calls.collect(),
            requests: requests.collect(),
            transfers: transfers.collect(),
            connections: connections.collect(),
        }
    }
}
