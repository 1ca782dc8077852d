//! Refusals of accesses: their counts, and their log lines.

use std::time::Duration;

use super::env::{Mem, Random};
use super::net::Net;
use super::raw::frame;
use super::refusals::{Cause, Refusals};
use super::wire::{Message, Range};
use super::{AccessPolicy, Log, Mode};

const TOKEN: u128 = 0xfeed;

/// The fields of a logged refusal: cause, peer, operation, and count.
fn refusal(line: &Log) -> (&Cause, String, &str, u64) {
    match line {
        Log::Refused { peer, what, cause, count } => (cause, peer.to_string(), what, *count),
        other => panic!("{other:?}"),
    }
}

/// Each refusal is counted once, under its cause.
#[test]
fn each_refusal_is_counted_under_its_cause() {
    let mut net = Net::new(2);
    let mut expected = Refusals::default();
    net.expose(1, TOKEN, vec![1; 100], false, false);
    net.expose(1, TOKEN + 1, vec![1; 100], true, true);
    net.revoke(1, TOKEN + 1);
    let open = Mode { read: true, write: true };
    net.expose_with_policy(1, TOKEN + 3, vec![1; 100], open, AccessPolicy { quota: Some(9), ..AccessPolicy::default() });
    let unconnected = Some(net.peer(1, 1));
    net.expose_with_policy(1, TOKEN + 4, vec![1; 100], open, AccessPolicy { only: unconnected, ..AccessPolicy::default() });
    net.expose_with_policy(1, TOKEN + 5, vec![1; 100], open, AccessPolicy { for_one_call: true, ..AccessPolicy::default() });
    net.expose_with_policy(1, TOKEN + 6, vec![1; 100], open, AccessPolicy { once: true, ..AccessPolicy::default() });
    net.expose_with_policy(1, TOKEN + 7, vec![1; 100], open, AccessPolicy { expires: Some(net.now), ..AccessPolicy::default() });
    for pull in [true, false] {
        for (token, len) in [(0, 1), (1, 1), (2, 1), (3, 101), (3, 10), (4, 1), (5, 1), (6, 0), (7, 1)] {
            let op = net.transfer(0, 1, pull, (TOKEN + token, 0), &Mem::new(vec![0; len]));
            net.settle();
            assert!(net.hosts[0].is_done(op));
        }
    }
    expected.mode = 2;
    expected.revoked = 2;
    expected.unknown_token = 2;
    expected.range = 2;
    expected.quota = 2;
    expected.other_peer = 2;
    expected.other_call = 2;
    expected.used_up = 1;
    expected.expired = 2;
    assert_eq!((net.hosts[1].proto.refusals(), expected.total()), (expected, 17));
    // For an engine that ran here before; and a shutdown request.
    let raw = net.raw_peer(1, 77);
    let range = Range { transfer: 1, owner: 1, token: TOKEN.to_le_bytes(), offset: 0, len: 1 };
    net.send_message(raw, &Message::Pull(range), b"");
    net.send_message(raw, &Message::Shutdown { call: 1 }, b"");
    expected.restarted = 1;
    expected.shutdown = 1;
    assert_eq!(net.hosts[1].proto.refusals(), expected);
    net.disconnect(raw);
    (0..8).for_each(|token| net.revoke(1, TOKEN + token));
    net.end();
}

/// Connections with random bytes are logged at powers of two.
#[test]
fn connections_with_foreign_bytes_are_logged_at_powers_of_two() {
    let mut net = Net::new(1);
    for _ in 0..1000 {
        let attacker = net.raw_dial(0);
        net.send_bytes(attacker, b"GET / HTTP/1.1\r\n\r\n".to_vec());
        assert!(net.is_shut(attacker));
    }
    let counts = net.hosts[0].log.iter().map(|line| match line {
        Log::LinkFailed { peer, failure, count } if peer.to_string().contains("10.0.9.9") && failure.contains("GET /") => *count,
        other => panic!("{other:?}"),
    });
    assert_eq!(counts.collect::<Vec<u64>>(), (0..10).map(|power| 1 << power).collect::<Vec<u64>>());
    net.end();
}

#[test]
fn guessed_tokens_are_counted_and_logged_at_powers_of_two() {
    const GUESSES: u64 = 10_000;
    let mut net = Net::new(1);
    let memory = net.expose(0, TOKEN, vec![1; 100], true, true);
    let raw = net.raw_peer(0, 7);
    let mut random = Random(3);
    let owner = net.hosts[0].incarnation;
    for transfer in 0..GUESSES / 100 {
        let mut bytes = Vec::new();
        for n in 0..100 {
            let token = (u128::from(random.next()) << 64 | u128::from(random.next())).to_le_bytes();
            let range = Range { transfer: 100 * transfer + n, owner, token, offset: 0, len: 4 };
            bytes.extend(frame(&if n % 2 == 0 { Message::Pull(range) } else { Message::Push(range) }, b""));
        }
        net.send_bytes(raw, bytes);
    }
    let refusals = net.hosts[0].proto.refusals();
    assert_eq!((refusals.unknown_token, refusals.total()), (GUESSES, GUESSES));
    let logged: Vec<u64> = net.hosts[0].log.iter().map(refusal).map(|(.., count)| count).collect();
    assert_eq!(logged, (0..14).map(|power| 1 << power).collect::<Vec<u64>>());
    for (cause, peer, what, _) in net.hosts[0].log.iter().map(refusal) {
        assert_eq!((cause, peer.starts_with("tcp://10.0.9.9:")), (&Cause::UnknownToken, true));
        assert!(what == "pull of 4 bytes at 0" || what == "push of 4 bytes at 0", "{what}");
    }
    assert_eq!(memory.bytes(), [1; 100]);
    net.advance(Duration::from_secs(1));
    net.disconnect(raw);
    net.revoke(0, TOKEN);
    net.end();
}
