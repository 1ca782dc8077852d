//! Calls that end before their responses arrive.

use std::time::Duration;

use super::env::{Mem, TestLease, pattern};
use super::host::assert_failed;
use super::malformed::request;
use super::net::{Net, TestCall, call};
use super::raw::frame;
use super::wire::{Message, Range, Stream};
use super::{Failure, PayloadStatus, Reply};

const LARGE: usize = 2 << 20;
const MOMENT: Duration = Duration::from_millis(1);

fn call_with_timeout(seconds: u64, body: &[u8]) -> super::net::TestCall {
    let mut call = call(body);
    call.timeout = Duration::from_secs(seconds);
    call
}

#[test]
fn late_response_to_a_timed_out_call_fails_with_cancelled() {
    let mut net = Net::new(2);
    let begun = net.now;
    let op = net.call(0, 1, call_with_timeout(1, b"x"));
    assert!(net.until(Duration::from_secs(5), |net| net.hosts[0].is_done(op)));
    assert_eq!(net.now - begun, Duration::from_secs(1));
    assert_failed!(net.hosts[0], op, Failure::Timeout);
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    assert_eq!(net.hosts[1].cancelled, [arrived.request]);
    assert!(!net.hosts[1].proto.is_wanted(arrived.request));
    net.with_host(1, |host| assert!(matches!(host.answer(arrived.request, b"late"), Err(Failure::Cancelled))));
    net.end();
}

/// The response is on the wire when the call is cancelled; its leases return to their owner.
#[test]
fn response_that_crosses_its_cancellation_returns_its_leases() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, call("x"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| {
        let lease = TestLease { token: 7, number: 1 };
        host.leased.push(lease.clone());
        let content = super::OutgoingBody::Small(b"late, and with a bulk");
        host.proto.respond(arrived.request, Ok(&mut Reply { content, result: 0, shape: b"r", leases: vec![lease] })).unwrap();
    });
    net.cancel(0, op);
    assert_failed!(net.hosts[0], op, Failure::Cancelled);
    net.settle();
    assert!(net.hosts[1].cancelled.is_empty(), "the request was answered, so there is nothing to cancel");
    net.end();
}

#[test]
fn cancelling_a_completed_call_has_no_effect() {
    let mut net = Net::pair();
    let op = net.call(0, 1, call("x"));
    net.settle();
    net.cancel(0, op);
    net.cancel(0, op);
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 1);
    net.end();
}

/// At every point of a large request: the server gets all of it or nothing, and frees what it holds.
#[test]
fn large_request_cancelled_at_any_point_leaves_nothing_behind() {
    for steps in 0..40 {
        let mut net = Net::new(2);
        net.settings.piece = 100 << 10;
        let mut what = call(pattern(1, LARGE));
        what.leases = vec![TestLease { token: 9, number: 5 }];
        let op = net.call(0, 1, what);
        for _ in 0..steps {
            if !net.step() {
                net.advance(net.settings.delay);
            }
        }
        let before = net.hosts[1].proto.requests.keys().next();
        net.cancel(0, op);
        net.advance(10 * MOMENT);
        // A handler that got the whole request is notified of the cancellation, and holds its leases until it is done.
        if let Some(arrived) = net.hosts[1].inbox.first() {
            assert_eq!(net.hosts[1].cancelled, [arrived.request]);
        } else if let Some(before) = before {
            assert_eq!(net.hosts[1].cancelled, [before], "finalizing may wait for requests that are arriving");
        }
        net.drop_requests(1);
        net.end();
    }
}

/// The memory of a large request is taken back when its call has ended, at any point: the server gets all of it or nothing, and
/// the connection stays.
#[test]
fn large_request_whose_memory_is_taken_back_at_any_point_leaves_the_connection() {
    for steps in 0..40 {
        let mut net = Net::new(2);
        net.settings.piece = 100 << 10;
        let memory = Mem::new(pattern(1, LARGE));
        let op = net.call(0, 1, TestCall { memory: Some(memory.clone()), ..call("") });
        let link = net.hosts[0].proto.links.keys().next();
        for _ in 0..steps {
            if !net.step() {
                net.advance(net.settings.delay);
            }
        }
        net.cancel(0, op);
        memory.close();
        net.advance(10 * MOMENT);
        if let Some(arrived) = net.hosts[1].inbox.first() {
            assert!(arrived.body == pattern(1, LARGE), "step {steps}");
        }
        net.drop_requests(1);
        let after = net.call(0, 1, call("after"));
        net.advance(10 * MOMENT);
        net.serve(1);
        net.advance(10 * MOMENT);
        assert!(net.hosts[0].is_done(after));
        assert_eq!(net.hosts[0].proto.links.keys().next(), link);
        net.end();
    }
}

/// The same for a large response.
#[test]
fn large_response_cancelled_at_any_point_leaves_nothing_behind() {
    for steps in 0..40 {
        let mut net = Net::new(2);
        net.settings.piece = 100 << 10;
        let op = net.call(0, 1, call("x"));
        net.advance(MOMENT);
        let arrived = net.hosts[1].take();
        net.with_host(1, |host| {
            let lease = TestLease { token: 9, number: 5 };
            host.leased.push(lease.clone());
            let content = super::host::content(&[7; LARGE]);
            let _ = host.proto.respond(arrived.request, Ok(&mut Reply { content, result: 0, shape: b"r", leases: vec![lease] }));
        });
        for _ in 0..steps {
            if !net.step() {
                net.advance(net.settings.delay);
            }
        }
        let done = net.hosts[0].is_done(op);
        net.cancel(0, op);
        net.advance(10 * MOMENT);
        if let Some(super::host::TestOutcome::Answered { leases, link, .. }) = net.hosts[0].outcome(op) {
            assert!(done);
            let (link, leases) = (*link, *leases);
            net.with_host(0, |host| host.proto.release(link, leases));
        }
        net.end();
    }
}

/// Other calls on the same connection complete.
#[test]
fn cancelling_some_calls_leaves_others_intact() {
    let mut net = Net::new(2);
    let ops: Vec<_> = (0..20).map(|n| net.call(0, 1, call(pattern(n, 100 << 10)))).collect();
    net.advance(Duration::from_micros(120));
    for op in ops.iter().step_by(2) {
        net.cancel(0, *op);
    }
    net.hosts[1].echo = true;
    net.advance(5 * MOMENT);
    while !net.hosts[1].inbox.is_empty() {
        net.serve(1);
    }
    net.settle();
    for (n, op) in ops.iter().enumerate() {
        if n % 2 == 0 {
            assert_failed!(net.hosts[0], *op, Failure::Cancelled);
        } else {
            assert_eq!(net.hosts[0].body(*op).len(), 100 << 10);
        }
    }
    net.end();
}

/// A call that is cancelled while its connection is being established does not affect other calls that wait for it.
#[test]
fn call_cancelled_before_connect_leaves_others_intact() {
    let mut net = Net::pair();
    let cancelled = net.call(0, 1, call(pattern(1, LARGE)));
    let kept = net.call(0, 1, call("kept"));
    net.cancel(0, cancelled);
    assert_failed!(net.hosts[0], cancelled, Failure::Cancelled);
    net.settle();
    assert_eq!(net.hosts[0].body(kept).len(), 4);
    net.end();
}

/// A timeout of zero ends the call.
#[test]
fn call_with_zero_timeout_ends() {
    let mut net = Net::pair();
    let op = net.call(0, 1, call_with_timeout(0, b"x"));
    net.settle();
    assert!(net.hosts[0].is_done(op));
    net.end();
}

/// A payload that is still arriving for a cancelled request is not taken for the body of the next request with the same
/// number; the same holds for pushes.
#[test]
fn payload_of_a_cancelled_operation_is_not_delivered_to_its_successor() {
    const LEN: usize = 1000;
    let data = |stream| frame(&Message::Data { stream, id: 7, offset: 0, len: LEN as u32 }, b"");
    let mut net = Net::new(1);
    let raw = net.raw_peer(0, 1);
    let (_, link) = net.raw_link(raw).unwrap();
    let memory = net.expose(0, 0xfeed, vec![1; LEN], true, true);
    let range =
        Range { transfer: 7, owner: net.hosts[0].incarnation, token: 0xfeed_u128.to_le_bytes(), offset: 0, len: LEN as u64 };
    let operations = [
        (Stream::Request, request(7, LEN as u64), Message::Cancel { call: 7 }),
        (Stream::Push, Message::Push(range), Message::Abort { transfer: 7, push: true }),
    ];
    for (stream, begun, ended) in operations {
        let now = net.now;
        net.with_host(0, |host| {
            let begin = host.proto.consume(link, &[frame(&begun, b""), data(stream)].concat(), now).unwrap();
            let payload = begin.target.unwrap();
            assert!(payload.memory.is_some());
            let again = [frame(&ended, b""), frame(&begun, b"")].concat();
            assert!(host.proto.consume(link, &again, now).unwrap().target.is_none());
            host.proto.handle_payload_done(link, PayloadStatus::Whole, now);
        });
        assert!(net.hosts[0].inbox.is_empty(), "no request was delivered with the old payload");
        let pushes = net.hosts[0].proto.links[link].pushes.values().map(|push| push.arrived);
        assert!(pushes.eq((stream == Stream::Push).then_some(0)));
        // The payload sent for the second operation is written.
        net.with_host(0, |host| {
            let target = host.proto.consume(link, &data(stream), now).unwrap().target.unwrap().memory.unwrap();
            target.write(0, &[9; LEN]);
            host.proto.handle_payload_done(link, PayloadStatus::Whole, now);
        });
        if stream == Stream::Request {
            assert_eq!(net.hosts[0].take().body, [9; LEN]);
        }
    }
    assert_eq!(memory.bytes(), [9; LEN]);
    net.disconnect(raw);
    net.revoke(0, 0xfeed);
    net.settle();
    assert_eq!(net.hosts[0].proto.links.len(), 0);
}

/// Of the calls and transfers that are in progress, those that are due last come first; those that have ended do not.
#[test]
fn waiters_of_what_is_in_progress_are_found() {
    let mut net = Net::pair();
    net.hosts[1].echo = false;
    let found = |net: &Net| {
        let mut found = Vec::new();
        let none: Option<()> = net.hosts[0].proto.find_waiter(|op| {
            found.push(*op);
            None
        });
        assert!(none.is_none());
        found
    };
    assert!(found(&net).is_empty());
    let calls = [20, 30, 10].map(|seconds| net.call(0, 1, call_with_timeout(seconds, b"x")));
    net.expose(1, 5, vec![0; 100], true, true);
    let pull = net.pull(0, 1, 5, 0, &Mem::new(vec![0; 100]));
    // The last call is due before the others: its deadline is among those of transfers.
    assert_eq!(found(&net), [calls[1], calls[0], pull, calls[2]]);
    assert_eq!(net.hosts[0].proto.find_waiter(|op| (*op == pull).then_some(7)), Some(7));
    net.advance(MOMENT);
    assert_eq!(found(&net), [calls[1], calls[0], calls[2]], "the pull has ended");
    net.advance(Duration::from_secs(21));
    assert_eq!(found(&net), [calls[1]]);
    net.advance(Duration::from_secs(10));
    assert!(found(&net).is_empty());
    net.settle_until_served(1);
    net.revoke(1, 5);
    net.end();
}
