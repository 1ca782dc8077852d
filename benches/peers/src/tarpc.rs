//! tarpc over TCP with bincode.

use std::{future::ready, net::SocketAddr};

use futures::{Future, StreamExt};
use serde_bytes::ByteBuf;
use tarpc::{
    client, context,
    serde_transport::tcp,
    server::{BaseChannel, Channel},
};
use tokio::runtime::Runtime;
use tokio_serde::formats::Bincode;

use crate::{Calls, Client, Failure, Kind, Outcome, Peer, announce, expect, many_tasks, one_task, timed};

pub const PEER: Peer =
    Peer { name: "tarpc 0.38", own: Kind::Default, tasks: &[Kind::CurrentThread, Kind::TwoWorkers], serve, connect };

#[tarpc::service]
trait Echo {
    async fn empty();
    async fn take(bytes: ByteBuf) -> u64;
}

#[derive(Clone)]
struct Server;

impl Echo for Server {
    async fn empty(self, _: context::Context) {}

    async fn take(self, _: context::Context, bytes: ByteBuf) -> u64 {
        bytes.len() as u64
    }
}

async fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(work);
}

fn serve(runtime: Runtime) -> Outcome {
    runtime.block_on(async {
        let listener = tcp::listen("127.0.0.1:0", Bincode::default).await?;
        announce(listener.local_addr())?;
        listener
            .filter_map(|transport| ready(transport.ok()))
            .for_each(async |transport| {
                tokio::spawn(BaseChannel::with_defaults(transport).execute(Server.serve()).for_each(spawn));
            })
            .await;
        Ok(())
    })
}

struct Caller {
    runtime: Runtime,
    echo: EchoClient,
}

fn connect(address: SocketAddr, runtime: Runtime) -> Outcome<Box<dyn Client>> {
    let echo = runtime.block_on(async {
        let transport = tcp::connect(address, Bincode::default).await?;
        Outcome::Ok(EchoClient::new(client::Config::default(), transport).spawn())
    })?;
    Ok(Box::new(Caller { runtime, echo }))
}

impl Calls for EchoClient {
    async fn call(&mut self) -> Result<(), Failure> {
        self.empty(context::current()).await.map_err(|error| error.to_string())
    }
}

impl Client for Caller {
    fn round(&mut self, size: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let Caller { runtime, echo } = self;
        let bytes = ByteBuf::from(vec![1; size]);
        runtime.block_on(timed(warm_up, count, samples, async || {
            if size == 0 {
                return Ok(echo.empty(context::current()).await?);
            }
            expect(echo.take(context::current(), bytes.clone()).await?, size)
        }))
    }

    fn one_task(&mut self, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        one_task(&self.runtime, self.echo.clone(), warm_up, count, samples)
    }

    fn many_tasks(&mut self, tasks: usize, each: usize) -> Outcome {
        many_tasks(&self.runtime, &self.echo, tasks, each)
    }
}
