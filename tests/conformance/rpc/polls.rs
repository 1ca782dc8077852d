//! Futures drive while they are polled. No operation depends on when that is.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Pending, Request};
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinSet, yield_now};

use crate::support::{Gate, Net, Pair, eventually, patience};

fn poll_once(pending: &mut Pending<u32>) -> Poll<()> {
    Pin::new(pending).poll(&mut Context::from_waker(Waker::noop())).map(drop)
}

fn runtimes() -> [Runtime; 2] {
    [Builder::new_current_thread().build().unwrap(), Builder::new_multi_thread().worker_threads(2).build().unwrap()]
}

/// Defines `blocks`, whose handlers wait at the gate, and `plus` at both engines.
fn define(pair: &Pair) -> Gate {
    let gate = Gate::default();
    let waits = gate.clone();
    pair.server
        .define("blocks", move |_: &Request, n: u32| {
            waits.wait();
            n
        })
        .unwrap();
    for engine in [&pair.server, &pair.client] {
        engine.define("plus", |_: &Request, n: u32| n + 1).unwrap();
    }
    pair.server
        .define("ask", |request: &Request, n: u32| {
            request.engine().procedure::<u32, u32>("plus").on(request.endpoint()).call(&n).unwrap()
        })
        .unwrap();
    gate
}

/// Calls in both directions.
fn assert_works(pair: &Pair) {
    let begin = Instant::now();
    let ask = pair.client.procedure::<u32, u32>("ask").on(&pair.to_server);
    for n in 0..30 {
        assert_eq!(ask.call(&n).unwrap(), n + 1);
    }
    assert!(begin.elapsed() < Duration::from_secs(3) * patience(), "{:?}", begin.elapsed());
}

fn future_that_is_not_polled_again_stops_no_other_operation(net: &Net) {
    let pair = net.pair();
    let gate = define(&pair);
    let blocks = pair.client.procedure::<u32, u32>("blocks").on(&pair.to_server);
    let plus = pair.client.procedure::<u32, u32>("plus").on(&pair.to_server);
    // Alone, with others that wait, and dropped.
    for others in [0, 1, 20] {
        let mut waiting: Vec<_> = (0..=others).map(|n| blocks.start(&n).unwrap()).collect();
        waiting.iter_mut().for_each(|pending| assert!(poll_once(pending).is_pending()));
        assert_works(&pair);
        for runtime in runtimes() {
            let plus = plus.clone();
            runtime.block_on(async move {
                for n in 0..100 {
                    assert_eq!(plus.start(&n).unwrap().await.unwrap(), n + 1);
                }
            });
        }
        drop(waiting.remove(0));
        assert_works(&pair);
    }
    gate.open();
}

fn calls_of_futures_that_are_not_polled_again_are_sent(net: &Net) {
    let pair = net.pair();
    let count = Arc::new(AtomicU32::new(0));
    let counts = count.clone();
    pair.server.define("count", move |_: &Request, ()| counts.fetch_add(1, Ordering::SeqCst)).unwrap();
    let call = pair.client.procedure::<(), u32>("count").on(&pair.to_server);
    for round in 1..=20 {
        let mut started: Vec<_> = (0..30).map(|_| call.start(&()).unwrap()).collect();
        for pending in &mut started {
            let _ = poll_once(pending);
        }
        let begin = Instant::now();
        eventually("all calls arrived", || count.load(Ordering::SeqCst) == 30 * round);
        assert!(begin.elapsed() < Duration::from_secs(3) * patience(), "{:?}", begin.elapsed());
    }
}

fn poll_returns_soon_while_the_handler_blocks(net: &Net) {
    let pair = net.pair();
    let gate = define(&pair);
    let mut pending = pair.client.procedure::<u32, u32>("blocks").on(&pair.to_server).start(&7).unwrap();
    let begin = Instant::now();
    for _ in 0..1000 {
        assert!(poll_once(&mut pending).is_pending());
    }
    assert!(begin.elapsed() < Duration::from_secs(1) * patience(), "{:?}", begin.elapsed());
    gate.open();
    assert_eq!(pending.wait().unwrap(), 7);
}

/// A task whose calls end while it is polled lets others of its thread run, and the runtime look for other events.
fn task_that_calls_lets_others_run(net: &Net) {
    let pair = net.pair();
    define(&pair);
    let plus = pair.client.procedure::<u32, u32>("plus").on(&pair.to_server);
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let calling = tokio::spawn(async move {
            let begin = Instant::now();
            while !end.load(Ordering::SeqCst) {
                assert!(begin.elapsed() < Duration::from_secs(3) * patience(), "no other task runs");
                assert_eq!(plus.start(&1).unwrap().await.unwrap(), 2);
            }
        });
        for _ in 0..20 {
            yield_now().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        ended.store(true, Ordering::SeqCst);
        calling.await.unwrap();
    });
}

/// Tasks call from several runtimes at a time, and threads beside them, while the peer calls back.
fn tasks_and_threads_call_at_the_same_time(net: &Net) {
    let pair = net.pair();
    define(&pair);
    let plus = pair.client.procedure::<u32, u32>("plus").on(&pair.to_server);
    let call_from_tasks = |runtime: &Runtime, crowd: u32| {
        runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for task in 0..crowd {
                let plus = plus.clone();
                tasks.spawn(async move {
                    for n in task..task + 50 {
                        assert_eq!(plus.start(&n).unwrap().await.unwrap(), n + 1);
                    }
                });
            }
            tasks.join_all().await;
        });
    };
    let ([one, two], call) = (&runtimes(), &call_from_tasks);
    thread::scope(|scope| {
        for crowd in [1, 2, 16] {
            scope.spawn(move || call(one, crowd));
            scope.spawn(move || call(two, crowd));
            scope.spawn(|| assert_works(&pair));
        }
    });
}

suite![
    future_that_is_not_polled_again_stops_no_other_operation,
    calls_of_futures_that_are_not_polled_again_are_sent,
    poll_returns_soon_while_the_handler_blocks,
    task_that_calls_lets_others_run,
    tasks_and_threads_call_at_the_same_time,
];
