//! Every call ends with its answer or with an error that states the cause. No failed call stops the server.
//!
//! `cargo run --example 04_errors_and_timeouts`

use std::sync::mpsc;
use std::time::Duration;

use calomel::{Engine, Error, Request, Responder};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;
    server.define("divide", |_: &Request, (x, y): (i32, i32)| x / y)?;

    // A deferred handler may answer later, from any thread. This one puts the questions into a channel that no thread reads.
    let (aside, _questions) = mpsc::channel::<Responder<String>>();
    server.define_deferred("ask", move |reply: Responder<String>, _question: String| {
        // If the receiver is gone, the responder is dropped, and the caller gets an error.
        aside.send(reply).ok();
    })?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let divide = client.procedure::<(i32, i32), i32>("divide");
    let ask = client.procedure::<str, String>("ask");
    let unknown = client.procedure::<(), ()>("unknown");

    let error = expect_error(unknown.on(&peer).call(&()));
    assert!(matches!(error, Error::NoSuchProcedure { .. }));

    // The caller sets the deadline, and the server knows it too. There is a default; this call sets a shorter one.
    let error = expect_error(ask.on(&peer).timeout(Duration::from_millis(50)).call("Is the server there?"));
    assert!(matches!(error, Error::Timeout { .. }));
    assert!(error.is_timeout());

    // A handler that panics fails its own call and nothing else. (Rust prints the panic to stderr.)
    let error = expect_error(divide.on(&peer).call(&(1, 0)));
    assert!(matches!(error, Error::HandlerPanicked { .. }));

    let answer = divide.on(&peer).call(&(84, 2))?;
    println!("the server still works: 84 / 2 = {answer}");
    assert_eq!(answer, 42);
    Ok(())
}

fn expect_error<T>(outcome: calomel::Result<T>) -> Error {
    let error = outcome.err().expect("a call that cannot succeed");
    println!("{error}");
    error
}
