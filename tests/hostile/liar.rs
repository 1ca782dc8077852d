//! A peer that keeps to the rules until it is told to do otherwise, and writes down all that it hears.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::common::wire::{self, Message, Range, Status, Stream};
use crate::support::*;
use crate::way::{Door, Piece, Way, dial};

/// A bulk as it travels.
#[derive(Clone, Debug, Serialize)]
pub struct Described {
    pub token: [u8; 16],
    pub offset: u64,
    pub len: u64,
    pub mode: calomel::BulkMode,
    pub segments: u32,
    pub owner: u64,
    pub addresses: Vec<String>,
    pub lease: Option<u32>,
    pub content: Option<Vec<u8>>,
    pub keys: Option<Vec<u8>>,
}

/// Length of what the victim pulls from the liar and pushes there.
pub const MOVED: usize = 50_000;

pub struct Liar {
    pub way: Box<dyn Way>,
    pub incarnation: u64,
    /// Bytes of the victim that are not taken apart yet.
    buffer: Vec<u8>,
    /// The payload that is arriving: how much is missing.
    payload: Option<usize>,
    /// All that was heard, payloads included.
    pub heard: Vec<u8>,
    pub said: VecDeque<(Message, Vec<u8>)>,
    /// Payload of the last streams.
    pub streamed: Vec<u8>,
    greeted: bool,
    next_call: u64,
    /// The victim's own operations with the liar.
    pub call: u64,
    pub pull: u64,
    pub push: u64,
}

impl Liar {
    pub fn new(way: Box<dyn Way>) -> Liar {
        Liar {
            way,
            incarnation: rand::random(),
            buffer: Vec::new(),
            payload: None,
            heard: Vec::new(),
            said: VecDeque::new(),
            streamed: Vec::new(),
            greeted: false,
            next_call: (1 << 40) + 1_000_000,
            call: 0,
            pull: 0,
            push: 0,
        }
    }

    /// Dials, and says nothing yet.
    pub fn dial(address: &str) -> Liar {
        Liar::new(dial(address))
    }

    /// Dials, and says hello.
    pub fn greeted(address: &str) -> Liar {
        let mut liar = Liar::dial(address);
        liar.bytes(&wire::greeting(liar.incarnation, 64 << 20));
        liar.await_greeting();
        liar
    }

    #[track_caller]
    pub fn await_greeting(&mut self) {
        self.expect("a ticket", |message| matches!(message, Message::Ticket { .. }));
    }

    /// As `greeted`, and with a call, a pull and a push of the victim under way.
    pub fn engaged(address: &str) -> Liar {
        let mut liar = Liar::greeted(address);
        liar.engage();
        liar
    }

    #[track_caller]
    pub fn engage(&mut self) {
        let number = self.request("engage", &self.own(MOVED));
        let (call, _) = self.expect("a call", |message| matches!(message, Message::Request { .. }));
        let (pull, _) = self.expect("a pull", |message| matches!(message, Message::Pull(_)));
        let (push, _) = self.expect("a push", |message| matches!(message, Message::Push(_)));
        let (Message::Request { call, .. }, Message::Pull(pull), Message::Push(push)) = (call, pull, push) else {
            unreachable!()
        };
        (self.call, self.pull, self.push) = (call, pull.transfer, push.transfer);
        self.until("what is pushed", |liar| liar.streamed.len() >= MOVED);
        self.answer(number).unwrap();
        self.said.clear();
        self.streamed.clear();
    }

    /// Is dialled, says hello, and has a call, a one-way call, a pull and a push of the victim under way.
    #[track_caller]
    pub fn dialled(dial: impl FnOnce(&str, u64)) -> Liar {
        let door = Door::open();
        let incarnation = rand::random();
        dial(&door.address, incarnation);
        let mut liar = Liar::new(door.accept());
        liar.incarnation = incarnation;
        liar.bytes(&wire::greeting(liar.incarnation, 64 << 20));
        liar.await_greeting();
        let (call, _) = liar.expect("a call", |message| matches!(message, Message::Request { one_way: false, .. }));
        let (pull, _) = liar.expect("a pull", |message| matches!(message, Message::Pull(_)));
        let (push, _) = liar.expect("a push", |message| matches!(message, Message::Push(_)));
        liar.until("what is pushed", |liar| liar.streamed.len() >= MOVED);
        let (Message::Request { call, .. }, Message::Pull(pull), Message::Push(push)) = (call, pull, push) else {
            unreachable!()
        };
        (liar.call, liar.pull, liar.push) = (call, pull.transfer, push.transfer);
        liar.said.clear();
        liar.streamed.clear();
        liar
    }

    /// Memory that the liar says it has.
    pub fn own(&self, len: usize) -> Described {
        Described {
            token: [7; 16],
            offset: 0,
            len: len as u64,
            mode: calomel::BulkMode::ReadWrite,
            segments: 1,
            owner: self.incarnation,
            addresses: Vec::new(),
            lease: None,
            content: None,
            keys: None,
        }
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> bool {
        self.way.put(bytes, BOUND)
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
        self.way.put_payload(payload, true, BOUND);
    }

    /// Calls a procedure of the victim; the number of the call.
    pub fn request(&mut self, name: &str, arguments: &impl Serialize) -> u64 {
        let body = postcard::to_stdvec(arguments).unwrap();
        self.next_call += 1;
        self.tell(&Message::call(self.next_call, name, body.len()), &body);
        self.next_call
    }

    /// The answer to a call: its bytes, or why there are none.
    #[track_caller]
    pub fn answer(&mut self, number: u64) -> Result<Vec<u8>, Status> {
        let is_it = |message: &Message| match message {
            Message::Response { call, .. } | Message::Refuse { call, .. } => *call == number,
            _ => false,
        };
        match self.expect("an answer", is_it) {
            (Message::Refuse { status, .. }, _) => Err(status),
            (Message::Response { size, .. }, body) if body.len() as u64 == size => Ok(body),
            (Message::Response { size, .. }, _) => {
                self.until("the rest of an answer", |liar| liar.streamed.len() as u64 >= size);
                Ok(std::mem::take(&mut self.streamed))
            }
            _ => unreachable!(),
        }
    }

    /// Pulls; the bytes, or the owner's word.
    #[track_caller]
    pub fn pull(&mut self, range: Range) -> Result<Vec<u8>, Status> {
        self.streamed.clear();
        self.tell(&Message::Pull(range), &[]);
        let done = |liar: &Liar| {
            let refused =
                liar.said.iter().any(|(m, _)| matches!(m, Message::Done { transfer, .. } if *transfer == range.transfer));
            refused || (range.len > 0 && liar.streamed.len() as u64 >= range.len)
        };
        self.until("the end of a pull", done);
        let at = self.said.iter().position(|(m, _)| matches!(m, Message::Done { transfer, .. } if *transfer == range.transfer));
        match at.and_then(|at| self.said.remove(at)) {
            Some((Message::Done { status, .. }, _)) if status != Status::Ok => Err(status),
            _ => Ok(std::mem::take(&mut self.streamed)),
        }
    }

    /// Takes in what has come. False when nothing has.
    pub fn listen(&mut self) -> bool {
        let Some(piece) = self.way.take() else { return false };
        match piece {
            Piece::Bytes(bytes) => {
                self.heard.extend_from_slice(&bytes);
                self.buffer.extend_from_slice(&bytes);
            }
            Piece::Payload(bytes) => {
                self.heard.extend_from_slice(&bytes);
                self.streamed.extend_from_slice(&bytes);
                let missing = self.payload.expect("a payload that was announced");
                self.payload = Some(missing.checked_sub(bytes.len()).expect("a payload as long as announced")).filter(|n| *n > 0);
            }
        }
        while self.take_apart() {}
        true
    }

    /// Takes the first frame, or greeting, or part of a payload out of the buffer.
    fn take_apart(&mut self) -> bool {
        let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        if let Some(missing) = self.payload.filter(|_| self.way.in_line()) {
            // The byte behind a payload counts.
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
        if !self.greeted && self.buffer.starts_with(wire::MAGIC) {
            if self.buffer.len() < wire::PIECE_LEN || self.buffer.len() < 16 + word(&self.buffer, 12) {
                return false;
            }
            self.greeted = self.buffer[wire::PIECE_LEN - 1] == wire::HELLO;
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
        let message: Message = postcard::from_bytes(&frame[..head]).expect("a message");
        if let Message::Data { len, .. } = message {
            self.payload = Some(len as usize + usize::from(self.way.in_line())).filter(|n| *n > 0);
        }
        self.said.push_back((message, frame[head..].to_vec()));
        true
    }

    /// Listens until something is true.
    #[track_caller]
    pub fn until(&mut self, what: &str, condition: impl Fn(&Liar) -> bool) {
        let begin = Instant::now();
        while !condition(self) {
            if !self.listen() {
                assert!(!self.way.has_ended() || self.listen(), "the victim has hung up; waiting for {what}");
                assert!(begin.elapsed() < patience() * BOUND, "not within {BOUND:?}: {what}; said: {:?}", self.said);
                thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// The first message of this sort that has come or comes, and its body; what came before stays.
    #[track_caller]
    pub fn expect(&mut self, what: &str, is_it: impl Fn(&Message) -> bool) -> (Message, Vec<u8>) {
        self.until(what, |liar| liar.said.iter().any(|(message, _)| is_it(message)));
        let at = self.said.iter().position(|(message, _)| is_it(message)).unwrap();
        self.said.remove(at).unwrap()
    }

    /// How the victim ended this number of things that the liar asked for.
    #[track_caller]
    pub fn statuses(&mut self, count: usize) -> Vec<Status> {
        fn status(message: &Message) -> Option<&Status> {
            match message {
                Message::Done { status, .. } | Message::Refuse { status, .. } => Some(status),
                _ => None,
            }
        }
        self.until("an end of each", |liar| liar.said.iter().filter_map(|(m, _)| status(m)).count() >= count);
        // Not one more, either.
        self.assert_listens();
        self.said.iter().filter_map(|(message, _)| status(message)).cloned().collect()
    }

    /// The victim goes on with the connection.
    #[track_caller]
    pub fn assert_listens(&mut self) {
        self.said.retain(|(message, _)| *message != Message::Pong);
        self.tell(&Message::Ping, &[]);
        self.expect("a pong", |message| *message == Message::Pong);
    }

    /// Waits for the victim to hang up; how long that took.
    #[track_caller]
    pub fn assert_hung_up(&mut self) -> Duration {
        let begin = Instant::now();
        loop {
            if !self.listen() {
                if self.way.has_ended() && !self.listen() {
                    return begin.elapsed();
                }
                assert!(begin.elapsed() < patience() * BOUND, "the victim does not hang up; it said {:?}", self.said);
                thread::sleep(Duration::from_micros(100));
            }
        }
    }
}
