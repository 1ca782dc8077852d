//! What arrives: the byte stream, and payloads, which are reported in the order in which they were announced.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::super::bulk::{CHECKSUM, PayloadPosted};
use super::super::limits::{EAGER, MAX_ANNOUNCED, RETRY, STALL};
use super::super::sys::{CompletionError, Label};
use super::super::wire::OfiContent;
use super::OfiLink;
use crate::memory::Slice;
use crate::transport::{LinkKey, PartialFrame, PayloadStatus, ReceiveTarget, Sink};

/// Tags of payloads have this bit, which that of messages has not. All providers have 48 bits.
const PAYLOAD_TAG: u64 = 1 << 46;

pub(super) struct OfiInbox {
    /// The sequence number of the next message.
    next: u32,
    partial: PartialFrame,
    /// Where the payload goes that the byte stream has announced.
    target: Option<ReceiveTarget<Slice>>,
    /// How much of it has arrived in messages, and whether all of that is right.
    got: usize,
    status: PayloadStatus,
    /// Payloads that are not reported yet, in order.
    pub(super) payloads: VecDeque<ArrivingPayload>,
    pub(super) slots: Slots,
    /// The tag of the next payload: from a random number on, so that only the peer knows it.
    tag: u64,
    /// A payload has arrived with a checksum: from then on, all must have one.
    has_covered: bool,
    /// When the last payload has arrived, or the first one was expected.
    pub(super) last_progress: Option<Instant>,
}

pub(super) struct ArrivingPayload {
    pub number: u64,
    pub state: PayloadState,
}

impl ArrivingPayload {
    /// It is announced, and comes to this slot.
    pub(super) fn comes_to(&self, slot: u8) -> bool {
        matches!(self.state, PayloadState::Coming { slot: its, .. } if its == slot)
    }
}

pub(super) enum PayloadState {
    /// It comes to a slot. `None`: its bytes are discarded.
    Coming {
        memory: Option<Slice>,
        len: usize,
        covered: bool,
        slot: u8,
    },
    /// The provider had no room for its receive.
    Waiting {
        memory: Slice,
        covered: bool,
    },
    /// The peer is sending it: into the memory, or into a buffer.
    Posted {
        memory: Slice,
        covered: bool,
    },
    Done(PayloadStatus),
}

/// A receive for payloads that come at once.
pub(super) enum Slot {
    Posted,
    /// Payloads have come, which may not all be announced yet.
    Filled(SlotContent),
    /// They have arrived, and the provider had no room for the next receive.
    Unposted(Vec<u8>),
}

/// What has come to a slot.
pub(in super::super) struct SlotContent {
    pub result: Result<usize, CompletionError>,
    pub buffer: Vec<u8>,
    /// What went beside it: an encoded `Load`.
    pub load: u64,
}

/// The slots of a link: see `eager.rs`.
#[derive(Default)]
pub(super) struct Slots {
    pub first_tag: u64,
    pub all: Vec<Slot>,
}

impl Slots {
    fn are_open(&self) -> bool {
        !self.all.is_empty()
    }
}

/// No payload of the bulk endpoint.
const INLINE: u64 = u64::MAX;

pub(super) fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it sent {what}"))
}

impl OfiInbox {
    pub(super) fn new(first_tag: u64) -> OfiInbox {
        OfiInbox {
            next: 0,
            partial: PartialFrame::default(),
            target: None,
            got: 0,
            status: PayloadStatus::Whole,
            payloads: VecDeque::new(),
            slots: Slots::default(),
            tag: first_tag,
            has_covered: false,
            last_progress: None,
        }
    }

    /// Messages arrive in order, unless the provider has lost some.
    pub(super) fn check_sequence(&mut self, sequence: u32) -> io::Result<()> {
        if sequence != self.next {
            let (next, lost) = (self.next, sequence.wrapping_sub(self.next));
            let what = format!("the provider has lost messages: number {sequence} came in place of {next} ({lost} later)");
            return Err(io::Error::new(io::ErrorKind::ConnectionReset, what));
        }
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Bytes of the stream have arrived. False when the sink has closed the link.
    pub(super) fn feed(&mut self, key: LinkKey, bytes: &[u8], sink: &mut dyn Sink) -> io::Result<bool> {
        if self.target.is_some() {
            return Err(broken("something else in place of a payload"));
        }
        let Some((target, behind)) = self.partial.offer(bytes, |bytes| sink.bytes(key, bytes)) else { return Ok(false) };
        if target.is_some() && !behind.is_empty() {
            return Err(broken("bytes in place of a payload"));
        }
        self.target = target;
        Ok(true)
    }

    fn take_target(&mut self) -> io::Result<ReceiveTarget<Slice>> {
        if self.payloads.len() >= MAX_ANNOUNCED {
            return Err(broken("more payloads than can be under way"));
        }
        self.target.take().ok_or_else(|| broken("a payload that it did not announce"))
    }

    fn check_covered(&mut self, covered: bool) -> io::Result<()> {
        if self.has_covered && !covered {
            return Err(broken("a payload without a checksum, after one that had it"));
        }
        self.has_covered |= covered;
        Ok(())
    }

    /// Part of a payload has arrived in a message, with its checksum, if any; `None`: its memory is gone.
    pub(super) fn deliver(&mut self, key: LinkKey, payload: Option<(&[u8], Option<u32>)>, sink: &mut dyn Sink) -> io::Result<()> {
        if let Some((_, sum)) = payload {
            self.check_covered(sum.is_some())?;
        }
        let target = self.target.as_ref().ok_or_else(|| broken("a payload that it did not announce"))?;
        let Some((bytes, sum)) = payload else {
            self.status = PayloadStatus::SourceGone;
            return self.delivered(key, sink);
        };
        let left = target.len - self.got;
        if bytes.len() > left || bytes.is_empty() && left > 0 {
            return Err(broken("a payload of another length than announced"));
        }
        if let Some(memory) = &target.memory {
            if sum.is_some_and(|sum| sum != crc32c::crc32c(bytes)) {
                self.status = PayloadStatus::Damaged;
            } else if self.status == PayloadStatus::Whole
                && !memory.part(self.got, bytes.len()).is_some_and(|part| part.write(bytes))
            {
                self.status = PayloadStatus::TargetGone;
            }
        }
        self.got += bytes.len();
        if bytes.len() == left {
            return self.delivered(key, sink);
        }
        sink.heard(key);
        Ok(())
    }

    fn delivered(&mut self, key: LinkKey, sink: &mut dyn Sink) -> io::Result<()> {
        self.take_target()?;
        self.got = 0;
        let status = std::mem::replace(&mut self.status, PayloadStatus::Whole);
        self.payloads.push_back(ArrivingPayload { number: INLINE, state: PayloadState::Done(status) });
        self.report(key, sink);
        Ok(())
    }

    /// Reports the payloads that have arrived, and before which no other is missing.
    pub(super) fn report(&mut self, key: LinkKey, sink: &mut dyn Sink) {
        while let Some(ArrivingPayload { state: PayloadState::Done(status), .. }) = self.payloads.front() {
            let status = *status;
            self.payloads.pop_front();
            sink.payload_done(key, status);
        }
    }

    fn next_tag(&mut self) -> u64 {
        self.tag = self.tag.wrapping_add(1);
        PAYLOAD_TAG | self.tag & (PAYLOAD_TAG - 1)
    }

    /// So many tags, from this one on.
    pub(super) fn next_tags(&mut self, count: u64) -> u64 {
        let first = self.next_tag();
        self.tag = self.tag.wrapping_add(count);
        first
    }

    fn is_expecting(&self) -> bool {
        self.payloads.iter().any(|payload| matches!(payload.state, PayloadState::Posted { .. } | PayloadState::Coming { .. }))
    }

    /// A payload is expected from now on.
    pub(super) fn expect(&mut self, payload: ArrivingPayload) {
        if !self.is_expecting() {
            self.last_progress = Some(Instant::now());
        }
        self.payloads.push_back(payload);
    }

    /// Where a payload goes that is announced under this number.
    pub(super) fn announced_target(&mut self, number: u64, len: usize, covered: bool) -> io::Result<ReceiveTarget<Slice>> {
        let target = self.take_target()?;
        if len != target.len || self.got > 0 {
            return Err(broken("a payload of another length than announced"));
        }
        if number == INLINE || self.payloads.iter().any(|payload| payload.number == number) {
            return Err(broken("a payload under the number of another one"));
        }
        self.check_covered(covered)?;
        Ok(target)
    }

    /// A peer that is alive, and sends nothing of a payload for long: the provider has lost its connection. Returns when to look
    /// again.
    pub(super) fn check_stall(&self, now: Instant) -> io::Result<Option<Instant>> {
        let Some(since) = self.last_progress.filter(|_| self.is_expecting()) else { return Ok(None) };
        if now < since + STALL {
            return Ok(Some(since + STALL));
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("a payload has not arrived for {STALL:?}")))
    }
}

impl OfiLink {
    /// The peer announces a payload that goes between the bulk endpoints.
    pub(super) fn payload_announced(
        &self,
        inbox: &mut OfiInbox,
        number: u64,
        len: usize,
        covered: bool,
        name: &[u8],
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        let target = inbox.announced_target(number, len, covered)?;
        let Some(memory) = target.memory else {
            inbox.payloads.push_back(ArrivingPayload { number, state: PayloadState::Done(PayloadStatus::Whole) });
            self.send_control(&OfiContent::Taken { number })?;
            inbox.report(self.key, sink);
            return Ok(());
        };
        let bulk = self.bulk()?;
        bulk.set_peer(name, self.remote)?;
        self.shared.begin_payload(&bulk);
        inbox.expect(ArrivingPayload { number, state: PayloadState::Waiting { memory, covered } });
        if len <= EAGER && !inbox.slots.are_open() {
            self.open_slots(inbox)?;
        }
        if self.post_waiting(inbox, sink)? {
            self.wants_timer(Instant::now() + RETRY);
        }
        if let Some(since) = inbox.last_progress {
            self.wants_timer(since + STALL);
        }
        Ok(())
    }

    /// Tries again to post the receives that the provider had no room for. True when some wait on.
    pub(super) fn receive_waiting(&self, sink: &mut dyn Sink) -> io::Result<bool> {
        self.post_waiting(&mut self.inbox.lock(), sink)
    }

    fn post_waiting(&self, inbox: &mut OfiInbox, sink: &mut dyn Sink) -> io::Result<bool> {
        for index in 0..inbox.payloads.len() {
            let PayloadState::Waiting { memory, covered } = &inbox.payloads[index].state else { continue };
            let (memory, covered, number) = (memory.clone(), *covered, inbox.payloads[index].number);
            let tag = inbox.next_tag();
            let label = Label::Payload { link: self.number, number };
            let bulk = self.bulk()?;
            match bulk.receive(&memory, tag, label, covered)? {
                PayloadPosted::Busy => return Ok(true),
                PayloadPosted::Gone => {
                    inbox.payloads[index].state = PayloadState::Done(PayloadStatus::TargetGone);
                    bulk.end_payload();
                    self.send_control(&OfiContent::Taken { number })?;
                }
                PayloadPosted::Begun => {
                    inbox.payloads[index].state = PayloadState::Posted { memory, covered };
                    self.send_control(&OfiContent::Ready { number, tag, name: bulk.name() })?;
                }
            }
        }
        inbox.report(self.key, sink);
        self.post_slots(inbox)
    }

    pub(super) fn send_control(&self, content: &OfiContent<'_>) -> io::Result<()> {
        let sent = self.out.lock().send(&self.port, content);
        sent?;
        self.check_sent(Ok(()));
        Ok(())
    }

    /// A payload has arrived, in its memory or in this buffer, or its receive has failed.
    pub(in super::super) fn payload_received(
        &self,
        number: u64,
        result: Result<usize, CompletionError>,
        buffer: Option<Vec<u8>>,
        sink: &mut dyn Sink,
    ) {
        if self.is_closed() {
            return;
        }
        self.hold();
        let mut inbox = self.inbox.lock();
        let Some(payload) = inbox.payloads.iter_mut().find(|payload| payload.number == number) else { return };
        let PayloadState::Posted { memory, covered } = &payload.state else { return };
        match arrived(Some(memory), memory.len, *covered, result, buffer.as_deref()) {
            Ok(status) => {
                payload.state = PayloadState::Done(status);
                inbox.last_progress = Some(Instant::now());
                if let Ok(bulk) = self.bulk() {
                    bulk.end_payload();
                }
                if let Err(error) = self.send_control(&OfiContent::Taken { number }) {
                    self.fail(error);
                }
                inbox.report(self.key, sink);
            }
            Err(error) => {
                drop(inbox);
                self.report_failure(error, sink);
            }
        }
    }
}

/// The length of what a receive for payloads has got.
pub(super) fn received(result: Result<usize, CompletionError>) -> io::Result<usize> {
    result.map_err(|error| match error.is_truncated() {
        true => broken("a payload that is longer than announced"),
        false => error.into(),
    })
}

/// How a payload has arrived.
pub(super) fn arrived(
    memory: Option<&Slice>,
    expected: usize,
    covered: bool,
    result: Result<usize, CompletionError>,
    buffer: Option<&[u8]>,
) -> io::Result<PayloadStatus> {
    let len = received(result)?;
    if len == 0 {
        return Ok(PayloadStatus::SourceGone);
    }
    if len != expected + if covered { CHECKSUM } else { 0 } {
        return Err(broken("a payload of another length than announced"));
    }
    let Some(buffer) = buffer else { return Ok(PayloadStatus::Whole) };
    let Some((bytes, sum)) = buffer.get(..len).and_then(|bytes| bytes.split_at_checked(expected)) else {
        return Err(broken("a payload of another length than announced"));
    };
    if covered && sum != crc32c::crc32c(bytes).to_le_bytes() {
        return Ok(PayloadStatus::Damaged);
    }
    Ok(if memory.is_none_or(|memory| memory.write(bytes)) { PayloadStatus::Whole } else { PayloadStatus::TargetGone })
}
