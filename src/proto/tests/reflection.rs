//! Strangers that have no key, and pass what an engine says on one of its connections to another of its connections.

use super::super::keys::PreSharedKey;
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::Raw;
use super::wire::{self, HandshakeMessage, ParsedHandshake, VERSIONS};
use super::{Config, Failure};
use crate::Address;

/// So many hosts, which all have the same key.
fn keyed(hosts: usize) -> Net {
    let config = Config { key: Some(PreSharedKey::new(b"a secret of more than sixteen bytes".to_vec())), ..config() };
    let mut net = Net::with(vec![(config, true); hosts]);
    net.echo_everywhere();
    net
}

/// Has a host dial the stranger at this port; its call, and the stranger's end.
fn dialled(net: &mut Net, host: usize, port: u16) -> (u64, Raw) {
    let address: Address = format!("tcp://10.0.9.9:{port}").parse().unwrap();
    net.played = Some(address.clone());
    let tag = net.hosts[host].proto.lookup(&address);
    let peer = tag.id;
    net.hosts[host].tags.insert(address, tag);
    let op = net.call_peer(host, peer, call("x"));
    net.advance(2 * net.settings.delay);
    (op, net.raw_dialled())
}

/// The pieces of a greeting that a host has said.
fn pieces(net: &Net, raw: Raw) -> Vec<HandshakeMessage> {
    let (mut bytes, mut pieces) = (net.heard(raw), Vec::new());
    while let ParsedHandshake::Message(said, len) = wire::parse_handshake(bytes, true) {
        pieces.push(said);
        bytes = &bytes[len..];
    }
    pieces
}

/// Passes everything on, both ways, until nothing more is said.
fn relay(net: &mut Net, ends: [Raw; 2]) {
    let mut passed = [0, 0];
    loop {
        let mut quiet = true;
        for side in [0, 1] {
            let said = net.heard(ends[side])[passed[side]..].to_vec();
            passed[side] += said.len();
            if !said.is_empty() {
                quiet = false;
                net.say_bytes(ends[1 - side], said);
            }
        }
        if quiet {
            return;
        }
    }
}

/// None of these connections has opened, and none of their hosts has said hello because of what the stranger passed on.
#[track_caller]
fn assert_closed_to_strangers(net: &mut Net, raws: &[Raw]) {
    for raw in raws {
        let open = net.raw_link(*raw).is_some_and(|(host, link)| net.hosts[host].proto.links[link].is_open());
        assert!(!open, "a stranger is let in: it has heard {:?}", pieces(net, *raw));
    }
    for host in &net.hosts {
        assert_eq!(host.proto.requests(), 0);
        assert!(host.proto.by_incarnation.is_empty(), "a stranger is somebody's peer");
    }
    net.settle();
    for raw in raws {
        assert!(net.is_shut(*raw));
    }
}

/// What an engine says to one that it has dialled, said to the engine itself.
#[test]
fn a_proof_for_another_does_not_open_the_own_door() {
    let mut net = keyed(1);
    let (op, out) = dialled(&mut net, 0, 7000);
    let door = net.raw_dial(0);
    relay(&mut net, [out, door]);
    assert_closed_to_strangers(&mut net, &[out, door]);
    assert_failed!(net.hosts[0], op, Failure::Unauthorized { reason } if reason.contains("itself"));
    net.end();
}

/// The same; and the connection on which the proof was made is gone when it is shown.
#[test]
fn a_proof_outlives_its_connection_and_opens_nothing() {
    for hangs_up in [true, false] {
        let mut net = keyed(1);
        let (_, out) = dialled(&mut net, 0, 7000);
        let door = net.raw_dial(0);
        let challenge = net.heard(out).to_vec();
        net.say_bytes(door, challenge.clone());
        let theirs = net.heard(door).to_vec();
        net.say_bytes(out, theirs);
        let proof = net.heard(out)[challenge.len()..].to_vec();
        if hangs_up {
            net.hang_up(out);
        }
        net.say_bytes(door, proof);
        assert_closed_to_strangers(&mut net, &[out, door]);
        net.end();
    }
}

/// Between two connections of the same side, of one engine and of two that share the key.
#[test]
fn two_connections_of_one_side() {
    for hosts in [1, 2] {
        for dialling in [true, false] {
            let mut net = keyed(hosts);
            let ends = [(0, 7000), (hosts - 1, 7001)]
                .map(|(host, port)| if dialling { dialled(&mut net, host, port).1 } else { net.raw_dial(host) });
            if !dialling {
                // Somebody has to begin.
                net.say_bytes(ends[0], wire::encode_handshake(VERSIONS, &HandshakeMessage::Challenge([7; 32])));
            }
            relay(&mut net, ends);
            assert_closed_to_strangers(&mut net, &ends);
            net.end();
        }
    }
}

/// Two engines of one process that share the key: what one has proved to a stranger is of no use at the other's door, but in the
/// very conversation with it. That a stranger stands in between two others is not what a key can keep off.
#[test]
fn a_proof_for_one_sibling_is_none_for_the_other() {
    for roles in [[0, 1], [1, 0]] {
        let mut net = keyed(2);
        let (_, out) = dialled(&mut net, roles[0], 7000);
        // A conversation with the sibling, until there is a proof in it.
        let doors = [net.raw_dial(roles[1]), net.raw_dial(roles[1]), net.raw_dial(roles[0])];
        let challenge = net.heard(out).to_vec();
        net.say_bytes(doors[0], challenge.clone());
        let theirs = net.heard(doors[0]).to_vec();
        net.say_bytes(out, theirs);
        let proof = net.heard(out)[challenge.len()..].to_vec();
        assert!(!proof.is_empty());
        // It is shown on another connection of the sibling, and on one of its maker.
        for door in &doors[1..] {
            net.say_bytes(*door, [&challenge[..], &proof].concat());
        }
        net.hang_up(doors[0]);
        assert_closed_to_strangers(&mut net, &[out, doors[0], doors[1], doors[2]]);
        net.end();
    }
}

/// An engine that wants a key may dial itself, at an address that is its own.
#[test]
fn an_engine_with_a_key_dials_itself() {
    for everywhere in [false, true] {
        let mut net = keyed(1);
        if everywhere {
            net.hosts[0].proto.set_addresses(vec!["tcp://0.0.0.0:7000".parse().unwrap()]);
        }
        for text in ["there", "and again"] {
            let op = net.call(0, 0, call(text));
            net.settle();
            assert_eq!(net.hosts[0].body(op), served(text.as_bytes()));
        }
        net.end();
    }
}

/// It listens on every interface, and the stranger at the same port of another host.
#[test]
fn the_same_port_elsewhere_is_not_the_own_door() {
    let mut net = keyed(1);
    net.hosts[0].proto.set_addresses(vec!["tcp://0.0.0.0:7000".parse().unwrap()]);
    let (_, out) = dialled(&mut net, 0, 7000);
    let door = net.raw_dial(0);
    relay(&mut net, [out, door]);
    assert_closed_to_strangers(&mut net, &[out, door]);
    net.end();
}
