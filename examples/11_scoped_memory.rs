//! `scope` exposes borrowed memory, like `std::thread::scope` does for threads: when it returns, no peer can access the memory
//! any more, even with a bulk that it kept.
//!
//! `cargo run --example 11_scoped_memory`

use std::sync::{Arc, OnceLock};

use calomel::{Bulk, BulkMode, Engine, Error, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;

    // A server that keeps the bulk from its first call, and tries it again in a later call.
    let kept = Arc::new(OnceLock::new());
    let keep = Arc::clone(&kept);
    server.define_try("fill", move |request: &Request, bulk: Bulk| {
        keep.get_or_init(|| bulk).on(request.endpoint()).push_from(&[7u8; 16][..])
    })?;
    server.define("is_revoked", move |request: &Request, (): ()| {
        let again = kept.get().map(|bulk| bulk.on(request.endpoint()).push_from(&[9u8; 16][..]));
        matches!(again, Some(Err(Error::Revoked { .. })))
    })?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let fill = client.procedure::<Bulk, usize>("fill");
    let is_revoked = client.procedure::<(), bool>("is_revoked");

    let mut buffer = [0u8; 16]; // on the stack, and it stays there
    let filled = client.scope(|scope| {
        let half = scope.expose(&mut buffer[..8], BulkMode::WriteOnly)?;
        fill.on(&peer).call(&half)
    })?;
    println!("{buffer:?}");
    assert_eq!(filled, 8);
    assert_eq!(buffer, [7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0]);

    let revoked = is_revoked.on(&peer).call(&())?;
    println!("revoked: {revoked}");
    assert!(revoked);
    assert!(!buffer.contains(&9));
    Ok(())
}
