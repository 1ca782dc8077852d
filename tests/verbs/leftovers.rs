//! However a connection ends, nothing of it is left: no descriptors and threads, and nothing that the system counts for its
//! devices. Each of these has a process for itself, to count in, and the devices.

use std::process::Command;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Error};

use crate::assert_error;
use crate::pair::{Pair, patient};
use crate::roles::Owner;
use crate::support::*;

/// How many of each there are: descriptors, threads, and what devices have of all processes.
fn counted() -> Vec<(String, usize)> {
    let entries = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    let mut counted =
        vec![("descriptors".to_owned(), entries("/proc/self/fd")), ("threads".to_owned(), entries("/proc/self/task"))];
    for what in ["qp", "cq", "mr", "pd", "cm_id", "ctx"] {
        let shown = Command::new("rdma").args(["resource", "show", what]).output().unwrap();
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.status.success(), "rdma resource show {what}: {}", String::from_utf8_lossy(&shown.stderr));
        // What the system has for itself stays; the number of a thread which has made the rest says nothing.
        counted.push((what.to_owned(), text.lines().filter(|line| !line.contains("[ib_core]")).count()));
    }
    counted
}

fn is_more(now: &[(String, usize)], before: &[(String, usize)]) -> bool {
    now.iter().zip(before).any(|((_, now), (_, before))| now > before)
}

/// Does the same again and again: from some time on, nothing is added.
fn nothing_is_left_within(rounds: usize, mut round: impl FnMut(usize)) {
    // What is made once and kept is no leftover.
    (0..2).for_each(&mut round);
    let before = counted();
    (2..2 + rounds).for_each(&mut round);
    let begin = Instant::now();
    loop {
        let now = counted();
        if !is_more(&now, &before) {
            break;
        }
        if begin.elapsed() > 2 * BOUND {
            let open: Vec<_> =
                std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| std::fs::read_link(entry.unwrap().path())).collect();
            panic!("{before:?} before; now {now:?}; open: {open:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    say(&format!("nothing left beside {before:?}"));
}

/// Everything that a connection can have in use.
fn use_all(pair: &Pair) {
    pair.assert_serves();
    let theirs = pair.server.expose(pattern(1, 300_000), BulkMode::ReadWrite).unwrap();
    let mut copy = vec![0u8; 300_000];
    theirs.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(copy == pattern(1, 300_000));
    let text: String = "staged".repeat(50_000);
    assert_eq!(pair.client.procedure::<String, String>("echo").on(&pair.to_server).call(&text).unwrap(), text);
}

fn ends(role: &str, server: &Engine, round: usize) {
    match role {
        "finalized" => {
            let pair = Pair::new();
            use_all(&pair);
            assert!(counted()[2].1 >= 4, "two connections' ends have two queue pairs each: {:?}", counted());
            pair.client.finalize().unwrap();
            pair.server.finalize().unwrap();
        }
        "dropped" => {
            let pair = Pair::new();
            use_all(&pair);
            let Pair { server, client, to_server } = pair;
            if round.is_multiple_of(2) {
                drop((to_server, client, server));
            } else {
                drop((server, client, to_server));
            }
        }
        "peer killed" => {
            let owner = Owner::start(server);
            let bulk = owner.lend(1, 300_000);
            let mut copy = vec![0u8; 300_000];
            bulk.on(&owner.to).pull_into(&mut copy).unwrap();
            owner.child.signal(libc::SIGKILL);
            eventually("the end of the peer is seen", || !owner.to.is_connected());
        }
        "no engine listens" => {
            let absent = server.lookup(nowhere()).unwrap();
            assert_error!(server.procedure::<(), ()>("x").on(&absent).call(&()), Error::Unreachable { .. });
        }
        "unreachable" => {
            let engine = patient().connect_timeout(Duration::from_millis(300)).build().unwrap();
            for address in ["verbs://10.9.0.77:7", "verbs://192.0.2.1:7"] {
                let absent = engine.lookup(address).unwrap();
                assert!(engine.procedure::<(), ()>("x").on(&absent).call(&()).is_err());
            }
        }
        "can't listen" => {
            assert_error!(Engine::server(server.address()).map(drop), Error::AddressInUse { .. });
            assert!(Engine::server("verbs://192.0.2.1:0").is_err());
        }
        "lanes broken" => {
            let pair = Pair::new();
            for _ in 0..5 {
                let theirs = pair.server.expose(vec![1u8; 300_000], BulkMode::ReadWrite).unwrap();
                let bulk: Bulk = theirs.bulk();
                drop(theirs);
                let mut copy = vec![0u8; 300_000];
                assert_error!(bulk.on(&pair.to_server).pull_into(&mut copy), Error::Revoked { .. });
            }
            use_all(&pair);
        }
        other => panic!("no role `{other}`"),
    }
}

/// The role behind [`two_hundred_connections`].
fn two_hundred() {
    const CONNECTIONS: usize = 200;
    let server = patient().listen(anywhere()).build().unwrap();
    define_add(&server);
    nothing_is_left_within(1, |round| {
        let connections = [1, 1, CONNECTIONS][round];
        let clients: Vec<Engine> = (0..connections).map(|_| patient().build().unwrap()).collect();
        let endpoints: Vec<_> = clients.iter().map(|client| client.lookup(server.address()).unwrap()).collect();
        for (client, endpoint) in clients.iter().zip(&endpoints) {
            assert_serves(client, endpoint);
        }
        assert!(endpoints.iter().all(|endpoint| endpoint.is_connected()));
        let add = |index: usize| clients[index].procedure::<(u32, u32), u32>("add").on(&endpoints[index]).start(&(1, 2)).unwrap();
        let all: Vec<_> = (0..connections).map(add).collect();
        all.into_iter().for_each(|pending| assert_eq!(pending.wait().unwrap(), 3));
    });
}

/// The roles behind all of these.
pub fn run(role: &str) {
    if role == "two hundred" {
        return two_hundred();
    }
    let server = patient().listen(anywhere()).build().unwrap();
    define_add(&server);
    nothing_is_left_within(6, |round| ends(role, &server, round));
}

fn nothing_is_left_by(role: &str) {
    let mut child = Child::start(role, &[]);
    // Rounds take their time.
    assert!(child.wait(8 * BOUND).success(), "{role}");
    eprintln!("{role}: {}", child.hear("nothing left"));
}

fn by_finalizing() {
    nothing_is_left_by("finalized");
}

fn by_dropping() {
    nothing_is_left_by("dropped");
}

fn by_killed_peers() {
    nothing_is_left_by("peer killed");
}

fn by_dials_that_fail() {
    ["no engine listens", "unreachable"].into_iter().for_each(nothing_is_left_by);
}

fn by_listeners_that_fail() {
    nothing_is_left_by("can't listen");
}

fn by_broken_lanes() {
    nothing_is_left_by("lanes broken");
}

/// Two hundred of them are there at a time, all of which work; and none is left.
fn two_hundred_connections() {
    nothing_is_left_by("two hundred");
}

on_device! { alone:
    by_finalizing,
    by_dropping,
    by_killed_peers,
    by_dials_that_fail,
    by_listeners_that_fail,
    by_broken_lanes,
    two_hundred_connections,
}
