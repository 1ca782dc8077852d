//! Strangers that have no key, and pass what an engine says on one of its connections to another of its connections: as it is,
//! piece by piece, between any two of them. An engine that dials itself is no such stranger.

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

/// One of the victim's connections, and what the victim has said there.
struct End {
    channel: Box<dyn Channel>,
    received: Vec<u8>,
    passed: usize,
}

impl End {
    fn new(channel: Box<dyn Channel>) -> End {
        End { channel, received: Vec::new(), passed: 0 }
    }

    /// True if there was something.
    fn listen(&mut self) -> bool {
        let before = self.received.len();
        while let Some(Piece::Bytes(bytes) | Piece::Payload(bytes)) = self.channel.take() {
            self.received.extend(bytes);
        }
        self.received.len() > before
    }

    /// The kinds of the pieces, and whether anything but pieces follows.
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

/// Passes on what is said at either end to the other, until the victim has hung up at both.
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
            assert!(!more, "a connection has opened: pieces {kinds:?} and more");
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

/// Neither a proof nor a hello has been said to somebody who has dialled.
#[track_caller]
fn assert_no_proof(end: &End) {
    let (kinds, _) = end.kinds();
    assert!(kinds.iter().all(|kind| [CHALLENGE, REFUSAL].contains(kind)), "pieces {kinds:?}");
}

/// Waits for so many pieces.
#[track_caller]
fn hear(end: &mut End, count: usize) {
    eventually("the victim says its piece", || {
        end.listen();
        end.kinds().0.len() >= count
    });
}

/// Has the victim dial the stranger.
fn dialled(scene: &Scene, listener: &Listener) -> End {
    scene.dial(&listener.address, 0);
    End::new(listener.accept())
}

fn of_one_engine() {
    let _watchdog = Watchdog::start("reflection::of_one_engine");
    let scene = Scene::with(Some(KEY));
    let begin = Instant::now();
    for closes in [false, true] {
        let listener = Listener::open();
        let mut ends = [dialled(&scene, &listener), End::new(dial(&scene.address))];
        if closes {
            // As far as a proof gets; and it is shown when the connection that it was made on is gone.
            hear(&mut ends[0], 1);
            let challenge = ends[0].received.clone();
            ends[1].channel.put(&challenge, BOUND);
            hear(&mut ends[1], 1);
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
    report("reflection: a proof for a stranger, at the own door", "the victim hangs up", begin);
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
    report("reflection: between two that the victim has dialled, and two that have dialled it", "the victim hangs up", begin);
}

fn keyed(address: &str) -> Engine {
    let engine = configured().pre_shared_key(KEY).listen(address).build().unwrap();
    define_add(&engine);
    engine
}

/// What is said to one engine, in the process of another that has the same key.
fn of_two_engines_of_a_process() {
    let _watchdog = Watchdog::start("reflection::of_two_engines_of_a_process");
    let begin = Instant::now();
    let engines = [keyed(&anywhere()), keyed(&anywhere())];
    for roles in [[0, 1], [1, 0]] {
        let [first, second] = roles.map(|role| &engines[role]);
        let calls = |engine: &Engine, listener: &Listener| {
            let to = engine.lookup(&listener.address).unwrap();
            let pending = engine.procedure::<(u32, u32), u32>("add").on(&to).start(&(1, 2)).unwrap();
            (End::new(listener.accept()), pending)
        };
        // Each dials the stranger, which passes what one says to the other.
        let doors = [(); 2].map(|()| Listener::open());
        let [(one, first_call), (two, second_call)] = [calls(first, &doors[0]), calls(second, &doors[1])];
        relay(&mut [one, two]);
        first_call.wait().unwrap_err();
        second_call.wait().unwrap_err();
        // The stranger dials each.
        let mut ends = roles.map(|role| End::new(dial(&engines[role].address().to_string())));
        ends[0].channel.put(&piece(CHALLENGE, &[7; 32]), BOUND);
        relay(&mut ends);
        ends.iter().for_each(assert_no_proof);
        // A proof that the first has made for a conversation with the second, in another conversation with either.
        let listener = Listener::open();
        let (mut out, call) = calls(first, &listener);
        let mut far = End::new(dial(&second.address().to_string()));
        hear(&mut out, 1);
        let challenge = out.received.clone();
        far.channel.put(&challenge, BOUND);
        hear(&mut far, 1);
        out.channel.put(&far.received, BOUND);
        hear(&mut out, 3);
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
fn an_engine_calls_itself() {
    let _watchdog = Watchdog::start("reflection::an_engine_calls_itself");
    let begin = Instant::now();
    let engine = keyed(&anywhere());
    assert_reaches_itself(&engine, &engine.address().to_string());
    engine.finalize().unwrap();
    let engine = keyed("tcp://0.0.0.0:0");
    let port = engine.address().to_string().rsplit_once(':').unwrap().1.to_owned();
    assert_reaches_itself(&engine, &engine.address().to_string());
    assert_reaches_itself(&engine, &format!("tcp://127.0.0.1:{port}"));
    assert_reaches_itself(&engine, &format!("tcp://127.0.0.2:{port}"));
    // The address of an interface, where there is one besides: nothing is sent to find it.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    if let Ok(SocketAddr::V4(own)) = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr()) {
        assert_reaches_itself(&engine, &format!("tcp://{}:{port}", own.ip()));
    }
    engine.finalize().unwrap();
    report("reflection: an engine with a key that calls itself", "it is served", begin);
}

over_both!(of_one_engine, of_two_engines_of_a_process, an_engine_calls_itself);
