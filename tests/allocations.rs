//! Allocations and page faults of warm operations, both sides together: they are counted, so that none is added unnoticed.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use calomel::{BulkMode, Endpoint, Engine, HandlerResult, Request};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Allocations of at least [`LONG`] bytes, and how many there are now.
static LONG_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static LONG_LIVE: AtomicUsize = AtomicUsize::new(0);
const LONG: usize = 1 << 20;

/// Calls of `sum` on handler threads. An unoptimized handler may look slow on a busy machine, and then its requests are handed over:
/// their memory is allocated by one thread, and freed by another.
static HANDED_OVER: AtomicUsize = AtomicUsize::new(0);

fn count(len: usize) {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    if len >= LONG {
        LONG_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        LONG_LIVE.fetch_add(1, Ordering::Relaxed);
    }
}

fn count_free(len: usize) {
    if len >= LONG {
        LONG_LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count_free(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        count(new);
        count_free(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, new) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The allocations of an operation, on average, after it has been done some times.
fn allocations(rounds: usize, mut operation: impl FnMut()) -> f64 {
    (0..rounds).for_each(|_| operation());
    HANDED_OVER.store(0, Ordering::Relaxed);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (0..rounds).for_each(|_| operation());
    (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64 / rounds as f64
}

/// Page faults of this process so far, as the kernel counts them.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// A fresh buffer of 2 MiB has 512 pages. The kernel may take a page away now and then.
#[track_caller]
fn check_faults(what: &str, listen: &str, rounds: u64, mut operation: impl FnMut()) {
    (0..rounds).for_each(|_| operation());
    let before = page_faults();
    (0..rounds).for_each(|_| operation());
    let found = page_faults() - before;
    // A busy machine may take another buffer once; each takes 512.
    assert!(found < 64 * rounds, "{what} over {listen}: {found} page faults in {rounds} operations");
}

/// Which way data takes over shared memory depends on the machine's load, unless it is set.
fn pair(listen: &str, kernel_copy: bool) -> (Engine, Engine, Endpoint) {
    let builder = || Engine::builder().same_host_upgrade(false).shm_kernel_copy(kernel_copy);
    let server = builder().listen(listen).build().unwrap();
    server
        .define("sum", |_: &Request, (x, y): (u64, u64)| {
            HANDED_OVER.fetch_add(usize::from(std::thread::current().name() == Some("calomel-handler")), Ordering::Relaxed);
            x + y
        })
        .unwrap();
    server.define_borrowed::<[u8], _, _>("len", |_: &Request, bytes: &[u8]| bytes.len()).unwrap();
    server.define("bytes", |_: &Request, len: usize| vec![7u8; len]).unwrap();
    server.define_try("text", |_: &Request, len: usize| -> HandlerResult<String> { Ok("a".repeat(len)) }).unwrap();
    server.define_async("floats", |_: Request, len: usize| async move { Some(vec![0.5f64; len / 8]) }).unwrap();
    let client = builder().build().unwrap();
    let peer = client.lookup(server.address()).unwrap();
    (server, client, peer)
}

#[track_caller]
fn check(what: &str, listen: &str, found: f64, allowed: f64) {
    // What other threads do now and then, such as the engine's timers, is a fraction.
    assert!(found < allowed + 0.9, "{what} over {listen}: {found} allocations");
}

/// Long results lie in the memory that the handler has made, and in that which the caller gets, and nowhere else but in mappings
/// that are used again; and all that memory is given back.
fn check_results(listen: &str, client: &Engine, peer: &Endpoint) {
    const ROUNDS: usize = 30;
    let bytes = client.procedure::<usize, Vec<u8>>("bytes").on(peer);
    let text = client.procedure::<usize, String>("text").on(peer);
    let floats = client.procedure::<usize, Option<Vec<f64>>>("floats").on(peer);
    let len = 2 << 20;
    for what in ["bytes", "text", "floats"] {
        let call = || match what {
            "bytes" => assert_eq!(bytes.call(&len).unwrap().len(), len),
            "text" => assert_eq!(text.call(&len).unwrap().len(), len),
            _ => assert_eq!(floats.call(&len).unwrap().unwrap().len(), len / 8),
        };
        call();
        let before = LONG_ALLOCATIONS.load(Ordering::Relaxed);
        (0..ROUNDS).for_each(|_| call());
        let found = LONG_ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(found, 2 * ROUNDS, "long allocations of {ROUNDS} calls that return {what} over {listen}");
    }
    // Cancelled, while it is made or sent.
    drop(bytes.start(&len).unwrap());
}

/// One test, since the allocator counts for the whole process.
#[test]
fn warm_operations_allocate_no_more_than_they_did() {
    for (listen, kernel_copy) in [("loop://", false), ("shm://", false), ("shm://", true), ("tcp://127.0.0.1:0", false)] {
        let (server, client, peer) = pair(listen, kernel_copy);
        let sum = client.procedure::<(u64, u64), u64>("sum").on(&peer);
        let small = allocations(1000, || assert_eq!(sum.call(&(40, 2)).unwrap(), 42));
        check("a small call", listen, small, 2.0 * HANDED_OVER.load(Ordering::Relaxed) as f64 / 1000.0);
        let len = client.procedure::<[u8], usize>("len").on(&peer);
        let bytes = vec![7u8; 2 << 20];
        let large = allocations(30, || assert_eq!(len.call(&bytes).unwrap(), 2 << 20));
        // The kernel copies chunks of 128 KiB, each of which is lent. On a busy machine the two threads that drive take turns, and
        // each makes its queues anew.
        check("a call with 2 MiB", listen, large, if kernel_copy { 16.0 * 3.0 + 9.0 } else { 9.0 });
        check_faults("a call with 2 MiB", listen, 30, || assert_eq!(len.call(&bytes).unwrap(), 2 << 20));
        let memory = server.expose(vec![7u8; 4096], BulkMode::ReadWrite).unwrap();
        let remote = memory.bulk().on(&peer);
        let mut buffer = [0; 4096];
        let pull = allocations(1000, || assert_eq!(remote.pull_into(&mut buffer[..]).unwrap(), 4096));
        check("a pull", listen, pull, 2.0);
        let shared: std::sync::Arc<[u8]> = vec![7u8; 4096].into();
        let expose = allocations(1000, || drop(client.expose_read_only(shared.clone()).unwrap()));
        check("exposing", listen, expose, 3.0);
        check_results(listen, &client, &peer);
        drop((sum, len, remote, memory, bytes, server, client, peer));
        let deadline = Instant::now() + Duration::from_secs(10);
        while LONG_LIVE.load(Ordering::Relaxed) > 0 {
            assert!(Instant::now() < deadline, "memory is left of the calls over {listen}");
            std::thread::yield_now();
        }
    }
}
