//! Engines that listen later, and callers that wait for them.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, Engine, Error, Request, Transport};

use crate::support::{Net, eventually, guarded};

const LONG: Duration = Duration::from_secs(20);

fn procedures_defined_before_listening_are_served(net: &Net) {
    let server = net.client();
    server.define("double", |_: &Request, x: u32| 2 * x).unwrap();
    assert!(server.addresses().is_empty());
    let address = server.listen(net.fresh_address()).unwrap();
    assert_eq!((server.address(), server.addresses()), (address.clone(), vec![address.clone()]));
    let client = net.client();
    let peer = client.lookup(&address).unwrap();
    assert_eq!(client.procedure::<u32, u32>("double").on(&peer).call(&21).unwrap(), 42);
}

fn each_of_several_addresses_is_served(net: &Net) {
    let server = net.server();
    server.define("hello", |_: &Request, ()| 7u8).unwrap();
    let more: Vec<_> = (0..3).map(|_| server.listen(net.fresh_address()).unwrap()).collect();
    assert_eq!(server.addresses()[1..], more);
    for address in server.addresses() {
        let client = net.client();
        assert_eq!(client.procedure::<(), u8>("hello").on(client.lookup(address).unwrap()).call(&()).unwrap(), 7);
    }
}

fn bulk_of_an_engine_that_listens_later_leads_to_it(net: &Net) {
    // The owner is known to the mediator by its connection only; a third engine reaches it at the later address.
    let (owner, mediator, third) = (net.client(), net.server(), net.client());
    mediator.define("forward", |_: &Request, bulk: Bulk| bulk).unwrap();
    let address = owner.listen(net.fresh_address()).unwrap();
    let exposed = owner.expose_read_only(vec![5u8; 10_000]).unwrap();
    let to_mediator = owner.lookup(mediator.address()).unwrap();
    let sent: Bulk = owner.procedure::<Bulk, Bulk>("forward").on(&to_mediator).call(&exposed.bulk()).unwrap();
    assert!(format!("{sent:?}").contains(&address.to_string()), "{sent:?}");
    let mut buffer = vec![0u8; 10_000];
    assert_eq!(sent.origin(&third).unwrap().pull_into(&mut buffer[..]).unwrap(), 10_000);
    assert_eq!(buffer, vec![5u8; 10_000]);
}

fn address_in_use_is_named_and_leaves_the_engine_intact(net: &Net) {
    let (first, second) = (net.server(), net.client());
    let error = second.listen(first.address()).unwrap_err();
    assert!(matches!(&error, Error::AddressInUse { address } if *address == first.address()), "{error}");
    assert!(second.addresses().is_empty());
    second.listen(net.fresh_address()).unwrap();
}

fn bad_address_is_named(net: &Net) {
    let engine = net.client();
    for text in ["tcp//x", "udp://1.2.3.4:5", "tcp://host"] {
        let error = engine.listen(text).unwrap_err();
        assert!(matches!(&error, Error::InvalidAddress { text: found, .. } if found == text), "{error}");
    }
    let error = engine.listen("nowhere://").unwrap_err();
    assert!(error.to_string().contains("does not listen"), "{error}");
}

fn listening_after_the_end_is_an_error(net: &Net) {
    let engine = net.client();
    engine.finalize().unwrap();
    let error = engine.listen(net.fresh_address()).unwrap_err();
    assert!(matches!(&error, Error::Finalized { what } if what.contains("listening")), "{error}");
}

fn seventeenth_address_is_refused(net: &Net) {
    let engine = net.client();
    for _ in 0..16 {
        engine.listen(net.fresh_address()).unwrap();
    }
    let error = engine.listen(net.fresh_address()).unwrap_err();
    assert!(error.to_string().contains("16"), "{error}");
    // A peer accepts its hello.
    let client = net.client();
    client.lookup(engine.address()).unwrap().ping(LONG).unwrap();
}

fn threads_that_listen_at_once_share_the_limit(net: &Net) {
    let engine = net.client();
    let addresses: Vec<_> = (0..20).map(|_| net.fresh_address()).collect();
    let barrier = Barrier::new(addresses.len());
    let listening: Vec<_> = thread::scope(|scope| {
        let (engine, barrier) = (&engine, &barrier);
        let listen = |address| {
            scope.spawn(move || {
                barrier.wait();
                engine.listen(address)
            })
        };
        let threads: Vec<_> = addresses.into_iter().map(listen).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap().ok()).collect()
    });
    assert_eq!(listening.len(), 16);
    let known = engine.addresses();
    assert!(listening.iter().all(|address| known.contains(address)), "{known:?} lacks some of {listening:?}");
    net.client().lookup(engine.address()).unwrap().ping(LONG).unwrap();
}

fn ping_measures_a_round_trip(net: &Net) {
    let pair = net.pair();
    let first = pair.to_server.ping(LONG).unwrap();
    let second = pair.to_server.ping(LONG).unwrap();
    assert!(first < LONG && second < LONG);
    // No procedure is defined, and none is needed.
    assert!(pair.to_server.is_connected());
    // A busy handler does not hold it up.
    pair.server.define("block", |_: &Request, ()| thread::sleep(Duration::from_millis(500))).unwrap();
    let block = pair.client.procedure::<(), ()>("block");
    let pending = block.on(&pair.to_server).start(&()).unwrap();
    let begin = Instant::now();
    pair.to_server.ping(LONG).unwrap();
    assert!(!pending.is_ready() || begin.elapsed() > Duration::from_millis(400));
    pending.wait().unwrap();
}

fn ping_of_an_absent_peer_is_an_error(net: &Net) {
    let client = net.client();
    let error = client.lookup(net.dead_address()).unwrap().ping(LONG).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.is_retryable(), "{error}");
}

fn wait_ready_waits_for_a_peer_that_starts_later(net: &Net) {
    let address = net.dead_address();
    let client = net.client();
    let peer = client.lookup(&address).unwrap();
    let short = peer.wait_ready(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(short, Error::Unreachable { .. } | Error::Timeout { .. }), "{short}");
    let server = net.client();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| peer.wait_ready(LONG));
        thread::sleep(Duration::from_millis(100));
        server.define("hello", |_: &Request, ()| 3u8).unwrap();
        server.listen(address.as_str()).unwrap();
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(client.procedure::<(), u8>("hello").on(&peer).call(&()).unwrap(), 3);
}

fn wait_ready_ends_with_what_waiting_does_not_mend(net: &Net) {
    let server =
        net.keep(guarded(net.builder()).listen(net.fresh_address()).pre_shared_key("another key than it").build().unwrap());
    let client = net.keep(net.builder().pre_shared_key("the key of the client").build().unwrap());
    let begin = Instant::now();
    let error = client.lookup(server.address()).unwrap().wait_ready(LONG).unwrap_err();
    assert!(matches!(error, Error::AccessDenied { .. }), "{error}");
    assert!(begin.elapsed() < LONG / 2);
}

suite!(
    procedures_defined_before_listening_are_served,
    each_of_several_addresses_is_served,
    bulk_of_an_engine_that_listens_later_leads_to_it,
    address_in_use_is_named_and_leaves_the_engine_intact,
    bad_address_is_named,
    listening_after_the_end_is_an_error,
    seventeenth_address_is_refused,
    threads_that_listen_at_once_share_the_limit,
    ping_measures_a_round_trip,
    ping_of_an_absent_peer_is_an_error,
    wait_ready_waits_for_a_peer_that_starts_later,
    wait_ready_ends_with_what_waiting_does_not_mend,
);

#[test]
fn engine_that_listens_on_all_interfaces_has_addresses_that_others_dial() {
    for (listen, v6) in [("tcp://0.0.0.0:0", false), ("tcp", false), ("tcp://[::]:0", true)] {
        let Ok(server) = Engine::server(listen) else {
            assert!(v6, "{listen}");
            continue;
        };
        server.define("hello", |_: &Request, ()| 9u8).unwrap();
        assert!(!server.addresses().is_empty());
        for address in server.addresses() {
            assert!(address.is_dialable(), "{address}");
            let client = Engine::client("tcp").unwrap();
            let peer = client.lookup(&address).unwrap();
            assert_eq!(client.procedure::<(), u8>("hello").on(&peer).call(&()).unwrap(), 9, "{address}");
        }
    }
}

/// Also where it is not the address that the first call came from: engines of a job on one host look each other up.
#[test]
fn one_connection_serves_both_directions_between_engines_on_all_interfaces() {
    for same_host_upgrade in [false, true] {
        let engine = || Engine::builder().listen("tcp").same_host_upgrade(same_host_upgrade).build().unwrap();
        let (one, other) = (engine(), engine());
        // Before they are connected: an endpoint stands for one peer from then on.
        let (to_one, to_other) = (other.lookup(one.address()).unwrap(), one.lookup(other.address()).unwrap());
        to_other.ping(LONG).unwrap();
        to_one.ping(LONG).unwrap();
        for engine in [&one, &other] {
            let open: u64 = engine.stats().transports.iter().map(|transport| transport.open).sum();
            assert_eq!((open, engine.peers().len()), (1, 1), "upgrade {same_host_upgrade}: {:?}", engine.peers());
        }
    }
}

#[test]
fn interface_is_named_in_place_of_a_host() {
    let server = Engine::server("tcp://lo:0").unwrap();
    assert!(server.address().to_string().starts_with("tcp://127.0.0.1:"), "{}", server.address());
    let error = Engine::server("tcp://no-such-interface0:0").unwrap_err();
    assert!(error.to_string().contains("no-such-interface0") && !error.is_retryable(), "{error}");
}

#[test]
fn advertised_address_is_what_peers_get() {
    let server = Engine::builder()
        .listen("tcp://127.0.0.1:0")
        .advertise("tcp://service.example:0")
        .advertise("tcp://192.0.2.9:7000")
        .build()
        .unwrap();
    let port = server.address().to_string().rsplit_once(':').unwrap().1.to_owned();
    assert_eq!(server.address().to_string(), format!("tcp://service.example:{port}"));
    assert_ne!(port, "0");
    assert_eq!(server.addresses()[1].to_string(), "tcp://192.0.2.9:7000");
    let bulk = server.expose_read_only(vec![1u8]).unwrap().bulk();
    assert!(format!("{bulk:?}").contains("service.example"), "{bulk:?}");
    let error = Engine::builder().advertise("nonsense").build().unwrap_err();
    assert!(matches!(&error, Error::InvalidAddress { text, .. } if text == "nonsense"), "{error}");
}

#[test]
fn unknown_host_and_a_foreign_listener_are_not_retryable() {
    let client = Engine::client("tcp").unwrap();
    let error = client.lookup("tcp://no-such-host.invalid:7000").unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && !error.is_retryable(), "{error}");

    let foreign = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", foreign.local_addr().unwrap());
    let server = thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = foreign.accept().unwrap();
        stream.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        stream
    });
    let error = client.lookup(address).unwrap().ping(LONG).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && !error.is_retryable(), "{error}");
    drop(server.join().unwrap());
}

#[test]
fn transport_of_an_endpoint_is_a_transport() {
    let (server, client) = (Engine::server("loop").unwrap(), Engine::client("loop").unwrap());
    let peer = client.lookup(server.address()).unwrap();
    peer.ping(LONG).unwrap();
    assert_eq!(peer.transport(), Some(Transport::Loop));
    server.finalize().unwrap();
    eventually("the connection ends", || peer.transport().is_none());
}
