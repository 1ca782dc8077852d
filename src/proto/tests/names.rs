//! Names and the shapes of types travel once a connection.

use std::time::Duration;

use super::host::{assert_failed, served};
use super::net::{Net, TestCall, call, config, limits};
use super::wire::MAX_NAME;
use super::{Config, Failure, PeerLimits, Status};

const MOMENT: Duration = Duration::from_millis(1);

/// Bytes that a call puts on the wire.
fn cost(net: &mut Net, what: TestCall) -> usize {
    let cost = cost_of(net, what);
    net.settle();
    cost
}

/// The same, where the call is not answered yet.
fn cost_of(net: &mut Net, what: TestCall) -> usize {
    net.call(0, 1, what);
    let wire = net.wires.len() - 1;
    let Some((_, super::wires::WireItem::Packet(packet))) = net.wires[wire].ends[0].outgoing.back_mut() else {
        panic!("nothing is sent")
    };
    let cost = packet.rest();
    net.advance(MOMENT);
    cost
}

fn named(name: &'static str, procedure: u32) -> TestCall {
    TestCall { name, procedure, ..call("x") }
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

/// What a call carries of its type: all of it once a connection, also when the call came to nothing.
fn shapes(net: &mut Net) -> Vec<(String, Vec<u8>)> {
    net.hosts[1].inbox.iter().map(|arrived| (arrived.name.clone(), arrived.shape.clone())).collect()
}

#[test]
fn a_declaration_is_sent_once_and_holds_for_all() {
    let mut net = Net::new(2);
    let typed = |procedure, shape| TestCall { procedure, shape, ..call("x") };
    net.call(0, 1, typed(1, b"a long shape of some type"));
    net.advance(MOMENT);
    let second = cost_of(&mut net, typed(1, b"a long shape of some type"));
    let grown = cost_of(&mut net, typed(2, b"a longer shape, of more of the type"));
    let again = cost_of(&mut net, typed(2, b"a longer shape, of more of the type"));
    assert!(second < 40 && again < 40 && grown > 60, "{second}, {grown} and {again} bytes");
    let known = [&b"a long shape of some type"[..], b"a longer shape, of more of the type"].map(<[u8]>::to_vec);
    let found = shapes(&mut net);
    let expected: Vec<_> = [0, 0, 1, 1].map(|n: usize| ("echo".to_owned(), known[n].clone())).into();
    assert_eq!(found, expected);
    answer_all(&mut net);
    net.end();
}

/// A number that a refused request has declared stands for the same in the next one.
#[test]
fn a_refused_request_declares() {
    let few = PeerLimits { peer_requests: 1, ..limits() };
    let mut net = Net::with(vec![(config(), true), (Config { limits: few, ..config() }, true)]);
    let first = net.call(0, 1, call("takes the place"));
    net.advance(MOMENT);
    let refused = net.call(0, 1, TestCall { procedure: 2, shape: b"other", ..call("x") });
    net.advance(MOMENT);
    assert_failed!(net.hosts[0], refused, Failure::Refused(Status::Busy(_)));
    answer_all(&mut net);
    net.call(0, 1, TestCall { procedure: 2, shape: b"other", ..call("x") });
    net.advance(MOMENT);
    assert_eq!(shapes(&mut net), [("echo".to_owned(), b"other".to_vec())]);
    assert!(net.hosts[0].is_done(first));
    answer_all(&mut net);
    net.end();
}

/// The number zero is declared with each message, and kept by no receiver.
#[test]
fn what_has_no_number_is_declared_each_time() {
    let mut net = Net::new(2);
    for shape in [&b"one"[..], b"two", b"one"] {
        net.call(0, 1, TestCall { procedure: 0, shape, ..call("x") });
        net.advance(MOMENT);
        assert_eq!(shapes(&mut net), [("echo".to_owned(), shape.to_vec())]);
        answer_all(&mut net);
    }
    net.end();
}

fn answer_all(net: &mut Net) {
    while !net.hosts[1].inbox.is_empty() {
        net.serve(1);
    }
    net.advance(MOMENT);
}

/// A name that no peer can define fails by itself: the connection goes on.
#[test]
fn a_name_that_is_too_long_is_not_sent() {
    let mut net = Net::pair();
    let first = net.call(0, 1, call("goes on"));
    let long: &'static str = Box::leak("n".repeat(MAX_NAME + 1).into_boxed_str());
    let refused = net.call(0, 1, named(long, 2));
    let longest = net.call(0, 1, named(&long[1..], 3));
    net.settle();
    assert_failed!(net.hosts[0], refused, Failure::TooLarge { size: 1025, limit: 1024 });
    for op in [first, longest] {
        assert!(matches!(net.hosts[0].outcome(op), Some(super::host::TestOutcome::Answered { .. })));
    }
    net.end();
}
