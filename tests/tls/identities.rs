//! Access control by the identity in a certificate.

use calomel::{Caller, Endpoint, Engine, EngineBuilder, Request, Tls};

use crate::authority::{Authority, Identity};
use crate::common::*;

const ANYWHERE: &str = "tcp://127.0.0.1:0";

fn builder(tls: Tls) -> EngineBuilder {
    Engine::builder().tls(tls)
}

/// A server that serves only peers with this certificate.
fn serving(authority: &Authority, known: &Identity) -> Engine {
    let der = known.der.clone();
    let decide = move |caller: &Caller<'_>| caller.certificate().is_some_and(|shown| *shown == *der);
    let server = builder(authority.tls()).authorize(decide).listen(ANYWHERE).build().unwrap();
    server.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    server
}

fn double(engine: &Engine, to: &Endpoint) -> calomel::Result<u32> {
    engine.procedure::<u32, u32>("double").on(to).call(&21)
}

/// Intermediate certificates are sent as well, and identify no peer.
#[test]
fn chain_with_an_intermediate_certificate_identifies_the_engine() {
    let _watchdog = Watchdog::start("identities::chain_with_an_intermediate_certificate_identifies_the_engine");
    let authority = Authority::new();
    let deputy = authority.deputy();
    let of_deputy = || {
        let mut identity = deputy.identity(&["127.0.0.1"]);
        let end = identity.certificate.clone();
        identity.certificate += &deputy.pem();
        (identity, end)
    };
    let (known, alone) = of_deputy();
    let server = {
        let der = known.der.clone();
        let tls = of_deputy().0.of(authority.trusted());
        let decide = move |caller: &Caller<'_>| caller.certificate().is_some_and(|shown| *shown == *der);
        builder(tls).authorize(decide).listen(ANYWHERE).build().unwrap()
    };
    server.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    let client = builder(known.of(authority.trusted())).build().unwrap();
    assert_eq!(double(&client, &client.lookup(server.address()).unwrap()).unwrap(), 42);
    // Without the intermediate certificate, the chain can't be verified.
    let alone = Identity { certificate: alone, ..known };
    let client = builder(alone.of(authority.trusted())).build().unwrap();
    let denied = double(&client, &client.lookup(server.address()).unwrap());
    assert!(matches!(&denied, Err(error) if error.to_string().contains("does not accept")), "{denied:?}");
}

/// The identity of an engine at an address does not carry over to the next engine there.
#[test]
fn certificate_decides_and_not_the_address() {
    let _watchdog = Watchdog::start("identities::certificate_decides_and_not_the_address");
    let authority = Authority::new();
    let (known, other) = (authority.identity(&["127.0.0.1"]), authority.identity(&["127.0.0.1"]));
    let server = serving(&authority, &known);
    let first = builder(known.of(authority.trusted())).listen(ANYWHERE).build().unwrap();
    let address = first.address().clone();
    assert_eq!(double(&first, &first.lookup(server.address()).unwrap()).unwrap(), 42);
    first.finalize().unwrap();
    // Where another process got the port meanwhile, there is nothing to test.
    let second = builder(other.of(authority.trusted())).listen(&address).build();
    let Ok(second) = second else { return };
    let denied = double(&second, &second.lookup(server.address()).unwrap());
    assert!(matches!(denied, Err(calomel::Error::AccessDenied { .. })), "{denied:?}");
    // The same in reverse, with the server still running.
    second.finalize().unwrap();
    let Ok(third) = builder(known.of(authority.trusted())).listen(&address).build() else { return };
    assert_eq!(double(&third, &third.lookup(server.address()).unwrap()).unwrap(), 42);
}

/// Calls that come back over a dialled connection have the identity of the dialled engine.
#[test]
fn callback_from_dialled_engine_has_its_certificate() {
    let _watchdog = Watchdog::start("identities::callback_from_dialled_engine_has_its_certificate");
    let authority = Authority::new();
    for allowed in [true, false] {
        let (known, other) = (authority.identity(&["127.0.0.1"]), authority.identity(&["127.0.0.1"]));
        let dialled = builder(if allowed { &known } else { &other }.of(authority.trusted())).listen(ANYWHERE).build().unwrap();
        dialled
            .define("back", |request: &Request, ()| {
                double(request.engine(), request.endpoint()).map_err(|error| matches!(error, calomel::Error::AccessDenied { .. }))
            })
            .unwrap();
        let server = serving(&authority, &known);
        let to = server.lookup(dialled.address()).unwrap();
        let back = server.procedure::<(), Result<u32, bool>>("back").on(&to).call(&()).unwrap();
        assert_eq!(back, if allowed { Ok(42) } else { Err(true) });
    }
}
