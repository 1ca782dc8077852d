//! Started transfers with borrowed memory, and waiting for the first of several.

use std::time::Duration;

use calomel::{BulkMode, Error, Transfer};

use crate::assert_error;
use crate::support::{Net, all_are, block_on, pattern, travelled};

const PART: usize = 60_000;
const PARTS: usize = 16;

fn parts_of_a_borrowed_slice_are_pulled_at_the_same_time(net: &Net) {
    let pair = net.pair();
    let data = pattern(1, PARTS * PART);
    let theirs = pair.server.expose_read_only(data.clone()).unwrap();
    let remote = travelled(&theirs.bulk()).on(&pair.to_server);
    let mut copy = vec![0u8; data.len()];
    let firsts = pair.client.scope(|s| {
        let mut pulls = Vec::new();
        for (i, part) in copy.chunks_mut(PART).enumerate() {
            pulls.push(s.start_pull_into(&remote.slice(i * PART, PART)?, part));
        }
        let mut firsts = Vec::new();
        while !pulls.is_empty() {
            let before = pulls.len();
            let (index, (result, part)) = Transfer::wait_any(&mut pulls);
            assert!(index < before && pulls.len() == before - 1);
            assert_eq!(result?, PART);
            // The slice is the caller's again, while the others are in progress.
            firsts.push(part[0]);
            part[0] = 0;
        }
        Ok(firsts)
    });
    let (mut firsts, mut expected) = (firsts.unwrap(), data.iter().step_by(PART).copied().collect::<Vec<_>>());
    firsts.sort_unstable();
    expected.sort_unstable();
    assert_eq!(firsts, expected);
    for (copy, data) in copy.chunks(PART).zip(data.chunks(PART)) {
        assert!(copy[0] == 0 && copy[1..] == data[1..]);
    }
}

fn borrowed_slice_is_pushed_and_used_again(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u32; 100_000], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let (numbers, mut copy) = ((0..100_000u32).collect::<Vec<_>>(), vec![0u32; 50_000]);
    pair.client
        .scope(|s| {
            let halves = numbers.chunks(50_000).enumerate();
            let pushes = halves.map(|(i, half)| Ok(s.start_push_from(&remote.slice_of::<u32>(50_000 * i, 50_000)?, half)));
            for (result, half) in Transfer::wait_all(pushes.collect::<Result<Vec<_>, Error>>()?) {
                assert_eq!((result?, half.len()), (200_000, 50_000));
            }
            // One slice for one pull after another, awaited or not; many more than the scope remembers.
            let mut slice = &mut copy[..];
            for i in 0..200 {
                let pull = s.start_pull_into(&remote.slice_of::<u32>(250 * i, 50_000)?, slice);
                let result;
                (result, slice) = if i % 2 == 0 { pull.wait() } else { block_on(pull) };
                assert_eq!(result?, 200_000);
                assert_eq!(slice[1], 250 * i as u32 + 1);
            }
            assert!(format!("{s:?}").len() < 30, "{s:?}");
            Ok(())
        })
        .unwrap();
    assert!(theirs.reclaim() == numbers && copy[..] == numbers[49_750..99_750]);
}

fn leaked_and_dropped_transfers_end_with_their_scope(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![9u8; 8 << 20], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    for leak in [true, false] {
        let (mut target, source) = (vec![0u8; 8 << 20], vec![9u8; 8 << 20]);
        pair.client
            .scope(|s| {
                let (pull, push) = (s.start_pull_into(&remote, &mut target), s.start_push_from(&remote, &source));
                if leak {
                    std::mem::forget((pull, push));
                } else {
                    drop((pull, push));
                }
                Ok(())
            })
            .unwrap();
        // From now on the slices are unused: a write would show.
        target.fill(1);
        std::thread::sleep(Duration::from_millis(20));
        assert!(all_are(&target, 1));
        drop(source);
        assert_eq!(remote.slice(0, 10).unwrap().pull_into(&mut target).unwrap(), 10);
    }
}

fn failed_started_transfer_returns_the_borrowed_slice(net: &Net) {
    let (pair, other) = (net.pair(), net.client());
    let theirs = pair.server.expose(vec![1u8; 5000], BulkMode::WriteOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut buffer = [3u8; 100];
    pair.client
        .scope(|s| {
            let (result, slice) = s.start_pull_into(&remote, &mut buffer).wait();
            assert_error!(result, Error::AccessDenied { .. });
            assert_eq!(*slice, [3; 100]);
            Ok(())
        })
        .unwrap();
    other
        .scope(|s| {
            let error = s.start_push_from(&remote, &buffer).wait().0.unwrap_err();
            assert!(matches!(error, Error::OtherEngine { object: "the scope", .. }), "{error:?}");
            Ok(())
        })
        .unwrap();
    let revoked = theirs.bulk().on(&pair.to_server);
    drop(theirs);
    let result = pair.client.scope(|s| Ok(s.start_push_from(&revoked, &buffer).wait().0));
    assert_error!(result.unwrap(), Error::Revoked { .. });
    assert_eq!(buffer, [3; 100]);
}

fn wait_any_returns_each_transfer_with_its_buffer(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(pattern(4, PARTS * PART), BulkMode::ReadWrite).unwrap();
    let denied = pair.server.expose(vec![0u8; 8], BulkMode::WriteOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut pulls = Vec::new();
    for i in 0..PARTS {
        let buffer = pair.client.expose(vec![0u8; PART], BulkMode::WriteOnly).unwrap();
        let source = if i == 3 { denied.bulk().on(&pair.to_server) } else { remote.slice(i * PART, PART).unwrap() };
        pulls.push(source.start_pull_into(buffer));
    }
    let mut left: Vec<usize> = (0..PARTS).collect();
    while !pulls.is_empty() {
        let (index, (result, buffer)) = Transfer::wait_any(&mut pulls);
        let i = left.remove(index);
        assert_eq!(pulls.len(), left.len());
        if i == 3 {
            assert_error!(result, Error::AccessDenied { .. });
        } else {
            assert_eq!(result.unwrap(), PART);
            assert!(buffer.reclaim() == pattern(4, PARTS * PART)[i * PART..][..PART], "{i}");
        }
    }
    // Slices of one exposure, too, in order.
    let ours = pair.client.expose(vec![0u8; 4000], BulkMode::ReadWrite).unwrap();
    let slices = (0..4).map(|i| remote.slice(i * PART, 1000).unwrap().start_pull_into(ours.slice(i * 1000, 1000).unwrap()));
    let ended = Transfer::wait_all(slices.collect());
    assert!(ended.iter().all(|(result, slice)| matches!(result, Ok(1000)) && slice.len() == 1000));
    let ours = ours.reclaim();
    assert!((0..4).all(|i| ours[i * 1000..][..1000] == pattern(4, PARTS * PART)[i * PART..][..1000]));
}

fn wait_any_of_nothing_panics(_: &Net) {
    let wait = || Transfer::wait_any(&mut Vec::<Transfer<Vec<u8>>>::new()).0;
    let panic = std::panic::catch_unwind(wait).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"wait_any needs at least one transfer"));
}

/// A peer reports what it gets in order: the small ones arrive while the first chunks of the large one are under way.
fn many_small_pulls_beside_a_large_one(net: &Net) {
    let pair = net.pair();
    let (large, small, count) = (4 << 20, 300, 200);
    let data = pattern(5, large + small * count);
    let theirs = pair.server.expose_read_only(data.clone()).unwrap();
    let remote = travelled(&theirs.bulk()).on(&pair.to_server);
    for _ in 0..3 {
        let expose = |len: usize| pair.client.expose(vec![0u8; len], BulkMode::WriteOnly).unwrap();
        let first = remote.slice(0, large).unwrap().start_pull_into(expose(large));
        let pulls: Vec<_> =
            (0..count).map(|i| remote.slice(large + i * small, small).unwrap().start_pull_into(expose(small))).collect();
        let (result, memory) = first.wait();
        assert_eq!(result.unwrap(), large);
        assert!(memory.reclaim() == data[..large]);
        for (i, pull) in pulls.into_iter().enumerate() {
            let (result, memory) = pull.wait();
            assert_eq!(result.unwrap(), small);
            assert!(memory.reclaim() == data[large + i * small..][..small], "{i}");
        }
    }
}

suite![
    many_small_pulls_beside_a_large_one,
    parts_of_a_borrowed_slice_are_pulled_at_the_same_time,
    borrowed_slice_is_pushed_and_used_again,
    leaked_and_dropped_transfers_end_with_their_scope,
    failed_started_transfer_returns_the_borrowed_slice,
    wait_any_returns_each_transfer_with_its_buffer,
    wait_any_of_nothing_panics,
];
