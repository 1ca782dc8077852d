//! Handlers that panic, types that do not match, values that can't be encoded or decoded: the caller gets the error, and the
//! server stays usable.

use std::fmt::Debug;
use std::task::Poll;
use std::time::Duration;

use calomel::{Error, HandlerResult, MessageSide, Request, Responder};
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::assert_error;
use crate::support::{BOUND, Net, Pair, eventually};

/// Can always be encoded, but is decoded only if it is less than 100.
#[derive(Debug, PartialEq)]
struct Picky(u32);

impl Serialize for Picky {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.0)
    }
}

impl<'de> Deserialize<'de> for Picky {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Picky, D::Error> {
        match u32::deserialize(deserializer)? {
            n @ 0..100 => Ok(Picky(n)),
            n => Err(D::Error::custom(format!("{n} is too much"))),
        }
    }
}

/// Can't be encoded if it is more than 100.
#[derive(Debug, PartialEq, Deserialize)]
struct Shy(u32);

impl Serialize for Shy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 > 100 {
            return Err(S::Error::custom("rather not"));
        }
        serializer.serialize_newtype_struct("Shy", &self.0)
    }
}

/// Panics while it is encoded if it is more than 100.
#[derive(Debug, PartialEq, Deserialize)]
struct Loud(u32);

impl Serialize for Loud {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert!(self.0 <= 100, "too loud");
        serializer.serialize_newtype_struct("Loud", &self.0)
    }
}

/// Waits once, until another thread has woken it.
async fn wait_once() {
    let mut waited = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        std::thread::spawn(move || waker.wake());
        Poll::Pending
    })
    .await;
}

/// A server with the procedure `fine`, which shows that it is usable.
fn pair(net: &Net) -> Pair {
    let pair = net.pair();
    pair.server.define("fine", |_: &Request, n: u8| n).unwrap();
    pair
}

#[track_caller]
fn assert_alive(pair: &Pair) {
    assert_eq!(pair.client.procedure::<u8, u8>("fine").on(&pair.to_server).call(&9).unwrap(), 9);
}

fn handler_that_panics_fails_its_call_with_the_message(net: &Net) {
    let pair = pair(net);
    pair.server.define("literal", |_: &Request, ()| -> u8 { panic!("a literal message") }).unwrap();
    pair.server.define("formatted", |_: &Request, n: u32| -> u8 { panic!("message number {n}") }).unwrap();
    pair.server.define("payload", |_: &Request, ()| -> u8 { std::panic::panic_any(17u8) }).unwrap();
    pair.server.define("index", |_: &Request, n: usize| [1u8, 2][n]).unwrap();
    pair.server.define_deferred("deferred", |_: Responder<u8>, ()| panic!("before answering")).unwrap();
    for _ in 0..20 {
        let literal = pair.client.procedure::<(), u8>("literal").on(&pair.to_server).call(&());
        assert_error!(literal, Error::HandlerPanicked { name, message, .. } if name == "literal" && message == "a literal message");
        let formatted = pair.client.procedure::<u32, u8>("formatted").on(&pair.to_server).call(&7);
        assert_error!(formatted, Error::HandlerPanicked { message, .. } if message == "message number 7");
        let payload = pair.client.procedure::<(), u8>("payload").on(&pair.to_server).call(&());
        assert_error!(payload, Error::HandlerPanicked { .. });
        let index = pair.client.procedure::<usize, u8>("index");
        assert_error!(index.on(&pair.to_server).call(&2), Error::HandlerPanicked { message, .. } if message.contains("out of bounds"));
        assert_eq!(index.on(&pair.to_server).call(&1).unwrap(), 2);
        let deferred = pair.client.procedure::<(), u8>("deferred").on(&pair.to_server).call(&());
        assert_error!(deferred, Error::HandlerPanicked { .. });
        assert_alive(&pair);
    }
}

fn panics_do_not_use_up_handler_threads(net: &Net) {
    let pair = Pair::of(net.server_with(|b| b.handler_threads(2)), net.client());
    pair.server.define("fine", |_: &Request, n: u8| n).unwrap();
    pair.server.define("panics", |_: &Request, n: u32| -> u32 { panic!("{n}") }).unwrap();
    let panics = pair.client.procedure::<u32, u32>("panics");
    let pendings: Vec<_> = (0..100).map(|n| panics.on(&pair.to_server).start(&n).unwrap()).collect();
    for pending in pendings {
        assert_error!(pending.wait(), Error::HandlerPanicked { .. });
    }
    assert_alive(&pair);
}

fn arguments_that_cannot_be_decoded_fail_the_call(net: &Net) {
    let pair = pair(net);
    pair.server.define("picky", |_: &Request, picky: Picky| picky.0).unwrap();
    pair.server.define_async("picky2", |_: Request, picky: Picky| async move { picky.0 }).unwrap();
    pair.server.define_deferred("picky3", |reply: Responder<u32>, picky: Picky| reply.respond(&picky.0).unwrap()).unwrap();
    for name in ["picky", "picky2", "picky3"] {
        let picky = pair.client.procedure::<Picky, u32>(name);
        assert_eq!(picky.on(&pair.to_server).call(&Picky(1)).unwrap(), 1);
        let error = picky.on(&pair.to_server).call(&Picky(100)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(name) && text.contains("100 is too much"), "{text}");
        assert_error!(Err::<(), _>(error), Error::Decode { side: MessageSide::Arguments, name: named, .. } if named == name);
        assert_alive(&pair);
    }
}

fn results_that_cannot_be_decoded_fail_the_call(net: &Net) {
    let pair = pair(net);
    pair.server.define("picky", |_: &Request, n: u32| Picky(n)).unwrap();
    let picky = pair.client.procedure::<u32, Picky>("picky");
    assert_eq!(picky.on(&pair.to_server).call(&99).unwrap(), Picky(99));
    let error = picky.on(&pair.to_server).call(&100).unwrap_err();
    assert!(error.to_string().contains("100 is too much"), "{error}");
    assert_error!(Err::<(), _>(error), Error::Decode { side: MessageSide::Result, name, .. } if name == "picky");
    assert_alive(&pair);
}

fn values_that_cannot_be_encoded_fail_the_call(net: &Net) {
    let pair = pair(net);
    pair.server.define("shy", |_: &Request, shy: Shy| Shy(shy.0 + 50)).unwrap();
    let shy = pair.client.procedure::<Shy, Shy>("shy");
    assert_eq!(shy.on(&pair.to_server).call(&Shy(10)).unwrap(), Shy(60));
    // On the caller's side,
    assert_error!(shy.on(&pair.to_server).call(&Shy(200)), Error::Encode { side: MessageSide::Arguments, .. });
    assert_error!(shy.on(&pair.to_server).notify(&Shy(200)), Error::Encode { reason, .. } if reason == "rather not");
    // and on the server's.
    assert_error!(shy.on(&pair.to_server).call(&Shy(70)), Error::Encode { side: MessageSide::Result, reason, .. } if reason == "rather not");
    assert_alive(&pair);
}

/// Calls `name` with argument and result types that its definition does not have.
#[track_caller]
fn assert_mismatch<A, R>(pair: &Pair, name: &str, side: MessageSide, arguments: A)
where
    A: Serialize + DeserializeOwned + Debug + 'static,
    R: DeserializeOwned + 'static,
{
    let procedure = pair.client.procedure::<A, R>(name);
    let error = procedure.on(&pair.to_server).call(&arguments).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains(name), "{error}");
    match &error {
        Error::TypeMismatch { side: found, name: named, .. } if *found == side && named == name => {}
        other => panic!("{arguments:?} to `{name}`: {other:?}"),
    }
    assert_alive(pair);
}

#[derive(Serialize, Deserialize, Debug)]
struct Point {
    x: i32,
    y: i32,
}

fn results_whose_encoding_panics_fail_the_call(net: &Net) {
    let pair = pair(net);
    pair.server.define("loud", |_: &Request, n: u32| Loud(n)).unwrap();
    pair.server.define_async("loud2", async |_: Request, n: u32| Loud(n)).unwrap();
    let waits = async |_: Request, n: u32| {
        wait_once().await;
        Loud(n)
    };
    pair.server.define_async("loud3", waits).unwrap();
    for name in ["loud", "loud2", "loud3"] {
        let loud = pair.client.procedure::<u32, Loud>(name);
        for _ in 0..5 {
            assert_eq!(loud.on(&pair.to_server).call(&1).unwrap(), Loud(1));
            assert_error!(loud.on(&pair.to_server).call(&101), Error::HandlerPanicked { message, .. } if message == "too loud");
        }
        assert_alive(&pair);
    }
    eventually("no handler is left", || pair.server.dump().unwrap().async_handlers == 0);
    // In a deferred handler, the panic is that of the thread that responds.
    let (give, given) = std::sync::mpsc::channel();
    pair.server.define_deferred("later", move |reply: Responder<Loud>, n: u32| give.send((reply, n)).unwrap()).unwrap();
    let call = pair.client.procedure::<u32, Loud>("later").on(&pair.to_server).start(&101).unwrap();
    let (reply, n) = given.recv_timeout(BOUND).unwrap();
    assert!(std::thread::spawn(move || reply.respond(&Loud(n))).join().is_err());
    assert_error!(call.wait(), Error::HandlerPanicked { message, .. } if message == "too loud");
}

/// Panics while it is decoded if it is more than 100.
#[derive(Debug, PartialEq, Serialize)]
struct Trap(u32);

impl<'de> Deserialize<'de> for Trap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Trap, D::Error> {
        let n = u32::deserialize(deserializer)?;
        assert!(n <= 100, "a trap");
        Ok(Trap(n))
    }
}

fn arguments_whose_decoding_panics_fail_the_call(net: &Net) {
    let pair = pair(net);
    pair.server.define("trap", |_: &Request, trap: Trap| trap.0).unwrap();
    pair.server.define_try("trap2", |_: &Request, trap: Trap| HandlerResult::Ok(trap.0)).unwrap();
    pair.server.define_async("trap3", async |_: Request, trap: Trap| trap.0).unwrap();
    pair.server.define_deferred("trap4", |reply: Responder<u32>, trap: Trap| reply.respond(&trap.0).unwrap()).unwrap();
    for name in ["trap", "trap2", "trap3", "trap4"] {
        let trap = pair.client.procedure::<Trap, u32>(name);
        for _ in 0..5 {
            assert_eq!(trap.on(&pair.to_server).call(&Trap(1)).unwrap(), 1);
            assert_error!(trap.on(&pair.to_server).call(&Trap(101)), Error::HandlerPanicked { message, .. } if message == "a trap");
        }
        assert_alive(&pair);
    }
}

/// Takes for granted that there is memory for its parts.
#[derive(Serialize)]
struct Greedy(Vec<String>);

impl<'de> Deserialize<'de> for Greedy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Greedy, D::Error> {
        Ok(Greedy(Vec::deserialize(deserializer).expect("strings")))
    }
}

fn panic_for_want_of_memory_is_a_want_of_memory(net: &Net) {
    let pair = Pair::of(net.server_with(|b| b.max_message_size(1 << 20).max_bytes_in_flight_per_peer(2 << 20)), net.client());
    pair.server.define("fine", |_: &Request, n: u8| n).unwrap();
    pair.server.define("many", |_: &Request, strings: Vec<String>| strings.len()).unwrap();
    pair.server.define("greedy", |_: &Request, strings: Greedy| strings.0.len()).unwrap();
    let greedy = pair.client.procedure::<Greedy, usize>("greedy").on(&pair.to_server);
    assert_eq!(greedy.call(&Greedy(vec![String::new(); 100])).unwrap(), 100);
    let strings = vec![String::new(); 1_000_000];
    let expected = pair.client.procedure::<Vec<String>, usize>("many").on(&pair.to_server).call(&strings).unwrap_err();
    let found = greedy.call(&Greedy(strings)).unwrap_err();
    assert_eq!(std::mem::discriminant(&found), std::mem::discriminant(&expected), "{found:?}, {expected:?}");
    assert_alive(&pair);
}

/// Can't be dropped unless it is 42, which the values are not that show what the type reads.
#[derive(Serialize, Deserialize)]
struct FortyTwo(u8);

impl Drop for FortyTwo {
    fn drop(&mut self) {
        assert_eq!(self.0, 42);
    }
}

fn type_whose_drop_panics_travels(net: &Net) {
    let pair = pair(net);
    pair.server.define("take", |_: &Request, value: FortyTwo| value.0).unwrap();
    pair.server.define("give", |_: &Request, ()| FortyTwo(42)).unwrap();
    for _ in 0..3 {
        assert_eq!(pair.client.procedure::<FortyTwo, u8>("take").on(&pair.to_server).call(&FortyTwo(42)).unwrap(), 42);
        assert_eq!(pair.client.procedure::<(), FortyTwo>("give").on(&pair.to_server).call(&()).unwrap().0, 42);
    }
}

/// Panics when it is dropped in a handler that waits.
struct Fragile;

impl Drop for Fragile {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

fn async_handler_that_panics_while_it_is_dropped_ends_no_more_than_itself(net: &Net) {
    let pair = pair(net);
    let (begun, begins) = std::sync::mpsc::channel();
    let forever = move |_: Request, ()| {
        let (fragile, begun) = (Fragile, begun.clone());
        async move {
            begun.send(()).unwrap();
            std::future::pending::<()>().await;
            drop(fragile);
        }
    };
    pair.server.define_async("forever", forever.clone()).unwrap();
    let ready = |_: Request, ()| {
        let fragile = Fragile;
        // Dropped when the future is, which is ready.
        std::future::poll_fn(move |_| Poll::Ready(std::mem::size_of_val(&fragile) as u8))
    };
    pair.server.define_async("ready", ready).unwrap();
    for _ in 0..3 {
        let call = pair.client.procedure::<(), ()>("forever").on(&pair.to_server);
        assert_error!(call.clone().timeout(Duration::from_millis(20)).call(&()), Error::Timeout { .. });
        let pending = call.start(&()).unwrap();
        begins.recv_timeout(BOUND).unwrap();
        drop(pending);
        assert_eq!(pair.client.procedure::<(), u8>("ready").on(&pair.to_server).call(&()).unwrap(), 0);
        assert_alive(&pair);
    }
    eventually("no handler is left", || pair.server.dump().unwrap().async_handlers == 0);
}

fn arguments_of_another_type_fail_with_type_mismatch(net: &Net) {
    let pair = pair(net);
    pair.server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    pair.server.define_async("greet", |_: Request, name: String| async move { name }).unwrap();
    pair.server.define_deferred("now", |reply: Responder<u8>, ()| reply.respond(&1).unwrap()).unwrap();
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, 1i32);
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, (1i32,));
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, (1i32, 2i32, 3i32));
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, (1i32, 2i64));
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, (1u32, 2u32));
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, "1, 2".to_owned());
    assert_mismatch::<_, i32>(&pair, "sum", MessageSide::Arguments, ());
    assert_mismatch::<_, String>(&pair, "greet", MessageSide::Arguments, 7u64);
    assert_mismatch::<_, String>(&pair, "greet", MessageSide::Arguments, Some(String::new()));
    assert_mismatch::<_, u8>(&pair, "now", MessageSide::Arguments, 0u8);
}

fn results_of_another_type_fail_with_type_mismatch(net: &Net) {
    let pair = pair(net);
    pair.server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    pair.server.define_async("greet", |_: Request, name: String| async move { name }).unwrap();
    pair.server.define_deferred("now", |reply: Responder<u8>, ()| reply.respond(&1).unwrap()).unwrap();
    assert_mismatch::<_, i64>(&pair, "sum", MessageSide::Result, (1i32, 2i32));
    assert_mismatch::<_, ()>(&pair, "sum", MessageSide::Result, (1i32, 2i32));
    assert_mismatch::<_, Option<i32>>(&pair, "sum", MessageSide::Result, (1i32, 2i32));
    assert_mismatch::<_, Vec<u16>>(&pair, "greet", MessageSide::Result, "a".to_owned());
    assert_mismatch::<_, u32>(&pair, "now", MessageSide::Result, ());
}

fn structs_of_another_shape_fail_with_type_mismatch(net: &Net) {
    mod newer {
        #[derive(serde::Serialize, serde::Deserialize, Debug)]
        pub struct Point {
            pub x: i32,
            pub y: i32,
            pub z: i32,
        }
    }
    let pair = pair(net);
    pair.server.define("norm", |_: &Request, p: Point| p.x.abs() + p.y.abs()).unwrap();
    let norm = pair.client.procedure::<Point, i32>("norm");
    assert_eq!(norm.on(&pair.to_server).call(&Point { x: -1, y: 2 }).unwrap(), 3);
    assert_mismatch::<_, i32>(&pair, "norm", MessageSide::Arguments, newer::Point { x: 1, y: 2, z: 3 });
}

fn one_way_call_with_mismatched_types_runs_no_handler(net: &Net) {
    let pair = pair(net);
    let (heard, hears) = std::sync::mpsc::channel();
    pair.server.define("note", move |_: &Request, n: u32| heard.send(n).unwrap()).unwrap();
    let _ = pair.client.procedure::<String, ()>("note").on(&pair.to_server).notify(&"7".into());
    pair.client.procedure::<u32, ()>("note").on(&pair.to_server).notify(&8).unwrap();
    assert_eq!(hears.recv_timeout(BOUND).unwrap(), 8);
    assert!(hears.try_recv().is_err());
}

suite![
    handler_that_panics_fails_its_call_with_the_message,
    panics_do_not_use_up_handler_threads,
    arguments_that_cannot_be_decoded_fail_the_call,
    results_that_cannot_be_decoded_fail_the_call,
    values_that_cannot_be_encoded_fail_the_call,
    results_whose_encoding_panics_fail_the_call,
    arguments_whose_decoding_panics_fail_the_call,
    panic_for_want_of_memory_is_a_want_of_memory,
    type_whose_drop_panics_travels,
    async_handler_that_panics_while_it_is_dropped_ends_no_more_than_itself,
    arguments_of_another_type_fail_with_type_mismatch,
    results_of_another_type_fail_with_type_mismatch,
    structs_of_another_shape_fail_with_type_mismatch,
    one_way_call_with_mismatched_types_runs_no_handler,
];
