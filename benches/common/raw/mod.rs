//! The raw references: the same exchanges over a bare TCP connection or bare shared memory between the same two processes.
//!
//! The server's thread sleeps in `read` until a [`Command`] announces a round. It spins (or waits in `epoll`) only for the
//! announced number of exchanges, and then sleeps again, so it does not disturb other measurements.

mod client;
mod lines;
mod server;
pub mod shared;
mod socket;

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

pub use client::Connection;
pub use server::start as start_server;

/// The kind of exchange in a round of the raw side.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Messages are echoed; both sides spin.
    Echo,
    /// Messages are echoed; both sides wait in `epoll`.
    EchoParked,
    /// The server receives a stream and answers with a byte.
    StreamIn,
    /// The server receives a byte and answers with a stream.
    StreamOut,
    /// Cache lines are echoed; both sides spin.
    Lines,
    /// Eventfds are signalled; both sides wait in `epoll`.
    Doorbells,
    /// The client's bytes go through the ring; the answer is a cache line.
    RingIn,
    /// For each signal in a cache line the server reads the client's memory with a system call.
    VmIn,
    /// The same, but the server writes.
    VmOut,
    /// The same, but the server copies from memory that both have mapped.
    CopyIn,
    /// The same, but the server copies into it.
    CopyOut,
}

impl Kind {
    const ALL: [Kind; 11] = [
        Kind::Echo,
        Kind::EchoParked,
        Kind::StreamIn,
        Kind::StreamOut,
        Kind::Lines,
        Kind::Doorbells,
        Kind::RingIn,
        Kind::VmIn,
        Kind::VmOut,
        Kind::CopyIn,
        Kind::CopyOut,
    ];
}

struct Command {
    kind: Kind,
    /// Bytes of a message or of a stream.
    size: usize,
    count: usize,
    /// Address in the client's memory.
    address: u64,
}

impl Command {
    const LEN: usize = 32;

    fn write_to(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut frame = [0; Command::LEN];
        let words = [self.kind as u64, self.size as u64, self.count as u64, self.address];
        for (slot, word) in frame.chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        stream.write_all(&frame)
    }

    fn read_from(stream: &mut TcpStream) -> io::Result<Command> {
        let mut frame = [0; Command::LEN];
        stream.read_exact(&mut frame)?;
        let word = |at: usize| u64::from_le_bytes(frame[at * 8..][..8].try_into().expect("eight bytes"));
        let kind = Kind::ALL.into_iter().find(|&kind| kind as u64 == word(0));
        let kind = kind.ok_or_else(|| io::Error::other(format!("unknown command {}", word(0))))?;
        Ok(Command { kind, size: word(1) as usize, count: word(2) as usize, address: word(3) })
    }
}
