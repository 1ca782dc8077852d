//! What peers can make this engine hold, and what is done beyond that.
//!
//! What can be refused is: requests, transfers and answers become `Busy`. What can't, as nobody waits for a word on it (what
//! is said back to a peer that does not read, half frames, declarations), ends the connection. This engine never stops reading: two
//! that stop reading each other would wait for ever, and cancels, answers and signs of life come the same way.

use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

use super::link::{Account, PeerLink, broken};
use super::wire::Hello;
use super::{Env, Failure, LinkId, Log, Output, Proto, RequestId, Status};

/// Numbers beyond which peers are refused. Those in all hold for a peer that has more than its share, which is that number
/// divided by the connections: so a few peers that take all there is do not lock the others out. Beyond twice the number
/// everybody is refused: it takes peers that have gone, and whose requests are still being handled.
#[derive(Clone, Debug)]
pub(crate) struct PeerLimits {
    /// Connections that others have made, once they have greeted.
    pub connections: usize,
    /// Connections that others have made, and that have not greeted yet.
    pub handshakes: usize,
    /// Requests of one peer that are arriving, wait for a handler, or are being handled.
    pub peer_requests: usize,
    /// The same of all peers, those included that have gone meanwhile.
    pub requests: usize,
    /// Pulls and pushes of one peer that are in progress.
    pub peer_transfers: usize,
    /// Bytes held for one peer: of its requests, from their announcement to the answer, of answers that are not out, of half
    /// frames, names, shapes of types and the like.
    pub peer_bytes: usize,
    /// The same of all peers.
    pub bytes: usize,
    /// Regions that are exposed at a time.
    pub exposures: usize,
}

/// How often limits were reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitCounts {
    /// Connections turned away, as there were too many.
    pub connections: u64,
    /// Connections dropped before they had greeted, as there were too many.
    pub handshakes: u64,
    /// Requests that were answered with `Busy`.
    pub requests: u64,
    /// Answers that `Busy` took the place of, as their caller does not read.
    pub answers: u64,
    /// Pulls and pushes that were refused.
    pub transfers: u64,
    /// Connections ended for what can't be refused.
    pub ended: u64,
    /// Exposures that were refused.
    pub exposures: u64,
}

impl LimitCounts {
    /// What peers were refused: not what the engine itself was.
    pub(super) fn total(&self) -> u64 {
        let LimitCounts { connections, handshakes, requests, answers, transfers, ended, exposures: _ } = *self;
        connections + handshakes + requests + answers + transfers + ended
    }
}

/// What a link has less of, that could not be refused, is not counted in all: the short path need not do it.
pub(super) const UNCOUNTED: usize = 16 << 10;
/// Bytes that may be said back to one peer, besides answers, and not be out: some 200,000 refusals.
pub(super) const MAX_CONTROL_BYTES: usize = 16 << 20;
/// What it takes to say that something is refused, and why.
const REFUSAL: usize = 100;
/// What it takes to keep a transfer of a peer.
const TRANSFER_COST: usize = 256;
/// What it takes to keep a lease that a peer has.
const LEASE_COST: usize = 192;

/// Memory of the values that a handler is given counts with one of so many parts. They may take many times as much as they did
/// in the message: numbers and short texts that are no attack do.
pub(crate) const VALUES_COUNT: usize = 4;
/// Memory that is granted for values beyond what is asked for, and one part in so many: they are not many questions.
pub(super) const VALUES_AHEAD: usize = 4 << 10;
pub(super) const VALUES_PART_AHEAD: usize = 4;

/// Why no more bytes are held. In words where it is told: those that wait for memory ask for it again and again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Full {
    bytes: usize,
    limit: usize,
    /// Of all peers; else of one.
    of_all: bool,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Full { bytes, limit, of_all } = self;
        write!(f, "{bytes} bytes are in flight for {}, and the limit is {limit}", if *of_all { "all peers" } else { "this peer" })
    }
}

/// Counts, and has it logged at powers of two: whoever is refused can't flood the log. Not here: who takes logs is user code.
fn tell<E: Env>(outputs: &mut VecDeque<Output<E>>, count: &mut u64, what: &'static str, reason: &str) {
    *count += 1;
    if count.is_power_of_two() {
        outputs.push_back(Output::Log(Log::Limit { what, reason: reason.to_owned(), count: *count }));
    }
}

impl<E: Env> PeerLink<E> {
    /// Whether what the link holds counts in all, or did.
    pub(super) fn counts(&self) -> bool {
        self.accounted_bytes() > UNCOUNTED || self.account.counted > 0
    }

    /// Bytes that are held for the peer, besides its requests. Who does not let go of the bulks that it got in answers gets no
    /// more of them.
    fn accounted_bytes(&self) -> usize {
        let Account { answers, control: said_back, flying, partial, declared, .. } = self.account;
        let tables = TRANSFER_COST * self.transfers() + LEASE_COST * self.leases.len();
        answers + said_back + flying + partial + declared + self.streams.answering() + tables
    }

    /// Those of them that could not be refused.
    fn unrefusable_bytes(&self) -> usize {
        self.account.control + self.account.partial + self.account.declared
    }

    /// Transfers of the peer that are in progress.
    fn transfers(&self) -> usize {
        self.streams.pulls() + self.pushes.len()
    }
}

impl<E: Env> Proto<E> {
    /// How often limits were reached so far.
    #[cfg(test)]
    pub(crate) fn limited(&self) -> LimitCounts {
        self.limited
    }

    /// What one peer may have when there is too much in all.
    fn share(&self, of: usize) -> usize {
        of / self.links.len().max(1)
    }

    /// Whether `all` is so much that a peer which has `own` of it gets no more.
    fn exceeds(&self, all: usize, own: usize, limit: usize) -> bool {
        all > limit && (own > self.share(limit) || all > limit.saturating_mul(2))
    }

    /// What is held for a peer, but for what is set `aside`, with so many bytes more. An error when that is more than one peer
    /// may have.
    fn check_own_bytes(&self, id: LinkId, more: usize, aside: usize) -> Result<usize, Full> {
        let (link, limit) = (&self.links[id], self.config.limits.peer_bytes);
        let own = link.account.requests + link.accounted_bytes() - aside;
        let with_this = own.saturating_add(more);
        if with_this > limit {
            return Err(Full { bytes: own, limit, of_all: false });
        }
        Ok(with_this)
    }

    /// An error when no more bytes may be held for a peer.
    fn check_bytes(&self, id: LinkId, more: usize) -> Result<(), Full> {
        self.check_bytes_without(id, more, (0, 0))
    }

    /// As `check_bytes`, without what is set aside of the peer, and in all.
    fn check_bytes_without(&self, id: LinkId, more: usize, (own, all): (usize, usize)) -> Result<(), Full> {
        let with_this = self.check_own_bytes(id, more, own)?;
        let (all, limit) = (self.bytes - all, self.config.limits.bytes);
        if self.exceeds(all.saturating_add(more), with_this, limit) {
            return Err(Full { bytes: all, limit, of_all: true });
        }
        Ok(())
    }

    /// Bytes that a request may take, with its values, when nothing else is there but what the connection has declared.
    pub(super) fn most_alone(&self, link: LinkId) -> usize {
        let PeerLimits { peer_bytes, bytes, .. } = self.config.limits;
        peer_bytes.min(bytes).saturating_sub(self.links.get(link).map_or(0, |link| link.account.declared))
    }

    /// Whether one more request of so many bytes is taken.
    pub(super) fn admit_request(&mut self, id: LinkId, bytes: usize) -> Result<(), Status> {
        let limits = &self.config.limits;
        let own = self.links[id].requests.len();
        let all = self.requests.len();
        let admitted = if own >= limits.peer_requests {
            Err(format!("{own} requests of this peer are in progress, and the limit is {}", limits.peer_requests))
        } else if self.exceeds(all + 1, own + 1, limits.requests) {
            Err(format!("{all} requests are in progress, and the limit is {}", limits.requests))
        } else {
            self.check_bytes(id, bytes).map_err(|full| full.to_string())
        };
        admitted.map_err(|reason| {
            tell(&mut self.outputs, &mut self.limited.requests, "requests are refused", &reason);
            Status::Busy(reason)
        })
    }

    /// Whether the values in a request may take so many bytes of memory: how many they may take, which is no less, and counts
    /// from now on. `Busy` when it may try again, which a one-way call does by itself: see [`Proto::park`].
    pub(crate) fn admit_values(&mut self, id: RequestId, memory: usize) -> Result<usize, Status> {
        let Some(request) = self.requests.get(id) else { return Ok(usize::MAX) };
        let (link, size, one_way) = (request.link, request.cost - request.values, request.one_way.is_some());
        // A call that has waited for memory has it reserved.
        let reserved = request.values.saturating_mul(VALUES_COUNT);
        if memory <= reserved {
            return Ok(reserved);
        }
        let ahead = memory.saturating_add(memory / VALUES_PART_AHEAD).saturating_add(VALUES_AHEAD);
        let granted = if self.is_behind_parked(id) {
            Err("one-way calls of this peer wait for memory".to_owned())
        } else if self.count_values(id, ahead).is_ok() {
            Ok(ahead)
        } else {
            self.count_values(id, memory).map(|()| memory).map_err(|full| full.to_string())
        };
        let reason = match granted {
            Ok(granted) => return Ok(granted),
            Err(reason) => reason,
        };
        let limit = self.config.limits.peer_bytes.min(self.config.limits.bytes);
        let alone = size.saturating_add(memory / VALUES_COUNT);
        // Some of the limit may always be taken, by bulks for instance: a caller must not try again for ever.
        let may_fit = alone <= self.most_alone(link).saturating_sub(limit / 16);
        if one_way && may_fit {
            return Err(Status::Busy(reason));
        }
        tell(&mut self.outputs, &mut self.limited.requests, "requests are refused", &reason);
        if may_fit {
            return Err(Status::Busy(reason));
        }
        let reason = format!(
            "the values in {size} bytes would take {memory} bytes of memory and more, of which one in {VALUES_COUNT} counts: \
             with the message that is more than the limit of {limit} bytes in flight for one peer"
        );
        Err(Status::Decode(reason))
    }

    /// The values in a request take so many bytes of memory, as long as it is handled. An error when that is too much.
    pub(crate) fn count_values(&mut self, id: RequestId, memory: usize) -> Result<(), Full> {
        let Some(request) = self.requests.get(id) else { return Ok(()) };
        let (link, before, values) = (request.link, request.values, memory / VALUES_COUNT);
        let more = values.saturating_sub(before);
        // Those that wait must not keep each other waiting.
        let aside = if more > 0 && request.wants > 0 { self.parked.bytes(link) } else { (0, 0) };
        if more > 0 && self.links.contains_key(link) {
            self.check_bytes_without(link, more, aside)?;
        } else if more > 0 && (self.bytes - aside.1).saturating_add(more) > self.config.limits.bytes.saturating_mul(2) {
            return Err(Full { bytes: self.bytes, limit: self.config.limits.bytes, of_all: true });
        }
        let request = &mut self.requests[id];
        request.values = values;
        request.cost = request.cost - before + values;
        if request.is_left_behind() {
            self.left_behind.1 = self.left_behind.1 - before + values;
        }
        self.bytes = self.bytes - before + values;
        if let Some(link) = self.links.get_mut(link) {
            link.account.requests = link.account.requests - before + values;
        }
        if values < before {
            self.parked.freed(link, true);
        }
        Ok(())
    }

    /// Whether an answer of so many bytes may wait to be sent. Its request, which took `freed`, has just ended.
    pub(super) fn admit_answer(&mut self, id: LinkId, bytes: usize, freed: usize) -> Result<(), Status> {
        // Most peers read: nothing waits.
        if self.links[id].accounted_bytes() == 0 && bytes <= UNCOUNTED {
            return Ok(());
        }
        // What takes no more than the request did, or than a refusal, is no more in all; and the handler has run.
        let checked =
            if bytes <= freed.max(REFUSAL) { self.check_own_bytes(id, bytes, 0).map(drop) } else { self.check_bytes(id, bytes) };
        checked.map_err(|full| {
            let reason = full.to_string();
            tell(&mut self.outputs, &mut self.limited.answers, "answers give way to refusals, as nobody reads them", &reason);
            Status::Busy(reason)
        })
    }

    /// Whether one more pull or push of a peer is taken.
    pub(super) fn admit_transfer(&mut self, id: LinkId) -> Result<(), Status> {
        let limit = self.config.limits.peer_transfers;
        let own = self.links[id].transfers();
        let admitted = if own >= limit {
            Err(format!("{own} transfers of this peer are in progress, and the limit is {limit}"))
        } else {
            self.check_bytes(id, TRANSFER_COST).map_err(|full| full.to_string())
        };
        admitted.map_err(|reason| {
            tell(&mut self.outputs, &mut self.limited.transfers, "transfers are refused", &reason);
            Status::Busy(reason)
        })
    }

    /// Whether one more region may be exposed.
    pub(crate) fn admit_exposure(&mut self) -> Result<(), Failure> {
        let (there, limit) = (self.exposures.len(), self.config.limits.exposures);
        if there < limit {
            return Ok(());
        }
        let reason = format!("{there} regions are exposed, and the limit is {limit}");
        tell(&mut self.outputs, &mut self.limited.exposures, "exposing is refused", &reason);
        Err(Failure::Refused(Status::Busy(reason)))
    }

    /// What a link holds has become more, or less.
    pub(super) fn recount(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        let weight = link.accounted_bytes();
        let counted = if weight > UNCOUNTED { weight } else { 0 };
        self.bytes = self.bytes - std::mem::replace(&mut link.account.counted, counted) + counted;
    }

    /// A message of a peer has been dealt with: an error when it has made this engine hold too much that can't be refused.
    pub(super) fn check_unrefusable_bytes(&mut self, id: LinkId) -> Result<(), Failure> {
        let Some(link) = self.links.get(id) else { return Ok(()) };
        if !link.counts() {
            return Ok(());
        }
        self.recount(id);
        let burden = self.links[id].unrefusable_bytes();
        let (Account { control: said_back, .. }, limits) = (&self.links[id].account, &self.config.limits);
        let reason = if *said_back > MAX_CONTROL_BYTES {
            format!("it does not read the {said_back} bytes that are said back to it")
        } else if burden > UNCOUNTED && self.exceeds(self.bytes, burden, limits.bytes) {
            format!("{} bytes are in flight for all peers, and {burden} of them it would not be refused", self.bytes)
        } else {
            return Ok(());
        };
        tell(&mut self.outputs, &mut self.limited.ended, "a connection is ended", &reason);
        Err(broken(reason))
    }

    /// So many bytes of a link begin a frame whose rest has not come. Who stalls there is watched.
    pub(super) fn keep_partial(&mut self, id: LinkId, len: usize, now: Instant) -> Result<(), Failure> {
        let Some(link) = self.links.get_mut(id) else { return Ok(()) };
        link.account.partial = len;
        self.watch(id, now);
        self.recount(id);
        self.check_unrefusable_bytes(id)
    }

    /// Somebody has dialled. There may be too many who have, and say nothing: the oldest of them goes.
    pub(super) fn count_handshake(&mut self, id: LinkId) {
        if self.handshakes.len() >= self.config.limits.handshakes.max(1)
            && let Some((_, oldest)) = self.handshakes.pop_first()
        {
            let reason = format!("{} connections have not greeted", self.handshakes.len() + 1);
            tell(&mut self.outputs, &mut self.limited.handshakes, "a connection is dropped that has not greeted", &reason);
            self.close(oldest, Failure::Unreachable { reason, source: None });
        }
        self.handshakes.insert((self.links[id].due, id));
    }

    /// Whether there are enough connections without the one that says this hello. An engine that proves that it connects again
    /// is not one more.
    pub(super) fn is_one_too_many(&mut self, hello: &Hello) -> bool {
        let limit = self.config.limits.connections;
        let (calls, bytes) = self.left_behind;
        if calls > self.config.limits.requests || bytes > self.config.limits.bytes {
            let reason = format!("{calls} one-way calls of {bytes} bytes wait for handlers, of peers that have gone");
            tell(&mut self.outputs, &mut self.limited.connections, "a connection is turned away", &reason);
            return true;
        }
        let replaces = || self.proved(hello).is_some_and(|peer| self.peers[peer].link.is_some());
        if self.accepted < limit || replaces() {
            return false;
        }
        let reason = format!("there are {} connections, and the limit is {limit}", self.accepted);
        tell(&mut self.outputs, &mut self.limited.connections, "a connection is turned away", &reason);
        true
    }

    /// What is wrong with the sums, if anything.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn miscounted(&self) -> Option<String> {
        let requests: usize = self.requests.values().map(|request| request.cost).sum();
        let counted: usize = self.links.values().map(|link| link.account.counted).sum();
        let accepted = self.links.values().filter(|link| link.is_open() && !link.dialled).count();
        let extra =
            self.links.values().map(|link| link.window.extra()).fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1));
        let left: Vec<usize> =
            self.requests.values().filter(|request| request.is_left_behind()).map(|request| request.cost).collect();
        let parked: usize = self.requests.values().filter(|request| request.parked.is_some()).map(|request| request.cost).sum();
        let sums = (requests + counted, accepted, extra, (left.len(), left.iter().sum()), parked);
        let told = (self.bytes, self.accepted, self.granted, self.left_behind, self.parked.bytes(LinkId::default()).1);
        (sums != told).then(|| {
            format!("bytes in flight, connections, credit, what is left behind, and what waits: {told:?} instead of {sums:?}")
        })
    }
}
