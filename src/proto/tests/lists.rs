//! What large bodies end with: it is told with the call or the answer that it belongs to, and with no other one.

use super::env::{TestLease, lists, pattern};
use super::host::{EAGER, list_of};
use super::malformed::request;
use super::net::{Net, TestCall, call, config};
use super::raw::frame;
use super::wire::Message;
use super::{Config, TrailingList};

#[test]
fn list_is_told_with_its_call_and_with_its_answer() {
    let mut net = Net::new(2);
    net.echo_everywhere();
    net.call(0, 1, call("connects"));
    net.settle();
    for (len, one_way) in
        [(EAGER + 20, false), (300_000, false), (300_001, false), (400_000, true), (EAGER, false), (EAGER, true)]
    {
        lists();
        net.call(0, 1, TestCall { one_way, ..call(pattern(1, len)) });
        net.settle();
        let bodies = if len <= EAGER { 0 } else { 1 + usize::from(!one_way) };
        assert_eq!(lists(), vec![list_of(len); bodies], "{len} bytes, one-way: {one_way}");
    }
    net.end();
}

/// It is decoded again where the list is not taken: bulks can't be.
#[test]
fn no_list_is_told_with_bulks() {
    let mut net = Net::new(2);
    net.echo_everywhere();
    net.call(0, 1, call("connects"));
    net.settle();
    lists();
    let leases = vec![TestLease { token: 7, number: 1 }];
    net.call(0, 1, TestCall { leases, ..call(pattern(1, 300_000)) });
    net.settle();
    // Its answer has none.
    assert_eq!(lists(), [None, list_of(300_000)]);
    net.end();
}

#[test]
fn list_of_another_call_is_ignored() {
    let small = Config { max_message: 100_000, ..config() };
    let mut net = Net::with(vec![(small, true), (config(), true)]);
    net.hosts[0].echo = false;
    let raw = net.raw_peer(0, 1);
    let list = |head, width| TrailingList { head, width };
    let announce_as = |net: &mut Net, is_answer, call, TrailingList { head, width }| {
        net.send_bytes(raw, frame(&Message::List { call, is_answer, head, width }, b""));
    };
    let announce = |net: &mut Net, call, list| announce_as(net, false, call, list);
    lists();
    // A refused call takes none with it, and the next has another number.
    announce(&mut net, 1, list(2, 1));
    net.send_message(raw, &request(1, 200_000), b"");
    net.send_message(raw, &request(2, 50_000), b"");
    // The last one counts, whatever it says, and once.
    announce(&mut net, 3, list(2, 1));
    announce(&mut net, 3, list(u64::MAX, 255));
    net.send_message(raw, &request(3, 20_000), b"");
    net.send_message(raw, &request(4, 20_000), b"");
    announce(&mut net, 4, list(2, 1));
    net.send_message(raw, &request(5, 20_000), b"");
    // Calls of both sides may have the same number.
    announce_as(&mut net, true, 6, list(2, 1));
    net.send_message(raw, &request(6, 20_000), b"");
    assert_eq!(lists(), [None, Some(list(u64::MAX, 255)), None, None, None]);
    assert!(!net.is_shut(raw));
    net.disconnect(raw);
    net.settle();
    net.end();
}
