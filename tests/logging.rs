//! Log lines: a subscriber may use the engine that logs, since no lock of the engine is held while it runs; and memory that is
//! dropped while a peer holds a bulk of it is warned of.

mod common;

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, OnceLock, mpsc};
use std::time::Duration;

use calomel::{Bulk, BulkMode, Engine, Error, Request};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use common::{Watchdog, eventually, patience, wire};

static ENGINE: OnceLock<Engine> = OnceLock::new();
static LINES: AtomicUsize = AtomicUsize::new(0);

/// What the target `calomel::bulk` has logged.
static BULK_LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());
/// What the target `calomel::engine` has logged.
static ENGINE_LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

#[derive(Clone, Debug)]
struct Line {
    level: Level,
    size: u64,
    count: u64,
    peer: String,
    message: String,
    /// Other fields, as `name=value`.
    others: Vec<String>,
}

impl Default for Line {
    fn default() -> Line {
        Line { level: Level::TRACE, size: 0, count: 0, peer: String::new(), message: String::new(), others: Vec::new() }
    }
}

impl Visit for Line {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "size" => self.size = value,
            "count" => self.count = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "peer" => self.peer = format!("{value:?}"),
            "message" => self.message = format!("{value:?}"),
            name => self.others.push(format!("{name}={value:?}")),
        }
    }
}

/// The subscriber of all tests.
fn subscribe() {
    static SET: Once = Once::new();
    SET.call_once(|| tracing::subscriber::set_global_default(UsesEngine).unwrap());
}

/// Calls functions of the engine that take its locks, for each log line.
struct UsesEngine;

impl Subscriber for UsesEngine {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("calomel") && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        if event.metadata().target() == "calomel::bulk" {
            let mut line = Line { level: *event.metadata().level(), ..Line::default() };
            event.record(&mut line);
            BULK_LINES.lock().unwrap().push(line);
        }
        let is_of_engine = event.metadata().target() == "calomel::engine";
        if is_of_engine {
            let mut line = Line { level: *event.metadata().level(), ..Line::default() };
            event.record(&mut line);
            ENGINE_LINES.lock().unwrap().push(line);
        }
        if let Some(engine) = ENGINE.get() {
            let _ = engine.refusals().total();
            let exposed = engine.expose_read_only(vec![0u8; 8]).unwrap();
            drop(exposed);
            // Lines about connections come in any case.
            LINES.fetch_add(usize::from(!is_of_engine), Ordering::SeqCst);
        }
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Sends bytes to the engine's port, and waits until the engine closes the connection.
fn send_and_await_close(address: SocketAddr, bytes: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience() * Duration::from_secs(10))).unwrap();
    stream.write_all(bytes).unwrap();
    // Neither the error code nor the bytes received before the end matter.
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn log_subscriber_that_uses_the_engine_does_not_deadlock() {
    let _watchdog = Watchdog::start("log_subscriber_that_uses_the_engine_does_not_deadlock");
    subscribe();
    let builder = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false).max_requests_per_peer(1);
    let engine = builder.authorize(|caller| caller.procedure() != "denied").build().unwrap();
    engine.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    let (begin, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let hold = move |_: &Request, (): ()| {
        begin.send(()).unwrap();
        ended.lock().unwrap().recv_timeout(patience() * Duration::from_secs(20)).unwrap();
    };
    engine.define("hold", hold).unwrap();
    let address = engine.address();
    let socket: SocketAddr = address.to_string().trim_start_matches("tcp://").parse().unwrap();
    assert!(ENGINE.set(engine).is_ok());
    let client = Engine::builder().same_host_upgrade(false).build().unwrap();
    let endpoint = client.lookup(address).unwrap();
    let one = client.procedure::<(), ()>("hold").on(&endpoint);
    let provoke: [(&str, &dyn Fn()); 6] = [
        ("another protocol", &|| send_and_await_close(socket, b"GET / HTTP/1.1\r\n\r\n")),
        ("another version", &|| send_and_await_close(socket, &wire::preamble(wire::VERSION + 1, wire::VERSION + 1, 50))),
        ("a corrupt handshake", &|| {
            let mut hello = wire::greeting(7, 1 << 20);
            hello[16] ^= 1;
            send_and_await_close(socket, &hello);
        }),
        // The third and the fourth failed connection, of which only the fourth is logged.
        ("no frame", &|| (0..2).for_each(|_| send_and_await_close(socket, &[wire::greeting(7, 1 << 20), vec![0; 100]].concat()))),
        ("a denied call", &|| {
            let denied = client.procedure::<(), ()>("denied").on(&endpoint).call(&());
            assert!(matches!(denied, Err(Error::AccessDenied { .. })), "{denied:?}");
        }),
        ("a limit", &|| {
            let held = one.start(&()).unwrap();
            begun.recv_timeout(patience() * Duration::from_secs(20)).unwrap();
            let busy = one.call(&());
            assert!(matches!(busy, Err(Error::Busy { .. })), "{busy:?}");
            end.send(()).unwrap();
            held.wait().unwrap();
        }),
    ];
    for (what, provoke) in provoke {
        let before = LINES.load(Ordering::SeqCst);
        provoke();
        eventually("a line is logged", || LINES.load(Ordering::SeqCst) > before);
        let call = client.procedure::<u32, u32>("double").on(&endpoint).timeout(patience() * Duration::from_secs(5)).call(&21);
        assert!(matches!(call, Ok(42)), "{what}: {call:?}");
    }
}

/// The lines about memory of these sizes, in bytes, which other tests do not use.
fn lines_of(sizes: std::ops::Range<u64>) -> Vec<Line> {
    BULK_LINES.lock().unwrap().iter().filter(|line| sizes.contains(&line.size)).cloned().collect()
}

#[test]
fn memory_dropped_while_a_peer_holds_a_bulk_is_warned_of() {
    const SIZE: u64 = 777_000;
    let _watchdog = Watchdog::start("memory_dropped_while_a_peer_holds_a_bulk_is_warned_of");
    subscribe();
    let server = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false).build().unwrap();
    let (keep, kept) = mpsc::channel();
    server.define("keep", move |_: &Request, bulk: Bulk| keep.send(bulk).unwrap()).unwrap();
    server.define("look", |_: &Request, bulk: Bulk| bulk.len()).unwrap();
    server.define("panic", |_: &Request, _: Bulk| -> usize { panic!("with a bulk in hand") }).unwrap();
    server.define("number", |_: &Request, _: u64| 0usize).unwrap();
    let client = Engine::builder().same_host_upgrade(false).build().unwrap();
    let endpoint = client.lookup(server.address()).unwrap();
    let expose = |size: u64| client.expose(vec![0u8; size as usize], BulkMode::ReadWrite).unwrap();
    let procedure = |name: &str| client.procedure::<Bulk, usize>(name).on(&endpoint);

    // A call that has ended holds nothing any more, however it ended.
    for round in 0..50 {
        for (number, name) in ["look", "panic", "number", "no such procedure"].into_iter().enumerate() {
            let exposed = expose(SIZE + 1000 + 4 * round + number as u64);
            let result = procedure(name).call(&exposed.bulk());
            assert_eq!(result.is_ok(), name == "look", "{result:?}");
            drop(exposed);
        }
    }
    assert!(lines_of(SIZE + 1000..SIZE + 1200).is_empty(), "{:?}", lines_of(SIZE + 1000..SIZE + 1200));

    // Asked for: `reclaim`, and the end of a scope.
    let keep = client.procedure::<Bulk, ()>("keep").on(&endpoint);
    let next_kept = || kept.recv_timeout(patience() * Duration::from_secs(20)).unwrap();
    let exposed = expose(SIZE + 50);
    keep.call(&exposed.bulk()).unwrap();
    exposed.reclaim();
    drop(next_kept());
    let mut borrowed = vec![0u8; SIZE as usize + 51];
    client.scope(|s| keep.call(&s.expose(&mut borrowed[..], BulkMode::ReadWrite)?)).unwrap();
    drop(next_kept());
    assert!(lines_of(SIZE..SIZE + 52).is_empty());

    // Dropped: the first, the second, the fourth and the eighth are logged.
    for number in 1..=9 {
        let exposed = expose(SIZE + 100 + number);
        keep.notify(&exposed.bulk()).unwrap();
        let _bulk = next_kept();
        drop(exposed);
    }
    let lines = lines_of(SIZE + 100..SIZE + 200);
    assert_eq!(
        lines.iter().map(|line| (line.size - SIZE - 100, line.count)).collect::<Vec<_>>(),
        [(1, 1), (2, 2), (4, 4), (8, 8)]
    );
    for line in lines {
        assert_eq!((line.level, line.peer), (Level::WARN, server.address().to_string()));
        assert!(line.message.starts_with("memory dropped while a peer holds a bulk of it"), "{}", line.message);
        assert!(line.message.contains("Exposed::released"), "{}", line.message);
    }

    // A finalized engine has ended all of it.
    let exposed: Vec<_> = (0..8).map(|number| expose(SIZE + 200 + number)).collect();
    exposed.iter().for_each(|exposed| keep.call(&exposed.bulk()).unwrap());
    client.finalize().unwrap();
    drop(exposed);
    assert!(lines_of(SIZE + 200..SIZE + 300).is_empty());
}

#[test]
fn operator_learns_of_listeners_and_connections() {
    let _watchdog = Watchdog::start("operator_learns_of_listeners_and_connections");
    subscribe();
    let server = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false).build().unwrap();
    let address = server.address().to_string();
    let found = |message: &str, part: &str| {
        let lines = ENGINE_LINES.lock().unwrap();
        let is_it =
            |line: &&Line| line.message == message && (line.peer == address || line.others.iter().any(|o| o.contains(part)));
        lines.iter().find(is_it).cloned()
    };
    assert_eq!(found("listening", &address).unwrap().level, Level::INFO);
    let client = Engine::builder().same_host_upgrade(false).build().unwrap();
    client.lookup(&*address).unwrap().ping(patience() * Duration::from_secs(10)).unwrap();
    let connected = found("connected", "no such text").unwrap();
    assert_eq!((connected.level, connected.others), (Level::INFO, vec!["transport=tcp".to_owned()]));
    server.finalize().unwrap();
    eventually("the client reports the loss", || found("connection lost", "no such text").is_some());
    let lost = found("connection lost", "no such text").unwrap();
    assert!(lost.level == Level::INFO && lost.others[0].contains("finalized"), "{lost:?}");
}
