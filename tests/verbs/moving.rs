//! Calls and transfers of all sizes.

use calomel::{Bulk, BulkMode, Request};

use crate::pair::{Pair, patient};
use crate::support::{all_are, text};

fn calls_of_all_sizes() {
    let pair = Pair::new();
    pair.assert_serves();
    let echo = pair.client.procedure::<String, String>("echo");
    for len in [0, 1, 100, 4000, 4096, 5000, 20_000, 70_000, 1 << 20, 5 << 20] {
        let sent = text(len as u64, len);
        assert!(echo.on(&pair.to_server).call(&sent).unwrap() == sent, "{len} bytes");
    }
}

fn bulks_are_moved_by_the_device() {
    let pair = Pair::new();
    pair.server
        .define("double", |request: &Request, bulk: Bulk| {
            let mut here = vec![0u8; bulk.len()];
            let remote = bulk.on(request.endpoint());
            remote.pull_into(&mut here[..]).unwrap();
            here.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(2));
            remote.push_from(&here[..]).unwrap();
        })
        .unwrap();
    let double = pair.client.procedure::<Bulk, ()>("double");
    for len in [1, 4096, 100_000, 3 << 20] {
        let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        let exposed = pair.client.expose(bytes.clone(), BulkMode::ReadWrite).unwrap();
        double.on(&pair.to_server).call(&exposed.bulk()).unwrap();
        let doubled = exposed.reclaim();
        assert!(doubled.iter().zip(&bytes).all(|(after, before)| *after == before.wrapping_mul(2)), "{len} bytes");
    }
}

fn memory_for_one_peer() {
    let pair = Pair::new();
    let other = patient().build().unwrap();
    pair.client.define("nothing", |_: &Request, (): ()| ()).unwrap();
    // Both are known to the server, and connected.
    let met = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = met.clone();
    pair.server.define("meet", move |request: &Request, (): ()| seen.lock().unwrap().push(request.endpoint().clone())).unwrap();
    pair.client.procedure::<(), ()>("meet").on(&pair.to_server).call(&()).unwrap();
    let others = other.lookup(pair.server.address()).unwrap();
    other.procedure::<(), ()>("meet").on(&others).call(&()).unwrap();
    let chosen = met.lock().unwrap()[0].clone();
    for len in [100usize, 300_000] {
        let exposed = pair.server.expose_to(&chosen, vec![7u8; len], BulkMode::ReadWrite).unwrap();
        let bytes = postcard::to_stdvec(&exposed.bulk()).unwrap();
        let bulk: Bulk = postcard::from_bytes(&bytes).unwrap();
        for _ in 0..3 {
            let mut here = vec![0u8; len];
            assert_eq!(bulk.on(&pair.to_server).pull_into(&mut here[..]).unwrap(), len);
            assert!(all_are(&here, 7));
            let denied = bulk.on(&others).pull_into(&mut here[..]).unwrap_err();
            assert!(matches!(denied, calomel::Error::AccessDenied { .. }), "{denied}");
            let denied = bulk.on(&others).push_from(&vec![1u8; len]).unwrap_err();
            assert!(matches!(denied, calomel::Error::AccessDenied { .. }), "{denied}");
        }
        bulk.on(&pair.to_server).push_from(&vec![8u8; len]).unwrap();
        assert!(exposed.reclaim() == vec![8u8; len]);
        let gone = bulk.on(&pair.to_server).pull_into(&mut vec![0u8; len][..]).unwrap_err();
        assert!(matches!(gone, calomel::Error::Revoked { .. }), "{gone}");
    }
}

on_device!(calls_of_all_sizes, bulks_are_moved_by_the_device, memory_for_one_peer);
