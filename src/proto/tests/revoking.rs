//! Memory that is taken back while peers use it.

use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, call};
use super::{Failure, Memory, Status};

const CHUNK: usize = 512 << 10;
const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 0xfeed;
const LEN: usize = 5 * CHUNK + 3;

/// The owner takes its memory back at every point of a transfer: whoever began it gets all, or learns why not; after that
/// nobody touches either memory.
#[test]
fn the_owner_takes_its_memory_back_at_any_point() {
    let (mut moved, mut revoked) = (0, 0);
    for pull in [true, false] {
        for report_late in [true, false] {
            for steps in 0..40 {
                let mut net = Net::new(2);
                net.settings.piece = 100 << 10;
                net.settings.report_late = report_late;
                let source = pattern(1, LEN);
                let far = net.expose(1, TOKEN, if pull { source.clone() } else { vec![0; LEN] }, true, true);
                let near = Mem::new(if pull { vec![0; LEN] } else { source.clone() });
                let op = net.transfer(0, 1, pull, (TOKEN, 0), &near);
                for _ in 0..steps {
                    if !net.step() {
                        net.advance(net.settings.delay);
                    }
                }
                net.revoke(1, TOKEN);
                let then = far.bytes();
                net.settle();
                assert!(far.bytes() == then, "memory that its owner has back was written");
                match net.hosts[0].outcome(op) {
                    Some(TestOutcome::Moved(LEN)) => {
                        moved += 1;
                        assert!(near.bytes() == source && far.bytes() == source);
                    }
                    Some(TestOutcome::Failed(Failure::Refused(Status::Revoked))) => revoked += 1,
                    other => panic!("{other:?}"),
                }
                net.end();
            }
        }
    }
    assert!(moved > 5 && revoked > 20, "{moved} whole, {revoked} revoked: both were to be seen");
}

/// The initiator's own memory is gone in the middle: its transfer fails, the connection lives, and the other side keeps
/// nothing of it.
#[test]
fn the_initiator_takes_its_own_memory_back_at_any_point() {
    let mut revoked = 0;
    for pull in [true, false] {
        for report_late in [true, false] {
            for steps in 0..40 {
                let mut net = Net::new(2);
                net.hosts[1].echo = true;
                net.settings.piece = 100 << 10;
                net.settings.report_late = report_late;
                net.expose(1, TOKEN, pattern(1, LEN), true, true);
                let near = Mem::new(pattern(2, LEN));
                let op = net.transfer(0, 1, pull, (TOKEN, 0), &near);
                for _ in 0..steps {
                    if !net.step() {
                        net.advance(net.settings.delay);
                    }
                }
                near.close();
                let then = near.bytes();
                net.settle();
                assert!(near.bytes() == then);
                match net.hosts[0].outcome(op) {
                    Some(TestOutcome::Moved(LEN)) => {}
                    Some(TestOutcome::Failed(Failure::Revoked | Failure::Refused(Status::Revoked))) => revoked += 1,
                    other => panic!("{other:?}"),
                }
                let alive = net.call(0, 1, call("still there?"));
                net.settle();
                assert_eq!(net.hosts[0].body(alive).len(), 12);
                net.revoke(1, TOKEN);
                net.end();
            }
        }
    }
    assert!(revoked > 20);
}

/// Several peers, several transfers each, one memory: all of them end.
#[test]
fn everybody_who_uses_the_memory_is_told() {
    let mut net = Net::new(3);
    net.settings.piece = 50_000;
    net.random = Some(super::env::Random(1));
    net.expose(1, TOKEN, vec![1; LEN], true, true);
    net.expose(1, TOKEN + 1, vec![1; LEN], true, true);
    let (mut doomed, mut spared) = (Vec::new(), Vec::new());
    for host in [0, 2] {
        for pull in [true, false, true] {
            doomed.push((host, net.transfer(host, 1, pull, (TOKEN, 0), &Mem::new(vec![0; LEN]))));
        }
        spared.push((host, net.pull(host, 1, TOKEN + 1, 0, &Mem::new(vec![0; LEN]))));
    }
    net.settings.pace = MOMENT / 10;
    net.advance(3 * MOMENT);
    net.revoke(1, TOKEN);
    net.settle();
    for (host, op) in doomed {
        assert_failed!(net.hosts[host], op, Failure::Refused(Status::Revoked));
    }
    for (host, op) in spared {
        assert!(matches!(net.hosts[host].outcome(op), Some(TestOutcome::Moved(LEN))));
    }
    net.revoke(1, TOKEN + 1);
    net.end();
}

/// A part of memory, cut from what somebody else takes back.
#[test]
fn revoking_twice_is_revoking_once() {
    let mut net = Net::new(2);
    net.expose(1, TOKEN, vec![1; 10], true, true);
    net.revoke(1, TOKEN);
    net.revoke(1, TOKEN);
    net.revoke(1, TOKEN + 1);
    let op = net.pull(0, 1, TOKEN, 0, &Mem::new(vec![0; 10]));
    let never = net.pull(0, 1, TOKEN + 1, 0, &Mem::new(vec![0; 10]));
    net.settle();
    assert_failed!(net.hosts[0], op, Failure::Refused(Status::Revoked));
    assert_failed!(net.hosts[0], never, Failure::Refused(Status::AccessDenied(_)));
    net.end();
}

/// The memory of the parts that were handed out is one: closing it closes them all.
#[test]
fn a_part_is_closed_with_the_whole() {
    let whole = Mem::new(vec![0; 10]);
    let part = whole.part(2, 3).unwrap();
    whole.close();
    assert!(!part.is_open());
    assert!(whole.part(8, 3).is_none() && whole.part(usize::MAX, 2).is_none());
}
