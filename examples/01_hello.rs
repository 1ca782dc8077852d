//! The smallest program: a server that defines a procedure from a closure, and a client that calls it.
//!
//! `cargo run --example 01_hello`

use calomel::{Engine, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?; // port 0: any free one
    server.define("hello", |_: &Request, name: String| format!("Hello, {name}!"))?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let hello = client.procedure::<str, String>("hello");

    let answer = hello.on(&peer).call("Matthieu")?;
    println!("{answer}");
    assert_eq!(answer, "Hello, Matthieu!");
    Ok(())
}
