//! Holds peers to the limits on what they can make this engine hold.
//!
//! Requests, transfers and answers beyond a limit are refused with `Busy`. What can't be refused, since no caller waits for a
//! reply (control messages to a peer that does not read, incomplete frames, declarations), ends the connection. This engine
//! never stops reading: two engines that stop reading each other would deadlock, and cancels, answers and pongs arrive the same
//! way.
//!
//! One-way calls wait, undecoded, until there is memory for their values: they are *parked*. Their callers take them as sent, so
//! a lack of memory that passes does not refuse them. A call that waits counts with its message. It is handled again when there
//! is room for the memory that it has requested and a quarter more, not counting the messages of others that wait: so they can't
//! keep each other waiting, and each is decoded a few times at most.
//!
//! ```text
//!   handed out ──no memory──▶ waits ──there is room──▶ handed out again, with the memory reserved
//!                               └──this engine ends──▶ lost
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::wire::{Hello, Status};
use super::{EngineStage, Env, Failure, Incoming, LinkId, Log, Output, Placed, Proto, RequestId, broken};

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

/// How often the limits of an engine were reached, as [`Stats`](crate::Stats) has it. [`EngineBuilder`](crate::EngineBuilder)
/// has the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LimitCounts {
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

/// Bytes that are held for a peer.
#[derive(Default)]
pub(super) struct Account {
    /// Of its requests, until they are answered.
    pub requests: usize,
    /// Of answers, and of other replies to the peer, among the queued frames.
    pub answers: usize,
    pub control: usize,
    /// The same, handed out and not yet reported as sent.
    pub sending: usize,
    /// Of an incomplete frame.
    pub partial: usize,
    /// How much of all this, without the requests, counts in total.
    pub counted: usize,
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
const VALUES_AHEAD: usize = 4 << 10;
const VALUES_PART_AHEAD: usize = 4;
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
    pub(crate) fn limited(&self) -> LimitCounts {
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
    fn most_alone(&self, link: LinkId) -> usize {
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
        let own = self.transfers_of_peer(id);
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
    /// connection. There may be as many lanes as connections.
    pub(super) fn is_one_too_many(&mut self, hello: &Hello, lane: bool) -> bool {
        let limit = self.config.limits.connections;
        let (calls, bytes) = self.left_behind;
        if calls > self.config.limits.requests || bytes > self.config.limits.bytes {
            let reason = format!("{calls} one-way calls ({bytes} bytes) of peers that are gone wait for handlers");
            count_and_log(&mut self.outputs, &mut self.limited.connections, "a connection is refused", &reason);
            return true;
        }
        let (count, what) = if lane { (self.accepted_lanes, "lanes") } else { (self.accepted, "connections") };
        let replaces = || !lane && self.proved(hello).is_some_and(|peer| self.peers[peer].links().next().is_some());
        if count < limit || replaces() {
            return false;
        }
        let reason = format!("there are {count} {what}, and the limit is {limit}");
        count_and_log(&mut self.outputs, &mut self.limited.connections, "a connection is refused", &reason);
        true
    }

    /// What differs between the running sums and a recount, if anything.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn miscounted(&self) -> Option<String> {
        if let Some((answers, control, queued)) = self.links.values().find_map(|link| link.overcounted_replies()) {
            return Some(format!("{answers} bytes of answers and {control} of other replies are among {queued} queued bytes"));
        }
        let requests: usize = self.requests.values().map(|request| request.cost).sum();
        let counted: usize = self.links.values().map(|link| link.account.counted).sum();
        let accepted = self.links.values().filter(|link| link.is_open() && !link.dialled);
        let (lanes, accepted): (Vec<_>, Vec<_>) = accepted.partition(|link| link.main.is_some());
        let extra =
            self.links.values().map(|link| link.window.extra()).fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1));
        let left: Vec<usize> =
            self.requests.values().filter(|request| request.is_left_behind()).map(|request| request.cost).collect();
        let parked: usize = self.requests.values().filter(|request| request.parked.is_some()).map(|request| request.cost).sum();
        let sums = (requests + counted, (accepted.len(), lanes.len()), extra, (left.len(), left.iter().sum()), parked);
        let running = (
            self.bytes,
            (self.accepted, self.accepted_lanes),
            self.granted,
            self.left_behind,
            self.parked.bytes(LinkId::default()).1,
        );
        (sums != running).then(|| {
            format!("bytes, connections, credit, calls left behind, and parked bytes are {running:?} instead of {sums:?}")
        })
    }
}

/// The calls that wait, in order of arrival: by link, and under the null link those of peers that are gone.
#[derive(Default)]
pub(super) struct Parked {
    queues: HashMap<LinkId, ParkedQueue>,
    /// The links that have calls here, or had; those that are gone, too, until their turns come. They take turns.
    turns: VecDeque<LinkId>,
    /// Those of them that have got memory back: they need not wait for their turns.
    freed: Vec<LinkId>,
    /// Values have given memory back: there may be room for any call.
    is_much_free: bool,
    /// Bytes of all calls that wait.
    bytes: usize,
}

#[derive(Default)]
struct ParkedQueue {
    requests: VecDeque<RequestId>,
    bytes: usize,
    /// It is in `freed`.
    is_freed: bool,
}

/// Links that one step serves beside those that have got memory back, and calls of each that it hands out. These cause a
/// further step when they end, and links that have requests are watched, which causes steps too.
const LINKS_AT_A_TIME: usize = 64;
const CALLS_AT_A_TIME: usize = 16;
/// Links that one step serves in vain when no values have given memory back: short calls of other peers must not take longer
/// for each link at which calls wait.
const LINKS_IN_VAIN: usize = 4;
/// One part in so many of the limit may be taken by what the peer itself releases: bulks and answers.
const PART_TAKEN: usize = 32;

impl Parked {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    #[cfg(test)]
    pub(super) fn turns(&self) -> usize {
        self.turns.len()
    }

    /// Bytes of the calls that wait, of this link and in total.
    pub(super) fn bytes(&self, link: LinkId) -> (usize, usize) {
        (self.queues.get(&link).map_or(0, |queue| queue.bytes), self.bytes)
    }

    pub(super) fn has(&self, link: LinkId) -> bool {
        self.queues.get(&link).is_some_and(|queue| !queue.requests.is_empty())
    }

    /// Memory that was taken by a request of a connection is free: the next that waits there may have it. If it was taken by
    /// values, it may be enough for those of other connections, too.
    #[inline]
    pub(super) fn freed(&mut self, link: LinkId, values: bool) {
        if !self.is_empty() {
            self.note_freed(link, values);
        }
    }

    #[cold]
    fn note_freed(&mut self, link: LinkId, values: bool) {
        self.is_much_free |= values;
        if let Some(queue) = self.queues.get_mut(&link)
            && !std::mem::replace(&mut queue.is_freed, true)
        {
            self.freed.push(link);
        }
    }

    pub(super) fn add(&mut self, link: LinkId, id: RequestId, bytes: usize, first: bool) {
        let queue = self.queues.entry(link).or_insert_with(|| {
            self.turns.push_back(link);
            ParkedQueue::default()
        });
        if first {
            queue.requests.push_front(id);
        } else {
            queue.requests.push_back(id);
        }
        queue.bytes += bytes;
        self.bytes += bytes;
    }

    /// Removes the first call of a link; `cost` gives its bytes.
    fn take(&mut self, link: LinkId, cost: impl FnOnce(RequestId) -> usize) -> Option<RequestId> {
        let queue = self.queues.get_mut(&link)?;
        let id = queue.requests.pop_front()?;
        let bytes = cost(id);
        queue.bytes -= bytes;
        self.bytes -= bytes;
        Some(id)
    }

    /// A link is gone. It keeps its place among the turns, where it is skipped: to search for it would take longer with each
    /// link that has calls here.
    pub(super) fn orphan(&mut self, link: LinkId) {
        let Some(mut gone) = self.queues.remove(&link) else { return };
        let orphans = self.queues.entry(LinkId::default()).or_insert_with(|| {
            self.turns.push_back(LinkId::default());
            ParkedQueue::default()
        });
        orphans.requests.append(&mut gone.requests);
        orphans.bytes += gone.bytes;
    }
}

impl<E: Env> Proto<E> {
    /// The link under which a request waits.
    fn queue_of(&self, link: LinkId) -> LinkId {
        if self.links.contains_key(link) { link } else { LinkId::default() }
    }

    /// Whether a request that is handed out for the first time has to wait behind parked ones.
    fn is_behind_parked(&self, id: RequestId) -> bool {
        let request = self.requests.get(id).filter(|request| request.one_way.is_some() && request.wants == 0);
        request.is_some_and(|request| self.parked.has(self.queue_of(request.link)))
    }

    /// Parks a one-way call whose values would have taken so much memory and more. It is handed out again when there is room
    /// for them.
    pub(crate) fn park(&mut self, incoming: Placed<Incoming<E>>, memory: usize) {
        let id = incoming.request;
        let is_over = self.stage == EngineStage::Closed;
        let Some(request) = self.requests.get_mut(id).filter(|_| !is_over) else { return self.lose(&incoming) };
        let again = request.wants > 0;
        request.wants = memory.saturating_add(memory / VALUES_PART_AHEAD).saturating_add(VALUES_AHEAD);
        request.parked = Some(incoming);
        let link = request.link;
        // A smaller amount is never refused.
        let _ = self.count_values(id, 0);
        let (link, cost) = (self.queue_of(link), self.requests[id].cost);
        self.parked.add(link, id, cost, again);
        // There may be room meanwhile.
        self.parked.freed(link, false);
    }

    /// Hands out the calls that there is room for.
    pub(super) fn resume_parked(&mut self) {
        for link in std::mem::take(&mut self.parked.freed) {
            if let Some(queue) = self.parked.queues.get_mut(&link) {
                queue.is_freed = false;
                self.resume_of(link);
            }
        }
        let most_in_vain = if std::mem::take(&mut self.parked.is_much_free) { LINKS_AT_A_TIME } else { LINKS_IN_VAIN };
        let mut in_vain = 0;
        for _ in 0..self.parked.turns.len().min(LINKS_AT_A_TIME) {
            let Some(link) = self.parked.turns.pop_front() else { return };
            if !self.parked.has(link) {
                self.parked.queues.remove(&link);
                continue;
            }
            let any = self.resume_of(link);
            if self.parked.has(link) {
                self.parked.turns.push_back(link);
            } else {
                self.parked.queues.remove(&link);
            }
            in_vain += usize::from(!any);
            if in_vain == most_in_vain {
                return;
            }
        }
    }

    /// Hands out what there is room for of one connection. False if there was none.
    fn resume_of(&mut self, link: LinkId) -> bool {
        for count in 0..CALLS_AT_A_TIME {
            let requests = &self.requests;
            let Some(id) = self.parked.take(link, |id| requests[id].cost) else { return count > 0 };
            if !self.reserve(id) {
                let cost = self.requests[id].cost;
                self.parked.add(link, id, cost, true);
                return count > 0;
            }
            if let Some(incoming) = self.requests[id].parked.take() {
                self.outputs.push_back(Output::Request(incoming));
            }
        }
        true
    }

    /// Reserves memory for the values of a request, if there is as much as it wants, or as much as it could ever get.
    fn reserve(&mut self, id: RequestId) -> bool {
        let request = &self.requests[id];
        let most = self.most_alone(request.link);
        let most = (most - most / PART_TAKEN).saturating_sub(request.cost).saturating_mul(VALUES_COUNT);
        let wanted = request.wants.min(most);
        self.count_values(id, wanted).is_ok()
    }

    /// This engine ends: the calls that wait are lost.
    pub(super) fn lose_parked(&mut self) {
        for (_, queue) in std::mem::take(&mut self.parked).queues {
            for id in queue.requests {
                if let Some(incoming) = self.requests.get_mut(id).and_then(|request| request.parked.take()) {
                    self.lose(&incoming);
                }
            }
        }
    }

    fn lose(&mut self, incoming: &Incoming<E>) {
        self.release(incoming.link, incoming.leases);
        // A one-way call has no caller that waits for the answer.
        let _ = self.respond(incoming.request, Err(Status::Finalizing));
    }
}
