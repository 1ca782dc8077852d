//! Sizes that a peer announces without sending as many bytes.

use std::time::Duration;

use super::env::allocated;
use super::host::assert_failed;
use super::malformed::{request, unharmed};
use super::net::{Net, call, config, few};
use super::raw::{self, Raw, hello};
use super::wire::{self, BorrowedBytes, Message};
use super::{Config, Failure, LeaseRange};

const SECOND: Duration = Duration::from_secs(1);

/// Sizes are checked before memory is allocated for them.
#[test]
fn request_sizes_beyond_limits_allocate_nothing() {
    let few = Config { limits: few(3), ..config() };
    let mut net = Net::with(vec![(few.clone(), true), (few, true)]);
    let raw = net.raw_peer(0, 1);
    allocated();
    for size in [u64::MAX, 1 << 62, 1 << 40, config().max_message as u64 + 1] {
        net.send_message(raw, &request(size, size), b"");
    }
    assert_eq!(allocated(), (0, 0));
    // Sizes within the limit are allocated, but no more often than requests are admitted.
    for number in 1..10 {
        net.send_message(raw, &request(number, config().max_message as u64), b"");
    }
    let (largest, total) = allocated();
    assert!(largest <= config().max_message && total <= 3 * config().max_message);
    assert!(!net.is_shut(raw));
    unharmed(net, raw);
}

/// A response that announces more than this engine accepts ends the call, and the connection stays.
#[test]
fn response_size_beyond_the_limit_fails_the_call() {
    let mut net = Net::pair();
    let peer = net.test_peer(0);
    let mut ops = Vec::new();
    ops.push(net.call_peer(0, peer, call("x")));
    net.advance(SECOND / 100);
    let raw = net.raw_dialled();
    net.send_bytes(raw, raw::encode_hello(wire::VERSIONS, &hello(1)));
    allocated();
    for size in [u64::MAX, config().max_message as u64 + 1] {
        let number = last_call(&net, raw);
        let answer = Message::Response {
            call: number,
            result: 0,
            shape: BorrowedBytes(b""),
            leases: LeaseRange::default(),
            released: LeaseRange::default(),
            size,
        };
        net.send_message(raw, &answer, b"");
        let op = ops[ops.len() - 1];
        assert_failed!(net.hosts[0], op, Failure::TooLarge { size: s, .. } if *s == size);
        ops.push(net.call_peer(0, peer, call("again")));
        net.advance(SECOND / 100);
    }
    assert_eq!(allocated(), (0, 0));
    assert!(!net.is_shut(raw));
    unharmed(net, raw);
}

fn last_call(net: &Net, raw: Raw) -> u64 {
    let mut number = 0;
    net.for_each_received(raw, |message| {
        if let Message::Request { call, .. } = message {
            number = *call;
        }
    });
    number
}
