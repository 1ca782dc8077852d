//! Adversaries that the victim dials.

use std::thread;
use std::time::{Duration, Instant};

use crate::adversary::{Adversary, MOVED};
use crate::channel::Listener;
use crate::common::wire::{self, CHALLENGE, HELLO, Message, PROOF, REFUSAL, Status, Stream, VERSION, piece, preamble};
use crate::handshakes::hello;
use crate::over_both;
use crate::scene::{Begun, Case, Scene, Then, case, report, table};
use crate::support::*;

/// All violations about the victim's operations, by a peer that was dialled.
fn misused_numbers_from_dialled_peer_are_ignored_or_disconnect() {
    table("dialled, own numbers", Begun::ByVictim, crate::numbers::OWN);
}

const ANSWERS: &[Case] = &[
    case("no response, ever", Then::Continues, |adversary, scene| {
        // Until the victim's own deadlines.
        adversary.expect("the end of the call", |m| matches!(m, Message::Cancel { .. }));
        adversary.expect("the end of the pull", |m| matches!(m, Message::Abort { push: false, .. }));
        adversary.expect("the end of the push", |m| matches!(m, Message::Abort { push: true, .. }));
        scene.assert_serves();
    }),
    case("the end of the connection", Then::Leaves, |_, _| ()),
    case("the end of the connection, in the middle of a response", Then::Leaves, |adversary, _| {
        adversary.tell(&Message::answer(adversary.call, 1000), &[]);
        adversary.announce(Stream::Response, adversary.call, 0, 1000);
        adversary.channel.break_off();
    }),
    case("the end of the connection, in the middle of a pull", Then::Leaves, |adversary, _| {
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![1; MOVED / 2]);
        adversary.announce(Stream::Pull, adversary.pull, MOVED as u64 / 2, 1000);
        adversary.channel.shut_half();
    }),
    case("a goodbye", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::Goodbye, &[]);
    }),
    case("correct responses", Then::Continues, |adversary, _| {
        adversary.tell(&Message::answer(adversary.call, 4), &[3, 1, 2, 3]);
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![1; MOVED]);
        adversary.tell(&Message::Done { transfer: adversary.push, status: Status::Ok }, &[]);
    }),
    case("calls of its own", Then::Continues, |adversary, _| {
        let number = adversary.request("add", &(1u32, 2u32));
        assert_eq!(adversary.answer(number), Ok(vec![3]));
        adversary.engage();
    }),
    case("malformed frames", Then::HangsUp, |adversary, _| {
        adversary.bytes(&[0xff; 100]);
    }),
];

fn malformed_responses_from_dialled_peer_end_the_operations() {
    table("dialled", Begun::ByVictim, ANSWERS);
}

/// Sent instead of a handshake. `None`: the adversary hangs up.
type First = (&'static str, fn() -> Option<Vec<u8>>);

const HANDSHAKES: &[First] = &[
    ("the end", || None),
    ("another protocol", || Some(b"SSH-2.0-OpenSSH_9.2p1\r\n".to_vec())),
    ("noise", || Some(pattern(4, 5000))),
    ("half a hello, and the end", || None),
    ("a hello longer than the limit", || Some(preamble(VERSION, VERSION, u32::MAX))),
    ("a hello of another version", || Some(preamble(VERSION + 1, VERSION + 1, 100))),
    ("a challenge", || Some(piece(CHALLENGE, &[1; 32]))),
    ("a proof", || Some(piece(PROOF, &[1; 64]))),
    ("a refusal", || Some(piece(REFUSAL, &[2]))),
    ("a refusal of a version that both speak", || Some(piece(REFUSAL, &[1]))),
    ("a refusal with an unknown reason", || Some(piece(REFUSAL, &[99]))),
    ("a malformed hello", || Some(piece(HELLO, &[0xff; 30]))),
    ("10,000 addresses", || Some(hello(7, 1 << 20, &["a"; 10_000], None, false))),
    ("17 addresses", || Some(hello(7, 1 << 20, &["tcp://127.0.0.1:1"; 17], None, false))),
    ("frames and no hello", || Some(Message::answer(1 << 32 | 1, 1).frame(&[1]))),
    ("a hello, and a second one", || Some([wire::greeting(8, 1 << 20), wire::greeting(9, 1 << 20)].concat())),
    ("a hello, and garbage", || Some([wire::greeting(8, 1 << 20), pattern(4, 5000)].concat())),
];

/// The victim hangs up, and each of its operations fails with an error that names the peer.
fn malformed_handshakes_of_dialled_peer_fail_the_operations() {
    let _watchdog = Watchdog::start("servers::malformed_handshakes_of_dialled_peer_fail_the_operations");
    let scene = Scene::new();
    for (name, say) in HANDSHAKES {
        let (begin, listener) = (Instant::now(), Listener::open());
        scene.dial(&listener.address, 8);
        let mut adversary = Adversary::new(listener.accept());
        match say() {
            Some(bytes) => {
                adversary.bytes(&bytes);
                let took = adversary.assert_hung_up();
                assert!(took < patience() * Duration::from_secs(4), "{name}: {took:?}");
            }
            None => drop(adversary.bytes(&wire::greeting(1, 1)[..if name.starts_with("half") { 20 } else { 0 }])),
        }
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        // Operations that found the connection gone dial again, and are disconnected.
        drop(listener);
        scene.assert_unharmed(&received);
        report(&format!("dialled: {name}"), "the operations fail", begin);
    }
    // A silent peer is waited for until the connect timeout.
    let (begin, listener) = (Instant::now(), Listener::open());
    scene.dial(&listener.address, 0);
    let mut adversary = Adversary::new(listener.accept());
    thread::sleep(Duration::from_millis(100));
    adversary.assert_hung_up();
    drop((adversary, listener));
    scene.assert_unharmed(&[]);
    report("dialled: nothing", "the operations fail", begin);
    // The peer claims to be another engine, or the victim itself. It is treated as the peer that was dialled.
    for (name, incarnation) in [("another", scene.honest_incarnation()), ("the victim", scene.incarnation())] {
        let begin = Instant::now();
        let address = scene.honest.address().to_string();
        let listener = Listener::open();
        scene.dial(&listener.address, incarnation);
        let mut adversary = Adversary::new(listener.accept());
        adversary.bytes(&hello(incarnation, 1 << 20, &[&address], None, false));
        adversary.await_handshake();
        adversary.expect("a call", |m| matches!(m, Message::Request { .. }));
        scene.assert_serves();
        scene.assert_bound_is_reached();
        let received = std::mem::take(&mut adversary.received);
        drop((adversary, listener));
        scene.assert_unharmed(&received);
        report(&format!("dialled: it claims to be {name}"), "it is the peer that was dialled", begin);
    }
}

over_both!(
    misused_numbers_from_dialled_peer_are_ignored_or_disconnect,
    malformed_responses_from_dialled_peer_end_the_operations,
    malformed_handshakes_of_dialled_peer_fail_the_operations
);
