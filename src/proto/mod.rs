//! The protocol between engines, as a state machine without any I/O of its own.
//!
//! The caller reports what happened (`handle_*`, `consume`), what the user wants (`call`, `respond`, `transfer`, `expose`, …),
//! and what time it is. After each of these it calls [`Proto::poll`] and executes each [`Output`]. A few frames for a link whose
//! [`Carrier`] takes them at once need no output: `poll` hands them over. [`Proto`] holds every table: peers, links, calls,
//! requests, transfers, exposed memory; and it checks each claim of a peer. It owns no socket, clock, thread or lock, and it never
//! reads a byte of the memory that it moves.
//!
//! ```text
//!          consume, handle_accepted/connected/payload_done/sent/rma_done/closed/timeout
//!   transport ─────────────────────────────────────────────────────────────▶ ┌───────┐
//!                                                                             │ Proto │ ◀── call, respond, transfer, expose …
//!   transport, waiters, handlers ◀────────────────────────────────── poll() ─ └───────┘
//! ```

mod admission;
mod calls;
mod exposures;
mod handshake;
mod idle;
mod keys;
mod lanes;
mod link;
mod log;
mod lost_bodies;
mod one_way;
mod peers;
mod policy;
mod refusals;
mod streams;
mod summary;
mod tables;
#[cfg(any(all(test, not(few_tests)), fuzzing))]
mod tests;
mod timers;
mod traffic;
mod transfers;
pub(crate) mod wire;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use slotmap::SlotMap;
use smallvec::SmallVec;

use crate::address::Interfaces;
pub(crate) use crate::payload::{Consumed, Injected, PayloadStatus, ReceiveTarget, RemoteKeys, TrailingList};
use crate::{Address, TraceContext, copy};
pub use admission::LimitCounts;
pub(crate) use admission::{PeerLimits, VALUES_COUNT};
pub(crate) use calls::{CallSpec, Question, Rejected, Reply};
pub(crate) use idle::MIN_IDLE;
pub(crate) use keys::PreSharedKey;
pub(crate) use lanes::{MAX_LANES, WORTH_A_LANE};
pub(crate) use link::MayWait;
pub(crate) use log::Log;
pub(crate) use peers::{MAX_ADDRESSES, PeerTag};
pub(crate) use policy::{AccessPolicy, Mode};
pub use refusals::Refusals;
pub(crate) use streams::OutgoingBody;
pub use summary::{CallDump, ConnectionDump, PeerStats, RequestDump, RequestState, TransferDirection, TransferDump};
pub(crate) use tables::Declaration;
#[cfg(any(all(test, not(few_tests)), fuzzing))]
pub(crate) use tests::fuzzing;
pub(crate) use traffic::PeerCalls;
pub use traffic::{Traffic, TransportStats};
pub(crate) use transfers::Remote;
pub(crate) use wire::{LeaseRange, Status};

slotmap::new_key_type! {
    /// A connection.
    pub(crate) struct LinkId;
    /// An engine that this one knows of.
    pub(crate) struct PeerId;
    /// A call that this engine makes.
    pub(crate) struct CallId;
    /// A call that a peer makes to this engine.
    pub(crate) struct RequestId;
    /// A transfer that this engine started.
    pub(crate) struct TransferId;
}

/// On so many links frames are sent at once in one step: this bounds the time for which it locks the protocol.
const MAX_INJECTED_LINKS: usize = 8;

/// The number that stands for a key on the wire.
fn wire_id(key: impl slotmap::Key) -> u64 {
    key.data().as_ffi()
}

/// A value in a box, which is moved at no cost, and whose memory can be used again.
pub(crate) struct Placed<T>(Box<Option<T>>);

impl<T> Placed<T> {
    pub(crate) fn new(mut place: Box<Option<T>>, value: T) -> Placed<T> {
        *place = Some(value);
        Placed(place)
    }

    /// Returns the value and its place.
    pub(crate) fn take(mut self) -> (T, Box<Option<T>>) {
        (self.0.take().expect("a value is taken once"), self.0)
    }
}

impl<T> Deref for Placed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        (*self.0).as_ref().expect("a value is in its place")
    }
}

impl<T> DerefMut for Placed<T> {
    fn deref_mut(&mut self) -> &mut T {
        (*self.0).as_mut().expect("a value is in its place")
    }
}

/// The types that the protocol handles without reading them.
pub(crate) trait Env: Sized {
    type Memory: Memory;
    /// Learns how a call or a transfer ended.
    type Waiter: Clone;
    /// Kept as long as a peer holds a bulk.
    type Lease: Lease;
    /// What the user of the protocol keeps beside a peer's declaration.
    type Verdicts: Default;
    /// Carries the bytes of a link.
    type Carrier: Carrier;
    /// New memory for the body of a large message, with the declaration of its values, and what it ends with, as the peer says. The body
    /// is handed out once chunks that follow each other have filled it.
    fn body_memory(len: usize, declaration: Option<&Declaration<Self>>, list: Option<TrailingList>) -> Self::Memory;
    /// Memory for a request, and for an answer: used again, where that is worth it.
    fn request_place() -> Box<Option<Incoming<Self>>> {
        Box::default()
    }
    fn answer_place() -> Box<Option<Answer<Self>>> {
        Box::default()
    }
}

pub(crate) trait Carrier: Clone {
    /// Whether `inject` ever sends anything.
    fn injects(&self) -> bool;
    /// Sends a few bytes if that takes neither a wait nor a system call.
    fn inject(&self, bytes: &[u8]) -> Injected;
    /// Whether short payloads that follow each other leave together.
    fn gathers(&self) -> bool;
    /// Whether each send takes a system call.
    fn takes_system_calls(&self) -> bool;
}

/// A range of memory; clones are the same bytes.
pub(crate) trait Memory: Clone {
    fn len(&self) -> usize;
    /// `None` when the part is not within the memory.
    fn part(&self, offset: usize, len: usize) -> Option<Self>;
    /// The same memory, for one operation, until `end`.
    fn for_one_operation(&self) -> Self;
    /// As `for_one_operation`, for memory that its owner uses again as soon as that is over, without waiting for transports.
    fn that_may_lapse(&self) -> Self {
        self.for_one_operation()
    }
    /// The operation is over: no byte of this memory, or of its parts, may be read or written any more.
    fn end(&self);
}

pub(crate) trait Lease {
    /// The memory that the lease is for.
    fn token(&self) -> u128;
}

/// The settings of a [`Proto`].
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Largest message sent or taken, in bytes.
    pub max_message: usize,
    /// A peer that gives no sign of life for this long, while something is expected of it, is disconnected.
    pub peer_timeout: Duration,
    /// Time limit for connecting and the handshake.
    pub connect: Duration,
    pub limits: PeerLimits,
    pub remote_shutdown: bool,
    /// Only engines that prove that they have this key are accepted.
    pub key: Option<PreSharedKey>,
    /// Whether bodies and payloads have checksums, too.
    pub checksums: bool,
    /// Connections that this engine has dialled are closed when they are not used for this long.
    pub idle_timeout: Option<Duration>,
    /// The user of the protocol may refuse to dial addresses that peers have named.
    pub filters_dials: bool,
    /// How many lanes this engine dials for a connection.
    pub lanes: usize,
    /// The length of a transfer that has one dialled.
    pub worth_a_lane: u64,
}

/// Bodies up to this length, as those of most small calls are, need no allocation.
const INLINE: usize = 16;

/// The body of a message.
#[derive(Debug)]
pub(crate) enum Body<M> {
    Small(SmallVec<[u8; INLINE]>),
    Large(M),
}

impl<M: Memory> Body<M> {
    fn empty() -> Body<M> {
        Body::Small(SmallVec::new())
    }

    /// Replaces an empty body by one that came within a frame.
    fn fill(&mut self, bytes: &[u8]) {
        if bytes.len() > INLINE {
            let mut long = Vec::new();
            copy::append(bytes, &mut long);
            *self = Body::Small(SmallVec::from_vec(long));
        } else if let Body::Small(small) = self {
            small.extend_from_slice(bytes);
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Body::Small(bytes) => bytes.len(),
            Body::Large(memory) => memory.len(),
        }
    }
}

/// A call of a peer, ready for its handler.
pub(crate) struct Incoming<E: Env> {
    pub request: RequestId,
    pub link: LinkId,
    pub peer: Arc<PeerTag>,
    pub provider: u16,
    /// The procedure, and the type of the arguments.
    pub declaration: Arc<Declaration<E>>,
    pub deadline: Option<Instant>,
    pub one_way: bool,
    /// It was handed out before, and then parked to wait for memory.
    pub again: bool,
    /// For the user of the protocol: when it was queued for its handler.
    pub stamp: u64,
    /// The trace that it belongs to.
    pub trace: Option<Arc<TraceContext>>,
    pub body: Body<E::Memory>,
    pub leases: LeaseRange,
}

/// The answer to a call, or the body of an incoming one.
pub(crate) struct Answer<E: Env> {
    pub link: LinkId,
    pub body: Body<E::Memory>,
    /// The declaration of the result's type, if there is one.
    pub declaration: Option<Arc<Declaration<E>>>,
    pub leases: LeaseRange,
}

/// Why an operation failed; the user of the protocol adds what the operation was.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    Timeout,
    Cancelled,
    Unreachable {
        reason: String,
        source: Option<Arc<io::Error>>,
    },
    Disconnected {
        reason: String,
    },
    PeerRestarted,
    TooLarge {
        size: u64,
        limit: u64,
    },
    Version {
        theirs: (u16, u16),
    },
    /// One of the two sides refuses the other.
    Unauthorized {
        reason: String,
    },
    /// The data was corrupted in transit.
    Checksum,
    Finalized,
    Revoked,
    /// The other side refused, for this reason.
    Refused(Status),
}

/// The peer has broken the protocol.
fn broken(reason: String) -> Failure {
    Failure::Disconnected { reason: format!("it broke the protocol: {reason}") }
}

/// What has to be executed now.
pub(crate) enum Output<E: Env> {
    /// Dial, and report `handle_connected` or `handle_closed`. A lane is dialled by the transport of its address only.
    Connect {
        link: LinkId,
        address: Address,
        lane: bool,
    },
    /// Send the bytes and the payload behind them, then report `handle_sent`. If the payload was exported to the peer,
    /// `handle_returned` follows. `more`: with that report the next payload is sent, unless its stream has ended meanwhile.
    Transmit {
        link: LinkId,
        carrier: Option<E::Carrier>,
        bytes: Vec<u8>,
        payload: Option<E::Memory>,
        more: bool,
    },
    /// Wake the peer, which sleeps: something was sent to it at once.
    WakePeer {
        carrier: E::Carrier,
    },
    /// Have a device transfer all of `memory` from or to the peer's memory, at `offset` from where the keys begin (RMA); then
    /// report `handle_rma_done`.
    StartRma {
        link: LinkId,
        /// Identifies the operation to the transport.
        transfer: u64,
        pull: bool,
        memory: E::Memory,
        keys: RemoteKeys,
        offset: u64,
    },
    /// Cancel a device's transfer; nothing is reported for it.
    CancelRma {
        link: LinkId,
        transfer: u64,
    },
    /// From now on payloads on the link have checksums.
    CoverPayloads {
        link: LinkId,
    },
    /// Find out how many of the sent bytes the peer's system has acknowledged, and report `handle_acknowledged`.
    AskAcknowledged {
        link: LinkId,
    },
    /// Drop the link, without a report.
    Close {
        link: LinkId,
    },
    CallDone {
        waiter: E::Waiter,
        result: Result<Placed<Answer<E>>, Box<Failure>>,
    },
    TransferDone {
        waiter: E::Waiter,
        result: Result<usize, Box<Failure>>,
    },
    Request(Placed<Incoming<E>>),
    /// The caller of this request no longer takes an answer.
    Cancelled {
        request: RequestId,
    },
    /// The peer that held the bulk has dropped it, or is gone.
    LeaseReleased(E::Lease),
    /// Copies of the content of this memory are stale.
    Stale {
        token: u128,
    },
    /// Peers may not use this memory any more, though its owner has not revoked it: withdraw what is exported of it, since the
    /// operation that it was made for is over.
    Withdraw {
        memory: E::Memory,
    },
    /// For the log. Its subscriber is user code, so no lock may be held while it runs.
    Log(Log),
    /// A peer asks this engine to shut down.
    ShutdownAsked,
    /// There is a connection to a peer that had none, or to another engine at its address.
    PeerConnected(Arc<PeerTag>),
    /// The connection to a peer has ended.
    PeerLost {
        peer: Arc<PeerTag>,
        failure: Failure,
    },
    /// The connection to a peer was idle, and is closed, as both sides agreed.
    PeerIdle(Arc<PeerTag>),
}

/// See the module's documentation.
pub(crate) struct Proto<E: Env> {
    config: Config,
    incarnation: u64,
    addresses: Vec<Address>,
    /// The interfaces of this host that the engine listens on.
    interfaces: Interfaces,
    /// What this engine's providers are, as their owners have registered it.
    identities: HashMap<u16, String>,
    links: SlotMap<LinkId, link::PeerLink<E>>,
    peers: SlotMap<PeerId, peers::Peer>,
    by_address: HashMap<Address, PeerId>,
    by_incarnation: HashMap<u64, PeerId>,
    /// The peers that were given a `resumption_token`. Tokens are looked up, not searched for: a peer can make them up.
    by_resumption_token: HashMap<u128, PeerId>,
    /// Challenges that this engine has sent on links that it dials, until those are open.
    dialling: HashMap<keys::Nonce, LinkId>,
    /// Number of peers at which unreferenced ones are removed.
    sweep_at: usize,
    /// How often a peer has had no connection any more because that was idle.
    idle_closed: u64,
    calls: SlotMap<CallId, calls::OutgoingCall<E>>,
    requests: SlotMap<RequestId, calls::InboundRequest<E>>,
    transfers: SlotMap<TransferId, transfers::OutgoingTransfer<E>>,
    /// The traces that the next requests of these links belong to. Beside the links, so that requests without a trace ask for
    /// no more than whether there is any.
    traces: HashMap<LinkId, Arc<TraceContext>>,
    exposures: exposures::Exposures<E>,
    /// Leases whose holders have not been told that the memory was revoked: token, link, and the lease's number on that link.
    holders: BTreeSet<(u128, LinkId, u64)>,
    /// Accepted connections: how many are open; and the others, by the time at which their handshake must be done.
    accepted: usize,
    /// Calls and answers that have arrived so far.
    calls_arrived: u64,
    /// Accepted lanes, which are not among them.
    accepted_lanes: usize,
    handshakes: BTreeSet<(Instant, LinkId)>,
    /// Bytes held for peers, as far as they count towards the total limit.
    bytes: usize,
    /// Credit for one-way calls, in calls and in bytes, that was granted beyond each link's minimum.
    granted: (usize, usize),
    /// One-way calls, and their bytes, that still wait for their handlers though their connections are gone.
    left_behind: (usize, usize),
    /// One-way calls that wait for memory for their values.
    parked: admission::Parked,
    limited: admission::LimitCounts,
    refusals: Refusals,
    transports: traffic::TransportTable,
    logged: log::LogCounts,
    timers: BTreeSet<(Instant, timers::TimerKind)>,
    /// Deadlines of calls, the earliest first, for calls that are made in that order, as most are.
    deadlines: timers::Deadlines,
    outputs: VecDeque<Output<E>>,
    /// Links that have something to send, and can send it.
    ready: VecDeque<LinkId>,
    /// For what the call or transfer that was queued last may wait.
    may_send_later: MayWait,
    stage: EngineStage,
    /// Generates what peers must not guess: tokens, `resumption_token`s, challenges. A stream cipher, under a key that no other
    /// engine has.
    random: StdRng,
}

/// ```text
///   Running ──begin_shutdown──▶ Draining ──finish_shutdown──▶ Closed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EngineStage {
    Running,
    /// Answers go out, and handlers may still call; new requests are refused.
    Draining,
    /// All operations fail with `Finalized`.
    Closed,
}

impl<E: Env> Proto<E> {
    /// `seed` comes from the operating system, and no other engine may have it: this engine's secrets are made from it.
    pub(crate) fn new(config: Config, incarnation: u64, seed: [u8; 32]) -> Proto<E> {
        Proto {
            config,
            incarnation,
            addresses: Vec::new(),
            interfaces: Interfaces::default(),
            identities: HashMap::new(),
            links: SlotMap::with_key(),
            peers: SlotMap::with_key(),
            by_address: HashMap::new(),
            by_incarnation: HashMap::new(),
            by_resumption_token: HashMap::new(),
            dialling: HashMap::new(),
            sweep_at: 64,
            idle_closed: 0,
            calls: SlotMap::with_key(),
            requests: SlotMap::with_key(),
            transfers: SlotMap::with_key(),
            traces: HashMap::new(),
            exposures: exposures::Exposures::default(),
            holders: BTreeSet::new(),
            accepted: 0,
            calls_arrived: 0,
            accepted_lanes: 0,
            handshakes: BTreeSet::new(),
            bytes: 0,
            granted: (0, 0),
            left_behind: (0, 0),
            parked: admission::Parked::default(),
            limited: admission::LimitCounts::default(),
            refusals: Refusals::default(),
            transports: traffic::TransportTable::default(),
            logged: log::LogCounts::default(),
            timers: BTreeSet::new(),
            deadlines: timers::Deadlines::default(),
            outputs: VecDeque::new(),
            ready: VecDeque::new(),
            may_send_later: MayWait::No,
            stage: EngineStage::Running,
            random: StdRng::from_seed(seed),
        }
    }

    /// A number that no peer can guess and that is used once: a token, a `resumption_token`.
    pub(crate) fn secret(&mut self) -> u128 {
        u128::from(self.random.next_u64()) << 64 | u128::from(self.random.next_u64())
    }

    /// The addresses at which the engine listens; peers learn them, so that they can dial back.
    /// `interfaces`: those of some of them, or of all.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<Address>, interfaces: &Interfaces) {
        self.addresses = addresses;
        self.interfaces.add(interfaces);
    }

    /// Sets what a provider is; `None` removes that. Returns what it was before.
    pub(crate) fn set_identity(&mut self, provider: u16, identity: Option<String>) -> Option<String> {
        match identity {
            Some(identity) => self.identities.insert(provider, identity),
            None => self.identities.remove(&provider),
        }
    }

    /// What a provider of this engine is.
    pub(crate) fn identity(&self, provider: u16) -> Option<&String> {
        self.identities.get(&provider)
    }

    /// True for an address that the engine listens at. A wildcard address is each one with its port.
    pub(crate) fn is_own_address(&self, address: &Address) -> bool {
        self.addresses.iter().any(|own| own == address || own.seen_from(address) == *address)
    }

    /// Takes the outputs, which are to be executed in this order. To be called after each other method.
    // Many steps have none.
    #[inline]
    pub(crate) fn poll(&mut self, outputs: &mut VecDeque<Output<E>>) {
        if !(self.outputs.is_empty() && self.ready.is_empty() && self.parked.is_empty()) {
            self.poll_some(outputs);
        }
    }

    fn poll_some(&mut self, outputs: &mut VecDeque<Output<E>>) {
        self.poll_unsent(outputs);
        self.send_ready(false, outputs);
    }

    /// Sends what it can inject; leaves the rest for [`Proto::poll`]. True when nothing is left.
    pub(crate) fn inject_ready(&mut self, outputs: &mut VecDeque<Output<E>>) -> bool {
        self.send_ready(true, outputs);
        self.ready.is_empty() && self.outputs.is_empty() && self.parked.is_empty()
    }

    fn send_ready(&mut self, only_injected: bool, outputs: &mut VecDeque<Output<E>>) {
        let mut injected = 0;
        for _ in 0..self.ready.len() {
            let Some(id) = self.ready.pop_front() else { break };
            let Some(link) = self.links.get_mut(id) else { continue };
            if injected < MAX_INJECTED_LINKS && link.inject(outputs) {
                injected += 1;
                if link.counts() {
                    self.recount(id);
                }
            } else if only_injected {
                self.ready.push_back(id);
            } else if let Some(output) = link.transmit(id, self.calls_arrived) {
                outputs.push_back(output);
            }
        }
    }

    /// As [`Proto::poll`], but leaves what is to be sent for later.
    pub(crate) fn poll_unsent(&mut self, outputs: &mut VecDeque<Output<E>>) {
        if !self.parked.is_empty() {
            self.resume_parked();
        }
        if self.outputs.is_empty() {
            return;
        }
        if outputs.is_empty() {
            std::mem::swap(&mut self.outputs, outputs);
        } else {
            outputs.append(&mut self.outputs);
        }
    }

    /// For what the call or transfer that was started last, or the last answer, may wait.
    pub(crate) fn may_send_later(&mut self) -> MayWait {
        std::mem::take(&mut self.may_send_later)
    }

    /// Refuses new requests from now on; those in progress continue.
    pub(crate) fn begin_shutdown(&mut self) {
        if self.stage == EngineStage::Running {
            self.stage = EngineStage::Draining;
        }
    }

    /// Ends everything: own operations with `Finalized`, links with a `Goodbye` once all that is queued has been sent.
    pub(crate) fn finish_shutdown(&mut self) {
        self.lose_parked();
        self.stage = EngineStage::Closed;
        let own: HashSet<u64> = self.calls.keys().map(wire_id).collect();
        for (_, call) in self.calls.drain() {
            self.outputs.push_back(Output::CallDone { waiter: call.waiter, result: Err(Box::new(Failure::Finalized)) });
        }
        for (id, transfer) in self.transfers.drain() {
            transfer.memory.end();
            if transfer.rma.is_some() {
                self.outputs.push_back(Output::CancelRma { link: transfer.link, transfer: wire_id(id) });
            }
            self.outputs.push_back(Output::TransferDone { waiter: transfer.waiter, result: Err(Box::new(Failure::Finalized)) });
        }
        let ids: Vec<LinkId> = self.links.keys().collect();
        for id in ids {
            let link = &mut self.links[id];
            for waiter in std::mem::take(&mut link.outgoing.waiting) {
                self.outputs.push_back(Output::CallDone { waiter, result: Err(Box::new(Failure::Finalized)) });
            }
            // Answers and one-way calls still go out: no caller here waits for them, but they were promised.
            link.streams.end_where(|stream| match stream.kind {
                wire::Stream::Response => false,
                wire::Stream::Request => own.contains(&stream.id),
                wire::Stream::Pull | wire::Stream::Push => true,
            });
            link.closing = true;
            self.touch_closing(id);
        }
        self.exposures.clear();
        self.timers.retain(|(_, timer)| !matches!(timer, timers::TimerKind::Exposure(_)));
    }

    /// True when no link is left.
    pub(crate) fn links_gone(&self) -> bool {
        self.links.is_empty()
    }

    /// A measure of what is queued and unsent; it changes as long as peers take any of it.
    pub(crate) fn unsent(&self) -> usize {
        self.links.values().map(link::PeerLink::unsent).sum()
    }

    /// Closes the links that are left, whether all has been sent or not.
    pub(crate) fn abandon_links(&mut self) {
        let ids: Vec<LinkId> = self.links.keys().collect();
        for id in ids {
            self.close(id, Failure::Finalized);
        }
    }

    /// What is still in progress, exposed or queued; each test ends with none.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut note = |what: &str, count: usize| {
            if count > 0 {
                left.push(format!("{count} {what}"));
            }
        };
        note("calls", self.calls.len());
        // A request that a peer has left behind ends with its handler.
        note("requests", self.requests.values().filter(|request| !request.is_orphan).count());
        note("transfers", self.transfers.len());
        note("exposures", self.exposures.len());
        note("holders", self.holders.len());
        note("traces", self.traces.len());
        note("outputs", self.outputs.len());
        note("handshakes", self.handshakes.len());
        note("challenges", self.dialling.len());
        for link in self.links.values() {
            link.leftovers(&mut note);
        }
        left.extend(self.miscounted());
        left
    }
}
