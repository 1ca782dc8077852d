//! A `Grant` restricts access to exposed memory: here to the callee of one call, or to one transfer. The server keeps the
//! bulks, and its later pulls are denied.
//!
//! `cargo run --example 15_restricted_memory`

use std::sync::{Arc, Mutex};
use std::time::Duration;

use calomel::{Bulk, BulkMode, Engine, Grant, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;

    // A server that pulls as often as it can, also from bulks of earlier calls.
    let kept = Arc::new(Mutex::new(Vec::new()));
    server.define("pull", move |request: &Request, bulk: Bulk| {
        let mut kept = kept.lock().unwrap();
        kept.extend([bulk.clone(), bulk]);
        let pull = |bulk: &Bulk| match bulk.on(request.endpoint()).pull_into(&mut [0u8; 4][..]) {
            Ok(pulled) => format!("pulled {pulled} bytes"),
            Err(error) => format!("refused: {error}"),
        };
        kept.iter().map(pull).collect::<Vec<String>>()
    })?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let pull = client.procedure::<Bulk, Vec<String>>("pull");

    // Other restrictions: `only(&peer)`, `quota(bytes)`. All can be combined.
    let grant = Grant::new().for_one_call().once().expires_after(Duration::from_secs(60));
    for _ in 0..2 {
        let exposed = client.expose_with(vec![7u8; 4], BulkMode::ReadOnly, &grant)?;
        for attempt in pull.on(&peer).call(&exposed.bulk())? {
            println!("{attempt}");
        }
    }

    let refusals = client.refusals();
    println!("used up: {}, revoked: {}", refusals.used_up, refusals.revoked);
    assert_eq!((refusals.used_up, refusals.revoked, refusals.total()), (2, 2, 4));
    Ok(())
}
