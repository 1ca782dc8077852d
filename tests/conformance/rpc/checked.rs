//! Types are compared once for each connection, provider, procedure and registration, and whenever more of a type is seen:
//! never too early, never too late.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use calomel::{Error, MessageSide, Procedure, Request};
use serde::{Deserialize, Serialize};

use crate::assert_error;
use crate::support::{BOUND, Net, Pair, eventually};

/// What clients send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Point {
    x: u32,
    y: u32,
}

/// What servers take that call it by the same name, and mean something else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Swapped {
    y: u32,
    x: i32,
}

const POINT: Point = Point { x: 1, y: 2 };

fn put(pair: &Pair) -> Procedure<Point, u32> {
    pair.client.procedure("put")
}

fn take_points(_: &Request, point: Point) -> u32 {
    point.x + point.y
}

fn take_swapped(_: &Request, point: Swapped) -> u32 {
    point.y + 100
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: calomel::Result<T>, fault: MessageSide) {
    assert_error!(result, Error::TypeMismatch { side, .. } if side == fault);
}

fn after_a_call_of_nothing(net: &Net) {
    let pair = net.pair();
    let put = put(&pair).on(&pair.to_server);
    assert_error!(put.call(&POINT), Error::NoSuchProcedure { .. });
    pair.server.define("put", take_swapped).unwrap();
    assert_refused(put.call(&POINT), MessageSide::Arguments);
    assert_refused(put.call(&POINT), MessageSide::Arguments);
}

/// The first call of the procedure is turned away, as too many are in progress.
fn after_a_call_that_was_busy(net: &Net) {
    let server = net.server_with(|builder| builder.max_requests_per_peer(1));
    let pair = Pair::of(server, net.client());
    let (entered, enters) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    pair.server
        .define("block", move |_: &Request, ()| {
            entered.send(()).unwrap();
            let _ = released.lock().unwrap().recv_timeout(BOUND);
        })
        .unwrap();
    pair.server.define("put", take_swapped).unwrap();
    let blocked = pair.client.procedure::<(), ()>("block").on(&pair.to_server).start(&()).unwrap();
    enters.recv_timeout(BOUND).unwrap();
    let put = put(&pair).on(&pair.to_server);
    assert_error!(put.call(&POINT), Error::Busy { .. });
    release.send(()).unwrap();
    blocked.wait().unwrap();
    assert_refused(put.call(&POINT), MessageSide::Arguments);
}

fn at_a_second_provider(net: &Net) {
    let pair = net.pair();
    pair.server.provider(1).define("put", take_points).unwrap();
    pair.server.provider(2).define("put", take_swapped).unwrap();
    let put = put(&pair);
    for _ in 0..2 {
        assert_eq!(put.on(pair.to_server.provider(1)).call(&POINT).unwrap(), 3);
        assert_refused(put.on(pair.to_server.provider(2)).call(&POINT), MessageSide::Arguments);
    }
}

fn after_another_definition(net: &Net) {
    let pair = net.pair();
    let put = put(&pair).on(&pair.to_server);
    for _ in 0..2 {
        let first = pair.server.define("put", take_points).unwrap();
        assert_eq!(put.call(&POINT).unwrap(), 3);
        assert!(first.remove());
        let second = pair.server.define("put", take_swapped).unwrap();
        assert_refused(put.call(&POINT), MessageSide::Arguments);
        assert!(second.remove());
    }
}

fn after_a_call_that_was_denied(net: &Net) {
    let open = Arc::new(AtomicBool::new(false));
    let is_open = open.clone();
    let pair = Pair::of(net.server_with(|builder| builder.authorize(move |_| is_open.load(Ordering::SeqCst))), net.client());
    pair.server.define("put", take_swapped).unwrap();
    let put = put(&pair).on(&pair.to_server);
    assert_error!(put.call(&POINT), Error::AccessDenied { .. });
    open.store(true, Ordering::SeqCst);
    assert_refused(put.call(&POINT), MessageSide::Arguments);
}

/// The calls end before there is a connection that they could be sent on, or hardly later.
fn after_calls_that_were_given_up(net: &Net) {
    let pair = net.pair();
    pair.server.define("put", take_swapped).unwrap();
    let put = put(&pair).on(&pair.to_server);
    drop(put.start(&POINT).unwrap());
    let cancelled = put.start(&POINT).unwrap();
    cancelled.cancel();
    cancelled.wait().unwrap_err();
    put.clone().timeout(Duration::from_nanos(1)).call(&POINT).unwrap_err();
    assert_refused(put.call(&POINT), MessageSide::Arguments);
}

fn after_a_call_that_was_too_large(net: &Net) {
    let pair = Pair::of(net.server_with(|builder| builder.max_message_size(1000)), net.client());
    let runs = Arc::new(AtomicU32::new(0));
    let ran = runs.clone();
    pair.server
        .define("put", move |_: &Request, _: Vec<Swapped>| {
            ran.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    let put = pair.client.procedure::<Vec<Point>, ()>("put").on(&pair.to_server);
    for _ in 0..2 {
        assert_error!(put.call(&vec![POINT; 10_000]), Error::MessageTooLarge { .. });
        assert_refused(put.call(&vec![POINT; 10]), MessageSide::Arguments);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

/// A one-way call that is refused reaches no handler.
fn one_way_calls(net: &Net) {
    let pair = net.pair();
    let (heard, hears) = mpsc::channel();
    let hear = heard.clone();
    pair.server.provider(1).define("put", move |_: &Request, point: Swapped| hear.send(point.x).unwrap()).unwrap();
    pair.server.provider(2).define("put", move |_: &Request, point: Point| heard.send(point.x as i32 + 10).unwrap()).unwrap();
    let put = pair.client.procedure::<Point, ()>("put");
    for _ in 0..3 {
        put.on(pair.to_server.provider(1)).notify(&POINT).unwrap();
        put.on(pair.to_server.provider(2)).notify(&POINT).unwrap();
    }
    for _ in 0..3 {
        assert_eq!(hears.recv_timeout(BOUND).unwrap(), 11);
    }
    assert_refused(put.on(pair.to_server.provider(1)).call(&POINT), MessageSide::Arguments);
    assert!(hears.try_recv().is_err());
}

fn results_of_providers_and_definitions(net: &Net) {
    let pair = net.pair();
    pair.server.provider(1).define("get", |_: &Request, ()| POINT).unwrap();
    pair.server.provider(2).define("get", |_: &Request, ()| Swapped { y: 1, x: 2 }).unwrap();
    let get = pair.client.procedure::<(), Point>("get");
    for _ in 0..2 {
        assert_eq!(get.on(pair.to_server.provider(1)).call(&()).unwrap(), POINT);
        assert_refused(get.on(pair.to_server.provider(2)).call(&()), MessageSide::Result);
    }
    let get = get.on(&pair.to_server);
    for _ in 0..2 {
        let first = pair.server.define("get", |_: &Request, ()| POINT).unwrap();
        assert_eq!(get.call(&()).unwrap(), POINT);
        first.remove();
        let second = pair.server.define("get", |_: &Request, ()| Swapped { y: 1, x: 2 }).unwrap();
        assert_refused(get.call(&()), MessageSide::Result);
        second.remove();
    }
}

/// Of one caller, and some of one name.
fn several_types_of_one_procedure(net: &Net) {
    let pair = net.pair();
    pair.server.define("put", take_points).unwrap();
    pair.server.define("get", |_: &Request, ()| POINT).unwrap();
    fn send<A: Serialize, R: serde::de::DeserializeOwned>(pair: &Pair, name: &str, value: A) -> calomel::Result<R> {
        pair.client.procedure::<A, R>(name).on(&pair.to_server).call(&value)
    }
    for _ in 0..2 {
        assert_eq!(send::<_, u32>(&pair, "put", POINT).unwrap(), 3);
        assert_refused(send::<_, u32>(&pair, "put", Swapped { y: 1, x: 2 }), MessageSide::Arguments);
        assert_refused(send::<_, i32>(&pair, "put", POINT), MessageSide::Result);
        {
            #[derive(Debug, Serialize, Deserialize)]
            struct Local {
                x: u32,
                y: u32,
            }
            assert_eq!(send::<_, u32>(&pair, "put", Local { x: 1, y: 2 }).unwrap(), 3);
            assert_eq!(send::<_, Local>(&pair, "get", ()).unwrap().y, 2);
        }
        {
            #[derive(Debug, Serialize, Deserialize)]
            struct Local {
                y: u32,
                x: i32,
            }
            assert_refused(send::<_, u32>(&pair, "put", Local { y: 1, x: 2 }), MessageSide::Arguments);
            assert_refused(send::<_, Local>(&pair, "get", ()), MessageSide::Result);
        }
    }
}

fn after_a_restart(net: &Net) {
    let client = net.client();
    let first = net.server();
    let to_server = client.lookup(first.address()).unwrap();
    first.define("put", take_points).unwrap();
    let put = client.procedure::<Point, u32>("put").on(&to_server);
    assert_eq!(put.call(&POINT).unwrap(), 3);
    first.finalize().unwrap();
    eventually("the end is noticed", || !to_server.is_connected());
    let second = net.keep(net.builder().listen(first.address()).build().unwrap());
    second.define("put", take_swapped).unwrap();
    assert_refused(put.call(&POINT), MessageSide::Arguments);
    second.provider(1).define("put", take_points).unwrap();
    assert_eq!(client.procedure::<Point, u32>("put").on(to_server.provider(1)).call(&POINT).unwrap(), 3);
}

macro_rules! wide {
    ($($variant:ident)*) => {
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        enum Wide {
            $($variant(u32),)*
            Text(String),
            Nested { inside: Vec<Wide>, maybe: Option<Box<Wide>> },
        }

        /// The same, but for the last two.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        enum Narrow {
            $($variant(u32),)*
            Text(String),
        }

        fn each_of_wide() -> Vec<Wide> {
            vec![$(Wide::$variant(7),)*]
        }
    };
}

wide! {
    A0 A1 A2 A3 A4 A5 A6 A7 A8 A9 B0 B1 B2 B3 B4 B5 B6 B7 B8 B9 C0 C1 C2 C3 C4 C5 C6 C7 C8 C9 D0 D1 D2 D3 D4 D5 D6 D7 D8 D9
}

fn many_variants(net: &Net) {
    let pair = net.pair();
    pair.server.define("echo", |_: &Request, value: Wide| value).unwrap();
    pair.server.define("narrow", |_: &Request, _: Narrow| ()).unwrap();
    let echo = pair.client.procedure::<Wide, Wide>("echo").on(&pair.to_server);
    let narrow = pair.client.procedure::<Wide, ()>("narrow").on(&pair.to_server);
    let mut values = each_of_wide();
    values.push(Wide::Text("text".into()));
    let narrow_ones = values.clone();
    for depth in 0..50 {
        let maybe = (depth % 3 == 0).then(|| Box::new(values[depth].clone()));
        values.push(Wide::Nested { inside: vec![values[depth].clone(), values[values.len() - 1].clone()], maybe });
    }
    for value in values.iter().chain(&values) {
        assert_eq!(echo.call(value).unwrap(), *value);
    }
    // What the receiver does not have is refused, and nothing else, whatever came before.
    for _ in 0..2 {
        narrow_ones.iter().for_each(|value| narrow.call(value).unwrap());
        let nested = Wide::Nested { inside: Vec::new(), maybe: None };
        assert_error!(
            narrow.call(&nested),
            Error::Decode { side: MessageSide::Arguments, .. } | Error::TypeMismatch { side: MessageSide::Arguments, .. }
        );
    }
}

/// Each sees other variants first.
fn first_calls_of_many_threads(net: &Net) {
    let pair = net.pair();
    pair.server.provider(1).define("echo", |_: &Request, value: (Wide, Option<u8>)| value).unwrap();
    pair.server.provider(2).define("echo", |_: &Request, value: (Narrow, Option<i8>)| value).unwrap();
    thread::scope(|scope| {
        for n in 0..8 {
            let pair = &pair;
            scope.spawn(move || {
                let all = each_of_wide();
                for i in 0..all.len() {
                    let value = (all[(i + 5 * n) % all.len()].clone(), (i % 2 == 0).then_some(3));
                    let echo = pair.client.procedure::<(Wide, Option<u8>), (Wide, Option<u8>)>("echo");
                    assert_eq!(echo.on(pair.to_server.provider(1)).call(&value).unwrap(), value);
                    if value.1.is_some() {
                        assert_refused(echo.on(pair.to_server.provider(2)).call(&value), MessageSide::Arguments);
                    }
                }
            });
        }
    });
}

suite![
    after_a_call_of_nothing,
    after_a_call_that_was_busy,
    after_a_call_that_was_denied,
    after_calls_that_were_given_up,
    after_a_call_that_was_too_large,
    at_a_second_provider,
    after_another_definition,
    after_a_restart,
    one_way_calls,
    results_of_providers_and_definitions,
    several_types_of_one_procedure,
    many_variants,
    first_calls_of_many_threads,
];
