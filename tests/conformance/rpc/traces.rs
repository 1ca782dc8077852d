//! The trace that the program sets for a call: its handler has it, whatever the call is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use calomel::{Error, Request, Responder, Retry, TraceContext};

use crate::support::{BOUND, Gate, Net, Pair, block_on, patience};

type Received = mpsc::Receiver<(&'static str, Option<TraceContext>)>;

const BY_CLOSURE: &str = "closure";
const BY_FUTURE: &str = "future";
const LATER: &str = "later";

fn trace(number: u8) -> TraceContext {
    TraceContext::new([number; 16], [number; 8], number).unwrap().with_state("vendor=1")
}

/// Handlers of each kind, which report the traces that they find.
fn define(pair: &Pair) -> Received {
    let (report, received) = mpsc::channel();
    let to = report.clone();
    pair.server
        .define(BY_CLOSURE, move |request: &Request, _: String| to.send((BY_CLOSURE, request.trace_context().cloned())).unwrap())
        .unwrap();
    let to = report.clone();
    let by_future = move |request: Request, _: String| {
        let to = to.clone();
        async move { to.send((BY_FUTURE, request.trace_context().cloned())).unwrap() }
    };
    pair.server.define_async(BY_FUTURE, by_future).unwrap();
    let later = move |responder: Responder<()>, _: String| {
        report.send((LATER, responder.request().trace_context().cloned())).unwrap();
        responder.respond(&()).unwrap();
    };
    pair.server.define_deferred(LATER, later).unwrap();
    received
}

fn trace_travels_with_calls_of_every_kind(net: &Net) {
    let pair = net.pair();
    let received = define(&pair);
    let next = || received.recv_timeout(patience() * BOUND).unwrap();
    let mut number = 0;
    // In one frame, in chunks, and in many of them.
    for len in [0, 100, 40_000, 3 << 20] {
        let text = "x".repeat(len);
        for name in [BY_CLOSURE, BY_FUTURE, LATER] {
            let call = pair.client.procedure::<str, ()>(name).on(&pair.to_server).timeout(patience() * BOUND);
            let mut traced = || {
                number += 1;
                (call.clone().trace_context(trace(number)), (name, Some(trace(number))))
            };
            let (call, expected) = traced();
            call.call(&text).unwrap();
            assert_eq!(next(), expected);
            let (call, expected) = traced();
            call.start(&text).unwrap().wait().unwrap();
            assert_eq!(next(), expected);
            let (call, expected) = traced();
            block_on(call.start(&text).unwrap()).unwrap();
            assert_eq!(next(), expected);
            let (call, expected) = traced();
            call.notify(&text).unwrap();
            assert_eq!(next(), expected);
            let (call, expected) = traced();
            block_on(call.notify_async(&text)).unwrap();
            assert_eq!(next(), expected);
            let (call, expected) = traced();
            call.retry(Retry::new(3)).call(&text).unwrap();
            assert_eq!(next(), expected);
            // Those without have none, also after one with.
            let call = pair.client.procedure::<str, ()>(name).on(&pair.to_server).timeout(patience() * BOUND);
            call.call(&text).unwrap();
            call.notify(&text).unwrap();
            assert_eq!([next(), next()], [(name, None), (name, None)]);
        }
    }
}

/// Also those of attempts that were repeated, and of calls that wait for credit.
fn trace_stays_with_its_call(net: &Net) {
    let pair = net.pair();
    let (report, received) = mpsc::channel();
    let once = AtomicBool::new(true);
    let busy_once = move |request: &Request, number: u8| {
        if once.swap(false, Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(400));
        }
        report.send((number, request.trace_context().cloned())).unwrap();
    };
    pair.server.define("busy once", busy_once).unwrap();
    let call = pair.client.procedure::<u8, ()>("busy once").on(&pair.to_server);
    let short = call.clone().timeout(patience() * Duration::from_millis(200)).trace_context(trace(200));
    match short.retry(Retry::new(20)).call(&200) {
        Ok(()) | Err(Error::Timeout { .. }) => {}
        other => panic!("{other:?}"),
    }
    let long = call.timeout(patience() * BOUND);
    for number in 1..=100 {
        long.clone().trace_context(trace(number)).notify(&number).unwrap();
    }
    let mut left = 100;
    while left > 0 {
        let (number, found) = received.recv_timeout(patience() * BOUND).unwrap();
        assert_eq!(found, Some(trace(number)));
        left -= u32::from(number <= 100);
    }
}

/// One-way calls whose values find no room are decoded again when there is some.
fn trace_waits_with_a_call_that_waits_for_memory(net: &Net) {
    let server = net.server_with(|builder| {
        builder.max_message_size(1 << 20).max_bytes_in_flight_per_peer(4 << 20).max_bytes_in_flight(16 << 20).handler_threads(64)
    });
    let pair = Pair::of(server, net.client());
    let (gate, (report, received)) = (Gate::default(), mpsc::channel());
    let waits = gate.clone();
    let hold = move |request: &Request, texts: Vec<String>| {
        report.send((texts.len(), request.trace_context().cloned())).unwrap();
        waits.wait();
    };
    pair.server.define("hold", hold).unwrap();
    let next = || received.recv_timeout(patience() * BOUND).unwrap();
    let hold = pair.client.procedure::<Vec<String>, ()>("hold").on(&pair.to_server).timeout(patience() * BOUND);
    // Each takes a fifth of the memory, and more while it is decoded.
    let start = |number| {
        let pending = hold.clone().trace_context(trace(number)).start(&vec![String::new(); 118_000]).unwrap();
        assert_eq!(next(), (118_000, Some(trace(number))));
        pending
    };
    let holding: Vec<_> = (1..=5).map(start).collect();
    for number in 6..=8 {
        hold.clone().trace_context(trace(number)).notify(&vec![String::new(); 12_000 + usize::from(number)]).unwrap();
    }
    hold.notify(&vec![String::new(); 12_000]).unwrap();
    pair.client.procedure::<(), ()>("there").on(&pair.to_server).call(&()).unwrap_err();
    assert!(received.try_recv().is_err(), "there is room for none of them");
    gate.open();
    let mut found: Vec<_> = (0..4).map(|_| next()).collect();
    found.sort_by_key(|(len, _)| *len);
    let expected = [(12_000, None), (12_006, Some(trace(6))), (12_007, Some(trace(7))), (12_008, Some(trace(8)))];
    assert_eq!(found, expected);
    holding.into_iter().for_each(|pending| pending.wait().unwrap());
}

suite!(trace_travels_with_calls_of_every_kind, trace_stays_with_its_call, trace_waits_with_a_call_that_waits_for_memory,);
