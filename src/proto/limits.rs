//! Limits on what peers can make this engine hold.

/// Limits beyond which peers are refused. A total limit applies to a peer that has more than its share, which is the limit
/// divided by the number of connections: so a few peers that use all of it do not lock the others out. Beyond twice the limit
/// every peer is refused; that takes requests that peers which are gone have left to their handlers.
#[derive(Clone, Debug)]
pub(crate) struct PeerLimits {
    /// Accepted connections that have sent their hello.
    pub connections: usize,
    /// Accepted connections that have not sent their hello yet.
    pub handshakes: usize,
    /// Requests of one peer that are arriving, wait for a handler, or are being handled.
    pub peer_requests: usize,
    /// The same of all peers, including those that are gone.
    pub requests: usize,
    /// Pulls and pushes of one peer that are in progress.
    pub peer_transfers: usize,
    /// Bytes held for one peer: of requests, from the announcement to the answer; of unsent answers, incomplete frames, names,
    /// shapes of types and the like.
    pub peer_bytes: usize,
    /// The same of all peers.
    pub bytes: usize,
    /// Regions exposed at a time.
    pub exposures: usize,
}

/// How often limits were reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitCounts {
    /// Connections refused, as there were too many.
    pub connections: u64,
    /// Connections dropped before their hello, as there were too many.
    pub handshakes: u64,
    /// Requests that were answered with `Busy`.
    pub requests: u64,
    /// Answers replaced by `Busy`, as their caller does not read.
    pub answers: u64,
    /// Pulls and pushes that were refused.
    pub transfers: u64,
    /// Connections ended because of what can't be refused.
    pub ended: u64,
    /// Exposures that were refused.
    pub exposures: u64,
}

impl LimitCounts {
    /// Refusals of peers, without those of this engine's own exposures.
    pub(super) fn total(&self) -> u64 {
        let LimitCounts { connections, handshakes, requests, answers, transfers, ended, exposures: _ } = *self;
        connections + handshakes + requests + answers + transfers + ended
    }
}

/// Accounted bytes of a link up to this do not count in total, which keeps the short path short.
pub(super) const UNCOUNTED: usize = 16 << 10;
/// Limit on the queued replies to one peer, in bytes, besides answers: some 200,000 refusals.
pub(super) const MAX_CONTROL_BYTES: usize = 16 << 20;
/// Accounted for each transfer of a peer.
pub(super) const TRANSFER_COST: usize = 256;
/// Accounted for each lease that a peer has.
pub(super) const LEASE_COST: usize = 192;

/// The memory of a request's values counts with one part in so many. Values may take many times as much as they did in the
/// message: numbers and short texts do, and are no attack.
pub(crate) const VALUES_COUNT: usize = 4;
/// Memory granted for values beyond what is requested, plus one part in so many: so there are few requests.
pub(super) const VALUES_AHEAD: usize = 4 << 10;
pub(super) const VALUES_PART_AHEAD: usize = 4;
