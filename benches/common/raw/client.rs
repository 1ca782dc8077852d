//! The client's end: it announces a round, drives it and takes its times.

use std::{
    hint::black_box,
    io,
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use super::{
    Command, Kind,
    socket::{Parked, spin_read, spin_read_some, spin_write},
};
use crate::common::{stats::Pace, timed};

/// A connection to the raw side of the server.
pub struct Connection {
    stream: TcpStream,
}

impl Connection {
    pub fn open(address: SocketAddr) -> io::Result<Connection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream })
    }

    /// One message out and back, again and again, both sides spinning.
    pub fn ping_pong(&mut self, size: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.round(Kind::Echo, size, warm_up + count, |stream| {
            let mut message = vec![1; size];
            timed(warm_up, count, samples, || {
                spin_write(stream, &message)?;
                spin_read(stream, &mut message)
            })
        })
    }

    /// The same with both sides waiting in `epoll`, and a pause before each message.
    pub fn ping_pong_parked(&mut self, size: usize, pause: Duration, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.round(Kind::EchoParked, size, count, |stream| {
            let mut message = vec![1; size];
            let mut parked = Parked::new(stream)?;
            for _ in 0..count {
                thread::sleep(pause);
                timed(0, 1, samples, || {
                    parked.write_all(&message)?;
                    parked.read_exact(&mut message)
                })?;
            }
            Ok(())
        })
    }

    /// Keeps `window` messages on their way, and tells `pace` how many came back.
    pub fn pipelined(&mut self, size: usize, window: usize, count: usize, pace: &mut Pace) -> io::Result<()> {
        self.round(Kind::Echo, size, count, |stream| {
            let (mut sent, mut received) = (0, 0);
            let outgoing = vec![1; size * window];
            let mut incoming = vec![0; size * window];
            while received < size * count {
                let next = (received / size + window).min(count);
                spin_write(stream, &outgoing[..(next - sent) * size])?;
                sent = next;
                received += spin_read_some(stream, &mut incoming)?;
                pace.reached(received / size);
            }
            Ok(())
        })
    }

    /// A stream to the server, its byte of acknowledgement back.
    pub fn stream_in(&mut self, source: &[u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.round(Kind::StreamIn, source.len(), warm_up + count, |stream| {
            timed(warm_up, count, samples, || {
                spin_write(stream, source)?;
                spin_read(stream, &mut [0])
            })
        })
    }

    /// A byte of request to the server, its stream back.
    pub fn stream_out(&mut self, target: &mut [u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.round(Kind::StreamOut, target.len(), warm_up + count, |stream| {
            timed(warm_up, count, samples, || {
                spin_write(stream, &[0])?;
                spin_read(stream, target)?;
                black_box(&target);
                Ok(())
            })
        })
    }

    fn round(
        &mut self,
        kind: Kind,
        size: usize,
        count: usize,
        exchange: impl FnOnce(&mut TcpStream) -> io::Result<()>,
    ) -> io::Result<()> {
        Command { kind, size, count }.write_to(&mut self.stream)?;
        self.stream.set_nonblocking(true)?;
        exchange(&mut self.stream)?;
        self.stream.set_nonblocking(false)
    }
}
