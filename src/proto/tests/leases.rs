//! Leases: which peers hold a bulk, and how they learn of its revocation.

use std::time::Duration;

use super::env::TestLease;
use super::host::ArrivedRequest;
use super::net::{Net, TestCall, call, config, few};
use super::wire::{BorrowedBytes, Declare, Message, Status};
use super::{Config, LeaseRange, OutgoingBody, Reply};

const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 0xbead;

fn lease(number: u32) -> TestLease {
    TestLease { token: TOKEN, number }
}

/// Sends a call with these leases, and answers it; the receiver holds the leases from then on.
fn send_bulks(net: &mut Net, from: usize, to: usize, numbers: &[u32]) -> ArrivedRequest {
    // Each bulk takes some bytes of the body.
    let body = vec![0; 20 * numbers.len()];
    net.call(from, to, TestCall { leases: numbers.iter().map(|n| lease(*n)).collect(), ..call(body) });
    net.advance(MOMENT);
    let arrived = net.hosts[to].take();
    assert_eq!(arrived.leases.count as usize, numbers.len());
    net.with_host(to, |host| host.answer(arrived.request, b"").unwrap());
    net.advance(MOMENT);
    arrived
}

fn release(net: &mut Net, host: usize, arrived: &ArrivedRequest) {
    let (link, leases) = (arrived.link, arrived.leases);
    net.with_host(host, |host| host.proto.release(link, leases));
    net.advance(MOMENT);
}

fn returned(net: &Net, host: usize) -> Vec<u32> {
    let mut numbers: Vec<_> = net.hosts[host].unleased.iter().map(|lease| lease.number).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn released_leases_return_to_the_owner() {
    let mut net = Net::new(2);
    let first = send_bulks(&mut net, 0, 1, &[1, 2, 3]);
    let second = send_bulks(&mut net, 0, 1, &[4]);
    assert!(returned(&net, 0).is_empty(), "a response does not release leases");
    release(&mut net, 1, &second);
    assert_eq!(returned(&net, 0), [4]);
    release(&mut net, 1, &first);
    assert_eq!(returned(&net, 0), [1, 2, 3, 4]);
    net.end();
}

/// The receiver releases them in any portions and order.
#[test]
fn leases_released_in_portions_return_in_portions() {
    let mut net = Net::new(2);
    let arrived = send_bulks(&mut net, 0, 1, &[1, 2, 3, 4, 5]);
    let first = arrived.leases.first;
    for (from, count, back) in [(1, 1, 1), (0, 1, 2), (3, 2, 4), (2, 1, 5)] {
        let part = LeaseRange { first: first + from, count };
        net.with_host(1, |host| host.proto.release(arrived.link, part));
        net.advance(MOMENT);
        assert_eq!(returned(&net, 0).len(), back);
    }
    net.end();
}

/// A release that includes leases released before still releases the others.
#[test]
fn leases_released_twice_return_once() {
    let mut net = Net::new(2);
    let arrived = send_bulks(&mut net, 0, 1, &[1, 2, 3, 4]);
    let first = arrived.leases.first;
    for part in [LeaseRange { first, count: 2 }, LeaseRange { first, count: 4 }] {
        net.with_host(1, |host| host.proto.release(arrived.link, part));
    }
    net.advance(MOMENT);
    assert_eq!(returned(&net, 0), [1, 2, 3, 4]);
    net.end();
}

#[test]
fn connection_loss_returns_all_leases() {
    let mut net = Net::new(2);
    let arrived = send_bulks(&mut net, 0, 1, &[1, 2, 3]);
    let wire = net.wire(0, 1);
    net.cut(wire);
    assert_eq!(returned(&net, 0), [1, 2, 3]);
    // A release after the connection loss has no effect.
    release(&mut net, 1, &arrived);
    net.end();
}

/// The call with the lease was never sent.
#[test]
fn lease_of_a_call_never_sent_returns() {
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = net.call(0, 1, TestCall { leases: vec![lease(1)], ..call("a call with a bulk in it") });
    net.settle();
    net.hosts[0].failure(op);
    assert_eq!(returned(&net, 0), [1]);
    net.end();
}

/// A response transports bulks as a call does.
#[test]
fn lease_in_a_response_returns_when_the_caller_releases_it() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, call("asks for a bulk"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| {
        host.leased.push(lease(1));
        let mut reply =
            Reply { content: OutgoingBody::Small(b"here is a bulk of mine"), result: 0, shape: b"r", leases: vec![lease(1)] };
        host.proto.respond(arrived.request, Ok(&mut reply)).unwrap();
    });
    net.advance(MOMENT);
    let Some(super::host::TestOutcome::Answered { link, leases, .. }) = net.hosts[0].outcome(op) else { panic!("not answered") };
    let (link, leases) = (*link, *leases);
    assert_eq!(leases.count, 1);
    assert!(net.hosts[1].unleased.is_empty());
    net.with_host(0, |host| host.proto.release(link, leases));
    net.advance(MOMENT);
    assert_eq!(returned(&net, 1), [1]);
    net.end();
}

/// What a host sends with releases and an answer, to a peer that is no engine: `Release` messages, and what answers release.
fn sent(release_and_answer: impl FnOnce(&mut super::host::Host, &ArrivedRequest)) -> (Vec<LeaseRange>, Vec<LeaseRange>) {
    let mut net = Net::new(1);
    let raw = net.raw_peer(0, 7);
    let body = [0; 100];
    let leases = LeaseRange { first: 5, count: 6 };
    net.send_message(raw, &raw_call(1, leases, body.len()), &body);
    let arrived = net.hosts[0].take();
    assert_eq!(arrived.leases, leases);
    net.with_host(0, |host| release_and_answer(host, &arrived));
    net.advance(MOMENT);
    let (mut releases, mut in_answers) = (Vec::new(), Vec::new());
    net.for_each_received(raw, |message| match message {
        Message::Release(leases) => {
            assert!(in_answers.is_empty(), "released behind the answer");
            releases.push(*leases);
        }
        Message::Response { released, .. } => in_answers.push(*released),
        Message::Refuse { .. } => in_answers.push(LeaseRange::default()),
        _ => {}
    });
    net.disconnect(raw);
    net.end();
    (releases, in_answers)
}

fn raw_call(call: u64, leases: LeaseRange, size: usize) -> Message<'static> {
    let declaration = Some(Declare { name: "echo", shape: BorrowedBytes(b"?") });
    let (budget_us, size) = (1_000_000, size as u64);
    Message::Request { call, procedure: 0, declaration, provider: 0, budget_us, one_way: false, leases, size }
}

/// Leases in this range of those that came with the call.
fn range(first: u64, count: u32) -> LeaseRange {
    LeaseRange { first: 5 + first, count }
}

#[test]
fn leases_released_before_the_answer_go_with_it() {
    let one_by_one = |order: &'static [u64]| {
        sent(|host, arrived| {
            order.iter().for_each(|number| host.proto.release(arrived.link, range(*number, 1)));
            host.answer(arrived.request, b"").unwrap();
        })
    };
    assert_eq!(one_by_one(&[0, 1, 2, 3, 4, 5]), (vec![], vec![range(0, 6)]));
    assert_eq!(one_by_one(&[5, 4, 3, 2, 1, 0]), (vec![], vec![range(0, 6)]));
    assert_eq!(one_by_one(&[3]), (vec![], vec![range(3, 1)]));
    assert_eq!(one_by_one(&[]), (vec![], vec![LeaseRange::default()]));
    // Not adjacent.
    assert_eq!(one_by_one(&[0, 2, 3, 5]), (vec![range(0, 1), range(2, 2)], vec![range(5, 1)]));
}

#[test]
fn leases_released_before_a_refusal_go_before_it() {
    let refused = sent(|host, arrived| {
        (0..3).for_each(|number| host.proto.release(arrived.link, range(number, 1)));
        host.refuse(arrived.request, Status::NoResponse);
        assert_eq!(host.proto.miscounted(), None);
    });
    assert_eq!(refused, (vec![range(0, 3)], vec![LeaseRange::default()]));
}

#[test]
fn leases_of_a_call_refused_on_arrival_go_before_the_refusal() {
    let mut net = Net::with(vec![(Config { limits: few(1), ..config() }, true)]);
    let raw = net.raw_peer(0, 7);
    net.send_message(raw, &raw_call(1, LeaseRange::default(), 0), b"");
    net.send_message(raw, &raw_call(2, range(0, 2), 100), &[0; 100]);
    net.advance(MOMENT);
    let mut sent = Vec::new();
    net.for_each_received(raw, |message| match message {
        Message::Release(leases) => sent.push(Ok(*leases)),
        Message::Refuse { call, status: Status::Busy(_) } => sent.push(Err(*call)),
        _ => {}
    });
    assert_eq!(sent, [Ok(range(0, 2)), Err(2)]);
    net.serve(0);
    net.disconnect(raw);
    net.end();
}

/// A release waits for other frames only until the engine sends what it has.
#[test]
fn leases_released_without_an_answer_go_alone() {
    for len in [1, 2, 6] {
        let released = sent(|host, arrived| (0..len).for_each(|number| host.proto.release(arrived.link, range(number, 1))));
        assert_eq!(released, (vec![range(0, len as u32)], vec![]));
    }
}

#[test]
fn lease_that_an_answer_releases_returns_with_it() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, TestCall { leases: vec![lease(1), lease(2)], ..call([0; 40]) });
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| {
        host.proto.release(arrived.link, LeaseRange { count: 1, ..arrived.leases });
        host.answer(arrived.request, b"one of them").unwrap();
    });
    net.advance(MOMENT);
    assert_eq!(net.hosts[0].body(op), b"one of them");
    assert_eq!(returned(&net, 0), [1]);
    net.with_host(1, |host| host.proto.release(arrived.link, LeaseRange { first: arrived.leases.first + 1, count: 1 }));
    net.advance(MOMENT);
    assert_eq!(returned(&net, 0), [1, 2]);
    net.end();
}

/// The answer to a call that its caller has given up is dropped; its leases return all the same.
#[test]
fn lease_that_a_late_answer_releases_returns() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, TestCall { leases: vec![lease(1)], ..call([0; 20]) });
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    // Both at the same time.
    net.with_host(1, |host| {
        host.proto.release(arrived.link, arrived.leases);
        host.answer(arrived.request, b"late").unwrap();
    });
    net.cancel(0, op);
    net.advance(MOMENT);
    assert_eq!(returned(&net, 0), [1]);
    net.end();
}

/// A peer may claim to release what it does not have.
#[test]
fn answer_that_releases_what_its_sender_does_not_have_releases_nothing_else() {
    let mut net = Net::new(2);
    let held = send_bulks(&mut net, 0, 1, &[1, 2]);
    let raw = net.raw_peer(0, 7);
    for first in [0, held.leases.first, u64::MAX] {
        for count in [1, 2, u32::MAX] {
            let released = LeaseRange { first, count };
            let (result, shape, leases) = (0, BorrowedBytes(b""), LeaseRange::default());
            net.send_message(raw, &Message::Response { call: 99, result, shape, leases, released, size: 0 }, b"");
        }
    }
    assert!(!net.is_shut(raw) && returned(&net, 0).is_empty());
    release(&mut net, 1, &held);
    assert_eq!(returned(&net, 0), [1, 2]);
    net.disconnect(raw);
    net.end();
}

/// A peer that holds a bulk is notified of the revocation, so that it drops copies of the content.
#[test]
fn holders_of_revoked_memory_are_notified() {
    let mut net = Net::new(3);
    net.expose(0, TOKEN, vec![1; 10], true, true);
    net.expose(0, TOKEN + 1, vec![1; 10], true, true);
    let held = send_bulks(&mut net, 0, 1, &[1]);
    let no_more = send_bulks(&mut net, 0, 2, &[2]);
    release(&mut net, 2, &no_more);
    net.revoke(0, TOKEN + 1);
    net.advance(MOMENT);
    assert!(net.hosts[1].stale.is_empty(), "other memory was revoked");
    net.revoke(0, TOKEN);
    net.advance(MOMENT);
    assert_eq!(net.hosts[1].stale, [TOKEN]);
    assert!(net.hosts[2].stale.is_empty(), "it holds no lease");
    release(&mut net, 1, &held);
    net.end();
}

/// A peer that has forwarded a bulk forwards the notification.
#[test]
fn revocation_reaches_peers_that_were_forwarded_the_bulk() {
    let mut net = Net::new(3);
    net.expose(0, TOKEN, vec![1; 10], true, true);
    let first = send_bulks(&mut net, 0, 1, &[1]);
    let second = send_bulks(&mut net, 1, 2, &[2]);
    net.revoke(0, TOKEN);
    net.advance(MOMENT);
    assert_eq!((&net.hosts[1].stale[..], &net.hosts[2].stale[..]), (&[TOKEN][..], &[TOKEN][..]));
    release(&mut net, 2, &second);
    release(&mut net, 1, &first);
    net.end();
}

/// A bulk that was forwarded in a circle: the notification goes round once, and stops.
#[test]
fn revocation_of_a_bulk_forwarded_in_a_circle_stops() {
    for hosts in [2, 3, 4] {
        let mut net = Net::new(hosts);
        net.expose(0, TOKEN, vec![1; 10], true, true);
        let mut held = Vec::new();
        for from in 0..hosts {
            let to = (from + 1) % hosts;
            held.push((to, send_bulks(&mut net, from, to, &[from as u32])));
        }
        // Also back and forth between the last two hosts.
        held.push((hosts - 2, send_bulks(&mut net, hosts - 1, hosts - 2, &[77])));
        net.revoke(0, TOKEN);
        net.advance(Duration::from_secs(1));
        for (number, host) in net.hosts.iter().enumerate().skip(1) {
            assert!(host.stale.contains(&TOKEN), "host {number} was not notified");
            assert!(host.stale.len() <= 3, "host {number} was notified {} times", host.stale.len());
        }
        for (host, arrived) in held.into_iter().rev() {
            release(&mut net, host, &arrived);
        }
        net.end();
    }
}
