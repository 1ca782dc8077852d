//! One-way calls, and the credit that limits them.

use std::time::Duration;

use super::env::{TestLease, pattern};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, TestCall, call, config, few, limits};
use super::raw::frame;
use super::wire::{BorrowedBytes, Declare, Message};
use super::{Config, Failure, LeaseRange, Log, PeerLimits, Status};
use crate::proto::one_way::{LEAST, MAX_ABANDONED, MOST};

const MOMENT: Duration = Duration::from_millis(1);

fn notice(body: &[u8]) -> TestCall {
    TestCall { one_way: true, ..call(body) }
}

#[test]
fn one_way_call_on_an_open_connection_is_done_at_once() {
    let mut net = Net::new(2);
    let first = net.call(0, 1, notice(b"opens the connection"));
    assert!(!net.hosts[0].is_done(first), "there is no connection yet");
    net.advance(MOMENT);
    assert!(matches!(net.hosts[0].outcome(first), Some(TestOutcome::Answered { .. })));
    let second = net.call(0, 1, notice(b"uses it"));
    assert!(net.hosts[0].is_done(second), "the connection is there");
    net.advance(MOMENT);
    for body in [&b"opens the connection"[..], b"uses it"] {
        let arrived = net.hosts[1].take();
        assert!(arrived.one_way);
        assert_eq!(arrived.body, body);
        net.with_host(1, |host| host.answer(arrived.request, b"discarded").unwrap());
    }
    net.settle();
    net.end();
}

/// The call is done for the caller, and the rest of its body is still sent.
#[test]
fn large_one_way_call_arrives_complete() {
    let mut net = Net::new(2);
    net.settings.piece = 10_000;
    let body = pattern(1, 3 << 20);
    let mut what = notice(&body);
    what.leases = vec![TestLease { token: 3, number: 1 }];
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
fn one_way_call_to_an_unreachable_peer_fails() {
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = net.call(0, 1, notice(b"x"));
    net.settle();
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.end();
}

/// The peer's limit is known after the handshake; a call beyond it fails and is not sent.
#[test]
fn one_way_call_beyond_the_peers_limit_is_too_large() {
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

/// A notice may be handled after its sender has disconnected: the handler's response is discarded.
#[test]
fn one_way_call_is_handled_after_its_sender_disconnects() {
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

/// Hosts whose limit on requests exceeds the credit for notices.
fn hosts_with_high_limits() -> Net {
    Net::with(vec![(Config { limits: few(20_000), ..config() }, true); 2])
}

/// Host 0 makes as many one-way calls as host 1 grants credit for.
fn use_all_credit(net: &mut Net) {
    for _ in 0..=MOST.calls {
        net.call(0, 1, notice(b"x"));
        net.advance(MOMENT);
    }
}

/// A sender that is faster than the handlers runs out of credit, and is woken when it has credit again.
#[test]
fn one_way_calls_beyond_the_credit_wait_until_others_are_handled() {
    let mut net = hosts_with_high_limits();
    let mut sent = Vec::new();
    let refused = loop {
        let op = net.call(0, 1, notice(b"x"));
        if matches!(net.hosts[0].outcomes.get(&op).map(|ends| &ends[..]), Some([TestOutcome::Failed(_)])) {
            break op;
        }
        sent.push(op);
        net.advance(MOMENT);
        assert!(sent.len() <= 10_000, "the sender never runs out of credit");
    };
    assert_failed!(net.hosts[0], refused, Failure::Refused(Status::Busy(reason)) if reason.contains("credit"));
    assert_eq!(net.hosts[1].inbox.len(), sent.len(), "what was sent has arrived, and none of it was dropped");
    // A waiting caller is woken once a good part has been handled; here two wait.
    let waiting = [7_000_001, 7_000_002];
    let peer = net.peer(0, 1);
    for op in waiting {
        net.hosts[0].begun.push(op);
        let now = net.now;
        net.with_host(0, |host| assert!(host.proto.await_credit(peer, Some(1), op, now)));
        assert!(!net.hosts[0].is_done(op));
    }
    for _ in 0..sent.len() / 2 {
        net.serve(1);
    }
    net.advance(MOMENT);
    assert!(waiting.iter().all(|op| net.hosts[0].is_done(*op)));
    let room = net.call(0, 1, notice(b"within the credit"));
    assert!(matches!(net.hosts[0].outcome(room), Some(TestOutcome::Answered { .. })));
    // With credit available the wait ends at once.
    let at_once = 7_000_003;
    net.hosts[0].begun.push(at_once);
    let now = net.now;
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, Some(1), at_once, now)));
    assert!(net.hosts[0].is_done(at_once));
    net.advance(MOMENT);
    while !net.hosts[1].inbox.is_empty() {
        net.serve(1);
    }
    net.end();
}

/// A caller gets all the credit that a link may have while none of its calls is over: handlers at both ends that make one-way
/// calls would wait for each other.
#[test]
fn credit_grows_while_no_handler_is_over() {
    for (len, most) in [(1, MOST.calls as usize), (10_000, MOST.bytes as usize / 10_100)] {
        let mut net = hosts_with_high_limits();
        let mut sent = 0;
        loop {
            let op = net.call(0, 1, notice(&pattern(1, len)));
            net.advance(MOMENT);
            if matches!(net.hosts[0].outcome(op), Some(TestOutcome::Failed(_))) {
                break;
            }
            sent += 1;
        }
        assert!((most..=MOST.calls as usize).contains(&sent), "{sent} calls of {len} bytes, instead of {most}");
        net.settle_until_served(1);
        net.end();
    }
}

/// A small share of the total limits bounds the credit.
#[test]
fn credit_without_a_share_stays_at_the_minimum() {
    let mut net = Net::with(vec![(Config { limits: few(20), ..config() }, true); 2]);
    for _ in 0..=LEAST.calls {
        net.call(0, 1, notice(b"x"));
        net.advance(MOMENT);
    }
    let sent = net.hosts[1].inbox.len();
    assert!((LEAST.calls as usize..=20).contains(&sent), "{sent} calls");
    net.settle_until_served(1);
    net.end();
}

#[test]
fn waiting_for_credit_fails_when_the_connection_is_lost() {
    let mut net = hosts_with_high_limits();
    let peer = net.peer(0, 1);
    use_all_credit(&mut net);
    let op = 7_000_001;
    net.hosts[0].begun.push(op);
    let now = net.now;
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, Some(1), op, now)));
    assert!(!net.hosts[0].is_done(op));
    net.cut(0);
    assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    net.drop_requests(1);
    net.end();
}

/// Shutdown fails callers that wait for credit at once, though closing the connection takes longer.
#[test]
fn waiting_for_credit_fails_when_the_engine_is_finalized() {
    let mut net = hosts_with_high_limits();
    let peer = net.peer(0, 1);
    use_all_credit(&mut net);
    let (op, now) = (7_000_001, net.now);
    net.hosts[0].begun.push(op);
    net.with_host(0, |host| {
        assert!(host.proto.await_credit(peer, Some(1), op, now));
        host.proto.begin_shutdown();
        host.proto.finish_shutdown();
    });
    assert_failed!(net.hosts[0], op, Failure::Finalized);
    net.drop_requests(1);
    net.end();
}

/// A caller that waits for credit fails when its peer times out. A waiter that was removed is not notified.
#[test]
fn waiting_for_credit_fails_when_the_peer_times_out() {
    let mut net = hosts_with_high_limits();
    let peer = net.peer(0, 1);
    use_all_credit(&mut net);
    // Nothing is expected of the peer any more.
    net.advance(2 * config().peer_timeout);
    let (waiting, removed, now) = (7_000_001, 7_000_002, net.now);
    net.hosts[0].begun.push(waiting);
    net.with_host(0, |host| {
        assert!(host.proto.await_credit(peer, Some(1), waiting, now));
        assert!(host.proto.await_credit(peer, Some(1), removed, now));
        host.proto.forget_waiter(peer, |waiter| *waiter == removed);
    });
    let wire = net.wire(0, 1);
    // A peer that answers liveness probes is not timed out.
    net.advance(3 * config().peer_timeout);
    assert!(!net.hosts[0].is_done(waiting));
    net.wires[wire].frozen = true;
    net.advance(2 * config().peer_timeout);
    assert_failed!(net.hosts[0], waiting, Failure::Disconnected { reason } if reason.contains("no sign of life"));
    assert!(!net.hosts[0].is_done(removed));
    net.drop_requests(1);
    net.end();
}

/// Credit returns for each notice, however it ends: handled, refused, or cancelled by its sender.
#[test]
fn credit_returns_for_every_one_way_call() {
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
    // Handled calls are reported in batches.
    assert!(link.outgoing.out < 600, "credit for {} one-way calls is lost", link.outgoing.out);
    net.end();
}

/// A large notice is announced first: it is done when the peer has accepted it, and fails when the peer has no room.
#[test]
fn large_one_way_call_beyond_the_peers_room_is_refused() {
    // Room for three of them and the declarations.
    let small = Config { limits: PeerLimits { peer_bytes: (3 << 20) + 1000, ..limits() }, ..config() };
    let mut net = Net::with(vec![(config(), true), (small, true)]);
    net.call(0, 1, call("connects"));
    net.advance(MOMENT);
    net.serve(1);
    let body = pattern(1, 1 << 20);
    net.settings.delay = MOMENT;
    let ops: Vec<_> = (0..4).map(|_| net.call(0, 1, notice(&body))).collect();
    assert!(ops.iter().all(|op| !net.hosts[0].is_done(*op)), "the peer has not replied yet");
    net.advance(60 * MOMENT);
    let refused = ops.iter().filter(|op| matches!(net.hosts[0].outcome(**op), Some(TestOutcome::Failed(_)))).count();
    assert_eq!((net.hosts[1].inbox.len(), refused), (3, 1));
    // The refused caller is woken when one of the others has been handled, and not before.
    let peer = net.peer(0, 1);
    let waiting = 7_000_001;
    net.hosts[0].begun.push(waiting);
    let now = net.now;
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, None, waiting, now)));
    net.advance(10 * MOMENT);
    assert!(!net.hosts[0].is_done(waiting));
    net.serve(1);
    net.advance(20 * MOMENT);
    assert!(net.hosts[0].is_done(waiting));
    let again = net.call(0, 1, notice(&body));
    net.advance(20 * MOMENT);
    assert!(matches!(net.hosts[0].outcome(again), Some(TestOutcome::Answered { .. })));
    net.settle_until_served(1);
    assert_eq!(net.hosts[1].proto.refusals().one_way, 0);
    net.end();
}

/// All of this engine's calls are handled between the refusal and the moment when its caller asks whether to wait: the caller
/// tries again. After a refusal for other reasons it has nothing to wait for.
#[test]
fn refused_caller_tries_again_after_the_last_report() {
    let small = Config { limits: PeerLimits { peer_bytes: (3 << 20) + 1000, ..limits() }, ..config() };
    let mut net = Net::with(vec![(config(), true), (small, true)]);
    net.call(0, 1, call("connects"));
    net.advance(MOMENT);
    net.serve(1);
    let body = pattern(1, 1 << 20);
    let ops: Vec<_> = (0..4).map(|_| net.call(0, 1, notice(&body))).collect();
    net.advance(20 * MOMENT);
    assert_failed!(net.hosts[0], ops[3], Failure::Refused(Status::Busy(_)));
    net.settle_until_served(1);
    assert_eq!(net.hosts[0].proto.links.values().next().unwrap().outgoing.out, 0);
    let (peer, now, waiting) = (net.peer(0, 1), net.now, 7_000_001);
    net.hosts[0].begun.push(waiting);
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, None, waiting, now), "there is room now"));
    assert!(net.hosts[0].is_done(waiting));
    net.end();
}

/// A refusal also reports the notices handled so far, so that the refused caller does not wait for them.
#[test]
fn refusal_reports_calls_handled_before_it() {
    let small = Config { limits: PeerLimits { peer_bytes: 3 << 20, ..limits() }, ..config() };
    let mut net = Net::with(vec![(config(), true), (small, true)]);
    let held = net.call(0, 1, call(pattern(1, 5 << 19)));
    net.advance(20 * MOMENT);
    (0..2).for_each(|_| _ = net.call(0, 1, notice(b"small")));
    net.advance(20 * MOMENT);
    let first = net.hosts[1].take();
    (0..2).for_each(|_| net.serve(1));
    let large = net.call(0, 1, notice(&pattern(2, 1 << 20)));
    net.advance(20 * MOMENT);
    assert_failed!(net.hosts[0], large, Failure::Refused(Status::Busy(_)));
    let peer = net.peer(0, 1);
    let now = net.now;
    net.with_host(0, |host| assert!(!host.proto.await_credit(peer, None, 7_000_001, now), "all have been handled"));
    net.with_host(1, |host| host.answer(first.request, b"").unwrap());
    net.settle();
    assert!(net.hosts[0].is_done(held));
    net.end();
}

/// Both sides agree on the number of unhandled calls, even if callers cancelled before the peer's reply arrived.
#[test]
fn cancelled_large_one_way_calls_are_counted_alike_on_both_sides() {
    for refused in [false, true] {
        let peer_bytes = if refused { (1 << 20) + 1000 } else { limits().peer_bytes };
        let small = Config { limits: PeerLimits { peer_bytes, ..limits() }, ..config() };
        let mut net = Net::with(vec![(config(), true), (small, true)]);
        net.call(0, 1, call("connects"));
        net.advance(MOMENT);
        net.serve(1);
        net.settings.delay = MOMENT;
        // This one uses up the peer's room in the refused case.
        let kept = net.call(0, 1, notice(&pattern(1, 1 << 20)));
        net.advance(20 * MOMENT);
        assert!(matches!(net.hosts[0].outcome(kept), Some(TestOutcome::Answered { .. })));
        for round in 0..3 {
            // The peer's reply is on its way.
            let op = net.call(0, 1, TestCall { timeout: 3 * MOMENT / 2, ..notice(&pattern(1, 1 << 20)) });
            if round == 0 {
                net.advance(MOMENT / 2);
                net.cancel(0, op);
            }
            net.advance(20 * MOMENT);
            assert!(matches!(net.hosts[0].outcome(op), Some(TestOutcome::Failed(_))));
        }
        let out = |net: &Net| net.hosts[0].proto.links.values().next().unwrap().outgoing.out;
        let held = net.hosts[1].inbox.len() as u32;
        assert_eq!(out(&net), held, "refused: {refused}");
        net.settle_until_served(1);
        assert_eq!(out(&net), 0, "refused: {refused}");
        net.end();
    }
}

/// Large one-way calls that are given up before the peer has replied are bounded: then no more are sent until it replies.
#[test]
fn unanswered_large_one_way_calls_are_bounded() {
    let mut net = hosts_with_high_limits();
    net.call(0, 1, call("connects"));
    net.advance(MOMENT);
    net.serve(1);
    net.settings.delay = 200 * MOMENT;
    let body = pattern(1, LEAST.bytes as usize);
    let abandoned = |net: &Net| net.hosts[0].proto.links.values().next().unwrap().outgoing.abandoned.len();
    let mut refused = 0;
    for _ in 0..MAX_ABANDONED + 20 {
        let op = net.call(0, 1, TestCall { timeout: MOMENT / 10, ..notice(&body) });
        net.advance(MOMENT / 5);
        let failed =
            |outcome: Option<&TestOutcome>| matches!(outcome, Some(TestOutcome::Failed(Failure::Refused(Status::Busy(_)))));
        refused += usize::from(failed(net.hosts[0].outcome(op)));
    }
    assert_eq!((abandoned(&net), refused), (MAX_ABANDONED, 20));
    let (peer, now, waiting) = (net.peer(0, 1), net.now, 7_000_001);
    assert!(
        matches!(net.hosts[0].proto.behind(peer, None), Failure::Refused(Status::Busy(why)) if why.contains("has not answered"))
    );
    // Small ones have credit.
    let small = net.call(0, 1, notice(b"small"));
    assert!(matches!(net.hosts[0].outcome(small), Some(TestOutcome::Answered { .. })));
    // A caller that waits may call again as soon as the peer has replied to one.
    net.hosts[0].begun.push(waiting);
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, None, waiting, now)));
    net.advance(MOMENT);
    assert!(!net.hosts[0].is_done(waiting));
    while !net.hosts[0].is_done(waiting) && net.now < now + 1000 * MOMENT {
        net.advance(MOMENT);
    }
    assert!(net.hosts[0].is_done(waiting) && abandoned(&net) < MAX_ABANDONED);
    net.advance(1000 * MOMENT);
    assert_eq!(abandoned(&net), 0);
    let again = net.call(0, 1, notice(&body));
    net.advance(1000 * MOMENT);
    assert!(matches!(net.hosts[0].outcome(again), Some(TestOutcome::Answered { .. })));
    net.settle_until_served(1);
    net.end();
}

fn raw_notice(call: u64, len: usize) -> Vec<u8> {
    let message = Message::Request {
        call,
        procedure: 1,
        declaration: (call == 0).then_some(Declare { name: "note", shape: BorrowedBytes(b"s") }),
        provider: 0,
        budget_us: 1_000_000,
        one_way: true,
        leases: LeaseRange::default(),
        size: len as u64,
    };
    frame(&message, &vec![7; len])
}

/// A peer that exceeds its credit, in calls or in bytes, is disconnected.
#[test]
fn peer_that_exceeds_its_credit_is_disconnected() {
    for (len, fits) in [(0, LEAST.calls as usize), (20_000, LEAST.bytes as usize / 20_000)] {
        // Too little for more credit than the minimum.
        let least = PeerLimits { requests: LEAST.calls as usize, bytes: LEAST.bytes as usize, ..limits() };
        let mut net = Net::with(vec![(Config { limits: least, ..config() }, true)]);
        let raw = net.raw_peer(0, 9);
        for call in 0..fits as u64 {
            net.send_bytes(raw, raw_notice(call, len));
        }
        assert!(!net.is_shut(raw));
        assert_eq!(net.hosts[0].inbox.len(), fits);
        net.send_bytes(raw, raw_notice(fits as u64, len));
        assert!(net.is_shut(raw), "{len} bytes");
        // Calls within the credit are handled.
        assert_eq!(net.hosts[0].proto.requests(), fits);
        net.drop_requests(0);
        net.end();
    }
}

/// Credit that is used up grows, up to the most for one peer, and up to the limits of the engine.
#[test]
fn credit_grows_within_the_limits() {
    let config = |requests| Config { limits: PeerLimits { requests, ..limits() }, ..config() };
    for (requests, most) in [(100_000, MOST.calls), (40, 40), (1, LEAST.calls)] {
        let mut net = Net::with(vec![(config(100_000), true), (config(requests), true)]);
        net.hosts[1].echo = true;
        net.call(0, 1, notice(b"connects"));
        net.settle();
        net.settings.delay = MOMENT;
        let mut sent = 0;
        for _ in 0..15 {
            sent = 0;
            // As many as there is credit for; then they are handled, and the credit returns.
            loop {
                let op = net.call(0, 1, notice(b"x"));
                if matches!(net.hosts[0].outcome(op), Some(TestOutcome::Failed(_))) {
                    break;
                }
                sent += 1;
            }
            net.settle();
        }
        net.hosts[1].echo = false;
        assert!(sent <= most && sent > most / 2, "{sent} calls at a time where {most} are the most");
        net.end();
    }
}

/// A peer can't pile up one-way calls by reconnecting.
#[test]
fn one_way_calls_left_by_disconnected_peers_are_bounded() {
    let mut net = Net::with(vec![(Config { limits: PeerLimits { requests: 100, ..limits() }, ..config() }, true)]);
    let mut refused = 0;
    for round in 0..20 {
        let raw = net.raw_peer(0, 100 + round);
        if net.is_shut(raw) {
            refused += 1;
            continue;
        }
        (0..LEAST.calls.into()).for_each(|call| net.send_bytes(raw, raw_notice(call, 10)));
        net.cut(raw.wire);
    }
    assert!(refused > 10);
    assert!(net.hosts[0].inbox.len() <= 100 + LEAST.calls as usize);
    net.drop_requests(0);
    let raw = net.raw_peer(0, 500);
    assert!(!net.is_shut(raw), "once the calls are handled, new peers are accepted again");
    net.cut(raw.wire);
    net.end();
}

/// The memory of decoded values stays accounted while handlers run, also after their callers have disconnected.
#[test]
fn values_of_calls_left_by_disconnected_peers_are_accounted() {
    let mut net = Net::with(vec![(Config { limits: PeerLimits { requests: 100, ..limits() }, ..config() }, true)]);
    let raw = net.raw_peer(0, 100);
    (0..3).for_each(|call| net.send_bytes(raw, raw_notice(call, 10)));
    let [less, more, same] = [0, 1, 2].map(|at| net.hosts[0].inbox[at].request);
    let count = |net: &mut Net, request, memory| {
        net.with_host(0, |host| host.proto.count_values(request, memory).unwrap());
        assert_eq!(net.hosts[0].proto.miscounted(), None);
    };
    count(&mut net, less, 40_000);
    count(&mut net, same, 40_000);
    net.cut(raw.wire);
    assert_eq!(net.hosts[0].proto.miscounted(), None);
    count(&mut net, less, 4_000);
    count(&mut net, more, 40_000);
    net.drop_requests(0);
    assert_eq!(net.hosts[0].proto.miscounted(), None);
    let raw = net.raw_peer(0, 500);
    assert!(!net.is_shut(raw), "once the calls are handled, new peers are accepted");
    net.cut(raw.wire);
    net.end();
}

/// Each one-way call that is dropped is counted, and logged with the peer at powers of two.
#[test]
fn dropped_one_way_calls_are_counted_and_logged() {
    let mut net = Net::new(2);
    for round in 1..=5u64 {
        net.call(0, 1, notice(b"x"));
        net.advance(MOMENT);
        let arrived = net.hosts[1].take();
        net.with_host(1, |host| host.refuse(arrived.request, Status::NoSuchProcedure));
        assert_eq!(net.hosts[1].proto.refusals().one_way, round);
    }
    let logged = net.hosts[1].log.iter().filter(|line| matches!(line, Log::Dropped { peer: Some(_), .. })).count();
    assert_eq!(logged, 3, "the first, the second, and the fourth");
    // A call that was arriving when the connection was lost.
    net.settings.piece = 10_000;
    net.settings.pace = MOMENT;
    net.call(0, 1, notice(&pattern(1, 1 << 20)));
    net.advance(5 * MOMENT);
    assert!(net.hosts[1].inbox.is_empty());
    let wire = net.wire(0, 1);
    net.cut(wire);
    assert_eq!(net.hosts[1].proto.refusals().one_way, 6);
    net.end();
}

/// A host at which handlers have nearly all the memory that the peers may take: of each call's values a quarter counts.
fn full(peers: u64) -> (Net, Vec<super::raw::Raw>) {
    let mut net = Net::with(vec![(Config { limits: PeerLimits { peer_bytes: 1 << 20, ..limits() }, ..config() }, true)]);
    net.hosts[0].values = 3 << 20;
    let raws: Vec<_> = (0..peers).map(|number| net.raw_peer(0, 1000 + number)).collect();
    for raw in &raws {
        (0..3).for_each(|call| net.send_bytes(*raw, raw_notice(call, 10)));
    }
    let host = &net.hosts[0];
    assert_eq!((host.inbox.len() as u64, host.proto.requests() as u64), (peers, 3 * peers));
    (net, raws)
}

fn handle_one(net: &mut Net) {
    let arrived = net.hosts[0].take();
    net.with_host(0, |host| {
        let _ = host.answer(arrived.request, b"");
    });
    assert_eq!(net.hosts[0].proto.miscounted(), None);
}

/// Each connection has its calls handled as soon as it has memory again, however many others wait.
#[test]
fn calls_that_wait_for_memory_are_handled_in_turn() {
    let (mut net, raws) = full(200);
    // The last one first: its turn is far away.
    let link = net.raw_link(raws[199]).unwrap().1;
    for _ in 0..3 {
        let at = net.hosts[0].inbox.iter().position(|arrived| arrived.link == link).expect("it does not wait");
        let arrived = net.hosts[0].inbox.remove(at);
        net.with_host(0, |host| host.answer(arrived.request, b"").unwrap());
        assert_eq!(net.hosts[0].proto.miscounted(), None);
    }
    assert_eq!(net.hosts[0].inbox.len(), 199);
    (0..3 * 199).for_each(|_| handle_one(&mut net));
    assert_eq!(net.hosts[0].proto.requests(), 0);
    assert_eq!(net.hosts[0].proto.refusals.one_way, 0);
    net.end();
}

/// One that waits for memory of other peers has it as soon as it is there, also where many wait for their own.
#[test]
fn a_call_that_waits_for_memory_of_others() {
    let limits = PeerLimits { peer_bytes: 1 << 20, bytes: 20_000_000, ..limits() };
    let mut net = Net::with(vec![(Config { limits, ..config() }, true)]);
    net.hosts[0].values = 7 << 19;
    let raws: Vec<_> = (0..22).map(|number| net.raw_peer(0, 1000 + number)).collect();
    net.send_bytes(raws[21], raw_notice(0, 10));
    for raw in &raws[..20] {
        (0..2).for_each(|call| net.send_bytes(*raw, raw_notice(call, 10)));
    }
    net.send_bytes(raws[20], raw_notice(0, 10));
    let link = net.raw_link(raws[20]).unwrap().1;
    let has_come = |net: &Net| net.hosts[0].inbox.iter().any(|arrived| arrived.link == link);
    assert_eq!((net.hosts[0].inbox.len(), has_come(&net)), (21, false));
    handle_one(&mut net);
    assert!(has_come(&net));
    (0..41).for_each(|_| handle_one(&mut net));
    assert_eq!(net.hosts[0].proto.requests(), 0);
    net.end();
}

/// Those of peers that have gone are handled, and count for no other peer.
#[test]
fn calls_that_wait_for_memory_outlive_their_connections() {
    let (mut net, raws) = full(20);
    for raw in &raws {
        net.disconnect(*raw);
        assert_eq!(net.hosts[0].proto.miscounted(), None);
    }
    while !net.hosts[0].inbox.is_empty() {
        handle_one(&mut net);
    }
    assert_eq!(net.hosts[0].proto.requests(), 0);
    assert_eq!(net.hosts[0].proto.refusals.one_way, 0);
    net.end();
}

/// What its caller has taken back is handled all the same; and what waits at the end of an engine is counted as lost.
#[test]
fn calls_that_wait_for_memory_are_cancelled_or_lost() {
    let (mut net, raws) = full(2);
    net.send_message(raws[0], &Message::Cancel { call: 2 }, b"");
    net.send_message(raws[0], &Message::Cancel { call: 2 }, b"");
    assert_eq!(net.hosts[0].proto.miscounted(), None);
    (0..2).for_each(|_| handle_one(&mut net));
    net.with_host(0, |host| {
        host.proto.begin_shutdown();
        host.proto.finish_shutdown();
    });
    assert_eq!(net.hosts[0].proto.miscounted(), None);
    assert_eq!(net.hosts[0].proto.refusals.one_way, 2);
    while !net.hosts[0].inbox.is_empty() {
        handle_one(&mut net);
    }
    net.end();
}

/// Values for which there is room when nothing else is there are not lost because something is.
#[test]
fn values_that_fit_alone_wait() {
    for parts in [8, 14] {
        let (limit, size) = (1 << 20, 10);
        let mut net = Net::with(vec![(Config { limits: PeerLimits { peer_bytes: limit, ..limits() }, ..config() }, true)]);
        let raw = net.raw_peer(0, 9);
        net.hosts[0].values = 1 << 20;
        net.send_bytes(raw, raw_notice(0, size));
        net.hosts[0].values = limit / 16 * parts * 4;
        net.send_bytes(raw, raw_notice(1, size));
        assert_eq!(net.hosts[0].proto.refusals.one_way, 0, "{parts} of 16 parts");
        (0..2).for_each(|_| handle_one(&mut net));
        net.end();
    }
}

/// Connections whose calls waited leave nothing in the order of turns, while calls of others go on waiting.
#[test]
fn connections_that_close_leave_no_turns() {
    let (mut net, _raws) = full(20);
    let mut most = 0;
    for number in 0..300 {
        let raw = net.raw_peer(0, 5000 + number);
        let link = net.raw_link(raw).unwrap().1;
        (0..2).for_each(|call| net.send_bytes(raw, raw_notice(call, 10)));
        assert!(net.hosts[0].proto.parked.has(link));
        net.disconnect(raw);
        while let Some(at) = net.hosts[0].inbox.iter().position(|arrived| arrived.link == link) {
            let arrived = net.hosts[0].inbox.remove(at);
            net.with_host(0, |host| host.answer(arrived.request, b"").unwrap());
        }
        most = most.max(net.hosts[0].proto.parked.turns());
    }
    assert_eq!((net.hosts[0].inbox.len(), net.hosts[0].proto.requests()), (20, 60));
    assert!(most <= 40, "{most} turns for 20 connections");
    while !net.hosts[0].inbox.is_empty() {
        handle_one(&mut net);
    }
    assert_eq!(net.hosts[0].proto.parked.turns(), 0);
    net.end();
}
