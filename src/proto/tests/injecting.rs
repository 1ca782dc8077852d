//! Frames that are sent while the protocol is locked.

use super::Injected;
use super::env::pattern;
use super::host::served;
use super::net::{Net, call};

/// An open link between two hosts, both ends of which can send a few bytes at once.
fn pair() -> Net {
    let mut net = Net::pair();
    net.settings.injects = true;
    net.call(0, 1, call("first"));
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
    assert!(net.hosts.iter().all(|host| host.woken.is_empty()));
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
    assert_eq!((net.hosts[0].woken.len(), net.hosts[1].woken.len()), (1, 0));
    net.end();
}

/// A frame does not overtake what was queued before it, and a payload is not cut in two.
#[test]
fn calls_beside_a_transmit_are_sent_behind_it() {
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
