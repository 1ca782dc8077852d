//! Access control by token, mode, range and incarnation.

use std::time::Duration;

use super::env::{Mem, Random};
use super::host::{TestOutcome, assert_failed};
use super::net::{Net, call};
use super::{AccessPolicy, Failure, Mode, Remote, Status};

const TOKEN: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;

fn refused(net: &Net, op: u64) -> Status {
    match net.hosts[0].failure(op) {
        Failure::Refused(status) => status.clone(),
        other => panic!("{other:?}"),
    }
}

/// Only the exact token gives access: no neighbouring value, and no permutation of its bytes.
#[test]
fn guessed_token_is_denied() {
    let mut net = Net::new(2);
    let far = net.expose(1, TOKEN, vec![1; 100], true, true);
    let mut random = Random(5);
    let mut guesses = vec![0, u128::MAX, TOKEN + 1, TOKEN - 1, TOKEN.swap_bytes(), TOKEN >> 64, TOKEN << 64];
    guesses.extend((0..128).map(|bit| TOKEN ^ (1 << bit)));
    guesses.extend((0..50).map(|_| u128::from(random.next()) << 64 | u128::from(random.next())));
    for guess in guesses {
        for pull in [true, false] {
            let near = Mem::new(vec![2; 100]);
            let op = net.transfer(0, 1, pull, (guess, 0), &near);
            net.settle();
            assert!(matches!(refused(&net, op), Status::AccessDenied(_)));
            assert_eq!(near.bytes(), [2; 100]);
        }
    }
    assert_eq!(far.bytes(), [1; 100]);
    net.revoke(1, TOKEN);
    net.end();
}

#[test]
fn access_other_than_the_mode_is_denied() {
    for (read, write) in [(true, false), (false, true), (false, false), (true, true)] {
        let mut net = Net::new(2);
        let far = net.expose(1, TOKEN, vec![1; 500_000], read, write);
        let near = Mem::new(vec![2; 500_000]);
        let pull = net.pull(0, 1, TOKEN, 0, &near);
        net.settle();
        let push = net.push(0, 1, TOKEN, 0, &Mem::new(vec![3; 500_000]));
        net.settle();
        for (op, allowed) in [(pull, read), (push, write)] {
            match net.hosts[0].outcome(op) {
                Some(TestOutcome::Transferred(500_000)) => assert!(allowed),
                Some(TestOutcome::Failed(Failure::Refused(Status::AccessDenied(_)))) => assert!(!allowed),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(near.byte(0), if read { 1 } else { 2 });
        assert_eq!(far.byte(0), if write { 3 } else { 1 });
        net.revoke(1, TOKEN);
        net.end();
    }
}

/// Every range out of bounds, also if the sum of offset and length overflows.
#[test]
fn range_outside_of_the_memory_is_out_of_range() {
    let mut net = Net::new(2);
    let far = net.expose(1, TOKEN, vec![1; 100], true, true);
    let outside = [
        (0, 101),
        (1, 100),
        (100, 1),
        (101, 0),
        (50, 51),
        (u64::MAX, 1),
        (u64::MAX, 0),
        (u64::MAX - 49, 50),
        (u64::MAX - 49, 51),
        (1 << 63, 100),
        (1 << 32, 1),
    ];
    for (offset, len) in outside {
        for pull in [true, false] {
            let near = Mem::new(vec![2; len]);
            let op = net.transfer(0, 1, pull, (TOKEN, offset), &near);
            net.settle();
            let expected = Status::OutOfRange { offset, len: len as u64, size: 100 };
            assert_eq!(refused(&net, op), expected);
            assert_eq!(near.bytes(), vec![2; len]);
        }
    }
    for (offset, len) in [(0, 100), (100, 0), (0, 0), (99, 1)] {
        let op = net.pull(0, 1, TOKEN, offset, &Mem::new(vec![2; len]));
        net.settle();
        assert!(matches!(net.hosts[0].outcome(op), Some(TestOutcome::Transferred(count)) if *count == len));
    }
    assert_eq!(far.bytes(), [1; 100]);
    net.revoke(1, TOKEN);
    net.end();
}

/// The owner was replaced by another engine at its address, even if that exposes the same token.
#[test]
fn bulk_of_a_replaced_engine_fails_with_restarted() {
    let mut net = Net::new(2);
    net.hosts[1].echo = true;
    let op = net.call(0, 1, call("x"));
    net.settle();
    assert_eq!(net.hosts[0].body(op).len(), 1);
    let owner = net.hosts[1].incarnation;
    net.restart(1, true);
    net.settle();
    let far = net.expose(1, TOKEN, vec![1; 100], true, true);
    let peer = net.peer(0, 1);
    for pull in [true, false] {
        let near = Mem::new(vec![2; 100]);
        let op =
            net.transfer_to(0, pull, Remote { peer, owner, token: TOKEN, offset: 0, keys: None }, &near, Duration::from_secs(9));
        net.settle();
        assert_failed!(net.hosts[0], op, Failure::PeerRestarted);
        assert_eq!(near.bytes(), [2; 100]);
    }
    assert_eq!(far.bytes(), [1; 100]);
    net.revoke(1, TOKEN);
    net.end();
}

/// Access to revoked memory fails with `Revoked` while its token is remembered; the number of remembered tokens is bounded.
#[test]
fn revoked_tokens_are_remembered_up_to_a_bound() {
    let mut net = Net::new(2);
    for token in 0..9000 {
        net.expose(1, token, vec![1; 10], true, true);
        net.revoke(1, token);
    }
    for (token, remembered) in [(8999, true), (4904, true), (0, false)] {
        let op = net.pull(0, 1, token, 0, &Mem::new(vec![2; 10]));
        net.settle();
        match refused(&net, op) {
            Status::Revoked => assert!(remembered),
            Status::AccessDenied(_) => assert!(!remembered),
            other => panic!("{other:?}"),
        }
    }
    net.end();
}

/// The owner's own accesses undergo the same checks.
#[test]
fn owner_access_against_mode_or_range_is_denied() {
    let mut net = Net::new(1);
    net.expose(0, TOKEN, vec![1; 100], true, false);
    let now = net.now;
    let proto = &mut net.hosts[0].proto;
    assert!(proto.access(TOKEN, 10, 90, false, now).is_ok());
    assert_eq!(proto.access(TOKEN, 10, 91, false, now).err(), Some(Status::OutOfRange { offset: 10, len: 91, size: 100 }));
    assert!(matches!(proto.access(TOKEN, 0, 1, true, now), Err(Status::AccessDenied(_))));
    net.revoke(0, TOKEN);
    assert_eq!(net.hosts[0].proto.access(TOKEN, 0, 1, false, now).err(), Some(Status::Revoked));
    net.end();
}

/// Memory for one peer is for that engine, not for others that know the token, nor for its successor.
#[test]
fn access_by_a_peer_other_than_the_chosen_one_is_denied() {
    let mut net = Net::new(3);
    for host in [0, 2] {
        let pull = net.pull(host, 1, TOKEN, 0, &Mem::new(vec![0; 10]));
        net.settle();
        assert!(net.hosts[host].outcome(pull).is_some(), "the hosts are connected");
    }
    let chosen = net.peer(1, 0);
    let memory = Mem::new(vec![1; 500_000]);
    net.with_host(1, |host| {
        host.proto.expose(
            TOKEN,
            memory.clone(),
            Mode { read: true, write: true },
            &AccessPolicy { only: Some(chosen), ..AccessPolicy::default() },
        )
    });
    for (host, allowed) in [(0, true), (2, false)] {
        for pull in [true, false] {
            let near = Mem::new(vec![1; 500_000]);
            let op = net.transfer(host, 1, pull, (TOKEN, 0), &near);
            net.settle();
            match net.hosts[host].outcome(op) {
                Some(TestOutcome::Transferred(500_000)) => assert!(allowed),
                Some(TestOutcome::Failed(Failure::Refused(Status::AccessDenied(_)))) => assert!(!allowed),
                other => panic!("{other:?}"),
            }
        }
    }
    net.hosts[0].echo = true;
    net.restart(0, true);
    net.settle();
    // The successor has the same address and peer id, but another incarnation.
    net.call(1, 0, call("connects"));
    net.settle();
    assert_eq!(net.peer(1, 0), chosen);
    let owner = net.hosts[1].incarnation;
    let peer = net.hosts[0].proto.lookup_incarnation(owner).expect("the owner has connected").id;
    let remote = Remote { peer, owner, token: TOKEN, offset: 0, keys: None };
    let op = net.transfer_to(0, true, remote, &Mem::new(vec![0; 10]), Duration::from_secs(5));
    net.settle();
    assert!(matches!(refused(&net, op), Status::AccessDenied(_)));
    net.with_host(1, |host| host.proto.revoke(TOKEN));
    net.end();
}
