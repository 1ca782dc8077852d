//! Two engines that dial each other at the same time, and then have two connections.

use std::time::Duration;

use super::env::{Random, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, call};
use super::raw::hello;
use super::wire::{self, Message};
use super::{Failure, Host};

const MOMENT: Duration = Duration::from_millis(1);

fn echoing(order: bool) -> Net {
    let mut net = Net::new(2);
    if !order {
        // The host with the larger incarnation comes first.
        net.restart(0, true);
    }
    net.hosts.iter_mut().for_each(|host| host.echo = true);
    net
}

/// The wire that a new call of this host takes.
fn used(net: &mut Net, from: usize) -> usize {
    let before: Vec<_> = net.wires.iter().map(|wire| [wire.ends[0].outgoing.len(), wire.ends[1].outgoing.len()]).collect();
    let op = net.call(from, 1 - from, call("which way?"));
    let after = net.wires.iter().map(|wire| [wire.ends[0].outgoing.len(), wire.ends[1].outgoing.len()]);
    let wire = after.zip(before).position(|(after, before)| after != before).expect("a call is sent");
    net.settle();
    assert_eq!(net.hosts[from].body(op), served(b"which way?"));
    wire
}

/// Whatever overtakes what: everything begun is answered, and both agree on one of the two without a word.
#[test]
fn both_dial_at_once_and_agree() {
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
        assert!(net.wires.len() <= 2);
        let (first, second) = (used(&mut net, 0), used(&mut net, 1));
        assert_eq!(first, second, "seed {seed}: each uses its own");
        assert!(net.wires.len() <= 2);
        net.end();
    }
    assert!(doubled > 50, "only {doubled} of the rounds had two connections");
}

/// One of the two is lost: what was begun on it fails, what was begun on the other does not, and new calls find a way.
#[test]
fn one_of_two_is_lost() {
    for order in [true, false] {
        for lost in [0, 1] {
            let mut net = echoing(order);
            net.hosts.iter_mut().for_each(|host| host.echo = false);
            let ops = [net.call(0, 1, call("a")), net.call(1, 0, call("b"))];
            net.advance(MOMENT);
            assert_eq!(net.wires.len(), 2);
            net.cut(lost);
            let hurt = lost;
            assert_failed!(net.hosts[hurt], ops[hurt], Failure::Disconnected { .. });
            net.serve(hurt);
            net.hosts[1 - hurt].inbox.clear();
            net.hosts.iter_mut().for_each(|host| host.echo = true);
            net.settle();
            assert_eq!(net.hosts[1 - hurt].body(ops[1 - hurt]).len(), 1);
            for host in [0, 1] {
                let op = net.call(host, 1 - host, call("again"));
                net.settle();
                assert_eq!(net.hosts[host].body(op), served(b"again"));
            }
            assert_eq!(used(&mut net, 0), used(&mut net, 1));
            net.end();
        }
    }
}

/// The same where nobody can be dialled any more: the connection that is left serves.
#[test]
fn the_one_that_is_left_serves() {
    for order in [true, false] {
        for lost in [0, 1] {
            let mut net = echoing(order);
            let ops = [net.call(0, 1, call("a")), net.call(1, 0, call("b"))];
            net.settle();
            assert_eq!((net.wires.len(), net.hosts[0].is_done(ops[0])), (2, true));
            net.cut(lost);
            net.hosts.iter_mut().for_each(|host| host.listens = false);
            for host in [0, 1] {
                let op = net.call(host, 1 - host, call("again"));
                net.settle();
                assert_eq!(net.hosts[host].body(op), served(b"again"), "order {order}, lost {lost}, host {host}");
            }
            net.end();
        }
    }
}

/// The peer is replaced by another engine, which dials: what waits on either of the old connections ends now.
#[test]
fn both_end_when_the_peer_is_replaced() {
    for order in [true, false] {
        let mut net = echoing(order);
        net.hosts[1].echo = false;
        let mut ops = vec![net.call(0, 1, call("on the one that it dialled"))];
        net.call(1, 0, call("b"));
        net.advance(MOMENT);
        assert_eq!(net.wires.len(), 2);
        ops.push(net.call(0, 1, call("on the one that they agreed on")));
        net.advance(MOMENT);
        net.restart(1, false);
        // It says who it is by dialling.
        net.hosts[1].echo = true;
        let fresh = net.call(1, 0, call("hello again"));
        net.advance(10 * MOMENT);
        assert_eq!(net.hosts[1].body(fresh), served(b"hello again"));
        for op in ops {
            assert!(net.hosts[0].is_done(op), "order {order}: a call to an engine that is no more goes on waiting");
            assert_failed!(net.hosts[0], op, Failure::PeerRestarted);
        }
        net.end();
    }
}

/// An engine may call itself: over a connection like any other.
#[test]
fn an_engine_dials_itself() {
    let mut net = Net::new(1);
    net.hosts[0].echo = true;
    for n in 0..3 {
        let op = net.call(0, 0, call(pattern(n, 100_000)));
        net.settle();
        assert!(net.hosts[0].body(op) == served(&pattern(n, 100_000)));
    }
    net.end();
}

/// A peer that has two connections and loses the one that is used is not forgotten while the other serves.
#[test]
fn a_peer_with_a_second_connection_is_not_forgotten() {
    let mut net = echoing(true);
    let ops = [net.call(0, 1, call("a")), net.call(1, 0, call("b"))];
    net.settle();
    assert_eq!((net.wires.len(), net.hosts[1].is_done(ops[1])), (2, true));
    net.hosts[0].echo = false;
    let wire = used_by_the_smaller(&mut net);
    // A large request is on its way over the one that they don't use, when the other is lost.
    net.cut_at(wire, usize::from(net.wires[wire].ends[0].host != 0));
    net.hosts[0].tags.clear();
    net.hosts[0].inbox.clear();
    for n in 0..300u64 {
        let raw = net.raw_dial(0);
        net.say_bytes(raw, wire::greet(wire::VERSIONS, &hello(0x10_0000 + n)));
        net.hang_up(raw);
    }
    net.hosts[0].echo = true;
    let other = 1 - wire;
    let end = usize::from(net.wires[other].ends[0].host != 1);
    let message = wire_request(&net.hosts[1]);
    let link = net.wires[other].ends[end].link.expect("the other connection is open");
    net.with_host(1, |host| host.proto.links[link].say(&message, b""));
    net.with_host(1, |host| host.proto.mark_ready(link));
    net.advance(MOMENT);
    assert!(net.hosts[0].proto.requests() == 0, "a request is neither answered nor refused");
    net.end();
}

fn used_by_the_smaller(net: &mut Net) -> usize {
    net.hosts[0].echo = true;
    net.hosts[1].echo = true;
    used(net, 0)
}

fn wire_request(_host: &Host) -> Message<'static> {
    Message::Request {
        call: 99,
        procedure: 77,
        name: Some("late"),
        provider: 0,
        budget_us: 1_000_000,
        one_way: false,
        want_shape: false,
        shape: wire::Bytes(b""),
        leases: super::Leases::default(),
        size: 0,
    }
}
