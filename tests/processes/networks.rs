//! Engines on hosts of their own: addresses that other hosts can dial. Each engine is made and used on threads that are in its
//! host's network namespace.

use std::time::Duration;

use calomel::{Bulk, Engine, Error, Request};

use crate::common::Watchdog;
use crate::namespaces::{Hosts, ip};

const LONG: Duration = Duration::from_secs(20);

/// The hosts, or `None` where the system permits no namespaces: then the test says so, and ends.
fn hosts(count: usize) -> Option<Hosts> {
    Hosts::new(count).inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

#[test]
fn engine_on_all_interfaces_has_an_address_that_another_host_dials() {
    let _watchdog = Watchdog::start("engine_on_all_interfaces");
    let Some(hosts) = hosts(2) else { return };
    let server = hosts.on(0, || {
        let server = Engine::server("tcp").unwrap();
        server.define("hello", |_: &Request, ()| 5u8).unwrap();
        server
    });
    let address = server.address();
    assert!(address.to_string().starts_with(&format!("tcp://{}:", ip(0))), "{address}");
    hosts.on(1, || {
        let client = Engine::client("tcp").unwrap();
        let peer = client.lookup(&address).unwrap();
        assert_eq!(client.procedure::<(), u8>("hello").on(&peer).call(&()).unwrap(), 5);
    });
    hosts.on(0, || server.finalize().unwrap());
}

#[test]
fn interface_can_be_named_on_the_host_that_has_it() {
    let _watchdog = Watchdog::start("interface_can_be_named");
    let Some(hosts) = hosts(1) else { return };
    let address = hosts.on(0, || Engine::server("tcp://near:0").unwrap().address());
    assert!(address.to_string().starts_with(&format!("tcp://{}:", ip(0))), "{address}");
}

/// The owner and the mediator are on one host, and connected by its loopback interface.
#[test]
fn bulk_that_a_mediator_forwards_to_another_host_leads_to_its_owner() {
    let _watchdog = Watchdog::start("bulk_that_a_mediator_forwards");
    let Some(hosts) = hosts(2) else { return };
    let consumer = hosts.on(1, || {
        let consumer = Engine::server("tcp").unwrap();
        consumer
            .define_try("consume", |request: &Request, bulk: Bulk| -> calomel::Result<Vec<u8>> {
                let mut buffer = vec![0u8; bulk.len()];
                bulk.origin(request.engine())?.timeout(LONG).pull_into(&mut buffer[..])?;
                Ok(buffer)
            })
            .unwrap();
        consumer
    });
    let to_consumer = consumer.address();
    let mediator = hosts.on(0, || {
        let mediator = Engine::builder().listen("tcp://127.0.0.1:0").same_host_upgrade(false).build().unwrap();
        let forward = move |request: &Request, bulk: Bulk| -> calomel::Result<Vec<u8>> {
            let engine = request.engine();
            engine.procedure::<Bulk, Vec<u8>>("consume").on(engine.lookup(&to_consumer)?).call(&bulk)
        };
        mediator.define_try("forward", forward).unwrap();
        mediator
    });
    let to_mediator = mediator.address();
    hosts.on(0, || {
        let owner = Engine::builder().listen("tcp").same_host_upgrade(false).build().unwrap();
        let exposed = owner.expose_read_only((0..20_000u32).map(|n| n as u8).collect::<Vec<u8>>()).unwrap();
        let peer = owner.lookup(&to_mediator).unwrap();
        let copied: Vec<u8> = owner.procedure::<Bulk, Vec<u8>>("forward").on(&peer).call(&exposed.bulk()).unwrap();
        assert_eq!(copied, exposed.view());
        // An owner that does not listen can't be found there, and the error says so.
        let silent = Engine::client("tcp").unwrap();
        let hidden = silent.expose_read_only(vec![1u8; 20_000]).unwrap();
        let peer = silent.lookup(&to_mediator).unwrap();
        let error = silent.procedure::<Bulk, Vec<u8>>("forward").on(&peer).call(&hidden.bulk()).unwrap_err();
        assert!(matches!(&error, Error::Failed { message, .. } if message.contains("does not listen")), "{error}");
    });
    hosts.on(0, || mediator.finalize().unwrap());
    hosts.on(1, || consumer.finalize().unwrap());
}
