//! Bulk transfers between honest hosts.

use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{TestOutcome, assert_failed, served};
use super::net::{Net, call};
use super::{Failure, Memory, Remote};

const CHUNK: usize = 512 << 10;
const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 0xfeed;

fn sizes() -> Vec<usize> {
    vec![0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 5 * CHUNK + 17]
}

#[track_caller]
fn assert_transferred(net: &Net, host: usize, op: u64, len: usize) {
    match net.hosts[host].outcome(op) {
        Some(TestOutcome::Transferred(count)) => assert_eq!(*count, len),
        other => panic!("the transfer did not complete: {other:?}"),
    }
}

/// Memory with a margin on both sides that must not be written.
fn margins(len: usize) -> (Mem, Mem) {
    let all = Mem::new(vec![0xaa; len + 64]);
    let part = all.part(32, len).unwrap();
    (all, part)
}

#[track_caller]
fn assert_margins(all: &Mem, expected: &[u8]) {
    let bytes = all.bytes();
    assert!(bytes[32..32 + expected.len()] == *expected, "the bytes are wrong");
    assert!(bytes[..32].iter().chain(&bytes[32 + expected.len()..]).all(|byte| *byte == 0xaa), "bytes outside were written");
}

#[test]
fn pulls_of_every_size_copy_exactly_their_bytes() {
    for report_late in [true, false] {
        for piece in [1000, 4093, CHUNK + 50, usize::MAX] {
            let mut net = Net::new(2);
            net.settings.piece = piece;
            net.settings.report_late = report_late;
            for len in sizes() {
                let source = pattern(len as u64, len + 100);
                net.expose(1, TOKEN, source.clone(), true, false);
                let (all, target) = margins(len);
                let op = net.pull(0, 1, TOKEN, 77, &target);
                net.settle();
                assert_transferred(&net, 0, op, len);
                assert_margins(&all, &source[77..77 + len]);
                net.revoke(1, TOKEN);
            }
            net.end();
        }
    }
}

#[test]
fn pushes_of_every_size_copy_exactly_their_bytes() {
    for report_late in [true, false] {
        for piece in [1000, 4093, CHUNK + 50, usize::MAX] {
            let mut net = Net::new(2);
            net.settings.piece = piece;
            net.settings.report_late = report_late;
            for len in sizes() {
                let target = net.expose(1, TOKEN, vec![0xaa; len + 64], false, true);
                let source = pattern(len as u64, len);
                let op = net.push(0, 1, TOKEN, 32, &Mem::new(source.clone()));
                net.settle();
                assert_transferred(&net, 0, op, len);
                assert_margins(&target, &source);
                net.revoke(1, TOKEN);
            }
            net.end();
        }
    }
}

/// Every byte boundary is a boundary between pieces.
#[test]
fn transfers_in_tiny_pieces_copy_exactly_their_bytes() {
    for piece in [1, 2, 3, 7] {
        let mut net = Net::new(2);
        net.settings.piece = piece;
        let source = pattern(1, 1000);
        let far = net.expose(1, TOKEN, source.clone(), true, true);
        let (all, near) = margins(1000);
        let pulled = net.pull(0, 1, TOKEN, 0, &near);
        net.settle();
        let pushed = net.push(0, 1, TOKEN, 500, &Mem::new(vec![1; 500]));
        net.settle();
        assert_transferred(&net, 0, pulled, 1000);
        assert_transferred(&net, 0, pushed, 500);
        assert_margins(&all, &source);
        assert_eq!(far.bytes(), [&source[..500], &[1; 500]].concat());
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// A server pulls what its caller exposes, over the caller's connection: the caller need not listen.
#[test]
fn pull_from_a_caller_that_does_not_listen_succeeds() {
    let mut net = Net::with(vec![(super::net::config(), false), (super::net::config(), true)]);
    let source = pattern(3, 3 * CHUNK);
    net.expose(0, TOKEN, source.clone(), true, true);
    let op = net.call(0, 1, call("pull my bulk"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    let target = Mem::new(vec![0; source.len()]);
    let owner = net.hosts[0].incarnation;
    let remote = Remote { peer: arrived.peer.id, owner, token: TOKEN, offset: 0, keys: None };
    let pull = net.transfer_to(1, true, remote, &target, Duration::from_secs(9));
    net.advance(MOMENT);
    assert_transferred(&net, 1, pull, source.len());
    assert!(target.bytes() == source);
    net.with_host(1, |host| host.answer(arrived.request, b"ok").unwrap());
    net.settle();
    assert_eq!(net.hosts[0].body(op), b"ok");
    net.revoke(0, TOKEN);
    net.end();
}

/// Pulls, pushes and small calls in both directions, all at once.
#[test]
fn concurrent_transfers_and_calls_complete() {
    let mut net = Net::new(2);
    net.hosts[0].echo = true;
    net.hosts[1].echo = true;
    net.settings.piece = 50_000;
    let len = 4 * CHUNK + 1;
    let (mut ops, mut checks) = (Vec::new(), Vec::new());
    for n in 0..4u128 {
        let (from, owner) = if n % 2 == 0 { (0, 1) } else { (1, 0) };
        let source = pattern(n as u64, len);
        net.expose(owner, n, source.clone(), true, false);
        let target = Mem::new(vec![0; len]);
        ops.push((from, net.pull(from, owner, n, 0, &target)));
        checks.push((target, source));
        let source = pattern(n as u64 + 50, len);
        let target = net.expose(owner, n + 100, vec![0; len], false, true);
        ops.push((from, net.push(from, owner, n + 100, 0, &Mem::new(source.clone()))));
        checks.push((target, source));
    }
    let calls: Vec<_> = (0..50u8).map(|n| (n, net.call(0, 1, call([n])))).collect();
    net.settle();
    for (n, op) in calls {
        assert_eq!(net.hosts[0].body(op), served(&[n]));
    }
    for (host, op) in ops {
        assert_transferred(&net, host, op, len);
    }
    for (target, source) in checks {
        assert!(target.bytes() == source);
    }
    for n in 0..4u128 {
        let owner = if n % 2 == 0 { 1 } else { 0 };
        net.revoke(owner, n);
        net.revoke(owner, n + 100);
    }
    net.end();
}

/// A small call waits for at most one chunk, though transfers keep the wire busy.
#[test]
fn small_call_beside_transfers_waits_for_one_chunk_at_most() {
    let mut net = Net::pair();
    let target = net.expose(1, TOKEN, vec![0; 16 << 20], true, true);
    let pushes: Vec<_> = (0..4).map(|n| net.push(0, 1, TOKEN, n * (4 << 20), &Mem::new(vec![n as u8 + 1; 4 << 20]))).collect();
    net.advance(MOMENT);
    net.settings.piece = 64 << 10;
    net.settings.pace = MOMENT;
    let begun = net.now;
    let op = net.call(0, 1, call("quick"));
    assert!(net.until(Duration::from_secs(1), |net| net.hosts[0].is_done(op)));
    assert!(net.now - begun <= 12 * MOMENT, "{:?} beside chunks that take 4 ms", net.now - begun);
    assert!(pushes.iter().all(|push| !net.hosts[0].is_done(*push)));
    net.settings.pace = Duration::ZERO;
    net.settle();
    for n in 0..4 {
        assert_eq!(target.byte((n << 22) + 5), n as u8 + 1);
    }
    net.revoke(1, TOKEN);
    net.end();
}

/// A transfer is cancelled at every point: nothing is left on either side, and its memory is not accessed any more.
#[test]
fn transfer_cancelled_at_any_point_leaves_nothing_behind() {
    for pull in [true, false] {
        for steps in 0..40 {
            let mut net = Net::new(2);
            net.settings.piece = 100 << 10;
            let far = net.expose(1, TOKEN, vec![1; 2 << 20], true, true);
            let near = Mem::new(vec![2; 2 << 20]);
            let op = net.transfer(0, 1, pull, (TOKEN, 0), &near);
            for _ in 0..steps {
                if !net.step() {
                    net.advance(net.settings.delay);
                }
            }
            let done = net.hosts[0].is_done(op);
            net.cancel(0, op);
            let then = near.bytes();
            if done {
                assert_transferred(&net, 0, op, 2 << 20);
            } else {
                assert_failed!(net.hosts[0], op, Failure::Cancelled);
            }
            net.settle();
            assert!(near.bytes() == then, "the memory of an ended transfer was written");
            assert!(done || pull || far.bytes().contains(&1) || net.hosts[0].is_done(op));
            net.revoke(1, TOKEN);
            net.end();
        }
    }
}

#[test]
fn transfer_beyond_its_timeout_fails_with_timeout() {
    for pull in [true, false] {
        let mut net = Net::new(2);
        net.hosts[1].echo = true;
        net.call(0, 1, call("connects"));
        net.settle();
        net.expose(1, TOKEN, vec![1; 2 << 20], true, true);
        let near = Mem::new(vec![2; 2 << 20]);
        let peer = net.peer(0, 1);
        let owner = net.hosts[1].incarnation;
        // The transfer needs a second, and has half of that.
        net.settings.piece = 64 << 10;
        net.settings.pace = 33 * MOMENT;
        let begun = net.now;
        let op = net.transfer_to(0, pull, Remote { peer, owner, token: TOKEN, offset: 0, keys: None }, &near, 500 * MOMENT);
        assert!(net.until(Duration::from_secs(5), |net| net.hosts[0].is_done(op)));
        assert_failed!(net.hosts[0], op, Failure::Timeout);
        assert_eq!(net.now - begun, 500 * MOMENT);
        let then = near.bytes();
        net.settle();
        assert!(near.bytes() == then);
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// The connection is lost at every point of a transfer.
#[test]
fn transfer_on_a_connection_lost_at_any_point_ends() {
    for pull in [true, false] {
        for report_late in [true, false] {
            for steps in 0..30 {
                let mut net = Net::new(2);
                net.settings.piece = 100 << 10;
                net.settings.report_late = report_late;
                net.expose(1, TOKEN, vec![1; 1 << 20], true, true);
                let near = Mem::new(vec![2; 1 << 20]);
                let op = net.transfer(0, 1, pull, (TOKEN, 0), &near);
                for _ in 0..steps {
                    if !net.step() {
                        net.advance(net.settings.delay);
                    }
                }
                net.cut(0);
                match net.hosts[0].outcome(op) {
                    Some(TestOutcome::Transferred(count)) => assert_eq!(*count, 1 << 20),
                    Some(TestOutcome::Failed(Failure::Disconnected { .. } | Failure::Unreachable { .. })) => {}
                    other => panic!("{other:?}"),
                }
                net.revoke(1, TOKEN);
                net.end();
            }
        }
    }
}

/// The peer reads a bounded number of payloads from this side's memory at a time: more of them where they are short, fewer where
/// they are long.
#[test]
fn payloads_that_the_peer_reads_are_bounded() {
    let mib = 1 << 20;
    for (len, chunk, most) in [
        (3 * mib, 2 * mib, 2),
        (mib + 1, 2 * mib, 2),
        (mib, 2 * mib, 4),
        (3 * mib, mib, 4),
        ((64 << 10) + 1, mib, 4),
        (64 << 10, mib, 16),
        (100, mib, 16),
    ] {
        for lent in [0, most - 1, most, most + 1] {
            let mut net = Net::pair();
            let source = pattern(3, len);
            net.expose(1, TOKEN, source.clone(), true, false);
            net.call(0, 1, call("first"));
            net.settle();
            let link = net.hosts[1].proto.links.keys().next().unwrap();
            net.with_host(1, |host| host.proto.set_chunk(link, chunk));
            (0..lent).for_each(|_| net.with_host(1, |host| host.proto.handle_sent(link, Vec::new(), true)));
            let target = Mem::new(vec![0; len]);
            let op = net.pull(0, 1, TOKEN, 0, &target);
            net.advance(MOMENT);
            assert_eq!(net.hosts[0].is_done(op), lent < most, "{len} bytes, by {chunk}, while {lent} payloads are lent");
            for _ in 0..lent {
                net.with_host(1, |host| host.proto.handle_returned(link));
            }
            net.settle();
            assert_transferred(&net, 0, op, len);
            assert!(target.bytes() == source);
            net.revoke(1, TOKEN);
            net.end();
        }
    }
}

/// A transport may keep a payload for a moment only if it is told that another one follows, and the last one must leave.
#[test]
fn a_payload_that_another_one_follows_says_so() {
    let mut net = Net::new(2);
    net.expose(1, TOKEN, vec![0; 4000], true, true);
    let source = Mem::new(pattern(1, 1000));
    net.push(0, 1, TOKEN, 0, &source);
    net.settle();
    let before = (net.hosts[0].transmits, net.hosts[0].followed);
    // The first one is on its way while the others are queued.
    let ops: Vec<_> = (0..4).map(|part| net.push(0, 1, TOKEN, part * 1000, &source)).collect();
    net.settle();
    assert_eq!((net.hosts[0].transmits - before.0, net.hosts[0].followed - before.1), (4, 2));
    ops.into_iter().for_each(|op| assert_transferred(&net, 0, op, 1000));
    net.revoke(1, TOKEN);
    net.end();
}
