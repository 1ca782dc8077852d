//! Malformed handshakes.

use std::time::{Duration, Instant};

use crate::adversary::Adversary;
use crate::common::wire::{self, CHALLENGE, HELLO, MAGIC, Message, PIECE_LEN, PROOF, REFUSAL, VERSION, piece, preamble};
use crate::over_both;
use crate::scene::{Begun, Case, Scene, Then, call_of_add, case, report, table};
use crate::support::*;
use crate::victim::Kind;

/// A hello message with these fields.
pub fn hello(incarnation: u64, max_message: u64, addresses: &[&str], ticket: Option<u128>, checksums: bool) -> Vec<u8> {
    piece(HELLO, &postcard::to_stdvec(&(incarnation, max_message, addresses, ticket, checksums)).unwrap())
}

/// A hello from these bytes.
fn raw_hello(parts: &[&[u8]]) -> Vec<u8> {
    piece(HELLO, &parts.concat())
}

/// The first bytes sent, and the reason that the victim gives for hanging up, if it gives one.
type First = (&'static str, fn() -> Vec<u8>, Option<u8>);

const REFUSED: &[First] = &[
    ("a challenge to an engine without a key", || piece(CHALLENGE, &[1; 32]), Some(4)),
    ("a challenge that is too short", || piece(CHALLENGE, &[1; 31]), None),
    ("a challenge that is too long", || piece(CHALLENGE, &[1; 33]), None),
    ("a proof without a challenge", || piece(PROOF, &[1; 64]), None),
    ("a refusal from the side that dials", || piece(REFUSAL, &[3]), None),
    ("a refusal with an unknown reason", || piece(REFUSAL, &[200]), None),
    ("a message of an unknown kind", || piece(4, &[0; 40]), None),
    ("a message of the last kind", || piece(255, &[0; 40]), None),
    ("an empty message", || preamble(VERSION, VERSION, 0), None),
    ("a message that is too short", || [preamble(VERSION, VERSION, 4), vec![0; 4]].concat(), None),
    ("a hello of 4 GiB", || preamble(VERSION, VERSION, u32::MAX), None),
    ("a hello longer than the limit", || preamble(VERSION, VERSION, (16 << 10) + 1), None),
    ("an older version", || preamble(0, VERSION - 1, 50), Some(1)),
    ("a newer version", || preamble(VERSION + 1, u16::MAX, 50), Some(1)),
    ("a reversed range of versions", || preamble(VERSION + 1, VERSION - 1, 50), Some(1)),
    (
        "a wrong checksum",
        || {
            let mut bytes = hello(7, 1 << 20, &[], None, false);
            bytes[16] ^= 1;
            bytes
        },
        None,
    ),
    ("an empty hello", || raw_hello(&[]), None),
    ("a malformed hello", || raw_hello(&[&[0xff; 100]]), None),
    ("10,000 addresses", || hello(7, 1 << 20, &["a"; 10_000], None, false), None),
    ("10,000 addresses, none of which follows", || raw_hello(&[&[7, 7], &[0x90, 0x4e]]), None),
    ("2^64 - 1 addresses", || raw_hello(&[&[7, 7], &[0xff; 9], &[1]]), None),
    ("1000 addresses", || hello(7, 1 << 20, &["shm://"; 1000], None, false), None),
    ("17 addresses", || hello(7, 1 << 20, &["tcp://127.0.0.1:1"; 17], None, false), None),
    ("an address that is not UTF-8", || raw_hello(&[&[7, 7, 1, 4], &[0xc3, 0x28, 0xff, 0xfe], &[0, 0]]), None),
    ("an invalid address", || hello(7, 1 << 20, &["gopher://x"], None, false), None),
    ("an address of 10,000 bytes", || hello(7, 1 << 20, &[&"tcp://".repeat(1600)], None, false), None),
    ("half a resumption token", || raw_hello(&[&[7, 7, 0, 1, 0xff]]), None),
    ("frames and no hello", call_of_add_at_once, None),
    ("another protocol", || b"GET / HTTP/1.1\r\n\r\n".to_vec(), None),
];

fn call_of_add_at_once() -> Vec<u8> {
    call_of_add(1)
}

/// Each on its own connection: the victim hangs up at once, however few bytes have arrived.
fn malformed_handshakes_are_refused() {
    let _watchdog = Watchdog::start("handshakes::malformed_handshakes_are_refused");
    let scene = Scene::new();
    for (name, say, why) in REFUSED {
        let begin = Instant::now();
        let mut adversary = Adversary::dial(&scene.address);
        adversary.bytes(&say());
        let took = adversary.assert_hung_up();
        assert!(took < patience() * Duration::from_secs(2), "{name}: {took:?}");
        // The victim sends at most a refusal: never a hello, and the reason where there is one.
        let reply = adversary.received.clone();
        let reason = reply.starts_with(MAGIC).then(|| (reply[PIECE_LEN - 1], reply[PIECE_LEN]));
        assert_eq!(reason, why.map(|why| (REFUSAL, why)), "{name}: {reply:?}");
        drop(adversary);
        scene.assert_unharmed(&reply);
        report(&format!("handshakes: {name}"), "the victim hangs up", begin);
    }
}

/// Unusual but valid: such engines may exist.
fn unusual_handshakes_are_accepted() {
    let _watchdog = Watchdog::start("handshakes::unusual_handshakes_are_accepted");
    let scene = Scene::new();
    let sixteen: Vec<String> = (0..16).map(|port| format!("tcp://127.0.0.1:{}", port + 1)).collect();
    let sixteen: Vec<&str> = sixteen.iter().map(String::as_str).collect();
    let all: [(&str, Vec<u8>); 7] = [
        ("incarnation 0", hello(0, 1 << 20, &[], None, false)),
        ("the last incarnation", hello(u64::MAX, 1 << 20, &[], None, false)),
        ("a message limit of 0", hello(rand::random(), 0, &[], None, false)),
        ("a message limit of 2^64 - 1", hello(rand::random(), u64::MAX, &[], None, false)),
        ("16 addresses of other peers", hello(rand::random(), 1 << 20, &sixteen, None, false)),
        ("an unknown resumption token", hello(rand::random(), 1 << 20, &[], Some(u128::MAX), false)),
        ("checksums", hello(rand::random(), 1 << 20, &[], None, true)),
    ];
    for (name, bytes) in all {
        let begin = Instant::now();
        let mut adversary = Adversary::dial(&scene.address);
        adversary.bytes(&bytes);
        adversary.await_handshake();
        adversary.request("engage", &adversary.claimed_memory(0));
        adversary.assert_listens();
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        scene.assert_unharmed(&received);
        report(&format!("handshakes: {name}"), "served like any peer", begin);
    }
}

const LATER: &[Case] = &[
    case("a second hello", Then::HangsUp, |adversary, _| {
        let hello = wire::greeting(adversary.incarnation, 1 << 20);
        adversary.bytes(&hello);
    }),
    case("a hello of another engine, later", Then::HangsUp, |adversary, scene| {
        adversary.bytes(&hello(scene.honest_incarnation(), 1 << 20, &[], None, false));
    }),
    case("a challenge, later", Then::HangsUp, |adversary, _| {
        adversary.bytes(&piece(CHALLENGE, &[1; 32]));
    }),
    case("a proof, later", Then::HangsUp, |adversary, _| {
        adversary.bytes(&piece(PROOF, &[1; 64]));
    }),
    case("a refusal, later", Then::HangsUp, |adversary, _| {
        adversary.bytes(&piece(REFUSAL, &[5]));
    }),
];

fn handshake_messages_after_the_handshake_disconnect() {
    table("handshakes", Begun::ByAdversary, LATER);
}

const SECRET_KEY: &str = "a key of more than sixteen bytes";

/// An engine with a key sends nothing to peers without one, and does nothing for them.
fn peers_without_the_key_are_refused() {
    let _watchdog = Watchdog::start("handshakes::peers_without_the_key_are_refused");
    let scene = Scene::with(Some(SECRET_KEY));
    let challenge = |byte| piece(CHALLENGE, &[byte; 32]);
    let proof = || piece(PROOF, &[9; 64]);
    let hello = || wire::greeting(5, 1 << 20);
    let cases: [(&str, Vec<Vec<u8>>); 10] = [
        ("a hello at once", vec![hello()]),
        ("a hello and calls at once", vec![hello(), call_of_add(1), Message::Pull(scene.range(1, Kind::ReadOnly)).frame(&[])]),
        ("a proof at once", vec![proof()]),
        ("a challenge and a hello", vec![challenge(1), hello()]),
        ("two challenges", vec![challenge(1), challenge(1)]),
        ("a challenge and an invalid proof", vec![challenge(1), proof(), hello()]),
        ("a challenge and two proofs", vec![challenge(1), proof(), proof()]),
        ("a challenge and a refusal", vec![challenge(1), piece(REFUSAL, &[4])]),
        ("a challenge and calls", vec![challenge(1), call_of_add(1)]),
        ("a challenge and half a proof", vec![challenge(1), proof()[..50].to_vec()]),
    ];
    for (name, pieces) in cases {
        let begin = Instant::now();
        let mut adversary = Adversary::dial(&scene.address);
        adversary.bytes(&pieces.concat());
        let took = adversary.assert_hung_up();
        assert!(took < patience() * Duration::from_secs(5), "{name}: {took:?}");
        assert_no_hello(&adversary.received);
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        scene.assert_unharmed(&received);
        report(&format!("without the key: {name}"), "the victim hangs up", begin);
    }
    // What one connection carried is useless on another: the victim's own challenge, sent as the adversary's.
    let begin = Instant::now();
    let mut first = Adversary::dial(&scene.address);
    first.bytes(&challenge(1));
    first.until("a challenge", |adversary| adversary.received.len() >= challenge(0).len());
    let mut second = Adversary::dial(&scene.address);
    second.bytes(&first.received);
    second.until("a challenge", |adversary| adversary.received.len() >= challenge(0).len());
    assert_ne!(first.received, second.received, "the challenge repeats");
    first.bytes(&second.received);
    first.assert_hung_up();
    second.assert_hung_up();
    assert_no_hello(&first.received);
    assert_no_hello(&second.received);
    drop((first, second));
    scene.assert_unharmed(&[]);
    report("without the key: the victim's own challenge", "the victim hangs up", begin);
}

/// A challenge and a refusal, and nothing else.
#[track_caller]
pub fn assert_no_hello(mut received: &[u8]) {
    while !received.is_empty() {
        assert!(received.starts_with(MAGIC), "{received:?}");
        assert!([CHALLENGE, REFUSAL].contains(&received[PIECE_LEN - 1]), "{received:?}");
        let len = u32::from_le_bytes(received[12..16].try_into().unwrap()) as usize;
        received = &received[16 + len..];
    }
}

over_both!(
    malformed_handshakes_are_refused,
    unusual_handshakes_are_accepted,
    handshake_messages_after_the_handshake_disconnect,
    peers_without_the_key_are_refused
);
