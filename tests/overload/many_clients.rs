//! Very many connections.

use std::io::Write;
use std::time::{Duration, Instant};

use calomel::{Engine, Error};

use crate::assert_error;
use crate::common::wire::greeting;
use crate::memory;
use crate::raw::{Raw, request};
use crate::server::Server;
use crate::support::*;

const MIB: usize = 1 << 20;

fn engine() -> Engine {
    Engine::builder().same_host_upgrade(false).build().unwrap()
}

/// Connects this many peers; each of them calls, then each reads its response.
fn connect_and_call(server: &Server, count: usize) -> Vec<Raw> {
    memory::raise_file_limit();
    let begin = Instant::now();
    let mut raws: Vec<Raw> = (0..count).map(|_| Raw::enter(&server.address)).collect();
    let body = postcard::to_stdvec(&(40u32, 2u32)).unwrap();
    for raw in &mut raws {
        raw.stream.write_all(&request(1, 0, Some("add"), false, &body)).unwrap();
    }
    // The server's handshake, and the response.
    raws.iter_mut().for_each(|raw| raw.read(40));
    println!(
        "{count} connections, each with a call, in {:?}: {} MiB more, {} descriptors, {} threads",
        begin.elapsed(),
        server.grown() / MIB,
        memory::descriptors(server.pid()),
        memory::threads(server.pid())
    );
    raws
}

#[test]
fn eight_hundred_clients_are_served() {
    let _watchdog = Watchdog::start("eight_hundred_clients_are_served");
    let server = Server::start("- - -");
    let raws = connect_and_call(&server, 800);
    let client = engine();
    assert_serves(&client, &client.lookup(&server.address).unwrap());
    assert!(server.grown() < 64 * MIB, "{} MiB", server.grown() / MIB);
    drop(raws);
    eventually("the connections are gone", || memory::descriptors(server.pid()) < 50);
}

#[test]
#[ignore = "takes 10,000 descriptors in each of two processes: run where there are as many"]
fn ten_thousand_clients_are_served() {
    let _watchdog = Watchdog::start("ten_thousand_clients_are_served");
    let server = Server::start("- - -");
    let raws = connect_and_call(&server, 10_000);
    let client = engine();
    assert_serves(&client, &client.lookup(&server.address).unwrap());
    assert!(server.grown() < 400 * MIB, "{} MiB", server.grown() / MIB);
    drop(raws);
    eventually("the connections are gone", || memory::descriptors(server.pid()) < 50);
    assert_serves(&client, &client.lookup(&server.address).unwrap());
}

/// A client above the limit of connections gets an error, and may retry.
#[test]
fn connection_above_the_limit_is_refused_with_a_retryable_error() {
    let _watchdog = Watchdog::start("connection_above_the_limit_is_refused_with_a_retryable_error");
    let server = Server::start("50 - -");
    let mut raws = connect_and_call(&server, 50);
    let client = engine();
    let endpoint = client.lookup(&server.address).unwrap();
    let add = client.procedure::<(u32, u32), u32>("add");
    for _ in 0..20 {
        let error = add.on(&endpoint).call(&(1, 2)).unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains("connections"), "{error}");
        assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
    }
    assert!(raws.iter_mut().all(|raw| !raw.is_hung_up_on()));
    raws.pop();
    eventually("there is room again", || add.on(&endpoint).call(&(1, 2)).is_ok());
    assert!(raws.iter_mut().all(|raw| !raw.is_hung_up_on()));
}

/// Peers that send half a message and stop; others connect and are served meanwhile.
#[test]
fn half_messages_delay_no_other_client() {
    let _watchdog = Watchdog::start("half_messages_delay_no_other_client");
    memory::raise_file_limit();
    let server = Server::start(&format!("- {} {}", 16 * MIB, 64 * MIB));
    memory::forget_peak(server.pid());
    // Half frames of 512 KiB, three times as many as may be held of all peers.
    let whole = [7; 800 << 10];
    let frame = request(1, 0, Some("length"), false, &whole);
    let mut raws: Vec<Raw> = (0..400).map(|_| Raw::enter(&server.address)).collect();
    for raw in &mut raws {
        // The server may hang up.
        raw.flood(Duration::from_millis(20), {
            let mut once = Some(frame[..512 << 10].to_vec());
            move || once.take()
        });
    }
    // And half handshakes: 2,000 at a time, replaced when they are disconnected.
    let half = &greeting(7, 1 << 20)[..20];
    let slow = || {
        let mut raw = Raw::dial(&server.address);
        let _ = raw.stream.write_all(half);
        raw
    };
    let mut silent: Vec<Raw> = (0..1600).map(|_| slow()).collect();
    let begin = Instant::now();
    let (mut served, mut slowest, mut dropped) = (0, Duration::ZERO, 0);
    while begin.elapsed() < Duration::from_secs(3) {
        for raw in &mut silent {
            if raw.is_hung_up_on() {
                *raw = slow();
                dropped += 1;
            }
        }
        // A new client each time.
        let client = engine();
        let call = Instant::now();
        assert_serves(&client, &client.lookup(&server.address).unwrap());
        slowest = slowest.max(call.elapsed());
        served += 1;
    }
    println!(
        "{served} honest clients were served, the slowest after {slowest:?}; {dropped} silent ones were disconnected; memory grew by {} MiB",
        server.grown() / MIB
    );
    assert!(dropped > 0 && server.grown() < 180 * MIB, "{} MiB", server.grown() / MIB);
    assert!(slowest < patience() * Duration::from_secs(3), "{slowest:?}");
}

/// A peer that once sent a long frame, and now one byte of the next, costs one byte, not the long frame's buffer.
#[test]
fn byte_after_a_long_frame_holds_no_long_buffer() {
    let _watchdog = Watchdog::start("byte_after_a_long_frame_holds_no_long_buffer");
    memory::raise_file_limit();
    let server = Server::start(&format!("- {} {}", 16 * MIB, 64 * MIB));
    let before = memory::resident(server.pid());
    const ANSWER: usize = 10_000;
    let long = request(1, 0, Some("length"), false, &[7; 1000 << 10]);
    let short = request(2, 1, Some("answer"), false, &postcard::to_stdvec(&ANSWER).unwrap());
    let bytes = [&long[..], &short, &short[..1]].concat();
    let raws: Vec<Raw> = (0..200)
        .map(|_| {
            let mut raw = Raw::enter(&server.address);
            raw.stream.write_all(&bytes).unwrap();
            raw.read(ANSWER);
            raw
        })
        .collect();
    let client = engine();
    assert_serves(&client, &client.lookup(&server.address).unwrap());
    let grown = memory::resident(server.pid()).saturating_sub(before);
    println!("{} connections with a byte of half a frame each: {} MiB", raws.len(), grown / MIB);
    assert!(grown < 40 * MIB, "{} MiB", grown / MIB);
}
