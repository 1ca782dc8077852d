//! Engines that claim to be others.

use super::host::served;
use super::net::{Net, call};

/// One that was met is away, and somebody says that it is that one: whoever looks for the first is not led to the second.
#[test]
fn nobody_is_taken_for_one_who_is_away() {
    let mut net = Net::pair();
    net.call(0, 1, call("they meet"));
    net.settle();
    let incarnation = net.hosts[0].incarnation;
    let met = net.hosts[1].proto.lookup_incarnation(incarnation).expect("it has been met").id;
    let wire = net.wire(0, 1);
    net.cut(wire);
    let raw = net.raw_peer(1, incarnation);
    assert!(!net.is_shut(raw));
    let found = |net: &Net| net.hosts[1].proto.lookup_incarnation(incarnation).map(|tag| tag.id);
    assert_eq!(found(&net), Some(met));
    assert!(net.hosts[1].proto.connection(met).is_none());
    // It comes back, shows its ticket, and is who it was, while the other is still there.
    let op = net.call(0, 1, call("again"));
    net.settle();
    assert_eq!(net.hosts[0].body(op), served(b"again"));
    assert_eq!(found(&net), Some(met));
    assert!(net.hosts[1].proto.connection(met).is_some());
    super::malformed::unharmed(net, raw);
}
