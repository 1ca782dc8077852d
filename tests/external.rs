//! An engine with `Progress::External` and no handler threads has no thread at all. This test counts threads, and forks, so it
//! runs alone in its process.

#[path = "common/mod.rs"]
mod common;
#[path = "common/event_loop.rs"]
mod event_loop;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use calomel::{BulkMode, Engine, Error, Progress, Request};
use common::{Watchdog, pattern};
use event_loop::{EventLoop, TRIGGERS, Trigger, serve};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

fn threads() -> usize {
    entries("/proc/self/task")
}

fn engine(address: &str) -> Engine {
    let builder = Engine::builder().listen(address).same_host_upgrade(false);
    builder.progress(Progress::External).handler_threads(0).build().unwrap()
}

/// Two engines in one loop, which this thread runs: calls, data, futures, timers, deadlines. Stopped by the last of them.
fn story(address: &str, trigger: Trigger) {
    let (one, other) = (engine(address), engine(address));
    one.define("sum", |_: &Request, (x, y): (u64, u64)| x + y).unwrap();
    one.define_async("later", |_: Request, x: u64| async move { x + 1 }).unwrap();
    one.define_async("never", |_: Request, ()| std::future::pending::<()>()).unwrap();
    let memory = one.expose(pattern(1, 1_000_000), BulkMode::ReadOnly).unwrap();
    let to_one = other.lookup(one.address()).unwrap();

    let sum = other.procedure::<(u64, u64), u64>("sum").on(&to_one).start(&(40, 2)).unwrap();
    let later = other.procedure::<u64, u64>("later").on(&to_one).start(&1).unwrap();
    let never = other.procedure::<(), ()>("never").on(&to_one).timeout(Duration::from_millis(50)).start(&()).unwrap();
    let pull = memory.bulk().on(&to_one).start_pull_into(other.expose(vec![0u8; 1_000_000], BulkMode::ReadWrite).unwrap());

    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    let counted = Arc::new(AtomicBool::new(false));
    let (ends, here) = (stop.clone(), counted.clone());
    let before = threads();
    let finish = move || {
        here.store(threads() == before, Ordering::SeqCst);
        rustix::io::write(&*ends, &1u64.to_ne_bytes()).unwrap();
    };
    one.timer(Duration::from_millis(500), finish).unwrap();
    serve(&[one.clone(), other.clone()], trigger, stop.as_fd());

    assert!(counted.load(Ordering::SeqCst), "an engine has started a thread");
    assert!(sum.is_ready() && later.is_ready() && never.is_ready());
    assert_eq!((sum.wait().unwrap(), later.wait().unwrap()), (42, 2));
    assert!(matches!(never.wait(), Err(Error::Timeout { .. })));
    let (pulled, copy) = pull.wait();
    assert_eq!(pulled.unwrap(), 1_000_000);
    assert!(copy.reclaim() == pattern(1, 1_000_000));
    drop(memory);
    assert_eq!(threads(), before);
    forks(&one);
    assert_eq!(threads(), before);
    drop((to_one, one, other));
    assert_eq!(threads(), before);
}

/// In a forked child, `progress` fails, and the child takes nothing that is the parent's.
#[allow(unsafe_code)]
fn forks(engine: &Engine) {
    // SAFETY: the child allocates little, and ends by `_exit`; no other thread of this process holds a lock, as no other runs
    // but the test harness, which waits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(engine.progress(Duration::ZERO), Err(Error::Unsupported { .. }));
        let _ = engine.as_fd();
        let dropped = engine.clone();
        drop(dropped);
        // SAFETY: ends the process, without destructors.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` is a place for its status.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0));
    engine.progress(Duration::ZERO).unwrap();
}

#[test]
fn external_engine_has_no_thread() {
    let _watchdog = Watchdog::start("external_engine_has_no_thread");
    let (before, descriptors) = (threads(), entries("/proc/self/fd"));
    for trigger in TRIGGERS {
        for address in ["loop://", "tcp://127.0.0.1:0", "shm://"] {
            story(address, trigger);
            assert_eq!(threads(), before, "{address}");
        }
    }
    assert_eq!(entries("/proc/self/fd"), descriptors);
    for progress in [Progress::External, Progress::Park] {
        accepts_when_descriptors_are_free_again(progress);
    }
}

/// A connection comes while no descriptor is left. No event follows when some are: the engine has to try again by itself.
fn accepts_when_descriptors_are_free_again(progress: Progress) {
    let builder = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false);
    let server = builder.progress(progress).handler_threads(0).build().unwrap();
    let _served = (progress == Progress::External).then(|| EventLoop::serving(&[&server], Trigger::Level));
    let address = server.address().to_string();
    let dial = || TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    // An engine that has accepted a stranger closes the connection.
    let refused = |mut stranger: TcpStream| {
        stranger.set_read_timeout(Some(Duration::from_secs(4))).unwrap();
        match stranger.read(&mut [0; 100]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{progress:?}: the connection is not accepted: {other:?}"),
        }
    };
    let mut stranger = dial();
    stranger.write_all(&[0xff; 1000]).unwrap();
    refused(stranger);

    let whole = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(100), maximum: whole.maximum }).unwrap();
    let mut files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    files.pop();
    let mut stranger = dial();
    stranger.write_all(&[0xff; 1000]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    drop(files);
    setrlimit(Resource::Nofile, whole).unwrap();
    refused(stranger);
}
