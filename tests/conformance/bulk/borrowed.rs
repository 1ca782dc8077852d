//! Transfers with borrowed slices: once the call has returned, with any result, no transfer accesses the slice.

use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Error};

use crate::assert_error;
use crate::support::{Net, all_are, pattern, stays};

const LEN: usize = 64 << 20;

fn pull_after_its_timeout_does_not_write(net: &Net) {
    let pair = net.pair();
    let data = pattern(1, LEN);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut timeouts = 0;
    let mut ours = vec![0u8; LEN];
    for micros in [0, 100, 500, 1000, 3000, 6000, 10_000] {
        let begin = Instant::now();
        let result = remote.clone().timeout(Duration::from_micros(micros)).pull_into(&mut ours);
        assert!(begin.elapsed() < Duration::from_secs(10));
        match result {
            Ok(moved) => assert!(moved == LEN && ours == data),
            Err(error) => {
                assert_error!(Err::<(), _>(error), Error::Timeout { .. });
                timeouts += 1;
            }
        }
        ours.fill(0xee);
        stays("the memory is not written", Duration::from_millis(20), || {
            std::hint::black_box(&ours).iter().step_by(997).all(|&b| b == 0xee)
        });
        assert!(ours == vec![0xee; LEN]);
    }
    assert!(timeouts > 0, "even a timeout of zero was long enough");
    assert_eq!(remote.pull_into(&mut ours).unwrap(), LEN);
    assert!(ours == data);
}

fn push_after_its_timeout_does_not_read(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut ours = vec![1u8; LEN];
    for micros in [0, 100, 500, 1000, 3000, 6000, 10_000] {
        let result = remote.clone().timeout(Duration::from_micros(micros)).push_from(&ours);
        if let Err(error) = result {
            assert_error!(Err::<(), _>(error), Error::Timeout { .. });
        }
        // The peer must not see bytes that are written after the call.
        ours.fill(0xee);
        thread::sleep(Duration::from_millis(5));
        ours.fill(1);
    }
    assert!(theirs.reclaim().iter().all(|&b| b <= 1));
}

fn pull_of_revoked_memory_does_not_write_after_its_error(net: &Net) {
    let pair = net.pair();
    let data = pattern(2, LEN / 4);
    for round in 0..5u64 {
        let theirs = pair.server.expose(data.clone(), BulkMode::ReadOnly).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let revoker = thread::spawn(move || {
            thread::sleep(Duration::from_micros(round * 700));
            drop(theirs);
        });
        let mut ours = vec![0u8; data.len()];
        match remote.pull_into(&mut ours) {
            Ok(moved) => assert!(moved == data.len() && ours == data),
            Err(error) => assert_error!(Err::<(), _>(error), Error::Revoked { .. }),
        }
        ours.fill(0xee);
        revoker.join().unwrap();
        thread::sleep(Duration::from_millis(3));
        assert!(all_are(&ours, 0xee));
    }
}

fn pull_from_a_finalized_peer_does_not_write_after_its_error(net: &Net) {
    for round in 0..3u64 {
        let pair = net.pair_with(|b| b.finalize_timeout(Duration::from_millis(1)));
        let theirs = pair.server.expose(vec![1u8; LEN / 2], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let mut ours = vec![0u8; LEN / 2];
        assert_eq!(remote.pull_into(&mut ours[..10]).unwrap(), 10);
        let server = pair.server.clone();
        let ender = thread::spawn(move || {
            thread::sleep(Duration::from_micros(round * 1000));
            server.finalize().unwrap();
        });
        let begin = Instant::now();
        if let Err(error) = remote.pull_into(&mut ours) {
            assert!(error.is_disconnected(), "{error}");
        }
        assert!(begin.elapsed() < Duration::from_secs(10));
        ours.fill(0xee);
        ender.join().unwrap();
        thread::sleep(Duration::from_millis(3));
        assert!(all_are(&ours, 0xee));
    }
}

fn pull_of_a_finalized_engine_does_not_write_after_it_returned(net: &Net) {
    for round in 0..3u64 {
        let pair = net.pair_with(|b| b.finalize_timeout(Duration::from_millis(1)));
        let theirs = pair.server.expose(vec![1u8; LEN / 2], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let mut ours = vec![0u8; LEN / 2];
        let client = pair.client.clone();
        let ender = thread::spawn(move || {
            thread::sleep(Duration::from_micros(round * 1000));
            client.finalize().unwrap();
        });
        let _ = remote.pull_into(&mut ours);
        ours.fill(0xee);
        ender.join().unwrap();
        thread::sleep(Duration::from_millis(3));
        assert!(all_are(&ours, 0xee));
    }
}

fn many_threads_pull_into_parts_of_one_buffer(net: &Net) {
    let pair = net.pair();
    let data = pattern(3, 16 * 100_000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let bulk = theirs.bulk();
    let mut ours = vec![0u8; data.len()];
    thread::scope(|s| {
        for (i, part) in ours.chunks_mut(100_000).enumerate() {
            let (bulk, to) = (&bulk, &pair.to_server);
            s.spawn(move || {
                let remote = bulk.slice(i * 100_000, 100_000).unwrap().on(to);
                assert_eq!(remote.pull_into(part).unwrap(), 100_000);
            });
        }
    });
    assert!(ours == data);
}

suite![
    pull_after_its_timeout_does_not_write,
    push_after_its_timeout_does_not_read,
    pull_of_revoked_memory_does_not_write_after_its_error,
    pull_from_a_finalized_peer_does_not_write_after_its_error,
    pull_of_a_finalized_engine_does_not_write_after_it_returned,
    many_threads_pull_into_parts_of_one_buffer,
];
