//! Calls that nobody answers.

use std::time::Duration;

use super::env::{TestLease, pattern};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, TestCall, call, config, few, limits};
use super::raw::frame;
use super::wire::{BorrowedBytes, Declare, Message};
use super::{Config, Failure, LeaseRange, Log, PeerLimits, Status};
use crate::proto::one_way::{LEAST, MOST};

const MOMENT: Duration = Duration::from_millis(1);

fn notice(body: &[u8]) -> TestCall {
    TestCall { one_way: true, ..call(body) }
}

#[test]
fn a_notice_is_done_when_it_is_on_its_way() {
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
        if matches!(net.hosts[0].outcomes.get(&op).map(|ends| &ends[..]), Some([TestOutcome::Failed(_)])) {
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
        let now = net.now;
        net.with_host(0, |host| assert!(host.proto.await_credit(peer, Some(1), op, now)));
        assert!(!net.hosts[0].is_done(op));
    }
    for _ in 0..sent.len() / 2 {
        net.serve(1);
    }
    net.advance(MOMENT);
    assert!(waiting.iter().all(|op| net.hosts[0].is_done(*op)));
    let room = net.call(0, 1, notice(b"there is room"));
    assert!(matches!(net.hosts[0].outcome(room), Some(TestOutcome::Answered { .. })));
    // Where there is room, nobody waits; and where the connection ends, nobody waits for it.
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
    let now = net.now;
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, Some(1), op, now)));
    assert!(!net.hosts[0].is_done(op));
    net.cut(0);
    assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
    net.drop_requests(1);
    net.end();
}

/// An engine that ends keeps no caller waiting for credit, though its connection takes a while to end.
#[test]
fn waiting_for_room_ends_with_the_engine() {
    let mut net = roomy();
    let peer = net.peer(0, 1);
    (0..5000).for_each(|_| _ = net.call(0, 1, notice(b"x")));
    net.advance(MOMENT);
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

/// A caller that waits for credit learns that its peer has fallen silent. One that has given up leaves nothing behind.
#[test]
fn waiting_for_room_ends_with_a_silent_peer() {
    let mut net = roomy();
    let peer = net.peer(0, 1);
    for _ in 0..5000 {
        net.call(0, 1, notice(b"x"));
    }
    net.advance(MOMENT);
    // Nothing is expected of the peer any more.
    net.advance(2 * config().peer_timeout);
    let (waits, gives_up, now) = (7_000_001, 7_000_002, net.now);
    net.hosts[0].begun.push(waits);
    net.with_host(0, |host| {
        assert!(host.proto.await_credit(peer, Some(1), waits, now));
        assert!(host.proto.await_credit(peer, Some(1), gives_up, now));
        host.proto.forget_waiter(peer, |waiter| *waiter == gives_up);
    });
    let wire = net.wire(0, 1);
    // A peer that lives may take its time.
    net.advance(3 * config().peer_timeout);
    assert!(!net.hosts[0].is_done(waits));
    net.wires[wire].frozen = true;
    net.advance(2 * config().peer_timeout);
    assert_failed!(net.hosts[0], waits, Failure::Disconnected { reason } if reason.contains("silent"));
    assert!(!net.hosts[0].is_done(gives_up));
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
    assert!(link.outgoing.out < 600, "room for {} notices is lost", link.outgoing.out);
    net.end();
}

/// What is large is announced: it is done when the peer has said that it takes it, and refused when the peer has no room.
#[test]
fn a_large_notice_is_taken_or_refused() {
    // Three of them, and what was declared.
    let small = Config { limits: PeerLimits { peer_bytes: (3 << 20) + 1000, ..limits() }, ..config() };
    let mut net = Net::with(vec![(config(), true), (small, true)]);
    net.call(0, 1, call("connects"));
    net.advance(MOMENT);
    net.serve(1);
    let body = pattern(1, 1 << 20);
    net.settings.delay = MOMENT;
    let ops: Vec<_> = (0..4).map(|_| net.call(0, 1, notice(&body))).collect();
    assert!(ops.iter().all(|op| !net.hosts[0].is_done(*op)), "the peer has said nothing yet");
    net.advance(20 * MOMENT);
    let refused = ops.iter().filter(|op| matches!(net.hosts[0].outcome(**op), Some(TestOutcome::Failed(_)))).count();
    assert_eq!((net.hosts[1].inbox.len(), refused), (3, 1));
    // Whoever was refused is told when one of the others has been handled, and no sooner.
    let peer = net.peer(0, 1);
    let waits = 7_000_001;
    net.hosts[0].begun.push(waits);
    let now = net.now;
    net.with_host(0, |host| assert!(host.proto.await_credit(peer, None, waits, now)));
    net.advance(10 * MOMENT);
    assert!(!net.hosts[0].is_done(waits));
    net.serve(1);
    net.advance(20 * MOMENT);
    assert!(net.hosts[0].is_done(waits));
    let again = net.call(0, 1, notice(&body));
    net.advance(20 * MOMENT);
    assert!(matches!(net.hosts[0].outcome(again), Some(TestOutcome::Answered { .. })));
    net.settle_until_served(1);
    assert_eq!(net.hosts[1].proto.refusals().one_way, 0);
    // Nothing of this engine is left there: nobody has to be waited for.
    let now = net.now;
    net.with_host(0, |host| assert!(!host.proto.await_credit(peer, None, 7_000_002, now)));
    net.end();
}

/// Small ones that were handled, and not reported yet, don't keep a caller waiting whose large one was refused.
#[test]
fn a_refusal_is_followed_by_what_was_not_reported() {
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

/// The two sides agree on what has not been handled, also where callers gave up before they heard that their calls were taken.
#[test]
fn large_notices_that_are_given_up_are_counted() {
    for refused in [false, true] {
        let peer_bytes = if refused { (1 << 20) + 1000 } else { limits().peer_bytes };
        let small = Config { limits: PeerLimits { peer_bytes, ..limits() }, ..config() };
        let mut net = Net::with(vec![(config(), true), (small, true)]);
        net.call(0, 1, call("connects"));
        net.advance(MOMENT);
        net.serve(1);
        net.settings.delay = MOMENT;
        // Where the peer has no room, it is because of this one.
        let kept = net.call(0, 1, notice(&pattern(1, 1 << 20)));
        net.advance(20 * MOMENT);
        assert!(matches!(net.hosts[0].outcome(kept), Some(TestOutcome::Answered { .. })));
        for round in 0..3 {
            // The word that it is taken, or not, is on its way.
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

/// A peer that makes more one-way calls than it has credit for is hung up on, in calls as well as in bytes.
#[test]
fn credit_is_not_exceeded() {
    for (len, fits) in [(0, LEAST.calls as usize), (20_000, LEAST.bytes as usize / 20_000)] {
        let mut net = Net::pair();
        let raw = net.raw_peer(0, 9);
        for call in 0..fits as u64 {
            net.say_bytes(raw, raw_notice(call, len));
        }
        assert!(!net.is_shut(raw));
        assert_eq!(net.hosts[0].inbox.len(), fits);
        net.say_bytes(raw, raw_notice(fits as u64, len));
        assert!(net.is_shut(raw), "{len} bytes");
        // What it had credit for is handled.
        assert_eq!(net.hosts[0].proto.requests(), fits);
        net.drop_requests(0);
        net.end();
    }
}

/// Who uses its credit gets more, up to what one peer gets, and up to the limits for all.
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
            // As many as there is credit for; then they are handled, and the credit comes back.
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

/// A peer can't pile up one-way calls by connecting again and again.
#[test]
fn what_is_left_behind_is_bounded() {
    let mut net = Net::with(vec![(Config { limits: PeerLimits { requests: 100, ..limits() }, ..config() }, true)]);
    let mut turned_away = 0;
    for round in 0..20 {
        let raw = net.raw_peer(0, 100 + round);
        if net.is_shut(raw) {
            turned_away += 1;
            continue;
        }
        (0..LEAST.calls.into()).for_each(|call| net.say_bytes(raw, raw_notice(call, 10)));
        net.cut(raw.wire);
    }
    assert!(turned_away > 10);
    assert!(net.hosts[0].inbox.len() <= 100 + LEAST.calls as usize);
    net.drop_requests(0);
    let raw = net.raw_peer(0, 500);
    assert!(!net.is_shut(raw), "when they have been handled, peers are welcome again");
    net.cut(raw.wire);
    net.end();
}

/// What the values of such calls take, more or less than before their callers went, is counted as long as they are handled.
#[test]
fn values_of_what_is_left_behind_are_counted() {
    let mut net = Net::with(vec![(Config { limits: PeerLimits { requests: 100, ..limits() }, ..config() }, true)]);
    let raw = net.raw_peer(0, 100);
    (0..3).for_each(|call| net.say_bytes(raw, raw_notice(call, 10)));
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
    assert!(!net.is_shut(raw), "when they have been handled, peers are welcome");
    net.cut(raw.wire);
    net.end();
}

/// Whatever keeps a call from its handler is counted, and noted with the peer at powers of two.
#[test]
fn what_is_lost_is_counted_and_noted() {
    let mut net = Net::new(2);
    for round in 1..=5u64 {
        net.call(0, 1, notice(b"x"));
        net.advance(MOMENT);
        let arrived = net.hosts[1].take();
        net.with_host(1, |host| host.refuse(arrived.request, Status::NoSuchProcedure));
        assert_eq!(net.hosts[1].proto.refusals().one_way, round);
    }
    let noted = net.hosts[1].log.iter().filter(|line| matches!(line, Log::Dropped { peer: Some(_), .. })).count();
    assert_eq!(noted, 3, "the first, the second, and the fourth");
    // What was arriving when the connection was lost.
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
        (0..3).for_each(|call| net.say_bytes(*raw, raw_notice(call, 10)));
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
    net.say_bytes(raws[21], raw_notice(0, 10));
    for raw in &raws[..20] {
        (0..2).for_each(|call| net.say_bytes(*raw, raw_notice(call, 10)));
    }
    net.say_bytes(raws[20], raw_notice(0, 10));
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
        net.hang_up(*raw);
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
    net.say(raws[0], &Message::Cancel { call: 2 }, b"");
    net.say(raws[0], &Message::Cancel { call: 2 }, b"");
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
        net.say_bytes(raw, raw_notice(0, size));
        net.hosts[0].values = limit / 16 * parts * 4;
        net.say_bytes(raw, raw_notice(1, size));
        assert_eq!(net.hosts[0].proto.refusals.one_way, 0, "{parts} of 16 parts");
        (0..2).for_each(|_| handle_one(&mut net));
        net.end();
    }
}
