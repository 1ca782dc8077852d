//! One link: its state and what is held for its peer, how it opens, and what arrives.

mod sending;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use slotmap::KeyData;
use smallvec::SmallVec;

use super::admission::{Account, LEASE_COST, TRANSFER_COST, UNCOUNTED};
use super::exposures::IncomingPush;
use super::keys::AuthState;
use super::one_way::{ReceiveWindow, SendCredit};
use super::streams::{OutgoingBody, Streams};
use super::tables::{Declaration, NumberMap, OwnDeclarations, PeerDeclarations};
use super::timers::TimerKind;
use super::traffic::Traffic;
use super::wire::{self, FrameError, LeaseRange, Message, Stream};
use super::{
    CallId, Consumed, EngineStage, Env, Failure, LinkId, Memory, Output, PayloadStatus, PeerId, Proto, ReceiveTarget, RequestId,
    TransferId, broken,
};
use crate::payload::TrailingList;
use crate::{Address, TraceContext, Transport};
pub(crate) use sending::MayWait;

/// Longest payload of one `Data`, unless the transport sets another. A small message waits behind no more than one (some 80 µs
/// on loopback). Bulks over tcp were measured at 0.6 to 0.7 of the raw stream with 256 KiB, at 0.8 to 1.1 with this, and no
/// better with 1 MiB.
const CHUNK: usize = 512 << 10;
/// Longest payload of one `Data` that is accepted.
const MAX_CHUNK: usize = 4 << 20;
/// Largest number of payloads of one link that may be arriving at once.
const MAX_INBOUND: usize = 64;

/// ```text
///   dialled:  Dialling ──connected──▶ Handshaking ──their hello──▶ Open
///   accepted:                         Handshaking ──their hello──▶ Open
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    Dialling,
    Handshaking,
    Open,
}

/// The lanes of a main link: see `lanes.rs`.
#[derive(Default)]
pub(super) struct Lanes {
    /// The transport keeps small messages waiting behind bulk data.
    pub useful: bool,
    /// Dialled or open.
    pub links: SmallVec<[LinkId; 1]>,
    /// One could not be opened.
    pub refused: bool,
}

/// What a link knows of being idle: see `idle.rs`.
#[derive(Default)]
pub(super) struct IdleState {
    /// When it is looked at next.
    pub due: Option<Instant>,
    /// How much it had been used when it was looked at last; at the side that was dialled, how many transfers that side had made.
    pub used: u64,
    /// This side has proposed to close the link, and has no answer yet: how much it had sent, with the proposal.
    pub offered: Option<u64>,
    /// When this side has proposed it last.
    pub proposed: Option<Instant>,
    /// This side has agreed to close it: its operations take another link.
    pub left: bool,
}

pub(super) struct PeerLink<E: Env> {
    pub state: LinkState,
    pub dialled: bool,
    /// Both ends are on this host, as far as the transport knows.
    pub local: bool,
    /// The peer's address, as far as the transport knows.
    pub remote: Address,
    /// The transport, which differs from that of the address where the peer is reached by a same-host address.
    pub transport: Transport,
    pub traffic: Traffic,
    pub peer: Option<PeerId>,
    /// The largest message that the peer accepts.
    pub peer_max_message: usize,
    pub incarnation: u64,
    /// Pieces of the handshake, or a refusal, that wait to be sent.
    pub handshake: Vec<u8>,
    /// How far the two sides have proved that they have the key, where one is required.
    pub auth: Option<Box<AuthState>>,
    /// Whether bodies and payloads have checksums.
    pub checksums: bool,
    /// Frames that wait to be sent.
    control: Vec<u8>,
    /// What of them, and of the streams, may wait for more.
    waiting: sending::Waiting,
    spare: Vec<u8>,
    /// What carries it, once it is there.
    pub carrier: Option<E::Carrier>,
    /// It can send a few bytes at once.
    injects: bool,
    /// It sends short payloads together.
    gathers: bool,
    /// Each send takes a system call.
    takes_system_calls: bool,
    pub streams: Streams<E::Memory>,
    /// A transmit was handed out and is not yet reported as sent.
    in_flight: bool,
    /// It is in `Proto::ready`.
    queued: bool,
    /// Close it when there is nothing left to send.
    pub closing: bool,
    /// This side has sent `Goodbye`. The peer has still to read all that was sent before, and ends the connection when it has.
    /// If this side ended it, what the peer is still sending would cause a reset, which discards what the peer has not read.
    pub goodbye: bool,
    /// Payloads that are arriving, in the order of their announcements.
    pub inbound: VecDeque<InboundPayload>,
    /// Longest payload of one `Data` that this side sends.
    chunk: usize,
    /// While there are streams: how many calls and answers had arrived at the engine before the last chunk.
    calls_before: Option<u64>,
    /// How many chunks are short from now on.
    short_chunks: u32,
    /// Devices at both ends can reach each other's memory.
    pub rma_capable: bool,
    /// Of a lane: the link that it belongs to.
    pub main: Option<LinkId>,
    pub lanes: Lanes,
    /// Payloads that were sent, and that the peer still reads from this side's memory. Negative for a moment if the end of one
    /// is reported before its beginning.
    exported: isize,
    /// What this side has declared, and what the peer has.
    pub declared: OwnDeclarations,
    pub declarations: PeerDeclarations<E>,
    /// Bytes held for the peer.
    pub account: Account,
    /// Requests of the peer, by its own numbers.
    pub requests: NumberMap<u64, RequestId>,
    /// Those of them that were cancelled: nothing is expected of the peer because of them.
    pub cancelled: usize,
    pub pushes: HashMap<u64, IncomingPush<E>>,
    pub leases: BTreeMap<u64, E::Lease>,
    pub next_lease: u64,
    /// Leases of the peer that go back with the next frame, or in it if it is an answer.
    pub released: LeaseRange,
    /// One-way calls of this side.
    pub outgoing: SendCredit<E::Waiter>,
    /// One-way calls of the peer.
    pub window: ReceiveWindow,
    /// Calls and transfers of this side that wait for the peer: how many, and the last of each.
    pub pending: usize,
    pub last_call: Option<CallId>,
    pub last_transfer: Option<TransferId>,
    pub last_heard: Instant,
    /// How many bytes the peer's system had acknowledged at the last check, and when that was.
    pub acknowledged: Option<(u64, Instant)>,
    /// When the peer is checked next, while something is expected of it.
    pub heartbeat: Option<Instant>,
    /// When the handshake has to be done.
    pub due: Instant,
    /// Since when another engine has claimed to be this peer.
    pub probed: Option<Instant>,
    pub idle: IdleState,
    /// What the body of this `Request` or `Response` ends with.
    list: Option<(Stream, u64, TrailingList)>,
}

/// A payload that is arriving.
pub(super) struct InboundPayload {
    pub kind: Stream,
    pub id: u64,
    pub len: usize,
    /// An operation wants it. If a peer gives two operations in turn the same number, the second must not get what was sent for
    /// the first.
    pub wanted: bool,
}

impl<E: Env> PeerLink<E> {
    pub(super) fn new(remote: Address, dialled: bool, now: Instant, due: Instant) -> PeerLink<E> {
        PeerLink {
            state: if dialled { LinkState::Dialling } else { LinkState::Handshaking },
            dialled,
            local: false,
            transport: remote.scheme(),
            traffic: Traffic::default(),
            remote,
            peer: None,
            peer_max_message: usize::MAX,
            incarnation: 0,
            handshake: Vec::new(),
            auth: None,
            checksums: false,
            control: Vec::new(),
            waiting: sending::Waiting::default(),
            spare: Vec::new(),
            carrier: None,
            injects: false,
            takes_system_calls: false,
            gathers: false,
            streams: Streams::default(),
            in_flight: false,
            queued: false,
            closing: false,
            goodbye: false,
            inbound: VecDeque::new(),
            chunk: CHUNK,
            calls_before: None,
            short_chunks: 0,
            rma_capable: false,
            main: None,
            lanes: Lanes::default(),
            exported: 0,
            declared: OwnDeclarations::default(),
            declarations: PeerDeclarations::default(),
            account: Account::default(),
            requests: NumberMap::default(),
            cancelled: 0,
            pushes: HashMap::new(),
            leases: BTreeMap::new(),
            next_lease: 0,
            released: LeaseRange::default(),
            outgoing: SendCredit::default(),
            window: ReceiveWindow::default(),
            pending: 0,
            last_call: None,
            last_transfer: None,
            last_heard: now,
            acknowledged: None,
            heartbeat: None,
            due,
            probed: None,
            idle: IdleState::default(),
            list: None,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.state == LinkState::Open
    }

    /// Queues a frame; the caller marks the link ready.
    pub(super) fn queue_frame(&mut self, message: &Message<'_>, body: &[u8]) {
        self.queue_released();
        wire::put(&mut self.control, message, body, self.checksums);
    }

    /// Takes out the first of the peer's leases in a range. Mostly that is the very first.
    pub(super) fn take_lease(&mut self, first: u64, end: u64) -> Option<(u64, E::Lease)> {
        if let Some(lease) = self.leases.remove(&first) {
            return Some((first, lease));
        }
        let number = *self.leases.range(first..end).next()?.0;
        self.leases.remove(&number).map(|lease| (number, lease))
    }

    /// Releases bulks that came from the peer with these leases. A list of bulks is dropped one by one, and most are dropped before
    /// the answer to their call: so they wait for the next frame.
    pub(super) fn release(&mut self, leases: LeaseRange) {
        let joined = self.released.joined(leases);
        if joined.is_none() {
            self.queue_released();
        }
        self.released = joined.unwrap_or(leases);
    }

    /// Queues what is released.
    #[inline]
    fn queue_released(&mut self) {
        if self.released.count > 0 {
            let released = std::mem::take(&mut self.released);
            self.queue_control(&Message::Release(released));
        }
    }

    /// Queues the trace of the request that is queued next.
    #[cold]
    pub(super) fn queue_trace(&mut self, trace: &TraceContext) {
        let (trace_id, parent_id) = (trace.trace_id(), trace.parent_id());
        self.queue_frame(&Message::TraceContext { trace_id, parent_id, flags: trace.flags(), state: trace.state() }, &[]);
    }

    /// As `queue_frame`, for an answer.
    pub(super) fn queue_response(&mut self, message: &Message<'_>, body: &[u8]) {
        self.queue_released();
        let before = self.control.len();
        self.queue_frame(message, body);
        self.account.answers += self.control.len() - before;
    }

    /// As `queue_frame`, for any other reply to the peer.
    pub(super) fn queue_control(&mut self, message: &Message<'_>) {
        self.queue_control_with(message, &[]);
    }

    pub(super) fn queue_control_with(&mut self, message: &Message<'_>, body: &[u8]) {
        self.queue_released();
        let before = self.control.len();
        self.queue_frame(message, body);
        self.account.control += self.control.len() - before;
    }

    /// Memory for a body that arrives in chunks.
    pub(super) fn memory_for_body(
        &mut self,
        kind: Stream,
        call: u64,
        size: usize,
        leases: LeaseRange,
        declaration: Option<&Declaration<E>>,
    ) -> E::Memory {
        let list = self.list.take().filter(|(of, number, _)| (*of, *number) == (kind, call) && self.has_lists(leases));
        E::body_memory(size, declaration, list.map(|(.., list)| list))
    }

    /// Queues what the body of the `Request` or `Response` that is queued next ends with, where the peer makes use of that.
    #[cold]
    pub(super) fn queue_list(&mut self, kind: Stream, call: u64, body: &OutgoingBody<'_, E::Memory>, leases: LeaseRange) {
        let Some(list) = body.list().filter(|list| self.has_lists(leases) && list.head_of(body.len()).is_some()) else { return };
        let TrailingList { head, width } = list;
        match kind {
            Stream::Response => self.queue_response(&Message::List { call, is_answer: true, head, width }, &[]),
            _ => self.queue_frame(&Message::List { call, is_answer: false, head, width }, &[]),
        }
    }

    /// Whether a list that a body ends with may get memory of its own. A device would need two registrations and two work requests. And
    /// a message whose list is not taken is decoded again, which bulks in it can't be: the first time they take over their leases.
    fn has_lists(&self, leases: LeaseRange) -> bool {
        leases.count == 0 && !matches!(self.transport, Transport::Verbs | Transport::Ofi(_))
    }

    /// True while something is expected of the peer.
    pub(super) fn is_busy(&self) -> bool {
        self.pending > 0
            || !self.outgoing.waiting.is_empty()
            || !self.outgoing.abandoned.is_empty()
            || self.in_flight
            || self.exported != 0
            || self.requests.len() > self.cancelled
            || !self.pushes.is_empty()
            || !self.streams.is_empty()
            || !self.inbound.is_empty()
            || self.account.partial > 0
    }

    /// Whether the link's accounted bytes count in total, or did.
    pub(super) fn counts(&self) -> bool {
        self.accounted_bytes() > UNCOUNTED || self.account.counted > 0
    }

    /// Bytes held for the peer, besides its requests. Leases are among them: a peer that keeps the bulks of its answers gets no
    /// more of them.
    pub(super) fn accounted_bytes(&self) -> usize {
        let Account { answers, control, sending, partial, .. } = self.account;
        let tables = TRANSFER_COST * self.transfers() + LEASE_COST * self.leases.len();
        answers + control + sending + partial + self.declarations.bytes + self.streams.answering + tables
    }

    /// Those of them that can't be refused.
    pub(super) fn unrefusable_bytes(&self) -> usize {
        self.account.control + self.account.partial + self.declarations.bytes
    }

    /// Transfers of the peer that are in progress.
    pub(super) fn transfers(&self) -> usize {
        self.streams.pulls + self.pushes.len()
    }

    /// Bytes of messages that were sent, or wait to be.
    pub(super) fn sent_or_queued(&self) -> u64 {
        let released = if self.released.count > 0 { wire::RELEASE_FRAME } else { 0 };
        self.traffic.sent_bytes + (self.handshake.len() + self.control.len() + released) as u64
    }

    /// Bytes that wait to be sent.
    pub(super) fn queued_bytes(&self) -> usize {
        self.handshake.len() + self.control.len() + self.streams.unsent()
    }

    /// The transport has not sent all that it was given, or the peer still reads it.
    pub(super) fn is_sending(&self) -> bool {
        self.in_flight || self.exported > 0
    }

    /// A measure of what is left to send. It is not in bytes, but shrinks with all that is sent.
    pub(super) fn unsent(&self) -> usize {
        1 + self.control.len() + self.streams.unsent() + usize::from(self.in_flight) + self.exported.unsigned_abs()
    }

    /// The operation is over: what is still arriving for it is discarded.
    pub(super) fn discard_inbound(&mut self, kind: Stream, id: u64) {
        self.inbound.iter_mut().filter(|l| l.kind == kind && l.id == id).for_each(|l| l.wanted = false);
    }

    /// Bytes of answers and of other replies, if they are more than all that is queued.
    #[cfg(any(test, fuzzing))]
    pub(super) fn overcounted_replies(&self) -> Option<(usize, usize, usize)> {
        let Account { answers, control, .. } = self.account;
        (answers + control > self.control.len()).then_some((answers, control, self.control.len()))
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn leftovers(&self, note: &mut impl FnMut(&str, usize)) {
        note("streams", self.streams.len());
        note("requests of a link", self.requests.len());
        note("incoming pushes", self.pushes.len());
        note("leases", self.leases.len());
        note("pending operations of a link", self.pending);
        note("bytes to send", self.control.len());
        note("leases to release", self.released.count as usize);
        note("waiters for credit", self.outgoing.waiting.len());
        note("announced calls that were given up", self.outgoing.abandoned.len());
        note("payloads arriving", self.inbound.len());
        note("exported payloads", self.exported.unsigned_abs());
        let Account { requests, answers, control, sending, partial, .. } = self.account;
        note("bytes of requests", requests);
        note("bytes of incomplete frames", partial);
        note("bytes of answers", answers + control + sending + self.streams.answering);
        note("pulls of the peer", self.streams.pulls);
    }
}

impl<E: Env> Proto<E> {
    /// The link to a peer: an existing one, or one that is dialled now.
    pub(super) fn link_to(&mut self, peer: PeerId, now: Instant) -> Result<LinkId, Failure> {
        if self.stage == EngineStage::Closed {
            return Err(Failure::Finalized);
        }
        let Some(entry) = self.peers.get(peer) else {
            return Err(Failure::Disconnected { reason: "the connection is gone".into() });
        };
        if let Some(link) = entry.link {
            return Ok(link);
        }
        let Some(address) = entry.dial.clone() else {
            return Err(Failure::Disconnected { reason: "it is not connected, and does not listen".into() });
        };
        let link = self.add_link(address.clone(), true, now);
        self.links[link].peer = Some(peer);
        self.peers[peer].link = Some(link);
        self.begin_handshake(link);
        self.outputs.push_back(Output::Connect { link, address, lane: false });
        Ok(link)
    }

    pub(super) fn add_link(&mut self, remote: Address, dialled: bool, now: Instant) -> LinkId {
        let due = now + self.config.connect;
        let id = self.links.insert(PeerLink::new(remote, dialled, now, due));
        self.timers.insert((due, TimerKind::Handshake(id)));
        id
    }

    /// A peer has dialled this engine.
    pub(crate) fn handle_accepted(&mut self, remote: Address, now: Instant) -> LinkId {
        let id = self.add_link(remote, false, now);
        self.count_handshake(id);
        id
    }

    /// The connection that [`Output::Connect`] asked for is made.
    pub(crate) fn handle_connected(&mut self, id: LinkId, now: Instant) {
        if let Some(link) = self.links.get_mut(id) {
            link.state = LinkState::Handshaking;
            link.last_heard = now;
            self.mark_ready(id);
        }
    }

    pub(crate) fn has_link(&self, link: LinkId) -> bool {
        self.links.contains_key(link)
    }

    /// Sets the longest payload that the link's transport prefers.
    pub(crate) fn set_chunk(&mut self, id: LinkId, len: usize) {
        if let Some(link) = self.links.get_mut(id) {
            link.chunk = len.clamp(1, MAX_CHUNK);
        }
    }

    /// The transport of a link that was dialled. `local`: it does not leave this host. `lanes_useful`: it keeps small messages
    /// waiting behind bulk data.
    pub(crate) fn set_transport(&mut self, id: LinkId, transport: Transport, local: bool, lanes_useful: bool) {
        if let Some(link) = self.links.get_mut(id) {
            link.transport = transport;
            link.local = local;
            link.lanes.useful = lanes_useful;
        }
    }

    /// The link's transport can execute [`Output::StartRma`](super::Output::StartRma).
    #[cfg_attr(not(any(test, feature = "verbs")), allow(dead_code, reason = "for transports that have devices"))]
    pub(crate) fn set_rma_capable(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id) {
            link.rma_capable = true;
        }
    }

    /// Continues to close a link, which ends once it is flushed. The peer ends an open one, see
    /// [`PeerLink::goodbye`]; the engine limits the time for that.
    pub(super) fn touch_closing(&mut self, id: LinkId) {
        let link = &mut self.links[id];
        if link.is_flushed() && !link.goodbye {
            if !link.is_open() {
                return self.close(id, Failure::Finalized);
            }
            link.goodbye = true;
            link.queue_frame(&Message::Goodbye, &[]);
        }
        self.mark_ready(id);
    }

    /// How many bytes the peer's system has acknowledged, as [`AskAcknowledged`](super::Output::AskAcknowledged) asked; 0 when
    /// all of them are. If the number has grown, the peer is alive, though its messages may wait behind what is sent to it.
    pub(crate) fn handle_acknowledged(&mut self, id: LinkId, bytes: u64, now: Instant) {
        let Some(link) = self.links.get_mut(id) else { return };
        // The bytes were acknowledged at some time after the last check.
        if let Some((_, asked)) = link.acknowledged.filter(|(before, _)| bytes > *before) {
            link.last_heard = link.last_heard.max(asked);
        }
        link.acknowledged = (bytes > 0).then_some((bytes, now));
    }

    /// Handles what it can of the bytes that arrived on a link. An error says how the peer broke the protocol; the caller
    /// closes the link with it.
    pub(crate) fn consume(&mut self, id: LinkId, bytes: &[u8], now: Instant) -> Result<Consumed<E::Memory>, Failure> {
        let mut used = 0;
        let Some(link) = self.links.get_mut(id) else {
            return Ok(Consumed { used: bytes.len(), target: None });
        };
        link.last_heard = now;
        // `bytes` begins with the incomplete frame again: counted as partial, too, it would count twice while the frame is
        // handled.
        if link.account.partial > 0 {
            link.account.partial = 0;
            self.recount(id);
        }
        while !self.links[id].is_open() {
            if self.links[id].closing {
                return Ok(Consumed { used: bytes.len(), target: None });
            }
            let Some(len) = self.handle_handshake(id, &bytes[used..], now)? else { return Ok(Consumed { used, target: None }) };
            used += len;
            match self.links.get_mut(id) {
                Some(link) => link.traffic.received_bytes += len as u64,
                None => return Ok(Consumed { used: bytes.len(), target: None }),
            }
        }
        while used < bytes.len() {
            let mut message = Message::Ping;
            let (body, len) = match wire::take_into(&bytes[used..], &mut message) {
                Ok(Some(taken)) => taken,
                Ok(None) => break,
                Err(FrameError::Broken(reason)) => return Err(broken(reason)),
                Err(FrameError::Damaged) => return Err(Failure::Checksum),
            };
            used += len;
            self.links[id].traffic.received_bytes += len as u64;
            let may_have_body = matches!(message, Message::Request { .. } | Message::Response { .. });
            if !may_have_body && body != Some(&[]) {
                return Err(broken("a body behind a message that takes none".to_owned()));
            }
            if let Message::Data { stream, id: number, offset, len } = message {
                let target = self.receive_target(id, stream, number, offset, len as usize)?;
                self.watch(id, now);
                return Ok(Consumed { used, target: Some(target) });
            }
            if self.is_wanted_message(id, &message)? {
                // Most are of calls, and a message is long: it is not moved for them.
                match message {
                    Message::Request { .. } => {
                        self.calls_arrived += 1;
                        self.handle_request(id, &message, body, now)?;
                    }
                    Message::Response { .. } => {
                        self.calls_arrived += 1;
                        self.handle_response(id, &message, body)?;
                    }
                    message => self.handle_other_message(id, message, now)?,
                }
            }
            self.check_unrefusable_bytes(id)?;
            if !self.links.contains_key(id) {
                return Ok(Consumed { used: bytes.len(), target: None });
            }
        }
        if used < bytes.len() {
            self.keep_partial(id, bytes.len() - used, now)?;
        }
        Ok(Consumed { used, target: None })
    }

    /// False for a message that is to be ignored. An error if it may not come on this link.
    fn is_wanted_message(&mut self, id: LinkId, message: &Message<'_>) -> Result<bool, Failure> {
        if self.stage == EngineStage::Closed && *message != Message::Goodbye {
            // No message is wanted any more, and no reply may be sent.
            return Ok(false);
        }
        let for_transfers = || {
            use Message::{Abort, Done, Goodbye, Ping, Pong, Pull, Push};
            matches!(message, Pull(_) | Push(_) | Done { .. } | Abort { .. } | Ping | Pong | Goodbye)
        };
        let link = &self.links[id];
        if link.main.is_some() && !for_transfers() {
            return Err(broken("a message on a lane that is not about transfers".into()));
        }
        Ok(!(link.idle.left && self.rejoin(id, message)))
    }

    fn handle_other_message(&mut self, id: LinkId, message: Message<'_>, now: Instant) -> Result<(), Failure> {
        match message {
            Message::Refuse { call, status } => self.handle_refuse(id, call, status),
            Message::Cancel { call } => self.handle_cancel(id, call),
            Message::Pull(range) => self.handle_pull(id, range, now)?,
            Message::Push(range) => self.handle_push(id, range, now)?,
            Message::Done { transfer, status } => self.handle_done(id, transfer, status),
            Message::Abort { transfer, push } => self.handle_abort(id, transfer, push),
            Message::Ping => {
                self.links[id].queue_control(&Message::Pong);
                self.mark_ready(id);
            }
            Message::Pong => {}
            Message::ResumptionToken { token } => self.handle_resumption_token(id, token),
            Message::Handled { count, calls, bytes } => self.handle_handled(id, count, calls, bytes),
            Message::Goodbye => {
                self.close(id, Failure::Disconnected { reason: "it was finalized".into() });
            }
            Message::Release(leases) => self.handle_release(id, leases),
            Message::Revoked { token } => self.handle_revoked(id, u128::from_le_bytes(token)),
            Message::Shutdown { call } => self.handle_shutdown(id, call),
            Message::Echo { call } => self.handle_echo(id, call),
            Message::Identify { call, provider } => self.handle_identify(id, call, provider),
            Message::TraceContext { .. } => self.handle_trace_context(id, &message)?,
            Message::Idle { received, exposes } => self.handle_idle(id, received, exposes)?,
            Message::IdleAgreed => self.handle_idle_agreed(id, now)?,
            Message::InUse => self.handle_in_use(id, now)?,
            Message::List { call, is_answer, head, width } => {
                let kind = if is_answer { Stream::Response } else { Stream::Request };
                self.links[id].list = Some((kind, call, TrailingList { head, width }));
            }
            Message::Request { .. } | Message::Response { .. } | Message::Data { .. } => {
                unreachable!("`consume` takes them itself")
            }
        }
        Ok(())
    }

    /// Kept until the next request. Most calls have none.
    #[cold]
    fn handle_trace_context(&mut self, id: LinkId, message: &Message<'_>) -> Result<(), Failure> {
        let Message::TraceContext { trace_id, parent_id, flags, state } = *message else { return Ok(()) };
        let trace = TraceContext::received(trace_id, parent_id, flags, state).map_err(|reason| broken(reason.to_owned()))?;
        self.traces.insert(id, Arc::new(trace));
        Ok(())
    }

    /// The trace of the request that has arrived.
    #[cold]
    #[inline(never)]
    pub(super) fn take_trace(&mut self, id: LinkId) -> Option<Arc<TraceContext>> {
        self.traces.remove(&id)
    }

    /// Where the payload of a `Data` goes.
    fn receive_target(
        &mut self,
        id: LinkId,
        kind: Stream,
        number: u64,
        offset: u64,
        len: usize,
    ) -> Result<ReceiveTarget<E::Memory>, Failure> {
        if len > MAX_CHUNK {
            return Err(broken(format!("a chunk of {len} bytes exceeds the limit of {MAX_CHUNK} bytes")));
        }
        let inbound = &self.links[id].inbound;
        if inbound.len() >= MAX_INBOUND {
            return Err(broken(format!("more than {MAX_INBOUND} payloads at a time")));
        }
        let coming: usize = inbound.iter().filter(|l| l.wanted && l.kind == kind && l.id == number).map(|l| l.len).sum();
        // Chunks of one stream come in order. One that does not breaks the protocol, or is for an operation that has ended.
        let (memory, arrived) = match kind {
            Stream::Pull => match self.transfers.get(KeyData::from_ffi(number).into()) {
                // The owner was not asked for what a device transfers.
                Some(transfer) if transfer.link == id && transfer.pull && transfer.rma.is_none() => {
                    (Some(&transfer.memory), transfer.arrived)
                }
                _ => (None, 0),
            },
            Stream::Response => match self.calls.get(KeyData::from_ffi(number).into()) {
                Some(call) if call.link == id => match &call.answer {
                    Some(answer) => (Some(&answer.memory), answer.arrived),
                    None => (None, 0),
                },
                _ => (None, 0),
            },
            Stream::Push => match self.links[id].pushes.get(&number) {
                Some(push) => (Some(&push.memory), push.arrived),
                None => (None, 0),
            },
            Stream::Request => match self.links[id].requests.get(&number).and_then(|r| self.requests.get(*r)) {
                Some(request) => match &request.body {
                    Some(body) => (Some(&body.memory), body.arrived),
                    None => (None, 0),
                },
                None => (None, 0),
            },
        };
        let total = memory.map_or(len, Memory::len);
        let target = match memory {
            Some(memory) => {
                let arrived = arrived + coming;
                let part = usize::try_from(offset).ok().filter(|o| *o == arrived).and_then(|o| memory.part(o, len));
                Some(part.ok_or_else(|| broken(format!("a chunk of {len} bytes at {offset} where {arrived} was expected")))?)
            }
            None => None,
        };
        self.links[id].inbound.push_back(InboundPayload { kind, id: number, len, wanted: target.is_some() });
        Ok(ReceiveTarget { memory: target, len, total })
    }

    /// Part of a payload has arrived: the peer is alive.
    pub(crate) fn handle_heard(&mut self, id: LinkId, now: Instant) {
        if let Some(link) = self.links.get_mut(id) {
            link.last_heard = now;
        }
    }

    /// The first of the payloads that `consume` announced has arrived.
    pub(crate) fn handle_payload_done(&mut self, id: LinkId, status: PayloadStatus, now: Instant) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.last_heard = now;
        let Some(InboundPayload { kind, id: number, len, wanted }) = link.inbound.pop_front() else { return };
        link.traffic.received_bytes += len as u64;
        if !wanted {
            return;
        }
        match kind {
            Stream::Pull => self.pull_arrived(id, number, len, status),
            Stream::Push => self.push_arrived(id, number, len, status),
            Stream::Request if status == PayloadStatus::Damaged => self.refuse_damaged(id, number),
            Stream::Response if status == PayloadStatus::Damaged => {
                self.abandon_call(CallId::from(KeyData::from_ffi(number)), Failure::Checksum);
            }
            Stream::Request if status == PayloadStatus::SourceGone => {
                if let Err(failure) = self.request_revoked(id, number) {
                    self.close(id, failure);
                }
            }
            // The body of an answer belongs to its sender: only a peer that breaks the protocol revokes it meanwhile.
            Stream::Request | Stream::Response if status != PayloadStatus::Whole => {
                self.close(id, broken("a message whose body was revoked".into()));
            }
            Stream::Request => self.request_arrived(id, number, len),
            Stream::Response => self.response_arrived(id, number, len),
        }
    }
}
