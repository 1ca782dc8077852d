//! A peer that dies or freezes in the middle of a transfer, a process that forks, and an owner that comes back.

use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Error, Exposed};

use crate::assert_error;
use crate::pair::{Pair, assert_quiet, patient};
use crate::roles::Owner;
use crate::support::*;

const LEN: usize = 256 << 20;
const SIGNALS: [i32; 2] = [libc::SIGKILL, libc::SIGSTOP];
/// Silence after which a peer is given up.
const SILENCE: Duration = Duration::from_secs(3);
/// By then, the end of a peer is known.
const KNOWN: Duration = Duration::from_secs(10);

fn engine() -> Engine {
    patient().peer_timeout(SILENCE).listen(anywhere()).default_timeout(3 * BOUND).build().unwrap()
}

/// Waits until the first byte of the memory is no longer zero.
#[track_caller]
fn wait_until_touched(memory: &Exposed<Vec<u8>>) {
    let mut byte = [0u8];
    eventually("a byte moves", || {
        memory.read_at(0, &mut byte).unwrap();
        byte[0] != 0
    });
}

/// Dies, or freezes for longer than it is borne with; what happened in between, and how long it took.
fn strike<T>(owner: &Owner, signal: i32, then: impl FnOnce() -> T) -> T {
    owner.child.signal(signal);
    let begin = Instant::now();
    let result = then();
    assert!(begin.elapsed() < KNOWN, "{:?}", begin.elapsed());
    result
}

/// A stopped process' device goes on serving reads and writes: only the process is missing.
fn the_owner_goes_while_it_is_pulled_from() {
    let engine = engine();
    let owner = Owner::start(&engine);
    let bulk = owner.lend(1, LEN);
    let local = engine.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let transfer = bulk.on(&owner.to).start_pull_into(local.slice(0, LEN).unwrap());
    wait_until_touched(&local);
    let (result, _slice) = strike(&owner, libc::SIGKILL, || transfer.wait());
    assert_error!(result, Error::Disconnected { .. });
    let bytes = local.reclaim();
    assert!(bytes[LEN - 1] == 0, "the transfer was over before the signal: this test tests nothing");
    assert_quiet(&bytes[..8 << 20], Duration::from_millis(200));
    Pair::new().assert_serves();
}

fn the_owner_goes_while_it_is_pushed_to() {
    let engine = engine();
    let owner = Owner::start(&engine);
    let bulk = owner.lend(0, LEN);
    let local = engine.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
    let transfer = bulk.on(&owner.to).start_push_from(local);
    // The first of it is there.
    let mut byte = [0u8];
    let first = bulk.slice(0, 1).unwrap();
    eventually("a byte moves", || first.on(&owner.to).pull_into(&mut byte).is_ok_and(|_| byte[0] == 1));
    let (result, local) = strike(&owner, libc::SIGKILL, || transfer.wait());
    assert_error!(result, Error::Disconnected { .. });
    assert!(all_are(&local.reclaim(), 1));
    Pair::new().assert_serves();
}

/// The other process moves memory of ours when it dies, or freezes: it is ours again at once.
fn the_mover_goes() {
    for signal in SIGNALS {
        for procedure in ["pull", "push"] {
            let engine = engine();
            let mut owner = Owner::start(&engine);
            let exposed = engine.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
            let pending = match procedure {
                "pull" => engine.procedure::<Bulk, Result<usize, String>>("pull").on(&owner.to).start(&exposed.bulk()),
                _ => engine.procedure::<(u8, Bulk), Result<usize, String>>("push").on(&owner.to).start(&(1, exposed.bulk())),
            };
            let pending = pending.unwrap();
            match procedure {
                "pull" => _ = owner.child.hear("pulling"),
                _ => wait_until_touched(&exposed),
            }
            let bytes = strike(&owner, signal, || exposed.reclaim());
            assert!(procedure == "pull" || bytes[LEN - 1] == 0, "the transfer was over: this test tests nothing");
            assert_quiet(&bytes[..8 << 20], Duration::from_millis(200));
            let begin = Instant::now();
            assert_error!(pending.wait(), Error::Disconnected { .. });
            assert!(begin.elapsed() < KNOWN, "{procedure}: {:?}", begin.elapsed());
            Pair::new().assert_serves();
            if signal == libc::SIGSTOP {
                owner.child.signal(libc::SIGCONT);
                assert_serves(&engine, &owner.to);
                owner.assert_one_sided();
            }
        }
    }
}

fn an_owner_that_is_restarted_has_lent_nothing() {
    let engine = engine();
    let mut owner = Owner::start(&engine);
    let bulk = owner.lend(1, 300_000);
    let mut copy = vec![0u8; 300_000];
    bulk.on(&owner.to).pull_into(&mut copy).unwrap();
    let address = owner.to.address().to_string();
    owner.child.tell("finalize");
    owner.child.hear("finalized");
    assert!(owner.child.wait(BOUND).success());
    let again = Owner::start_at(&engine, &address);
    let error = bulk.on(&again.to).pull_into(&mut copy).unwrap_err();
    assert!(matches!(error, Error::PeerRestarted { .. }), "{error}");
    let error = bulk.on(&again.to).push_from(&copy).unwrap_err();
    assert!(matches!(error, Error::PeerRestarted { .. }), "{error}");
    again.assert_one_sided();
}

fn forks(role: &str) {
    let mut child = Child::start(role, &[]);
    child.hear("forked well");
    assert!(child.wait(BOUND).success());
}

fn a_forked_child_gets_an_error() {
    forks("fork");
}

/// It has copies of what its parent has: what becomes of them changes nothing of the parent's.
fn a_forked_child_drops_what_it_has_inherited() {
    forks("fork, and drop");
}

/// The role behind the two of them.
pub fn fork(drops: bool) {
    let pair = Pair::new();
    let exposed = pair.server.expose(vec![1u8; 300_000], BulkMode::ReadWrite).unwrap();
    let bulk = exposed.bulk();
    let mut copy = vec![0u8; 300_000];
    bulk.on(&pair.to_server).pull_into(&mut copy).unwrap();
    // SAFETY: the child calls what a user's child would call, and ends by `_exit`; no other thread holds a lock of this
    // program's own at this moment.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let is_clear = |error: Error| error.to_string().contains("fork");
        let call = pair.client.procedure::<(u32, u32), u32>("add").on(&pair.to_server).call(&(1, 2)).map(drop);
        let pull = bulk.on(&pair.to_server).pull_into(&mut copy).map(drop);
        let push = bulk.on(&pair.to_server).push_from(&copy).map(drop);
        let well = [call, pull, push].into_iter().all(|result| result.is_err_and(is_clear));
        if drops {
            drop((exposed, pair));
        }
        // SAFETY: ends the process, without running what belongs to the parent.
        unsafe { libc::_exit(i32::from(!well)) };
    }
    assert!(pid > 0);
    let mut status = 0;
    let begin = Instant::now();
    // SAFETY: the pointer is to a variable of the right type.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } != pid {
        if begin.elapsed() > BOUND {
            // SAFETY: the child was not waited for, so the number is its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status, 0, "256: no clear error; else: a signal");
    pair.assert_serves();
    // The pages are still those that the device knows, though the parent has written them after the fork.
    exposed.write_at(0, &[5; 1000]).unwrap();
    bulk.on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(all_are(&copy[..1000], 5) && all_are(&copy[1000..], 1));
    bulk.on(&pair.to_server).push_from(&vec![6u8; 300_000]).unwrap();
    assert!(all_are(&exposed.reclaim(), 6));
    say("forked well");
}

on_device!(
    the_owner_goes_while_it_is_pulled_from,
    the_owner_goes_while_it_is_pushed_to,
    the_mover_goes,
    an_owner_that_is_restarted_has_lent_nothing,
    a_forked_child_gets_an_error,
    a_forked_child_drops_what_it_has_inherited,
);
