//! Connections that are lost, and engines that are replaced.

use crate::address::Interfaces;
use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::{Failure, Remote};

const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 5;

#[test]
fn call_after_connection_loss_reconnects() {
    let mut net = Net::pair();
    let peer = net.peer(0, 1);
    for round in 0..5u8 {
        let op = net.call_peer(0, peer, call([round]));
        net.settle();
        assert_eq!(net.hosts[0].body(op), served(&[round]));
        assert!(net.hosts[0].proto.connection(peer).is_some());
        net.cut(round.into());
        assert!(net.hosts[0].proto.connection(peer).is_none());
    }
    assert_eq!(net.wires.len(), 5);
    net.end();
}

/// Everything in progress ends when the connection is lost, at every point.
#[test]
fn connection_loss_at_any_point_fails_pending_calls() {
    for steps in 0..60 {
        for notified in [[true, true], [true, false], [false, true]] {
            let mut net = Net::pair();
            net.settings.piece = 40 << 10;
            let ops = [call("small"), call(pattern(1, 300 << 10)), call(pattern(2, 20 << 10))].map(|what| net.call(0, 1, what));
            for _ in 0..steps {
                if !net.step() {
                    net.advance(net.settings.delay);
                }
            }
            for side in (0..2).filter(|side| notified[*side]) {
                net.cut_at(0, side);
            }
            net.advance(2 * config().peer_timeout + config().connect);
            // An idle end is left to the keep-alive of the operating system.
            net.cut(0);
            for op in ops {
                match net.hosts[0].outcome(op) {
                    Some(super::host::TestOutcome::Answered { .. }) => {}
                    Some(super::host::TestOutcome::Failed(Failure::Disconnected { .. } | Failure::Unreachable { .. })) => {}
                    other => panic!("after {steps} steps, {notified:?}: {other:?}"),
                }
            }
            net.end();
        }
    }
}

/// Handlers are notified that their callers have disconnected.
#[test]
fn requests_of_a_lost_connection_are_cancelled_at_the_server() {
    let mut net = Net::new(2);
    let ops: Vec<_> = (0..10).map(|n| net.call(0, 1, call(pattern(n, n as usize * 5000)))).collect();
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[1].inbox.len(), 10);
    net.cut(0);
    assert_eq!(net.hosts[1].cancelled.len(), 10);
    for arrived in std::mem::take(&mut net.hosts[1].inbox) {
        net.with_host(1, |host| assert!(host.answer(arrived.request, b"discarded").is_err()));
    }
    for op in ops {
        assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    }
    net.end();
}

/// A peer that does not listen can be called only while it is connected.
#[test]
fn call_to_a_disconnected_peer_without_address_fails() {
    let mut net = Net::with(vec![(config(), false), (config(), true)]);
    net.hosts[0].echo = true;
    net.call(0, 1, call("x"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    let back = net.call_peer(1, arrived.peer.id, call("back"));
    net.advance(MOMENT);
    assert_eq!(net.hosts[1].body(back), served(b"back"));
    net.cut(0);
    let gone = net.call_peer(1, arrived.peer.id, call("back"));
    assert_failed!(net.hosts[1], gone, Failure::Disconnected { .. });
    net.end();
}

/// One side has lost the connection and makes a new one before the other notices. Calls back to it use the new connection,
/// and what waits on the old one fails in time.
#[test]
fn caller_that_reconnects_before_its_loss_is_noticed_is_reached() {
    for (caller, server) in [(0, 1), (1, 0)] {
        let mut hosts = vec![(config(), true); 2];
        hosts[caller].1 = false;
        let mut net = Net::with(hosts);
        net.hosts[caller].echo = true;
        net.call(caller, server, call("first"));
        net.advance(MOMENT);
        let first = net.hosts[server].take();
        let stuck = net.call_peer(server, first.peer.id, call("stuck"));
        net.wires[0].frozen = true;
        net.cut_at(0, 0);
        let again = net.call(caller, server, call("again"));
        net.advance(MOMENT);
        let second = net.hosts[server].take();
        let back = net.call_peer(server, second.peer.id, call("back"));
        net.advance(10 * MOMENT);
        assert_eq!(net.hosts[server].body(back), served(b"back"), "the call did not use the new connection");
        net.with_host(server, |host| host.answer(second.request, b"").unwrap());
        net.advance(2 * config().peer_timeout);
        assert_eq!(net.hosts[caller].body(again), b"");
        assert_failed!(net.hosts[server], stuck, Failure::Disconnected { .. });
        // The loss of the old connection does not affect the new one.
        let back = net.call_peer(server, second.peer.id, call("back"));
        net.settle();
        assert_eq!(net.hosts[server].body(back), served(b"back"));
        // Transfers use the new connection, too.
        net.expose(caller, TOKEN, vec![1; 10], true, true);
        let owner = net.hosts[caller].incarnation;
        let tag = net.hosts[server].proto.lookup_incarnation(owner).expect("it is connected");
        let near = Mem::new(vec![0; 10]);
        let pull = net.transfer_to(
            server,
            true,
            Remote { peer: tag.id, owner, token: TOKEN, offset: 0, keys: None },
            &near,
            MOMENT * 100,
        );
        net.settle();
        assert!(matches!(net.hosts[server].outcome(pull), Some(super::host::TestOutcome::Transferred(10))));
        net.revoke(caller, TOKEN);
        drop((first, second, tag));
        net.end();
    }
}

/// The engine at the address is replaced, and the connections of the old one were closed.
#[test]
fn call_to_a_replaced_engine_reaches_the_new_one() {
    let mut net = Net::pair();
    let peer = net.peer(0, 1);
    let op = net.call_peer(0, peer, call("old"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"old"));
    net.restart(1, true);
    net.advance(MOMENT);
    let op = net.call_peer(0, peer, call("new"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"new"));
    let incarnation = net.hosts[1].incarnation;
    assert_eq!(net.hosts[0].proto.lookup_incarnation(incarnation).map(|tag| tag.id), Some(peer));
    net.end();
}

/// The old engine died without closing its connections, and the new one dials: operations with the old one fail in time, and
/// then the address leads to the new one.
#[test]
fn new_engine_that_dials_before_the_old_times_out_is_reached() {
    let mut net = Net::new(2);
    net.hosts[0].echo = true;
    net.expose(1, TOKEN, vec![1; 8 << 20], true, true);
    let ops = [
        net.call(0, 1, call("waits")),
        net.call(0, 1, call(pattern(1, 1 << 20))),
        net.pull(0, 1, TOKEN, 0, &Mem::new(vec![0; 8 << 20])),
        net.push(0, 1, TOKEN, 0, &Mem::new(vec![0; 8 << 20])),
    ];
    net.settings.piece = 64 << 10;
    net.settings.pace = MOMENT;
    net.advance(10 * MOMENT);
    net.restart(1, false);
    let hello = net.call(1, 0, call("I am new here"));
    net.advance(20 * MOMENT);
    assert_eq!(net.hosts[1].body(hello), served(b"I am new here"));
    net.settings.pace = Duration::ZERO;
    net.advance(config().peer_timeout + config().peer_timeout / 4);
    for op in ops {
        assert_failed!(net.hosts[0], op, Failure::PeerRestarted | Failure::Disconnected { .. });
    }
    net.echo_everywhere();
    let op = net.call(0, 1, call("and you?"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"and you?"));
    net.end();
}

/// A bulk of the old engine, used over the new connection: the new engine refuses it.
#[test]
fn push_for_a_replaced_engine_fails_with_restarted() {
    let mut net = Net::pair();
    let op = net.call(0, 1, call("x"));
    net.settle();
    net.hosts[0].body(op);
    let (peer, owner) = (net.peer(0, 1), net.hosts[1].incarnation);
    net.restart(1, true);
    net.settle();
    net.expose(1, TOKEN, vec![1; 100], true, true);
    let push = net.transfer_to(
        0,
        false,
        Remote { peer, owner, token: TOKEN, offset: 0, keys: None },
        &Mem::new(vec![9; 100]),
        MOMENT * 500,
    );
    net.settle();
    assert_failed!(net.hosts[0], push, Failure::PeerRestarted);
    assert_eq!(net.hosts[1].exposed[&TOKEN].bytes(), [1; 100]);
    net.revoke(1, TOKEN);
    net.end();
}

/// Three engines connected to each other: one is replaced, and the other two are not affected.
#[test]
fn replacing_one_of_three_engines_leaves_the_others_connected() {
    let mut net = Net::new(3);
    net.hosts.iter_mut().for_each(|host| host.echo = true);
    let call_all_pairs = |net: &mut Net| {
        for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)] {
            let op = net.call(from, to, call(pattern(from as u64, 30_000)));
            net.advance(MOMENT);
            assert!(net.hosts[from].body(op) == served(&pattern(from as u64, 30_000)), "{from} to {to}");
        }
    };
    for notified in [true, false, true, false] {
        call_all_pairs(&mut net);
        net.restart(1, notified);
        // A peer that is not notified finds out by the peer timeout of its next operation.
        for (from, to) in [(0, 1), (2, 1), (1, 0), (1, 2)] {
            net.call(from, to, call("are you there?"));
        }
        net.advance(2 * config().peer_timeout);
    }
    call_all_pairs(&mut net);
    net.end();
}

/// An engine with two addresses is reached by both.
#[test]
fn engine_with_two_addresses_is_reached_by_both() {
    let mut net = Net::pair();
    net.hosts[0].echo = true;
    let second: crate::Address = "tcp://10.0.0.2:7001".parse().unwrap();
    let both = vec![net.hosts[1].address.clone(), second.clone()];
    net.hosts[1].proto.set_addresses(both, &Interfaces::default());
    let op = net.call(0, 1, call("one"));
    net.settle();
    net.hosts[0].body(op);
    let first = std::mem::replace(&mut net.hosts[1].address, second);
    let op = net.call(0, 1, call("two"));
    net.settle();
    net.hosts[0].body(op);
    net.hosts[1].address = first;
    let back = net.call(1, 0, call("back"));
    net.settle();
    net.hosts[1].body(back);
    net.end();
}

/// A peer on this host that listens on all interfaces is the one at any address of this host, with its port.
#[test]
fn peer_on_this_host_is_found_at_the_address_of_an_interface() {
    use super::raw::{encode_hello, hello};
    for (claimed, address, known) in [
        ("tcp://0.0.0.0:7001", "tcp://10.0.0.5:7001", true),
        ("tcp://0.0.0.0:7001", "tcp://127.0.0.1:7001", true),
        ("tcp://10.0.0.5:7001", "tcp://10.0.0.5:7001", true),
        // Another port, another host, another IP version.
        ("tcp://0.0.0.0:7001", "tcp://10.0.0.5:7002", false),
        ("tcp://0.0.0.0:7001", "tcp://10.0.0.6:7001", false),
        ("tcp://10.0.0.6:7001", "tcp://10.0.0.6:7001", false),
        ("tcp://[::]:7001", "tcp://10.0.0.5:7001", false),
    ] {
        let mut net = Net::new(1);
        let own = vec!["tcp://0.0.0.0:7000".parse().unwrap()];
        net.hosts[0].proto.set_addresses(own, &Interfaces::of(["tcp://10.0.0.5:7000".parse().unwrap()]));
        let address: crate::Address = address.parse().unwrap();
        let looked_up = net.hosts[0].proto.lookup(&address);
        let raw = net.raw_dial_from(0, "shm://");
        let sent = super::wire::Hello { addresses: vec![claimed.parse().unwrap()], ..hello(1) };
        net.send_bytes(raw, encode_hello(super::wire::VERSIONS, &sent));
        let connected = net.hosts[0].proto.connection(looked_up.id).is_some();
        assert_eq!(connected, known, "{claimed} over shm, {address} looked up");
        drop(looked_up);
        net.disconnect(raw);
        net.end();
    }
}

/// A peer with a new incarnation each time leaves nothing behind, however often it is dialled.
#[test]
fn replaced_engines_are_forgotten() {
    let mut net = Net::new(1);
    let peer = net.test_peer(0);
    for incarnation in 1..200 {
        net.call_peer(0, peer, call("connects"));
        net.advance(MOMENT);
        let raw = net.raw_dialled();
        net.send_bytes(raw, super::raw::encode_hello(super::wire::VERSIONS, &super::raw::hello(incarnation)));
        net.disconnect(raw);
        assert!(net.hosts[0].proto.by_incarnation.len() <= 1);
    }
    net.end();
}
