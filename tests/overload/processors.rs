//! Threads that answer each other, on one processor, while another one is idle: the kernel parts them after some 10 ms at best.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Request};

/// In so many calls in a row caller and handler must be on processors of their own.
const CALLS: usize = 100;
/// So few that the engines do not try to part while they are bound.
const BOUND_CALLS: usize = 3;
/// Within which they part mostly, and always: another program may have the idle processor for a moment. The time of the calls that
/// show it does not count, since it is the machine's.
const PARTED: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(2)];

fn processor() -> i32 {
    // SAFETY: it takes nothing and touches nothing.
    unsafe { libc::sched_getcpu() }
}

fn affinity() -> libc::cpu_set_t {
    // SAFETY: an all-zero set is a valid one, of no processors.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set has room for this size.
    assert_eq!(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) }, 0);
    set
}

/// For all threads of this process.
fn set_affinity(set: &libc::cpu_set_t) {
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let id = task.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: the set is valid, and of this size. A thread may have ended meanwhile.
        unsafe { libc::sched_setaffinity(id, size_of_val(set), set) };
    }
}

fn threads_that_share_a_processor_part(listen: &str) {
    if thread::available_parallelism().map_or(1, usize::from) < 2 {
        println!("skipped: there is one processor");
        return;
    }
    let build = |listen: &str| Engine::builder().same_host_upgrade(false).listen(listen).build().unwrap();
    let (server, client) = (build(listen), build("loop://"));
    server.define("where", |_: &Request, ()| processor()).unwrap();
    let handled_on = client.procedure::<(), i32>("where").on(client.lookup(server.address()).unwrap());
    let all = affinity();
    // SAFETY: an all-zero set is a valid one, of no processors.
    let mut here: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number is that of a processor, and within the set.
    unsafe { libc::CPU_SET(processor() as usize, &mut here) };
    let mut took = Vec::new();
    for _ in 0..40 {
        thread::sleep(Duration::from_millis(30));
        set_affinity(&here);
        let shared = (0..BOUND_CALLS).filter(|_| handled_on.call(&()).unwrap() == processor()).count();
        assert_eq!(shared, BOUND_CALLS, "all threads are bound to one processor");
        set_affinity(&all);
        let begin = Instant::now();
        let (mut shared, mut apart) = (Duration::ZERO, 0);
        while apart < CALLS {
            if handled_on.call(&()).unwrap() == processor() {
                (shared, apart) = (begin.elapsed(), 0);
            } else {
                apart += 1;
            }
            assert!(begin.elapsed() < PARTED[1], "caller and handler share a processor");
        }
        took.push(shared);
    }
    took.sort();
    let median = took[took.len() / 2];
    println!("{listen}: they part within {median:?}, at most {:?}", took[took.len() - 1]);
    assert!(median < PARTED[0], "caller and handler share a processor for {median:?}");
}

#[test]
#[ignore = "binds the threads of its process"]
fn threads_that_share_a_processor_part_over_loop() {
    threads_that_share_a_processor_part("loop://");
}

#[test]
#[ignore = "binds the threads of its process"]
fn threads_that_share_a_processor_part_over_shm() {
    threads_that_share_a_processor_part("shm://");
}

#[test]
#[ignore = "binds the threads of its process"]
fn threads_that_share_a_processor_part_over_tcp() {
    threads_that_share_a_processor_part("tcp://127.0.0.1:0");
}
