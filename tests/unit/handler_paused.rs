use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use serde::{Deserialize, Serialize};

use super::super::drive::DriveGoal;
use super::super::workers::{HandlerClass, JobKind};
use super::*;
use crate::{Engine, Pending, Request};

const LONG: Duration = Duration::from_secs(3600);
const BOUND: Duration = Duration::from_secs(10);
/// So long the request of `Wait::RequestAndSet` waits, at least.
const KEPT: Duration = Duration::from_millis(20);

#[test]
fn ever_more_jobs_are_passed_on_while_a_handler_waits() {
    const JOBS: u64 = 20;
    let engine = Engine::client("loop").unwrap();
    let core = &engine.shared().core;
    core.retire_progress();
    let (sender, ran) = mpsc::channel();
    let class = Arc::new(HandlerClass::default());
    let job = |n| {
        let sender = sender.clone();
        let (runnable, task) = async_task::spawn(async move { sender.send(n).unwrap() }, |_| ());
        task.detach();
        Job::new(core, JobKind::Task(runnable, class.clone()))
    };
    let paused = HandlerPaused { core, stay: LONG, is_progress: false, keeping: Cell::default() };
    let mut new = (0..JOBS).map(job).collect();
    let mut passed_on = 0;
    for (steps, expected) in [(0, 0), (1, 1), (2, 3), (3, 7), (4, JOBS)] {
        let since = Instant::now().checked_sub(LONG * steps).unwrap();
        paused.keeping.set(Some(Keeping { awaited: Awaited::Transfer, since, steps: 0, passed_on: passed_on as u32 }));
        paused.keep_or_pass_on(&mut new, false);
        assert_eq!(core.threads.load().0, JOBS - passed_on, "it waits no more");
        paused.keep_or_pass_on(&mut new, true);
        let next = paused.keeping.get().map(|_| since + LONG * (steps + 1));
        assert_eq!(paused.keeps_jobs_until(), next);
        while passed_on < expected {
            ran.recv_timeout(BOUND).unwrap();
            passed_on += 1;
        }
        assert_eq!(core.threads.load().0, JOBS - passed_on, "after {steps} steps");
    }
    assert_eq!(paused.keeps_jobs_until(), None);
}

fn is_progress_thread() -> bool {
    thread::current().name() == Some("calomel-progress")
}

/// On a busy machine the watcher may replace a progress thread before its handler waits. Then all is to be tried again.
fn one_of_many(what: &str, round: impl Fn() -> bool) {
    assert!((0..20).any(|_| round()), "{what}");
}

fn server_and_client() -> (Engine, Engine) {
    let server = Engine::server("loop://").unwrap();
    server.define("is_progress", |_: &Request, ()| is_progress_thread()).unwrap();
    (server, Engine::client("loop").unwrap())
}

/// For what the handler of `waits` waits, and until when.
#[derive(Serialize, Deserialize)]
enum Wait {
    /// Until so many requests wait behind it.
    Requests(u64),
    /// Until then, and then until `set` has been handled, while jobs are passed on as ever.
    RequestAndSet,
    /// Until `set` has been handled, as if for the caller's answer; jobs stay.
    SetByCaller,
    /// As if for an answer of its own engine, which it calls.
    SetByItself,
}

/// `waits`: returns whether that came. Sends when it begins to wait.
fn define_waits(server: &Engine) -> mpsc::Receiver<()> {
    let (sender, started) = mpsc::channel();
    let is_set = Arc::new(AtomicBool::new(false));
    let set = is_set.clone();
    server
        .define("set", move |request: &Request, ()| {
            set.store(true, Ordering::SeqCst);
            // The thread that waits may sleep.
            request.engine().shared().core.ring();
        })
        .unwrap();
    server
        .define("waits", move |request: &Request, wait: Wait| {
            let engine = request.engine();
            let itself = engine.lookup(engine.address()).unwrap();
            let core = &engine.shared().core;
            let awaited = match wait {
                Wait::Requests(_) | Wait::RequestAndSet => Awaited::Transfer,
                Wait::SetByCaller => Awaited::Answer(request.endpoint().peer()),
                Wait::SetByItself => Awaited::Answer(itself.peer()),
            };
            let paused = core.pause_handler(awaited);
            let keep_from = |since| paused.keeping.set(Some(Keeping { awaited, since, steps: 0, passed_on: 0 }));
            let drive = |stop: &dyn Fn() -> bool| {
                let acquired = core.driver_lock.try_acquire().unwrap();
                let deadline = Some(Instant::now() + BOUND);
                let (progress, until_event, brief) = Default::default();
                let goal = DriveGoal { stop, announce: &|_| true, deadline, progress, until_event, brief };
                core.drive_as_caller(acquired, &goal, Some(&paused))
            };
            keep_from(Instant::now() + LONG);
            sender.send(()).unwrap();
            if !paused.is_progress {
                return false;
            }
            let is_set = || is_set.load(Ordering::SeqCst);
            let wait_behind = |count| drive(&|| core.threads.load().0 == count);
            match wait {
                Wait::Requests(count) => wait_behind(count),
                Wait::RequestAndSet => {
                    let came = wait_behind(1);
                    thread::sleep(KEPT);
                    keep_from(Instant::now());
                    came && drive(&is_set)
                }
                Wait::SetByCaller => drive(&is_set),
                Wait::SetByItself => {
                    let _pending = engine.procedure::<(), ()>("set").on(&itself).start(&()).unwrap();
                    drive(&is_set)
                }
            }
        })
        .unwrap();
    started
}

#[test]
fn requests_that_come_while_a_handler_waits_are_handled_after_it() {
    const REQUESTS: u64 = 5;
    one_of_many("the progress thread handles the requests that it has received meanwhile", || {
        let (server, client) = server_and_client();
        let started = define_waits(&server);
        let peer = client.lookup(server.address()).unwrap();
        let waits = client.procedure::<Wait, bool>("waits").on(&peer).start(&Wait::Requests(REQUESTS)).unwrap();
        started.recv_timeout(BOUND).unwrap();
        let call = client.procedure::<(), bool>("is_progress").on(&peer);
        let behind: Vec<_> = (0..REQUESTS).map(|_| call.start(&()).unwrap()).collect();
        waits.wait().unwrap() && Pending::wait_all(behind).into_iter().all(Result::unwrap)
    });
}

/// In the end, though no others come; and at once, if it comes from the peer that is to answer.
#[test]
fn request_is_passed_on_while_a_handler_waits() {
    for wait in [Wait::RequestAndSet, Wait::SetByCaller, Wait::SetByItself] {
        one_of_many("a request that was received meanwhile is handled before the handler ends", || {
            let (server, client) = server_and_client();
            let started = define_waits(&server);
            let peer = client.lookup(server.address()).unwrap();
            let waits = client.procedure::<Wait, bool>("waits").on(&peer).start(&wait).unwrap();
            started.recv_timeout(BOUND).unwrap();
            if !matches!(wait, Wait::SetByItself) {
                client.procedure::<(), ()>("set").on(&peer).call(&()).unwrap();
            }
            let came = waits.wait().unwrap();
            if came && matches!(wait, Wait::RequestAndSet) {
                assert!(waiting_time(&server, "set") >= KEPT, "its waiting time begins when it arrives");
            }
            came
        });
    }
}

/// How long the one request of this procedure has waited.
fn waiting_time(server: &Engine, procedure: &str) -> Duration {
    let end = Instant::now() + BOUND;
    loop {
        // It is counted when the handler has returned, and may be answered before.
        let stats = server.stats();
        if let Some(handler) = stats.handlers.iter().find(|handler| handler.procedure == procedure && handler.calls == 1) {
            return handler.waiting.max;
        }
        assert!(Instant::now() < end, "it is counted");
        thread::yield_now();
    }
}

#[test]
fn handler_that_has_waited_for_long_keeps_no_jobs() {
    // With one processor, all jobs are passed on.
    for (waits, keeps) in [(false, true), (true, false)] {
        one_of_many("jobs are kept, or not", || {
            let (server, client) = server_and_client();
            server
                .define("keeps", |request: &Request, waits: bool| {
                    let core = &request.engine().shared().core;
                    let end = Instant::now() + if waits { 10 * core.stay } else { Duration::ZERO };
                    core.wait(&|| Instant::now() >= end, &|_| true, Some(end), Awaited::Other);
                    let keeps = |awaited| {
                        let paused = core.pause_handler(awaited);
                        paused.is_progress.then(|| paused.keeping.get().is_some())
                    };
                    [keeps(Awaited::Transfer), keeps(Awaited::Other)]
                })
                .unwrap();
            let peer = client.lookup(server.address()).unwrap();
            let keeps_jobs = client.procedure::<bool, [Option<bool>; 2]>("keeps").on(&peer);
            let spins = server.shared().core.spin.is_some();
            keeps_jobs.call(&waits).unwrap() == [Some(spins && keeps), Some(false)]
        });
    }
}
