//! Engines that claim the identity of others.

use super::host::served;
use super::net::{Net, call};

/// While a known engine is disconnected, an impostor claims its incarnation: a lookup does not lead to the impostor.
#[test]
fn impostor_of_a_disconnected_engine_is_not_found_by_its_incarnation() {
    let mut net = Net::pair();
    net.call(0, 1, call("connects"));
    net.settle();
    let incarnation = net.hosts[0].incarnation;
    let peer = net.hosts[1].proto.lookup_incarnation(incarnation).expect("it has been connected").id;
    let wire = net.wire(0, 1);
    net.cut(wire);
    let raw = net.raw_peer(1, incarnation);
    assert!(!net.is_shut(raw));
    let found = |net: &Net| net.hosts[1].proto.lookup_incarnation(incarnation).map(|tag| tag.id);
    assert_eq!(found(&net), Some(peer));
    assert!(net.hosts[1].proto.connection(peer).is_none());
    // It reconnects with its resumption token and keeps its identity, though the impostor is still connected.
    let op = net.call(0, 1, call("again"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"again"));
    assert_eq!(found(&net), Some(peer));
    assert!(net.hosts[1].proto.connection(peer).is_some());
    super::malformed::unharmed(net, raw);
}
