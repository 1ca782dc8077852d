//! The role of a process: an engine that serves and calls, and follows orders.

use std::fmt::Write as _;
use std::io::BufRead;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use calomel::{Engine, Error};

use crate::journal::{Journal, loss};
use crate::load::{Load, THREADS};
use crate::serve::Node;
use crate::support::*;

/// Index, generation and seed of the process, and whether it uses shared memory where it can.
pub const NODE: &str = "CALOMEL_CHAOS_NODE";

/// The time by which each process reaches every other again after the last fault: a disconnected peer is dialled anew, and the
/// kernel may take a while to retransmit.
fn healed() -> Duration {
    patience() * Duration::from_secs(10)
}

pub fn run() {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let settings = std::env::var(NODE).unwrap();
    let settings: Vec<u64> = settings.split(' ').map(|number| number.parse().unwrap()).collect();
    let (index, generation, seed, upgrade) = (settings[0] as usize, settings[1] as u32, settings[2], settings[3] == 1);
    let journal = Arc::new(Journal::default());
    let watched = journal.clone();
    thread::spawn(move || watched.watch());
    // What is made once and kept by the first use does not count.
    Engine::client("loop").unwrap().finalize().unwrap();
    // This thread, the harness', and the journal's: a joined thread may stay in the list for a moment.
    eventually("the first engine's threads have ended", || threads() == 3);
    let before = (threads(), descriptors());
    let engine = listen(index, upgrade);
    let node = Node::new(engine.clone(), journal.clone(), index, generation, seed);
    say(&format!("address {}", engine.address()));
    let stop = Arc::new(AtomicBool::new(false));
    let mut load: Vec<JoinHandle<()>> = Vec::new();
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.split_once(' ').unwrap_or((&order, "")) {
            ("peers", peers) => node.peers.set(peers.split(' ').map(str::to_owned).collect()).unwrap(),
            ("load", _) => {
                for thread in 0..THREADS {
                    let (mut load_of, stop) = (Load::new(&node, thread), stop.clone());
                    load.push(thread::spawn(move || load_of.run(&stop)));
                }
            }
            ("rest", _) => {
                stop.store(true, Ordering::SeqCst);
                load.drain(..).for_each(|thread| thread.join().unwrap_or_else(|_| loss("a thread panicked")));
                say("rests");
            }
            ("meet", round) => {
                let took = meet(&node, round.parse().unwrap());
                say(&format!("met {} {}", took.as_millis(), holdings()));
            }
            ("settle", _) => {
                settle(&node);
                say(&format!("settled {}", holdings()));
            }
            ("leave", _) => {
                journal.leave();
                stop.store(true, Ordering::SeqCst);
                journal.timed(|| "finalizing".to_owned(), Duration::from_secs(3), || engine.finalize()).unwrap_or_else(|error| {
                    // A handler may run as long as its caller waits.
                    assert!(error.is_timeout(), "{error}");
                });
                load.drain(..).for_each(|thread| thread.join().unwrap_or_else(|_| loss("a thread panicked")));
                node.reap(true);
                drop((node, engine));
                check_leftovers(before);
                journal.tell();
                say("left");
                process::exit(0);
            }
            (order, _) => panic!("no order `{order}`"),
        }
    }
    process::exit(0);
}

fn listen(index: usize, upgrade: bool) -> Engine {
    let begin = Instant::now();
    loop {
        // With payload checksums and without; and the three paths for payloads over shared memory.
        let builder = configured().same_host_upgrade(upgrade).payload_checksums(index.is_multiple_of(2));
        let builder = match index % 3 {
            0 => builder,
            path => builder.shm_kernel_copy(path == 1),
        };
        match builder.listen(std::env::var(LISTEN).unwrap()).build() {
            Ok(engine) => return engine,
            // The predecessor may not be entirely gone.
            Err(Error::AddressInUse { .. } | Error::Io { .. }) if begin.elapsed() < BOUND => {
                thread::sleep(Duration::from_millis(10))
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Calls each of the others, and transfers memory there and back, until that succeeds; returns how long it took.
fn meet(node: &Arc<Node>, round: u32) -> Duration {
    let begin = Instant::now();
    let mut load = Load::new(node, 0x80 + round);
    for peer in (0..node.peers.get().unwrap().len()).filter(|peer| *peer != node.index) {
        loop {
            match load.visit_with(peer, Duration::from_secs(2), 300_000) {
                Ok(()) => break,
                Err(error) if begin.elapsed() > healed() => {
                    loss(&format!("{} can't reach {peer} for {:?} after the last fault: {error}", node.index, begin.elapsed()));
                    break;
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }
    begin.elapsed()
}

/// Waits until nothing is in progress any more, and no peer holds a bulk of this process.
fn settle(node: &Arc<Node>) {
    let begin = Instant::now();
    node.reap(true);
    while node.journal.in_progress() + node.held() + node.opened() > 0 {
        if begin.elapsed() > healed() {
            return loss(&format!(
                "{} has {} operations in progress, {} exposures that peers hold, {} open",
                node.index,
                node.journal.in_progress(),
                node.held(),
                node.opened()
            ));
        }
        thread::sleep(Duration::from_millis(10));
    }
    node.journal.tell();
}

fn entries(directory: &str) -> Vec<String> {
    let found = std::fs::read_dir(directory).unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        Some(format!("{} {} {}", path.display(), name.trim(), std::fs::read_link(&path).unwrap_or_default().display()))
    });
    found.collect()
}

fn threads() -> usize {
    entries("/proc/self/task").len()
}

fn descriptors() -> usize {
    entries("/proc/self/fd").len()
}

/// What this process holds: threads, except idle handler and timer threads; descriptors; KiB of memory.
fn holdings() -> String {
    // SAFETY: takes a number, and returns free memory to the system.
    unsafe { libc::malloc_trim(0) };
    let idle = |task: &String| task.contains("calomel-handler") || task.contains("calomel-timer");
    let threads = entries("/proc/self/task").iter().filter(|task| !idle(task)).count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let memory = memory.trim().trim_end_matches(" kB");
    let mut text = String::new();
    let _ = write!(text, "{threads} {} {memory}", descriptors());
    text
}

fn check_leftovers(before: (usize, usize)) {
    let begin = Instant::now();
    // The verbs library keeps the devices that it has opened; `tests/verbs` checks everything else there.
    let as_before = || threads() == before.0 && (descriptors() <= before.1 + spared_descriptors() || is_over_verbs());
    while !as_before() {
        // A handler that finalizing abandoned may run as long as its caller waits; its thread ends with it.
        if begin.elapsed() > patience() * Duration::from_secs(5) {
            let (tasks, files) = (entries("/proc/self/task"), entries("/proc/self/fd"));
            return loss(&format!("left over: {before:?} before, now {tasks:?} and {files:?}"));
        }
        thread::sleep(Duration::from_millis(5));
    }
}
