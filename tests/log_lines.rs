//! What the log says of handlers that panic, of responders that are dropped, and of one-way calls that are lost.

mod common;

use std::time::Duration;

use calomel::{Engine, Error, Request, Responder};
use tracing::Level;

use common::kept_lines::{has, keep, lines};
use common::{Watchdog, eventually};

/// Waits until a line has all of these parts.
#[track_caller]
fn assert_logged(parts: &[&str]) {
    eventually(&format!("a line has {parts:?}, of {:?}", lines()), || has(parts));
}

#[test]
fn faults_of_handlers_are_logged_with_their_procedures() {
    let _watchdog = Watchdog::start("faults_of_handlers_are_logged_with_their_procedures");
    keep("calomel", Level::WARN);
    let server = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false).build().unwrap();
    let client = Engine::client("tcp").unwrap();
    let peer = client.lookup(server.address()).unwrap();

    server.provider(4).define("breaks", |_: &Request, ()| -> u8 { panic!("out of cheese") }).unwrap();
    let breaks = client.procedure::<(), u8>("breaks");
    assert!(matches!(breaks.on(peer.provider(4)).call(&()), Err(Error::HandlerPanicked { .. })));
    assert_logged(&["ERROR calomel::handler", "breaks", "provider=4", "out of cheese"]);

    server.define_async("breaks later", |_: Request, fine: bool| async move { assert!(fine, "in a future") }).unwrap();
    assert!(client.procedure::<bool, ()>("breaks later").on(&peer).call(&false).is_err());
    assert_logged(&["ERROR calomel::handler", "breaks later", "in a future"]);

    server.define_deferred("breaks deferred", |_: Responder<u8>, ()| panic!("with a responder")).unwrap();
    assert!(client.procedure::<(), u8>("breaks deferred").on(&peer).call(&()).is_err());
    assert_logged(&["ERROR calomel::handler", "breaks deferred", "with a responder"]);

    server.define_deferred("forgets", |responder: Responder<u8>, ()| drop(responder)).unwrap();
    assert!(matches!(client.procedure::<(), u8>("forgets").on(&peer).call(&()), Err(Error::NoResponse { .. })));
    assert_logged(&["WARN calomel::handler", "forgets", "dropped without a response"]);

    server.define("wants a text", |_: &Request, text: String| drop(text)).unwrap();
    client.procedure::<u64, ()>("wants a text").on(&peer).notify(&7).unwrap();
    assert_logged(&["WARN calomel::rpc", "wants a text", "one-way call lost"]);
    client.procedure::<(), ()>("unknown").on(&peer).notify(&()).unwrap();
    assert_logged(&["WARN calomel::rpc", "unknown", "one-way call lost"]);

    // What a caller causes by giving up is no fault of the handler.
    server
        .define("slow", |request: &Request, ()| {
            while !request.is_cancelled() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // The deadline may pass here before it passes for the caller.
            std::thread::sleep(Duration::from_millis(200));
        })
        .unwrap();
    let before = lines().len();
    let slow = client.procedure::<(), ()>("slow").on(&peer).timeout(Duration::from_millis(50)).call(&());
    assert!(matches!(slow, Err(Error::Timeout { .. })));
    server.finalize().unwrap();
    let after = lines().clone();
    assert_eq!(after.len(), before, "{after:?}");
}
