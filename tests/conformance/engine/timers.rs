//! Timers: firing, cancelling, and their order.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use calomel::{Request, Timer};

use crate::support::{BOUND, Net, eventually, stays};

fn a_timer_fires_once_after_its_time(net: &Net) {
    let engine = net.client();
    for millis in [0, 1, 30, 100] {
        let delay = Duration::from_millis(millis);
        let (fire, fired) = mpsc::channel();
        let begin = Instant::now();
        let _timer: Timer = engine.timer(delay, move || fire.send(Instant::now()).unwrap()).unwrap();
        let at = fired.recv_timeout(BOUND).unwrap();
        let took = at - begin;
        assert!(took >= delay && took < delay + Duration::from_secs(2), "{took:?} for {delay:?}");
        assert!(fired.recv_timeout(Duration::from_millis(20)).is_err());
    }
}

fn a_cancelled_timer_never_fires(net: &Net) {
    let engine = net.client();
    let count = Arc::new(AtomicU32::new(0));
    let here = count.clone();
    let timer = engine
        .timer(Duration::from_millis(50), move || {
            here.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    assert!(timer.cancel());
    stays("it did not fire", Duration::from_millis(150), || count.load(Ordering::SeqCst) == 0);
}

fn a_timer_that_has_fired_cant_be_cancelled(net: &Net) {
    let engine = net.client();
    let (fire, fired) = mpsc::channel();
    let timer = engine.timer(Duration::from_millis(1), move || fire.send(()).unwrap()).unwrap();
    fired.recv_timeout(BOUND).unwrap();
    assert!(!timer.cancel());
}

fn a_dropped_timer_fires(net: &Net) {
    let engine = net.client();
    let (fire, fired) = mpsc::channel();
    drop(engine.timer(Duration::from_millis(20), move || fire.send(()).unwrap()).unwrap());
    fired.recv_timeout(BOUND).unwrap();
}

fn timers_fire_in_the_order_of_their_times(net: &Net) {
    let engine = net.client();
    let (fire, fired) = mpsc::channel();
    let mut timers = Vec::new();
    for n in [3u32, 0, 4, 1, 2] {
        let fire = fire.clone();
        timers.push(engine.timer(Duration::from_millis(60 * u64::from(n) + 20), move || fire.send(n).unwrap()).unwrap());
    }
    let order: Vec<u32> = (0..5).map(|_| fired.recv_timeout(BOUND).unwrap()).collect();
    assert_eq!(order, [0, 1, 2, 3, 4]);
}

fn a_shorter_timer_overtakes_a_longer_one_set_before(net: &Net) {
    // The engine sleeps until the first timer: an earlier one must wake it.
    let engine = net.client();
    let (fire, fired) = mpsc::channel();
    let long = engine.timer(Duration::from_secs(3600), || {}).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let begin = Instant::now();
    let _short = engine.timer(Duration::from_millis(20), move || fire.send(()).unwrap()).unwrap();
    fired.recv_timeout(BOUND).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(2));
    assert!(long.cancel());
}

fn thousands_of_timers_fire_or_are_cancelled_once(net: &Net) {
    let engine = net.client();
    let count = Arc::new(AtomicU32::new(0));
    let mut random = crate::support::Random(5);
    let timers: Vec<Timer> = (0..2000)
        .map(|_| {
            let count = count.clone();
            let delay = Duration::from_micros(random.below(100_000) as u64);
            engine
                .timer(delay, move || {
                    count.fetch_add(1, Ordering::SeqCst);
                })
                .unwrap()
        })
        .collect();
    let cancelled = timers.iter().step_by(3).filter(|timer| timer.cancel()).count() as u32;
    eventually("each fired or was cancelled", || count.load(Ordering::SeqCst) + cancelled == 2000);
    stays("none did both", Duration::from_millis(50), || count.load(Ordering::SeqCst) + cancelled == 2000);
}

fn timer_may_make_calls_and_set_timers(net: &Net) {
    let pair = net.pair();
    pair.server.define("tick", |_: &Request, n: u32| n + 1).unwrap();
    let (sender, receiver) = mpsc::channel();
    let (engine, endpoint) = (pair.client.clone(), pair.to_server.clone());
    let _first = pair
        .client
        .timer(Duration::from_millis(5), move || {
            let answer = engine.procedure::<u32, u32>("tick").on(&endpoint).call(&1).unwrap();
            let _second = engine.timer(Duration::from_millis(5), move || sender.send(answer).unwrap()).unwrap();
        })
        .unwrap();
    assert_eq!(receiver.recv_timeout(BOUND).unwrap(), 2);
}

fn timer_that_blocks_or_panics_does_not_stop_others(net: &Net) {
    let pair = net.pair();
    pair.server.define("fine", |_: &Request, n: u32| n).unwrap();
    let gate = crate::support::Gate::default();
    let door = gate.clone();
    let (fire, fired) = mpsc::channel();
    let _blocked = pair.server.timer(Duration::from_millis(1), move || door.wait()).unwrap();
    let _panics = pair.server.timer(Duration::from_millis(2), || panic!("in a timer")).unwrap();
    let _later = pair.server.timer(Duration::from_millis(30), move || fire.send(()).unwrap()).unwrap();
    let fine = pair.client.procedure::<u32, u32>("fine");
    for n in 0..50 {
        assert_eq!(fine.on(&pair.to_server).call(&n).unwrap(), n);
    }
    fired.recv_timeout(BOUND).unwrap();
    gate.open();
}

fn finalize_drops_timers_that_have_not_fired(net: &Net) {
    let engine = net.client();
    let owned = Arc::new(());
    let moved = owned.clone();
    let count = Arc::new(AtomicU32::new(0));
    let here = count.clone();
    let timer = engine
        .timer(Duration::from_millis(100), move || {
            let _moved = &moved;
            here.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    engine.finalize().unwrap();
    stays("it did not fire", Duration::from_millis(200), || count.load(Ordering::SeqCst) == 0);
    assert!(!timer.cancel() || count.load(Ordering::SeqCst) == 0);
    drop(timer);
    eventually("the closure was dropped", || Arc::strong_count(&owned) == 1);
}

suite![
    a_timer_fires_once_after_its_time,
    a_cancelled_timer_never_fires,
    a_timer_that_has_fired_cant_be_cancelled,
    a_dropped_timer_fires,
    timers_fire_in_the_order_of_their_times,
    a_shorter_timer_overtakes_a_longer_one_set_before,
    thousands_of_timers_fire_or_are_cancelled_once,
    timer_may_make_calls_and_set_timers,
    timer_that_blocks_or_panics_does_not_stop_others,
    finalize_drops_timers_that_have_not_fired,
];
