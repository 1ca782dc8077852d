//! A server that is started again at the address that it had.

use std::time::{Duration, Instant};

use calomel::{Bulk, Error, Request};

use crate::assert_error;
use crate::support::*;

fn a_restarted_server_serves_and_knows_no_old_bulks() {
    let _watchdog = Watchdog::start("a_restarted_server_serves_and_knows_no_old_bulks");
    let (mut child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    let text = address.to_string();
    for _ in 0..3 {
        assert_serves(&engine, &endpoint);
        let open = engine.procedure::<(u8, usize), Bulk>("open");
        let old = open.on(&endpoint).call(&(1, 100_000)).unwrap();
        let mut copy = vec![0u8; 100_000];
        assert_eq!(old.on(&endpoint).pull_into(&mut copy).unwrap(), 100_000);
        child.signal(libc::SIGKILL);
        drop(child);
        eventually("the death is noticed", || !endpoint.is_connected());
        let error = old.on(&endpoint).pull_into(&mut copy).unwrap_err();
        assert_error!(Err::<(), _>(error), Error::Unreachable { .. });

        child = Child::server(&[(LISTEN, &text)]).0;
        copy.fill(7);
        assert_serves(&engine, &endpoint);
        let _ours = open.on(&endpoint).call(&(2, 100_000)).unwrap();
        let begin = Instant::now();
        let error = old.on(&endpoint).pull_into(&mut copy).unwrap_err();
        assert!(error.to_string().contains(&text), "{error}");
        assert_error!(Err::<(), _>(error), Error::PeerRestarted { .. });
        assert_error!(old.on(&endpoint).push_from(&copy), Error::PeerRestarted { .. });
        assert!(begin.elapsed() < Duration::from_secs(2));
        assert!(copy.iter().all(|&b| b == 7));
    }
}

fn an_old_bulk_alone_finds_the_new_server_out() {
    // The first thing after the restart is the transfer: no call has met the new process before.
    let _watchdog = Watchdog::start("an_old_bulk_alone_finds_the_new_server_out");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    let open = engine.procedure::<(u8, usize), Bulk>("open");
    let old = open.on(&endpoint).call(&(1, 100_000)).unwrap();
    drop(child);
    eventually("the death is noticed", || !endpoint.is_connected());
    let (_child, _) = Child::server(&[(LISTEN, &address.to_string())]);
    assert_error!(old.on(&endpoint).pull_into(&mut [0u8; 10][..]), Error::PeerRestarted { .. });
    assert_serves(&engine, &endpoint);
}

fn a_restart_that_nobody_noticed() {
    // Calls right after the kill, without waiting for the news: each ends soon, and soon one succeeds.
    let _watchdog = Watchdog::start("a_restart_that_nobody_noticed");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    assert_serves(&engine, &endpoint);
    drop(child);
    let (_child, _) = Child::server(&[(LISTEN, &address.to_string())]);
    let begin = Instant::now();
    let add = engine.procedure::<(u32, u32), u32>("add");
    eventually("the new server serves", || match add.on(&endpoint).call(&(1, 2)) {
        Ok(sum) => sum == 3,
        Err(error) => {
            assert!(error.is_disconnected(), "{error}");
            false
        }
    });
    assert!(begin.elapsed() < NOTICED);
}

fn a_client_that_comes_back_is_a_new_one() {
    // Same program, same host; what the old one exposed is gone, and its endpoint does not become the new one's.
    let _watchdog = Watchdog::start("a_client_that_comes_back_is_a_new_one");
    let engine = server();
    let (tell, told) = std::sync::mpsc::channel();
    engine.define("hello", move |r: &Request, ()| tell.send(r.endpoint().clone()).unwrap()).unwrap();
    let mut callers = Vec::new();
    for _ in 0..2 {
        let mut child = Child::client();
        child.tell(&format!("call hello {}", engine.address()));
        let caller = told.recv_timeout(BOUND).unwrap();
        child.hear("result");
        assert_serves(&engine, &caller);
        callers.push(caller);
        drop(child);
        eventually("the death is noticed", || callers.iter().all(|caller| !caller.is_connected()));
    }
    assert_ne!(callers[0], callers[1]);
    for caller in &callers {
        let begin = Instant::now();
        let error = engine.procedure::<(u32, u32), u32>("add").on(caller).call(&(1, 2)).unwrap_err();
        assert!(error.is_disconnected() && begin.elapsed() < NOTICED, "{error}");
    }
    assert_lives(&engine);
}

fn an_address_in_use_is_an_error_and_free_again_after_a_kill() {
    let _watchdog = Watchdog::start("an_address_in_use_is_an_error_and_free_again_after_a_kill");
    let (child, address) = Child::server(&[]);
    // With a connection, so that a port lingers in the system's tables.
    let engine = client();
    assert_serves(&engine, &engine.lookup(&address).unwrap());
    assert_error!(configured().listen(&address).build(), Error::AddressInUse { address: named, .. } if named == address);
    drop(child);
    let successor = configured().listen(&address).build().unwrap();
    define_add(&successor);
    eventually("the death is noticed", || !engine.lookup(&address).unwrap().is_connected());
    assert_serves(&engine, &engine.lookup(&address).unwrap());
}

#[test]
fn a_port_in_use_by_somebody_else_is_an_error() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", socket.local_addr().unwrap());
    assert_error!(configured().listen(&taken).build(), Error::AddressInUse { .. });
}

over_each!(
    a_restarted_server_serves_and_knows_no_old_bulks,
    an_old_bulk_alone_finds_the_new_server_out,
    a_restart_that_nobody_noticed,
    a_client_that_comes_back_is_a_new_one,
    an_address_in_use_is_an_error_and_free_again_after_a_kill
);
