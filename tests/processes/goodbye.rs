//! One-way calls and responses that a process sends right before it ends its engine arrive.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Request};

use crate::common::{BOUND, Watchdog, eventually, patience, text};
use crate::support::{Child, client, say, server};

/// Small one-way calls that a process makes before it ends.
const SMALL: usize = 3000;
/// Length of a message that travels in many chunks.
const LARGE: usize = 3 << 20;
/// Some faults show only in some of these runs.
const ROUNDS: usize = 10;

/// Fewer where the machine is emulated.
fn rounds() -> usize {
    ROUNDS / patience() as usize
}

/// Finalizing takes far less time when the peer takes part; the rest is for a busy machine. A peer that does not read is
/// disconnected after a second.
const PROMPT: u128 = 900;
/// What a child has to do: numbers and an address.
const ORDER: &str = "CALOMEL_TEST_ORDER";

/// In the child: makes one-way calls, drops its engine, and ends.
pub fn notify_and_end() {
    let order = std::env::var(ORDER).unwrap();
    let mut words = order.split(' ');
    let mut number = || words.next().unwrap().parse::<usize>().unwrap();
    let (count, size) = (number(), number());
    let engine = client();
    let note = engine.procedure::<(u64, String), ()>("note");
    let to = engine.lookup(words.next().unwrap()).unwrap();
    for index in 0..count as u64 {
        note.on(&to).notify(&(index, text(index, size))).unwrap();
    }
    let begin = Instant::now();
    drop((note, to, engine));
    say(&format!("ended {}", begin.elapsed().as_millis()));
}

/// In the child: an engine that ends as soon as it has sent one response.
pub fn answer_and_end() {
    let size: usize = std::env::var(ORDER).unwrap().parse().unwrap();
    let engine = server();
    let (report, reports) = mpsc::channel();
    engine
        .define("once", move |_: &Request, seed: u64| {
            report.send(()).unwrap();
            text(seed, size)
        })
        .unwrap();
    say(&format!("address {}", engine.address()));
    reports.recv_timeout(BOUND).unwrap();
    let begin = Instant::now();
    engine.finalize().unwrap();
    say(&format!("ended {}", begin.elapsed().as_millis()));
}

/// How often each one-way call has been handled.
type Handled = Arc<Mutex<HashMap<u64, u32>>>;

/// A server whose handler of one-way calls takes some time.
fn listener(takes: Duration) -> (Engine, Handled) {
    let engine = server();
    let handled = Handled::default();
    let by_index = handled.clone();
    engine
        .define("note", move |_: &Request, (index, bytes): (u64, String)| {
            assert!(bytes == text(index, bytes.len()));
            thread::sleep(takes);
            *by_index.lock().unwrap().entry(index).or_default() += 1;
        })
        .unwrap();
    (engine, handled)
}

/// A child makes this number of one-way calls and ends: each is handled once.
#[track_caller]
fn assert_all_arrive(takes: Duration, count: usize, size: usize) {
    let (engine, handled) = listener(takes);
    let order = format!("{count} {size} {}", engine.address());
    let mut child = Child::start("notify and end", &[(ORDER, &order)]);
    let took: u128 = child.hear("ended").parse().unwrap();
    assert!(took < PROMPT * u128::from(patience()), "finalizing took {took} ms");
    assert!(child.wait(BOUND).success());
    let begin = Instant::now();
    while handled.lock().unwrap().len() < count && begin.elapsed() < Duration::from_secs(5) * patience() {
        thread::sleep(Duration::from_millis(1));
    }
    let handled = handled.lock().unwrap();
    assert_eq!(handled.len(), count, "one-way calls handled of those that were made");
    assert!(handled.values().all(|times| *times == 1));
    drop(handled);
    engine.finalize().unwrap();
}

fn small_one_way_calls_before_exit_arrive() {
    let _watchdog = Watchdog::start("small_one_way_calls_before_exit_arrive");
    (0..rounds()).for_each(|_| assert_all_arrive(Duration::ZERO, SMALL, 0));
}

fn large_one_way_call_before_exit_arrives() {
    let _watchdog = Watchdog::start("large_one_way_call_before_exit_arrives");
    (0..rounds()).for_each(|_| assert_all_arrive(Duration::ZERO, 2, LARGE));
}

fn one_way_calls_to_slow_handler_before_exit_arrive() {
    let _watchdog = Watchdog::start("one_way_calls_to_slow_handler_before_exit_arrive");
    (0..2).for_each(|_| assert_all_arrive(Duration::from_millis(10), 40, 5000));
}

fn response_before_server_exit_arrives() {
    let _watchdog = Watchdog::start("response_before_server_exit_arrives");
    for round in 0..rounds() as u64 {
        for size in [10, LARGE] {
            let mut child = Child::start("answer and end", &[(ORDER, &size.to_string())]);
            let engine = client();
            let endpoint = engine.lookup(child.hear("address")).unwrap();
            // One-way calls that the server no longer reads, or refuses, are sent at the same time.
            let note = engine.procedure::<u64, ()>("nothing");
            let pending = engine.procedure::<u64, String>("once").on(&endpoint).start(&round).unwrap();
            while !pending.is_ready() {
                let _ = note.on(&endpoint).notify(&round);
            }
            assert!(pending.wait().unwrap() == text(round, size));
            let took: u128 = child.hear("ended").parse().unwrap();
            assert!(took < PROMPT * u128::from(patience()), "finalizing took {took} ms");
            assert!(child.wait(BOUND).success());
            engine.finalize().unwrap();
        }
    }
}

/// The limit on flushing applies, and afterwards the peer receives what the kernel had accepted.
fn finalize_with_peer_that_never_reads_takes_a_second() {
    let _watchdog = Watchdog::start("finalize_with_peer_that_never_reads_takes_a_second");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    let add = engine.procedure::<(u32, u32), u32>("add");
    assert_eq!(add.on(&endpoint).call(&(1, 2)).unwrap(), 3);
    child.signal(libc::SIGSTOP);
    add.on(&endpoint).notify(&(1, 2)).unwrap();
    let begin = Instant::now();
    engine.finalize().unwrap();
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(1500) * patience(), "{took:?}");
}

/// The peer is killed while the engine waits for it: the end of the connection ends the wait.
fn killed_peer_ends_the_wait_of_finalize() {
    let _watchdog = Watchdog::start("killed_peer_ends_the_wait_of_finalize");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    let add = engine.procedure::<(u32, u32), u32>("add");
    assert_eq!(add.on(&endpoint).call(&(1, 2)).unwrap(), 3);
    child.signal(libc::SIGSTOP);
    let pid = child.pid();
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        // SAFETY: the child is not waited for before this thread is joined, so the number is its own.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    });
    let begin = Instant::now();
    engine.finalize().unwrap();
    let took = begin.elapsed();
    killer.join().unwrap();
    eventually("the peer is dead", || !child.is_running());
    assert!(took < Duration::from_millis(900) * patience(), "{took:?}");
}

over_each!(
    small_one_way_calls_before_exit_arrive,
    large_one_way_call_before_exit_arrives,
    one_way_calls_to_slow_handler_before_exit_arrive,
    response_before_server_exit_arrives,
    finalize_with_peer_that_never_reads_takes_a_second,
    killed_peer_ends_the_wait_of_finalize,
);
