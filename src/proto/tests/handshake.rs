//! The handshake: which connections open, and which are refused.

use std::time::Duration;

use super::env::pattern;
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{self, hello};
use super::wire::{HandshakeMessage, Hello, PREAMBLE_LEN, Refusal, VERSIONS};
use super::{Config, Failure};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn call_to_an_address_without_listener_is_unreachable() {
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = net.call(0, 1, call("x"));
    net.advance(SECOND / 10);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { source: Some(_), .. });
    // The next call dials again.
    net.hosts[1].listens = true;
    net.hosts[1].echo = true;
    let op = net.call(0, 1, call("x"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    net.end();
}

/// The connection attempt gets no reply at all.
#[test]
fn call_during_connect_timeout_is_unreachable() {
    let mut net = Net::new(2);
    net.black_hole = true;
    let begun = net.now;
    let ops: Vec<_> = (0..3).map(|_| net.call(0, 1, call("x"))).collect();
    assert!(net.until(10 * SECOND, |net| ops.iter().all(|op| net.hosts[0].is_done(*op))));
    assert_eq!(net.now - begun, config().connect);
    for op in ops {
        assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    }
    net.end();
}

/// A listener that accepts the connection and then sends nothing.
#[test]
fn call_to_a_listener_without_handshake_is_unreachable() {
    let mut net = Net::new(1);
    let peer = net.test_peer(0);
    let begun = net.now;
    let op = net.call_peer(0, peer, call(pattern(1, 1 << 20)));
    assert!(net.until(10 * SECOND, |net| net.hosts[0].is_done(op)));
    assert_eq!(net.now - begun, config().connect);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.end();
}

/// A peer that dials and sends nothing, or half a handshake, is disconnected after the connect timeout.
#[test]
fn peer_without_complete_handshake_is_disconnected() {
    let handshake = raw::encode_hello(VERSIONS, &hello(1));
    for sent in [0, 1, 8, 15, 16, handshake.len() - 1] {
        let mut net = Net::new(1);
        let raw = net.raw_dial(0);
        net.send_bytes(raw, handshake[..sent].to_vec());
        net.advance(config().connect / 2);
        assert!(!net.is_shut(raw));
        net.settle();
        assert!(net.is_shut(raw) && net.hosts[0].proto.links_gone());
        assert!(net.wires[raw.wire].ends[0].received.is_empty(), "the accepting side waits for the handshake of its peer");
        net.end();
    }
}

/// The connection ends before the handshake: the reason names the cause.
#[test]
fn listener_that_disconnects_before_handshake_is_unreachable() {
    let mut net = Net::new(1);
    let peer = net.test_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(SECOND / 10);
    let raw = net.raw_dialled();
    net.disconnect(raw);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { reason, .. } if reason.contains("ended during the handshake"));
    net.end();
}

/// A web server or random bytes: refused at the first byte that differs from a handshake.
#[test]
fn foreign_protocol_is_refused_on_either_side() {
    let mut wrong_tail = raw::encode_hello(VERSIONS, &hello(1));
    wrong_tail.truncate(PREAMBLE_LEN + 1);
    wrong_tail[12..16].copy_from_slice(&1u32.to_le_bytes());
    let mut long = raw::encode_hello(VERSIONS, &hello(1));
    long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let foreign =
        [b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), b"x".to_vec(), b"calomel\x01".to_vec(), vec![0; 100], wrong_tail, long];
    for bytes in foreign {
        let mut net = Net::new(1);
        let raw = net.raw_dial(0);
        net.send_bytes(raw, bytes.clone());
        assert!(net.is_shut(raw));
        let peer = net.test_peer(0);
        let op = net.call_peer(0, peer, call("x"));
        net.advance(SECOND / 10);
        let raw = net.raw_dialled();
        net.send_bytes(raw, bytes);
        assert_failed!(net.hosts[0], op, Failure::Unreachable { reason, .. } if reason.contains("not a calomel engine"));
        net.end();
    }
}

/// A peer with other protocol versions: both sides report the versions that they support.
#[test]
fn disjoint_versions_are_refused_with_the_peers_versions() {
    for (low, high) in [(VERSIONS.1 + 1, VERSIONS.1 + 4), (u16::MAX, u16::MAX), (0, VERSIONS.0 - 1), (3, 2)] {
        let mut net = Net::new(1);
        // It dials: it gets the versions of the host, and is disconnected.
        let raw = net.raw_dial(0);
        net.send_bytes(raw, raw::encode_hello((low, high), &hello(1)));
        net.settle();
        assert!(net.is_shut(raw));
        assert_eq!(net.first_handshake_message(raw), HandshakeMessage::Refusal(Refusal::Version));
        // It is dialled: the caller gets its versions.
        let peer = net.test_peer(0);
        let op = net.call_peer(0, peer, call("x"));
        net.advance(SECOND / 10);
        let raw = net.raw_dialled();
        net.send_bytes(raw, raw::encode_hello((low, high), &hello(1)));
        assert_failed!(net.hosts[0], op, Failure::Version { theirs } if *theirs == (low, high));
        net.end();
    }
}

/// The preamble has the same layout in all versions; what follows may differ, and is not decoded.
#[test]
fn unknown_hello_of_another_version_is_refused_by_version() {
    let mut net = Net::new(1);
    let mut bytes = raw::encode_hello((9, 9), &hello(1));
    bytes.truncate(PREAMBLE_LEN);
    bytes.extend([0xff; 40]);
    let raw = net.raw_dial(0);
    net.send_bytes(raw, bytes);
    net.settle();
    assert!(net.is_shut(raw) && net.first_handshake_message(raw) == HandshakeMessage::Refusal(Refusal::Version));
    net.end();
}

/// Version ranges that overlap partly.
#[test]
fn overlapping_versions_are_accepted() {
    let mut net = Net::new(1);
    let raw = net.raw_dial(0);
    net.send_bytes(raw, raw::encode_hello((VERSIONS.0, VERSIONS.1 + 9), &hello(1)));
    net.settle();
    assert!(!net.is_shut(raw));
    net.end();
}

#[test]
fn hello_with_too_many_addresses_is_refused() {
    let many = |count: usize| Hello {
        addresses: (0..count).map(|n| format!("tcp://10.0.9.9:{}", n + 1).parse().unwrap()).collect(),
        ..hello(1)
    };
    let mut net = Net::new(1);
    for (count, taken) in [(16, true), (17, false), (500, false)] {
        let raw = net.raw_dial(0);
        net.send_bytes(raw, raw::encode_hello(VERSIONS, &many(count)));
        assert_eq!(net.is_shut(raw), !taken, "{count} addresses");
    }
    net.end();
}

/// A peer is dialled at the address that the user of this engine named, whatever addresses the peer announces; no other
/// address counts as the user's choice.
#[test]
fn named_address_is_dialled_rather_than_an_announced_one() {
    let [claimed, named] = [22, 7000].map(|port| format!("tcp://10.0.9.9:{port}").parse::<crate::Address>().unwrap());
    for early in [false, true] {
        let mut net = Net::new(1);
        let raw = net.raw_dial(0);
        let sent = Hello { addresses: vec![claimed.clone(), named.clone()], ..hello(1) };
        net.send_bytes(raw, raw::encode_hello(VERSIONS, &sent));
        net.disconnect(raw);
        let (now, proto) = (net.now, &mut net.hosts[0].proto);
        let tag = proto.lookup(&named);
        if early {
            // The address that the peer announced is being dialled already.
            let link = proto.link_to(tag.id, now).unwrap();
            proto.choose(tag.id, &named);
            assert_eq!(proto.links[link].remote, claimed);
            assert!(!proto.is_chosen(link));
            proto.close(link, Failure::Cancelled);
        }
        proto.choose(tag.id, &named);
        let link = proto.link_to(tag.id, now).unwrap();
        assert_eq!(proto.links[link].remote, named);
        assert!(proto.is_chosen(link));
        proto.close(link, Failure::Cancelled);
        proto.outputs.clear();
        net.end();
    }
}

/// Thousands of peers that connect once, each with a new incarnation: disconnected peers are forgotten.
#[test]
fn disconnected_peers_are_forgotten() {
    let mut net = Net::new(1);
    for n in 0..3000u64 {
        let raw = net.raw_dial(0);
        let address = format!("tcp://10.0.9.9:{}", 1 + n % 60_000).parse().unwrap();
        let sent = Hello { addresses: if n % 2 == 0 { vec![address] } else { Vec::new() }, ..hello(0x10_0000 + n) };
        net.send_bytes(raw, raw::encode_hello(VERSIONS, &sent));
        net.disconnect(raw);
        net.wires.clear();
        net.hosts[0].wires.clear();
    }
    net.settle();
    let proto = &net.hosts[0].proto;
    for (what, count) in [
        ("peers", proto.peers.len()),
        ("addresses", proto.by_address.len()),
        ("incarnations", proto.by_incarnation.len()),
        ("links", proto.links.len()),
    ] {
        assert!(count <= 200, "{count} {what} are remembered");
    }
    net.end();
}

/// A peer that comes back with a new incarnation each time, from one address.
#[test]
fn old_incarnations_of_a_peer_are_forgotten() {
    let mut net = Net::new(1);
    for n in 0..1000u64 {
        let raw = net.raw_dial(0);
        let sent = Hello { addresses: vec!["tcp://10.0.9.9:7000".parse().unwrap()], ..hello(0x10_0000 + n) };
        net.send_bytes(raw, raw::encode_hello(VERSIONS, &sent));
        net.disconnect(raw);
    }
    let remembered = net.hosts[0].proto.by_incarnation.len();
    assert!(remembered <= 200, "{remembered} incarnations of one peer are remembered");
    net.end();
}

/// A limit of 0: even small messages are refused with size and limit.
#[test]
fn call_to_a_peer_with_limit_zero_is_too_large() {
    let mut net = Net::with(vec![(config(), true), (Config { max_message: 0, ..config() }, true)]);
    net.hosts[1].echo = true;
    let empty = net.call(0, 1, call(""));
    let byte = net.call(0, 1, call("x"));
    net.settle();
    assert_eq!(net.hosts[0].body(empty), b"");
    assert_failed!(net.hosts[0], byte, Failure::TooLarge { size: 1, limit: 0 });
    net.end();
}
