//! One link: its state, what is held for its peer, and what waits to be sent.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use super::access::IncomingPush;
use super::credit::{ReceiveWindow, SendCredit};
use super::declarations::{OwnDeclarations, PeerDeclarations};
use super::keys::AuthState;
use super::limits::{LEASE_COST, TRANSFER_COST, UNCOUNTED};
use super::streams::{Chunk, Streams};
use super::tables::NumberMap;
use super::wire::{self, Message, Stream};
use super::{CallId, Env, LinkId, Output, PeerId, RequestId, TransferId};
use crate::Address;

/// Longest payload of one `Data`, unless the transport sets another. A small message waits behind no more than one (some 80 µs
/// on loopback). Bulks over tcp were measured at 0.6 to 0.7 of the raw stream with 256 KiB, at 0.8 to 1.1 with this, and no
/// better with 1 MiB.
const CHUNK: usize = 512 << 10;
/// Longest payload of one `Data` that is accepted.
pub(super) const MAX_CHUNK: usize = 4 << 20;
/// Payloads of a link that the peer may be reading from this side's memory at a time: the one that it reads, and the next ones.
const MAX_EXPORTED: isize = 4;
/// A send buffer that has grown beyond this is freed, not reused.
const KEEP: usize = 64 << 10;

/// With so many calls in progress, a further one may wait to be sent together with others.
const MANY: usize = 8;
/// So many bytes are worth a send of their own.
const WORTH_SENDING: usize = 16 << 10;

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

pub(super) struct PeerLink<E: Env> {
    pub state: LinkState,
    pub dialled: bool,
    /// Both ends are on this host, as far as the transport knows.
    pub local: bool,
    /// The peer's address, as far as the transport knows.
    pub remote: Address,
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
    /// How many calls are among them.
    waiting_calls: usize,
    spare: Vec<u8>,
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
    /// Devices at both ends can reach each other's memory.
    pub rma_capable: bool,
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

    /// As `queue_frame`, for an answer.
    pub(super) fn queue_response(&mut self, message: &Message<'_>, body: &[u8]) {
        let before = self.control.len();
        self.queue_frame(message, body);
        self.account.answers += self.control.len() - before;
    }

    /// As `queue_frame`, for any other reply to the peer.
    pub(super) fn queue_control(&mut self, message: &Message<'_>) {
        self.queue_control_with(message, &[]);
    }

    pub(super) fn queue_control_with(&mut self, message: &Message<'_>, body: &[u8]) {
        let before = self.control.len();
        self.queue_frame(message, body);
        self.account.control += self.control.len() - before;
    }

    /// A call was queued. True when it may wait for more: the peer has more calls to handle meanwhile than would wait.
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

    /// Whether the link's accounted bytes count in total, or did.
    pub(super) fn counts(&self) -> bool {
        self.accounted_bytes() > UNCOUNTED || self.account.counted > 0
    }

    /// Bytes held for the peer, besides its requests. Leases are among them: a peer that keeps the bulks of its answers gets no
    /// more of them.
    pub(super) fn accounted_bytes(&self) -> usize {
        let Account { answers, control, sending, partial, .. } = self.account;
        let tables = TRANSFER_COST * self.transfers() + LEASE_COST * self.leases.len();
        answers + control + sending + partial + self.declarations.bytes + self.streams.answering() + tables
    }

    /// Those of them that can't be refused.
    pub(super) fn unrefusable_bytes(&self) -> usize {
        self.account.control + self.account.partial + self.declarations.bytes
    }

    /// Transfers of the peer that are in progress.
    pub(super) fn transfers(&self) -> usize {
        self.streams.pulls() + self.pushes.len()
    }

    pub(super) fn wants_to_send(&self) -> bool {
        match self.state {
            LinkState::Dialling => false,
            LinkState::Handshaking => !self.handshake.is_empty(),
            LinkState::Open => !self.handshake.is_empty() || !self.control.is_empty() || self.may_stream(),
        }
    }

    fn may_stream(&self) -> bool {
        self.exported < MAX_EXPORTED && !self.streams.is_empty()
    }

    pub(super) fn is_flushed(&self) -> bool {
        !self.in_flight && self.exported == 0 && !self.wants_to_send()
    }

    /// A measure of what is left to send. It is not in bytes, but shrinks with all that is sent.
    pub(super) fn unsent(&self) -> usize {
        1 + self.control.len() + self.streams.unsent() + usize::from(self.in_flight) + self.exported.unsigned_abs()
    }

    /// True when the link has something to send from now on; it is to be put in `Proto::ready` then.
    pub(super) fn becomes_ready(&mut self) -> bool {
        let becomes = !self.queued && !self.in_flight && self.wants_to_send();
        self.queued |= becomes;
        becomes
    }

    /// Sets the longest payload to send.
    pub(super) fn set_chunk(&mut self, len: usize) {
        self.chunk = len.clamp(1, MAX_CHUNK);
    }

    /// A transmit is out; its buffer is reused. If the payload was `exported`, the peer is still reading it.
    pub(super) fn sent(&mut self, mut bytes: Vec<u8>, exported: bool) {
        self.in_flight = false;
        self.account.sending = 0;
        self.exported += isize::from(exported);
        if bytes.capacity() <= KEEP {
            bytes.clear();
            self.spare = bytes;
        }
    }

    /// The peer has read a payload that was exported to it.
    pub(super) fn returned(&mut self) {
        self.exported -= 1;
    }

    /// The next thing to send: all queued frames, and one chunk.
    pub(super) fn transmit(&mut self, id: LinkId) -> Option<Output<E>> {
        self.queued = false;
        if self.in_flight || !self.wants_to_send() {
            return None;
        }
        self.in_flight = true;
        self.waiting_calls = 0;
        self.account.sending = std::mem::take(&mut self.account.answers) + std::mem::take(&mut self.account.control);
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

    /// The operation is over: what is still arriving for it is discarded.
    pub(super) fn discard_inbound(&mut self, kind: Stream, id: u64) {
        self.inbound.iter_mut().filter(|l| l.kind == kind && l.id == id).for_each(|l| l.wanted = false);
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
        note("exported payloads", self.exported.unsigned_abs());
        let Account { requests, answers, control, sending, partial, .. } = self.account;
        note("bytes of requests", requests);
        note("bytes of incomplete frames", partial);
        note("bytes of answers", answers + control + sending + self.streams.answering());
        note("pulls of the peer", self.streams.pulls());
    }
}
