//! Holds peers to the limits on what they can make this engine hold.
//!
//! Requests, transfers and answers beyond a limit are refused with `Busy`. What can't be refused, since no caller waits for a
//! reply (control messages to a peer that does not read, incomplete frames, declarations), ends the connection. This engine
//! never stops reading: two engines that stop reading each other would deadlock, and cancels, answers and pongs arrive the same
//! way.

use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

use super::limits::{MAX_CONTROL_BYTES, PeerLimits, TRANSFER_COST, UNCOUNTED, VALUES_AHEAD, VALUES_COUNT, VALUES_PART_AHEAD};
use super::link::Account;
use super::wire::Hello;
use super::{Env, Failure, LinkId, Log, Output, Proto, RequestId, Status, broken};

/// Bytes of a refusal with its reason.
const REFUSAL: usize = 100;

/// Why no more bytes are held. Calls that wait for memory ask for it often, so the words are made only where they are told.
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

/// Counts a refusal, and logs it at powers of two of the count, so that a refused peer can't flood the log. The line is an
/// output, as the log's subscriber is user code.
fn count_and_log<E: Env>(outputs: &mut VecDeque<Output<E>>, count: &mut u64, what: &'static str, reason: &str) {
    *count += 1;
    if count.is_power_of_two() {
        outputs.push_back(Output::Log(Log::Limit { what, reason: reason.to_owned(), count: *count }));
    }
}

impl<E: Env> Proto<E> {
    /// How often limits were reached so far.
    #[cfg(test)]
    pub(crate) fn limited(&self) -> super::limits::LimitCounts {
        self.limited
    }

    /// The share of one peer in a total limit.
    fn share(&self, of: usize) -> usize {
        of / self.links.len().max(1)
    }

    /// Whether `all` exceeds the limit so far that a peer which has `own` of it gets no more.
    fn exceeds(&self, all: usize, own: usize, limit: usize) -> bool {
        all > limit && (own > self.share(limit) || all > limit.saturating_mul(2))
    }

    /// The bytes held for a peer and `more`, without what is set `aside`. An error if one peer may not have that many.
    fn check_own_bytes(&self, id: LinkId, more: usize, aside: usize) -> Result<usize, Full> {
        let (link, limit) = (&self.links[id], self.config.limits.peer_bytes);
        let own = link.account.requests + link.accounted_bytes() - aside;
        let with_this = own.saturating_add(more);
        if with_this > limit {
            return Err(Full { bytes: own, limit, of_all: false });
        }
        Ok(with_this)
    }

    /// An error if no more bytes may be held for a peer.
    fn check_bytes(&self, id: LinkId, more: usize) -> Result<(), Full> {
        self.check_bytes_without(id, more, (0, 0))
    }

    /// As `check_bytes`, without what is set aside of this peer and in total.
    fn check_bytes_without(&self, id: LinkId, more: usize, (own, all): (usize, usize)) -> Result<(), Full> {
        let with_this = self.check_own_bytes(id, more, own)?;
        let (all, limit) = (self.bytes - all, self.config.limits.bytes);
        if self.exceeds(all.saturating_add(more), with_this, limit) {
            return Err(Full { bytes: all, limit, of_all: true });
        }
        Ok(())
    }

    /// Bytes that a request and its values could take if the peer held nothing else but its declarations.
    pub(super) fn most_alone(&self, link: LinkId) -> usize {
        let PeerLimits { peer_bytes, bytes, .. } = self.config.limits;
        peer_bytes.min(bytes).saturating_sub(self.links.get(link).map_or(0, |link| link.declarations.bytes))
    }

    /// Whether one more request of so many bytes is accepted.
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
            count_and_log(&mut self.outputs, &mut self.limited.requests, "requests are refused", &reason);
            Status::Busy(reason)
        })
    }

    /// How much memory the values of a request may take, at least `memory`; it counts from now on. `Busy` if another attempt
    /// may succeed; a one-way call makes one by itself, see [`Proto::park`].
    pub(crate) fn admit_values(&mut self, id: RequestId, memory: usize) -> Result<usize, Status> {
        let Some(request) = self.requests.get(id) else { return Ok(usize::MAX) };
        let (link, size, one_way) = (request.link, request.cost - request.values, request.one_way.is_some());
        // Memory is reserved for a call that has waited for it.
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
        // Other things, such as bulks, may take some of the limit for long: a caller must not retry for ever.
        let may_fit = alone <= self.most_alone(link).saturating_sub(limit / 16);
        if one_way && may_fit {
            return Err(Status::Busy(reason));
        }
        count_and_log(&mut self.outputs, &mut self.limited.requests, "requests are refused", &reason);
        if may_fit {
            return Err(Status::Busy(reason));
        }
        let reason = format!(
            "the values in {size} bytes would take {memory} bytes of memory and more, of which one in {VALUES_COUNT} counts: \
             with the message that is more than the limit of {limit} bytes in flight for one peer"
        );
        Err(Status::Decode(reason))
    }

    /// Accounts for the memory that the values of a request take while it is handled. An error if that is too much.
    pub(crate) fn count_values(&mut self, id: RequestId, memory: usize) -> Result<(), Full> {
        let Some(request) = self.requests.get(id) else { return Ok(()) };
        let (link, before, values) = (request.link, request.values, memory / VALUES_COUNT);
        let more = values.saturating_sub(before);
        // Calls that wait must not keep each other waiting.
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
        // Most peers read, and nothing waits.
        if self.links[id].accounted_bytes() == 0 && bytes <= UNCOUNTED {
            return Ok(());
        }
        // An answer no larger than its request, or than a refusal, does not increase the total; and the handler has run.
        let checked =
            if bytes <= freed.max(REFUSAL) { self.check_own_bytes(id, bytes, 0).map(drop) } else { self.check_bytes(id, bytes) };
        checked.map_err(|full| {
            let reason = full.to_string();
            count_and_log(
                &mut self.outputs,
                &mut self.limited.answers,
                "answers are replaced by refusals, as the peer does not read",
                &reason,
            );
            Status::Busy(reason)
        })
    }

    /// Whether one more pull or push of a peer is accepted.
    pub(super) fn admit_transfer(&mut self, id: LinkId) -> Result<(), Status> {
        let limit = self.config.limits.peer_transfers;
        let own = self.links[id].transfers();
        let admitted = if own >= limit {
            Err(format!("{own} transfers of this peer are in progress, and the limit is {limit}"))
        } else {
            self.check_bytes(id, TRANSFER_COST).map_err(|full| full.to_string())
        };
        admitted.map_err(|reason| {
            count_and_log(&mut self.outputs, &mut self.limited.transfers, "transfers are refused", &reason);
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
        count_and_log(&mut self.outputs, &mut self.limited.exposures, "exposures are refused", &reason);
        Err(Failure::Refused(Status::Busy(reason)))
    }

    /// Updates the total after a link's accounted bytes have changed.
    pub(super) fn recount(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        let accounted = link.accounted_bytes();
        let counted = if accounted > UNCOUNTED { accounted } else { 0 };
        self.bytes = self.bytes - std::mem::replace(&mut link.account.counted, counted) + counted;
    }

    /// Called after each message of a peer: an error if it makes this engine hold too much that can't be refused.
    pub(super) fn check_unrefusable_bytes(&mut self, id: LinkId) -> Result<(), Failure> {
        let Some(link) = self.links.get(id) else { return Ok(()) };
        if !link.counts() {
            return Ok(());
        }
        self.recount(id);
        let unrefusable = self.links[id].unrefusable_bytes();
        let (Account { control, .. }, limits) = (&self.links[id].account, &self.config.limits);
        let reason = if *control > MAX_CONTROL_BYTES {
            format!("it does not read the {control} bytes of replies that wait for it")
        } else if unrefusable > UNCOUNTED && self.exceeds(self.bytes, unrefusable, limits.bytes) {
            format!(
                "{} bytes are in flight for all peers, and {unrefusable} of them, which it caused, can't be refused",
                self.bytes
            )
        } else {
            return Ok(());
        };
        count_and_log(&mut self.outputs, &mut self.limited.ended, "a connection is ended", &reason);
        Err(broken(reason))
    }

    /// `len` bytes of an incomplete frame wait. The peer is watched, in case it stalls.
    pub(super) fn keep_partial(&mut self, id: LinkId, len: usize, now: Instant) -> Result<(), Failure> {
        let Some(link) = self.links.get_mut(id) else { return Ok(()) };
        link.account.partial = len;
        self.watch(id, now);
        self.recount(id);
        self.check_unrefusable_bytes(id)
    }

    /// A connection was accepted, and has to send its hello. If there are too many of those, the oldest is dropped.
    pub(super) fn count_handshake(&mut self, id: LinkId) {
        if self.handshakes.len() >= self.config.limits.handshakes.max(1)
            && let Some((_, oldest)) = self.handshakes.pop_first()
        {
            let reason = format!("{} connections have not sent their hello", self.handshakes.len() + 1);
            count_and_log(&mut self.outputs, &mut self.limited.handshakes, "a connection is dropped before its hello", &reason);
            self.close(oldest, Failure::Unreachable { reason, source: None });
        }
        self.handshakes.insert((self.links[id].due, id));
    }

    /// Whether the limits refuse the connection that sent this hello. An engine that proves that it reconnects replaces its old
    /// connection.
    pub(super) fn is_one_too_many(&mut self, hello: &Hello) -> bool {
        let limit = self.config.limits.connections;
        let (calls, bytes) = self.left_behind;
        if calls > self.config.limits.requests || bytes > self.config.limits.bytes {
            let reason = format!("{calls} one-way calls ({bytes} bytes) of peers that are gone wait for handlers");
            count_and_log(&mut self.outputs, &mut self.limited.connections, "a connection is refused", &reason);
            return true;
        }
        let replaces = || self.proved(hello).is_some_and(|peer| self.peers[peer].link.is_some());
        if self.accepted < limit || replaces() {
            return false;
        }
        let reason = format!("there are {} connections, and the limit is {limit}", self.accepted);
        count_and_log(&mut self.outputs, &mut self.limited.connections, "a connection is refused", &reason);
        true
    }

    /// What differs between the running sums and a recount, if anything.
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
        let running = (self.bytes, self.accepted, self.granted, self.left_behind, self.parked.bytes(LinkId::default()).1);
        (sums != running).then(|| {
            format!("bytes, connections, credit, calls left behind, and parked bytes are {running:?} instead of {sums:?}")
        })
    }
}
