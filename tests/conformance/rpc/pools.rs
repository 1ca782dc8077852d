//! Handler pools: which threads run which handler.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use calomel::{HandlerPool, Request};

use crate::support::{Gate, Net, Pair, eventually, pattern};

fn a_pool_runs_its_handlers_on_its_own_threads(net: &Net) {
    let pair = net.pair();
    let pool = HandlerPool::new(2);
    let seen = Arc::new(Mutex::new(HashSet::new()));
    let here = seen.clone();
    pair.server
        .pool(&pool)
        .define("pooled", move |_: &Request, ()| {
            here.lock().unwrap().insert(thread::current().id());
        })
        .unwrap();
    let other = Arc::new(Mutex::new(HashSet::new()));
    let here = other.clone();
    pair.server
        .define("plain", move |_: &Request, ()| {
            here.lock().unwrap().insert(thread::current().id());
        })
        .unwrap();
    for name in ["pooled", "plain"] {
        let procedure = pair.client.procedure::<(), ()>(name);
        let pendings: Vec<_> = (0..100).map(|_| procedure.on(&pair.to_server).start(&()).unwrap()).collect();
        pendings.into_iter().for_each(|pending| pending.wait().unwrap());
    }
    let (seen, other) = (seen.lock().unwrap(), other.lock().unwrap());
    assert!(!seen.is_empty() && seen.len() <= 2, "{} threads of a pool of 2", seen.len());
    assert!(seen.is_disjoint(&other));
    assert!(!seen.contains(&thread::current().id()));
}

fn a_pool_of_one_runs_one_handler_at_a_time(net: &Net) {
    let pair = net.pair();
    let pool = HandlerPool::new(1);
    let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (r, m) = (running.clone(), most.clone());
    pair.server
        .pool(&pool)
        .define("alone", move |_: &Request, ()| {
            m.fetch_max(r.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::yield_now();
            r.fetch_sub(1, Ordering::SeqCst);
        })
        .unwrap();
    let alone = pair.client.procedure::<(), ()>("alone");
    let pendings: Vec<_> = (0..200).map(|_| alone.on(&pair.to_server).start(&()).unwrap()).collect();
    pendings.into_iter().for_each(|pending| pending.wait().unwrap());
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

fn a_pool_of_three_runs_three_at_a_time(net: &Net) {
    let pair = net.pair();
    let pool = HandlerPool::new(3);
    let (inside, gate) = (Arc::new(AtomicU32::new(0)), Gate::default());
    let (i, g) = (inside.clone(), gate.clone());
    pair.server
        .provider(5)
        .pool(&pool)
        .define("three", move |_: &Request, ()| {
            i.fetch_add(1, Ordering::SeqCst);
            g.wait();
        })
        .unwrap();
    let three = pair.client.procedure::<(), ()>("three");
    let endpoint = pair.to_server.provider(5);
    let pendings: Vec<_> = (0..3).map(|_| three.on(&endpoint).start(&()).unwrap()).collect();
    eventually("three handlers run side by side", || inside.load(Ordering::SeqCst) == 3);
    gate.open();
    pendings.into_iter().for_each(|pending| pending.wait().unwrap());
}

fn blocked_pool_does_not_block_others(net: &Net) {
    let pair = net.pair();
    let (slow, fast) = (HandlerPool::new(1), HandlerPool::new(1));
    let gate = Gate::default();
    let door = gate.clone();
    pair.server.pool(&slow).define("slow", move |_: &Request, ()| door.wait()).unwrap();
    pair.server.provider(1).pool(&fast).define("fast", |_: &Request, n: u32| n).unwrap();
    pair.server.define("plain", |_: &Request, n: u32| n).unwrap();
    let slow = pair.client.procedure::<(), ()>("slow");
    let pendings: Vec<_> = (0..10).map(|_| slow.on(&pair.to_server).start(&()).unwrap()).collect();
    for n in 0..50 {
        let fast = pair.client.procedure::<u32, u32>("fast");
        assert_eq!(fast.on(pair.to_server.provider(1)).call(&n).unwrap(), n);
        let plain = pair.client.procedure::<u32, u32>("plain");
        assert_eq!(plain.on(&pair.to_server).call(&n).unwrap(), n);
    }
    gate.open();
    pendings.into_iter().for_each(|pending| pending.wait().unwrap());
}

fn calls_of_one_procedure_do_not_wait_behind_all_those_of_another(net: &Net) {
    const MANY: u32 = 100;
    let pair = net.pair();
    let pool = HandlerPool::new(1);
    let (gate, handled) = (Gate::default(), Arc::new(AtomicU32::new(0)));
    let (door, count) = (gate.clone(), handled.clone());
    let provider = pair.server.pool(&pool);
    provider
        .define("many", move |_: &Request, ()| {
            door.wait();
            count.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    let before = handled.clone();
    provider.define("few", move |_: &Request, ()| before.load(Ordering::SeqCst)).unwrap();
    let many = pair.client.procedure::<(), ()>("many");
    let waiting: Vec<_> = (0..MANY).map(|_| many.on(&pair.to_server).start(&()).unwrap()).collect();
    let few = pair.client.procedure::<(), u32>("few");
    let pending: Vec<_> = (0..3).map(|_| few.on(&pair.to_server).start(&()).unwrap()).collect();
    eventually("all of them have arrived", || pair.server.dump().unwrap().requests.len() == MANY as usize + 3);
    // A thread passes requests on to the pool, in their order, before it runs this one.
    pair.server.define("last", |_: &Request, ()| ()).unwrap();
    pair.client.procedure::<(), ()>("last").on(&pair.to_server).call(&()).unwrap();
    gate.open();
    let found: Vec<u32> = pending.into_iter().map(|pending| pending.wait().unwrap()).collect();
    waiting.into_iter().for_each(|pending| pending.wait().unwrap());
    // One in each turn.
    assert!(found.iter().all(|before| *before < MANY / 2), "{found:?} calls of the other procedure were handled before");
}

fn a_pool_runs_async_and_deferred_handlers_too(net: &Net) {
    let pair = net.pair();
    let pool = HandlerPool::new(1);
    let provider = pair.server.provider(1).pool(&pool);
    let id = || format!("{:?}", thread::current().id());
    provider.define("plain", move |_: &Request, ()| id()).unwrap();
    provider.define_async("async", move |_: Request, ()| async move { id() }).unwrap();
    provider.define_deferred("deferred", move |reply: calomel::Responder<String>, ()| reply.respond(&id()).unwrap()).unwrap();
    let ids: HashSet<String> = ["plain", "async", "deferred"]
        .map(|name| pair.client.procedure::<(), String>(name).on(pair.to_server.provider(1)).call(&()).unwrap())
        .into();
    assert_eq!(ids.len(), 1, "{ids:?}");
}

fn one_pool_serves_several_engines(net: &Net) {
    let pool = HandlerPool::new(2);
    let client = net.client();
    let servers: Vec<_> = (0..3).map(|_| net.server()).collect();
    for (i, server) in servers.iter().enumerate() {
        server.pool(&pool).define("which", move |_: &Request, ()| i).unwrap();
    }
    let which = client.procedure::<(), usize>("which");
    for (i, server) in servers.iter().enumerate() {
        let endpoint = client.lookup(server.address()).unwrap();
        assert_eq!(which.on(&endpoint).call(&()).unwrap(), i);
        server.finalize().unwrap();
    }
}

fn every_number_of_handler_threads_serves(net: &Net) {
    for threads in [0, 1, 2, 16] {
        let pair = net.pair_with(|b| b.handler_threads(threads));
        pair.server.define("square", |_: &Request, n: u64| n * n).unwrap();
        let square = pair.client.procedure::<u64, u64>("square");
        let pendings: Vec<_> = (0..200).map(|n| square.on(&pair.to_server).start(&n).unwrap()).collect();
        for (n, pending) in pendings.into_iter().enumerate() {
            assert_eq!(pending.wait().unwrap(), (n * n) as u64, "{threads} threads");
        }
    }
}

fn every_progress_mode_serves(net: &Net) {
    for progress in [calomel::Progress::Adaptive, calomel::Progress::Park, calomel::Progress::Spin] {
        let pair = net.pair_with(|b| b.progress(progress));
        pair.server.define("square", |_: &Request, n: u64| n * n).unwrap();
        let square = pair.client.procedure::<u64, u64>("square");
        for n in 0..100 {
            assert_eq!(square.on(&pair.to_server).call(&n).unwrap(), n * n);
        }
        let exposed = pair.server.expose_read_only(pattern(1, 100_000)).unwrap();
        let mut copy = vec![0u8; 100_000];
        exposed.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
        assert!(copy == exposed.view());
        pair.client.finalize().unwrap();
        pair.server.finalize().unwrap();
    }
}

fn blocked_handlers_do_not_stop_progress(net: &Net) {
    let pair = Pair::of(net.server_with(|b| b.handler_threads(2)), net.client());
    let (gate, entered) = (Gate::default(), Arc::new(AtomicU32::new(0)));
    let (door, count) = (gate.clone(), entered.clone());
    pair.server
        .define("blocks", move |_: &Request, n: u32| {
            count.fetch_add(1, Ordering::SeqCst);
            door.wait();
            n
        })
        .unwrap();
    pair.client.define("event", |_: &Request, n: u32| n).unwrap();
    let blocks = pair.client.procedure::<u32, u32>("blocks");
    let pendings: Vec<_> = (0..20).map(|n| blocks.on(&pair.to_server).start(&n).unwrap()).collect();
    eventually("the threads are all blocked", || entered.load(Ordering::SeqCst) >= 2);
    // Transfers need no handler thread,
    let exposed = pair.server.expose_read_only(pattern(2, 1_000_000)).unwrap();
    let mut copy = vec![0u8; 1_000_000];
    exposed.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(copy == exposed.view());
    // nor do calls that the server itself makes,
    let (a, b) = (net.server(), pair.server.clone());
    a.define("event", |_: &Request, n: u32| n + 1).unwrap();
    let to_a = b.lookup(a.address()).unwrap();
    for n in 0..20 {
        assert_eq!(b.procedure::<u32, u32>("event").on(&to_a).call(&n).unwrap(), n + 1);
    }
    // timers fire,
    let (fire, fired) = std::sync::mpsc::channel();
    let _timer = pair.server.timer(std::time::Duration::from_millis(5), move || fire.send(()).unwrap()).unwrap();
    fired.recv_timeout(crate::support::BOUND / 2).unwrap();
    // and timeouts are enforced.
    let result = blocks.on(&pair.to_server).timeout(std::time::Duration::from_millis(30)).call(&1);
    assert!(result.unwrap_err().is_timeout());
    gate.open();
    for (n, pending) in pendings.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), n as u32);
    }
}

fn calls_queued_in_a_dropped_pool_are_answered(net: &Net) {
    let pair = net.pair();
    let pool = HandlerPool::new(1);
    let (entered, gate) = (Gate::default(), Gate::default());
    let (e, g) = (entered.clone(), gate.clone());
    let registration = pair
        .server
        .pool(&pool)
        .define("queued", move |_: &Request, n: u32| {
            e.open();
            g.wait();
            n
        })
        .unwrap();
    let queued = pair.client.procedure::<u32, u32>("queued");
    let first = queued.on(&pair.to_server).start(&1).unwrap();
    entered.wait();
    let rest: Vec<_> = (2..20).map(|n| queued.on(&pair.to_server).start(&n).unwrap()).collect();
    // When a later call has been answered, these are in the pool's queue.
    pair.server.define("fine", |_: &Request, ()| ()).unwrap();
    pair.client.procedure::<(), ()>("fine").on(&pair.to_server).call(&()).unwrap();
    registration.remove();
    drop(pool);
    let begin = std::time::Instant::now();
    gate.open();
    assert_eq!(first.wait().unwrap(), 1);
    for (n, pending) in (2..20).zip(rest) {
        match pending.wait() {
            Ok(answer) => assert_eq!(answer, n),
            Err(error) => assert!(!error.is_timeout(), "{error}"),
        }
    }
    assert!(begin.elapsed() < std::time::Duration::from_secs(5));
}

suite![
    calls_queued_in_a_dropped_pool_are_answered,
    a_pool_runs_its_handlers_on_its_own_threads,
    a_pool_of_one_runs_one_handler_at_a_time,
    a_pool_of_three_runs_three_at_a_time,
    blocked_pool_does_not_block_others,
    calls_of_one_procedure_do_not_wait_behind_all_those_of_another,
    a_pool_runs_async_and_deferred_handlers_too,
    one_pool_serves_several_engines,
    every_number_of_handler_threads_serves,
    every_progress_mode_serves,
    blocked_handlers_do_not_stop_progress,
];
