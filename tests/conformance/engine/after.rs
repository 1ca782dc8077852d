//! After finalize, every call of the API fails with `Finalized`.

use std::time::Duration;

use calomel::{BulkMode, Error, HandlerPool, Request, Responder};

use crate::assert_error;
use crate::support::{Net, travelled};

fn call_to_finalized_engine_fails_with_finalized(net: &Net) {
    let pair = net.pair();
    let (engine, endpoint) = (&pair.client, &pair.to_server);
    pair.server.define("hello", |_: &Request, n: u8| n).unwrap();
    let hello = engine.procedure::<u8, u8>("hello");
    hello.on(endpoint).call(&1).unwrap();
    let theirs = pair.server.expose(vec![0u8; 100_000], BulkMode::ReadWrite).unwrap();
    let bulk = travelled(&theirs.bulk());
    let local = engine.expose(vec![0u8; 100], BulkMode::ReadWrite).unwrap();
    let remote = bulk.on(endpoint);
    remote.pull_into(&local).unwrap();
    let provider = engine.provider(3);
    engine.finalize().unwrap();
    assert!(engine.is_finalized());

    // Engine
    engine.finalize().unwrap();
    engine.wait_for_finalize();
    assert_error!(engine.lookup(pair.server.address()), Error::Finalized { .. });
    assert_error!(engine.timer(Duration::ZERO, || {}), Error::Finalized { .. });
    // RPC
    assert_error!(engine.define("late", |_: &Request, ()| ()), Error::Finalized { .. });
    assert_error!(engine.define_async("late", |_: Request, ()| async {}), Error::Finalized { .. });
    assert_error!(engine.define_deferred("late", |_: Responder<()>, ()| {}), Error::Finalized { .. });
    assert_error!(engine.define_borrowed::<str, _, _>("late", |_: &Request, s: &str| s.len()), Error::Finalized { .. });
    assert_error!(provider.define("late", |_: &Request, ()| ()), Error::Finalized { .. });
    assert_error!(engine.pool(&HandlerPool::new(1)).define("late", |_: &Request, ()| ()), Error::Finalized { .. });
    assert_error!(hello.on(endpoint).call(&1), Error::Finalized { .. });
    assert_error!(engine.procedure::<u8, u8>("hello").on(endpoint).call(&1), Error::Finalized { .. });
    assert_error!(hello.on(endpoint).timeout(Duration::from_secs(1)).call(&1), Error::Finalized { .. });
    assert_error!(hello.on(endpoint).start(&1).and_then(|pending| pending.wait()), Error::Finalized { .. });
    assert_error!(hello.on(endpoint).notify(&1), Error::Finalized { .. });
    assert_error!(endpoint.shutdown(), Error::Finalized { .. });
    assert!(!endpoint.is_connected());
    // Bulk
    assert_error!(engine.expose(vec![0u8; 4], BulkMode::ReadWrite), Error::Finalized { .. });
    assert_error!(engine.expose_read_only(String::new()), Error::Finalized { .. });
    assert_error!(remote.pull_into(&local), Error::Finalized { .. });
    assert_error!(remote.push_from(&local), Error::Finalized { .. });
    assert_error!(remote.pull_into(&mut [0u8; 4][..]), Error::Finalized { .. });
    assert_error!(remote.push_from(&[0u8; 4][..]), Error::Finalized { .. });
    assert_error!(bulk.on(endpoint) >> &local, Error::Finalized { .. });
    assert_error!(bulk.on(endpoint) << &local, Error::Finalized { .. });
    assert_error!(bulk.origin(engine).and_then(|remote| remote.pull_into(&mut [0u8; 4][..])), Error::Finalized { .. });
    let (result, local) = remote.start_pull_into(local).wait();
    assert_error!(result, Error::Finalized { .. });
    let (result, local) = remote.start_push_from(local).wait();
    assert_error!(result, Error::Finalized { .. });
    assert_eq!(local.reclaim(), [0; 100]);
    let mut buffer = [0u8; 4];
    let scoped = engine.scope(|s| s.expose(&mut buffer[..], BulkMode::ReadWrite).map(|_| ()));
    assert_error!(scoped, Error::Finalized { .. });
    // Functions that need no engine still work.
    assert_eq!(bulk.slice(0, 5).unwrap().len(), 5);
    assert!(theirs.reclaim() == vec![0; 100_000]);
}

fn transfer_with_a_finalized_owner_fails(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u8; 100_000], BulkMode::ReadWrite).unwrap();
    let bulk = theirs.bulk();
    bulk.on(&pair.to_server).pull_into(&mut [0u8; 10][..]).unwrap();
    pair.server.finalize().unwrap();
    for _ in 0..2 {
        let error = bulk.on(&pair.to_server).pull_into(&mut [0u8; 10][..]).unwrap_err();
        assert!(error.is_disconnected(), "{error}");
        let error = bulk.on(&pair.to_server).push_from(&[0u8; 10][..]).unwrap_err();
        assert!(error.is_disconnected(), "{error}");
    }
}

fn finalized_error_names_the_procedure(net: &Net) {
    let pair = net.pair();
    pair.client.finalize().unwrap();
    let error = pair.client.procedure::<(), ()>("some-name").on(&pair.to_server).call(&()).unwrap_err();
    assert!(error.to_string().contains("some-name") && error.to_string().contains("finalized"), "{error}");
    assert!(!error.is_retryable() && !error.is_disconnected() && !error.is_timeout());
}

suite![call_to_finalized_engine_fails_with_finalized, transfer_with_a_finalized_owner_fails, finalized_error_names_the_procedure,];
