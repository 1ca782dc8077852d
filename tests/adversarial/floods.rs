//! More than anybody wants, all at once, and nobody reads what comes back.

use std::time::{Duration, Instant};

use crate::adversary::Adversary;
use crate::common::wire::{ANYTHING, Message, Range, Status, Stream};
use crate::over_both;
use crate::scene::{Scene, report};
use crate::support::*;
use crate::victim::Kind;

/// What the victim may hold for a peer that asks and does not read, in KiB.
const FLOODED: u64 = 64 << 10;

const MANY: u64 = 200_000;
const BLOCK: u64 = 2000;

type Flood = (&'static str, fn(u64, &Scene) -> Vec<u8>);

/// What is answered, each; the frame of this number.
const QUESTIONS: &[Flood] = &[
    ("pings", |_, _| Message::Ping.frame(&[])),
    ("calls of a procedure that there is not", |n, _| {
        let mut message = Message::call(n, "no such procedure", 1);
        if let Message::Request { procedure, declaration, .. } = &mut message {
            *procedure = 1;
            *declaration = declaration.take().filter(|_| n == 0);
        }
        message.frame(&[1])
    }),
    ("pulls of what there is not", |n, scene| {
        Message::Pull(Range { token: [n as u8; 16], transfer: n, ..scene.range(0, Kind::ReadOnly) }).frame(&[])
    }),
    ("pushes of nothing into what there is not", |n, scene| {
        Message::Push(Range { token: [n as u8; 16], transfer: n, ..scene.range(0, Kind::ReadOnly) }).frame(&[])
    }),
];

/// What is not.
const WORDS: &[Flood] = &[
    ("cancelled calls", |n, _| Message::Cancel { call: n }.frame(&[])),
    ("one-way calls of a procedure that there is not", |n, _| {
        let mut message = Message::call(n, "no such procedure", 1);
        if let Message::Request { procedure, one_way, declaration, .. } = &mut message {
            (*procedure, *one_way) = (1, true);
            *declaration = declaration.take().filter(|_| n == 0);
        }
        message.frame(&[1])
    }),
    ("releases, ends and answers of nothing", |n, _| match n % 4 {
        0 => Message::Release { first: 0, count: u32::MAX }.frame(&[]),
        1 => Message::Done { transfer: n, status: Status::Ok }.frame(&[]),
        2 => Message::answer(n << 32, 1).frame(&[1]),
        _ => Message::Handled { count: u32::MAX, calls: u32::MAX, bytes: u32::MAX }.frame(&[]),
    }),
    ("words of memory that was taken back", |n, _| Message::Revoked { token: u128::from(n).to_le_bytes() }.frame(&[])),
    ("names of procedures", |n, _| {
        let mut message = Message::call(n, &format!("name {n}"), 1);
        if let Message::Request { procedure, .. } = &mut message {
            *procedure = n as u32 + 1;
        }
        message.frame(&[1])
    }),
    ("types of answers", |n, _| {
        let result = n as u32 + 1;
        Message::Response { call: n << 32, result, shape: vec![ANYTHING], leases: (0, 0), size: 1 }.frame(&[1])
    }),
];

/// Others are served while it comes, and what it takes is bounded, and given back.
fn unread(floods: &[Flood]) {
    let _watchdog = Watchdog::start("floods::unread");
    let scene = Scene::new();
    for (name, frame) in floods {
        let (begin, served) = (Instant::now(), scene.served());
        let mut adversary = Adversary::engaged(&scene.address);
        let (mut most, mut taken) = (0, 0);
        let block = |begin: u64| -> Vec<u8> { (begin..begin + BLOCK).flat_map(|n| frame(n, &scene)).collect() };
        let first = block(0);
        for at in (0..MANY).step_by(BLOCK as usize) {
            let fresh = if at > 0 && (name.starts_with("names") || name.starts_with("calls")) { Some(block(at)) } else { None };
            // A victim that has had enough reads no more, or hangs up.
            if !adversary.channel.put(fresh.as_ref().unwrap_or(&first), Duration::from_secs(2)) {
                break;
            }
            (most, taken) = (most.max(scene.grown()), taken + BLOCK);
        }
        scene.assert_serves();
        most = most.max(scene.grown());
        assert!(most < FLOODED, "{name}: {most} KiB");
        assert!(scene.served() >= served + 2, "{name}: {} rounds of others", scene.served() - served);
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        scene.assert_unharmed(&received);
        report(&format!("{taken} {name}"), &format!("{most} KiB held at most"), begin);
    }
}

fn questions() {
    unread(QUESTIONS);
}

fn words() {
    unread(WORDS);
}

/// Parts of streams that nobody waits for.
fn unwanted_data() {
    let _watchdog = Watchdog::start("floods::unwanted_data");
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
    report("40 MiB of data for nobody", &format!("{most} KiB held"), begin);
}

/// Calls in progress by the thousand, when their caller is hung up on.
fn calls_left_behind() {
    let _watchdog = Watchdog::start("floods::calls_left_behind");
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
    report("12,000 calls that nobody waits for", "the victim hangs up", begin);
}

/// Connections that come and go.
fn comings_and_goings() {
    let _watchdog = Watchdog::start("floods::comings_and_goings");
    let scene = Scene::new();
    let begin = Instant::now();
    for n in 0..300 {
        let mut adversary = if n % 3 == 0 { Adversary::after_handshake(&scene.address) } else { Adversary::dial(&scene.address) };
        if n % 2 == 0 {
            adversary.channel.break_off();
        }
    }
    scene.assert_unharmed(&[]);
    report("300 connections that come and go", "they are gone", begin);
}

over_both!(questions, words, unwanted_data, calls_left_behind, comings_and_goings);
