//! Connections that are lost, and engines that are replaced.

use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::{Failure, Remote};

const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 5;

#[test]
fn a_connection_that_is_lost_is_made_again() {
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

/// Everything in progress ends when the connection does: at every point of its life.
#[test]
fn the_connection_is_lost_at_any_point() {
    for steps in 0..60 {
        for told in [[true, true], [true, false], [false, true]] {
            let mut net = Net::pair();
            net.settings.piece = 40 << 10;
            let ops = [call("small"), call(pattern(1, 300 << 10)), call(pattern(2, 20 << 10))].map(|what| net.call(0, 1, what));
            for _ in 0..steps {
                if !net.step() {
                    net.advance(net.settings.delay);
                }
            }
            for side in (0..2).filter(|side| told[*side]) {
                net.cut_at(0, side);
            }
            net.advance(2 * config().peer_timeout + config().connect);
            // An end at which nothing is waited for is left to the system's keep-alive.
            net.cut(0);
            for op in ops {
                match net.hosts[0].outcome(op) {
                    Some(super::host::TestOutcome::Answered { .. }) => {}
                    Some(super::host::TestOutcome::Failed(Failure::Disconnected { .. } | Failure::Unreachable { .. })) => {}
                    other => panic!("after {steps} steps, {told:?}: {other:?}"),
                }
            }
            net.end();
        }
    }
}

/// The server's handlers learn that their callers are gone.
#[test]
fn requests_of_a_lost_connection_are_cancelled() {
    let mut net = Net::new(2);
    let ops: Vec<_> = (0..10).map(|n| net.call(0, 1, call(pattern(n, n as usize * 5000)))).collect();
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[1].inbox.len(), 10);
    net.cut(0);
    assert_eq!(net.hosts[1].cancelled.len(), 10);
    for arrived in std::mem::take(&mut net.hosts[1].inbox) {
        net.with_host(1, |host| assert!(host.answer(arrived.request, b"nobody").is_err()));
    }
    for op in ops {
        assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    }
    net.end();
}

/// One that does not listen can be called as long as it is connected, and not after that.
#[test]
fn a_peer_that_can_not_be_dialled() {
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

/// One side has lost the connection and makes a new one, before the other has noticed anything. Whoever is called back
/// over the new connection is reached; what waits on the old one ends in time; and then all is well.
#[test]
fn a_caller_comes_back_before_its_loss_was_noticed() {
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
        assert_eq!(net.hosts[server].body(back), served(b"back"), "the caller that has just called is not reached");
        net.with_host(server, |host| host.answer(second.request, b"").unwrap());
        net.advance(2 * config().peer_timeout);
        assert_eq!(net.hosts[caller].body(again), b"");
        assert_failed!(net.hosts[server], stuck, Failure::Disconnected { .. });
        // The loss of the old connection does not take the new one away.
        let back = net.call_peer(server, second.peer.id, call("back"));
        net.settle();
        assert_eq!(net.hosts[server].body(back), served(b"back"));
        // And its memory is found where it is.
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
        assert!(matches!(net.hosts[server].outcome(pull), Some(super::host::TestOutcome::Moved(10))));
        net.revoke(caller, TOKEN);
        drop((first, second, tag));
        net.end();
    }
}

/// The engine at the address is another one now, and its connections were closed as the old one died.
#[test]
fn a_replaced_engine_is_met_anew() {
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

/// The old one died without a word, and the new one dials: it does not answer for the old one, which is missed in time. And
/// then its address is the new one's.
#[test]
fn a_replaced_engine_dials_before_the_old_one_is_missed() {
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

/// A bulk of the old one, used over the new connection: the new one says that it is not its own.
#[test]
fn old_traffic_reaches_nobody_else() {
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

/// Three engines that know each other: one is replaced, the other two don't mind.
#[test]
fn one_of_three_is_replaced() {
    let mut net = Net::new(3);
    net.hosts.iter_mut().for_each(|host| host.echo = true);
    let everybody = |net: &mut Net| {
        for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)] {
            let op = net.call(from, to, call(pattern(from as u64, 30_000)));
            net.advance(MOMENT);
            assert!(net.hosts[from].body(op) == served(&pattern(from as u64, 30_000)), "{from} to {to}");
        }
    };
    for told in [true, false, true, false] {
        everybody(&mut net);
        net.restart(1, told);
        // Whoever is not told learns from the silence, when it asks for something.
        for (from, to) in [(0, 1), (2, 1), (1, 0), (1, 2)] {
            net.call(from, to, call("are you there?"));
        }
        net.advance(2 * config().peer_timeout);
    }
    everybody(&mut net);
    net.end();
}

/// One engine under two addresses is reached by both.
#[test]
fn two_addresses_of_one_engine() {
    let mut net = Net::pair();
    net.hosts[0].echo = true;
    let second: crate::Address = "tcp://10.0.0.2:7001".parse().unwrap();
    let both = vec![net.hosts[1].address.clone(), second.clone()];
    net.hosts[1].proto.set_addresses(both);
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

/// A peer that is somebody else each time leaves nothing behind, however often it is dialled.
#[test]
fn engines_that_are_no_more_are_forgotten() {
    let mut net = Net::new(1);
    let peer = net.played_peer(0);
    for incarnation in 1..200 {
        net.call_peer(0, peer, call("who is there"));
        net.advance(MOMENT);
        let raw = net.raw_dialled();
        net.say_bytes(raw, super::raw::greet(super::wire::VERSIONS, &super::raw::hello(incarnation)));
        net.hang_up(raw);
        assert!(net.hosts[0].proto.by_incarnation.len() <= 1);
    }
    net.end();
}
