//! A log subscriber may use the engine that logs: over tcp, no lock of the engine is held while the subscriber runs.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::Duration;

use calomel::{Engine, Error, Request};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use common::{Watchdog, eventually, patience, wire};

static ENGINE: OnceLock<Engine> = OnceLock::new();
static LINES: AtomicUsize = AtomicUsize::new(0);

/// Calls functions of the engine that take its locks, for each log line.
struct UsesEngine;

impl Subscriber for UsesEngine {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("calomel") && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, _: &Event<'_>) {
        if let Some(engine) = ENGINE.get() {
            let _ = engine.refusals().total();
            let exposed = engine.expose_read_only(vec![0u8; 8]).unwrap();
            drop(exposed);
            LINES.fetch_add(1, Ordering::SeqCst);
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
    tracing::subscriber::set_global_default(UsesEngine).unwrap();
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
