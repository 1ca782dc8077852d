//! Identity spoofing: peers that claim to be another engine, the victim itself, or two at once.
//!
//! All the time the victim exchanges with the honest peer, by its endpoint and by the origin of its memory: if an adversary is
//! taken for it, that fails.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use calomel::{Bulk, Engine};

use crate::adversary::Adversary;
use crate::common::wire::{Message, Range, Status};
use crate::handshakes::hello;
use crate::over_both;
use crate::scene::{Scene, report};
use crate::support::*;
use crate::victim::{BOUND_TO_ONE, HONEST, LEN, full_of};

/// Dials with this identity, and has the victim start operations.
pub fn claiming(scene: &Scene, incarnation: u64, addresses: &[&str], ticket: Option<u128>) -> Adversary {
    let mut adversary = Adversary::dial(&scene.address);
    adversary.incarnation = incarnation;
    adversary.bytes(&hello(incarnation, 64 << 20, addresses, ticket, false));
    adversary
        .until("a resumption token", |adversary| adversary.messages.iter().any(|(m, _)| matches!(m, Message::Ticket { .. })));
    adversary
}

fn resumption_token_of(adversary: &Adversary) -> u128 {
    adversary.messages.iter().find_map(|(m, _)| if let Message::Ticket { ticket } = m { Some(*ticket) } else { None }).unwrap()
}

/// It is served as itself, and can't access what belongs to the peer that it claims to be.
#[track_caller]
pub fn assert_no_other_peer(adversary: &mut Adversary, scene: &Scene, bound: &Bulk) {
    let range = Range { offset: 0, len: 16, ..Range::of(900, bound) };
    assert!(matches!(adversary.pull(range), Err(Status::AccessDenied(_))), "it was taken for another peer");
    adversary.tell(&Message::Push(Range { transfer: 901, ..range }), &[]);
    adversary.expect("a refusal", |m| matches!(m, Message::Done { transfer: 901, status: Status::AccessDenied(_) }));
    let number = adversary.request("swallow", &vec![1u8; 10]);
    assert_eq!(adversary.answer(number), Ok(vec![10]));
    // The victim's operations with it go to no other peer, and the other way round. For memory with the victim's own
    // incarnation, the victim asks no peer.
    if adversary.incarnation != scene.incarnation() {
        adversary.engage();
    }
    assert_serves(&scene.honest, &scene.to);
    scene.assert_bound_is_reached();
}

fn claimed_identities_grant_nothing() {
    let _watchdog = Watchdog::start("identity::claimed_identities_grant_nothing");
    let scene = Scene::new();
    let (victim, honest) = (scene.incarnation(), scene.honest_incarnation());
    let (here, there) = (scene.address.clone(), scene.honest.address().to_string());
    let cases: [(&str, u64, Vec<&str>, Option<u128>); 10] = [
        ("another peer's incarnation", honest, vec![], None),
        ("another peer's address", rand::random(), vec![&there], None),
        ("another peer's incarnation and address", honest, vec![&there], None),
        ("another peer's incarnation, with resumption token 0", honest, vec![], Some(0)),
        ("another peer's incarnation, with the last resumption token", honest, vec![&there], Some(u128::MAX)),
        ("the victim's own incarnation", victim, vec![], None),
        ("the victim's own address", rand::random(), vec![&here], None),
        ("the victim's own incarnation and address", victim, vec![&here], None),
        ("all addresses", rand::random(), vec![&here, &there], None),
        ("no incarnation, and another peer's address", 0, vec![&there], Some(0)),
    ];
    for (name, incarnation, addresses, ticket) in &cases {
        let begin = Instant::now();
        let mut adversary = claiming(&scene, *incarnation, addresses, *ticket);
        assert_no_other_peer(&mut adversary, &scene, &scene.bound);
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        scene.assert_unharmed(&received);
        report(&format!("identity: {name}"), "a new peer", begin);
    }
    // Its own resumption token, once as itself and once as another peer.
    let begin = Instant::now();
    for claim in [None, Some(honest)] {
        let first = claiming(&scene, claim.unwrap_or_else(rand::random), &[], None);
        let ticket = resumption_token_of(&first);
        for still_there in [true, false] {
            let mut second = claiming(&scene, honest, &[&there], Some(ticket));
            assert_no_other_peer(&mut second, &scene, &scene.bound);
            if still_there {
                assert_serves(&scene.honest, &scene.to);
            }
        }
        drop(first);
        scene.assert_unharmed(&[]);
    }
    report("identity: its own resumption tokens, with another peer's incarnation", "a new peer", begin);
    // Two connections at once with the same identity, then with each other's tokens.
    let begin = Instant::now();
    for incarnation in [honest, victim, 77] {
        let mut two = [0, 1].map(|_| claiming(&scene, incarnation, &[&there], None));
        let resumption_tokens = [resumption_token_of(&two[0]), resumption_token_of(&two[1])];
        assert_ne!(resumption_tokens[0], resumption_tokens[1]);
        for adversary in &mut two {
            assert_no_other_peer(adversary, &scene, &scene.bound);
        }
        // With the other's resumption token it is taken for that one, whose connection counts as lost. No other peer is
        // affected.
        let mut third = claiming(&scene, incarnation, &[], Some(resumption_tokens[1]));
        assert_no_other_peer(&mut third, &scene, &scene.bound);
        drop((two, third));
        scene.assert_unharmed(&[]);
    }
    report("identity: two at once of the same incarnation", "two peers", begin);
}

/// A tcp proxy whose connections can be cut, without affecting others.
struct Cut {
    address: String,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cut {
    fn to(address: &str) -> Cut {
        let target = address.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, streams) = (format!("tcp://{}", listener.local_addr().unwrap()), Arc::<Mutex<Vec<TcpStream>>>::default());
        let kept = streams.clone();
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = TcpStream::connect(&target).unwrap();
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
                kept.lock().unwrap().extend([near, far]);
            }
        });
        Cut { address, streams }
    }

    fn now(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// An engine is disconnected for a moment; meanwhile the adversary claims to be it.
fn away(scene: &Scene, listens: bool) {
    let begin = Instant::now();
    let cut = Cut::to(&scene.address);
    let engine: Engine = if listens { server() } else { client() };
    let to = engine.lookup(&cut.address).unwrap();
    let theirs = engine.expose_read_only(full_of(HONEST)).unwrap();
    let keep = engine.procedure::<Bulk, (usize, Bulk)>("keep");
    let (index, bound) = keep.on(&to).call(&theirs.bulk()).unwrap();
    let take_kept =
        |engine: &Engine, to| engine.procedure::<usize, Result<Vec<u8>, String>>("take kept").on(to).call(&index).unwrap();
    assert_eq!(take_kept(&scene.honest, &scene.to), Ok(full_of(HONEST)));
    // The victim has noticed the disconnect.
    cut.now();
    eventually("the connection is lost", || !to.is_connected());
    let incarnation = Range::of(0, &theirs.bulk()).owner;
    let own = engine.addresses().first().map(ToString::to_string);
    let addresses: Vec<&str> = own.iter().map(String::as_str).collect();
    let mut adversaries: Vec<Adversary> = Vec::new();
    for claimed in [&[][..], &addresses] {
        let mut adversary = claiming(scene, incarnation, claimed, None);
        assert_no_other_peer(&mut adversary, scene, &bound);
        adversary.messages.clear();
        adversaries.push(adversary);
        // The victim pulls what the other engine exposes: it gets that, or nothing; the adversary does not see the request.
        match take_kept(&scene.honest, &scene.to) {
            Ok(bytes) => assert!(listens && bytes == full_of(HONEST)),
            Err(text) => assert!(!listens, "{text}"),
        }
        for adversary in &mut adversaries {
            adversary.assert_listens();
            assert!(
                !adversary.messages.iter().any(|(m, _)| matches!(m, Message::Pull(_))),
                "the adversary was asked for another peer's memory"
            );
        }
    }
    // After reconnecting, it is the same peer as before.
    let mut bytes = vec![0u8; LEN];
    assert_eq!(bound.on(&to).pull_into(&mut bytes).unwrap(), LEN);
    assert!(bytes == full_of(BOUND_TO_ONE));
    assert_eq!(take_kept(&scene.honest, &scene.to), Ok(full_of(HONEST)));
    drop(adversaries);
    engine.finalize().unwrap();
    scene.assert_unharmed(&[]);
    report(
        &format!("identity: a peer that {} is disconnected for a moment", if listens { "listens" } else { "does not listen" }),
        "no peer takes its place",
        begin,
    );
}

#[test]
fn disconnected_peer_can_not_be_impersonated() {
    let _watchdog = Watchdog::start("identity::disconnected_peer_can_not_be_impersonated");
    // Only a tcp connection can be cut from outside the engines.
    over(Carrier::Tcp, || {
        let scene = Scene::new();
        away(&scene, true);
        away(&scene, false);
    });
}

over_both!(claimed_identities_grant_nothing);
