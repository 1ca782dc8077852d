//! The client of the raw side: it announces a round, drives it and records the times.

use std::{
    hint::black_box,
    io::{self, Read},
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use super::{
    Command, Kind, lines,
    shared::{self, Shared},
    socket::{Parked, spin_read, spin_read_some, spin_write},
};
use crate::common::{stats::Pace, timed};

/// A connection to the raw side of the server.
pub struct Connection {
    stream: TcpStream,
    shared: Shared,
}

impl Connection {
    pub fn open(address: SocketAddr, shared: Shared) -> io::Result<Connection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, shared })
    }

    /// Round trips of one message; both sides spin.
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

    /// Keeps `window` messages in flight, and reports to `pace` how many came back.
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

    /// A stream to the server, then one byte of acknowledgement back.
    pub fn stream_in(&mut self, source: &[u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.round(Kind::StreamIn, source.len(), warm_up + count, |stream| {
            timed(warm_up, count, samples, || {
                spin_write(stream, source)?;
                spin_read(stream, &mut [0])
            })
        })
    }

    /// One byte of request to the server, then its stream back.
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

    /// Round trips of a cache line; both sides spin.
    pub fn lines(&mut self, window: usize, count: usize, pace: &mut Pace) -> io::Result<()> {
        assert!(window <= lines::LINES);
        self.shared_round(Kind::Lines, 0, count, 0, |shared| {
            let (mut sent, mut received) = (0, 0);
            while received < count {
                while sent < (received + window).min(count) {
                    lines::signal(lines::out(shared, sent), sent);
                    sent += 1;
                }
                lines::wait_for(lines::back(shared, received), received);
                received += 1;
                pace.reached(received);
            }
            Ok(())
        })
    }

    /// An eventfd signalled on each side; both wait in `epoll`, with a pause before each.
    pub fn doorbells(&mut self, pause: Duration, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.shared_round(Kind::Doorbells, 0, count, 0, |shared| {
            for _ in 0..count {
                thread::sleep(pause);
                timed(0, 1, samples, || {
                    shared.client_doorbell().ring()?;
                    shared.server_doorbell().sleep()
                })?;
            }
            Ok(())
        })
    }

    /// Copies to the server through a ring in shared memory; the acknowledgement is a cache line.
    pub fn ring_in(&mut self, source: &[u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.shared_round(Kind::RingIn, source.len(), warm_up + count, 0, |shared| {
            let mut number = 0;
            timed(warm_up, count, samples, || {
                lines::send(shared, number * source.len(), source);
                lines::wait_for(lines::back(shared, number), number);
                number += 1;
                Ok(())
            })
        })
    }

    /// The server reads this memory with `process_vm_readv`; cache lines signal request and completion.
    pub fn vm_in(&mut self, source: &[u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.asked(Kind::VmIn, source.len(), source.as_ptr().addr() as u64, warm_up, count, samples)?;
        black_box(source);
        Ok(())
    }

    /// The server writes this memory with `process_vm_writev`.
    pub fn vm_out(&mut self, target: &mut [u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.asked(Kind::VmOut, target.len(), target.as_mut_ptr().expose_provenance() as u64, warm_up, count, samples)?;
        black_box(target);
        Ok(())
    }

    /// The server copies as many bytes from memory that both processes have mapped.
    pub fn copy_in(&mut self, source: &[u8], warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.shared.write(0, source);
        self.asked(Kind::CopyIn, source.len(), 0, warm_up, count, samples)
    }

    /// The server copies as many bytes to memory that both processes have mapped.
    pub fn copy_out(&mut self, len: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> io::Result<()> {
        self.asked(Kind::CopyOut, len, 0, warm_up, count, samples)
    }

    /// Reads the server's memory from this process.
    pub fn vm_read(
        &self,
        pid: u32,
        address: u64,
        len: usize,
        warm_up: usize,
        count: usize,
        samples: &mut Vec<f64>,
    ) -> io::Result<()> {
        let mut target = vec![1; len];
        timed(warm_up, count, samples, || {
            shared::vm_read(pid, address, &mut target)?;
            black_box(&target);
            Ok(())
        })
    }

    /// A round in which the server acts each time a cache line signals it.
    fn asked(
        &mut self,
        kind: Kind,
        size: usize,
        address: u64,
        warm_up: usize,
        count: usize,
        samples: &mut Vec<f64>,
    ) -> io::Result<()> {
        self.shared_round(kind, size, warm_up + count, address, |shared| {
            let mut number = 0;
            timed(warm_up, count, samples, || {
                lines::signal(lines::out(shared, number), number);
                lines::wait_for(lines::back(shared, number), number);
                number += 1;
                Ok(())
            })
        })
    }

    /// Ends with a byte from the server which confirms that no system call failed.
    fn shared_round(
        &mut self,
        kind: Kind,
        size: usize,
        count: usize,
        address: u64,
        exchange: impl FnOnce(&Shared) -> io::Result<()>,
    ) -> io::Result<()> {
        lines::reset(&self.shared);
        Command { kind, size, count, address }.write_to(&mut self.stream)?;
        exchange(&self.shared)?;
        let mut fine = [0];
        self.stream.read_exact(&mut fine)?;
        if fine[0] == 1 {
            Ok(())
        } else {
            Err(io::Error::other(format!("the system refuses {kind:?} between the two processes")))
        }
    }

    fn round(
        &mut self,
        kind: Kind,
        size: usize,
        count: usize,
        exchange: impl FnOnce(&mut TcpStream) -> io::Result<()>,
    ) -> io::Result<()> {
        Command { kind, size, count, address: 0 }.write_to(&mut self.stream)?;
        self.stream.set_nonblocking(true)?;
        exchange(&mut self.stream)?;
        self.stream.set_nonblocking(false)
    }
}
