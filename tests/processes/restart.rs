//! A server that is restarted at the same address.

use std::time::{Duration, Instant};

use calomel::{Bulk, Error, Request};

use crate::assert_error;
use crate::support::*;

fn restarted_server_serves_and_refuses_old_bulks() {
    let _watchdog = Watchdog::start("restarted_server_serves_and_refuses_old_bulks");
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
        eventually("the disconnect is noticed", || !endpoint.is_connected());
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
        assert!(all_are(&copy, 7));
    }
}

fn pull_of_old_bulk_from_restarted_server_fails() {
    // The transfer is the first operation after the restart: no call has met the new process before.
    let _watchdog = Watchdog::start("pull_of_old_bulk_from_restarted_server_fails");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    let open = engine.procedure::<(u8, usize), Bulk>("open");
    let old = open.on(&endpoint).call(&(1, 100_000)).unwrap();
    drop(child);
    eventually("the disconnect is noticed", || !endpoint.is_connected());
    let (_child, _) = Child::server(&[(LISTEN, &address.to_string())]);
    assert_error!(old.on(&endpoint).pull_into(&mut [0u8; 10][..]), Error::PeerRestarted { .. });
    assert_serves(&engine, &endpoint);
}

fn calls_right_after_a_restart_soon_succeed() {
    // Calls right after the kill, before the disconnect is known: each ends soon, and soon one succeeds.
    let _watchdog = Watchdog::start("calls_right_after_a_restart_soon_succeed");
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

fn restarted_client_is_a_new_peer() {
    // Same program, same host: the old client's exposed memory is gone, and its endpoint does not lead to the new client.
    let _watchdog = Watchdog::start("restarted_client_is_a_new_peer");
    let engine = server();
    let (report, reports) = std::sync::mpsc::channel();
    engine.define("hello", move |r: &Request, ()| report.send(r.endpoint().clone()).unwrap()).unwrap();
    let mut callers = Vec::new();
    for _ in 0..2 {
        let mut child = Child::client();
        child.tell(&format!("call hello {}", engine.address()));
        let caller = reports.recv_timeout(BOUND).unwrap();
        child.hear("result");
        assert_serves(&engine, &caller);
        callers.push(caller);
        drop(child);
        eventually("the disconnect is noticed", || callers.iter().all(|caller| !caller.is_connected()));
    }
    assert_ne!(callers[0], callers[1]);
    for caller in &callers {
        let begin = Instant::now();
        let error = engine.procedure::<(u32, u32), u32>("add").on(caller).call(&(1, 2)).unwrap_err();
        assert!(error.is_disconnected() && begin.elapsed() < NOTICED, "{error}");
    }
    assert_lives(&engine);
}

fn address_in_use_is_an_error_until_its_engine_is_killed() {
    let _watchdog = Watchdog::start("address_in_use_is_an_error_until_its_engine_is_killed");
    let (child, address) = Child::server(&[]);
    // With a connection, so that the kernel keeps the port for a while.
    let engine = client();
    assert_serves(&engine, &engine.lookup(&address).unwrap());
    assert_error!(configured().listen(&address).build(), Error::AddressInUse { address: named, .. } if named == address);
    drop(child);
    let successor = configured().listen(&address).build().unwrap();
    define_add(&successor);
    eventually("the disconnect is noticed", || !engine.lookup(&address).unwrap().is_connected());
    assert_serves(&engine, &engine.lookup(&address).unwrap());
}

#[test]
fn port_in_use_by_another_socket_is_an_error() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", socket.local_addr().unwrap());
    assert_error!(configured().listen(&taken).build(), Error::AddressInUse { .. });
}

over_each!(
    restarted_server_serves_and_refuses_old_bulks,
    pull_of_old_bulk_from_restarted_server_fails,
    calls_right_after_a_restart_soon_succeed,
    restarted_client_is_a_new_peer,
    address_in_use_is_an_error_until_its_engine_is_killed
);
