//! Idle connections to adversaries: which propose, answer and stay as they like.

use super::host::assert_failed;
use super::idle::{MOMENT, TIMEOUT, idle};
use super::net::{Net, TestCall, call, config};
use super::raw::{Raw, encode_hello, frame, hello};
use super::wire::{self, Hello, Message};
use super::{Config, Failure};

/// A peer connects, shows a token if it has one, and closes its connection as idle. Returns the token that it was given.
fn close_as_idle(net: &mut Net, incarnation: u64, shown: Option<u128>) -> u128 {
    let raw = net.raw_dial(0);
    net.send_bytes(raw, encode_hello(wire::VERSIONS, &Hello { resumption_token: shown, ..hello(incarnation) }));
    net.send_message(raw, &Message::ResumptionToken { token: 5 }, b"");
    let mut token = 0;
    net.for_each_received(raw, |message| {
        if let Message::ResumptionToken { token: given } = message {
            token = *given;
        }
    });
    offer(net, raw);
    assert_eq!(answers(net, raw), [true]);
    net.disconnect(raw);
    token
}

/// Proposes to close the connection.
fn offer(net: &mut Net, raw: Raw) {
    let received = net.received(raw).len() as u64;
    net.send_message(raw, &Message::Idle { received, exposes: false }, b"");
}

/// Whether the host has agreed, for each of its answers.
fn answers(net: &Net, raw: Raw) -> Vec<bool> {
    let mut answers = Vec::new();
    net.for_each_received(raw, |message| match message {
        Message::IdleAgreed => answers.push(true),
        Message::InUse => answers.push(false),
        _ => {}
    });
    answers
}

/// A host that closes idle connections has dialled the adversary, or an adversary a host.
fn dialled() -> (Net, Raw) {
    let mut net = Net::with(vec![(idle(), true)]);
    let peer = net.test_peer(0);
    let op = net.call_peer(0, peer, TestCall { timeout: MOMENT, ..call("connects") });
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.send_bytes(raw, encode_hello(wire::VERSIONS, &hello(9)));
    net.advance(MOMENT);
    assert_failed!(net.hosts[0], op, Failure::Timeout);
    give_token(&mut net, raw);
    (net, raw)
}

fn accepted() -> (Net, Raw) {
    let mut net = Net::with(vec![(config(), true)]);
    let raw = net.raw_peer(0, 9);
    give_token(&mut net, raw);
    (net, raw)
}

fn give_token(net: &mut Net, raw: Raw) {
    net.send_message(raw, &Message::ResumptionToken { token: 5 }, b"");
}

fn offers(net: &Net, raw: Raw) -> usize {
    let mut count = 0;
    net.for_each_received(raw, |message| count += usize::from(matches!(message, Message::Idle { .. })));
    count
}

/// As many idle peers are remembered as connections are allowed; the oldest go first.
#[test]
fn idle_peers_are_remembered_up_to_a_limit() {
    let few = Config { limits: super::PeerLimits { connections: 100, ..super::net::limits() }, ..config() };
    let mut net = Net::with(vec![(few, true)]);
    let tokens: Vec<u128> = (1..=300u64).map(|n| close_as_idle(&mut net, n, None)).collect();
    assert!(net.hosts[0].proto.peers.len() <= 250, "{} peers", net.hosts[0].proto.peers.len());
    // The last one is known, and the first is not.
    for (incarnation, known) in [(300, true), (1, false)] {
        let token = tokens[incarnation as usize - 1];
        assert_eq!(close_as_idle(&mut net, incarnation, Some(token)) == token, known);
    }
    net.end();
}

/// Without the token, this engine could not prove to be the same one when it connects again.
#[test]
fn connection_to_a_peer_that_gives_no_token_stays_open() {
    let mut net = Net::with(vec![(idle(), true)]);
    let raw = net.raw_peer(0, 9);
    offer(&mut net, raw);
    assert_eq!(answers(&net, raw), [false]);
    give_token(&mut net, raw);
    offer(&mut net, raw);
    assert_eq!(answers(&net, raw), [false, true]);
    net.disconnect(raw);
    let peer = net.test_peer(0);
    net.call_peer(0, peer, TestCall { timeout: MOMENT, ..call("connects") });
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.send_bytes(raw, encode_hello(wire::VERSIONS, &hello(9)));
    net.advance(10 * TIMEOUT);
    assert_eq!(offers(&net, raw), 0);
    give_token(&mut net, raw);
    net.advance(2 * TIMEOUT);
    assert_eq!(offers(&net, raw), 1);
    net.disconnect(raw);
    net.end();
}

#[test]
fn peer_that_never_answers_a_proposal_gets_no_second_one() {
    let (mut net, raw) = dialled();
    net.advance(20 * TIMEOUT);
    assert_eq!((offers(&net, raw), net.is_shut(raw)), (1, false));
    // The connection is good for everything else.
    let op = net.call_peer(0, net.hosts[0].tags.values().next().unwrap().id, TestCall { timeout: MOMENT, ..call("x") });
    net.advance(2 * MOMENT);
    assert_failed!(net.hosts[0], op, Failure::Timeout);
    // A late answer is an answer; the connection has been used since.
    net.send_message(raw, &Message::IdleAgreed, b"");
    assert!(!net.is_shut(raw));
    net.advance(3 * TIMEOUT);
    assert_eq!(offers(&net, raw), 2);
    net.send_message(raw, &Message::IdleAgreed, b"");
    assert!(net.is_shut(raw));
    net.end();
}

#[test]
fn peer_that_declines_is_asked_once_in_each_interval() {
    let (mut net, raw) = dialled();
    for count in 1..6 {
        net.advance(if count == 1 { 2 * TIMEOUT } else { TIMEOUT });
        assert_eq!(offers(&net, raw), count);
        net.send_message(raw, &Message::InUse, b"");
    }
    net.disconnect(raw);
    net.end();
}

#[test]
fn peer_that_answers_or_proposes_out_of_turn_breaks_the_protocol() {
    for message in [Message::IdleAgreed, Message::InUse, Message::Idle { received: 0, exposes: false }] {
        let (mut net, raw) = dialled();
        net.send_message(raw, &message, b"");
        assert!(net.is_shut(raw), "{message:?}");
        net.end();
    }
    for message in [Message::IdleAgreed, Message::InUse] {
        let (mut net, raw) = accepted();
        net.send_message(raw, &message, b"");
        assert!(net.is_shut(raw), "{message:?}");
        net.end();
    }
    // Two answers to one proposal.
    let (mut net, raw) = dialled();
    net.advance(2 * TIMEOUT);
    net.send_message(raw, &Message::InUse, b"");
    assert!(!net.is_shut(raw));
    net.send_message(raw, &Message::IdleAgreed, b"");
    assert!(net.is_shut(raw));
    net.end();
}

/// Each proposal is answered, and nothing is kept of it.
#[test]
fn proposals_without_end_are_answered() {
    let (mut net, raw) = accepted();
    for n in 1..=1000 {
        offer(&mut net, raw);
        if n % 100 == 0 {
            assert_eq!(answers(&net, raw), vec![true; n]);
            assert!(net.hosts[0].left("bytes of answers") == 0 && net.hosts[0].proto.connected_peers().is_empty());
        }
    }
    // One that does not know of everything that was sent to it.
    net.send_message(raw, &Message::Idle { received: 17, exposes: false }, b"");
    assert_eq!(answers(&net, raw).last(), Some(&false));
    assert_eq!(net.hosts[0].proto.connected_peers().len(), 1);
    net.disconnect(raw);
    net.end();
}

/// The adversary gets the host's agreement, and then stays, and calls.
#[test]
fn peer_that_calls_after_the_agreement_is_served() {
    let (mut net, raw) = accepted();
    net.hosts[0].echo = true;
    for _ in 0..3 {
        offer(&mut net, raw);
        assert!(net.hosts[0].proto.connected_peers().is_empty());
        net.send_message(raw, &Message::Echo { call: 1 }, b"");
        assert_eq!(net.hosts[0].proto.connected_peers().len(), 1);
    }
    offer(&mut net, raw);
    net.send_message(raw, &Message::InUse, b"");
    assert_eq!((net.hosts[0].proto.connected_peers().len(), net.hosts[0].idle), (1, 0));
    // Only the host has left the connection when that is lost.
    offer(&mut net, raw);
    net.disconnect(raw);
    assert_eq!(net.hosts[0].idle, 1);
    net.end();
}

/// A connection that ends for another reason than idleness is reported as lost, also if this side had left it.
#[test]
fn peer_that_breaks_the_protocol_after_the_agreement_is_lost() {
    for bytes in [frame(&Message::Goodbye, b""), vec![0; 100], frame(&Message::Ping, b"body")] {
        let (mut net, raw) = accepted();
        offer(&mut net, raw);
        assert_eq!(answers(&net, raw), [true]);
        net.send_bytes(raw, bytes);
        assert!(net.is_shut(raw) && net.hosts[0].idle == 0 && net.hosts[0].connected.is_empty());
        net.end();
    }
}
