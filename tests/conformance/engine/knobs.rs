//! Every setting, at the ends of its range.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{EngineBuilder, Request};

use crate::support::{BOUND, Gate, Net, Pair, block_on, pattern};

/// Makes calls and transfers, sets a timer, requests a shutdown, and finalizes.
fn exercise(pair: &Pair) {
    pair.server.define("length", |_: &Request, text: String| text.len()).unwrap();
    let length = pair.client.procedure::<String, usize>("length");
    for len in [0, 100, 50_000] {
        assert_eq!(length.on(&pair.to_server).call(&"x".repeat(len)).unwrap(), len);
    }
    let exposed = pair.server.expose_read_only(pattern(1, 300_000)).unwrap();
    let mut copy = vec![0u8; 300_000];
    exposed.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(copy == exposed.view());
    let (fire, fired) = mpsc::channel();
    let _timer = pair.client.timer(Duration::from_millis(2), move || fire.send(()).unwrap()).unwrap();
    fired.recv_timeout(BOUND).unwrap();
    assert!(pair.to_server.shutdown().is_err());
    let begin = Instant::now();
    pair.client.finalize().unwrap();
    pair.server.finalize().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(3));
}

fn maximal_durations_are_accepted(net: &Net) {
    let settings: [fn(EngineBuilder, Duration) -> EngineBuilder; 4] = [
        EngineBuilder::default_timeout,
        EngineBuilder::connect_timeout,
        EngineBuilder::peer_timeout,
        EngineBuilder::finalize_timeout,
    ];
    for (i, set) in settings.iter().enumerate() {
        for duration in [Duration::MAX, Duration::from_secs(u64::MAX / 2), Duration::from_secs(1 << 40)] {
            println!("setting {i}, {duration:?}");
            exercise(&net.pair_with(|b| set(b, duration)));
        }
    }
}

fn maximal_timers_do_not_fire(net: &Net) {
    let engine = net.client();
    let timer = engine.timer(Duration::MAX, || panic!("the end of time has come")).unwrap();
    timer.cancel();
    let _timer = engine.timer(Duration::from_secs(1 << 50), || panic!("the end of time has come")).unwrap();
    let exposed = engine.expose_read_only(String::new()).unwrap();
    exposed.released().wait_timeout(Duration::MAX).unwrap();
    engine.finalize().unwrap();
}

fn zero_and_maximal_sizes_are_accepted(net: &Net) {
    for size in [0, 1, 1000, usize::MAX] {
        exercise(&net.pair_with(|b| b.eager_limit(size)));
        exercise(&net.pair_with(|b| b.eager_bulk_limit(size)));
    }
    exercise(&net.pair_with(|b| b.max_message_size(usize::MAX)));
    exercise(&net.pair_with(|b| b.handler_threads(1000)));
    // With a limit of zero bytes, calls without arguments and results are still possible.
    let pair = net.pair_with(|b| b.max_message_size(0));
    pair.server.define("nothing", |_: &Request, ()| ()).unwrap();
    pair.client.procedure::<(), ()>("nothing").on(&pair.to_server).call(&()).unwrap();
}

fn short_heartbeat_does_not_end_long_calls(net: &Net) {
    let pair = net.pair_with(|b| b.peer_timeout(Duration::from_secs(1)));
    pair.server.define("long", |_: &Request, ()| thread::sleep(Duration::from_millis(2500))).unwrap();
    let long = pair.client.procedure::<(), ()>("long");
    let pendings: Vec<_> = (0..3).map(|_| long.on(&pair.to_server).start(&()).unwrap()).collect();
    pendings.into_iter().for_each(|pending| pending.wait().unwrap());
    exercise(&pair);
}

fn timers_and_futures_run_without_handler_threads(net: &Net) {
    let pair = net.pair_with(|b| b.handler_threads(0));
    // Idle engines: only their own progress threads drive them.
    thread::sleep(Duration::from_millis(20));
    for engine in [&pair.server, &pair.client] {
        let (fire, fired) = mpsc::channel();
        let _timer = engine.timer(Duration::from_millis(20), move || fire.send(()).unwrap()).unwrap();
        fired.recv_timeout(BOUND / 4).unwrap();
    }
    let gate = Gate::default();
    let door = gate.clone();
    pair.server
        .define_async("woken from elsewhere", move |_: Request, n: u32| {
            let door = door.clone();
            let mut begun = false;
            async move {
                std::future::poll_fn(move |cx| {
                    if std::mem::replace(&mut begun, true) && door.is_open() {
                        return std::task::Poll::Ready(n + 1);
                    }
                    let (waker, door) = (cx.waker().clone(), door.clone());
                    thread::spawn(move || {
                        door.wait();
                        waker.wake();
                    });
                    std::task::Poll::Pending
                })
                .await
            }
        })
        .unwrap();
    let woken = pair.client.procedure::<u32, u32>("woken from elsewhere");
    let pending = woken.on(&pair.to_server).timeout(BOUND / 4).start(&1).unwrap();
    thread::sleep(Duration::from_millis(50));
    gate.open();
    assert_eq!(block_on(pending).unwrap(), 2);
}

suite![
    maximal_durations_are_accepted,
    maximal_timers_do_not_fire,
    zero_and_maximal_sizes_are_accepted,
    short_heartbeat_does_not_end_long_calls,
    timers_and_futures_run_without_handler_threads,
];
