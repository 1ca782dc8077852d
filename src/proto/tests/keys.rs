//! Engines that share a key, those that don't, and those that pretend to.

use std::time::Duration;

use super::super::keys::{self, PreSharedKey, Role, Transcript as Told};
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

/// Two hosts with these keys, of which the second answers.
fn hosts(first: Option<PreSharedKey>, second: Option<PreSharedKey>) -> Net {
    let with = |key| (Config { key, ..config() }, true);
    let mut net = Net::with(vec![with(first), with(second)]);
    net.echo_everywhere();
    net
}

fn keyed() -> Net {
    hosts(key(SECRET), key(SECRET))
}

/// What the liar says to a host that has a key.
fn say(net: &mut Net, raw: Raw, said: &HandshakeMessage) -> Vec<u8> {
    let bytes = wire::encode_handshake(VERSIONS, said);
    net.say_bytes(raw, bytes.clone());
    bytes
}

/// All that a host has said on a connection that the liar dialled, piece by piece, and their bytes.
fn heard(net: &Net, raw: Raw) -> Vec<(HandshakeMessage, Vec<u8>)> {
    heard_at(net, raw, 0)
}

fn heard_at(net: &Net, raw: Raw, side: usize) -> Vec<(HandshakeMessage, Vec<u8>)> {
    let mut bytes = &net.wires[raw.wire].ends[side].heard[..];
    let mut pieces = Vec::new();
    while let ParsedHandshake::Message(said, len) = wire::parse_handshake(bytes, true) {
        pieces.push((said, bytes[..len].to_vec()));
        bytes = &bytes[len..];
    }
    pieces
}

#[test]
fn the_same_key_opens() {
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

/// Whoever has another key, or none, on either side, is told so. The caller learns why.
#[test]
fn another_key_or_none_does_not() {
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
        assert!(net.hosts[1].proto.peers.is_empty(), "somebody without the key is nobody's peer");
        net.end();
    }
}

/// Noise, greetings that are not wanted, half of them: nothing is kept, and nothing is said but that a key is wanted.
#[test]
fn those_without_the_key_get_nowhere() {
    let greeting = wire::encode_handshake(VERSIONS, &HandshakeMessage::Hello(hello(1)));
    let mut long = greeting[..PREAMBLE_LEN + 5].to_vec();
    long[12..16].copy_from_slice(&(MAX_HELLO as u32).to_le_bytes());
    let proof = wire::encode_handshake(VERSIONS, &HandshakeMessage::Proof([1; 32], [2; 32]));
    let refusal = wire::encode_handshake(VERSIONS, &HandshakeMessage::Refusal(Refusal::Busy));
    let twice = [0, 1].map(|n| wire::encode_handshake(VERSIONS, &HandshakeMessage::Challenge([n; 32]))).concat();
    for said in [greeting.clone(), long, proof, refusal, twice, vec![0; 100], b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut net = keyed();
        allocated();
        let raw = net.raw_dial(0);
        net.say_bytes(raw, said);
        net.settle();
        assert!(net.is_shut(raw));
        for (said, _) in heard(&net, raw) {
            assert!(matches!(said, HandshakeMessage::Challenge(_) | HandshakeMessage::Refusal(_)), "{said:?}");
        }
        assert_eq!((allocated().1, live()), (0, 0));
        assert!(net.hosts[0].proto.peers.is_empty());
        net.end();
    }
}

/// A guess is one of 2^256, and each costs a connection.
#[test]
fn guessed_proofs() {
    let mut net = keyed();
    for guess in 0..200u8 {
        let raw = net.raw_dial(0);
        say(&mut net, raw, &HandshakeMessage::Challenge([guess; 32]));
        let mut proof = [guess; 32];
        proof[usize::from(guess) % 32] ^= 1;
        say(&mut net, raw, &HandshakeMessage::Proof(proof, [guess; 32]));
        assert!(net.is_shut(raw));
        assert_eq!(heard(&net, raw)[1].0, HandshakeMessage::Refusal(Refusal::OtherKey));
    }
    net.settle();
    net.end();
}

/// All that an honest engine has said, said again by somebody who has listened.
#[test]
fn a_replay_proves_nothing() {
    let mut net = keyed();
    let op = net.call(0, 1, call("secret"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"secret"));
    let wire = net.wire(0, 1);
    let said: Vec<Vec<u8>> = [0, 1].map(|side| net.wires[wire].ends[side].heard.clone()).into();
    for said in said {
        for at_once in [true, false] {
            let raw = net.raw_dial(1);
            if at_once {
                net.say_bytes(raw, said.clone());
            } else {
                said.chunks(53).for_each(|piece| net.say_bytes(raw, piece.to_vec()));
            }
            net.settle();
            assert!(net.is_shut(raw));
            let served = net.hosts[1].proto.requests();
            assert_eq!(served, 0);
            assert!(
                heard(&net, raw)
                    .iter()
                    .all(|(said, _)| !matches!(said, HandshakeMessage::Hello(_) | HandshakeMessage::Proof(..)))
            );
        }
    }
    net.settle();
    net.end();
}

/// A host's own words, sent back to it: as its challenge, and as its proof.
#[test]
fn a_mirror_proves_nothing() {
    let mut net = keyed();
    let raw = net.raw_dial(0);
    say(&mut net, raw, &HandshakeMessage::Challenge([7; 32]));
    let (challenge, _) = heard(&net, raw)[0].clone();
    // It dials, and hears its own challenge of the other connection, then its own proof.
    let peer = net.played_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(Duration::from_millis(1));
    let dialled = net.raw_dialled();
    net.say_bytes(dialled, wire::encode_handshake(VERSIONS, &challenge));
    let own: Vec<u8> = heard_at(&net, dialled, 1).into_iter().skip(1).flat_map(|(_, bytes)| bytes).collect();
    assert!(!own.is_empty(), "it has proved itself, as whoever dials does first");
    net.say_bytes(dialled, own.clone());
    assert_failed!(net.hosts[0], op, Failure::Unauthorized { .. });
    // And where it was dialled.
    net.say_bytes(raw, own);
    assert!(net.is_shut(raw));
    net.settle();
    net.end();
}

/// Who has the key, and says another hello than the one that it has proved; and the right one.
#[test]
fn a_hello_is_proved_too() {
    for honest in [true, false] {
        let mut net = keyed();
        let raw = net.raw_dial(0);
        let ours = say(&mut net, raw, &HandshakeMessage::Challenge([7; 32]));
        let theirs = heard(&net, raw)[0].1.clone();
        let greeting = wire::encode_handshake(VERSIONS, &HandshakeMessage::Hello(hello(1)));
        let digest = keys::digest(&greeting);
        let told = Told { challenges: [&ours, &theirs], answered: None, hello: &digest };
        let proof = PreSharedKey::new(SECRET.to_vec()).prove(Role::Dialling, &told);
        say(&mut net, raw, &HandshakeMessage::Proof(proof, digest));
        assert!(!net.is_shut(raw) && heard(&net, raw).len() == 1);
        say(&mut net, raw, &HandshakeMessage::Hello(hello(if honest { 1 } else { 2 })));
        assert_eq!(net.is_shut(raw), !honest);
        net.hang_up(raw);
        net.settle();
        net.end();
    }
}

/// A caller that begins, and says no more, is let go in time.
#[test]
fn half_a_proof() {
    let mut net = keyed();
    let raw = net.raw_dial(0);
    say(&mut net, raw, &HandshakeMessage::Challenge([7; 32]));
    net.say_bytes(raw, wire::encode_handshake(VERSIONS, &HandshakeMessage::Proof([0; 32], [0; 32]))[..60].to_vec());
    assert!(!net.is_shut(raw));
    net.settle();
    assert!(net.is_shut(raw) && net.hosts[0].proto.links_gone());
    net.end();
}

/// A successor at the address proves itself anew, and is told from its predecessor.
#[test]
fn a_successor_has_to_prove_itself() {
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
