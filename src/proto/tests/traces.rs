//! The trace that travels with a call: with calls of every kind, with the right one of them, and at no cost to those without.

use std::time::Duration;

use super::Config;
use super::env::pattern;
use super::net::{Net, TestCall, call, config};
use super::raw;
use super::wire::Message;
use crate::TraceContext;
use crate::proto::one_way::MAX_COST;

const MOMENT: Duration = Duration::from_millis(1);

fn trace(number: u8, state: &str) -> TraceContext {
    TraceContext::new([number; 16], [number; 8], 1).unwrap().with_state(state)
}

fn traced(what: TestCall, number: u8, state: &str) -> TestCall {
    TestCall { trace: Some(trace(number, state)), ..what }
}

fn notice(body: impl Into<Vec<u8>>) -> TestCall {
    TestCall { one_way: true, ..call(body) }
}

/// Takes what has arrived at host 1, and answers it.
fn arrived(net: &mut Net) -> Option<TraceContext> {
    net.advance(100 * MOMENT);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| drop(host.answer(arrived.request, b"")));
    arrived.trace
}

#[test]
fn trace_travels_with_calls_of_every_kind() {
    let state = "vendor=".to_owned() + &"x".repeat(TraceContext::MAX_STATE - 7);
    for state in ["", "a=1", &state] {
        let mut net = Net::new(2);
        let kinds: [(&str, TestCall); 7] = [
            ("before there is a connection", call("x")),
            ("small", call("y")),
            ("large", call(pattern(1, 300 << 10))),
            ("without a body", call("")),
            ("one-way", notice("z")),
            ("one-way, announced", notice(pattern(2, MAX_COST + 1))),
            ("one-way, streamed", notice(pattern(3, 1 << 20))),
        ];
        for (number, (kind, what)) in (1..).zip(kinds) {
            let (one_way, body) = (what.one_way, what.body.clone());
            net.call(0, 1, traced(what, number, state));
            assert_eq!(arrived(&mut net), Some(trace(number, state)), "{kind}");
            // It is that of this call only.
            net.call(0, 1, TestCall { one_way, ..call(body) });
            assert_eq!(arrived(&mut net), None, "the next after: {kind}");
        }
        net.settle();
        net.end();
    }
}

/// The bytes that the call puts on the wire.
fn sent_for(net: &mut Net, what: TestCall) -> u64 {
    let sent = |net: &Net| net.hosts[0].proto.links.values().map(|link| link.traffic.sent_bytes).sum::<u64>();
    let before = sent(net);
    net.call(0, 1, what);
    let sent = sent(net) - before;
    arrived(net);
    sent
}

/// The frame of a trace has 12 bytes of lengths and checksum, and 27 besides the state.
#[test]
fn call_without_a_trace_sends_not_one_byte_for_it() {
    let mut net = Net::new(2);
    sent_for(&mut net, call("opens the connection"));
    sent_for(&mut net, notice("uses it"));
    for what in [|| call("four"), || notice("four")] {
        let (without, with) = (sent_for(&mut net, what()), sent_for(&mut net, traced(what(), 9, "")));
        assert_eq!(without, 12 + 44 + 4);
        assert_eq!((with, sent_for(&mut net, traced(what(), 9, "a=1"))), (without + 39, without + 42));
        assert_eq!(sent_for(&mut net, what()), without);
    }
    net.settle();
    net.end();
}

/// Both sides count the state in the cost of a one-way call: they agree on which calls take credit, and on how much.
#[test]
fn state_of_a_trace_takes_credit() {
    let mut net = Net::new(2);
    net.call(0, 1, call("opens the connection"));
    arrived(&mut net);
    let state = "a=".to_owned() + &"y".repeat(98);
    // Bodies of that length would be streamed, and announced for that reason.
    let shape: &[u8] = vec![7; MAX_COST / 2].leak();
    for (len, announced) in [(MAX_COST - 101, false), (MAX_COST - 100, false), (MAX_COST - 99, true), (MAX_COST, true)] {
        for _ in 0..20 {
            let declared = TestCall { procedure: 0, shape, name: "", ..notice(pattern(4, len - shape.len())) };
            let op = net.call(0, 1, traced(declared, 3, &state));
            assert_eq!(net.hosts[0].is_done(op), !announced, "{len}");
            assert_eq!(arrived(&mut net), Some(trace(3, &state)));
            assert!(net.hosts[0].is_done(op));
        }
    }
    net.settle();
    net.end();
}

/// A one-way call that waits for memory for its values is handed out again, with its trace.
#[test]
fn trace_waits_with_a_call_that_waits_for_memory() {
    let mut small = config();
    small.limits.peer_bytes = 1 << 20;
    let mut net = Net::with(vec![(config(), true), (small, true)]);
    net.hosts[1].values = 3 << 20;
    net.call(0, 1, traced(notice("first"), 1, ""));
    net.call(0, 1, traced(notice("second"), 2, "a=1"));
    net.advance(100 * MOMENT);
    let first = net.hosts[1].take();
    assert_eq!(first.trace, Some(trace(1, "")));
    assert!(net.hosts[1].inbox.is_empty(), "the second has to wait for memory");
    net.with_host(1, |host| drop(host.answer(first.request, b"")));
    assert_eq!(arrived(&mut net), Some(trace(2, "a=1")));
    net.settle();
    net.end();
}

/// A request that is refused takes its trace with it.
#[test]
fn trace_of_a_refused_call_is_not_that_of_the_next() {
    let small = Config { max_message: 2000, ..config() };
    let mut net = Net::with(vec![(small, true), (config(), true)]);
    net.hosts[0].echo = false;
    let raw = net.raw_peer(0, 1);
    let context = Message::TraceContext { trace_id: [7; 16], parent_id: [7; 8], flags: 0, state: "" };
    net.send_message(raw, &context, b"");
    net.send_message(raw, &super::malformed::request(1, 5000), b"");
    net.send_message(raw, &super::malformed::request(2, 0), b"");
    let arrived = net.hosts[0].take();
    assert_eq!(arrived.trace, None);
    // One that is replaced, and one that no request follows.
    net.send_message(raw, &context, b"");
    net.send_bytes(
        raw,
        raw::frame(&Message::TraceContext { trace_id: [8; 16], parent_id: [8; 8], flags: 255, state: "b=2" }, b""),
    );
    net.send_message(raw, &super::malformed::request(3, 0), b"");
    net.send_message(raw, &context, b"");
    assert!(!net.is_shut(raw));
    let next = net.hosts[0].take();
    let expected = TraceContext::new([8; 16], [8; 8], 255).unwrap().with_state("b=2");
    assert_eq!(next.trace, Some(expected));
    for request in [arrived.request, next.request] {
        net.with_host(0, |host| drop(host.answer(request, b"")));
    }
    net.disconnect(raw);
    net.settle();
    net.end();
}
