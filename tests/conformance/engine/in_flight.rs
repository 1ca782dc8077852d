//! Finalizing with calls and transfers in progress: each of them ends exactly once, in bounded time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Error, Request, Responder};

use crate::support::{BOUND, Gate, Net, Pair, end, eventually, pattern};

const DEADLINE: Duration = Duration::from_millis(300);

/// Engines that wait no longer than [`DEADLINE`] for work in progress.
fn pair(net: &Net) -> Pair {
    net.pair_with(|b| b.finalize_timeout(DEADLINE))
}

#[track_caller]
fn assert_ended(result: calomel::Result<()>) {
    match result {
        Err(Error::Finalized { .. } | Error::Disconnected { .. } | Error::Unreachable { .. } | Error::Cancelled { .. }) => {}
        other => panic!("{other:?}"),
    }
}

fn finalize_waits_for_a_call_in_progress(net: &Net) {
    // The default deadline leaves enough time for a handler that has begun.
    let pair = net.pair();
    let entered = Gate::default();
    let door = entered.clone();
    pair.server
        .define("short", move |_: &Request, ()| {
            door.open();
            thread::sleep(Duration::from_millis(100));
            17u8
        })
        .unwrap();
    let pending = pair.client.procedure::<(), u8>("short").on(&pair.to_server).start(&()).unwrap();
    entered.wait();
    pair.server.finalize().unwrap();
    assert_eq!(pending.wait().unwrap(), 17);
}

fn calls_of_a_finalized_client_end(net: &Net) {
    let pair = pair(net);
    let (hold, held) = mpsc::channel();
    pair.server.define_deferred("kept", move |reply: Responder<()>, ()| hold.send(reply).unwrap()).unwrap();
    let kept = pair.client.procedure::<(), ()>("kept");
    let pendings: Vec<_> = (0..10).map(|_| kept.on(&pair.to_server).start(&()).unwrap()).collect();
    let responders: Vec<_> = (0..10).map(|_| held.recv_timeout(BOUND).unwrap()).collect();
    let begin = Instant::now();
    thread::scope(|s| {
        // Also a call that blocks another thread meanwhile.
        s.spawn(|| assert_ended(kept.on(&pair.to_server).call(&())));
        let _eleventh = held.recv_timeout(BOUND).unwrap();
        end(&pair.client);
        for pending in pendings {
            assert_ended(pending.wait());
        }
    });
    assert!(begin.elapsed() < DEADLINE + Duration::from_secs(3));
    for responder in responders {
        eventually("the server knows", || responder.request().is_cancelled());
    }
    pair.server.define("alive", |_: &Request, ()| ()).unwrap();
    let other = Pair::of(pair.server, net.client());
    other.client.procedure::<(), ()>("alive").on(&other.to_server).call(&()).unwrap();
}

fn calls_to_a_finalized_server_end(net: &Net) {
    let pair = pair(net);
    let entered = Gate::default();
    let (door, cancelled) = (entered.clone(), Arc::new(AtomicBool::new(false)));
    let tell = cancelled.clone();
    pair.server
        .define("endless", move |request: &Request, ()| {
            door.open();
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            tell.store(request.is_cancelled(), Ordering::SeqCst);
        })
        .unwrap();
    let pending = pair.client.procedure::<(), ()>("endless").on(&pair.to_server).start(&()).unwrap();
    entered.wait();
    let begin = Instant::now();
    end(&pair.server);
    // A handler that checks its request ends with the engine: by itself, or cancelled by finalize.
    let result = pending.wait();
    assert!(begin.elapsed() < DEADLINE + Duration::from_secs(3));
    if result.is_err() {
        assert_ended(result);
    }
    eventually("the handler learns it", || cancelled.load(Ordering::SeqCst));
}

fn calls_in_both_directions_end_with_finalize(net: &Net) {
    for finalize_server in [true, false] {
        let pair = pair(net);
        let (hold, held) = mpsc::channel();
        for engine in [&pair.server, &pair.client] {
            let hold = hold.clone();
            engine.define_deferred("kept", move |reply: Responder<()>, ()| hold.send(reply).unwrap()).unwrap();
        }
        let there = pair.client.procedure::<(), ()>("kept").on(&pair.to_server).start(&()).unwrap();
        let from_client = held.recv_timeout(BOUND).unwrap();
        let to_client = from_client.request().endpoint().clone();
        let back = pair.server.procedure::<(), ()>("kept").on(&to_client).start(&()).unwrap();
        let from_server = held.recv_timeout(BOUND).unwrap();
        let begin = Instant::now();
        end(if finalize_server { &pair.server } else { &pair.client });
        assert_ended(there.wait());
        assert_ended(back.wait());
        assert!(begin.elapsed() < DEADLINE + Duration::from_secs(3));
        drop((from_client, from_server));
    }
}

fn handler_that_blocks_for_ever_does_not_stop_finalize(net: &Net) {
    let pair = pair(net);
    let (entered, never) = (Gate::default(), Gate::default());
    let (e, n) = (entered.clone(), never.clone());
    pair.server
        .define("stuck", move |_: &Request, ()| {
            e.open();
            n.wait();
        })
        .unwrap();
    let pending = pair.client.procedure::<(), ()>("stuck").on(&pair.to_server).start(&()).unwrap();
    entered.wait();
    // Long enough to be detected as a handler that blocks.
    thread::sleep(Duration::from_millis(200));
    let begin = Instant::now();
    end(&pair.server);
    assert!(begin.elapsed() < DEADLINE + Duration::from_secs(3), "{:?}", begin.elapsed());
    assert_ended(pending.wait());
    never.open();
}

fn transfers_in_flight_end_and_return_their_buffers(net: &Net) {
    const LEN: usize = 48 << 20;
    for finalize_owner in [true, false] {
        let pair = pair(net);
        let data = pattern(1, LEN);
        let source = pair.server.expose_read_only(data.clone()).unwrap();
        let target = pair.server.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
        let pulled = pair.client.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
        let pushed = pair.client.expose(data.clone(), BulkMode::ReadOnly).unwrap();
        let pull = source.bulk().on(&pair.to_server).start_pull_into(pulled);
        let push = target.bulk().on(&pair.to_server).start_push_from(pushed);
        let begin = Instant::now();
        end(if finalize_owner { &pair.server } else { &pair.client });
        assert!(begin.elapsed() < DEADLINE + Duration::from_secs(5));
        let (result, pulled) = pull.wait();
        let pulled = pulled.reclaim();
        match result {
            Ok(moved) => assert!(moved == LEN && pulled == data),
            Err(error) => assert_ended(Err(error)),
        }
        let (result, pushed) = push.wait();
        assert!(pushed.reclaim() == data);
        let target = target.reclaim();
        match result {
            Ok(moved) => assert!(moved == LEN && target == data),
            Err(error) => assert_ended(Err(error)),
        }
        assert!(source.reclaim() == data);
    }
}

fn exposures_of_a_finalized_engine_are_reclaimed(net: &Net) {
    let pair = pair(net);
    let mut exposed = Vec::new();
    for i in 0..10u8 {
        exposed.push(pair.server.expose(vec![i; 1000], BulkMode::ReadWrite).unwrap());
    }
    let name = pair.server.expose_read_only(String::from("still here")).unwrap();
    pair.server.finalize().unwrap();
    assert_eq!(name.view(), "still here");
    for (i, exposed) in exposed.into_iter().enumerate() {
        assert_eq!(exposed.reclaim(), vec![i as u8; 1000]);
    }
    assert_eq!(name.reclaim(), "still here");
}

fn finalize_under_load_ends_in_bounded_time(net: &Net) {
    for round in 0..6 {
        let pair = pair(net);
        pair.server.define("plus", |_: &Request, n: u64| n + 1).unwrap();
        let exposed = pair.server.expose_read_only(pattern(1, 100_000)).unwrap();
        let bulk = exposed.bulk();
        let calls = std::sync::atomic::AtomicU32::new(0);
        thread::scope(|s| {
            for t in 0..8u64 {
                let (pair, bulk, calls) = (&pair, &bulk, &calls);
                s.spawn(move || {
                    let plus = pair.client.procedure::<u64, u64>("plus");
                    let begin = Instant::now();
                    for n in 0.. {
                        let result = if t % 2 == 0 {
                            plus.on(&pair.to_server).call(&n).map(|answer| assert_eq!(answer, n + 1))
                        } else {
                            bulk.on(&pair.to_server).pull_into(&mut [0u8; 5000][..]).map(|_| ())
                        };
                        calls.fetch_add(1, Ordering::SeqCst);
                        if result.is_err() {
                            return assert_ended(result);
                        }
                        assert!(begin.elapsed() < BOUND);
                    }
                });
            }
            eventually("there is load", || calls.load(Ordering::SeqCst) > 100);
            let begin = Instant::now();
            end(if round % 2 == 0 { &pair.server } else { &pair.client });
            assert!(begin.elapsed() < DEADLINE + Duration::from_secs(3));
        });
    }
}

suite![
    finalize_waits_for_a_call_in_progress,
    calls_of_a_finalized_client_end,
    calls_to_a_finalized_server_end,
    calls_in_both_directions_end_with_finalize,
    handler_that_blocks_for_ever_does_not_stop_finalize,
    transfers_in_flight_end_and_return_their_buffers,
    exposures_of_a_finalized_engine_are_reclaimed,
    finalize_under_load_ends_in_bounded_time,
];
