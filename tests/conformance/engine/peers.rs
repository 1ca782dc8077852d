//! Peers: which are connected, and events when that changes.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use calomel::{Bulk, Engine, Error, PeerEvent, Request};

use crate::support::{BOUND, Net, eventually};

const LONG: Duration = Duration::from_secs(20);

fn observed(net: &Net) -> (Engine, mpsc::Receiver<PeerEvent>) {
    let (events, received) = mpsc::channel();
    let events = Mutex::new(events);
    let hook = move |event| drop(events.lock().unwrap().send(event));
    (net.server_with(|builder| builder.on_peer_event(hook)), received)
}

fn peers_are_listed_and_reported_as_they_come_and_go(net: &Net) {
    let (server, events) = observed(net);
    assert!(server.peers().is_empty());
    let first = net.server();
    first.lookup(server.address()).unwrap().ping(LONG).unwrap();
    let Ok(PeerEvent::Connected(endpoint)) = events.recv_timeout(BOUND) else { panic!() };
    assert_eq!(server.peers(), [endpoint.clone()]);
    // The peer can be called by the endpoint of the event.
    first.define("hello", |_: &Request, ()| 1u8).unwrap();
    assert_eq!(server.procedure::<(), u8>("hello").on(&endpoint).call(&()).unwrap(), 1);
    let second = net.client();
    second.lookup(server.address()).unwrap().ping(LONG).unwrap();
    assert!(matches!(events.recv_timeout(BOUND), Ok(PeerEvent::Connected(_))));
    assert_eq!(server.peers().len(), 2);
    first.finalize().unwrap();
    match events.recv_timeout(BOUND).unwrap() {
        PeerEvent::Lost { endpoint: lost, error } => {
            assert_eq!(lost, endpoint);
            assert!(matches!(error, Error::Disconnected { .. }), "{error}");
        }
        event => panic!("{event:?}"),
    }
    assert_eq!(server.peers().len(), 1);
    server.finalize().unwrap();
    assert!(matches!(events.recv_timeout(BOUND), Ok(PeerEvent::Lost { .. })));
    assert!(events.try_recv().is_err());
}

fn each_connection_of_many_is_reported_once(net: &Net) {
    let (server, events) = observed(net);
    let clients: Vec<Engine> = (0..8).map(|_| net.client()).collect();
    for _ in 0..3 {
        std::thread::scope(|scope| {
            for client in &clients {
                scope.spawn(|| {
                    let peer = client.lookup(server.address()).unwrap();
                    peer.ping(LONG).unwrap();
                    peer.forget();
                    assert!(!peer.is_connected());
                });
            }
        });
    }
    let mut connected = 0;
    for _ in 0..2 * 3 * clients.len() {
        match events.recv_timeout(BOUND).unwrap() {
            PeerEvent::Connected(_) => connected += 1,
            PeerEvent::Lost { .. } => {}
            event => panic!("{event:?}"),
        }
    }
    assert_eq!(connected, 3 * clients.len());
    assert!(events.try_recv().is_err());
    eventually("no peer is left", || server.peers().is_empty());
}

fn hook_that_panics_or_uses_the_engine_does_no_harm(net: &Net) {
    let engine = Arc::new(Mutex::new(None::<calomel::WeakEngine>));
    let own = engine.clone();
    let hook = move |event: PeerEvent| {
        let engine = own.lock().unwrap().clone();
        let Some(engine) = engine.and_then(|engine| engine.upgrade()) else { return };
        let (PeerEvent::Connected(endpoint) | PeerEvent::Lost { endpoint, .. }) = event else { return };
        let _ = (engine.peers().len(), endpoint.is_connected(), endpoint.address(), engine.refusals().total());
        // Waiting is refused there, and does not hang.
        assert!(matches!(
            endpoint.ping(LONG),
            Err(Error::Unsupported { .. } | Error::Cancelled { .. } | Error::Finalized { .. })
        ));
        panic!("in the hook");
    };
    let server = net.server_with(|builder| builder.on_peer_event(hook));
    *engine.lock().unwrap() = Some(server.downgrade());
    for _ in 0..3 {
        let client = net.client();
        client.lookup(server.address()).unwrap().ping(LONG).unwrap();
        client.finalize().unwrap();
    }
    eventually("no peer is left", || server.peers().is_empty());
}

fn forgotten_peer_is_connected_anew(net: &Net) {
    let address = {
        let server = net.server();
        let address = server.address();
        let client = net.client();
        let peer = client.lookup(&address).unwrap();
        server.define("wait", |_: &Request, _: Bulk| std::thread::sleep(Duration::from_millis(300))).unwrap();
        let exposed = client.expose_read_only(vec![1u8; 100_000]).unwrap();
        let waiting = client.procedure::<Bulk, ()>("wait").on(&peer).start(&exposed.bulk()).unwrap();
        peer.ping(LONG).unwrap();
        assert!(!exposed.released().is_released());
        peer.forget();
        assert!(matches!(waiting.wait(), Err(Error::Disconnected { .. })));
        assert!(!peer.is_connected());
        exposed.released().wait_timeout(BOUND).unwrap();
        // The same engine, and after a restart another one, is reached by the same endpoint.
        peer.ping(LONG).unwrap();
        server.finalize().unwrap();
        let other = net.client();
        other.define("hello", |_: &Request, ()| 2u8).unwrap();
        peer.forget();
        other.listen(&address).unwrap();
        assert_eq!(client.procedure::<(), u8>("hello").on(&peer).call(&()).unwrap(), 2);
        address
    };
    assert!(net.client().lookup(address).unwrap().ping(LONG).is_ok());
}

fn engines_are_equal_if_they_are_the_same(net: &Net) {
    let (first, second) = (net.server(), net.server());
    assert_eq!(first, first.clone());
    assert_eq!(first, first.downgrade().upgrade().unwrap());
    assert_eq!(first.lookup(second.address()).unwrap().engine(), first);
    assert_eq!(first.provider(3).engine(), first);
    assert_ne!(first, second);
}

suite!(
    peers_are_listed_and_reported_as_they_come_and_go,
    each_connection_of_many_is_reported_once,
    hook_that_panics_or_uses_the_engine_does_no_harm,
    forgotten_peer_is_connected_anew,
    engines_are_equal_if_they_are_the_same,
);
