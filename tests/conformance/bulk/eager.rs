//! Small read-only bulks are sent eagerly inside the RPC; except for speed, the result is the same.

use std::sync::mpsc;

use calomel::{Bulk, BulkMode, Error, RemoteBulk, Request};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, Pair, eventually, pattern};

type Answer = Result<Vec<u8>, String>;

/// `read`: returns the bulk's bytes, pulled in two parts.
fn define_read(pair: &Pair) {
    pair.server
        .define("read", |request: &Request, bulk: Bulk| -> Answer {
            let mut bytes = vec![0u8; bulk.len()];
            let half = bulk.len() / 2;
            let remote = bulk.on(request.endpoint());
            remote.pull_into(&mut bytes[..half]).map_err(|e| e.to_string())?;
            remote
                .slice(half, bulk.len() - half)
                .and_then(|rest| rest.pull_into(&mut bytes[half..]))
                .map_err(|e| e.to_string())?;
            Ok(bytes)
        })
        .unwrap();
}

fn bulks_of_every_size_around_the_limit_arrive(net: &Net) {
    for limit in [0, 1, 1000, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        define_read(&pair);
        let read = pair.client.procedure::<Bulk, Answer>("read");
        for len in [0, 1, 2, 999, 1000, 1001, 4095, 4096, 4097, 20_000] {
            let data = pattern(len as u64, len);
            let exposed = pair.client.expose_read_only(data.clone()).unwrap();
            let answer = read.on(&pair.to_server).call(&exposed.bulk()).unwrap();
            assert_eq!(answer, Ok(data), "{len} bytes with a limit of {limit}");
        }
    }
}

fn slices_and_segments_of_small_bulks_arrive(net: &Net) {
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        define_read(&pair);
        let read = pair.client.procedure::<Bulk, Answer>("read");
        let data = pattern(1, 100);
        let parts = (data[..10].to_vec(), data[10..10].to_vec(), data[10..].to_vec());
        let exposed = pair.client.expose_read_only(parts).unwrap();
        for (offset, len) in [(0, 100), (5, 50), (10, 90), (99, 1), (100, 0)] {
            let part = exposed.bulk().slice(offset, len).unwrap();
            let answer = read.on(&pair.to_server).call(&part).unwrap();
            assert_eq!(answer.unwrap(), data[offset..offset + len]);
        }
        // A small slice of a large bulk, too.
        let large = pair.client.expose_read_only(pattern(2, 100_000)).unwrap();
        let answer = read.on(&pair.to_server).call(&large.bulk().slice(77_000, 10).unwrap()).unwrap();
        assert_eq!(answer.unwrap(), pattern(2, 100_000)[77_000..77_010]);
    }
}

fn eager_bytes_are_those_at_the_time_of_the_call(net: &Net) {
    // Each handler reads what the owner wrote before that call.
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        define_read(&pair);
        let read = pair.client.procedure::<Bulk, Answer>("read");
        let exposed = pair.client.expose(vec![0u8; 16], BulkMode::ReadOnly).unwrap();
        let bulk = exposed.bulk();
        for round in 0..50u8 {
            exposed.write_at(0, &[round; 16]).unwrap();
            let answer = read.on(&pair.to_server).call(&bulk).unwrap();
            assert_eq!(answer.unwrap(), [round; 16]);
        }
    }
}

fn small_writable_bulk_is_pulled_and_pushed(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("increment", |request: &Request, bulk: Bulk| {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes).unwrap();
            bytes.iter_mut().for_each(|byte| *byte += 1);
            bulk.on(request.endpoint()).push_from(&bytes).unwrap()
        })
        .unwrap();
    let exposed = pair.client.expose(vec![1u8; 10], BulkMode::ReadWrite).unwrap();
    let increment = pair.client.procedure::<Bulk, usize>("increment");
    for _ in 0..5 {
        assert_eq!(increment.on(&pair.to_server).call(&exposed.bulk()).unwrap(), 10);
    }
    assert_eq!(exposed.reclaim(), [6; 10]);
}

fn push_into_an_eager_bulk_is_denied(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("write", |request: &Request, bulk: Bulk| {
            let result = bulk.on(request.endpoint()).push_from(&[9u8; 4][..]);
            matches!(result, Err(Error::AccessDenied { .. }))
        })
        .unwrap();
    let exposed = pair.client.expose_read_only(vec![1u8; 4]).unwrap();
    assert!(pair.client.procedure::<Bulk, bool>("write").on(&pair.to_server).call(&exposed.bulk()).unwrap());
    assert_eq!(exposed.view(), [1; 4]);
}

/// Memory that was not sent eagerly is revoked at once; eagerly sent bytes once the peer has received the revocation.
#[track_caller]
fn assert_revoked(limit: usize, remote: &RemoteBulk) {
    let mut copy = vec![0u8; remote.len()];
    if limit == 0 {
        assert_error!(remote.pull_into(&mut copy), Error::Revoked { .. });
    }
    eventually("the bulk is revoked", || match remote.pull_into(&mut copy) {
        Ok(_) => false,
        Err(Error::Revoked { .. }) => true,
        Err(other) => panic!("{other:?}"),
    });
}

fn eager_bulk_is_revoked_when_its_exposure_is_dropped(net: &Net) {
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        let (sender, receiver) = mpsc::channel();
        pair.server
            .define("keep", move |request: &Request, bulk: Bulk| {
                sender.send((request.endpoint().clone(), bulk)).unwrap();
            })
            .unwrap();
        let exposed = pair.client.expose_read_only(String::from("a secret")).unwrap();
        pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
        let (caller, bulk) = receiver.recv_timeout(BOUND).unwrap();
        let mut copy = [0u8; 8];
        assert_eq!(bulk.on(&caller).pull_into(&mut copy[..]).unwrap(), 8);
        assert_eq!(&copy, b"a secret");
        drop(exposed);
        assert_revoked(limit, &bulk.on(&caller));
    }
}

fn eager_bulk_dropped_before_its_handler_reads_is_at_most_readable(net: &Net) {
    // The exposure is dropped before the handler reads; the handler may read bytes that were sent eagerly, but not write.
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        let (entered, go) = (Gate::default(), Gate::default());
        let (e, g) = (entered.clone(), go.clone());
        pair.server
            .define("late", move |request: &Request, bulk: Bulk| {
                e.open();
                g.wait();
                let mut copy = [0u8; 6];
                match bulk.on(request.endpoint()).pull_into(&mut copy[..]) {
                    Ok(_) => assert_eq!(&copy, b"secret"),
                    Err(error) => assert_error!(Err::<(), _>(error), Error::Revoked { .. }),
                }
                // Eagerly sent or not, the exposure as such has ended.
                matches!(
                    bulk.on(request.endpoint()).push_from(&copy[..]),
                    Err(Error::Revoked { .. } | Error::AccessDenied { .. })
                )
            })
            .unwrap();
        let exposed = pair.client.expose_read_only(String::from("secret")).unwrap();
        let late = pair.client.procedure::<Bulk, bool>("late");
        let pending = late.on(&pair.to_server).start(&exposed.bulk()).unwrap();
        entered.wait();
        drop(exposed);
        go.open();
        assert!(pending.wait().unwrap());
    }
}

fn many_eager_bulks_in_one_call_arrive(net: &Net) {
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        pair.server
            .define("join", |request: &Request, bulks: Vec<Bulk>| {
                let mut joined = String::new();
                for bulk in bulks {
                    let mut part = vec![0u8; bulk.len()];
                    bulk.on(request.endpoint()).pull_into(&mut part).unwrap();
                    joined.push_str(std::str::from_utf8(&part).unwrap());
                }
                joined
            })
            .unwrap();
        let texts: Vec<_> = (0..200).map(|i| pair.client.expose_read_only(format!("{i},")).unwrap()).collect();
        let bulks: Vec<Bulk> = texts.iter().map(|text| text.bulk()).collect();
        let expected: String = texts.iter().map(|text| text.view()).collect();
        let join = pair.client.procedure::<Vec<Bulk>, String>("join");
        assert_eq!(join.on(&pair.to_server).call(&bulks).unwrap(), expected);
    }
}

fn eager_bulk_in_a_result_arrives(net: &Net) {
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        let exposed = pair.server.expose_read_only(String::from("from the server")).unwrap();
        let bulk = exposed.bulk();
        pair.server.define("motto", move |_: &Request, ()| bulk.clone()).unwrap();
        let motto = pair.client.procedure::<(), Bulk>("motto");
        let bulk = motto.on(&pair.to_server).call(&()).unwrap();
        let mut copy = vec![0u8; bulk.len()];
        bulk.on(&pair.to_server).pull_into(&mut copy).unwrap();
        assert_eq!(copy, b"from the server");
        drop(exposed);
        assert_revoked(limit, &bulk.on(&pair.to_server));
    }
}

fn kept_bulk_of_writable_memory_returns_current_bytes(net: &Net) {
    // Read-only for peers, not for the owner: a pull from a kept bulk returns the current bytes.
    for limit in [0, 4096] {
        let pair = net.pair_with(|b| b.eager_bulk_limit(limit));
        let (sender, receiver) = mpsc::channel();
        pair.server
            .define("keep", move |request: &Request, bulk: Bulk| {
                sender.send((request.endpoint().clone(), bulk)).unwrap();
            })
            .unwrap();
        let exposed = pair.client.expose(vec![0u8; 16], BulkMode::ReadOnly).unwrap();
        pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
        let (caller, bulk) = receiver.recv_timeout(BOUND).unwrap();
        for round in 1..20u8 {
            exposed.write_at(0, &[round; 16]).unwrap();
            let mut copy = [0u8; 16];
            assert_eq!(bulk.on(&caller).pull_into(&mut copy[..]).unwrap(), 16);
            assert_eq!(copy, [round; 16], "limit {limit}");
        }
        // Also after the owner's own transfer wrote it.
        let source = pair.server.expose_read_only(vec![99u8; 16]).unwrap();
        source.bulk().on(&pair.to_server).pull_into(&exposed).unwrap();
        let mut copy = [0u8; 16];
        bulk.on(&caller).pull_into(&mut copy[..]).unwrap();
        assert_eq!(copy, [99; 16], "limit {limit}");
    }
}

suite![
    kept_bulk_of_writable_memory_returns_current_bytes,
    bulks_of_every_size_around_the_limit_arrive,
    slices_and_segments_of_small_bulks_arrive,
    eager_bytes_are_those_at_the_time_of_the_call,
    small_writable_bulk_is_pulled_and_pushed,
    push_into_an_eager_bulk_is_denied,
    eager_bulk_is_revoked_when_its_exposure_is_dropped,
    eager_bulk_dropped_before_its_handler_reads_is_at_most_readable,
    many_eager_bulks_in_one_call_arrive,
    eager_bulk_in_a_result_arrives,
];
