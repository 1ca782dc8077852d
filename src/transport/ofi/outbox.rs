//! The sending side of a link: messages in sequence, within the peer's credit, and payloads that wait for the peer.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::backlog::Backlog;
use super::limits::{CREDITS, EAGER, MAX_UNSENT, MESSAGE, MOST_ANNOUNCED, MOST_KEPT, SLOT, SLOTS, TAKEN_AT_ONCE};
use super::port::{PeerName, Port};
use super::sys::{EndpointName, Label, MAX_NAME, PeerAddress};
use super::wire::{self, HEADER, MOST_TOGETHER, OfiContent, OfiHeader};
use crate::memory::Slice;

/// A frame and its payload, partly sent.
pub(super) struct OfiSend {
    pub bytes: Vec<u8>,
    at: usize,
    payload: Option<Slice>,
    /// How much of the payload is sent.
    payload_at: usize,
}

impl OfiSend {
    pub(super) fn new(bytes: Vec<u8>, payload: Option<Slice>) -> OfiSend {
        OfiSend { bytes, at: 0, payload, payload_at: 0 }
    }
}

/// How far a frame has come.
pub(super) enum FrameProgress {
    All,
    /// The payload waits until the peer is ready for it.
    PayloadAnnounced,
    /// There is no credit for the rest, or the provider keeps as much as it may.
    Partly,
}

/// A payload that the peer has been told of.
pub(super) struct AnnouncedPayload {
    pub number: u64,
    pub memory: Slice,
    pub covered: bool,
}

/// Payloads that go together to a receive of the peer, with its tag: to a slot, or one alone.
pub(super) struct Parcel {
    pub payloads: Vec<AnnouncedPayload>,
    pub tag: u64,
    pub slot: Option<usize>,
}

impl Parcel {
    /// The bytes that it has at the receiver.
    fn len(&self) -> usize {
        self.payloads.iter().map(|payload| payload.memory.len).sum()
    }
}

pub(super) struct OfiOutbox {
    peer: PeerAddress,
    backlog: Arc<Backlog>,
    /// The peer's number of the link; 0 until it is known.
    to: u64,
    /// Of the next message.
    sequence: u32,
    /// Messages that took a credit, and how many of them the peer has handled; the most that may be under way.
    sent: u32,
    peer_handled: u32,
    most: u32,
    /// Longest message that the peer accepts.
    longest: usize,
    /// The peer's messages that took a credit: handled, and reported as handled.
    handled: u32,
    reported: u32,
    /// The message that is being made: further parts may be added until it is posted. Empty: there is none.
    gathered: Vec<u8>,
    /// It takes a credit; it is the last one.
    gathered_credited: bool,
    gathered_last: bool,
    /// It has something that does not wait for company; and how many reports of payloads that have arrived.
    gathered_urgent: bool,
    gathered_taken: usize,
    /// The driver posts it at the end of its pass, when the link has nothing more to say.
    held: bool,
    /// A further frame follows the next one.
    more: bool,
    /// The driver will call `release`.
    listed: bool,
    /// Messages that the provider had no room for: it has no connection yet, or the peer is dead; or for which it may not be asked,
    /// since it keeps so many.
    unsent: VecDeque<Vec<u8>>,
    blocked_since: Option<Instant>,
    pub pending: Option<OfiSend>,
    announced: Vec<AnnouncedPayload>,
    next_payload: u64,
    /// The tag of the peer's first slot for payloads that are sent at once, and the payloads that use each.
    first_slot: u64,
    slots: Vec<Vec<u64>>,
    /// Most payloads that go to a slot together.
    most_together: usize,
    /// The payloads that the peer may not have reported to its engine, from the oldest that has not arrived on: it reports them in their
    /// order. Without a number: it went in messages, or has arrived.
    unreported: VecDeque<Option<u64>>,
    /// To send once the announcements are posted. The last one takes further payloads while it has room.
    eager: Vec<Parcel>,
    /// An empty buffer, for reuse.
    scratch: Vec<u8>,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl OfiOutbox {
    /// Without a peer, whose name is not known yet, nothing can be sent.
    pub(super) fn new(peer: Option<&PeerName>) -> OfiOutbox {
        OfiOutbox {
            peer: peer.map_or(PeerAddress::UNKNOWN, PeerName::address),
            backlog: peer.map_or_else(
                || Arc::new(Backlog::new(0, EndpointName::of(([0, 0, 0, 0], 0).into()))),
                |peer| peer.backlog().clone(),
            ),
            to: 0,
            sequence: 0,
            sent: 0,
            peer_handled: 0,
            most: 0,
            longest: MESSAGE,
            handled: 0,
            reported: 0,
            gathered: Vec::new(),
            gathered_credited: false,
            gathered_last: false,
            gathered_urgent: false,
            gathered_taken: 0,
            held: false,
            more: false,
            listed: false,
            unsent: VecDeque::new(),
            blocked_since: None,
            pending: None,
            announced: Vec::new(),
            next_payload: 0,
            first_slot: 0,
            slots: Vec::new(),
            most_together: 1,
            unreported: VecDeque::new(),
            eager: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// The peer's parameters have arrived.
    pub(super) fn open(&mut self, to: u64, credits: u16, longest: u32) {
        self.to = to;
        self.most = u32::from(credits).min(CREDITS);
        self.longest = MESSAGE.min(longest as usize);
    }

    /// The link has ended: nothing is sent any more.
    pub(super) fn clear(&mut self, port: &Port) {
        // Of what waits, the last message of all is sent, beyond the bound, to learn from its completion when all have left. The
        // peer finds a gap. One that has caused that before is spared it: then such a message was the last one posted.
        if self.to != 0
            && self.backlog.len() <= MOST_KEPT
            && let Some(last) = self.unsent.pop_back()
        {
            let _ = self.post_now(port, last, true);
        }
        self.pending = None;
        self.gathered.clear();
        self.unsent.clear();
        self.announced.clear();
        self.eager.clear();
        self.unreported.clear();
    }

    /// Takes what the peer reports with a message. An error when it breaks a rule.
    pub(super) fn take_handled(&mut self, handled: u32) -> io::Result<()> {
        if handled.wrapping_sub(self.peer_handled) > self.sent.wrapping_sub(self.peer_handled) {
            return Err(broken("it reports handling more messages than it was sent"));
        }
        self.peer_handled = handled;
        Ok(())
    }

    /// A message that takes a credit has arrived. An error when the peer had none.
    pub(super) fn check_credit(&self) -> io::Result<()> {
        let under_way = self.handled.wrapping_sub(self.reported);
        if under_way >= CREDITS { Err(broken("it sends more messages than it has credits for")) } else { Ok(()) }
    }

    /// A message that takes a credit has been handled. Reports that by a message of its own when it is due, and no other message
    /// takes it along.
    pub(super) fn count_handled(&mut self, port: &Port) -> io::Result<()> {
        self.handled = self.handled.wrapping_add(1);
        if self.held { Ok(()) } else { self.post_gathered(port) }
    }

    /// Whether a further message that takes a credit may be sent.
    fn may_send(&self) -> bool {
        self.sent.wrapping_sub(self.peer_handled) < self.most && self.backlog.has_room()
    }

    /// From now on what is sent is gathered, until `release`. True when the driver is to be told that it must call that.
    pub(super) fn hold(&mut self) -> bool {
        self.held = true;
        !std::mem::replace(&mut self.listed, true)
    }

    /// The next frame is gathered, for the one that follows it at once.
    pub(super) fn expect_more(&mut self) {
        self.more = true;
    }

    /// Whether something is gathered for a frame that is to follow. Then the driver is to be told: it may not follow after all.
    pub(super) fn begins_to_wait(&mut self) -> bool {
        !self.gathered.is_empty() && !std::mem::replace(&mut self.listed, true)
    }

    /// Ends `hold`, and posts what was gathered. False when that waits for company, unless it has waited long enough.
    pub(super) fn release(&mut self, port: &Port, long_enough: bool) -> io::Result<bool> {
        self.held = false;
        // A payload whose announcement is posted must not wait, and neither must credit that is due.
        let urgent = self.gathered_urgent || !self.eager.is_empty() || self.owes_credit();
        if !long_enough && !urgent && (1..TAKEN_AT_ONCE).contains(&self.gathered_taken) {
            return Ok(false);
        }
        self.listed = false;
        self.post_gathered(port)?;
        Ok(true)
    }

    /// So much was handled since the last report that the peer may soon wait for one.
    fn owes_credit(&self) -> bool {
        self.handled.wrapping_sub(self.reported) >= CREDITS / 2
    }

    /// Posts what was gathered, unless the driver does that later.
    fn post_unless_held(&mut self, port: &Port) -> io::Result<()> {
        if self.held { Ok(()) } else { self.post_gathered(port) }
    }

    /// True when nothing waits for room at the provider.
    pub(super) fn flush(&mut self, port: &Port) -> io::Result<bool> {
        while let Some(message) = self.unsent.pop_front() {
            if let Some(message) = self.offer(port, message, true)? {
                self.unsent.push_front(message);
                self.blocked_since.get_or_insert_with(Instant::now);
                return Ok(false);
            }
        }
        self.blocked_since = None;
        Ok(true)
    }

    /// Since when messages wait for room at the provider.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since.filter(|_| !self.unsent.is_empty())
    }

    /// Sends a message, alone or as part of one, or keeps it until the provider has room. An error when the peer causes more of
    /// them than it reads.
    pub(super) fn send(&mut self, port: &Port, content: &OfiContent<'_>) -> io::Result<()> {
        self.gather(port, content)?;
        self.post_unless_held(port)
    }

    /// Adds to the message that is being made, or posts that and begins another. False when there is no credit for it.
    fn gather(&mut self, port: &Port, content: &OfiContent<'_>) -> io::Result<bool> {
        let credited = content.is_credited();
        if credited && !self.gathered_credited && !self.may_send() {
            return Ok(false);
        }
        if self.gathered.is_empty() || !wire::add_part(content, self.longest, &mut self.gathered) {
            if !self.gathered.is_empty() {
                self.post_gathered(port)?;
            }
            if credited && !self.may_send() {
                return Ok(false);
            }
            self.gathered = self.begin_message(content);
        }
        if credited && !self.gathered_credited {
            self.gathered_credited = true;
            self.sent = self.sent.wrapping_add(1);
        }
        self.gathered_last |= matches!(content, OfiContent::Bye);
        match content {
            OfiContent::Taken { .. } | OfiContent::Emptied { .. } => self.gathered_taken += 1,
            _ => self.gathered_urgent = true,
        }
        Ok(true)
    }

    /// The first part of a message.
    fn begin_message(&mut self, content: &OfiContent<'_>) -> Vec<u8> {
        let mut message = std::mem::take(&mut self.scratch);
        message.clear();
        wire::encode(OfiHeader { sequence: self.sequence, to: self.to, handled: self.handled }, content, &mut message);
        self.sequence = self.sequence.wrapping_add(1);
        message
    }

    fn post_gathered(&mut self, port: &Port) -> io::Result<()> {
        let mut message = std::mem::take(&mut self.gathered);
        if message.is_empty() {
            if !self.owes_credit() {
                return Ok(());
            }
            message = self.begin_message(&OfiContent::Credit);
        }
        wire::set_handled(&mut message, self.handled);
        self.reported = self.handled;
        (self.gathered_credited, self.gathered_urgent, self.gathered_taken) = (false, false, 0);
        let last = std::mem::take(&mut self.gathered_last);
        self.post(port, message, last)
    }

    /// As `send`, for the messages that open a link, which have no number in its sequence.
    pub(super) fn send_hello(&mut self, port: &Port, content: &OfiContent<'_>) -> io::Result<()> {
        // An earlier one that has not left yet will do.
        if !self.unsent.is_empty() {
            return self.flush(port).map(drop);
        }
        let to = if matches!(content, OfiContent::Hello(_)) { 0 } else { self.to };
        let mut message = Vec::new();
        wire::encode(OfiHeader { sequence: 0, to, handled: 0 }, content, &mut message);
        self.post(port, message, true)
    }

    /// The first and the last message of a link are `noted`, and have completions: with those all have left that were posted
    /// before, and the endpoint may be closed behind them.
    fn post(&mut self, port: &Port, mut message: Vec<u8>, noted: bool) -> io::Result<()> {
        if self.unsent.is_empty() {
            match self.offer(port, message, noted)? {
                None => return Ok(()),
                Some(busy) => message = busy,
            }
            self.blocked_since.get_or_insert_with(Instant::now);
        }
        self.unsent.push_back(message);
        if self.unsent.len() > MAX_UNSENT { Err(broken("it causes messages and does not read them")) } else { Ok(()) }
    }

    /// Posts a message; returns it when there is no room. `noted`: it needs a completion.
    fn offer(&mut self, port: &Port, message: Vec<u8>, noted: bool) -> io::Result<Option<Vec<u8>>> {
        if !self.backlog.has_room() {
            return Ok(Some(message));
        }
        self.post_now(port, message, noted)
    }

    fn post_now(&mut self, port: &Port, mut message: Vec<u8>, noted: bool) -> io::Result<Option<Vec<u8>>> {
        let number = self.backlog.begin();
        let posted = if message.len() <= port.inject() && !noted && !Backlog::is_noted(number) {
            port.inject_message(self.peer, &message).map(|taken| {
                let busy = (!taken).then(|| std::mem::take(&mut message));
                self.scratch = message;
                busy
            })
        } else {
            port.send(self.peer, message, Label::Sent { backlog: self.backlog.id, number })
        };
        match &posted {
            Ok(None) => {}
            Ok(Some(_)) => self.backlog.busy(),
            Err(_) => self.backlog.failed(),
        }
        posted
    }

    /// Sends what there is credit for. `name`: the address of the link's bulk endpoint, for payloads that need it.
    pub(super) fn write(
        &mut self,
        port: &Port,
        sending: &mut OfiSend,
        covered: bool,
        name: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<FrameProgress> {
        let progress = self.gather_frame(port, sending, covered, name)?;
        if !std::mem::take(&mut self.more) || matches!(progress, FrameProgress::Partly) {
            self.post_unless_held(port)?;
        }
        Ok(progress)
    }

    fn gather_frame(
        &mut self,
        port: &Port,
        sending: &mut OfiSend,
        covered: bool,
        name: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<FrameProgress> {
        let begins = sending.payload.is_some() && (sending.at, sending.payload_at) == (0, 0);
        if begins && self.unreported.len() >= MOST_ANNOUNCED {
            return Ok(FrameProgress::Partly);
        }
        let room = self.longest - HEADER;
        let announces = sending.payload.as_ref().is_some_and(|payload| payload.len > port.longest_in_messages());
        // The announcement takes the last bytes along.
        let beside = if announces { self.longest - wire::announcement(MAX_NAME) } else { 0 };
        while sending.bytes.len() - sending.at > beside {
            let end = sending.bytes.len().min(sending.at + room);
            if !self.gather(port, &OfiContent::Bytes(&sending.bytes[sending.at..end]))? {
                return Ok(FrameProgress::Partly);
            }
            sending.at = end;
        }
        let Some(payload) = &sending.payload else { return Ok(FrameProgress::All) };
        if announces && let Some(slot) = self.free_slot(payload.len, covered) {
            let (number, len, bytes) = (self.next_payload, payload.len as u32, &sending.bytes[sending.at..]);
            if !self.gather(port, &OfiContent::Eager { number, len, covered, slot: slot as u8, bytes })? {
                return Ok(FrameProgress::Partly);
            }
            self.next_payload += 1;
            self.unreported.push_back(Some(number));
            let payload = AnnouncedPayload { number, memory: payload.clone(), covered };
            match self.eager.last_mut().filter(|_| !self.slots[slot].is_empty()) {
                Some(parcel) => parcel.payloads.push(payload),
                None => {
                    let tag = self.first_slot + slot as u64;
                    self.eager.push(Parcel { payloads: vec![payload], tag, slot: Some(slot) });
                }
            }
            self.slots[slot].push(number);
            sending.payload = None;
            sending.at = sending.bytes.len();
            return Ok(FrameProgress::PayloadAnnounced);
        }
        if announces {
            let name = name()?;
            let (number, len, bytes) = (self.next_payload, payload.len as u32, &sending.bytes[sending.at..]);
            if !self.gather(port, &OfiContent::Announce { number, len, covered, name: &name, bytes })? {
                return Ok(FrameProgress::Partly);
            }
            self.next_payload += 1;
            self.unreported.push_back(Some(number));
            self.announced.push(AnnouncedPayload { number, memory: payload.clone(), covered });
            sending.payload = None;
            sending.at = sending.bytes.len();
            return Ok(FrameProgress::PayloadAnnounced);
        }
        let mut bytes = vec![0; (room - 4).min(payload.len)];
        loop {
            if !self.gathered_credited && !self.may_send() {
                return Ok(FrameProgress::Partly);
            }
            let len = bytes.len().min(payload.len - sending.payload_at);
            let bytes = &mut bytes[..len];
            if !payload.part(sending.payload_at, len).is_some_and(|part| part.read(bytes)) {
                if !self.gather(port, &OfiContent::SourceGone)? {
                    return Ok(FrameProgress::Partly);
                }
                break;
            }
            if !self.gather(port, &OfiContent::Payload { bytes, sum: covered.then(|| crc32c::crc32c(bytes)) })? {
                return Ok(FrameProgress::Partly);
            }
            sending.payload_at += len;
            if sending.payload_at == payload.len {
                break;
            }
        }
        sending.payload = None;
        if !self.unreported.is_empty() {
            self.unreported.push_back(None);
        }
        Ok(FrameProgress::All)
    }

    /// The slot for a payload: that of the last parcel, which has not left, or one that is free.
    fn free_slot(&self, len: usize, covered: bool) -> Option<usize> {
        if len > EAGER {
            return None;
        }
        let has_room = |parcel: &&Parcel| {
            let alike = parcel.payloads.iter().all(|payload| payload.covered == covered);
            alike && parcel.payloads.len() < self.most_together && parcel.len() + len <= SLOT
        };
        let begun = self.eager.last().filter(has_room).and_then(|parcel| parcel.slot);
        begun.or_else(|| self.slots.iter().position(Vec::is_empty))
    }

    /// The peer has slots, with tags from this one on, for so many payloads at most. An error when it has them already.
    pub(super) fn set_slots(&mut self, tag: u64, count: u8, most_together: usize) -> io::Result<()> {
        if !self.slots.is_empty() || tag.checked_add(u64::from(count)).is_none() {
            return Err(broken("it has receives for payloads already"));
        }
        self.first_slot = tag;
        self.slots.resize(usize::from(count).min(SLOTS), Vec::new());
        self.most_together = most_together.clamp(1, MOST_TOGETHER);
        Ok(())
    }

    /// The payloads of a slot have arrived: it is free.
    pub(super) fn free_slot_of(&mut self, slot: u8) -> Vec<u64> {
        self.slots.get_mut(usize::from(slot)).map(std::mem::take).unwrap_or_default()
    }

    /// A payload has arrived, and with it those behind it that have arrived before.
    pub(super) fn has_arrived(&mut self, number: u64) {
        if let Some(place) = self.unreported.iter_mut().find(|other| **other == Some(number)) {
            *place = None;
        }
        while let Some(None) = self.unreported.front() {
            self.unreported.pop_front();
        }
    }

    /// Payloads whose announcements are posted.
    pub(super) fn take_eager(&mut self) -> Vec<Parcel> {
        if self.gathered.is_empty() { std::mem::take(&mut self.eager) } else { Vec::new() }
    }

    /// Forgets a payload that the peer does not want; false if it is not announced any more.
    pub(super) fn forget_announced(&mut self, number: u64) -> bool {
        let before = self.announced.len();
        self.announced.retain(|payload| payload.number != number);
        self.announced.len() < before
    }

    /// Takes the payload that the peer is ready for. An error when there is none of this number.
    pub(super) fn take_announced(&mut self, number: u64) -> io::Result<AnnouncedPayload> {
        let found = self.announced.iter().position(|payload| payload.number == number);
        let found = found.ok_or_else(|| broken("it asks for a payload that it was not told of"))?;
        Ok(self.announced.swap_remove(found))
    }
}
