//! Channels that carry an adversary's bytes to its victim.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::forged::{BYTES, Forged, GONE, MAX_BODY, PAYLOAD, listen};
use crate::support::anywhere;

/// What has arrived from the victim.
pub enum Piece {
    /// Handshake messages and frames; and payloads, where the transport sends these in line.
    Bytes(Vec<u8>),
    Payload(Vec<u8>),
}

/// A connection that carries arbitrary bytes.
pub trait Channel: Send {
    /// Sends bytes. False: the victim no longer reads, or has not read them within `patience`.
    fn put(&mut self, bytes: &[u8], patience: Duration) -> bool;
    /// Sends the payload behind a `Data`, and whether the sender's memory was exposed to its end.
    fn put_payload(&mut self, bytes: &[u8], whole: bool, patience: Duration) -> bool;
    /// What has arrived; `None` if nothing has.
    fn take(&mut self) -> Option<Piece>;
    /// The victim has hung up, and all that it sent has been received.
    fn has_ended(&mut self) -> bool;
    /// Closes the sending half.
    fn shut_half(&mut self);
    /// Ends the connection at once; bytes in transit are lost.
    fn break_off(&mut self);
    /// Payloads are in line with the frames, each followed by a status byte.
    fn in_line(&self) -> bool;
}

/// A new connection to an engine, on which nothing has been sent.
pub fn dial(address: &str) -> Box<dyn Channel> {
    match address.strip_prefix("tcp://") {
        Some(socket) => Box::new(Tcp::new(TcpStream::connect(socket).unwrap())),
        None => Box::new(Forged::connect(address, false)),
    }
}

/// Where an adversary is dialled.
pub struct Listener {
    pub address: String,
    tcp: Option<TcpListener>,
    shm: Option<OwnedFd>,
}

impl Listener {
    /// On the transport of this test.
    pub fn open() -> Listener {
        if anywhere().starts_with("tcp") {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("tcp://{}", listener.local_addr().unwrap());
            return Listener { address, tcp: Some(listener), shm: None };
        }
        let address = format!("shm://adversary-{:016x}", rand::random::<u64>());
        Listener { shm: Some(listen(&address)), address, tcp: None }
    }

    /// Accepts a connection, on which nothing of the protocol has been sent.
    pub fn accept(&self) -> Box<dyn Channel> {
        match (&self.tcp, &self.shm) {
            (Some(listener), _) => Box::new(Tcp::new(listener.accept().unwrap().0)),
            (None, Some(listener)) => {
                let mut peer = Forged::accept(listener);
                peer.welcome(false);
                Box::new(peer)
            }
            (None, None) => unreachable!("one of them is set"),
        }
    }
}

pub struct Tcp {
    stream: TcpStream,
    ended: bool,
}

impl Tcp {
    pub fn new(stream: TcpStream) -> Tcp {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Tcp { stream, ended: false }
    }
}

/// Retries until it is done; false if that takes too long.
fn within(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !done() {
        if begin.elapsed() > patience {
            return false;
        }
        thread::sleep(Duration::from_micros(100));
    }
    true
}

impl Channel for Tcp {
    fn put(&mut self, bytes: &[u8], patience: Duration) -> bool {
        let (mut rest, mut broken) = (bytes, false);
        while !rest.is_empty() && !broken {
            let moved = within(patience, || match self.stream.write(rest) {
                Ok(n) => {
                    rest = &rest[n..];
                    true
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => false,
                Err(_) => {
                    broken = true;
                    true
                }
            });
            broken |= !moved;
        }
        !broken
    }

    fn put_payload(&mut self, bytes: &[u8], whole: bool, patience: Duration) -> bool {
        self.put(&[bytes, &[u8::from(whole)]].concat(), patience)
    }

    fn take(&mut self) -> Option<Piece> {
        let mut buffer = vec![0; 64 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.ended = true,
            Ok(n) => {
                buffer.truncate(n);
                return Some(Piece::Bytes(buffer));
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.ended = true,
        }
        None
    }

    fn has_ended(&mut self) -> bool {
        self.ended
    }

    fn shut_half(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn break_off(&mut self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        let len = size_of_val(&linger) as libc::socklen_t;
        let (fd, value) = (self.stream.as_raw_fd(), (&raw const linger).cast());
        // SAFETY: the option's value is valid for `len` bytes, for as long as the call lasts.
        assert_eq!(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, value, len) }, 0);
    }

    fn in_line(&self) -> bool {
        true
    }
}

impl Forged {
    /// Writes bytes to the ring as the victim makes room for them.
    fn put_all(&mut self, kind: u64, bytes: &[u8], patience: Duration) -> bool {
        bytes.chunks(MAX_BODY).all(|piece| {
            let room = within(patience, || self.has_room(piece.len()) || self.has_hung_up());
            if !room || !self.has_room(piece.len()) {
                return false;
            }
            self.put(kind, piece);
            true
        })
    }
}

impl Channel for Forged {
    fn put(&mut self, bytes: &[u8], patience: Duration) -> bool {
        self.put_all(BYTES, bytes, patience)
    }

    fn put_payload(&mut self, bytes: &[u8], whole: bool, patience: Duration) -> bool {
        if whole {
            return self.put_all(PAYLOAD, bytes, patience);
        }
        // Sent instead of the rest.
        let put = self.put_all(PAYLOAD, &bytes[..bytes.len() - 1], patience);
        self.put(GONE, &[]);
        put
    }

    fn take(&mut self) -> Option<Piece> {
        let (kind, body) = self.try_next()?;
        Some(if kind == BYTES { Piece::Bytes(body) } else { Piece::Payload(body) })
    }

    fn has_ended(&mut self) -> bool {
        self.has_hung_up()
    }

    fn shut_half(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    fn break_off(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn in_line(&self) -> bool {
        false
    }
}
