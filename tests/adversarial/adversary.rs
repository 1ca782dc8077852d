//! A peer that obeys the protocol unless a case says otherwise, and records all that it receives.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::channel::{Channel, Listener, Piece, dial};
use crate::common::wire::{self, Described, Message, Range, Status, Stream};
use crate::support::*;

/// Length of the victim's pulls from the adversary and pushes to it.
pub const MOVED: usize = 50_000;

pub struct Adversary {
    pub channel: Box<dyn Channel>,
    pub incarnation: u64,
    /// Bytes of the victim that are not parsed yet.
    buffer: Vec<u8>,
    /// The payload that is arriving: how many bytes are missing.
    payload: Option<usize>,
    /// All bytes received, payloads included.
    pub received: Vec<u8>,
    pub messages: VecDeque<(Message, Vec<u8>)>,
    /// Payload of the last streams.
    pub streamed: Vec<u8>,
    handshake_done: bool,
    pub next_call: u64,
    /// The victim's own operations with the adversary.
    pub call: u64,
    pub pull: u64,
    pub push: u64,
}

impl Adversary {
    pub fn new(channel: Box<dyn Channel>) -> Adversary {
        Adversary {
            channel,
            incarnation: rand::random(),
            buffer: Vec::new(),
            payload: None,
            received: Vec::new(),
            messages: VecDeque::new(),
            streamed: Vec::new(),
            handshake_done: false,
            next_call: (1 << 40) + 1_000_000,
            call: 0,
            pull: 0,
            push: 0,
        }
    }

    /// Dials, and sends nothing yet.
    pub fn dial(address: &str) -> Adversary {
        Adversary::new(dial(address))
    }

    /// Dials, and completes the handshake.
    pub fn after_handshake(address: &str) -> Adversary {
        let mut adversary = Adversary::dial(address);
        adversary.bytes(&wire::greeting(adversary.incarnation, 64 << 20));
        adversary.await_handshake();
        adversary
    }

    #[track_caller]
    pub fn await_handshake(&mut self) {
        self.expect("a resumption token", |message| matches!(message, Message::Ticket { .. }));
    }

    /// As `after_handshake`, and with a call, a pull and a push of the victim in progress.
    pub fn engaged(address: &str) -> Adversary {
        let mut adversary = Adversary::after_handshake(address);
        adversary.engage();
        adversary
    }

    #[track_caller]
    pub fn engage(&mut self) {
        let number = self.request("engage", &self.claimed_memory(MOVED));
        let (call, _) = self.expect("a call", |message| matches!(message, Message::Request { .. }));
        let (pull, _) = self.expect("a pull", |message| matches!(message, Message::Pull(_)));
        let (push, _) = self.expect("a push", |message| matches!(message, Message::Push(_)));
        let (Message::Request { call, .. }, Message::Pull(pull), Message::Push(push)) = (call, pull, push) else {
            unreachable!()
        };
        (self.call, self.pull, self.push) = (call, pull.transfer, push.transfer);
        self.until("the payload of the push", |adversary| adversary.streamed.len() >= MOVED);
        self.answer(number).unwrap();
        self.messages.clear();
        self.streamed.clear();
    }

    /// Is dialled, completes the handshake, and has a call, a one-way call, a pull and a push of the victim in progress.
    #[track_caller]
    pub fn dialled(dial: impl FnOnce(&str, u64)) -> Adversary {
        let listener = Listener::open();
        let incarnation = rand::random();
        dial(&listener.address, incarnation);
        let mut adversary = Adversary::new(listener.accept());
        adversary.incarnation = incarnation;
        adversary.bytes(&wire::greeting(adversary.incarnation, 64 << 20));
        adversary.await_handshake();
        let (call, _) = adversary.expect("a call", |message| matches!(message, Message::Request { one_way: false, .. }));
        let (pull, _) = adversary.expect("a pull", |message| matches!(message, Message::Pull(_)));
        let (push, _) = adversary.expect("a push", |message| matches!(message, Message::Push(_)));
        adversary.until("the payload of the push", |adversary| adversary.streamed.len() >= MOVED);
        let (Message::Request { call, .. }, Message::Pull(pull), Message::Push(push)) = (call, pull, push) else {
            unreachable!()
        };
        (adversary.call, adversary.pull, adversary.push) = (call, pull.transfer, push.transfer);
        adversary.messages.clear();
        adversary.streamed.clear();
        adversary
    }

    /// Memory that the adversary claims to have.
    pub fn claimed_memory(&self, len: usize) -> Described {
        Described::new([7; 16], len as u64, calomel::BulkMode::ReadWrite, self.incarnation)
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> bool {
        self.channel.put(bytes, BOUND)
    }

    pub fn tell(&mut self, message: &Message, body: &[u8]) -> bool {
        self.bytes(&message.frame(body))
    }

    /// Announces a part of a stream.
    pub fn announce(&mut self, stream: Stream, id: u64, offset: u64, len: u32) {
        self.tell(&Message::Data { stream, id, offset, len }, &[]);
    }

    /// A part of a stream.
    pub fn data(&mut self, stream: Stream, id: u64, offset: u64, payload: &[u8]) {
        self.announce(stream, id, offset, payload.len() as u32);
        self.channel.put_payload(payload, true, BOUND);
    }

    /// Calls a procedure of the victim; returns the number of the call.
    pub fn request(&mut self, name: &str, arguments: &impl Serialize) -> u64 {
        let body = postcard::to_stdvec(arguments).unwrap();
        self.next_call += 1;
        self.tell(&Message::call(self.next_call, name, body.len()), &body);
        self.next_call
    }

    /// The response to a call: its bytes, or the status that refused it.
    #[track_caller]
    pub fn answer(&mut self, number: u64) -> Result<Vec<u8>, Status> {
        match self.expect("an answer", |message| is_answer(message, number)) {
            (Message::Refuse { status, .. }, _) => Err(status),
            (Message::Response { size, .. }, body) if body.len() as u64 == size => Ok(body),
            (Message::Response { size, .. }, _) => {
                self.until("the rest of an answer", |adversary| adversary.streamed.len() as u64 >= size);
                Ok(std::mem::take(&mut self.streamed))
            }
            _ => unreachable!(),
        }
    }

    /// Pulls; returns the bytes, or the status that refused it.
    #[track_caller]
    pub fn pull(&mut self, range: Range) -> Result<Vec<u8>, Status> {
        self.streamed.clear();
        self.tell(&Message::Pull(range), &[]);
        let done = |adversary: &Adversary| {
            let refused = adversary
                .messages
                .iter()
                .any(|(m, _)| matches!(m, Message::Done { transfer, .. } if *transfer == range.transfer));
            refused || (range.len > 0 && adversary.streamed.len() as u64 >= range.len)
        };
        self.until("the end of a pull", done);
        let at =
            self.messages.iter().position(|(m, _)| matches!(m, Message::Done { transfer, .. } if *transfer == range.transfer));
        match at.and_then(|at| self.messages.remove(at)) {
            Some((Message::Done { status, .. }, _)) if status != Status::Ok => Err(status),
            _ => Ok(std::mem::take(&mut self.streamed)),
        }
    }

    /// Receives what has arrived; false if nothing has.
    pub fn listen(&mut self) -> bool {
        let Some(piece) = self.channel.take() else { return false };
        match piece {
            Piece::Bytes(bytes) => {
                self.received.extend_from_slice(&bytes);
                self.buffer.extend_from_slice(&bytes);
            }
            Piece::Payload(bytes) => {
                self.received.extend_from_slice(&bytes);
                self.streamed.extend_from_slice(&bytes);
                let missing = self.payload.expect("a payload that was announced");
                self.payload = Some(missing.checked_sub(bytes.len()).expect("a payload as long as announced")).filter(|n| *n > 0);
            }
        }
        while self.take_apart() {}
        true
    }

    /// Parses the first frame, handshake message or part of a payload in the buffer.
    fn take_apart(&mut self) -> bool {
        let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        if let Some(missing) = self.payload.filter(|_| self.channel.in_line()) {
            // Includes the status byte behind the payload.
            let n = missing.min(self.buffer.len());
            let rest = self.buffer.split_off(n);
            let mut part = std::mem::replace(&mut self.buffer, rest);
            self.payload = Some(missing - n).filter(|n| *n > 0);
            if self.payload.is_none() {
                part.pop();
            }
            self.streamed.extend_from_slice(&part);
            return n > 0;
        }
        if !self.handshake_done && self.buffer.starts_with(wire::MAGIC) {
            if self.buffer.len() < wire::PIECE_LEN || self.buffer.len() < 16 + word(&self.buffer, 12) {
                return false;
            }
            self.handshake_done = self.buffer[wire::PIECE_LEN - 1] == wire::HELLO;
            self.buffer.drain(..16 + word(&self.buffer, 12));
            return true;
        }
        if self.buffer.len() < wire::PREFIX_LEN {
            return false;
        }
        let (len, head) = (word(&self.buffer, 4), word(&self.buffer, 8) & 0x7fff_ffff);
        if self.buffer.len() < wire::PREFIX_LEN + len {
            return false;
        }
        let frame: Vec<u8> = self.buffer.drain(..wire::PREFIX_LEN + len).skip(wire::PREFIX_LEN).collect();
        let (message, _) = Message::take(&frame[..head]).expect("a message");
        if let Message::Data { len, .. } = message {
            self.payload = Some(len as usize + usize::from(self.channel.in_line())).filter(|n| *n > 0);
        }
        self.messages.push_back((message, frame[head..].to_vec()));
        true
    }

    /// Receives until the condition is true.
    #[track_caller]
    pub fn until(&mut self, what: &str, condition: impl Fn(&Adversary) -> bool) {
        let begin = Instant::now();
        while !condition(self) {
            if !self.listen() {
                assert!(!self.channel.has_ended() || self.listen(), "the victim has hung up; waiting for {what}");
                assert!(begin.elapsed() < patience() * BOUND, "not within {BOUND:?}: {what}; received: {:?}", self.messages);
                thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// As [`Adversary::answer`], of a victim that works on it for long. It answers pings meanwhile, and does not take this peer for
    /// dead.
    #[track_caller]
    pub fn late_answer(&mut self, number: u64) -> Result<Vec<u8>, Status> {
        let begin = Instant::now();
        while !self.messages.iter().any(|(message, _)| is_answer(message, number)) && begin.elapsed() < patience() * BOUND {
            self.assert_listens();
            thread::sleep(Duration::from_millis(50));
        }
        self.answer(number)
    }

    /// Waits for the first message for which `is_it` is true; returns it with its body. Earlier messages stay.
    #[track_caller]
    pub fn expect(&mut self, what: &str, is_it: impl Fn(&Message) -> bool) -> (Message, Vec<u8>) {
        self.until(what, |adversary| adversary.messages.iter().any(|(message, _)| is_it(message)));
        let at = self.messages.iter().position(|(message, _)| is_it(message)).unwrap();
        self.messages.remove(at).unwrap()
    }

    /// Waits until the victim has ended this many requests; returns their statuses.
    #[track_caller]
    pub fn statuses(&mut self, count: usize) -> Vec<Status> {
        fn status(message: &Message) -> Option<&Status> {
            match message {
                Message::Done { status, .. } | Message::Refuse { status, .. } => Some(status),
                _ => None,
            }
        }
        self.until("an end of each", |adversary| adversary.messages.iter().filter_map(|(m, _)| status(m)).count() >= count);
        // And not one more.
        self.assert_listens();
        self.messages.iter().filter_map(|(message, _)| status(message)).cloned().collect()
    }

    /// Asserts that the victim still serves the connection.
    #[track_caller]
    pub fn assert_listens(&mut self) {
        self.messages.retain(|(message, _)| *message != Message::Pong);
        self.tell(&Message::Ping, &[]);
        self.expect("a pong", |message| *message == Message::Pong);
    }

    /// Waits for the victim to hang up; returns how long that took.
    #[track_caller]
    pub fn assert_hung_up(&mut self) -> Duration {
        let begin = Instant::now();
        loop {
            if !self.listen() {
                if self.channel.has_ended() && !self.listen() {
                    return begin.elapsed();
                }
                assert!(begin.elapsed() < patience() * BOUND, "the victim does not hang up; received: {:?}", self.messages);
                thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

fn is_answer(message: &Message, number: u64) -> bool {
    matches!(message, Message::Response { call, .. } | Message::Refuse { call, .. } if *call == number)
}
