//! Sizes that a peer claims and never sends.

use std::time::Duration;

use super::env::allocated;
use super::host::assert_failed;
use super::malformed::{request, unharmed};
use super::net::{Net, call, config, few};
use super::raw::{self, Raw, hello};
use super::wire::{self, BorrowedBytes, Message};
use super::{Config, Failure, LeaseRange};

const SECOND: Duration = Duration::from_secs(1);

/// Sizes are checked before anything is allocated for them.
#[test]
fn sizes_that_are_claimed() {
    let few = Config { limits: few(3), ..config() };
    let mut net = Net::with(vec![(few.clone(), true), (few, true)]);
    let raw = net.raw_peer(0, 1);
    allocated();
    for size in [u64::MAX, 1 << 62, 1 << 40, config().max_message as u64 + 1] {
        net.say(raw, &request(size, size), b"");
    }
    assert_eq!(allocated(), (0, 0));
    // Within the limits a claim is believed, but only so often.
    for number in 1..10 {
        net.say(raw, &request(number, config().max_message as u64), b"");
    }
    let (largest, total) = allocated();
    assert!(largest <= config().max_message && total <= 3 * config().max_message);
    assert!(!net.is_shut(raw));
    unharmed(net, raw);
}

/// An answer that claims more than this engine takes ends the call, not the engine.
#[test]
fn an_answer_that_claims_too_much() {
    let mut net = Net::pair();
    let peer = net.played_peer(0);
    let mut ops = Vec::new();
    ops.push(net.call_peer(0, peer, call("x")));
    net.advance(SECOND / 100);
    let raw = net.raw_dialled();
    net.say_bytes(raw, raw::greet(wire::VERSIONS, &hello(1)));
    allocated();
    for size in [u64::MAX, config().max_message as u64 + 1] {
        let number = last_call(&net, raw);
        let answer =
            Message::Response { call: number, result: 0, shape: BorrowedBytes(b""), leases: LeaseRange::default(), size };
        net.say(raw, &answer, b"");
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
    net.each_heard(raw, |message| {
        if let Message::Request { call, .. } = message {
            number = *call;
        }
    });
    number
}
