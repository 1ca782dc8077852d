//! Wakers are user code that runs on the thread that receives the answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Engine, Pending, Procedure, Request, Responder};

use crate::support::{BOUND, Net, Pair, all_are, eventually};

/// A waker that runs the closure.
struct Act<F>(F);

impl<F: Fn() + Send + Sync + 'static> Wake for Act<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn waker(act: impl Fn() + Send + Sync + 'static) -> Waker {
    Waker::from(Arc::new(Act(act)))
}

/// Polls with a waker that runs `act` when the answer arrives. Before that it polls until the future does not wake its task by
/// itself any more, to be polled again.
fn poll_with<F: Future + Unpin>(future: &mut F, act: impl Fn() + Send + Sync + 'static) {
    loop {
        let woken = Arc::new(AtomicBool::new(false));
        let sets = woken.clone();
        let waker = self::waker(move || sets.store(true, Ordering::SeqCst));
        assert!(Pin::new(&mut *future).poll(&mut Context::from_waker(&waker)).is_pending());
        if !woken.load(Ordering::SeqCst) {
            break;
        }
    }
    let waker = self::waker(act);
    assert!(Pin::new(future).poll(&mut Context::from_waker(&waker)).is_pending());
}

/// Defines `later`, whose calls the test answers.
fn define_later(server: &Engine) -> mpsc::Receiver<Responder<u32>> {
    let (hold, held) = mpsc::channel();
    server.define_deferred("later", move |reply: Responder<u32>, ()| hold.send(reply).unwrap()).unwrap();
    server.define("fine", |_: &Request, n: u32| n).unwrap();
    held
}

fn start(pair: &Pair) -> Pending<u32> {
    pair.client.procedure::<(), u32>("later").on(&pair.to_server).start(&()).unwrap()
}

#[track_caller]
fn assert_works(pair: &Pair) {
    let fine: Procedure<u32, u32> = pair.client.procedure("fine");
    let begin = Instant::now();
    for n in 0..20 {
        assert_eq!(fine.on(&pair.to_server).timeout(BOUND / 4).call(&n).unwrap(), n);
    }
    assert!(begin.elapsed() < Duration::from_secs(3));
}

fn panicking_waker_leaves_the_engine_usable(net: &Net) {
    let pair = net.pair();
    let held = define_later(&pair.server);
    let exposed = pair.server.expose(vec![1u8; 1 << 20], BulkMode::ReadWrite).unwrap();
    for _ in 0..5 {
        let mut pending = start(&pair);
        poll_with(&mut pending, || panic!("in a waker"));
        let reply = held.recv_timeout(BOUND).unwrap();
        thread::sleep(Duration::from_millis(5));
        reply.respond(&1).unwrap();
        eventually("the answer is there", || pending.is_ready());
        assert_eq!(pending.wait().unwrap(), 1);
        assert_works(&pair);
        // The waker of a transfer, and one that is dropped while its call is in progress.
        let local = pair.client.expose(vec![0u8; 1 << 20], BulkMode::ReadWrite).unwrap();
        let mut transfer = exposed.bulk().on(&pair.to_server).start_pull_into(local);
        let panicking = waker(|| panic!("in a waker"));
        let (result, local) = match Pin::new(&mut transfer).poll(&mut Context::from_waker(&panicking)) {
            Poll::Ready(done) => done,
            Poll::Pending => {
                thread::sleep(Duration::from_millis(5));
                transfer.wait()
            }
        };
        assert_eq!(result.unwrap(), 1 << 20);
        assert!(all_are(&local.reclaim(), 1));
        let mut pending = start(&pair);
        poll_with(&mut pending, || panic!("in a waker"));
        // A call that is dropped before its handler has begun may never reach its handler.
        let reply = held.recv_timeout(BOUND).unwrap();
        drop(pending);
        drop(reply);
        assert_works(&pair);
    }
}

/// The first polls drive, and wake the task themselves.
fn waker_that_panics_within_the_poll_leaves_the_engine_usable(net: &Net) {
    let pair = net.pair();
    let held = define_later(&pair.server);
    let mut pending = start(&pair);
    let panicking = waker(|| panic!("in a waker"));
    for _ in 0..20 {
        assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(&panicking)).is_pending());
        assert_works(&pair);
    }
    held.recv_timeout(BOUND).unwrap().respond(&1).unwrap();
    assert_eq!(pending.wait().unwrap(), 1);
    assert_works(&pair);
}

fn panicking_waker_of_released_leaves_the_engine_usable(net: &Net) {
    // The waker of a `Released` is woken by a peer, too.
    let pair = net.pair();
    let _held = define_later(&pair.server);
    let (keep, kept) = mpsc::channel();
    pair.server.define("keep", move |_: &Request, bulk: calomel::Bulk| keep.send(bulk).unwrap()).unwrap();
    let exposed = pair.client.expose(vec![1u8; 100_000], BulkMode::ReadWrite).unwrap();
    pair.client.procedure::<calomel::Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
    let mut released = exposed.released();
    let panicking = waker(|| panic!("in a waker"));
    assert_eq!(Pin::new(&mut released).poll(&mut Context::from_waker(&panicking)), Poll::Pending);
    drop(kept.recv_timeout(BOUND).unwrap());
    exposed.released().wait_timeout(BOUND).unwrap();
    assert_works(&pair);
    assert!(exposed.reclaim() == vec![1; 100_000]);
}

fn waker_may_start_and_cancel_calls(net: &Net) {
    let pair = net.pair();
    let held = define_later(&pair.server);
    let (sender, receiver) = mpsc::channel();
    let mut pending = start(&pair);
    let (fine, to) = (pair.client.procedure::<u32, u32>("fine"), pair.to_server.clone());
    poll_with(&mut pending, move || {
        let (one, other) = (fine.on(&to).start(&1), fine.on(&to).start(&2));
        drop(other);
        fine.on(&to).notify(&3).unwrap();
        sender.send(one).unwrap();
    });
    held.recv_timeout(BOUND).unwrap().respond(&5).unwrap();
    assert_eq!(receiver.recv_timeout(BOUND).unwrap().unwrap().wait().unwrap(), 1);
    assert_eq!(pending.wait().unwrap(), 5);
    assert_works(&pair);
}

fn waker_that_finalizes_does_not_wait_for_itself(net: &Net) {
    let pair = net.pair();
    let held = define_later(&pair.server);
    let mut pending = start(&pair);
    let client = pair.client.clone();
    poll_with(&mut pending, move || {
        let _ = client.finalize();
    });
    held.recv_timeout(BOUND).unwrap().respond(&5).unwrap();
    let begin = Instant::now();
    pair.client.wait_for_finalize();
    assert!(begin.elapsed() < Duration::from_secs(7), "{:?}", begin.elapsed());
    assert_eq!(pending.wait().unwrap(), 5);
}

fn waker_that_drops_the_last_engine_handle_does_not_deadlock(net: &Net) {
    let pair = net.pair();
    let held = define_later(&pair.server);
    let client = net.builder().build().unwrap();
    let to_server = client.lookup(pair.server.address()).unwrap();
    let mut pending = client.procedure::<(), u32>("later").on(&to_server).start(&()).unwrap();
    drop(to_server);
    let last = std::sync::Mutex::new(Some(client));
    poll_with(&mut pending, move || drop(last.lock().unwrap().take()));
    held.recv_timeout(BOUND).unwrap().respond(&5).unwrap();
    // Waiting at once could replace the waker and so drop it, and with it the engine, before there is an answer.
    eventually("the answer is here", || pending.is_ready());
    assert_eq!(pending.wait().unwrap(), 5);
    assert_works(&pair);
}

fn wait_any_over_two_engines_returns_the_first_answer(net: &Net) {
    // One thread waits for calls of two engines: driving one must not miss the other.
    let pair = net.pair();
    let held = define_later(&pair.server);
    let other = Pair::of(pair.server.clone(), net.client());
    for order in [[0, 1], [1, 0]] {
        let mut pendings = vec![start(&pair), start(&other)];
        let mut replies = [Some(held.recv_timeout(BOUND).unwrap()), Some(held.recv_timeout(BOUND).unwrap())];
        let (first, second) = (replies[order[0]].take().unwrap(), replies[order[1]].take().unwrap());
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            first.respond(&1).unwrap();
        });
        let begin = Instant::now();
        let (_, answer) = Pending::wait_any(&mut pendings);
        assert_eq!(answer.unwrap(), 1);
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        second.respond(&2).unwrap();
        assert_eq!(Pending::wait_any(&mut pendings).1.unwrap(), 2);
        late.join().unwrap();
    }
}

fn gateway_calls_through_a_second_engine_are_answered(net: &Net) {
    // Handlers of one engine start calls of a second one, while the first is busy with other calls.
    let (back, front) = (net.server(), net.server());
    back.define("plus", |_: &Request, n: u32| n + 1).unwrap();
    let middle = net.client();
    let to_back = middle.lookup(back.address()).unwrap();
    let plus = middle.procedure::<u32, u32>("plus");
    front
        .define_async("gateway", move |_: Request, n: u32| {
            let pending = plus.on(&to_back).start(&n);
            async move { pending.unwrap().await.unwrap() }
        })
        .unwrap();
    front.define("quick", |_: &Request, n: u32| n).unwrap();
    let client = net.client();
    let to_front = client.lookup(front.address()).unwrap();
    let (gateway, quick) = (client.procedure::<u32, u32>("gateway"), client.procedure::<u32, u32>("quick"));
    for round in 0..400 {
        let begin = Instant::now();
        let passed = gateway.on(&to_front).timeout(Duration::from_secs(10)).start(&round).unwrap();
        let burst: Vec<_> = (0..8).map(|n| quick.on(&to_front).start(&n).unwrap()).collect();
        assert_eq!(passed.wait().unwrap(), round + 1);
        Pending::wait_all(burst).into_iter().for_each(|answer| assert!(answer.unwrap() < 8));
        assert!(begin.elapsed() < Duration::from_secs(3), "round {round}: {:?}", begin.elapsed());
    }
}

suite![
    panicking_waker_leaves_the_engine_usable,
    waker_that_panics_within_the_poll_leaves_the_engine_usable,
    panicking_waker_of_released_leaves_the_engine_usable,
    waker_may_start_and_cancel_calls,
    waker_that_finalizes_does_not_wait_for_itself,
    waker_that_drops_the_last_engine_handle_does_not_deadlock,
    wait_any_over_two_engines_returns_the_first_answer,
    gateway_calls_through_a_second_engine_are_answered,
];
