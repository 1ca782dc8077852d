use calomel::{Bulk, BulkMode, Request};

use super::support::{Pair, device};

#[test]
fn calls_of_all_sizes() {
    let Some(device) = device() else { return };
    let pair = Pair::new(&device);
    pair.server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    pair.server.define("echo", |_: &Request, text: String| text).unwrap();
    assert_eq!(pair.client.procedure::<(i32, i32), i32>("sum").on(&pair.endpoint).call(&(1, 2)).unwrap(), 3);
    let echo = pair.client.procedure::<String, String>("echo");
    for len in [0, 1, 100, 4000, 4096, 5000, 20_000, 70_000, 1 << 20, 5 << 20] {
        let text: String = (0..len).map(|index| char::from(b'a' + (index % 23) as u8)).collect();
        assert_eq!(echo.on(&pair.endpoint).call(&text).unwrap(), text, "{len} bytes");
    }
}

#[test]
fn bulks_are_moved_by_the_device() {
    let Some(device) = device() else { return };
    let pair = Pair::new(&device);
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
        double.on(&pair.endpoint).call(&exposed.bulk()).unwrap();
        let doubled = exposed.reclaim();
        assert!(doubled.iter().zip(&bytes).all(|(after, before)| *after == before.wrapping_mul(2)), "{len} bytes");
    }
}

#[test]
fn memory_for_one_peer() {
    let Some(device) = device() else { return };
    let pair = Pair::new(&device);
    let other = pair.another_client();
    pair.client.define("nothing", |_: &Request, (): ()| ()).unwrap();
    // Both are known to the server, and connected.
    let met = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = met.clone();
    pair.server.define("meet", move |request: &Request, (): ()| seen.lock().unwrap().push(request.endpoint().clone())).unwrap();
    pair.client.procedure::<(), ()>("meet").on(&pair.endpoint).call(&()).unwrap();
    let others = other.lookup(pair.server.address()).unwrap();
    other.procedure::<(), ()>("meet").on(&others).call(&()).unwrap();
    let chosen = met.lock().unwrap()[0].clone();
    for len in [100usize, 300_000] {
        let exposed = pair.server.expose_to(&chosen, vec![7u8; len], BulkMode::ReadWrite).unwrap();
        let bytes = postcard::to_stdvec(&exposed.bulk()).unwrap();
        let bulk: Bulk = postcard::from_bytes(&bytes).unwrap();
        for _ in 0..3 {
            let mut here = vec![0u8; len];
            assert_eq!(bulk.on(&pair.endpoint).pull_into(&mut here[..]).unwrap(), len);
            assert!(here.iter().all(|byte| *byte == 7));
            let denied = bulk.on(&others).pull_into(&mut here[..]).unwrap_err();
            assert!(matches!(denied, calomel::Error::AccessDenied { .. }), "{denied}");
            let denied = bulk.on(&others).push_from(&vec![1u8; len]).unwrap_err();
            assert!(matches!(denied, calomel::Error::AccessDenied { .. }), "{denied}");
        }
        bulk.on(&pair.endpoint).push_from(&vec![8u8; len]).unwrap();
        assert!(exposed.reclaim() == vec![8u8; len]);
        let gone = bulk.on(&pair.endpoint).pull_into(&mut vec![0u8; len][..]).unwrap_err();
        assert!(matches!(gone, calomel::Error::Revoked { .. }), "{gone}");
    }
}
