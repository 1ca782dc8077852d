//! The server of the raw side: a thread that spins only while a round runs.

use std::{
    hint::black_box,
    io::{self, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::unix::process::parent_id,
    thread,
};

use super::{
    Command, Kind, lines,
    shared::{Shared, vm_read, vm_write},
    socket::{Parked, spin_read, spin_read_some, spin_write},
};

/// Serves connections sequentially, on a thread of its own.
pub fn start(shared: Shared) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming() {
            // A failing connection ends its service; the benchmark reports the error on the client's side.
            let _ = stream.and_then(|stream| serve(stream, &shared));
        }
    });
    Ok(address)
}

fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    loop {
        let command = Command::read_from(&mut stream)?;
        match command.kind {
            Kind::Echo | Kind::EchoParked | Kind::StreamIn | Kind::StreamOut => {
                stream.set_nonblocking(true)?;
                over_tcp(&mut stream, &command, &mut buffer)?;
                stream.set_nonblocking(false)?;
            }
            _ => {
                let fine = over_memory(shared, &command, &mut buffer)?;
                stream.write_all(&[u8::from(fine)])?;
            }
        }
    }
}

fn over_tcp(stream: &mut TcpStream, &Command { kind, size, count, .. }: &Command, buffer: &mut Vec<u8>) -> io::Result<()> {
    match kind {
        Kind::EchoParked => {
            let mut parked = Parked::new(stream)?;
            let mut message = vec![0; size];
            for _ in 0..count {
                parked.read_exact(&mut message)?;
                parked.write_all(&message)?;
            }
        }
        Kind::StreamIn => {
            fit(buffer, size);
            for _ in 0..count {
                spin_read(stream, buffer)?;
                black_box(&buffer);
                spin_write(stream, &[0])?;
            }
        }
        Kind::StreamOut => {
            fit(buffer, size);
            for _ in 0..count {
                spin_read(stream, &mut [0])?;
                spin_write(stream, buffer)?;
            }
        }
        _ => echo(stream, size * count)?,
    }
    Ok(())
}

/// False if a system call was refused; every message is answered all the same.
fn over_memory(shared: &Shared, command: &Command, buffer: &mut Vec<u8>) -> io::Result<bool> {
    let &Command { kind, size, count, address } = command;
    let client = parent_id();
    fit(buffer, size);
    let mut fine = true;
    for number in 0..count {
        match kind {
            Kind::Doorbells => {
                shared.client_doorbell().sleep()?;
                shared.server_doorbell().ring()?;
                continue;
            }
            Kind::RingIn => lines::receive(shared, number * size, buffer),
            _ => lines::wait_for(lines::out(shared, number), number),
        }
        match kind {
            Kind::VmIn => fine &= vm_read(client, address, buffer).is_ok(),
            Kind::VmOut => fine &= vm_write(client, address, buffer).is_ok(),
            Kind::CopyIn => shared.read(0, buffer),
            Kind::CopyOut => shared.write(0, buffer),
            _ => {}
        }
        black_box(&buffer);
        lines::signal(lines::back(shared, number), number);
    }
    Ok(fine)
}

/// Echoes `total` bytes; one read may take several messages.
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

/// Makes `buffer` `size` bytes long, and touches every page of it.
fn fit(buffer: &mut Vec<u8>, size: usize) {
    if buffer.len() != size {
        *buffer = Vec::new();
        *buffer = vec![1; size];
    }
}
