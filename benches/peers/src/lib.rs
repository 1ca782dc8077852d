//! The same two calls in other RPC libraries: an empty one, and one that takes bytes and returns their number.
//!
//! Each library is used as its own examples show, over TCP, without tuning.

#[cfg(capnp)]
mod capnp_rpc;
mod tarpc;
mod tonic;

use std::{
    error::Error,
    io::{Read, Write},
    net::SocketAddr,
    process, thread,
    time::Instant,
};

pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// A library, and functions that serve and call with it.
pub struct Peer {
    pub name: &'static str,
    /// Serves until the process ends; [`announce`] prints the address.
    pub serve: fn() -> Outcome,
    pub connect: fn(SocketAddr) -> Outcome<Box<dyn Client>>,
}

/// A connection to the other process.
pub trait Client {
    /// Makes calls sequentially, with one sample in nanoseconds for each after the warm-up. Size zero means the empty call.
    fn round(&mut self, size: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome;
}

pub const PEERS: &[Peer] = &[
    tarpc::PEER,
    tonic::PEER,
    #[cfg(capnp)]
    capnp_rpc::PEER,
];

/// The libraries that were left out of this build, with the reason.
pub const LEFT_OUT: &[&str] = &[
    #[cfg(not(capnp))]
    "capnp-rpc: skipped: there was no `capnp` when this was built (Debian: apt-get install capnproto)",
];

/// Prints the server's address for the parent, and ends the process when the parent ends.
fn announce(address: SocketAddr) -> Outcome {
    println!("{address}");
    std::io::stdout().flush()?;
    thread::spawn(|| {
        // The input ends with the client, even with one that was killed.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        process::exit(0);
    });
    Ok(())
}

async fn timed(warm_up: usize, count: usize, samples: &mut Vec<f64>, mut call: impl AsyncFnMut() -> Outcome) -> Outcome {
    for _ in 0..warm_up {
        call().await?;
    }
    for _ in 0..count {
        let begun = Instant::now();
        call().await?;
        samples.push(begun.elapsed().as_nanos() as f64);
    }
    Ok(())
}

fn expect(found: u64, size: usize) -> Outcome {
    if found == size as u64 { Ok(()) } else { Err(format!("{found} of {size} bytes arrived").into()) }
}
