//! The operations that `ci/instructions` counts: each test repeats one operation of the fast path in one thread, without
//! random choices or waits, so that every run takes the same number of instructions.

use std::collections::VecDeque;
use std::hint::black_box;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use crate::progress::Core;
use crate::proto::LeaseRange;
use crate::proto::wire::{self, Message};
use crate::shape::{DeclarationNumbers, Encoded, Knowledge};
use crate::transport::{Capabilities, Link, LinkKey, Sink, TransportDriver};
use crate::{Address, Bulk, BulkMode, Endpoint, Engine, EngineBuilder, Request, Result, Transport};

/// Typical arguments: numbers, a text, a list.
type Arguments = (u64, f64, String, Vec<u32>);

fn known() -> (Knowledge, DeclarationNumbers) {
    (Knowledge::new(None), DeclarationNumbers::default())
}

fn arguments() -> Arguments {
    (7 << 30, 0.5, "matrix/17".to_owned(), vec![1000; 16])
}

/// Repeats a round. Runs with two numbers of rounds give two counts, whose difference is that of the rounds alone.
fn repeat(mut round: impl FnMut()) {
    let rounds = std::env::var("CALOMEL_ROUNDS").map_or(10, |rounds| rounds.parse().expect("CALOMEL_ROUNDS is a number"));
    (0..rounds).for_each(|_| round());
}

fn encode(arguments: &Arguments, known: &(Knowledge, DeclarationNumbers), body: &mut Vec<u8>, out: &mut Vec<u8>) {
    body.clear();
    out.clear();
    assert!(matches!(known.0.encode(arguments, body, &known.1), Ok(Encoded::As(_))));
    let message = Message::Request {
        call: 123_456,
        procedure: 3,
        declaration: None,
        provider: 0,
        budget_us: 30_000_000,
        one_way: false,
        leases: LeaseRange::default(),
        size: body.len() as u64,
    };
    wire::put(out, &message, body, false);
}

#[test]
fn encode_request() {
    let (arguments, known, mut body, mut out) = (arguments(), known(), Vec::new(), Vec::new());
    repeat(|| encode(black_box(&arguments), &known, &mut body, black_box(&mut out)));
}

#[test]
fn decode_request() {
    let (arguments, mut out) = (arguments(), Vec::new());
    encode(&arguments, &known(), &mut Vec::new(), &mut out);
    repeat(|| {
        let mut message = Message::Ping;
        let Ok(Some((Some(body), _))) = wire::take_into(black_box(&out), &mut message) else { panic!("no frame") };
        assert!(matches!(black_box(message), Message::Request { call: 123_456, .. }));
        assert_eq!(crate::rpc::decode::<Arguments>(body).as_ref(), Ok(&arguments));
    });
}

fn encode_value<T: serde::Serialize>(value: T) {
    let (known, mut body) = (known(), Vec::new());
    repeat(|| {
        body.clear();
        assert!(matches!(known.0.encode(black_box(&value), &mut body, &known.1), Ok(Encoded::As(_))));
    });
}

fn decode_value<T: serde::Serialize + serde::de::DeserializeOwned>(value: T, check: impl Fn(&T) -> bool) {
    let body = postcard::to_stdvec(&value).unwrap();
    repeat(|| assert!(check(&crate::rpc::decode::<T>(black_box(&body)).unwrap())));
}

/// 64 KiB as programs pass them on.
#[test]
fn encode_list_of_bytes() {
    encode_value(vec![7u8; 64 << 10]);
}

#[test]
fn decode_list_of_bytes() {
    decode_value(vec![7u8; 64 << 10], |list| list.len() == 64 << 10);
}

/// As indices, or counts, are: few bytes each, mostly as many as their neighbours.
fn numbers() -> Vec<u64> {
    (0..8 << 10).collect()
}

#[test]
fn encode_list_of_numbers() {
    encode_value(numbers());
}

#[test]
fn decode_list_of_numbers() {
    decode_value(numbers(), |list| list.len() == 8 << 10);
}

/// Points in space.
fn points() -> Vec<[f32; 3]> {
    (0..4 << 10).map(|i| [i as f32, 0.5, -1.0]).collect()
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Particle {
    id: u64,
    position: [f64; 3],
    velocity: [f64; 3],
    charge: f32,
    alive: bool,
}

fn particles() -> Vec<Particle> {
    let particle = |i| Particle { id: i, position: [0.5, i as f64, 2.0], velocity: [1.0; 3], charge: -1.0, alive: true };
    (0..1 << 10).map(particle).collect()
}

#[test]
fn encode_list_of_points() {
    encode_value(points());
}

#[test]
fn decode_list_of_points() {
    decode_value(points(), |list| list.len() == 4 << 10);
}

#[test]
fn encode_list_of_particles() {
    encode_value(particles());
}

/// Nothing is known of the type before, as in a program's first call.
#[test]
fn encode_first_list_of_particles() {
    let (particles, mut body) = (particles(), Vec::new());
    repeat(|| {
        body.clear();
        let (knowledge, numbers) = known();
        assert!(matches!(knowledge.encode(black_box(&particles), &mut body, &numbers), Ok(Encoded::As(_))));
    });
}

#[test]
fn decode_list_of_particles() {
    decode_value(particles(), |list| list.len() == 1 << 10);
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
enum Kind {
    Plain,
    Sized { width: u32, height: u32 },
    Named(String),
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Record {
    id: u64,
    kind: Kind,
    scores: Vec<f32>,
    parts: Vec<Kind>,
}

fn record() -> Record {
    let parts = vec![Kind::Plain, Kind::Sized { width: 640, height: 480 }, Kind::Named("thumbnail".to_owned())];
    Record { id: 1 << 40, kind: Kind::Plain, scores: vec![0.5; 16], parts }
}

#[test]
fn encode_record() {
    encode_value(record());
}

#[test]
fn decode_record() {
    decode_value(record(), |record| record.id == 1 << 40);
}

/// A client and a server that are driven by this thread.
fn by_hand(listen: &str, scheme: Transport) -> Result<(Engine, Engine, Endpoint)> {
    // The ring's and the kernel's copy would be chosen by their pace. How the ring is written still is: under valgrind, whose
    // time is its own, always past the caches.
    by_hand_from(|| Engine::builder().same_host_upgrade(false).shm_kernel_copy(false), listen, scheme)
}

fn by_hand_from(builder: impl Fn() -> EngineBuilder, listen: &str, scheme: Transport) -> Result<(Engine, Engine, Endpoint)> {
    let server = builder().listen(listen).build()?;
    server.define("sum", |_: &Request, (x, y): (u64, u64)| x + y)?;
    server.define_async("sum_async", async |_: Request, (x, y): (u64, u64)| x + y)?;
    server.define("record", |_: &Request, record: Record| record)?;
    server.define("bulk", |_: &Request, bulk: Bulk| bulk.len())?;
    server.define_borrowed::<[u8], _, _>("take", |_: &Request, bytes: &[u8]| bytes.len())?;
    let far: Arc<OnceLock<Arc<Core>>> = Arc::default();
    let server_core = far.clone();
    let wrap = move |inner| -> Box<dyn TransportDriver> {
        Box::new(LockstepTransport { inner, scheme, far: server_core.clone(), turns: AtomicU32::new(0) })
    };
    let client = builder().wrap(wrap).build()?;
    let peer = client.lookup(server.address())?;
    // The first call connects and checks types.
    assert_eq!(client.procedure::<(u64, u64), u64>("sum").on(&peer).call(&(1, 2))?, 3);
    client.by_hand();
    far.get_or_init(|| server.by_hand());
    Ok((server, client, peer))
}

fn calls(listen: &str, scheme: Transport) -> Result<()> {
    let (_server, client, peer) = by_hand(listen, scheme)?;
    let sum = client.procedure::<(u64, u64), u64>("sum").on(&peer);
    repeat(|| assert_eq!(sum.call(black_box(&(40, 2))).unwrap(), 42));
    Ok(())
}

#[test]
fn loop_call() -> Result<()> {
    calls("loop://", Transport::Loop)
}

#[test]
fn shm_call() -> Result<()> {
    calls("shm://", Transport::Shm)
}

/// What [`EngineBuilder::statistics`] takes is the difference to `shm_call`.
#[test]
fn shm_call_without_statistics() -> Result<()> {
    let builder = || Engine::builder().same_host_upgrade(false).shm_kernel_copy(false).statistics(false);
    let (_server, client, peer) = by_hand_from(builder, "shm://", Transport::Shm)?;
    let sum = client.procedure::<(u64, u64), u64>("sum").on(&peer);
    repeat(|| assert_eq!(sum.call(black_box(&(40, 2))).unwrap(), 42));
    Ok(())
}

/// One of 64 in flight; the caller waits for the oldest.
#[test]
fn shm_call_started() -> Result<()> {
    started("shm://", Transport::Shm)
}

#[test]
fn tcp_call_started() -> Result<()> {
    started("tcp://127.0.0.1:0", Transport::Tcp)
}

fn started(listen: &str, scheme: Transport) -> Result<()> {
    let (_server, client, peer) = by_hand(listen, scheme)?;
    let sum = client.procedure::<(u64, u64), u64>("sum").on(&peer);
    let mut flight: VecDeque<_> = (0..63).map(|_| sum.start(&(40, 2)).unwrap()).collect();
    repeat(|| {
        flight.push_back(sum.start(black_box(&(40, 2))).unwrap());
        assert_eq!(flight.pop_front().unwrap().wait().unwrap(), 42);
    });
    Ok(())
}

/// The kernel's part does not count.
#[test]
fn tcp_call() -> Result<()> {
    calls("tcp://127.0.0.1:0", Transport::Tcp)
}

/// Polled until it is ready, as by a runtime. Where it leaves driving to the progress thread, this thread drives.
#[test]
fn shm_call_awaited() -> Result<()> {
    let (_server, client, peer) = by_hand("shm://", Transport::Shm)?;
    let sum = client.procedure::<(u64, u64), u64>("sum").on(&peer);
    let core = client.by_hand();
    let mut context = Context::from_waker(Waker::noop());
    repeat(|| {
        let mut pending = pin!(sum.start(black_box(&(40, 2))).unwrap());
        let answer = loop {
            match pending.as_mut().poll(&mut context) {
                Poll::Ready(answer) => break answer,
                Poll::Pending => core.turn(false),
            }
        };
        assert_eq!(answer.unwrap(), 42);
    });
    Ok(())
}

/// To an async handler whose future is ready at once.
#[test]
fn shm_call_of_async_handler() -> Result<()> {
    let (_server, client, peer) = by_hand("shm://", Transport::Shm)?;
    let sum = client.procedure::<(u64, u64), u64>("sum_async").on(&peer);
    repeat(|| assert_eq!(sum.call(black_box(&(40, 2))).unwrap(), 42));
    Ok(())
}

#[test]
fn shm_call_with_record() -> Result<()> {
    let (_server, client, peer) = by_hand("shm://", Transport::Shm)?;
    let (echo, record) = (client.procedure::<Record, Record>("record").on(&peer), record());
    repeat(|| assert_eq!(echo.call(black_box(&record)).unwrap().id, 1 << 40));
    Ok(())
}

/// Copied into the ring and out of it, and nowhere else: sent from where they lie, and read where they arrived. Of longer ones the
/// way would be chosen by its pace.
#[test]
fn shm_call_with_8_kib_of_bytes() -> Result<()> {
    let builder = || Engine::builder().same_host_upgrade(false).shm_kernel_copy(false).eager_limit(1 << 10);
    let (_server, client, peer) = by_hand_from(builder, "shm://", Transport::Shm)?;
    let (take, bytes) = (client.procedure::<[u8], usize>("take").on(&peer), vec![7; (8 << 10) - 100]);
    repeat(|| assert_eq!(take.call(black_box(&bytes)).unwrap(), bytes.len()));
    Ok(())
}

/// With memory of an engine that listens: its addresses travel with the bulk. The lease comes back with the answer.
#[test]
fn shm_call_with_bulk() -> Result<()> {
    let (_server, client, peer) = by_hand("shm://", Transport::Shm)?;
    client.listen("tcp://127.0.0.1:0")?;
    let exposed = client.expose(vec![7u8; 4096], BulkMode::ReadWrite)?;
    let take = client.procedure::<Bulk, usize>("bulk").on(&peer);
    repeat(|| assert_eq!(take.call(black_box(&exposed.bulk())).unwrap(), 4096));
    Ok(())
}

/// Through the ring; larger pulls are copied by the kernel.
#[test]
fn shm_pull_of_4_kib() -> Result<()> {
    let (server, _client, peer) = by_hand("shm://", Transport::Shm)?;
    let theirs = server.expose(vec![7u8; 4096], BulkMode::ReadWrite)?;
    let remote = theirs.bulk().on(&peer);
    let mut ours = vec![0u8; 4096];
    repeat(|| assert_eq!(remote.pull_into(&mut ours[..]).unwrap(), 4096));
    assert_eq!(ours[4095], 7);
    Ok(())
}

/// Memory is exposed, and withdrawn. Allocation is the system's.
#[test]
fn expose_and_drop() -> Result<()> {
    let engine = Engine::builder().listen("loop://").build()?;
    let content: Arc<[u8]> = vec![7u8; 4096].into();
    repeat(|| drop(engine.expose_read_only(black_box(content.clone())).unwrap()));
    Ok(())
}

/// Drives the server whenever the client polls.
struct LockstepTransport {
    inner: Box<dyn TransportDriver>,
    scheme: Transport,
    far: Arc<OnceLock<Arc<Core>>>,
    turns: AtomicU32,
}

/// After this many turns the server has handled the doorbell that woke it, if it was asleep.
const FIRST_TURNS: u32 = 9;

impl TransportDriver for LockstepTransport {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn serves(&self, scheme: Transport) -> bool {
        self.inner.serves(scheme)
    }

    fn available(&self, scheme: Transport) -> Result<()> {
        self.inner.available(scheme)
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
        // There are several transports: only one of them drives the server.
        if self.capabilities().scheme == self.scheme
            && let Some(far) = self.far.get()
        {
            far.turn(self.turns.fetch_add(1, Ordering::Relaxed) < FIRST_TURNS);
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
    fn mute(&self) {
        self.inner.mute();
    }
}
