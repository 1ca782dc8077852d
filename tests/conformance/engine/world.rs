//! Worlds of several ranks: what they do together, and how all of them learn that one can't go on.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use calomel::launch::World;
use calomel::{Address, Engine, EngineBuilder, Error, Progress, Request};

use crate::support::{BOUND, Gate, Net, end};

/// More than the ranks below one in the tree, so that rank 1 is neither its root nor a leaf.
const SIZE: usize = 10;

fn engines(net: &Net, size: usize, configure: impl Fn(EngineBuilder) -> EngineBuilder) -> Vec<Engine> {
    (0..size).map(|_| net.server_with(&configure)).collect()
}

fn addresses(engines: &[Engine]) -> Vec<Address> {
    engines.iter().map(Engine::address).collect()
}

/// Runs `work` as each rank of a world of these engines.
fn as_each<T: Send>(engines: &[Engine], work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let addresses = addresses(engines);
    let rank = |rank: usize| work(World::from_addresses(&engines[rank], rank, &addresses, BOUND).unwrap());
    at_once(engines.len(), rank)
}

fn at_once<T: Send>(size: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|threads| {
        let started: Vec<_> = (0..size).map(|rank| threads.spawn(move || work(rank))).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn value_of(rank: usize) -> Vec<u8> {
    vec![rank as u8; 100 * rank]
}

fn ranks_meet_and_share_values(net: &Net) {
    for size in [1, 2, SIZE] {
        let engines = engines(net, size, |builder| builder);
        for engine in &engines {
            engine.define("square", |_: &Request, x: usize| x * x).unwrap();
        }
        let expected: Vec<Vec<u8>> = (0..size).map(value_of).collect();
        as_each(&engines, |world| {
            assert_eq!(world.size(), size);
            for _ in 0..3 {
                world.barrier(BOUND).unwrap();
                assert_eq!(world.all_gather(&value_of(world.rank()), BOUND).unwrap(), expected);
            }
            let next = (world.rank() + 1) % size;
            assert_eq!(world.endpoint(next).address(), engines[next].address());
            let square = engines[world.rank()].procedure::<usize, usize>("square");
            assert_eq!(square.on(world.endpoint(next)).timeout(BOUND).call(&next).unwrap(), next * next);
            assert_eq!(format!("{world:?}"), format!("World(rank {} of {size})", world.rank()));
            // No rank leaves before the others have called it.
            world.barrier(BOUND).unwrap();
        });
    }
}

fn barrier_lets_nobody_through_early(net: &Net) {
    let engines = engines(net, 4, |builder| builder);
    let arrived = AtomicUsize::new(0);
    as_each(&engines, |world| {
        for round in 1..=30 {
            arrived.fetch_add(1, Ordering::SeqCst);
            world.barrier(BOUND).unwrap();
            assert!(arrived.load(Ordering::SeqCst) >= 4 * round);
            assert!(arrived.load(Ordering::SeqCst) <= 4 * round + 3);
            world.barrier(BOUND).unwrap();
        }
    });
}

/// A rank that returns leaves at once, and takes no other rank's answer with it.
fn ranks_leave_right_after_a_barrier(net: &Net) {
    for _ in 0..10 {
        let engines = engines(net, 3, |builder| builder);
        as_each(&engines, |world| {
            world.barrier(BOUND).unwrap();
            let engine = &engines[world.rank()];
            drop(world);
            engine.finalize().unwrap();
        });
    }
}

fn worlds_on_one_engine_are_apart(net: &Net) {
    let engines = engines(net, 3, |builder| builder);
    let (all, some) = (addresses(&engines), addresses(&engines[..2]));
    at_once(3, |rank| {
        let engine = &engines[rank];
        let first = World::from_addresses(engine, rank, &all, BOUND).unwrap();
        let second = World::from_addresses(engine, rank, &all, BOUND).unwrap();
        let pair = (rank < 2).then(|| World::from_addresses(engine, rank, &some, BOUND).unwrap());
        // In different orders: the worlds do not wait for each other.
        let value = [rank as u8];
        if rank == 0 {
            thread::scope(|threads| {
                threads.spawn(|| first.barrier(BOUND).unwrap());
                assert_eq!(second.all_gather(&value, BOUND).unwrap(), [[0], [1], [2]]);
            });
        } else {
            assert_eq!(second.all_gather(&value, BOUND).unwrap(), [[0], [1], [2]]);
            first.barrier(BOUND).unwrap();
        }
        // The end of one world is not the end of another.
        drop(second);
        if let Some(pair) = pair {
            assert_eq!(pair.all_gather(&value, BOUND).unwrap(), [[0], [1]]);
        }
        first.barrier(BOUND).unwrap();
        // Nor is its name taken for the next one.
        drop(first);
        World::from_addresses(engine, rank, &all, BOUND).unwrap().barrier(BOUND).unwrap();
    });
}

fn worlds_on_two_engines_of_a_process_are_apart(net: &Net) {
    let (ones, others) = (engines(net, 3, |builder| builder), engines(net, 3, |builder| builder));
    let (all_ones, all_others) = (addresses(&ones), addresses(&others));
    at_once(3, |rank| {
        let one = World::from_addresses(&ones[rank], rank, &all_ones, BOUND).unwrap();
        let gathered = one.all_gather(others[rank].address().to_string().as_bytes(), BOUND).unwrap();
        let gathered: Vec<Address> = gathered.into_iter().map(|text| String::from_utf8(text).unwrap().parse().unwrap()).collect();
        assert_eq!(gathered, all_others);
        let other = World::from_addresses(&others[rank], rank, &gathered, BOUND).unwrap();
        drop(one);
        other.barrier(BOUND).unwrap();
    });
}

/// Whichever rank it is: the root, one in the middle, or a leaf.
fn rank_that_is_finalized_is_reported_to_all_others(net: &Net) {
    for lost in [0, 1, SIZE - 1] {
        let engines = engines(net, SIZE, |builder| builder);
        let address = engines[lost].address();
        as_each(&engines, |world| {
            if world.rank() == lost {
                end(&engines[lost]);
                assert!(matches!(world.barrier(BOUND), Err(Error::Finalized { .. })));
                return;
            }
            let begin = Instant::now();
            match world.barrier(BOUND) {
                Err(Error::Disconnected { peer, reason, .. }) => {
                    assert_eq!(peer, address);
                    assert!(reason.contains(&format!("rank {lost}")), "{reason}");
                }
                other => panic!("{other:?}"),
            }
            // The world is over.
            assert!(matches!(world.all_gather(&[], BOUND), Err(Error::Disconnected { .. })));
            assert!(begin.elapsed() < BOUND / 2, "{:?}", begin.elapsed());
        });
    }
}

fn rank_that_leaves_is_reported_while_its_engine_lives(net: &Net) {
    let engines = engines(net, 3, |builder| builder);
    as_each(&engines, |world| {
        if world.rank() == 2 {
            return;
        }
        let left = world.all_gather(b"x", BOUND).unwrap_err();
        assert!(matches!(left, Error::Disconnected { .. }), "{left:?}");
        assert!(left.to_string().contains("rank 2: it has left the world"), "{left}");
        world.endpoint(2).ping(BOUND).unwrap();
    });
}

fn deadline_holds_where_a_rank_does_not_come(net: &Net) {
    let (engines, over) = (engines(net, 3, |builder| builder), Gate::default());
    let waiting = AtomicUsize::new(2);
    as_each(&engines, |world| {
        if world.rank() == 1 {
            return over.wait();
        }
        let begin = Instant::now();
        let error = world.barrier(Duration::from_millis(200)).unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        assert!(error.to_string().contains("barrier, waiting for rank"), "{error}");
        // Another rank's deadline may have been a moment earlier.
        assert!(begin.elapsed() >= Duration::from_millis(50), "{:?}", begin.elapsed());
        assert!(world.barrier(BOUND).unwrap_err().is_timeout());
        assert!(begin.elapsed() < BOUND / 2, "{:?}", begin.elapsed());
        if waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
            over.open();
        }
        over.wait();
    });
}

fn deadline_holds_for_joining(net: &Net) {
    let engine = net.server();
    for other in [net.dead_address(), net.server().address().to_string()] {
        let addresses = [engine.address(), other.parse().unwrap()];
        for rank in [0, 1] {
            let addresses = if rank == 0 { addresses.clone() } else { [addresses[1].clone(), addresses[0].clone()] };
            let begin = Instant::now();
            let error = World::from_addresses(&engine, rank, &addresses, Duration::from_millis(100)).unwrap_err();
            assert!(matches!(&error, Error::Timeout { peer, .. } if peer.to_string() == other), "{error:?}");
            assert!(error.to_string().contains("joining the world, waiting for rank"), "{error}");
            assert!(begin.elapsed() < BOUND / 2, "{:?}", begin.elapsed());
        }
    }
}

/// An attempt that has failed is none of the worlds that the ranks count.
fn attempt_can_be_repeated(net: &Net) {
    let engines = engines(net, 2, |builder| builder);
    let addresses = addresses(&engines);
    for _ in 0..2 {
        let early = World::from_addresses(&engines[1], 1, &addresses, Duration::from_millis(20));
        assert!(early.unwrap_err().is_timeout());
    }
    as_each(&engines, |world| world.barrier(BOUND).unwrap());
}

fn ranks_that_disagree_are_told(net: &Net) {
    let engines = engines(net, 2, |builder| builder);
    let errors = as_each(&engines, |world| match world.rank() {
        0 => world.barrier(BOUND).unwrap_err(),
        _ => world.all_gather(b"x", BOUND).unwrap_err(),
    });
    for error in errors {
        assert!(matches!(error, Error::Failed { .. }), "{error:?}");
        assert!(["all_gather while", "barrier while"].iter().any(|text| error.to_string().contains(text)), "{error}");
    }
}

fn value_that_is_too_long_is_refused(net: &Net) {
    let engines = engines(net, 2, |builder| builder);
    let most = (4 << 20) / 2;
    as_each(&engines, |world| {
        let gathered = world.all_gather(&vec![world.rank() as u8; most], BOUND).unwrap();
        assert!(gathered[0] == vec![0; most] && gathered[1] == vec![1; most]);
        if world.rank() == 1 {
            let error = world.all_gather(&vec![0; most + 1], BOUND).unwrap_err();
            assert!(
                matches!(error, Error::MessageTooLarge { size, limit, .. } if size == most + 1 && limit == most),
                "{error:?}"
            );
        } else {
            let error = world.all_gather(&[], BOUND).unwrap_err();
            assert!(matches!(error, Error::Failed { .. }), "{error:?}");
            assert!(error.to_string().contains("rank 1") && error.to_string().contains("limit of 2097152"), "{error}");
        }
    });
}

fn engines_without_threads_serve_while_they_wait(net: &Net) {
    let bare = |builder: EngineBuilder| builder.progress(Progress::External).handler_threads(0);
    let engines = engines(net, SIZE, bare);
    as_each(&engines, |world| {
        assert_eq!(world.all_gather(&[7], BOUND).unwrap(), vec![vec![7]; SIZE]);
        world.barrier(BOUND).unwrap();
        // Together: each drives its own end of the connections.
        let engine = &engines[world.rank()];
        drop(world);
        engine.finalize().unwrap();
    });
}

fn second_thread_in_a_barrier_is_refused(net: &Net) {
    let engines = engines(net, 2, |builder| builder);
    let waits = Gate::default();
    as_each(&engines, |world| {
        if world.rank() == 1 {
            waits.wait();
            return world.barrier(BOUND).unwrap();
        }
        thread::scope(|threads| {
            let (ended, results) = mpsc::channel();
            for _ in 0..2 {
                let (world, ended) = (&world, ended.clone());
                threads.spawn(move || ended.send(world.barrier(BOUND)).unwrap());
            }
            // Whichever is second: the other one waits for rank 1.
            let refused = results.recv_timeout(BOUND).unwrap().unwrap_err();
            assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");
            assert!(refused.to_string().contains("another thread"), "{refused}");
            waits.open();
            results.recv_timeout(BOUND).unwrap().unwrap();
        });
    });
}

fn wrong_arguments_are_named(net: &Net) {
    let (engine, other) = (net.server(), net.server());
    let addresses = [engine.address(), other.address()];
    for (result, part) in [
        (World::from_addresses(&engine, 2, &addresses, BOUND), "rank 2: ranks are less than 2"),
        (World::from_addresses(&engine, 0, &[], BOUND), "rank 0: ranks are less than 0"),
        (World::from_addresses(&engine, 0, &[engine.address(), engine.address()], BOUND), "ranks 0 and 1 have the same"),
        (World::from_addresses(&net.client(), 0, &addresses, BOUND), "the engine does not listen"),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Launch { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// The engine at a rank's address takes itself for another rank.
fn rank_at_the_wrong_place_is_found(net: &Net) {
    let engines = engines(net, 3, |builder| builder);
    let addresses = addresses(&engines);
    let errors = at_once(3, |rank| {
        let claimed = [0, 2, 1][rank];
        World::from_addresses(&engines[rank], claimed, &addresses, Duration::from_millis(500)).unwrap_err()
    });
    assert!(errors.iter().any(|error| error.to_string().contains("takes it for rank")), "{errors:?}");
}

suite!(
    ranks_meet_and_share_values,
    barrier_lets_nobody_through_early,
    ranks_leave_right_after_a_barrier,
    worlds_on_one_engine_are_apart,
    worlds_on_two_engines_of_a_process_are_apart,
    rank_that_is_finalized_is_reported_to_all_others,
    rank_that_leaves_is_reported_while_its_engine_lives,
    deadline_holds_where_a_rank_does_not_come,
    deadline_holds_for_joining,
    attempt_can_be_repeated,
    ranks_that_disagree_are_told,
    value_that_is_too_long_is_refused,
    engines_without_threads_serve_while_they_wait,
    second_thread_in_a_barrier_is_refused,
    wrong_arguments_are_named,
    rank_at_the_wrong_place_is_found,
);
