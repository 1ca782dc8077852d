//! `scope` exposes borrowed memory, as `std::thread::scope` lends it to threads: when it returns, no peer can reach it
//! any more, whatever they kept.
//!
//! `cargo run --example 10_scoped_memory`

use std::sync::{Arc, Mutex};

use calomel::{Bulk, BulkMode, Engine, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;

    // A server with a long memory: it keeps the bulk, and writes to it again when asked.
    let kept = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&kept);
    server.define("fill", move |request: &Request, bulk: Bulk| {
        let filled = bulk.on(request.endpoint()).push_from(&[7u8; 16][..]);
        *keep.lock().expect("no handler panics with the lock held") = Some(bulk);
        filled.map_err(|error| error.to_string())
    })?;
    server.define("fill_again", move |request: &Request, (): ()| {
        let bulk = kept.lock().expect("no handler panics with the lock held").clone().ok_or("nothing to fill")?;
        bulk.on(request.endpoint()).push_from(&[9u8; 16][..]).map_err(|error| error.to_string())
    })?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let fill = client.procedure::<Bulk, Result<usize, String>>("fill");
    let fill_again = client.procedure::<(), Result<usize, String>>("fill_again");

    let mut buffer = [0u8; 16]; // on the stack, and it stays there
    let filled = client.scope(|scope| {
        let half = scope.expose(&mut buffer[..8], BulkMode::WriteOnly)?;
        fill.on(&peer).call(&half)
    })?;
    println!("{buffer:?}");
    assert_eq!(filled, Ok(8));
    assert_eq!(buffer, [7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0]);

    let refused = fill_again.on(&peer).call(&())?.expect_err("the scope is over");
    println!("{refused}");
    assert!(!buffer.contains(&9));
    Ok(())
}
