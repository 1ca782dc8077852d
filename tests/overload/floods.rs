//! Peers that send without end, and do not read.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Endpoint, Engine, Request};

use crate::memory;
use crate::raw::{ABORT, CANCEL, PING, PONG, PULL, REVOKED, Raw, announcement, message, request};
use crate::server::Server;
use crate::support::*;

const MIB: usize = 1 << 20;
/// What the server of most tests may hold for one peer, and for all.
const PEER: usize = 16 * MIB;
const ALL: usize = 64 * MIB;
/// Up to twice that much is held, so that nobody is locked out. Beyond what is counted there is what 64 handlers make before it
/// is an answer, buffers that are longer than what is in them, tables, the allocator's own.
const MOST: usize = 2 * ALL + 96 * MIB;
/// Without optimization, a read's worth of small frames takes some 20 ms.
const MEANWHILE: Duration = Duration::from_millis(if cfg!(debug_assertions) { 1000 } else { 100 });
/// By then all is as before: 64 threads have done what was left to do.
const RECOVERED: Duration = Duration::from_secs(10);
const FLOOD: Duration = Duration::from_millis(1500);

fn server() -> Server {
    Server::start(&format!("- {PEER} {ALL}"))
}

/// An engine that calls the server as it should be called.
struct Honest {
    engine: Engine,
    endpoint: Endpoint,
}

impl Honest {
    fn new(server: &Server) -> Honest {
        let engine = Engine::builder().same_host_upgrade(false).build().unwrap();
        let endpoint = engine.lookup(&server.address).unwrap();
        let honest = Honest { engine, endpoint };
        honest.rate(Duration::from_millis(200));
        honest
    }

    fn add(&self) -> Duration {
        let begin = Instant::now();
        let sum = self.engine.procedure::<(u32, u32), u32>("add").on(&self.endpoint).call(&(40, 2));
        assert_eq!(sum.unwrap(), 42);
        begin.elapsed()
    }

    /// The median of what calls take.
    fn latency(&self, time: Duration) -> Duration {
        let begin = Instant::now();
        let mut took = Vec::new();
        while begin.elapsed() < time || took.len() < 5 {
            took.push(self.add());
        }
        took.sort_unstable();
        took[took.len() / 2]
    }

    /// Calls a second.
    fn rate(&self, time: Duration) -> f64 {
        let begin = Instant::now();
        let mut calls = 0;
        while begin.elapsed() < time {
            self.add();
            calls += 1;
        }
        f64::from(calls) / begin.elapsed().as_secs_f64()
    }

    /// The best of a few: others use the machine, too.
    fn best_rate(&self) -> f64 {
        (0..5).map(|_| self.rate(Duration::from_millis(100))).fold(0.0, f64::max)
    }
}

/// Has several peers flood the server, while somebody else calls: memory is bounded, calls are answered, and afterwards all is
/// as before.
fn flooded(name: &str, floods: Vec<Box<dyn FnMut() -> Option<Vec<u8>> + Send>>) {
    let server = server();
    let honest = Honest::new(&server);
    let (rate, before) = (honest.best_rate(), honest.latency(FLOOD / 5));
    memory::forget_peak(server.pid());
    let peers = floods.len();
    let during = thread::scope(|scope| {
        let raws: Vec<_> = floods
            .into_iter()
            .map(|mut flood| {
                let address = &server.address;
                scope.spawn(move || {
                    let mut raw = Raw::enter(address);
                    let (sent, hung_up) = raw.flood(FLOOD, &mut flood);
                    (raw, sent, hung_up)
                })
            })
            .collect();
        let during = honest.latency(FLOOD);
        let (mut sent, mut hung_up) = (0, 0);
        for raw in raws {
            let (_raw, bytes, ended) = raw.join().unwrap();
            sent += bytes;
            hung_up += usize::from(ended);
        }
        println!("{name}: {peers} peers sent {} KiB, and {hung_up} were hung up on", sent >> 10);
        during
    });
    let begin = Instant::now();
    let mut after = honest.rate(Duration::from_millis(100));
    while after < 0.8 * rate && begin.elapsed() < patience() * RECOVERED {
        after = honest.rate(Duration::from_millis(100));
    }
    println!(
        "{name}: memory grew by {} MiB; a call took {before:?}, {during:?} meanwhile; {rate:.0} calls a second, {after:.0} within {:?}",
        server.grown() / MIB,
        begin.elapsed()
    );
    assert!(server.grown() < MOST, "{} MiB", server.grown() / MIB);
    assert!(during < patience() * MEANWHILE, "{during:?} instead of {before:?}");
    // Others use the machine, too.
    assert!(after > 0.4 * rate, "{after:.0} calls a second instead of {rate:.0}");
}

fn each<F: FnMut() -> Option<Vec<u8>> + Send + 'static>(
    peers: usize,
    flood: impl Fn() -> F,
) -> Vec<Box<dyn FnMut() -> Option<Vec<u8>> + Send>> {
    (0..peers).map(|_| Box::new(flood()) as Box<dyn FnMut() -> Option<Vec<u8>> + Send>).collect()
}

/// Calls of one procedure, one after the other, a few at a time.
fn calls(name: &'static str, one_way: bool, body: Vec<u8>) -> impl FnMut() -> Option<Vec<u8>> + Send + 'static {
    let mut number = 0;
    move || {
        let mut bytes = Vec::new();
        while bytes.len() < 4 << 10 {
            bytes.extend(request(number, 0, (number == 0).then_some(name), one_way, &body));
            number += 1;
        }
        Some(bytes)
    }
}

fn encoded<T: serde::Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).unwrap()
}

#[test]
fn answers_that_nobody_reads() {
    let _watchdog = Watchdog::start("answers_that_nobody_reads");
    // A few bytes ask for many; or for a few kibibytes, which are sent with the answer.
    let mut floods = each(4, || calls("answer", false, encoded(&(200usize << 10))));
    floods.extend(each(4, || calls("answer", false, encoded(&(8usize << 10)))));
    flooded("answers", floods);
}

#[test]
fn large_requests_in_one_piece() {
    let _watchdog = Watchdog::start("large_requests_in_one_piece");
    flooded("requests of 900 KiB", each(8, || calls("length", false, encoded(&vec![7u8; 900 << 10]))));
}

#[test]
fn requests_for_a_slow_handler() {
    let _watchdog = Watchdog::start("requests_for_a_slow_handler");
    flooded("requests that wait", each(8, || calls("slow", false, encoded(&"x".repeat(8 << 10)))));
}

#[test]
fn one_way_calls_for_a_slow_handler() {
    let _watchdog = Watchdog::start("one_way_calls_for_a_slow_handler");
    flooded("one-way calls", each(8, || calls("slow", true, encoded(&"x".repeat(8 << 10)))));
}

#[test]
fn calls_of_nothing() {
    let _watchdog = Watchdog::start("calls_of_nothing");
    flooded("calls of nothing", each(4, || calls("no such procedure", false, Vec::new())));
}

#[test]
fn names() {
    let _watchdog = Watchdog::start("names");
    let flood = || {
        let mut number = 0u32;
        move || {
            number += 1;
            Some(request(number.into(), number, Some(&format!("{number:01000}")), false, &[]))
        }
    };
    flooded("names", each(8, flood));
}

#[test]
fn announcements() {
    let _watchdog = Watchdog::start("announcements");
    let flood = || {
        let mut number = 0;
        move || {
            number += 1;
            Some(announcement(number, 0, (number == 1).then_some("length"), 8 << 20))
        }
    };
    flooded("announcements", each(8, flood));
}

/// What is announced and taken back costs nothing but the frames: nobody has memory zeroed for bytes that never come.
#[test]
fn announcements_that_are_taken_back() {
    let _watchdog = Watchdog::start("announcements_that_are_taken_back");
    let flood = || {
        let mut number = 0;
        move || {
            let pairs = number..number + 300;
            number += 300;
            let pair = |number: u64| {
                let name = (number == 0).then_some("length");
                [announcement(number, 0, name, 7 << 20), message(CANCEL, &number)].concat()
            };
            Some(pairs.flat_map(pair).collect())
        }
    };
    flooded("announcements that are taken back", each(4, flood));
}

#[test]
fn small_frames_of_every_kind() {
    let _watchdog = Watchdog::start("small_frames_of_every_kind");
    // A pull names owner, token, offset and length.
    let pull = |number: u64| message(PULL, &(number, 1u64, [7u8; 16], 0u64, 1u64));
    let kinds: [fn(u64) -> Vec<u8>; 4] = [
        |_| message(PING, &()),
        |number| message(CANCEL, &number),
        |number| message(ABORT, &(number, false)),
        |number| message(REVOKED, &u128::from(number).to_le_bytes()),
    ];
    let mut floods = Vec::new();
    for kind in kinds {
        floods.extend(each(2, || {
            let frames: Vec<u8> = (0..300).flat_map(kind).collect();
            move || Some(frames.clone())
        }));
    }
    floods.extend(each(2, || {
        let mut number = 0;
        move || {
            number += 1;
            Some(pull(number))
        }
    }));
    flooded("small frames", floods);
}

/// Whoever shows that it lives, and reads nothing, is given up by the system after the silence limit.
#[test]
fn a_peer_that_reads_nothing_is_given_up() {
    let _watchdog = Watchdog::start("a_peer_that_reads_nothing_is_given_up");
    let engine = Engine::builder().listen("tcp://127.0.0.1:0").heartbeat(Duration::from_secs(1)).build().unwrap();
    engine.define("answer", |_: &Request, len: usize| "x".repeat(len)).unwrap();
    let mut raw = Raw::enter(&engine.address());
    let begin = Instant::now();
    raw.stream.write_all(&request(1, 0, Some("answer"), false, &encoded(&(32 * MIB)))).unwrap();
    let mut hung_up = false;
    while !hung_up && begin.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(20));
        hung_up = raw.stream.write_all(&message(PONG, &())).is_err();
    }
    println!("hung up on: {hung_up}, after {:?}", begin.elapsed());
    assert!(hung_up && begin.elapsed() > Duration::from_millis(500));
}

/// A peer that comes, leaves slow work, and goes, again and again.
#[test]
fn peers_that_leave_work_behind() {
    let _watchdog = Watchdog::start("peers_that_leave_work_behind");
    let server = server();
    let honest = Honest::new(&server);
    memory::forget_peak(server.pid());
    let begin = Instant::now();
    let (mut peers, mut sent) = (0, 0);
    while begin.elapsed() < 2 * FLOOD {
        let mut raw = Raw::enter(&server.address);
        let mut flood = calls("slow", false, encoded(&"x".repeat(100 << 10)));
        sent += raw.flood(FLOOD / 10, || flood().filter(|_| begin.elapsed() < 2 * FLOOD)).0;
        peers += 1;
        honest.add();
    }
    println!("{peers} peers left {} MiB, and memory grew by {} MiB", sent / MIB, server.grown() / MIB);
    // What nobody waits for counts too, up to as much again.
    assert!(server.grown() < MOST, "{} MiB", server.grown() / MIB);
    eventually("calls are taken again", || {
        let sum = honest.engine.procedure::<(u32, u32), u32>("add").on(&honest.endpoint).call(&(40, 2));
        sum.is_ok()
    });
}
