//! Remote shutdown.

use std::thread;
use std::time::{Duration, Instant};

use calomel::{Error, Request};

use crate::assert_error;
use crate::support::{Net, Pair, eventually};

fn remote_shutdown_finalizes_a_server_that_allows_it(net: &Net) {
    let pair = Pair::of(net.server_with(|b| b.remote_shutdown(true)), net.client());
    pair.server.define("hello", |_: &Request, ()| ()).unwrap();
    pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
    let server = pair.server.clone();
    let waiter = thread::spawn(move || server.wait_for_finalize());
    let begin = Instant::now();
    pair.to_server.shutdown().unwrap();
    waiter.join().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5));
    eventually("the server is finalized", || pair.server.is_finalized());
    assert!(!pair.client.is_finalized());
    let error = pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap_err();
    assert!(error.is_disconnected(), "{error}");
}

fn remote_shutdown_without_a_connection_connects(net: &Net) {
    let pair = Pair::of(net.server_with(|b| b.remote_shutdown(true)), net.client());
    pair.to_server.shutdown().unwrap();
    pair.server.wait_for_finalize();
}

fn remote_shutdown_is_denied_by_default(net: &Net) {
    for server in [net.server(), net.server_with(|b| b.remote_shutdown(false))] {
        let pair = Pair::of(server, net.client());
        pair.server.define("hello", |_: &Request, ()| ()).unwrap();
        assert_error!(pair.to_server.shutdown(), Error::AccessDenied { .. });
        pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
        assert!(!pair.server.is_finalized());
    }
}

fn remote_shutdown_of_a_client_is_denied(net: &Net) {
    let pair = net.pair();
    pair.server.define("betray", |request: &Request, ()| request.endpoint().shutdown().is_ok()).unwrap();
    assert!(!pair.client.procedure::<(), bool>("betray").on(&pair.to_server).call(&()).unwrap());
    assert!(!pair.client.is_finalized());
}

fn remote_shutdown_of_an_unreachable_server_fails(net: &Net) {
    let client = net.client();
    let endpoint = client.lookup(net.dead_address()).unwrap();
    assert_error!(endpoint.shutdown(), Error::Unreachable { .. });
}

suite![
    remote_shutdown_finalizes_a_server_that_allows_it,
    remote_shutdown_without_a_connection_connects,
    remote_shutdown_is_denied_by_default,
    remote_shutdown_of_a_client_is_denied,
    remote_shutdown_of_an_unreachable_server_fails,
];
