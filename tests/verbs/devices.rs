//! Several devices in one engine, addresses of all of them, and IPv6.

use calomel::{Bulk, BulkMode, Exposed, Request, Segments};

use crate::pair::{Pair, patient};
use crate::support::*;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is the address of a device; ci/softroce has one"))
}

/// Addresses of two devices.
fn both() -> [String; 2] {
    [anywhere(), format!("verbs://{}:0", variable("CALOMEL_VERBS_SECOND"))]
}

fn a_server_listens_on_both_devices() {
    let [first, second] = both();
    let server = patient().listen(first).listen(second).build().unwrap();
    define_add(&server);
    // What one engine exposes is pulled and pushed over either of its devices, in one piece or in many.
    let one = server.expose(pattern(1, 300_001), BulkMode::ReadWrite).unwrap();
    let many: Exposed<Segments<Vec<u8>>> =
        server.expose(Segments((0..7).map(|n| pattern(n, 50_001)).collect()), BulkMode::ReadWrite).unwrap();
    let bulks = [one.bulk(), many.bulk()];
    server.define("bulk", move |_: &Request, index: usize| bulks[index].clone()).unwrap();
    let addresses = server.addresses();
    assert_eq!(addresses.len(), 2);
    for (round, address) in addresses.iter().enumerate() {
        let client = patient().build().unwrap();
        let to_server = client.lookup(address).unwrap();
        assert_serves(&client, &to_server);
        for index in 0..2 {
            let bulk = client.procedure::<usize, Bulk>("bulk").on(&to_server).call(&index).unwrap();
            let pushed = pattern(round as u64 + 10, bulk.len());
            assert_eq!(bulk.on(&to_server).push_from(&pushed).unwrap(), pushed.len());
            let mut pulled = vec![0u8; bulk.len()];
            assert_eq!(bulk.on(&to_server).pull_into(&mut pulled).unwrap(), pulled.len());
            assert!(pulled == pushed, "{address}");
        }
    }
    assert!(one.reclaim() == pattern(11, 300_001));
    assert!(many.reclaim().0.concat() == pattern(11, 350_007));
}

/// A client with two devices lends one bulk to two servers, each of which reaches it by another.
fn a_bulk_is_reached_by_either_device_of_its_owner() {
    let servers = both().map(|address| patient().listen(address).build().unwrap());
    for server in &servers {
        server
            .define("add one", |request: &Request, bulk: Bulk| {
                let mut bytes = vec![0u8; bulk.len()];
                let remote = bulk.on(request.endpoint());
                remote.pull_into(&mut bytes).unwrap();
                bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                remote.push_from(&bytes).unwrap()
            })
            .unwrap();
    }
    let client = patient().build().unwrap();
    // Exposed before any device is known, between the two, and after both.
    let mut exposed = vec![client.expose(pattern(1, 200_000), BulkMode::ReadWrite).unwrap()];
    let mut endpoints = Vec::new();
    for server in &servers {
        endpoints.push(client.lookup(server.address()).unwrap());
        exposed.push(client.expose(pattern(1, 200_000), BulkMode::ReadWrite).unwrap());
    }
    let add_one = client.procedure::<Bulk, usize>("add one");
    for endpoint in &endpoints {
        for memory in &exposed {
            assert_eq!(add_one.on(endpoint).call(&memory.bulk()).unwrap(), 200_000);
        }
    }
    let wanted: Vec<u8> = pattern(1, 200_000).into_iter().map(|byte| byte.wrapping_add(2)).collect();
    exposed.into_iter().for_each(|memory| assert!(memory.reclaim() == wanted));
}

/// Peers reach it at the addresses of each device; what it says of itself is nothing that could be dialled.
fn an_engine_listens_on_all_devices_at_once() {
    let server = patient().listen("verbs://0.0.0.0:0").build().unwrap();
    define_add(&server);
    let address = server.address().to_string();
    eprintln!("listens at {address}");
    let (_, port) = address.rsplit_once(':').unwrap();
    for ip in [variable("CALOMEL_VERBS"), variable("CALOMEL_VERBS_SECOND")] {
        let client = patient().build().unwrap();
        let to_server = client.lookup(format!("verbs://{ip}:{port}")).unwrap();
        assert_serves(&client, &to_server);
        let exposed = server.expose_read_only(pattern(3, 100_000)).unwrap();
        let mut copy = vec![0u8; 100_000];
        exposed.bulk().on(&to_server).pull_into(&mut copy).unwrap();
        assert!(copy == exposed.view());
        client.finalize().unwrap();
    }
}

fn addresses_of_ipv6_do_as_well() {
    let pair = Pair::at(&format!("verbs://[{}]:0", variable("CALOMEL_VERBS_V6")));
    assert!(pair.server.address().to_string().contains("[fd00"), "{}", pair.server.address());
    pair.assert_serves();
    let exposed = pair.server.expose(vec![0u8; 300_000], BulkMode::ReadWrite).unwrap();
    exposed.bulk().on(&pair.to_server).push_from(&pattern(5, 300_000)).unwrap();
    assert!(exposed.reclaim() == pattern(5, 300_000));
}

on_device!(
    a_server_listens_on_both_devices,
    a_bulk_is_reached_by_either_device_of_its_owner,
    an_engine_listens_on_all_devices_at_once,
    addresses_of_ipv6_do_as_well,
);
