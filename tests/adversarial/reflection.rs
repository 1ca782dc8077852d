//! Reflection: peers without the key relay what an engine sends on one connection to another of its connections, unchanged and
//! message by message, in every combination. An engine that dials itself is a legitimate case.

use std::net::{SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Endpoint, Engine};

use crate::channel::{Channel, Listener, Piece, dial};
use crate::common::wire::{CHALLENGE, HELLO, PIECE_LEN, PROOF, REFUSAL, piece};
use crate::over_both;
use crate::scene::{Scene, report};
use crate::support::*;

const KEY: &str = "a key of more than sixteen bytes";

/// One of the victim's connections, and what the victim has sent on it.
struct End {
    channel: Box<dyn Channel>,
    received: Vec<u8>,
    passed: usize,
}

impl End {
    fn new(channel: Box<dyn Channel>) -> End {
        End { channel, received: Vec::new(), passed: 0 }
    }

    /// True if something had arrived.
    fn listen(&mut self) -> bool {
        let before = self.received.len();
        while let Some(Piece::Bytes(bytes) | Piece::Payload(bytes)) = self.channel.take() {
            self.received.extend(bytes);
        }
        self.received.len() > before
    }

    /// The kinds of the handshake messages, and whether anything follows them.
    fn kinds(&self) -> (Vec<u8>, bool) {
        let (mut rest, mut kinds) = (&self.received[..], Vec::new());
        while rest.len() >= PIECE_LEN && rest.starts_with(crate::common::wire::MAGIC) {
            kinds.push(rest[PIECE_LEN - 1]);
            let len = 16 + u32::from_le_bytes(rest[12..16].try_into().unwrap()) as usize;
            rest = rest.get(len..).unwrap_or_default();
        }
        (kinds, !rest.is_empty())
    }
}

/// Relays what is sent at either end to the other, until the victim has hung up at both.
#[track_caller]
fn relay(ends: &mut [End; 2]) {
    let begin = Instant::now();
    loop {
        let mut any = false;
        for from in [0, 1] {
            any |= ends[from].listen();
            let reply = ends[from].received[ends[from].passed..].to_vec();
            if !reply.is_empty() {
                ends[from].passed += reply.len();
                ends[1 - from].channel.put(&reply, BOUND);
            }
            let (kinds, more) = ends[from].kinds();
            assert!(!more, "a connection has opened: messages {kinds:?} and more");
        }
        if !any && ends.iter_mut().all(|end| end.channel.has_ended()) {
            return;
        }
        assert!(begin.elapsed() < patience() * BOUND, "the victim does not hang up: {:?}", ends.each_ref().map(End::kinds));
        if !any {
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Neither a proof nor a hello was sent to the side that dialled.
#[track_caller]
fn assert_no_proof(end: &End) {
    let (kinds, _) = end.kinds();
    assert!(kinds.iter().all(|kind| [CHALLENGE, REFUSAL].contains(kind)), "messages {kinds:?}");
}

/// Waits for this many handshake messages.
#[track_caller]
fn await_messages(end: &mut End, count: usize) {
    eventually("the victim sends its message", || {
        end.listen();
        end.kinds().0.len() >= count
    });
}

/// Has the victim dial the adversary.
fn dialled(scene: &Scene, listener: &Listener) -> End {
    scene.dial(&listener.address, 0);
    End::new(listener.accept())
}

fn relayed_handshake_of_one_engine_is_refused() {
    let _watchdog = Watchdog::start("reflection::relayed_handshake_of_one_engine_is_refused");
    let scene = Scene::with(Some(KEY));
    let begin = Instant::now();
    for closes in [false, true] {
        let listener = Listener::open();
        let mut ends = [dialled(&scene, &listener), End::new(dial(&scene.address))];
        if closes {
            // Up to the proof, which is shown after the connection that it was made for has ended.
            await_messages(&mut ends[0], 1);
            let challenge = ends[0].received.clone();
            ends[1].channel.put(&challenge, BOUND);
            await_messages(&mut ends[1], 1);
            let theirs = ends[1].received.clone();
            ends[0].channel.put(&theirs, BOUND);
            eventually("a proof, or no more", || ends[0].listen() || ends[0].channel.has_ended());
            ends[0].channel.break_off();
            let proof = ends[0].received[challenge.len()..].to_vec();
            ends[1].channel.put(&proof, BOUND);
            eventually("the victim hangs up", || !ends[1].listen() && ends[1].channel.has_ended());
        } else {
            relay(&mut ends);
        }
        assert_no_proof(&ends[1]);
        let received = [&ends[0].received[..], &ends[1].received].concat();
        drop((ends, listener));
        scene.assert_unharmed(&received);
    }
    report("reflection: a proof made for another connection", "the victim hangs up", begin);
    let begin = Instant::now();
    let mut ends = [(); 2].map(|()| End::new(dial(&scene.address)));
    ends[0].channel.put(&piece(CHALLENGE, &[7; 32]), BOUND);
    relay(&mut ends);
    ends.iter().for_each(assert_no_proof);
    drop(ends);
    let doors = [(); 2].map(|()| Listener::open());
    let mut ends = doors.each_ref().map(|listener| dialled(&scene, listener));
    relay(&mut ends);
    let received = [&ends[0].received[..], &ends[1].received].concat();
    drop((ends, doors));
    scene.assert_unharmed(&received);
    report("reflection: between two outgoing and two incoming connections", "the victim hangs up", begin);
}

fn keyed(address: &str) -> Engine {
    let engine = configured().pre_shared_key(KEY).listen(address).build().unwrap();
    define_add(&engine);
    engine
}

/// Relays between two engines of one process that have the same key.
fn relayed_handshake_between_two_engines_is_refused() {
    let _watchdog = Watchdog::start("reflection::relayed_handshake_between_two_engines_is_refused");
    let begin = Instant::now();
    let engines = [keyed(&anywhere()), keyed(&anywhere())];
    for roles in [[0, 1], [1, 0]] {
        let [first, second] = roles.map(|role| &engines[role]);
        let calls = |engine: &Engine, listener: &Listener| {
            let to = engine.lookup(&listener.address).unwrap();
            let pending = engine.procedure::<(u32, u32), u32>("add").on(&to).start(&(1, 2)).unwrap();
            (End::new(listener.accept()), pending)
        };
        // Each dials the adversary, which relays between them.
        let doors = [(); 2].map(|()| Listener::open());
        let [(one, first_call), (two, second_call)] = [calls(first, &doors[0]), calls(second, &doors[1])];
        relay(&mut [one, two]);
        first_call.wait().unwrap_err();
        second_call.wait().unwrap_err();
        // The adversary dials each.
        let mut ends = roles.map(|role| End::new(dial(&engines[role].address().to_string())));
        ends[0].channel.put(&piece(CHALLENGE, &[7; 32]), BOUND);
        relay(&mut ends);
        ends.iter().for_each(assert_no_proof);
        // A proof that the first engine made for one connection, on another connection to either engine.
        let listener = Listener::open();
        let (mut out, call) = calls(first, &listener);
        let mut far = End::new(dial(&second.address().to_string()));
        await_messages(&mut out, 1);
        let challenge = out.received.clone();
        far.channel.put(&challenge, BOUND);
        await_messages(&mut far, 1);
        out.channel.put(&far.received, BOUND);
        await_messages(&mut out, 3);
        assert_eq!(out.kinds(), (vec![CHALLENGE, PROOF, HELLO], false));
        for engine in [first, second] {
            let mut other = End::new(dial(&engine.address().to_string()));
            other.channel.put(&out.received, BOUND);
            eventually("the victim hangs up", || !other.listen() && other.channel.has_ended());
            assert_no_proof(&other);
        }
        drop((out, far, listener));
        call.wait().unwrap_err();
    }
    for (engine, other) in engines.iter().zip(engines.iter().rev()) {
        assert_serves(engine, &engine.lookup(other.address()).unwrap());
    }
    engines.iter().for_each(|engine| engine.finalize().unwrap());
    report("reflection: between two engines of a process", "both hang up", begin);
}

#[track_caller]
fn assert_reaches_itself(engine: &Engine, address: &str) {
    let to: Endpoint = engine.lookup(address).unwrap();
    assert_serves(engine, &to);
}

/// With a key and without: by its address, and, where it listens on every interface, by each of its addresses.
fn engine_that_calls_itself_is_served() {
    let _watchdog = Watchdog::start("reflection::engine_that_calls_itself_is_served");
    let begin = Instant::now();
    let engine = keyed(&anywhere());
    assert_reaches_itself(&engine, &engine.address().to_string());
    engine.finalize().unwrap();
    let engine = keyed("tcp://0.0.0.0:0");
    let port = engine.address().to_string().rsplit_once(':').unwrap().1.to_owned();
    assert_reaches_itself(&engine, &engine.address().to_string());
    assert_reaches_itself(&engine, &format!("tcp://127.0.0.1:{port}"));
    assert_reaches_itself(&engine, &format!("tcp://127.0.0.2:{port}"));
    // The address of another interface, if there is one; nothing is sent to find it.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    if let Ok(SocketAddr::V4(own)) = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr()) {
        assert_reaches_itself(&engine, &format!("tcp://{}:{port}", own.ip()));
    }
    engine.finalize().unwrap();
    report("reflection: an engine with a key that calls itself", "it is served", begin);
}

over_both!(
    relayed_handshake_of_one_engine_is_refused,
    relayed_handshake_between_two_engines_is_refused,
    engine_that_calls_itself_is_served
);
