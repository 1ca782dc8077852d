//! How connections begin, and with whom they don't.

use std::time::Duration;

use super::env::pattern;
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{self, hello};
use super::wire::{HandshakeMessage, Hello, PREAMBLE_LEN, Refusal, VERSIONS};
use super::{Config, Failure};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn nobody_listens() {
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = net.call(0, 1, call("x"));
    net.advance(SECOND / 10);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { source: Some(_), .. });
    // It may be there next time.
    net.hosts[1].listens = true;
    net.hosts[1].echo = true;
    let op = net.call(0, 1, call("x"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    net.end();
}

/// No answer at all to the dialling.
#[test]
fn connecting_takes_too_long() {
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

/// Whoever answers the dialling, and then says nothing.
#[test]
fn a_listener_that_does_not_greet() {
    let mut net = Net::new(1);
    let peer = net.played_peer(0);
    let begun = net.now;
    let op = net.call_peer(0, peer, call(pattern(1, 1 << 20)));
    assert!(net.until(10 * SECOND, |net| net.hosts[0].is_done(op)));
    assert_eq!(net.now - begun, config().connect);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.end();
}

/// Whoever dials and says nothing, or half a greeting, is not kept for ever.
#[test]
fn a_caller_that_does_not_greet() {
    let greeting = raw::greet(VERSIONS, &hello(1));
    for said in [0, 1, 8, 15, 16, greeting.len() - 1] {
        let mut net = Net::new(1);
        let raw = net.raw_dial(0);
        net.say_bytes(raw, greeting[..said].to_vec());
        net.advance(config().connect / 2);
        assert!(!net.is_shut(raw));
        net.settle();
        assert!(net.is_shut(raw) && net.hosts[0].proto.links_gone());
        assert!(net.wires[raw.wire].ends[0].heard.is_empty(), "an accepted connection is greeted when it has greeted");
        net.end();
    }
}

/// The connection ends before the greeting: the reason names the cause.
#[test]
fn a_listener_that_hangs_up() {
    let mut net = Net::new(1);
    let peer = net.played_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(SECOND / 10);
    let raw = net.raw_dialled();
    net.hang_up(raw);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { reason, .. } if reason.contains("greeting"));
    net.end();
}

/// A web server, a shell, noise: recognized by the first byte that no greeting has.
#[test]
fn foreign_listeners_and_callers() {
    let mut wrong_tail = raw::greet(VERSIONS, &hello(1));
    wrong_tail.truncate(PREAMBLE_LEN + 1);
    wrong_tail[12..16].copy_from_slice(&1u32.to_le_bytes());
    let mut long = raw::greet(VERSIONS, &hello(1));
    long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let foreign =
        [b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), b"x".to_vec(), b"calomel\x01".to_vec(), vec![0; 100], wrong_tail, long];
    for bytes in foreign {
        let mut net = Net::new(1);
        let raw = net.raw_dial(0);
        net.say_bytes(raw, bytes.clone());
        assert!(net.is_shut(raw));
        let peer = net.played_peer(0);
        let op = net.call_peer(0, peer, call("x"));
        net.advance(SECOND / 10);
        let raw = net.raw_dialled();
        net.say_bytes(raw, bytes);
        assert_failed!(net.hosts[0], op, Failure::Unreachable { reason, .. } if reason.contains("not a calomel engine"));
        net.end();
    }
}

/// A peer of the future: both sides say which versions they speak.
#[test]
fn versions_that_do_not_meet() {
    for (low, high) in [(VERSIONS.1 + 1, VERSIONS.1 + 4), (u16::MAX, u16::MAX), (0, VERSIONS.0 - 1), (3, 2)] {
        let mut net = Net::new(1);
        // Here it dials: it is told what is spoken here, and let go.
        let raw = net.raw_dial(0);
        net.say_bytes(raw, raw::greet((low, high), &hello(1)));
        net.settle();
        assert!(net.is_shut(raw));
        assert_eq!(net.greeted(raw), HandshakeMessage::Refusal(Refusal::Version));
        // Here it is dialled: the caller learns its versions.
        let peer = net.played_peer(0);
        let op = net.call_peer(0, peer, call("x"));
        net.advance(SECOND / 10);
        let raw = net.raw_dialled();
        net.say_bytes(raw, raw::greet((low, high), &hello(1)));
        assert_failed!(net.hosts[0], op, Failure::Version { theirs } if *theirs == (low, high));
        net.end();
    }
}

/// The preamble keeps its layout in all versions, what follows need not: it is not looked at.
#[test]
fn another_version_may_say_hello_in_its_own_way() {
    let mut net = Net::new(1);
    let mut bytes = raw::greet((9, 9), &hello(1));
    bytes.truncate(PREAMBLE_LEN);
    bytes.extend([0xff; 40]);
    let raw = net.raw_dial(0);
    net.say_bytes(raw, bytes);
    net.settle();
    assert!(net.is_shut(raw) && net.greeted(raw) == HandshakeMessage::Refusal(Refusal::Version));
    net.end();
}

/// A version that is spoken on both sides, among others that are not.
#[test]
fn versions_that_overlap() {
    let mut net = Net::new(1);
    let raw = net.raw_dial(0);
    net.say_bytes(raw, raw::greet((VERSIONS.0, VERSIONS.1 + 9), &hello(1)));
    net.settle();
    assert!(!net.is_shut(raw));
    net.end();
}

#[test]
fn a_peer_claims_too_many_addresses() {
    let many = |count: usize| Hello {
        addresses: (0..count).map(|n| format!("tcp://10.0.9.9:{}", n + 1).parse().unwrap()).collect(),
        ..hello(1)
    };
    let mut net = Net::new(1);
    for (count, taken) in [(16, true), (17, false), (500, false)] {
        let raw = net.raw_dial(0);
        net.say_bytes(raw, raw::greet(VERSIONS, &many(count)));
        assert_eq!(net.is_shut(raw), !taken, "{count} addresses");
    }
    net.end();
}

/// Whatever addresses a peer has claimed, it is dialled at the one that the user of this engine has named, and no other counts as
/// the user's choice.
#[test]
fn a_claim_beside_the_address_that_is_named() {
    let [claimed, named] = [22, 7000].map(|port| format!("tcp://10.0.9.9:{port}").parse::<crate::Address>().unwrap());
    for early in [false, true] {
        let mut net = Net::new(1);
        let raw = net.raw_dial(0);
        let said = Hello { addresses: vec![claimed.clone(), named.clone()], ..hello(1) };
        net.say_bytes(raw, raw::greet(VERSIONS, &said));
        net.hang_up(raw);
        let (now, proto) = (net.now, &mut net.hosts[0].proto);
        let tag = proto.lookup(&named);
        if early {
            // The peer's choice is being dialled already.
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

/// Callers may come by the thousand, each somebody new: who has gone is forgotten.
#[test]
fn those_who_have_gone_are_forgotten() {
    let mut net = Net::new(1);
    for n in 0..3000u64 {
        let raw = net.raw_dial(0);
        let address = format!("tcp://10.0.9.9:{}", 1 + n % 60_000).parse().unwrap();
        let said = Hello { addresses: if n % 2 == 0 { vec![address] } else { Vec::new() }, ..hello(0x10_0000 + n) };
        net.say_bytes(raw, raw::greet(VERSIONS, &said));
        net.hang_up(raw);
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

/// One that comes back as somebody new again and again, from one address.
#[test]
fn incarnations_of_the_past_are_forgotten() {
    let mut net = Net::new(1);
    for n in 0..1000u64 {
        let raw = net.raw_dial(0);
        let said = Hello { addresses: vec!["tcp://10.0.9.9:7000".parse().unwrap()], ..hello(0x10_0000 + n) };
        net.say_bytes(raw, raw::greet(VERSIONS, &said));
        net.hang_up(raw);
    }
    let remembered = net.hosts[0].proto.by_incarnation.len();
    assert!(remembered <= 200, "{remembered} incarnations of one peer are remembered");
    net.end();
}

/// A limit that nobody has: small messages are refused with numbers all the same.
#[test]
fn a_peer_that_takes_nothing() {
    let mut net = Net::with(vec![(config(), true), (Config { max_message: 0, ..config() }, true)]);
    net.hosts[1].echo = true;
    let empty = net.call(0, 1, call(""));
    let byte = net.call(0, 1, call("x"));
    net.settle();
    assert_eq!(net.hosts[0].body(empty), b"");
    assert_failed!(net.hosts[0], byte, Failure::TooLarge { size: 1, limit: 0 });
    net.end();
}
