//! Waiting for a buffer of a pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Error, Request};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, eventually};

const SHORT: Duration = Duration::from_millis(30);

fn take_timeout_waits_for_a_returned_buffer(net: &Net) {
    let engine = net.client();
    let pool = engine.buffer_pool(100, 2);
    let (first, second) = (pool.take_timeout(SHORT).unwrap(), pool.take_timeout(Duration::ZERO).unwrap());
    let waiting = pool.clone();
    let waiter = thread::spawn(move || waiting.take_timeout(BOUND).map(|buffer| buffer[0]));
    thread::sleep(SHORT);
    assert!(!waiter.is_finished());
    let mut exposed = first;
    exposed[0] = 5;
    // A buffer that is exposed is returned when the exposure is dropped.
    drop(engine.expose(exposed, BulkMode::ReadWrite).unwrap());
    assert_eq!(waiter.join().unwrap().unwrap(), 5);
    drop(second);
    eventually("all are returned", || pool.available() == 2);
}

fn take_timeout_names_the_pool_when_all_are_taken(net: &Net) {
    let engine = net.server();
    let pool = engine.buffer_pool(4096, 2);
    let kept = (pool.take().unwrap(), pool.take().unwrap());
    let begin = Instant::now();
    let error = pool.take_timeout(SHORT).unwrap_err();
    assert!(begin.elapsed() >= SHORT && error.is_timeout(), "{error:?}");
    let expected = format!("taking one of the 2 buffers of 4096 bytes of a pool at {} timed out after 30ms", engine.address());
    assert_eq!(error.to_string(), expected);
    assert!(pool.take_timeout(Duration::ZERO).unwrap_err().is_timeout());
    // A buffer that is leaked is never returned, and a pool may have none: neither hangs.
    std::mem::forget(kept);
    assert!(pool.take_timeout(SHORT).unwrap_err().is_timeout());
    assert_error!(engine.buffer_pool(4096, 0).take_timeout(Duration::MAX), Error::Unsupported { .. });
}

fn panic_of_a_holder_returns_its_buffer(net: &Net) {
    let engine = net.client();
    let pool = engine.buffer_pool(100, 1);
    let (taken, panics) = (Gate::default(), Gate::default());
    thread::scope(|threads| {
        threads.spawn(|| {
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let _buffer = pool.take().unwrap();
                taken.open();
                panics.wait();
                panic!("with a buffer in hand");
            }));
            assert!(panicked.is_err());
        });
        taken.wait();
        let waiter = threads.spawn(|| pool.take_timeout(BOUND).map(drop));
        thread::sleep(SHORT);
        panics.open();
        waiter.join().unwrap().unwrap();
    });
}

fn each_of_many_takers_gets_a_buffer(net: &Net) {
    let pool = net.client().buffer_pool(8, 3);
    let most = Mutex::new((0, 0));
    thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| {
                for _ in 0..200 {
                    let buffer = pool.take_timeout(BOUND).unwrap();
                    {
                        let mut most = most.lock().unwrap();
                        most.0 += 1;
                        most.1 = most.1.max(most.0);
                    }
                    thread::yield_now();
                    most.lock().unwrap().0 -= 1;
                    drop(buffer);
                }
            });
        }
    });
    assert!(most.lock().unwrap().1 <= 3 && pool.available() == 3);
}

fn handler_that_waits_for_a_buffer_lets_others_run(net: &Net) {
    // One thread for all handlers: the one that returns the buffer has to run while the other waits.
    let pair = net.pair_with(|b| b.handler_threads(1));
    let pool = pair.server.buffer_pool(1000, 1);
    let held = Mutex::new(pool.take());
    pair.server
        .define("fill", move |request: &Request, bulk: Bulk| {
            let mut buffer = pool.take_timeout(BOUND).unwrap();
            bulk.on(request.endpoint()).pull_into(&mut buffer[..]).unwrap()
        })
        .unwrap();
    pair.server.define("return", move |_: &Request, ()| drop(held.lock().unwrap().take())).unwrap();
    let exposed = pair.client.expose(vec![1u8; 1000], BulkMode::ReadOnly).unwrap();
    let fill = pair.client.procedure::<Bulk, usize>("fill").on(&pair.to_server).start(&exposed.bulk()).unwrap();
    thread::sleep(SHORT);
    assert!(!fill.is_ready());
    pair.client.procedure::<(), ()>("return").on(&pair.to_server).call(&()).unwrap();
    assert_eq!(fill.wait().unwrap(), 1000);
}

suite![
    take_timeout_waits_for_a_returned_buffer,
    take_timeout_names_the_pool_when_all_are_taken,
    panic_of_a_holder_returns_its_buffer,
    each_of_many_takers_gets_a_buffer,
    handler_that_waits_for_a_buffer_lets_others_run,
];
