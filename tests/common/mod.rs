//! Helpers that several test suites share: a watchdog, conditions with a time limit, and test data.

// No suite uses all of them.
#![allow(dead_code)]

pub mod kept_lines;
pub mod mitm;
pub mod wire;

use std::future::Future;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The time limit of a test; on an emulated machine, `CALOMEL_TEST_PATIENCE` times as long.
const WATCHDOG: Duration = Duration::from_secs(60);
/// The time limit for conditions that must become true.
pub const BOUND: Duration = Duration::from_secs(20);

/// An address to listen at on an RDMA device, whose IP address is in `CALOMEL_VERBS`.
#[track_caller]
pub fn verbs_address(port: u16) -> String {
    let ip = std::env::var("CALOMEL_VERBS").expect("CALOMEL_VERBS names the IP address of an RDMA device; ci/softroce has one");
    let ip: IpAddr = ip.parse().expect("CALOMEL_VERBS is an IP address");
    format!("verbs://{}", SocketAddr::new(ip, port))
}

/// An address to listen at through libfabric: of this host, or of the device whose IP address is in `CALOMEL_VERBS`.
pub fn fabric_address(scheme: &str) -> String {
    let ip = std::env::var("CALOMEL_VERBS").ok().filter(|_| scheme == "ofi+verbs");
    format!("{scheme}://{}:0", ip.as_deref().unwrap_or("127.0.0.1"))
}

/// Whether libfabric has a provider for addresses of this scheme. Where it has none the test is skipped, with a line that says
/// why; with `CALOMEL_TEST_FABRIC` set, it fails.
#[track_caller]
pub fn has_fabric(scheme: &str) -> bool {
    let engine = calomel::Engine::builder().build().unwrap();
    let found = engine.transports().into_iter().find(|status| status.transport.to_string() == scheme);
    let Some(reason) = found.and_then(|status| status.unavailable) else { return true };
    assert!(std::env::var_os("CALOMEL_TEST_FABRIC").is_none(), "{scheme} is unavailable: {reason}");
    println!("skipped, {scheme} is unavailable: {reason}");
    false
}

/// The factor for time limits: more than one on an emulated machine.
pub fn patience() -> u32 {
    std::env::var("CALOMEL_TEST_PATIENCE").map_or(1, |times| times.parse().unwrap())
}

/// So many rounds, or a part of them where the machine is emulated: what they repeat is exercised in full elsewhere.
pub fn rounds(count: usize) -> usize {
    (count / patience() as usize).max(1)
}

/// Aborts the process when it is not dropped in time, so that a test that hangs is reported with its name.
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
                // Not `eprintln!`: the harness would capture that, and the process is about to abort.
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

/// A file that is removed when it is dropped.
pub struct TempFile(PathBuf);

impl TempFile {
    /// Its name ends in `ending`.
    pub fn with(ending: &str, content: &str) -> TempFile {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("calomel-{}-{}.{ending}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, content).unwrap();
        TempFile(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

/// Waits until `condition` holds, and fails if it does not within [`BOUND`].
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < BOUND, "not within {BOUND:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Fails if `condition` is false at a check within `time`. It can miss a violation, but never reports a false one.
#[track_caller]
pub fn stays(what: &str, time: Duration, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        assert!(condition(), "after {:?}: {what}", begin.elapsed());
        thread::sleep(Duration::from_millis(1));
    }
}

/// A gate that is opened once. Waiting for it has a time limit, so that no handler outlives a failed test for long.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    #[track_caller]
    pub fn wait(&self) {
        // In an emulated machine other steps take their time.
        let limit = BOUND * patience();
        let (lock, opened) = &*self.0;
        let (open, _) = opened.wait_timeout_while(lock.lock().unwrap(), limit, |open| !*open).unwrap();
        assert!(*open, "the gate was not opened within {limit:?}");
    }

    pub fn is_open(&self) -> bool {
        *self.0.0.lock().unwrap()
    }
}

/// A minimal executor: polls on this thread, and parks between polls.
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
            assert!(begin.elapsed() < 2 * BOUND, "the future was not woken");
        }
    }
}

/// `len` bytes that depend on `seed` and on their position, computed fast even without optimization.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    // A prime period: a chunk displaced by a power of two does not match.
    let mut random = Random(seed);
    let block: Vec<u8> = (0..4099.min(len)).map(|_| random.next() as u8).collect();
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let take = block.len().min(len - bytes.len());
        bytes.extend_from_slice(&block[..take]);
    }
    bytes
}

/// ASCII that depends on `seed` and on its position. Without optimization bytes are encoded one by one, text is not.
pub fn text(seed: u64, len: usize) -> String {
    let block: String = pattern(seed, 4099.min(len)).into_iter().map(|byte| char::from(byte & 0x7f)).collect();
    let mut text = block.repeat(len.div_ceil(block.len().max(1)));
    text.truncate(len);
    text
}

/// Whether each of `bytes` is `byte`. Fast without optimization, where a closure for each byte is not.
pub fn all_are(bytes: &[u8], byte: u8) -> bool {
    // Each is equal to its neighbour.
    bytes.is_empty() || (bytes[0] == byte && bytes[1..] == bytes[..bytes.len() - 1])
}

/// splitmix64: small, seeded, and the same on every platform.
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

/// Asserts that a result is an error of this shape, and prints it if it is not.
#[macro_export]
macro_rules! assert_error {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {
        match $result {
            Err($pattern) $(if $guard)? => {}
            other => panic!("expected {}, got {:?}", stringify!($pattern), other.map(|_| "a success")),
        }
    };
}
