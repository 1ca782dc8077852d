//! Access control: which peers may connect, and which calls they may make.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use calomel::{BulkMode, Endpoint, Engine, EngineBuilder, Error, Request, Transport};

use crate::assert_error;
use crate::support::{Net, Pair, all_are, eventually, travelled};

const KEY: &[u8] = b"sixteen bytes at the least";
const OTHER: &[u8] = b"sixteen bytes of something else";

fn keyed(builder: EngineBuilder) -> EngineBuilder {
    builder.pre_shared_key(KEY)
}

fn other(builder: EngineBuilder) -> EngineBuilder {
    builder.pre_shared_key(OTHER)
}

fn serving(engine: Engine) -> Engine {
    engine.define("hello", |_: &Request, ()| 7u8).unwrap();
    engine
}

fn hello(engine: &Engine, to: &Endpoint) -> calomel::Result<u8> {
    engine.procedure::<(), u8>("hello").on(to).call(&())
}

fn client_with_the_key_is_served(net: &Net) {
    let pair = Pair::of(serving(net.server_with(keyed)), net.client_with(keyed));
    assert_eq!(hello(&pair.client, &pair.to_server).unwrap(), 7);
    let exposed = pair.server.expose(vec![9u8; 100_000], BulkMode::ReadOnly).unwrap();
    let mut copy = vec![0u8; 100_000];
    assert_eq!(travelled(&exposed.bulk()).on(&pair.to_server).pull_into(&mut copy[..]).unwrap(), 100_000);
    assert!(all_are(&copy, 9));
}

/// In both directions. The client with the right key is not disturbed.
fn client_with_another_key_is_refused(net: &Net) {
    let server = serving(net.server_with(keyed));
    let rejected = net.client_with(other);
    let good = net.client_with(keyed);
    let to_server = good.lookup(server.address()).unwrap();
    for _ in 0..3 {
        let error = hello(&rejected, &rejected.lookup(server.address()).unwrap()).unwrap_err();
        assert!(!error.is_retryable());
        assert_error!(Err::<(), _>(error), Error::AccessDenied { reason, .. } if reason.contains("key"));
        assert_eq!(hello(&good, &to_server).unwrap(), 7);
    }
    assert_eq!(server.refusals().connections, 3);
    // Here the client refuses the server.
    let strange = serving(net.server_with(other));
    assert_error!(hello(&good, &good.lookup(strange.address()).unwrap()), Error::AccessDenied { .. });
    assert_eq!(hello(&good, &to_server).unwrap(), 7);
}

fn keys_that_are_too_short_are_refused(net: &Net) {
    for key in ["", "fifteen bytes.."] {
        assert_error!(net.builder().pre_shared_key(key).build(), Error::Unsupported { what, .. } if !what.contains("fifteen"));
    }
    let debug = format!("{:?}", net.builder().pre_shared_key(KEY));
    assert!(!debug.contains("sixteen") && !debug.contains("115"), "{debug}");
}

fn authorize_hook_decides_on_each_call(net: &Net) {
    let asked = Arc::new(AtomicU32::new(0));
    let server = net.server_with(|builder| {
        let asked = asked.clone();
        builder.authorize(move |caller| {
            asked.fetch_add(1, Ordering::Relaxed);
            caller.procedure() != "secret" && caller.provider_id() != 3
        })
    });
    let done = Arc::new(AtomicU32::new(0));
    for provider in [0, 3] {
        for name in ["secret", "open"] {
            let done = done.clone();
            let count = move |_: &Request, (): ()| done.fetch_add(1, Ordering::SeqCst);
            server.provider(provider).define(name, count).unwrap();
        }
    }
    let pair = Pair::of(server, net.client());
    let call = |name: &str, to: &Endpoint| pair.client.procedure::<(), u32>(name).on(to).call(&());
    assert_eq!(call("open", &pair.to_server).unwrap(), 0);
    assert_error!(call("secret", &pair.to_server), Error::AccessDenied { .. });
    assert_error!(call("open", &pair.to_server.provider(3)), Error::AccessDenied { .. });
    // Unknown procedures are denied in the same way.
    assert_error!(call("nothing", &pair.to_server.provider(3)), Error::AccessDenied { .. });
    assert_error!(call("nothing", &pair.to_server), Error::NoSuchProcedure { .. });
    // Denied calls with large arguments, and denied one-way calls, run no handler.
    let large = pair.client.procedure::<Vec<u8>, u32>("secret");
    assert_error!(large.on(&pair.to_server).call(&vec![1; 1 << 20]), Error::AccessDenied { .. });
    pair.client.procedure::<(), u32>("secret").on(&pair.to_server).notify(&()).unwrap();
    eventually("the notice is decided on", || asked.load(Ordering::Relaxed) == 7);
    assert_eq!(call("open", &pair.to_server).unwrap(), 1);
    let refusals = pair.server.refusals();
    assert_eq!((refusals.calls, refusals.total()), (5, 5));
}

fn authorize_hook_knows_the_caller(net: &Net) {
    let scheme = net.scheme();
    let server = net.server_with(|builder| {
        builder.authorize(move |caller| {
            let process = caller.process().map(|process| (process.pid, process.uid));
            // SAFETY: takes nothing, and cannot fail.
            #[allow(unsafe_code)]
            let own = (std::process::id(), unsafe { libc::geteuid() });
            let carrier = caller.transport();
            let known = matches!(carrier, Some(Transport::Loop | Transport::Shm));
            carrier.is_some_and(|carrier| carrier.to_string() == scheme)
                && process == known.then_some(own)
                && format!("{caller:?}").contains("hello")
                && caller.endpoint().is_connected()
        })
    });
    let pair = Pair::of(serving(server), net.client());
    assert_eq!(hello(&pair.client, &pair.to_server).unwrap(), 7);
}

/// If the `authorize` hook panics, the call is denied and the engine stays usable.
fn panicking_authorize_hook_denies_the_call(net: &Net) {
    let server = net.server_with(|builder| {
        builder.authorize(|caller| {
            assert!(caller.procedure() != "panic", "on purpose");
            true
        })
    });
    let pair = Pair::of(serving(server), net.client());
    let panics = pair.client.procedure::<(), ()>("panic");
    assert_error!(panics.on(&pair.to_server).call(&()), Error::AccessDenied { .. });
    assert_eq!(hello(&pair.client, &pair.to_server).unwrap(), 7);
}

suite!(
    client_with_the_key_is_served,
    client_with_another_key_is_refused,
    keys_that_are_too_short_are_refused,
    authorize_hook_decides_on_each_call,
    authorize_hook_knows_the_caller,
    panicking_authorize_hook_denies_the_call,
);
