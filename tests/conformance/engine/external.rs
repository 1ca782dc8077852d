//! Engines without progress threads, served by a foreign event loop that sleeps without a timeout: a lost wake-up hangs it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuilder, Error, Progress, Request, Responder};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::event_loop::{EventLoop, TRIGGERS};
use crate::rpc::asynchronous::assert_polling_handler_gets_answers;
use crate::support::{BOUND, Gate, Net, Pair, block_on, eventually, pattern, rounds};

/// No thread at all.
fn bare(builder: EngineBuilder) -> EngineBuilder {
    builder.progress(Progress::External).handler_threads(0)
}

fn external(builder: EngineBuilder) -> EngineBuilder {
    builder.progress(Progress::External)
}

fn define_sum(engine: &Engine) {
    engine.define("sum", |_: &Request, (x, y): (u64, u64)| x + y).unwrap();
}

fn sum(from: &Engine, to: &Endpoint, x: u64, y: u64) -> calomel::Result<u64> {
    from.procedure::<(u64, u64), u64>("sum").on(to).timeout(BOUND).call(&(x, y))
}

/// `progress` on this thread until it is done.
#[track_caller]
fn drive_until(engine: &Engine, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < BOUND, "not within {BOUND:?}");
        engine.progress(Duration::from_millis(20)).unwrap();
    }
}

fn foreign_loop_serves_calls(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client());
        let (ran, on) = mpsc::channel();
        define_sum(&pair.server);
        pair.server.define("where", move |_: &Request, ()| ran.send(thread::current().id()).unwrap()).unwrap();
        let served = EventLoop::serving(&[&pair.server], trigger);
        for x in 0..200 {
            assert_eq!(sum(&pair.client, &pair.to_server, x, 1).unwrap(), x + 1);
        }
        pair.client.procedure::<(), ()>("where").on(&pair.to_server).call(&()).unwrap();
        assert_eq!(on.recv().unwrap(), served.thread());
    }
}

fn both_sides_are_served_by_loops_and_call_each_other(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(external), net.client_with(external));
        // The handler calls its caller back, while that waits for it.
        define_sum(&pair.client);
        pair.server.define("back", |request: &Request, x: u64| sum(request.engine(), request.endpoint(), x, 1).unwrap()).unwrap();
        let _served = EventLoop::serving(&[&pair.server], trigger);
        let _serves = EventLoop::serving(&[&pair.client], trigger);
        let back = pair.client.procedure::<u64, u64>("back");
        for x in 0..30 {
            assert_eq!(back.on(&pair.to_server).timeout(BOUND).call(&x).unwrap(), x + 1);
        }
        // Not driven by the thread that waits.
        for x in 0..30 {
            assert_eq!(block_on(back.on(&pair.to_server).timeout(BOUND).start(&x).unwrap()).unwrap(), x + 1);
        }
    }
}

fn call_that_waits_needs_no_loop(net: &Net) {
    let pair = Pair::of(net.server(), net.client_with(bare));
    define_sum(&pair.server);
    for x in 0..100 {
        assert_eq!(sum(&pair.client, &pair.to_server, x, 2).unwrap(), x + 2);
    }
    // Asleep in the reactor meanwhile.
    pair.server.define("slow", |_: &Request, ()| thread::sleep(Duration::from_millis(20))).unwrap();
    for _ in 0..5 {
        pair.client.procedure::<(), ()>("slow").on(&pair.to_server).call(&()).unwrap();
    }
}

/// A call waits on another thread and drives; the loop, which sleeps, runs what arrives for handlers meanwhile.
fn handlers_run_in_the_loop_while_another_thread_drives(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server(), net.client_with(bare));
        let (ran, on) = mpsc::channel();
        pair.client
            .define("note", move |_: &Request, x: u64| {
                ran.send(thread::current().id()).unwrap();
                x + 1
            })
            .unwrap();
        let back = |request: &Request, x: u64| {
            // The caller sleeps in the reactor by then.
            thread::sleep(Duration::from_millis(x % 3));
            request.engine().procedure::<u64, u64>("note").on(request.endpoint()).timeout(BOUND).call(&x).unwrap()
        };
        pair.server.define("back", back).unwrap();
        let served = EventLoop::serving(&[&pair.client], trigger);
        for x in 0..40 {
            let answer = pair.client.procedure::<u64, u64>("back").on(&pair.to_server).timeout(BOUND).call(&x);
            assert_eq!(answer.unwrap(), x + 1);
            assert_eq!(on.recv().unwrap(), served.thread());
        }
    }
}

fn bulk_data_moves_both_ways(net: &Net) {
    const LEN: usize = 3_000_000;
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client_with(bare));
        let memory = pair.server.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
        let bulk = memory.bulk();
        pair.server.define("memory", move |_: &Request, ()| bulk.clone()).unwrap();
        let _served = EventLoop::serving(&[&pair.server], trigger);
        let remote = pair.client.procedure::<(), Bulk>("memory").on(&pair.to_server).call(&()).unwrap();
        // Waiting on this thread, without and with a loop.
        for round in 0..6 {
            let serving = (round >= 2).then(|| EventLoop::serving_meanwhile(&[&pair.client], trigger));
            let local = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
            let pull = remote.on(&pair.to_server).start_pull_into(local);
            let (pulled, local) = if round >= 4 { block_on(pull) } else { pull.wait() };
            assert_eq!(pulled.unwrap(), LEN);
            assert!(memory_of(&local) == memory_of(&memory), "round {round}");
            let push = remote.on(&pair.to_server).start_push_from(local);
            let (pushed, _) = if round >= 4 { block_on(push) } else { push.wait() };
            assert_eq!(pushed.unwrap(), LEN);
            drop(serving);
        }
    }
}

fn memory_of(memory: &calomel::Exposed<Vec<u8>>) -> Vec<u8> {
    let mut bytes = vec![0u8; memory.len()];
    memory.read_at(0, &mut bytes).unwrap();
    bytes
}

fn one_way_floods_arrive(net: &Net) {
    let per_thread = rounds(5000);
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client_with(bare));
        let seen = Arc::new(AtomicUsize::new(0));
        let count = seen.clone();
        let note = move |_: &Request, bytes: Vec<u8>| {
            count.fetch_add(usize::from(!bytes.is_empty()), Ordering::SeqCst);
        };
        pair.server.define("note", note).unwrap();
        let _served = EventLoop::serving(&[&pair.server], trigger);
        let _serves = EventLoop::serving(&[&pair.client], trigger);
        let call = pair.client.procedure::<Vec<u8>, ()>("note").on(&pair.to_server).timeout(BOUND);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..per_thread {
                        call.notify(&vec![1; 500]).unwrap();
                    }
                });
            }
        });
        eventually("all have arrived", || seen.load(Ordering::SeqCst) == 2 * per_thread);
    }
}

/// Started calls, calls that wait, and calls the other way, from several threads: each pair of them meets in some round.
fn no_wake_up_is_lost(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client_with(bare));
        define_sum(&pair.server);
        define_sum(&pair.client);
        pair.server.define("endpoint", |request: &Request, ()| request.endpoint().clone().is_connected()).unwrap();
        let _served = EventLoop::serving(&[&pair.server], trigger);
        let _serves = EventLoop::serving(&[&pair.client], trigger);
        thread::scope(|scope| {
            for caller in 0..2 {
                let pair = &pair;
                scope.spawn(move || {
                    for x in 0..rounds(150) as u64 {
                        assert_eq!(sum(&pair.client, &pair.to_server, x, caller).unwrap(), x + caller);
                    }
                });
                scope.spawn(move || {
                    let started = pair.client.procedure::<(u64, u64), u64>("sum").on(&pair.to_server).timeout(BOUND);
                    for x in 0..rounds(150) as u64 {
                        let calls: Vec<_> = (0..1 + x % 12).map(|y| started.start(&(x, y)).unwrap()).collect();
                        for (y, call) in calls.into_iter().enumerate() {
                            assert_eq!(block_on(call).unwrap(), x + y as u64);
                        }
                    }
                });
            }
        });
    }
}

fn deadlines_and_timers_expire_in_the_loop(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server(), net.client_with(bare));
        let kept = std::sync::Mutex::new(Vec::new());
        pair.server.define_deferred("never", move |reply: Responder<()>, ()| kept.lock().unwrap().push(reply)).unwrap();
        let served = EventLoop::serving(&[&pair.client], trigger);
        let never = pair.client.procedure::<(), ()>("never");
        // The later deadline first, so that the earlier one has to be noticed.
        let begin = Instant::now();
        let late = never.on(&pair.to_server).timeout(Duration::from_millis(120)).start(&()).unwrap();
        thread::sleep(Duration::from_millis(5));
        let early = never.on(&pair.to_server).timeout(Duration::from_millis(30)).start(&()).unwrap();
        eventually("the deadline has passed", || early.is_ready());
        assert!(begin.elapsed() >= Duration::from_millis(30));
        assert!(matches!(block_on(late), Err(Error::Timeout { .. })));
        assert!(begin.elapsed() >= Duration::from_millis(120) && begin.elapsed() < Duration::from_secs(5));
        assert!(matches!(early.wait(), Err(Error::Timeout { .. })));

        let (fire, fired) = mpsc::channel();
        let begin = Instant::now();
        for n in [2u64, 0, 1] {
            let fire = fire.clone();
            let delay = Duration::from_millis(20 + 25 * n);
            pair.client.timer(delay, move || fire.send((n, thread::current().id())).unwrap()).unwrap();
        }
        let order: Vec<_> = (0..3).map(|_| fired.recv_timeout(BOUND).unwrap()).collect();
        assert_eq!(order, [0, 1, 2].map(|n| (n, served.thread())));
        assert!(begin.elapsed() >= Duration::from_millis(70) && begin.elapsed() < Duration::from_secs(5));
    }
}

fn timer_runs_in_the_loop_while_another_thread_drives(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server(), net.client_with(bare));
        pair.server.define("slow", |_: &Request, ()| thread::sleep(Duration::from_millis(100))).unwrap();
        let served = EventLoop::serving(&[&pair.client], trigger);
        let (fire, fired) = mpsc::channel();
        let begin = Instant::now();
        pair.client
            .timer(Duration::from_millis(20), move || fire.send((Instant::now(), thread::current().id())).unwrap())
            .unwrap();
        pair.client.procedure::<(), ()>("slow").on(&pair.to_server).call(&()).unwrap();
        let (at, on) = fired.recv_timeout(BOUND).unwrap();
        assert!(at - begin >= Duration::from_millis(20));
        assert_eq!(on, served.thread());
    }
}

fn waiting_for_the_release_of_memory_needs_no_loop(net: &Net) {
    let pair = Pair::of(net.server(), net.client_with(bare));
    let (keep, kept) = mpsc::channel();
    pair.server.define("keep", move |_: &Request, bulk: Bulk| keep.send(bulk).unwrap()).unwrap();
    let memory = pair.client.expose(pattern(1, 1000), BulkMode::ReadOnly).unwrap();
    let keep = pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server);
    keep.call(&memory.bulk()).unwrap();
    let released = memory.released();
    assert!(matches!(released.wait_timeout(Duration::from_millis(20)), Err(Error::Timeout { .. })));
    let dropped = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(kept);
    });
    released.wait_timeout(BOUND).unwrap();
    dropped.join().unwrap();
}

fn end_of_a_peer_is_noticed(net: &Net) {
    for trigger in TRIGGERS {
        let server = net.server_with(|builder| builder.finalize_timeout(Duration::from_millis(1)));
        let pair = Pair::of(server, net.client_with(bare));
        let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
        let keep = kept.clone();
        pair.server.define_deferred("never", move |reply: Responder<()>, ()| keep.lock().unwrap().push(reply)).unwrap();
        let _served = EventLoop::serving(&[&pair.client], trigger);
        let call = pair.client.procedure::<(), ()>("never").on(&pair.to_server).timeout(BOUND).start(&()).unwrap();
        eventually("the call has arrived", || !kept.lock().unwrap().is_empty());
        let _ = pair.server.finalize();
        eventually("the call has ended", || call.is_ready());
        assert!(matches!(call.wait(), Err(Error::Disconnected { .. })));
    }
}

fn loop_serves_two_engines_that_call_each_other(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client_with(bare));
        define_sum(&pair.server);
        let _served = EventLoop::serving(&[&pair.server, &pair.client], trigger);
        let call = pair.client.procedure::<(u64, u64), u64>("sum").on(&pair.to_server).timeout(BOUND);
        for x in 0..50 {
            assert_eq!(block_on(call.start(&(x, 7)).unwrap()).unwrap(), x + 7);
            assert_eq!(call.call(&(x, 7)).unwrap(), x + 7);
        }
    }
}

fn futures_of_handlers_are_woken_in_the_loop(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client());
        let to_self = pair.server.lookup(pair.server.address()).unwrap();
        define_sum(&pair.server);
        let add = pair.server.procedure::<(u64, u64), u64>("sum").on(&to_self).timeout(BOUND);
        pair.server
            .define_async("later", move |_: Request, x: u64| {
                let add = add.clone();
                async move { add.start(&(x, 1)).unwrap().await.unwrap() }
            })
            .unwrap();
        let _served = EventLoop::serving(&[&pair.server], trigger);
        for x in 0..50 {
            let later = pair.client.procedure::<u64, u64>("later").on(&pair.to_server).timeout(BOUND);
            assert_eq!(later.call(&x).unwrap(), x + 1);
        }
    }
}

fn future_that_wakes_itself_stops_no_progress(net: &Net) {
    for trigger in TRIGGERS {
        let pair = Pair::of(net.server_with(bare), net.client());
        let _served = EventLoop::serving(&[&pair.server], trigger);
        assert_polling_handler_gets_answers(&pair);
    }
}

/// Also when another thread was in `progress` at that moment, and was told.
fn descriptor_is_readable_when_the_engine_ends(net: &Net) {
    for ends_while_asleep in [true, false] {
        let engine = net.server_with(bare);
        thread::scope(|scope| {
            let progress = scope.spawn(|| while engine.progress(BOUND).is_ok() {});
            if ends_while_asleep {
                thread::sleep(Duration::from_millis(20));
            }
            engine.finalize().unwrap();
            progress.join().unwrap();
        });
        let mut fds = [PollFd::new(&engine, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })).unwrap(), 1, "{ends_while_asleep}");
    }
}

fn several_threads_make_progress(net: &Net) {
    let pair = Pair::of(net.server_with(bare), net.client_with(bare));
    define_sum(&pair.server);
    let blocked = Gate::default();
    let opened = blocked.clone();
    pair.server.define("blocks", move |_: &Request, ()| opened.wait()).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for timeout in [0, 5, 1000] {
            let (pair, over) = (&pair, &over);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    pair.server.progress(Duration::from_millis(timeout)).unwrap();
                    thread::yield_now();
                }
            });
        }
        // One of them is in a handler, and the others go on.
        let waits = pair.client.procedure::<(), ()>("blocks").on(&pair.to_server).timeout(BOUND).start(&()).unwrap();
        for x in 0..300 {
            assert_eq!(sum(&pair.client, &pair.to_server, x, 3).unwrap(), x + 3);
        }
        blocked.open();
        waits.wait().unwrap();
        over.store(true, Ordering::SeqCst);
        // Ends the longest sleep.
        let _ = sum(&pair.client, &pair.to_server, 0, 0);
    });
}

fn progress_polls_once_or_until_its_timeout(net: &Net) {
    let engine = net.server_with(bare);
    // What is left from the start.
    while engine.progress(Duration::ZERO).unwrap() {}
    for _ in 0..3 {
        let begin = Instant::now();
        assert!(!engine.progress(Duration::ZERO).unwrap());
        assert!(begin.elapsed() < Duration::from_secs(1));
        let begin = Instant::now();
        assert!(!engine.progress(Duration::from_millis(30)).unwrap());
        assert!(begin.elapsed() >= Duration::from_millis(30));
    }
    let fired = Arc::new(AtomicBool::new(false));
    let fire = fired.clone();
    engine.timer(Duration::from_millis(30), move || fire.store(true, Ordering::SeqCst)).unwrap();
    let begin = Instant::now();
    assert!(engine.progress(BOUND).unwrap());
    assert!(fired.load(Ordering::SeqCst) && begin.elapsed() < BOUND / 2);
}

fn progress_is_refused_where_it_can_only_fail(net: &Net) {
    let ordinary = net.client();
    let error = ordinary.progress(Duration::ZERO).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { reason, .. } if reason.contains("Progress::External")), "{error}");
    assert!(catch_unwind(AssertUnwindSafe(|| _ = ordinary.as_fd())).is_err());

    let pair = Pair::of(net.server_with(bare), net.client());
    let inside = |request: &Request, ()| request.engine().progress(Duration::ZERO).unwrap_err().to_string();
    pair.server.define("inside", inside).unwrap();
    let call = pair.client.procedure::<(), String>("inside").on(&pair.to_server).start(&()).unwrap();
    drive_until(&pair.server, || call.is_ready());
    let text = call.wait().unwrap();
    assert!(text.contains("a handler"), "{text}");

    pair.server.finalize().unwrap();
    assert!(matches!(pair.server.progress(Duration::ZERO), Err(Error::Finalized { .. })));
    // It stays valid until the handle is dropped.
    let _ = pair.server.as_fd();
}

fn finalize_drives_on_the_calling_thread(net: &Net) {
    let pair = Pair::of(net.server_with(bare), net.client());
    define_sum(&pair.server);
    let first = pair.client.procedure::<(u64, u64), u64>("sum").on(&pair.to_server);
    let (answered, begun) = (first.start(&(1, 1)).unwrap(), Instant::now());
    drive_until(&pair.server, || answered.is_ready());
    // A request that has arrived is answered by the thread that finalizes.
    let ran = Arc::new(AtomicBool::new(false));
    let (here, engine) = (ran.clone(), pair.server.clone());
    pair.server.on_prefinalize(move || {
        let call = first.start(&(2, 2)).unwrap();
        drive_until(&engine, || call.is_ready());
        here.store(call.wait().unwrap() == 4, Ordering::SeqCst);
    });
    pair.server.finalize().unwrap();
    assert!(ran.load(Ordering::SeqCst));
    assert!(begun.elapsed() < BOUND / 2 && pair.server.is_finalized());
}

fn dropping_the_last_handle_ends_the_engine(net: &Net) {
    for _ in 0..3 {
        let server = bare(net.builder()).listen(net.fresh_address()).build().unwrap();
        let client = net.client();
        let to_server = client.lookup(server.address()).unwrap();
        define_sum(&server);
        let call = client.procedure::<(u64, u64), u64>("sum").on(&to_server).start(&(1, 1)).unwrap();
        drive_until(&server, || call.is_ready());
        assert_eq!(call.wait().unwrap(), 2);
        let begin = Instant::now();
        drop(server);
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        assert!(sum(&client, &to_server, 1, 1).is_err());
    }
}

fn loop_learns_of_the_end_by_another_thread_or_peer(net: &Net) {
    for trigger in TRIGGERS {
        // `serve` deregisters an engine that is finalized; a loop that were not woken would not end with the other one.
        let server = net.server_with(|builder| bare(builder).remote_shutdown(true));
        let other = net.server_with(bare);
        let client = net.client();
        let _served = EventLoop::serving(&[&server, &other], trigger);
        client.lookup(server.address()).unwrap().shutdown().unwrap();
        server.wait_for_finalize();
        other.finalize().unwrap();
        assert!(server.is_finalized() && other.is_finalized());
    }
    let server = net.server_with(|builder| bare(builder).remote_shutdown(true));
    let client = net.client();
    let asked = thread::spawn({
        let address = server.address();
        move || client.lookup(address).unwrap().shutdown().unwrap()
    });
    // Drives by itself.
    server.wait_for_finalize();
    asked.join().unwrap();
}

fn handler_may_finalize_its_engine(net: &Net) {
    let pair = Pair::of(net.server_with(bare), net.client());
    pair.server.define("end", |request: &Request, ()| request.engine().finalize().unwrap()).unwrap();
    let _served = EventLoop::serving(&[&pair.server], TRIGGERS[0]);
    let _ = pair.client.procedure::<(), ()>("end").on(&pair.to_server).timeout(BOUND).call(&());
    pair.server.wait_for_finalize();
}

suite!(
    foreign_loop_serves_calls,
    both_sides_are_served_by_loops_and_call_each_other,
    call_that_waits_needs_no_loop,
    handlers_run_in_the_loop_while_another_thread_drives,
    bulk_data_moves_both_ways,
    one_way_floods_arrive,
    no_wake_up_is_lost,
    deadlines_and_timers_expire_in_the_loop,
    timer_runs_in_the_loop_while_another_thread_drives,
    waiting_for_the_release_of_memory_needs_no_loop,
    end_of_a_peer_is_noticed,
    loop_serves_two_engines_that_call_each_other,
    futures_of_handlers_are_woken_in_the_loop,
    future_that_wakes_itself_stops_no_progress,
    descriptor_is_readable_when_the_engine_ends,
    several_threads_make_progress,
    progress_polls_once_or_until_its_timeout,
    progress_is_refused_where_it_can_only_fail,
    finalize_drives_on_the_calling_thread,
    dropping_the_last_handle_ends_the_engine,
    loop_learns_of_the_end_by_another_thread_or_peer,
    handler_may_finalize_its_engine,
);
