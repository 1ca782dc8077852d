//! The raw limit: the same exchanges over a bare TCP connection between the same two processes.
//!
//! The server's thread sleeps in `read` until a [`Command`] announces a round; only for that round does it spin (or wait in
//! `epoll`), and it goes back to sleep after the announced number of exchanges. So it disturbs nothing measured beside it.

mod client;
mod server;
mod socket;

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

pub use client::Connection;
pub use server::start as start_server;

/// What a round of the raw side consists of.
#[derive(Clone, Copy)]
enum Kind {
    /// Messages come back as they are; both sides spin.
    Echo = 1,
    /// The same, both sides waiting in `epoll`.
    EchoParked = 2,
    /// The server receives a stream and answers with a byte.
    StreamIn = 3,
    /// The server receives a byte and answers with a stream.
    StreamOut = 4,
}

struct Command {
    kind: Kind,
    /// Bytes of a message or of a stream.
    size: usize,
    count: usize,
}

impl Command {
    fn write_to(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut frame = [0; 24];
        let words = [self.kind as u64, self.size as u64, self.count as u64];
        for (slot, word) in frame.chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        stream.write_all(&frame)
    }

    fn read_from(stream: &mut TcpStream) -> io::Result<Command> {
        let mut frame = [0; 24];
        stream.read_exact(&mut frame)?;
        let word = |at: usize| u64::from_le_bytes(frame[at * 8..][..8].try_into().expect("eight bytes"));
        let kind = match word(0) {
            1 => Kind::Echo,
            2 => Kind::EchoParked,
            3 => Kind::StreamIn,
            4 => Kind::StreamOut,
            other => return Err(io::Error::other(format!("unknown command {other}"))),
        };
        Ok(Command { kind, size: word(1) as usize, count: word(2) as usize })
    }
}
