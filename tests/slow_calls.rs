//! Slow calls and slow handlers are logged, where a threshold is set; at level INFO, so without spans.

mod common;

use std::thread;
use std::time::Duration;

use calomel::{Engine, EngineBuilder, EngineConfig, HandlerResult, Request, Responder};
use tracing::Level;

use common::kept_lines::{self, keep};
use common::{Watchdog, block_on, eventually};

const THRESHOLD: Duration = Duration::from_millis(20);
const SLOW: Duration = Duration::from_millis(25);

fn subscribe() {
    keep("calomel::rpc", Level::INFO);
}

/// The lines about a procedure; `message`: of calls, or of handlers.
fn lines(message: &str, procedure: &str) -> Vec<String> {
    let (message, procedure) = (format!("message={message} "), format!("procedure={procedure:?} "));
    let is_it = |line: &&String| format!("{line} ").contains(&message) && format!("{line} ").contains(&procedure);
    kept_lines::lines().iter().filter(is_it).cloned().collect()
}

#[track_caller]
fn logged(message: &str, procedure: &str, count: usize) -> Vec<String> {
    eventually(&format!("{count} lines `{message}` about `{procedure}`"), || lines(message, procedure).len() >= count);
    let found = lines(message, procedure);
    assert_eq!(found.len(), count, "{found:?}");
    found
}

fn builder(statistics: bool) -> EngineBuilder {
    Engine::builder().same_host_upgrade(false).statistics(statistics)
}

/// A handler of each kind, whose names begin with `prefix`.
fn define(server: &Engine, prefix: &str) {
    let name = |kind: &str| format!("{prefix} {kind}");
    server.define(&name("closure"), |_: &Request, time: Duration| thread::sleep(time)).unwrap();
    let fails = |_: &Request, time: Duration| -> HandlerResult<()> {
        thread::sleep(time);
        Err("too late".into())
    };
    server.define_try(&name("failing"), fails).unwrap();
    server.define_async(&name("future"), |_: Request, time: Duration| async move { thread::sleep(time) }).unwrap();
    let later = |responder: Responder<()>, time: Duration| {
        drop(thread::spawn(move || {
            thread::sleep(time);
            drop(responder.respond(&()));
        }));
    };
    server.define_deferred(&name("deferred"), later).unwrap();
}

#[test]
fn slow_calls_and_handlers_are_logged() {
    let _watchdog = Watchdog::start("slow_calls_and_handlers_are_logged");
    subscribe();
    for (statistics, prefix) in [(true, "measured"), (false, "unmeasured")] {
        let server = builder(statistics).listen("tcp://127.0.0.1:0").slow_calls(THRESHOLD).build().unwrap();
        let client = builder(statistics).slow_calls(THRESHOLD).build().unwrap();
        assert_eq!(client.config().slow_calls, Some(THRESHOLD));
        define(&server, prefix);
        let peer = client.lookup(server.address()).unwrap();
        for kind in ["closure", "failing", "future", "deferred"] {
            let name = format!("{prefix} {kind}");
            let call = client.procedure::<Duration, ()>(&name).on(&peer);
            let fails = kind == "failing";
            assert_eq!(call.call(&SLOW).is_err(), fails);
            assert_eq!(call.start(&SLOW).unwrap().wait().is_err(), fails);
            assert_eq!(block_on(call.start(&SLOW).unwrap()).is_err(), fails);
            for line in [logged("slow call", &name, 3), logged("slow handler", &name, 3)].concat() {
                assert!(line.starts_with("INFO ") && line.contains("provider=0") && line.contains("threshold=20ms"), "{line}");
                assert!(line.contains(" took=") && line.contains(" peer=") && line.contains("omitted=0"), "{line}");
                assert_eq!(line.contains("too late"), fails, "{line}");
            }
            assert!(lines("slow call", &name)[0].contains(&format!("peer={}", server.address())));
            // One-way, by an engine that logs nothing itself: on a busy machine sending may be slow, too.
            let other = builder(statistics).build().unwrap();
            let call = other.procedure::<Duration, ()>(&name).on(other.lookup(server.address()).unwrap());
            call.notify(&SLOW).unwrap();
            block_on(call.notify_async(&SLOW)).unwrap();
            logged("slow handler", &name, 5);
            logged("slow call", &name, 3);
        }
    }
    assert_eq!(kept_lines::lines().iter().find(|line| line.contains("a span")), None);
}

/// What counts is when the response arrived.
#[test]
fn result_that_is_taken_late_is_no_slow_call() {
    let _watchdog = Watchdog::start("result_that_is_taken_late_is_no_slow_call");
    subscribe();
    let server = builder(true).listen("tcp://127.0.0.1:0").build().unwrap();
    define(&server, "late");
    for statistics in [true, false] {
        // Above what a busy machine takes.
        let client = builder(statistics).slow_calls(Duration::from_secs(1)).build().unwrap();
        let call = client.procedure::<Duration, ()>("late closure").on(client.lookup(server.address()).unwrap());
        let pending = call.start(&Duration::ZERO).unwrap();
        eventually("it is ready", || pending.is_ready());
        thread::sleep(Duration::from_millis(1100));
        pending.wait().unwrap();
        assert_eq!(lines("slow call", "late closure"), Vec::<String>::new());
    }
}

/// A one-way call that has to wait until it can be sent.
#[test]
fn one_way_call_that_waits_for_credit_is_slow() {
    let _watchdog = Watchdog::start("one_way_call_that_waits_for_credit_is_slow");
    subscribe();
    let server = builder(true).listen("tcp://127.0.0.1:0").handler_threads(1).max_requests(64).build().unwrap();
    server.define("takes its time", |_: &Request, ()| thread::sleep(Duration::from_millis(10))).unwrap();
    let client = builder(true).slow_calls(THRESHOLD).build().unwrap();
    let call = client.procedure::<(), ()>("takes its time").on(client.lookup(server.address()).unwrap());
    for _ in 0..100 {
        call.notify(&()).unwrap();
    }
    // Those for which there was credit are not among them.
    let lines = lines("slow call", "takes its time");
    assert!(!lines.is_empty() && lines.len() < 100 && lines.iter().all(|line| !line.contains("µs")), "{lines:?}");
}

/// Neither those below the threshold, nor any without one; each engine has its own.
#[test]
fn others_are_not_logged() {
    let _watchdog = Watchdog::start("others_are_not_logged");
    subscribe();
    let server = builder(true).listen("tcp://127.0.0.1:0").slow_calls(Duration::from_secs(50)).build().unwrap();
    define(&server, "others");
    let client = builder(true).build().unwrap();
    let slow = client.procedure::<Duration, ()>("others closure").on(client.lookup(server.address()).unwrap());
    slow.call(&SLOW).unwrap();
    slow.notify(&SLOW).unwrap();
    assert_eq!(EngineConfig::default().slow_calls, None);
    server.finalize().unwrap();
    let none = Vec::<String>::new();
    assert_eq!((lines("slow call", "others closure"), lines("slow handler", "others closure")), (none.clone(), none));
}

#[test]
fn slow_calls_do_not_flood_the_log() {
    let _watchdog = Watchdog::start("slow_calls_do_not_flood_the_log");
    subscribe();
    let server = builder(true).listen("tcp://127.0.0.1:0").slow_calls(Duration::ZERO).build().unwrap();
    server.define("flood", |_: &Request, ()| ()).unwrap();
    let client = builder(true).build().unwrap();
    let flood = client.procedure::<(), ()>("flood").on(client.lookup(server.address()).unwrap());
    for _ in 0..1000 {
        flood.call(&()).unwrap();
    }
    // More only if this takes a minute.
    logged("slow handler", "flood", 100);
}
