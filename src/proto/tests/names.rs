//! Names travel once a connection, and so do the shapes of types that were checked.

use std::time::Duration;

use super::env::TestEnv;
use super::host::{Host, served};
use super::net::{Call, Net, call};
use super::{CallSpec, Content, Rejected};

const MOMENT: Duration = Duration::from_millis(1);

/// Bytes that a call puts on the wire.
fn cost(net: &mut Net, what: Call) -> usize {
    net.call(0, 1, what);
    let wire = net.wires.len() - 1;
    let Some((_, super::wires::Item::Packet(packet))) = net.wires[wire].ends[0].outgoing.back_mut() else {
        panic!("nothing is sent")
    };
    let cost = packet.rest();
    net.settle();
    cost
}

fn named(name: &'static str, procedure: u32) -> Call {
    Call { name, procedure, ..call("x") }
}

#[test]
fn a_name_is_sent_once() {
    let long = "a-procedure-with-a-long-and-telling-name";
    let mut net = Net::pair();
    net.call(0, 1, call("opens the connection"));
    net.settle();
    let first = cost(&mut net, named(long, 2));
    let second = cost(&mut net, named(long, 2));
    assert!(first > long.len() && second < 40, "{first} bytes, then {second}");
    net.end();
}

/// A connection that is made anew knows no names.
#[test]
fn a_new_connection_is_told_the_names_again() {
    let mut net = Net::pair();
    net.call(0, 1, named("again", 5));
    net.settle();
    let wire = net.wire(0, 1);
    net.cut(wire);
    let op = net.call(0, 1, named("again", 5));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"x"));
    assert_eq!(net.hosts[0].shapes_asked, 2, "and their types are checked again");
    net.end();
}

#[test]
fn many_names_keep_apart() {
    let names = ["a", "b", "", "ü", "a b", "c"];
    let mut net = Net::new(2);
    for (n, name) in names.iter().enumerate().chain(names.iter().enumerate().rev()) {
        net.call(0, 1, named(name, n as u32));
        net.advance(MOMENT);
        let arrived = net.hosts[1].take();
        assert_eq!(arrived.name, *name);
        net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
    }
    net.end();
}

fn spec(host: &mut Host, shape: Option<(&[u8], bool)>, deadline: std::time::Instant) -> CallSpec<'static, TestEnv> {
    let (address, op) = (host.address.clone(), 1000 + host.begun.len() as u64);
    host.begun.push(op);
    let tag = host.tags.values().find(|tag| tag.address != address).expect("the peer was looked up");
    let content = Content::Small(b"x");
    CallSpec {
        peer: tag.id,
        procedure: 1,
        name: "echo",
        provider: 0,
        content,
        shape: shape.map(|(shape, whole)| (shape.to_vec(), whole)),
        leases: Vec::new(),
        deadline,
        timed: true,
        one_way: false,
        waiter: op,
    }
}

/// The peer checks the type of the arguments until it has seen the whole of it.
#[test]
fn shapes_are_asked_for_until_one_was_whole() {
    let mut net = Net::new(2);
    net.peer(0, 1);
    let (now, until) = (net.now, net.now + Duration::from_secs(9));
    // Each call that has to be made again is one that was begun for nothing.
    let make = |net: &mut Net, shape: Option<(&'static [u8], bool)>| {
        let made = net.with_host(0, |host| {
            let spec = spec(host, shape, until);
            match host.proto.call(spec, now) {
                Ok(_) => true,
                Err(Rejected::NeedShape(spec)) => {
                    assert_eq!((spec.procedure, spec.name, &spec.shape), (1, "echo", &None));
                    host.begun.pop();
                    false
                }
                Err(Rejected::NoCredit(_)) => panic!("it is not one-way"),
                Err(Rejected::Failed(failure)) => panic!("{failure:?}"),
            }
        });
        net.advance(MOMENT);
        made
    };
    assert!(!make(&mut net, None), "the type is not known");
    assert!(make(&mut net, Some((b"part", false))));
    assert!(!make(&mut net, None), "only a part of it is known");
    assert!(make(&mut net, Some((b"whole", true))));
    assert!(make(&mut net, None), "all of it is known");
    assert!(make(&mut net, Some((b"whole", true))));
    let shapes: Vec<_> = net.hosts[1].inbox.iter().map(|arrived| arrived.shape.clone()).collect();
    assert_eq!(shapes, [&b"part"[..], b"whole", b"", b""]);
    while !net.hosts[1].inbox.is_empty() {
        net.serve(1);
    }
    net.end();
}

/// The caller asks for the shape of the result until it has checked the whole type.
#[test]
fn the_shape_of_a_result_is_wanted_until_it_was_checked() {
    let mut net = Net::new(2);
    for (round, wanted) in [true, true, false].into_iter().enumerate() {
        let op = net.call(0, 1, call("x"));
        net.advance(MOMENT);
        let arrived = net.hosts[1].take();
        assert_eq!(arrived.want_shape, wanted, "round {round}");
        net.with_host(1, |host| host.answer(arrived.request, b"").unwrap());
        net.advance(MOMENT);
        let Some(super::host::Outcome::Answered { link, .. }) = net.hosts[0].outcome(op) else { panic!("not answered") };
        let link = *link;
        if round == 1 {
            net.with_host(0, |host| host.proto.result_checked(link, 1));
        }
    }
    net.end();
}
