//! Connecting, reconnecting, and noticing lost connections.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Request};

use crate::assert_error;
use crate::support::{Net, Pair, eventually, rounds};

fn first_call_connects_the_endpoint(net: &Net) {
    let pair = net.pair();
    pair.server.define("hello", |_: &Request, ()| ()).unwrap();
    assert!(!pair.to_server.is_connected());
    pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
    assert!(pair.to_server.is_connected());
    assert!(pair.to_server.provider(3).is_connected());
    pair.server.finalize().unwrap();
    eventually("the end of the server is noticed", || !pair.to_server.is_connected());
}

fn call_to_an_address_without_a_listener_fails_at_once(net: &Net) {
    let client = net.client();
    let address = net.dead_address();
    let endpoint = client.lookup(&address).unwrap();
    let begin = Instant::now();
    let error = client.procedure::<(), ()>("hello").on(&endpoint).call(&()).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert!(error.to_string().contains(&address), "{error}");
    assert!(error.is_disconnected() && error.is_retryable() && !error.is_timeout());
    assert_error!(Err::<(), _>(error), Error::Unreachable { peer, .. } if peer.to_string() == address);
    let pending = client.procedure::<(), ()>("hello").on(&endpoint).start(&()).and_then(|pending| pending.wait());
    assert_error!(pending, Error::Unreachable { .. });
    assert!(!endpoint.is_connected());
}

fn call_succeeds_once_the_server_listens(net: &Net) {
    let client = net.client();
    let address = net.dead_address();
    let endpoint = client.lookup(&address).unwrap();
    let hello = client.procedure::<(), u8>("hello");
    assert_error!(hello.on(&endpoint).call(&()), Error::Unreachable { .. });
    let server = net.keep(net.builder().listen(&address).build().unwrap());
    server.define("hello", |_: &Request, ()| 1u8).unwrap();
    assert_eq!(hello.on(&endpoint).call(&()).unwrap(), 1);
}

fn call_to_a_finalized_server_fails_as_disconnected(net: &Net) {
    let pair = net.pair();
    pair.server.define("hello", |_: &Request, ()| ()).unwrap();
    let hello = pair.client.procedure::<(), ()>("hello");
    hello.on(&pair.to_server).call(&()).unwrap();
    pair.server.finalize().unwrap();
    let begin = Instant::now();
    for _ in 0..3 {
        let error = hello.on(&pair.to_server).call(&()).unwrap_err();
        assert!(error.is_disconnected(), "{error}");
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
}

fn restarted_server_serves_calls_and_rejects_old_bulks(net: &Net) {
    let client = net.client();
    let first = net.server();
    let address = first.address();
    let endpoint = client.lookup(&address).unwrap();
    let number = client.procedure::<(), u32>("number");
    first.define("number", |_: &Request, ()| 1u32).unwrap();
    assert_eq!(number.on(&endpoint).call(&()).unwrap(), 1);
    let exposed = first.expose_read_only(vec![1u8; 100_000]).unwrap();
    let old = crate::support::travelled(&exposed.bulk());
    assert_eq!(old.on(&endpoint).pull_into(&mut [0u8; 10][..]).unwrap(), 10);
    first.finalize().unwrap();
    eventually("the end is noticed", || !endpoint.is_connected());

    let second = net.keep(net.builder().listen(&address).build().unwrap());
    second.define("number", |_: &Request, ()| 2u32).unwrap();
    assert_eq!(number.on(&endpoint).call(&()).unwrap(), 2);
    let error = old.on(&endpoint).pull_into(&mut [0u8; 10][..]).unwrap_err();
    assert!(error.is_disconnected() && !error.is_retryable());
    assert_error!(Err::<(), _>(error), Error::PeerRestarted { peer, .. } if peer == address);
    let error = old.on(&endpoint).push_from(&[0u8; 10][..]).unwrap_err();
    assert_error!(Err::<(), _>(error), Error::PeerRestarted { .. } | Error::AccessDenied { .. });
    // Also through its origin, which is an address too.
    let result = old.origin(&client).and_then(|remote| remote.pull_into(&mut [0u8; 10][..]));
    assert_error!(result, Error::PeerRestarted { .. });
    assert_eq!(number.on(&endpoint).call(&()).unwrap(), 2);
}

fn transport_that_is_not_built_in_is_unsupported(net: &Net) {
    // With this feature the transport is supported.
    if cfg!(feature = "verbs") {
        return;
    }
    let client = net.client();
    let text = "verbs://127.0.0.1:1";
    let result = client.lookup(text).and_then(|endpoint| client.procedure::<(), ()>("hello").on(&endpoint).call(&()));
    assert_error!(result, Error::Unsupported { .. });
    assert_error!(Engine::server(text), Error::Unsupported { .. });
}

fn calls_of_many_short_lived_clients_succeed(net: &Net) {
    let server = net.server();
    server.define("hello", |_: &Request, n: u32| n).unwrap();
    for n in 0..50 {
        let pair = Pair::of(server.clone(), net.builder().build().unwrap());
        assert_eq!(pair.client.procedure::<u32, u32>("hello").on(&pair.to_server).call(&n).unwrap(), n);
        pair.client.finalize().unwrap();
    }
}

fn calls_of_one_client_reach_the_right_server(net: &Net) {
    let client = net.client();
    let servers: Vec<Engine> = (0..20).map(|_| net.server()).collect();
    for (n, server) in servers.iter().enumerate() {
        server.define("which", move |_: &Request, ()| n).unwrap();
    }
    let endpoints: Vec<_> = servers.iter().map(|server| client.lookup(server.address()).unwrap()).collect();
    let which = client.procedure::<(), usize>("which");
    let pendings: Vec<_> = endpoints.iter().map(|endpoint| which.on(endpoint).start(&()).unwrap()).collect();
    for (n, pending) in pendings.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), n);
    }
}

fn endpoint_of_another_engine_neither_hangs_nor_crashes(net: &Net) {
    // Endpoints are values; an engine that is given another's must not hang or crash.
    let pair = net.pair();
    pair.server.define("hello", |_: &Request, ()| 1u8).unwrap();
    let other = net.client();
    let begin = Instant::now();
    if let Ok(answer) = other.procedure::<(), u8>("hello").on(&pair.to_server).call(&()) {
        assert_eq!(answer, 1);
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(pair.client.procedure::<(), u8>("hello").on(&pair.to_server).call(&()).unwrap(), 1);
}

fn simultaneous_connects_lose_no_call(net: &Net) {
    // Each pair may briefly have two connections; no call is lost on either, and each is executed once.
    for _ in 0..rounds(40) {
        let engines = [net.server(), net.server(), net.server()];
        let counts: Vec<_> = engines
            .iter()
            .map(|engine| {
                let count = Arc::new(AtomicU32::new(0));
                let here = count.clone();
                engine.define("count", move |_: &Request, ()| here.fetch_add(1, Ordering::SeqCst)).unwrap();
                count
            })
            .collect();
        let start = Barrier::new(6);
        thread::scope(|s| {
            for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
                let (engines, start) = (&engines, &start);
                s.spawn(move || {
                    let endpoint = engines[from].lookup(engines[to].address()).unwrap();
                    let count = engines[from].procedure::<(), u32>("count");
                    start.wait();
                    for _ in 0..5 {
                        count.on(&endpoint).call(&()).unwrap();
                    }
                });
            }
        });
        assert!(counts.iter().all(|count| count.load(Ordering::SeqCst) == 10));
        engines.iter().for_each(|engine| engine.finalize().unwrap());
    }
}

fn end_of_a_quiet_peer_is_noticed_beside_busy_peers(net: &Net) {
    let client = net.client();
    let servers: Vec<Engine> = (0..6).map(|_| net.server()).collect();
    let stop = AtomicU32::new(0);
    thread::scope(|s| {
        for server in &servers {
            server.define("busy", |_: &Request, n: u32| n).unwrap();
            let endpoint = client.lookup(server.address()).unwrap();
            let (busy, stop) = (client.procedure::<u32, u32>("busy"), &stop);
            s.spawn(move || {
                while stop.load(Ordering::SeqCst) == 0 {
                    busy.on(&endpoint).call(&1).unwrap();
                }
            });
        }
        for _ in 0..20 {
            let quiet = net.server();
            quiet.define("slow", |_: &Request, ()| thread::sleep(Duration::from_millis(3))).unwrap();
            let endpoint = client.lookup(quiet.address()).unwrap();
            client.procedure::<(), ()>("slow").on(&endpoint).call(&()).unwrap();
            // The answer and the end of the connection arrive together, as far as the system allows.
            let pending = client.procedure::<(), ()>("slow").on(&endpoint).start(&()).unwrap();
            quiet.finalize().unwrap();
            let begin = Instant::now();
            let _ = pending.wait();
            eventually("the end is noticed", || !endpoint.is_connected());
            assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        }
        stop.store(1, Ordering::SeqCst);
    });
}

suite![
    end_of_a_quiet_peer_is_noticed_beside_busy_peers,
    simultaneous_connects_lose_no_call,
    first_call_connects_the_endpoint,
    call_to_an_address_without_a_listener_fails_at_once,
    call_succeeds_once_the_server_listens,
    call_to_a_finalized_server_fails_as_disconnected,
    restarted_server_serves_calls_and_rejects_old_bulks,
    transport_that_is_not_built_in_is_unsupported,
    calls_of_many_short_lived_clients_succeed,
    calls_of_one_client_reach_the_right_server,
    endpoint_of_another_engine_neither_hangs_nor_crashes,
];
