//! One connection: what waits to be sent, and what arrives.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use super::declarations::{OwnDeclarations, PeerDeclarations};
use super::handshake::AuthState;
use super::hash::NumberMap;
use super::inbound::{InboundPayload, MAX_CHUNK};
use super::one_way::{ReceiveWindow, SendCredit};
pub(super) use super::streams::OutStream;
use super::streams::{Chunk, Streams};
use super::transfers::IncomingPush;
use super::wire::{self, Frame, FrameError, Message};
use super::{CallId, Consumed, EngineStage, Env, Failure, LinkId, Output, PeerId, Proto, RequestId, TransferId};
use crate::Address;

/// Longest payload of one `Data` where the transport does not say. A small message waits for no more than this in front of it
/// (some 80 µs on loopback). With 256 KiB bulks over tcp were measured at 0.6 to 0.7 of the raw stream, with this at 0.8 to
/// 1.1, with 1 MiB no better.
const CHUNK: usize = 512 << 10;
/// Payloads of a link that the peer may be reading out of this side's memory at a time: one that it reads, and those that
/// it finds when it is done with that.
const MAX_LENT: isize = 4;
/// A send buffer that grew beyond this is given back to the allocator.
const KEEP: usize = 64 << 10;

/// With so many calls on their way, a further one may wait for others to be sent with.
const MANY: usize = 8;
/// So many bytes are worth sending.
const WORTH_SENDING: usize = 16 << 10;

/// ```text
///   dialled:  Dialling ──connected──▶ Greeting ──their greeting──▶ Open
///   accepted:                         Greeting ──their greeting──▶ Open
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    Dialling,
    Handshaking,
    Open,
}

pub(super) struct PeerLink<E: Env> {
    pub state: LinkState,
    pub dialled: bool,
    /// Both ends are on this host, as far as the transport knows.
    pub local: bool,
    /// Where it leads, as far as the transport knows.
    pub remote: Address,
    pub peer: Option<PeerId>,
    /// The largest message that the peer takes.
    pub peer_max_message: usize,
    pub incarnation: u64,
    /// What is to be said before the connection is open, or instead.
    pub handshake: Vec<u8>,
    /// Where a key is wanted: how far the two sides have proved themselves.
    pub auth: Option<Box<AuthState>>,
    /// Bodies and payloads have checksums.
    pub checksums: bool,
    /// Frames that wait to be sent.
    control: Vec<u8>,
    /// How many calls are among them.
    waiting_calls: usize,
    spare: Vec<u8>,
    pub streams: Streams<E::Memory>,
    /// A transmit has been handed out and not reported as sent.
    in_flight: bool,
    /// Stands in `Proto::ready`.
    queued: bool,
    /// Close it when there is nothing left to send.
    pub closing: bool,
    /// It has been said that nothing follows. The peer has still to read all that was said before, and ends the connection when
    /// it has: to end it here would let what the peer is saying meanwhile meet a reset, which takes back what it has not read.
    goodbye: bool,
    /// Payloads that are arriving, in the order in which they were announced.
    pub inbound: VecDeque<InboundPayload>,
    /// Longest payload of one `Data` that this side sends.
    chunk: usize,
    /// Devices at both ends can reach each other's memory.
    pub rma_capable: bool,
    /// Payloads that are out, and still read from this side's memory. Below zero for a moment when the end of one is reported
    /// before its beginning.
    exported: isize,
    /// What this side has declared, and the peer.
    pub declared: OwnDeclarations,
    pub declarations: PeerDeclarations<E>,
    /// What is held on the peer's account.
    pub account: Account,
    /// Requests of the peer by its own number.
    pub requests: NumberMap<u64, RequestId>,
    /// Those of them that were cancelled: nothing is expected of the peer on their account.
    pub cancelled: usize,
    pub pushes: HashMap<u64, IncomingPush<E>>,
    pub leases: BTreeMap<u64, E::Lease>,
    pub next_lease: u64,
    /// One-way calls of this side.
    pub outgoing: SendCredit<E::Waiter>,
    /// One-way calls of the peer.
    pub window: ReceiveWindow,
    /// Calls and transfers of this side that wait for the peer: how many, and the last of each.
    pub pending: usize,
    pub last_call: Option<CallId>,
    pub last_transfer: Option<TransferId>,
    pub last_heard: Instant,
    /// How much the peer's system had acknowledged when that was last asked, and when that was.
    pub acknowledged: Option<(u64, Instant)>,
    /// When the peer is looked after next, while something is expected of it.
    pub heartbeat: Option<Instant>,
    /// Until when the link has to be open.
    pub due: Instant,
    /// Since when somebody else claims to be this peer.
    pub probed: Option<Instant>,
}

/// Bytes that are held on a peer's account.
#[derive(Default)]
pub(super) struct Account {
    /// Of its requests, until they are answered.
    pub requests: usize,
    /// Of answers, and of what else is said because the peer has said something, among the frames that wait.
    pub answers: usize,
    pub control: usize,
    /// The same of what has been handed out and not reported as sent.
    pub flying: usize,
    /// Bytes that begin a frame whose rest has not come.
    pub partial: usize,
    /// Of what the peer has declared.
    pub declared: usize,
    /// How much of all that, but for the requests, is counted in all.
    pub counted: usize,
}

impl<E: Env> PeerLink<E> {
    pub(super) fn new(remote: Address, dialled: bool, now: Instant, due: Instant) -> PeerLink<E> {
        PeerLink {
            state: if dialled { LinkState::Dialling } else { LinkState::Handshaking },
            dialled,
            local: false,
            remote,
            peer: None,
            peer_max_message: usize::MAX,
            incarnation: 0,
            handshake: Vec::new(),
            auth: None,
            checksums: false,
            control: Vec::new(),
            waiting_calls: 0,
            spare: Vec::new(),
            streams: Streams::default(),
            in_flight: false,
            queued: false,
            closing: false,
            goodbye: false,
            inbound: VecDeque::new(),
            chunk: CHUNK,
            rma_capable: false,
            exported: 0,
            declared: OwnDeclarations::default(),
            declarations: PeerDeclarations::default(),
            account: Account::default(),
            requests: NumberMap::default(),
            cancelled: 0,
            pushes: HashMap::new(),
            leases: BTreeMap::new(),
            next_lease: 0,
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
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.state == LinkState::Open
    }

    /// Queues a frame; the caller marks the link ready.
    pub(super) fn queue_frame(&mut self, message: &Message<'_>, body: &[u8]) {
        wire::put(&mut self.control, message, body, self.checksums);
    }

    /// As `say`, for an answer.
    pub(super) fn queue_response(&mut self, message: &Message<'_>, body: &[u8]) {
        let before = self.control.len();
        self.queue_frame(message, body);
        self.account.answers += self.control.len() - before;
    }

    /// As `say`, for what else is said because the peer has said something.
    pub(super) fn queue_control(&mut self, message: &Message<'_>) {
        let before = self.control.len();
        self.queue_frame(message, &[]);
        self.account.control += self.control.len() - before;
    }

    /// A call was said. True when it may wait for more: the peer has at least as many calls to deal with as would wait.
    pub(super) fn may_wait(&mut self) -> bool {
        self.waiting_calls += 1;
        let under_way = self.pending.max(self.outgoing.out as usize);
        self.is_open()
            && self.streams.is_empty()
            && under_way >= MANY
            && 2 * self.waiting_calls < under_way
            && self.control.len() < WORTH_SENDING
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

    pub(super) fn wants_to_send(&self) -> bool {
        match self.state {
            LinkState::Dialling => false,
            LinkState::Handshaking => !self.handshake.is_empty(),
            LinkState::Open => !self.handshake.is_empty() || !self.control.is_empty() || self.may_stream(),
        }
    }

    fn may_stream(&self) -> bool {
        self.exported < MAX_LENT && !self.streams.is_empty()
    }

    pub(super) fn is_flushed(&self) -> bool {
        !self.in_flight && self.exported == 0 && !self.wants_to_send()
    }

    /// How much is left to send; not in bytes, but less with all that is sent.
    pub(super) fn unsent(&self) -> usize {
        1 + self.control.len() + self.streams.unsent() + usize::from(self.in_flight) + self.exported.unsigned_abs()
    }

    /// The next thing to send: every frame that waits, and one chunk.
    pub(super) fn transmit(&mut self, id: LinkId) -> Option<Output<E>> {
        self.queued = false;
        if self.in_flight || !self.wants_to_send() {
            return None;
        }
        self.in_flight = true;
        self.waiting_calls = 0;
        self.account.flying = std::mem::take(&mut self.account.answers) + std::mem::take(&mut self.account.control);
        if !self.handshake.is_empty() {
            return Some(Output::Transmit { link: id, bytes: std::mem::take(&mut self.handshake), payload: None });
        }
        let mut bytes = std::mem::replace(&mut self.control, std::mem::take(&mut self.spare));
        let mut payload = None;
        let next = if self.may_stream() { self.streams.next(self.chunk) } else { None };
        if let Some(Chunk { kind: stream, id, offset, len, memory }) = next {
            payload = memory;
            wire::put(&mut bytes, &Message::Data { stream, id, offset: offset as u64, len: len as u32 }, &[], false);
        }
        Some(Output::Transmit { link: id, bytes, payload })
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn leftovers(&self, note: &mut impl FnMut(&str, usize)) {
        note("streams", self.streams.len());
        note("requests of a link", self.requests.len());
        note("incoming pushes", self.pushes.len());
        note("leases", self.leases.len());
        note("pending operations of a link", self.pending);
        note("bytes to send", self.control.len());
        note("waiters for credit", self.outgoing.waiting.len());
        note("announced calls that were given up", self.outgoing.abandoned.len());
        note("payloads arriving", self.inbound.len());
        note("payloads lent", self.exported.unsigned_abs());
        let Account { requests, answers, control: said_back, flying, partial, .. } = self.account;
        note("bytes of requests", requests);
        note("bytes of half a frame", partial);
        note("bytes of answers", answers + said_back + flying + self.streams.answering());
        note("pulls of the peer", self.streams.pulls());
    }
}

impl<E: Env> Proto<E> {
    /// Puts the link in line for sending, if it has anything to send.
    pub(super) fn mark_ready(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if !link.queued && !link.in_flight && link.wants_to_send() {
            link.queued = true;
            self.ready.push_back(id);
        }
        if link.counts() {
            self.recount(id);
        }
    }

    /// The longest payload that the link's transport likes to get.
    pub(crate) fn set_chunk(&mut self, id: LinkId, len: usize) {
        if let Some(link) = self.links.get_mut(id) {
            link.chunk = len.clamp(1, MAX_CHUNK);
        }
    }

    /// The link does not leave this host.
    pub(crate) fn set_local(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id) {
            link.local = true;
        }
    }

    /// The link's transport can carry out [`Output::Move`].
    #[cfg_attr(not(any(test, feature = "verbs")), allow(dead_code, reason = "for transports that have devices"))]
    pub(crate) fn set_rma_capable(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id) {
            link.rma_capable = true;
        }
    }

    /// The peer has read a payload that was lent to it.
    pub(crate) fn handle_returned(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.exported -= 1;
        if link.closing {
            self.touch_closing(id);
        } else {
            self.mark_ready(id);
        }
    }

    /// A transmit is out; its buffer comes back for the next. When its payload is `lent`, the peer is still reading that.
    pub(crate) fn handle_sent(&mut self, id: LinkId, mut bytes: Vec<u8>, lent: bool) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.in_flight = false;
        link.account.flying = 0;
        link.exported += isize::from(lent);
        if bytes.capacity() <= KEEP {
            bytes.clear();
            link.spare = bytes;
        }
        if link.closing {
            self.touch_closing(id);
        } else {
            self.mark_ready(id);
        }
    }

    /// Goes on with a link that is to be closed once it is flushed. An open one is closed by its peer, see [`Link::goodbye`]; the
    /// engine gives that a limited time.
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

    /// Bytes of a payload arrived, though not all: the peer lives.
    pub(crate) fn handle_heard(&mut self, id: LinkId, now: Instant) {
        if let Some(link) = self.links.get_mut(id) {
            link.last_heard = now;
        }
    }

    /// What the peer's system has acknowledged so far, as [`Output::AskAcknowledged`] asked; 0 when nothing is on its way. If that has become more, the
    /// peer lives, though what it says waits behind what it is sent.
    pub(crate) fn handle_acknowledged(&mut self, id: LinkId, bytes: u64, now: Instant) {
        let Some(link) = self.links.get_mut(id) else { return };
        // It was some time since the last question; all that is certain is that it was not before that.
        if let Some((_, asked)) = link.acknowledged.filter(|(before, _)| bytes > *before) {
            link.last_heard = link.last_heard.max(asked);
        }
        link.acknowledged = (bytes > 0).then_some((bytes, now));
    }

    /// Takes what it can of the bytes that arrived on a link. An error says how the peer broke the protocol: the link is to
    /// be closed with it.
    pub(crate) fn consume(&mut self, id: LinkId, bytes: &[u8], now: Instant) -> Result<Consumed<E::Memory>, Failure> {
        let mut used = 0;
        let Some(link) = self.links.get_mut(id) else {
            return Ok(Consumed { used: bytes.len(), target: None });
        };
        link.last_heard = now;
        // What began a frame is in `bytes` again: counted as partial, too, it would count twice while the frame is handled.
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
            if !self.links.contains_key(id) {
                return Ok(Consumed { used: bytes.len(), target: None });
            }
        }
        while used < bytes.len() {
            let (message, body, len) = match wire::take(&bytes[used..]) {
                Ok(Frame::Incomplete) => break,
                Ok(Frame::Whole(message, body, len)) => (message, Some(body), len),
                Ok(Frame::Damaged(message, len)) => (message, None, len),
                Err(FrameError::Broken(reason)) => return Err(broken(reason)),
                Err(FrameError::Damaged) => return Err(Failure::Checksum),
            };
            used += len;
            let may_have_body = matches!(message, Message::Request { .. } | Message::Response { .. });
            if !may_have_body && body != Some(&[]) {
                return Err(broken("a body behind a message that has none".to_owned()));
            }
            if let Message::Data { stream, id: number, offset, len } = message {
                let place = self.receive_target(id, stream, number, offset, len as usize)?;
                self.watch(id, now);
                return Ok(Consumed { used, target: Some(place) });
            }
            self.handle_message(id, message, body, now)?;
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

    /// Without a body: it was damaged on its way.
    fn handle_message(&mut self, id: LinkId, message: Message<'_>, body: Option<&[u8]>, now: Instant) -> Result<(), Failure> {
        if self.stage == EngineStage::Closed && message != Message::Goodbye {
            // Nothing is wanted any more, and nothing may be said back.
            return Ok(());
        }
        match message {
            Message::Request { .. } => return self.handle_request(id, message, body, now),
            Message::Response { .. } => self.handle_response(id, message, body)?,
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
            Message::ResumptionToken { token: ticket } => self.handle_resumption_token(id, ticket),
            Message::Handled { count, calls, bytes } => self.handle_handled(id, count, calls, bytes),
            Message::Goodbye => {
                self.close(id, Failure::Disconnected { reason: "it was finalized".into() });
            }
            Message::Release(leases) => self.handle_release(id, leases),
            Message::Revoked { token } => self.handle_revoked(id, u128::from_le_bytes(token)),
            Message::Shutdown { call } => self.handle_shutdown(id, call),
            Message::Data { .. } => unreachable!("`consume` takes payloads itself"),
        }
        Ok(())
    }
}

/// The peer does not keep to the protocol.
pub(super) fn broken(reason: String) -> Failure {
    Failure::Disconnected { reason: format!("it broke the protocol: {reason}") }
}
