//! Tickets that somebody in the network has read: an engine shows one to be known again, and without TLS it is sent in the clear.
//! With a pre-shared key it is worth nothing to those who have not the key. Without one it is what SECURITY.md says: whoever
//! shows it is taken for the engine that it was given to, and for no other.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use calomel::{Bulk, Endpoint, Engine};

use crate::adversary::Adversary;
use crate::common::wire::{CHALLENGE, HELLO, Message, PIECE_LEN, PREFIX_LEN, PROOF, Range, Status, piece};
use crate::handshakes::{assert_no_hello, hello};
use crate::identity::{assert_no_other_peer, claiming};
use crate::scene::{Scene, call_of_add, report};
use crate::support::*;
use crate::victim::{BOUND_TO_ONE, GONE, HONEST, LEN, SECRET, WRITE_ONLY, full_of};

/// Passes tcp connections on, and reads what is said there; can cut them.
#[derive(Clone, Default)]
struct Tap {
    address: String,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    /// What who dials says on the first connection, and what it is told.
    recorded: [Arc<Mutex<Vec<u8>>>; 2],
}

impl Tap {
    fn to(address: &str) -> Tap {
        let target = address.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tap = Tap { address: format!("tcp://{}", listener.local_addr().unwrap()), ..Tap::default() };
        let here = tap.clone();
        thread::spawn(move || {
            for (number, near) in listener.incoming().flatten().enumerate() {
                let far = TcpStream::connect(&target).unwrap();
                for ((from, to), recorded) in [(&near, &far), (&far, &near)].into_iter().zip(&here.recorded) {
                    let (mut from, mut to, recorded) = (from.try_clone().unwrap(), to.try_clone().unwrap(), recorded.clone());
                    thread::spawn(move || {
                        let mut buffer = vec![0; 64 << 10];
                        while let Ok(n @ 1..) = from.read(&mut buffer) {
                            if number == 0 {
                                recorded.lock().unwrap().extend_from_slice(&buffer[..n]);
                            }
                            if to.write_all(&buffer[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
                here.streams.lock().unwrap().extend([near, far]);
            }
        });
        tap
    }

    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// The pieces of the greeting of one side, and what follows.
    fn greeting(&self, side: usize) -> (Vec<Vec<u8>>, Vec<u8>) {
        let (mut rest, mut pieces) = (self.recorded[side].lock().unwrap().clone(), Vec::new());
        loop {
            let tail = rest.split_off(16 + u32::from_le_bytes(rest[12..16].try_into().unwrap()) as usize);
            let kind = rest[PIECE_LEN - 1];
            pieces.push(std::mem::replace(&mut rest, tail));
            if kind == HELLO {
                return (pieces, rest);
            }
        }
    }

    /// The ticket that who dials has been given: the first message.
    fn ticket(&self) -> u128 {
        let (_, frames) = self.greeting(1);
        let head = u32::from_le_bytes(frames[8..12].try_into().unwrap()) as usize & 0x7fff_ffff;
        match postcard::from_bytes(&frames[PREFIX_LEN..PREFIX_LEN + head]) {
            Ok(Message::Ticket { ticket }) => ticket,
            other => panic!("{other:?}"),
        }
    }
}

/// An engine that the victim has memory for, whose words somebody reads.
struct Robbed {
    tap: Tap,
    engine: Engine,
    to: Endpoint,
    theirs: calomel::Exposed<Vec<u8>, calomel::ReadOnly>,
    /// Under which number the victim keeps a bulk of that.
    index: usize,
    bound: Bulk,
}

impl Robbed {
    fn new(scene: &Scene, engine: Engine) -> Robbed {
        let tap = Tap::to(&scene.address);
        let to = engine.lookup(&tap.address).unwrap();
        let theirs = engine.expose_read_only(full_of(HONEST)).unwrap();
        let keep = engine.procedure::<Bulk, (usize, Bulk)>("keep");
        let (index, bound) = keep.on(&to).call(&theirs.bulk()).unwrap();
        let robbed = Robbed { tap, engine, to, theirs, index, bound };
        robbed.assert_served();
        robbed
    }

    fn incarnation(&self) -> u64 {
        Range::of(0, &self.theirs.bulk()).owner
    }

    /// It reaches what is for it.
    #[track_caller]
    fn assert_served(&self) {
        let mut bytes = vec![0u8; LEN];
        assert_eq!(self.bound.on(&self.to).pull_into(&mut bytes).unwrap(), LEN);
        assert!(bytes == full_of(BOUND_TO_ONE));
    }
}

/// Whoever has read the ticket, and has not the key, gets no hello and nothing else, whether the engine is there or away.
#[test]
fn a_stolen_ticket_is_worth_nothing_without_the_key() {
    const KEY: &str = "a third key of more than sixteen bytes";
    let _watchdog = Watchdog::start("resumption::a_stolen_ticket_is_worth_nothing_without_the_key");
    over(Carrier::Tcp, || {
        let scene = Scene::with(Some(KEY));
        let robbed = Robbed::new(&scene, configured().pre_shared_key(KEY).build().unwrap());
        let (ticket, notes) = (robbed.tap.ticket(), scene.notes());
        let hello = || hello(robbed.incarnation(), 64 << 20, &[], Some(ticket), false);
        let (recorded, _) = robbed.tap.greeting(0);
        let challenge = || recorded.iter().find(|piece| piece[PIECE_LEN - 1] == CHALLENGE).unwrap().clone();
        let proof = || recorded.iter().find(|piece| piece[PIECE_LEN - 1] == PROOF).unwrap().clone();
        let pull = || Message::Pull(Range { offset: 0, len: 16, ..Range::of(1, &robbed.bound) }).frame(&[]);
        let note = || Message::call(1, "note", 1).frame(&[1]);
        let cases: [(&str, Vec<Vec<u8>>); 6] = [
            ("at once", vec![hello(), pull(), note(), call_of_add(2)]),
            ("after a challenge", vec![piece(CHALLENGE, &[1; 32]), hello(), pull(), note()]),
            ("after its owner's challenge", vec![challenge(), hello(), pull(), note()]),
            ("after its owner's proof", vec![challenge(), proof(), hello(), pull(), note()]),
            ("after a proof of nothing", vec![challenge(), piece(PROOF, &[9; 64]), hello(), pull(), note()]),
            ("in its owner's own words", recorded.clone()),
        ];
        for away in [false, true] {
            if away {
                robbed.tap.cut();
                eventually("the connection is lost", || !robbed.to.is_connected());
            }
            for (name, pieces) in &cases {
                let begin = Instant::now();
                let mut thief = Adversary::dial(&scene.address);
                thief.bytes(&pieces.concat());
                thief.assert_hung_up();
                assert_no_hello(&thief.received);
                assert_eq!(robbed.to.is_connected(), !away, "{name}");
                report(&format!("a stolen ticket, without the key: {name}"), "the victim hangs up", begin);
            }
        }
        assert_eq!(scene.notes(), notes);
        robbed.assert_served();
        robbed.engine.finalize().unwrap();
        scene.assert_unharmed(&[]);
    });
}

/// Without a key, whoever has read an engine's ticket takes its place: it reaches what is for that engine, and is asked for what
/// that engine has; its connection ends. It reaches nothing else, and is pushed aside when the engine comes back.
#[test]
fn where_there_is_no_key_a_stolen_ticket_lets_one_in_as_its_owner_until_that_comes_back() {
    let _watchdog = Watchdog::start("resumption::where_there_is_no_key");
    over(Carrier::Tcp, || {
        let scene = Scene::new();
        let robbed = Robbed::new(&scene, client());
        let (ticket, incarnation) = (robbed.tap.ticket(), robbed.incarnation());
        for away in [false, true] {
            let begin = Instant::now();
            if away {
                robbed.tap.cut();
                eventually("the connection is lost", || !robbed.to.is_connected());
            }
            // The ticket is the incarnation's: with another one, or as another, it is nothing.
            for (incarnation, ticket) in
                [(incarnation, ticket ^ 1), (rand::random(), ticket), (scene.honest_incarnation(), ticket)]
            {
                let mut other = claiming(&scene, incarnation, &[], Some(ticket));
                assert_no_other_peer(&mut other, &scene, &robbed.bound);
                scene.assert_kept_to_itself(&other.received);
                assert_eq!(robbed.to.is_connected(), !away);
            }
            let mut thief = claiming(&scene, incarnation, &[], Some(ticket));
            eventually("its owner has lost its connection", || !robbed.to.is_connected());
            // What is for its owner, to read and to write.
            let range = Range { offset: 0, len: 16, ..Range::of(900, &robbed.bound) };
            assert_eq!(thief.pull(range), Ok(BOUND_TO_ONE.to_vec()));
            thief.tell(&Message::Push(Range { transfer: 901, len: 0, ..range }), &[]);
            thief.expect("the end of a push", |m| matches!(m, Message::Done { transfer: 901, status: Status::Ok }));
            // What its owner exposes: it is asked for that.
            let take = scene.honest.procedure::<usize, Result<Vec<u8>, String>>("take kept").on(&scene.to);
            let taken = take.start(&robbed.index).unwrap();
            let (asked, _) = thief.expect("a pull", |m| matches!(m, Message::Pull(_)));
            let Message::Pull(asked) = asked else { unreachable!() };
            assert_eq!(asked.token, Range::of(0, &robbed.theirs.bulk()).token);
            thief.tell(&Message::Done { transfer: asked.transfer, status: Status::Revoked }, &[]);
            assert!(taken.wait().unwrap().is_err());
            // What is for others, it does not get.
            let others = Range { offset: 0, len: 16, ..Range::of(902, &scene.bound) };
            assert!(matches!(thief.pull(others), Err(Status::AccessDenied(_))));
            for mark in [SECRET, WRITE_ONLY, GONE, HONEST] {
                assert!(!thief.received.windows(mark.len()).any(|bytes| bytes == mark), "the thief has read more than that");
            }
            scene.assert_serves();
            scene.assert_bound_is_reached();
            // Its owner comes back, is who it was, and the thief is out.
            robbed.assert_served();
            thief.assert_hung_up();
            assert_eq!(take.call(&robbed.index).unwrap(), Ok(full_of(HONEST)));
            report("a stolen ticket, without any key", "its owner's place, until that comes back", begin);
        }
        robbed.engine.finalize().unwrap();
        scene.assert_unharmed(&[]);
    });
}
