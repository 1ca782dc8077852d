//! `released` resolves when no peer holds the memory's bulk any more.

use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use calomel::{Bulk, BulkMode, Engine, Error, Request, Responder};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, Pair, block_on, eventually};

const SHORT: Duration = Duration::from_millis(50);

/// `keep` passes each bulk that it receives to the test.
fn define_keep(engine: &Engine) -> mpsc::Receiver<Bulk> {
    let (sender, receiver) = mpsc::channel();
    engine.define("keep", move |_: &Request, bulk: Bulk| sender.send(bulk).unwrap()).unwrap();
    receiver
}

fn bulk_that_was_never_sent_is_released(net: &Net) {
    let engine = net.client();
    let exposed = engine.expose(vec![0u8; 100_000], BulkMode::ReadWrite).unwrap();
    exposed.released().wait_timeout(BOUND).unwrap();
    exposed.released().wait();
    block_on(exposed.released());
}

fn bulk_of_a_one_way_call_is_released_when_its_receiver_drops_it(net: &Net) {
    // A one-way call has no answer that its caller could wait for.
    for (len, limit) in [(10, 0), (10, 4096), (100_000, 4096)] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        let kept = define_keep(&pair.server);
        let exposed = pair.client.expose(vec![5u8; len], BulkMode::ReadOnly).unwrap();
        pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).notify(&exposed.bulk()).unwrap();
        let bulk = kept.recv_timeout(BOUND).unwrap();
        let released = exposed.released();
        if limit == 0 || len > limit {
            assert_error!(exposed.released().wait_timeout(SHORT), Error::Timeout { .. });
        }
        drop(bulk);
        released.wait_timeout(BOUND).unwrap();
        assert!(exposed.reclaim() == vec![5; len]);
    }
}

fn exposure_dropped_after_a_one_way_call_is_revoked_at_the_peer(net: &Net) {
    let pair = net.pair();
    let (dropped, (sender, results)) = (Gate::default(), mpsc::channel());
    let gate = dropped.clone();
    pair.server
        .define("pull", move |request: &Request, bulk: Bulk| {
            gate.wait();
            sender.send(bulk.on(request.endpoint()).pull_into(&mut vec![0u8; bulk.len()])).unwrap();
        })
        .unwrap();
    let exposed = pair.client.expose_read_only(vec![5u8; 4097]).unwrap();
    pair.client.procedure::<Bulk, ()>("pull").on(&pair.to_server).notify(&exposed.bulk()).unwrap();
    drop(exposed);
    dropped.open();
    assert_error!(results.recv_timeout(BOUND).unwrap(), Error::Revoked { .. });
}

fn receiver_of_a_one_way_call_pulls_what_is_exposed_until_it_is_released(net: &Net) {
    let pair = net.pair();
    let (sender, results) = mpsc::channel();
    pair.server
        .define("pull", move |request: &Request, bulk: Bulk| {
            thread::sleep(Duration::from_millis(5));
            sender.send(bulk.on(request.endpoint()).pull_into(&mut vec![0u8; bulk.len()])).unwrap();
        })
        .unwrap();
    for len in [10, 4096, 4097, 100_000] {
        let exposed = pair.client.expose_read_only(vec![5u8; len]).unwrap();
        pair.client.procedure::<Bulk, ()>("pull").on(&pair.to_server).notify(&exposed.bulk()).unwrap();
        exposed.released().wait_timeout(BOUND).unwrap();
        drop(exposed);
        assert_eq!(results.recv_timeout(BOUND).unwrap().unwrap(), len);
    }
}

fn bulk_is_released_when_all_holders_have_dropped_it(net: &Net) {
    let pair = net.pair();
    let other = net.server();
    let (kept, kept2) = (define_keep(&pair.server), define_keep(&other));
    let exposed = pair.client.expose(vec![5u8; 100_000], BulkMode::ReadWrite).unwrap();
    let keep = pair.client.procedure::<Bulk, ()>("keep");
    keep.on(&pair.to_server).call(&exposed.bulk()).unwrap();
    keep.on(&pair.to_server).call(&exposed.bulk().slice(0, 5).unwrap()).unwrap();
    keep.on(pair.client.lookup(other.address()).unwrap()).call(&exposed.bulk()).unwrap();
    let mut bulks = vec![kept.recv_timeout(BOUND).unwrap(), kept.recv_timeout(BOUND).unwrap()];
    bulks.push(kept2.recv_timeout(BOUND).unwrap());
    let clone = bulks[0].clone();
    let part = bulks[0].slice(3, 4).unwrap();
    while let Some(bulk) = bulks.pop() {
        assert_error!(exposed.released().wait_timeout(SHORT), Error::Timeout { .. });
        drop(bulk);
    }
    assert_error!(exposed.released().wait_timeout(SHORT), Error::Timeout { .. });
    drop(clone);
    assert_error!(exposed.released().wait_timeout(SHORT), Error::Timeout { .. });
    drop(part);
    exposed.released().wait_timeout(BOUND).unwrap();
}

fn bulk_is_released_when_its_call_returns(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("look", |request: &Request, bulk: Bulk| bulk.on(request.endpoint()).pull_into(&mut [0u8; 10][..]).unwrap())
        .unwrap();
    let look = pair.client.procedure::<Bulk, usize>("look");
    let exposed = pair.client.expose(vec![5u8; 100_000], BulkMode::ReadWrite).unwrap();
    for _ in 0..20 {
        assert_eq!(look.on(&pair.to_server).call(&exposed.bulk()).unwrap(), 10);
        // The caller may drop the memory now.
        assert!(exposed.released().is_released());
    }
}

fn bulk_is_released_when_its_holder_is_finalized(net: &Net) {
    let pair = net.pair();
    let kept = define_keep(&pair.server);
    let exposed = pair.client.expose(vec![5u8; 100_000], BulkMode::ReadWrite).unwrap();
    pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
    let bulk = kept.recv_timeout(BOUND).unwrap();
    assert_error!(exposed.released().wait_timeout(SHORT), Error::Timeout { .. });
    pair.server.finalize().unwrap();
    exposed.released().wait_timeout(BOUND).unwrap();
    drop(bulk);
}

fn awaited_released_is_woken(net: &Net) {
    let pair = net.pair();
    let kept = define_keep(&pair.server);
    let exposed = pair.client.expose(vec![5u8; 100_000], BulkMode::ReadWrite).unwrap();
    pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
    let bulk = kept.recv_timeout(BOUND).unwrap();
    let released = exposed.released();
    let waiter = thread::spawn(move || block_on(released));
    thread::sleep(SHORT);
    assert!(!waiter.is_finished());
    drop(bulk);
    waiter.join().unwrap();
}

fn released_keeps_only_the_last_waker_of_a_future(net: &Net) {
    struct Nothing;
    impl std::task::Wake for Nothing {
        fn wake(self: Arc<Self>) {}
    }
    let pair = net.pair();
    let kept = define_keep(&pair.server);
    let exposed = pair.client.expose_read_only(vec![1u8; 100_000]).unwrap();
    pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
    let bulk = kept.recv_timeout(BOUND).unwrap();
    let mut released = exposed.released();
    let mut other = released.clone();
    let (first, tasks): (Arc<Nothing>, Vec<Arc<Nothing>>) = (Arc::new(Nothing), (0..100).map(|_| Arc::new(Nothing)).collect());
    let polled = |released: &mut calomel::Released, task: &Arc<Nothing>| {
        let waker = std::task::Waker::from(task.clone());
        Pin::new(released).poll(&mut std::task::Context::from_waker(&waker)).is_ready()
    };
    assert!(!polled(&mut other, &first));
    for task in &tasks {
        assert!(!polled(&mut released, task) && !polled(&mut released, task));
    }
    // The list itself holds one count of each task.
    let wakers: usize = tasks.iter().map(|task| Arc::strong_count(task) - 1).sum();
    assert_eq!(wakers, 1, "wakers of earlier tasks are kept");
    assert_eq!(Arc::strong_count(&first), 2);
    drop(released);
    assert!(tasks.iter().all(|task| Arc::strong_count(task) == 1), "the waker of a dropped future is kept");
    drop(bulk);
    eventually("the other future is woken", || polled(&mut other, &first));
}

fn bulk_of_a_failed_call_is_released(net: &Net) {
    // Panics, dropped responders and unknown procedures leave no lease behind.
    let pair = net.pair();
    pair.server.define("panics", |_: &Request, _: Bulk| -> u8 { panic!("with a bulk in hand") }).unwrap();
    pair.server.define_deferred("forgets", |_: Responder<u8>, _: Bulk| {}).unwrap();
    let exposed = pair.client.expose(vec![5u8; 100_000], BulkMode::ReadWrite).unwrap();
    for name in ["panics", "forgets", "missing"] {
        let procedure = pair.client.procedure::<Bulk, u8>(name);
        procedure.on(&pair.to_server).call(&exposed.bulk()).unwrap_err();
        exposed.released().wait_timeout(BOUND).unwrap();
        procedure.on(&pair.to_server).notify(&exposed.bulk()).unwrap();
        exposed.released().wait_timeout(BOUND).unwrap();
    }
    let dead = pair.client.lookup(net.dead_address()).unwrap();
    pair.client.procedure::<Bulk, u8>("x").on(&dead).call(&exposed.bulk()).unwrap_err();
    exposed.released().wait_timeout(BOUND).unwrap();
}

fn forwarded_bulk_is_not_released(net: &Net) {
    let (owner, middle, last) = (net.server(), net.server(), net.server());
    let kept = define_keep(&last);
    let to_last = middle.lookup(last.address()).unwrap();
    middle
        .define("forward", move |request: &Request, bulk: Bulk| {
            request.engine().procedure::<Bulk, ()>("keep").on(&to_last).call(&bulk).unwrap();
        })
        .unwrap();
    let exposed = owner.expose(vec![5u8; 100_000], BulkMode::ReadWrite).unwrap();
    let pair = Pair::of(middle, owner);
    pair.client.procedure::<Bulk, ()>("forward").on(&pair.to_server).call(&exposed.bulk()).unwrap();
    let bulk = kept.recv_timeout(BOUND).unwrap();
    // The last engine can still reach the owner, so the lease must not have ended.
    assert_error!(exposed.released().wait_timeout(SHORT), Error::Timeout { .. });
    assert_eq!(bulk.origin(&last).unwrap().pull_into(&mut [0u8; 10][..]).unwrap(), 10);
    drop(bulk);
    exposed.released().wait_timeout(BOUND).unwrap();
}

fn handlers_that_wait_for_a_release_do_not_use_up_threads(net: &Net) {
    // All handler threads wait for a release that only another handler can bring about.
    let pair = net.pair_with(|b| b.handler_threads(1));
    pair.client.define("back", |_: &Request, ()| ()).unwrap();
    pair.client
        .define("hold", |request: &Request, bulk: Bulk| {
            // Calls back before it drops the bulk, after the call that carried it has been answered.
            let (engine, caller) = (request.engine().clone(), request.endpoint().clone());
            thread::spawn(move || {
                thread::sleep(SHORT);
                engine.procedure::<(), ()>("poke").on(&caller).call(&()).unwrap();
                drop(bulk);
            });
        })
        .unwrap();
    pair.server.define("poke", |_: &Request, ()| ()).unwrap();
    pair.server
        .define("expose", |request: &Request, ()| {
            let exposed = request.engine().expose(vec![1u8; 100_000], BulkMode::ReadWrite).unwrap();
            let hold = request.engine().procedure::<Bulk, ()>("hold");
            hold.on(request.endpoint()).call(&exposed.bulk()).unwrap();
            exposed.released().wait_timeout(BOUND / 2).is_ok()
        })
        .unwrap();
    let expose = pair.client.procedure::<(), bool>("expose");
    let pendings: Vec<_> = (0..3).map(|_| expose.on(&pair.to_server).start(&()).unwrap()).collect();
    for pending in pendings {
        assert!(pending.wait().unwrap());
    }
}

suite![
    released_keeps_only_the_last_waker_of_a_future,
    handlers_that_wait_for_a_release_do_not_use_up_threads,
    bulk_that_was_never_sent_is_released,
    bulk_of_a_one_way_call_is_released_when_its_receiver_drops_it,
    exposure_dropped_after_a_one_way_call_is_revoked_at_the_peer,
    receiver_of_a_one_way_call_pulls_what_is_exposed_until_it_is_released,
    bulk_is_released_when_all_holders_have_dropped_it,
    bulk_is_released_when_its_call_returns,
    bulk_is_released_when_its_holder_is_finalized,
    awaited_released_is_woken,
    bulk_of_a_failed_call_is_released,
    forwarded_bulk_is_not_released,
];
