//! Two engines that dial each other at the same time and so have two connections.

use std::time::Duration;

use super::Failure;
use super::env::{Random, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{self, hello};
use super::wire;

const MOMENT: Duration = Duration::from_millis(1);

/// Two hosts; `order` selects which one has the larger incarnation.
fn echoing(order: bool) -> Net {
    let mut net = Net::new(2);
    if !order {
        net.restart(0, true);
    }
    net.echo_everywhere();
    net
}

/// The wire that a new call of this host uses.
fn wire_in_use(net: &mut Net, from: usize) -> usize {
    let waiting =
        |net: &Net| -> Vec<_> { net.wires.iter().map(|wire| wire.ends.each_ref().map(|end| end.outgoing.len())).collect() };
    let before = waiting(net);
    let op = net.call(from, 1 - from, call("which wire?"));
    let wire = waiting(net).into_iter().zip(before).position(|(after, before)| after != before);
    net.settle();
    assert_eq!(net.hosts[from].body(op), served(b"which wire?"));
    wire.expect("a call is sent over a connection that is there")
}

/// In any order of events all calls are answered, there are at most two connections, and each engine keeps using the same
/// one.
#[test]
fn simultaneous_connects_answer_all_calls() {
    let mut doubled = 0;
    for seed in 0..200 {
        let mut net = echoing(seed % 2 == 0);
        net.random = Some(Random(seed));
        net.settings.piece = 1 + seed as usize * 13 % 200;
        let mut ops = vec![(0, net.call(0, 1, call("a"))), (1, net.call(1, 0, call(pattern(seed, 20_000))))];
        for _ in 0..seed / 7 {
            if !net.step() {
                net.advance(net.settings.delay);
            }
            if seed % 5 == 0 {
                ops.push((0, net.call(0, 1, call("more"))));
            }
        }
        net.settle();
        for (host, op) in ops {
            net.hosts[host].body(op);
        }
        doubled += usize::from(net.wires.len() == 2);
        let (first, second) = (wire_in_use(&mut net, 0), wire_in_use(&mut net, 1));
        assert_eq!((wire_in_use(&mut net, 0), wire_in_use(&mut net, 1)), (first, second));
        assert!(net.wires.len() <= 2);
        net.end();
    }
    assert!(doubled > 50, "only {doubled} of the rounds had two connections");
}

/// One of the two is lost: its calls fail, calls on the other don't, and new calls succeed.
#[test]
fn loss_of_one_of_two_connections_fails_its_calls_only() {
    for order in [true, false] {
        for lost in [0, 1] {
            let mut net = echoing(order);
            net.hosts.iter_mut().for_each(|host| host.echo = false);
            let ops = [net.call(0, 1, call("a")), net.call(1, 0, call("b"))];
            net.advance(MOMENT);
            assert_eq!(net.wires.len(), 2);
            net.cut(lost);
            // Each call was sent on the connection that its own host had dialled.
            assert_failed!(net.hosts[lost], ops[lost], Failure::Disconnected { .. });
            net.echo_everywhere();
            net.serve(lost);
            net.drop_requests(1 - lost);
            net.settle();
            assert_eq!(net.hosts[1 - lost].body(ops[1 - lost]).len(), 1);
            for _ in 0..2 {
                for host in [0, 1] {
                    let op = net.call(host, 1 - host, call("again"));
                    net.settle();
                    assert_eq!(net.hosts[host].body(op), served(b"again"));
                }
            }
            assert!(net.wires.len() <= 3, "a connection is made anew once, not for each call");
            net.end();
        }
    }
}

/// The peer is replaced, and its connections are not closed: what waits on either connection fails in time.
#[test]
fn calls_on_both_connections_fail_when_the_peer_is_replaced() {
    for order in [true, false] {
        let mut net = echoing(order);
        net.hosts[1].echo = false;
        let ops = [net.call(0, 1, call("a")), net.call(0, 1, call(pattern(1, 1 << 20)))];
        net.call(1, 0, call("b"));
        net.advance(MOMENT);
        assert_eq!(net.wires.len(), 2);
        net.restart(1, false);
        net.hosts[1].echo = true;
        let fresh = net.call(1, 0, call("hello again"));
        net.advance(10 * MOMENT);
        assert_eq!(net.hosts[1].body(fresh), served(b"hello again"));
        net.advance(config().peer_timeout + config().peer_timeout / 4);
        for op in ops {
            assert_failed!(net.hosts[0], op, Failure::PeerRestarted | Failure::Disconnected { .. });
        }
        let op = net.call(0, 1, call("and now?"));
        net.settle();
        assert_eq!(net.hosts[0].body(op), served(b"and now?"));
        net.end();
    }
}

/// An engine may call itself, over an ordinary connection.
#[test]
fn calls_of_an_engine_to_itself_succeed() {
    let mut net = Net::new(1);
    net.echo_everywhere();
    for n in 0..3 {
        let op = net.call(0, 0, call(pattern(n, 100_000)));
        net.settle();
        assert!(net.hosts[0].body(op) == served(&pattern(n, 100_000)));
    }
    assert_eq!(net.wires.len(), 1);
    net.end();
}

/// The last reference to a connected peer is dropped, and many others connect and disconnect: both its connections stay.
#[test]
fn connected_peer_without_references_is_not_forgotten() {
    for order in [true, false] {
        let mut net = echoing(order);
        let ops = [net.call(0, 1, call("a")), net.call(1, 0, call("b"))];
        net.settle();
        assert_eq!((net.wires.len(), net.hosts[0].is_done(ops[0])), (2, true));
        net.hosts[0].tags.clear();
        for n in 0..300u64 {
            let raw = net.raw_dial(0);
            net.send_bytes(raw, raw::encode_hello(wire::VERSIONS, &hello(0x10_0000 + n)));
            net.disconnect(raw);
        }
        let op = net.call(1, 0, call("remember me?"));
        net.settle();
        assert_eq!(net.hosts[1].body(op), served(b"remember me?"));
        net.end();
    }
}
