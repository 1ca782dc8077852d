//! Who holds a bulk, and what they are told.

use std::time::Duration;

use super::env::TestLease;
use super::host::ArrivedRequest;
use super::net::{Net, TestCall, call};
use super::{LeaseRange, OutgoingBody, Reply};

const MOMENT: Duration = Duration::from_millis(1);
const TOKEN: u128 = 0xbead;

fn ticket(number: u32) -> TestLease {
    TestLease { token: TOKEN, number }
}

/// Sends a call with these tickets, and has it answered; what the receiver holds from then on.
fn lend(net: &mut Net, from: usize, to: usize, numbers: &[u32]) -> ArrivedRequest {
    // Each bulk takes its place in the message.
    let body = vec![0; 20 * numbers.len()];
    net.call(from, to, TestCall { leases: numbers.iter().map(|n| ticket(*n)).collect(), ..call(body) });
    net.advance(MOMENT);
    let arrived = net.hosts[to].take();
    assert_eq!(arrived.leases.count as usize, numbers.len());
    net.with_host(to, |host| host.answer(arrived.request, b"").unwrap());
    net.advance(MOMENT);
    arrived
}

fn give_back(net: &mut Net, host: usize, arrived: &ArrivedRequest) {
    let (link, leases) = (arrived.link, arrived.leases);
    net.with_host(host, |host| host.proto.release(link, leases));
    net.advance(MOMENT);
}

fn returned(net: &Net, host: usize) -> Vec<u32> {
    let mut numbers: Vec<_> = net.hosts[host].unleased.iter().map(|ticket| ticket.number).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn what_is_given_back_comes_back() {
    let mut net = Net::new(2);
    let first = lend(&mut net, 0, 1, &[1, 2, 3]);
    let second = lend(&mut net, 0, 1, &[4]);
    assert!(returned(&net, 0).is_empty(), "an answer gives nothing back");
    give_back(&mut net, 1, &second);
    assert_eq!(returned(&net, 0), [4]);
    give_back(&mut net, 1, &first);
    assert_eq!(returned(&net, 0), [1, 2, 3, 4]);
    net.end();
}

/// In whatever portions and order the receiver lets go of them.
#[test]
fn they_are_given_back_one_by_one() {
    let mut net = Net::new(2);
    let arrived = lend(&mut net, 0, 1, &[1, 2, 3, 4, 5]);
    let first = arrived.leases.first;
    for (from, count, back) in [(1, 1, 1), (0, 1, 2), (3, 2, 4), (2, 1, 5)] {
        let part = LeaseRange { first: first + from, count };
        net.with_host(1, |host| host.proto.release(arrived.link, part));
        net.advance(MOMENT);
        assert_eq!(returned(&net, 0).len(), back);
    }
    net.end();
}

/// Those that are given back already are no reason to keep the others.
#[test]
fn they_are_given_back_again_with_others() {
    let mut net = Net::new(2);
    let arrived = lend(&mut net, 0, 1, &[1, 2, 3, 4]);
    let first = arrived.leases.first;
    for part in [LeaseRange { first, count: 2 }, LeaseRange { first, count: 4 }] {
        net.with_host(1, |host| host.proto.release(arrived.link, part));
    }
    net.advance(MOMENT);
    assert_eq!(returned(&net, 0), [1, 2, 3, 4]);
    net.end();
}

#[test]
fn a_lost_connection_gives_all_back() {
    let mut net = Net::new(2);
    let arrived = lend(&mut net, 0, 1, &[1, 2, 3]);
    let wire = net.wire(0, 1);
    net.cut(wire);
    assert_eq!(returned(&net, 0), [1, 2, 3]);
    // The receiver learns later than its own connection that it holds nothing: that harms nobody.
    give_back(&mut net, 1, &arrived);
    net.end();
}

/// The call that would have brought them there was never sent.
#[test]
fn what_never_left_comes_back() {
    let mut net = Net::new(2);
    net.hosts[1].listens = false;
    let op = net.call(0, 1, TestCall { leases: vec![ticket(1)], ..call("a bulk, or what stands for it") });
    net.settle();
    net.hosts[0].failure(op);
    assert_eq!(returned(&net, 0), [1]);
    net.end();
}

/// An answer brings bulks as a call does.
#[test]
fn leases_of_an_answer() {
    let mut net = Net::new(2);
    let op = net.call(0, 1, call("give me a bulk"));
    net.advance(MOMENT);
    let arrived = net.hosts[1].take();
    net.with_host(1, |host| {
        host.leased.push(ticket(1));
        let reply =
            Reply { content: OutgoingBody::Small(b"here is a bulk of mine"), result: 0, shape: b"r", leases: vec![ticket(1)] };
        host.proto.respond(arrived.request, Ok(reply)).unwrap();
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

/// Whoever holds a bulk of memory that is taken back is told: copies of its content are stale.
#[test]
fn holders_are_told_that_memory_was_taken_back() {
    let mut net = Net::new(3);
    net.expose(0, TOKEN, vec![1; 10], true, true);
    net.expose(0, TOKEN + 1, vec![1; 10], true, true);
    let held = lend(&mut net, 0, 1, &[1]);
    let no_more = lend(&mut net, 0, 2, &[2]);
    give_back(&mut net, 2, &no_more);
    net.revoke(0, TOKEN + 1);
    net.advance(MOMENT);
    assert!(net.hosts[1].stale.is_empty(), "that was other memory");
    net.revoke(0, TOKEN);
    net.advance(MOMENT);
    assert_eq!(net.hosts[1].stale, [TOKEN]);
    assert!(net.hosts[2].stale.is_empty(), "it holds none");
    give_back(&mut net, 1, &held);
    net.end();
}

/// Who has passed a bulk on passes the news on.
#[test]
fn the_news_goes_on_to_those_who_were_forwarded_the_bulk() {
    let mut net = Net::new(3);
    net.expose(0, TOKEN, vec![1; 10], true, true);
    let first = lend(&mut net, 0, 1, &[1]);
    let second = lend(&mut net, 1, 2, &[2]);
    net.revoke(0, TOKEN);
    net.advance(MOMENT);
    assert_eq!((&net.hosts[1].stale[..], &net.hosts[2].stale[..]), (&[TOKEN][..], &[TOKEN][..]));
    give_back(&mut net, 2, &second);
    give_back(&mut net, 1, &first);
    net.end();
}

/// A bulk that went round in a circle: the news goes round once, and then there is silence.
#[test]
fn news_does_not_go_in_circles() {
    for hosts in [2, 3, 4] {
        let mut net = Net::new(hosts);
        net.expose(0, TOKEN, vec![1; 10], true, true);
        let mut held = Vec::new();
        for from in 0..hosts {
            let to = (from + 1) % hosts;
            held.push((to, lend(&mut net, from, to, &[from as u32])));
        }
        // And back and forth between the last two.
        held.push((hosts - 2, lend(&mut net, hosts - 1, hosts - 2, &[77])));
        net.revoke(0, TOKEN);
        net.advance(Duration::from_secs(1));
        for (number, host) in net.hosts.iter().enumerate().skip(1) {
            assert!(host.stale.contains(&TOKEN), "host {number} was not told");
            assert!(host.stale.len() <= 3, "host {number} was told {} times", host.stale.len());
        }
        for (host, arrived) in held.into_iter().rev() {
            give_back(&mut net, host, &arrived);
        }
        net.end();
    }
}
