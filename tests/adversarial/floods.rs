//! More requests than a peer may have in progress, all at once, with their responses unread.

use std::time::{Duration, Instant};

use crate::adversary::Adversary;
use crate::common::wire::{ANYTHING, Message, Range, Status, Stream};
use crate::over_both;
use crate::scene::{Scene, report};
use crate::support::*;
use crate::victim::Kind;

/// What the victim may hold for a peer that sends requests and does not read, in KiB.
const FLOODED: u64 = 64 << 10;

const MANY: u64 = 200_000;
const BLOCK: u64 = 2000;

type Flood = (&'static str, fn(u64, &Scene) -> Vec<u8>);

/// Requests that are answered; the frame with this number.
const REQUESTS: &[Flood] = &[
    ("pings", |_, _| Message::Ping.frame(&[])),
    ("calls of an unknown procedure", |n, _| {
        let mut message = Message::call(n, "no such procedure", 1);
        if let Message::Request { procedure, declaration, .. } = &mut message {
            *procedure = 1;
            *declaration = declaration.take().filter(|_| n == 0);
        }
        message.frame(&[1])
    }),
    ("pulls of unknown memory", |n, scene| {
        Message::Pull(Range { token: [n as u8; 16], transfer: n, ..scene.range(0, Kind::ReadOnly) }).frame(&[])
    }),
    ("empty pushes into unknown memory", |n, scene| {
        Message::Push(Range { token: [n as u8; 16], transfer: n, ..scene.range(0, Kind::ReadOnly) }).frame(&[])
    }),
];

/// Messages without a response.
const MESSAGES: &[Flood] = &[
    ("cancelled calls", |n, _| Message::Cancel { call: n }.frame(&[])),
    ("one-way calls of an unknown procedure", |n, _| {
        let mut message = Message::call(n, "no such procedure", 1);
        if let Message::Request { procedure, one_way, declaration, .. } = &mut message {
            (*procedure, *one_way) = (1, true);
            *declaration = declaration.take().filter(|_| n == 0);
        }
        message.frame(&[1])
    }),
    ("releases, ends and answers of unknown operations", |n, _| match n % 4 {
        0 => Message::Release { first: 0, count: u32::MAX }.frame(&[]),
        1 => Message::Done { transfer: n, status: Status::Ok }.frame(&[]),
        2 => Message::answer(n << 32, 1).frame(&[1]),
        _ => Message::Handled { count: u32::MAX, calls: u32::MAX, bytes: u32::MAX }.frame(&[]),
    }),
    ("notices of revoked memory", |n, _| Message::Revoked { token: u128::from(n).to_le_bytes() }.frame(&[])),
    ("names of procedures", |n, _| {
        let mut message = Message::call(n, &format!("name {n}"), 1);
        if let Message::Request { procedure, .. } = &mut message {
            *procedure = n as u32 + 1;
        }
        message.frame(&[1])
    }),
    ("declarations of result types", |n, _| {
        let result = n as u32 + 1;
        Message::Response { call: n << 32, result, shape: vec![ANYTHING], leases: (0, 0), released: (0, 0), size: 1 }.frame(&[1])
    }),
];

/// Other peers are served during the flood, its memory is bounded, and is freed afterwards.
fn assert_flood_is_bounded(floods: &[Flood]) {
    let _watchdog = Watchdog::start("floods::assert_flood_is_bounded");
    let scene = Scene::new();
    for (name, frame) in floods {
        let (begin, served) = (Instant::now(), scene.served());
        let mut adversary = Adversary::engaged(&scene.address);
        let (mut most, mut taken) = (0, 0);
        let block = |begin: u64| -> Vec<u8> { (begin..begin + BLOCK).flat_map(|n| frame(n, &scene)).collect() };
        let first = block(0);
        for at in (0..MANY).step_by(BLOCK as usize) {
            let fresh = if at > 0 && (name.starts_with("names") || name.starts_with("calls")) { Some(block(at)) } else { None };
            // A victim may stop reading at a limit, or hang up.
            if !adversary.channel.put(fresh.as_ref().unwrap_or(&first), Duration::from_secs(2)) {
                break;
            }
            (most, taken) = (most.max(scene.grown()), taken + BLOCK);
        }
        scene.assert_serves();
        most = most.max(scene.grown());
        assert!(most < FLOODED, "{name}: {most} KiB");
        assert!(scene.served() >= served + 2, "{name}: {} rounds of other peers", scene.served() - served);
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        scene.assert_unharmed(&received);
        report(&format!("{taken} {name}"), &format!("{most} KiB held at most"), begin);
    }
}

fn unread_responses_hold_bounded_memory() {
    assert_flood_is_bounded(REQUESTS);
}

fn messages_without_response_hold_bounded_memory() {
    assert_flood_is_bounded(MESSAGES);
}

/// Parts of streams that do not exist.
fn data_for_unknown_streams_is_discarded() {
    let _watchdog = Watchdog::start("floods::data_for_unknown_streams_is_discarded");
    let scene = Scene::new();
    let (begin, served) = (Instant::now(), scene.served());
    let mut adversary = Adversary::engaged(&scene.address);
    let part = vec![0x66; 1 << 20];
    for n in 0..40 {
        adversary.data([Stream::Pull, Stream::Push, Stream::Request, Stream::Response][n % 4], n as u64, 0, &part);
    }
    adversary.assert_listens();
    let most = scene.grown();
    assert!(most < FLOODED, "{most} KiB");
    scene.assert_serves();
    assert!(scene.served() >= served + 2);
    drop(adversary);
    scene.assert_unharmed(&[]);
    report("40 MiB of data for unknown streams", &format!("{most} KiB held"), begin);
}

/// Thousands of calls in progress when the victim hangs up on their caller.
fn thousands_of_calls_end_with_their_connection() {
    let _watchdog = Watchdog::start("floods::thousands_of_calls_end_with_their_connection");
    let scene = Scene::new();
    let begin = Instant::now();
    let mut adversary = Adversary::engaged(&scene.address);
    let call = |n: u64| {
        let mut message = Message::call(n, "slow", 1);
        if let Message::Request { procedure, declaration, .. } = &mut message {
            *procedure = 1;
            *declaration = declaration.take().filter(|_| n == 0);
        }
        message.frame(&[2])
    };
    let frames: Vec<u8> = (0..12_000).flat_map(call).collect();
    adversary.channel.put(&frames, BOUND);
    scene.assert_serves();
    adversary.bytes(&[0xff; 100]);
    adversary.assert_hung_up();
    scene.assert_serves();
    let received = std::mem::take(&mut adversary.received);
    drop(adversary);
    scene.assert_unharmed(&received);
    report("12,000 calls left behind", "the victim hangs up", begin);
}

/// Connections that are opened and broken off.
fn short_connections_leave_nothing() {
    let _watchdog = Watchdog::start("floods::short_connections_leave_nothing");
    let scene = Scene::new();
    let begin = Instant::now();
    for n in 0..300 {
        let mut adversary = if n % 3 == 0 { Adversary::after_handshake(&scene.address) } else { Adversary::dial(&scene.address) };
        if n % 2 == 0 {
            adversary.channel.break_off();
        }
    }
    scene.assert_unharmed(&[]);
    report("300 short connections", "they leave nothing", begin);
}

over_both!(
    unread_responses_hold_bounded_memory,
    messages_without_response_hold_bounded_memory,
    data_for_unknown_streams_is_discarded,
    thousands_of_calls_end_with_their_connection,
    short_connections_leave_nothing
);
