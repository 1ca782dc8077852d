//! What goes out on a link: frames, and chunks of payloads.

use std::collections::VecDeque;

use super::super::streams::Chunk;
use super::super::wire::{self, Message};
use super::super::{Carrier, Env, Injected, LinkId, Output, Proto};
use super::{LinkState, PeerLink};

/// Longest payload of one `Data` while calls arrive: the driver handles none of them while it sends one or reads one. So short
/// ones take up to half of the bandwidth of a transfer that is alone.
const CHUNK_BESIDE_CALLS: usize = 128 << 10;
/// So many chunks are short after a call.
const SHORT_CHUNKS: u32 = 16;
/// Payloads of a link that the peer may be reading from this side's memory at a time: the one that it reads, and the next ones.
/// More of those that are short, since transports send them together; fewer of those that are long, since the peer has to read all
/// of them before their memory can be reclaimed.
const MAX_EXPORTED: isize = 4;
const MAX_SHORT_EXPORTED: isize = 16;
const MAX_LONG_EXPORTED: isize = 2;
const SHORT: usize = 64 << 10;
const LONG: usize = 1 << 20;
/// A send buffer that has grown beyond this is freed, not reused.
const KEEP: usize = 64 << 10;

/// The longest frames that are sent while the protocol is locked: to copy them takes less time than to unlock it, and to lock it
/// again when they are sent.
const MAX_INJECTED_BYTES: usize = 4 << 10;
/// With so many calls and transfers in progress, a further one may wait to be sent together with others; and with so many requests
/// unanswered, an answer.
const MANY: usize = 4;
/// So many bytes are worth a send of their own.
const WORTH_SENDING: usize = 16 << 10;
/// So many bytes of pushes do not wait for more of them.
const MAX_WAITING: usize = 512 << 10;

/// For what a call, a transfer or an answer that was queued may wait, to be sent together with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MayWait {
    #[default]
    No,
    /// To send takes a system call: for the driver's next poll, if that is at hand.
    ForNextPoll,
    /// The peer has more to handle meanwhile than would wait.
    ForMore,
}

/// What was queued since the last send, and may wait for more.
#[derive(Default)]
pub(super) struct Waiting {
    /// Calls and transfers, and answers that wait.
    operations: usize,
    /// Streams of short pushes among them, and their bytes.
    streams: usize,
    bytes: usize,
}

impl<E: Env> PeerLink<E> {
    /// A call or a transfer was queued. `streamed`: so many bytes of a push follow it. They wait where they can leave with others.
    pub(in crate::proto) fn may_wait(&mut self, streamed: usize) -> MayWait {
        let waiting = &mut self.waiting;
        waiting.operations += 1;
        if (1..=SHORT).contains(&streamed) && self.gathers {
            waiting.streams += 1;
            waiting.bytes += streamed;
        }
        if !self.is_open()
            || self.streams.len() != self.waiting.streams
            || self.control.len() >= WORTH_SENDING
            || self.waiting.bytes >= MAX_WAITING
        {
            return MayWait::No;
        }
        let under_way = self.pending.max(self.outgoing.out as usize);
        if under_way >= MANY && 2 * self.waiting.operations < under_way {
            MayWait::ForMore
        } else if self.takes_system_calls {
            MayWait::ForNextPoll
        } else {
            MayWait::No
        }
    }

    /// An answer was queued. It may wait for a moment where the peer waits for more answers than would.
    #[inline]
    pub(in crate::proto) fn answer_may_wait(&mut self) -> MayWait {
        if !self.takes_system_calls || !self.is_open() || !self.streams.is_empty() || self.control.len() >= WORTH_SENDING {
            return MayWait::No;
        }
        let (owed, waiting) = (self.requests.len().saturating_sub(self.cancelled), self.waiting.operations + 1);
        if owed < MANY || 2 * waiting >= owed {
            return MayWait::No;
        }
        self.waiting.operations = waiting;
        MayWait::ForNextPoll
    }

    pub(in crate::proto) fn wants_to_send(&self) -> bool {
        match self.state {
            LinkState::Dialling => false,
            LinkState::Handshaking => !self.handshake.is_empty(),
            LinkState::Open => {
                !self.handshake.is_empty() || !self.control.is_empty() || self.released.count > 0 || self.may_stream()
            }
        }
    }

    fn may_stream(&self) -> bool {
        self.may_stream_beside(self.exported)
    }

    /// Whether the next chunk may be sent while so many are exported.
    fn may_stream_beside(&self, exported: isize) -> bool {
        self.streams.next_len().is_some_and(|len| {
            let most = match len.min(self.longest_chunk()) {
                len if len <= SHORT => MAX_SHORT_EXPORTED,
                len if len <= LONG => MAX_EXPORTED,
                _ => MAX_LONG_EXPORTED,
            };
            exported < most
        })
    }

    pub(super) fn is_flushed(&self) -> bool {
        !self.in_flight && self.exported == 0 && !self.wants_to_send()
    }

    /// True when the link has something to send from now on; it is to be put in `Proto::ready` then.
    fn becomes_ready(&mut self) -> bool {
        let becomes = !self.queued && !self.in_flight && self.wants_to_send();
        self.queued |= becomes;
        becomes
    }

    /// Sends the queued frames at once, if they are few, nothing else is to be sent, and the transport can do that.
    pub(in crate::proto) fn inject(&mut self, outputs: &mut VecDeque<Output<E>>) -> bool {
        self.queue_released();
        let Some(carrier) = self.carrier.as_ref().filter(|_| self.injects) else { return false };
        let only_frames = self.is_open() && self.handshake.is_empty() && self.streams.is_empty() && !self.closing;
        if !only_frames || self.in_flight || self.control.is_empty() || self.control.len() > MAX_INJECTED_BYTES {
            return false;
        }
        match carrier.inject(&self.control) {
            Injected::No => return false,
            Injected::Yes => {}
            Injected::PeerSleeps => outputs.push_back(Output::WakePeer { carrier: carrier.clone() }),
        }
        self.queued = false;
        self.waiting = Waiting::default();
        (self.account.answers, self.account.control) = (0, 0);
        self.traffic.sent_bytes += self.control.len() as u64;
        self.control.clear();
        true
    }

    /// The next thing to send: all queued frames, and one chunk. `calls`: how many calls and answers have arrived at the engine.
    pub(in crate::proto) fn transmit(&mut self, id: LinkId, calls: u64) -> Option<Output<E>> {
        self.queued = false;
        if self.in_flight || !self.wants_to_send() {
            return None;
        }
        self.queue_released();
        self.in_flight = true;
        self.waiting = Waiting::default();
        self.account.sending = std::mem::take(&mut self.account.answers) + std::mem::take(&mut self.account.control);
        if !self.handshake.is_empty() {
            let bytes = std::mem::take(&mut self.handshake);
            self.traffic.sent_bytes += bytes.len() as u64;
            return Some(Output::Transmit { link: id, carrier: self.carrier.clone(), bytes, payload: None, more: false });
        }
        let mut bytes = std::mem::replace(&mut self.control, std::mem::take(&mut self.spare));
        let mut payload = None;
        let next = if self.may_stream() { self.next_chunk(calls) } else { None };
        if let Some(Chunk { kind: stream, id, offset, len, memory }) = next {
            payload = memory;
            wire::put(&mut bytes, &Message::Data { stream, id, offset: offset as u64, len: len as u32 }, &[], false);
            self.traffic.sent_bytes += len as u64;
        }
        self.traffic.sent_bytes += bytes.len() as u64;
        let more = payload.is_some() && self.may_stream_beside(self.exported + 1);
        Some(Output::Transmit { link: id, carrier: self.carrier.clone(), bytes, payload, more })
    }

    fn longest_chunk(&self) -> usize {
        if self.short_chunks > 0 { self.chunk.min(CHUNK_BESIDE_CALLS) } else { self.chunk }
    }

    fn next_chunk(&mut self, calls: u64) -> Option<Chunk<E::Memory>> {
        // The call that a transfer belongs to came before its first chunk.
        if self.calls_before.is_some_and(|before| before != calls) {
            self.short_chunks = SHORT_CHUNKS;
        }
        let most = self.longest_chunk();
        self.short_chunks = self.short_chunks.saturating_sub(1);
        let next = self.streams.next(most);
        self.calls_before = (!self.streams.is_empty()).then_some(calls);
        next
    }
}

impl<E: Env> Proto<E> {
    /// Queues the link for sending, if it has anything to send.
    pub(in crate::proto) fn mark_ready(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if link.becomes_ready() {
            self.ready.push_back(id);
        }
        if link.counts() {
            self.recount(id);
        }
    }

    /// Sets what carries the link; returns what did before, or `carrier` where there is no such link any more.
    pub(crate) fn set_carrier(&mut self, id: LinkId, carrier: E::Carrier) -> Option<E::Carrier> {
        match self.links.get_mut(id) {
            Some(link) => {
                (link.injects, link.gathers) = (carrier.injects(), carrier.gathers());
                link.takes_system_calls = carrier.takes_system_calls();
                link.carrier.replace(carrier)
            }
            None => Some(carrier),
        }
    }

    /// The peer has read a payload that was exported to it.
    pub(crate) fn handle_returned(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.exported -= 1;
        if link.closing {
            self.touch_closing(id);
        } else {
            self.mark_ready(id);
        }
    }

    /// A transmit is out; its buffer is reused. If the payload was `exported`, the peer is still reading it.
    pub(crate) fn handle_sent(&mut self, id: LinkId, mut bytes: Vec<u8>, exported: bool) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.in_flight = false;
        link.account.sending = 0;
        link.exported += isize::from(exported);
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
}
