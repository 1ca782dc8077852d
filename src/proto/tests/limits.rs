//! Limits on sizes, requests and times: each one fails with an error that names it.

use std::time::Duration;

use super::env::{TestLease, pattern};
use super::host::{assert_failed, served};
use super::net::{Net, TestCall, call, config, few};
use super::{Config, Failure, Reply, Status};

const MOMENT: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

fn limits(first: usize, second: usize) -> Net {
    let with = |max_message| (Config { max_message, ..config() }, true);
    let mut net = Net::with(vec![with(first), with(second)]);
    net.hosts[1].echo = true;
    net
}

#[test]
fn body_beyond_the_senders_limit_is_too_large() {
    for limit in [1000, 100_000] {
        let mut net = limits(limit, 1 << 20);
        let fits = net.call(0, 1, call(pattern(1, limit)));
        let large = net.call(0, 1, call(pattern(1, limit + 1)));
        let size = limit as u64 + 1;
        assert_failed!(net.hosts[0], large, Failure::TooLarge { size: s, limit: l } if (*s, *l) == (size, limit as u64));
        net.settle();
        assert!(net.hosts[0].body(fits) == served(&pattern(1, limit)));
        net.end();
    }
}

/// The receiver's limit is known after the handshake; a call queued before that is then refused with size and limit.
#[test]
fn body_beyond_the_receivers_limit_is_too_large() {
    for limit in [1000, 100_000] {
        let mut net = limits(1 << 20, limit);
        for round in 0..2 {
            let fits = net.call(0, 1, call(pattern(1, limit)));
            let mut what = call(pattern(1, limit + 1));
            what.leases = vec![TestLease { token: 1, number: round }];
            let large = net.call(0, 1, what);
            net.settle();
            let size = limit as u64 + 1;
            assert_failed!(net.hosts[0], large, Failure::TooLarge { size: s, limit: l } if (*s, *l) == (size, limit as u64));
            assert!(net.hosts[0].body(fits) == served(&pattern(1, limit)));
        }
        net.end();
    }
}

/// A response that is too large is an error on both sides.
#[test]
fn response_beyond_the_smaller_limit_is_too_large() {
    for (caller, server) in [(50_000, 1 << 20), (1 << 20, 50_000)] {
        let mut net = limits(caller, server);
        net.hosts[1].echo = false;
        for (size, fits) in [(50_000, true), (50_001, false)] {
            let op = net.call(0, 1, call("x"));
            net.advance(MOMENT);
            let arrived = net.hosts[1].take();
            let result = net.with_host(1, |host| {
                let body = pattern(1, size);
                let content = super::host::content(&body);
                let lease = TestLease { token: 1, number: size as u32 };
                host.leased.push(lease.clone());
                host.proto.respond(arrived.request, Ok(&mut Reply { content, result: 0, shape: b"r", leases: vec![lease] }))
            });
            net.settle();
            if fits {
                assert!(result.is_ok());
                assert_eq!(net.hosts[0].body(op).len(), size);
                let Some(super::host::TestOutcome::Answered { link, leases, .. }) = net.hosts[0].outcome(op) else {
                    unreachable!()
                };
                let (link, leases) = (*link, *leases);
                net.with_host(0, |host| host.proto.release(link, leases));
            } else {
                assert!(matches!(result, Err(Failure::TooLarge { size: 50_001, limit: 50_000 })));
                let expected = Status::TooLarge { size: 50_001, limit: 50_000 };
                assert_failed!(net.hosts[0], op, Failure::Refused(status) if *status == expected);
            }
        }
        net.end();
    }
}

#[test]
fn request_beyond_the_limit_is_refused_with_busy() {
    let few = Config { limits: few(3), ..config() };
    let mut net = Net::with(vec![(few.clone(), true), (few, true)]);
    let ops: Vec<_> = (0..5).map(|n| net.call(0, 1, call(pattern(n, 40_000)))).collect();
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[1].inbox.len(), 3);
    for op in &ops[3..] {
        assert_failed!(net.hosts[0], *op, Failure::Refused(Status::Busy(reason)) if reason.contains('3'));
    }
    // A response makes room for one more request.
    net.serve(1);
    let next = net.call(0, 1, call("next"));
    net.advance(MOMENT);
    assert_eq!(net.hosts[1].inbox.len(), 3);
    (0..3).for_each(|_| net.serve(1));
    net.settle();
    assert_eq!(net.hosts[0].body(next), served(b"next"));
    net.end();
}

/// A refused call returns its leases.
#[test]
fn refused_call_returns_its_leases() {
    let few = Config { limits: few(1), ..config() };
    let mut net = Net::with(vec![(few.clone(), true), (few, true)]);
    net.call(0, 1, call("first"));
    for number in 0..3 {
        net.call(
            0,
            1,
            TestCall { leases: vec![TestLease { token: 1, number }], ..call(pattern(1, 20 + 20_000 * number as usize)) },
        );
    }
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[0].unleased.len(), 3);
    net.serve(1);
    net.end();
}

/// Timeouts of a year, the longest that an engine accepts.
#[test]
fn call_with_the_longest_timeouts_succeeds() {
    let patient = Config { peer_timeout: LONGEST, connect: LONGEST, ..config() };
    let mut net = Net::with(vec![(patient.clone(), true), (patient, true)]);
    net.hosts[1].echo = true;
    let op = net.call(0, 1, call("x"));
    net.advance(Duration::from_secs(1));
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    net.end();
}

/// A deadline beyond what the wire format can express is clipped without a panic.
#[test]
fn call_with_a_deadline_beyond_the_wire_format_succeeds() {
    let mut net = Net::pair();
    let century = Duration::from_secs(100 * 365 * 24 * 3600);
    let op = net.call(0, 1, TestCall { timeout: century, ..call("x") });
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    net.end();
}
