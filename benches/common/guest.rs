//! A client that speaks calomel's protocol over a plain socket: thousands of engines would need thousands of threads.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use super::wire::{ANYTHING, MAGIC, Message, PREFIX_LEN, greeting};

/// A server that sends nothing for this long does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A client that is only a socket.
pub struct Guest {
    stream: TcpStream,
    calls: u64,
    /// Bytes received and not parsed yet.
    incoming: Vec<u8>,
}

impl Guest {
    /// Connects and completes the handshake.
    pub fn enter(address: SocketAddr) -> io::Result<Guest> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // Incarnations are random; two guests with the same one would be taken for the same engine.
        let incarnation = u64::from(stream.local_addr()?.port()) << 32 | u64::from(std::process::id());
        stream.write_all(&greeting(incarnation, 1 << 20))?;

        let mut preamble = [0; 16];
        stream.read_exact(&mut preamble)?;
        if !preamble.starts_with(MAGIC) {
            return Err(io::Error::other("the server speaks another protocol"));
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
            // The first call declares which name the number stands for.
            declaration: (self.calls == 0).then(|| (procedure.to_owned(), vec![ANYTHING])),
            provider: 0,
            budget_us: PATIENCE.as_micros() as u64,
            one_way: false,
            leases: (0, 0),
            size: 0,
        };
        self.calls += 1;
        self.stream.write_all(&message.frame(&[]))
    }

    /// Waits for the answer of the last call.
    pub fn answer(&mut self) -> io::Result<()> {
        loop {
            while let Some(message) = self.message()? {
                match message {
                    Message::Response { call, .. } if call + 1 == self.calls => return Ok(()),
                    Message::Refuse { status, .. } => return Err(io::Error::other(format!("refused: {status:?}"))),
                    // Other messages that a server sends to an engine.
                    _ => {}
                }
            }
            if self.receive()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Answers liveness probes of the server.
    pub fn tend(&mut self) -> io::Result<()> {
        self.stream.set_nonblocking(true)?;
        let received = self.receive();
        self.stream.set_nonblocking(false)?;
        match received {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            outcome => {
                outcome?;
                while self.message()?.is_some() {}
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

    /// The next message received. A ping is answered here.
    fn message(&mut self) -> io::Result<Option<Message>> {
        let Some((prefix, rest)) = self.incoming.split_first_chunk::<PREFIX_LEN>() else { return Ok(None) };
        let len = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
        let Some(bytes) = rest.get(..len) else { return Ok(None) };
        // The message's body follows it.
        let (message, _) = Message::take(bytes).ok_or_else(|| io::Error::other("no message"))?;
        self.incoming.drain(..PREFIX_LEN + len);
        if message == Message::Ping {
            self.stream.write_all(&Message::Pong.frame(&[]))?;
        }
        Ok(Some(message))
    }

    pub fn round_trip(&mut self, procedure: &str) -> io::Result<()> {
        self.call(procedure)?;
        self.answer()
    }
}
