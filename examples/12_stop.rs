//! A server that allows it can be stopped from afar. `wait_for_finalize` is where its main thread spends the time until
//! then, and callbacks run on the way out.
//!
//! `cargo run --example 12_stop`

use std::sync::mpsc;

use calomel::{Engine, Error, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::builder().listen("tcp://127.0.0.1:0").remote_shutdown(true).build()?;
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y)?;

    let (events, happened) = mpsc::channel();
    let last_event = events.clone();
    // Before anything is closed: other servers can still be told.
    server.on_prefinalize(move || {
        events.send("prefinalize").ok();
    });
    // After the last call has ended: what the handlers needed can go.
    server.on_finalize(move || {
        last_event.send("finalize").ok();
    });

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let sum = client.procedure::<(i32, i32), i32>("sum");
    assert_eq!(sum.on(&peer).call(&(1, 2))?, 3);

    // Off unless enabled: an engine does not stop at the word of a stranger.
    let careful = Engine::server("tcp://127.0.0.1:0")?;
    let error = client.lookup(careful.address())?.shutdown().expect_err("nobody enabled it");
    println!("{error}");
    assert!(matches!(error, Error::AccessDenied { .. }));

    peer.shutdown()?;
    server.wait_for_finalize();
    let events: Vec<_> = happened.try_iter().collect();
    println!("the server stopped: {events:?}");
    assert_eq!(events, ["prefinalize", "finalize"]);

    let error = sum.on(&peer).call(&(1, 2)).expect_err("nobody is there any more");
    println!("{error}");
    assert!(error.is_disconnected());
    Ok(())
}
