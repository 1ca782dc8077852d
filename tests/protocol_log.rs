//! Level TRACE of target `calomel::proto`: the messages that engines send to each other.

mod common;

use calomel::{Bulk, BulkMode, Engine, Request, TraceContext};
use tracing::Level;

use common::kept_lines::{has, keep, lines};
use common::{Watchdog, eventually};

#[test]
fn messages_are_logged_at_level_trace() {
    let _watchdog = Watchdog::start("messages_are_logged_at_level_trace");
    keep("calomel::proto", Level::TRACE);
    let of_each = ["loop://", "tcp://127.0.0.1:0", "shm://"];
    for address in of_each {
        lines().clear();
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
        assert!(!has(&["message=no message"]), "{:#?}", lines());
    }
}
