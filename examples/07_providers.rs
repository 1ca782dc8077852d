//! Providers are objects behind one address: each has a number, and procedures of its own under the same names.
//!
//! `cargo run --example 07_providers`

use calomel::{Engine, Error, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;
    for (id, greeting) in [(1, "Hello"), (2, "Bonjour")] {
        let provider = server.provider(id);
        provider.define("greet", move |_: &Request, name: String| format!("{greeting}, {name}!"))?;
    }

    // An endpoint selects a provider; the procedure and the connection are the same for all of them.
    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let greet = client.procedure::<str, String>("greet");

    let english = greet.on(peer.provider(1)).call("Matthieu")?;
    let french = greet.on(peer.provider(2)).call("Matthieu")?;
    println!("{english} {french}");
    assert_eq!((english.as_str(), french.as_str()), ("Hello, Matthieu!", "Bonjour, Matthieu!"));

    let error = greet.on(peer.provider(3)).call("Matthieu").expect_err("there is no provider 3");
    println!("{error}");
    assert!(matches!(error, Error::NoSuchProvider { .. }));
    Ok(())
}
