//! Messages that an engine has queued before finalize arrive.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Request, Responder};

use crate::support::{BOUND, Gate, Net, Pair, eventually, patience, text};

const LARGE: usize = 3 << 20;
/// Some of these runs hit a fault that depends on timing.
const ROUNDS: u64 = 10;

/// Finalizing takes far less if the peers respond: the rest is a margin for a busy machine. Finalize waits one second for a
/// peer that does not.
const PROMPT: Duration = Duration::from_millis(900);

type Handled = Arc<Mutex<HashMap<u64, u32>>>;

/// Defines `note`, which takes the given time, and counts how often each call has been handled.
fn define_note(engine: &Engine, takes: Duration) -> Handled {
    let handled = Handled::default();
    let by_index = handled.clone();
    engine
        .define("note", move |_: &Request, (index, bytes): (u64, String)| {
            assert!(bytes == text(index, bytes.len()));
            thread::sleep(takes);
            *by_index.lock().unwrap().entry(index).or_default() += 1;
        })
        .unwrap();
    handled
}

#[track_caller]
fn assert_all_handled(handled: &Handled, count: usize) {
    let begin = Instant::now();
    while handled.lock().unwrap().len() < count && begin.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(1));
    }
    let handled = handled.lock().unwrap();
    assert_eq!(handled.len(), count, "one-way calls handled of those that were made");
    assert!(handled.values().all(|times| *times == 1));
}

#[track_caller]
fn end_promptly(engine: &Engine) {
    let begin = Instant::now();
    engine.finalize().unwrap();
    let took = begin.elapsed();
    assert!(took < PROMPT * patience(), "finalizing took {took:?}");
}

/// A client makes one-way calls and finalizes at once: all of them are handled.
fn all_arrive(net: &Net, takes: Duration, count: u64, size: usize) {
    let Pair { server, client, to_server } = net.pair();
    let handled = define_note(&server, takes);
    let note = client.procedure::<(u64, String), ()>("note");
    for index in 0..count {
        note.on(&to_server).notify(&(index, text(index, size))).unwrap();
    }
    end_promptly(&client);
    assert_all_handled(&handled, count as usize);
    server.finalize().unwrap();
}

fn one_way_calls_before_finalize_are_handled(net: &Net) {
    for _ in 0..ROUNDS / u64::from(patience()) {
        all_arrive(net, Duration::ZERO, 3000, 0);
        all_arrive(net, Duration::ZERO, 2, LARGE);
    }
}

fn one_way_calls_before_finalize_are_handled_by_slow_handlers(net: &Net) {
    all_arrive(net, Duration::from_millis(10), 40, 5000);
}

/// A handler that awaits something runs to its end although the caller of the one-way call is gone.
fn handler_of_a_one_way_call_outlives_its_caller(net: &Net) {
    let Pair { server, client, to_server } = net.pair();
    let waker = Arc::new(Mutex::new(None));
    let (gate, done) = (Gate::default(), Gate::default());
    let (waits, opens, finished) = (waker.clone(), gate.clone(), done.clone());
    server
        .define_async("wait", move |request: Request, ()| {
            let (waker, gate, done) = (waits.clone(), opens.clone(), finished.clone());
            async move {
                poll_fn(|context| {
                    *waker.lock().unwrap() = Some(context.waker().clone());
                    if gate.is_open() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                assert!(!request.is_cancelled());
                done.open();
            }
        })
        .unwrap();
    client.procedure::<(), ()>("wait").on(&to_server).notify(&()).unwrap();
    eventually("the handler runs", || waker.lock().unwrap().is_some());
    // The server has closed its side by then.
    end_promptly(&client);
    gate.open();
    let waker: Option<Waker> = waker.lock().unwrap().take();
    waker.unwrap().wake();
    eventually("the handler has come to its end", || done.is_open());
}

/// Answers arrive, although their caller goes on sending messages that the server does not read any more.
fn answer_before_finalize_arrives(net: &Net) {
    for round in 0..ROUNDS / u64::from(patience()) {
        for size in [10, LARGE] {
            let Pair { server, client, to_server } = net.pair();
            let kept = Arc::new(Mutex::new(None));
            let keep = kept.clone();
            server.define_deferred("once", move |reply: Responder<String>, ()| *keep.lock().unwrap() = Some(reply)).unwrap();
            server.define("note", |_: &Request, _: u64| ()).unwrap();
            let pending = client.procedure::<(), String>("once").on(&to_server).start(&()).unwrap();
            eventually("the call is there", || kept.lock().unwrap().is_some());
            let stop = Gate::default();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let note = client.procedure::<u64, ()>("note");
                    while !stop.is_open() && note.on(&to_server).notify(&round).is_ok() {}
                });
                kept.lock().unwrap().take().unwrap().respond(&text(round, size)).unwrap();
                end_promptly(&server);
                stop.open();
            });
            assert!(pending.wait().unwrap() == text(round, size));
            client.finalize().unwrap();
        }
    }
}

/// Both engines have sent something, and both finalize at the same moment: neither waits for long.
fn engines_that_finalize_at_once_end_promptly(net: &Net) {
    for _ in 0..5 * ROUNDS / u64::from(patience()) {
        let Pair { server, client, to_server } = net.pair();
        server.define("note", |_: &Request, _: String| ()).unwrap();
        let note = client.procedure::<String, ()>("note");
        for size in [10, 100, 1 << 20] {
            note.on(&to_server).notify(&text(1, size)).unwrap();
        }
        let start = Barrier::new(2);
        thread::scope(|scope| {
            for engine in [&server, &client] {
                scope.spawn(|| {
                    start.wait();
                    end_promptly(engine);
                });
            }
        });
    }
}

suite!(
    one_way_calls_before_finalize_are_handled,
    one_way_calls_before_finalize_are_handled_by_slow_handlers,
    handler_of_a_one_way_call_outlives_its_caller,
    answer_before_finalize_arrives,
    engines_that_finalize_at_once_end_promptly,
);
