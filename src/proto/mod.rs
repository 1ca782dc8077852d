//! The protocol between engines, without any input or output of its own.
//!
//! [`Proto`] is told what happened (`handle_*`), what its user wants (`call`, `respond`, `pull`, `expose`, …), and what
//! time it is; after each of these, [`Proto::poll`] is called, and each [`Output`] is carried out.
//! It holds every table: peers, links, calls, requests, transfers, exposed memory; and it checks every claim of a peer.
//! It owns no socket, clock, thread or lock, and it never looks at a byte of the memory that is moved.
//!
//! ```text
//!                handle_accepted/connected/consume/placed/sent/moved/closed/timeout
//!   transport ───────────────────────────────────────────────────────────────▶ ┌───────┐
//!                                                                               │ Proto │ ◀── call, respond, pull, expose …
//!   transport, waiters, handlers ◀──────────────────────────────────── poll() ─ └───────┘
//! ```

mod calls;
mod chain;
mod declarations;
mod exposures;
mod handshake;
mod hash;
mod inbound;
mod keys;
mod limits;
mod link;
mod log;
mod one_way;
mod parked;
mod peers;
mod policy;
mod refusals;
mod requests;
mod streams;
#[cfg(any(test, fuzzing))]
mod tests;
mod timers;
mod transfers;
pub(crate) mod wire;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use slotmap::SlotMap;

use crate::Address;
pub(crate) use crate::payload::{Consumed, PayloadStatus, ReceiveTarget, RemoteKeys};
pub(crate) use calls::{Answer, CallSpec, OutgoingBody, Rejected};
pub(crate) use declarations::Declaration;
pub(crate) use exposures::Mode;
pub(crate) use keys::PreSharedKey;
pub(crate) use limits::{PeerLimits, VALUES_COUNT};
pub(crate) use log::Log;
pub(crate) use peers::PeerTag;
pub(crate) use policy::AccessPolicy;
pub use refusals::Refusals;
pub(crate) use requests::{Incoming, Reply};
#[cfg(any(test, fuzzing))]
pub(crate) use tests::fuzzing;
pub(crate) use transfers::Remote;
pub(crate) use wire::{LeaseRange, Status};

slotmap::new_key_type! {
    /// A connection.
    pub(crate) struct LinkId;
    /// An engine that this one knows of.
    pub(crate) struct PeerId;
    /// A call that this engine makes.
    pub(crate) struct CallId;
    /// A call that a peer makes here.
    pub(crate) struct RequestId;
    /// A transfer that this engine began.
    pub(crate) struct TransferId;
}

/// A key as it travels.
fn wire_id(key: impl slotmap::Key) -> u64 {
    key.data().as_ffi()
}

/// What the protocol handles without knowing it.
pub(crate) trait Env {
    type Memory: Memory;
    /// Who learns how a call or a transfer ended.
    type Waiter;
    /// What is kept as long as a peer holds a bulk.
    type Lease: Lease;
    /// What the user of the protocol keeps beside a declaration of a peer.
    type Verdicts: Default;
}

/// A range of memory; clones are the same bytes.
pub(crate) trait Memory: Clone {
    /// New memory for the body of a large message.
    fn allocate(len: usize) -> Self;
    fn len(&self) -> usize;
    /// `None` when the part does not lie inside.
    fn part(&self, offset: usize, len: usize) -> Option<Self>;
    /// The same memory, for one operation: until `end`.
    fn for_one_operation(&self) -> Self;
    /// The operation is over: its memory, and every part of it, must not be read or written any more.
    fn end(&self);
}

pub(crate) trait Lease {
    /// The memory that the lease is for.
    fn token(&self) -> u128;
}

/// The numbers that a [`Proto`] goes by.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Largest message sent or taken, in bytes.
    pub max_message: usize,
    /// A peer that says nothing for this long, while something is expected of it, is given up.
    pub peer_timeout: Duration,
    /// Time that connecting and greeting may take.
    pub connect: Duration,
    pub limits: PeerLimits,
    pub remote_shutdown: bool,
    /// Only engines that prove to have it are talked to.
    pub key: Option<PreSharedKey>,
    /// Bodies and payloads have checksums, too.
    pub checksums: bool,
}

/// The body of a message.
#[derive(Debug)]
pub(crate) enum Body<M> {
    Small(Vec<u8>),
    Large(M),
}

/// Why an operation failed, before anybody knows what it was called.
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
    /// One of the two sides does not want to have to do with the other.
    Unauthorized {
        reason: String,
    },
    /// What arrived is not what was sent.
    Checksum,
    Finalized,
    Revoked,
    /// The other side said so.
    Refused(Status),
}

/// What has to be done now.
pub(crate) enum Output<E: Env> {
    /// Dial, and report `handle_connected` or `handle_closed`.
    Connect {
        link: LinkId,
        address: Address,
    },
    /// Send the bytes, and the payload behind them; report `handle_sent` when that is done. If the payload is lent to the peer,
    /// `handle_returned` follows.
    Transmit {
        link: LinkId,
        bytes: Vec<u8>,
        payload: Option<E::Memory>,
    },
    /// Have a device move all of `memory` from or to the peer's, at `offset` of what the keys reach; report `handle_moved`.
    Move {
        link: LinkId,
        /// Names the move towards the transport.
        transfer: u64,
        pull: bool,
        memory: E::Memory,
        keys: RemoteKeys,
        offset: u64,
    },
    /// Give a move up; nothing needs to be reported of it.
    EndMove {
        link: LinkId,
        transfer: u64,
    },
    /// From now on payloads on the link are to have checksums.
    CoverPayloads {
        link: LinkId,
    },
    /// Find out how much of what was sent the peer's system has, and report `handle_acknowledged`.
    AskAcknowledged {
        link: LinkId,
    },
    /// Drop the link, without reporting back.
    Close {
        link: LinkId,
    },
    CallDone {
        waiter: E::Waiter,
        result: Result<Answer<E>, Failure>,
    },
    TransferDone {
        waiter: E::Waiter,
        result: Result<usize, Failure>,
    },
    Request(Incoming<E>),
    /// The caller of this request takes no answer any more.
    Cancelled {
        request: RequestId,
    },
    /// No longer held by the peer that it was given to.
    LeaseReleased(E::Lease),
    /// Copies of the content of this memory are stale.
    Stale {
        token: u128,
    },
    /// Memory that peers may not use any more, though its owner has not taken it back: what was lent of it, the operation that
    /// it was made for being over, is withdrawn.
    Withdraw {
        memory: E::Memory,
    },
    /// For the log: who takes it is user code, and nothing is locked for it.
    Log(Log),
    /// A peer asks for the end of this engine.
    ShutdownAsked,
}

/// See the module's documentation.
pub(crate) struct Proto<E: Env> {
    config: Config,
    incarnation: u64,
    addresses: Vec<Address>,
    links: SlotMap<LinkId, link::PeerLink<E>>,
    peers: SlotMap<PeerId, peers::Peer>,
    by_address: HashMap<Address, PeerId>,
    by_incarnation: HashMap<u64, PeerId>,
    /// To whom tickets were given. Who shows one is looked up, not searched for: a ticket can be made up.
    by_resumption_token: HashMap<u128, PeerId>,
    /// Challenges that this engine has said on links that it dials, until those are open.
    dialling: HashMap<keys::Nonce, LinkId>,
    /// Number of peers at which those that nobody refers to are swept out.
    sweep_at: usize,
    calls: SlotMap<CallId, calls::OutgoingCall<E>>,
    requests: SlotMap<RequestId, requests::InboundRequest<E>>,
    transfers: SlotMap<TransferId, transfers::OutgoingTransfer<E>>,
    exposures: exposures::Exposures<E>,
    /// Leases whose holders don't know that the memory was taken back, by token: the link, and the lease's number there.
    holders: BTreeSet<(u128, LinkId, u64)>,
    /// Connections that others have made: those that have greeted, and the others, by when they have to.
    accepted: usize,
    handshakes: BTreeSet<(Instant, LinkId)>,
    /// Bytes held for peers, as far as they are counted in all.
    bytes: usize,
    /// Credit for one-way calls, in calls and in bytes, that peers were given beyond what each of them has.
    granted: (usize, usize),
    /// One-way calls, and their bytes, whose connections are gone while they wait for their handlers.
    left_behind: (usize, usize),
    /// One-way calls that wait for memory for their values.
    parked: parked::Parked,
    limited: limits::LimitCounts,
    refusals: Refusals,
    logged: log::LogCounts,
    timers: BTreeSet<(Instant, timers::TimerKind)>,
    /// Deadlines of calls, the next one first: those that come in order, as most do.
    deadlines: timers::Deadlines,
    outputs: VecDeque<Output<E>>,
    /// Links that have something to send and are free to.
    ready: VecDeque<LinkId>,
    /// What was said last can wait for more.
    may_send_later: bool,
    stage: EngineStage,
    /// Makes what peers must not guess: tokens, tickets, challenges. A stream cipher, under a key that no other engine has.
    random: StdRng,
}

/// ```text
///   Running ──begin_shutdown──▶ Draining ──finish_shutdown──▶ Closed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EngineStage {
    Running,
    /// Answers go out, and handlers may go on calling, but no new request is taken.
    Draining,
    /// Everything ends with `Finalized`.
    Closed,
}

impl<E: Env> Proto<E> {
    /// `seed` is the operating system's, and nobody else's: an engine's secrets are made of it.
    pub(crate) fn new(config: Config, incarnation: u64, seed: [u8; 32]) -> Proto<E> {
        Proto {
            config,
            incarnation,
            addresses: Vec::new(),
            links: SlotMap::with_key(),
            peers: SlotMap::with_key(),
            by_address: HashMap::new(),
            by_incarnation: HashMap::new(),
            by_resumption_token: HashMap::new(),
            dialling: HashMap::new(),
            sweep_at: 64,
            calls: SlotMap::with_key(),
            requests: SlotMap::with_key(),
            transfers: SlotMap::with_key(),
            exposures: exposures::Exposures::default(),
            holders: BTreeSet::new(),
            accepted: 0,
            handshakes: BTreeSet::new(),
            bytes: 0,
            granted: (0, 0),
            left_behind: (0, 0),
            parked: parked::Parked::default(),
            limited: limits::LimitCounts::default(),
            refusals: Refusals::default(),
            logged: log::LogCounts::default(),
            timers: BTreeSet::new(),
            deadlines: timers::Deadlines::default(),
            outputs: VecDeque::new(),
            ready: VecDeque::new(),
            may_send_later: false,
            stage: EngineStage::Running,
            random: StdRng::from_seed(seed),
        }
    }

    /// A number that no peer can guess, and that comes but once: a token, a ticket.
    pub(crate) fn secret(&mut self) -> u128 {
        u128::from(self.random.next_u64()) << 64 | u128::from(self.random.next_u64())
    }

    /// Where the engine listens: told to peers, so that they can dial back.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<Address>) {
        self.addresses = addresses;
    }

    /// What is to be done, in this order; to be asked for after everything else that is called.
    pub(crate) fn poll(&mut self, outputs: &mut VecDeque<Output<E>>) {
        self.poll_unsent(outputs);
        while let Some(id) = self.ready.pop_front() {
            if let Some(output) = self.links.get_mut(id).and_then(|link| link.transmit(id)) {
                outputs.push_back(output);
            }
        }
    }

    /// As [`Proto::poll`], but for what is to be sent: that is left for later.
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

    /// Whether the call that was made last may be left to be sent with more: many are on their way over its link, so that
    /// the peer has something to do meanwhile, and not many wait yet.
    pub(crate) fn may_send_later(&mut self) -> bool {
        std::mem::take(&mut self.may_send_later)
    }

    /// When [`Proto::handle_timeout`] wants to be called, if at all.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let timer = self.timers.first().map(|(at, _)| *at);
        [timer, self.deadlines.next()].into_iter().flatten().min()
    }

    /// No new requests from now on: those that come are refused, those in progress go on.
    pub(crate) fn begin_shutdown(&mut self) {
        if self.stage == EngineStage::Running {
            self.stage = EngineStage::Draining;
        }
    }

    /// Ends everything: own operations with `Finalized`, links with a goodbye once what they have to say is said.
    pub(crate) fn finish_shutdown(&mut self) {
        self.lose_parked();
        self.stage = EngineStage::Closed;
        let own: HashSet<u64> = self.calls.keys().map(wire_id).collect();
        for (_, call) in self.calls.drain() {
            self.outputs.push_back(Output::CallDone { waiter: call.waiter, result: Err(Failure::Finalized) });
        }
        for (id, transfer) in self.transfers.drain() {
            transfer.memory.end();
            if transfer.moving.is_some() {
                self.outputs.push_back(Output::EndMove { link: transfer.link, transfer: wire_id(id) });
            }
            self.outputs.push_back(Output::TransferDone { waiter: transfer.waiter, result: Err(Failure::Finalized) });
        }
        let ids: Vec<LinkId> = self.links.keys().collect();
        for id in ids {
            let link = &mut self.links[id];
            for waiter in std::mem::take(&mut link.outgoing.waiting) {
                self.outputs.push_back(Output::CallDone { waiter, result: Err(Failure::Finalized) });
            }
            // Answers and one-way calls, which nobody waits for here, have been promised.
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

    /// True when no connection is left.
    pub(crate) fn links_gone(&self) -> bool {
        self.links.is_empty()
    }

    /// How much has been said and is not sent: changes as long as peers take any of it.
    pub(crate) fn unsent(&self) -> usize {
        self.links.values().map(link::PeerLink::unsent).sum()
    }

    /// Drops the links that are left, said or not.
    pub(crate) fn abandon_links(&mut self) {
        let ids: Vec<LinkId> = self.links.keys().collect();
        for id in ids {
            self.close(id, Failure::Finalized);
        }
    }

    /// Nothing in progress, nothing exposed, nobody connected: what every test ends with.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut note = |what: &str, count: usize| {
            if count > 0 {
                left.push(format!("{count} {what}"));
            }
        };
        note("calls", self.calls.len());
        // What a peer has left behind is its handler's to finish.
        note("requests", self.requests.values().filter(|request| !request.is_orphan).count());
        note("transfers", self.transfers.len());
        note("exposures", self.exposures.len());
        note("holders", self.holders.len());
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
