//! Engines leave no threads or descriptors behind, and an idle engine does nothing. Each test runs in its own process, to count
//! there.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Error, HandlerPool, Request, Responder};

use crate::assert_error;
use crate::roles::say;
use crate::support::*;

fn ended_engines_leave_no_threads_and_no_descriptors() {
    let _watchdog = Watchdog::start("ended_engines_leave_no_threads_and_no_descriptors");
    let mut child = Child::start("leftovers", &[]);
    child.hear("nothing left");
    assert!(child.wait(BOUND).success());
}

fn idle_engines_use_no_cpu_time() {
    let _watchdog = Watchdog::start("idle_engines_use_no_cpu_time");
    let mut child = Child::start("idle", &[]);
    child.hear("nothing done");
    assert!(child.wait(BOUND).success());
}

fn call_in_forked_child_fails() {
    let _watchdog = Watchdog::start("call_in_forked_child_fails");
    let mut child = Child::start("fork", &[]);
    child.hear("forked well");
    assert!(child.wait(BOUND).success());
}

fn entries(directory: &str) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            format!("{} {}", entry.file_name().display(), target.display())
        })
        .collect();
    names.sort();
    names
}

fn threads() -> usize {
    entries("/proc/self/task").len()
}

fn descriptors() -> usize {
    entries("/proc/self/fd").len()
}

/// Uses most of what takes threads and descriptors, and ends it in one of several ways.
fn busy_life(round: usize) {
    let pool = HandlerPool::new(2);
    let own = if round.is_multiple_of(2) { anywhere() } else { format!("loop://leftovers-{round}") };
    let server = configured().listen(own).listen(anywhere()).build().unwrap();
    define_add(&server);
    server.pool(&pool).define("pooled", |_: &Request, ()| ()).unwrap();
    let (hold, held) = std::sync::mpsc::channel();
    server.define_deferred("kept", move |reply: Responder<()>, ()| hold.send(reply).unwrap()).unwrap();
    server.define("blocks", |_: &Request, ()| std::thread::sleep(Duration::from_millis(20))).unwrap();
    server
        .define_async("fetch", |request: Request, bulk: Bulk| async move {
            let local = request.engine().expose(vec![0u8; bulk.len()], BulkMode::ReadWrite).unwrap();
            bulk.on(request.endpoint()).start_pull_into(local).await.0.unwrap()
        })
        .unwrap();
    let clients: Vec<Engine> = (0..3).map(|_| client()).collect();
    for client in &clients {
        let endpoint = client.lookup(server.address()).unwrap();
        assert_serves(client, &endpoint);
        client.procedure::<(), ()>("pooled").on(&endpoint).call(&()).unwrap();
        let blocks = client.procedure::<(), ()>("blocks");
        let pendings: Vec<_> = (0..4).map(|_| blocks.on(&endpoint).start(&()).unwrap()).collect();
        pendings.into_iter().for_each(|pending| pending.wait().unwrap());
        let exposed = client.expose(vec![1u8; 300_000], BulkMode::ReadWrite).unwrap();
        let fetch = client.procedure::<Bulk, usize>("fetch");
        assert_eq!(fetch.on(&endpoint).call(&exposed.bulk()).unwrap(), 300_000);
        // In progress at the end.
        let _pending = client.procedure::<(), ()>("kept").on(&endpoint).start(&()).unwrap();
        let _reply = held.recv_timeout(BOUND).unwrap();
        let _timer = client.timer(Duration::from_secs(3600), || {}).unwrap();
        let absent = client.lookup(nowhere()).unwrap();
        assert_error!(client.procedure::<(), ()>("x").on(&absent).call(&()), Error::Unreachable { .. });
    }
    match round % 3 {
        0 => {
            clients.iter().for_each(|client| client.finalize().unwrap());
            server.finalize().unwrap();
        }
        1 => server.finalize().unwrap(),
        // All of them are dropped.
        _ => {}
    }
}

/// The role behind [`ended_engines_leave_no_threads_and_no_descriptors`].
pub fn run() {
    // One run beforehand: what is made once and kept does not count.
    (0..6).for_each(busy_life);
    let before = (threads(), descriptors());
    (6..30).for_each(busy_life);
    let begin = Instant::now();
    while threads() > before.0 || descriptors() > before.1 {
        // A joined thread may stay in the list for a moment.
        if begin.elapsed() > Duration::from_secs(5) {
            panic!("{before:?} before; now {:?} and {:?}", entries("/proc/self/task"), entries("/proc/self/fd"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // The thread of this test, the harness', and one more that the harness may wait with.
    assert!(before.0 <= 3, "{} threads without any engine", before.0);
    say("nothing left");
}

/// The activity of each other thread of this process so far: ticks of processor time, and how often it went to sleep.
fn activity() -> BTreeMap<String, (u64, u64, String)> {
    // SAFETY: asks for a number.
    let own = unsafe { libc::gettid() }.to_string();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let ids = tasks.map(|task| task.unwrap().file_name().into_string().unwrap()).filter(|id| *id != own);
    // A thread that ends meanwhile is no longer there.
    ids.filter_map(|id| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/self/task/{id}/{file}")).ok();
        let stat = read("stat")?;
        let (name, rest) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // Counted from the state, which is the third field of the file: user and system time are fields 14 and 15.
        let ticks = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        let status = read("status")?;
        let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        let value = (ticks, sleeps.trim().parse().unwrap(), name.to_owned());
        Some((id, value))
    })
    .collect()
}

/// The role behind [`idle_engines_use_no_cpu_time`].
pub fn idle() {
    let server = builder().listen(anywhere()).build().unwrap();
    define_add(&server);
    server.define("blocks", |_: &Request, ()| std::thread::sleep(Duration::from_millis(5))).unwrap();
    let exposed = server.expose_read_only(pattern(1, 100_000)).unwrap();
    let clients: Vec<Engine> = (0..10).map(|_| builder().build().unwrap()).collect();
    let mut endpoints = Vec::new();
    for client in &clients {
        let endpoint = client.lookup(server.address()).unwrap();
        assert_serves(client, &endpoint);
        client.procedure::<(), ()>("blocks").on(&endpoint).call(&()).unwrap();
        let mut copy = vec![0u8; 100_000];
        exposed.bulk().on(&endpoint).pull_into(&mut copy).unwrap();
        let _timer = client.timer(Duration::from_secs(3600), || {}).unwrap();
        endpoints.push(endpoint);
    }
    // A bulk that went there and back; both ends hold it when its memory is revoked, and each is notified.
    let kept = std::sync::Mutex::new(Vec::new());
    server
        .define("keep", move |_: &Request, bulk: Bulk| {
            kept.lock().unwrap().push(bulk.clone());
            bulk
        })
        .unwrap();
    let large = clients[0].expose(vec![1u8; 100_000], BulkMode::ReadOnly).unwrap();
    let small = clients[0].expose_read_only(vec![1u8; 100]).unwrap();
    let keep = clients[0].procedure::<Bulk, Bulk>("keep");
    let _back = [&large.bulk(), &small.bulk()].map(|bulk| keep.on(&endpoints[0]).call(bulk).unwrap());
    drop((large, small));
    // After activity a thread may spin, and idle threads may end, for a bounded time.
    let begin = Instant::now();
    let mut before = activity();
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = activity();
        if now == before {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(15), "never idle: {before:?}, {now:?}");
        before = now;
    }
    // An engine's activity recurs. In an emulated guest, threads wake spuriously once in a while.
    for window in 1.. {
        std::thread::sleep(Duration::from_secs(2));
        let after = activity();
        if before == after {
            break;
        }
        assert!(window < 4, "idle engines did something: {before:?}, {after:?}");
        before = after;
    }
    assert!(endpoints.iter().all(|endpoint| endpoint.is_connected()));
    for (client, endpoint) in clients.iter().zip(&endpoints) {
        assert_serves(client, endpoint);
    }
    say("nothing done");
}

/// The role behind [`call_in_forked_child_fails`].
pub fn fork() {
    let engine = server();
    define_add(&engine);
    let client = client();
    let endpoint = client.lookup(engine.address()).unwrap();
    assert_serves(&client, &endpoint);
    let exposed = engine.expose(vec![1u8; 100_000], BulkMode::ReadWrite).unwrap();
    let bulk = exposed.bulk();
    // SAFETY: the child calls what a user's child would call, and ends by `_exit`; no other thread holds a lock of this program
    // at this moment.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let begin = Instant::now();
        let call = client.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2));
        let pull = bulk.on(&endpoint).pull_into(&mut [0u8; 10][..]);
        let clear = |error: &Error| {
            eprintln!("in the forked child: {error}");
            error.to_string().contains("fork")
        };
        let well = call.is_err_and(|e| clear(&e)) && pull.is_err_and(|e| clear(&e));
        let code = if !well {
            1
        } else if begin.elapsed() > Duration::from_secs(3) {
            2
        } else {
            0
        };
        // SAFETY: ends the process, without running what belongs to the parent.
        unsafe { libc::_exit(code) };
    }
    assert!(pid > 0);
    let mut status = 0;
    let begin = Instant::now();
    loop {
        // SAFETY: the pointer is to a variable of the right type.
        let ended = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
        if ended == pid {
            break;
        }
        if begin.elapsed() > Duration::from_secs(10) {
            // SAFETY: the child was not waited for, so the number is its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status, 0, "1: no clear error; 2: not at once; else: a signal");
    // The parent is not affected.
    assert_serves(&client, &endpoint);
    say("forked well");
}

over_each!(ended_engines_leave_no_threads_and_no_descriptors, idle_engines_use_no_cpu_time, call_in_forked_child_fails);
