//! A connection that speaks calomel's protocol by hand: thousands of engines would be thousands of threads.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use calomel::Address;
use serde::{Deserialize, Serialize};

const MAGIC: [u8; 8] = *b"calomel\0";
const VERSION: u16 = 2;
/// A server that says nothing for so long does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// What an engine says of itself when a connection begins, behind magic, versions, length, checksum and kind.
#[derive(Serialize, Deserialize)]
struct Hello {
    incarnation: u64,
    max_message: u64,
    addresses: Vec<Address>,
    ticket: Option<u64>,
    checksums: bool,
}

/// The message that is sent here, with the number that it has among all.
#[derive(Serialize)]
enum Message<'a> {
    Request {
        call: u64,
        procedure: u32,
        declaration: Option<(&'a str, &'a [u8])>,
        provider: u16,
        budget_us: u64,
        one_way: bool,
        leases: (u64, u32),
        size: u64,
    },
}

const RESPONSE: u8 = 1;
/// The shape of `()`.
const UNIT: u8 = 16;
const REFUSE: u8 = 2;
const PING: u8 = 9;
const PONG: u8 = 10;

/// A frame of a message without a body: its checksum, its length, and that of the message in it.
fn framed(message: &[u8]) -> Vec<u8> {
    let len = (message.len() as u32).to_le_bytes();
    let covered = [&len, &len, message].concat();
    [&crc32c::crc32c(&covered).to_le_bytes(), &covered[..]].concat()
}

/// A client that is nothing but a socket.
pub struct Guest {
    stream: TcpStream,
    calls: u64,
    /// What has come and was not looked at yet.
    incoming: Vec<u8>,
}

impl Guest {
    /// Connects, and exchanges greetings.
    pub fn enter(address: SocketAddr) -> io::Result<Guest> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // Incarnations are random; two guests of one would be taken for the same engine.
        let incarnation = u64::from(stream.local_addr()?.port()) << 32 | u64::from(std::process::id());
        let hello = Hello { incarnation, max_message: 1 << 20, addresses: Vec::new(), ticket: None, checksums: false };
        let hello = postcard::to_stdvec(&hello).map_err(io::Error::other)?;
        let mut greeting = MAGIC.to_vec();
        greeting.extend_from_slice(&VERSION.to_le_bytes());
        greeting.extend_from_slice(&VERSION.to_le_bytes());
        greeting.extend_from_slice(&(hello.len() as u32 + 5).to_le_bytes());
        let said = [&[0], &hello[..]].concat();
        let sum = crc32c::crc32c_append(crc32c::crc32c(&greeting), &said);
        greeting.extend_from_slice(&sum.to_le_bytes());
        greeting.extend_from_slice(&said);
        stream.write_all(&greeting)?;

        let mut preamble = [0; 16];
        stream.read_exact(&mut preamble)?;
        if preamble[..8] != MAGIC {
            return Err(io::Error::other("the server greets in another protocol"));
        }
        let len = u32::from_le_bytes(preamble[12..].try_into().expect("four bytes"));
        stream.read_exact(&mut vec![0; len as usize])?;
        Ok(Guest { stream, calls: 0, incoming: Vec::new() })
    }

    /// Sends a call without arguments.
    pub fn call(&mut self, procedure: &str) -> io::Result<()> {
        let message = Message::Request {
            call: self.calls,
            procedure: 1,
            // The first call ties the number to the name, and to arguments of no bytes.
            declaration: (self.calls == 0).then_some((procedure, &[UNIT][..])),
            provider: 0,
            budget_us: PATIENCE.as_micros() as u64,
            one_way: false,
            leases: (0, 0),
            size: 0,
        };
        self.calls += 1;
        let message = postcard::to_stdvec(&message).map_err(io::Error::other)?;
        self.stream.write_all(&framed(&message))
    }

    /// Waits for the answer of the last call.
    pub fn answer(&mut self) -> io::Result<()> {
        loop {
            while let Some(frame) = self.frame()? {
                match frame.first() {
                    Some(&RESPONSE) => {
                        let (call, _) = postcard::take_from_bytes::<u64>(&frame[1..]).map_err(io::Error::other)?;
                        if call + 1 == self.calls {
                            return Ok(());
                        }
                    }
                    Some(&REFUSE) => return Err(io::Error::other("the call was refused")),
                    // What else a server says to an engine.
                    _ => {}
                }
            }
            if self.receive()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Lets the server know that this side is alive, if it has asked.
    pub fn tend(&mut self) -> io::Result<()> {
        self.stream.set_nonblocking(true)?;
        let received = self.receive();
        self.stream.set_nonblocking(false)?;
        match received {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            outcome => {
                outcome?;
                while self.frame()?.is_some() {}
                Ok(())
            }
        }
    }

    fn receive(&mut self) -> io::Result<usize> {
        let mut bytes = [0; 512];
        let len = self.stream.read(&mut bytes)?;
        self.incoming.extend_from_slice(&bytes[..len]);
        Ok(len)
    }

    /// The next frame that has come, without its prefix. A ping is answered.
    fn frame(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((prefix, rest)) = self.incoming.split_first_chunk::<12>() else { return Ok(None) };
        let len = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
        let Some(frame) = rest.get(..len).map(<[u8]>::to_vec) else { return Ok(None) };
        self.incoming.drain(..12 + len);
        if frame.first() == Some(&PING) {
            self.stream.write_all(&framed(&[PONG]))?;
        }
        Ok(Some(frame))
    }

    pub fn round_trip(&mut self, procedure: &str) -> io::Result<()> {
        self.call(procedure)?;
        self.answer()
    }
}
