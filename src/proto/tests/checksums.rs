//! Corruption in transit: checksums of messages and bodies.

use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{encode_hello, hello};
use super::wire::{self, Message};
use super::{Config, Failure, Status, wire_id};

/// Both sides use checksums of bodies if one of them asks for them.
#[test]
fn checksums_wanted_by_one_side_are_used_by_both() {
    for (first, second) in [(false, false), (true, false), (false, true), (true, true)] {
        let with = |checksums| (Config { checksums, ..config() }, true);
        let mut net = Net::with(vec![with(first), with(second)]);
        net.echo_everywhere();
        let ops = [net.call(0, 1, call("there")), net.call(0, 1, call(vec![1; 100_000]))];
        net.settle();
        assert_eq!(net.hosts[0].body(ops[0]), served(b"there"));
        assert_eq!(net.hosts[0].body(ops[1]).len(), 100_000);
        for host in &net.hosts {
            assert_eq!(host.covered.len(), usize::from(first || second));
        }
        net.end();
    }
}

/// A frame with a flipped bit in its body.
fn corrupted(message: &Message<'_>, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::put(&mut bytes, message, body, true);
    let at = bytes.len() - 5;
    bytes[at] ^= 4;
    bytes
}

/// Corrupt arguments: the call is refused, and other calls on the connection go on.
#[test]
fn corrupt_arguments_are_refused_with_checksum() {
    let mut net = Net::pair();
    let raw = net.raw_peer(1, 7);
    net.send_bytes(raw, corrupted(&super::malformed::request(5, 3), b"abc"));
    net.send_message(raw, &super::malformed::request(6, 3), b"abc");
    let mut replies = Vec::new();
    net.for_each_received(raw, |message| match message {
        Message::Refuse { call, status } => replies.push((*call, Some(status.clone()))),
        Message::Response { call, .. } => replies.push((*call, None)),
        _ => {}
    });
    assert_eq!(replies, [(5, Some(Status::Checksum)), (6, None)]);
    net.disconnect(raw);
    net.end();
}

/// A corrupt response ends its call only.
#[test]
fn corrupt_response_fails_its_call_only() {
    let mut net = Net::new(1);
    let peer = net.test_peer(0);
    let ops = [net.call_peer(0, peer, call("x")), net.call_peer(0, peer, call("y"))];
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.send_bytes(raw, encode_hello(wire::VERSIONS, &hello(7)));
    let ids = ops.map(|op| match net.hosts[0].ids[&op] {
        super::host::OperationId::Call(id) => wire_id(id),
        super::host::OperationId::Transfer(_) => unreachable!(),
    });
    let answer = |call| Message::Response {
        call,
        result: 0,
        shape: wire::BorrowedBytes(b""),
        leases: super::LeaseRange::default(),
        released: super::LeaseRange::default(),
        size: 3,
    };
    net.send_bytes(raw, corrupted(&answer(ids[0]), b"abc"));
    net.send_message(raw, &answer(ids[1]), b"def");
    assert_failed!(net.hosts[0], ops[0], Failure::Checksum);
    assert_eq!(net.hosts[0].body(ops[1]), b"def");
    net.disconnect(raw);
    net.end();
}

/// After a corrupt message header the frame boundaries are lost: the connection ends with this cause.
#[test]
fn corrupt_message_header_ends_the_connection() {
    let mut net = Net::new(1);
    let peer = net.test_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.send_bytes(raw, encode_hello(wire::VERSIONS, &hello(7)));
    let mut ping = super::raw::frame(&Message::Ping, b"");
    ping[12] ^= 1;
    net.send_bytes(raw, ping);
    assert_failed!(net.hosts[0], op, Failure::Checksum);
    assert!(net.is_shut(raw));
    net.end();
}

/// The same for a handshake message.
#[test]
fn corrupt_handshake_ends_the_connection() {
    let mut net = Net::new(1);
    let peer = net.test_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    let mut handshake = encode_hello(wire::VERSIONS, &hello(7));
    handshake[22] ^= 1;
    net.send_bytes(raw, handshake);
    assert_failed!(net.hosts[0], op, Failure::Checksum);
    net.end();
}
