//! Reclaiming memory while peers use it: first their access is revoked, then accesses in progress are fenced.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Error, Exposed, RemoteBulk};

use crate::assert_error;
use crate::support::{BOUND, Net, all_are, eventually, pattern, stays};

const LEN: usize = 4 << 20;
const QUIET: Duration = Duration::from_millis(60);

/// Two threads push to a bulk and two pull from it, as far as its mode allows, until it is revoked; runs `meanwhile` once they
/// have started.
fn with_transfers_in_progress<T>(remote: &RemoteBulk, mode: BulkMode, meanwhile: impl FnOnce() -> T) -> T {
    let moved = AtomicU32::new(0);
    let rounds = |transfer: &dyn Fn(u8) -> calomel::Result<usize>| {
        let begin = Instant::now();
        for round in (0..=u8::MAX).cycle() {
            if let Err(error) = transfer(round) {
                assert_error!(Err::<(), _>(error), Error::Revoked { .. });
                return;
            }
            moved.fetch_add(1, Ordering::SeqCst);
            assert!(begin.elapsed() < BOUND, "the memory was never revoked");
        }
    };
    thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                if mode != BulkMode::ReadOnly {
                    rounds(&|round| remote.push_from(&vec![round; LEN]));
                }
            });
            s.spawn(|| {
                if mode != BulkMode::WriteOnly {
                    let mut copy = vec![0u8; LEN];
                    let copy = std::cell::RefCell::new(&mut copy);
                    rounds(&|_| remote.pull_into(&mut copy.borrow_mut()[..]));
                }
            });
        }
        eventually("the peers transfer", || moved.load(Ordering::SeqCst) > 4);
        meanwhile()
    })
}

fn reclaimed_memory_is_not_written_any_more(net: &Net) {
    let pair = net.pair();
    for mode in [BulkMode::WriteOnly, BulkMode::ReadWrite] {
        let theirs = pair.server.expose(vec![0u8; LEN], mode).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        with_transfers_in_progress(&remote, mode, || {
            let begin = Instant::now();
            let bytes = theirs.reclaim();
            assert!(begin.elapsed() < Duration::from_secs(3));
            let snapshot = bytes.clone();
            stays("the memory is not written", QUIET, || std::hint::black_box(&bytes) == &snapshot);
        });
    }
}

fn memory_of_a_dropped_exposure_is_not_written_any_more(net: &Net) {
    let pair = net.pair();
    for _ in 0..3 {
        let theirs = pair.server.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        with_transfers_in_progress(&remote, BulkMode::ReadWrite, || {
            drop(theirs);
            // The allocator may return the same memory again; its new user must be the only writer.
            let fresh: Vec<Vec<u8>> = (0..3).map(|_| vec![0x5cu8; LEN]).collect();
            stays("the memory is not written", QUIET, || fresh.iter().all(|f| std::hint::black_box(f)[..] == fresh[0][..]));
            assert!(fresh[0] == vec![0x5c; LEN]);
        });
    }
}

fn read_only_memory_is_reclaimed_during_pulls(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose_read_only(pattern(1, LEN)).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    with_transfers_in_progress(&remote, BulkMode::ReadOnly, || {
        let mut bytes = theirs.reclaim();
        assert!(bytes == pattern(1, LEN));
        // Only the owner writes it now.
        bytes.fill(0);
    });
}

fn pull_during_reclaim_returns_old_bytes_or_fails(net: &Net) {
    // After reclaim the memory is refilled: a transfer that saw the new bytes must not succeed.
    let pair = net.pair();
    for _ in 0..6 {
        let theirs = pair.server.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        thread::scope(|s| {
            let reader = s.spawn(|| {
                let begin = Instant::now();
                let mut copy = vec![0u8; LEN];
                while remote.pull_into(&mut copy).is_ok() {
                    assert!(all_are(&copy, 1));
                    assert!(begin.elapsed() < BOUND);
                }
            });
            thread::sleep(Duration::from_millis(8));
            theirs.reclaim().fill(2);
            reader.join().unwrap();
        });
    }
}

fn reclaimed_target_of_a_pull_is_not_written_any_more(net: &Net) {
    // Here the reclaimed buffer is the local target of a transfer, not the owner's memory.
    let pair = net.pair();
    let theirs = pair.server.expose(vec![1u8; 48 << 20], BulkMode::ReadOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    for round in 0..4 {
        let ours = pair.client.expose(vec![0u8; 48 << 20], BulkMode::ReadWrite).unwrap();
        let transfer = remote.start_pull_into(ours.slice(0, ours.len()).unwrap());
        thread::sleep(Duration::from_micros(round * 1000));
        let mut ours = ours.reclaim();
        ours.fill(7);
        let (result, _slice) = transfer.wait();
        assert!(all_are(&ours, 7));
        match result {
            Ok(moved) => assert_eq!(moved, 48 << 20),
            Err(error) => assert_error!(Err::<(), _>(error), Error::Revoked { .. }),
        }
    }
    assert_eq!(remote.pull_into(&mut [0u8; 10][..]).unwrap(), 10);
}

fn leaked_exposure_stays_exposed(net: &Net) {
    let pair = net.pair();
    let exposed = pair.server.expose(vec![1u8; 10_000], BulkMode::ReadWrite).unwrap();
    let bulk = exposed.bulk();
    std::mem::forget(exposed);
    assert_eq!(bulk.on(&pair.to_server).push_from(&[2u8; 5][..]).unwrap(), 5);
    let mut copy = vec![0u8; 10_000];
    assert_eq!(bulk.on(&pair.to_server).pull_into(&mut copy).unwrap(), 10_000);
    assert_eq!(copy[..6], [2, 2, 2, 2, 2, 1]);
}

fn exposure_is_reclaimed_on_another_thread(net: &Net) {
    fn movable<T: Send + Sync + 'static>(_: &T) {}
    let pair = net.pair();
    let exposed: Exposed<Vec<u8>> = pair.server.expose(vec![3u8; 100], BulkMode::ReadWrite).unwrap();
    movable(&exposed);
    let bytes = thread::spawn(move || exposed.reclaim()).join().unwrap();
    assert_eq!(bytes, [3; 100]);
}

fn thousands_of_exposures_are_independent(net: &Net) {
    // Thousands of exposures, half of them used, neither accumulate nor get mixed up.
    let pair = net.pair();
    thread::scope(|s| {
        for t in 0..4u8 {
            let pair = &pair;
            s.spawn(move || {
                for round in 0..500usize {
                    let theirs = pair.server.expose([t; 64], BulkMode::ReadWrite).unwrap();
                    if round % 2 == 0 {
                        let mut copy = [0u8; 64];
                        theirs.bulk().on(&pair.to_server).pull_into(&mut copy[..]).unwrap();
                        assert_eq!(copy, [t; 64]);
                    }
                    if round % 3 == 0 {
                        assert_eq!(theirs.reclaim(), [t; 64]);
                    }
                }
            });
        }
    });
}

suite![
    reclaimed_memory_is_not_written_any_more,
    memory_of_a_dropped_exposure_is_not_written_any_more,
    read_only_memory_is_reclaimed_during_pulls,
    pull_during_reclaim_returns_old_bytes_or_fails,
    reclaimed_target_of_a_pull_is_not_written_any_more,
    leaked_exposure_stays_exposed,
    exposure_is_reclaimed_on_another_thread,
    thousands_of_exposures_are_independent,
];
