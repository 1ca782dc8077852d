//! Liars that claim to be the engine that memory is exposed to. Host 0 owns the memory, host 1 is the engine that it is for.

use std::time::Duration;

use super::env::Mem;
use super::host::TestOutcome;
use super::net::{Net, call};
use super::raw::{Raw, hello};
use super::wire::{self, Hello, Message, Range};
use super::{AccessPolicy, Mode, PeerId, Remote, Status};

const TOKEN: u128 = 0xfeed;
const SECOND: Duration = Duration::from_secs(1);

/// The two have met, and the memory is for host 1.
fn scene() -> (Net, Mem, PeerId) {
    let mut net = Net::new(2);
    net.echo_everywhere();
    let op = net.call(1, 0, call("hello"));
    net.settle();
    assert_eq!(net.hosts[1].body(op).len(), 5);
    let chosen = net.hosts[0].proto.lookup_incarnation(net.hosts[1].incarnation).expect("they have met");
    // The owner holds an endpoint of it, so that it is not forgotten.
    net.hosts[0].tags.insert("tcp://10.0.0.2:7000".parse().unwrap(), chosen.clone());
    let terms = AccessPolicy { only: Some(chosen.id), ..AccessPolicy::default() };
    let memory = net.expose_on_terms(0, TOKEN, vec![1; 100], Mode { read: true, write: true }, terms);
    (net, memory, chosen.id)
}

/// Somebody who says to be the engine of this incarnation, and shows this ticket.
fn claim(net: &mut Net, incarnation: u64, ticket: Option<u128>) -> Raw {
    let raw = net.raw_dial(0);
    let hello = Hello { resumption_token: ticket, addresses: vec!["tcp://10.0.0.2:7000".parse().unwrap()], ..hello(incarnation) };
    net.say_bytes(raw, super::raw::greet(wire::VERSIONS, &hello));
    net.advance(SECOND / 100);
    raw
}

/// The ticket that the owner gave on a connection.
fn ticket(net: &Net, raw: Raw) -> Option<u128> {
    let mut ticket = None;
    net.each_heard(raw, |message| {
        if let Message::ResumptionToken { token: given } = message {
            ticket = Some(*given);
        }
    });
    assert!(ticket.is_some());
    ticket
}

/// Neither reads nor writes.
#[track_caller]
fn gets_nothing(net: &mut Net, raw: Raw) {
    let range = |transfer| Range { transfer, owner: net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len: 100 };
    let (pull, push) = (Message::Pull(range(1)), Message::Push(range(2)));
    net.say(raw, &pull, b"");
    net.say(raw, &push, b"");
    let mut told = Vec::new();
    net.each_heard(raw, |message| match message {
        Message::Done { transfer, status: Status::AccessDenied(reason) } => {
            assert_eq!(reason, "the memory is exposed to another peer");
            told.push(*transfer);
        }
        Message::Done { .. } | Message::Data { .. } => panic!("{message:?}"),
        _ => {}
    });
    assert_eq!(told, [1, 2]);
}

/// The engine that it is for still gets it.
fn is_still_let_in(net: &mut Net) {
    let before = net.hosts[1].proto.lookup_incarnation(net.hosts[0].incarnation).expect("they have met");
    let remote = Remote { peer: before.id, owner: net.hosts[0].incarnation, token: TOKEN, offset: 0, keys: None };
    let near = Mem::new(vec![0; 100]);
    let op = net.transfer_to(1, true, remote, &near, 9 * SECOND);
    net.advance(SECOND);
    assert!(matches!(net.hosts[1].outcome(op), Some(TestOutcome::Moved(100))), "{:?}", net.hosts[1].outcome(op));
}

#[test]
fn claiming_to_be_somebody_is_not_being_it() {
    let (mut net, memory, chosen) = scene();
    let theirs = net.hosts[1].incarnation;
    let genuine = net.hosts[0].proto.peers[chosen].given_token.expect("they have met");
    let mut liars = Vec::new();
    // While the other is connected, and while it is away; two connections at a time, as an engine might have.
    for away in [false, true] {
        if away {
            let wire = net.wire(1, 0);
            net.cut(wire);
        }
        let first = claim(&mut net, theirs, None);
        let second = claim(&mut net, theirs, Some(0));
        // A ticket that it was given as who it claims to be, and one that it was given as itself.
        let own = claim(&mut net, 0xbad, None);
        let (as_them, as_itself) = (ticket(&net, first), ticket(&net, own));
        assert!(as_them != Some(genuine) && as_itself != Some(genuine));
        let third = claim(&mut net, theirs, as_itself);
        // The ticket of the other, shown by somebody who does not even claim to be the other.
        let fourth = claim(&mut net, 0xbad + 1, Some(genuine));
        for raw in [first, second, own, third, fourth] {
            gets_nothing(&mut net, raw);
        }
        // It comes back with what it was given.
        net.hang_up(first);
        let back = claim(&mut net, theirs, as_them);
        gets_nothing(&mut net, back);
        liars.extend([second, own, third, fourth, back]);
    }
    assert_eq!(memory.bytes(), [1; 100]);
    assert_eq!(net.hosts[0].proto.refusals().other_peer, 2 * 2 * 6);
    // All the liars together don't keep the other from its memory, though they were there first.
    is_still_let_in(&mut net);
    liars.into_iter().for_each(|raw| net.hang_up(raw));
    is_still_let_in(&mut net);
    net.revoke(0, TOKEN);
    net.end();
}

/// The owner dials the address of the other, and a liar answers there, who knows the incarnation.
#[test]
fn at_its_address_somebody_else() {
    let (mut net, memory, _) = scene();
    let theirs = net.hosts[1].incarnation;
    let wire = net.wire(1, 0);
    net.cut(wire);
    // It is who should be there, as far as addresses go; but not the engine that was met.
    net.restart(1, true);
    net.hosts[1].echo = true;
    net.settle();
    let op = net.call(0, 1, call("who is there"));
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 12);
    assert_ne!(net.hosts[1].incarnation, theirs);
    let raw = claim(&mut net, theirs, None);
    gets_nothing(&mut net, raw);
    net.hang_up(raw);
    assert_eq!(memory.bytes(), [1; 100]);
    net.revoke(0, TOKEN);
    net.end();
}

/// As above, and whoever answers there says the incarnation of the engine that was met, which is no secret.
#[test]
fn at_its_address_somebody_who_claims_to_be_it() {
    for genuine in [false, true] {
        let mut net = Net::new(1);
        let peer = net.played_peer(0);
        let greet = |net: &mut Net, ticket| {
            net.call_peer(0, peer, call("meet"));
            net.advance(SECOND / 100);
            let raw = net.raw_dialled();
            let hello = Hello { resumption_token: ticket, ..hello(77) };
            net.say_bytes(raw, super::raw::greet(wire::VERSIONS, &hello));
            raw
        };
        let met = greet(&mut net, None);
        let given = ticket(&net, met);
        let terms = AccessPolicy { only: Some(peer), ..AccessPolicy::default() };
        let memory = net.expose_on_terms(0, TOKEN, vec![1; 100], Mode { read: true, write: true }, terms);
        net.hang_up(met);
        let again = greet(&mut net, if genuine { given } else { Some(1) });
        assert_ne!(again.wire, met.wire);
        if genuine {
            let range = Range { transfer: 1, owner: net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len: 100 };
            net.say(again, &Message::Pull(range), b"");
            let mut sent = 0;
            net.each_heard(again, |message| sent += if let Message::Data { len, .. } = message { *len } else { 0 });
            assert_eq!(sent, 100);
        } else {
            gets_nothing(&mut net, again);
        }
        assert_eq!(memory.bytes(), [1; 100]);
        net.hang_up(again);
        net.revoke(0, TOKEN);
        net.end();
    }
}

/// The owner dials the engine that it met again, and that is still the one that the memory is for.
#[test]
fn the_owner_dials_it_again() {
    let (mut net, memory, chosen) = scene();
    let wire = net.wire(1, 0);
    net.cut(wire);
    let op = net.call_peer(0, chosen, call("are you there"));
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 13);
    is_still_let_in(&mut net);
    assert_eq!(memory.bytes(), [1; 100]);
    net.revoke(0, TOKEN);
    net.end();
}
