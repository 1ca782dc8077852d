//! Peers that send without end, and do not read.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Address, Endpoint, Engine, Request};

use crate::common::wire::{Message, Range};
use crate::memory;
use crate::raw::{ABORT, CANCEL, PING, PONG, REVOKED, Raw, announcement, message, request};
use crate::server::Server;
use crate::support::*;

pub const MIB: usize = 1 << 20;
/// What the server of most tests may hold for one peer, and for all.
const PEER: usize = 16 * MIB;
const ALL: usize = 64 * MIB;
/// Up to twice that much is held, so that no peer is locked out. Not accounted: the memory of 64 handlers before their results
/// are responses, unused capacity of buffers, tables, and the allocator's own.
/// That came to 95 to 233 MiB in all, and to 256 MiB once, on a busy machine.
pub const MOST: usize = 2 * ALL + 160 * MIB;
/// Without optimization, one read of small frames takes some 20 ms, and a call beside eight floods took 0.02 to 1.5 s.
pub const MEANWHILE: Duration = Duration::from_millis(if cfg!(debug_assertions) { 3000 } else { 100 });
/// By then, the 64 handler threads have finished the remaining requests.
const RECOVERED: Duration = Duration::from_secs(10);
pub const FLOOD: Duration = Duration::from_millis(1500);

/// These tests compare rates, so they run sequentially: beside another flood, a rate says nothing.
static FLOODS: Mutex<()> = Mutex::new(());

/// Waits for the other floods, whose watchdogs bound that, and then starts a watchdog.
pub fn alone(name: &'static str) -> (Watchdog, MutexGuard<'static, ()>) {
    let turn = FLOODS.lock().unwrap_or_else(PoisonError::into_inner);
    (Watchdog::start(name), turn)
}

pub fn server() -> Server {
    Server::start(&format!("- {PEER} {ALL}"))
}

/// An honest client of the server.
pub struct Honest {
    engine: Engine,
    endpoint: Endpoint,
}

impl Honest {
    pub fn new(server: &Server) -> Honest {
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

    /// The median latency of calls.
    pub fn latency(&self, time: Duration) -> Duration {
        let begin = Instant::now();
        let mut took = Vec::new();
        while begin.elapsed() < time || took.len() < 5 {
            took.push(self.add());
        }
        took.sort_unstable();
        took[took.len() / 2]
    }

    /// Calls per second.
    fn rate(&self, time: Duration) -> f64 {
        let begin = Instant::now();
        let mut calls = 0;
        while begin.elapsed() < time {
            self.add();
            calls += 1;
        }
        f64::from(calls) / begin.elapsed().as_secs_f64()
    }

    /// The best of a few measurements: the machine is shared.
    fn best_rate(&self) -> f64 {
        (0..5).map(|_| self.rate(Duration::from_millis(100))).fold(0.0, f64::max)
    }
}

/// Floods the server at this address for `FLOOD`; returns how many bytes it has sent, and whether the server has hung up.
pub type Flood = Box<dyn FnOnce(&Address) -> (usize, bool) + Send>;

/// Has sockets flood the server with these bytes.
fn flooded(name: &str, floods: Vec<Box<dyn FnMut() -> Option<Vec<u8>> + Send>>) {
    let flood = |mut next| -> Flood { Box::new(move |address| Raw::enter(address).flood(FLOOD, &mut next)) };
    overloaded(name, floods.into_iter().map(flood).collect());
}

/// Has several peers flood the server, while an honest client calls: memory is bounded, calls are answered, and afterwards the
/// rate of calls recovers.
pub fn overloaded(name: &str, floods: Vec<Flood>) {
    let server = server();
    let honest = Honest::new(&server);
    let (rate, before) = (honest.best_rate(), honest.latency(FLOOD / 5));
    memory::forget_peak(server.pid());
    let peers = floods.len();
    let during = thread::scope(|scope| {
        let address = &server.address;
        let floods: Vec<_> = floods.into_iter().map(|flood| scope.spawn(move || flood(address))).collect();
        let during = honest.latency(FLOOD);
        let (mut sent, mut hung_up) = (0, 0);
        for flood in floods {
            let (bytes, ended) = flood.join().unwrap();
            sent += bytes;
            hung_up += usize::from(ended);
        }
        println!("{name}: {peers} peers sent {} KiB, {hung_up} of them were disconnected", sent >> 10);
        during
    });
    let begin = Instant::now();
    let mut after = honest.rate(Duration::from_millis(100));
    while after < 0.8 * rate && begin.elapsed() < patience() * RECOVERED {
        after = honest.rate(Duration::from_millis(100));
    }
    println!(
        "{name}: memory grew by {} MiB; a call took {before:?}, {during:?} meanwhile; {rate:.0} calls per second, {after:.0} within {:?}",
        server.grown() / MIB,
        begin.elapsed()
    );
    assert!(server.grown() < MOST, "{} MiB", server.grown() / MIB);
    assert!(during < patience() * MEANWHILE, "{during:?} instead of {before:?}");
    // The machine is shared.
    assert!(after > 0.4 * rate, "{after:.0} calls per second instead of {rate:.0}");
}

fn each<F: FnMut() -> Option<Vec<u8>> + Send + 'static>(
    peers: usize,
    flood: impl Fn() -> F,
) -> Vec<Box<dyn FnMut() -> Option<Vec<u8>> + Send>> {
    (0..peers).map(|_| Box::new(flood()) as Box<dyn FnMut() -> Option<Vec<u8>> + Send>).collect()
}

/// Calls of one procedure, made sequentially, a few in each write.
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
fn unread_responses_hold_bounded_memory() {
    let _alone = alone("unread_responses_hold_bounded_memory");
    // A few bytes of request ask for a large response; or a few kibibytes, which come back with the response.
    let mut floods = each(4, || calls("answer", false, encoded(&(200usize << 10))));
    floods.extend(each(4, || calls("answer", false, encoded(&(8usize << 10)))));
    flooded("answers", floods);
}

#[test]
fn large_requests_in_one_frame_hold_bounded_memory() {
    let _alone = alone("large_requests_in_one_frame_hold_bounded_memory");
    flooded("requests of 900 KiB", each(8, || calls("length", false, encoded(&vec![7u8; 900 << 10]))));
}

#[test]
fn requests_for_slow_handler_hold_bounded_memory() {
    let _alone = alone("requests_for_slow_handler_hold_bounded_memory");
    flooded("queued requests", each(8, || calls("slow", false, encoded(&"x".repeat(8 << 10)))));
}

#[test]
fn one_way_calls_for_slow_handler_hold_bounded_memory() {
    let _alone = alone("one_way_calls_for_slow_handler_hold_bounded_memory");
    flooded("one-way calls", each(8, || calls("slow", true, encoded(&"x".repeat(8 << 10)))));
}

#[test]
fn calls_of_unknown_procedures_hold_bounded_memory() {
    let _alone = alone("calls_of_unknown_procedures_hold_bounded_memory");
    flooded("calls of unknown procedures", each(4, || calls("no such procedure", false, Vec::new())));
}

#[test]
fn new_procedure_names_hold_bounded_memory() {
    let _alone = alone("new_procedure_names_hold_bounded_memory");
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
fn announced_arguments_hold_bounded_memory() {
    let _alone = alone("announced_arguments_hold_bounded_memory");
    let flood = || {
        let mut number = 0;
        move || {
            number += 1;
            Some(announcement(number, 0, (number == 1).then_some("length"), 8 << 20))
        }
    };
    flooded("announcements", each(8, flood));
}

/// Announcements that are cancelled cost no more than their frames: no memory is zeroed for bytes that never arrive.
#[test]
fn cancelled_announcements_zero_no_memory() {
    let _alone = alone("cancelled_announcements_zero_no_memory");
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
    flooded("cancelled announcements", each(4, flood));
}

#[test]
fn small_frames_of_every_kind_hold_bounded_memory() {
    let _alone = alone("small_frames_of_every_kind_hold_bounded_memory");
    // A pull contains owner, token, offset and length.
    let pull = |number: u64| Message::Pull(Range { transfer: number, owner: 1, token: [7; 16], offset: 0, len: 1 }).frame(&[]);
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

/// A peer that shows signs of life, but reads nothing, is disconnected after the peer timeout.
#[test]
fn peer_that_reads_nothing_is_disconnected() {
    let _alone = alone("peer_that_reads_nothing_is_disconnected");
    let engine = Engine::builder().listen("tcp://127.0.0.1:0").peer_timeout(Duration::from_secs(1)).build().unwrap();
    engine.define("answer", |_: &Request, len: usize| "x".repeat(len)).unwrap();
    let mut raw = Raw::enter(&engine.address());
    let begin = Instant::now();
    raw.stream.write_all(&request(1, 0, Some("answer"), false, &encoded(&(32 * MIB)))).unwrap();
    let mut hung_up = false;
    while !hung_up && begin.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(20));
        hung_up = raw.stream.write_all(&message(PONG, &())).is_err();
    }
    println!("disconnected: {hung_up}, after {:?}", begin.elapsed());
    assert!(hung_up && begin.elapsed() > Duration::from_millis(500));
}

/// Peers that connect, leave slow requests, and disconnect, again and again.
#[test]
fn requests_of_disconnected_peers_hold_bounded_memory() {
    let _alone = alone("requests_of_disconnected_peers_hold_bounded_memory");
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
    // Requests of disconnected peers are accounted, too, up to as much again.
    assert!(server.grown() < MOST, "{} MiB", server.grown() / MIB);
    eventually("calls are accepted again", || {
        let sum = honest.engine.procedure::<(u32, u32), u32>("add").on(&honest.endpoint).call(&(40, 2));
        sum.is_ok()
    });
}
