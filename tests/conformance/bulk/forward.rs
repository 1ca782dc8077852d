//! Bulks that are forwarded through other engines, and used by the last one.

use std::sync::mpsc;

use calomel::{Bulk, BulkMode, Error, Request};

use crate::assert_error;
use crate::support::{BOUND, Net, all_are, pattern, travelled};

type Answer = Result<u64, String>;

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, &b| sum.wrapping_mul(31).wrapping_add(b.into()))
}

fn third_engine_pulls_from_the_owner(net: &Net) {
    // owner -> middle -> worker, and the worker pulls from the owner, to which it has never connected.
    for len in [100, 200_000] {
        let (owner, middle, worker) = (net.server(), net.server(), net.server());
        worker
            .define("work", |request: &Request, bulk: Bulk| -> Answer {
                let mut bytes = vec![0u8; bulk.len()];
                let remote = bulk.origin(request.engine()).map_err(|e| e.to_string())?;
                remote.pull_into(&mut bytes).map_err(|e| e.to_string())?;
                Ok(checksum(&bytes))
            })
            .unwrap();
        let to_worker = middle.lookup(worker.address()).unwrap();
        middle
            .define("forward", move |request: &Request, bulk: Bulk| -> Answer {
                let work = request.engine().procedure::<Bulk, Answer>("work");
                work.on(&to_worker).call(&bulk).map_err(|e| e.to_string())?
            })
            .unwrap();
        let data = pattern(len as u64, len);
        let exposed = owner.expose(data.clone(), BulkMode::ReadOnly).unwrap();
        let to_middle = owner.lookup(middle.address()).unwrap();
        let forward = owner.procedure::<Bulk, Answer>("forward");
        assert_eq!(forward.on(&to_middle).call(&exposed.bulk()).unwrap(), Ok(checksum(&data)));
        // And from a slice of it.
        let part = exposed.bulk().slice(10, 50).unwrap();
        assert_eq!(forward.on(&to_middle).call(&part).unwrap(), Ok(checksum(&data[10..60])));
    }
}

fn third_engine_pushes_to_the_owner(net: &Net) {
    let (owner, client) = (net.server(), net.client());
    let target = owner.expose(vec![0u8; 100_000], BulkMode::WriteOnly).unwrap();
    let bulk = travelled(&target.bulk());
    let remote = bulk.slice(1000, 5000).unwrap().origin(&client).unwrap();
    assert_eq!(remote.push_from(&vec![5u8; 10_000]).unwrap(), 5000);
    let target = target.reclaim();
    assert!(all_are(&target[..1000], 0));
    assert!(all_are(&target[1000..6000], 5));
    assert!(all_are(&target[6000..], 0));
}

fn origin_of_a_callers_bulk_reaches_the_caller(net: &Net) {
    // Also for a caller that does not listen: the connection exists.
    let pair = net.pair();
    pair.server
        .define("fetch", |request: &Request, bulk: Bulk| -> Answer {
            let mut bytes = vec![0u8; bulk.len()];
            let remote = bulk.origin(request.engine()).map_err(|e| e.to_string())?;
            remote.pull_into(&mut bytes).map_err(|e| e.to_string())?;
            Ok(checksum(&bytes))
        })
        .unwrap();
    let fetch = pair.client.procedure::<Bulk, Answer>("fetch");
    for len in [100, 200_000] {
        let data = pattern(1, len);
        let exposed = pair.client.expose_read_only(data.clone()).unwrap();
        assert_eq!(fetch.on(&pair.to_server).call(&exposed.bulk()).unwrap(), Ok(checksum(&data)));
    }
}

fn origin_that_does_not_listen_is_an_error(net: &Net) {
    let (a, b) = (net.client(), net.client());
    let exposed = a.expose(vec![1u8; 100_000], BulkMode::ReadOnly).unwrap();
    let bulk = travelled(&exposed.bulk());
    let begin = std::time::Instant::now();
    let result = bulk.origin(&b).and_then(|remote| remote.pull_into(&mut [0u8; 10][..]));
    assert_error!(result, Error::Unreachable { .. } | Error::Unsupported { .. } | Error::InvalidAddress { .. });
    assert!(begin.elapsed() < std::time::Duration::from_secs(6));
}

fn origin_that_is_finalized_is_disconnected(net: &Net) {
    let (owner, client) = (net.server(), net.client());
    let exposed = owner.expose(vec![1u8; 100_000], BulkMode::ReadOnly).unwrap();
    let bulk = travelled(&exposed.bulk());
    owner.finalize().unwrap();
    let error = bulk.origin(&client).and_then(|remote| remote.pull_into(&mut [0u8; 10][..])).unwrap_err();
    assert!(error.is_disconnected(), "{error}");
}

fn own_bulk_returned_by_a_server_is_usable(net: &Net) {
    // Sent out and returned by a server, it is still the engine's own memory.
    let pair = net.pair();
    pair.server.define("return", |_: &Request, bulk: Bulk| bulk).unwrap();
    let back = pair.client.procedure::<Bulk, Bulk>("return");
    for len in [100, 100_000] {
        let exposed = pair.client.expose(pattern(1, len), BulkMode::ReadWrite).unwrap();
        let returned = back.on(&pair.to_server).call(&exposed.bulk()).unwrap();
        let mut copy = vec![0u8; len];
        assert_eq!(returned.origin(&pair.client).unwrap().pull_into(&mut copy).unwrap(), len);
        assert!(copy == pattern(1, len));
        assert_eq!(returned.origin(&pair.client).unwrap().push_from(&[1u8; 4][..]).unwrap(), 4);
        assert_eq!(exposed.reclaim()[..4], [1; 4]);
        assert_error!(returned.origin(&pair.client).unwrap().pull_into(&mut copy), Error::Revoked { .. });
    }
}

fn kept_bulk_is_usable_after_its_call(net: &Net) {
    // Kept by the handler, used later by another thread, with the caller's endpoint.
    let pair = net.pair();
    let (sender, receiver) = mpsc::channel();
    pair.server
        .define("keep", move |request: &Request, bulk: Bulk| {
            sender.send((request.endpoint().clone(), bulk)).unwrap();
        })
        .unwrap();
    for len in [100, 100_000] {
        let exposed = pair.client.expose(pattern(3, len), BulkMode::ReadOnly).unwrap();
        pair.client.procedure::<Bulk, ()>("keep").on(&pair.to_server).call(&exposed.bulk()).unwrap();
        let (caller, bulk) = receiver.recv_timeout(BOUND).unwrap();
        let mut copy = vec![0u8; len];
        assert_eq!(bulk.on(&caller).pull_into(&mut copy).unwrap(), len);
        assert!(copy == pattern(3, len));
    }
}

fn bulk_in_a_result_is_usable(net: &Net) {
    let pair = net.pair();
    let kept = std::sync::Mutex::new(Vec::new());
    pair.server
        .define("open", move |request: &Request, len: usize| {
            let exposed = request.engine().expose(pattern(len as u64, len), BulkMode::ReadWrite).unwrap();
            let bulk = exposed.bulk();
            kept.lock().unwrap().push(exposed);
            bulk
        })
        .unwrap();
    let open = pair.client.procedure::<usize, Bulk>("open");
    for len in [0, 1, 100, 100_000] {
        let bulk = open.on(&pair.to_server).call(&len).unwrap();
        let mut copy = vec![0u8; len];
        assert_eq!(bulk.on(&pair.to_server).pull_into(&mut copy).unwrap(), len);
        assert_eq!(bulk.origin(&pair.client).unwrap().pull_into(&mut copy).unwrap(), len);
        assert!(copy == pattern(len as u64, len));
    }
}

fn bulk_received_over_one_transport_is_usable_over_another(net: &Net) {
    // The bulk is received over one transport; a third engine reaches the owner over the other.
    let owner = net.keep(net.builder().listen(net.fresh_address()).listen("tcp://127.0.0.1:0").build().unwrap());
    let worker = net.keep(net.builder().listen("tcp://127.0.0.1:0").build().unwrap());
    let middle = net.server();
    let data = pattern(9, 200_000);
    let exposed = owner.expose(data.clone(), BulkMode::ReadOnly).unwrap();
    let bulk = exposed.bulk();
    owner.define("open", move |_: &Request, ()| bulk.clone()).unwrap();
    worker
        .define("work", |request: &Request, bulk: Bulk| {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.origin(request.engine()).unwrap().pull_into(&mut bytes).unwrap();
            checksum(&bytes)
        })
        .unwrap();
    let bulk = middle.procedure::<(), Bulk>("open").on(middle.lookup(owner.address()).unwrap()).call(&()).unwrap();
    let to_worker = middle.lookup(worker.address()).unwrap();
    assert_eq!(middle.procedure::<Bulk, u64>("work").on(&to_worker).call(&bulk).unwrap(), checksum(&data));
}

suite![
    bulk_received_over_one_transport_is_usable_over_another,
    third_engine_pulls_from_the_owner,
    third_engine_pushes_to_the_owner,
    origin_of_a_callers_bulk_reaches_the_caller,
    origin_that_does_not_listen_is_an_error,
    origin_that_is_finalized_is_disconnected,
    own_bulk_returned_by_a_server_is_usable,
    kept_bulk_is_usable_after_its_call,
    bulk_in_a_result_is_usable,
];
