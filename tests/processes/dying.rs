//! Calls during which the caller's or the server's process dies or freezes.

use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Request};

use crate::assert_error;
use crate::support::*;

const SIGNALS: [i32; 2] = [libc::SIGKILL, libc::SIGSTOP];

fn server_killed_or_stopped_ends_calls_with_disconnected() {
    let _watchdog = Watchdog::start("server_killed_or_stopped_ends_calls_with_disconnected");
    for signal in SIGNALS {
        let (mut child, address) = Child::server(&[]);
        let engine = server();
        let endpoint = engine.lookup(&address).unwrap();
        let hang = engine.procedure::<(), ()>("hang");
        let pendings: Vec<_> = (0..3).map(|_| hang.on(&endpoint).start(&()).unwrap()).collect();
        (0..3).for_each(|_| _ = child.hear("entered"));
        let begin = Instant::now();
        child.signal(signal);
        for pending in pendings {
            let error = pending.wait().unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&address.to_string()) && text.contains("hang"), "{text}");
            assert_disconnected(Err::<(), _>(error), begin);
        }
        assert!(!endpoint.is_connected());
        assert_lives(&engine);
        if signal == libc::SIGSTOP {
            child.signal(libc::SIGCONT);
            // When it continues, it cancels the calls of the lost connection, and serves again over a new one.
            (0..3).for_each(|_| _ = child.hear("cancelled"));
            assert_serves(&engine, &endpoint);
        }
        engine.finalize().unwrap();
    }
}

fn calls_to_stopped_server_fail_within_the_peer_timeout() {
    let _watchdog = Watchdog::start("calls_to_stopped_server_fail_within_the_peer_timeout");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    assert_serves(&engine, &endpoint);
    child.signal(libc::SIGSTOP);
    // Over the existing connection, which was idle: its peer timeout starts with this call.
    let begin = Instant::now();
    assert_disconnected(engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)), begin);
    // And over a new one: the kernel accepts the connection, but no handshake follows.
    let begin = Instant::now();
    let error = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)).unwrap_err();
    assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
    assert!(begin.elapsed() < Duration::from_secs(4));
    // A call's own deadline applies when it is shorter.
    let begin = Instant::now();
    let add = engine.procedure::<(u32, u32), u32>("add");
    assert_error!(add.on(&endpoint).timeout(Duration::from_millis(50)).call(&(1, 2)), Error::Timeout { .. });
    assert!(begin.elapsed() < patience() * Duration::from_secs(1));
    child.signal(libc::SIGCONT);
    assert_serves(&engine, &endpoint);
}

/// A server in this process, whose `hang` reports when it begins and how it ends.
fn hanging_server() -> (Engine, std::sync::mpsc::Receiver<&'static str>) {
    let engine = server();
    define_add(&engine);
    let (report, reports) = std::sync::mpsc::channel();
    engine
        .define("hang", move |request: &Request, ()| {
            report.send("entered").unwrap();
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            let _ = report.send(if request.is_cancelled() { "cancelled" } else { "not cancelled" });
        })
        .unwrap();
    (engine, reports)
}

fn client_killed_or_stopped_cancels_its_calls() {
    let _watchdog = Watchdog::start("client_killed_or_stopped_cancels_its_calls");
    for signal in SIGNALS {
        let (engine, reports) = hanging_server();
        let mut child = Child::client();
        child.tell(&format!("call hang {}", engine.address()));
        assert_eq!(reports.recv_timeout(BOUND), Ok("entered"));
        let begin = Instant::now();
        child.signal(signal);
        assert_eq!(reports.recv_timeout(BOUND), Ok("cancelled"));
        assert!(begin.elapsed() < NOTICED, "{:?}", begin.elapsed());
        assert_lives(&engine);
        if signal == libc::SIGSTOP {
            child.signal(libc::SIGCONT);
            let result = child.hear("result");
            assert!(result.contains("disconnected"), "{result}");
            child.tell(&format!("add {}", engine.address()));
            assert_eq!(child.hear("sum"), "Ok(3)");
        }
        engine.finalize().unwrap();
    }
}

fn callbacks_to_killed_or_stopped_client_end_with_disconnected() {
    // The server calls back its client, which has no address; then the client goes.
    let _watchdog = Watchdog::start("callbacks_to_killed_or_stopped_client_end_with_disconnected");
    for signal in SIGNALS {
        let engine = server();
        let (report, reports) = std::sync::mpsc::channel();
        engine.define("hello", move |r: &Request, ()| report.send(r.endpoint().clone()).unwrap()).unwrap();
        let mut child = Child::client();
        child.tell(&format!("call hello {}", engine.address()));
        let caller = reports.recv_timeout(BOUND).unwrap();
        child.hear("result");
        let pending = engine.procedure::<(), ()>("hang").on(&caller).start(&()).unwrap();
        child.hear("entered");
        let begin = Instant::now();
        child.signal(signal);
        assert_disconnected(pending.wait(), begin);
        let begin = Instant::now();
        let again = engine.procedure::<(), ()>("hang").on(&caller).call(&());
        assert!(again.unwrap_err().is_disconnected());
        assert!(begin.elapsed() < NOTICED);
        assert_lives(&engine);
        engine.finalize().unwrap();
    }
}

fn exit_without_finalize_ends_calls_with_disconnected() {
    let _watchdog = Watchdog::start("exit_without_finalize_ends_calls_with_disconnected");
    // It exits by itself with a call in progress, or from the handler of that call.
    for how in ["order", "exit", "abort"] {
        let (mut child, address) = Child::server(&[]);
        let engine = client();
        let endpoint = engine.lookup(&address).unwrap();
        let name = if how == "order" { "hang" } else { how };
        let begin = Instant::now();
        let pending = engine.procedure::<(), ()>(name).on(&endpoint).start(&()).unwrap();
        if how == "order" {
            child.hear("entered");
            child.tell("exit");
        }
        assert_disconnected(pending.wait(), begin);
        child.wait(BOUND);
        assert_lives(&engine);
    }
}

fn finalized_server_disconnects_and_its_process_exits() {
    let _watchdog = Watchdog::start("finalized_server_disconnects_and_its_process_exits");
    let (mut child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    assert_serves(&engine, &endpoint);
    child.tell("finalize");
    child.hear("finalized");
    assert!(child.wait(BOUND).success());
    let error = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)).unwrap_err();
    assert!(error.is_disconnected(), "{error}");
    assert_lives(&engine);
}

fn finalize_with_stopped_peer_is_bounded() {
    let _watchdog = Watchdog::start("finalize_with_stopped_peer_is_bounded");
    let (mut child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    let pending = engine.procedure::<(), ()>("hang").on(&endpoint).start(&()).unwrap();
    child.hear("entered");
    child.signal(libc::SIGSTOP);
    let begin = Instant::now();
    engine.finalize().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    pending.wait().unwrap_err();
}

fn server_serves_after_many_clients_are_killed() {
    let _watchdog = Watchdog::start("server_serves_after_many_clients_are_killed");
    let (engine, reports) = hanging_server();
    let mut children: Vec<Child> = (0..6).map(|_| Child::client()).collect();
    for child in &mut children {
        child.tell(&format!("call hang {}", engine.address()));
    }
    let mut cancelled = 0;
    (0..6).for_each(|_| assert_eq!(reports.recv_timeout(BOUND), Ok("entered")));
    while let Some(child) = children.pop() {
        drop(child);
        assert_eq!(reports.recv_timeout(BOUND), Ok("cancelled"));
        cancelled += 1;
        assert_lives(&engine);
    }
    assert_eq!(cancelled, 6);
    engine.finalize().unwrap();
}

over_each!(
    server_killed_or_stopped_ends_calls_with_disconnected,
    calls_to_stopped_server_fail_within_the_peer_timeout,
    client_killed_or_stopped_cancels_its_calls,
    callbacks_to_killed_or_stopped_client_end_with_disconnected,
    exit_without_finalize_ends_calls_with_disconnected,
    finalized_server_disconnects_and_its_process_exits,
    finalize_with_stopped_peer_is_bounded,
    server_serves_after_many_clients_are_killed
);
