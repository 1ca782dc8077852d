//! Calls that nobody answers.

use std::time::Duration;

use super::env::{Ticket, pattern};
use super::host::{Outcome, assert_failed};
use super::net::{Call, Net, call, config, few};
use super::{Config, Failure, Status};

const MOMENT: Duration = Duration::from_millis(1);

fn notice(body: &[u8]) -> Call {
    Call { one_way: true, ..call(body) }
}

#[test]
fn a_notice_is_done_when_it_is_on_its_way() {
    let mut net = Net::new(2);
    let first = net.call(0, 1, notice(b"opens the connection"));
    assert!(!net.hosts[0].is_done(first), "there is no connection yet");
    net.advance(MOMENT);
    assert!(matches!(net.hosts[0].outcome(first), Some(Outcome::Answered { .. })));
    let second = net.call(0, 1, notice(b"uses it"));
    assert!(net.hosts[0].is_done(second), "the connection is there");
    net.advance(MOMENT);
    for body in [&b"opens the connection"[..], b"uses it"] {
        let arrived = net.hosts[1].take();
        assert!(arrived.one_way);
        assert_eq!(arrived.body, body);
        net.with_host(1, |host| host.answer(arrived.request, b"nobody hears this").unwrap());
    }
    net.settle();
    net.end();
}

/// The caller's part is over, and the body goes on to the end.
#[test]
fn a_large_notice_arrives_whole() {
    let mut net = Net::new(2);
    net.settings.piece = 10_000;
    let body = pattern(1, 3 << 20);
    let mut what = notice(&body);
    what.leases = vec![Ticket { token: 3, number: 1 }];
    let op = net.call(0, 1, what);
    net.advance(MOMENT);
    assert!(net.hosts[0].is_done(op));
    net.advance(100 * MOMENT);
    let arrived = net.hosts[1].take();
    assert!(arrived.body == body && arrived.large);
    net.with_host(1, |host| {
        host.proto.release(arrived.link, arrived.leases);
        let _ = host.answer(arrived.request, b"");
    });
    net.end();
}

#[test]
fn a_notice_fails_where_there_is_no_connection() {
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = net.call(0, 1, notice(b"x"));
    net.settle();
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.end();
}

/// What the peer does not take is known as soon as the peer is, and is not sent.
#[test]
fn a_notice_that_is_too_large_for_the_peer() {
    let mut small = config();
    small.max_message = 1000;
    let mut net = Net::with(vec![(config(), true), (small, true)]);
    let first = net.call(0, 1, notice(&[1; 1001]));
    let large = net.call(0, 1, notice(&pattern(1, 1 << 20)));
    net.settle();
    for op in [first, large] {
        assert_failed!(net.hosts[0], op, Failure::TooLarge { limit: 1000, .. });
    }
    let second = net.call(0, 1, notice(&[1; 1001]));
    assert_failed!(net.hosts[0], second, Failure::TooLarge { size: 1001, limit: 1000 });
    net.settle();
    assert!(net.hosts[1].inbox.is_empty());
    net.end();
}

/// A notice that is handled when its sender has gone: its handler's answer is for nobody, and harms nobody.
#[test]
fn the_sender_goes_away() {
    let mut net = Net::new(2);
    net.call(0, 1, notice(b"x"));
    net.advance(MOMENT);
    let wire = net.wire(0, 1);
    net.cut(wire);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| {
        let _ = host.answer(arrived.request, b"");
    });
    net.end();
}

/// Hosts that take more requests than notices may be on their way.
fn roomy() -> Net {
    Net::with(vec![(Config { limits: few(20_000), ..config() }, true); 2])
}

/// Whoever sends notices faster than they are handled waits, and is told when there is room again.
#[test]
fn a_sender_of_many_notices_is_slowed_down() {
    let mut net = roomy();
    let mut sent = Vec::new();
    let refused = loop {
        let op = net.call(0, 1, notice(b"x"));
        if matches!(net.hosts[0].outcomes.get(&op).map(|ends| &ends[..]), Some([Outcome::Failed(_)])) {
            break op;
        }
        sent.push(op);
        net.advance(MOMENT);
        assert!(sent.len() <= 10_000, "nobody slows the sender down");
    };
    assert_failed!(net.hosts[0], refused, Failure::Refused(Status::Busy(reason)) if reason.contains("credit"));
    assert_eq!(net.hosts[1].inbox.len(), sent.len(), "what was sent has arrived, and none of it was dropped");
    // One who waits is told once a good part has been handled; two wait.
    let waiting = [7_000_001, 7_000_002];
    let peer = net.peer(0, 1);
    for op in waiting {
        net.hosts[0].begun.push(op);
        net.with_host(0, |host| host.proto.await_credit(peer, op));
        assert!(!net.hosts[0].is_done(op));
    }
    for _ in 0..sent.len() / 2 {
        net.serve(1);
    }
    net.advance(MOMENT);
    assert!(waiting.iter().all(|op| net.hosts[0].is_done(*op)));
    let room = net.call(0, 1, notice(b"there is room"));
    assert!(matches!(net.hosts[0].outcome(room), Some(Outcome::Answered { .. })));
    // Where there is room, nobody waits; and where the connection ends, nobody waits for it.
    let at_once = 7_000_003;
    net.hosts[0].begun.push(at_once);
    net.with_host(0, |host| host.proto.await_credit(peer, at_once));
    assert!(net.hosts[0].is_done(at_once));
    net.advance(MOMENT);
    while !net.hosts[1].inbox.is_empty() {
        net.serve(1);
    }
    net.end();
}

#[test]
fn waiting_for_room_ends_with_the_connection() {
    let mut net = roomy();
    let peer = net.peer(0, 1);
    for _ in 0..5000 {
        net.call(0, 1, notice(b"x"));
    }
    net.advance(MOMENT);
    let op = 7_000_001;
    net.hosts[0].begun.push(op);
    net.with_host(0, |host| host.proto.await_credit(peer, op));
    assert!(!net.hosts[0].is_done(op));
    net.cut(0);
    assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    net.drop_requests(1);
    net.end();
}

/// Room is given back for each notice, however it ends: handled, refused, cancelled by its sender.
#[test]
fn no_room_is_lost() {
    let few = Config { limits: few(20), max_message: 100_000, ..config() };
    let mut net = Net::with(vec![(config(), true), (few, true)]);
    net.hosts[1].echo = true;
    for round in 0..3000u64 {
        net.hosts[1].echo = !round.is_multiple_of(3);
        let size = [10, 20_000, 40_000][round as usize % 3];
        let op = net.call(0, 1, notice(&pattern(round, size)));
        if round.is_multiple_of(7) {
            net.cancel(0, op);
        }
        if round.is_multiple_of(5) {
            net.advance(MOMENT / 10);
        }
        if round.is_multiple_of(100) {
            net.drop_requests(1);
        }
    }
    net.advance(10 * MOMENT);
    net.drop_requests(1);
    net.settle();
    let link = net.hosts[0].proto.links.values().next().expect("they are connected");
    // What is handled is reported in portions.
    assert!(link.one_way_out < 600, "room for {} notices is lost", link.one_way_out);
    net.end();
}
