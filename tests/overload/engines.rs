//! Peers that are engines, over several transports: they speak the protocol as they should, and want too much or stand still.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use calomel::{Address, Bulk, Call, Endpoint, Engine, Error, Pending};

use crate::floods::{FLOOD, Flood, Honest, MEANWHILE, MIB, MOST, alone, overloaded, server};
use crate::memory;
use crate::support::*;

/// The server's address, for a child.
const SERVER: &str = "CALOMEL_TEST_SERVER";
/// Calls that a peer has in flight.
const IN_FLIGHT: usize = 1_000;
/// Answers that a child waits for at a time: far more than the server may keep for it.
const ANSWERS: usize = 400;

macro_rules! over_transports {
    ($($test:ident),* $(,)?) => {
        over_each!(@ over_tcp, Tcp, $($test),*);
        over_each!(@ over_shm, Shm, $($test),*);
        #[cfg(feature = "ofi")]
        over_each!(@ over_ofi, Ofi, $($test),*);
    };
}

over_transports!(
    calls_of_a_slow_handler_hold_bounded_memory,
    one_way_calls_of_a_slow_handler_hold_bounded_memory,
    large_answers_hold_bounded_memory,
    pulls_hold_bounded_memory,
    peers_that_stop_while_they_read_hold_bounded_memory,
);

/// An engine of a peer's, and the server.
fn enter(address: &Address) -> (Engine, Endpoint) {
    let engine = Engine::builder().same_host_upgrade(false).build().unwrap();
    let server = engine.lookup(address).unwrap();
    (engine, server)
}

/// So many peers, each of which does this until the time is over.
fn each(peers: usize, flood: fn(&Engine, Endpoint, Instant) -> usize) -> Vec<Flood> {
    let peer = |_| -> Flood {
        Box::new(move |address| {
            let (engine, server) = enter(address);
            (flood(&engine, server, Instant::now() + FLOOD), false)
        })
    };
    (0..peers).map(peer).collect()
}

/// What a server may answer that has too much to do.
fn is_expected<T>(result: calomel::Result<T>) {
    match result {
        Ok(_) | Err(Error::Busy { .. } | Error::Timeout { .. }) => {}
        Err(other) => panic!("{other:?}"),
    }
}

/// Keeps calls in flight until the time is over; returns how many were made. Those that are left are cancelled.
fn keep_calling<A: serde::Serialize, R: serde::de::DeserializeOwned>(
    call: &Call<A, R>,
    argument: &A,
    in_flight: usize,
    until: Instant,
) -> usize {
    let (mut calls, mut made) = (VecDeque::<Pending<R>>::new(), 0);
    while Instant::now() < until {
        match call.start(argument) {
            Ok(call) => calls.push_back(call),
            Err(error) => is_expected::<()>(Err(error)),
        }
        made += 1;
        if calls.len() == in_flight {
            calls.pop_front().into_iter().for_each(|call| is_expected(call.wait()));
        }
    }
    made
}

fn calls_of_a_slow_handler_hold_bounded_memory() {
    let _alone = alone("calls_of_a_slow_handler_hold_bounded_memory");
    let flood = |engine: &Engine, server: Endpoint, until| {
        let slow = engine.procedure::<String, ()>("slow").on(server).timeout(Duration::from_secs(5));
        keep_calling(&slow, &"x".repeat(8 << 10), IN_FLIGHT, until) * (8 << 10)
    };
    overloaded("calls by engines", each(4, flood));
}

fn one_way_calls_of_a_slow_handler_hold_bounded_memory() {
    let _alone = alone("one_way_calls_of_a_slow_handler_hold_bounded_memory");
    let flood = |engine: &Engine, server: Endpoint, until| {
        let slow = engine.procedure::<String, ()>("slow").on(server).timeout(Duration::from_millis(100));
        let (argument, mut sent) = ("x".repeat(8 << 10), 0);
        while Instant::now() < until {
            is_expected(slow.notify(&argument));
            sent += argument.len();
        }
        sent
    };
    overloaded("one-way calls by engines", each(4, flood));
}

fn large_answers_hold_bounded_memory() {
    let _alone = alone("large_answers_hold_bounded_memory");
    let flood = |engine: &Engine, server: Endpoint, until| {
        let answer = engine.procedure::<usize, String>("answer").on(server).timeout(Duration::from_secs(5));
        keep_calling(&answer, &(200 << 10), IN_FLIGHT, until) * 8
    };
    overloaded("answers to engines", each(4, flood));
}

fn pulls_hold_bounded_memory() {
    let _alone = alone("pulls_hold_bounded_memory");
    let flood = |engine: &Engine, server: Endpoint, until| {
        let region = engine.procedure::<(), Bulk>("region").on(&server).call(&()).unwrap();
        let (mut copy, mut pulled) = (vec![0u8; region.len()], 0);
        while Instant::now() < until {
            pulled += region.on(&server).pull_into(&mut copy[..]).unwrap();
        }
        assert!(copy == vec![1; copy.len()]);
        pulled
    };
    overloaded("pulls by engines", each(4, flood));
}

/// They are processes that a signal stops while many answers, and a pull, are on their way to them.
fn peers_that_stop_while_they_read_hold_bounded_memory() {
    let _alone = alone("peers_that_stop_while_they_read_hold_bounded_memory");
    let server = server();
    let honest = Honest::new(&server);
    let before = honest.latency(FLOOD / 5);
    memory::forget_peak(server.pid());
    let address = server.address.to_string();
    let mut peers: Vec<Child> = (0..3).map(|_| Child::start("reader", &[(SERVER, &address)])).collect();
    peers.iter_mut().for_each(|peer| _ = peer.hear("read"));
    peers.iter().for_each(|peer| peer.signal(libc::SIGSTOP));
    let during = honest.latency(FLOOD);
    println!("memory grew by {} MiB; a call took {before:?}, {during:?} meanwhile", server.grown() / MIB);
    assert!(server.grown() < MOST, "{} MiB", server.grown() / MIB);
    assert!(during < patience() * MEANWHILE, "{during:?} instead of {before:?}");
    for peer in &mut peers {
        peer.said_of(&["read"]);
        peer.signal(libc::SIGCONT);
        // What it was about to say when it was stopped, and what it says now.
        (0..3).for_each(|_| _ = peer.hear("read"));
    }
}

/// In a child: reads large answers and a large region, again and again.
pub fn read() {
    let (engine, server) = enter(&std::env::var(SERVER).unwrap().parse().unwrap());
    let answer = engine.procedure::<usize, String>("answer").on(&server);
    let region = engine.procedure::<(), Bulk>("region").on(&server).call(&()).unwrap();
    let mut copy = vec![0u8; region.len()];
    let begin = Instant::now();
    while begin.elapsed() < patience() * BOUND {
        let calls: Vec<_> = (0..ANSWERS).filter_map(|_| answer.start(&(200 << 10)).ok()).collect();
        assert_eq!(region.on(&server).pull_into(&mut copy[..]).unwrap(), copy.len());
        calls.into_iter().for_each(|call| is_expected(call.wait()));
        say("read");
    }
}
