//! Who somebody says to be: another engine, the victim itself, two at once.
//!
//! All the time the victim deals with the honest peer, by its endpoint and by the origin of its memory: where a liar is taken for
//! it, that fails.

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

/// Dials as somebody else; and has the victim ask for things.
pub fn claiming(scene: &Scene, incarnation: u64, addresses: &[&str], ticket: Option<u128>) -> Adversary {
    let mut adversary = Adversary::dial(&scene.address);
    adversary.incarnation = incarnation;
    adversary.bytes(&hello(incarnation, 64 << 20, addresses, ticket, false));
    adversary.until("a ticket", |adversary| adversary.messages.iter().any(|(m, _)| matches!(m, Message::Ticket { .. })));
    adversary
}

fn ticket_of(adversary: &Adversary) -> u128 {
    adversary.messages.iter().find_map(|(m, _)| if let Message::Ticket { ticket } = m { Some(*ticket) } else { None }).unwrap()
}

/// It is served as what it is, and reaches nothing that is for the one that it claims to be.
#[track_caller]
pub fn assert_no_other_peer(adversary: &mut Adversary, scene: &Scene, bound: &Bulk) {
    let range = Range { offset: 0, len: 16, ..Range::of(900, bound) };
    assert!(matches!(adversary.pull(range), Err(Status::AccessDenied(_))), "it was taken for another");
    adversary.tell(&Message::Push(Range { transfer: 901, ..range }), &[]);
    adversary.expect("a refusal", |m| matches!(m, Message::Done { transfer: 901, status: Status::AccessDenied(_) }));
    let number = adversary.request("swallow", &vec![1u8; 10]);
    assert_eq!(adversary.answer(number), Ok(vec![10]));
    // What the victim asks it for is not asked of another, and the other way round. What is the victim's own, by its incarnation,
    // it asks no peer for.
    if adversary.incarnation != scene.incarnation() {
        adversary.engage();
    }
    assert_serves(&scene.honest, &scene.to);
    scene.assert_bound_is_reached();
}

fn claims() {
    let _watchdog = Watchdog::start("identity::claims");
    let scene = Scene::new();
    let (victim, honest) = (scene.incarnation(), scene.honest_incarnation());
    let (here, there) = (scene.address.clone(), scene.honest.address().to_string());
    let cases: [(&str, u64, Vec<&str>, Option<u128>); 10] = [
        ("another's incarnation", honest, vec![], None),
        ("another's address", rand::random(), vec![&there], None),
        ("another's incarnation and address", honest, vec![&there], None),
        ("another's incarnation, with the ticket 0", honest, vec![], Some(0)),
        ("another's incarnation, with the last ticket", honest, vec![&there], Some(u128::MAX)),
        ("the victim's own incarnation", victim, vec![], None),
        ("the victim's own address", rand::random(), vec![&here], None),
        ("the victim's own incarnation and address", victim, vec![&here], None),
        ("everybody's address", rand::random(), vec![&here, &there], None),
        ("no incarnation, and another's address", 0, vec![&there], Some(0)),
    ];
    for (name, incarnation, addresses, ticket) in &cases {
        let begin = Instant::now();
        let mut adversary = claiming(&scene, *incarnation, addresses, *ticket);
        assert_no_other_peer(&mut adversary, &scene, &scene.bound);
        let received = std::mem::take(&mut adversary.received);
        drop(adversary);
        scene.assert_unharmed(&received);
        report(&format!("identity: {name}"), "somebody new", begin);
    }
    // The ticket that it was given itself, once as itself and once as another.
    let begin = Instant::now();
    for claim in [None, Some(honest)] {
        let first = claiming(&scene, claim.unwrap_or_else(rand::random), &[], None);
        let ticket = ticket_of(&first);
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
    report("identity: tickets of its own, with another's incarnation", "somebody new", begin);
    // Two at once, who are the same, and each other.
    let begin = Instant::now();
    for incarnation in [honest, victim, 77] {
        let mut two = [0, 1].map(|_| claiming(&scene, incarnation, &[&there], None));
        let tickets = [ticket_of(&two[0]), ticket_of(&two[1])];
        assert_ne!(tickets[0], tickets[1]);
        for adversary in &mut two {
            assert_no_other_peer(adversary, &scene, &scene.bound);
        }
        // Each other's ticket: it is that one's, and that one is thought to have lost its connection. Nobody else is.
        let mut third = claiming(&scene, incarnation, &[], Some(tickets[1]));
        assert_no_other_peer(&mut third, &scene, &scene.bound);
        drop((two, third));
        scene.assert_unharmed(&[]);
    }
    report("identity: two at once of the same incarnation", "two peers", begin);
}

/// A tcp connection through here can be cut, and nobody else's is.
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

/// An engine that is away for a moment: meanwhile somebody claims to be it.
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
    // It is gone, as far as the victim knows.
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
        // The victim wants what the other exposes: it gets that, or nothing; and the liar is not even told what it wants.
        match take_kept(&scene.honest, &scene.to) {
            Ok(bytes) => assert!(listens && bytes == full_of(HONEST)),
            Err(text) => assert!(!listens, "{text}"),
        }
        for adversary in &mut adversaries {
            adversary.assert_listens();
            assert!(
                !adversary.messages.iter().any(|(m, _)| matches!(m, Message::Pull(_))),
                "the liar was asked for another's memory"
            );
        }
    }
    // Back again, it is who it was.
    let mut bytes = vec![0u8; LEN];
    assert_eq!(bound.on(&to).pull_into(&mut bytes).unwrap(), LEN);
    assert!(bytes == full_of(BOUND_TO_ONE));
    assert_eq!(take_kept(&scene.honest, &scene.to), Ok(full_of(HONEST)));
    drop(adversaries);
    engine.finalize().unwrap();
    scene.assert_unharmed(&[]);
    report(
        &format!("identity: one who {} is away for a moment", if listens { "listens" } else { "does not listen" }),
        "nobody takes its place",
        begin,
    );
}

#[test]
fn nobody_takes_the_place_of_one_who_is_away() {
    let _watchdog = Watchdog::start("identity::nobody_takes_the_place_of_one_who_is_away");
    // Only a tcp connection is cut without either engine's doing.
    over(Carrier::Tcp, || {
        let scene = Scene::new();
        away(&scene, true);
        away(&scene, false);
    });
}

over_both!(claims);
