//! What `ci/instructions` counts: each test does one thing of the short path again and again, in one thread, without a random
//! choice or a wait, so that every run takes the same instructions.

use std::hint::black_box;
use std::sync::{Arc, OnceLock};

use crate::progress::Core;
use crate::proto::Leases;
use crate::proto::wire::{self, Frame, Message};
use crate::transport::{Capabilities, Link, LinkKey, Sink, Transport};
use crate::{Address, Engine, Request, Result};

/// A request as they come: some numbers, a text, a list.
type Arguments = (u64, f64, String, Vec<u32>);

fn arguments() -> Arguments {
    (7 << 30, 0.5, "matrix/17".to_owned(), vec![1000; 16])
}

/// How often. Two numbers of rounds give two counts, whose difference is that of the rounds alone.
fn again(mut round: impl FnMut()) {
    let rounds = std::env::var("CALOMEL_ROUNDS").map_or(10, |rounds| rounds.parse().expect("CALOMEL_ROUNDS is a number"));
    (0..rounds).for_each(|_| round());
}

fn encode(arguments: &Arguments, body: &mut Vec<u8>, out: &mut Vec<u8>) {
    body.clear();
    out.clear();
    wire::encode(arguments, body).unwrap();
    let message = Message::Request {
        call: 123_456,
        procedure: 3,
        name: None,
        provider: 0,
        budget_us: 30_000_000,
        one_way: false,
        want_shape: false,
        shape: wire::Bytes(&[]),
        leases: Leases::default(),
        size: body.len() as u64,
    };
    wire::put(out, &message, body);
}

#[test]
fn encode_request() {
    let (arguments, mut body, mut out) = (arguments(), Vec::new(), Vec::new());
    again(|| encode(black_box(&arguments), &mut body, black_box(&mut out)));
}

#[test]
fn decode_request() {
    let (arguments, mut out) = (arguments(), Vec::new());
    encode(&arguments, &mut Vec::new(), &mut out);
    again(|| {
        let Ok(Frame::Whole(message, body, _)) = wire::take(black_box(&out)) else { panic!("no frame") };
        assert!(matches!(black_box(message), Message::Request { call: 123_456, .. }));
        assert_eq!(crate::rpc::decode::<Arguments>(body).as_ref(), Ok(&arguments));
    });
}

#[test]
fn loop_call() -> Result<()> {
    let server = Engine::builder().listen("loop://").build()?;
    server.define("sum", |_: &Request, (x, y): (u64, u64)| x + y)?;
    let far: Arc<OnceLock<Arc<Core>>> = Arc::default();
    let moved = far.clone();
    let client = Engine::builder().wrap(move |inner| Box::new(Turning { inner, far: moved.clone() })).build()?;
    let peer = client.lookup(server.address())?;
    let sum = client.procedure::<(u64, u64), u64>("sum").on(&peer);
    // The first call connects and checks types.
    assert_eq!(sum.call(&(1, 2))?, 3);
    client.by_hand();
    far.get_or_init(|| server.by_hand());
    again(|| assert_eq!(sum.call(black_box(&(40, 2))).unwrap(), 42));
    Ok(())
}

/// Has the server make its turn when the client looks for what has come.
struct Turning {
    inner: Box<dyn Transport>,
    far: Arc<OnceLock<Arc<Core>>>,
}

impl Transport for Turning {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn resolve(&self, address: &Address) -> Result<Address> {
        self.inner.resolve(address)
    }
    fn listen(&self, address: &Address) -> Result<Address> {
        self.inner.listen(address)
    }
    fn stop_listening(&self) {
        self.inner.stop_listening();
    }
    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> std::io::Result<()> {
        self.inner.connect(key, address, attach)
    }
    fn poll(&self, sink: &mut dyn Sink) -> bool {
        // There are several transports: the server makes one turn for all.
        if self.capabilities().scheme == crate::Scheme::Loop
            && let Some(far) = self.far.get()
        {
            far.turn();
        }
        self.inner.poll(sink)
    }
    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink) {
        self.inner.ready(token, event, sink);
    }
    fn park(&self) -> bool {
        self.inner.park()
    }
    fn unpark(&self) {
        self.inner.unpark();
    }
}
