//! What an engine holds for its peers at most.

use super::EngineBuilder;
use crate::proto;

/// What was said of it, or else the defaults.
pub(super) struct LimitOverrides {
    connections: usize,
    peer_requests: usize,
    requests: usize,
    peer_transfers: usize,
    peer_bytes: Option<usize>,
    bytes: Option<usize>,
    exposures: usize,
}

/// Peers that have connected and not greeted: 10,000 that come at the same moment are greeted as they come, and hardly ever
/// are there more than some dozens.
const HANDSHAKES: usize = 1024;
/// So many of the largest messages may be in flight for one peer, and times as much for all; of small ones, more.
const MESSAGES: usize = 4;
const MIN_MESSAGE: usize = 16 << 20;

impl Default for LimitOverrides {
    fn default() -> LimitOverrides {
        LimitOverrides {
            connections: 16 << 10,
            peer_requests: 16 << 10,
            requests: 256 << 10,
            peer_transfers: 16 << 10,
            peer_bytes: None,
            bytes: None,
            exposures: 1 << 20,
        }
    }
}

impl LimitOverrides {
    pub(super) fn limits(&self, max_message: usize) -> proto::PeerLimits {
        let peer_bytes = self.peer_bytes.unwrap_or_else(|| max_message.max(MIN_MESSAGE).saturating_mul(MESSAGES));
        // With less, the largest message would always be refused.
        let peer_bytes = peer_bytes.max(max_message);
        let bytes = self.bytes.unwrap_or_else(|| peer_bytes.saturating_mul(MESSAGES)).max(max_message);
        proto::PeerLimits {
            connections: self.connections,
            handshakes: HANDSHAKES,
            peer_requests: self.peer_requests,
            requests: self.requests,
            peer_transfers: self.peer_transfers,
            peer_bytes,
            bytes,
            exposures: self.exposures,
        }
    }
}

/// Limits, so that no number of peers, and nothing that they do, makes the engine's memory grow without bound. The defaults let
/// 10,000 peers connect. Where a limit is for all peers together, only those that have more than their share (the limit divided
/// by the number of connections) are refused: a few greedy ones don't lock the others out.
impl EngineBuilder {
    /// How many connections of others the engine keeps at a time (default 16,384). Who connects beyond that is turned away, and
    /// its calls fail with [`Error::Disconnected`](crate::Error::Disconnected) or
    /// [`Error::Unreachable`](crate::Error::Unreachable), which can be retried. Connections that the engine makes itself don't
    /// count. Of connections whose peer has not greeted yet there are 1024 more at most, and beyond that the oldest is dropped.
    ///
    /// A process may have only so many files open: over tcp a connection takes one, over shared memory
    /// several.
    pub fn max_connections(mut self, count: usize) -> Self {
        self.most.connections = count;
        self
    }

    /// How many requests of one peer may be in progress at a time: arriving, waiting for a handler, or being handled (default
    /// 16,384). Those beyond are answered with [`Error::Busy`](crate::Error::Busy). One-way calls that take credit
    /// count, and are not refused: their credit limits them, see [`Call::notify`](crate::Call::notify).
    pub fn max_requests_per_peer(mut self, count: usize) -> Self {
        self.most.peer_requests = count;
        self
    }

    /// The same of all peers together (default 262,144).
    pub fn max_requests(mut self, count: usize) -> Self {
        self.most.requests = count;
        self
    }

    /// How many pulls and pushes of one peer, to and from memory that is exposed here, may be in progress at a time (default
    /// 16,384). Those beyond fail with [`Error::Busy`](crate::Error::Busy). Transfers that an RDMA device carries out by itself
    /// don't count.
    pub fn max_transfers_per_peer(mut self, count: usize) -> Self {
        self.most.peer_transfers = count;
        self
    }

    /// How many bytes of messages the engine holds for one peer at a time: of its requests, from their announcement to the answer,
    /// and of answers until they are sent (default four times the largest message, at least 64 MiB; never less than the
    /// largest message). Requests beyond that are answered with [`Error::Busy`](crate::Error::Busy), and so is a request whose
    /// answer does not fit, because the peer is slow to read: then its handler has run. Exposed memory does not count.
    ///
    /// Arguments may take many times as much memory as they did in the message: an empty `String` took one byte, and takes
    /// twenty-four. Where they take more than the message, a quarter of them counts too, from the decoding to the answer. So
    /// with the defaults a message of the largest size may become thirteen times as large, which numbers of 64 bits do, and
    /// texts of four letters and more; smaller messages more. A one-way call that was sent waits until there is room: its message
    /// counts meanwhile, but not against other calls that wait, so a peer may have twice this number of bytes then. A request whose arguments alone would be too much fails
    /// with [`Error::Decode`](crate::Error::Decode), and so does an answer whose value would take more than four times this
    /// number of bytes.
    pub fn max_bytes_in_flight_per_peer(mut self, bytes: usize) -> Self {
        self.most.peer_bytes = Some(bytes);
        self
    }

    /// The same for all peers together (default four times that of one peer).
    pub fn max_bytes_in_flight(mut self, bytes: usize) -> Self {
        self.most.bytes = Some(bytes);
        self
    }

    /// How many regions may be exposed at a time (default 1,048,576). To expose one more fails with
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn max_exposures(mut self, count: usize) -> Self {
        self.most.exposures = count;
        self
    }
}
