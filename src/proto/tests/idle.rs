//! Idle connections: when they are closed, when not, and how the engines meet again. `idle_orders.rs` has the orders of events.

use std::time::Duration;

use super::devices::keys;
use super::env::{Mem, TestLease, pattern};
use super::host::{TestOutcome, assert_failed, served};
use super::net::{Net, TestCall, call, config};
use super::{AccessPolicy, Config, Failure, Mode, PreSharedKey, Remote, Status};

pub(super) const MOMENT: Duration = Duration::from_millis(1);
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
const TOKEN: u128 = 0x1d1e;

pub(super) fn idle() -> Config {
    Config { idle_timeout: Some(TIMEOUT), ..config() }
}

/// Two hosts; the first closes idle connections. They listen or don't.
fn hosts(listen: [bool; 2]) -> Net {
    let mut net = Net::with(vec![(idle(), listen[0]), (config(), listen[1])]);
    net.echo_everywhere();
    net
}

/// The same, connected.
fn scene() -> Net {
    let mut net = hosts([true, true]);
    net.call(0, 1, call("hello"));
    net.advance(MOMENT);
    net
}

fn links(net: &Net) -> [usize; 2] {
    [0, 1].map(|host| net.hosts[host].proto.links.len())
}

/// Lets time pass in which idle connections are closed; true if none is left.
fn is_closed_when_idle(net: &mut Net) -> bool {
    net.advance(4 * TIMEOUT);
    links(net) == [0, 0]
}

fn one_way(body: &[u8]) -> TestCall {
    TestCall { one_way: true, ..call(body) }
}

/// Calls, transfers and one-way calls in both directions succeed.
#[track_caller]
fn assert_all_succeeds(net: &mut Net) {
    for host in [0, 1] {
        net.expose(host, TOKEN, pattern(3, 3000), true, true);
    }
    for host in [0, 1] {
        let near = Mem::new(vec![0; 3000]);
        let ops = [net.pull(host, 1 - host, TOKEN, 0, &near), net.push(host, 1 - host, TOKEN, 0, &near)];
        let calls = [net.call(host, 1 - host, call("one")), net.call(host, 1 - host, one_way(b"two"))];
        net.advance(MOMENT);
        ops.iter().for_each(|op| assert!(matches!(net.hosts[host].outcome(*op), Some(TestOutcome::Transferred(3000)))));
        assert_eq!(net.hosts[host].body(calls[0]), served(b"one"));
        assert!(matches!(net.hosts[host].outcome(calls[1]), Some(TestOutcome::Answered { .. })));
        assert_eq!(net.hosts[1 - host].notices.pop().unwrap(), b"two");
    }
    for host in [0, 1] {
        net.revoke(host, TOKEN);
    }
}

#[test]
fn idle_connection_is_closed_and_made_again() {
    let mut net = scene();
    for round in 1..5 {
        net.advance(TIMEOUT / 2);
        assert_eq!(links(&net), [1, 1]);
        assert!(is_closed_when_idle(&mut net));
        assert!(net.hosts.iter().all(|host| host.connected.is_empty() && host.idle == round));
        assert!(net.hosts.iter().all(|host| host.proto.connected_peers().is_empty()));
        // Nothing is left to do.
        assert!(net.hosts.iter().all(|host| host.proto.next_timeout().is_none()));
        if round % 2 == 0 {
            assert_all_succeeds(&mut net);
        } else {
            let op = net.call(0, 1, call("again"));
            net.advance(MOMENT);
            assert_eq!(net.hosts[0].body(op), served(b"again"));
        }
    }
    for host in &net.hosts {
        let stats = &host.proto.connection_stats(&Default::default()).0[0];
        assert_eq!((stats.failed, stats.open), (0, 1));
        assert_eq!(stats.ended, stats.dialled + stats.accepted - 1);
        assert!(host.log.is_empty());
    }
    net.end();
}

/// Nothing is measured, and no timer set, where it is not asked for.
#[test]
fn connections_stay_open_by_default() {
    let mut net = Net::pair();
    net.call(0, 1, call("hello"));
    net.advance(10 * MOMENT);
    // The deadline of the heartbeat is the last.
    net.advance(config().peer_timeout);
    assert!(net.hosts.iter().all(|host| host.proto.next_timeout().is_none()));
    assert_eq!(links(&net), [1, 1]);
    net.end();
}

#[test]
fn connection_in_use_stays_open() {
    let uses: [fn(&mut Net) -> u64; 4] = [
        |net| net.call(0, 1, call("x")),
        |net| net.call(1, 0, call("x")),
        |net| net.call(0, 1, one_way(b"x")),
        |net| net.pull(1, 0, TOKEN, 0, &Mem::new(vec![0; 10])),
    ];
    for used in uses {
        let mut net = scene();
        net.expose(0, TOKEN, vec![1; 10], true, true);
        for _ in 0..20 {
            net.advance(TIMEOUT * 9 / 10);
            used(&mut net);
        }
        assert_eq!((net.wires.len(), links(&net)), (1, [1, 1]));
        assert!(is_closed_when_idle(&mut net));
        net.revoke(0, TOKEN);
        net.end();
    }
}

/// Only the peer of a device's transfers takes part in none of them: the other side declines.
#[test]
fn connection_used_by_a_device_stays_open() {
    let mut net = hosts([true, true]);
    net.settings.devices = true;
    net.expose(0, TOKEN, vec![1; 10], true, true);
    net.call(0, 1, call("hello"));
    net.advance(MOMENT);
    let peer = net.hosts[1].proto.lookup_incarnation(net.hosts[0].incarnation).unwrap();
    let pull = |net: &mut Net| {
        let keys = Some(keys(TOKEN, Mode { read: true, write: true }));
        let remote = Remote { peer: peer.id, owner: net.hosts[0].incarnation, token: TOKEN, offset: 0, keys };
        let op = net.transfer_to(1, true, remote, &Mem::new(vec![0; 10]), TIMEOUT);
        net.advance(MOMENT);
        assert!(matches!(net.hosts[1].outcome(op), Some(TestOutcome::Transferred(10))));
    };
    for _ in 0..20 {
        net.advance(TIMEOUT * 9 / 10);
        pull(&mut net);
    }
    assert_eq!((net.wires.len(), net.rma_completed), (1, 20));
    net.advance(TIMEOUT);
    assert!(is_closed_when_idle(&mut net));
    // The keys are good for the next connection too; the owner serves the first, which has it made.
    pull(&mut net);
    assert_eq!(net.rma_completed, 20);
    pull(&mut net);
    assert_eq!((net.wires.len(), net.rma_completed), (2, 21));
    net.revoke(0, TOKEN);
    drop(peer);
    net.end();
}

/// A handler that takes long, one whose caller has given up, and a one-way one.
#[test]
fn connection_stays_open_while_handlers_run() {
    for (from, to) in [(0, 1), (1, 0)] {
        for kind in ["call", "cancelled", "one-way", "announced"] {
            let mut net = scene();
            net.hosts[to].echo = false;
            let body = if kind == "announced" { pattern(1, 100_000) } else { b"x".to_vec() };
            let timeout = if kind == "call" { 20 * TIMEOUT } else { MOMENT };
            let is_one_way = matches!(kind, "one-way" | "announced");
            let op = net.call(from, to, TestCall { timeout, one_way: is_one_way, ..call(body) });
            net.advance(4 * TIMEOUT);
            assert_eq!((net.wires.len(), links(&net)), (1, [1, 1]), "{kind}");
            assert_eq!(net.hosts[from].is_done(op), kind != "call");
            net.settle_until_served(to);
            assert!(is_closed_when_idle(&mut net), "{kind}");
            net.end();
        }
    }
}

#[test]
fn connection_stays_open_while_a_side_holds_bulks() {
    for (owner, holder) in [(0, 1), (1, 0)] {
        let mut net = scene();
        net.hosts[holder].echo = false;
        net.call(owner, holder, TestCall { leases: vec![TestLease { token: TOKEN, number: 1 }], ..call(vec![0; 20]) });
        net.advance(MOMENT);
        let arrived = net.hosts[holder].take();
        net.with_host(holder, |host| host.answer(arrived.request, b"").unwrap());
        let sent = |net: &Net| net.hosts[owner].proto.links.values().map(|link| link.traffic.sent_bytes).sum::<u64>();
        let before = sent(&net);
        net.advance(5 * TIMEOUT);
        assert_eq!((net.wires.len(), links(&net)), (1, [1, 1]));
        assert!(net.hosts[owner].unleased.is_empty());
        // The owner knows of them, and proposes nothing. If the other side has dialled, it is told that each time.
        assert_eq!(sent(&net) > before, owner == 1);
        net.with_host(holder, |host| host.proto.release(arrived.link, arrived.leases));
        drop(arrived);
        assert!(is_closed_when_idle(&mut net));
        net.end();
    }
}

/// A server reaches a client that does not listen over the client's connection only.
#[test]
fn connection_of_a_client_stays_open_while_it_may_be_needed() {
    // The server's program holds an endpoint.
    let mut net = hosts([false, true]);
    net.hosts[1].echo = false;
    net.call(0, 1, call("hello"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
    net.advance(5 * TIMEOUT);
    let back = net.call_peer(1, arrived.peer.id, call("back"));
    net.advance(MOMENT);
    assert_eq!((net.hosts[1].body(back), net.wires.len()), (&served(b"back")[..], 1));
    drop(arrived);
    assert!(is_closed_when_idle(&mut net));
    // The client exposes memory.
    net.hosts[1].echo = true;
    net.call(0, 1, call("hello"));
    net.expose(0, TOKEN, vec![1; 10], true, true);
    assert!(!is_closed_when_idle(&mut net));
    net.revoke(0, TOKEN);
    assert!(is_closed_when_idle(&mut net));
    net.end();
}

/// The client listens, but at addresses where the server could not dial it.
#[test]
fn connection_of_a_client_that_cannot_be_dialled_stays_open_while_it_may_be_needed() {
    for (claimed, filters) in [("tcp://10.0.0.77:7000", false), ("tcp://10.0.0.1:7000", true)] {
        let server = Config { filters_dials: filters, ..config() };
        let mut net = Net::with(vec![(idle(), true), (server, true)]);
        net.echo_everywhere();
        net.hosts[0].proto.set_addresses(vec![claimed.parse().unwrap()], &crate::address::Interfaces::default());
        net.expose(0, TOKEN, vec![1; 10], true, true);
        net.call(0, 1, call("hello"));
        assert!(!is_closed_when_idle(&mut net));
        net.revoke(0, TOKEN);
        assert!(is_closed_when_idle(&mut net));
        // Unless the server's program itself has named the address.
        if filters {
            let peer = net.peer(1, 0);
            let address = net.hosts[0].address.clone();
            net.hosts[1].proto.choose(peer, &address);
            net.expose(0, TOKEN, vec![1; 10], true, true);
            net.call(0, 1, call("hello"));
            assert!(is_closed_when_idle(&mut net));
            net.revoke(0, TOKEN);
        }
        net.end();
    }
}

#[test]
fn lanes_are_closed_with_an_idle_connection() {
    let mut net = hosts([true, true]);
    net.settings.lanes = true;
    net.expose(1, TOKEN, pattern(1, 3 << 20), true, true);
    let peer = net.peer(0, 1);
    for _ in 0..2 {
        net.call_peer(0, peer, call("hello"));
        net.advance(MOMENT);
        for _ in 0..5 {
            let op = net.pull(0, 1, TOKEN, 0, &Mem::new(vec![0; 3 << 20]));
            // Each takes a lane; what goes over that is use of the connection.
            net.advance(TIMEOUT * 9 / 10);
            assert!(matches!(net.hosts[0].outcome(op), Some(TestOutcome::Transferred(_))));
            assert_eq!(links(&net), [2, 2]);
        }
        assert!(is_closed_when_idle(&mut net));
    }
    assert_eq!(net.wires.len(), 4);
    net.revoke(1, TOKEN);
    net.end();
}

/// A transfer is in progress on a lane, and nothing on the connection itself.
#[test]
fn connection_stays_open_while_a_lane_is_in_use() {
    for from in [0, 1] {
        let mut net = hosts([true, true]);
        net.settings.lanes = true;
        net.expose(1 - from, TOKEN, pattern(1, 3 << 20), true, true);
        net.call(0, 1, call("hello"));
        net.advance(MOMENT);
        net.pull(from, 1 - from, TOKEN, 0, &Mem::new(vec![0; 3 << 20]));
        net.advance(10 * MOMENT);
        net.settings.piece = 15 << 10;
        net.settings.pace = TIMEOUT / 40;
        let peer = net.hosts[from].proto.lookup_incarnation(net.hosts[1 - from].incarnation).unwrap().id;
        let remote = Remote { peer, owner: net.hosts[1 - from].incarnation, token: TOKEN, offset: 0, keys: None };
        let op = net.transfer_to(from, true, remote, &Mem::new(vec![0; 3 << 20]), 20 * TIMEOUT);
        net.advance(4 * TIMEOUT);
        assert!(!net.hosts[from].is_done(op));
        net.advance(2 * TIMEOUT);
        assert!(matches!(net.hosts[from].outcome(op), Some(TestOutcome::Transferred(_))));
        assert!(is_closed_when_idle(&mut net), "from {from}: {:?}", links(&net));
        net.revoke(1 - from, TOKEN);
        net.end();
    }
}

/// Both dial again at the same moment.
#[test]
fn both_sides_may_connect_again_at_once() {
    for keyed in [false, true] {
        let key = keyed.then(|| PreSharedKey::new(b"a secret of more than sixteen bytes".to_vec()));
        let mut net = Net::with(vec![(Config { key, ..idle() }, true); 2]);
        net.echo_everywhere();
        net.call(0, 1, call("hello"));
        for round in 0..10u8 {
            assert!(is_closed_when_idle(&mut net));
            let first = net.call(0, 1, call([round]));
            net.advance(u32::from(round) * net.settings.delay / 2);
            let second = net.call(1, 0, call([round]));
            net.advance(MOMENT);
            assert_eq!(net.hosts[0].body(first), served(&[round]));
            assert_eq!(net.hosts[1].body(second), served(&[round]));
        }
        net.end();
    }
}

/// With a connection of each side, a handler uses the memory of the call that came over the other one.
#[test]
fn memory_for_one_call_is_accessible_over_both_connections() {
    let mut net = Net::with(vec![(idle(), true); 2]);
    net.call(0, 1, call("hello"));
    net.advance(MOMENT);
    net.drop_requests(1);
    assert!(is_closed_when_idle(&mut net));
    for host in [0, 1] {
        net.call(host, 1 - host, call("at once"));
    }
    net.advance(MOMENT);
    (0..2).for_each(|host| net.drop_requests(host));
    assert_eq!(links(&net), [2, 2]);
    for (owner, reader) in [(0, 1), (1, 0)] {
        let policy = AccessPolicy { for_one_call: true, ..AccessPolicy::default() };
        net.expose_with_policy(owner, TOKEN, vec![7; 10], Mode { read: true, write: false }, policy);
        let lease = TestLease { token: TOKEN, number: owner as u32 };
        net.call(owner, reader, TestCall { leases: vec![lease], ..call(vec![0; 20]) });
        net.advance(MOMENT);
        let arrived = net.hosts[reader].take();
        let remote = Remote { peer: arrived.peer.id, owner: net.hosts[owner].incarnation, token: TOKEN, offset: 0, keys: None };
        assert_ne!(net.hosts[reader].proto.peers[arrived.peer.id].link, Some(arrived.link));
        let op = net.transfer_to(reader, true, remote.clone(), &Mem::new(vec![0; 10]), TIMEOUT);
        net.advance(MOMENT);
        assert!(matches!(net.hosts[reader].outcome(op), Some(TestOutcome::Transferred(10))));
        // The call is over.
        net.with_host(reader, |host| host.answer(arrived.request, b"").unwrap());
        net.advance(MOMENT);
        let op = net.transfer_to(reader, true, remote, &Mem::new(vec![0; 10]), TIMEOUT);
        net.advance(MOMENT);
        assert_failed!(net.hosts[reader], op, Failure::Refused(Status::AccessDenied(_)));
        net.with_host(reader, |host| host.proto.release(arrived.link, arrived.leases));
        net.revoke(owner, TOKEN);
    }
    assert!(is_closed_when_idle(&mut net));
    net.end();
}

/// A peer that dials an engine which has dialled it has lost that connection, unless it can't have heard of it, or has left it.
#[test]
fn peer_that_has_lost_a_connection_is_reached_over_the_new_one() {
    for (closes, pause, is_lost) in [(false, MOMENT, false), (false, TIMEOUT, true), (true, TIMEOUT * 3 / 2, true)] {
        let mut net = Net::with(vec![(if closes { idle() } else { config() }, true), (config(), true)]);
        net.call(0, 1, call("hello"));
        net.advance(MOMENT);
        net.drop_requests(1);
        net.advance(pause);
        // The first side does not notice it.
        net.wires[0].frozen = true;
        net.cut_at(0, 1);
        let stuck = net.call(0, 1, call("stuck"));
        net.advance(MOMENT);
        net.call(1, 0, call("again"));
        net.advance(MOMENT);
        assert_eq!(net.hosts[0].is_done(stuck), is_lost, "after {pause:?}");
        net.drop_requests(0);
        let op = net.call(0, 1, call("new"));
        net.advance(MOMENT);
        assert_eq!(net.hosts[1].inbox.len(), usize::from(is_lost));
        net.drop_requests(1);
        net.advance(2 * config().peer_timeout);
        for op in [stuck, op] {
            assert!(net.hosts[0].is_done(op));
        }
        assert_failed!(net.hosts[0], stuck, Failure::Disconnected { .. });
        net.end();
    }
}

/// An engine that calls itself.
#[test]
fn idle_connection_of_an_engine_to_itself_is_closed() {
    let mut net = Net::with(vec![(idle(), true)]);
    net.echo_everywhere();
    for _ in 0..3 {
        let op = net.call(0, 0, call("me"));
        net.advance(MOMENT);
        assert_eq!(net.hosts[0].body(op), served(b"me"));
        assert_eq!(net.hosts[0].proto.links.len(), 2);
        net.advance(4 * TIMEOUT);
        assert_eq!(net.hosts[0].proto.links.len(), 0);
    }
    assert_eq!((net.wires.len(), net.hosts[0].idle), (3, 6));
    net.end();
}

/// Engines that dialled each other before they had met have two connections, and are two peers of each other.
#[test]
fn two_connections_are_closed() {
    let mut net = Net::with(vec![(idle(), true); 2]);
    net.echo_everywhere();
    net.call(0, 1, call("a"));
    net.call(1, 0, call("b"));
    net.advance(MOMENT);
    assert_eq!(links(&net), [2, 2]);
    for _ in 0..3 {
        assert!(is_closed_when_idle(&mut net));
        assert_all_succeeds(&mut net);
    }
    net.end();
}

/// Memory for one peer stays open to it, also if no endpoint of it is held and many other peers have come and gone.
#[test]
fn peers_know_each_other_after_an_idle_connection() {
    let mut net = Net::with(vec![(idle(), true); 2]);
    net.echo_everywhere();
    net.call(0, 1, call("hello"));
    net.advance(MOMENT);
    let peer = net.hosts[0].proto.lookup_incarnation(net.hosts[1].incarnation).unwrap().id;
    let policy = AccessPolicy { only: Some(peer), ..AccessPolicy::default() };
    net.expose_with_policy(0, TOKEN, vec![7; 10], Mode { read: true, write: false }, policy);
    for round in 0..3 {
        assert!(is_closed_when_idle(&mut net), "round {round}: {:?}", links(&net));
        for host in [0, 1] {
            net.hosts[host].tags.clear();
            for n in 0..200u64 {
                let raw = net.raw_peer(host, 0x10_0000 * (round + 1) + n);
                net.disconnect(raw);
            }
        }
        let near = Mem::new(vec![0; 10]);
        let op = match round {
            0 => net.pull(1, 0, TOKEN, 0, &near),
            _ => {
                // The peer that has the memory exposed to it is called first.
                net.call(0, 1, call("again"));
                net.advance(MOMENT);
                let peer = net.hosts[1].proto.lookup_incarnation(net.hosts[0].incarnation).unwrap().id;
                let remote = Remote { peer, owner: net.hosts[0].incarnation, token: TOKEN, offset: 0, keys: None };
                net.transfer_to(1, true, remote, &near, TIMEOUT)
            }
        };
        net.advance(MOMENT);
        assert!(matches!(net.hosts[1].outcome(op), Some(TestOutcome::Transferred(10))), "{:?}", net.hosts[1].outcome(op));
    }
    net.revoke(0, TOKEN);
    net.end();
}

/// The engine at the address is another one when the connection is made again.
#[test]
fn engine_that_is_replaced_while_idle_is_noticed() {
    let mut net = scene();
    let (peer, owner) = (net.peer(0, 1), net.hosts[1].incarnation);
    assert!(is_closed_when_idle(&mut net));
    net.restart(1, true);
    net.hosts[1].echo = true;
    net.expose(1, TOKEN, vec![1; 10], true, true);
    let remote = Remote { peer, owner, token: TOKEN, offset: 0, keys: None };
    let op = net.transfer_to(0, true, remote, &Mem::new(vec![0; 10]), TIMEOUT);
    net.advance(MOMENT);
    assert_failed!(net.hosts[0], op, Failure::PeerRestarted);
    let op = net.call(0, 1, call("new"));
    net.advance(MOMENT);
    assert_eq!(net.hosts[0].body(op), served(b"new"));
    net.revoke(1, TOKEN);
    net.end();
}

#[test]
fn peer_that_is_gone_when_it_is_needed_again_is_unreachable() {
    let mut net = scene();
    assert!(is_closed_when_idle(&mut net));
    net.hosts[1].listens = false;
    let op = net.call(0, 1, call("gone"));
    net.advance(MOMENT);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.hosts[1].listens = true;
    assert_all_succeeds(&mut net);
    net.end();
}

/// An engine is finalized at each point of closing an idle connection.
#[test]
fn engines_may_end_while_an_idle_connection_is_being_closed() {
    for host in [0, 1] {
        for steps in 0..12 {
            for one_side in [true, false] {
                let mut net = scene();
                assert!(net.until(3 * TIMEOUT, |net| !net.wires[0].ends[0].outgoing.is_empty()), "no proposal");
                for _ in 0..steps {
                    if !net.step() {
                        net.advance(net.settings.delay);
                    }
                }
                net.with_host(host, |host| host.proto.begin_shutdown());
                net.advance(if one_side { Duration::ZERO } else { MOMENT });
                net.with_host(host, |host| host.proto.finish_shutdown());
                net.advance(3 * TIMEOUT);
                assert!(net.hosts[host].proto.links_gone());
                assert_eq!(links(&net), [0, 0]);
                net.end();
            }
        }
    }
}

#[test]
fn lost_connection_leaves_no_timer() {
    let mut net = scene();
    net.advance(config().peer_timeout);
    assert!(net.hosts[0].proto.next_timeout().is_some());
    net.cut(0);
    assert!(net.hosts[0].proto.next_timeout().is_none());
    net.end();
}

/// The connection is lost at each point, and one end may not notice. The next operations succeed, or find that out.
#[test]
fn idle_connection_may_be_lost_while_it_is_being_closed() {
    for steps in 0..8 {
        for notified in [[true, true], [true, false], [false, true]] {
            let mut net = scene();
            assert!(net.until(3 * TIMEOUT, |net| !net.wires[0].ends[0].outgoing.is_empty()), "no proposal");
            for _ in 0..steps {
                if !net.step() {
                    net.advance(net.settings.delay);
                }
            }
            (0..2).filter(|side| notified[*side]).for_each(|side| net.cut_at(0, side));
            net.wires[0].frozen = true;
            for host in [0, 1] {
                let op = net.call(host, 1 - host, call("found out"));
                net.advance(2 * config().peer_timeout);
                match net.hosts[host].outcome(op) {
                    Some(TestOutcome::Answered { .. } | TestOutcome::Failed(Failure::Disconnected { .. })) => {}
                    other => panic!("after {steps} steps, {notified:?}: {other:?}"),
                }
                let op = net.call(host, 1 - host, call("again"));
                net.advance(MOMENT);
                assert_eq!(net.hosts[host].body(op), served(b"again"));
            }
            net.cut(0);
            net.end();
        }
    }
}

/// With a connection of each side, a lane belongs to the one that the same side has dialled, at both ends.
#[test]
fn lanes_belong_to_the_connection_of_the_side_that_dialled_them() {
    let mut net = Net::with(vec![(idle(), true); 2]);
    net.settings.lanes = true;
    net.echo_everywhere();
    net.call(0, 1, call("hello"));
    assert!(is_closed_when_idle(&mut net));
    for host in [0, 1] {
        net.call(host, 1 - host, call("at once"));
        net.expose(host, TOKEN, pattern(1, 3 << 20), true, true);
    }
    net.advance(MOMENT);
    assert_eq!(links(&net), [2, 2]);
    for host in [0, 1, 0, 1] {
        let op = net.pull(host, 1 - host, TOKEN, 0, &Mem::new(vec![0; 3 << 20]));
        net.advance(10 * MOMENT);
        assert!(matches!(net.hosts[host].outcome(op), Some(TestOutcome::Transferred(_))));
    }
    for host in &net.hosts {
        let lanes: Vec<_> = host.proto.links.values().filter_map(|lane| Some((lane.dialled, lane.main?))).collect();
        assert_eq!(lanes.len(), 2);
        assert!(lanes.iter().all(|(dialled, main)| host.proto.links[*main].dialled == *dialled));
    }
    (0..2).for_each(|host| net.revoke(host, TOKEN));
    assert!(is_closed_when_idle(&mut net));
    net.end();
}

/// What this side begins without sending anything on the connection itself, after it has proposed to close it.
#[test]
fn connection_stays_open_if_it_is_needed_when_the_answer_comes() {
    for what in ["transfer by a device", "transfer on a lane", "exposed memory"] {
        let mut net = hosts([what != "exposed memory", true]);
        net.settings.devices = what == "transfer by a device";
        net.settings.rma_duration = 10 * MOMENT;
        net.settings.lanes = true;
        net.call(0, 1, call("hello"));
        net.advance(MOMENT);
        net.expose(1, TOKEN, pattern(1, 3 << 20), true, true);
        let (peer, owner) = (net.peer(0, 1), net.hosts[1].incarnation);
        let remote = Remote { peer, owner, token: TOKEN, offset: 0, keys: None };
        // This has a lane dialled, if there is no device.
        net.transfer_to(0, true, remote.clone(), &Mem::new(vec![0; 3 << 20]), TIMEOUT);
        assert!(net.until(3 * TIMEOUT, |net| !net.hosts[1].proto.connected_peers().is_empty()));
        assert!(net.until(3 * TIMEOUT, |net| net.hosts[1].proto.connected_peers().is_empty()), "no proposal");
        let keys = net.settings.devices.then(|| keys(TOKEN, Mode { read: true, write: true }));
        let op = match what {
            "exposed memory" => {
                net.expose(0, TOKEN, vec![1; 10], true, true);
                None
            }
            _ => {
                let near = Mem::new(vec![0; 3 << 20]);
                let op = net.transfer_to(0, true, Remote { keys, ..remote }, &near, TIMEOUT);
                // It takes longer than the answer.
                (net.settings.piece, net.settings.pace) = (300 << 10, MOMENT);
                Some(op)
            }
        };
        net.advance(TIMEOUT / 2);
        assert!(op.is_none_or(|op| matches!(net.hosts[0].outcome(op), Some(TestOutcome::Transferred(_)))), "{what}");
        assert!(net.hosts.iter().all(|host| host.idle == 0 && host.proto.connected_peers().len() == 1), "{what}");
        (0..2).for_each(|host| net.revoke(host, TOKEN));
        assert!(is_closed_when_idle(&mut net));
        net.end();
    }
}

/// What the peer has sent on this connection must not be overtaken by what it sends on the next one.
#[test]
fn peer_declines_while_something_it_has_sent_is_on_its_way() {
    let mut net = scene();
    assert!(net.until(3 * TIMEOUT, |net| !net.wires[0].ends[0].outgoing.is_empty()), "no proposal");
    // Nothing is in progress at the side that makes a one-way call.
    let op = net.call(1, 0, one_way(b"first"));
    assert!(net.hosts[1].is_done(op));
    net.advance(TIMEOUT / 2);
    assert_eq!((links(&net), net.hosts[0].idle, net.hosts[0].notices.len()), ([1, 1], 0, 1));
    assert!(is_closed_when_idle(&mut net));
    net.end();
}

/// Calls back find a peer that can't be dialled where it was, as long as it has not gone.
#[test]
fn endpoint_of_a_client_that_was_closed_as_idle_is_not_connected() {
    let mut net = hosts([false, true]);
    net.call(0, 1, call("hello"));
    assert!(is_closed_when_idle(&mut net));
    let tag = net.hosts[1].proto.lookup_incarnation(net.hosts[0].incarnation).unwrap();
    let op = net.call_peer(1, tag.id, call("back"));
    assert_failed!(net.hosts[1], op, Failure::Disconnected { .. });
    // The client is recognized when it connects again.
    net.call(0, 1, call("hello"));
    net.advance(MOMENT);
    let back = net.call_peer(1, tag.id, call("back"));
    net.advance(MOMENT);
    assert_eq!(net.hosts[1].body(back), served(b"back"));
    drop(tag);
    net.end();
}

/// More connections than one-way calls have credit for at first: credit begins anew, and reports of the old one are not missed.
#[test]
fn one_way_calls_have_credit_after_each_idle_connection() {
    let mut net = scene();
    let mut sent = 0u8;
    for _ in 0..5 {
        for _ in 0..10 {
            let op = net.call(0, 1, one_way(&[sent]));
            net.advance(MOMENT);
            assert!(matches!(net.hosts[0].outcome(op), Some(TestOutcome::Answered { .. })));
            sent += 1;
        }
        assert!(is_closed_when_idle(&mut net));
    }
    let expected: Vec<Vec<u8>> = (0..sent).map(|n| vec![n]).collect();
    assert_eq!(net.hosts[1].notices, expected);
    net.end();
}

/// With the limit of connections reached, an engine that connects again is refused like any other, and later accepted.
#[test]
fn peer_that_connects_again_counts_against_the_limit() {
    let one = Config { limits: super::PeerLimits { connections: 1, ..super::net::limits() }, ..config() };
    let mut net = Net::with(vec![(idle(), true), (one, true)]);
    net.echo_everywhere();
    net.call(0, 1, call("hello"));
    assert!(is_closed_when_idle(&mut net));
    let raw = net.raw_peer(1, 77);
    let op = net.call(0, 1, call("no room"));
    net.advance(MOMENT);
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.disconnect(raw);
    let op = net.call(0, 1, call("room"));
    net.advance(MOMENT);
    assert_eq!(net.hosts[0].body(op), served(b"room"));
    net.end();
}
