//! A peer that is only a socket.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use calomel::Address;

use crate::common::wire::{ANYTHING, Message, frame, greeting};

static NEXT: AtomicU64 = AtomicU64::new(1);

pub fn socket(address: &Address) -> SocketAddr {
    address.to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
}

pub struct Raw {
    pub stream: TcpStream,
}

impl Raw {
    /// Connects, and sends nothing yet.
    pub fn dial(address: &Address) -> Raw {
        let stream = TcpStream::connect(socket(address)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Raw { stream }
    }

    /// Connects, and completes the handshake as an engine would that accepts messages of any length.
    pub fn enter(address: &Address) -> Raw {
        let mut raw = Raw::dial(address);
        let incarnation = (u64::from(std::process::id()) << 32) + NEXT.fetch_add(1, Ordering::Relaxed);
        raw.stream.write_all(&greeting(incarnation, 1 << 30)).unwrap();
        raw
    }

    /// Sends the bytes that `next` makes, until it has none or the time is over, and reads nothing. Returns how many bytes were
    /// sent, and whether the server has hung up.
    pub fn flood(&mut self, time: Duration, mut next: impl FnMut() -> Option<Vec<u8>>) -> (usize, bool) {
        self.stream.set_nonblocking(true).unwrap();
        let (begin, mut sent, mut bytes, mut at) = (Instant::now(), 0, Vec::new(), 0);
        while begin.elapsed() < time {
            if at == bytes.len() {
                let Some(more) = next() else { break };
                (bytes, at) = (more, 0);
            }
            match self.stream.write(&bytes[at..]) {
                Ok(n) => {
                    at += n;
                    sent += n;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return (sent, true),
            }
        }
        (sent, false)
    }

    /// Waits until this many bytes have arrived in all.
    pub fn read(&mut self, bytes: usize) {
        self.stream.set_nonblocking(false).unwrap();
        let mut buffer = vec![0; 64 << 10];
        let mut got = 0;
        while got < bytes {
            let n = self.stream.read(&mut buffer).unwrap();
            assert!(n > 0, "the server has hung up after {got} bytes of {bytes}");
            got += n;
        }
    }

    /// Whether the server has hung up; discards what it has sent.
    pub fn is_hung_up_on(&mut self) -> bool {
        self.stream.set_nonblocking(true).unwrap();
        let mut buffer = vec![0; 64 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
        }
    }
}

/// A call as it is on the wire. The first call with a procedure number declares its name.
pub fn request(call: u64, procedure: u32, name: Option<&str>, one_way: bool, body: &[u8]) -> Vec<u8> {
    call_of(call, procedure, name, one_way, body.len() as u64).frame(body)
}

/// A call whose body is announced, and may follow.
pub fn announcement(call: u64, procedure: u32, name: Option<&str>, size: u64) -> Vec<u8> {
    call_of(call, procedure, name, false, size).frame(&[])
}

fn call_of(call: u64, procedure: u32, name: Option<&str>, one_way: bool, size: u64) -> Message {
    let (procedure, declaration) = (procedure + 1, name.map(|name| (name.to_owned(), vec![ANYTHING])));
    Message::Request { call, procedure, declaration, provider: 0, budget_us: 60_000_000, one_way, leases: (0, 0), size }
}

/// Numbers of messages that have few fields.
pub const CANCEL: u8 = 1;
pub const ABORT: u8 = 3;
pub const PING: u8 = 4;
pub const PONG: u8 = 5;
pub const REVOKED: u8 = 8;

pub fn message<T: serde::Serialize>(number: u8, fields: &T) -> Vec<u8> {
    let mut message = vec![number];
    message.extend(postcard::to_stdvec(fields).unwrap());
    frame(&message, &[])
}
