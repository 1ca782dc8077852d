//! Handlers that make calls: to their caller, to other engines, in a ring, and to their own engine.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use calomel::{Bulk, Call, Engine, Request};
use serde::{Serialize, Serializer};

use crate::support::{BOUND, Net, Pair, eventually};

/// `depth`: calls its caller with one less, down to zero; returns how many handlers were involved.
fn define_ping_pong(engine: &Engine) {
    engine
        .define("depth", |request: &Request, left: u32| {
            if left == 0 {
                return 1;
            }
            let depth = request.engine().procedure::<u32, u32>("depth");
            1 + depth.on(request.endpoint()).call(&(left - 1)).unwrap()
        })
        .unwrap();
}

fn eight_nested_calls_between_two_engines_are_answered(net: &Net) {
    for threads in [0, 1, 4] {
        let pair = net.pair_with(|b| b.handler_threads(threads));
        define_ping_pong(&pair.server);
        define_ping_pong(&pair.client);
        let depth = pair.client.procedure::<u32, u32>("depth");
        for left in [0, 1, 2, 8, 8] {
            assert_eq!(depth.on(&pair.to_server).call(&left).unwrap(), left + 1, "{threads} threads");
        }
    }
}

fn concurrent_nested_calls_are_answered(net: &Net) {
    let pair = net.pair();
    define_ping_pong(&pair.server);
    define_ping_pong(&pair.client);
    let depth = pair.client.procedure::<u32, u32>("depth");
    let pendings: Vec<_> = (0..16).map(|n| depth.on(&pair.to_server).start(&(n % 9)).unwrap()).collect();
    for (n, pending) in pendings.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), n as u32 % 9 + 1);
    }
}

fn calls_around_a_ring_of_engines_are_answered(net: &Net) {
    let ring: Vec<Engine> = (0..4).map(|_| net.server()).collect();
    for (i, engine) in ring.iter().enumerate() {
        let next = engine.lookup(ring[(i + 1) % ring.len()].address()).unwrap();
        engine
            .define("around", move |request: &Request, left: u32| {
                if left == 0 {
                    return vec![i];
                }
                let around = request.engine().procedure::<u32, Vec<usize>>("around");
                let mut path = around.on(&next).call(&(left - 1)).unwrap();
                path.push(i);
                path
            })
            .unwrap();
    }
    let client = net.client();
    let first = client.lookup(ring[0].address()).unwrap();
    let path = client.procedure::<u32, Vec<usize>>("around").on(&first).call(&8).unwrap();
    assert_eq!(path, [0, 3, 2, 1, 0, 3, 2, 1, 0]);
}

fn handler_that_calls_its_own_engine_is_answered(net: &Net) {
    for threads in [0, 1, 4] {
        let pair = Pair::of(net.server_with(|b| b.handler_threads(threads)), net.client());
        let myself = pair.server.lookup(pair.server.address()).unwrap();
        pair.server
            .define("factorial", move |request: &Request, n: u64| -> u64 {
                if n == 0 {
                    return 1;
                }
                n * request.engine().procedure::<u64, u64>("factorial").on(&myself).call(&(n - 1)).unwrap()
            })
            .unwrap();
        let factorial = pair.client.procedure::<u64, u64>("factorial");
        assert_eq!(factorial.on(&pair.to_server).call(&8).unwrap(), 40_320, "{threads} threads");
    }
}

fn nested_calls_of_async_handlers_are_answered(net: &Net) {
    let pair = net.pair();
    for engine in [&pair.server, &pair.client] {
        engine
            .define_async("depth", |request: Request, left: u32| async move {
                if left == 0 {
                    return 1;
                }
                let depth = request.engine().procedure::<u32, u32>("depth");
                1 + depth.on(request.endpoint()).start(&(left - 1)).unwrap().await.unwrap()
            })
            .unwrap();
    }
    let depth = pair.client.procedure::<u32, u32>("depth");
    assert_eq!(depth.on(&pair.to_server).call(&64).unwrap(), 65);
}

fn handler_may_define_and_remove_procedures(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("define", |request: &Request, name: String| {
            let answer = name.clone();
            request.engine().define(&name, move |_: &Request, ()| answer.clone()).is_ok()
        })
        .unwrap();
    let define = pair.client.procedure::<String, bool>("define");
    assert!(define.on(&pair.to_server).call(&"fresh".into()).unwrap());
    assert!(!define.on(&pair.to_server).call(&"fresh".into()).unwrap());
    assert_eq!(pair.client.procedure::<(), String>("fresh").on(&pair.to_server).call(&()).unwrap(), "fresh");
}

fn handler_may_build_and_finalize_engines(net: &Net) {
    let pair = net.pair();
    let knobs = net.knobs();
    pair.server.define("plus", |_: &Request, n: u32| n + 1).unwrap();
    let address = pair.server.address();
    pair.server
        .define("via a fresh engine", move |_: &Request, n: u32| {
            let engine = knobs(Engine::builder()).build().unwrap();
            let endpoint = engine.lookup(&address).unwrap();
            let answer = engine.procedure::<u32, u32>("plus").on(&endpoint).call(&n).unwrap();
            engine.finalize().unwrap();
            // Not the handler's own engine, so the handler can wait for it.
            assert!(engine.is_finalized());
            answer
        })
        .unwrap();
    let call = pair.client.procedure::<u32, u32>("via a fresh engine");
    for n in 0..5 {
        assert_eq!(call.on(&pair.to_server).call(&n).unwrap(), n + 1);
    }
}

fn one_way_calls_made_by_handlers_arrive(net: &Net) {
    let pair = net.pair();
    let count = Arc::new(AtomicU32::new(0));
    for engine in [&pair.server, &pair.client] {
        let count = count.clone();
        engine
            .define("spread", move |request: &Request, left: u32| {
                count.fetch_add(1, Ordering::SeqCst);
                if left > 0 {
                    let spread = request.engine().procedure::<u32, ()>("spread");
                    spread.on(request.endpoint()).notify(&(left - 1)).unwrap();
                    spread.on(request.endpoint()).notify(&(left - 1)).unwrap();
                }
            })
            .unwrap();
    }
    pair.client.procedure::<u32, ()>("spread").on(&pair.to_server).notify(&8).unwrap();
    eventually("all notifications arrived", || count.load(Ordering::SeqCst) == (1 << 9) - 1);
}

/// Each handler at one end waits until as many calls have arrived at the other, whose handlers wait, too. Fewer than there are
/// handler threads, and more than the credit at first.
fn one_way_calls_arrive_while_handlers_at_both_ends_wait(net: &Net) {
    const CALLS: u32 = 40;
    let pair = net.pair();
    let arrived = [Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0))];
    let met = Arc::new(AtomicU32::new(0));
    for (engine, [own, other]) in [(&pair.server, [0, 1]), (&pair.client, [1, 0])] {
        let (own, other, met) = (arrived[own].clone(), arrived[other].clone(), met.clone());
        engine
            .define("meet", move |request: &Request, is_answer: bool| {
                if !is_answer {
                    let meet = request.engine().procedure::<bool, ()>("meet");
                    meet.on(request.endpoint()).notify(&true).unwrap();
                }
                own.fetch_add(1, Ordering::SeqCst);
                eventually("all calls have arrived", || other.load(Ordering::SeqCst) == CALLS);
                met.fetch_add(1, Ordering::SeqCst);
            })
            .unwrap();
    }
    let meet = pair.client.procedure::<bool, ()>("meet").on(&pair.to_server);
    for _ in 0..CALLS {
        meet.notify(&false).unwrap();
    }
    eventually("the handlers at both ends met", || met.load(Ordering::SeqCst) == 2 * CALLS);
}

fn waiting_caller_without_handler_threads_serves_calls(net: &Net) {
    // The client waits in a call whose handler calls the client before it answers. The client, which has no handler threads,
    // must serve that call while it waits.
    let server = net.server();
    let client = net.client_with(|b| b.handler_threads(0));
    let pair = Pair::of(server, client);
    pair.client.define("secret", |_: &Request, ()| 42u8).unwrap();
    pair.server
        .define("guess", |request: &Request, ()| {
            let secret = request.engine().procedure::<(), u8>("secret");
            secret.on(request.endpoint()).call(&()).unwrap()
        })
        .unwrap();
    for _ in 0..50 {
        assert_eq!(pair.client.procedure::<(), u8>("guess").on(&pair.to_server).call(&()).unwrap(), 42);
    }
}

/// More than the progress thread runs before it looks for the driver lock, which the thread that waits has.
fn waiting_caller_without_handler_threads_serves_many_calls(net: &Net) {
    const CALLS: u64 = 900;
    let pair = Pair::of(net.server(), net.client_with(|builder| builder.handler_threads(0)));
    let next = |_: &Request, x: u64| {
        // So that calls queue up.
        thread::sleep(Duration::from_micros(100));
        x + 1
    };
    pair.client.define("next", next).unwrap();
    pair.server
        .define("many", |request: &Request, ()| {
            let next = request.engine().procedure::<u64, u64>("next").on(request.endpoint()).timeout(BOUND);
            let calls: Vec<_> = (0..CALLS).map(|x| next.start(&x).unwrap()).collect();
            calls.into_iter().map(|call| call.wait().unwrap()).sum::<u64>()
        })
        .unwrap();
    let sum = pair.client.procedure::<(), u64>("many").on(&pair.to_server).timeout(2 * BOUND).call(&()).unwrap();
    assert_eq!(sum, CALLS * (CALLS + 1) / 2);
}

/// Encoded as the number that a call returns, to which it passes a bulk.
struct Counted {
    count: Call<(Bulk, Bulk), u64>,
    bulk: Bulk,
    panics: bool,
}

impl Serialize for Counted {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let sum = self.count.call(&(self.bulk.clone(), self.bulk.clone())).map_err(serde::ser::Error::custom)?;
        assert!(!self.panics, "told to panic");
        serializer.serialize_u64(sum)
    }
}

/// The message that is encoded, and the one that its value sends meanwhile, keep their bulks apart: each of them is released.
fn value_that_makes_a_call_while_it_is_encoded_leaves_the_bulks_beside_it_alone(net: &Net) {
    let pair = net.pair();
    let sum = |request: &Request, bulk: &Bulk| {
        let mut bytes = vec![0u8; bulk.len()];
        bulk.on(request.endpoint()).pull_into(&mut bytes[..]).unwrap();
        bytes.into_iter().map(u64::from).sum::<u64>()
    };
    pair.server.define("count", move |request: &Request, (a, b): (Bulk, Bulk)| sum(request, &a) + sum(request, &b)).unwrap();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeps = kept.clone();
    pair.server
        .define("outer", move |request: &Request, (a, inner, b): (Bulk, u64, Bulk)| {
            let sums = (sum(request, &a), inner, sum(request, &b));
            keeps.lock().unwrap().extend([a, b]);
            sums
        })
        .unwrap();
    // Too long to be sent with their content.
    let exposed = [1u8, 2, 3].map(|byte| pair.client.expose_read_only(vec![byte; 10_000]).unwrap());
    let [first, inner, last] = exposed.each_ref();
    for panics in [false, true, false] {
        let count = pair.client.procedure("count").on(&pair.to_server);
        let counted = Counted { count, bulk: inner.bulk(), panics };
        let outer = pair.client.procedure::<(Bulk, Counted, Bulk), (u64, u64, u64)>("outer").on(&pair.to_server).timeout(BOUND);
        let result = catch_unwind(AssertUnwindSafe(|| outer.call(&(first.bulk(), counted, last.bulk()))));
        match panics {
            false => {
                assert_eq!(result.unwrap().unwrap(), (10_000, 40_000, 30_000));
                inner.released().wait_timeout(BOUND).unwrap();
                assert!(!first.released().is_released() && !last.released().is_released(), "the server holds them");
                kept.lock().unwrap().clear();
            }
            true => assert!(result.is_err()),
        }
        for exposed in &exposed {
            exposed.released().wait_timeout(BOUND).unwrap();
        }
    }
}

/// Runs what it holds when its thread ends.
struct AtEnd(Option<Box<dyn FnOnce()>>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if let Some(last) = self.0.take() {
            last();
        }
    }
}

thread_local! {
    static AT_END: RefCell<AtEnd> = const { RefCell::new(AtEnd(None)) };
}

/// Thread-locals are destroyed in the reverse order of their first uses: some of the library's before the program's.
fn thread_that_is_ending_may_call_with_a_bulk(net: &Net) {
    let pair = net.pair();
    pair.server.define("len", |_: &Request, bulk: Option<Bulk>| bulk.map_or(0, |bulk| bulk.len())).unwrap();
    let exposed = pair.client.expose_read_only(vec![1u8; 10_000]).unwrap();
    let len = pair.client.procedure::<Option<Bulk>, usize>("len").on(&pair.to_server).timeout(BOUND);
    for calls_before in 0..3 {
        let (len, bulk, (sender, receiver)) = (len.clone(), exposed.bulk(), mpsc::channel());
        let user = thread::spawn(move || {
            let calls = [None, Some(bulk.clone())];
            let call = |bulk: &Option<Bulk>| assert_eq!(len.call(bulk).unwrap(), bulk.as_ref().map_or(0, Bulk::len));
            calls.iter().take(calls_before).for_each(call);
            let (at_end, last) = (len.clone(), bulk.clone());
            AT_END.with_borrow_mut(|end| end.0 = Some(Box::new(move || sender.send(at_end.call(&Some(last))).unwrap())));
            calls.iter().skip(calls_before).for_each(call);
        });
        user.join().unwrap();
        assert_eq!(receiver.recv_timeout(BOUND).unwrap().unwrap(), 10_000, "{calls_before} calls before");
    }
    exposed.released().wait_timeout(BOUND).unwrap();
}

suite![
    eight_nested_calls_between_two_engines_are_answered,
    concurrent_nested_calls_are_answered,
    calls_around_a_ring_of_engines_are_answered,
    handler_that_calls_its_own_engine_is_answered,
    nested_calls_of_async_handlers_are_answered,
    handler_may_define_and_remove_procedures,
    handler_may_build_and_finalize_engines,
    one_way_calls_made_by_handlers_arrive,
    one_way_calls_arrive_while_handlers_at_both_ends_wait,
    waiting_caller_without_handler_threads_serves_calls,
    waiting_caller_without_handler_threads_serves_many_calls,
    value_that_makes_a_call_while_it_is_encoded_leaves_the_bulks_beside_it_alone,
    thread_that_is_ending_may_call_with_a_bulk,
];
