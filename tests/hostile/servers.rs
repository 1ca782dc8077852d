//! Liars that the victim dials.

use std::thread;
use std::time::{Duration, Instant};

use crate::common::wire::{self, CHALLENGE, HELLO, Message, PROOF, REFUSAL, Status, Stream, VERSION, piece, preamble};
use crate::greetings::hello;
use crate::liar::{Liar, MOVED};
use crate::over_both;
use crate::scene::{Begun, Lie, Scene, Then, lie, report, table};
use crate::support::*;
use crate::way::Door;

/// Everything that can be said of the victim's operations by one who dialled, said by one who was dialled.
fn of_its_own() {
    table("dialled, own numbers", Begun::ByVictim, crate::numbers::OWN);
}

const ANSWERS: &[Lie] = &[
    lie("no answer, ever", Then::GoesOn, |liar, scene| {
        // Until the victim's own deadlines.
        liar.expect("the end of the call", |m| matches!(m, Message::Cancel { .. }));
        liar.expect("the end of the pull", |m| matches!(m, Message::Abort { push: false, .. }));
        liar.expect("the end of the push", |m| matches!(m, Message::Abort { push: true, .. }));
        scene.assert_serves();
    }),
    lie("the end of the connection", Then::Leaves, |_, _| ()),
    lie("the end of the connection, in the middle of an answer", Then::Leaves, |liar, _| {
        liar.tell(&Message::answer(liar.call, 1000), &[]);
        liar.announce(Stream::Response, liar.call, 0, 1000);
        liar.way.break_off();
    }),
    lie("the end of the connection, in the middle of a pull", Then::Leaves, |liar, _| {
        liar.data(Stream::Pull, liar.pull, 0, &vec![1; MOVED / 2]);
        liar.announce(Stream::Pull, liar.pull, MOVED as u64 / 2, 1000);
        liar.way.shut_half();
    }),
    lie("the end of the engine", Then::HangsUp, |liar, _| {
        liar.tell(&Message::Goodbye, &[]);
    }),
    lie("what was right", Then::GoesOn, |liar, _| {
        liar.tell(&Message::answer(liar.call, 4), &[3, 1, 2, 3]);
        liar.data(Stream::Pull, liar.pull, 0, &vec![1; MOVED]);
        liar.tell(&Message::Done { transfer: liar.push, status: Status::Ok }, &[]);
    }),
    lie("calls of its own", Then::GoesOn, |liar, _| {
        let number = liar.request("add", &(1u32, 2u32));
        assert_eq!(liar.answer(number), Ok(vec![3]));
        liar.engage();
    }),
    lie("frames that are none", Then::HangsUp, |liar, _| {
        liar.bytes(&[0xff; 100]);
    }),
];

fn answers() {
    table("dialled", Begun::ByVictim, ANSWERS);
}

/// What is said instead of a greeting. `None`: the liar hangs up.
type First = (&'static str, fn() -> Option<Vec<u8>>);

const GREETINGS: &[First] = &[
    ("the end", || None),
    ("another protocol", || Some(b"SSH-2.0-OpenSSH_9.2p1\r\n".to_vec())),
    ("noise", || Some(pattern(4, 5000))),
    ("half a hello, and the end", || None),
    ("a hello longer than any", || Some(preamble(VERSION, VERSION, u32::MAX))),
    ("a hello of another version", || Some(preamble(VERSION + 1, VERSION + 1, 100))),
    ("a challenge", || Some(piece(CHALLENGE, &[1; 32]))),
    ("a proof", || Some(piece(PROOF, &[1; 64]))),
    ("a refusal", || Some(piece(REFUSAL, &[2]))),
    ("a refusal of a version that both speak", || Some(piece(REFUSAL, &[1]))),
    ("a refusal for no reason", || Some(piece(REFUSAL, &[99]))),
    ("a hello that is none", || Some(piece(HELLO, &[0xff; 30]))),
    ("10,000 addresses", || Some(hello(7, 1 << 20, &["a"; 10_000], None, false))),
    ("17 addresses", || Some(hello(7, 1 << 20, &["tcp://127.0.0.1:1"; 17], None, false))),
    ("frames and no hello", || Some(Message::answer(1 << 32 | 1, 1).frame(&[1]))),
    ("a hello, and a second one", || Some([wire::greeting(8, 1 << 20), wire::greeting(9, 1 << 20)].concat())),
    ("a hello, and noise", || Some([wire::greeting(8, 1 << 20), pattern(4, 5000)].concat())),
];

/// The victim hangs up by itself, and each of its operations fails and says with whom.
fn greetings() {
    let _watchdog = Watchdog::start("servers::greetings");
    let scene = Scene::new();
    for (name, say) in GREETINGS {
        let (begin, door) = (Instant::now(), Door::open());
        scene.dial(&door.address, 8);
        let mut liar = Liar::new(door.accept());
        match say() {
            Some(bytes) => {
                liar.bytes(&bytes);
                let took = liar.assert_hung_up();
                assert!(took < patience() * Duration::from_secs(4), "{name}: {took:?}");
            }
            None => drop(liar.bytes(&wire::greeting(1, 1)[..if name.starts_with("half") { 20 } else { 0 }])),
        }
        let heard = std::mem::take(&mut liar.heard);
        drop(liar);
        // Operations that found the connection gone dial again: to be hung up on.
        drop(door);
        scene.assert_unharmed(&heard);
        report(&format!("dialled: {name}"), "the operations fail", begin);
    }
    // Silence is waited for as long as connecting may take.
    let (begin, door) = (Instant::now(), Door::open());
    scene.dial(&door.address, 0);
    let mut liar = Liar::new(door.accept());
    thread::sleep(Duration::from_millis(100));
    liar.assert_hung_up();
    drop((liar, door));
    scene.assert_unharmed(&[]);
    report("dialled: nothing", "the operations fail", begin);
    // Somebody else, or the victim itself, is at the end of the line: so it says. It is who was dialled, and nobody else.
    for (name, incarnation) in [("another", scene.honest_incarnation()), ("the victim", scene.incarnation())] {
        let begin = Instant::now();
        let address = scene.honest.address().to_string();
        let door = Door::open();
        scene.dial(&door.address, incarnation);
        let mut liar = Liar::new(door.accept());
        liar.bytes(&hello(incarnation, 1 << 20, &[&address], None, false));
        liar.await_greeting();
        liar.expect("a call", |m| matches!(m, Message::Request { .. }));
        scene.assert_serves();
        scene.assert_bound_is_reached();
        let heard = std::mem::take(&mut liar.heard);
        drop((liar, door));
        scene.assert_unharmed(&heard);
        report(&format!("dialled: it says that it is {name}"), "it is who was dialled", begin);
    }
}

over_both!(of_its_own, answers, greetings);
