//! Random messages, from those that an engine would send to those that only an attacker would.

use super::LeaseRange;
use super::env::Random;
use super::wire::{BorrowedBytes, Declare, Message, Range, Status, Stream};

/// What an adversary knows of its target: numbers that refer to something there.
#[derive(Clone, Default)]
pub struct KnownProcedures {
    pub numbers: Vec<u64>,
    pub tokens: Vec<u128>,
    pub owner: u64,
}

const NAMES: [&str; 4] = ["echo", "", "other", "ünïcödé"];
const BODY: [u8; 64] = [0x5a; 64];

impl Random {
    /// A known number, a small one, a huge one, or any.
    pub fn number(&mut self, known: &[u64]) -> u64 {
        match self.below(6) {
            0 | 1 => self.pick(known).copied().unwrap_or(1),
            2 => self.below(8) as u64,
            3 => u64::MAX - self.below(3) as u64,
            4 => 1 << self.below(64),
            _ => self.next(),
        }
    }

    /// A length, mostly short enough that its bytes can be sent along.
    pub fn length(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => self.number(&[]),
            2 => (512 << 10) - 1 + self.below(3) as u64,
            _ => self.below(3000) as u64,
        }
    }

    fn text(&mut self) -> String {
        NAMES[self.below(4)].repeat(self.below(3))
    }

    pub fn status(&mut self) -> Status {
        match self.below(16) {
            0 => Status::Ok,
            1 => Status::NoSuchProcedure,
            2 => Status::NoSuchProvider,
            3 => Status::NoResponse,
            4 => Status::Panicked(self.text()),
            5 => Status::Failed(self.text()),
            6 => Status::Decode(self.text()),
            7 => Status::TypeMismatch { expected: self.text(), found: self.text() },
            8 => Status::TooLarge { size: self.next(), limit: self.length() },
            9 => Status::Busy(self.text()),
            10 => Status::AccessDenied(self.text()),
            11 => Status::Revoked,
            12 => Status::OutOfRange { offset: self.next(), len: self.length(), size: self.length() },
            13 => Status::Restarted,
            14 => Status::Finalizing,
            _ => Status::Encode(self.text()),
        }
    }

    fn leases(&mut self) -> LeaseRange {
        LeaseRange { first: self.number(&[]), count: [0, 0, 1, 3, u32::MAX][self.below(5)] }
    }

    /// None are encoded as such.
    fn released(&mut self) -> LeaseRange {
        Some(self.leases()).filter(|leases| leases.count > 0).unwrap_or_default()
    }

    fn token(&mut self, known: &KnownProcedures) -> [u8; 16] {
        let any = u128::from(self.next());
        let token = if self.once_in(4) { None } else { self.pick(&known.tokens).copied() };
        token.unwrap_or(any).to_le_bytes()
    }

    fn range(&mut self, known: &KnownProcedures) -> Range {
        Range {
            transfer: self.number(&known.numbers),
            owner: if self.once_in(8) { self.next() } else { known.owner },
            token: self.token(known),
            offset: self.length(),
            len: self.length(),
        }
    }

    pub fn stream(&mut self) -> Stream {
        [Stream::Pull, Stream::Push, Stream::Request, Stream::Response][self.below(4)]
    }

    /// A message, and a body for it.
    pub fn message(&mut self, known: &KnownProcedures) -> (Message<'static>, &'static [u8]) {
        let body = &BODY[..if self.once_in(2) { 0 } else { self.below(BODY.len()) }];
        let call = self.number(&known.numbers);
        let size = if self.once_in(3) { self.length() } else { body.len() as u64 };
        let shape = BorrowedBytes(&BODY[..self.below(9)]);
        let message = match self.below(20) {
            0..5 => Message::Request {
                call: if self.once_in(3) { call } else { self.next() },
                procedure: self.below(5) as u32,
                declaration: if self.once_in(3) { None } else { Some(Declare { name: NAMES[self.below(4)], shape }) },
                provider: self.below(3) as u16,
                budget_us: self.number(&[]),
                one_way: self.once_in(3),
                leases: self.leases(),
                size,
            },
            5 | 6 => Message::Response {
                call,
                result: self.below(3) as u32,
                shape,
                leases: self.leases(),
                released: self.released(),
                size,
            },
            7 => Message::Refuse { call, status: self.status() },
            8 => Message::Cancel { call },
            9 | 10 => Message::Pull(self.range(known)),
            11 | 12 => Message::Push(self.range(known)),
            13 => Message::Done { transfer: call, status: self.status() },
            14 => Message::Abort { transfer: call, push: self.once_in(2) },
            15 | 16 => {
                let len = self.length().min(300 << 10) as u32;
                let offset = if self.once_in(2) { 0 } else { self.length() };
                Message::Data { stream: self.stream(), id: call, offset, len }
            }
            17 => Message::Release(self.leases()),
            18 => Message::Revoked { token: self.token(known) },
            _ => match self.below(11) {
                10 => {
                    let (head, width) = (self.length(), [0, 1, 2, 4, 8, 255][self.below(6)]);
                    Message::List { call, is_answer: self.once_in(2), head, width }
                }
                8 => Message::Idle { received: self.number(&[]), exposes: self.once_in(2) },
                9 => [Message::IdleAgreed, Message::InUse][self.below(2)].clone(),
                6 => Message::ResumptionToken { token: self.number(&known.numbers).into() },
                7 => Message::Handled {
                    count: self.number(&[]) as u32,
                    calls: self.number(&[]) as u32,
                    bytes: self.number(&[]) as u32,
                },
                0 => Message::Ping,
                1 => Message::Pong,
                2 => Message::Shutdown { call },
                5 => Message::TraceContext {
                    trace_id: [self.below(3) as u8; 16],
                    parent_id: [self.below(3) as u8; 8],
                    flags: self.below(256) as u8,
                    state: ["", "a=1", "ünïcödé", "line\nbreak"][self.below(4)],
                },
                4 if self.once_in(2) => Message::Identify { call, provider: self.below(3) as u16 },
                4 => Message::Echo { call },
                // Rare, since the receiver ignores all that follows.
                3 if self.once_in(4) => Message::Goodbye,
                _ => Message::Cancel { call },
            },
        };
        (message, body)
    }
}
