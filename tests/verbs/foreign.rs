//! Peers that speak another version, that are no engines, and that lie: each costs its own connection, with a clear error, and
//! no other peer's.

use std::thread;

use calomel::{Error, Result};

use crate::common::wire::VERSION;
use crate::pair::{Pair, patient};
use crate::raw::{Listener, Raw, hello, message, versions};
use crate::support::*;

/// The versions that are spoken here.
const SPOKEN: (u16, u16) = (VERSION, VERSION);
/// Those of a peer that is newer.
const NEWER: (u16, u16) = (VERSION + 1, VERSION + 3);

// What messages are.
const CREDIT: u8 = 0;
const BYTES: u8 = 1;
const STAGED_BYTES: u8 = 2;
const PAYLOAD: u8 = 3;
const STAGED_PAYLOAD: u8 = 4;
const SOURCE_GONE: u8 = 5;
const OFFER: u8 = 6;
const LANE_UP: u8 = 7;

fn another_version_is_refused_with_ours() {
    let pair = Pair::new();
    let address = pair.server.address().to_string();
    for theirs in [NEWER, (0, 0), (VERSION + 3, 2), (u16::MAX, u16::MAX)] {
        let said = Raw::dial(&address, &hello(theirs)).err().expect("it is connected");
        assert_eq!(versions(&said), SPOKEN, "{theirs:?}");
        pair.assert_serves();
    }
    // One that speaks ours among others is welcome.
    assert_eq!(
        versions(&Raw::dial(&address, &hello((0, 9))).unwrap_or_else(|said| panic!("it is refused: {said:?}")).met),
        SPOKEN
    );
}

fn who_is_no_engine_is_refused() {
    let pair = Pair::new();
    let address = pair.server.address().to_string();
    let (mut no_credit, mut tiny) = (hello(SPOKEN), hello(SPOKEN));
    no_credit[16..18].fill(0);
    tiny[12..16].copy_from_slice(&8u32.to_le_bytes());
    for said in [Vec::new(), vec![0; 36], b"GET / HTTP/1.0\r\n\r\n".to_vec(), vec![0xff; 56], no_credit, tiny] {
        assert!(Raw::dial(&address, &said).is_err(), "{said:?}");
        pair.assert_serves();
    }
}

/// What a call gets of a peer that is no engine, which does with it what it likes.
fn called(peer: impl FnOnce(Listener) + Send + 'static) -> (Error, String) {
    let listener = Listener::new();
    let address = listener.address.clone();
    let peer = thread::spawn(move || peer(listener));
    let engine = patient().build().unwrap();
    let to = engine.lookup(&address).unwrap();
    let called: Result<u32> = engine.procedure::<(u32, u32), u32>("add").on(&to).call(&(1, 2));
    let error = called.unwrap_err();
    let text = error.to_string();
    peer.join().unwrap();
    // It goes on with others.
    let pair = Pair::new();
    assert_serves(&engine, &engine.lookup(pair.server.address()).unwrap());
    (error, text)
}

fn names_both(text: &str) -> bool {
    [SPOKEN, NEWER].iter().all(|(low, high)| text.contains(&format!("{low}..={high}")))
}

fn a_call_to_another_version_names_both() {
    let (error, text) = called(|listener| assert_eq!(versions(&listener.refuse(&hello(NEWER))), SPOKEN));
    assert!(matches!(error, Error::Version { ours: SPOKEN, theirs: NEWER, .. }), "{error:?}");
    assert!(names_both(&text), "{text}");
    // Where it does not refuse by itself, this side does.
    let (error, text) = called(|listener| assert!(listener.accept(&hello(NEWER)).is_hung_up_on()));
    assert!(matches!(error, Error::Version { ours: SPOKEN, theirs: NEWER, .. }), "{text}");
}

fn a_call_to_no_engine_says_so() {
    let (error, text) = called(|listener| assert!(listener.accept(b"GET / HTTP/1.0").is_hung_up_on()));
    assert!(error.is_disconnected() && text.contains("not a calomel engine"), "{text}");
    let (error, text) = called(|listener| _ = listener.refuse(b"go away"));
    assert!(error.is_disconnected() && text.contains("refuse"), "{text}");
}

/// What a call gets of a peer that connects properly, and then says something. It must be hung up on.
#[track_caller]
fn answered(messages: Vec<Vec<u8>>) -> String {
    let (error, text) = called(move |listener| {
        let mut peer = listener.accept(&hello(SPOKEN));
        messages.iter().for_each(|message| _ = peer.send(message));
        assert!(peer.is_hung_up_on(), "it is connected still");
    });
    assert!(error.is_disconnected(), "{error:?}");
    text
}

fn staged(address: u64, len: u32) -> Vec<u8> {
    [&address.to_le_bytes()[..], &7u32.to_le_bytes(), &len.to_le_bytes()].concat()
}

fn offer(lane: u32) -> Vec<u8> {
    [lane, 0x00ab_cdef, 1].iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn messages_that_make_no_sense() {
    let nonsense = [
        message(99, &[]),
        vec![1, 0, 0],
        vec![0xff; 4096],
        message(CREDIT, b"more"),
        message(OFFER, &[1; 5]),
        message(LANE_UP, &[]),
        message(STAGED_BYTES, &[0; 15]),
    ];
    for message in nonsense {
        let text = answered(vec![message.clone()]);
        assert!(text.contains("malformed"), "{message:?}: {text}");
    }
}

fn things_that_were_not_agreed() {
    let mut read = message(CREDIT, &[]);
    read[4] = 5;
    let cases = [
        (vec![read], "reading more than was staged"),
        (vec![message(BYTES, b"GET / HTTP/1.0\r\n\r\n and more that is no greeting")], "engine"),
        (vec![message(PAYLOAD, b"some")], "payload"),
        (vec![message(SOURCE_GONE, &[])], "payload"),
        (vec![message(OFFER, &offer(7))], "out of turn"),
        (vec![message(LANE_UP, &77u32.to_le_bytes())], "has not offered"),
        (vec![message(CREDIT, &[])], "reports nothing"),
        (vec![message(STAGED_BYTES, &staged(4096, 1 << 20))], "more than was agreed"),
        (vec![message(STAGED_BYTES, &staged(4096, u32::MAX))], "more than was agreed"),
        (vec![message(STAGED_PAYLOAD, &staged(4096, 10)); 6], "more than was agreed"),
    ];
    for (messages, wanted) in cases {
        let text = answered(messages);
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

/// The device refuses it: the buffers for messages are 4096 bytes long. The peer learns of that first, and hangs up: which of the
/// two is reported depends on what comes before the other.
fn a_message_that_is_too_long() {
    let text = answered(vec![vec![1; 5000]]);
    let ends = ["device ended the connection", "it closed the connection"];
    assert!(ends.iter().any(|end| text.contains(end)), "{text}");
}

/// Sixteen may be sent before a credit comes back.
fn more_messages_than_there_is_room_for() {
    let (_, text) = called(|listener| {
        let mut peer = listener.accept(&hello(SPOKEN));
        // Harmless each, but for their number: no credit that comes back is waited for.
        let nothing = message(BYTES, &[]);
        let until = std::time::Instant::now() + BOUND / 4;
        while std::time::Instant::now() < until {
            let posted = (0..60).filter(|_| peer.post(&nothing)).count();
            if posted < 60 || !peer.arrived(posted) {
                return;
            }
        }
        panic!("thousands of messages, and it is not hung up on");
    });
    assert!(text.contains("more messages than it has credits for"), "{text}");
}

/// A violation costs the peer that commits it its connection, and no other peer, though they share queues.
fn others_are_not_affected() {
    let pair = Pair::new();
    let address = pair.server.address().to_string();
    let hang_ups = [
        vec![0xff; 4096],
        vec![1; 5000],
        message(OFFER, &offer(9)),
        message(PAYLOAD, b"some"),
        message(STAGED_BYTES, &staged(0, 0)),
    ];
    for said in &hang_ups {
        let pendings: Vec<_> = (0..16u32)
            .map(|n| pair.client.procedure::<(u32, u32), u32>("add").on(&pair.to_server).start(&(n, n)).unwrap())
            .collect();
        let mut peer = Raw::dial(&address, &hello(SPOKEN)).unwrap_or_else(|said| panic!("it is refused: {said:?}"));
        peer.send(said);
        (0u32..).zip(pendings).for_each(|(n, pending)| assert_eq!(pending.wait().unwrap(), 2 * n));
        assert!(pair.to_server.is_connected());
    }
    // One that says nothing at all, and takes nothing.
    let _silent = Raw::dial(&address, &hello(SPOKEN)).unwrap_or_else(|said| panic!("it is refused: {said:?}"));
    pair.assert_serves();
    // Many that go without a word.
    for _ in 0..40 {
        drop(Raw::dial(&address, &hello(SPOKEN)));
    }
    pair.assert_serves();
    pair.server.finalize().unwrap();
}

on_device!(
    another_version_is_refused_with_ours,
    who_is_no_engine_is_refused,
    a_call_to_another_version_names_both,
    a_call_to_no_engine_says_so,
    messages_that_make_no_sense,
    things_that_were_not_agreed,
    a_message_that_is_too_long,
    more_messages_than_there_is_room_for,
    others_are_not_affected,
);
