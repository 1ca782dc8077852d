//! Handlers that are futures, and calls awaited inside them.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Error, Pending, Request};

use crate::assert_error;
use crate::support::{BOUND, Net, Pair, patience, pattern};

fn async_handler_answers(net: &Net) {
    let pair = net.pair();
    pair.server.define_async("sum2", |_req: Request, (x, y): (i32, i32)| async move { x + y }).unwrap();
    let sum = pair.client.procedure::<(i32, i32), i32>("sum2");
    for i in 0..100 {
        assert_eq!(sum.on(&pair.to_server).call(&(i, 1)).unwrap(), i + 1);
    }
}

/// A future that becomes ready once `fire` is called, from any thread.
#[derive(Clone, Default)]
struct Signal(Arc<Mutex<(bool, Vec<Waker>)>>);

impl Signal {
    fn fire(&self) {
        let wakers = {
            let mut state = self.0.lock().unwrap();
            state.0 = true;
            std::mem::take(&mut state.1)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Future for Signal {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock().unwrap();
        if state.0 {
            return Poll::Ready(());
        }
        state.1.push(cx.waker().clone());
        Poll::Pending
    }
}

fn a_thousand_waiting_handlers_need_no_threads(net: &Net) {
    let pair = net.pair();
    let (signal, entered) = (Signal::default(), Arc::new(Mutex::new(0)));
    let (wait, count) = (signal.clone(), entered.clone());
    pair.server
        .define_async("waits", move |_: Request, n: u32| {
            let (wait, count) = (wait.clone(), count.clone());
            async move {
                *count.lock().unwrap() += 1;
                wait.await;
                n
            }
        })
        .unwrap();
    let waits = pair.client.procedure::<u32, u32>("waits");
    let pendings: Vec<_> = (0..1000).map(|n| waits.on(&pair.to_server).start(&n).unwrap()).collect();
    crate::support::eventually("all handlers wait", || *entered.lock().unwrap() == 1000);
    let threads = std::fs::read_dir("/proc/self/task").map(|tasks| tasks.count()).unwrap_or(0);
    assert!(threads < 500, "{threads} threads for 1000 waiting handlers");
    signal.fire();
    for (n, pending) in pendings.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), n as u32);
    }
}

fn an_async_handler_awaits_calls_to_its_caller(net: &Net) {
    let pair = net.pair();
    pair.client.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    pair.server
        .define_async("sum of doubles", |request: Request, numbers: Vec<u32>| async move {
            let double = request.engine().procedure::<u32, u32>("double");
            let started: calomel::Result<Vec<_>> = numbers.iter().map(|n| double.on(request.endpoint()).start(n)).collect();
            let mut sum = 0;
            for pending in started.unwrap() {
                sum += pending.await.unwrap();
            }
            sum
        })
        .unwrap();
    let sum = pair.client.procedure::<Vec<u32>, u32>("sum of doubles");
    assert_eq!(sum.on(&pair.to_server).call(&(1..=100).collect()).unwrap(), 10_100);
}

fn an_async_handler_awaits_transfers(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_async("fetch", |request: Request, bulk: calomel::Bulk| async move {
            let local = request.engine().expose(vec![0u8; bulk.len()], BulkMode::WriteOnly).unwrap();
            let (moved, local) = bulk.on(request.endpoint()).start_pull_into(local).await;
            (moved.unwrap(), local.reclaim())
        })
        .unwrap();
    let data = pattern(3, 300_000);
    let exposed = pair.client.expose_read_only(data.clone()).unwrap();
    let fetch = pair.client.procedure::<calomel::Bulk, (usize, Vec<u8>)>("fetch");
    let (moved, answer) = fetch.on(&pair.to_server).call(&exposed.bulk()).unwrap();
    assert_eq!(moved, data.len());
    assert!(answer == data);
}

fn future_woken_too_often_by_any_thread_completes(net: &Net) {
    /// Needs `left` polls, and is woken several times for each.
    struct Restless {
        left: u32,
    }
    impl Future for Restless {
        type Output = u32;
        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<u32> {
            if self.left == 0 {
                return Poll::Ready(7);
            }
            self.left -= 1;
            cx.waker().wake_by_ref();
            let (a, b) = (cx.waker().clone(), cx.waker().clone());
            thread::spawn(move || a.wake());
            b.wake_by_ref();
            Poll::Pending
        }
    }
    let pair = net.pair();
    pair.server.define_async("restless", |_: Request, left: u32| Restless { left }).unwrap();
    let restless = pair.client.procedure::<u32, u32>("restless");
    for _ in 0..10 {
        let pendings: Vec<_> = (0..20).map(|n| restless.on(&pair.to_server).start(&n).unwrap()).collect();
        for pending in pendings {
            assert_eq!(pending.wait().unwrap(), 7);
        }
    }
    crate::support::eventually("no handler is left", || pair.server.dump().unwrap().async_handlers == 0);
}

fn pending_future_is_dropped_when_its_call_times_out(net: &Net) {
    let pair = net.pair();
    let owned = Arc::new(());
    let keep = owned.clone();
    pair.server
        .define_async("never", move |_: Request, ()| {
            let keep = keep.clone();
            async move {
                let _keep = keep;
                std::future::pending::<()>().await
            }
        })
        .unwrap();
    let never = pair.client.procedure::<(), ()>("never");
    for _ in 0..10 {
        let begin = Instant::now();
        let result = never.on(&pair.to_server).timeout(Duration::from_millis(20)).call(&());
        assert_error!(result, Error::Timeout { .. });
        assert!(begin.elapsed() < Duration::from_secs(3));
    }
    // The server frees a call's resources when it ends: the futures are dropped, with the values that they own.
    crate::support::eventually("the futures were dropped", || Arc::strong_count(&owned) <= 2);
}

/// A one-way call has no caller that ends it, so a future that waits for ever ends with its engine: also one that is still polled for
/// the first time when the engine ends.
fn future_whose_first_poll_outlasts_its_engine_is_dropped(net: &Net) {
    const LONG: Duration = Duration::from_secs(10);
    /// What the future owns.
    struct Owned(mpsc::Sender<()>);
    impl Drop for Owned {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let pair = net.pair_with(|b| b.finalize_timeout(Duration::from_millis(200)));
    let (drops, dropped) = mpsc::channel();
    let (enters, entered) = mpsc::channel();
    let (releases, released) = mpsc::channel();
    let released = Arc::new(Mutex::new(released));
    pair.server
        .define_async("outlasts", move |_: Request, ()| {
            let (owned, enters, released) = (Owned(drops.clone()), enters.clone(), released.clone());
            async move {
                let _owned = owned;
                enters.send(()).unwrap();
                released.lock().unwrap().recv_timeout(LONG).unwrap();
                std::future::pending::<()>().await
            }
        })
        .unwrap();
    pair.client.procedure::<(), ()>("outlasts").on(&pair.to_server).notify(&()).unwrap();
    entered.recv_timeout(LONG).unwrap();
    let _ = pair.server.finalize();
    releases.send(()).unwrap();
    dropped.recv_timeout(LONG).expect("the future is dropped, though the program keeps the engine");
}

/// Pending once, with its task woken.
async fn yields() {
    let mut woken = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut woken, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The handler calls its caller, and polls for the answer: between two polls it wakes itself.
#[track_caller]
pub fn assert_polling_handler_gets_answers(pair: &Pair) {
    pair.client.define("next", |_: &Request, x: u64| x + 1).unwrap();
    let polls = |request: Request, x: u64| async move {
        let call = request.engine().procedure::<u64, u64>("next").on(request.endpoint()).timeout(BOUND).start(&x).unwrap();
        while !call.is_ready() {
            yields().await;
        }
        call.await.unwrap()
    };
    pair.server.define_async("polls", polls).unwrap();
    let polls = pair.client.procedure::<u64, u64>("polls").on(&pair.to_server).timeout(BOUND);
    let begin = Instant::now();
    for x in 0..50 {
        assert_eq!(polls.call(&x).unwrap(), x + 1);
    }
    assert!(begin.elapsed() < patience() * Duration::from_secs(4), "{:?}", begin.elapsed());
}

fn future_that_wakes_itself_stops_no_progress(net: &Net) {
    for threads in [0, 2] {
        let server = net.server_with(|builder| builder.handler_threads(threads));
        assert_polling_handler_gets_answers(&Pair::of(server, net.client()));
    }
}

fn async_handler_that_panics_fails_its_call(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_async("panics", |_: Request, early: bool| {
            if early {
                panic!("before the future");
            }
            async move {
                if std::hint::black_box(true) {
                    panic!("in the future");
                }
                1u8
            }
        })
        .unwrap();
    let panics = pair.client.procedure::<bool, u8>("panics");
    for (early, text) in [(true, "before the future"), (false, "in the future")] {
        let result = panics.on(&pair.to_server).call(&early);
        assert_error!(result, Error::HandlerPanicked { message, .. } if message.contains(text));
    }
}

fn compute(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {}
}

/// Requests are received between its polls, all of which are quick.
fn future_that_wakes_itself_and_computes_holds_up_no_requests(net: &Net) {
    let pair = net.pair();
    let polls = Arc::new(AtomicUsize::new(0));
    let ended = Arc::new(AtomicBool::new(false));
    let (count, stop) = (polls.clone(), ended.clone());
    pair.server
        .define_async("computes", move |_: Request, ()| {
            let (count, stop) = (count.clone(), stop.clone());
            std::future::poll_fn(move |context| {
                compute(Duration::from_micros(50));
                count.fetch_add(1, Ordering::Relaxed);
                context.waker().wake_by_ref();
                if stop.load(Ordering::Relaxed) { Poll::Ready(()) } else { Poll::Pending }
            })
        })
        .unwrap();
    pair.server.define("quick", |_: &Request, ()| ()).unwrap();
    let quick = pair.client.procedure::<(), ()>("quick").on(&pair.to_server);
    let pending = pair.client.procedure::<(), ()>("computes").on(&pair.to_server).start(&()).unwrap();
    let mut waited: Vec<_> = (0..101)
        .map(|_| {
            let before = polls.load(Ordering::Relaxed);
            quick.call(&()).unwrap();
            polls.load(Ordering::Relaxed) - before
        })
        .collect();
    ended.store(true, Ordering::Relaxed);
    pending.wait().unwrap();
    waited.sort_unstable();
    assert!(waited[60] <= 128 * patience() as usize, "polls while a request waits: {waited:?}");
}

/// To wake another thread for each of them would take longer than most of these polls.
fn handler_that_is_woken_goes_on_where_requests_are_handled(net: &Net) {
    let (back, pair) = (net.server(), net.pair());
    back.define("plus", |_: &Request, n: u32| n + 1).unwrap();
    let to_back = pair.server.lookup(back.address()).unwrap();
    let plus = pair.server.procedure::<u32, u32>("plus").on(to_back);
    pair.server
        .define_async("gateway", move |_: Request, long: bool| {
            let pending = plus.start(&1);
            async move {
                assert_eq!(pending.unwrap().await.unwrap(), 2);
                if long {
                    compute(Duration::from_micros(300));
                }
                thread::current().name().unwrap_or_default().to_owned()
            }
        })
        .unwrap();
    let gateway = pair.client.procedure::<bool, String>("gateway").on(&pair.to_server);
    for (long, expected) in [(false, "calomel-progress"), (true, "calomel-handler")] {
        let mut found = 0;
        crate::support::eventually(expected, || {
            found += usize::from(gateway.call(&long).unwrap() == expected);
            found == 2
        });
    }
}

/// The progress thread waits inside a handler, for what a woken one is to answer.
fn handler_that_waits_does_not_keep_those_that_are_woken(net: &Net) {
    let pair = net.pair();
    let (server, client) = (&pair.server, &pair.client);
    client.define("leaf", |_: &Request, n: u32| n + 1).unwrap();
    server
        .define_async("inner", |request: Request, n: u32| {
            let pending = request.engine().procedure::<u32, u32>("leaf").on(request.endpoint()).start(&n);
            async move { pending.unwrap().await.unwrap() }
        })
        .unwrap();
    let inner = client.procedure::<u32, u32>("inner").on(&pair.to_server);
    client
        .define("many", move |_: &Request, n: u32| {
            let pendings: Vec<_> = (0..n).map(|i| inner.start(&i).unwrap()).collect();
            Pending::wait_all(pendings).into_iter().map(Result::unwrap).sum::<u32>()
        })
        .unwrap();
    // Each is new, so its first call is handled by the progress thread.
    for n in 0..20 {
        let name = format!("outer {n}");
        server
            .define(&name, |request: &Request, n: u32| {
                let many = request.engine().procedure::<u32, u32>("many").on(request.endpoint());
                many.timeout(BOUND / 4).call(&n).unwrap()
            })
            .unwrap();
        assert_eq!(client.procedure::<u32, u32>(&name).on(&pair.to_server).call(&n).unwrap(), n * (n + 1) / 2);
    }
}

suite![
    async_handler_answers,
    future_that_wakes_itself_and_computes_holds_up_no_requests,
    handler_that_is_woken_goes_on_where_requests_are_handled,
    handler_that_waits_does_not_keep_those_that_are_woken,
    a_thousand_waiting_handlers_need_no_threads,
    an_async_handler_awaits_calls_to_its_caller,
    an_async_handler_awaits_transfers,
    future_woken_too_often_by_any_thread_completes,
    pending_future_is_dropped_when_its_call_times_out,
    future_whose_first_poll_outlasts_its_engine_is_dropped,
    future_that_wakes_itself_stops_no_progress,
    async_handler_that_panics_fails_its_call,
];
