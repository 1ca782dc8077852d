//! Authentication by pre-shared key: with the right key, another, none, and forged proofs.

use std::time::Duration;

use super::super::keys::{self, PreSharedKey, Role, Transcript as Handshake};
use super::env::{allocated, live};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{Raw, hello};
use super::wire::{self, HandshakeMessage, MAX_HELLO, PREAMBLE_LEN, ParsedHandshake, Refusal, VERSIONS};
use super::{Config, Failure};

const SECRET: &[u8] = b"a secret of more than sixteen bytes";

fn key(secret: &[u8]) -> Option<PreSharedKey> {
    Some(PreSharedKey::new(secret.to_vec()))
}

/// Two hosts with these keys.
fn hosts(first: Option<PreSharedKey>, second: Option<PreSharedKey>) -> Net {
    let with = |key| (Config { key, ..config() }, true);
    let mut net = Net::with(vec![with(first), with(second)]);
    net.echo_everywhere();
    net
}

fn keyed() -> Net {
    hosts(key(SECRET), key(SECRET))
}

/// Sends a handshake message of the adversary, and returns its bytes.
fn send_handshake(net: &mut Net, raw: Raw, sent: &HandshakeMessage) -> Vec<u8> {
    let bytes = wire::encode_handshake(VERSIONS, sent);
    net.send_bytes(raw, bytes.clone());
    bytes
}

/// The handshake messages that a host has sent on a connection that the adversary dialled, and their bytes.
fn received_handshake(net: &Net, raw: Raw) -> Vec<(HandshakeMessage, Vec<u8>)> {
    received_handshake_at(net, raw, 0)
}

fn received_handshake_at(net: &Net, raw: Raw, side: usize) -> Vec<(HandshakeMessage, Vec<u8>)> {
    let mut bytes = &net.wires[raw.wire].ends[side].received[..];
    let mut pieces = Vec::new();
    while let ParsedHandshake::Message(sent, len) = wire::parse_handshake(bytes, true) {
        pieces.push((sent, bytes[..len].to_vec()));
        bytes = &bytes[len..];
    }
    pieces
}

#[test]
fn same_key_on_both_sides_is_accepted() {
    for piece in [usize::MAX, 1, 7] {
        let mut net = keyed();
        net.settings.piece = piece;
        let ops = [net.call(0, 1, call("there")), net.call(1, 0, call("back"))];
        net.settle();
        assert_eq!(net.hosts[0].body(ops[0]), served(b"there"));
        assert_eq!(net.hosts[1].body(ops[1]), served(b"back"));
        net.end();
    }
}

/// A peer with another key, or with none, is refused on either side, and the caller gets the reason.
#[test]
fn another_key_or_none_is_refused_with_the_reason() {
    let none = || None;
    let cases = [
        (key(SECRET), key(b"another secret of that length"), "its key is another"),
        (none(), key(SECRET), "wants a key"),
        (key(SECRET), none(), "has no key"),
    ];
    for (first, second, words) in cases {
        let mut net = hosts(first, second);
        let op = net.call(0, 1, call("x"));
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::Unauthorized { reason } if reason.contains(words));
        assert!(net.hosts[0].proto.links_gone() && net.hosts[1].proto.links_gone());
        assert!(net.hosts[1].proto.peers.is_empty(), "a peer without the key was registered");
        net.end();
    }
}

/// Random bytes, messages out of order, half messages: nothing is kept, and the host reveals only that it requires a key.
#[test]
fn messages_without_proof_end_the_connection() {
    let handshake = wire::encode_handshake(VERSIONS, &HandshakeMessage::Hello(hello(1)));
    let mut long = handshake[..PREAMBLE_LEN + 5].to_vec();
    long[12..16].copy_from_slice(&(MAX_HELLO as u32).to_le_bytes());
    let proof = wire::encode_handshake(VERSIONS, &HandshakeMessage::Proof([1; 32], [2; 32]));
    let refusal = wire::encode_handshake(VERSIONS, &HandshakeMessage::Refusal(Refusal::Busy));
    let twice = [0, 1].map(|n| wire::encode_handshake(VERSIONS, &HandshakeMessage::Challenge([n; 32]))).concat();
    for sent in [handshake.clone(), long, proof, refusal, twice, vec![0; 100], b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut net = keyed();
        allocated();
        let raw = net.raw_dial(0);
        net.send_bytes(raw, sent);
        net.settle();
        assert!(net.is_shut(raw));
        for (sent, _) in received_handshake(&net, raw) {
            assert!(matches!(sent, HandshakeMessage::Challenge(_) | HandshakeMessage::Refusal(_)), "{sent:?}");
        }
        assert_eq!((allocated().1, live()), (0, 0));
        assert!(net.hosts[0].proto.peers.is_empty());
        net.end();
    }
}

/// A guess has one chance in 2^256, and each guess costs a connection.
#[test]
fn guessed_proof_is_refused() {
    let mut net = keyed();
    for guess in 0..200u8 {
        let raw = net.raw_dial(0);
        send_handshake(&mut net, raw, &HandshakeMessage::Challenge([guess; 32]));
        let mut proof = [guess; 32];
        proof[usize::from(guess) % 32] ^= 1;
        send_handshake(&mut net, raw, &HandshakeMessage::Proof(proof, [guess; 32]));
        assert!(net.is_shut(raw));
        assert_eq!(received_handshake(&net, raw)[1].0, HandshakeMessage::Refusal(Refusal::OtherKey));
    }
    net.settle();
    net.end();
}

/// An eavesdropper replays all that an honest engine has sent.
#[test]
fn replayed_handshake_is_refused() {
    let mut net = keyed();
    let op = net.call(0, 1, call("secret"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"secret"));
    let wire = net.wire(0, 1);
    let sent: Vec<Vec<u8>> = [0, 1].map(|side| net.wires[wire].ends[side].received.clone()).into();
    for sent in sent {
        for at_once in [true, false] {
            let raw = net.raw_dial(1);
            if at_once {
                net.send_bytes(raw, sent.clone());
            } else {
                sent.chunks(53).for_each(|piece| net.send_bytes(raw, piece.to_vec()));
            }
            net.settle();
            assert!(net.is_shut(raw));
            let served = net.hosts[1].proto.requests();
            assert_eq!(served, 0);
            assert!(
                received_handshake(&net, raw)
                    .iter()
                    .all(|(sent, _)| !matches!(sent, HandshakeMessage::Hello(_) | HandshakeMessage::Proof(..)))
            );
        }
    }
    net.settle();
    net.end();
}

/// The host's own messages are reflected to it: its challenge, and its proof.
#[test]
fn reflected_proof_is_refused() {
    let mut net = keyed();
    let raw = net.raw_dial(0);
    send_handshake(&mut net, raw, &HandshakeMessage::Challenge([7; 32]));
    let (challenge, _) = received_handshake(&net, raw)[0].clone();
    // It dials, and receives its own challenge of the other connection, then its own proof.
    let peer = net.test_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(Duration::from_millis(1));
    let dialled = net.raw_dialled();
    net.send_bytes(dialled, wire::encode_handshake(VERSIONS, &challenge));
    let own: Vec<u8> = received_handshake_at(&net, dialled, 1).into_iter().skip(1).flat_map(|(_, bytes)| bytes).collect();
    assert!(!own.is_empty(), "the dialling side sends its proof first");
    net.send_bytes(dialled, own.clone());
    assert_failed!(net.hosts[0], op, Failure::Unauthorized { .. });
    // And on the connection that it accepted.
    net.send_bytes(raw, own);
    assert!(net.is_shut(raw));
    net.settle();
    net.end();
}

/// A peer with the key sends another hello than the proof covers, or the right one.
#[test]
fn hello_other_than_the_proved_one_is_refused() {
    for honest in [true, false] {
        let mut net = keyed();
        let raw = net.raw_dial(0);
        let ours = send_handshake(&mut net, raw, &HandshakeMessage::Challenge([7; 32]));
        let theirs = received_handshake(&net, raw)[0].1.clone();
        let handshake = wire::encode_handshake(VERSIONS, &HandshakeMessage::Hello(hello(1)));
        let digest = keys::digest(&handshake);
        let transcript = Handshake { challenges: [&ours, &theirs], answered: None, hello: &digest };
        let proof = PreSharedKey::new(SECRET.to_vec()).prove(Role::Dialling, &transcript);
        send_handshake(&mut net, raw, &HandshakeMessage::Proof(proof, digest));
        assert!(!net.is_shut(raw) && received_handshake(&net, raw).len() == 1);
        send_handshake(&mut net, raw, &HandshakeMessage::Hello(hello(if honest { 1 } else { 2 })));
        assert_eq!(net.is_shut(raw), !honest);
        net.disconnect(raw);
        net.settle();
        net.end();
    }
}

/// A peer that stops within its proof is disconnected in time.
#[test]
fn peer_with_incomplete_proof_is_disconnected() {
    let mut net = keyed();
    let raw = net.raw_dial(0);
    send_handshake(&mut net, raw, &HandshakeMessage::Challenge([7; 32]));
    net.send_bytes(raw, wire::encode_handshake(VERSIONS, &HandshakeMessage::Proof([0; 32], [0; 32]))[..60].to_vec());
    assert!(!net.is_shut(raw));
    net.settle();
    assert!(net.is_shut(raw) && net.hosts[0].proto.links_gone());
    net.end();
}

/// A successor at the address authenticates anew.
#[test]
fn successor_with_the_key_is_accepted() {
    let mut net = keyed();
    let op = net.call(0, 1, call("x"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    net.restart(1, true);
    net.settle();
    let op = net.call(0, 1, call("y"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"y"));
    net.end();
}
