//! The dial filter decides which addresses named by peers an engine connects to.

use std::sync::{Arc, Mutex, mpsc};

use calomel::{Address, BulkMode, Endpoint, EngineBuilder, Error, Request};

use crate::support::{BOUND, Net, all_are, eventually, pattern, travelled};

/// A filter that records the addresses that it is asked about, and always returns `answer`.
fn filtered(builder: EngineBuilder, asked: &Arc<Mutex<Vec<Address>>>, answer: bool) -> EngineBuilder {
    let asked = asked.clone();
    builder.dial_filter(move |address| {
        asked.lock().unwrap().push(address.clone());
        answer
    })
}

#[track_caller]
fn refused<T>(result: calomel::Result<T>, at: &Address) {
    match result {
        Err(Error::Unreachable { peer, reason, .. }) => {
            assert_eq!(peer, *at);
            assert!(reason.contains("dial filter"), "{reason}");
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("a success"),
    }
}

fn owner_of_a_bulk_is_dialled_only_if_the_filter_allows(net: &Net) {
    for len in [100, 100_000] {
        let owner = net.server();
        let exposed = owner.expose(pattern(1, len), BulkMode::ReadWrite).unwrap();
        let bulk = travelled(&exposed.bulk());
        let asked = Arc::default();
        let wary = net.client_with(|builder| filtered(builder, &asked, false));
        let mut copy = vec![0u8; len];
        refused(bulk.origin(&wary).and_then(|remote| remote.pull_into(&mut copy)), &owner.address());
        assert_eq!(*asked.lock().unwrap(), [owner.address()]);
        assert!(all_are(&copy, 0));
        // Addresses that the program itself has looked up bypass the filter.
        let to_owner = wary.lookup(owner.address()).unwrap();
        assert_eq!(bulk.origin(&wary).unwrap().pull_into(&mut copy).unwrap(), len);
        assert!(copy == pattern(1, len) && to_owner.is_connected());
        assert_eq!(asked.lock().unwrap().len(), 1);
        let asked = Arc::default();
        let open = net.client_with(|builder| filtered(builder, &asked, true));
        assert_eq!(bulk.origin(&open).unwrap().pull_into(&mut copy).unwrap(), len);
        assert!(asked.lock().unwrap().iter().all(|address| *address == owner.address()));
        assert!(!asked.lock().unwrap().is_empty());
    }
}

fn claimed_address_is_dialled_only_if_the_filter_allows(net: &Net) {
    for answer in [false, true] {
        let asked = Arc::default();
        let server = net.server_with(|builder| filtered(builder, &asked, answer));
        let (sender, receiver) = mpsc::channel::<Endpoint>();
        server.define("hello", move |request: &Request, ()| sender.send(request.endpoint().clone()).unwrap()).unwrap();
        let peer = net.server();
        let claimed = peer.address();
        peer.procedure::<(), ()>("hello").on(peer.lookup(server.address()).unwrap()).call(&()).unwrap();
        let caller = receiver.recv_timeout(BOUND).unwrap();
        assert_eq!(caller.address(), claimed);
        peer.finalize().unwrap();
        eventually("the connection is gone", || !caller.is_connected());
        assert!(asked.lock().unwrap().is_empty(), "nothing was dialled");
        let call = server.procedure::<(), ()>("hello").on(&caller).call(&());
        if answer {
            assert!(call.unwrap_err().is_disconnected());
        } else {
            refused(call, &claimed);
        }
        assert_eq!(asked.lock().unwrap().first(), Some(&claimed));
    }
}

fn panicking_dial_filter_refuses(net: &Net) {
    let owner = net.server();
    let exposed = owner.expose(pattern(1, 1000), BulkMode::ReadWrite).unwrap();
    let wary = net.client_with(|builder| builder.dial_filter(|_| panic!("for the test")));
    refused(travelled(&exposed.bulk()).origin(&wary), &owner.address());
}

suite![
    owner_of_a_bulk_is_dialled_only_if_the_filter_allows,
    claimed_address_is_dialled_only_if_the_filter_allows,
    panicking_dial_filter_refuses,
];
