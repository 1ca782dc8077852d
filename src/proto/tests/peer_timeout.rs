//! Peers that fall silent, and peers that are merely slow.

use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::{Config, Failure};

const SECOND: Duration = Duration::from_secs(1);
const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 7;

fn silence() -> Duration {
    config().peer_timeout
}

/// A connection with something in progress, from whose first moment on nothing arrives.
#[track_caller]
fn given_up_in_time(mut net: Net, ops: &[u64]) {
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    let begun = net.now;
    assert!(net.until(20 * SECOND, |net| ops.iter().all(|op| net.hosts[0].is_done(*op))));
    let took = net.now - begun;
    assert!(took >= silence() / 2 && took <= silence() + silence() / 4, "given up after {took:?} of {:?}", silence());
    for op in ops {
        assert_failed!(net.hosts[0], *op, Failure::Disconnected { reason } if reason.contains("silent"));
    }
    net.advance(2 * silence());
    net.hosts[1].inbox.clear();
    net.end();
}

#[test]
fn a_silent_peer_is_given_up_by_its_caller() {
    let mut net = Net::new(2);
    let ops: Vec<_> = (0..5).map(|n| net.call(0, 1, call(pattern(n, n as usize * 10_000)))).collect();
    net.advance(10 * MOMENT);
    given_up_in_time(net, &ops);
}

#[test]
fn a_silent_owner_is_given_up() {
    for pull in [true, false] {
        let mut net = Net::pair();
        net.call(0, 1, call("connects"));
        net.settle();
        net.expose(1, TOKEN, vec![1; 8 << 20], true, true);
        net.settings.piece = 64 << 10;
        net.settings.pace = MOMENT;
        let op = net.transfer(0, 1, pull, (TOKEN, 0), &Mem::new(vec![0; 8 << 20]));
        net.advance(20 * MOMENT);
        net.revoke(1, TOKEN);
        given_up_in_time(net, &[op]);
    }
}

/// A server has resources of its caller's too: the request of a caller that fell silent is cancelled.
#[test]
fn a_silent_caller_is_given_up() {
    let mut net = Net::new(2);
    net.call(0, 1, call("never answered"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    let begun = net.now;
    assert!(net.until(20 * SECOND, |net| !net.hosts[1].cancelled.is_empty()));
    assert!(net.now - begun <= silence() + silence() / 4);
    assert_eq!(net.hosts[1].cancelled, [arrived.request]);
    net.end();
}

/// A handler may take its time: a peer that answers pings is there.
#[test]
fn a_peer_that_answers_pings_is_kept() {
    let mut net = Net::new(2);
    let mut what = call("takes minutes");
    what.timeout = 1000 * SECOND;
    let op = net.call(0, 1, what);
    net.advance(300 * SECOND);
    assert!(!net.hosts[0].is_done(op));
    net.serve(1);
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"takes minutes"));
    net.end();
}

/// Nobody is asked for a sign of life while nothing is expected: an idle engine sets no timer, and sends nothing.
#[test]
fn an_idle_connection_is_left_alone() {
    let mut net = Net::pair();
    net.call(0, 1, call("x"));
    net.settle();
    for host in &net.hosts {
        assert_eq!(host.proto.next_timeout(), None);
    }
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    net.advance(1000 * SECOND);
    assert_eq!(net.hosts[0].proto.links.len(), 1);
    // What was not asked for is not missed: the peer's long silence does not count from when it began.
    net.wires[wire].frozen = false;
    let op = net.call(0, 1, call("still there?"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"still there?"));
    assert_eq!(net.wires.len(), 1);
    net.end();
}

/// A line so slow that one chunk takes longer than the silence allowed: bytes that trickle in are signs of life, for the
/// side that sends them too.
#[test]
fn a_slow_line_is_not_a_silent_one() {
    for pull in [true, false] {
        let mut net = Net::pair();
        net.call(0, 1, call("connects"));
        net.settle();
        let source = pattern(1, 300 << 10);
        let far = net.expose(1, TOKEN, source.clone(), true, true);
        let near = Mem::new(source.clone());
        // 256 KiB take five seconds, and three of silence are allowed.
        net.settings.piece = 5 << 10;
        net.settings.pace = 100 * MOMENT;
        let op = net.transfer(0, 1, pull, (TOKEN, 0), &near);
        net.settle();
        match net.hosts[0].outcome(op) {
            Some(super::host::TestOutcome::Moved(len)) => assert_eq!(*len, source.len()),
            other => panic!("pull: {pull}, given up for slowness: {other:?}"),
        }
        assert!(near.bytes() == far.bytes());
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// The same for the bodies of calls and answers.
#[test]
fn a_slow_call_is_not_a_silent_one() {
    let mut net = Net::pair();
    net.call(0, 1, call("connects"));
    net.settle();
    net.settings.piece = 5 << 10;
    net.settings.pace = 100 * MOMENT;
    let op = net.call(0, 1, call(pattern(1, 300 << 10)));
    net.settle();
    assert!(net.hosts[0].body(op) == served(&pattern(1, 300 << 10)));
    net.end();
}

/// A peer that takes nothing in: what is sent to it goes nowhere, and it is given up.
#[test]
fn a_peer_that_does_not_read_is_given_up() {
    let mut net = Net::pair();
    net.call(0, 1, call("connects"));
    net.settle();
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    let mut notice = call(pattern(1, 1 << 20));
    notice.one_way = true;
    let op = net.call(0, 1, notice);
    net.advance(2 * silence());
    assert!(net.hosts[0].proto.links.is_empty());
    assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    net.end();
}

/// Hearts may beat at different speeds.
#[test]
fn a_patient_and_an_impatient_engine() {
    let with = |silence| (Config { peer_timeout: silence, ..config() }, true);
    let mut net = Net::with(vec![with(SECOND / 5), with(100 * SECOND)]);
    let mut what = call("slow");
    what.timeout = 100 * SECOND;
    let op = net.call(0, 1, what);
    net.advance(30 * SECOND);
    assert!(!net.hosts[0].is_done(op));
    net.serve(1);
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"slow"));
    net.end();
}

/// A slow line dies between two questions for signs of life: what was acknowledged before that does not prolong its life.
#[test]
fn a_slow_line_that_dies_is_missed_in_time() {
    for moment in [1100, 1500, 1900, 2300] {
        let mut net = Net::pair();
        net.call(0, 1, call("connects"));
        net.settle();
        net.expose(1, TOKEN, vec![1; 8 << 20], true, true);
        net.settings.piece = 5 << 10;
        net.settings.pace = 100 * MOMENT;
        let op = net.push(0, 1, TOKEN, 0, &Mem::new(vec![0; 8 << 20]));
        net.advance(moment * MOMENT);
        net.revoke(1, TOKEN);
        given_up_in_time(net, &[op]);
    }
}
