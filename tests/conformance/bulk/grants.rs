//! Memory exposed with a `Grant`: the owner enforces its restrictions on every transport.

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, Error, Grant, Request};

use crate::assert_error;
use crate::support::{BOUND, Net, Pair, all_are, end, eventually, pattern, travelled};

const LENGTHS: [usize; 4] = [0, 1, 3000, 300_000];

#[track_caller]
fn assert_denied<T: std::fmt::Debug>(result: calomel::Result<T>, why: &str) {
    let error = result.unwrap_err();
    assert!(!error.is_retryable() && !error.is_disconnected() && !error.is_timeout());
    match error {
        Error::AccessDenied { reason, .. } => assert!(reason.contains(why), "{reason}"),
        other => panic!("{other:?}"),
    }
}

/// The server's endpoint of the client.
fn meet(pair: &Pair) -> Endpoint {
    let met = Arc::new(Mutex::new(None));
    let seen = met.clone();
    let meet = move |request: &Request, (): ()| *seen.lock().unwrap() = Some(request.endpoint().clone());
    let registration = pair.server.define("meet", meet).unwrap();
    pair.client.procedure::<(), ()>("meet").on(&pair.to_server).call(&()).unwrap();
    registration.remove();
    met.lock().unwrap().take().unwrap()
}

fn empty_grant_restricts_nothing(net: &Net) {
    let pair = net.pair();
    for len in LENGTHS {
        let theirs = pair.server.expose_with(pattern(1, len), BulkMode::ReadWrite, &Grant::new()).unwrap();
        for _ in 0..3 {
            let mut copy = vec![0u8; len];
            assert_eq!(theirs.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap(), len);
            assert!(copy == pattern(1, len));
        }
        assert!(theirs.reclaim() == pattern(1, len));
    }
}

fn second_transfer_of_a_once_grant_is_denied(net: &Net) {
    let pair = net.pair();
    for len in LENGTHS {
        let theirs = pair.server.expose_with(pattern(1, len), BulkMode::ReadWrite, &Grant::new().once()).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let mut copy = vec![0u8; len];
        assert_eq!(remote.pull_into(&mut copy).unwrap(), len);
        assert!(copy == pattern(1, len));
        for _ in 0..2 {
            assert_denied(remote.pull_into(&mut copy), "used up");
            assert_denied(remote.push_from(&vec![9u8; len]), "used up");
            let (result, _) = remote.start_push_from(pair.client.expose(vec![9u8; len], BulkMode::ReadOnly).unwrap()).wait();
            assert_denied(result, "used up");
        }
        assert!(theirs.reclaim() == pattern(1, len));
    }
    assert_eq!(pair.server.refusals().used_up, 6 * LENGTHS.len() as u64);
    assert_eq!(pair.server.refusals().total(), pair.server.refusals().used_up);
}

fn concurrent_transfers_of_a_once_grant_succeed_once(net: &Net) {
    let pair = net.pair();
    for round in 0..20 {
        let theirs = pair.server.expose_with(pattern(round, 100_000), BulkMode::ReadOnly, &Grant::new().once()).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let local = || pair.client.expose(vec![0u8; 100_000], BulkMode::WriteOnly).unwrap();
        let transfers: Vec<_> = (0..8).map(|_| remote.start_pull_into(local())).collect();
        let mut moved = 0;
        for (result, local) in transfers.into_iter().map(|transfer| transfer.wait()) {
            match result {
                Ok(len) => {
                    moved += 1;
                    assert!(len == 100_000 && local.reclaim() == pattern(round, 100_000));
                }
                Err(error) => {
                    assert_denied(Err::<(), _>(error), "used up");
                    assert!(all_are(&local.reclaim(), 0));
                }
            }
        }
        assert_eq!(moved, 1);
    }
}

fn transfers_beyond_the_quota_are_denied(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose_with(pattern(1, 100_000), BulkMode::ReadWrite, &Grant::new().quota(250_000)).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut copy = vec![0u8; 100_000];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 100_000);
    assert_eq!(remote.push_from(&copy).unwrap(), 100_000);
    assert_denied(remote.pull_into(&mut copy[..50_001]), "50000 bytes left of the quota");
    assert_eq!(remote.pull_into(&mut copy[..50_000]).unwrap(), 50_000);
    assert_denied(remote.push_from(&[1u8; 1][..]), "0 bytes left of the quota");
    assert_eq!(remote.pull_into(&mut [0u8; 0][..]).unwrap(), 0);
    assert_eq!(pair.server.refusals().quota, 2);
    assert!(theirs.reclaim() == pattern(1, 100_000));
    let most = pair.server.expose_with(vec![1u8; 10], BulkMode::ReadOnly, &Grant::new().quota(u64::MAX)).unwrap();
    assert_eq!(most.bulk().on(&pair.to_server).pull_into(&mut copy[..10]).unwrap(), 10);
}

fn transfers_after_expiry_are_denied(net: &Net) {
    let pair = net.pair();
    for len in [1, 3000, 300_000] {
        let time = Duration::from_millis(50);
        let begin = Instant::now();
        let theirs = pair.server.expose_with(pattern(1, len), BulkMode::ReadWrite, &Grant::new().expires_after(time)).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let mut copy = vec![0u8; len];
        // Transfers succeed until the grant expires.
        let error = loop {
            match remote.pull_into(&mut copy) {
                Ok(moved) => assert_eq!(moved, len),
                Err(error) => break error,
            }
            assert!(begin.elapsed() < BOUND, "it does not expire");
        };
        assert!(begin.elapsed() >= time, "expired after {:?}", begin.elapsed());
        assert_error!(Err::<(), _>(error), Error::AccessDenied { .. } | Error::Revoked { .. });
        for _ in 0..3 {
            assert_denied(remote.pull_into(&mut copy), "expired");
            assert_denied(remote.push_from(&vec![9u8; len]), "expired");
        }
        // The owner can still access it.
        let mut ours = vec![0u8; len];
        theirs.read_at(0, &mut ours).unwrap();
        theirs.write_at(0, &vec![4u8; len]).unwrap();
        assert!(ours == pattern(1, len));
        let bulk = theirs.bulk();
        assert!(theirs.reclaim() == vec![4; len]);
        assert_error!(bulk.on(&pair.to_server).pull_into(&mut copy), Error::Revoked { .. });
    }
    let long = Grant::new().expires_after(Duration::MAX);
    let theirs = pair.server.expose_with(vec![1u8; 10], BulkMode::ReadOnly, &long).unwrap();
    assert_eq!(theirs.bulk().on(&pair.to_server).pull_into(&mut [0u8; 10][..]).unwrap(), 10);
}

/// Peers push and pull all the time, large memory and small; once the grant has expired, no peer accesses it, and peers get the
/// reason. The memory is from `engine.alloc`, which peers on this host have mapped.
fn expiry_ends_transfers_in_progress(net: &Net) {
    let pair = net.pair();
    for push in [true, false] {
        for len in [10_000, 8 << 20] {
            let mut buffer = pair.server.alloc(len);
            buffer.fill(1);
            let grant = Grant::new().expires_after(Duration::from_millis(30));
            let theirs = pair.server.expose_with(buffer, BulkMode::ReadWrite, &grant).unwrap();
            let remote = theirs.bulk().on(&pair.to_server);
            let mut local = vec![2u8; len];
            let begin = Instant::now();
            let error = loop {
                let result = if push { remote.push_from(&local) } else { remote.pull_into(&mut local) };
                if let Err(error) = result {
                    break error;
                }
                assert!(begin.elapsed() < BOUND, "it does not expire");
            };
            assert_error!(Err::<(), _>(error), Error::AccessDenied { .. } | Error::Revoked { .. });
            theirs.write_at(0, &vec![3u8; len]).unwrap();
            if push {
                assert_denied(remote.push_from(&local), "expired");
            } else {
                assert_denied(remote.pull_into(&mut local), "expired");
                assert!(!local.contains(&3));
            }
            assert!(all_are(&theirs.reclaim(), 3));
        }
    }
}

/// Defines `use`: pulls from a bulk, pushes the same bytes back, and keeps the bulk.
fn define_use(engine: &Engine) -> Arc<Mutex<Option<(Bulk, Endpoint)>>> {
    let kept = Arc::new(Mutex::new(None));
    let keep = kept.clone();
    engine
        .define("use", move |request: &Request, bulk: Bulk| -> Result<usize, String> {
            let remote = bulk.on(request.endpoint());
            let mut bytes = vec![0u8; bulk.len()];
            let moved = remote.pull_into(&mut bytes).map_err(|e| e.to_string())?;
            *keep.lock().unwrap() = Some((bulk.clone(), request.endpoint().clone()));
            Ok(moved + remote.push_from(&bytes).map_err(|e| e.to_string())?)
        })
        .unwrap();
    kept
}

fn transfers_after_the_one_call_are_denied(net: &Net) {
    let pair = net.pair();
    let kept = define_use(&pair.server);
    let use_it = pair.client.procedure::<Bulk, Result<usize, String>>("use");
    for len in LENGTHS {
        let ours = pair.client.expose_with(pattern(1, len), BulkMode::ReadWrite, &Grant::new().for_one_call()).unwrap();
        // The answer ends the permission.
        assert_eq!(use_it.on(&pair.to_server).call(&ours.bulk()).unwrap(), Ok(2 * len));
        let (bulk, owner) = kept.lock().unwrap().take().unwrap();
        assert_denied(bulk.on(&owner).pull_into(&mut vec![0u8; len]), "has ended");
        assert_denied(bulk.on(&owner).push_from(&vec![9u8; len]), "has ended");
        // Another call does not renew it.
        let again = use_it.on(&pair.to_server).call(&ours.bulk()).unwrap();
        assert!(again.is_err_and(|error| error.contains("has ended")));
        assert!(ours.reclaim() == pattern(1, len));
    }
    assert_eq!(pair.client.refusals().other_call, 3 * LENGTHS.len() as u64);
}

fn third_engine_is_denied_during_the_one_call(net: &Net) {
    // client -> server -> third: the server has access, the third engine has not.
    let pair = net.pair();
    let third = net.server();
    let to_third = pair.server.lookup(third.address()).unwrap();
    third
        .define("try", |request: &Request, bulk: Bulk| -> Result<usize, String> {
            let remote = bulk.origin(request.engine()).map_err(|e| e.to_string())?;
            remote.pull_into(&mut vec![0u8; bulk.len()]).map_err(|e| e.to_string())
        })
        .unwrap();
    pair.server
        .define("forward", move |request: &Request, bulk: Bulk| -> Result<Result<usize, String>, String> {
            let attempt = request.engine().procedure::<Bulk, Result<usize, String>>("try");
            let theirs = attempt.on(&to_third).call(&bulk).map_err(|e| e.to_string())?;
            bulk.on(request.endpoint()).pull_into(&mut vec![0u8; bulk.len()]).map_err(|e| e.to_string())?;
            Ok(theirs)
        })
        .unwrap();
    // The owner listens, so that the third engine can reach it.
    let owner = net.server();
    let to_server = owner.lookup(pair.server.address()).unwrap();
    let forward = owner.procedure::<Bulk, Result<Result<usize, String>, String>>("forward");
    for len in [100, 100_000] {
        let ours = owner.expose_read_only_with(pattern(1, len), &Grant::new().for_one_call()).unwrap();
        let theirs = forward.on(&to_server).call(&ours.bulk()).unwrap().unwrap();
        assert!(theirs.is_err_and(|error| error.contains("another call")));
    }
    assert_eq!(owner.refusals().other_call, 2);
}

fn cancelled_or_timed_out_call_ends_its_transfers(net: &Net) {
    let pair = net.pair();
    let (sender, receiver) = mpsc::channel();
    let (began, begun) = mpsc::channel();
    pair.server
        .define("push on", move |request: &Request, bulk: Bulk| {
            let remote = bulk.on(request.endpoint());
            let begin = Instant::now();
            let bytes = vec![2u8; bulk.len()];
            while begin.elapsed() < BOUND {
                if let Err(error) = remote.push_from(&bytes) {
                    let _ = sender.send(error);
                    return;
                }
                let _ = began.send(());
            }
        })
        .unwrap();
    let push = pair.client.procedure::<Bulk, ()>("push on");
    for len in [1000, 2 << 20] {
        for cancelled in [true, false] {
            let ours = pair.client.expose_with(vec![1u8; len], BulkMode::WriteOnly, &Grant::new().for_one_call()).unwrap();
            let timeout = if cancelled { BOUND } else { Duration::from_millis(200) };
            let pending = push.on(&pair.to_server).timeout(timeout).start(&ours.bulk()).unwrap();
            if cancelled {
                (0..3).for_each(|_| begun.recv_timeout(BOUND).unwrap());
                pending.cancel();
            }
            assert_error!(pending.wait(), Error::Cancelled { .. } | Error::Timeout { .. });
            ours.write_at(0, &vec![3u8; len]).unwrap();
            // The memory is still exposed, but only the owner accesses it.
            let error = receiver.recv_timeout(BOUND).unwrap();
            assert_error!(Err::<(), _>(error), Error::AccessDenied { .. } | Error::Revoked { .. });
            assert!(ours.reclaim() == vec![3; len]);
            while begun.try_recv().is_ok() {}
        }
    }
    end(&pair.server);
}

fn transfers_after_the_one_way_call_are_denied(net: &Net) {
    let pair = net.pair();
    let kept = define_use(&pair.server);
    let (sender, receiver) = mpsc::channel();
    pair.server
        .define("keep", move |request: &Request, bulk: Bulk| {
            let _ = sender.send((bulk, request.endpoint().clone()));
        })
        .unwrap();
    let one_call = Grant::new().for_one_call();
    // The receiver has dropped the bulk: the permission ends.
    let ours = pair.client.expose_with(pattern(1, 100_000), BulkMode::ReadWrite, &one_call).unwrap();
    pair.client.procedure::<Bulk, Result<usize, String>>("use").on(&pair.to_server).notify(&ours.bulk()).unwrap();
    eventually("it was used", || kept.lock().unwrap().is_some());
    let (bulk, owner) = kept.lock().unwrap().take().unwrap();
    let outside = travelled(&bulk);
    // The handler may still push.
    drop(bulk);
    ours.released().wait_timeout(BOUND).unwrap();
    assert_denied(outside.on(&owner).pull_into(&mut [0u8; 10][..]), "has ended");
    // The receiver keeps the bulk: the permission ends with the call's timeout.
    let ours = pair.client.expose_with(vec![1u8; 100], BulkMode::ReadWrite, &one_call).unwrap();
    let time = Duration::from_millis(300);
    let begin = Instant::now();
    pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).timeout(time).notify(&ours.bulk()).unwrap();
    let (bulk, owner) = receiver.recv_timeout(BOUND).unwrap();
    let error = loop {
        match bulk.on(&owner).pull_into(&mut [0u8; 100][..]) {
            Ok(moved) => assert_eq!(moved, 100),
            Err(error) => break error,
        }
        assert!(begin.elapsed() < BOUND, "it does not end");
    };
    assert!(begin.elapsed() >= time);
    assert_error!(Err::<(), _>(error), Error::AccessDenied { .. } | Error::Revoked { .. });
    assert_denied(bulk.on(&owner).pull_into(&mut [0u8; 100][..]), "has ended");
}

fn restricted_memory_is_not_sent_eagerly(net: &Net) {
    // The peer has no copy of its content: each pull asks the owner, and is counted.
    let pair = net.pair();
    let kept = Arc::new(Mutex::new(None));
    let keep = kept.clone();
    pair.server
        .define("twice", move |request: &Request, bulk: Bulk| -> [bool; 2] {
            let pulled = [(); 2].map(|()| bulk.on(request.endpoint()).pull_into(&mut [0u8; 100][..]).is_ok());
            *keep.lock().unwrap() = Some((bulk, request.endpoint().clone()));
            pulled
        })
        .unwrap();
    let twice = pair.client.procedure::<Bulk, [bool; 2]>("twice");
    let text = String::from("secret").repeat(20);
    let time = Duration::from_secs(3600);
    let grants = [
        (Grant::new(), [true, true]),
        (Grant::new().once(), [true, false]),
        (Grant::new().quota(199), [true, false]),
        (Grant::new().quota(99), [false, false]),
        (Grant::new().expires_after(Duration::ZERO), [false, false]),
        (Grant::new().expires_after(time), [true, true]),
        (Grant::new().for_one_call(), [true, true]),
        (Grant::new().only(&pair.to_server), [true, true]),
        (Grant::new().only(&pair.to_server).for_one_call().once().quota(1000).expires_after(time), [true, false]),
    ];
    for (grant, expected) in grants {
        let exposed = pair.client.expose_read_only_with(text.clone(), &grant).unwrap();
        assert_eq!(twice.on(&pair.to_server).call(&exposed.bulk()).unwrap(), expected, "{grant:?}");
        assert_eq!(exposed.view(), text);
        drop(kept.lock().unwrap().take());
    }
}

fn grant_for_one_peer_is_denied_to_others_and_not_used_up(net: &Net) {
    let pair = net.pair();
    let other = net.client();
    let to_server = other.lookup(pair.server.address()).unwrap();
    let chosen = meet(&pair);
    let grant = Grant::new().only(&chosen).once();
    for len in LENGTHS {
        let theirs = pair.server.expose_with(pattern(1, len), BulkMode::ReadOnly, &grant).unwrap();
        let mut copy = vec![0u8; len];
        // Denied transfers of other peers do not use it up.
        assert_denied(theirs.bulk().on(&to_server).pull_into(&mut copy), "another peer");
        assert!(all_are(&copy, 0));
        assert_eq!(theirs.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap(), len);
        assert!(copy == pattern(1, len));
        assert_denied(theirs.bulk().on(&pair.to_server).pull_into(&mut copy), "used up");
    }
    // An endpoint of another engine is refused.
    let foreign = Grant::new().only(&pair.to_server);
    assert_error!(pair.server.expose_with(vec![1u8; 10], BulkMode::ReadOnly, &foreign), Error::OtherEngine { .. });
    assert_error!(pair.server.expose_read_only_with(vec![1u8; 10], &foreign), Error::OtherEngine { .. });
    let mut buffer = [1u8; 10];
    let result = pair.server.scope(|s| s.expose_with(&mut buffer, BulkMode::ReadOnly, &foreign).map(|_| ()));
    assert_error!(result, Error::OtherEngine { .. });
}

fn grants_restrict_the_owners_own_transfers(net: &Net) {
    let engine = net.server();
    let to_itself = engine.lookup(engine.address()).unwrap();
    let mut copy = vec![0u8; 1000];
    let once = engine.expose_with(vec![1u8; 1000], BulkMode::ReadOnly, &Grant::new().once()).unwrap();
    assert_eq!(once.bulk().on(&to_itself).pull_into(&mut copy).unwrap(), 1000);
    assert_denied(once.bulk().on(&to_itself).pull_into(&mut copy), "used up");
    let over = Grant::new().expires_after(Duration::ZERO);
    let over = engine.expose_with(vec![1u8; 1000], BulkMode::ReadOnly, &over).unwrap();
    assert_denied(over.bulk().on(&to_itself).pull_into(&mut copy), "expired");
    let other = net.server();
    let elsewhere = engine.lookup(other.address()).unwrap();
    let theirs = engine.expose_to(&elsewhere, vec![1u8; 1000], BulkMode::ReadOnly).unwrap();
    assert_denied(theirs.bulk().on(&to_itself).pull_into(&mut copy), "another peer");
    let ours = engine.expose_to(&to_itself, vec![1u8; 1000], BulkMode::ReadOnly).unwrap();
    assert_eq!(ours.bulk().on(&to_itself).pull_into(&mut copy).unwrap(), 1000);
    // A call to itself counts as a call.
    define_use(&engine);
    let call = engine.expose_with(vec![1u8; 1000], BulkMode::ReadWrite, &Grant::new().for_one_call()).unwrap();
    assert_denied(call.bulk().on(&to_itself).pull_into(&mut copy), "has not been made");
    let use_it = engine.procedure::<Bulk, Result<usize, String>>("use");
    assert_eq!(use_it.on(&to_itself).call(&call.bulk()).unwrap(), Ok(2000));
    assert_denied(call.bulk().on(&to_itself).pull_into(&mut copy), "has ended");
    assert_eq!(engine.refusals().total(), 0, "only refusals to peers are counted");
}

fn grants_restrict_memory_of_a_scope(net: &Net) {
    let pair = net.pair();
    let kept = define_use(&pair.server);
    let use_it = pair.client.procedure::<Bulk, Result<usize, String>>("use");
    let mut buffer = vec![5u8; 50_000];
    let text = String::from("borrowed");
    pair.client
        .scope(|s| {
            let bulk = s.expose_with(&mut buffer, BulkMode::ReadWrite, &Grant::new().for_one_call())?;
            assert_eq!(use_it.on(&pair.to_server).call(&bulk)?, Ok(100_000));
            let (bulk, owner) = kept.lock().unwrap().take().unwrap();
            assert_denied(bulk.on(&owner).push_from(&[1u8; 10][..]), "has ended");
            let read = s.expose_read_only_with(&text[..], &Grant::new().quota(10))?;
            assert!(use_it.on(&pair.to_server).call(&read)?.is_err_and(|error| error.contains("to write")));
            assert!(use_it.on(&pair.to_server).call(&read)?.is_err_and(|error| error.contains("quota")));
            *kept.lock().unwrap() = Some((bulk, owner));
            Ok(())
        })
        .unwrap();
    let (bulk, owner) = kept.lock().unwrap().take().unwrap();
    assert_error!(bulk.on(&owner).push_from(&[1u8; 10][..]), Error::Revoked { .. });
    assert!(buffer == vec![5; 50_000]);
}

suite![
    empty_grant_restricts_nothing,
    second_transfer_of_a_once_grant_is_denied,
    concurrent_transfers_of_a_once_grant_succeed_once,
    transfers_beyond_the_quota_are_denied,
    transfers_after_expiry_are_denied,
    expiry_ends_transfers_in_progress,
    transfers_after_the_one_call_are_denied,
    third_engine_is_denied_during_the_one_call,
    cancelled_or_timed_out_call_ends_its_transfers,
    transfers_after_the_one_way_call_are_denied,
    restricted_memory_is_not_sent_eagerly,
    grant_for_one_peer_is_denied_to_others_and_not_used_up,
    grants_restrict_the_owners_own_transfers,
    grants_restrict_memory_of_a_scope,
];
