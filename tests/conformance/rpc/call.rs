//! Blocking calls, one-way calls, and calls with borrowed arguments.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use calomel::{Error, Procedure, Request};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, eventually, rounds};

fn call_returns_the_answer(net: &Net) {
    let pair = net.pair();
    pair.server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    let sum = pair.client.procedure::<(i32, i32), i32>("sum");
    let answer: i32 = sum.on(&pair.to_server).call(&(42, 63)).unwrap();
    assert_eq!(answer, 105);
    for i in 0..100 {
        assert_eq!(sum.on(&pair.to_server).call(&(i, -2 * i)).unwrap(), -i);
    }
}

fn a_procedure_is_shared_between_threads_and_used_with_any_endpoint(net: &Net) {
    fn thread_safe<T: Clone + Send + Sync + 'static>(_: &T) {}
    let client = net.client();
    let servers: Vec<_> = (0..3u32)
        .map(|i| {
            let server = net.server();
            server.define("which", move |_: &Request, plus: u32| i + plus).unwrap();
            client.lookup(server.address()).unwrap()
        })
        .collect();
    let which: Procedure<u32, u32> = client.procedure("which");
    thread_safe(&which);
    assert_eq!(which.name(), "which");
    thread::scope(|s| {
        for t in 0..4u32 {
            let (which, servers) = (which.clone(), &servers);
            s.spawn(move || {
                for i in 0..3 {
                    assert_eq!(which.on(&servers[i as usize]).call(&(10 * t)).unwrap(), i + 10 * t);
                    assert_eq!(which.on(servers[i as usize].clone()).call(&(10 * t)).unwrap(), i + 10 * t);
                }
            });
        }
    });
}

fn function_serves_as_a_handler(net: &Net) {
    fn half(_: &Request, n: u64) -> Option<u64> {
        n.is_multiple_of(2).then_some(n / 2)
    }
    let pair = net.pair();
    pair.server.define("half", half).unwrap();
    let half = pair.client.procedure::<u64, Option<u64>>("half");
    assert_eq!(half.on(&pair.to_server).call(&10).unwrap(), Some(5));
    assert_eq!(half.on(&pair.to_server).call(&11).unwrap(), None);
}

fn both_ends_of_a_connection_serve(net: &Net) {
    let pair = net.pair();
    pair.client.define("name", |_: &Request, ()| String::from("the client")).unwrap();
    pair.server
        .define("name of the caller", |request: &Request, ()| {
            let name = request.engine().procedure::<(), String>("name");
            name.on(request.endpoint()).call(&()).map_err(|e| e.to_string())
        })
        .unwrap();
    let name = pair.client.procedure::<(), Result<String, String>>("name of the caller");
    assert_eq!(name.on(&pair.to_server).call(&()).unwrap().unwrap(), "the client");
}

fn two_servers_call_each_other(net: &Net) {
    let (a, b) = (net.server(), net.server());
    for (engine, name) in [(&a, "a"), (&b, "b")] {
        engine.define("name", move |_: &Request, ()| name.to_owned()).unwrap();
    }
    for (caller, callee, name) in [(&a, &b, "b"), (&b, &a, "a"), (&a, &a, "a")] {
        let endpoint = caller.lookup(callee.address()).unwrap();
        assert_eq!(caller.procedure::<(), String>("name").on(&endpoint).call(&()).unwrap(), name);
    }
}

fn one_way_call_arrives_and_is_not_answered(net: &Net) {
    let pair = net.pair();
    let (heard, hears) = mpsc::channel();
    pair.server.define("note", move |_: &Request, text: String| heard.send(text).unwrap()).unwrap();
    let note = pair.client.procedure::<String, ()>("note");
    for i in 0..100 {
        note.on(&pair.to_server).notify(&format!("note {i}")).unwrap();
    }
    let mut texts: Vec<String> = (0..100).map(|_| hears.recv_timeout(BOUND).unwrap()).collect();
    texts.sort_by_key(|text| text[5..].parse::<u32>().unwrap());
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(*text, format!("note {i}"));
    }
}

fn one_way_call_reaches_every_kind_of_handler(net: &Net) {
    let pair = net.pair();
    let count = Arc::new(AtomicU32::new(0));
    let (a, b, c) = (count.clone(), count.clone(), count.clone());
    pair.server.define("blocking", move |_: &Request, n: u32| a.fetch_add(n, Ordering::SeqCst)).unwrap();
    pair.server
        .define_async("async", move |_: Request, n: u32| {
            let count = b.clone();
            async move { count.fetch_add(n, Ordering::SeqCst) }
        })
        .unwrap();
    pair.server
        .define_deferred("deferred", move |responder: calomel::Responder<u32>, n: u32| {
            c.fetch_add(n, Ordering::SeqCst);
            // The caller does not wait for this answer, so it is discarded without an error.
            responder.respond(&n).unwrap();
        })
        .unwrap();
    for (name, n) in [("blocking", 1), ("async", 10), ("deferred", 100)] {
        pair.client.procedure::<u32, u32>(name).on(&pair.to_server).notify(&n).unwrap();
    }
    eventually("three notifications arrived", || count.load(Ordering::SeqCst) == 111);
}

fn failing_one_way_call_leaves_the_server_usable(net: &Net) {
    let pair = net.pair();
    pair.server.define("there", |_: &Request, ()| 1u8).unwrap();
    pair.server.define("panics", |_: &Request, ()| -> u8 { panic!("on purpose") }).unwrap();
    for name in ["missing", "panics", "there"] {
        pair.client.procedure::<(), u8>(name).on(&pair.to_server).notify(&()).unwrap();
        pair.client.procedure::<u64, u8>(name).on(&pair.to_server).notify(&7).unwrap();
    }
    assert_eq!(pair.client.procedure::<(), u8>("there").on(&pair.to_server).call(&()).unwrap(), 1);
}

fn handler_with_borrowed_arguments_answers(net: &Net) {
    let pair = net.pair();
    pair.server.define_borrowed::<str, _, _>("letters", |_: &Request, s: &str| s.chars().count()).unwrap();
    pair.server
        .define_borrowed::<[u8], _, _>("sum", |_: &Request, bytes: &[u8]| bytes.iter().map(|&b| u64::from(b)).sum::<u64>())
        .unwrap();
    let letters = pair.client.procedure::<String, usize>("letters");
    let sum = pair.client.procedure::<Vec<u8>, u64>("sum");
    for text in ["", "a", "Käse", &"ß".repeat(100_000)] {
        assert_eq!(letters.on(&pair.to_server).call(&text.to_owned()).unwrap(), text.chars().count());
    }
    for len in [0, 1, 1000, 100_000] {
        assert_eq!(sum.on(&pair.to_server).call(&vec![3; len]).unwrap(), 3 * len as u64);
    }
}

fn call_of_an_unknown_procedure_fails_with_its_name(net: &Net) {
    let pair = net.pair();
    let nothing = pair.client.procedure::<u32, u32>("nothing-like-it");
    let error = nothing.on(&pair.to_server).call(&1).unwrap_err();
    assert!(error.to_string().contains("nothing-like-it"), "{error}");
    assert!(!error.is_timeout() && !error.is_disconnected());
    assert_error!(Err::<(), _>(error), Error::NoSuchProcedure { name, .. } if name == "nothing-like-it");
    // The procedure may be defined later.
    pair.server.define("nothing-like-it", |_: &Request, n: u32| n + 1).unwrap();
    assert_eq!(nothing.on(&pair.to_server).call(&1).unwrap(), 2);
}

fn procedure_names_of_any_characters_are_distinct(net: &Net) {
    let pair = net.pair();
    let names = ["a", "b", "ab", "a b", "ä", "sum::<T>", "", &"long".repeat(50)];
    for (i, name) in names.iter().enumerate() {
        pair.server.define(name, move |_: &Request, ()| i).unwrap();
    }
    for (i, name) in names.iter().enumerate() {
        assert_eq!(pair.client.procedure::<(), usize>(name).on(&pair.to_server).call(&()).unwrap(), i, "{name:?}");
    }
}

fn one_way_calls_before_finalize_arrive(net: &Net) {
    // A one-way call has no answer, so a program can wait for it only with `finalize`.
    for len in [0, 100, 20_000, 3_000_000] {
        let pair = net.pair();
        let (heard, hears) = mpsc::channel();
        pair.server.define("last words", move |_: &Request, text: String| heard.send(text.len()).unwrap()).unwrap();
        let words = pair.client.procedure::<String, ()>("last words");
        for _ in 0..3 {
            words.on(&pair.to_server).notify(&"x".repeat(len)).unwrap();
        }
        pair.client.finalize().unwrap();
        for _ in 0..3 {
            assert_eq!(hears.recv_timeout(BOUND), Ok(len), "of {len} bytes");
        }
    }
}

fn overload_of_one_way_calls_loses_none(net: &Net) {
    let count = rounds(40_000);
    let pair = net.pair();
    let (sum, gate) = (Arc::new(AtomicU32::new(0)), Gate::default());
    let (here, door) = (sum.clone(), gate.clone());
    pair.server
        .define("drop", move |_: &Request, n: u32| {
            door.wait();
            here.fetch_add(n, Ordering::SeqCst)
        })
        .unwrap();
    let drop = pair.client.procedure::<u32, u32>("drop");
    let sent = thread::scope(|s| {
        let sender = s.spawn(|| {
            // More calls than are accepted while none is handled: `notify` blocks, or fails with `Busy`.
            let results = (0..count).map(|_| drop.on(&pair.to_server).notify(&1));
            results.filter(|result| !matches!(result, Err(Error::Busy { .. }))).map(Result::unwrap).count() as u32
        });
        thread::sleep(Duration::from_millis(100));
        gate.open();
        sender.join().unwrap()
    });
    eventually("what was sent has arrived", || sum.load(Ordering::SeqCst) == sent);
}

suite![
    one_way_calls_before_finalize_arrive,
    overload_of_one_way_calls_loses_none,
    call_returns_the_answer,
    a_procedure_is_shared_between_threads_and_used_with_any_endpoint,
    function_serves_as_a_handler,
    both_ends_of_a_connection_serve,
    two_servers_call_each_other,
    one_way_call_arrives_and_is_not_answered,
    one_way_call_reaches_every_kind_of_handler,
    failing_one_way_call_leaves_the_server_usable,
    handler_with_borrowed_arguments_answers,
    call_of_an_unknown_procedure_fails_with_its_name,
    procedure_names_of_any_characters_are_distinct,
];
