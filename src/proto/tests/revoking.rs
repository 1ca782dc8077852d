//! Memory that is revoked while peers use it.

use std::time::Duration;

use super::env::{Mem, pattern};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, call};
use super::{Failure, Memory, Status};

const CHUNK: usize = 512 << 10;
const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 0xfeed;
const LEN: usize = 5 * CHUNK + 3;

/// The owner revokes its memory at every point of a transfer: the initiator gets all bytes or the reason. After that neither
/// memory is accessed.
#[test]
fn transfer_of_memory_revoked_by_the_owner_stops_at_any_point() {
    let (mut completed, mut revoked) = (0, 0);
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
                assert!(far.bytes() == then, "revoked memory was written");
                match net.hosts[0].outcome(op) {
                    Some(TestOutcome::Transferred(LEN)) => {
                        completed += 1;
                        assert!(near.bytes() == source && far.bytes() == source);
                    }
                    Some(TestOutcome::Failed(Failure::Refused(Status::Revoked))) => revoked += 1,
                    other => panic!("{other:?}"),
                }
                net.end();
            }
        }
    }
    assert!(completed > 5 && revoked > 20, "{completed} whole, {revoked} revoked: both must occur");
}

/// The initiator's memory is closed at every point: its transfer fails, the connection stays open, and the owner keeps no
/// state of it.
#[test]
fn transfer_of_memory_closed_by_the_initiator_stops_at_any_point() {
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
                    Some(TestOutcome::Transferred(LEN)) => {}
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

/// Several peers with several transfers each on one memory: all of them fail.
#[test]
fn all_transfers_of_revoked_memory_fail_with_revoked() {
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
        assert!(matches!(net.hosts[host].outcome(op), Some(TestOutcome::Transferred(LEN))));
    }
    net.revoke(1, TOKEN + 1);
    net.end();
}

/// Revoking again, or an unknown token, has no effect.
#[test]
fn revoking_memory_twice_has_no_further_effect() {
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

/// The parts of a memory share its gate: closing it closes them all.
#[test]
fn closing_memory_closes_its_parts() {
    let whole = Mem::new(vec![0; 10]);
    let part = whole.part(2, 3).unwrap();
    whole.close();
    assert!(!part.is_open());
    assert!(whole.part(8, 3).is_none() && whole.part(usize::MAX, 2).is_none());
}
