//! Calls and bulk data between engines that trust each other.

use calomel::{Bulk, BulkMode, Engine, EngineBuilder, Request, Transport};

use crate::authority::Authority;
use crate::support::*;

/// The settings of every engine here.
fn engine(authority: &Authority) -> EngineBuilder {
    Engine::builder().tls(authority.tls())
}

#[test]
fn calls_of_every_size_succeed_in_both_directions() {
    let _watchdog = Watchdog::start("calls::calls_of_every_size_succeed_in_both_directions");
    let authority = Authority::new();
    let server = engine(&authority).listen("tcp://127.0.0.1:0").build().unwrap();
    let client = engine(&authority).build().unwrap();
    server.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    server
        .define("back", |request: &Request, len: usize| {
            let echo = request.engine().procedure::<Vec<u8>, Vec<u8>>("echo");
            let bytes = pattern(5, len);
            echo.on(request.endpoint()).call(&bytes).map(|back| back == bytes).map_err(|e| e.to_string())
        })
        .unwrap();
    client.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    let to = client.lookup(server.address()).unwrap();
    for len in [0, 1, 16_000, 16_384, 16_400, 100_000, 3_000_000] {
        let bytes = pattern(len as u64, len);
        let back = client.procedure::<Vec<u8>, Vec<u8>>("echo").on(&to).call(&bytes).unwrap();
        assert!(back == bytes, "{len}");
        let same = client.procedure::<usize, Result<bool, String>>("back").on(&to).call(&len).unwrap();
        assert_eq!(same, Ok(true), "{len}");
    }
    // Shared memory would bypass the certificates.
    assert_eq!(to.transport(), Some(Transport::Tcp));
    client.finalize().unwrap();
    server.finalize().unwrap();
}

#[test]
fn transfers_of_every_size_succeed_in_both_directions() {
    let _watchdog = Watchdog::start("calls::transfers_of_every_size_succeed_in_both_directions");
    let authority = Authority::new();
    let server = engine(&authority).listen("tcp://127.0.0.1:0").build().unwrap();
    let client = engine(&authority).build().unwrap();
    let to = client.lookup(server.address()).unwrap();
    for len in [0, 1, 16_383, 65_536, 65_537, 600_000, 16 << 20] {
        let theirs = server.expose(pattern(1, len), BulkMode::ReadWrite).unwrap();
        let mut bytes = vec![0u8; len];
        assert_eq!(theirs.bulk().on(&to).pull_into(&mut bytes).unwrap(), len);
        assert!(bytes == pattern(1, len), "{len}");
        bytes.copy_from_slice(&pattern(2, len));
        assert_eq!(theirs.bulk().on(&to).push_from(&bytes).unwrap(), len);
        assert!(theirs.reclaim() == bytes, "{len}");
    }
    // Of the client's memory, requested by the server.
    server
        .define("turn", |request: &Request, bulk: Bulk| -> Result<(), String> {
            let mut bytes = vec![0u8; bulk.len()];
            let remote = bulk.on(request.endpoint());
            remote.pull_into(&mut bytes).map_err(|e| e.to_string())?;
            bytes.reverse();
            remote.push_from(&bytes).map(drop).map_err(|e| e.to_string())
        })
        .unwrap();
    let mine = client.expose(pattern(3, 1_000_003), BulkMode::ReadWrite).unwrap();
    let turned = client.procedure::<Bulk, Result<(), String>>("turn").on(&to).call(&mine.bulk()).unwrap();
    assert_eq!(turned, Ok(()));
    let mut expected = pattern(3, 1_000_003);
    expected.reverse();
    assert!(mine.reclaim() == expected);
}
