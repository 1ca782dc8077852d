//! Calls that are repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Error, Request, Retry};

use crate::support::Net;

const LONG: Duration = Duration::from_secs(10);

fn call_is_repeated_until_the_peer_is_there(net: &Net) {
    let address = net.dead_address();
    let (server, client) = (net.client(), net.client());
    server.define("answer", |_: &Request, ()| 42u8).unwrap();
    let answer = client.procedure::<(), u8>("answer");
    let peer = client.lookup(&address).unwrap();
    thread::scope(|scope| {
        let retry = Retry::new(1000).backoff(Duration::from_millis(5), Duration::from_millis(20));
        let calling = scope.spawn(move || answer.on(&peer).retry(retry).call(&()));
        thread::sleep(Duration::from_millis(60));
        server.listen(address.as_str()).unwrap();
        assert_eq!(calling.join().unwrap().unwrap(), 42);
    });
}

fn attempts_are_counted(net: &Net) {
    let client = net.client();
    let peer = client.lookup(net.dead_address()).unwrap();
    let retry = Retry::new(3).backoff(Duration::from_millis(20), Duration::from_secs(1));
    let begin = Instant::now();
    let error = client.procedure::<(), ()>("none").on(&peer).timeout(LONG).retry(retry).call(&()).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    // Two pauses, of 20 and 40 ms, each up to a half shorter.
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(30) && took < LONG, "{took:?}");
}

fn error_that_a_retry_does_not_mend_ends_the_call(net: &Net) {
    let pair = net.pair();
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let fail = move |_: &Request, ()| {
        count.fetch_add(1, Ordering::SeqCst);
        Err::<u8, _>("no")
    };
    pair.server.define_try("fails", fail).unwrap();
    let error = pair.client.procedure::<(), u8>("fails").on(&pair.to_server).retry(Retry::new(10)).call(&()).unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

fn attempt_that_times_out_is_repeated(net: &Net) {
    let pair = net.pair();
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let slow_once = move |_: &Request, ()| {
        let earlier = count.fetch_add(1, Ordering::SeqCst);
        if earlier == 0 {
            thread::sleep(Duration::from_millis(600));
        }
        earlier
    };
    pair.server.define("slow", slow_once).unwrap();
    let slow = pair.client.procedure::<(), u32>("slow");
    let answer = slow.on(&pair.to_server).timeout(Duration::from_millis(300)).retry(Retry::new(5)).call(&()).unwrap();
    assert!(answer >= 1, "{answer}");
}

fn finalizing_ends_the_wait_before_an_attempt(net: &Net) {
    let client = net.client();
    let peer = client.lookup(net.dead_address()).unwrap();
    let none = client.procedure::<(), ()>("none");
    let retry = Retry::new(5).backoff(Duration::MAX, Duration::MAX);
    thread::scope(|scope| {
        let calling = scope.spawn(|| none.on(&peer).retry(retry).call(&()));
        let waiting = scope.spawn(|| peer.wait_ready(Duration::MAX));
        thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        client.finalize().unwrap();
        let error = calling.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Finalized { .. } | Error::Unreachable { .. }), "{error}");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Finalized { .. } | Error::Unreachable { .. }), "{error}");
        assert!(begin.elapsed() < LONG, "{:?}", begin.elapsed());
    });
}

suite!(
    call_is_repeated_until_the_peer_is_there,
    attempts_are_counted,
    error_that_a_retry_does_not_mend_ends_the_call,
    attempt_that_times_out_is_repeated,
    finalizing_ends_the_wait_before_an_attempt,
);
