//! Lanes: links to a peer that carry bulk data only.

use std::time::Duration;

use super::env::{Mem, TestLease, pattern};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, NetSettings, call, config};
use super::raw::{Raw, encode_hello, hello};
use super::wire::{self, HandshakeMessage, Hello, Message, Range};
use super::{AccessPolicy, Failure, LinkId, Mode, Status};

const TOKEN: u128 = 0xfeed;
const LARGE: usize = 3 << 20;
const SECOND: Duration = Duration::from_secs(1);

/// Two hosts that are connected; host 0 has dialled. Both expose the same bytes.
fn scene() -> (Net, Vec<u8>) {
    scene_with(|_| {})
}

fn scene_with(change: impl Fn(&mut NetSettings)) -> (Net, Vec<u8>) {
    let mut net = Net::new(2);
    net.settings.lanes = true;
    change(&mut net.settings);
    net.echo_everywhere();
    let bytes = pattern(1, LARGE);
    for host in [0, 1] {
        net.expose(host, TOKEN, bytes.clone(), true, true);
    }
    net.call(0, 1, call("hello"));
    net.settle();
    (net, bytes)
}

fn end(mut net: Net) {
    net.revoke(0, TOKEN);
    net.revoke(1, TOKEN);
    net.end();
}

/// Pulls `len` bytes from the other host.
#[track_caller]
fn pull(net: &mut Net, from: usize, len: usize) -> u64 {
    let peer = net.hosts[1 - from].incarnation;
    let peer = net.hosts[from].proto.lookup_incarnation(peer).expect("the hosts are connected").id;
    let remote = super::Remote { peer, owner: net.hosts[1 - from].incarnation, token: TOKEN, offset: 0, keys: None };
    net.transfer_to(from, true, remote, &Mem::new(vec![0; len]), 30 * SECOND)
}

#[track_caller]
fn assert_pulled(net: &mut Net, from: usize, len: usize) {
    let op = pull(net, from, len);
    net.settle();
    let outcome = net.hosts[from].outcome(op);
    assert!(matches!(outcome, Some(TestOutcome::Transferred(n)) if *n == len), "{outcome:?}");
}

/// The lanes of a host, and the bytes of payload that their wires have carried in either direction.
fn lanes(net: &Net, host: usize) -> Vec<LinkId> {
    net.hosts[host].proto.links.iter().filter(|(_, link)| link.main.is_some()).map(|(id, _)| id).collect()
}

fn carried(net: &Net, host: usize, lane: LinkId) -> u64 {
    let (wire, _) = net.hosts[host].wires[&lane];
    net.wires[wire].ends.iter().map(|end| end.delivered).sum()
}

#[test]
fn transfers_take_a_lane_once_it_is_open() {
    // Whichever side pulls, the side that dialled the connection dials the lane.
    for from in [0, 1] {
        let (mut net, _) = scene();
        assert_pulled(&mut net, from, LARGE);
        let [at_0, at_1] = [0, 1].map(|host| lanes(&net, host));
        assert_eq!((at_0.len(), at_1.len()), (1, 1));
        assert!(net.hosts[0].proto.links[at_0[0]].dialled && !net.hosts[1].proto.links[at_1[0]].dialled);
        // The first transfer was on the main link.
        assert!(carried(&net, 0, at_0[0]) < 1000);
        assert_pulled(&mut net, from, LARGE);
        let before = carried(&net, 0, at_0[0]);
        assert!(before >= LARGE as u64);
        // Short ones, and calls, stay on the main link; middling ones take the lane, but are not worth one.
        assert_pulled(&mut net, from, 1000);
        net.call(from, 1 - from, call(pattern(2, 200_000)));
        net.settle();
        assert_eq!(carried(&net, 0, at_0[0]), before);
        assert_pulled(&mut net, 1 - from, 100 << 10);
        assert!(carried(&net, 0, at_0[0]) > before + (100 << 10));
        // A lane has no lanes.
        assert_eq!((lanes(&net, 0), net.wires.len()), (at_0, 2));
        end(net);
    }
}

#[test]
fn pushes_take_a_lane_too() {
    let (mut net, bytes) = scene();
    for _ in 0..2 {
        let op = net.push(0, 1, TOKEN, 0, &Mem::new(bytes.clone()));
        net.settle();
        assert!(matches!(net.hosts[0].outcome(op), Some(TestOutcome::Transferred(LARGE))));
    }
    let lane = lanes(&net, 0)[0];
    assert!(carried(&net, 0, lane) >= LARGE as u64);
    end(net);
}

#[test]
fn short_transfers_have_no_lane_dialled() {
    for (useful, len) in [(true, (1 << 20) - 1), (false, LARGE)] {
        let (mut net, _) = scene_with(|settings| settings.lanes = useful);
        assert_pulled(&mut net, 0, len);
        assert_pulled(&mut net, 0, len);
        assert_eq!(lanes(&net, 0).len(), 0);
        end(net);
    }
}

#[test]
fn as_many_lanes_are_dialled_as_the_configuration_says() {
    for count in [0, 3] {
        let mut net = Net::with(vec![(super::Config { lanes: count, ..config() }, true), (config(), true)]);
        net.settings.lanes = true;
        net.echo_everywhere();
        net.expose(1, TOKEN, pattern(1, LARGE), true, true);
        net.call(0, 1, call("hello"));
        net.settle();
        for _ in 0..5 {
            assert_pulled(&mut net, 0, LARGE);
        }
        assert_eq!(lanes(&net, 0).len(), count);
        // Each takes its share of several at a time.
        let ops: Vec<u64> = (0..count).map(|_| pull(&mut net, 0, LARGE)).collect();
        let pending = lanes(&net, 0).into_iter().map(|lane| net.hosts[0].proto.links[lane].pending);
        assert!(pending.eq(std::iter::repeat_n(1, count)));
        net.settle();
        assert!(ops.iter().all(|op| matches!(net.hosts[0].outcome(*op), Some(TestOutcome::Transferred(LARGE)))));
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// A call is answered while a transfer is in progress on a slow wire.
#[test]
fn call_does_not_wait_behind_a_transfer_on_a_lane() {
    let (mut net, _) = scene_with(|settings| {
        settings.piece = 64 << 10;
        settings.pace = Duration::from_millis(10);
    });
    assert_pulled(&mut net, 0, LARGE);
    let long = pull(&mut net, 0, LARGE);
    net.advance(Duration::from_millis(100));
    let op = net.call(0, 1, call("quick"));
    net.advance(Duration::from_millis(5));
    assert_eq!(net.hosts[0].body(op).len(), 5);
    assert!(net.hosts[0].outcome(long).is_none());
    net.settle();
    end(net);
}

#[test]
fn lane_ends_with_its_main_link() {
    for side in [0, 1] {
        let (mut net, _) = scene();
        assert_pulled(&mut net, 0, LARGE);
        let main = net.wire(0, 1);
        let op = pull(&mut net, 0, LARGE);
        net.cut_at(main, side);
        if side == 0 {
            assert_eq!(lanes(&net, 0).len(), 0);
            assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
        } else {
            net.advance(SECOND);
            assert_eq!(lanes(&net, 1).len(), 0);
        }
        net.cut(main);
        net.settle();
        assert_eq!((lanes(&net, 0).len(), lanes(&net, 1).len()), (0, 0));
        // The next main link has a lane of its own.
        net.call(0, 1, call("again"));
        net.settle();
        assert_pulled(&mut net, 0, LARGE);
        assert_eq!(lanes(&net, 0).len(), 1);
        end(net);
    }
}

#[test]
fn lost_lane_fails_its_transfers_alone_and_is_replaced() {
    let (mut net, _) = scene();
    assert_pulled(&mut net, 0, LARGE);
    let (first, _) = net.hosts[0].wires[&lanes(&net, 0)[0]];
    let op = pull(&mut net, 0, LARGE);
    let waits = net.call(0, 1, call("beside"));
    net.cut(first);
    net.settle();
    assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    assert_eq!(net.hosts[0].body(waits).len(), 6);
    // The peers stay connected, which the simulated hosts check; a large transfer takes the main link, and has a lane dialled.
    assert_pulled(&mut net, 0, LARGE);
    let second = lanes(&net, 0)[0];
    assert_pulled(&mut net, 0, LARGE);
    assert!(carried(&net, 0, second) >= LARGE as u64);
    end(net);
}

#[test]
fn refused_lane_is_not_dialled_again() {
    let (mut net, _) = scene();
    net.hosts[1].listens = false;
    for _ in 0..3 {
        assert_pulled(&mut net, 0, LARGE);
    }
    assert_eq!(net.wires.len(), 2, "the connection, and one attempt at a lane");
    assert_eq!(lanes(&net, 0).len(), 0);
    end(net);
}

/// The limit of connections is one of peers: lanes take no place of theirs, and there may be as many.
#[test]
fn lanes_have_a_limit_of_their_own() {
    let limits = super::PeerLimits { connections: 2, ..super::net::limits() };
    let greedy = super::Config { lanes: 3, ..config() };
    let mut net = Net::with(vec![(greedy.clone(), true), (super::Config { limits, ..config() }, true), (greedy, true)]);
    net.settings.lanes = true;
    net.echo_everywhere();
    net.expose(1, TOKEN, pattern(1, LARGE), true, true);
    for from in [0, 2] {
        let op = net.call(from, 1, call("hello"));
        net.settle();
        assert_eq!(net.hosts[from].body(op).len(), 5);
        for _ in 0..4 {
            let op = net.pull(from, 1, TOKEN, 0, &Mem::new(vec![0; LARGE]));
            net.settle();
            assert!(matches!(net.hosts[from].outcome(op), Some(TestOutcome::Transferred(LARGE))));
        }
    }
    assert_eq!([0, 1, 2].map(|host| lanes(&net, host).len()), [2, 2, 0]);
    // A place that becomes free is taken.
    let main = net.wire(0, 1);
    net.cut(main);
    net.call(2, 1, call("hello"));
    net.settle();
    assert_eq!([0, 1, 2].map(|host| lanes(&net, host).len()), [0, 0, 0]);
    net.revoke(1, TOKEN);
    net.end();
}

#[test]
fn lanes_between_engines_with_a_key_prove_that_they_have_it() {
    let key = || Some(super::PreSharedKey::new(b"a key of thirty-two bytes, or so".to_vec()));
    let mut net =
        Net::with(vec![(super::Config { key: key(), ..config() }, true), (super::Config { key: key(), ..config() }, true)]);
    net.settings.lanes = true;
    net.echo_everywhere();
    net.expose(1, TOKEN, pattern(1, LARGE), true, true);
    net.call(0, 1, call("hello"));
    net.settle();
    for _ in 0..2 {
        assert_pulled(&mut net, 0, LARGE);
    }
    let lane = lanes(&net, 0)[0];
    assert!(carried(&net, 0, lane) >= LARGE as u64);
    let theirs = net.hosts[0].incarnation;
    let known = net.hosts[1].proto.lookup_incarnation(theirs).expect("the hosts are connected").id;
    let token = net.hosts[1].proto.peers[known].given_token;
    let raw = dial_lane(&mut net, &Hello { resumption_token: token, ..hello(theirs) });
    assert!(net.is_shut(raw));
    assert_eq!(lanes(&net, 1).len(), 1);
    net.revoke(1, TOKEN);
    net.end();
}

/// At an address that leads to several engines, the lane may reach another one. It may claim to be the same.
#[test]
fn lane_to_another_engine_is_ended() {
    for claimed in [0xb, 0xa] {
        assert_lane_is_ended(claimed);
    }
}

fn assert_lane_is_ended(claimed: u64) {
    let mut net = Net::new(1);
    net.settings.lanes = true;
    net.echo_everywhere();
    let peer = net.test_peer(0);
    net.call_peer(0, peer, call("hello"));
    net.advance(SECOND);
    let main = net.raw_dialled();
    net.send_bytes(main, encode_hello(wire::VERSIONS, &hello(0xa)));
    net.send_message(main, &Message::ResumptionToken { token: 5 }, b"");
    let begin = |net: &mut Net| {
        let remote = super::Remote { peer, owner: 0xa, token: TOKEN, offset: 0, keys: None };
        net.transfer_to(0, true, remote, &Mem::new(vec![0; LARGE]), SECOND)
    };
    begin(&mut net);
    net.advance(SECOND / 100);
    let lane = net.raw_dialled();
    assert_ne!(lane.wire, main.wire);
    assert!(matches!(net.first_handshake_message(lane), HandshakeMessage::Lane(shown) if shown.resumption_token == Some(5)));
    net.send_bytes(lane, encode_hello(wire::VERSIONS, &hello(claimed)));
    assert!(net.is_shut(lane) && !net.is_shut(main));
    assert_eq!(lanes(&net, 0).len(), 0);
    let wires = net.wires.len();
    begin(&mut net);
    net.advance(SECOND / 100);
    // Where another engine says so, no further one is dialled.
    assert_eq!(net.wires.len(), wires + usize::from(claimed == 0xa));
    net.disconnect(main);
    net.end();
}

/// Its owner would learn that the peer is lost, and never that it was connected.
#[test]
fn connection_that_is_answered_as_a_lane_is_refused() {
    let mut net = Net::with(vec![(config(), true)]);
    let peer = net.test_peer(0);
    let op = net.call_peer(0, peer, call("hello"));
    net.advance(SECOND);
    let raw = net.raw_dialled();
    net.send_bytes(raw, wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Lane(hello(0xa))));
    assert!(net.is_shut(raw) && net.hosts[0].is_done(op));
    net.end();
}

/// Dials host 1 with a lane's hello.
fn dial_lane(net: &mut Net, hello: &Hello) -> Raw {
    let raw = net.raw_dial(1);
    net.send_bytes(raw, wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Lane(hello.clone())));
    raw
}

#[test]
fn lane_without_proof_of_its_connection_is_refused() {
    let (mut net, _) = scene();
    let theirs = net.hosts[0].incarnation;
    let known = net.hosts[1].proto.lookup_incarnation(theirs).expect("the hosts are connected").id;
    let token = net.hosts[1].proto.peers[known].given_token;
    for (incarnation, shown) in [(theirs, None), (theirs, token.map(|token| token ^ 1)), (theirs ^ 1, token)] {
        let raw = dial_lane(&mut net, &Hello { resumption_token: shown, ..hello(incarnation) });
        assert!(net.is_shut(raw));
        assert_eq!(lanes(&net, 1).len(), 0);
    }
    // A connection that is no lane's peer any more has none.
    let main = net.wire(0, 1);
    net.cut(main);
    let raw = dial_lane(&mut net, &Hello { resumption_token: token, ..hello(theirs) });
    assert!(net.is_shut(raw));
    end(net);
}

/// A peer has no more transfers with lanes than without.
#[test]
fn transfers_on_lanes_count_against_the_limit_of_their_peer() {
    let limits = super::PeerLimits { peer_transfers: 3, ..super::net::limits() };
    let mut net = Net::with(vec![(super::Config { lanes: 2, ..config() }, true), (super::Config { limits, ..config() }, true)]);
    net.settings.lanes = true;
    net.echo_everywhere();
    net.expose(1, TOKEN, pattern(1, LARGE), true, true);
    net.call(0, 1, call("hello"));
    net.settle();
    (0..2).for_each(|_| assert_pulled(&mut net, 0, LARGE));
    assert_eq!(lanes(&net, 0).len(), 2);
    (net.settings.piece, net.settings.pace) = (64 << 10, Duration::from_millis(1));
    let mut ops: Vec<u64> = (0..4).map(|_| pull(&mut net, 0, LARGE)).collect();
    ops.push(pull(&mut net, 0, 1000));
    net.settle();
    let done = ops.iter().filter(|op| matches!(net.hosts[0].outcome(**op), Some(TestOutcome::Transferred(_)))).count();
    // The short one is over before the last of the others begins, which is one too many.
    assert_eq!(done, 4);
    assert_pulled(&mut net, 0, LARGE);
    net.revoke(1, TOKEN);
    net.end();
}

#[test]
fn call_on_a_lane_ends_it() {
    let (mut net, _) = scene();
    let theirs = net.hosts[0].incarnation;
    let known = net.hosts[1].proto.lookup_incarnation(theirs).expect("the hosts are connected").id;
    let shown = Hello { resumption_token: net.hosts[1].proto.peers[known].given_token, ..hello(theirs) };
    for message in [Message::Echo { call: 1 }, Message::ResumptionToken { token: 7 }, Message::Shutdown { call: 1 }] {
        let lane = dial_lane(&mut net, &shown);
        net.send_message(lane, &Message::Ping, b"");
        assert!(!net.is_shut(lane));
        net.send_message(lane, &message, b"");
        assert!(net.is_shut(lane), "{message:?}");
    }
    let op = net.call(0, 1, call("hello"));
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 5);
    end(net);
}

/// The dialled side could not prove itself on the lane, which the other side would end with the transfers on it.
#[test]
fn lane_of_a_peer_that_has_given_no_token_is_refused() {
    for gives in [true, false] {
        let (mut net, _) = scene();
        let main = net.raw_peer(1, 0xa);
        net.advance(SECOND / 100);
        if gives {
            net.send_message(main, &Message::ResumptionToken { token: 5 }, b"");
        }
        let mut given = None;
        net.for_each_received(main, |message| {
            if let Message::ResumptionToken { token } = message {
                given = Some(*token);
            }
        });
        assert!(given.is_some());
        let lane = dial_lane(&mut net, &Hello { resumption_token: given, ..hello(0xa) });
        assert_eq!(net.is_shut(lane), !gives);
        assert!(!net.is_shut(main));
        net.disconnect(main);
        assert!(net.is_shut(lane));
        end(net);
    }
}

#[test]
fn more_lanes_than_the_limit_are_refused() {
    let (mut net, _) = scene();
    let theirs = net.hosts[0].incarnation;
    let known = net.hosts[1].proto.lookup_incarnation(theirs).expect("the hosts are connected").id;
    let shown = Hello { resumption_token: net.hosts[1].proto.peers[known].given_token, ..hello(theirs) };
    let raws: Vec<Raw> = (0..super::MAX_LANES + 3).map(|_| dial_lane(&mut net, &shown)).collect();
    assert_eq!(raws.iter().filter(|raw| net.is_shut(**raw)).count(), 3);
    assert_eq!(lanes(&net, 1).len(), super::MAX_LANES);
    // None of them has taken the place of the connection.
    let op = net.call(0, 1, call("hello"));
    net.advance(SECOND);
    assert_eq!(net.hosts[0].body(op).len(), 5);
    raws.into_iter().for_each(|raw| net.disconnect(raw));
    end(net);
}

/// Memory that is exposed for one call may be pulled on a lane of the connection that the call came by, and on no other link.
#[test]
fn memory_for_one_call_may_be_pulled_on_a_lane() {
    let (mut net, _) = scene();
    assert_pulled(&mut net, 1, LARGE);
    net.hosts[1].echo = false;
    let policy = AccessPolicy { for_one_call: true, ..AccessPolicy::default() };
    const SECRET: u128 = 0xbeef;
    net.expose_with_policy(0, SECRET, pattern(3, LARGE), Mode { read: true, write: false }, policy);
    let lease = TestLease { token: SECRET, number: 1 };
    let op = net.call(0, 1, super::net::TestCall { leases: vec![lease], ..call(vec![0; 20]) });
    net.advance(SECOND);
    let lane = lanes(&net, 1)[0];
    let before = carried(&net, 1, lane);
    let owner = net.hosts[0].incarnation;
    let peer = net.hosts[1].proto.lookup_incarnation(owner).expect("the hosts are connected").id;
    let remote = super::Remote { peer, owner, token: SECRET, offset: 0, keys: None };
    let pulled = net.transfer_to(1, true, remote, &Mem::new(vec![0; LARGE]), 9 * SECOND);
    net.advance(SECOND);
    assert!(matches!(net.hosts[1].outcome(pulled), Some(TestOutcome::Transferred(LARGE))), "{:?}", net.hosts[1].outcome(pulled));
    assert!(carried(&net, 1, lane) >= before + LARGE as u64);
    let raw = net.raw_peer(0, 0xbad);
    let range = Range { transfer: 1, owner, token: SECRET.to_le_bytes(), offset: 0, len: 10 };
    net.send_message(raw, &Message::Pull(range), b"");
    let mut denied = 0;
    net.for_each_received(raw, |message| match message {
        Message::Done { status: Status::AccessDenied(_), .. } => denied += 1,
        Message::Data { .. } => panic!("another peer has got the bytes"),
        _ => {}
    });
    assert_eq!(denied, 1);
    net.disconnect(raw);
    net.settle_until_served(1);
    assert_eq!(net.hosts[0].body(op).len(), 20);
    net.revoke(0, SECRET);
    end(net);
}
