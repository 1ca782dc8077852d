//! The same two calls in other RPC libraries: an empty one, and one that takes bytes and returns their number.
//!
//! Each library is used as its own examples show, over TCP, without tuning.

#[cfg(capnp)]
mod capnp_rpc;
mod tarpc;
mod tonic;

use std::{
    error::Error,
    io::{self, Read, Write},
    net::SocketAddr,
    process, thread,
    time::Instant,
};

use tokio::{
    runtime::{self, Runtime},
    task::JoinSet,
};

pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// What a task returns of an error, as it can be sent to another thread.
pub type Failure = String;

/// The runtime of a side.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// tokio's default, with a worker per core.
    Default,
    CurrentThread,
    TwoWorkers,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Default, Kind::CurrentThread, Kind::TwoWorkers];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Default => "default runtime",
            Kind::CurrentThread => "current-thread runtime",
            Kind::TwoWorkers => "two workers",
        }
    }

    pub fn runtime(self) -> io::Result<Runtime> {
        let mut builder = match self {
            Kind::Default => return Runtime::new(),
            Kind::CurrentThread => runtime::Builder::new_current_thread(),
            Kind::TwoWorkers => runtime::Builder::new_multi_thread(),
        };
        if self == Kind::TwoWorkers {
            builder.worker_threads(2);
        }
        builder.enable_all().build()
    }
}

/// A library, and functions that serve and call with it.
pub struct Peer {
    pub name: &'static str,
    /// The runtime of its own examples.
    pub own: Kind,
    /// The runtimes whose tasks can call with it.
    pub tasks: &'static [Kind],
    /// Serves until the process ends; [`announce`] prints the address.
    pub serve: fn(Runtime) -> Outcome,
    pub connect: fn(SocketAddr, Runtime) -> Outcome<Box<dyn Client>>,
}

/// A connection to the other process.
pub trait Client {
    /// Makes calls sequentially, with one sample in nanoseconds for each after the warm-up. Size zero means the empty call.
    fn round(&mut self, size: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome;

    /// The same with empty calls from one task.
    fn one_task(&mut self, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome;

    /// Makes empty calls from so many tasks at once, `each` from each of them.
    fn many_tasks(&mut self, tasks: usize, each: usize) -> Outcome;
}

/// Makes empty calls, in a task of its own.
pub trait Calls: Clone + Send + 'static {
    fn call(&mut self) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// See [`Client::one_task`]. The task is spawned, as those of a program are: what is not runs on the thread that waits for the
/// runtime.
pub fn one_task(runtime: &Runtime, mut calls: impl Calls, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
    let task = async move {
        let mut samples = Vec::with_capacity(count);
        for done in 0..warm_up + count {
            let begun = Instant::now();
            calls.call().await?;
            if done >= warm_up {
                samples.push(begun.elapsed().as_nanos() as f64);
            }
        }
        Ok::<_, Failure>(samples)
    };
    samples.extend(runtime.block_on(async { tokio::spawn(task).await })??);
    Ok(())
}

/// See [`Client::many_tasks`].
pub fn many_tasks(runtime: &Runtime, calls: &impl Calls, tasks: usize, each: usize) -> Outcome {
    runtime.block_on(async {
        let mut set = JoinSet::new();
        for _ in 0..tasks {
            let mut calls = calls.clone();
            set.spawn(async move {
                for _ in 0..each {
                    calls.call().await?;
                }
                Ok::<_, Failure>(())
            });
        }
        while let Some(ended) = set.join_next().await {
            ended??;
        }
        Ok(())
    })
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
