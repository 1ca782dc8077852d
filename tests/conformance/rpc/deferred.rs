//! Answers that are sent later, by another thread, or not at all.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Error, Request, Responder};

use crate::assert_error;
use crate::support::{BOUND, Net, end, eventually};

fn answer_from_another_thread_arrives(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_deferred("later", |reply: Responder<String>, name: String| {
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(10));
                reply.respond(&format!("hello {name}")).unwrap();
            });
        })
        .unwrap();
    let later = pair.client.procedure::<String, String>("later");
    assert_eq!(later.on(&pair.to_server).call(&"you".into()).unwrap(), "hello you");
}

fn answer_inside_the_handler_arrives(net: &Net) {
    let pair = net.pair();
    pair.server.define_deferred("now", |reply: Responder<u8>, n: u8| reply.respond(&(n + 1)).unwrap()).unwrap();
    let now = pair.client.procedure::<u8, u8>("now");
    for n in 0..100 {
        assert_eq!(now.on(&pair.to_server).call(&n).unwrap(), n + 1);
    }
}

fn dropped_responder_fails_its_call_with_no_response(net: &Net) {
    let pair = net.pair();
    pair.server.define_deferred("forgets", |_: Responder<u8>, ()| {}).unwrap();
    let (hold, held) = mpsc::channel();
    pair.server.define_deferred("forgets later", move |r: Responder<u8>, ()| hold.send(r).unwrap()).unwrap();
    let begin = Instant::now();
    let forgets = pair.client.procedure::<(), u8>("forgets");
    assert_error!(forgets.on(&pair.to_server).call(&()), Error::NoResponse { name, .. } if name == "forgets");
    let later = pair.client.procedure::<(), u8>("forgets later");
    let pending = later.on(&pair.to_server).start(&()).unwrap();
    drop(held.recv_timeout(BOUND).unwrap());
    assert_error!(pending.wait(), Error::NoResponse { .. });
    assert!(begin.elapsed() < Duration::from_secs(5));
}

fn failed_call_returns_the_reason(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_deferred("fails", |reply: Responder<u8>, why: String| {
            reply.fail(why);
        })
        .unwrap();
    let fails = pair.client.procedure::<String, u8>("fails");
    for why in ["", "no such file", &"long ".repeat(200)] {
        let error = fails.on(&pair.to_server).call(&why.to_owned()).unwrap_err();
        assert!(error.to_string().contains(why));
        assert_error!(Err::<(), _>(error), Error::Failed { name, message, .. } if name == "fails" && message == why);
    }
    // Very long messages may be cut.
    let why = "ß".repeat(2_000_000);
    let result = fails.on(&pair.to_server).call(&why);
    assert_error!(result, Error::Failed { message, .. } if message.starts_with(&why[..1000]));
}

fn responder_knows_its_request(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_deferred("describe", |reply: Responder<(String, bool)>, ()| {
            let request: &Request = reply.request();
            let answer = (request.procedure().to_string(), request.remaining() > Duration::ZERO);
            reply.respond(&answer).unwrap();
        })
        .unwrap();
    let describe = pair.client.procedure::<(), (String, bool)>("describe");
    assert_eq!(describe.on(&pair.to_server).call(&()).unwrap(), ("describe".into(), true));
}

fn responder_knows_that_its_call_has_ended(net: &Net) {
    let pair = net.pair();
    let (hold, held) = mpsc::channel();
    pair.server.define_deferred("kept", move |r: Responder<u8>, ()| hold.send(r).unwrap()).unwrap();
    let kept = pair.client.procedure::<(), u8>("kept");
    // By a timeout,
    assert_error!(kept.on(&pair.to_server).timeout(Duration::from_millis(400)).call(&()), Error::Timeout { .. });
    let responder = held.recv_timeout(BOUND).unwrap();
    eventually("the timeout reached the server", || responder.request().is_cancelled());
    let _ = responder.respond(&1);
    // by cancelling,
    let pending = kept.on(&pair.to_server).start(&()).unwrap();
    let responder = held.recv_timeout(BOUND).unwrap();
    assert!(!responder.request().is_cancelled());
    pending.cancel();
    eventually("the cancellation reached the server", || responder.request().is_cancelled());
    let _ = responder.respond(&1);
    // by dropping the call,
    let pending = kept.on(&pair.to_server).start(&()).unwrap();
    let responder = held.recv_timeout(BOUND).unwrap();
    drop(pending);
    eventually("giving up reached the server", || responder.request().is_cancelled());
    // and by the end of the caller's engine.
    let _pending = kept.on(&pair.to_server).start(&()).unwrap();
    let responder = held.recv_timeout(BOUND).unwrap();
    pair.client.finalize().unwrap();
    eventually("the caller's end reached the server", || responder.request().is_cancelled());
    let _ = responder.respond(&1);
}

fn answers_in_any_order_reach_their_calls(net: &Net) {
    let pair = net.pair();
    let kept = std::sync::Arc::new(Mutex::new(Vec::new()));
    let keep = kept.clone();
    pair.server.define_deferred("shuffled", move |reply: Responder<u32>, n: u32| keep.lock().unwrap().push((reply, n))).unwrap();
    let shuffled = pair.client.procedure::<u32, u32>("shuffled");
    let pendings: Vec<_> = (0..200).map(|n| shuffled.on(&pair.to_server).start(&n).unwrap()).collect();
    eventually("all calls arrived", || kept.lock().unwrap().len() == 200);
    let mut random = crate::support::Random(7);
    let mut calls = std::mem::take(&mut *kept.lock().unwrap());
    while !calls.is_empty() {
        let (reply, n) = calls.swap_remove(random.below(calls.len()));
        reply.respond(&(n * 3)).unwrap();
    }
    for (n, pending) in pendings.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), n as u32 * 3);
    }
}

fn responders_of_a_finalized_engine_are_harmless(net: &Net) {
    let pair = net.pair_with(|b| b.finalize_timeout(Duration::from_millis(200)));
    let (hold, held) = mpsc::channel();
    pair.server.define_deferred("kept", move |r: Responder<u8>, ()| hold.send(r).unwrap()).unwrap();
    let kept = pair.client.procedure::<(), u8>("kept");
    let pendings: Vec<_> = (0..3).map(|_| kept.on(&pair.to_server).start(&()).unwrap()).collect();
    let mut responders: Vec<_> = (0..3).map(|_| held.recv_timeout(BOUND).unwrap()).collect();
    end(&pair.server);
    assert!(responders.pop().unwrap().respond(&1).is_err());
    responders.pop().unwrap().fail("too late");
    drop(responders);
    for pending in pendings {
        let error = pending.wait().unwrap_err();
        assert!(error.is_disconnected() || matches!(error, Error::NoResponse { .. }), "{error}");
    }
}

suite![
    answer_from_another_thread_arrives,
    answer_inside_the_handler_arrives,
    dropped_responder_fails_its_call_with_no_response,
    failed_call_returns_the_reason,
    responder_knows_its_request,
    responder_knows_that_its_call_has_ended,
    answers_in_any_order_reach_their_calls,
    responders_of_a_finalized_engine_are_harmless,
];
