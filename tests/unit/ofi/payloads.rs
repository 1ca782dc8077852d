//! Messages of several parts, and payloads that come at once, between a transport that is driven by hand and a peer that sends
//! whatever it likes.

use std::sync::Arc;
use std::time::Instant;

use super::super::Ofi;
use super::super::limits::{EAGER, MESSAGE, MOST_ANNOUNCED, SLOT, SLOTS};
use super::super::station::Station;
use super::super::sys::{EndpointName, Label, PeerAddress, Posted};
use super::super::wire::{self, Load, MOST_TOGETHER, OfiContent, OfiHeader};
use super::{BOUND, Raw, parts, provider, station};
use crate::Address;
use crate::address::OfiProvider;
use crate::memory::{Region, Slice};
use crate::proto::wire::VERSIONS;
use crate::transport::{Consumed, Link, LinkKey, PayloadStatus, Reactor, ReceiveTarget, Sent, Sink, TransportDriver};

/// What the victim's engine would do: it answers each byte of the stream with one byte, but for a frame that announces a payload.
#[derive(Default)]
struct Answers {
    link: Option<Arc<dyn Link>>,
    target: Option<Arc<Region>>,
    answered: usize,
    /// Payloads to send when the byte `SEND` comes, and those of them that are gone right afterwards.
    to_send: Vec<Arc<Region>>,
    gone: Vec<usize>,
    /// Reports of sends that had to wait, and of loans that have ended.
    sent: usize,
    returned: usize,
    done: Vec<PayloadStatus>,
    closed: Option<String>,
}

/// Begins a frame that announces a payload of so many bytes, in four bytes.
const FRAME: u8 = b'P';
/// Has the victim send its payloads.
const SEND: u8 = b'S';

impl Answers {
    fn send_payloads(&mut self) {
        for region in &self.to_send {
            let sent = self.link.as_ref().unwrap().send(frame(region.len() as u32), Some(Slice::whole(region)));
            assert!(matches!(sent, Sent::All(_) | Sent::Lent(_)));
        }
        self.gone.iter().for_each(|index| self.to_send[*index].close());
    }
}

impl Sink for Answers {
    fn accepted(&mut self, _remote: Address) -> LinkKey {
        LinkKey(1)
    }
    fn attach(&mut self, _key: LinkKey, link: Arc<dyn Link>) {
        self.link = Some(link);
    }
    fn connected(&mut self, _key: LinkKey) {}
    fn chunk(&mut self, _key: LinkKey, _len: usize) {}
    fn bytes(&mut self, _key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        if let Some(len) = bytes.strip_prefix(&[FRAME]) {
            let len = u32::from_le_bytes(len.try_into().unwrap()) as usize;
            let memory = self.target.as_ref().and_then(|region| Slice::whole(region).part(0, len));
            return Some(Consumed { used: bytes.len(), target: Some(ReceiveTarget { memory, len, total: len }) });
        }
        if bytes == [SEND] {
            self.send_payloads();
            return Some(Consumed { used: 1, target: None });
        }
        for byte in bytes {
            let sent = self.link.as_ref().unwrap().send(vec![*byte], None);
            assert!(matches!(sent, Sent::All(_)));
            self.answered += 1;
        }
        Some(Consumed { used: bytes.len(), target: None })
    }
    fn payload_done(&mut self, _key: LinkKey, status: PayloadStatus) {
        self.done.push(status);
    }
    fn heard(&mut self, _key: LinkKey) {}
    fn sent(&mut self, _key: LinkKey, _buffer: Vec<u8>, _lent: bool) {
        self.sent += 1;
    }
    fn returned(&mut self, _key: LinkKey) {
        self.returned += 1;
    }
    fn rma_capable(&mut self, _key: LinkKey) {}
    fn rma_done(&mut self, _key: LinkKey, _operation: u64, _result: std::io::Result<()>) {}
    fn closed(&mut self, _key: LinkKey, cause: std::io::Error) {
        self.closed = Some(cause.to_string());
    }
}

/// A transport with one link, and the peer of that link.
struct Driven {
    ofi: Ofi,
    sink: Answers,
    raw: Raw,
    /// The peer's endpoint for payloads, and the victim's address there.
    bulk: Station,
    to: Option<PeerAddress>,
    /// The victim's number of the link, and the sequence number of the peer's next message.
    link: u64,
    sequence: u32,
    /// Parts that the victim has sent, and that no test has looked at.
    heard: Vec<Heard>,
    messages: usize,
    /// The peer does not read payloads.
    deaf: bool,
    _polls: [mio::Poll; 2],
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq)]
enum Heard {
    Byte(u8),
    Ready(u64, u64),
    Slots(u64, u8),
    Taken(u64),
    Emptied(u8),
    Eager(u64, u32, u8),
    Announced(u64),
    Bye,
    Other,
}

impl Driven {
    fn new() -> Option<Driven> {
        if let Err(reason) = provider::available(OfiProvider::Tcp) {
            println!("skipped: {reason}");
            return None;
        }
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let reactor = Reactor { registry: poll.registry().try_clone().unwrap(), waker, first_token: 1 };
        let ofi = Ofi::new(reactor, 1, VERSIONS, false);
        let address = ofi.listen(&"ofi+tcp://127.0.0.1:0".parse().unwrap()).unwrap();
        let raw = Raw::to(address.socket().unwrap());
        let (bulk, bulk_poll) = station();
        let sink = Answers { target: Some(Region::from_vec(vec![0; EAGER])), ..Answers::default() };
        let (to, link, sequence) = (None, 0, 0);
        let (heard, messages, deaf, _polls) = (Vec::new(), 0, false, [poll, bulk_poll]);
        let mut driven = Driven { ofi, sink, raw, bulk, to, link, sequence, heard, messages, deaf, _polls };
        let hello = driven.message(OfiHeader { sequence: 0, to: 0, handled: 0 }, &[OfiContent::Hello(driven.raw.hello())]);
        driven.post(&hello);
        let begin = Instant::now();
        while driven.link == 0 {
            assert!(begin.elapsed() < BOUND, "no answer to the hello");
            driven.poll();
        }
        Some(driven)
    }

    fn message(&self, header: OfiHeader, parts: &[OfiContent<'_>]) -> Vec<u8> {
        let mut message = Vec::new();
        wire::encode(header, &parts[0], &mut message);
        parts[1..].iter().for_each(|part| assert!(wire::add_part(part, MESSAGE, &mut message)));
        message
    }

    /// Sends a message. The victim does nothing meanwhile, once there is a connection.
    fn post(&mut self, message: &[u8]) {
        let begin = Instant::now();
        while !self.raw.try_send(message) {
            assert!(begin.elapsed() < BOUND, "the provider takes nothing");
            self.poll();
        }
    }

    fn say(&mut self, parts: &[OfiContent<'_>]) {
        let header = OfiHeader { sequence: self.sequence, to: self.link, handled: self.messages as u32 };
        let message = self.message(header, parts);
        self.sequence += 1;
        self.post(&message);
    }

    /// One pass of the victim's driver, and what it has sent.
    fn poll(&mut self) -> bool {
        let any = self.ofi.poll(&mut self.sink);
        self.hear();
        any
    }

    /// What the victim has sent, which does nothing meanwhile.
    fn hear(&mut self) {
        if !self.deaf {
            self.bulk.collect().unwrap();
        }
        for done in self.raw.station.take_completions().unwrap() {
            let (false, Some(buffer), Ok(len)) = (done.is_send, &done.buffer, done.result) else { continue };
            let message = &buffer[..len];
            let (_, first, _) = wire::decode(message).unwrap();
            if let OfiContent::Accept(accept) = first {
                self.link = accept.link;
                continue;
            }
            let all = parts(message);
            // Of those that take a credit.
            self.messages += usize::from(all.iter().any(|part| part.is_credited()));
            self.heard.extend(all.iter().map(|part| match *part {
                OfiContent::Bytes(&[byte]) => Heard::Byte(byte),
                OfiContent::Ready { number, tag, .. } => Heard::Ready(number, tag),
                OfiContent::Slots { tag, count, name } => {
                    self.to.get_or_insert_with(|| self.bulk.av.insert(&EndpointName::from_bytes(name).unwrap()).unwrap());
                    Heard::Slots(tag, count)
                }
                OfiContent::Taken { number } => Heard::Taken(number),
                OfiContent::Emptied { slot } => Heard::Emptied(slot),
                OfiContent::Eager { number, len, slot, .. } => Heard::Eager(number, len, slot),
                OfiContent::Announce { number, name, .. } => {
                    self.to.get_or_insert_with(|| self.bulk.av.insert(&EndpointName::from_bytes(name).unwrap()).unwrap());
                    Heard::Announced(number)
                }
                OfiContent::Bye => Heard::Bye,
                _ => Heard::Other,
            }));
            self.raw.station.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap();
        }
    }

    #[track_caller]
    fn poll_until(&mut self, what: &str, is_done: impl Fn(&Driven) -> bool) {
        let begin = Instant::now();
        while !is_done(self) {
            assert!(begin.elapsed() < BOUND, "{what}: {:?}, {:?}", self.heard, self.sink.closed);
            self.poll();
        }
    }

    /// The peer announces a payload for which it waits until the victim is ready, and sends it. Returns the tag of the first slot.
    #[track_caller]
    fn open_slots(&mut self) -> u64 {
        let (len, frame) = (9000, frame(9000));
        let name = self.bulk.endpoint.name().bytes().to_vec();
        self.say(&[OfiContent::Announce { number: 0, len, covered: false, name: &name, bytes: &frame }]);
        self.poll_until("slots", |driven| driven.heard.len() >= 2);
        let [Heard::Slots(first, count), Heard::Ready(0, tag)] = self.heard[..] else { panic!("{:?}", self.heard) };
        assert_eq!(usize::from(count), SLOTS);
        self.send_payload(tag, vec![1; len as usize]);
        self.poll_until("the first payload", |driven| driven.heard.contains(&Heard::Taken(0)));
        self.heard.clear();
        first
    }

    /// The victim announces a payload, which the peer does not want, and the peer answers with slots.
    #[track_caller]
    fn offer_slots(&mut self, payload: &Arc<Region>) {
        self.poll_until("the link", |driven| driven.sink.link.is_some());
        self.sink.to_send = vec![payload.clone()];
        self.sink.send_payloads();
        self.poll_until("an announcement", |driven| driven.heard.contains(&Heard::Announced(0)));
        let tag = 1 << 47;
        for slot in 0..SLOTS as u64 {
            let label = Label::Slot { link: 0, slot: slot as u8 };
            assert!(matches!(self.bulk.endpoint.receive(vec![0; SLOT], tag + slot, label).unwrap(), Posted::Begun));
        }
        let name = self.bulk.endpoint.name().bytes().to_vec();
        let slots = OfiContent::Slots { tag, count: SLOTS as u8, name: &name };
        self.say(&[slots, OfiContent::Taken { number: 0 }, OfiContent::Bytes(&[9])]);
        self.poll_until("the slots are known", |driven| driven.heard.contains(&Heard::Byte(9)));
        self.heard.clear();
    }

    fn send_payload(&mut self, tag: u64, bytes: Vec<u8>) {
        let (begin, to, mut waiting) = (Instant::now(), self.to.unwrap(), Some(bytes));
        while let Some(bytes) = waiting.take() {
            assert!(begin.elapsed() < BOUND, "the provider takes nothing");
            if let Posted::Busy(bytes) = self.bulk.endpoint.send(to, bytes, tag, Label::Message).unwrap() {
                waiting = Some(bytes);
            }
            self.poll();
        }
    }

    /// Sends what goes to a slot, with `load` beside it.
    fn send_to_slot(&mut self, tag: u64, load: u64, bytes: Vec<u8>) {
        let (begin, to, mut waiting) = (Instant::now(), self.to.unwrap(), Some(bytes));
        while let Some(bytes) = waiting.take() {
            assert!(begin.elapsed() < BOUND, "the provider takes nothing");
            if let Posted::Busy(bytes) = self.bulk.endpoint.send_with_data(to, bytes, tag, load, Label::Message).unwrap() {
                waiting = Some(bytes);
            }
            self.poll();
        }
    }

    fn bytes_at_target(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(Slice::whole(self.sink.target.as_ref().unwrap()).part(0, len).unwrap().read(&mut bytes));
        bytes
    }

    fn finish(mut self) {
        self.say(&[OfiContent::Bye]);
        self.poll_until("the end", |driven| driven.sink.closed.is_some());
    }
}

fn frame(len: u32) -> Vec<u8> {
    [&[FRAME][..], &len.to_le_bytes()].concat()
}

fn eager(number: u64, len: u32, slot: u8, bytes: &[u8]) -> OfiContent<'_> {
    OfiContent::Eager { number, len, covered: false, slot, bytes }
}

#[test]
fn answers_of_one_pass_go_out_as_one_message() {
    let Some(mut driven) = Driven::new() else { return };
    let (mut total, mut fewest) = (0, usize::MAX);
    // What was sent may arrive in several passes on a busy machine: of those, each has one message.
    for _ in 0..20 {
        (0..6).for_each(|byte| driven.say(&[OfiContent::Bytes(&[byte])]));
        total += 6;
        let (before, mut passes, begin) = (driven.messages, 0, Instant::now());
        while driven.sink.answered < total {
            assert!(begin.elapsed() < BOUND);
            let answered = driven.sink.answered;
            driven.poll();
            passes += usize::from(driven.sink.answered > answered);
        }
        driven.poll_until("answers", |driven| driven.heard.len() == total);
        assert_eq!(driven.messages - before, passes);
        fewest = fewest.min(passes);
    }
    assert!(fewest < 6, "each message has a pass of its own");
    let answers: Vec<Heard> = (0..total).map(|index| Heard::Byte((index % 6) as u8)).collect();
    assert_eq!(driven.heard, answers);
    driven.finish();
}

/// What a thread sends waits for what it sends next, where it has said so; if nothing follows, until the driver's next pass; and not
/// while the driver sleeps.
#[test]
fn a_send_that_another_one_follows_leaves_with_it() {
    let Some(mut driven) = Driven::new() else { return };
    driven.poll_until("the link", |driven| driven.sink.link.is_some());
    let link = driven.sink.link.clone().unwrap();
    let send = |byte| assert!(matches!(link.send(vec![byte], None), Sent::All(_)));
    let before = driven.messages;
    link.more_follows();
    send(1);
    send(2);
    driven.poll_until("two bytes", |driven| driven.heard.len() == 2);
    assert_eq!(driven.messages - before, 1, "they go together");
    link.more_follows();
    driven.poll();
    send(3);
    driven.poll_until("a byte that nothing follows", |driven| driven.heard.len() == 3);
    let hear = |driven: &mut Driven, len| {
        let begin = Instant::now();
        while driven.heard.len() < len {
            assert!(begin.elapsed() < BOUND, "what is sent while the driver sleeps waits for it: {:?}", driven.heard);
            driven.hear();
        }
    };
    // It goes to sleep after the thread has looked whether it sleeps, and before.
    link.more_follows();
    driven.ofi.park();
    send(4);
    hear(&mut driven, 4);
    link.more_follows();
    send(5);
    hear(&mut driven, 5);
    driven.ofi.unpark();
    assert_eq!(driven.heard, [1, 2, 3, 4, 5].map(Heard::Byte));
    driven.finish();
}

#[test]
fn parts_are_handled_in_their_order() {
    let Some(mut driven) = Driven::new() else { return };
    driven.say(&[1, 2, 3].map(|byte| [byte]).each_ref().map(|byte| OfiContent::Bytes(byte)));
    driven.poll_until("answers", |driven| driven.heard.len() == 3);
    assert_eq!(driven.heard, [1, 2, 3].map(Heard::Byte));
    driven.finish();
}

fn one() -> u64 {
    Load::of(1).encode()
}

#[test]
fn payloads_come_at_once_before_or_after_their_announcement() {
    let Some(mut driven) = Driven::new() else { return };
    let first = driven.open_slots();
    for turn in 0..3 * SLOTS as u64 {
        let (number, slot, value) = (turn + 1, (turn % SLOTS as u64) as u8, turn as u8 + 2);
        let len = EAGER as u32 - turn as u32;
        let bytes = frame(len);
        if turn % 2 == 0 {
            driven.say(&[eager(number, len, slot, &bytes)]);
            driven.poll();
            driven.send_to_slot(first + u64::from(slot), one(), vec![value; len as usize]);
        } else {
            driven.send_to_slot(first + u64::from(slot), one(), vec![value; len as usize]);
            (0..20).for_each(|_| _ = driven.poll());
            driven.say(&[eager(number, len, slot, &bytes)]);
        }
        driven.poll_until("the payload", |driven| driven.heard.contains(&Heard::Emptied(slot)));
        driven.heard.clear();
        assert!(driven.bytes_at_target(len as usize) == vec![value; len as usize], "payload {number}");
    }
    let before = driven.sink.done.len();
    assert!(driven.sink.done.iter().all(|status| *status == PayloadStatus::Whole));
    // One whose memory is gone at its source, and two that are discarded.
    driven.say(&[eager(100, 500, 0, &frame(500))]);
    let mut none = Load::of(1);
    none.leave_out(0);
    driven.send_to_slot(first, none.encode(), Vec::new());
    driven.poll_until("a payload that is left out", |driven| driven.heard.contains(&Heard::Emptied(0)));
    driven.sink.target.as_ref().unwrap().close();
    driven.say(&[eager(101, 500, 1, &frame(500))]);
    driven.send_to_slot(first + 1, one(), vec![1; 500]);
    driven.poll_until("a payload without a place", |driven| driven.heard.contains(&Heard::Emptied(1)));
    driven.sink.target = None;
    driven.say(&[eager(102, 500, 2, &frame(500))]);
    driven.send_to_slot(first + 2, one(), vec![1; 500]);
    driven.poll_until("a payload that is not wanted", |driven| driven.heard.contains(&Heard::Emptied(2)));
    let expected = [PayloadStatus::SourceGone, PayloadStatus::TargetGone, PayloadStatus::Whole];
    assert_eq!(driven.sink.done[before..], expected);
    driven.finish();
}

/// Several payloads in one slot, some of them left out, whose announcements come before, after, or around them.
#[test]
fn payloads_that_come_together_go_to_their_places() {
    let Some(mut driven) = Driven::new() else { return };
    let first = driven.open_slots();
    let lens: [u32; 4] = [9000, 20_000, EAGER as u32, 10_001];
    let values = [3, 4, 5, 6];
    for (turn, left_out) in [None, Some(0), Some(1), Some(3), None].into_iter().enumerate() {
        for announced_before in 0..=lens.len() {
            let before = driven.sink.done.len();
            let numbers: Vec<u64> = (0..4).map(|index| 1000 + 100 * turn as u64 + 10 * announced_before as u64 + index).collect();
            let frames = lens.map(frame);
            let announcements: Vec<OfiContent<'_>> =
                (0..4).map(|index| eager(numbers[index], lens[index], 0, &frames[index])).collect();
            let (early, late) = announcements.split_at(announced_before);
            // The places are those of one memory, so a later payload is seen where it is shorter than one before.
            let mut load = Load::of(4);
            let mut bytes = Vec::new();
            for index in 0..4 {
                match left_out == Some(index) {
                    true => load.leave_out(index),
                    false => bytes.extend(vec![values[index]; lens[index] as usize]),
                }
            }
            assert!(bytes.len() <= SLOT);
            if !early.is_empty() {
                driven.say(early);
            }
            driven.send_to_slot(first, load.encode(), bytes);
            (0..20).for_each(|_| _ = driven.poll());
            if !late.is_empty() {
                assert_eq!(driven.sink.done.len(), before, "payloads are reported before all are announced");
                driven.say(late);
            }
            driven.poll_until("the payloads", |driven| driven.heard.contains(&Heard::Emptied(0)));
            driven.heard.clear();
            let expected =
                [0, 1, 2, 3].map(|index| if left_out == Some(index) { PayloadStatus::SourceGone } else { PayloadStatus::Whole });
            assert_eq!(driven.sink.done[before..], expected);
            let at_target = driven.bytes_at_target(EAGER);
            let mut image = vec![0; EAGER];
            for index in (0..4).filter(|index| left_out != Some(*index)) {
                image[..lens[index] as usize].fill(values[index]);
            }
            // What an earlier turn has left behind the longest payload of this one.
            let longest = (0..4).filter(|index| left_out != Some(*index)).map(|index| lens[index] as usize).max().unwrap();
            assert!(at_target[..longest] == image[..longest], "without {left_out:?}, {announced_before} announced before");
        }
    }
    driven.finish();
}

/// What the victim sends in one pass of its driver leaves together, and what is gone by the end of it is left out.
#[test]
fn payloads_that_are_sent_in_one_pass_leave_together() {
    const COUNT: usize = 4;
    const LEN: usize = 30_000;
    let Some(mut driven) = Driven::new() else { return };
    let memory: [_; 1 + 3 * COUNT] = std::array::from_fn(|index| Region::from_vec(vec![index as u8 + 1; LEN]));
    driven.offer_slots(&memory[0]);
    // The others wait for the end of the pass; two of them are gone by then.
    (driven.sink.to_send, driven.sink.gone) = (memory[1..].to_vec(), vec![2, COUNT]);
    driven.say(&[OfiContent::Bytes(&[SEND])]);
    let mut filled = Vec::new();
    let begin = Instant::now();
    while filled.len() < 3 {
        assert!(begin.elapsed() < BOUND, "{:?}", driven.heard);
        driven.poll();
        for done in driven.bulk.take_completions().unwrap() {
            let (Label::Slot { slot, .. }, Some(buffer), Ok(len)) = (done.label, done.buffer, done.result) else { continue };
            filled.push((slot, Load::decode(done.data).unwrap(), buffer[..len].to_vec()));
        }
    }
    let announced: Vec<Heard> = std::mem::take(&mut driven.heard);
    let expected: Vec<Heard> =
        (0..3 * COUNT).map(|index| Heard::Eager(index as u64 + 1, LEN as u32, (index / COUNT) as u8)).collect();
    assert_eq!(announced, expected);
    for (slot, load, bytes) in filled {
        assert_eq!(load.count, COUNT);
        let indices = (0..COUNT).map(|index| usize::from(slot) * COUNT + index);
        let gone: Vec<usize> = indices.clone().enumerate().filter(|(at, _)| !load.has(*at)).map(|(_, index)| index).collect();
        let expected: &[usize] = match slot {
            0 => &[2],
            1 => &[COUNT],
            _ => &[],
        };
        assert_eq!(gone, expected);
        let image: Vec<u8> = indices.filter(|index| !gone.contains(index)).flat_map(|index| vec![index as u8 + 2; LEN]).collect();
        assert!(bytes == image, "slot {slot}");
    }
    // No loan is left of those that were sent, nor of those that could not be.
    memory.iter().for_each(|region| region.close());
    assert_eq!(driven.sink.closed, None);
    // Each slot takes others once it is emptied.
    driven.say(&[0, 1, 2].map(|slot| OfiContent::Emptied { slot }));
    driven.say(&[OfiContent::Emptied { slot: 2 }]);
    driven.poll_until("a slot that is emptied twice", |driven| driven.sink.closed.is_some());
    let closed = driven.sink.closed.take().unwrap();
    assert!(closed.contains("a payload that it was not sent"), "{closed}");
}

#[test]
fn arrivals_are_reported_together() {
    let Some(mut driven) = Driven::new() else { return };
    let first = driven.open_slots();
    let before = driven.sequence;
    for slot in 0..SLOTS as u8 {
        driven.say(&[eager(u64::from(slot) + 1, 100, slot, &frame(100))]);
        driven.send_to_slot(first + u64::from(slot), one(), vec![slot; 100]);
    }
    driven.poll_until("reports", |driven| driven.heard.len() == SLOTS);
    assert_eq!(driven.sequence - before, SLOTS as u32);
    let expected: Vec<Heard> = (0..SLOTS as u8).map(Heard::Emptied).collect();
    assert_eq!(driven.heard, expected);
    driven.finish();
}

#[test]
fn malformed_parts_end_the_link() {
    type Break = fn(&mut Vec<u8>);
    let cases: [(&str, Break); 5] = [
        ("a part that is cut off", |message| message.truncate(message.len() - 1)),
        ("a second part behind the end", |message| message[20..22].copy_from_slice(&9000u16.to_le_bytes())),
        ("a second part within the header", |message| message[20..22].copy_from_slice(&4u16.to_le_bytes())),
        ("an unknown part", |message| message[25] = 99),
        ("bytes behind the last part", |message| message.push(0)),
    ];
    for (what, harm) in cases {
        let Some(mut driven) = Driven::new() else { return };
        let header = OfiHeader { sequence: 0, to: driven.link, handled: 0 };
        let mut message = driven.message(header, &[OfiContent::Bytes(&[1]), OfiContent::Bytes(&[2]), OfiContent::Credit]);
        harm(&mut message);
        driven.post(&message);
        driven.poll_until(what, |driven| driven.sink.closed.is_some());
        let closed = driven.sink.closed.take().unwrap();
        assert!(closed.contains("malformed"), "{what}: {closed}");
    }
}

#[test]
fn payloads_that_break_the_rules_end_the_link() {
    type Case = fn(&mut Driven, u64);
    let cases: [(&str, Case); 13] = [
        ("a slot that is not there", |driven, _| driven.say(&[eager(1, 100, SLOTS as u8, &frame(100))])),
        ("more payloads than a slot takes", |driven, _| {
            (0..=MOST_TOGETHER as u64).for_each(|number| driven.say(&[eager(number + 1, 100, 0, &frame(100))]));
        }),
        ("fewer payloads than announced", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100)), eager(2, 100, 0, &frame(100))]);
            driven.send_to_slot(first, one(), vec![1; 100]);
        }),
        ("no payloads", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100))]);
            driven.send_to_slot(first, 0, vec![1; 100]);
        }),
        ("payloads that are left out, and more of them than there are", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100))]);
            driven.send_to_slot(first, one() | 2 << 8, vec![1; 100]);
        }),
        ("nothing beside the payload", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100))]);
            driven.send_payload(first, vec![1; 100]);
        }),
        ("a payload that is left out, and is there", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100))]);
            driven.send_to_slot(first, one() | 1 << 8, vec![1; 100]);
        }),
        ("a number that is in use", |driven, _| {
            driven.say(&[eager(1, 100, 0, &frame(100)), eager(1, 100, 1, &frame(100))]);
        }),
        ("a payload without a frame", |driven, _| driven.say(&[eager(1, 100, 0, b"")])),
        ("another length than that of the frame", |driven, _| driven.say(&[eager(1, 101, 0, &frame(100))])),
        ("a payload that is too long for a slot", |driven, _| {
            driven.sink.target = None;
            driven.say(&[eager(1, 1 << 20, 0, &frame(1 << 20))]);
        }),
        ("a payload that is shorter than announced", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100))]);
            driven.send_to_slot(first, one(), vec![1; 99]);
        }),
        ("a payload that is longer than the receive", |driven, first| {
            driven.say(&[eager(1, 100, 0, &frame(100))]);
            driven.send_to_slot(first, one(), vec![1; SLOT + 100]);
        }),
    ];
    for (what, case) in cases {
        let Some(mut driven) = Driven::new() else { return };
        let first = driven.open_slots();
        case(&mut driven, first);
        driven.poll_until(what, |driven| driven.sink.closed.is_some());
        let closed = driven.sink.closed.take().unwrap();
        assert!(closed.contains("it sent"), "{what}: {closed}");
    }
}

/// A bulk endpoint takes descriptors and memory: a stranger must not have one opened.
#[test]
fn slots_before_any_payload_end_the_link() {
    let Some(mut driven) = Driven::new() else { return };
    let name = driven.bulk.endpoint.name().bytes().to_vec();
    driven.say(&[OfiContent::Slots { tag: 1 << 47, count: 1, name: &name }]);
    driven.poll_until("slots before any payload", |driven| driven.sink.closed.is_some());
    let closed = driven.sink.closed.take().unwrap();
    assert!(closed.contains("though none was announced to it"), "{closed}");
}

/// A peer reports payloads in their order, so those that went in messages are on its hands until the one before them has arrived.
#[test]
fn payloads_behind_one_that_has_not_arrived_are_bounded() {
    let Some(mut driven) = Driven::new() else { return };
    driven.poll_until("the link", |driven| driven.sink.link.is_some());
    let link = driven.sink.link.clone().unwrap();
    let [large, small] = [30_000, 100].map(|len| Region::from_vec(vec![1; len]));
    let send = |region: &Arc<Region>| link.send(frame(region.len() as u32), Some(Slice::whole(region)));
    assert!(matches!(send(&large), Sent::Lent(_)));
    driven.poll_until("an announcement", |driven| driven.heard.contains(&Heard::Announced(0)));
    let mut sent = 1;
    let begin = Instant::now();
    // Each has arrived, and its credit is back, before the next: so the one that has to wait does not wait for credit.
    loop {
        let messages = driven.messages;
        if matches!(send(&small), Sent::Later) {
            break;
        }
        sent += 1;
        assert!(sent <= MOST_ANNOUNCED && begin.elapsed() < BOUND, "{sent} payloads");
        driven.poll_until("a small payload", |driven| driven.messages > messages);
        let heard = driven.sink.answered;
        driven.say(&[OfiContent::Credit, OfiContent::Bytes(&[0])]);
        driven.poll_until("the credit", |driven| driven.sink.answered > heard);
    }
    assert_eq!(sent, MOST_ANNOUNCED);
    (0..20).for_each(|_| _ = driven.poll());
    assert_eq!(driven.sink.sent, 0);
    driven.say(&[OfiContent::Taken { number: 0 }]);
    driven.poll_until("the rest", |driven| driven.sink.sent > 0 || driven.sink.closed.is_some());
    assert_eq!((driven.sink.sent, &driven.sink.closed), (1, &None));
    driven.finish();
}

/// A peer may report what it does not read. The provider keeps it, so it counts as under way: the engine sends no more than a few.
#[test]
fn payloads_count_until_the_provider_has_done_with_them() {
    const LEN: usize = 60_000;
    let Some(mut driven) = Driven::new() else { return };
    let memory = Region::from_vec(vec![1; LEN]);
    driven.offer_slots(&memory);
    driven.sink.to_send = vec![memory; 4];
    let report = |driven: &mut Driven| {
        driven.say(&[OfiContent::Bytes(&[SEND])]);
        driven.poll_until("announcements", |driven| driven.heard.len() >= 4);
        let begin = Instant::now();
        while !driven.deaf && !driven.bulk.take_completions().unwrap().iter().any(|done| matches!(done.label, Label::Slot { .. }))
        {
            assert!(begin.elapsed() < BOUND, "the payloads do not arrive");
            driven.poll();
        }
        driven.heard.clear();
        driven.say(&[OfiContent::Emptied { slot: 0 }, OfiContent::Bytes(&[9])]);
        driven.poll_until("the report is handled", |driven| driven.heard.contains(&Heard::Byte(9)));
        driven.heard.clear();
    };
    // What is read is over once it is reported.
    report(&mut driven);
    driven.poll_until("the end of four payloads", |driven| driven.sink.returned == 5);
    driven.deaf = true;
    let begin = Instant::now();
    let mut rounds = 0;
    // The buffers of the connection take some megabytes.
    while rounds * 4 * LEN < 64 << 20 && driven.sink.returned + 16 > 5 + 4 * rounds {
        assert!(begin.elapsed() < BOUND, "{} of {rounds} times 4", driven.sink.returned);
        report(&mut driven);
        rounds += 1;
    }
    assert!(rounds * 4 * LEN < 64 << 20, "{} payloads count as over", driven.sink.returned);
    assert_eq!(driven.sink.closed, None);
}
