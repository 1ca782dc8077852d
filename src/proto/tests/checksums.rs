//! Bytes that are not what was sent.

use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{greet, hello};
use super::wire::{self, Message};
use super::{Config, Failure, Status, wire_id};

/// Both sides have checksums of bodies when one of them wants them.
#[test]
fn one_of_two_is_enough() {
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

/// A frame whose body has lost a bit.
fn damaged(message: &Message<'_>, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::put(&mut bytes, message, body, true);
    let at = bytes.len() - 5;
    bytes[at] ^= 4;
    bytes
}

/// Arguments that have been damaged: the call is refused, and others on the connection go on.
#[test]
fn damaged_arguments() {
    let mut net = Net::pair();
    let raw = net.raw_peer(1, 7);
    net.say_bytes(raw, damaged(&super::malformed::request(5, 3), b"abc"));
    net.say(raw, &super::malformed::request(6, 3), b"abc");
    let mut said = Vec::new();
    net.each_heard(raw, |message| match message {
        Message::Refuse { call, status } => said.push((*call, Some(status.clone()))),
        Message::Response { call, .. } => said.push((*call, None)),
        _ => {}
    });
    assert_eq!(said, [(5, Some(Status::Checksum)), (6, None)]);
    net.hang_up(raw);
    net.end();
}

/// An answer that has been damaged ends its call, and no other.
#[test]
fn a_damaged_answer() {
    let mut net = Net::new(1);
    let peer = net.played_peer(0);
    let ops = [net.call_peer(0, peer, call("x")), net.call_peer(0, peer, call("y"))];
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.say_bytes(raw, greet(wire::VERSIONS, &hello(7)));
    let ids = ops.map(|op| match net.hosts[0].ids[&op] {
        super::host::OperationId::Call(id) => wire_id(id),
        super::host::OperationId::Transfer(_) => unreachable!(),
    });
    let answer = |call| Message::Response {
        call,
        result: 0,
        shape: wire::BorrowedBytes(b""),
        leases: super::LeaseRange::default(),
        size: 3,
    };
    net.say_bytes(raw, damaged(&answer(ids[0]), b"abc"));
    net.say(raw, &answer(ids[1]), b"def");
    assert_failed!(net.hosts[0], ops[0], Failure::Checksum);
    assert_eq!(net.hosts[0].body(ops[1]), b"def");
    net.hang_up(raw);
    net.end();
}

/// Where the head of a message is damaged, nobody knows what follows: everything on the connection ends, with the cause.
#[test]
fn a_damaged_head() {
    let mut net = Net::new(1);
    let peer = net.played_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.say_bytes(raw, greet(wire::VERSIONS, &hello(7)));
    let mut ping = super::raw::frame(&Message::Ping, b"");
    ping[12] ^= 1;
    net.say_bytes(raw, ping);
    assert_failed!(net.hosts[0], op, Failure::Checksum);
    assert!(net.is_shut(raw));
    net.end();
}

/// A greeting, too.
#[test]
fn a_damaged_greeting() {
    let mut net = Net::new(1);
    let peer = net.played_peer(0);
    let op = net.call_peer(0, peer, call("x"));
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    let mut greeting = greet(wire::VERSIONS, &hello(7));
    greeting[22] ^= 1;
    net.say_bytes(raw, greeting);
    assert_failed!(net.hosts[0], op, Failure::Checksum);
    net.end();
}
