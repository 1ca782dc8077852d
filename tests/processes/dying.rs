//! Either side of a call dies or freezes in the middle of it.

use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Request};

use crate::assert_error;
use crate::support::*;

const SIGNALS: [i32; 2] = [libc::SIGKILL, libc::SIGSTOP];

fn a_server_that_goes_ends_the_calls_to_it() {
    let _watchdog = Watchdog::start("a_server_that_goes_ends_the_calls_to_it");
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
            // It learns that its callers have gone, and serves again, over a new connection.
            (0..3).for_each(|_| _ = child.hear("cancelled"));
            assert_serves(&engine, &endpoint);
        }
        engine.finalize().unwrap();
    }
}

fn a_stopped_server_is_noticed_by_new_calls_too() {
    let _watchdog = Watchdog::start("a_stopped_server_is_noticed_by_new_calls_too");
    let (child, address) = Child::server(&[]);
    let engine = client();
    let endpoint = engine.lookup(&address).unwrap();
    assert_serves(&engine, &endpoint);
    child.signal(libc::SIGSTOP);
    // Over the connection that exists, which was idle: its silence counts from now on.
    let begin = Instant::now();
    assert_disconnected(engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)), begin);
    // And by a new one, which the system makes, and nobody answers.
    let begin = Instant::now();
    let error = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)).unwrap_err();
    assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
    assert!(begin.elapsed() < Duration::from_secs(4));
    // A deadline that is shorter than all of that is kept.
    let begin = Instant::now();
    let add = engine.procedure::<(u32, u32), u32>("add");
    assert_error!(add.on(&endpoint).timeout(Duration::from_millis(50)).call(&(1, 2)), Error::Timeout { .. });
    assert!(begin.elapsed() < patience() * Duration::from_secs(1));
    child.signal(libc::SIGCONT);
    assert_serves(&engine, &endpoint);
}

/// A server in this process, whose `hang` tells when it has begun and how it ended.
fn hanging_server() -> (Engine, std::sync::mpsc::Receiver<&'static str>) {
    let engine = server();
    define_add(&engine);
    let (tell, told) = std::sync::mpsc::channel();
    engine
        .define("hang", move |request: &Request, ()| {
            tell.send("entered").unwrap();
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            let _ = tell.send(if request.is_cancelled() { "cancelled" } else { "not cancelled" });
        })
        .unwrap();
    (engine, told)
}

fn a_client_that_goes_cancels_its_calls() {
    let _watchdog = Watchdog::start("a_client_that_goes_cancels_its_calls");
    for signal in SIGNALS {
        let (engine, told) = hanging_server();
        let mut child = Child::client();
        child.tell(&format!("call hang {}", engine.address()));
        assert_eq!(told.recv_timeout(BOUND), Ok("entered"));
        let begin = Instant::now();
        child.signal(signal);
        assert_eq!(told.recv_timeout(BOUND), Ok("cancelled"));
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

fn a_client_that_goes_ends_calls_to_it() {
    // The server calls back its client, which has no address, and goes.
    let _watchdog = Watchdog::start("a_client_that_goes_ends_calls_to_it");
    for signal in SIGNALS {
        let engine = server();
        let (tell, told) = std::sync::mpsc::channel();
        engine.define("hello", move |r: &Request, ()| tell.send(r.endpoint().clone()).unwrap()).unwrap();
        let mut child = Child::client();
        child.tell(&format!("call hello {}", engine.address()));
        let caller = told.recv_timeout(BOUND).unwrap();
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

fn processes_that_exit_without_finalizing_are_noticed() {
    let _watchdog = Watchdog::start("processes_that_exit_without_finalizing_are_noticed");
    // By itself, with a call in progress; and from the handler that serves it.
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

fn a_process_that_finalizes_is_noticed_and_ends() {
    let _watchdog = Watchdog::start("a_process_that_finalizes_is_noticed_and_ends");
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

fn finalizing_beside_a_frozen_peer_is_bounded() {
    let _watchdog = Watchdog::start("finalizing_beside_a_frozen_peer_is_bounded");
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

fn many_clients_killed_at_random_leave_a_server_that_serves() {
    let _watchdog = Watchdog::start("many_clients_killed_at_random_leave_a_server_that_serves");
    let (engine, told) = hanging_server();
    let mut children: Vec<Child> = (0..6).map(|_| Child::client()).collect();
    for child in &mut children {
        child.tell(&format!("call hang {}", engine.address()));
    }
    let mut cancelled = 0;
    (0..6).for_each(|_| assert_eq!(told.recv_timeout(BOUND), Ok("entered")));
    while let Some(child) = children.pop() {
        drop(child);
        assert_eq!(told.recv_timeout(BOUND), Ok("cancelled"));
        cancelled += 1;
        assert_lives(&engine);
    }
    assert_eq!(cancelled, 6);
    engine.finalize().unwrap();
}

over_each!(
    a_server_that_goes_ends_the_calls_to_it,
    a_stopped_server_is_noticed_by_new_calls_too,
    a_client_that_goes_cancels_its_calls,
    a_client_that_goes_ends_calls_to_it,
    processes_that_exit_without_finalizing_are_noticed,
    a_process_that_finalizes_is_noticed_and_ends,
    finalizing_beside_a_frozen_peer_is_bounded,
    many_clients_killed_at_random_leave_a_server_that_serves
);
