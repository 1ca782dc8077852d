//! Which thread drives an engine, who leads, what is held until the batch ends, and which threads are woken.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crate::progress::Core;
use crate::{Bulk, BulkMode, Call, Caller, Engine, Request, Responder, Result};

/// What is waited for comes within this time, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(3);

/// A waker that checks that it is called without locks of its engine held.
struct LockCheckingWaker(Arc<Core>, mpsc::Sender<bool>);

impl Wake for LockCheckingWaker {
    fn wake(self: Arc<Self>) {
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.0.assert_unlocked()));
        let _ = self.1.send(found.is_ok());
    }
}

#[test]
fn hooks_and_wakers_run_without_locks_held() {
    for address in ["loop://", "tcp://127.0.0.1:0", "shm://"] {
        let core: Arc<OnceLock<Weak<Core>>> = Arc::default();
        let own = core.clone();
        // A panic in the hook denies the call, so that the call below fails.
        let decide = move |_: &Caller<'_>| {
            own.get().unwrap().upgrade().unwrap().assert_unlocked();
            true
        };
        let server = Engine::builder().listen(address).same_host_upgrade(false).authorize(decide).build().unwrap();
        core.set(Arc::downgrade(&server.shared().core)).unwrap();
        server.define("twice", |_: &Request, n: u32| 2 * n).unwrap();
        let client = Engine::builder().same_host_upgrade(false).build().unwrap();
        let twice = client.procedure::<u32, u32>("twice");
        let peer = client.lookup(server.address()).unwrap();
        for round in 0..50u64 {
            // Now and then both sides sleep, and the reactor reports the event.
            if round % 5 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(twice.on(&peer).call(&21).unwrap(), 42);
            let (report, unlocked) = mpsc::channel();
            let waker = Waker::from(Arc::new(LockCheckingWaker(client.shared().core.clone(), report)));
            let mut pending = twice.on(&peer).start(&1).unwrap();
            let mut context = Context::from_waker(&waker);
            if Pin::new(&mut pending).poll(&mut context).is_pending() {
                assert!(unlocked.recv_timeout(Duration::from_secs(20)).unwrap(), "a waker ran with a lock held, over {address}");
            }
        }
    }
}

/// Pulls that are started while others are in progress are asked for together with more of them; those that block are not, nor
/// are pushes, whose bytes follow.
#[test]
fn started_pulls_are_held_while_others_are_in_progress() -> Result<()> {
    let server = Engine::server("loop://")?;
    let exposed = server.expose(vec![7u8; 100], BulkMode::ReadWrite)?;
    let bulk = exposed.bulk();
    server.define("bulk", move |_: &Request, (): ()| bulk.clone())?;
    let client = Engine::client("loop")?;
    let peer = client.lookup(server.address())?;
    let remote = client.procedure::<(), Bulk>("bulk").on(&peer).call(&())?.on(&peer);
    let local: Vec<_> =
        [0u8, 0, 0, 0, 7].into_iter().map(|byte| client.expose(vec![byte; 100], BulkMode::ReadWrite)).collect::<Result<_>>()?;
    let (core, far) = (client.by_hand(), server.by_hand());
    let mut pulls = Vec::new();
    for memory in &local[..3] {
        pulls.push(remote.start_pull_into(memory.slice(0, 100)?));
        assert!(core.held_calls().is_none_or(|held| held == (false, 0)), "the first three are sent at once");
    }
    pulls.push(remote.start_pull_into(local[3].slice(0, 100)?));
    assert!(core.held_calls().is_none_or(|held| held == (true, 0)), "the fourth is held");
    let push = remote.start_push_from(local[4].slice(0, 100)?);
    assert!(core.held_calls().is_none_or(|held| held == (false, 0)), "a push takes what is held along");
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            let pulled: Vec<_> = pulls.into_iter().map(|pull| pull.wait().0).collect();
            (pulled, push.wait().0)
        });
        while !ended.is_finished() {
            far.turn(false);
        }
        let (pulled, pushed) = ended.join().unwrap();
        assert!(pulled.into_iter().chain([pushed]).all(|moved| moved.is_ok_and(|len| len == 100)));
    });
    assert!(local.into_iter().take(4).all(|memory| memory.reclaim() == [7; 100]));
    Ok(())
}

/// A server, a client, and a procedure that has been called.
fn echo() -> Result<(Engine, Engine, Call<u64, u64>)> {
    echo_at("loop://")
}

fn echo_at(address: &str) -> Result<(Engine, Engine, Call<u64, u64>)> {
    let server =
        Engine::builder().listen(address).same_host_upgrade(false).finalize_timeout(Duration::from_millis(100)).build()?;
    server.define("echo", |_: &Request, n: u64| n)?;
    let client = Engine::builder().same_host_upgrade(false).finalize_timeout(Duration::from_millis(100)).build()?;
    let echo = client.procedure::<u64, u64>("echo").on(client.lookup(server.address())?);
    echo.call(&0)?;
    Ok((server, client, echo))
}

/// Calls that tasks start while others are unanswered wait for more of them, for a moment.
#[test]
fn calls_of_tasks_are_held_while_answers_may_come() -> Result<()> {
    let (server, client, echo) = echo()?;
    let (core, far) = (client.by_hand(), server.by_hand());
    // The first three are sent at once. Of more, those that wait are sent when they are half of all: at the twelfth, for instance.
    let mut pending: Vec<_> = (0..3).map(|n| echo.start(&n)).collect::<Result<_>>()?;
    assert!(core.held_calls().is_none_or(|held| held == (false, 0)));
    for n in 3..13 {
        pending.push(echo.start(&n)?);
        assert!(n > 3 || core.held_calls().is_none_or(|held| held == (true, 0)), "the fourth is held");
    }
    let mut context = Context::from_waker(Waker::noop());
    let mut poll = || Pin::new(&mut pending[0]).poll(&mut context).is_ready();
    // With one processor, futures do not drive.
    if let Some(held) = core.held_calls() {
        assert_eq!(held, (true, 0));
        assert!(!poll());
        assert_eq!(core.held_calls(), Some((true, 0)), "other tasks have not been polled yet");
        let begun = Instant::now();
        while core.held_calls() == Some((true, 0)) && begun.elapsed() < TIMEOUT {
            assert!(!poll());
        }
        assert_eq!(core.held_calls(), Some((false, 1)), "no answer came while polls drove, so they are sent");
    }
    while !poll() {
        far.turn(false);
    }
    Ok(())
}

/// A task, and how many times it has been woken since that was last asked.
#[derive(Clone, Default)]
struct CountedTask(Arc<Wakes>);

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl CountedTask {
    /// Polls a future once; whether it is ready.
    fn poll<F: Future + Unpin>(&self, future: &mut F) -> bool {
        let waker = Waker::from(self.0.clone());
        Pin::new(future).poll(&mut Context::from_waker(&waker)).is_ready()
    }

    fn wakes(&self) -> usize {
        self.0.0.swap(0, Ordering::Relaxed)
    }
}

/// Polls a future once; whether it is ready, and how many times its task has been woken meanwhile.
fn poll_once<F: Future + Unpin>(future: &mut F) -> (bool, usize) {
    let task = CountedTask::default();
    (task.poll(future), task.wakes())
}

fn repeat_until(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT);
    }
}

/// So many polls return at once, in each round.
const MOST_RETURNS: usize = 64;

/// A branch of `select!` is polled once, and kept. Behind such futures, others drive nevertheless.
#[test]
fn future_leads_in_place_of_those_that_are_not_polled_any_more() -> Result<()> {
    let (server, client, echo, never) = echo_and_never("loop://")?;
    let (core, far) = (client.by_hand(), server.by_hand());
    // With one processor, futures do not drive.
    if core.held_calls().is_none() {
        return Ok(());
    }
    for kept in 1..=3 {
        let mut pending: Vec<_> = (0..kept).map(|n| never.start(&n)).collect::<Result<_>>()?;
        for future in &mut pending {
            assert_eq!(poll_once(future), (false, 1), "the first leads, and others stand by");
        }
        let mut behind = echo.start(&7)?;
        assert_eq!(poll_once(&mut behind), (false, 1), "it stands by");
        // It lets other tasks run, and the fourth call is held for a moment.
        let ready = (0..100 * MOST_RETURNS).any(|_| {
            far.turn(false);
            poll_once(&mut behind).0
        });
        assert!(ready, "it leads in place of {kept}");
    }
    Ok(())
}

/// The answers of others end sooner than that of the future which leads, where that has called last.
#[test]
fn future_leads_while_answers_come_for_others() -> Result<()> {
    let (server, client, echo, never) = echo_and_never("loop://")?;
    let (core, far) = (client.by_hand(), server.by_hand());
    // With one processor, futures do not drive.
    if core.held_calls().is_none() {
        return Ok(());
    }
    let mut leader = never.start(&1)?;
    assert_eq!(poll_once(&mut leader), (false, 1), "it leads");
    for n in 0..100 {
        let other = echo.start(&n)?;
        repeat_until(|| {
            far.turn(false);
            assert_eq!(poll_once(&mut leader), (false, 1), "it leads when {n} answers have come for others");
            other.is_ready()
        });
    }
    // Once in a while it leaves driving to the progress thread, as others do.
    repeat_until(|| {
        let (other, mut rests) = (echo.start(&1).unwrap(), false);
        repeat_until(|| {
            far.turn(false);
            rests = poll_once(&mut leader) == (false, 0);
            rests || other.is_ready()
        });
        rests
    });
    Ok(())
}

/// A server, a client that calls it, and its procedures: one that answers, and one that does not.
type TwoProcedures = (Engine, Engine, Call<u64, u64>, Call<u64, u64>);

fn echo_and_never(address: &str) -> Result<TwoProcedures> {
    let (server, client, echo) = echo_at(address)?;
    let kept = Mutex::new(Vec::new());
    server.define_deferred("never", move |responder: Responder<u64>, _: u64| kept.lock().unwrap().push(responder))?;
    let never = client.procedure::<u64, u64>("never").on(client.lookup(server.address())?);
    Ok((server, client, echo, never))
}

/// The tasks that wait behind a leader are not polled again before their operations end, as those of a `join_all`: when its call has
/// ended, or it is dropped, one of them is woken to lead. Until the progress thread looks for that they would wait in vain.
#[test]
fn leader_that_ends_wakes_another_task_that_waits() -> Result<()> {
    let (server, client, echo, never) = echo_and_never("loop://")?;
    let (core, far) = (client.by_hand(), server.by_hand());
    // With one processor, futures do not drive.
    if core.held_calls().is_none() {
        return Ok(());
    }
    let tasks: [CountedTask; 4] = Default::default();
    let mut first = echo.start(&1)?;
    let mut others: Vec<_> = (1..4).map(|n| never.start(&n)).collect::<Result<_>>()?;
    assert!(!tasks[0].poll(&mut first) && tasks[0].wakes() == 1, "it leads");
    for (task, other) in tasks[1..].iter().zip(&mut others) {
        assert!(!task.poll(other));
        task.wakes();
    }
    let woken = || tasks.each_ref().map(CountedTask::wakes);
    (0..3).for_each(|_| far.turn(false));
    repeat_until(|| tasks[0].poll(&mut first));
    assert!(tasks[0].wakes() > 0);
    for last in (1..4).rev() {
        let mut expected = [0; 4];
        expected[last] = 1;
        assert_eq!(woken(), expected, "the one that was started last is woken");
        assert!(!tasks[last].poll(&mut others[last - 1]));
        assert_eq!(woken(), expected, "it leads");
        others.pop();
        assert_eq!(tasks[last].wakes(), 1, "its call has ended");
    }
    assert_eq!(woken(), [0; 4]);
    Ok(())
}

/// Where each send takes a system call, and a task leads, calls that its thread starts wait until that leads again, and leave
/// together. Those of other threads do not.
#[test]
fn calls_that_are_started_beside_a_leader_wait_for_its_next_poll() -> Result<()> {
    for (address, waits) in [("loop://", false), ("tcp://127.0.0.1:0", true)] {
        let (server, client, echo, never) = echo_and_never(address)?;
        let (core, far) = (client.by_hand(), server.by_hand());
        // With one processor, futures do not drive.
        if core.held_calls().is_none() {
            return Ok(());
        }
        let is_left = || core.held_calls().unwrap().0;
        let mut first = never.start(&1)?;
        assert!(!is_left(), "nothing leads");
        assert!(!poll_once(&mut first).0);
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| echo.start(&2)).join().unwrap())?;
        assert!(!is_left(), "that thread does not poll the leader");
        let second = echo.start(&3)?;
        assert_eq!(is_left(), waits, "{address}");
        repeat_until(|| {
            assert!(!poll_once(&mut first).0);
            !is_left()
        });
        assert_eq!(core.held_calls().unwrap().1, 0, "they leave at once then");
        for mut pending in [elsewhere, second] {
            repeat_until(|| {
                far.turn(true);
                core.turn(true);
                poll_once(&mut pending).0
            });
        }
    }
    Ok(())
}

/// Where each send takes a system call, a thread drives, and the peer waits for more answers than would wait, an answer of another
/// thread waits for the driver's next poll; or for the end of that driver.
#[test]
fn answers_wait_for_the_driver_while_the_peer_waits_for_more() -> Result<()> {
    // How many answers are given, while a thread drives or not, and which are left for it. Of eight, seven and six are unanswered when
    // one and two wait. The third is sent with those, and the fifth with the fourth, since three are few.
    let expected = [true, true, false, true, false, false, false];
    for (address, driving, given) in [
        ("loop://", true, 7),
        ("tcp://127.0.0.1:0", true, 7),
        ("tcp://127.0.0.1:0", false, 7),
        ("tcp://127.0.0.1:0", true, 1),
        ("tcp://127.0.0.1:0", true, 2),
    ] {
        let (server, client, _) = echo_at(address)?;
        let (responders, kept) = mpsc::channel();
        server.define_deferred("later", move |responder: Responder<u64>, n: u64| {
            let _ = responders.send((responder, n));
        })?;
        let far = server.by_hand();
        // With one processor, no thread is awake for long.
        if far.held_calls().is_none() {
            return Ok(());
        }
        let is_left = || far.held_calls().unwrap().0;
        let later = client.procedure::<u64, u64>("later").on(client.lookup(server.address())?);
        let mut pending: Vec<_> = (0..8).map(|n| later.start(&n)).collect::<Result<_>>()?;
        let mut arrived = Vec::new();
        repeat_until(|| {
            far.turn(true);
            arrived.extend(kept.try_iter());
            arrived.len() == 8
        });
        let answer = |(responder, n): (Responder<u64>, u64)| {
            responder.respond(&n).unwrap();
            is_left()
        };
        let mut answers = arrived.into_iter().map(answer);
        let mut give = || answers.by_ref().take(given).collect::<Vec<_>>();
        let left = if driving { far.while_driving(give) } else { give() };
        let waits = driving && address.starts_with("tcp");
        assert_eq!(left, if waits { &expected[..given] } else { &[false; 7] }, "{address}, {driving}");
        assert!(!is_left(), "no thread drives any more");
        for (n, pending) in (0..).zip(pending.drain(..given)) {
            assert_eq!(pending.wait()?, n);
        }
        answers.for_each(|_left| ());
        for (n, pending) in (given as u64..).zip(pending) {
            assert_eq!(pending.wait()?, n);
        }
    }
    Ok(())
}

/// What async handlers start goes out with what the others of their batch start. Not so before a poll that may block the thread: the
/// future has another waker then.
#[test]
fn calls_of_async_handlers_leave_with_their_batch() -> Result<()> {
    for address in ["loop://", "tcp://127.0.0.1:0"] {
        let (back, front, client) = (echo_at(address)?.0, echo_at(address)?.0, echo_at("loop://")?.1);
        let echo = front.procedure::<u64, u64>("echo").on(front.lookup(back.address())?);
        echo.call(&0)?;
        let (left, core) = (Arc::new(Mutex::new(Vec::new())), front.by_hand());
        if core.held_calls().is_none() {
            return Ok(());
        }
        let (call, lefts, engine) = (echo.clone(), left.clone(), core.clone());
        front.define("plain", move |_: &Request, _: bool| {
            let mut pending = call.start(&7).unwrap();
            assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(Waker::noop())).is_pending());
            lefts.lock().unwrap().push(engine.held_calls().unwrap().0);
            7u64
        })?;
        let (lefts, engine) = (left.clone(), core.clone());
        front.define_async("gateway", move |_: Request, blocks: bool| {
            let (echo, lefts, engine) = (echo.clone(), lefts.clone(), engine.clone());
            async move {
                let mut pending = echo.start(&7).unwrap();
                let mut is_ready = |context: &mut Context<'_>| Pin::new(&mut pending).poll(context).is_ready();
                if blocks {
                    assert!(!poll_once(&mut pending).0);
                } else {
                    assert!(!poll_fn(|context| Poll::Ready(is_ready(context))).await);
                }
                lefts.lock().unwrap().push(engine.held_calls().unwrap().0);
                pending.await.unwrap()
            }
        })?;
        let to_front = client.lookup(front.address())?;
        let gateway = client.procedure::<bool, u64>("gateway").on(&to_front);
        for (name, blocks, expected) in
            [("gateway", false, [true, false]), ("gateway", true, [false, false]), ("plain", true, [false, false])]
        {
            let first = client.procedure::<bool, u64>(name).on(&to_front);
            let mut pendings = vec![first.start(&blocks)?, gateway.start(&false)?];
            repeat_until(|| {
                core.turn(true);
                left.lock().unwrap().len() == 2
            });
            assert_eq!(std::mem::take(&mut *left.lock().unwrap()), expected, "{address}, {name}");
            repeat_until(|| {
                core.turn(true);
                pendings.retain_mut(|pending| !poll_once(pending).0);
                pendings.is_empty()
            });
        }
    }
    Ok(())
}

/// A task whose answers are there whenever it polls would else go on calling in a single poll.
#[test]
fn task_that_calls_returns_to_its_runtime_though_answers_are_there() -> Result<()> {
    let (server, client, echo) = echo()?;
    let (core, far) = (client.by_hand(), server.by_hand());
    // With one processor, futures do not drive.
    if core.held_calls().is_none() {
        return Ok(());
    }
    let mut returned = 0;
    for n in 0..20 {
        let mut pending = echo.start(&n)?;
        far.turn(false);
        // Polls this far apart count as if the task had kept its thread for 10 us in between.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(10) {}
        let (ready, woken) = poll_once(&mut pending);
        if !ready {
            assert_eq!(woken, 1, "it is to be polled again");
            assert!((0..=MOST_RETURNS).any(|_| poll_once(&mut pending).0), "and drives then");
            returned += 1;
        }
    }
    assert!(returned >= 9, "every 20 us, not {returned} times");
    Ok(())
}

/// What the progress thread must not be late for is a request. So it takes over where a thread that drives no more, or has not
/// driven, leaves the lock free, if the engine is asked at all.
#[test]
fn progress_thread_takes_over_for_the_next_request() -> Result<()> {
    let server = Engine::server("loop://")?;
    let (keep, kept) = mpsc::channel();
    server.define_deferred("later", move |responder: Responder<u64>, (): ()| keep.send(responder).unwrap())?;
    let client = Engine::client("loop")?;
    client.define("hello", |_: &Request, ()| ())?;
    let address = client.listen("loop://")?;
    let peer = client.lookup(server.address())?;
    let (later, ping) = (client.procedure::<(), u64>("later").on(&peer), client.procedure::<(), u64>("ping").on(&peer));
    server.define("ping", |_: &Request, ()| 1u64)?;
    ping.call(&())?;
    let back = server.procedure::<(), ()>("hello").on(server.lookup(address)?);
    back.call(&())?;
    let (core, far) = (client.by_hand(), server.by_hand());
    let call = || {
        std::thread::scope(|scope| {
            let called = scope.spawn(|| ping.call(&()));
            while !called.is_finished() {
                far.turn(false);
            }
            called.join().unwrap()
        })
    };
    call()?;
    core.takes_over();
    call()?;
    assert!(!core.takes_over(), "an engine that is not asked leaves the lock free for its next call");
    let asked = back.start(&())?;
    core.turn(false);
    call()?;
    assert!(core.takes_over(), "the engine has handled a request");
    call()?;
    assert!(!core.takes_over(), "and no other one since");
    drop(asked);

    let pending = later.start(&())?;
    far.turn(false);
    far.takes_over();
    kept.try_recv().unwrap().respond(&7)?;
    assert!(far.takes_over(), "this thread has answered, and no thread drives");
    drop(pending);
    Ok(())
}

/// The thread that calls is awake, and finds the answer by itself: no thread of its engine wakes up for it.
#[test]
fn rare_call_wakes_no_other_thread_of_its_engine() -> Result<()> {
    // With one processor callers sleep.
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return Ok(());
    }
    for listen in ["loop://", "shm://", "tcp://127.0.0.1:0"] {
        let server = Engine::builder().same_host_upgrade(false).listen(listen).build()?;
        server.define("empty", |_: &Request, ()| ())?;
        let client = Engine::builder().same_host_upgrade(false).build()?;
        let empty = client.procedure::<(), ()>("empty").on(&client.lookup(server.address())?);
        let mut least = u64::MAX;
        // On a busy machine an answer may take so long that the caller sleeps.
        for _ in 0..40 {
            std::thread::sleep(Duration::from_millis(5));
            let before = client.stats().sleeps;
            for _ in 0..10 {
                empty.call(&())?;
                std::thread::sleep(Duration::from_millis(3));
            }
            least = least.min(client.stats().sleeps - before);
            if least <= 2 {
                break;
            }
        }
        assert!(least <= 2, "{listen}: the client's threads have slept {least} times beside ten calls");
    }
    Ok(())
}
