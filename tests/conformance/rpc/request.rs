//! What a `Request` tells the handler about its call.

use std::sync::mpsc;

use calomel::{Request, Responder};

use crate::support::{BOUND, Net, block_on};

/// All properties of a request, as text.
fn described(request: &Request) -> (String, String, u16, String, bool) {
    (
        request.engine().address().to_string(),
        request.procedure().to_string(),
        request.provider_id(),
        request.endpoint().address().to_string(),
        request.is_cancelled(),
    )
}

type Described = (String, String, u16, String, bool);

fn request_knows_engine_procedure_provider_and_caller(net: &Net) {
    let (server, caller) = (net.server(), net.server());
    let to_server = caller.lookup(server.address()).unwrap();
    server.define("plain", |request: &Request, ()| described(request)).unwrap();
    server.provider(9).define_async("async", |request: Request, ()| async move { described(&request) }).unwrap();
    server
        .define_deferred("deferred", |responder: Responder<Described>, ()| {
            let answer = described(responder.request());
            responder.respond(&answer).unwrap();
        })
        .unwrap();
    for (name, provider) in [("plain", 0), ("async", 9), ("deferred", 0)] {
        let procedure = caller.procedure::<(), Described>(name);
        let (engine, procedure, id, from, cancelled) = procedure.on(to_server.provider(provider)).call(&()).unwrap();
        assert_eq!(engine, server.address().to_string());
        assert_eq!(procedure, name);
        assert_eq!(id, provider);
        // A caller that listens is known by the address that it listens at.
        assert_eq!(from, caller.address().to_string());
        assert!(!cancelled);
    }
}

fn endpoints_of_the_same_caller_are_equal(net: &Net) {
    let (server, a, b) = (net.server(), net.client(), net.client());
    let (seen, sees) = mpsc::channel();
    server.define("hello", move |request: &Request, ()| seen.send(request.endpoint().clone()).unwrap()).unwrap();
    let hello = |engine: &calomel::Engine| {
        let endpoint = engine.lookup(server.address()).unwrap();
        engine.procedure::<(), ()>("hello").on(&endpoint).call(&()).unwrap();
        sees.recv_timeout(BOUND).unwrap()
    };
    let (first, other, second) = (hello(&a), hello(&b), hello(&a));
    assert_eq!(first, second);
    assert_ne!(first, other);
    assert!(first.is_connected() && other.is_connected());
}

fn callers_endpoint_is_usable_after_the_call(net: &Net) {
    // The endpoint outlives its request: a server may call a client at any time, also one that does not listen.
    let pair = net.pair();
    let (seen, sees) = mpsc::channel();
    pair.server.define("subscribe", move |r: &Request, ()| seen.send(r.endpoint().clone()).unwrap()).unwrap();
    pair.client.define("event", |_: &Request, n: u32| n + 1).unwrap();
    pair.client.procedure::<(), ()>("subscribe").on(&pair.to_server).call(&()).unwrap();
    let caller = sees.recv_timeout(BOUND).unwrap();
    let event = pair.server.procedure::<u32, u32>("event");
    for n in 0..50 {
        assert_eq!(event.on(&caller).call(&n).unwrap(), n + 1);
    }
}

fn callers_endpoint_reaches_its_providers(net: &Net) {
    let pair = net.pair();
    pair.client.provider(4).define("mine", |request: &Request, ()| request.provider_id()).unwrap();
    pair.server
        .define("ask", |request: &Request, ()| {
            let mine = request.engine().procedure::<(), u16>("mine");
            mine.on(request.endpoint().provider(4)).call(&()).unwrap()
        })
        .unwrap();
    assert_eq!(pair.client.procedure::<(), u16>("ask").on(&pair.to_server).call(&()).unwrap(), 4);
}

fn request_can_move_into_futures_and_threads(net: &Net) {
    fn movable<T: Send + 'static>(_: &T) {}
    let pair = net.pair();
    pair.server
        .define_async("moved", |request: Request, ()| {
            movable(&request);
            async move { std::thread::spawn(move || request.procedure().to_string()).join().unwrap() }
        })
        .unwrap();
    let pending = pair.client.procedure::<(), String>("moved").on(&pair.to_server).start(&()).unwrap();
    assert_eq!(block_on(pending).unwrap(), "moved");
}

suite![
    request_knows_engine_procedure_provider_and_caller,
    endpoints_of_the_same_caller_are_equal,
    callers_endpoint_is_usable_after_the_call,
    callers_endpoint_reaches_its_providers,
    request_can_move_into_futures_and_threads,
];
