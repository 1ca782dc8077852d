//! tonic (gRPC). The codec passes bytes on unchanged, so that no `protoc` is needed; protobuf would
//! add a tag and a length to a message of bytes.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    net::SocketAddr,
    task::{Context, Poll},
};

use bytes::{Buf, BufMut, Bytes};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Request, Response, Status,
    body::Body,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::{BoxFuture, Service, http, http::uri::PathAndQuery},
    server::{self, NamedService},
    transport::{Channel, Server},
};

use crate::{Calls, Client, Failure, Kind, Outcome, Peer, announce, expect, many_tasks, one_task, timed};

pub const PEER: Peer =
    Peer { name: "tonic 0.14", own: Kind::Default, tasks: &[Kind::CurrentThread, Kind::TwoWorkers], serve, connect };

#[derive(Clone, Copy, Default)]
struct Plain;

impl Codec for Plain {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Plain;
    type Decoder = Plain;

    fn encoder(&mut self) -> Plain {
        Plain
    }

    fn decoder(&mut self) -> Plain {
        Plain
    }
}

impl Encoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Equivalent to what `tonic-build` generates for a service with these two methods.
#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "bench.Echo";
}

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = server::Grpc::new(Plain);
            Ok(match request.uri().path() {
                "/bench.Echo/Empty" => grpc.unary(Empty, request).await,
                "/bench.Echo/Take" => grpc.unary(Take, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

struct Empty;

impl Service<Request<Bytes>> for Empty {
    type Response = Response<Bytes>;
    type Error = Status;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Bytes>) -> Self::Future {
        ready(Ok(Response::new(Bytes::new())))
    }
}

struct Take;

impl Service<Request<Bytes>> for Take {
    type Response = Response<Bytes>;
    type Error = Status;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        let length = request.into_inner().len() as u64;
        ready(Ok(Response::new(Bytes::copy_from_slice(&length.to_le_bytes()))))
    }
}

fn serve(runtime: Runtime) -> Outcome {
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        announce(listener.local_addr()?)?;
        // `Server::serve`, which binds by itself, sets this too, but does not return the port.
        let incoming = futures::StreamExt::inspect(TcpListenerStream::new(listener), |stream| {
            let _ = stream.as_ref().map(|stream| stream.set_nodelay(true));
        });
        Ok(Server::builder().add_service(Echo).serve_with_incoming(incoming).await?)
    })
}

struct Caller {
    runtime: Runtime,
    grpc: Grpc<Channel>,
}

fn connect(address: SocketAddr, runtime: Runtime) -> Outcome<Box<dyn Client>> {
    let channel = runtime.block_on(Channel::from_shared(format!("http://{address}"))?.connect())?;
    Ok(Box::new(Caller { runtime, grpc: Grpc::new(channel) }))
}

impl Calls for Grpc<Channel> {
    async fn call(&mut self) -> Result<(), Failure> {
        self.ready().await.map_err(|error| error.to_string())?;
        let path = PathAndQuery::from_static("/bench.Echo/Empty");
        let answer = self.unary(Request::new(Bytes::new()), path, Plain).await;
        answer.map(drop).map_err(|error| error.to_string())
    }
}

impl Client for Caller {
    fn round(&mut self, size: usize, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let Caller { runtime, grpc } = self;
        let bytes = Bytes::from(vec![1; size]);
        runtime.block_on(timed(warm_up, count, samples, async || {
            if size == 0 {
                return Ok(grpc.call().await?);
            }
            grpc.ready().await?;
            let path = PathAndQuery::from_static("/bench.Echo/Take");
            let answer = grpc.unary(Request::new(bytes.clone()), path, Plain).await?.into_inner();
            expect(u64::from_le_bytes(answer[..].try_into()?), size)
        }))
    }

    fn one_task(&mut self, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        one_task(&self.runtime, self.grpc.clone(), warm_up, count, samples)
    }

    fn many_tasks(&mut self, tasks: usize, each: usize) -> Outcome {
        many_tasks(&self.runtime, &self.grpc, tasks, each)
    }
}
