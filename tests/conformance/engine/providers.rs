//! Providers as a whole: what they are, what they serve, and their removal.

use std::sync::Arc;
use std::time::Duration;

use calomel::{Error, Request};

use crate::support::{Net, eventually};

const LONG: Duration = Duration::from_secs(20);

fn identity_is_registered_and_asked_for_remotely(net: &Net) {
    let pair = net.pair();
    let provider = pair.server.provider(7);
    assert_eq!(provider.identity(), None);
    let at_seven = pair.to_server.provider(7);
    let error = at_seven.identity(LONG).unwrap_err();
    assert!(matches!(&error, Error::NoSuchProvider { provider: 7, .. }), "{error}");
    provider.register_identity("kv store 2").unwrap();
    assert_eq!(provider.identity().as_deref(), Some("kv store 2"));
    assert_eq!(at_seven.identity(LONG).unwrap(), "kv store 2");
    assert!(matches!(pair.to_server.identity(LONG), Err(Error::NoSuchProvider { provider: 0, .. })));
    let error = provider.register_identity("another").unwrap_err();
    assert!(matches!(&error, Error::AlreadyDefined { name, provider: 7 } if name == "identity"), "{error}");
    assert_eq!(at_seven.identity(LONG).unwrap(), "kv store 2");
}

fn identity_has_a_limit(net: &Net) {
    let pair = net.pair();
    let longest = "ä".repeat(512);
    pair.server.provider(1).register_identity(&longest).unwrap();
    assert_eq!(pair.to_server.provider(1).identity(LONG).unwrap(), longest);
    let error = pair.server.provider(2).register_identity(&"x".repeat(1025)).unwrap_err();
    assert!(matches!(&error, Error::MessageTooLarge { size: 1025, limit: 1024, .. }), "{error}");
    pair.server.provider(3).register_identity("").unwrap();
    assert_eq!(pair.to_server.provider(3).identity(LONG).unwrap(), "");
}

fn procedures_are_listed_by_provider(net: &Net) {
    let server = net.server();
    assert!(server.procedures().is_empty());
    let registration = server.define("b", |_: &Request, ()| ()).unwrap();
    server.define("a", |_: &Request, ()| ()).unwrap();
    server.provider(9).define("c", |_: &Request, ()| ()).unwrap();
    let listed = |names: &[(u16, &str)]| names.iter().map(|(id, name)| (*id, (*name).to_owned())).collect::<Vec<_>>();
    assert_eq!(server.procedures(), listed(&[(0, "a"), (0, "b"), (9, "c")]));
    assert_eq!(server.provider(9).procedures(), ["c"]);
    assert!(server.provider(8).procedures().is_empty());
    registration.remove();
    assert_eq!(server.procedures(), listed(&[(0, "a"), (9, "c")]));
}

fn provider_is_removed_as_a_whole(net: &Net) {
    let pair = net.pair();
    let provider = pair.server.provider(5);
    let captured = Arc::new(());
    for name in ["one", "two"] {
        let captured = captured.clone();
        provider.define(name, move |_: &Request, ()| Arc::strong_count(&captured)).unwrap();
    }
    let kept = provider.define("three", |_: &Request, ()| 0usize).unwrap();
    provider.register_identity("to be removed").unwrap();
    pair.server.define("one", |_: &Request, ()| 7usize).unwrap();
    let one = pair.client.procedure::<(), usize>("one");
    let at_five = pair.to_server.provider(5);
    assert_eq!(one.on(&at_five).call(&()).unwrap(), 3);
    assert_eq!(provider.remove(), 3);
    assert_eq!(provider.remove(), 0);
    assert!(!kept.remove());
    // A handler that has just answered may still hold its closure.
    eventually("the closures were dropped", || Arc::strong_count(&captured) == 1);
    assert!(matches!(one.on(&at_five).call(&()), Err(Error::NoSuchProvider { provider: 5, .. })));
    assert!(matches!(at_five.identity(LONG), Err(Error::NoSuchProvider { .. })));
    // The engine's own procedures stay, and the provider can be made anew.
    assert_eq!(one.on(&pair.to_server).call(&()).unwrap(), 7);
    provider.define("one", |_: &Request, ()| 9usize).unwrap();
    provider.register_identity("again").unwrap();
    assert_eq!(one.on(&at_five).call(&()).unwrap(), 9);
    assert_eq!(at_five.identity(LONG).unwrap(), "again");
}

suite!(
    identity_is_registered_and_asked_for_remotely,
    identity_has_a_limit,
    procedures_are_listed_by_provider,
    provider_is_removed_as_a_whole,
);
