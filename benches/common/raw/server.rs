//! The server's end: a thread that spins only while a round runs.

use std::{
    hint::black_box,
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
};

use super::{
    Command, Kind,
    socket::{Parked, spin_read, spin_read_some, spin_write},
};

/// Serves one connection after the other on a thread of its own.
pub fn start() -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming() {
            // The end of a connection ends its service; the benchmark reports what went wrong on its own side.
            let _ = stream.and_then(serve);
        }
    });
    Ok(address)
}

fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    loop {
        let Command { kind, size, count } = Command::read_from(&mut stream)?;
        stream.set_nonblocking(true)?;
        match kind {
            Kind::Echo => echo(&mut stream, size * count)?,
            Kind::EchoParked => {
                let mut parked = Parked::new(&stream)?;
                let mut message = vec![0; size];
                for _ in 0..count {
                    parked.read_exact(&mut message)?;
                    parked.write_all(&message)?;
                }
            }
            Kind::StreamIn => {
                fit(&mut buffer, size);
                for _ in 0..count {
                    spin_read(&mut stream, &mut buffer)?;
                    black_box(&buffer);
                    spin_write(&mut stream, &[0])?;
                }
            }
            Kind::StreamOut => {
                fit(&mut buffer, size);
                for _ in 0..count {
                    spin_read(&mut stream, &mut [0])?;
                    spin_write(&mut stream, &buffer)?;
                }
            }
        }
        stream.set_nonblocking(false)?;
    }
}

/// Sends `total` bytes back, many messages a read where many have come.
fn echo(stream: &mut TcpStream, total: usize) -> io::Result<()> {
    let mut buffer = [0; 64 << 10];
    let mut done = 0;
    while done < total {
        let len = spin_read_some(stream, &mut buffer)?;
        spin_write(stream, &buffer[..len])?;
        done += len;
    }
    Ok(())
}

/// Makes `buffer` `size` bytes long, every page of it touched.
fn fit(buffer: &mut Vec<u8>, size: usize) {
    if buffer.len() != size {
        *buffer = Vec::new();
        *buffer = vec![1; size];
    }
}
