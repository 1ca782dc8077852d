//! Rules that the fast path must keep: calls queued to be sent with others are sent, threads do not wait for a handler that
//! blocks, and busy engines still serve timers and new peers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, PeerEvent, Pending, Request, Responder};

use crate::assert_error;
use crate::support::{BOUND, Net, eventually, patience};

/// The time limit for waking a thread on a busy machine.
fn soon() -> Duration {
    patience() * Duration::from_millis(300)
}

/// Defines `held`, whose calls are not answered, and counts them.
fn define_held(server: &Engine) -> Arc<AtomicUsize> {
    let held = Mutex::new(Vec::new());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    server
        .define_deferred("held", move |responder: Responder<()>, (): ()| {
            held.lock().unwrap().push(responder);
            counted.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    count
}

fn started_calls_that_are_not_polled_are_sent(net: &Net) {
    let pair = net.pair();
    let count = define_held(&pair.server);
    let held = pair.client.procedure::<(), ()>("held").on(&pair.to_server);
    let mut pendings: Vec<Pending<()>> = Vec::new();
    // One more at a time, with many in flight: each waits to be sent with the next one, and there is none.
    for round in 0..100u64 {
        let calls = if round == 0 { 20 } else { 1 + round as usize % 3 };
        pendings.extend((0..calls).map(|_| held.start(&()).unwrap()));
        let started = Instant::now();
        eventually("the calls arrived", || count.load(Ordering::SeqCst) == pendings.len());
        assert!(started.elapsed() < soon(), "round {round}: {:?}", started.elapsed());
        // The engine is busy, about to sleep, or asleep.
        thread::sleep(Duration::from_micros([0, 100, 380, 420, 500, 1000, 5000][round as usize % 7]));
    }
    for pending in pendings {
        pending.cancel();
        assert_error!(pending.wait(), Error::Cancelled { .. });
    }
}

fn calls_started_by_several_threads_are_sent(net: &Net) {
    const THREADS: usize = 3;
    const EACH: usize = 300;
    let pair = net.pair();
    let count = define_held(&pair.server);
    pair.server.define("empty", |_: &Request, (): ()| ()).unwrap();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (pair, count) = (&pair, &count);
            scope.spawn(move || {
                let held = pair.client.procedure::<(), ()>("held").on(&pair.to_server);
                let empty = pair.client.procedure::<(), ()>("empty").on(&pair.to_server);
                let mut pendings = Vec::new();
                for n in 0..EACH {
                    pendings.push(held.start(&()).unwrap());
                    match (n + number) % 50 {
                        // Other threads drive for a while, and stop.
                        0 => empty.call(&()).unwrap(),
                        10 => thread::sleep(Duration::from_micros(400)),
                        20 => thread::sleep(Duration::from_micros(900)),
                        _ => {}
                    }
                }
                eventually("the calls arrived", || count.load(Ordering::SeqCst) == THREADS * EACH);
                drop(pendings);
            });
        }
    });
}

fn one_way_calls_without_later_calls_are_sent(net: &Net) {
    let pair = net.pair();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    pair.server
        .define("note", move |_: &Request, (): ()| {
            counted.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    let note = pair.client.procedure::<(), ()>("note").on(&pair.to_server);
    let mut sent = 0;
    for round in 0..60usize {
        for _ in 0..=round {
            note.notify(&()).unwrap();
        }
        sent += round + 1;
        eventually("the calls arrived", || count.load(Ordering::SeqCst) == sent);
        thread::sleep(Duration::from_micros([0, 390, 450, 2000][round % 4]));
    }
}

fn one_way_calls_before_finalize_are_sent(net: &Net) {
    let server = net.server();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    server
        .define("note", move |_: &Request, (): ()| {
            counted.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    let client = net.client();
    let note = client.procedure::<(), ()>("note").on(client.lookup(server.address()).unwrap());
    for _ in 0..100 {
        note.notify(&()).unwrap();
    }
    client.finalize().unwrap();
    eventually("the calls arrived", || count.load(Ordering::SeqCst) == 100);
}

/// The engine's own calls proceed while one of its handlers blocks, whichever thread holds the driver lock, in every round.
fn blocked_handler_does_not_delay_its_engines_callers(net: &Net) {
    let (one, other) = (net.server(), net.server());
    for engine in [&one, &other] {
        engine.define("empty", |_: &Request, (): ()| ()).unwrap();
    }
    let (to_one, to_other) = (other.lookup(one.address()).unwrap(), one.lookup(other.address()).unwrap());
    let empty = one.procedure::<(), ()>("empty").on(&to_other);
    empty.call(&()).unwrap();
    for round in 0..5 {
        let (open, opened) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel::<()>();
        // A new procedure each time, which has not been classified yet.
        let name = format!("block {round}");
        let opened = Mutex::new(opened);
        one.define(&name, move |_: &Request, (): ()| {
            begin.send(()).unwrap();
            let _ = opened.lock().unwrap().recv_timeout(BOUND);
        })
        .unwrap();
        let blocked = other.procedure::<(), ()>(&name).on(&to_one).start(&()).unwrap();
        begun.recv_timeout(BOUND).unwrap();
        for _ in 0..20 {
            let started = Instant::now();
            empty.call(&()).unwrap();
            assert!(started.elapsed() < soon(), "round {round}: {:?}", started.elapsed());
        }
        // Calls of other engines are served as well.
        let started = Instant::now();
        other.procedure::<(), ()>("empty").on(&to_one).call(&()).unwrap();
        assert!(started.elapsed() < soon(), "round {round}: {:?}", started.elapsed());
        open.send(()).unwrap();
        blocked.wait().unwrap();
    }
}

/// As above, after the handler has waited in a call of its own: the watcher may not have checked it since.
fn handler_that_blocks_after_a_call_does_not_delay_others(net: &Net) {
    let (one, other) = (net.server(), net.server());
    for engine in [&one, &other] {
        engine.define("empty", |_: &Request, (): ()| ()).unwrap();
    }
    other.define("slow", |_: &Request, (): ()| thread::sleep(Duration::from_millis(40))).unwrap();
    let (open, opened) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    one.define("block", move |request: &Request, (): ()| {
        request.engine().procedure::<(), ()>("slow").on(request.endpoint()).call(&()).unwrap();
        begin.send(()).unwrap();
        let _ = opened.lock().unwrap().recv_timeout(BOUND);
    })
    .unwrap();
    let to_one = other.lookup(one.address()).unwrap();
    let blocked = other.procedure::<(), ()>("block").on(&to_one).start(&()).unwrap();
    begun.recv_timeout(BOUND).unwrap();
    let started = Instant::now();
    other.procedure::<(), ()>("empty").on(&to_one).call(&()).unwrap();
    assert!(started.elapsed() < soon(), "{:?}", started.elapsed());
    open.send(()).unwrap();
    blocked.wait().unwrap();
}

/// As above, with handlers that have all been quick before, after pauses of all lengths: they are watched less closely.
fn handler_that_blocks_after_many_quick_ones_does_not_delay_others(net: &Net) {
    let (one, other) = (net.server(), net.server());
    one.define("empty", |_: &Request, (): ()| ()).unwrap();
    let to_one = other.lookup(one.address()).unwrap();
    let empty = other.procedure::<(), ()>("empty").on(&to_one);
    for pause in [0, 1, 3, 7, 14, 40] {
        let (open, opened) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel::<()>();
        let opened = Mutex::new(opened);
        let name = format!("mixed {pause}");
        one.define(&name, move |_: &Request, blocks: bool| {
            if blocks {
                begin.send(()).unwrap();
                let _ = opened.lock().unwrap().recv_timeout(BOUND);
            }
        })
        .unwrap();
        let mixed = other.procedure::<bool, ()>(&name).on(&to_one);
        (0..100).for_each(|_| mixed.call(&false).unwrap());
        thread::sleep(Duration::from_millis(pause));
        let blocked = mixed.start(&true).unwrap();
        begun.recv_timeout(BOUND).unwrap();
        let started = Instant::now();
        empty.call(&()).unwrap();
        assert!(started.elapsed() < soon(), "after {pause} ms: {:?}", started.elapsed());
        open.send(()).unwrap();
        blocked.wait().unwrap();
    }
}

/// After a call that found its engine asleep, with arguments that one write may not send: requests reach that engine, and it
/// notices that a peer is gone.
fn engine_is_reached_between_rare_calls(net: &Net) {
    let (gone, notice) = mpsc::channel();
    let other = net.server_with(|builder| {
        builder.on_peer_event(move |event| {
            if let PeerEvent::Lost { .. } = event {
                let _ = gone.send(Instant::now());
            }
        })
    });
    let one = net.server();
    for engine in [&one, &other] {
        engine.define("length", |_: &Request, text: String| text.len() as u64).unwrap();
    }
    let (to_one, to_other) = (other.lookup(one.address()).unwrap(), one.lookup(other.address()).unwrap());
    let forth = other.procedure::<String, u64>("length").on(&to_one);
    let back = one.procedure::<String, u64>("length").on(&to_other);
    back.call(&String::new()).unwrap();
    for round in 0..24usize {
        let text = "-".repeat([0, 100, 70_000, 3 << 20][round % 4]);
        thread::sleep(Duration::from_millis(2));
        assert_eq!(forth.call(&text).unwrap(), text.len() as u64);
        thread::sleep(Duration::from_micros([0, 100, 1000][round % 3]));
        let started = Instant::now();
        assert_eq!(back.call(&"back".to_owned()).unwrap(), 4);
        assert!(started.elapsed() < soon(), "round {round}: {:?}", started.elapsed());
    }
    thread::sleep(Duration::from_millis(2));
    forth.call(&String::new()).unwrap();
    one.finalize().unwrap();
    let finalized = Instant::now();
    let noticed = notice.recv_timeout(BOUND).unwrap().saturating_duration_since(finalized);
    assert!(noticed < soon(), "{noticed:?}");
}

/// Makes calls without pause until `work` is done.
fn busily<R>(pair: &crate::support::Pair, work: impl FnOnce() -> R) -> R {
    pair.server.define("busy", |_: &Request, (): ()| ()).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let busy = pair.client.procedure::<(), ()>("busy").on(&pair.to_server);
            while !stop.load(Ordering::SeqCst) {
                busy.call(&()).unwrap();
            }
        });
        // The other thread must end even if this one panics.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::SeqCst);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn timers_and_deadlines_of_busy_engines_are_on_time(net: &Net) {
    let pair = net.pair();
    define_held(&pair.server);
    busily(&pair, || {
        for _ in 0..5 {
            let delay = Duration::from_millis(20);
            for engine in [&pair.server, &pair.client] {
                let (fire, fired) = mpsc::channel();
                let set = Instant::now();
                engine.timer(delay, move || fire.send(Instant::now()).unwrap()).unwrap();
                let at = fired.recv_timeout(BOUND).unwrap();
                assert!(at - set >= delay && at - set < delay + soon(), "{:?}", at - set);
            }
            let started = Instant::now();
            let held = pair.client.procedure::<(), ()>("held").on(&pair.to_server).timeout(delay).start(&()).unwrap();
            assert_error!(held.wait(), Error::Timeout { .. });
            let took = started.elapsed();
            assert!(took >= delay && took < delay + soon(), "{took:?}");
        }
    });
}

fn new_peers_of_busy_engines_are_served(net: &Net) {
    let pair = net.pair();
    busily(&pair, || {
        for _ in 0..5 {
            let new_peer = net.client();
            let to_server = new_peer.lookup(pair.server.address()).unwrap();
            let started = Instant::now();
            new_peer.procedure::<(), ()>("busy").on(&to_server).call(&()).unwrap();
            assert!(started.elapsed() < soon(), "{:?}", started.elapsed());
        }
    });
}

/// Calls from several threads with pauses: all threads sleep in between, and each must be woken.
fn rare_calls_of_several_threads_are_answered(net: &Net) {
    let pair = net.pair();
    pair.server.define("empty", |_: &Request, (): ()| ()).unwrap();
    thread::scope(|scope| {
        for number in 0..4u64 {
            let pair = &pair;
            scope.spawn(move || {
                let empty = pair.client.procedure::<(), ()>("empty").on(&pair.to_server);
                for n in 0..40 {
                    thread::sleep(Duration::from_micros(300 * ((number * 7 + n * 5) % 11)));
                    let started = Instant::now();
                    empty.call(&()).unwrap();
                    assert!(started.elapsed() < soon(), "{:?}", started.elapsed());
                }
            });
        }
    });
}

suite!(
    started_calls_that_are_not_polled_are_sent,
    calls_started_by_several_threads_are_sent,
    one_way_calls_without_later_calls_are_sent,
    one_way_calls_before_finalize_are_sent,
    blocked_handler_does_not_delay_its_engines_callers,
    handler_that_blocks_after_a_call_does_not_delay_others,
    handler_that_blocks_after_many_quick_ones_does_not_delay_others,
    engine_is_reached_between_rare_calls,
    timers_and_deadlines_of_busy_engines_are_on_time,
    new_peers_of_busy_engines_are_served,
    rare_calls_of_several_threads_are_answered,
);
