//! Overload: resources of one peer are bounded, and other peers keep their share.

use std::time::Duration;

use super::super::admission::MAX_CONTROL_BYTES;
use super::super::tables::MAX_DECLARED_BYTES;
use super::env::{Mem, TestLease, pattern};
use super::host::{assert_failed, served};
use super::malformed::{declaring, request};
use super::net::{Net, call, config, few, limits};
use super::raw::{self, Raw, frame};
use super::wire::{self, MAX_FRAME, Message, Range, Stream};
use super::{Config, Failure, LeaseRange, OutgoingBody, PayloadStatus, PeerLimits, Reply, Status};

const MOMENT: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TOKEN: u128 = 0xabc;

/// A host with these limits, and this many others.
fn net_with(limits: PeerLimits, others: usize) -> Net {
    let mut hosts = vec![(Config { limits, ..config() }, true)];
    hosts.extend(vec![(config(), true); others]);
    Net::with(hosts)
}

/// The frames of many requests of `size` bytes each.
fn requests(numbers: std::ops::Range<u64>, size: usize) -> Vec<u8> {
    let body = vec![7; size];
    numbers.flat_map(|number| frame(&request(number, size as u64), &body)).collect()
}

fn refusals(net: &Net, raw: Raw) -> usize {
    let mut count = 0;
    net.for_each_received(raw, |message| {
        count += usize::from(matches!(message, Message::Refuse { status: Status::Busy(_), .. }))
    });
    count
}

/// A peer that uses up the limit of the engine does not deny the others their share.
#[test]
fn requests_beyond_the_engines_limit_leave_others_their_share() {
    let mut net = net_with(PeerLimits { requests: 12, ..limits() }, 3);
    let greedy: Vec<_> = (0..30).map(|_| net.call(1, 0, call("mine"))).collect();
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[0].inbox.len(), 12);
    for op in &greedy[12..] {
        assert_failed!(net.hosts[1], *op, Failure::Refused(Status::Busy(reason)) if reason.contains("12"));
    }
    // Two more connections: each has its share of four.
    net.call(2, 0, call("first"));
    net.call(3, 0, call("first"));
    net.advance(10 * MOMENT);
    let honest: Vec<_> = (0..5).map(|_| net.call(2, 0, call("ours"))).collect();
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[0].inbox.len(), 12 + 5);
    assert_eq!(honest.iter().filter(|op| net.hosts[2].is_done(**op)).count(), 2);
    assert_eq!(net.hosts[0].proto.limited().requests, 18 + 2);
    net.settle_until_served(0);
    // The whole limit is available again at once.
    let again: Vec<_> = (0..12).map(|_| net.call(1, 0, call("mine"))).collect();
    net.advance(10 * MOMENT);
    net.settle_until_served(0);
    again.iter().for_each(|op| assert_eq!(net.hosts[1].body(*op), served(b"mine")));
    net.end();
}

/// Bodies are accounted from their announcement to the response, whether they arrive in one piece or not.
#[test]
fn bytes_beyond_the_peers_limit_are_refused_with_busy() {
    for size in [10_000, 100_000] {
        let mut net = net_with(PeerLimits { peer_bytes: 10 * size, ..limits() }, 2);
        let ops: Vec<_> = (0..12).map(|n| net.call(1, 0, call(pattern(n, size)))).collect();
        net.advance(SECOND / 10);
        // Declarations count, too.
        assert_eq!(net.hosts[0].inbox.len(), 9);
        let limit = (10 * size).to_string();
        for op in &ops[9..] {
            assert_failed!(net.hosts[1], *op, Failure::Refused(Status::Busy(reason)) if reason.contains(&limit));
        }
        let other = net.call(2, 0, call(pattern(1, size)));
        net.serve(0);
        net.advance(SECOND / 10);
        let next = net.call(1, 0, call(pattern(2, size)));
        net.advance(SECOND / 10);
        net.settle_until_served(0);
        assert!(net.hosts[2].body(other) == served(&pattern(1, size)));
        assert!(net.hosts[1].body(next) == served(&pattern(2, size)));
        net.end();
    }
}

#[test]
fn bytes_beyond_the_engines_limit_leave_others_their_share() {
    let mut net = net_with(PeerLimits { bytes: 1_000_000, ..limits() }, 4);
    for host in 1..4 {
        net.call(host, 0, call("x"));
    }
    net.advance(10 * MOMENT);
    net.settle_until_served(0);
    // Three connections: each has a third, once the limit is reached.
    let greedy: Vec<_> = (0..10).map(|n| net.call(1, 0, call(pattern(n, 200_000)))).collect();
    net.advance(SECOND / 10);
    assert_eq!(net.hosts[0].inbox.len(), 5);
    assert_failed!(net.hosts[1], greedy[9], Failure::Refused(Status::Busy(reason)) if reason.contains("1000000"));
    let honest: Vec<_> = (0..5).map(|n| net.call(2, 0, call(pattern(n, 80_000)))).collect();
    net.advance(SECOND / 10);
    assert_eq!(net.hosts[0].inbox.len(), 5 + 4);
    assert_failed!(net.hosts[2], honest[4], Failure::Refused(Status::Busy(_)));
    net.settle_until_served(0);
    net.end();
}

/// A caller that does not read its responses gets refusals; if it does not read those either, it is disconnected.
#[test]
fn caller_that_does_not_read_is_refused_then_disconnected() {
    for size in [1_000, 20_000] {
        let mut net = net_with(PeerLimits { peer_bytes: 200_000, bytes: 300_000, ..limits() }, 1);
        net.hosts[0].echo = true;
        let raw = net.raw_peer(0, 9);
        net.read(raw, false);
        let mut sent = 0;
        while !net.is_shut(raw) {
            // Bodies of 20,000 bytes are answered with streams.
            net.send_bytes(raw, requests(sent..sent + 100, size));
            sent += 100;
            for account in net.hosts[0].proto.links.values().map(|link| &link.account) {
                assert!(account.answers <= 200_000, "{} bytes of answers wait", account.answers);
                assert!(account.control < 320_000, "{} bytes", account.control);
            }
            assert!(sent < 10_000, "the peer is never disconnected");
            if sent == 1_000 {
                // If it reads again, its calls are served again.
                assert!(net.hosts[0].proto.limited().requests > 0);
                net.read(raw, true);
                net.advance(SECOND);
                let before = refusals(&net, raw);
                net.send_bytes(raw, requests(sent..sent + 5, size));
                net.advance(SECOND);
                assert_eq!(refusals(&net, raw), before);
                sent += 5;
                net.read(raw, false);
            }
        }
        assert_eq!(net.hosts[0].proto.limited().ended, 1);
        assert!(net.hosts[0].proto.bytes == 0);
        net.end();
    }
}

/// Responses that are larger than their requests may exceed the limit.
#[test]
fn unread_responses_beyond_the_limit_are_refused() {
    let mut net = net_with(PeerLimits { peer_bytes: 1_000_000, ..limits() }, 0);
    let raw = net.raw_peer(0, 9);
    net.read(raw, false);
    net.send_bytes(raw, requests(0..20, 10));
    let mut refused = 0;
    for number in 0..20 {
        let arrived = net.hosts[0].take();
        // Every other one is sent as a stream.
        let body = pattern(1, if number % 2 == 0 { 10_000 } else { 200_000 });
        match net.with_host(0, |host| host.answer(arrived.request, &body)) {
            Ok(()) => {}
            Err(Failure::Refused(Status::Busy(reason))) => {
                assert!(reason.contains("1000000"));
                refused += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    // Four large ones, and all of the small ones: 900,000 bytes and their frames.
    assert_eq!(refused, 6);
    assert_eq!(net.hosts[0].proto.limited().answers, 6);
    net.read(raw, true);
    net.advance(SECOND);
    assert_eq!(refusals(&net, raw), 6);
    net.end();
}

/// A response that is no larger than its request is not refused, since its handler has run, even if other peers have used
/// the limit of the engine up since.
#[test]
fn responses_no_larger_than_their_requests_are_sent() {
    let mut net = net_with(PeerLimits { bytes: 100_000, ..limits() }, 2);
    for host in [1, 2] {
        net.call(host, 0, call("x"));
    }
    net.advance(10 * MOMENT);
    net.settle_until_served(0);
    let greedy: Vec<_> = (0..9).map(|n| net.call(1, 0, call(pattern(n, 10_000)))).collect();
    net.advance(10 * MOMENT);
    let honest: Vec<_> = (0..4).map(|n| net.call(2, 0, call(pattern(n, 10_000)))).collect();
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[0].inbox.len(), 9 + 4);
    // All at once: the first are not sent yet when the next are queued.
    for _ in 0..13 {
        let arrived = net.hosts[0].take();
        assert!(net.with_host(0, |host| host.answer(arrived.request, &pattern(1, 1_000))).is_ok());
    }
    net.settle();
    greedy.iter().for_each(|op| assert!(net.hosts[1].body(*op) == pattern(1, 1_000)));
    honest.iter().for_each(|op| assert!(net.hosts[2].body(*op) == pattern(1, 1_000)));
    assert_eq!(net.hosts[0].proto.limited().answers, 0);
    net.end();
}

/// Cheap messages that each cause a reply: pings, denied transfers, shutdown requests.
#[test]
fn flooding_peer_that_does_not_read_is_disconnected() {
    let range = Range { transfer: 1, owner: 1, token: [1; 16], offset: 0, len: 1 };
    let floods = [
        frame(&Message::Ping, b""),
        frame(&Message::Pull(range), b""),
        frame(&Message::Push(range), b""),
        frame(&Message::Shutdown { call: 1 }, b""),
    ];
    for flood in floods {
        let mut net = net_with(PeerLimits { bytes: 1 << 20, ..limits() }, 1);
        net.hosts[0].echo = true;
        let raw = net.raw_peer(0, 9);
        net.read(raw, false);
        let many = flood.repeat(10_000);
        let mut rounds = 0;
        while !net.is_shut(raw) {
            // Messages about unknown operations have no effect.
            net.send_bytes(raw, frame(&Message::Cancel { call: 77 }, b""));
            net.send_bytes(raw, frame(&Message::Abort { transfer: 77, push: false }, b""));
            net.send_bytes(raw, frame(&Message::Handled { count: u32::MAX, calls: u32::MAX, bytes: u32::MAX }, b""));
            net.send_bytes(raw, many.clone());
            rounds += 1;
            assert!(rounds < 100, "the peer is never disconnected");
        }
        let op = net.call(1, 0, call("honest"));
        net.advance(SECOND);
        assert_eq!(net.hosts[1].body(op), served(b"honest"));
        net.end();
    }
}

/// Refusals of corrupt bodies count as unread replies, too.
#[test]
fn corrupt_bodies_with_unread_refusals_end_the_connection() {
    let mut net = net_with(limits(), 1);
    let raw = net.raw_peer(0, 9);
    let (_, link) = net.raw_link(raw).unwrap();
    // Straight into the protocol, whose outputs are not executed.
    let (proto, now) = (&mut net.hosts[0].proto, net.now);
    let mut sent = 0;
    let failure = (0..u64::MAX).find_map(|call| {
        let announced = frame(&request(call, 1), b"");
        let bytes = [announced, frame(&Message::Data { stream: Stream::Request, id: call, offset: 0, len: 1 }, b"")].concat();
        let result = proto.consume(link, &bytes, now);
        proto.handle_payload_done(link, PayloadStatus::Damaged, now);
        sent += bytes.len();
        assert!(sent < 8 * MAX_CONTROL_BYTES, "the peer is never disconnected");
        result.err()
    });
    assert!(matches!(&failure, Some(Failure::Disconnected { reason }) if reason.contains("does not read")), "{failure:?}");
    net.with_host(0, |host| host.proto.close(link, Failure::Cancelled));
    net.end();
}

/// A peer that releases no bulks of its responses is refused at some point, and served again when it releases them.
#[test]
fn responses_with_bulks_never_released_are_refused() {
    const LIMIT: usize = 1 << 20;
    let mut net = net_with(PeerLimits { bytes: LIMIT, peer_bytes: LIMIT, ..limits() }, 1);
    net.hosts[0].echo = false;
    let raw = net.raw_peer(0, 9);
    let mut call = 0;
    let mut given = |net: &mut Net| {
        call += 1;
        net.send_message(raw, &request(call, 0), b"");
        if net.hosts[0].inbox.is_empty() {
            return false;
        }
        let arrived = net.hosts[0].take();
        net.with_host(0, |host| {
            let lease = TestLease { token: TOKEN, number: 1 };
            host.leased.push(lease.clone());
            let mut reply =
                Reply { content: OutgoingBody::Small(b"room for the bulk here "), result: 0, shape: b"r", leases: vec![lease] };
            match host.proto.respond(arrived.request, Ok(&mut reply)) {
                Ok(()) => true,
                Err(Failure::Refused(Status::Busy(_))) => false,
                Err(other) => panic!("{other:?}"),
            }
        })
    };
    let most = LIMIT / size_of::<TestLease>();
    let got = (0..most).take_while(|_| given(&mut net)).count();
    assert!((1000..most).contains(&got), "{got} of {most}");
    assert!(refusals(&net, raw) > 0);
    assert!(!net.is_shut(raw));
    net.send_message(raw, &Message::Release(LeaseRange { first: 0, count: got as u32 }), b"");
    assert!(given(&mut net));
    net.disconnect(raw);
    net.end();
}

/// The bound on unread replies of one peer holds below the limit of the engine, too.
#[test]
fn unread_replies_beyond_the_peers_bound_end_the_connection() {
    let mut net = net_with(limits(), 0);
    let raw = net.raw_peer(0, 9);
    net.read(raw, false);
    net.send_message(raw, &Message::Ping, b"");
    // Sets the account, instead of sending that many pings.
    net.hosts[0].proto.links.values_mut().for_each(|link| link.account.control = MAX_CONTROL_BYTES - 30);
    net.send_message(raw, &Message::Ping, b"");
    net.send_message(raw, &Message::Ping, b"");
    assert!(!net.is_shut(raw));
    net.send_message(raw, &Message::Ping, b"");
    assert!(net.is_shut(raw));
    net.end();
}

/// A peer that reads may cause any number of replies.
#[test]
fn flooding_peer_that_reads_stays_connected() {
    let mut net = net_with(limits(), 0);
    let raw = net.raw_peer(0, 9);
    let pings = frame(&Message::Ping, b"").repeat(10_000);
    for _ in 0..40 {
        net.send_bytes(raw, pings.clone());
        net.advance(MOMENT);
    }
    assert!(!net.is_shut(raw));
    net.disconnect(raw);
    net.end();
}

#[test]
fn transfers_beyond_the_peers_limit_are_refused_with_busy() {
    for pull in [true, false] {
        let mut net = net_with(PeerLimits { peer_transfers: 5, ..limits() }, 1);
        net.expose(0, TOKEN, pattern(1, 2 << 20), true, true);
        net.settings.pace = MOMENT;
        net.settings.piece = 64 << 10;
        let parts: Vec<_> = (0..8).map(|_| Mem::new(vec![0; 2 << 20])).collect();
        let ops: Vec<_> = parts.iter().map(|part| net.transfer(1, 0, pull, (TOKEN, 0), part)).collect();
        net.settle();
        let refused = ops.iter().filter(|op| match net.hosts[1].outcome(**op) {
            Some(super::host::TestOutcome::Transferred(n)) => {
                assert_eq!(*n, 2 << 20);
                false
            }
            Some(super::host::TestOutcome::Failed(Failure::Refused(Status::Busy(reason)))) => {
                assert!(reason.contains('5'));
                true
            }
            other => panic!("{other:?}"),
        });
        assert_eq!(refused.count(), 3);
        let again = net.transfer(1, 0, pull, (TOKEN, 0), &parts[0]);
        net.settle();
        assert!(matches!(net.hosts[1].outcome(again), Some(super::host::TestOutcome::Transferred(_))));
        net.revoke(0, TOKEN);
        net.end();
    }
}

/// Pulls whose data is never read: no more than the limit of them wait.
#[test]
fn unread_pulls_beyond_the_limit_are_refused() {
    let mut net = net_with(PeerLimits { peer_transfers: 50, ..limits() }, 0);
    net.expose(0, TOKEN, vec![1; 1 << 20], true, true);
    let owner = net.hosts[0].incarnation;
    let raw = net.raw_peer(0, 9);
    net.read(raw, false);
    let pull = |transfer| Range { transfer, owner, token: TOKEN.to_le_bytes(), offset: 0, len: 1 << 20 };
    for number in 0..1000 {
        net.send_message(raw, &Message::Pull(pull(number)), b"");
    }
    assert_eq!(net.hosts[0].left("pulls of the peer"), 50);
    assert_eq!(net.hosts[0].proto.limited().transfers, 950);
    // Aborted pulls make room; the same number twice is a protocol violation.
    for transfer in 0..1000 {
        net.send_message(raw, &Message::Abort { transfer, push: false }, b"");
    }
    assert_eq!(net.hosts[0].left("pulls of the peer"), 0);
    net.send_message(raw, &Message::Pull(pull(1)), b"");
    assert!(!net.is_shut(raw));
    net.send_message(raw, &Message::Pull(pull(1)), b"");
    assert!(net.is_shut(raw));
    net.revoke(0, TOKEN);
    net.end();
}

/// Connections without a handshake don't keep other peers from connecting.
#[test]
fn connections_without_handshake_beyond_the_limit_are_closed() {
    let mut net = net_with(PeerLimits { handshakes: 20, ..limits() }, 1);
    net.hosts[0].echo = true;
    let half = &raw::encode_hello(wire::VERSIONS, &raw::hello(9))[..20];
    let mut slow: Vec<Raw> = Vec::new();
    for number in 0..200 {
        let raw = net.raw_dial(0);
        if number % 2 == 0 {
            net.send_bytes(raw, half.to_vec());
        }
        slow.push(raw);
        if number == 100 {
            let op = net.call(1, 0, call("honest"));
            net.advance(10 * MOMENT);
            assert_eq!(net.hosts[1].body(op), served(b"honest"));
        }
    }
    // The oldest are disconnected.
    assert_eq!(slow.iter().map(|raw| net.is_shut(*raw)).collect::<Vec<_>>(), [vec![true; 180], vec![false; 20]].concat());
    assert!(net.hosts[0].proto.limited().handshakes >= 180);
    net.advance(config().connect);
    assert!(slow.iter().all(|raw| net.is_shut(*raw)));
    net.end();
}

/// A connection beyond the limit is refused, and may be retried. A reconnecting engine replaces its old connection.
#[test]
fn connection_beyond_the_limit_is_refused() {
    let mut net = net_with(PeerLimits { connections: 2, ..limits() }, 4);
    net.hosts[0].echo = true;
    for host in [1, 2] {
        let op = net.call(host, 0, call("x"));
        net.advance(10 * MOMENT);
        assert_eq!(net.hosts[host].body(op), served(b"x"));
    }
    let op = net.call(3, 0, call("x"));
    net.advance(10 * MOMENT);
    assert_failed!(net.hosts[3], op, Failure::Unreachable { reason, .. } if reason.contains("connections"));
    assert_eq!(net.hosts[0].proto.limited().connections, 1);
    // The connection of host 1 is lost, and host 0 is not notified.
    let wire = net.wire(1, 0);
    net.cut_at(wire, 0);
    let op = net.call(1, 0, call("again"));
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[1].body(op), served(b"again"));
    // What this engine dials does not count.
    net.hosts[4].echo = true;
    let op = net.call(0, 4, call("x"));
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    // A disconnected peer makes room.
    let wire = net.wire(2, 0);
    net.cut(wire);
    let op = net.call(3, 0, call("x"));
    net.settle();
    assert_eq!(net.hosts[3].body(op), served(b"x"));
    net.end();
}

/// A peer that stalls within a frame times out, though nothing else is expected of it.
#[test]
fn peer_that_stalls_within_a_frame_is_disconnected() {
    let mut net = net_with(limits(), 0);
    let raw = net.raw_peer(0, 9);
    net.advance(10 * config().peer_timeout);
    assert!(!net.is_shut(raw));
    let whole = requests(1..2, 1000);
    let begun = net.now;
    net.send_bytes(raw, whole[..500].to_vec());
    assert!(net.until(10 * config().peer_timeout, |net| net.is_shut(raw)));
    assert!(net.now - begun >= config().peer_timeout && net.now - begun < 2 * config().peer_timeout);
    // The same holds for a payload of an unknown operation.
    let raw = net.raw_peer(0, 9);
    net.send_message(raw, &Message::Data { stream: Stream::Pull, id: 1, offset: 0, len: 1000 }, b"");
    assert!(net.until(10 * config().peer_timeout, |net| net.is_shut(raw)));
    net.end();
}

/// A frame that arrives in pieces is accounted like one that arrives whole: as many requests are admitted.
#[test]
fn frames_in_pieces_are_accounted_once() {
    const SIZE: usize = 10_000;
    for piece in [1000, 4000, SIZE - 1, usize::MAX] {
        let mut net = net_with(PeerLimits { peer_bytes: 4 * SIZE + SIZE / 2, ..limits() }, 0);
        let raw = net.raw_peer(0, 9);
        for part in requests(1..7, SIZE).chunks(piece) {
            net.send_bytes(raw, part.to_vec());
        }
        assert_eq!((net.hosts[0].inbox.len(), refusals(&net, raw)), (4, 2), "in pieces of {piece}");
        net.settle_until_served(0);
        net.end();
    }
}

/// The bytes of all incomplete frames are bounded: peers with more than their share are disconnected.
#[test]
fn incomplete_frames_beyond_the_limit_end_connections() {
    let mut net = net_with(PeerLimits { bytes: 10 << 20, ..limits() }, 1);
    net.hosts[0].echo = true;
    let half = &frame(&request(1, MAX_FRAME as u64 - 100), &vec![0; MAX_FRAME - 100])[..MAX_FRAME - 200];
    let raws: Vec<Raw> = (0..100).map(|number| net.raw_peer(0, 9 + number)).collect();
    for raw in &raws {
        net.send_bytes(*raw, half.to_vec());
        let held: usize = net.wires.iter().map(|wire| wire.ends[1].receiving.partial.len()).sum();
        assert!(held <= 11 << 20, "{held} bytes");
    }
    assert!((9..=11).contains(&raws.iter().filter(|raw| !net.is_shut(**raw)).count()));
    let op = net.call(1, 0, call("honest"));
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[1].body(op), served(b"honest"));
    net.advance(3 * config().peer_timeout);
    net.end();
}

/// Requests of a disconnected peer count until their handlers are done, so that reconnecting does not evade the limits.
#[test]
fn requests_of_disconnected_peers_count_against_the_limit() {
    let mut net = net_with(PeerLimits { requests: 100, bytes: 150_000, ..limits() }, 1);
    for round in 0..20 {
        let raw = net.raw_peer(0, 9 + round);
        net.send_bytes(raw, requests(0..200, 1_000));
        net.disconnect(raw);
    }
    let here = net.hosts[0].inbox.len();
    // Up to twice the limit, since a new connection always has a share.
    assert!((100..=200).contains(&here), "{here} requests");
    assert!(net.hosts[0].proto.bytes <= 300_000);
    let op = net.call(1, 0, call("honest"));
    net.advance(10 * MOMENT);
    assert_failed!(net.hosts[1], op, Failure::Refused(Status::Busy(_)));
    net.drop_requests(0);
    assert_eq!(net.hosts[0].proto.bytes, 0);
    let op = net.call(1, 0, call("honest"));
    net.advance(10 * MOMENT);
    net.settle_until_served(0);
    assert_eq!(net.hosts[1].body(op), served(b"honest"));
    net.end();
}

#[test]
fn declarations_beyond_the_byte_limit_end_the_connection() {
    let mut net = net_with(limits(), 0);
    net.hosts[0].echo = true;
    let raw = net.raw_peer(0, 9);
    let name = "n".repeat(wire::MAX_NAME);
    let mut declared = 0;
    for number in 0..20_000 {
        let message = declaring(number + 1, number as u32 + 1, Some(&name));
        net.send_message(raw, &message, b"");
        if net.is_shut(raw) {
            break;
        }
        declared += wire::MAX_NAME;
    }
    assert!(net.is_shut(raw) && declared < MAX_DECLARED_BYTES && declared > MAX_DECLARED_BYTES / 2, "{declared}");
    net.end();
}

#[test]
fn exposure_beyond_the_limit_is_refused() {
    let mut net = net_with(PeerLimits { exposures: 3, ..limits() }, 0);
    for token in 0..3 {
        assert!(net.hosts[0].proto.admit_exposure().is_ok());
        net.expose(0, token, vec![1], true, true);
    }
    match net.hosts[0].proto.admit_exposure() {
        Err(Failure::Refused(Status::Busy(reason))) => assert!(reason.contains('3')),
        other => panic!("{other:?}"),
    }
    net.revoke(0, 1);
    assert!(net.hosts[0].proto.admit_exposure().is_ok());
    net.revoke(0, 0);
    net.revoke(0, 2);
    net.end();
}

/// Closed connections leave no timers behind, even with long timeouts.
#[test]
fn closed_connections_leave_no_timers() {
    let patient = Config { peer_timeout: Duration::from_secs(1 << 20), connect: Duration::from_secs(1 << 20), ..config() };
    let mut net = Net::with(vec![(Config { limits: few(5), ..patient }, true)]);
    for number in 0..100 {
        let raw = if number % 2 == 0 { net.raw_dial(0) } else { net.raw_peer(0, 9 + number) };
        if number % 4 == 1 {
            net.send_bytes(raw, requests(0..1, 10));
        }
        net.disconnect(raw);
    }
    net.drop_requests(0);
    assert_eq!(net.hosts[0].proto.next_timeout(), None);
    net.end();
}
