//! Frames that are sent while the protocol is locked.

use std::collections::VecDeque;
use std::time::Duration;

use super::env::pattern;
use super::host::{Host, served};
use super::net::{Net, call};
use super::wire::Message;
use super::{Injected, MAX_INJECTED_LINKS, MayWait};

/// An open link between two hosts, both ends of which can send a few bytes at once.
fn pair() -> Net {
    let mut net = Net::pair();
    net.settings.injects = true;
    net.call(0, 1, call("first"));
    net.settle();
    net
}

/// A host with open links to so many others, which can send a few bytes at once.
fn star(peers: usize) -> Net {
    let mut net = Net::new(1 + peers);
    net.settings.injects = true;
    for peer in 1..=peers {
        net.hosts[peer].echo = true;
        net.call(0, peer, call("first"));
    }
    net.settle();
    net
}

fn transmits(net: &Net) -> usize {
    net.hosts.iter().map(|host| host.transmits).sum()
}

/// Makes a call with so many bytes; returns how many transmits of both sides it takes.
fn transmits_of_call(net: &mut Net, len: usize) -> usize {
    let (before, body) = (transmits(net), pattern(7, len));
    let op = net.call(0, 1, call(body.clone()));
    net.settle();
    assert!(net.hosts[0].body(op) == served(&body));
    transmits(net) - before
}

#[test]
fn small_calls_and_answers_are_sent_at_once() {
    let mut net = pair();
    assert_eq!(transmits_of_call(&mut net, 10), 0);
    let traffic = |net: &Net, host: usize| {
        let link = net.hosts[host].proto.links.values().next().unwrap();
        (link.traffic.sent_bytes, link.traffic.received_bytes)
    };
    let ((sent, received), far) = (traffic(&net, 0), traffic(&net, 1));
    assert_eq!((received, sent), far, "all that is sent is counted");
    assert!(net.hosts.iter().all(|host| host.woken == 0));
    net.end();
}

/// The time for which the protocol is locked has a bound.
#[test]
fn large_calls_and_answers_are_transmitted() {
    let mut net = pair();
    assert_eq!(transmits_of_call(&mut net, 5000), 2);
    net.end();
}

#[test]
fn what_the_transport_does_not_take_is_transmitted() {
    let mut net = pair();
    net.hosts[0].carriers.values().for_each(|carrier| carrier.says.set(Injected::No));
    assert_eq!(transmits_of_call(&mut net, 10), 1);
    net.end();
}

#[test]
fn peer_that_sleeps_is_woken() {
    let mut net = pair();
    net.hosts[0].carriers.values().for_each(|carrier| carrier.says.set(Injected::PeerSleeps));
    assert_eq!(transmits_of_call(&mut net, 10), 0);
    assert_eq!((net.hosts[0].woken, net.hosts[1].woken), (1, 0));
    net.end();
}

/// An engine with many peers does not lock its protocol until it has sent to all of them.
#[test]
fn few_links_send_at_once_in_one_step() {
    const PEERS: usize = 20;
    let mut net = star(PEERS);
    let before = transmits(&net);
    // One step with frames for each link: they are polled together.
    let now = net.now;
    net.with_host(0, |host| {
        let links: Vec<_> = host.proto.links.keys().collect();
        for link in links {
            host.proto.links[link].queue_control(&Message::Ping);
            host.proto.mark_ready(link);
            host.proto.handle_heard(link, now);
        }
    });
    assert_eq!(transmits(&net) - before, PEERS - MAX_INJECTED_LINKS);
    net.settle();
    net.end();
}

/// Answers of a batch wait for others where to send takes a system call, and only there.
#[test]
fn what_can_be_injected_leaves_before_the_rest() {
    let mut net = Net::new(3);
    for peer in [1, 2] {
        net.settings.injects = peer == 1;
        net.hosts[peer].echo = true;
        net.call(0, peer, call("first"));
        net.settle();
    }
    let links: Vec<_> = net.hosts[0].proto.links.keys().collect();
    let injects = |net: &Net, link| net.hosts[0].carriers.contains_key(&link);
    assert_eq!(links.iter().filter(|link| injects(&net, **link)).count(), 1);
    let before = net.hosts[0].transmits;
    let mut outputs = VecDeque::new();
    for _ in 0..3 {
        let proto = &mut net.hosts[0].proto;
        for link in &links {
            proto.links[*link].queue_control(&Message::Ping);
            proto.mark_ready(*link);
        }
        assert!(!proto.inject_ready(&mut outputs) && outputs.is_empty());
        for link in &links {
            assert_eq!(net.hosts[0].proto.links[*link].wants_to_send(), !injects(&net, *link));
        }
    }
    let says = |host: &Host, says| host.carriers.values().for_each(|carrier| carrier.says.set(says));
    let host = &mut net.hosts[0];
    says(host, Injected::No);
    for link in &links {
        host.proto.links[*link].queue_control(&Message::Ping);
        host.proto.mark_ready(*link);
    }
    assert!(!host.proto.inject_ready(&mut outputs) && outputs.is_empty());
    assert!(links.iter().all(|link| host.proto.links[*link].wants_to_send()), "what is refused waits for the rest");
    says(host, Injected::Yes);
    net.pump(0);
    assert_eq!(net.hosts[0].transmits - before, 1, "the rest leaves together");
    net.settle();
    net.end();
}

#[test]
fn few_links_inject_in_one_step_and_the_others_in_the_next() {
    const PEERS: usize = 2 * MAX_INJECTED_LINKS + 1;
    let mut net = star(PEERS);
    let (before, proto) = (transmits(&net), &mut net.hosts[0].proto);
    let links: Vec<_> = proto.links.keys().collect();
    for link in &links {
        proto.links[*link].queue_control(&Message::Ping);
        proto.mark_ready(*link);
    }
    let mut outputs = VecDeque::new();
    for left in [PEERS - MAX_INJECTED_LINKS, 1, 0] {
        assert_eq!(proto.inject_ready(&mut outputs), left == 0);
        assert_eq!(links.iter().filter(|link| proto.links[**link].wants_to_send()).count(), left);
    }
    net.settle();
    assert_eq!(transmits(&net), before);
    net.end();
}

/// What is held for the peer counts until it is sent, and no longer; calls that wait for more are few again after they were sent.
#[test]
fn what_is_sent_at_once_is_not_held_any_more() {
    let mut net = pair();
    let link = net.hosts[1].proto.links.keys().next().unwrap();
    let before = net.hosts[1].proto.bytes;
    {
        let host = &mut net.hosts[1];
        host.proto.links[link].account.answers = 1 << 20;
        host.proto.recount(link);
        assert!(host.proto.bytes > before);
        host.proto.links[link].queue_control(&Message::Ping);
        host.proto.mark_ready(link);
    }
    net.pump(1);
    assert_eq!(net.hosts[1].proto.bytes, before);
    net.settle();

    // Started calls wait until half as many wait as are in progress: each time anew.
    net.hosts[1].echo = false;
    for _ in 0..20 {
        net.call(0, 1, call("x"));
    }
    let link = net.hosts[0].proto.links.values_mut().next().unwrap();
    assert_eq!(link.may_wait(0), MayWait::ForMore, "nothing waits, and 20 calls are in progress");
    net.advance(Duration::from_millis(1));
    net.settle_until_served(1);
    net.end();
}

/// Pushes that are started wait for others where their bytes can leave together, and are short.
#[test]
fn short_pushes_wait_where_payloads_leave_together() {
    const LONG: usize = (64 << 10) + 1;
    for (gathers, len, waits) in [(true, 100, true), (true, LONG - 1, true), (false, 100, false), (true, LONG, false)] {
        let mut net = pair();
        net.expose(1, 5, vec![0; LONG], true, true);
        net.hosts[1].echo = false;
        for _ in 0..20 {
            net.call(0, 1, call("x"));
        }
        let (now, peer, owner) = (net.now, net.peer(0, 1), net.hosts[1].incarnation);
        net.with_host(0, |host| {
            let (id, carrier) = host.carriers.iter().next().unwrap();
            let carrier = super::env::TestCarrier { gathers, ..carrier.clone() };
            host.proto.set_carrier(*id, carrier);
            let remote = super::Remote { peer, owner, token: 5, offset: 0, keys: None };
            let source = super::env::Mem::new(pattern(1, len));
            host.begun.push(1 << 40);
            host.proto.transfer(false, remote, source, Some(now + Duration::from_secs(30)), 1 << 40, now).unwrap();
            assert_eq!(host.proto.may_send_later() == MayWait::ForMore, waits, "{gathers}, {len} bytes");
        });
        net.advance(Duration::from_millis(1));
        net.settle_until_served(1);
        net.revoke(1, 5);
        net.end();
    }
}

/// A frame does not overtake the chunks of a payload, nor cut one in two.
#[test]
fn calls_beside_a_payload_are_transmitted() {
    let mut net = pair();
    net.settings.report_late = true;
    let memory = net.expose(1, 5, pattern(3, 1 << 20), true, false);
    let local = super::env::Mem::new(vec![0; 1 << 20]);
    let pull = net.pull(0, 1, 5, 0, &local);
    let calls: Vec<_> = (0..20u8).map(|number| net.call(0, 1, call([number]))).collect();
    net.settle();
    for (number, op) in calls.into_iter().enumerate() {
        assert_eq!(net.hosts[0].body(op), served(&[number as u8]));
    }
    assert!(net.hosts[0].is_done(pull));
    assert!(local.bytes() == memory.bytes());
    net.revoke(1, 5);
    net.end();
}

/// Where to send takes a system call, an answer may wait for the next poll of the driver while the peer waits for more than would.
#[test]
fn answers_wait_for_a_poll_while_many_are_owed_where_sends_take_system_calls() {
    for takes_system_calls in [false, true] {
        let mut net = pair();
        let (id, carrier) = net.hosts[1].carriers.iter().next().unwrap();
        let (id, carrier) = (*id, super::env::TestCarrier { takes_system_calls, ..carrier.clone() });
        net.with_host(1, |host| host.proto.set_carrier(id, carrier));
        net.hosts[1].echo = false;
        let calls: Vec<_> = (0..12).map(|_| net.call(0, 1, call("x"))).collect();
        net.advance(Duration::from_millis(1));
        // Eleven are unanswered behind the first. Those that wait are sent when they are half as many, and by fours none waits.
        let waits = [true, true, true, false, true, true, false, true, false, false, false, false];
        for (number, waits) in waits.into_iter().enumerate() {
            let host = &mut net.hosts[1];
            let request = host.take().request;
            host.answer(request, b"y").unwrap();
            let expected = if takes_system_calls && waits { MayWait::ForNextPoll } else { MayWait::No };
            assert_eq!(host.proto.may_send_later(), expected, "answer {number}, system calls: {takes_system_calls}");
            if !waits {
                net.pump(1);
            }
        }
        net.settle();
        assert!(calls.into_iter().all(|call| net.hosts[0].is_done(call)));
        net.end();
    }
}

/// Where to send takes a system call, a call may wait for the next poll of the driver though few are in progress.
#[test]
fn few_calls_wait_for_a_poll_where_sends_take_system_calls() {
    for (takes_system_calls, expected) in [(false, MayWait::No), (true, MayWait::ForNextPoll)] {
        let mut net = pair();
        let (id, carrier) = net.hosts[0].carriers.iter().next().unwrap();
        let (id, carrier) = (*id, super::env::TestCarrier { takes_system_calls, ..carrier.clone() });
        net.with_host(0, |host| host.proto.set_carrier(id, carrier));
        net.hosts[1].echo = false;
        for expected in [expected, expected, expected, MayWait::ForMore] {
            net.call(0, 1, call("x"));
            assert_eq!(net.hosts[0].proto.may_send_later(), expected, "system calls: {takes_system_calls}");
        }
        net.advance(Duration::from_millis(1));
        net.settle_until_served(1);
        net.end();
    }
}
