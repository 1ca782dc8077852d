//! Calls and their responses.

use std::time::Duration;

use super::env::{Random, pattern};
use super::host::{TestOutcome, assert_failed, served};
use super::net::{Net, call, few};
use super::{Failure, Status};

const CHUNK: usize = 512 << 10;

#[test]
fn call_to_an_echoing_peer_returns_its_response() {
    let mut net = Net::pair();
    let op = net.call(0, 1, call("hello"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"hello"));
    net.end();
}

/// Handshakes, frames and payloads that arrive in pieces of every size are reassembled.
#[test]
fn bodies_of_every_size_in_pieces_of_every_size_are_reassembled() {
    let small = [0, 1, 2, 300];
    let large = [super::host::EAGER, super::host::EAGER + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5];
    let every = [&small[..], &large[..]].concat();
    let cases: [(usize, &[usize]); 9] = [
        (1, &small),
        (2, &small),
        (3, &small),
        (5, &small),
        (7, &[0, 300, CHUNK + 1]),
        (64, &every),
        (4093, &every),
        (CHUNK + 70, &every),
        (usize::MAX, &every),
    ];
    for (piece, sizes) in cases {
        for report_late in [true, false] {
            let mut net = Net::pair();
            net.settings.piece = piece;
            net.settings.report_late = report_late;
            net.settings.injects = !report_late;
            for &size in sizes {
                let body = pattern(size as u64, size);
                let op = net.call(0, 1, call(body.clone()));
                net.settle();
                assert!(net.hosts[0].body(op) == served(&body), "{size} bytes in pieces of {piece}");
            }
            net.end();
        }
    }
}

#[test]
fn thousand_calls_answered_in_random_order_get_their_own_responses() {
    let mut net = Net::new(2);
    let ops: Vec<_> = (0..1000u32).map(|n| (n, net.call(0, 1, call(n.to_le_bytes())))).collect();
    net.run();
    net.advance(Duration::from_millis(1));
    assert_eq!(net.hosts[1].inbox.len(), 1000);
    let mut random = Random(1);
    while !net.hosts[1].inbox.is_empty() {
        let n = random.below(net.hosts[1].inbox.len());
        net.hosts[1].inbox.swap(0, n);
        net.serve(1);
        if random.once_in(10) {
            net.advance(Duration::from_micros(30));
        }
    }
    net.settle();
    for (n, op) in ops {
        assert_eq!(net.hosts[0].body(op), served(&n.to_le_bytes()));
    }
    net.end();
}

/// Both hosts call each other over one connection.
#[test]
fn calls_in_both_directions_share_one_connection() {
    let mut net = Net::pair();
    net.hosts[0].echo = true;
    let there = net.call(0, 1, call("there"));
    net.settle();
    let back = net.call(1, 0, call("back"));
    net.settle();
    assert_eq!(net.hosts[0].body(there), served(b"there"));
    assert_eq!(net.hosts[1].body(back), served(b"back"));
    assert_eq!(net.wires.len(), 1);
    net.end();
}

#[test]
fn request_arrives_with_the_fields_of_its_call() {
    let mut net = Net::new(2);
    let began = net.now;
    let op = net.call(0, 1, call("x"));
    net.advance(Duration::from_millis(1));
    let arrived = net.hosts[1].take();
    assert_eq!((arrived.name.as_str(), arrived.provider, arrived.one_way), ("echo", 0, false));
    assert_eq!(arrived.shape, b"s");
    assert_eq!(arrived.peer.address, net.hosts[0].address);
    let until = arrived.deadline.unwrap();
    assert!(until >= began + Duration::from_secs(29) && until <= net.now + Duration::from_secs(30));
    net.with_host(1, |host| host.answer(arrived.request, b"y").unwrap());
    net.settle();
    match net.hosts[0].outcome(op) {
        Some(TestOutcome::Answered { body, shape, .. }) => assert_eq!((&body[..], &shape[..]), (&b"y"[..], &b"r"[..])),
        other => panic!("{other:?}"),
    }
    net.end();
}

#[test]
fn refusal_of_every_kind_reaches_the_caller_unchanged() {
    let text = || "why".to_owned();
    let refusals = [
        Status::NoSuchProcedure,
        Status::NoSuchProvider,
        Status::NoResponse,
        Status::Panicked(text()),
        Status::Failed("ü€".repeat(1000)),
        Status::Decode(text()),
        Status::Encode(text()),
        Status::TypeMismatch { expected: text(), found: String::new() },
        Status::Busy(text()),
        Status::AccessDenied(text()),
        Status::Finalizing,
    ];
    let mut net = Net::new(2);
    for status in refusals {
        let op = net.call(0, 1, call("x"));
        net.advance(Duration::from_millis(1));
        let arrived = net.hosts[1].take();
        net.with_host(1, |host| host.refuse(arrived.request, status.clone()));
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::Refused(received) if *received == status);
    }
    net.end();
}

/// A refusal may arrive before all of a large body is sent: the rest is not sent.
#[test]
fn large_call_refused_early_stops_sending() {
    let mut config = super::net::config();
    config.limits = few(1);
    let mut net = Net::with(vec![(config.clone(), true), (config, true)]);
    let first = net.call(0, 1, call("keeps the place"));
    net.advance(Duration::from_millis(1));
    let arrived = net.hosts[1].take();
    let refused = net.call(0, 1, call(pattern(1, 4 << 20)));
    net.settings.delay = Duration::from_millis(1);
    net.advance(Duration::from_millis(8));
    assert_failed!(net.hosts[0], refused, Failure::Refused(Status::Busy(_)));
    assert!(net.hosts[0].proto.leftovers().iter().all(|left| !left.contains("streams")));
    net.with_host(1, |host| host.answer(arrived.request, b"done").unwrap());
    net.settle();
    assert_eq!(net.hosts[0].body(first), b"done");
    net.end();
}

#[test]
fn second_response_to_a_call_fails_with_cancelled() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, call("x"));
    net.advance(Duration::from_millis(1));
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| {
        host.answer(arrived.request, b"first").unwrap();
        assert!(matches!(host.answer(arrived.request, b"second"), Err(Failure::Cancelled)));
    });
    net.settle();
    assert_eq!(net.hosts[0].body(op), b"first");
    net.end();
}

/// While large bodies are being sent, a small call waits for at most one chunk.
#[test]
fn small_call_beside_large_calls_waits_for_one_chunk_at_most() {
    let mut net = Net::pair();
    let mut large: Vec<_> = (0..3u64).map(|n| net.call(0, 1, call(pattern(n, 4 << 20)))).collect();
    net.advance(Duration::from_millis(1));
    // From here on bandwidth is limited: 64 KiB take a millisecond.
    net.settings.piece = 64 << 10;
    net.settings.pace = Duration::from_millis(1);
    let begun = net.now;
    let small = net.call(0, 1, call("quick"));
    assert!(net.until(Duration::from_secs(1), |net| net.hosts[0].is_done(small)));
    let took = net.now - begun;
    assert!(took <= Duration::from_millis(12), "a small call took {took:?} beside streams whose chunks take 4 ms");
    assert!(large.iter().all(|op| !net.hosts[0].is_done(*op)));
    net.settings.pace = Duration::ZERO;
    net.settle();
    for (n, op) in large.drain(..).enumerate() {
        assert!(net.hosts[0].body(op) == served(&pattern(n as u64, 4 << 20)));
    }
    net.end();
}

/// Large bodies share the connection: none waits until another is complete.
#[test]
fn short_body_beside_a_long_one_completes_first() {
    let mut net = Net::pair();
    net.settings.piece = 64 << 10;
    net.settings.pace = Duration::from_millis(1);
    let long = net.call(0, 1, call(pattern(1, 4 << 20)));
    let short = net.call(0, 1, call(pattern(2, CHUNK)));
    assert!(net.until(Duration::from_secs(5), |net| net.hosts[0].is_done(short)));
    assert!(!net.hosts[0].is_done(long));
    net.settle();
    net.end();
}
