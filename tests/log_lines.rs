//! What the log says of handlers that panic, of responders that are dropped, and of one-way calls that are lost.

mod common;

use std::fmt::{Debug, Write};
use std::sync::Mutex;
use std::time::Duration;

use calomel::{Engine, Error, Request, Responder};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use common::{Watchdog, eventually};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the lines of the levels WARN and ERROR.
struct KeepsLines;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for KeepsLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("calomel") && *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {}", event.metadata().level(), event.metadata().target()));
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Waits until a line has all of these parts.
#[track_caller]
fn assert_logged(parts: &[&str]) {
    let logged = || LINES.lock().unwrap().iter().any(|line| parts.iter().all(|part| line.contains(part)));
    eventually(&format!("a line has {parts:?}, of {:?}", LINES.lock().unwrap()), logged);
}

#[test]
fn faults_of_handlers_are_logged_with_their_procedures() {
    let _watchdog = Watchdog::start("faults_of_handlers_are_logged_with_their_procedures");
    tracing::subscriber::set_global_default(KeepsLines).unwrap();
    let server = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false).build().unwrap();
    let client = Engine::client("tcp").unwrap();
    let peer = client.lookup(server.address()).unwrap();

    server.provider(4).define("breaks", |_: &Request, ()| -> u8 { panic!("out of cheese") }).unwrap();
    let breaks = client.procedure::<(), u8>("breaks");
    assert!(matches!(breaks.on(peer.provider(4)).call(&()), Err(Error::HandlerPanicked { .. })));
    assert_logged(&["ERROR calomel::handler", "breaks", "provider=4", "out of cheese"]);

    server.define_async("breaks later", |_: Request, fine: bool| async move { assert!(fine, "in a future") }).unwrap();
    assert!(client.procedure::<bool, ()>("breaks later").on(&peer).call(&false).is_err());
    assert_logged(&["ERROR calomel::handler", "breaks later", "in a future"]);

    server.define_deferred("breaks deferred", |_: Responder<u8>, ()| panic!("with a responder")).unwrap();
    assert!(client.procedure::<(), u8>("breaks deferred").on(&peer).call(&()).is_err());
    assert_logged(&["ERROR calomel::handler", "breaks deferred", "with a responder"]);

    server.define_deferred("forgets", |responder: Responder<u8>, ()| drop(responder)).unwrap();
    assert!(matches!(client.procedure::<(), u8>("forgets").on(&peer).call(&()), Err(Error::NoResponse { .. })));
    assert_logged(&["WARN calomel::handler", "forgets", "dropped without a response"]);

    server.define("wants a text", |_: &Request, text: String| drop(text)).unwrap();
    client.procedure::<u64, ()>("wants a text").on(&peer).notify(&7).unwrap();
    assert_logged(&["WARN calomel::rpc", "wants a text", "one-way call lost"]);
    client.procedure::<(), ()>("unknown").on(&peer).notify(&()).unwrap();
    assert_logged(&["WARN calomel::rpc", "unknown", "one-way call lost"]);

    // What a caller causes by giving up is no fault of the handler.
    server
        .define("slow", |request: &Request, ()| {
            while !request.is_cancelled() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // The deadline may pass here before it passes for the caller.
            std::thread::sleep(Duration::from_millis(200));
        })
        .unwrap();
    let before = LINES.lock().unwrap().len();
    let slow = client.procedure::<(), ()>("slow").on(&peer).timeout(Duration::from_millis(50)).call(&());
    assert!(matches!(slow, Err(Error::Timeout { .. })));
    server.finalize().unwrap();
    assert_eq!(LINES.lock().unwrap().len(), before, "{:?}", LINES.lock().unwrap());
}
