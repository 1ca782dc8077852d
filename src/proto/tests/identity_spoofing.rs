//! Adversaries that claim the identity of the engine that memory is exposed to. Host 0 owns the memory, which is for host 1.

use std::time::Duration;

use super::env::Mem;
use super::host::TestOutcome;
use super::net::{Net, call};
use super::raw::{Raw, hello};
use super::wire::{self, Hello, Message, Range};
use super::{AccessPolicy, Mode, PeerId, Remote, Status};

const TOKEN: u128 = 0xfeed;
const SECOND: Duration = Duration::from_secs(1);

/// The two hosts are connected, and the memory is for host 1.
fn scene() -> (Net, Mem, PeerId) {
    let mut net = Net::new(2);
    net.echo_everywhere();
    let op = net.call(1, 0, call("hello"));
    net.settle();
    assert_eq!(net.hosts[1].body(op).len(), 5);
    let chosen = net.hosts[0].proto.lookup_incarnation(net.hosts[1].incarnation).expect("the hosts are connected");
    // The owner holds an endpoint of host 1, so that it is not forgotten.
    net.hosts[0].tags.insert("tcp://10.0.0.2:7000".parse().unwrap(), chosen.clone());
    let policy = AccessPolicy { only: Some(chosen.id), ..AccessPolicy::default() };
    let memory = net.expose_with_policy(0, TOKEN, vec![1; 100], Mode { read: true, write: true }, policy);
    (net, memory, chosen.id)
}

/// Connects an adversary that claims this incarnation, with this resumption token.
fn claim(net: &mut Net, incarnation: u64, token: Option<u128>) -> Raw {
    let raw = net.raw_dial(0);
    let hello = Hello { resumption_token: token, addresses: vec!["tcp://10.0.0.2:7000".parse().unwrap()], ..hello(incarnation) };
    net.send_bytes(raw, super::raw::encode_hello(wire::VERSIONS, &hello));
    net.advance(SECOND / 100);
    raw
}

/// The resumption token that the owner issued on a connection.
fn token(net: &Net, raw: Raw) -> Option<u128> {
    let mut token = None;
    net.for_each_received(raw, |message| {
        if let Message::ResumptionToken { token: issued } = message {
            token = Some(*issued);
        }
    });
    assert!(token.is_some());
    token
}

/// Asserts that both pull and push are denied.
#[track_caller]
fn assert_denied(net: &mut Net, raw: Raw) {
    let range = |transfer| Range { transfer, owner: net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len: 100 };
    let (pull, push) = (Message::Pull(range(1)), Message::Push(range(2)));
    net.send_message(raw, &pull, b"");
    net.send_message(raw, &push, b"");
    let mut denied = Vec::new();
    net.for_each_received(raw, |message| match message {
        Message::Done { transfer, status: Status::AccessDenied(reason) } => {
            assert_eq!(reason, "the memory is exposed to another peer");
            denied.push(*transfer);
        }
        Message::Done { .. } | Message::Data { .. } => panic!("{message:?}"),
        _ => {}
    });
    assert_eq!(denied, [1, 2]);
}

/// Asserts that the engine that the memory is for can pull it.
fn assert_still_allowed(net: &mut Net) {
    let before = net.hosts[1].proto.lookup_incarnation(net.hosts[0].incarnation).expect("the hosts are connected");
    let remote = Remote { peer: before.id, owner: net.hosts[0].incarnation, token: TOKEN, offset: 0, keys: None };
    let near = Mem::new(vec![0; 100]);
    let op = net.transfer_to(1, true, remote, &near, 9 * SECOND);
    net.advance(SECOND);
    assert!(matches!(net.hosts[1].outcome(op), Some(TestOutcome::Transferred(100))), "{:?}", net.hosts[1].outcome(op));
}

#[test]
fn claimed_incarnation_without_its_resumption_token_is_denied() {
    let (mut net, memory, chosen) = scene();
    let theirs = net.hosts[1].incarnation;
    let genuine = net.hosts[0].proto.peers[chosen].given_token.expect("the hosts are connected");
    let mut adversaries = Vec::new();
    // While host 1 is connected, and while it is not; two connections at a time, as an engine might have.
    for away in [false, true] {
        if away {
            let wire = net.wire(1, 0);
            net.cut(wire);
        }
        let first = claim(&mut net, theirs, None);
        let second = claim(&mut net, theirs, Some(0));
        // A token issued for the claimed identity, and one issued for the adversary's own.
        let own = claim(&mut net, 0xbad, None);
        let (as_them, as_itself) = (token(&net, first), token(&net, own));
        assert!(as_them != Some(genuine) && as_itself != Some(genuine));
        let third = claim(&mut net, theirs, as_itself);
        // The token of host 1, with another incarnation than host 1's.
        let fourth = claim(&mut net, 0xbad + 1, Some(genuine));
        for raw in [first, second, own, third, fourth] {
            assert_denied(&mut net, raw);
        }
        // It reconnects with the token that it was issued.
        net.disconnect(first);
        let back = claim(&mut net, theirs, as_them);
        assert_denied(&mut net, back);
        adversaries.extend([second, own, third, fourth, back]);
    }
    assert_eq!(memory.bytes(), [1; 100]);
    assert_eq!(net.hosts[0].proto.refusals().other_peer, 2 * 2 * 6);
    // The adversaries don't deny host 1 access, though they connected first.
    assert_still_allowed(&mut net);
    adversaries.into_iter().for_each(|raw| net.disconnect(raw));
    assert_still_allowed(&mut net);
    net.revoke(0, TOKEN);
    net.end();
}

/// Another engine runs at host 1's address, and an adversary knows host 1's incarnation.
#[test]
fn successor_at_the_peers_address_is_denied() {
    let (mut net, memory, _) = scene();
    let theirs = net.hosts[1].incarnation;
    let wire = net.wire(1, 0);
    net.cut(wire);
    // The address is right, but the engine is not the one that the memory is for.
    net.restart(1, true);
    net.hosts[1].echo = true;
    net.settle();
    let op = net.call(0, 1, call("connects now"));
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 12);
    assert_ne!(net.hosts[1].incarnation, theirs);
    let raw = claim(&mut net, theirs, None);
    assert_denied(&mut net, raw);
    net.disconnect(raw);
    assert_eq!(memory.bytes(), [1; 100]);
    net.revoke(0, TOKEN);
    net.end();
}

/// The engine at the address claims the incarnation of the one that was connected before, which is no secret.
#[test]
fn claimed_incarnation_at_the_peers_address_is_denied() {
    for genuine in [false, true] {
        let mut net = Net::new(1);
        let peer = net.test_peer(0);
        let connect_at = |net: &mut Net, token| {
            net.call_peer(0, peer, call("connects"));
            net.advance(SECOND / 100);
            let raw = net.raw_dialled();
            let hello = Hello { resumption_token: token, ..hello(77) };
            net.send_bytes(raw, super::raw::encode_hello(wire::VERSIONS, &hello));
            raw
        };
        let met = connect_at(&mut net, None);
        let issued = token(&net, met);
        let policy = AccessPolicy { only: Some(peer), ..AccessPolicy::default() };
        let memory = net.expose_with_policy(0, TOKEN, vec![1; 100], Mode { read: true, write: true }, policy);
        net.disconnect(met);
        let again = connect_at(&mut net, if genuine { issued } else { Some(1) });
        assert_ne!(again.wire, met.wire);
        if genuine {
            let range = Range { transfer: 1, owner: net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len: 100 };
            net.send_message(again, &Message::Pull(range), b"");
            let mut sent = 0;
            net.for_each_received(again, |message| sent += if let Message::Data { len, .. } = message { *len } else { 0 });
            assert_eq!(sent, 100);
        } else {
            assert_denied(&mut net, again);
        }
        assert_eq!(memory.bytes(), [1; 100]);
        net.disconnect(again);
        net.revoke(0, TOKEN);
        net.end();
    }
}

/// After a connection loss the owner dials, and the memory is still for the engine at the other end.
#[test]
fn peer_dialled_again_by_the_owner_is_allowed() {
    let (mut net, memory, chosen) = scene();
    let wire = net.wire(1, 0);
    net.cut(wire);
    let op = net.call_peer(0, chosen, call("are you there"));
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 13);
    assert_still_allowed(&mut net);
    assert_eq!(memory.bytes(), [1; 100]);
    net.revoke(0, TOKEN);
    net.end();
}
