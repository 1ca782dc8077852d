//! Shutdown of engines, and how their peers are notified.

use std::time::Duration;

use super::env::{Mem, TestLease, pattern};
use super::host::{Host, TestOutcome, assert_failed, served};
use super::net::{Net, TestCall, call, config};
use super::{Config, Failure, Status};

const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 3;

fn begin(net: &mut Net, host: usize) {
    net.with_host(host, |host| host.proto.begin_shutdown());
}

fn finish(net: &mut Net, host: usize) {
    net.with_host(host, |host| host.proto.finish_shutdown());
}

#[test]
fn call_to_a_draining_engine_is_refused_with_finalizing() {
    let mut net = Net::new(2);
    net.hosts[0].echo = true;
    let old = net.call(0, 1, call("old"));
    net.advance(MOMENT);
    begin(&mut net, 1);
    let mut what = call(pattern(1, 1 << 20));
    what.leases = vec![TestLease { token: 1, number: 1 }];
    let refused = [net.call(0, 1, call("new")), net.call(0, 1, what)];
    let one_way = net.call(0, 1, TestCall { one_way: true, ..call("notice") });
    net.advance(10 * MOMENT);
    for op in refused {
        assert_failed!(net.hosts[0], op, Failure::Refused(Status::Finalizing));
    }
    assert!(net.hosts[0].is_done(one_way));
    assert_eq!(net.hosts[1].inbox.len(), 1);
    // A handler in progress may still call and transfer.
    net.expose(0, TOKEN, vec![1; 1 << 20], true, true);
    let nested = net.call(1, 0, call("nested"));
    let pull = net.pull(1, 0, TOKEN, 0, &Mem::new(vec![0; 1 << 20]));
    net.advance(10 * MOMENT);
    assert_eq!(net.hosts[1].body(nested), served(b"nested"));
    assert!(matches!(net.hosts[1].outcome(pull), Some(TestOutcome::Transferred(_))));
    net.serve(1);
    net.advance(MOMENT);
    assert_eq!(net.hosts[0].body(old), served(b"old"));
    net.revoke(0, TOKEN);
    finish(&mut net, 1);
    net.settle();
    assert!(net.hosts[1].proto.links_gone() && net.hosts[0].proto.links_gone());
    net.end();
}

/// Own operations fail with `Finalized`, those of peers with the end of the connection, at every point.
#[test]
fn operations_in_progress_at_shutdown_fail() {
    for steps in 0..40 {
        for report_late in [true, false] {
            let mut net = Net::new(2);
            net.settings.piece = 100 << 10;
            net.settings.report_late = report_late;
            net.settings.injects = !report_late;
            let mut ops = Vec::new();
            for (owner, other) in [(0, 1), (1, 0)] {
                net.expose(owner, TOKEN, vec![1; 1 << 20], true, true);
                net.expose(owner, TOKEN + 1, vec![1; 1 << 20], true, true);
                let leases = vec![TestLease { token: TOKEN, number: 1 }];
                ops.push((other, net.call(other, owner, TestCall { leases, ..call([5; 40]) })));
                ops.push((other, net.call(other, owner, call(pattern(1, 600 << 10)))));
                ops.push((other, net.pull(other, owner, TOKEN, 0, &Mem::new(vec![0; 1 << 20]))));
                ops.push((other, net.push(other, owner, TOKEN, 0, &Mem::new(vec![0; 1 << 20]))));
            }
            for _ in 0..steps {
                if !net.step() {
                    net.advance(net.settings.delay);
                }
            }
            let done: Vec<_> = ops.iter().map(|(host, op)| net.hosts[*host].is_done(*op)).collect();
            finish(&mut net, 1);
            for ((host, op), done) in ops.iter().zip(&done) {
                if *host == 1 && !done {
                    assert_failed!(net.hosts[1], *op, Failure::Finalized);
                }
            }
            net.advance(10 * MOMENT);
            for ((host, op), done) in ops.iter().zip(&done) {
                // What was sent before still arrives; a call may also have dialled again and failed.
                if *host == 0 && !done {
                    match net.hosts[0].outcome(*op) {
                        Some(TestOutcome::Failed(Failure::Disconnected { .. } | Failure::Unreachable { .. })) => {}
                        Some(TestOutcome::Failed(Failure::Refused(Status::Finalizing))) => {}
                        Some(TestOutcome::Transferred(_)) => {}
                        other => panic!("after {steps} steps: {other:?}"),
                    }
                }
            }
            (0..2).for_each(|host| net.drop_requests(host));
            net.revoke(0, TOKEN);
            net.revoke(0, TOKEN + 1);
            net.settle();
            assert!(net.hosts[1].proto.links_gone());
            net.end();
        }
    }
}

/// Responses queued before shutdown arrive, however long they are.
#[test]
fn responses_queued_before_shutdown_arrive() {
    let mut net = Net::new(2);
    net.settings.piece = 64 << 10;
    net.settings.pace = MOMENT;
    let ops: Vec<_> = (0..3).map(|n| net.call(0, 1, call(pattern(n, 1 << 20)))).collect();
    net.advance(200 * MOMENT);
    (0..3).for_each(|_| net.serve(1));
    finish(&mut net, 1);
    net.settle();
    for (n, op) in ops.iter().enumerate() {
        assert!(net.hosts[0].body(*op) == served(&pattern(n as u64, 1 << 20)));
    }
    net.end();
}

/// An engine that shuts down waits until its peers close the connections: they have read everything by then. What they send
/// meanwhile is read, and not answered.
#[test]
fn connections_of_a_finalized_engine_are_closed_by_its_peers() {
    for delay in [MOMENT, 20 * MOMENT] {
        let mut net = Net::new(2);
        net.settings.delay = delay;
        net.call(1, 0, call("x"));
        net.settle();
        net.serve(0);
        net.settle();
        let received = net.hosts[0].inbox.len();
        let notices: Vec<_> = (0..10u64).map(|n| net.call(0, 1, TestCall { one_way: true, ..call(pattern(n, 100)) })).collect();
        let late = net.call(1, 0, call("what is not answered any more"));
        finish(&mut net, 0);
        assert!(notices.iter().all(|op| net.hosts[0].is_done(*op)));
        net.advance(delay / 2);
        assert!(!net.hosts[0].proto.links_gone(), "the peer has not read everything yet");
        net.settle();
        assert!(net.hosts[0].proto.links_gone() && net.hosts[1].proto.links_gone());
        assert_eq!(net.hosts[0].inbox.len(), received);
        assert_failed!(net.hosts[1], late, Failure::Disconnected { reason } if reason.contains("finalized"));
        // One-way calls are handled though their caller has disconnected, and are not cancelled.
        assert_eq!(net.hosts[1].inbox.len(), notices.len());
        assert!(net.hosts[1].cancelled.is_empty());
        assert_eq!(net.hosts[1].proto.requests(), notices.len());
        net.drop_requests(1);
        net.end();
    }
}

#[test]
fn call_to_a_finalized_peer_fails_with_that_reason() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, call("x"));
    net.advance(MOMENT);
    finish(&mut net, 1);
    net.advance(MOMENT);
    assert_failed!(net.hosts[0], op, Failure::Disconnected { reason } if reason.contains("finalized"));
    net.drop_requests(1);
    net.end();
}

/// Operations of a finalized engine fail at once, and peers that dial it are disconnected.
#[test]
fn call_of_a_finalized_engine_fails_with_finalized() {
    let mut net = Net::new(3);
    net.hosts[0].echo = true;
    net.call(1, 0, call("x"));
    net.settle();
    finish(&mut net, 1);
    finish(&mut net, 1);
    let op = net.call(1, 0, call("x"));
    assert_failed!(net.hosts[1], op, Failure::Finalized);
    let pull = net.pull(1, 0, TOKEN, 0, &Mem::new(vec![0; 10]));
    assert_failed!(net.hosts[1], pull, Failure::Finalized);
    let late = net.call(2, 1, call("late"));
    net.advance(10 * MOMENT);
    assert_failed!(
        net.hosts[2],
        late,
        Failure::Disconnected { .. } | Failure::Unreachable { .. } | Failure::Refused(Status::Finalizing)
    );
    net.settle();
    assert!(net.hosts[1].proto.links_gone());
    net.end();
}

/// A peer that does not read can't keep an engine from shutting down.
#[test]
fn peer_that_does_not_read_can_be_abandoned_at_shutdown() {
    let mut net = Net::new(2);
    net.call(0, 1, call("x"));
    net.advance(MOMENT);
    net.wires[0].frozen = true;
    let op = net.call(1, 0, call(pattern(1, 1 << 20)));
    net.serve(1);
    finish(&mut net, 1);
    assert_failed!(net.hosts[1], op, Failure::Finalized);
    assert!(!net.hosts[1].proto.links_gone(), "a response is still to be sent");
    net.with_host(1, |host| host.proto.abandon_links());
    assert!(net.hosts[1].proto.links_gone());
    net.end();
}

/// Shutdown while connections are being established.
#[test]
fn shutdown_before_the_connection_opens_ends_its_call() {
    for steps in 0..8 {
        for finalized in [0, 1] {
            let mut net = Net::pair();
            let op = net.call(0, 1, call("x"));
            for _ in 0..steps {
                if !net.step() {
                    net.advance(net.settings.delay);
                }
            }
            finish(&mut net, finalized);
            net.settle();
            assert!(net.hosts[0].is_done(op));
            assert!(net.hosts[finalized].proto.links_gone());
            net.end();
        }
    }
}

fn request_shutdown(net: &mut Net, from: usize, to: usize) -> u64 {
    let peer = net.peer(from, to);
    let (now, until) = (net.now, net.now + 100 * MOMENT);
    let op = 5_000_000;
    net.with_host(from, |host: &mut Host| {
        host.begun.push(op);
        if let Err(failure) = host.proto.ask(peer, crate::proto::Question::Shutdown, until, op, now) {
            host.call_done(op, Err(failure));
        }
    });
    op
}

#[test]
fn remote_shutdown_is_refused_unless_allowed() {
    for allowed in [true, false] {
        let with = |remote_shutdown| (Config { remote_shutdown, ..config() }, true);
        let mut net = Net::with(vec![with(!allowed), with(allowed)]);
        let op = request_shutdown(&mut net, 0, 1);
        net.settle();
        if allowed {
            assert_eq!(net.hosts[0].body(op), b"");
        } else {
            assert_failed!(net.hosts[0], op, Failure::Refused(Status::AccessDenied(_)));
        }
        assert_eq!(net.hosts[1].shutdowns, usize::from(allowed));
        net.end();
    }
}

#[test]
fn remote_shutdown_of_an_absent_peer_fails() {
    let mut net = Net::new(2);
    net.black_hole = true;
    let op = request_shutdown(&mut net, 0, 1);
    net.settle();
    assert_failed!(net.hosts[0], op, Failure::Timeout);
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = request_shutdown(&mut net, 0, 1);
    net.settle();
    assert_failed!(net.hosts[0], op, Failure::Unreachable { .. });
    net.end();
}
