//! capnp-rpc over TCP, on a single-threaded runtime per side, as the library requires.

use std::{net::SocketAddr, rc::Rc};

use capnp_rpc::{RpcSystem, rpc_twoparty_capnp::Side, twoparty::VatNetwork};
use futures::{AsyncReadExt, io};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    task::{JoinSet, LocalSet, spawn_local},
};
use tokio_util::compat::TokioAsyncReadCompatExt;

use crate::{Client, Kind, Outcome, Peer, announce, expect, timed};

/// Its clients can't be sent to other threads.
pub const PEER: Peer = Peer { name: "capnp-rpc 0.27", own: Kind::CurrentThread, tasks: &[Kind::CurrentThread], serve, connect };

#[allow(clippy::all, dead_code, reason = "made by a tool")]
mod echo_capnp {
    include!(concat!(env!("OUT_DIR"), "/echo_capnp.rs"));
}
use echo_capnp::echo;

struct Server;

impl echo::Server for Server {
    async fn empty(self: Rc<Self>, _: echo::EmptyParams, _: echo::EmptyResults) -> Result<(), capnp::Error> {
        Ok(())
    }

    async fn take(self: Rc<Self>, parameters: echo::TakeParams, mut results: echo::TakeResults) -> Result<(), capnp::Error> {
        let length = parameters.get()?.get_bytes()?.len() as u64;
        results.get().set_length(length);
        Ok(())
    }
}

fn network(stream: TcpStream, side: Side) -> Outcome<Box<VatNetwork<impl io::AsyncRead + Unpin>>> {
    stream.set_nodelay(true)?;
    let (reader, writer) = TokioAsyncReadCompatExt::compat(stream).split();
    let (reader, writer) = (io::BufReader::new(reader), io::BufWriter::new(writer));
    Ok(Box::new(VatNetwork::new(reader, writer, side, Default::default())))
}

fn serve(runtime: Runtime) -> Outcome {
    LocalSet::new().block_on(&runtime, async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        announce(listener.local_addr()?)?;
        let echo: echo::Client = capnp_rpc::new_client(Server);
        loop {
            let (stream, _) = listener.accept().await?;
            spawn_local(RpcSystem::new(network(stream, Side::Server)?, Some(echo.clone().client)));
        }
    })
}

struct Caller {
    runtime: Runtime,
    tasks: LocalSet,
    echo: echo::Client,
}

fn connect(address: SocketAddr, runtime: Runtime) -> Outcome<Box<dyn Client>> {
    let tasks = LocalSet::new();
    let echo = tasks.block_on(&runtime, async {
        let mut system = RpcSystem::new(network(TcpStream::connect(address).await?, Side::Client)?, None);
        let echo = system.bootstrap(Side::Server);
        spawn_local(system);
        Outcome::Ok(echo)
    })?;
    Ok(Box::new(Caller { runtime, tasks, echo }))
}

async fn empty(echo: &echo::Client) -> Outcome {
    echo.empty_request().send().promise.await?;
    Ok(())
}

impl Client for Caller {
    fn round(&mut self, size: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let Caller { runtime, tasks, echo } = self;
        let bytes = vec![1; size];
        let calls = timed(warm_up, count, samples, async || {
            if size == 0 {
                return empty(echo).await;
            }
            let mut request = echo.take_request();
            request.get().set_bytes(&bytes);
            let answer = request.send().promise.await?;
            expect(answer.get()?.get_length(), size)
        });
        tasks.block_on(runtime, calls)
    }

    fn one_task(&mut self, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let echo = self.echo.clone();
        let task = async move {
            let mut samples = Vec::with_capacity(count);
            timed(warm_up, count, &mut samples, async || empty(&echo).await).await?;
            Outcome::Ok(samples)
        };
        samples.extend(self.tasks.block_on(&self.runtime, async { spawn_local(task).await })??);
        Ok(())
    }

    fn many_tasks(&mut self, tasks: usize, each: usize) -> Outcome {
        self.tasks.block_on(&self.runtime, async {
            let mut set = JoinSet::new();
            for _ in 0..tasks {
                let echo = self.echo.clone();
                set.spawn_local(async move {
                    for _ in 0..each {
                        empty(&echo).await?;
                    }
                    Outcome::Ok(())
                });
            }
            while let Some(ended) = set.join_next().await {
                ended??;
            }
            Ok(())
        })
    }
}
