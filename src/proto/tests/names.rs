//! Declarations: names and shapes of types are sent once per connection.

use std::time::Duration;

use super::host::{assert_failed, served};
use super::net::{Net, TestCall, call, config, limits};
use super::wire::MAX_NAME;
use super::{Config, Failure, PeerLimits, Status};

const MOMENT: Duration = Duration::from_millis(1);

/// The bytes that a call puts on the wire.
fn cost(net: &mut Net, what: TestCall) -> usize {
    let cost = cost_of(net, what);
    net.settle();
    cost
}

/// The same, before the call is answered.
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

/// The frame of a call whose name and type the peer knows: 12 bytes of lengths and checksum, 44 of fields, and `"x"`.
const BARE: usize = 57;

#[test]
fn name_of_a_second_call_is_not_sent() {
    let long = "a-procedure-with-a-long-and-clear-name";
    let mut net = Net::pair();
    net.call(0, 1, call("opens the connection"));
    net.settle();
    let first = cost(&mut net, named(long, 2));
    let second = cost(&mut net, named(long, 2));
    assert!(first > BARE + long.len() && second == BARE, "{first} bytes, then {second}");
    net.end();
}

/// A new connection has no declarations.
#[test]
fn name_is_sent_again_on_a_new_connection() {
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
fn calls_of_many_names_arrive_with_their_own() {
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

/// Names and shapes of the requests that wait.
fn shapes(net: &mut Net) -> Vec<(String, Vec<u8>)> {
    net.hosts[1].inbox.iter().map(|arrived| (arrived.name.clone(), arrived.shape.clone())).collect()
}

#[test]
fn shape_of_a_second_call_is_not_sent() {
    let mut net = Net::new(2);
    let typed = |procedure, shape| TestCall { procedure, shape, ..call("x") };
    net.call(0, 1, typed(1, b"a long shape of some type"));
    net.advance(MOMENT);
    let second = cost_of(&mut net, typed(1, b"a long shape of some type"));
    let grown = cost_of(&mut net, typed(2, b"a longer shape, of more of the type"));
    let again = cost_of(&mut net, typed(2, b"a longer shape, of more of the type"));
    assert!(second == BARE && again == BARE && grown > BARE + 35, "{second}, {grown} and {again} bytes");
    let known = [&b"a long shape of some type"[..], b"a longer shape, of more of the type"].map(<[u8]>::to_vec);
    let found = shapes(&mut net);
    let expected: Vec<_> = [0, 0, 1, 1].map(|n: usize| ("echo".to_owned(), known[n].clone())).into();
    assert_eq!(found, expected);
    answer_all(&mut net);
    net.end();
}

/// A declaration in a refused request holds for the next one.
#[test]
fn declaration_in_a_refused_request_holds() {
    let few = PeerLimits { peer_requests: 1, ..limits() };
    let mut net = Net::with(vec![(config(), true), (Config { limits: few, ..config() }, true)]);
    let first = net.call(0, 1, call("uses the limit up"));
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

/// Number zero is declared with each message, and not kept by the receiver.
#[test]
fn number_zero_is_declared_with_each_call() {
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

/// A call with a name that is too long fails locally, and the connection stays open.
#[test]
fn name_beyond_the_limit_is_too_large() {
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
