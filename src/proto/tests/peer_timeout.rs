//! The peer timeout: silent peers are disconnected, slow ones are not.

use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::{Config, Failure};

const SECOND: Duration = Duration::from_secs(1);
const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 7;

fn timeout() -> Duration {
    config().peer_timeout
}

/// Freezes the connection of these operations, and asserts that they fail within the peer timeout.
#[track_caller]
fn assert_disconnected_in_time(mut net: Net, ops: &[u64]) {
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    let begun = net.now;
    assert!(net.until(20 * SECOND, |net| ops.iter().all(|op| net.hosts[0].is_done(*op))));
    let took = net.now - begun;
    assert!(took >= timeout() / 2 && took <= timeout() + timeout() / 4, "disconnected after {took:?} of {:?}", timeout());
    for op in ops {
        assert_failed!(net.hosts[0], *op, Failure::Disconnected { reason } if reason.contains("no sign of life"));
    }
    net.advance(2 * timeout());
    net.hosts[1].inbox.clear();
    net.end();
}

#[test]
fn calls_to_a_silent_peer_fail_with_disconnected() {
    let mut net = Net::new(2);
    let ops: Vec<_> = (0..5).map(|n| net.call(0, 1, call(pattern(n, n as usize * 10_000)))).collect();
    net.advance(10 * MOMENT);
    assert_disconnected_in_time(net, &ops);
}

#[test]
fn transfers_with_a_silent_owner_fail_with_disconnected() {
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
        assert_disconnected_in_time(net, &[op]);
    }
}

/// A server holds resources for its caller: the request of a caller that times out is cancelled.
#[test]
fn request_of_a_silent_caller_is_cancelled() {
    let mut net = Net::new(2);
    net.call(0, 1, call("never answered"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    let begun = net.now;
    assert!(net.until(20 * SECOND, |net| !net.hosts[1].cancelled.is_empty()));
    assert!(net.now - begun <= timeout() + timeout() / 4);
    assert_eq!(net.hosts[1].cancelled, [arrived.request]);
    net.end();
}

/// A handler may take minutes: a peer that answers pings is alive.
#[test]
fn peer_that_answers_pings_stays_connected() {
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

/// No liveness probe is sent while nothing is expected: an idle engine sets no timer, and sends nothing.
#[test]
fn idle_connection_is_not_probed() {
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
    // The peer timeout counts from the new call on, not from the last received byte.
    net.wires[wire].frozen = false;
    let op = net.call(0, 1, call("still there?"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"still there?"));
    assert_eq!(net.wires.len(), 1);
    net.end();
}

/// A connection so slow that one chunk takes longer than the peer timeout: each received byte counts as a sign of life, for
/// the sending side too.
#[test]
fn slow_transfer_does_not_time_out() {
    for pull in [true, false] {
        let mut net = Net::pair();
        net.call(0, 1, call("connects"));
        net.settle();
        let source = pattern(1, 300 << 10);
        let far = net.expose(1, TOKEN, source.clone(), true, true);
        let near = Mem::new(source.clone());
        // 256 KiB take five seconds, and the peer timeout is three.
        net.settings.piece = 5 << 10;
        net.settings.pace = 100 * MOMENT;
        let op = net.transfer(0, 1, pull, (TOKEN, 0), &near);
        net.settle();
        match net.hosts[0].outcome(op) {
            Some(super::host::TestOutcome::Transferred(len)) => assert_eq!(*len, source.len()),
            other => panic!("pull: {pull}, disconnected though bytes arrived: {other:?}"),
        }
        assert!(near.bytes() == far.bytes());
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// The same for the bodies of calls and responses.
#[test]
fn slow_call_does_not_time_out() {
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

/// A peer that acknowledges nothing times out.
#[test]
fn peer_that_does_not_read_is_disconnected() {
    let mut net = Net::pair();
    net.call(0, 1, call("connects"));
    net.settle();
    let wire = net.wire(0, 1);
    net.wires[wire].frozen = true;
    let mut notice = call(pattern(1, 1 << 20));
    notice.one_way = true;
    let op = net.call(0, 1, notice);
    net.advance(2 * timeout());
    assert!(net.hosts[0].proto.links.is_empty());
    assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    net.end();
}

/// The two sides may have different peer timeouts.
#[test]
fn engines_with_different_peer_timeouts_stay_connected() {
    let with = |timeout| (Config { peer_timeout: timeout, ..config() }, true);
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

/// A slow connection is lost between two liveness probes: bytes acknowledged before that do not extend the timeout.
#[test]
fn slow_connection_that_is_lost_times_out() {
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
        assert_disconnected_in_time(net, &[op]);
    }
}
