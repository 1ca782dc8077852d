//! What the tests of several suites stand on: a watchdog, conditions with a bound, and bytes to move.

// Each suite uses what it needs.
#![allow(dead_code)]

pub mod meddler;
pub mod wire;

use std::future::Future;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// A test that runs longer than this hangs; where the machine is emulated, `CALOMEL_TEST_PATIENCE` times as long.
const WATCHDOG: Duration = Duration::from_secs(60);
/// What must happen, happens within this time.
pub const BOUND: Duration = Duration::from_secs(20);

/// Where tests listen on an RDMA device: at its address, which the environment names.
#[track_caller]
pub fn verbs_address(port: u16) -> String {
    let ip = std::env::var("CALOMEL_VERBS").expect("CALOMEL_VERBS names the IP address of an RDMA device; ci/softroce has one");
    let ip: IpAddr = ip.parse().expect("CALOMEL_VERBS is an IP address");
    format!("verbs://{}", SocketAddr::new(ip, port))
}

/// How many times as long as usual things may take: more than once where the machine is emulated.
pub fn patience() -> u32 {
    std::env::var("CALOMEL_TEST_PATIENCE").map_or(1, |times| times.parse().unwrap())
}

/// So many rounds, or a part of them where the machine is emulated: what they repeat is exercised in full elsewhere.
pub fn rounds(count: usize) -> usize {
    (count / patience() as usize).max(1)
}

/// Ends the process when it is not dropped in time: a hang is a failure with a name.
pub struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watchdog {
    pub fn start(name: &'static str) -> Watchdog {
        let (stop, stopped) = mpsc::channel::<()>();
        let limit = patience() * WATCHDOG;
        let thread = thread::spawn(move || {
            if stopped.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                // Not `eprintln!`: the harness would keep that to itself, and it is about to die.
                let _ = writeln!(std::io::stderr(), "\nwatchdog: {name} hangs, after {limit:?}");
                process::abort();
            }
        });
        Watchdog { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until `condition` holds, and fails when it does not within [`BOUND`].
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < BOUND, "not within {BOUND:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Fails when `condition` stops to hold within `time`. Good for what must never happen: it can miss it, not invent it.
#[track_caller]
pub fn stays(what: &str, time: Duration, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        assert!(condition(), "after {:?}: {what}", begin.elapsed());
        thread::sleep(Duration::from_millis(1));
    }
}

/// A door that is opened once, and waited for with a bound, so that no handler outlives a failed test for long.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    #[track_caller]
    pub fn wait(&self) {
        let (lock, opened) = &*self.0;
        let (open, _) = opened.wait_timeout_while(lock.lock().unwrap(), BOUND, |open| !*open).unwrap();
        assert!(*open, "nobody opened the gate within {BOUND:?}");
    }

    pub fn is_open(&self) -> bool {
        *self.0.0.lock().unwrap()
    }
}

/// The plainest executor: polls on this thread, and parks in between.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread, AtomicBool);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.1.store(true, Ordering::SeqCst);
            self.0.unpark();
        }
    }
    let unpark = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(unpark.clone());
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let begin = Instant::now();
        while !unpark.1.swap(false, Ordering::SeqCst) {
            thread::park_timeout(BOUND);
            assert!(begin.elapsed() < 2 * BOUND, "nobody woke the future");
        }
    }
}

/// `len` bytes that differ with `seed` and with their place, made quickly also without optimization.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    // A prime: a mistake by a power of two does not hit the same byte.
    let mut random = Random(seed);
    let block: Vec<u8> = (0..4099.min(len)).map(|_| random.next() as u8).collect();
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let take = block.len().min(len - bytes.len());
        bytes.extend_from_slice(&block[..take]);
    }
    bytes
}

/// splitmix64: small, seeded, and the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At least 0, less than `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }
}

/// Asserts that a result is the error of this shape, and shows what it is if not.
#[macro_export]
macro_rules! assert_error {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {
        match $result {
            Err($pattern) $(if $guard)? => {}
            other => panic!("expected {}, got {:?}", stringify!($pattern), other.map(|_| "a success")),
        }
    };
}
