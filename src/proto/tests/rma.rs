//! Transfers by RMA, and their fallback to the protocol.

use std::time::Duration;

use super::devices::keys;
use super::env::{Mem, Op, pattern};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, TestCall, call};
use super::raw::{self, frame, hello};
use super::wire::{self, Message, Stream};
use super::{Failure, Memory, Mode, Remote, Status};

const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 0xfeed;
const LEN: usize = 1 << 20;
const BOTH: Mode = Mode { read: true, write: true };

/// Two connected hosts with devices; the second has exposed memory in this mode.
fn pair(mode: Mode) -> (Net, Mem) {
    let mut net = Net::pair();
    net.settings.devices = true;
    net.call(0, 1, call("connects"));
    net.settle();
    let far = net.expose(1, TOKEN, pattern(1, LEN + 100), mode.read, mode.write);
    (net, far)
}

/// Starts a transfer with the remote keys of the second host's memory.
fn begin(net: &mut Net, pull: bool, offset: u64, memory: &Mem, mode: Mode, timeout: Duration) -> Op {
    let peer = net.peer(0, 1);
    let owner = net.hosts[1].incarnation;
    let remote = Remote { peer, owner, token: TOKEN, offset, keys: Some(keys(TOKEN, mode)) };
    net.transfer_to(0, pull, remote, memory, timeout)
}

/// Bytes that the hosts have sent to each other.
fn bytes_sent(net: &Net) -> u64 {
    net.wires.iter().flat_map(|wire| &wire.ends).map(|end| end.delivered).sum()
}

#[track_caller]
fn assert_transferred(net: &Net, op: Op, len: usize) {
    match net.hosts[0].outcome(op) {
        Some(TestOutcome::Transferred(completed)) => assert_eq!(*completed, len),
        other => panic!("the transfer did not complete: {other:?}"),
    }
}

#[test]
fn transfer_by_rma_sends_no_messages() {
    for len in [1, 4097, LEN] {
        let (mut net, far) = pair(BOTH);
        let before = bytes_sent(&net);
        let near = Mem::new(vec![0xaa; LEN]);
        let part = near.part(0, len).unwrap();
        let pull = begin(&mut net, true, 77, &part, BOTH, 100 * MOMENT);
        net.advance(MOMENT);
        assert_transferred(&net, pull, len);
        assert!(near.bytes()[..len] == far.bytes()[77..77 + len]);
        assert!(near.bytes()[len..].iter().all(|byte| *byte == 0xaa));
        let source = pattern(2, len);
        let push = begin(&mut net, false, 50, &Mem::new(source.clone()), BOTH, 100 * MOMENT);
        net.advance(MOMENT);
        assert_transferred(&net, push, len);
        assert!(far.bytes()[50..50 + len] == source);
        assert!(far.bytes()[50 + len..] == pattern(1, LEN + 100)[50 + len..]);
        assert_eq!((net.rma_completed, bytes_sent(&net)), (2, before));
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// Without a device, keys, a connection or bytes to transfer, the transfer goes through the protocol.
#[test]
fn transfer_that_cannot_use_rma_uses_the_protocol() {
    for missing in ["devices", "keys", "connection", "bytes"] {
        for pull in [true, false] {
            let mut net = Net::pair();
            net.settings.devices = missing != "devices";
            if missing != "connection" {
                net.call(0, 1, call("connects"));
                net.settle();
            }
            net.expose(1, TOKEN, vec![1; LEN], true, true);
            let len = if missing == "bytes" { 0 } else { LEN };
            let near = Mem::new(vec![2; len]);
            let op = match missing {
                "keys" => net.transfer(0, 1, pull, (TOKEN, 0), &near),
                _ => begin(&mut net, pull, 0, &near, BOTH, Duration::from_secs(1)),
            };
            net.settle();
            assert_transferred(&net, op, len);
            assert_eq!(net.rma_completed, 0, "RMA was used without {missing}");
            net.revoke(1, TOKEN);
            net.end();
        }
    }
}

/// A device fails in the middle: the transfer starts over through the protocol.
#[test]
fn transfer_after_a_failed_rma_is_served_by_the_owner() {
    for pull in [true, false] {
        let (mut net, far) = pair(BOTH);
        net.settings.rma_fails = true;
        let near = Mem::new(pattern(2, LEN));
        let op = begin(&mut net, pull, 100, &near, BOTH, Duration::from_secs(1));
        net.settle();
        assert_transferred(&net, op, LEN);
        assert!(near.bytes() == far.bytes()[100..]);
        assert!(pull || near.bytes() == pattern(2, LEN));
        assert_eq!(net.rma_completed, 0);
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// A device reports no cause; the owner does, when the transfer falls back.
#[test]
fn failed_rma_reports_the_cause_of_the_owner() {
    let others = [Mode { read: true, write: false }, Mode { read: false, write: true }];
    for pull in [true, false] {
        let (mut net, far) = pair(BOTH);
        let near = Mem::new(vec![2; LEN]);
        net.revoke(1, TOKEN);
        let op = begin(&mut net, pull, 0, &near, BOTH, Duration::from_secs(1));
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::Refused(Status::Revoked));
        assert!(far.bytes() == pattern(1, LEN + 100) && near.bytes() == vec![2; LEN]);
        net.end();

        let mode = others[usize::from(pull)];
        let (mut net, far) = pair(mode);
        let op = begin(&mut net, pull, 0, &near, mode, Duration::from_secs(1));
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::Refused(Status::AccessDenied(_)));
        assert!(far.bytes() == pattern(1, LEN + 100) && near.bytes() == vec![2; LEN]);
        net.revoke(1, TOKEN);
        net.end();

        let (mut net, _) = pair(BOTH);
        let op = begin(&mut net, pull, 101, &near, BOTH, Duration::from_secs(1));
        net.settle();
        let size = LEN as u64 + 100;
        assert_failed!(net.hosts[0], op, Failure::Refused(Status::OutOfRange { size: s, .. }) if *s == size);
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// The local memory is closed while a device accesses it.
#[test]
fn rma_with_closed_local_memory_fails_with_revoked() {
    for pull in [true, false] {
        let (mut net, _) = pair(BOTH);
        let near = Mem::new(vec![2; LEN]);
        let op = begin(&mut net, pull, 0, &near, BOTH, Duration::from_secs(1));
        near.close();
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::Revoked | Failure::Refused(Status::Revoked));
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// Memory of a cancelled operation is not accessed any more; the peer is not notified, and a late completion is ignored.
#[test]
fn rma_that_times_out_or_is_cancelled_leaves_memory_alone() {
    for pull in [true, false] {
        for cancel in [true, false] {
            let (mut net, far) = pair(BOTH);
            net.settings.rma_duration = 500 * MOMENT;
            let (before, near, begun) = (bytes_sent(&net), Mem::new(vec![2; LEN]), net.now);
            let op = begin(&mut net, pull, 0, &near, BOTH, 200 * MOMENT);
            if cancel {
                net.advance(100 * MOMENT);
                assert!(!net.hosts[0].is_done(op));
                net.cancel(0, op);
                assert_failed!(net.hosts[0], op, Failure::Cancelled);
            } else {
                assert!(net.until(Duration::from_secs(1), |net| net.hosts[0].is_done(op)));
                assert_eq!(net.now - begun, 200 * MOMENT);
                assert_failed!(net.hosts[0], op, Failure::Timeout);
            }
            assert!(net.rma_operations.iter().all(|each| each.cancelled));
            assert_eq!(net.rma_operations.len(), 1);
            net.settle();
            assert!(far.bytes() == pattern(1, LEN + 100) && near.bytes() == vec![2; LEN]);
            assert_eq!((net.rma_completed, bytes_sent(&net)), (0, before));
            net.revoke(1, TOKEN);
            net.end();
        }
    }
}

/// The deadline covers the whole transfer, including the fallback.
#[test]
fn fallback_of_rma_ends_at_the_deadline() {
    for pull in [true, false] {
        let (mut net, _) = pair(BOTH);
        net.settings.rma_duration = 100 * MOMENT;
        net.settings.rma_fails = true;
        net.settings.piece = 64 << 10;
        net.settings.pace = 30 * MOMENT;
        let begun = net.now;
        let op = begin(&mut net, pull, 0, &Mem::new(vec![2; LEN]), BOTH, 300 * MOMENT);
        assert!(net.until(Duration::from_secs(5), |net| net.hosts[0].is_done(op)));
        assert_failed!(net.hosts[0], op, Failure::Timeout);
        assert_eq!(net.now - begun, 300 * MOMENT);
        net.revoke(1, TOKEN);
        net.end();
    }
}

#[test]
fn rma_on_a_lost_connection_fails_with_disconnected() {
    for pull in [true, false] {
        let (mut net, far) = pair(BOTH);
        net.settings.rma_duration = 100 * MOMENT;
        let near = Mem::new(vec![2; LEN]);
        let op = begin(&mut net, pull, 0, &near, BOTH, Duration::from_secs(1));
        net.advance(50 * MOMENT);
        let wire = net.wire(0, 1);
        net.cut(wire);
        assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
        net.settle();
        assert!(far.bytes() == pattern(1, LEN + 100) && near.bytes() == vec![2; LEN]);
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// The keys of a replaced engine are not used with its successor.
#[test]
fn rma_with_a_replaced_owner_fails_with_restarted() {
    for pull in [true, false] {
        let (mut net, _) = pair(BOTH);
        let peer = net.peer(0, 1);
        let owner = net.hosts[1].incarnation;
        net.restart(1, true);
        net.settle();
        net.call(0, 1, call("connects"));
        net.settle();
        let far = net.expose(1, TOKEN, vec![1; LEN], true, true);
        let near = Mem::new(vec![2; LEN]);
        let remote = Remote { peer, owner, token: TOKEN, offset: 0, keys: Some(keys(TOKEN, BOTH)) };
        let op = net.transfer_to(0, pull, remote, &near, Duration::from_secs(1));
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::PeerRestarted);
        assert!(far.bytes() == vec![1; LEN] && near.bytes() == vec![2; LEN]);
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// An RMA operation lasts as long as the peer answers liveness probes.
#[test]
fn rma_with_a_silent_peer_fails_with_disconnected() {
    for silent in [true, false] {
        let (mut net, _) = pair(BOTH);
        net.settings.rma_duration = Duration::from_secs(20);
        let op = begin(&mut net, true, 0, &Mem::new(vec![2; LEN]), BOTH, Duration::from_secs(30));
        let begun = net.now;
        let wire = net.wire(0, 1);
        net.wires[wire].frozen = silent;
        assert!(net.until(Duration::from_secs(30), |net| net.hosts[0].is_done(op)));
        if silent {
            assert_failed!(net.hosts[0], op, Failure::Disconnected { .. });
            assert!(net.now - begun <= Duration::from_secs(4), "{:?}", net.now - begun);
        } else {
            assert_transferred(&net, op, LEN);
            assert_eq!(net.now - begun, Duration::from_secs(20));
        }
        net.revoke(1, TOKEN);
        net.end();
    }
}

#[test]
fn rma_fails_when_either_engine_is_finalized() {
    for pull in [true, false] {
        for own in [true, false] {
            let (mut net, far) = pair(BOTH);
            net.settings.rma_duration = 100 * MOMENT;
            let near = Mem::new(vec![2; LEN]);
            let op = begin(&mut net, pull, 0, &near, BOTH, Duration::from_secs(1));
            net.with_host(usize::from(!own), |host| host.proto.finish_shutdown());
            if own {
                assert!(net.rma_operations.iter().all(|each| each.cancelled));
                assert_failed!(net.hosts[0], op, Failure::Finalized);
            }
            net.settle();
            assert!(own || matches!(net.hosts[0].failure(op), Failure::Disconnected { .. }));
            assert!(far.bytes() == pattern(1, LEN + 100) && near.bytes() == vec![2; LEN]);
            net.revoke(1, TOKEN);
            net.end();
        }
    }
}

/// Messages of the peer about an RMA operation have no effect.
#[test]
fn peer_messages_about_an_rma_are_ignored() {
    for pull in [true, false] {
        let mut net = Net::new(1);
        net.settings.devices = true;
        let peer = net.test_peer(0);
        let opens = net.call_peer(0, peer, TestCall { one_way: true, ..call("x") });
        net.advance(net.settings.delay);
        let raw = net.raw_dialled();
        net.send_bytes(raw, raw::encode_hello(wire::VERSIONS, &hello(50)));
        assert!(net.hosts[0].is_done(opens));
        net.settings.rma_duration = 100 * MOMENT;
        let near = Mem::new(vec![2; 1000]);
        let remote = Remote { peer, owner: 50, token: TOKEN, offset: 0, keys: Some(keys(TOKEN, BOTH)) };
        let op = net.transfer_to(0, pull, remote, &near, Duration::from_secs(1));
        let transfer = net.rma_operations[0].number;
        for status in [Status::Ok, Status::Revoked, Status::Restarted] {
            net.send_message(raw, &Message::Done { transfer, status }, b"");
        }
        let data = Message::Data { stream: Stream::Pull, id: transfer, offset: 0, len: 1000 };
        net.send_bytes(raw, [frame(&data, b""), vec![66; 1000], vec![1]].concat());
        net.advance(50 * MOMENT);
        assert!(!net.hosts[0].is_done(op) && !net.rma_operations[0].cancelled);
        assert!(near.bytes() == vec![2; 1000]);
        // The key is invalid, and the transfer falls back: from now on the owner's messages count.
        assert!(net.until(100 * MOMENT, |net| net.rma_operations.is_empty()));
        net.send_message(raw, &Message::Done { transfer, status: Status::Revoked }, b"");
        net.advance(MOMENT);
        assert_failed!(net.hosts[0], op, Failure::Refused(Status::Revoked));
        let wire = raw.wire;
        net.cut(wire);
        net.end();
    }
}
