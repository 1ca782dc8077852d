//! Non-blocking reads and writes that spin, and reads that sleep in `epoll`.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    thread,
};

use mio::{Events, Interest, Poll, Token};

pub fn spin_read(stream: &mut TcpStream, mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        let len = spin_read_some(stream, buffer)?;
        buffer = &mut buffer[len..];
    }
    Ok(())
}

pub fn spin_read_some(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    let mut patience = Patience::default();
    loop {
        match stream.read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => patience.spend(),
            outcome => return outcome,
        }
    }
}

/// Attempts in vain before the thread yields the core. Without the limit, two sides that spin on one core would see each other
/// only once in a time slice; on an idle machine an exchange ends long before it.
const TRIES: u32 = 128;

#[derive(Default)]
struct Patience(u32);

impl Patience {
    fn spend(&mut self) {
        self.0 += 1;
        if self.0.is_multiple_of(TRIES) {
            thread::yield_now();
        }
    }
}

pub fn spin_write(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let mut patience = Patience::default();
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => patience.spend(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A socket whose reader sleeps in `epoll`.
pub struct Parked {
    stream: mio::net::TcpStream,
    poll: Poll,
    events: Events,
}

impl Parked {
    pub fn new(stream: &TcpStream) -> io::Result<Parked> {
        let mut stream = mio::net::TcpStream::from_std(stream.try_clone()?);
        let poll = Poll::new()?;
        poll.registry().register(&mut stream, Token(0), Interest::READABLE)?;
        Ok(Parked { stream, poll, events: Events::with_capacity(1) })
    }

    /// Events are edge-triggered: sleeping is correct only after a read that found the socket empty, or after an exchange whose
    /// every byte was read. Both sides use it that way.
    pub fn read_exact(&mut self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            self.poll.poll(&mut self.events, None)?;
            while !buffer.is_empty() {
                match self.stream.read(buffer) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(len) => buffer = &mut buffer[len..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }
}
