//! Calls that nobody answers.

use std::time::Duration;

use super::env::{Ticket, pattern};
use super::host::{Outcome, assert_failed};
use super::net::{Call, Net, call, config};
use super::Failure;

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
        assert!(arrived.one_way && !arrived.want_shape);
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
