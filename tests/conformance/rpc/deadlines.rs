//! Deadlines: set by default, enforced, and known to the server.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Request, Responder};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, Pair};

/// Defines `wait`, which waits until its call is cancelled or timed out, sends the time that this took, and answers long after.
fn define_wait(server: &Engine) -> mpsc::Receiver<Duration> {
    let (ended, ends) = mpsc::channel();
    server
        .define("wait", move |request: &Request, ()| {
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            let _ = ended.send(begin.elapsed());
            thread::sleep(Duration::from_millis(100));
        })
        .unwrap();
    ends
}

fn call_beyond_its_timeout_fails_with_timeout(net: &Net) {
    let pair = net.pair();
    let ends = define_wait(&pair.server);
    let wait = pair.client.procedure::<(), ()>("wait");
    let mut begun = 0;
    for millis in [5, 50, 200, 400] {
        let timeout = Duration::from_millis(millis);
        let begin = Instant::now();
        let error = wait.on(&pair.to_server).timeout(timeout).call(&()).unwrap_err();
        let took = begin.elapsed();
        assert!(took >= timeout && took < timeout + Duration::from_secs(3), "{took:?}");
        assert!(error.is_timeout() && error.is_retryable() && !error.is_disconnected());
        let text = error.to_string();
        assert!(text.contains("wait") && text.contains(&pair.server.address().to_string()), "{text}");
        assert_error!(Err::<(), _>(error), Error::Timeout { after, .. } if after == timeout);
        // A handler that began before the call ended is cancelled with it, long before the handler's own time limit.
        if let Ok(took) = ends.recv_timeout(Duration::from_secs(1)) {
            assert!(took < BOUND / 2);
            begun += 1;
        }
    }
    assert!(begun > 0, "no handler ever began");
}

fn started_call_beyond_its_timeout_fails_with_timeout(net: &Net) {
    let pair = net.pair();
    define_wait(&pair.server);
    let wait = pair.client.procedure::<(), ()>("wait");
    let begin = Instant::now();
    let pending = wait.on(&pair.to_server).timeout(Duration::from_millis(50)).start(&()).unwrap();
    assert_error!(pending.wait(), Error::Timeout { .. });
    let pending = wait.on(&pair.to_server).timeout(Duration::from_millis(50)).start(&()).unwrap();
    assert_error!(crate::support::block_on(pending), Error::Timeout { .. });
    assert!(begin.elapsed() < Duration::from_secs(5));
}

fn timeout_of_zero_fails_with_timeout(net: &Net) {
    let pair = net.pair();
    define_wait(&pair.server);
    let wait = pair.client.procedure::<(), ()>("wait");
    assert_error!(wait.on(&pair.to_server).timeout(Duration::ZERO).call(&()), Error::Timeout { .. });
}

fn a_long_timeout_does_not_overflow(net: &Net) {
    let pair = net.pair();
    pair.server.define("quick", |_: &Request, n: u8| n).unwrap();
    let quick = pair.client.procedure::<u8, u8>("quick");
    for timeout in [Duration::from_secs(1 << 40), Duration::MAX] {
        assert_eq!(quick.on(&pair.to_server).timeout(timeout).call(&3).unwrap(), 3);
    }
}

fn call_without_a_timeout_has_the_engines_default(net: &Net) {
    let (server, client) = (net.server(), net.client_with(|b| b.default_timeout(Duration::from_millis(80))));
    let pair = crate::support::Pair::of(server, client);
    define_wait(&pair.server);
    let wait = pair.client.procedure::<(), ()>("wait");
    let begin = Instant::now();
    assert_error!(wait.on(&pair.to_server).call(&()), Error::Timeout { .. });
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(80) && took < Duration::from_secs(3), "{took:?}");
}

fn request_knows_the_calls_deadline(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("remaining", |request: &Request, ()| {
            let first = request.remaining();
            thread::sleep(Duration::from_millis(20));
            let second = request.remaining();
            (request.deadline().is_some_and(|at| at > Instant::now()), first, second)
        })
        .unwrap();
    let remaining = pair.client.procedure::<(), (bool, Duration, Duration)>("remaining");
    let timeout = Duration::from_secs(10);
    let (ahead, first, second) = remaining.on(&pair.to_server).timeout(timeout).call(&()).unwrap();
    assert!(ahead && first <= timeout && first > timeout / 2, "{first:?}");
    assert!(second <= first - Duration::from_millis(20), "{first:?} {second:?}");
    // A call without a timeout of its own has the default one.
    let (_, first, _) = remaining.on(&pair.to_server).call(&()).unwrap();
    assert!(first > Duration::ZERO && first <= Duration::from_secs(30));
}

fn request_of_a_timed_out_call_has_no_time_left(net: &Net) {
    let pair = net.pair();
    let (sender, receiver) = mpsc::channel();
    pair.server
        .define("late", move |request: &Request, ()| {
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            sender.send((request.is_cancelled(), request.remaining())).unwrap();
            thread::sleep(Duration::from_millis(100));
        })
        .unwrap();
    let late = pair.client.procedure::<(), ()>("late");
    late.on(&pair.to_server).timeout(Duration::from_millis(400)).call(&()).unwrap_err();
    let (cancelled, remaining) = receiver.recv_timeout(BOUND).unwrap();
    assert!(cancelled);
    assert!(remaining < Duration::from_millis(400), "{remaining:?}");
}

fn late_answer_is_not_taken_for_the_next_calls(net: &Net) {
    // The answer to a call that timed out must not be taken for that of the next one.
    let pair = net.pair();
    let (hold, held) = mpsc::channel();
    pair.server.define_deferred("slow", move |r: Responder<u32>, n: u32| hold.send((r, n)).unwrap()).unwrap();
    let slow = pair.client.procedure::<u32, u32>("slow");
    for round in 0..20 {
        let timed = slow.on(&pair.to_server).timeout(Duration::from_millis(5)).call(&round);
        assert_error!(timed, Error::Timeout { .. });
        let next = slow.on(&pair.to_server).start(&(100 + round)).unwrap();
        // A call that timed out may have been dropped before it was sent; the next one may not.
        loop {
            let (responder, n) = held.recv_timeout(BOUND).unwrap();
            // A response to a call that has ended may succeed or fail, but must return.
            let _ = responder.respond(&n);
            if n == 100 + round {
                break;
            }
        }
        assert_eq!(next.wait().unwrap(), 100 + round);
    }
}

fn nested_call_times_out_before_the_outer_call(net: &Net) {
    // The inner call has a deadline of its own: a server whose inner server hangs still answers.
    let (inner, outer, client) = (net.server(), net.server(), net.client());
    define_wait(&inner);
    let to_inner = outer.lookup(inner.address()).unwrap();
    outer
        .define("outer", move |request: &Request, ()| {
            let wait = request.engine().procedure::<(), ()>("wait");
            wait.on(&to_inner).timeout(Duration::from_millis(50)).call(&()).unwrap_err().is_timeout()
        })
        .unwrap();
    let to_outer = client.lookup(outer.address()).unwrap();
    assert!(client.procedure::<(), bool>("outer").on(&to_outer).call(&()).unwrap());
}

fn timed_out_call_returns_while_its_handler_blocks(net: &Net) {
    let pair = net.pair_with(|b| b.finalize_timeout(Duration::from_millis(500)));
    let gate = Gate::default();
    let door = gate.clone();
    pair.server.define("deaf", move |_: &Request, ()| door.wait()).unwrap();
    let deaf = pair.client.procedure::<(), ()>("deaf");
    let begin = Instant::now();
    for _ in 0..5 {
        assert_error!(deaf.on(&pair.to_server).timeout(Duration::from_millis(20)).call(&()), Error::Timeout { .. });
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
    gate.open();
    deaf.on(&pair.to_server).call(&()).unwrap();
}

/// Arguments are sent from where they lie. When a call ends before all of them are sent, its memory is the caller's again at once:
/// a handler gets none of what is written there then, and the connection stays.
fn call_that_times_out_while_its_arguments_are_sent_leaves_the_connection(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_borrowed::<[u8], _, _>("first", |_: &Request, bytes: &[u8]| {
            assert!(bytes == vec![bytes[0]; bytes.len()]);
            bytes[0]
        })
        .unwrap();
    let first = pair.client.procedure::<[u8], u8>("first").on(&pair.to_server);
    assert_eq!(first.call(&[1]).unwrap(), 1);
    let mut bytes = vec![0; 16 << 20];
    let mut timeout = Duration::from_micros(50);
    for round in 0.. {
        bytes.fill(round);
        match first.clone().timeout(timeout).call(&bytes) {
            Ok(found) => assert_eq!(found, round),
            Err(error) => assert!(error.is_timeout(), "{error:?}"),
        }
        assert_eq!(first.call(&[round]).unwrap(), round);
        if timeout > Duration::from_secs(1) {
            break;
        }
        timeout = timeout * 3 / 2;
    }
    for engine in [&pair.client, &pair.server] {
        assert_eq!(engine.stats().transports.iter().map(|transport| transport.ended).sum::<u64>(), 0);
    }
}

/// Takes long to be encoded.
struct Slow;

impl serde::Serialize for Slow {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        thread::sleep(Duration::from_millis(2300));
        serializer.serialize_u8(7)
    }
}

fn slow_encoding_is_not_taken_for_a_silent_peer(net: &Net) {
    // Others take seconds to connect where the device is emulated.
    if !["loop", "shm", "tcp"].contains(&net.scheme()) {
        return;
    }
    let patience = Duration::from_secs(2);
    let pair = Pair::of(net.server(), net.client_with(|b| b.connect_timeout(patience).peer_timeout(patience)));
    pair.server.define("echo", |_: &Request, n: u8| n).unwrap();
    let echo = pair.client.procedure::<Slow, u8>("echo").on(&pair.to_server).timeout(patience);
    // This call makes the connection.
    assert_eq!(echo.call(&Slow).unwrap(), 7);
    assert_eq!(echo.start(&Slow).unwrap().wait().unwrap(), 7);
}

suite![
    slow_encoding_is_not_taken_for_a_silent_peer,
    call_that_times_out_while_its_arguments_are_sent_leaves_the_connection,
    call_beyond_its_timeout_fails_with_timeout,
    started_call_beyond_its_timeout_fails_with_timeout,
    timeout_of_zero_fails_with_timeout,
    a_long_timeout_does_not_overflow,
    call_without_a_timeout_has_the_engines_default,
    request_knows_the_calls_deadline,
    request_of_a_timed_out_call_has_no_time_left,
    late_answer_is_not_taken_for_the_next_calls,
    nested_call_times_out_before_the_outer_call,
    timed_out_call_returns_while_its_handler_blocks,
];
