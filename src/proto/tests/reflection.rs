//! Reflection attacks: an attacker without the key relays what an engine sends on one of its connections to another.

use super::super::keys::PreSharedKey;
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::Raw;
use super::wire::{self, HandshakeMessage, ParsedHandshake, VERSIONS};
use super::{Config, Failure};
use crate::Address;
use crate::address::Interfaces;

/// This many hosts, which all have the same key.
fn keyed(hosts: usize) -> Net {
    let config = Config { key: Some(PreSharedKey::new(b"a secret of more than sixteen bytes".to_vec())), ..config() };
    let mut net = Net::with(vec![(config, true); hosts]);
    net.echo_everywhere();
    net
}

/// Has a host dial the attacker at this port; returns its call, and the attacker's end.
fn dialled(net: &mut Net, host: usize, port: u16) -> (u64, Raw) {
    let address: Address = format!("tcp://10.0.9.9:{port}").parse().unwrap();
    net.test_address = Some(address.clone());
    let tag = net.hosts[host].proto.lookup(&address);
    let peer = tag.id;
    net.hosts[host].tags.insert(address, tag);
    let op = net.call_peer(host, peer, call("x"));
    net.advance(2 * net.settings.delay);
    (op, net.raw_dialled())
}

/// The handshake messages that a host has sent.
fn handshake_messages(net: &Net, raw: Raw) -> Vec<HandshakeMessage> {
    let (mut bytes, mut handshake_messages) = (net.received(raw), Vec::new());
    while let ParsedHandshake::Message(sent, len) = wire::parse_handshake(bytes, true) {
        handshake_messages.push(sent);
        bytes = &bytes[len..];
    }
    handshake_messages
}

/// Relays everything, both ways, until nothing more is sent.
fn relay(net: &mut Net, ends: [Raw; 2]) {
    let mut relayed = [0, 0];
    loop {
        let mut quiet = true;
        for side in [0, 1] {
            let sent = net.received(ends[side])[relayed[side]..].to_vec();
            relayed[side] += sent.len();
            if !sent.is_empty() {
                quiet = false;
                net.send_bytes(ends[1 - side], sent);
            }
        }
        if quiet {
            return;
        }
    }
}

/// Asserts that none of these connections has opened, and no host has accepted a hello.
#[track_caller]
fn assert_attacker_refused(net: &mut Net, raws: &[Raw]) {
    for raw in raws {
        let open = net.raw_link(*raw).is_some_and(|(host, link)| net.hosts[host].proto.links[link].is_open());
        assert!(!open, "the attacker was accepted: it received {:?}", handshake_messages(net, *raw));
    }
    for host in &net.hosts {
        assert_eq!(host.proto.requests(), 0);
        assert!(host.proto.by_incarnation.is_empty(), "the attacker was registered as a peer");
    }
    net.settle();
    for raw in raws {
        assert!(net.is_shut(*raw));
    }
}

/// What an engine sends to a peer that it has dialled, sent to the engine itself.
#[test]
fn proof_reflected_to_its_sender_is_refused() {
    let mut net = keyed(1);
    let (op, out) = dialled(&mut net, 0, 7000);
    let accepted = net.raw_dial(0);
    relay(&mut net, [out, accepted]);
    assert_attacker_refused(&mut net, &[out, accepted]);
    assert_failed!(net.hosts[0], op, Failure::Unauthorized { reason } if reason.contains("itself"));
    net.end();
}

/// The same, after the connection on which the proof was made has ended.
#[test]
fn proof_reflected_after_its_connection_ended_is_refused() {
    for hangs_up in [true, false] {
        let mut net = keyed(1);
        let (_, out) = dialled(&mut net, 0, 7000);
        let accepted = net.raw_dial(0);
        let challenge = net.received(out).to_vec();
        net.send_bytes(accepted, challenge.clone());
        let theirs = net.received(accepted).to_vec();
        net.send_bytes(out, theirs);
        let proof = net.received(out)[challenge.len()..].to_vec();
        if hangs_up {
            net.disconnect(out);
        }
        net.send_bytes(accepted, proof);
        assert_attacker_refused(&mut net, &[out, accepted]);
        net.end();
    }
}

/// Between two connections in the same role, of one engine and of two that share the key.
#[test]
fn handshakes_relayed_between_connections_of_one_role_are_refused() {
    for hosts in [1, 2] {
        for dialling in [true, false] {
            let mut net = keyed(hosts);
            let ends = [(0, 7000), (hosts - 1, 7001)]
                .map(|(host, port)| if dialling { dialled(&mut net, host, port).1 } else { net.raw_dial(host) });
            if !dialling {
                // The accepting side waits for a message.
                net.send_bytes(ends[0], wire::encode_handshake(VERSIONS, &HandshakeMessage::Challenge([7; 32])));
            }
            relay(&mut net, ends);
            assert_attacker_refused(&mut net, &ends);
            net.end();
        }
    }
}

/// Two engines that share the key: a proof of one is refused by the other on any connection but the relayed one. A key alone
/// does not detect a relay between two engines.
#[test]
fn proof_for_another_connection_is_refused() {
    for roles in [[0, 1], [1, 0]] {
        let mut net = keyed(2);
        let (_, out) = dialled(&mut net, roles[0], 7000);
        // A handshake with the sibling, relayed up to the proof.
        let accepted = [net.raw_dial(roles[1]), net.raw_dial(roles[1]), net.raw_dial(roles[0])];
        let challenge = net.received(out).to_vec();
        net.send_bytes(accepted[0], challenge.clone());
        let theirs = net.received(accepted[0]).to_vec();
        net.send_bytes(out, theirs);
        let proof = net.received(out)[challenge.len()..].to_vec();
        assert!(!proof.is_empty());
        // The proof is replayed on another connection of the sibling, and on one of its sender.
        for accepted in &accepted[1..] {
            net.send_bytes(*accepted, [&challenge[..], &proof].concat());
        }
        net.disconnect(accepted[0]);
        assert_attacker_refused(&mut net, &[out, accepted[0], accepted[1], accepted[2]]);
        net.end();
    }
}

/// An engine with a key may dial itself, at its own address.
#[test]
fn engine_with_a_key_that_dials_itself_is_accepted() {
    for everywhere in [false, true] {
        let mut net = keyed(1);
        if everywhere {
            net.hosts[0].proto.set_addresses(vec!["tcp://0.0.0.0:7000".parse().unwrap()], &Interfaces::default());
        }
        for text in ["there", "and again"] {
            let op = net.call(0, 0, call(text));
            net.settle();
            assert_eq!(net.hosts[0].body(op), served(text.as_bytes()));
        }
        net.end();
    }
}

/// The engine listens on every interface, and the attacker at the same port of another host.
#[test]
fn proof_reflected_from_the_same_port_elsewhere_is_refused() {
    let mut net = keyed(1);
    net.hosts[0].proto.set_addresses(vec!["tcp://0.0.0.0:7000".parse().unwrap()], &Interfaces::default());
    let (_, out) = dialled(&mut net, 0, 7000);
    let accepted = net.raw_dial(0);
    relay(&mut net, [out, accepted]);
    assert_attacker_refused(&mut net, &[out, accepted]);
    net.end();
}
