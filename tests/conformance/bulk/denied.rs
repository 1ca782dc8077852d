//! The owner denies transfers that the access policy of its memory does not allow.

use std::sync::{Arc, Mutex};

use calomel::{BulkMode, Error, Request};

use crate::assert_error;
use crate::support::{Net, all_are, pattern, travelled};

fn push_into_read_only_is_denied(net: &Net) {
    let pair = net.pair();
    let ours = pair.client.expose(vec![9u8; 100_000], BulkMode::ReadWrite).unwrap();
    for len in [0, 1, 100, 100_000] {
        let data = pattern(1, len);
        let theirs = pair.server.expose(data.clone(), BulkMode::ReadOnly).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        assert_error!(remote.push_from(&vec![9u8; 100_000]), Error::AccessDenied { .. });
        assert_error!(remote.push_from(&ours), Error::AccessDenied { .. });
        assert_error!(&remote << &ours, Error::AccessDenied { .. });
        let (result, _) = remote.start_push_from(ours.slice(0, 10).unwrap()).wait();
        assert_error!(result, Error::AccessDenied { .. });
        assert_eq!(remote.pull_into(&ours).unwrap(), len);
        assert!(theirs.reclaim() == data);
    }
    let text = pair.server.expose_read_only(String::from("text")).unwrap();
    assert_error!(text.bulk().on(&pair.to_server).push_from(&[1u8; 4][..]), Error::AccessDenied { .. });
    assert_eq!(text.view(), "text");
}

fn pull_from_write_only_is_denied(net: &Net) {
    let pair = net.pair();
    let ours = pair.client.expose(vec![9u8; 100_000], BulkMode::ReadWrite).unwrap();
    for len in [0, 1, 100, 100_000] {
        let theirs = pair.server.expose(pattern(1, len), BulkMode::WriteOnly).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let mut copy = vec![7u8; 100_000];
        assert_error!(remote.pull_into(&mut copy), Error::AccessDenied { .. });
        assert!(all_are(&copy, 7));
        assert_error!(remote.pull_into(&ours), Error::AccessDenied { .. });
        assert_error!(&remote >> &ours, Error::AccessDenied { .. });
        let (result, _) = remote.start_pull_into(ours.slice(0, 10).unwrap()).wait();
        assert_error!(result, Error::AccessDenied { .. });
        assert_eq!(remote.push_from(&copy).unwrap(), len);
        assert!(theirs.reclaim() == vec![7; len]);
    }
    assert!(all_are(&ours.reclaim(), 9));
}

fn mode_does_not_restrict_the_owners_transfers(net: &Net) {
    // A write-only exposure is a valid source of its owner's pushes; a read-only one (of `expose`) is a valid target of its
    // pulls.
    let pair = net.pair();
    let theirs = pair.server.expose(vec![1u8; 1000], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let ours = pair.client.expose(vec![2u8; 1000], BulkMode::WriteOnly).unwrap();
    assert_eq!(remote.push_from(&ours).unwrap(), 1000);
    let ours = pair.client.expose(vec![0u8; 1000], BulkMode::ReadOnly).unwrap();
    assert_eq!(remote.pull_into(&ours).unwrap(), 1000);
    assert!(ours.reclaim() == [2; 1000]);
}

fn denied_transfer_names_the_peer(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![1u8; 10_000], BulkMode::ReadOnly).unwrap();
    let error = theirs.bulk().on(&pair.to_server).push_from(&[1u8; 4][..]).unwrap_err();
    assert!(error.to_string().contains(&pair.server.address().to_string()), "{error}");
    assert!(!error.is_retryable() && !error.is_disconnected());
}

fn transfer_with_an_engine_that_is_not_the_owner_fails(net: &Net) {
    // Sent to an engine that never exposed it.
    let (a, b, client) = (net.server(), net.server(), net.client());
    let to_b = client.lookup(b.address()).unwrap();
    for len in [10, 100_000] {
        let of_a = a.expose(pattern(1, len), BulkMode::ReadWrite).unwrap();
        let _of_b = b.expose(pattern(2, len), BulkMode::ReadWrite).unwrap();
        let bulk = travelled(&of_a.bulk());
        let mut copy = vec![0u8; len];
        let result = bulk.on(&to_b).pull_into(&mut copy);
        assert_error!(result, Error::OtherEngine { .. });
        assert!(all_are(&copy, 0));
        let result = bulk.on(&to_b).push_from(&copy);
        assert_error!(result, Error::OtherEngine { .. });
        assert!(of_a.reclaim() == pattern(1, len));
    }
}

fn transfer_with_revoked_memory_fails_with_revoked(net: &Net) {
    let pair = net.pair();
    for len in [1, 100, 100_000] {
        for dropped in [true, false] {
            let theirs = pair.server.expose(vec![1u8; len], BulkMode::ReadWrite).unwrap();
            let (bulk, part) = (theirs.bulk(), theirs.bulk().slice(0, 1).unwrap());
            assert_eq!(bulk.on(&pair.to_server).push_from(&vec![2u8; len]).unwrap(), len);
            if dropped {
                drop(theirs);
            } else {
                assert!(theirs.reclaim() == vec![2; len]);
            }
            let mut copy = vec![7u8; len];
            for bulk in [&bulk, &part, &travelled(&bulk)] {
                let remote = bulk.on(&pair.to_server);
                let error = remote.pull_into(&mut copy).unwrap_err();
                assert!(!error.is_retryable() && !error.is_disconnected());
                assert_error!(Err::<(), _>(error), Error::Revoked { .. });
                assert_error!(remote.push_from(&copy), Error::Revoked { .. });
            }
            assert!(all_are(&copy, 7));
        }
    }
}

fn new_exposure_does_not_reuse_a_revoked_token(net: &Net) {
    let pair = net.pair();
    let mut old = Vec::new();
    for round in 0..200u8 {
        let theirs = pair.server.expose(vec![round; 50], BulkMode::ReadWrite).unwrap();
        assert_eq!(theirs.bulk().on(&pair.to_server).pull_into(&mut [0u8; 50][..]).unwrap(), 50);
        old.push(theirs.bulk());
    }
    let current = pair.server.expose(vec![1u8; 50], BulkMode::ReadWrite).unwrap();
    for bulk in &old {
        assert_error!(bulk.on(&pair.to_server).push_from(&[2u8; 50][..]), Error::Revoked { .. } | Error::AccessDenied { .. });
    }
    assert_eq!(current.reclaim(), [1; 50]);
}

fn tokens_of_consecutive_exposures_are_random(net: &Net) {
    // Two consecutive exposures share only their public fields.
    let server = net.server();
    let bytes = |_| postcard::to_stdvec(&server.expose(vec![0u8; 100_000], BulkMode::ReadOnly).unwrap().bulk()).unwrap();
    let all: Vec<Vec<u8>> = (0..64).map(bytes).collect();
    let len = all[0].len();
    // Byte positions at which each bit takes both values over 64 exposures: 128 random bits fill at least 16 of them.
    let random = (0..len)
        .filter(|&at| {
            let (or, and) = all.iter().filter_map(|b| b.get(at)).fold((0, 0xff), |(or, and), b| (or | b, and & b));
            or & !and & 0x7f == 0x7f
        })
        .count();
    assert!(random >= 16, "only {random} of {len} bytes differ at random");
}

fn memory_exposed_to_one_peer_is_denied_to_others(net: &Net) {
    let pair = net.pair();
    let other = net.client();
    let to_server = other.lookup(pair.server.address()).unwrap();
    let met = Arc::new(Mutex::new(Vec::new()));
    let seen = met.clone();
    pair.server.define("meet", move |request: &Request, (): ()| seen.lock().unwrap().push(request.endpoint().clone())).unwrap();
    pair.client.procedure::<(), ()>("meet").on(&pair.to_server).call(&()).unwrap();
    other.procedure::<(), ()>("meet").on(&to_server).call(&()).unwrap();
    let chosen = met.lock().unwrap()[0].clone();
    for len in [0, 100, 100_000] {
        let theirs = pair.server.expose_to(&chosen, pattern(1, len), BulkMode::ReadWrite).unwrap();
        for bulk in [theirs.bulk(), travelled(&theirs.bulk())] {
            let mut copy = vec![0u8; len];
            assert_error!(bulk.on(&to_server).pull_into(&mut copy), Error::AccessDenied { .. });
            assert!(all_are(&copy, 0));
            assert_error!(bulk.on(&to_server).push_from(&copy), Error::AccessDenied { .. });
            assert_eq!(bulk.on(&pair.to_server).pull_into(&mut copy).unwrap(), len);
            assert!(copy == pattern(1, len));
            assert_eq!(bulk.on(&pair.to_server).push_from(&copy).unwrap(), len);
        }
        let bulk = theirs.bulk();
        assert!(theirs.reclaim() == pattern(1, len));
        assert_error!(bulk.on(&pair.to_server).pull_into(&mut vec![0u8; len]), Error::Revoked { .. });
    }
    // An endpoint that was looked up but never connected: the grant is for the engine found at that address, which none of the
    // connected peers is.
    let absent = pair.server.lookup(net.dead_address()).unwrap();
    let theirs = pair.server.expose_to(&absent, vec![1u8; 100], BulkMode::ReadWrite).unwrap();
    assert_error!(theirs.bulk().on(&pair.to_server).pull_into(&mut vec![0u8; 100]), Error::AccessDenied { .. });
    // An endpoint of another engine is refused.
    let refused = pair.server.expose_to(&pair.to_server, vec![1u8; 100], BulkMode::ReadWrite);
    assert_error!(refused, Error::OtherEngine { .. });
}

suite![
    memory_exposed_to_one_peer_is_denied_to_others,
    push_into_read_only_is_denied,
    pull_from_write_only_is_denied,
    mode_does_not_restrict_the_owners_transfers,
    denied_transfer_names_the_peer,
    transfer_with_an_engine_that_is_not_the_owner_fails,
    transfer_with_revoked_memory_fails_with_revoked,
    new_exposure_does_not_reuse_a_revoked_token,
    tokens_of_consecutive_exposures_are_random,
];
