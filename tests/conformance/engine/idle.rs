//! Idle connections: they are closed, and whatever is called next connects again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuilder, Error, Grant, PeerEvent, Progress, Request, TransportStats};

use crate::event_loop::{EventLoop, TRIGGERS};
use crate::support::{BOUND, Net, Pair, Random, eventually, pattern, stays};

const TIMEOUT: Duration = Duration::from_millis(20);

fn idle(builder: EngineBuilder) -> EngineBuilder {
    builder.idle_timeout(TIMEOUT)
}

/// Two engines that listen, and close idle connections.
fn both(net: &Net) -> Pair {
    Pair::of(net.server_with(idle), net.server_with(idle))
}

fn define_echo(engine: &Engine) {
    engine.define("echo", |_: &Request, text: String| text).unwrap();
}

#[track_caller]
fn assert_echoes(from: &Engine, to: &Endpoint) {
    let echo = from.procedure::<String, String>("echo").on(to).timeout(BOUND);
    assert_eq!(echo.call(&"x".to_owned()).unwrap(), "x");
    // Too long for one message.
    assert_eq!(echo.call(&"y".repeat(100_000)).unwrap().len(), 100_000);
}

#[track_caller]
fn wait_until_closed(engines: &[&Engine]) {
    eventually("the connection is closed", || engines.iter().all(|engine| engine.peers().is_empty()));
}

fn idle_connection_is_closed_and_made_again(net: &Net) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let noted = events.clone();
    let hook = move |event| {
        noted.lock().unwrap().push(match event {
            PeerEvent::Connected(_) => "connected",
            PeerEvent::Idle(_) => "idle",
            other => panic!("{other:?}"),
        });
    };
    let pair = Pair::of(net.server_with(idle), net.server_with(|builder| idle(builder).on_peer_event(hook)));
    define_echo(&pair.server);
    let told = Arc::new(AtomicUsize::new(0));
    let counted = told.clone();
    pair.server
        .define("tell", move |_: &Request, ()| {
            counted.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    let exposed = pair.server.expose(pattern(1, 3 << 20), BulkMode::ReadWrite).unwrap();
    let bulk = crate::support::travelled(&exposed.bulk());
    let mut copy = vec![0; 3 << 20];
    for round in 1..=3 {
        assert_echoes(&pair.client, &pair.to_server);
        wait_until_closed(&[&pair.client, &pair.server]);
        assert!(!pair.to_server.is_connected() && pair.to_server.transport().is_none());
        bulk.on(&pair.to_server).pull_into(&mut copy).unwrap();
        // That there is a connection again is counted below: on a slow machine it is closed by now.
        assert!(copy == pattern(1, 3 << 20));
        wait_until_closed(&[&pair.client, &pair.server]);
        bulk.on(&pair.to_server).push_from(&copy).unwrap();
        wait_until_closed(&[&pair.client, &pair.server]);
        // By an address that the bulk names.
        bulk.origin(&pair.client).unwrap().pull_into(&mut copy).unwrap();
        wait_until_closed(&[&pair.client, &pair.server]);
        pair.client.procedure::<(), ()>("tell").on(&pair.to_server).notify(&()).unwrap();
        eventually("the one-way call is handled", || told.load(Ordering::SeqCst) == round);
        wait_until_closed(&[&pair.client, &pair.server]);
    }
    let count = 5 * 3;
    eventually("each is reported", || events.lock().unwrap().len() == 2 * count);
    assert!(events.lock().unwrap().chunks(2).all(|both| both == ["connected", "idle"]));
    for engine in [&pair.client, &pair.server] {
        let sum = |count: fn(&TransportStats) -> u64| engine.stats().transports.iter().map(count).sum::<u64>();
        // The side that was dialled has left the connection a moment before it is closed.
        eventually("all have ended", || sum(|t| t.open) == 0);
        assert_eq!(sum(|t| t.failed), 0);
        assert!(sum(|t| t.ended) >= count as u64);
    }
}

fn server_calls_back_a_client_that_listens(net: &Net) {
    let pair = both(net);
    let kept = Arc::new(Mutex::new(None));
    let keep = kept.clone();
    pair.server
        .define("hello", move |request: &Request, ()| drop(keep.lock().unwrap().replace(request.endpoint().clone())))
        .unwrap();
    define_echo(&pair.client);
    pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
    let back = kept.lock().unwrap().take().unwrap();
    for _ in 0..3 {
        wait_until_closed(&[&pair.client, &pair.server]);
        assert_echoes(&pair.server, &back);
        assert_eq!(pair.server.peers(), std::slice::from_ref(&back));
    }
}

/// Memory that one peer may read is read by it after an idle connection, whichever side connects again.
fn memory_for_one_peer_is_read_after_an_idle_connection(net: &Net) {
    let pair = both(net);
    let exposed = Arc::new(Mutex::new(None));
    let kept = exposed.clone();
    pair.server
        .define("expose", move |request: &Request, ()| {
            let grant = Grant::new().only(request.endpoint());
            let exposed = request.engine().expose_with(pattern(2, 10_000), BulkMode::ReadOnly, &grant).unwrap();
            *kept.lock().unwrap() = Some(exposed);
        })
        .unwrap();
    pair.client.procedure::<(), ()>("expose").on(&pair.to_server).call(&()).unwrap();
    let bulk = crate::support::travelled(&exposed.lock().unwrap().as_ref().unwrap().bulk());
    for _ in 0..3 {
        wait_until_closed(&[&pair.client, &pair.server]);
        let mut copy = vec![0; 10_000];
        bulk.on(&pair.to_server).pull_into(&mut copy).unwrap();
        assert!(copy == pattern(2, 10_000));
    }
}

fn client_that_does_not_listen_stays_within_reach(net: &Net) {
    let pair = net.pair_with(idle);
    let client = net.client_with(idle);
    let kept = Arc::new(Mutex::new(None));
    let keep = kept.clone();
    pair.server
        .define("hello", move |request: &Request, ()| drop(keep.lock().unwrap().replace(request.endpoint().clone())))
        .unwrap();
    define_echo(&client);
    client.procedure::<(), ()>("hello").on(client.lookup(pair.server.address()).unwrap()).call(&()).unwrap();
    let back = kept.lock().unwrap().take().unwrap();
    stays("the connection is open", 10 * TIMEOUT, || client.peers().len() == 1 && pair.server.peers().len() == 1);
    assert_echoes(&pair.server, &back);
    // No one could call it any more.
    drop(back);
    wait_until_closed(&[&client, &pair.server]);
    // Its memory can be reached over its connections only.
    let exposed = client.expose_read_only(vec![1u8; 10_000]).unwrap();
    client.lookup(pair.server.address()).unwrap().ping(BOUND).unwrap();
    stays("the connection is open", 10 * TIMEOUT, || client.peers().len() == 1);
    drop(exposed);
    wait_until_closed(&[&client, &pair.server]);
}

fn connection_with_work_in_progress_stays_open(net: &Net) {
    let pair = both(net);
    pair.server.define("sleep", |_: &Request, ()| thread::sleep(10 * TIMEOUT)).unwrap();
    let sleep = pair.client.procedure::<(), ()>("sleep");
    sleep.on(&pair.to_server).call(&()).unwrap();
    sleep.on(&pair.to_server).notify(&()).unwrap();
    stays("the connection is open", 6 * TIMEOUT, || pair.server.peers().len() == 1);
    wait_until_closed(&[&pair.client, &pair.server]);
}

/// An event loop that sleeps until the engine's next deadline closes idle connections too.
fn event_loop_closes_idle_connections(net: &Net) {
    let external = |builder: EngineBuilder| idle(builder).progress(Progress::External).handler_threads(0);
    let pair = Pair::of(net.server(), net.server_with(external));
    define_echo(&pair.server);
    let _served = EventLoop::serving(&[&pair.client], TRIGGERS[0]);
    for _ in 0..3 {
        assert_echoes(&pair.client, &pair.to_server);
        wait_until_closed(&[&pair.client, &pair.server]);
    }
}

fn engine_ends_while_connections_are_idle(net: &Net) {
    for pause in [0, 10, 19, 20, 21, 30, 39, 40, 41, 60] {
        let pair = both(net);
        pair.to_server.ping(BOUND).unwrap();
        thread::sleep(Duration::from_millis(pause));
        pair.server.finalize().unwrap();
        assert!(matches!(
            pair.to_server.ping(BOUND),
            Err(Error::Unreachable { .. } | Error::Disconnected { .. } | Error::AccessDenied { .. })
        ));
        pair.client.finalize().unwrap();
    }
}

const ROUNDS: u64 = 150;

/// The numbers of the calls that were handled, and how often.
type Handled = Arc<Mutex<HashMap<u64, usize>>>;

/// Both engines call each other, at intervals about as long as the timeout: each call succeeds, and is handled once.
fn calls_around_the_timeout_succeed_once(net: &Net) {
    let closed = Arc::new(AtomicUsize::new(0));
    let engine = |timeout: u64| {
        let closed = closed.clone();
        let hook = move |event| match event {
            PeerEvent::Connected(_) => {}
            PeerEvent::Idle(_) => {
                closed.fetch_add(1, Ordering::Relaxed);
            }
            other => panic!("{other:?}"),
        };
        net.server_with(|builder| builder.idle_timeout(Duration::from_millis(timeout)).on_peer_event(hook))
    };
    let engines = [engine(1), engine(3)];
    let handled: [Handled; 2] = Default::default();
    for (engine, handled) in engines.iter().zip(&handled) {
        let (called, told) = (handled.clone(), handled.clone());
        let note = |handled: &Handled, n: u64| *handled.lock().unwrap().entry(n).or_default() += 1;
        engine
            .define("call", move |_: &Request, n: u64| {
                note(&called, n);
                n + 1
            })
            .unwrap();
        engine.define("tell", move |_: &Request, n: u64| note(&told, n)).unwrap();
        let read = |request: &Request, bulk: Bulk| {
            let mut copy = vec![0; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut copy).unwrap();
            copy.len()
        };
        engine.define("read", read).unwrap();
    }
    let memory = pattern(1, 5000);
    let exposed = [0, 1].map(|number: usize| engines[number].expose_read_only(memory.clone()).unwrap());
    let start = Barrier::new(6);
    let made: Vec<u64> = thread::scope(|scope| {
        let callers: Vec<_> = (0..6u64)
            .map(|thread| {
                let number = thread as usize % 2;
                let (from, to, bulk, memory) = (&engines[number], &engines[1 - number], exposed[1 - number].bulk(), &memory);
                let start = &start;
                scope.spawn(move || {
                    let (mut pauses, mut random) = (Random(7), Random(thread));
                    let peer = from.lookup(to.address()).unwrap();
                    let (call, tell) = (from.procedure::<u64, u64>("call"), from.procedure::<u64, ()>("tell"));
                    let read = from.procedure::<Bulk, usize>("read");
                    let first = 1000 * 1000 * thread;
                    for n in first..first + ROUNDS {
                        // All begin at about the same time, which is about when the connection is closed.
                        start.wait();
                        thread::sleep(Duration::from_micros((pauses.below(9000) + random.below(500)) as u64));
                        match thread / 2 {
                            0 => assert_eq!(call.on(&peer).timeout(BOUND).call(&n).unwrap(), n + 1),
                            1 => tell.on(&peer).timeout(BOUND).notify(&n).unwrap(),
                            _ if random.below(2) == 0 => {
                                let mut copy = vec![0; 5000];
                                bulk.on(&peer).pull_into(&mut copy).unwrap();
                                assert!(copy == *memory);
                            }
                            _ => {
                                let grant = Grant::new().for_one_call();
                                let exposed = from.expose_with(vec![1u8; 6000], BulkMode::ReadOnly, &grant).unwrap();
                                assert_eq!(read.on(&peer).timeout(BOUND).call(&exposed.bulk()).unwrap(), 6000);
                            }
                        }
                    }
                    if thread / 2 < 2 { ROUNDS } else { 0 }
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    for number in [0, 1] {
        let count: u64 = made.iter().skip(1 - number).step_by(2).sum();
        eventually("all were handled", || handled[number].lock().unwrap().len() as u64 == count);
        assert!(handled[number].lock().unwrap().values().all(|times| *times == 1));
    }
    wait_until_closed(&[&engines[0], &engines[1]]);
    assert!(closed.load(Ordering::Relaxed) > 10, "the connections were closed {closed:?} times");
}

suite!(
    idle_connection_is_closed_and_made_again,
    server_calls_back_a_client_that_listens,
    memory_for_one_peer_is_read_after_an_idle_connection,
    client_that_does_not_listen_stays_within_reach,
    connection_with_work_in_progress_stays_open,
    event_loop_closes_idle_connections,
    engine_ends_while_connections_are_idle,
    calls_around_the_timeout_succeed_once,
);
