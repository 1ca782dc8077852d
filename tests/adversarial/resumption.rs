//! Stolen resumption tokens: an engine sends its token when it reconnects, and without TLS a network observer can read it. With
//! a pre-shared key, the token is useless without the key. Without a key, its sender is taken for the engine that it was given
//! to, and for no other, as SECURITY.md documents.

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

/// A tcp proxy that records its connections, and can cut them.
#[derive(Clone, Default)]
struct Tap {
    address: String,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    /// The bytes of either side on the first connection, the dialling side's first.
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

    /// The handshake messages of one side, and the bytes that follow.
    fn handshake(&self, side: usize) -> (Vec<Vec<u8>>, Vec<u8>) {
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

    /// The resumption token that the dialling side got, in the first message.
    fn resumption_token(&self) -> u128 {
        let (_, frames) = self.handshake(1);
        let head = u32::from_le_bytes(frames[8..12].try_into().unwrap()) as usize & 0x7fff_ffff;
        match postcard::from_bytes(&frames[PREFIX_LEN..PREFIX_LEN + head]) {
            Ok(Message::Ticket { ticket }) => ticket,
            other => panic!("{other:?}"),
        }
    }
}

/// An engine that exchanges memory with the victim, over a recorded connection.
struct Owner {
    tap: Tap,
    engine: Engine,
    to: Endpoint,
    theirs: calomel::Exposed<Vec<u8>, calomel::ReadOnly>,
    /// The victim's number for a bulk of that memory.
    index: usize,
    bound: Bulk,
}

impl Owner {
    fn new(scene: &Scene, engine: Engine) -> Owner {
        let tap = Tap::to(&scene.address);
        let to = engine.lookup(&tap.address).unwrap();
        let theirs = engine.expose_read_only(full_of(HONEST)).unwrap();
        let keep = engine.procedure::<Bulk, (usize, Bulk)>("keep");
        let (index, bound) = keep.on(&to).call(&theirs.bulk()).unwrap();
        let owner = Owner { tap, engine, to, theirs, index, bound };
        owner.assert_served();
        owner
    }

    fn incarnation(&self) -> u64 {
        Range::of(0, &self.theirs.bulk()).owner
    }

    /// It can access what belongs to it.
    #[track_caller]
    fn assert_served(&self) {
        let mut bytes = vec![0u8; LEN];
        assert_eq!(self.bound.on(&self.to).pull_into(&mut bytes).unwrap(), LEN);
        assert!(bytes == full_of(BOUND_TO_ONE));
    }
}

/// A peer with the token and without the key gets no hello and nothing else, whether the engine is connected or not.
#[test]
fn stolen_resumption_token_without_the_key_is_refused() {
    const KEY: &str = "a third key of more than sixteen bytes";
    let _watchdog = Watchdog::start("resumption::stolen_resumption_token_without_the_key_is_refused");
    over(Carrier::Tcp, || {
        let scene = Scene::with(Some(KEY));
        let owner = Owner::new(&scene, configured().pre_shared_key(KEY).build().unwrap());
        let (ticket, notes) = (owner.tap.resumption_token(), scene.notes());
        let hello = || hello(owner.incarnation(), 64 << 20, &[], Some(ticket), false);
        let (recorded, _) = owner.tap.handshake(0);
        let challenge = || recorded.iter().find(|piece| piece[PIECE_LEN - 1] == CHALLENGE).unwrap().clone();
        let proof = || recorded.iter().find(|piece| piece[PIECE_LEN - 1] == PROOF).unwrap().clone();
        let pull = || Message::Pull(Range { offset: 0, len: 16, ..Range::of(1, &owner.bound) }).frame(&[]);
        let note = || Message::call(1, "note", 1).frame(&[1]);
        let cases: [(&str, Vec<Vec<u8>>); 6] = [
            ("at once", vec![hello(), pull(), note(), call_of_add(2)]),
            ("after a challenge", vec![piece(CHALLENGE, &[1; 32]), hello(), pull(), note()]),
            ("after the owner's challenge", vec![challenge(), hello(), pull(), note()]),
            ("after the owner's proof", vec![challenge(), proof(), hello(), pull(), note()]),
            ("after an invalid proof", vec![challenge(), piece(PROOF, &[9; 64]), hello(), pull(), note()]),
            ("the owner's recorded bytes", recorded.clone()),
        ];
        for away in [false, true] {
            if away {
                owner.tap.cut();
                eventually("the connection is lost", || !owner.to.is_connected());
            }
            for (name, pieces) in &cases {
                let begin = Instant::now();
                let mut impostor = Adversary::dial(&scene.address);
                impostor.bytes(&pieces.concat());
                impostor.assert_hung_up();
                assert_no_hello(&impostor.received);
                assert_eq!(owner.to.is_connected(), !away, "{name}");
                report(&format!("a stolen resumption token, without the key: {name}"), "the victim hangs up", begin);
            }
        }
        assert_eq!(scene.notes(), notes);
        owner.assert_served();
        owner.engine.finalize().unwrap();
        scene.assert_unharmed(&[]);
    });
}

/// Without a key, a peer with an engine's resumption token takes that engine's place: it can access that engine's memory, gets
/// the requests for it, and ends its connection. It gets nothing else, and is disconnected when the engine reconnects.
#[test]
fn stolen_resumption_token_without_any_key_impersonates_until_reconnect() {
    let _watchdog = Watchdog::start("resumption::where_there_is_no_key");
    over(Carrier::Tcp, || {
        let scene = Scene::new();
        let owner = Owner::new(&scene, client());
        let (ticket, incarnation) = (owner.tap.resumption_token(), owner.incarnation());
        for away in [false, true] {
            let begin = Instant::now();
            if away {
                owner.tap.cut();
                eventually("the connection is lost", || !owner.to.is_connected());
            }
            // The token is bound to the incarnation: with another incarnation, it is worthless.
            for (incarnation, ticket) in
                [(incarnation, ticket ^ 1), (rand::random(), ticket), (scene.honest_incarnation(), ticket)]
            {
                let mut other = claiming(&scene, incarnation, &[], Some(ticket));
                assert_no_other_peer(&mut other, &scene, &owner.bound);
                scene.assert_kept_to_itself(&other.received);
                assert_eq!(owner.to.is_connected(), !away);
            }
            let mut impostor = claiming(&scene, incarnation, &[], Some(ticket));
            eventually("the owner has lost its connection", || !owner.to.is_connected());
            // What the owner may read and write.
            let range = Range { offset: 0, len: 16, ..Range::of(900, &owner.bound) };
            assert_eq!(impostor.pull(range), Ok(BOUND_TO_ONE.to_vec()));
            impostor.tell(&Message::Push(Range { transfer: 901, len: 0, ..range }), &[]);
            impostor.expect("the end of a push", |m| matches!(m, Message::Done { transfer: 901, status: Status::Ok }));
            // Requests for the owner's memory go to the impostor.
            let take = scene.honest.procedure::<usize, Result<Vec<u8>, String>>("take kept").on(&scene.to);
            let taken = take.start(&owner.index).unwrap();
            let (asked, _) = impostor.expect("a pull", |m| matches!(m, Message::Pull(_)));
            let Message::Pull(asked) = asked else { unreachable!() };
            assert_eq!(asked.token, Range::of(0, &owner.theirs.bulk()).token);
            impostor.tell(&Message::Done { transfer: asked.transfer, status: Status::Revoked }, &[]);
            assert!(taken.wait().unwrap().is_err());
            // What belongs to other peers, it does not get.
            let others = Range { offset: 0, len: 16, ..Range::of(902, &scene.bound) };
            assert!(matches!(impostor.pull(others), Err(Status::AccessDenied(_))));
            for mark in [SECRET, WRITE_ONLY, GONE, HONEST] {
                assert!(
                    !impostor.received.windows(mark.len()).any(|bytes| bytes == mark),
                    "the impostor has read more than that"
                );
            }
            scene.assert_serves();
            scene.assert_bound_is_reached();
            // The owner reconnects as the same peer, and the impostor is disconnected.
            owner.assert_served();
            impostor.assert_hung_up();
            assert_eq!(take.call(&owner.index).unwrap(), Ok(full_of(HONEST)));
            report("a stolen resumption token, without any key", "the owner's place, until the owner reconnects", begin);
        }
        owner.engine.finalize().unwrap();
        scene.assert_unharmed(&[]);
    });
}
