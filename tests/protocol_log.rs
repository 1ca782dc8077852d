//! Level TRACE of target `calomel::proto`: the messages that engines send to each other.

mod common;

use std::fmt::{Debug, Write};
use std::sync::Mutex;

use calomel::{Bulk, BulkMode, Engine, Request, TraceContext};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use common::{Watchdog, eventually};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct KeepsLines;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for KeepsLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "calomel::proto" && *metadata.level() == Level::TRACE
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn messages_are_logged_at_level_trace() {
    let _watchdog = Watchdog::start("messages_are_logged_at_level_trace");
    tracing::subscriber::set_global_default(KeepsLines).unwrap();
    let of_each = ["loop://", "tcp://127.0.0.1:0", "shm://"];
    for address in of_each {
        LINES.lock().unwrap().clear();
        let server = Engine::builder().listen(address).same_host_upgrade(false).build().unwrap();
        server.define("sum", |_: &Request, (x, y): (u32, u32)| x + y).unwrap();
        let pull = |request: &Request, bulk: Bulk| {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes[..]).unwrap()
        };
        server.define("pull", pull).unwrap();
        let client = Engine::builder().same_host_upgrade(false).build().unwrap();
        let peer = client.lookup(server.address()).unwrap();
        let sum = client.procedure::<(u32, u32), u32>("sum").on(&peer);
        let trace = TraceContext::new([0xab; 16], [0xcd; 8], 1).unwrap();
        sum.clone().trace_context(trace).call(&(1, 2)).unwrap();
        sum.notify(&(1, 2)).unwrap();
        let exposed = client.expose(vec![7u8; 300_000], BulkMode::ReadWrite).unwrap();
        client.procedure::<Bulk, usize>("pull").on(&peer).call(&exposed.bulk()).unwrap();
        client.finalize().unwrap();
        server.finalize().unwrap();
        let has = |parts: &[&str]| LINES.lock().unwrap().iter().any(|line| parts.iter().all(|part| line.contains(part)));
        for direction in ["sent", "received"] {
            for parts in [
                ["message=request", "procedure 1 `sum`", "provider 0"],
                ["message=request", "one-way call", "bytes"],
                ["message=trace context", "abababababababababababababababab", "cdcdcdcdcdcdcdcd"],
                ["message=response", "type 1", "bytes"],
                ["message=pull", "transfer", "300000 bytes at 0"],
                ["message=goodbye", "", ""],
            ] {
                let direction = format!("direction={direction:?}");
                let parts = [&parts[..], &[&direction]].concat();
                eventually(&format!("{parts:?} over {address}"), || has(&parts));
            }
        }
        if address.starts_with("tcp") {
            assert!(has(&["message=handshake"]));
        }
        // Every byte was understood.
        assert!(!has(&["message=no message"]), "{:#?}", LINES.lock().unwrap());
    }
}
