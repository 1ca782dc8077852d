//! Access policies of exposed memory. Host 0 owns it, host 1 is called with it, host 2 merely knows the token.

use std::time::Duration;

use super::env::{Mem, Op, TestLease, pattern};
use super::host::{ArrivedRequest, TestOutcome};
use super::net::{Net, TestCall, call};
use super::refusals::Cause;
use super::{AccessPolicy, Failure, Mode, OutgoingBody, PeerId, Remote, Reply, Status};

const CHUNK: usize = 512 << 10;
const LEN: usize = 5 * CHUNK + 3;
const MOMENT: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TOKEN: u128 = 0xfeed;
const BOTH: Mode = Mode { read: true, write: true };

const NOT_CALLED_YET: Cause = Cause::OtherCall("the call that the memory is exposed for has not been made");
const OTHER_CALL: Cause = Cause::OtherCall("the memory is exposed for another call");
const CALL_ENDED: Cause = Cause::OtherCall("the call that the memory was exposed for has ended");

fn one_call() -> AccessPolicy {
    AccessPolicy { for_one_call: true, ..AccessPolicy::default() }
}

/// The hosts are connected, and host 0 exposes memory with this policy.
fn scene(len: usize, policy: impl FnOnce(&mut Net) -> AccessPolicy) -> (Net, Mem) {
    let mut net = Net::new(3);
    for host in [1, 2] {
        let op = net.pull(host, 0, 0, 0, &Mem::new(vec![0; 1]));
        net.settle();
        assert!(net.hosts[host].is_done(op), "the hosts are connected");
    }
    let policy = policy(&mut net);
    let memory = net.expose_with_policy(0, TOKEN, vec![1; len], BOTH, policy);
    (net, memory)
}

/// The id of host 0 in the peer table of another host.
fn owner(net: &Net, host: usize) -> PeerId {
    net.hosts[host].proto.lookup_incarnation(net.hosts[0].incarnation).expect("the hosts are connected").id
}

fn begin(net: &mut Net, host: usize, pull: bool, near: &Mem) -> Op {
    let remote = Remote { peer: owner(net, host), owner: net.hosts[0].incarnation, token: TOKEN, offset: 0, keys: None };
    net.transfer_to(host, pull, remote, near, 30 * SECOND)
}

/// Pulls, and returns the result.
fn pull(net: &mut Net, host: usize, len: usize) -> Result<(), Status> {
    let op = begin(net, host, true, &Mem::new(vec![0; len]));
    net.advance(20 * MOMENT);
    ended(net, host, op)
}

#[track_caller]
fn ended(net: &Net, host: usize, op: Op) -> Result<(), Status> {
    match net.hosts[host].outcome(op) {
        Some(TestOutcome::Transferred(_)) => Ok(()),
        Some(TestOutcome::Failed(Failure::Refused(status))) => Err(status.clone()),
        other => panic!("{other:?}"),
    }
}

fn denied(cause: Cause) -> Result<(), Status> {
    Err(cause.status())
}

/// Host 0 calls another host with this many bulks of the memory.
fn send(net: &mut Net, to: usize, bulks: u32, one_way: bool, timeout: Duration) -> (Op, ArrivedRequest) {
    let leases = (0..bulks).map(|number| TestLease { token: TOKEN, number: 100 * to as u32 + number }).collect();
    let op = net.call(0, to, TestCall { leases, one_way, timeout, ..call(vec![0; 20 * bulks as usize]) });
    net.advance(MOMENT);
    (op, net.hosts[to].take())
}

fn drop_bulks(net: &mut Net, host: usize, arrived: &ArrivedRequest) {
    net.with_host(host, |host| host.proto.release(arrived.link, arrived.leases));
    net.advance(MOMENT);
}

fn finish(mut net: Net) {
    net.revoke(0, TOKEN);
    net.drop_requests(1);
    net.drop_requests(2);
    net.settle();
    assert_eq!(pull(&mut net, 1, 1), Err(Status::Revoked));
    net.end();
}

/// Only the callee has access, and only during the call, however the call ends.
#[test]
fn one_call_memory_is_accessible_to_the_callee_during_the_call_only() {
    for end in ["answer", "refuse", "cancel", "timeout"] {
        let (mut net, _) = scene(100, |_| one_call());
        for host in [1, 2] {
            assert_eq!(pull(&mut net, host, 1), denied(NOT_CALLED_YET));
        }
        let (op, arrived) = send(&mut net, 1, 2, false, SECOND);
        for _ in 0..3 {
            assert_eq!(pull(&mut net, 1, 100), Ok(()));
            assert_eq!(pull(&mut net, 2, 100), denied(OTHER_CALL));
        }
        // The same bulk in a second call: the exposure stays bound to the first.
        let (_, other) = send(&mut net, 2, 1, false, 30 * SECOND);
        assert_eq!(pull(&mut net, 2, 1), denied(OTHER_CALL));
        match end {
            "answer" => net.with_host(1, |host| host.answer(arrived.request, b"").unwrap()),
            "refuse" => net.with_host(1, |host| host.refuse(arrived.request, Status::NoResponse)),
            "cancel" => net.cancel(0, op),
            _ => net.advance(SECOND),
        }
        net.advance(MOMENT);
        assert!(net.hosts[0].is_done(op));
        // The callee still holds the bulk.
        for host in [1, 2] {
            assert_eq!(pull(&mut net, host, 1), denied(CALL_ENDED), "{end}");
        }
        drop_bulks(&mut net, 1, &arrived);
        drop_bulks(&mut net, 2, &other);
        net.with_host(2, |host| host.answer(other.request, b"").unwrap());
        assert_eq!(pull(&mut net, 1, 1), denied(CALL_ENDED), "another call does not bring it back");
        if matches!(end, "cancel" | "timeout") {
            net.with_host(1, |host| host.refuse(arrived.request, Status::NoResponse));
        }
        finish(net);
    }
}

/// The connection of the call is lost; the same engine connects again.
#[test]
fn one_call_memory_after_connection_loss_is_denied() {
    for one_way in [false, true] {
        let (mut net, _) = scene(100, |_| one_call());
        let (_, _) = send(&mut net, 1, 1, one_way, 30 * SECOND);
        assert_eq!(pull(&mut net, 1, 100), Ok(()));
        let wire = net.wire(0, 1);
        net.cut(wire);
        net.hosts[1].inbox.clear();
        let op = net.pull(1, 0, TOKEN, 0, &Mem::new(vec![0; 1]));
        net.advance(20 * MOMENT);
        assert_eq!(ended(&net, 1, op), denied(CALL_ENDED));
        finish(net);
    }
}

/// The end of a one-way call is not reported: access lasts until the callee has released all of its bulks, or until the
/// deadline.
#[test]
fn one_way_call_memory_is_accessible_until_bulks_are_released_or_deadline() {
    for dropped in [true, false] {
        let (mut net, _) = scene(100, |_| one_call());
        let (op, arrived) = send(&mut net, 1, 3, true, SECOND);
        assert!(net.hosts[0].is_done(op));
        let (_, later) = send(&mut net, 1, 1, true, 30 * SECOND);
        for number in 0..3 {
            assert_eq!(pull(&mut net, 1, 100), Ok(()));
            assert_eq!(pull(&mut net, 2, 100), denied(OTHER_CALL));
            let part = super::LeaseRange { first: arrived.leases.first + number, count: 1 };
            if dropped || number == 0 {
                net.with_host(1, |host| host.proto.release(arrived.link, part));
                // Leases of another call don't count, and a lease that is released twice counts once.
                net.with_host(1, |host| host.proto.release(arrived.link, part));
                drop_bulks(&mut net, 1, &later);
            }
        }
        if !dropped {
            assert_eq!(pull(&mut net, 1, 100), Ok(()));
            net.advance(SECOND);
            assert_eq!(net.hosts[0].left("exposures"), 1);
        }
        assert_eq!(pull(&mut net, 1, 1), denied(CALL_ENDED));
        drop_bulks(&mut net, 1, &arrived);
        for request in [arrived.request, later.request] {
            net.with_host(1, |host| host.answer(request, b"").unwrap());
        }
        finish(net);
    }
}

/// Memory for one call is not accessible through a bulk in a response, nor after a call that failed locally.
#[test]
fn one_call_memory_sent_in_a_response_is_denied() {
    let (mut net, _) = scene(100, |_| one_call());
    let asked = net.call(1, 0, call("asks for a bulk"));
    net.advance(MOMENT);
    let arrived = net.hosts[0].take();
    let lease = TestLease { token: TOKEN, number: 1 };
    net.with_host(0, |host| {
        host.leased.push(lease.clone());
        let mut reply =
            Reply { content: OutgoingBody::Small(b"here is a bulk of mine"), result: 0, shape: b"r", leases: vec![lease] };
        host.proto.respond(arrived.request, Ok(&mut reply)).unwrap();
    });
    net.advance(MOMENT);
    let Some(TestOutcome::Answered { link, leases, .. }) = net.hosts[1].outcome(asked) else { panic!("not answered") };
    let (link, leases) = (*link, *leases);
    assert_eq!(pull(&mut net, 1, 1), denied(NOT_CALLED_YET));
    net.with_host(1, |host| host.proto.release(link, leases));
    // Too large: it fails before anything is sent.
    let leases = vec![TestLease { token: TOKEN, number: 2 }];
    let op = net.call(0, 1, TestCall { leases, ..call(vec![0; 5 << 20]) });
    assert!(matches!(net.hosts[0].failure(op), Failure::TooLarge { .. }));
    assert_eq!(pull(&mut net, 1, 1), denied(NOT_CALLED_YET));
    let (_, arrived) = send(&mut net, 1, 1, false, SECOND);
    assert_eq!(pull(&mut net, 1, 1), Ok(()));
    drop_bulks(&mut net, 1, &arrived);
    net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
    finish(net);
}

/// What ends an exposure while a transfer is in progress.
#[derive(Clone, Copy, Debug, PartialEq)]
enum HowItEnds {
    Time,
    Call,
    OneWay,
}

/// The exposure ends at every point of a transfer: the initiator gets all bytes or the reason. After that the memory is
/// neither read nor written for the transfer, though the owner still has it exposed and keeps writing it.
#[test]
fn transfer_in_progress_is_aborted_when_its_exposure_ends() {
    for end in [HowItEnds::Time, HowItEnds::Call, HowItEnds::OneWay] {
        for pull in [true, false] {
            let (mut completed, mut stopped) = (0, 0);
            for step in 0..60 {
                let (mut net, far) =
                    scene(LEN, |_| AccessPolicy { for_one_call: end != HowItEnds::Time, ..AccessPolicy::default() });
                net.settings.piece = 100 << 10;
                net.settings.report_late = step % 2 == 0;
                let (op, arrived) = send(&mut net, 1, 1, end == HowItEnds::OneWay, 10 * SECOND);
                if end == HowItEnds::Time {
                    net.revoke(0, TOKEN);
                }
                let expires = Some(net.now + step * Duration::from_micros(15));
                let far = if end == HowItEnds::Time {
                    net.expose_with_policy(0, TOKEN, vec![1; LEN], BOTH, AccessPolicy { expires, ..AccessPolicy::default() })
                } else {
                    far
                };
                net.settings.pace = Duration::from_micros(20);
                let near = Mem::new(vec![if pull { 0 } else { 2 }; LEN]);
                let transfer = begin(&mut net, 1, pull, &near);
                net.advance(step * Duration::from_micros(15));
                match end {
                    HowItEnds::Time => {}
                    HowItEnds::Call => net.cancel(0, op),
                    HowItEnds::OneWay => {
                        let (link, leases) = (arrived.link, arrived.leases);
                        net.with_host(1, |host| host.proto.release(link, leases));
                        let gone = net.until(SECOND, |net| !net.hosts[0].unleased.is_empty());
                        assert!(gone);
                    }
                }
                // Even if the peer reads and sends nothing more.
                let left = net.hosts[0].left("streams") + net.hosts[0].left("incoming pushes");
                assert_eq!(left, 0, "{end:?}: state of an ended transfer is kept");
                // The owner keeps using the memory.
                let over = vec![3; LEN];
                far.write(0, &over);
                net.advance(SECOND);
                assert!(far.bytes() == over, "{end:?}: written after the end");
                assert!(!near.bytes().contains(&3), "{end:?}: read after the end");
                match ended(&net, 1, transfer) {
                    Ok(()) => completed += 1,
                    Err(Status::AccessDenied(_) | Status::Revoked) => stopped += 1,
                    Err(other) => panic!("{other:?}"),
                }
                if end != HowItEnds::OneWay {
                    drop_bulks(&mut net, 1, &arrived);
                }
                let request = arrived.request;
                net.with_host(1, |host| host.refuse(request, Status::NoResponse));
                finish(net);
            }
            assert!(completed > 5 && stopped > 5, "{end:?}, pull {pull}: {completed} whole, {stopped} stopped: both must occur");
        }
    }
}

#[test]
fn second_transfer_of_one_transfer_memory_is_denied() {
    for pull_first in [true, false] {
        let (mut net, far) = scene(LEN, |_| AccessPolicy { once: true, ..AccessPolicy::default() });
        // A refused transfer does not use the permission up.
        let outside = net.transfer(1, 0, true, (TOKEN, 1), &Mem::new(vec![0; LEN]));
        net.advance(SECOND);
        assert!(matches!(ended(&net, 1, outside), Err(Status::OutOfRange { .. })));
        // Two concurrent transfers, and two later ones.
        let near = Mem::new(vec![2; LEN]);
        let first = begin(&mut net, 1, pull_first, &near);
        let second = begin(&mut net, 1, !pull_first, &Mem::new(vec![5; 10]));
        net.advance(SECOND);
        assert_eq!((ended(&net, 1, first), ended(&net, 1, second)), (Ok(()), denied(Cause::UsedUp)));
        assert_eq!(pull(&mut net, 2, 10), denied(Cause::UsedUp));
        assert_eq!(pull(&mut net, 1, 0), denied(Cause::UsedUp));
        let all = if pull_first { 1 } else { 2 };
        assert!(far.bytes() == vec![all; LEN] && near.bytes() == vec![all; LEN]);
        finish(net);
    }
    // An empty transfer counts, and so does one that failed.
    for fails in [true, false] {
        let (mut net, _) = scene(LEN, |_| AccessPolicy { once: true, ..AccessPolicy::default() });
        let op = begin(&mut net, 1, true, &Mem::new(vec![0; if fails { LEN } else { 0 }]));
        if fails {
            net.advance(net.settings.delay);
            net.cancel(1, op);
        }
        net.advance(SECOND);
        assert!(net.hosts[1].is_done(op));
        assert_eq!(pull(&mut net, 1, 1), denied(Cause::UsedUp));
        finish(net);
    }
}

#[test]
fn transfer_beyond_the_quota_is_denied() {
    let quota = |bytes| AccessPolicy { quota: Some(bytes), ..AccessPolicy::default() };
    let left = |len, left| denied(Cause::Quota { len, left });
    let (mut net, _) = scene(100, |_| quota(250));
    assert_eq!(pull(&mut net, 1, 100), Ok(()));
    let op = begin(&mut net, 2, false, &Mem::new(vec![7; 100]));
    net.advance(SECOND);
    assert_eq!(ended(&net, 2, op), Ok(()));
    // One byte too many, exactly the rest, none, and one too many again.
    assert_eq!(pull(&mut net, 1, 51), left(51, 50));
    assert_eq!(pull(&mut net, 1, 50), Ok(()));
    assert_eq!(pull(&mut net, 1, 0), Ok(()));
    assert_eq!(pull(&mut net, 1, 1), left(1, 0));
    finish(net);
    let (mut net, _) = scene(100, |_| quota(0));
    assert_eq!(pull(&mut net, 1, 1), left(1, 0));
    finish(net);
    // The largest quota: no offset and length of a peer overflow the sum.
    let (mut net, _) = scene(100, |_| quota(u64::MAX));
    let now = net.now;
    for (offset, len) in [(0, u64::MAX), (u64::MAX, u64::MAX), (1, u64::MAX)] {
        let outside = Status::OutOfRange { offset, len, size: 100 };
        assert_eq!(net.hosts[0].proto.access(TOKEN, offset, len, false, now).err(), Some(outside));
    }
    for _ in 0..3 {
        assert_eq!(pull(&mut net, 1, 100), Ok(()));
    }
    finish(net);
    // Two concurrent transfers that exceed the quota together.
    let (mut net, _) = scene(LEN, |_| quota(LEN as u64 + 9));
    let ops = [LEN, 10].map(|len| begin(&mut net, 1, true, &Mem::new(vec![0; len])));
    net.advance(SECOND);
    assert_eq!(ops.map(|op| ended(&net, 1, op)), [Ok(()), left(10, 9)]);
    finish(net);
}

/// The expiry is exact to the nanosecond, even if the timer fires late.
#[test]
fn access_after_expiry_is_denied() {
    let mut expires = None;
    let (mut net, _) = scene(100, |net| {
        expires = Some(net.now + SECOND);
        AccessPolicy { expires, ..AccessPolicy::default() }
    });
    assert_eq!(net.hosts[0].proto.next_timeout(), expires);
    assert_eq!(pull(&mut net, 1, 100), Ok(()));
    let at = expires.unwrap();
    let just = Duration::from_nanos(1);
    let proto = &mut net.hosts[0].proto;
    assert!(proto.access(TOKEN, 0, 1, false, at - just).is_ok());
    assert_eq!(proto.access(TOKEN, 0, 1, false, at).err(), Some(Cause::Expired.status()));
    net.advance(SECOND);
    // An event may carry a slightly older time stamp.
    assert_eq!(net.hosts[0].proto.access(TOKEN, 0, 1, false, at - just).err(), Some(Cause::Expired.status()));
    assert_eq!(net.hosts[0].proto.next_timeout(), None);
    for host in [1, 2] {
        assert_eq!(pull(&mut net, host, 1), denied(Cause::Expired));
    }
    finish(net);
    // An expiry in the past; and one that is still ahead when the owner revokes.
    let (mut net, _) = scene(100, |net| AccessPolicy { expires: Some(net.now), ..AccessPolicy::default() });
    assert_eq!(pull(&mut net, 1, 1), denied(Cause::Expired));
    finish(net);
    let (net, _) = scene(100, |net| AccessPolicy { expires: Some(net.now + 1000 * SECOND), ..AccessPolicy::default() });
    finish(net);
    // Shutdown drops pending expiries.
    let (mut net, _) = scene(100, |net| AccessPolicy { expires: Some(net.now + 1000 * SECOND), ..AccessPolicy::default() });
    net.with_host(0, |host| host.proto.finish_shutdown());
    net.end();
}

/// Every combination of restrictions, with each of them violated: the first violated one in list order is the reason.
#[test]
fn first_violated_restriction_is_the_reason() {
    for set in 0..32u32 {
        let has = |bit: u32| set & (1 << bit) != 0;
        let (mut net, _) = scene(100, |net| AccessPolicy {
            only: has(0).then(|| net.peer(0, 1)),
            for_one_call: has(1),
            once: has(3),
            quota: has(4).then_some(150),
            expires: has(2).then(|| net.now + SECOND),
        });
        let (op, arrived) = send(&mut net, 1, 1, false, 30 * SECOND);
        let first = |causes: &[(bool, Cause)]| causes.iter().find(|(broken, _)| *broken).map(|(_, cause)| cause.clone());
        let expect = |cause: Option<Cause>| cause.map_or(Ok(()), denied);
        let other_host = first(&[(has(0), Cause::OtherPeer), (has(1), OTHER_CALL)]);
        if other_host.is_some() {
            assert_eq!(pull(&mut net, 2, 100), expect(other_host.clone()), "set {set:b}");
        }
        assert_eq!(pull(&mut net, 1, 100), Ok(()), "set {set:b}");
        let used = first(&[(has(3), Cause::UsedUp), (has(4), Cause::Quota { len: 100, left: 50 })]);
        assert_eq!(pull(&mut net, 1, 100), expect(used.clone()), "set {set:b}");
        net.advance(SECOND);
        let later = has(2).then_some(Cause::Expired).or(used);
        assert_eq!(pull(&mut net, 1, 100), expect(later.clone()), "set {set:b}");
        assert_eq!(pull(&mut net, 2, 100), expect(other_host.or(later.clone())), "set {set:b}");
        net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
        net.advance(MOMENT);
        assert!(net.hosts[0].is_done(op));
        assert_eq!(pull(&mut net, 1, 100), expect(has(1).then_some(CALL_ENDED).or(later)), "set {set:b}");
        drop_bulks(&mut net, 1, &arrived);
        finish(net);
    }
}

/// The owner's own accesses obey the policy, too.
#[test]
fn owner_access_against_its_own_policy_is_denied() {
    let (mut net, _) = scene(100, |net| AccessPolicy { only: Some(net.peer(0, 1)), ..AccessPolicy::default() });
    let now = net.now;
    let own = |net: &mut Net| net.hosts[0].proto.access(TOKEN, 0, 10, true, now).map(|_| ());
    assert_eq!(own(&mut net), denied(Cause::OtherPeer));
    net.revoke(0, TOKEN);
    let policy = AccessPolicy { only: Some(net.peer(0, 0)), once: true, quota: Some(10), for_one_call: true, expires: None };
    net.expose_with_policy(0, TOKEN, pattern(1, 100), BOTH, policy);
    assert_eq!(own(&mut net), denied(NOT_CALLED_YET));
    let (_, arrived) = send(&mut net, 0, 1, false, SECOND);
    assert_eq!(own(&mut net), Ok(()));
    assert_eq!(own(&mut net), denied(Cause::UsedUp));
    net.with_host(0, |host| host.answer(arrived.request, b"").unwrap());
    net.advance(MOMENT);
    assert_eq!(own(&mut net), denied(CALL_ENDED));
    drop_bulks(&mut net, 0, &arrived);
    assert_eq!(net.hosts[0].proto.refusals().total(), 2, "only refusals to peers count");
    finish(net);
}

/// Memory for a peer that is not connected yet is for the first engine found at its address, not for its successor.
#[test]
fn successor_of_the_peer_that_memory_is_for_is_denied() {
    let mut net = Net::new(2);
    let only = Some(net.peer(0, 1));
    net.expose_with_policy(0, TOKEN, vec![1; 10], BOTH, AccessPolicy { only, ..AccessPolicy::default() });
    net.call(0, 1, call("connects"));
    net.advance(MOMENT);
    assert_eq!(pull(&mut net, 1, 10), Ok(()));
    net.hosts[1].echo = true;
    net.hosts[1].inbox.clear();
    net.restart(1, true);
    net.settle();
    net.call(0, 1, call("connects"));
    net.settle();
    assert_eq!(pull(&mut net, 1, 10), denied(Cause::OtherPeer));
    net.revoke(0, TOKEN);
    net.end();
}
