//! Peers that want too much: what they get is bounded, and others get theirs.

use std::time::Duration;

use super::super::declarations::MAX_BYTES;
use super::super::limits::MAX_CONTROL_BYTES;
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

/// A host with these limits, and so many others.
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
    net.each_heard(raw, |message| count += usize::from(matches!(message, Message::Refuse { status: Status::Busy(_), .. })));
    count
}

/// A few that take all there is do not lock the others out.
#[test]
fn requests_in_all() {
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
    // And all is as before at once.
    let again: Vec<_> = (0..12).map(|_| net.call(1, 0, call("mine"))).collect();
    net.advance(10 * MOMENT);
    net.settle_until_served(0);
    again.iter().for_each(|op| assert_eq!(net.hosts[1].body(*op), served(b"mine")));
    net.end();
}

/// Bodies count from their announcement to the answer, whether they came in one piece or not.
#[test]
fn bytes_of_one_peer() {
    for size in [10_000, 100_000] {
        let mut net = net_with(PeerLimits { peer_bytes: 10 * size, ..limits() }, 2);
        let ops: Vec<_> = (0..12).map(|n| net.call(1, 0, call(pattern(n, size)))).collect();
        net.advance(SECOND / 10);
        // What is declared counts, too.
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
fn bytes_in_all() {
    let mut net = net_with(PeerLimits { bytes: 1_000_000, ..limits() }, 4);
    for host in 1..4 {
        net.call(host, 0, call("x"));
    }
    net.advance(10 * MOMENT);
    net.settle_until_served(0);
    // Three connections: a third for each, once all of it is taken.
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

/// Who asks, and does not read the answers, gets refusals instead; they are not many bytes, and not kept for ever either.
#[test]
fn a_caller_that_does_not_read() {
    for size in [1_000, 20_000] {
        let mut net = net_with(PeerLimits { peer_bytes: 200_000, bytes: 300_000, ..limits() }, 1);
        net.hosts[0].echo = true;
        let raw = net.raw_peer(0, 9);
        net.read(raw, false);
        let mut sent = 0;
        while !net.is_shut(raw) {
            // Bodies of 20,000 bytes are answered by streams.
            net.say_bytes(raw, requests(sent..sent + 100, size));
            sent += 100;
            for account in net.hosts[0].proto.links.values().map(|link| &link.account) {
                assert!(account.answers <= 200_000, "{} bytes of answers wait", account.answers);
                assert!(account.control < 320_000, "{} bytes", account.control);
            }
            assert!(sent < 10_000, "it is never hung up on");
            if sent == 1_000 {
                // It may begin to read: then all goes on.
                assert!(net.hosts[0].proto.limited().requests > 0);
                net.read(raw, true);
                net.advance(SECOND);
                let before = refusals(&net, raw);
                net.say_bytes(raw, requests(sent..sent + 5, size));
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

/// An answer may be larger than what was asked, and not fit.
#[test]
fn answers_that_are_not_read() {
    let mut net = net_with(PeerLimits { peer_bytes: 1_000_000, ..limits() }, 0);
    let raw = net.raw_peer(0, 9);
    net.read(raw, false);
    net.say_bytes(raw, requests(0..20, 10));
    let mut refused = 0;
    for number in 0..20 {
        let arrived = net.hosts[0].take();
        // Every other travels as a stream.
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

/// What takes no more than the request did, is never refused: its handler has run, and the peer reads. Not even where others have
/// had their share since, so that there is too much in all.
#[test]
fn answers_that_take_the_place_of_their_requests() {
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
    // All at once: the first of them are not out when the next come.
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

/// What costs the peer nothing, and has an answer: pings, pulls of nothing, shutdowns.
#[test]
fn floods_that_are_never_read() {
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
            // Frames with nobody's interest in them do no harm.
            net.say_bytes(raw, frame(&Message::Cancel { call: 77 }, b""));
            net.say_bytes(raw, frame(&Message::Abort { transfer: 77, push: false }, b""));
            net.say_bytes(raw, frame(&Message::Handled { count: u32::MAX, calls: u32::MAX, bytes: u32::MAX }, b""));
            net.say_bytes(raw, many.clone());
            rounds += 1;
            assert!(rounds < 100, "it is never hung up on");
        }
        let op = net.call(1, 0, call("honest"));
        net.advance(SECOND);
        assert_eq!(net.hosts[1].body(op), served(b"honest"));
        net.end();
    }
}

/// Nor is it read what became of bodies that were damaged on their way, if they were.
#[test]
fn a_flood_of_damaged_bodies_that_is_never_read() {
    let mut net = net_with(limits(), 1);
    let raw = net.raw_peer(0, 9);
    let (_, link) = net.raw_link(raw).unwrap();
    // Straight into the protocol, whose output nobody carries out.
    let (proto, now) = (&mut net.hosts[0].proto, net.now);
    let mut sent = 0;
    let failure = (0..u64::MAX).find_map(|call| {
        let announced = frame(&request(call, 1), b"");
        let bytes = [announced, frame(&Message::Data { stream: Stream::Request, id: call, offset: 0, len: 1 }, b"")].concat();
        let result = proto.consume(link, &bytes, now);
        proto.handle_payload_done(link, PayloadStatus::Damaged, now);
        sent += bytes.len();
        assert!(sent < 8 * MAX_CONTROL_BYTES, "it is never hung up on");
        result.err()
    });
    assert!(matches!(&failure, Some(Failure::Disconnected { reason }) if reason.contains("does not read")), "{failure:?}");
    net.with_host(0, |host| host.proto.close(link, Failure::Cancelled));
    net.end();
}

/// Who keeps all the bulks that it gets in answers gets no more at some time; and does again when it lets go of them.
#[test]
fn bulks_that_are_never_let_go() {
    const LIMIT: usize = 1 << 20;
    let mut net = net_with(PeerLimits { bytes: LIMIT, peer_bytes: LIMIT, ..limits() }, 1);
    net.hosts[0].echo = false;
    let raw = net.raw_peer(0, 9);
    let mut call = 0;
    let mut given = |net: &mut Net| {
        call += 1;
        net.say(raw, &request(call, 0), b"");
        if net.hosts[0].inbox.is_empty() {
            return false;
        }
        let arrived = net.hosts[0].take();
        net.with_host(0, |host| {
            let ticket = TestLease { token: TOKEN, number: 1 };
            host.leased.push(ticket.clone());
            let reply =
                Reply { content: OutgoingBody::Small(b"it takes its place here"), result: 0, shape: b"r", leases: vec![ticket] };
            match host.proto.respond(arrived.request, Ok(reply)) {
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
    net.say(raw, &Message::Release(LeaseRange { first: 0, count: got as u32 }), b"");
    assert!(given(&mut net));
    net.hang_up(raw);
    net.end();
}

/// However much there may be in all.
#[test]
fn what_is_said_back_to_one_peer() {
    let mut net = net_with(limits(), 0);
    let raw = net.raw_peer(0, 9);
    net.read(raw, false);
    net.say(raw, &Message::Ping, b"");
    // As if it had sent so many more, which takes a while.
    net.hosts[0].proto.links.values_mut().for_each(|link| link.account.control = MAX_CONTROL_BYTES - 30);
    net.say(raw, &Message::Ping, b"");
    net.say(raw, &Message::Ping, b"");
    assert!(!net.is_shut(raw));
    net.say(raw, &Message::Ping, b"");
    assert!(net.is_shut(raw));
    net.end();
}

/// A peer that reads may have as much said back to it as it likes.
#[test]
fn floods_that_are_read() {
    let mut net = net_with(limits(), 0);
    let raw = net.raw_peer(0, 9);
    let pings = frame(&Message::Ping, b"").repeat(10_000);
    for _ in 0..40 {
        net.say_bytes(raw, pings.clone());
        net.advance(MOMENT);
    }
    assert!(!net.is_shut(raw));
    net.hang_up(raw);
    net.end();
}

#[test]
fn transfers_of_one_peer() {
    for pull in [true, false] {
        let mut net = net_with(PeerLimits { peer_transfers: 5, ..limits() }, 1);
        net.expose(0, TOKEN, pattern(1, 2 << 20), true, true);
        net.settings.pace = MOMENT;
        net.settings.piece = 64 << 10;
        let parts: Vec<_> = (0..8).map(|_| Mem::new(vec![0; 2 << 20])).collect();
        let ops: Vec<_> = parts.iter().map(|part| net.transfer(1, 0, pull, (TOKEN, 0), part)).collect();
        net.settle();
        let refused = ops.iter().filter(|op| match net.hosts[1].outcome(**op) {
            Some(super::host::TestOutcome::Moved(n)) => {
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
        assert!(matches!(net.hosts[1].outcome(again), Some(super::host::TestOutcome::Moved(_))));
        net.revoke(0, TOKEN);
        net.end();
    }
}

/// A hostile peer's pulls, which it never reads: no more than the limit of them wait, in whatever numbers they come.
#[test]
fn pulls_that_are_never_read() {
    let mut net = net_with(PeerLimits { peer_transfers: 50, ..limits() }, 0);
    net.expose(0, TOKEN, vec![1; 1 << 20], true, true);
    let owner = net.hosts[0].incarnation;
    let raw = net.raw_peer(0, 9);
    net.read(raw, false);
    let pull = |transfer| Range { transfer, owner, token: TOKEN.to_le_bytes(), offset: 0, len: 1 << 20 };
    for number in 0..1000 {
        net.say(raw, &Message::Pull(pull(number)), b"");
    }
    assert_eq!(net.hosts[0].left("pulls of the peer"), 50);
    assert_eq!(net.hosts[0].proto.limited().transfers, 950);
    // Given up, they make room; and the same number twice is a lie.
    for transfer in 0..1000 {
        net.say(raw, &Message::Abort { transfer, push: false }, b"");
    }
    assert_eq!(net.hosts[0].left("pulls of the peer"), 0);
    net.say(raw, &Message::Pull(pull(1)), b"");
    assert!(!net.is_shut(raw));
    net.say(raw, &Message::Pull(pull(1)), b"");
    assert!(net.is_shut(raw));
    net.revoke(0, TOKEN);
    net.end();
}

/// Those who have connected and say nothing do not keep the others out.
#[test]
fn connections_that_do_not_greet() {
    let mut net = net_with(PeerLimits { handshakes: 20, ..limits() }, 1);
    net.hosts[0].echo = true;
    let half = &raw::greet(wire::VERSIONS, &raw::hello(9))[..20];
    let mut slow: Vec<Raw> = Vec::new();
    for number in 0..200 {
        let raw = net.raw_dial(0);
        if number % 2 == 0 {
            net.say_bytes(raw, half.to_vec());
        }
        slow.push(raw);
        if number == 100 {
            let op = net.call(1, 0, call("honest"));
            net.advance(10 * MOMENT);
            assert_eq!(net.hosts[1].body(op), served(b"honest"));
        }
    }
    // The oldest go.
    assert_eq!(slow.iter().map(|raw| net.is_shut(*raw)).collect::<Vec<_>>(), [vec![true; 180], vec![false; 20]].concat());
    assert!(net.hosts[0].proto.limited().handshakes >= 180);
    net.advance(config().connect);
    assert!(slow.iter().all(|raw| net.is_shut(*raw)));
    net.end();
}

/// One connection too many is turned away, and told that it may try again. An engine that comes again is not one more.
#[test]
fn too_many_connections() {
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
    // The connection of host 1 is lost, and this engine does not know.
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
    // Who goes makes room.
    let wire = net.wire(2, 0);
    net.cut(wire);
    let op = net.call(3, 0, call("x"));
    net.settle();
    assert_eq!(net.hosts[3].body(op), served(b"x"));
    net.end();
}

/// Whoever stalls in the middle of a frame is watched, though nothing was expected of it before.
#[test]
fn half_a_frame() {
    let mut net = net_with(limits(), 0);
    let raw = net.raw_peer(0, 9);
    net.advance(10 * config().peer_timeout);
    assert!(!net.is_shut(raw));
    let whole = requests(1..2, 1000);
    let begun = net.now;
    net.say_bytes(raw, whole[..500].to_vec());
    assert!(net.until(10 * config().peer_timeout, |net| net.is_shut(raw)));
    assert!(net.now - begun >= config().peer_timeout && net.now - begun < 2 * config().peer_timeout);
    // A payload that nobody wants, and that does not come, is no better.
    let raw = net.raw_peer(0, 9);
    net.say(raw, &Message::Data { stream: Stream::Pull, id: 1, offset: 0, len: 1000 }, b"");
    assert!(net.until(10 * config().peer_timeout, |net| net.is_shut(raw)));
    net.end();
}

/// A frame that arrives in pieces takes no more room than one that arrives whole: as many requests are admitted.
#[test]
fn frames_in_pieces() {
    const SIZE: usize = 10_000;
    for piece in [1000, 4000, SIZE - 1, usize::MAX] {
        let mut net = net_with(PeerLimits { peer_bytes: 4 * SIZE + SIZE / 2, ..limits() }, 0);
        let raw = net.raw_peer(0, 9);
        for part in requests(1..7, SIZE).chunks(piece) {
            net.say_bytes(raw, part.to_vec());
        }
        assert_eq!((net.hosts[0].inbox.len(), refusals(&net, raw)), (4, 2), "in pieces of {piece}");
        net.settle_until_served(0);
        net.end();
    }
}

/// All half frames together are bounded: those who have more than their share have to go.
#[test]
fn many_half_frames() {
    let mut net = net_with(PeerLimits { bytes: 10 << 20, ..limits() }, 1);
    net.hosts[0].echo = true;
    let half = &frame(&request(1, MAX_FRAME as u64 - 100), &vec![0; MAX_FRAME - 100])[..MAX_FRAME - 200];
    let raws: Vec<Raw> = (0..100).map(|number| net.raw_peer(0, 9 + number)).collect();
    for raw in &raws {
        net.say_bytes(*raw, half.to_vec());
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

/// What a peer leaves behind for slow handlers counts until they are done with it: to come again is no way to have more.
#[test]
fn requests_of_those_who_are_gone() {
    let mut net = net_with(PeerLimits { requests: 100, bytes: 150_000, ..limits() }, 1);
    for round in 0..20 {
        let raw = net.raw_peer(0, 9 + round);
        net.say_bytes(raw, requests(0..200, 1_000));
        net.hang_up(raw);
    }
    let here = net.hosts[0].inbox.len();
    // As much again, while what nobody waits for is all that there is.
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
fn names_of_one_peer() {
    let mut net = net_with(limits(), 0);
    net.hosts[0].echo = true;
    let raw = net.raw_peer(0, 9);
    let name = "n".repeat(wire::MAX_NAME);
    let mut said = 0;
    for number in 0..20_000 {
        let message = declaring(number + 1, number as u32 + 1, Some(&name));
        net.say(raw, &message, b"");
        if net.is_shut(raw) {
            break;
        }
        said += wire::MAX_NAME;
    }
    assert!(net.is_shut(raw) && said < MAX_BYTES && said > MAX_BYTES / 2, "{said}");
    net.end();
}

#[test]
fn exposures() {
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

/// Connections that come and go leave no timers behind, however patient the engine is.
#[test]
fn connections_that_come_and_go() {
    let patient = Config { peer_timeout: Duration::from_secs(1 << 20), connect: Duration::from_secs(1 << 20), ..config() };
    let mut net = Net::with(vec![(Config { limits: few(5), ..patient }, true)]);
    for number in 0..100 {
        let raw = if number % 2 == 0 { net.raw_dial(0) } else { net.raw_peer(0, 9 + number) };
        if number % 4 == 1 {
            net.say_bytes(raw, requests(0..1, 10));
        }
        net.hang_up(raw);
    }
    net.drop_requests(0);
    assert_eq!(net.hosts[0].proto.next_timeout(), None);
    net.end();
}
