//! A server that allows it can be stopped remotely. Its main thread blocks in `wait_for_finalize` until then; callbacks run
//! before and after the engine ends.
//!
//! `cargo run --example 13_stop`

use std::sync::mpsc;

use calomel::{Engine, Error, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::builder().listen("tcp://127.0.0.1:0").remote_shutdown(true).build()?;
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y)?;

    let (events, happened) = mpsc::channel();
    let last_event = events.clone();
    // Before any connection is closed: calls to other servers still work.
    server.on_prefinalize(move || {
        events.send("prefinalize").ok();
    });
    // After the last call has ended: resources of the handlers can be freed.
    server.on_finalize(move || {
        last_event.send("finalize").ok();
    });

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let sum = client.procedure::<(i32, i32), i32>("sum");
    assert_eq!(sum.on(&peer).call(&(1, 2))?, 3);

    // Off by default: without it, an engine denies remote shutdown.
    let careful = Engine::server("tcp://127.0.0.1:0")?;
    let error = client.lookup(careful.address())?.shutdown().expect_err("remote shutdown is not enabled");
    println!("{error}");
    assert!(matches!(error, Error::AccessDenied { .. }));

    peer.shutdown()?;
    server.wait_for_finalize();
    let events: Vec<_> = happened.try_iter().collect();
    println!("the server stopped: {events:?}");
    assert_eq!(events, ["prefinalize", "finalize"]);

    let error = sum.on(&peer).call(&(1, 2)).expect_err("the server has stopped");
    println!("{error}");
    assert!(error.is_disconnected());
    Ok(())
}
