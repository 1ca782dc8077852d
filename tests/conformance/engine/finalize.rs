//! Finalizing: from any thread or callback, any number of times, in bounded time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Request};

use crate::support::{BOUND, Gate, Net, Pair, block_on, eventually};

/// Runs `action`, and asserts that it returned soon.
#[track_caller]
fn soon<T>(action: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = action();
    assert!(begin.elapsed() < Duration::from_secs(3), "took {:?}", begin.elapsed());
    result
}

fn finalize_is_idempotent(net: &Net) {
    let pair = net.pair();
    pair.server.define("hello", |_: &Request, ()| ()).unwrap();
    pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
    for engine in [&pair.client, &pair.server] {
        assert!(!engine.is_finalized());
        for _ in 0..3 {
            soon(|| engine.finalize()).unwrap();
            assert!(engine.is_finalized());
        }
        soon(|| engine.wait_for_finalize());
    }
}

fn finalizing_a_clone_finalizes_the_engine(net: &Net) {
    let server = net.server();
    let clone = server.clone();
    clone.define("hello", |_: &Request, ()| 1u8).unwrap();
    let client = net.client();
    let endpoint = client.lookup(clone.address()).unwrap();
    assert_eq!(client.procedure::<(), u8>("hello").on(&endpoint).call(&()).unwrap(), 1);
    drop(clone);
    assert_eq!(client.procedure::<(), u8>("hello").on(&endpoint).call(&()).unwrap(), 1);
    let clone = server.clone();
    clone.finalize().unwrap();
    assert!(server.is_finalized());
}

fn finalize_on_eight_threads_returns_when_finalized(net: &Net) {
    for _ in 0..5 {
        let pair = net.pair();
        pair.server.define("hello", |_: &Request, ()| ()).unwrap();
        pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
        for engine in [&pair.server, &pair.client] {
            let start = Barrier::new(8);
            thread::scope(|s| {
                for _ in 0..8 {
                    s.spawn(|| {
                        start.wait();
                        soon(|| engine.finalize()).unwrap();
                        // Each call returns when the engine is finalized, not only the first.
                        assert!(engine.is_finalized());
                    });
                }
            });
        }
    }
}

fn both_ends_finalizing_at_once_succeed(net: &Net) {
    for _ in 0..10 {
        let pair = net.pair();
        pair.server.define("hello", |_: &Request, ()| ()).unwrap();
        pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
        let start = Barrier::new(2);
        thread::scope(|s| {
            for engine in [&pair.server, &pair.client] {
                let start = &start;
                s.spawn(move || {
                    start.wait();
                    soon(|| engine.finalize()).unwrap();
                });
            }
        });
    }
}

fn wait_for_finalize_returns_to_all_threads(net: &Net) {
    let server = net.server();
    let (done, all) = mpsc::channel();
    for _ in 0..4 {
        let (server, done) = (server.clone(), done.clone());
        thread::spawn(move || {
            server.wait_for_finalize();
            assert!(server.is_finalized());
            done.send(()).unwrap();
        });
    }
    thread::sleep(Duration::from_millis(30));
    assert!(all.try_recv().is_err());
    server.finalize().unwrap();
    (0..4).for_each(|_| all.recv_timeout(BOUND).unwrap());
}

fn finalize_in_a_handler_ends_its_engine(net: &Net) {
    for threads in [0, 1, 4] {
        let server = net.server_with(|b| b.handler_threads(threads));
        let client = net.client();
        let endpoint = client.lookup(server.address()).unwrap();
        server
            .define("quit", |request: &Request, ()| {
                request.engine().finalize().unwrap();
                true
            })
            .unwrap();
        // The answer may be lost, but the call and the server end.
        let result = soon(|| client.procedure::<(), bool>("quit").on(&endpoint).call(&()));
        if let Err(error) = result {
            assert!(error.is_disconnected(), "{error}");
        }
        soon(|| server.wait_for_finalize());
        assert!(server.is_finalized());
    }
}

fn finalize_in_every_kind_of_handler_ends_its_engine(net: &Net) {
    for kind in ["async", "deferred", "notified", "pooled"] {
        let pool = calomel::HandlerPool::new(1);
        let (server, client) = (net.server(), net.client());
        let endpoint = client.lookup(server.address()).unwrap();
        server
            .define_async("async", |request: Request, ()| async move {
                request.engine().finalize().unwrap();
            })
            .unwrap();
        server
            .define_deferred("deferred", |reply: calomel::Responder<()>, ()| {
                reply.request().engine().finalize().unwrap();
                let _ = reply.respond(&());
            })
            .unwrap();
        server.define("notified", |request: &Request, ()| request.engine().finalize().unwrap()).unwrap();
        server.pool(&pool).define("pooled", |request: &Request, ()| request.engine().finalize().unwrap()).unwrap();
        let procedure = client.procedure::<(), ()>(kind);
        if kind == "notified" {
            procedure.on(&endpoint).notify(&()).unwrap();
        } else if let Err(error) = soon(|| procedure.on(&endpoint).call(&())) {
            assert!(error.is_disconnected(), "{kind}: {error}");
        }
        soon(|| server.wait_for_finalize());
    }
}

fn finalize_in_a_timer_ends_its_engine(net: &Net) {
    let engine = net.client();
    let own = engine.clone();
    let _timer = engine.timer(Duration::from_millis(10), move || own.finalize().unwrap()).unwrap();
    soon(|| engine.wait_for_finalize());
    assert!(engine.is_finalized());
}

fn finalize_callbacks_run_in_reverse_order_and_can_be_removed(net: &Net) {
    let engine = net.client();
    let order = Arc::new(Mutex::new(Vec::new()));
    let note = |name: &'static str| {
        let order = order.clone();
        move || order.lock().unwrap().push(name)
    };
    engine.on_finalize(note("after 1"));
    let removed = engine.on_finalize(note("after 2"));
    engine.on_finalize(note("after 3"));
    engine.on_prefinalize(note("before 1"));
    let also_removed = engine.on_prefinalize(note("before 2"));
    engine.on_prefinalize(note("before 3"));
    assert!(removed.remove() && also_removed.remove());
    assert!(!removed.remove());
    engine.finalize().unwrap();
    assert_eq!(*order.lock().unwrap(), ["before 3", "before 1", "after 3", "after 1"]);
    assert!(!also_removed.remove());
    // After the fact they run at once, on this thread.
    let late = engine.on_finalize(note("late"));
    engine.on_prefinalize(note("later"));
    assert_eq!(order.lock().unwrap()[4..], ["late", "later"]);
    assert!(!late.remove());
    assert_eq!(Arc::strong_count(&order), 1);
}

fn waiting_for_the_end_in_a_handler_fails_at_once(net: &Net) {
    let pair = net.pair();
    pair.server.define("wait", |request: &Request, ()| request.engine().wait_for_finalize()).unwrap();
    let begin = Instant::now();
    let error = pair.client.procedure::<(), ()>("wait").on(&pair.to_server).call(&()).unwrap_err();
    assert!(matches!(&error, Error::HandlerPanicked { message, .. } if message.contains("wait_for_finalize")), "{error}");
    assert!(begin.elapsed() < BOUND);
}

fn end_is_awaited_by_tasks(net: &Net) {
    let (engine, other) = (net.server(), net.client());
    let waiting = {
        let engine = engine.clone();
        thread::spawn(move || block_on(engine.wait_for_finalize_async()))
    };
    block_on(engine.finalize_async()).unwrap();
    assert!(engine.is_finalized());
    soon(|| waiting.join().unwrap());
    // Again, and after the fact.
    block_on(engine.finalize_async()).unwrap();
    block_on(engine.wait_for_finalize_async());
    // Begun, and not awaited.
    drop(other.finalize_async());
    soon(|| other.wait_for_finalize());
}

fn finalize_callbacks_run_once_and_in_order(net: &Net) {
    let pair = net.pair();
    pair.server.define("bye", |_: &Request, ()| 1u8).unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let (a, b, c) = (order.clone(), order.clone(), order.clone());
    let (engine, endpoint) = (pair.client.clone(), pair.to_server.clone());
    pair.client.on_finalize(move || b.lock().unwrap().push("finalized"));
    pair.client.on_prefinalize(move || {
        // The engine still works in this callback, so that it can call others.
        let answer = engine.procedure::<(), u8>("bye").on(&endpoint).call(&());
        a.lock().unwrap().push(if answer.is_ok() { "said bye" } else { "could not say bye" });
    });
    pair.client.on_prefinalize(move || c.lock().unwrap().push("second"));
    pair.client.finalize().unwrap();
    pair.client.finalize().unwrap();
    let mut order = order.lock().unwrap().clone();
    assert_eq!(order.pop(), Some("finalized"));
    order.sort_unstable();
    assert_eq!(order, ["said bye", "second"]);
}

fn finalize_callbacks_may_finalize_and_panic(net: &Net) {
    let engine = net.server();
    let count = Arc::new(AtomicU32::new(0));
    for late in [false, true] {
        let (own, count) = (engine.clone(), count.clone());
        let callback = move || {
            // Inside finalize: this call must not wait for itself.
            let _ = own.finalize();
            count.fetch_add(1, Ordering::SeqCst);
        };
        let _ = if late { engine.on_finalize(callback) } else { engine.on_prefinalize(callback) };
    }
    soon(|| engine.finalize()).unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 2);
    let engine = net.server();
    engine.on_prefinalize(|| panic!("in a callback"));
    let (sender, receiver) = mpsc::channel();
    engine.on_finalize(move || sender.send(()).unwrap());
    let own = engine.clone();
    let _ = soon(|| thread::spawn(move || own.finalize()).join());
    soon(|| engine.finalize()).unwrap();
    receiver.recv_timeout(BOUND).unwrap();
    assert!(engine.is_finalized());
}

fn dropping_the_last_clone_finalizes(net: &Net) {
    let server = net.builder().listen(net.fresh_address()).build().unwrap();
    let address = server.address();
    server.define("hello", |_: &Request, ()| ()).unwrap();
    let (sender, receiver) = mpsc::channel();
    server.on_finalize(move || sender.send(()).unwrap());
    let client = net.client();
    let endpoint = client.lookup(&address).unwrap();
    client.procedure::<(), ()>("hello").on(&endpoint).call(&()).unwrap();
    let clone = server.clone();
    drop(server);
    client.procedure::<(), ()>("hello").on(&endpoint).call(&()).unwrap();
    soon(|| drop(clone));
    receiver.recv_timeout(BOUND).unwrap();
    assert!(client.procedure::<(), ()>("hello").on(&endpoint).call(&()).unwrap_err().is_disconnected());
    net.keep(net.builder().listen(&address).build().unwrap());
}

fn engine_dropped_in_its_own_handler_ends(net: &Net) {
    let server = net.builder().listen(net.fresh_address()).build().unwrap();
    let address = server.address();
    let slot = Arc::new(Mutex::new(None));
    let taken = slot.clone();
    server
        .define("drop yourself", move |_: &Request, ()| {
            let last: Option<Engine> = taken.lock().unwrap().take();
            drop(last);
        })
        .unwrap();
    *slot.lock().unwrap() = Some(server);
    let client = net.client();
    let endpoint = client.lookup(&address).unwrap();
    let _ = soon(|| client.procedure::<(), ()>("drop yourself").on(&endpoint).call(&()));
    eventually("the address is free", || net.builder().listen(&address).build().map(|engine| net.keep(engine)).is_ok());
}

fn engine_in_a_thread_local_ends_with_its_thread(net: &Net) {
    thread_local! {
        static ENGINE: std::cell::RefCell<Option<Engine>> = const { std::cell::RefCell::new(None) };
    }
    let server = net.server();
    server.define("hello", |_: &Request, ()| ()).unwrap();
    let (knobs, address) = (net.knobs(), server.address());
    let (sender, receiver) = mpsc::channel();
    let user = thread::spawn(move || {
        // The library's own thread-locals are initialized after this one, so they are destroyed before it.
        ENGINE.with_borrow_mut(|_| ());
        let client = knobs(Engine::builder()).build().unwrap();
        client.on_finalize(move || sender.send(()).unwrap());
        let endpoint = client.lookup(address).unwrap();
        client.procedure::<(), ()>("hello").on(&endpoint).call(&()).unwrap();
        ENGINE.set(Some(client));
    });
    soon(|| user.join()).unwrap();
    receiver.recv_timeout(BOUND).unwrap();
}

/// A call on which `authorize` decides when finalize begins is seen to end, also if it is denied or its procedure is unknown.
fn call_refused_during_finalize_is_not_waited_for(net: &Net) {
    for allowed in [false, true] {
        let (asked, decide) = (Gate::default(), Gate::default());
        let (tell, wait) = (asked.clone(), decide.clone());
        let server = net.server_with(|builder| {
            builder.authorize(move |_| {
                tell.open();
                wait.wait();
                allowed
            })
        });
        let pair = Pair::of(server, net.client());
        pair.client.procedure::<(), ()>("nothing").on(&pair.to_server).notify(&()).unwrap();
        asked.wait();
        let begin = Instant::now();
        thread::scope(|scope| {
            let finalizing = scope.spawn(|| pair.server.finalize());
            // It waits for work in progress.
            thread::sleep(Duration::from_millis(100));
            decide.open();
            finalizing.join().unwrap().unwrap();
        });
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    }
}

suite![
    call_refused_during_finalize_is_not_waited_for,
    engine_in_a_thread_local_ends_with_its_thread,
    finalize_is_idempotent,
    finalizing_a_clone_finalizes_the_engine,
    finalize_on_eight_threads_returns_when_finalized,
    both_ends_finalizing_at_once_succeed,
    wait_for_finalize_returns_to_all_threads,
    finalize_in_a_handler_ends_its_engine,
    finalize_in_every_kind_of_handler_ends_its_engine,
    finalize_in_a_timer_ends_its_engine,
    finalize_callbacks_run_in_reverse_order_and_can_be_removed,
    waiting_for_the_end_in_a_handler_fails_at_once,
    end_is_awaited_by_tasks,
    finalize_callbacks_run_once_and_in_order,
    finalize_callbacks_may_finalize_and_panic,
    dropping_the_last_clone_finalizes,
    engine_dropped_in_its_own_handler_ends,
];
