//! Signals don't disturb a process with open links: peers that die cause no `SIGPIPE`, interrupted system calls are repeated,
//! and after SIGCONT a call past its deadline ends at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Error, Request, Responder};

use crate::assert_error;
use crate::roles::say;
use crate::support::*;

const LEN: usize = 8 << 20;

fn peer_that_dies_causes_no_sigpipe() {
    let _watchdog = Watchdog::start("peer_that_dies_causes_no_sigpipe");
    let mut child = Child::start("talker", &[]);
    child.hear("ready");
    let mut random = Random(0x919e);
    for round in 0..15 {
        let (mut peer, address) = Child::server(&[]);
        child.tell(&format!("talk {address}"));
        child.hear("talks");
        thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        match round % 3 {
            0 => peer.signal(libc::SIGKILL),
            1 => peer.tell("exit"),
            _ => peer.tell("finalize"),
        }
        child.hear("done");
    }
    child.tell("end");
    // `wait` would report a signal here.
    assert!(child.wait(BOUND).success());
}

/// The role behind [`peer_that_dies_causes_no_sigpipe`]: `SIGPIPE` ends it, as it does programs that are not written in Rust.
pub fn talk() {
    // SAFETY: restores the default action of a signal.
    assert!(unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) } != libc::SIG_ERR);
    let engine = client();
    say("ready");
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let Some(address) = order.strip_prefix("talk ") else { break };
        let endpoint = engine.lookup(address).unwrap();
        assert_serves(&engine, &endpoint);
        let bulk = engine.procedure::<(u8, usize), Bulk>("open").on(&endpoint).call(&(1, LEN)).unwrap();
        let ended = AtomicBool::new(false);
        // Until the peer is gone, and once more.
        let again = |work: &(dyn Fn() -> bool + Sync)| {
            let begin = Instant::now();
            while work() && begin.elapsed() < BOUND {}
            ended.store(true, Ordering::SeqCst);
            work();
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let bytes = pattern(2, LEN);
                again(&|| bulk.on(&endpoint).push_from(&bytes).is_ok());
            });
            scope.spawn(|| {
                let swallow = engine.procedure::<Vec<u8>, usize>("not defined");
                let bytes = vec![0u8; 100_000];
                again(&|| matches!(swallow.on(&endpoint).call(&bytes), Err(Error::NoSuchProcedure { .. })));
            });
            scope.spawn(|| {
                let add = engine.procedure::<(u32, u32), u32>("add");
                again(&|| add.on(&endpoint).notify(&(1, 2)).is_ok() && !ended.load(Ordering::SeqCst));
            });
            say("talks");
        });
        within_this_process();
        say("done");
    }
    std::process::exit(0);
}

/// The same with a peer in this process, which is dropped during calls to it.
fn within_this_process() {
    let peer = configured().listen("loop://pipe").build().unwrap();
    define_add(&peer);
    let engine = client();
    let endpoint = engine.lookup("loop://pipe").unwrap();
    let exposed = peer.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let bulk = exposed.bulk();
    assert_serves(&engine, &endpoint);
    let bytes = pattern(2, LEN);
    thread::scope(|scope| {
        scope.spawn(|| while bulk.on(&endpoint).push_from(&bytes).is_ok() {});
        scope.spawn(|| peer.finalize().unwrap());
    });
}

/// Counts the interruptions.
static INTERRUPTIONS: AtomicU64 = AtomicU64::new(0);

extern "C" fn interrupt(_: libc::c_int) {
    INTERRUPTIONS.fetch_add(1, Ordering::Relaxed);
}

/// Has each thread of this process interrupted a thousand times a second, without restarts of system calls.
fn start_signals() {
    // SAFETY: an all-zero `sigaction` is a valid one: no flags, and no signals blocked meanwhile.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = interrupt as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler touches one atomic.
    assert_eq!(unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) }, 0);
    let millisecond = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    let timer = libc::itimerval { it_interval: millisecond, it_value: millisecond };
    // SAFETY: the timer is valid for as long as the call lasts.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) }, 0);
    // The timer's signal goes to one thread; the others get theirs here.
    thread::spawn(|| {
        loop {
            for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
                let id: i32 = task.file_name().to_str().unwrap().parse().unwrap();
                // SAFETY: takes numbers only; a thread that has ended meanwhile is no matter.
                unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), id, libc::SIGALRM) };
            }
            thread::sleep(Duration::from_micros(500));
        }
    });
}

fn interrupted_system_calls_do_not_fail_operations() {
    let _watchdog = Watchdog::start("interrupted_system_calls_do_not_fail_operations");
    let mut child = Child::start("under signals", &[]);
    child.hear("unmoved");
    assert!(child.wait(BOUND).success());
}

/// The role behind [`interrupted_system_calls_do_not_fail_operations`].
pub fn run_under_signals() {
    start_signals();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        // Connections are made under signals, too. A long heartbeat, so that no peer is disconnected because the machine is
        // busy.
        let (engine, own) = (builder().build().unwrap(), builder().listen(anywhere()).build().unwrap());
        define_add(&own);
        own.define("echo", |_: &Request, text: String| text).unwrap();
        let to_own = engine.lookup(own.address()).unwrap();
        (0..20).for_each(|_| assert_serves(&engine, &to_own));
        let theirs = own.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let mut buffer = engine.alloc(LEN);
        buffer.copy_from_slice(&pattern(3, LEN));
        let exposed = engine.expose(buffer, BulkMode::ReadWrite).unwrap();
        assert_eq!(theirs.bulk().on(&to_own).push_from(&exposed).unwrap(), LEN);
        let mut bytes = vec![0u8; LEN];
        assert_eq!(theirs.bulk().on(&to_own).pull_into(&mut bytes).unwrap(), LEN);
        assert!(bytes == pattern(3, LEN));
        let text = "x".repeat(300_000);
        assert!(engine.procedure::<String, String>("echo").on(&to_own).call(&text).unwrap() == text);
        // Neither sooner nor much later than it should.
        let (keep, _kept) = std::sync::mpsc::channel();
        own.define_deferred("never", move |reply: Responder<()>, ()| keep.send(reply).unwrap()).unwrap();
        let never = engine.procedure::<(), ()>("never");
        let asked = Instant::now();
        assert_error!(never.on(&to_own).timeout(Duration::from_millis(50)).call(&()), Error::Timeout { .. });
        assert!(asked.elapsed() >= Duration::from_millis(50));
        assert!(asked.elapsed() < patience() * Duration::from_secs(3), "{:?}", asked.elapsed());
        let (rang, asked) = (Gate::default(), Instant::now());
        let on_time = rang.clone();
        let _timer = engine.timer(Duration::from_millis(20), move || on_time.open()).unwrap();
        rang.wait();
        assert!(asked.elapsed() >= Duration::from_millis(20));
        engine.finalize().unwrap();
        own.finalize().unwrap();
    }
    assert!(INTERRUPTIONS.load(Ordering::Relaxed) > 1000, "hardly any thread was interrupted: this test tests nothing");
    say("unmoved");
    std::process::exit(0);
}

fn call_stopped_past_its_deadline_times_out_on_sigcont() {
    let _watchdog = Watchdog::start("call_stopped_past_its_deadline_times_out_on_sigcont");
    let engine = server();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = kept.clone();
    // There is no response: one that had already arrived would be returned.
    engine.define_deferred("hang", move |reply: Responder<()>, ()| keep.lock().unwrap().push(reply)).unwrap();
    let mut child = Child::client();
    for attempt in 1.. {
        kept.lock().unwrap().clear();
        // Once `call`, and once `start` and `wait`.
        child.tell(&format!("briefly {}", engine.address()));
        let mut early = Vec::new();
        while kept.lock().unwrap().len() < 2 && early.len() < 2 {
            early.extend(child.said_of(&["brief"]));
            thread::sleep(Duration::from_millis(1));
        }
        if early.is_empty() {
            break;
        }
        // On a busy machine their deadlines may pass before they are in progress.
        (early.len()..2).for_each(|_| drop(child.hear("brief")));
        assert!(attempt < 50, "two calls are never in progress before their deadlines: {early:?}");
    }
    child.signal(libc::SIGSTOP);
    // Longer than the deadline of 200 ms, and shorter than the peer timeout.
    thread::sleep(Duration::from_millis(400));
    child.signal(libc::SIGCONT);
    let begin = Instant::now();
    for _ in 0..2 {
        let ended = child.hear("brief");
        assert!(ended.contains("timed out after 200ms"), "{ended}");
    }
    assert!(begin.elapsed() < patience() * Duration::from_secs(2), "{:?}", begin.elapsed());
    child.tell("finalize");
    child.hear("finalized");
    // Each has ended once.
    assert!(child.said_of(&["brief"]).is_empty());
    assert!(child.wait(BOUND).success());
    engine.finalize().unwrap();
}

/// Sets the real-time clock; false where that is not permitted.
fn set_clock(to: libc::timespec) -> bool {
    // SAFETY: the value is valid for as long as the call lasts.
    unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const to) == 0 }
}

fn clock(which: libc::clockid_t) -> libc::timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one value, which outlives it.
    assert_eq!(unsafe { libc::clock_gettime(which, &raw mut now) }, 0);
    now
}

/// Restores the clock, by the monotonic one.
struct Restored {
    real: libc::timespec,
    monotonic: libc::timespec,
}

impl Drop for Restored {
    fn drop(&mut self) {
        let passed = clock(libc::CLOCK_MONOTONIC).tv_sec - self.monotonic.tv_sec;
        set_clock(libc::timespec { tv_sec: self.real.tv_sec + passed, ..self.real });
    }
}

#[test]
#[ignore = "sets the system's clock: ci/verbs, in a guest"]
fn a_clock_that_jumps_breaks_no_deadline() {
    let _watchdog = Watchdog::start("a_clock_that_jumps_breaks_no_deadline");
    assert!(
        std::env::var("CALOMEL_MAY_SET_CLOCK").is_ok(),
        "CALOMEL_MAY_SET_CLOCK says that no other process needs this system's clock"
    );
    let restored = Restored { real: clock(libc::CLOCK_REALTIME), monotonic: clock(libc::CLOCK_MONOTONIC) };
    assert!(set_clock(restored.real), "only root may set the clock");
    let jumping = AtomicBool::new(true);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut hours = [5, -9, 24 * 365, 1, -24 * 30, 0].iter().cycle();
            while jumping.load(Ordering::SeqCst) {
                let hours = hours.next().unwrap();
                assert!(set_clock(libc::timespec { tv_sec: restored.real.tv_sec + hours * 3600, ..restored.real }));
                thread::sleep(Duration::from_millis(7));
            }
        });
        for address in ["tcp://127.0.0.1:0", "shm://"] {
            let server = configured().listen(address).same_host_upgrade(false).build().unwrap();
            define_add(&server);
            let (keep, _kept) = std::sync::mpsc::channel();
            server.define_deferred("never", move |reply: Responder<()>, ()| keep.send(reply).unwrap()).unwrap();
            let engine = configured().same_host_upgrade(false).build().unwrap();
            let endpoint = engine.lookup(server.address()).unwrap();
            let (add, never) = (engine.procedure::<(u32, u32), u32>("add"), engine.procedure::<(), ()>("never"));
            let exposed = server.expose_read_only(pattern(5, 1 << 20)).unwrap();
            for _ in 0..10 {
                for _ in 0..10 {
                    assert_eq!(add.on(&endpoint).call(&(1, 2)).unwrap(), 3);
                }
                let limit = Duration::from_millis(100);
                let begin = Instant::now();
                let pending = never.on(&endpoint).timeout(limit).start(&()).unwrap();
                assert_error!(never.on(&endpoint).timeout(limit).call(&()), Error::Timeout { .. });
                assert_error!(pending.wait(), Error::Timeout { .. });
                assert!(begin.elapsed() >= limit && begin.elapsed() < patience() * 10 * limit, "{:?}", begin.elapsed());
                let begin = Instant::now();
                let rang = Gate::default();
                let on_time = rang.clone();
                let _timer = engine.timer(limit, move || on_time.open()).unwrap();
                rang.wait();
                assert!(begin.elapsed() >= limit && begin.elapsed() < patience() * 10 * limit, "{:?}", begin.elapsed());
                let mut bytes = vec![0u8; 1 << 20];
                exposed.bulk().on(&endpoint).pull_into(&mut bytes).unwrap();
                assert!(bytes == exposed.view());
            }
            // Idle for longer than the peer timeout, beside a call: it is not disconnected.
            let limit = 2 * HEARTBEAT;
            assert_error!(never.on(&endpoint).timeout(limit).call(&()), Error::Timeout { .. });
            assert!(endpoint.is_connected());
            engine.finalize().unwrap();
            server.finalize().unwrap();
        }
        jumping.store(false, Ordering::SeqCst);
    });
}

over_each!(
    peer_that_dies_causes_no_sigpipe,
    interrupted_system_calls_do_not_fail_operations,
    call_stopped_past_its_deadline_times_out_on_sigcont
);
