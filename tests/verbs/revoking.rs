//! Memory that its owner revokes while devices transfer it, and transfers that their initiators cancel.

use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Error, Exposed, Pending};

use crate::assert_error;
use crate::pair::{Pair, assert_quiet, patient};
use crate::roles::Owner;
use crate::support::*;

/// Moving it takes seconds where the device is emulated.
const LEN: usize = 256 << 20;
/// For taking memory back, and for the news of it; a device that is none is slow at it.
const SOON: Duration = Duration::from_secs(5);
const QUIET: Duration = Duration::from_millis(300);

/// Calls go on all the while, and none is lost.
fn revoked_memory_harms_nothing_else() {
    const CALLS: usize = 64;
    let pair = Pair::new();
    let echo = pair.client.procedure::<String, String>("echo");
    let start = |index: usize| -> Pending<String> {
        // Some of them are staged, and read by the lane that breaks.
        let text = if index.is_multiple_of(16) { "x".repeat(30_000 + index) } else { index.to_string() };
        echo.on(&pair.to_server).start(&text).unwrap()
    };
    let mut random = Random(0x2e0);
    let (mut revoked, mut whole) = (0, 0);
    for round in 0..100 {
        let calls: Vec<_> = (0..CALLS).map(start).collect();
        let len = [20_000, 300_000, 3 << 20][round % 3];
        let theirs = pair.server.expose(vec![1u8; len], BulkMode::ReadWrite).unwrap();
        let bulk = theirs.bulk();
        let local = pair.client.expose(vec![1u8; len], BulkMode::ReadWrite).unwrap();
        let remote = bulk.on(&pair.to_server);
        let transfer = if round % 2 == 0 { remote.start_pull_into(local) } else { remote.start_push_from(local) };
        std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
        let begin = Instant::now();
        drop(theirs);
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        match transfer.wait().0 {
            Ok(_) => whole += 1,
            Err(Error::Revoked { .. }) => revoked += 1,
            Err(error) => panic!("round {round}: {error}"),
        }
        // One that begins afterwards, too.
        if round % 4 == 0 {
            assert_error!(remote.pull_into(&mut vec![0u8; len]), Error::Revoked { .. });
        }
        for (index, call) in calls.into_iter().enumerate() {
            let wanted = if index.is_multiple_of(16) { 30_000 + index } else { index.to_string().len() };
            assert_eq!(call.wait().unwrap().len(), wanted, "round {round}");
        }
        assert!(pair.to_server.is_connected());
    }
    // How many are caught in the middle depends on the machine.
    assert!(revoked >= 8, "{revoked} were revoked, {whole} were not: this test tests little");
}

fn transfers_are_one_sided_again_after_a_refusal() {
    let engine = patient().listen(anywhere()).build().unwrap();
    let owner = Owner::start(&engine);
    owner.assert_one_sided();
    for _ in 0..5 {
        let bulk = owner.lend(1, 300_000);
        owner.take_back(1);
        assert_error!(bulk.on(&owner.to).pull_into(&mut vec![0u8; 300_000]), Error::Revoked { .. });
        assert_error!(bulk.on(&owner.to).push_from(&vec![0u8; 300_000]), Error::Revoked { .. });
        owner.assert_one_sided();
    }
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

#[track_caller]
fn soon<T>(work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = work();
    let took = begin.elapsed();
    assert!(took < SOON, "{took:?}");
    result
}

fn a_pull_from_memory_that_is_taken_back() {
    for by_reclaim in [true, false] {
        let pair = Pair::new();
        let theirs = pair.server.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
        let ours = pair.client.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
        let transfer = theirs.bulk().on(&pair.to_server).start_pull_into(ours.slice(0, LEN).unwrap());
        wait_until_touched(&ours);
        if by_reclaim {
            // What it is filled with now never arrives.
            soon(|| theirs.reclaim()).fill(2);
        } else {
            soon(|| drop(theirs));
        }
        let (result, _) = soon(|| transfer.wait());
        assert_error!(result, Error::Revoked { .. });
        let bytes = soon(|| ours.reclaim());
        assert!(bytes[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
        assert!(!bytes.contains(&2));
        assert_quiet(&bytes[..8 << 20], QUIET);
        pair.assert_serves();
    }
}

fn a_push_into_memory_that_is_taken_back() {
    let pair = Pair::new();
    let theirs = pair.server.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
    let ours = pair.client.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
    let transfer = theirs.bulk().on(&pair.to_server).start_push_from(ours);
    wait_until_touched(&theirs);
    let bytes = soon(|| theirs.reclaim());
    assert!(bytes[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
    let snapshot = bytes.clone();
    let (result, ours) = soon(|| transfer.wait());
    assert_error!(result, Error::Revoked { .. });
    std::thread::sleep(QUIET);
    assert!(bytes == snapshot, "it was written after it had been revoked");
    assert!(all_are(&ours.reclaim(), 1));
    pair.assert_serves();
}

fn a_push_into_a_scope_that_ends() {
    let pair = Pair::new();
    let (send, receive) = std::sync::mpsc::channel::<Bulk>();
    let ours = pair.client.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
    let to_server = pair.to_server.clone();
    let pusher = std::thread::spawn(move || {
        let bulk = receive.recv_timeout(BOUND).unwrap();
        bulk.on(&to_server).start_push_from(ours).wait().0
    });
    let mut bytes = vec![0u8; LEN];
    let mut ended = None;
    pair.server
        .scope(|scope| {
            let bulk = scope.expose(&mut bytes[..], BulkMode::ReadWrite)?;
            send.send(bulk.clone()).unwrap();
            // Seen by way of the device, from another engine.
            let first = bulk.slice(0, 1).unwrap().on(&pair.to_server);
            let mut byte = [0u8];
            eventually("a byte moves", || first.pull_into(&mut byte).is_ok_and(|_| byte[0] != 0));
            ended = Some(Instant::now());
            Ok(())
        })
        .unwrap();
    let took = ended.unwrap().elapsed();
    assert!(took < SOON, "{took:?}");
    assert!(bytes[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
    let snapshot = bytes.clone();
    assert_error!(pusher.join().unwrap(), Error::Revoked { .. });
    std::thread::sleep(QUIET);
    assert!(bytes == snapshot, "it was written after the scope had ended");
    pair.assert_serves();
}

fn a_transfer_that_is_given_up_leaves_the_buffer_alone() {
    for cancel in [true, false] {
        let pair = Pair::new();
        let theirs = pair.server.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
        let ours = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server).timeout(if cancel { BOUND } else { Duration::from_millis(150) });
        let transfer = remote.start_pull_into(ours);
        let begin = Instant::now();
        if cancel {
            std::thread::sleep(Duration::from_millis(150));
            transfer.cancel();
        }
        let (result, ours) = transfer.wait();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        match result.unwrap_err() {
            Error::Cancelled { .. } if cancel => {}
            Error::Timeout { .. } if !cancel => {}
            error => panic!("{error}"),
        }
        // Still exposed, and not written any more all the same.
        let read = || {
            let mut bytes = vec![0u8; LEN];
            ours.read_at(0, &mut bytes).unwrap();
            bytes
        };
        let snapshot = read();
        assert!(snapshot[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
        std::thread::sleep(QUIET);
        assert!(read() == snapshot, "it was written after the transfer had ended");
        pair.assert_serves();
    }
}

fn a_borrowed_buffer_is_its_owners_after_the_deadline() {
    let pair = Pair::new();
    let theirs = pair.server.expose(vec![1u8; LEN], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server).timeout(Duration::from_millis(400));
    let mut ours = vec![0u8; LEN];
    assert_error!(soon(|| remote.pull_into(&mut ours)), Error::Timeout { .. });
    assert!(ours[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
    let snapshot = ours.clone();
    std::thread::sleep(QUIET);
    assert!(ours == snapshot, "it was written after the transfer had ended");
    // What is written here after a push was given up never arrives.
    ours.fill(3);
    assert_error!(soon(|| remote.push_from(&ours)), Error::Timeout { .. });
    ours.fill(4);
    std::thread::sleep(QUIET);
    assert!(!theirs.reclaim().contains(&4));
    pair.assert_serves();
}

on_device!(
    revoked_memory_harms_nothing_else,
    transfers_are_one_sided_again_after_a_refusal,
    a_pull_from_memory_that_is_taken_back,
    a_push_into_memory_that_is_taken_back,
    a_push_into_a_scope_that_ends,
    a_transfer_that_is_given_up_leaves_the_buffer_alone,
    a_borrowed_buffer_is_its_owners_after_the_deadline,
);
