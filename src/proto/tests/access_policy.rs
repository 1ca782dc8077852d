//! Memory that is exposed on terms. Host 0 owns it, host 1 is called with it, host 2 has only heard of it.

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

const UNMADE: Cause = Cause::OtherCall("the call that the memory is exposed for has not been made");
const ANOTHER: Cause = Cause::OtherCall("the memory is exposed for another call");
const OVER: Cause = Cause::OtherCall("the call that the memory was exposed for has ended");

fn one_call() -> AccessPolicy {
    AccessPolicy { for_one_call: true, ..AccessPolicy::default() }
}

/// The hosts have met; memory of host 0 is exposed on these terms.
fn scene(len: usize, terms: impl FnOnce(&mut Net) -> AccessPolicy) -> (Net, Mem) {
    let mut net = Net::new(3);
    for host in [1, 2] {
        let op = net.pull(host, 0, 0, 0, &Mem::new(vec![0; 1]));
        net.settle();
        assert!(net.hosts[host].is_done(op), "they have met");
    }
    let terms = terms(&mut net);
    let memory = net.expose_on_terms(0, TOKEN, vec![1; len], BOTH, terms);
    (net, memory)
}

/// Host 0's peer as another host knows it.
fn owner(net: &Net, host: usize) -> PeerId {
    net.hosts[host].proto.lookup_incarnation(net.hosts[0].incarnation).expect("they have met").id
}

fn begin(net: &mut Net, host: usize, pull: bool, near: &Mem) -> Op {
    let remote = Remote { peer: owner(net, host), owner: net.hosts[0].incarnation, token: TOKEN, offset: 0, keys: None };
    net.transfer_to(host, pull, remote, near, 30 * SECOND)
}

/// A pull and its end.
fn pull(net: &mut Net, host: usize, len: usize) -> Result<(), Status> {
    let op = begin(net, host, true, &Mem::new(vec![0; len]));
    net.advance(20 * MOMENT);
    ended(net, host, op)
}

#[track_caller]
fn ended(net: &Net, host: usize, op: Op) -> Result<(), Status> {
    match net.hosts[host].outcome(op) {
        Some(TestOutcome::Moved(_)) => Ok(()),
        Some(TestOutcome::Failed(Failure::Refused(status))) => Err(status.clone()),
        other => panic!("{other:?}"),
    }
}

fn denied(cause: Cause) -> Result<(), Status> {
    Err(cause.status())
}

/// Host 0 calls another with so many bulks of the memory.
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

/// Before the call nobody, during the call the callee, after the call nobody: however it ends.
#[test]
fn memory_for_one_call() {
    for end in ["answer", "refuse", "cancel", "timeout"] {
        let (mut net, _) = scene(100, |_| one_call());
        for host in [1, 2] {
            assert_eq!(pull(&mut net, host, 1), denied(UNMADE));
        }
        let (op, arrived) = send(&mut net, 1, 2, false, SECOND);
        for _ in 0..3 {
            assert_eq!(pull(&mut net, 1, 100), Ok(()));
            assert_eq!(pull(&mut net, 2, 100), denied(ANOTHER));
        }
        // The same bulk in another call: it is the first one's.
        let (_, other) = send(&mut net, 2, 1, false, 30 * SECOND);
        assert_eq!(pull(&mut net, 2, 1), denied(ANOTHER));
        match end {
            "answer" => net.with_host(1, |host| host.answer(arrived.request, b"").unwrap()),
            "refuse" => net.with_host(1, |host| host.refuse(arrived.request, Status::NoResponse)),
            "cancel" => net.cancel(0, op),
            _ => net.advance(SECOND),
        }
        net.advance(MOMENT);
        assert!(net.hosts[0].is_done(op));
        // The callee has kept the bulk.
        for host in [1, 2] {
            assert_eq!(pull(&mut net, host, 1), denied(OVER), "{end}");
        }
        drop_bulks(&mut net, 1, &arrived);
        drop_bulks(&mut net, 2, &other);
        net.with_host(2, |host| host.answer(other.request, b"").unwrap());
        assert_eq!(pull(&mut net, 1, 1), denied(OVER), "another call does not bring it back");
        if matches!(end, "cancel" | "timeout") {
            net.with_host(1, |host| host.refuse(arrived.request, Status::NoResponse));
        }
        finish(net);
    }
}

/// The connection is lost that the call was made on; the same engine connects again.
#[test]
fn a_lost_connection_ends_the_call() {
    for one_way in [false, true] {
        let (mut net, _) = scene(100, |_| one_call());
        let (_, _) = send(&mut net, 1, 1, one_way, 30 * SECOND);
        assert_eq!(pull(&mut net, 1, 100), Ok(()));
        let wire = net.wire(0, 1);
        net.cut(wire);
        net.hosts[1].inbox.clear();
        let op = net.pull(1, 0, TOKEN, 0, &Mem::new(vec![0; 1]));
        net.advance(20 * MOMENT);
        assert_eq!(ended(&net, 1, op), denied(OVER));
        finish(net);
    }
}

/// Nobody hears of the end of a one-way call: it is the callee's until it has dropped all of its bulks, or the time is over.
#[test]
fn memory_for_one_one_way_call() {
    for dropped in [true, false] {
        let (mut net, _) = scene(100, |_| one_call());
        let (op, arrived) = send(&mut net, 1, 3, true, SECOND);
        assert!(net.hosts[0].is_done(op));
        let (_, later) = send(&mut net, 1, 1, true, 30 * SECOND);
        for number in 0..3 {
            assert_eq!(pull(&mut net, 1, 100), Ok(()));
            assert_eq!(pull(&mut net, 2, 100), denied(ANOTHER));
            let part = super::LeaseRange { first: arrived.leases.first + number, count: 1 };
            if dropped || number == 0 {
                net.with_host(1, |host| host.proto.release(arrived.link, part));
                // Those of another call don't count, nor does it count twice.
                net.with_host(1, |host| host.proto.release(arrived.link, part));
                drop_bulks(&mut net, 1, &later);
            }
        }
        if !dropped {
            assert_eq!(pull(&mut net, 1, 100), Ok(()));
            net.advance(SECOND);
            assert_eq!(net.hosts[0].left("exposures"), 1);
        }
        assert_eq!(pull(&mut net, 1, 1), denied(OVER));
        drop_bulks(&mut net, 1, &arrived);
        for request in [arrived.request, later.request] {
            net.with_host(1, |host| host.answer(request, b"").unwrap());
        }
        finish(net);
    }
}

/// Such a bulk in an answer is of no use; a call that never was made does not count.
#[test]
fn an_answer_is_no_call() {
    let (mut net, _) = scene(100, |_| one_call());
    let asked = net.call(1, 0, call("give me a bulk"));
    net.advance(MOMENT);
    let arrived = net.hosts[0].take();
    let ticket = TestLease { token: TOKEN, number: 1 };
    net.with_host(0, |host| {
        host.leased.push(ticket.clone());
        let reply =
            Reply { content: OutgoingBody::Small(b"here is a bulk of mine"), result: 0, shape: b"r", leases: vec![ticket] };
        host.proto.respond(arrived.request, Ok(reply)).unwrap();
    });
    net.advance(MOMENT);
    let Some(TestOutcome::Answered { link, leases, .. }) = net.hosts[1].outcome(asked) else { panic!("not answered") };
    let (link, leases) = (*link, *leases);
    assert_eq!(pull(&mut net, 1, 1), denied(UNMADE));
    net.with_host(1, |host| host.proto.release(link, leases));
    // Too large to be made.
    let leases = vec![TestLease { token: TOKEN, number: 2 }];
    let op = net.call(0, 1, TestCall { leases, ..call(vec![0; 5 << 20]) });
    assert!(matches!(net.hosts[0].failure(op), Failure::TooLarge { .. }));
    assert_eq!(pull(&mut net, 1, 1), denied(UNMADE));
    let (_, arrived) = send(&mut net, 1, 1, false, SECOND);
    assert_eq!(pull(&mut net, 1, 1), Ok(()));
    drop_bulks(&mut net, 1, &arrived);
    net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
    finish(net);
}

/// What ends an exposure while a transfer is under way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum HowItEnds {
    Time,
    Call,
    OneWay,
}

/// At every point of a transfer the right to it ends: whoever began it gets all, or learns why not. Nobody touches the memory
/// after that, though the owner still has it exposed, and goes on writing it.
#[test]
fn what_is_under_way_ends() {
    for end in [HowItEnds::Time, HowItEnds::Call, HowItEnds::OneWay] {
        for pull in [true, false] {
            let (mut moved, mut stopped) = (0, 0);
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
                    net.expose_on_terms(0, TOKEN, vec![1; LEN], BOTH, AccessPolicy { expires, ..AccessPolicy::default() })
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
                // Also where the other side reads and sends nothing more.
                let left = net.hosts[0].left("streams") + net.hosts[0].left("incoming pushes");
                assert_eq!(left, 0, "{end:?}: kept for a transfer that is over");
                // The owner goes on with it.
                let over = vec![3; LEN];
                far.write(0, &over);
                net.advance(SECOND);
                assert!(far.bytes() == over, "{end:?}: written after the end");
                assert!(!near.bytes().contains(&3), "{end:?}: read after the end");
                match ended(&net, 1, transfer) {
                    Ok(()) => moved += 1,
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
            assert!(moved > 5 && stopped > 5, "{end:?}, pull {pull}: {moved} whole, {stopped} stopped: both were to be seen");
        }
    }
}

#[test]
fn memory_for_one_transfer() {
    for pull_first in [true, false] {
        let (mut net, far) = scene(LEN, |_| AccessPolicy { once: true, ..AccessPolicy::default() });
        // What is refused uses nothing up.
        let outside = net.transfer(1, 0, true, (TOKEN, 1), &Mem::new(vec![0; LEN]));
        net.advance(SECOND);
        assert!(matches!(ended(&net, 1, outside), Err(Status::OutOfRange { .. })));
        // Two at the same time, and two more of others.
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
    // One of nothing is one; one that failed was one.
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
fn memory_with_a_quota() {
    let quota = |bytes| AccessPolicy { quota: Some(bytes), ..AccessPolicy::default() };
    let left = |len, left| denied(Cause::Quota { len, left });
    let (mut net, _) = scene(100, |_| quota(250));
    assert_eq!(pull(&mut net, 1, 100), Ok(()));
    let op = begin(&mut net, 2, false, &Mem::new(vec![7; 100]));
    net.advance(SECOND);
    assert_eq!(ended(&net, 2, op), Ok(()));
    // Off by one, exactly, and none.
    assert_eq!(pull(&mut net, 1, 51), left(51, 50));
    assert_eq!(pull(&mut net, 1, 50), Ok(()));
    assert_eq!(pull(&mut net, 1, 0), Ok(()));
    assert_eq!(pull(&mut net, 1, 1), left(1, 0));
    finish(net);
    let (mut net, _) = scene(100, |_| quota(0));
    assert_eq!(pull(&mut net, 1, 1), left(1, 0));
    finish(net);
    // The largest there is: nothing overflows, whatever a peer names.
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
    // Two at the same time that are too much together.
    let (mut net, _) = scene(LEN, |_| quota(LEN as u64 + 9));
    let ops = [LEN, 10].map(|len| begin(&mut net, 1, true, &Mem::new(vec![0; len])));
    net.advance(SECOND);
    assert_eq!(ops.map(|op| ended(&net, 1, op)), [Ok(()), left(10, 9)]);
    finish(net);
}

/// To the microsecond, and not later because a timer is.
#[test]
fn memory_for_a_time() {
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
    // What comes in may be dated to a moment ago.
    assert_eq!(net.hosts[0].proto.access(TOKEN, 0, 1, false, at - just).err(), Some(Cause::Expired.status()));
    assert_eq!(net.hosts[0].proto.next_timeout(), None);
    for host in [1, 2] {
        assert_eq!(pull(&mut net, host, 1), denied(Cause::Expired));
    }
    finish(net);
    // A time that is over when it begins; and one that the owner does not wait for.
    let (mut net, _) = scene(100, |net| AccessPolicy { expires: Some(net.now), ..AccessPolicy::default() });
    assert_eq!(pull(&mut net, 1, 1), denied(Cause::Expired));
    finish(net);
    let (net, _) = scene(100, |net| AccessPolicy { expires: Some(net.now + 1000 * SECOND), ..AccessPolicy::default() });
    finish(net);
    // The end of the engine is the end of what it waits for.
    let (mut net, _) = scene(100, |net| AccessPolicy { expires: Some(net.now + 1000 * SECOND), ..AccessPolicy::default() });
    net.with_host(0, |host| host.proto.finish_shutdown());
    net.end();
}

/// Every set of terms, and each of them broken: the first one that is, in the order of the list, is the reason.
#[test]
fn all_terms_together() {
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
        let stranger = first(&[(has(0), Cause::OtherPeer), (has(1), ANOTHER)]);
        if stranger.is_some() {
            assert_eq!(pull(&mut net, 2, 100), expect(stranger.clone()), "set {set:b}");
        }
        assert_eq!(pull(&mut net, 1, 100), Ok(()), "set {set:b}");
        let used = first(&[(has(3), Cause::UsedUp), (has(4), Cause::Quota { len: 100, left: 50 })]);
        assert_eq!(pull(&mut net, 1, 100), expect(used.clone()), "set {set:b}");
        net.advance(SECOND);
        let later = has(2).then_some(Cause::Expired).or(used);
        assert_eq!(pull(&mut net, 1, 100), expect(later.clone()), "set {set:b}");
        assert_eq!(pull(&mut net, 2, 100), expect(stranger.or(later.clone())), "set {set:b}");
        net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
        net.advance(MOMENT);
        assert!(net.hosts[0].is_done(op));
        assert_eq!(pull(&mut net, 1, 100), expect(has(1).then_some(OVER).or(later)), "set {set:b}");
        drop_bulks(&mut net, 1, &arrived);
        finish(net);
    }
}

/// An engine's own bulks obey the terms, too.
#[test]
fn the_owners_own_access_on_terms() {
    let (mut net, _) = scene(100, |net| AccessPolicy { only: Some(net.peer(0, 1)), ..AccessPolicy::default() });
    let now = net.now;
    let own = |net: &mut Net| net.hosts[0].proto.access(TOKEN, 0, 10, true, now).map(|_| ());
    assert_eq!(own(&mut net), denied(Cause::OtherPeer));
    net.revoke(0, TOKEN);
    let terms = AccessPolicy { only: Some(net.peer(0, 0)), once: true, quota: Some(10), for_one_call: true, expires: None };
    net.expose_on_terms(0, TOKEN, pattern(1, 100), BOTH, terms);
    assert_eq!(own(&mut net), denied(UNMADE));
    let (_, arrived) = send(&mut net, 0, 1, false, SECOND);
    assert_eq!(own(&mut net), Ok(()));
    assert_eq!(own(&mut net), denied(Cause::UsedUp));
    net.with_host(0, |host| host.answer(arrived.request, b"").unwrap());
    net.advance(MOMENT);
    assert_eq!(own(&mut net), denied(OVER));
    drop_bulks(&mut net, 0, &arrived);
    assert_eq!(net.hosts[0].proto.refusals().total(), 2, "only those of peers count: they met with one");
    finish(net);
}

/// Memory for a peer that has not been met is for the first engine that is met there; not for the next.
#[test]
fn memory_for_a_peer_that_was_not_met() {
    let mut net = Net::new(2);
    let only = Some(net.peer(0, 1));
    net.expose_on_terms(0, TOKEN, vec![1; 10], BOTH, AccessPolicy { only, ..AccessPolicy::default() });
    net.call(0, 1, call("who is there"));
    net.advance(MOMENT);
    assert_eq!(pull(&mut net, 1, 10), Ok(()));
    net.hosts[1].echo = true;
    net.hosts[1].inbox.clear();
    net.restart(1, true);
    net.settle();
    net.call(0, 1, call("who is there"));
    net.settle();
    assert_eq!(pull(&mut net, 1, 10), denied(Cause::OtherPeer));
    net.revoke(0, TOKEN);
    net.end();
}
