//! Transfers in progress: started, awaited, timed out, cancelled, dropped, leaked.

use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Error, Exposed, Request, Transfer};

use crate::assert_error;
use crate::support::{BOUND, Net, Pair, all_are, block_on, eventually, pattern, rounds};

const LEN: usize = 3_000_000;
/// A transfer of this length takes tens of milliseconds.
const LONG: usize = 48 << 20;

fn started_transfer_returns_result_and_buffer(net: &Net) {
    let pair = net.pair();
    let data = pattern(1, LEN);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let transfer: Transfer<Vec<u8>> = theirs.bulk().on(&pair.to_server).start_pull_into(ours);
    eventually("the transfer is done", || transfer.is_ready());
    let (result, ours): (_, Exposed<Vec<u8>>) = transfer.wait();
    assert_eq!(result.unwrap(), LEN);
    // The exposure in the returned buffer is still valid.
    ours.write_at(0, &[1, 2, 3]).unwrap();
    let (result, ours) = theirs.bulk().on(&pair.to_server).start_push_from(ours).wait();
    assert_eq!(result.unwrap(), LEN);
    let (theirs, ours) = (theirs.reclaim(), ours.reclaim());
    assert!(theirs == ours && theirs[..3] == [1, 2, 3] && theirs[3..] == data[3..]);
}

fn awaited_transfer_returns_result_and_buffer(net: &Net) {
    let pair = net.pair();
    let data = pattern(2, LEN);
    let theirs = pair.server.expose_read_only(data.clone()).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let fresh = || pair.client.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
    let (a, b) = (remote.start_pull_into(fresh()), remote.start_pull_into(fresh()));
    let (a, b) = block_on(async move { (a.await, b.await) });
    for (result, buffer) in [a, b] {
        assert_eq!(result.unwrap(), LEN);
        assert!(buffer.reclaim() == data);
    }
}

fn many_concurrent_transfers_succeed(net: &Net) {
    let pair = net.pair();
    let data = pattern(3, 64 * 50_000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let target = pair.server.expose(vec![0u8; data.len()], BulkMode::ReadWrite).unwrap();
    let mut pulls = Vec::new();
    for i in 0..64 {
        let part = theirs.bulk().slice(i * 50_000, 50_000).unwrap().on(&pair.to_server);
        pulls.push(part.start_pull_into(pair.client.expose(vec![0u8; 50_000], BulkMode::ReadWrite).unwrap()));
    }
    let mut pushes = Vec::new();
    for (i, pull) in pulls.into_iter().enumerate() {
        let (result, buffer) = pull.wait();
        assert_eq!(result.unwrap(), 50_000);
        let part = target.bulk().slice((63 - i) * 50_000, 50_000).unwrap().on(&pair.to_server);
        pushes.push(part.start_push_from(buffer));
    }
    for push in pushes {
        assert_eq!(push.wait().0.unwrap(), 50_000);
    }
    let target = target.reclaim();
    for i in 0..64 {
        assert!(target[i * 50_000..][..50_000] == data[(63 - i) * 50_000..][..50_000]);
    }
}

fn failed_transfer_returns_the_buffer(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![1u8; 100], BulkMode::WriteOnly).unwrap();
    let ours = pair.client.expose(pattern(1, 100), BulkMode::ReadWrite).unwrap();
    let (result, ours) = theirs.bulk().on(&pair.to_server).start_pull_into(ours).wait();
    assert_error!(result, Error::AccessDenied { .. });
    let gone = theirs.bulk();
    drop(theirs);
    let (result, ours) = gone.on(&pair.to_server).start_push_from(ours).wait();
    assert_error!(result, Error::Revoked { .. });
    let absent = pair.client.lookup(net.dead_address()).unwrap();
    let (result, ours) = block_on(gone.on(&absent).start_push_from(ours));
    assert!(result.unwrap_err().is_disconnected());
    assert!(ours.reclaim() == pattern(1, 100));
}

fn transfer_beyond_its_timeout_fails_with_timeout(net: &Net) {
    let pair = net.pair();
    let data = pattern(4, LONG);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut ours = pair.client.expose(vec![0u8; LONG], BulkMode::ReadWrite).unwrap();
    let mut timeouts = 0;
    for micros in [0, 50, 500, 2000, 5000] {
        let timeout = Duration::from_micros(micros);
        let begin = Instant::now();
        let (result, back) = remote.clone().timeout(timeout).start_pull_into(ours).wait();
        assert!(begin.elapsed() < Duration::from_secs(10));
        match result {
            Ok(moved) => assert_eq!(moved, LONG),
            Err(error) => {
                assert_error!(Err::<(), _>(error), Error::Timeout { after, .. } if after == timeout);
                timeouts += 1;
            }
        }
        ours = back;
    }
    assert!(timeouts > 0, "even a timeout of zero was long enough");
    // Both sides are still usable.
    let (result, ours) = remote.start_pull_into(ours).wait();
    assert_eq!(result.unwrap(), LONG);
    assert!(ours.reclaim() == data);
}

fn cancelled_pull_ends_soon_and_writes_no_more(net: &Net) {
    let pair = net.pair();
    let data = pattern(5, LONG);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    for round in 0..6 {
        let ours = pair.client.expose(vec![0u8; LONG], BulkMode::ReadWrite).unwrap();
        let transfer = remote.start_pull_into(ours);
        thread::sleep(Duration::from_micros(500 * round));
        transfer.cancel();
        let begin = Instant::now();
        let (result, ours) = transfer.wait();
        assert!(begin.elapsed() < Duration::from_secs(5));
        let mut ours = ours.reclaim();
        match result {
            Ok(moved) => assert!(moved == LONG && ours == data),
            Err(error) => assert_error!(Err::<(), _>(error), Error::Cancelled { .. }),
        }
        // The transfer is over: what is written here stays.
        ours.fill(0x5c);
        thread::sleep(Duration::from_millis(5));
        assert!(ours == vec![0x5c; LONG]);
    }
    let mut copy = vec![0u8; 1000];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 1000);
    assert!(copy == data[..1000]);
}

fn cancelled_push_ends_soon(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u8; LONG], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let mut ours = pair.client.expose(vec![1u8; LONG], BulkMode::ReadWrite).unwrap();
    for round in 0..6 {
        let transfer = remote.start_push_from(ours);
        thread::sleep(Duration::from_micros(500 * round));
        transfer.cancel();
        let (result, back) = transfer.wait();
        if let Err(error) = result {
            assert_error!(Err::<(), _>(error), Error::Cancelled { .. });
        }
        ours = back;
    }
    assert!(ours.reclaim() == vec![1; LONG]);
    assert_eq!(remote.push_from(&[2u8; 10][..]).unwrap(), 10);
    let theirs = theirs.reclaim();
    assert_eq!(theirs[..10], [2; 10]);
    assert!(theirs.iter().all(|&b| b <= 2));
}

fn cancel_of_a_completed_transfer_keeps_the_result(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![3u8; 1000], BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![0u8; 1000], BulkMode::ReadWrite).unwrap();
    let transfer = theirs.bulk().on(&pair.to_server).start_pull_into(ours);
    eventually("the transfer is done", || transfer.is_ready());
    transfer.cancel();
    let (result, ours) = transfer.wait();
    assert_eq!(result.unwrap(), 1000);
    assert!(ours.reclaim() == [3; 1000]);
}

/// Asserts that calls and transfers between the two still work.
fn assert_usable(pair: &Pair, theirs: &Exposed<Vec<u8>>) {
    let mut copy = vec![0u8; 1000];
    assert_eq!(theirs.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap(), 1000);
    pair.server.define("fine", |_: &Request, n: u8| n).unwrap().remove();
    let missing = pair.client.procedure::<u8, u8>("fine").on(&pair.to_server).call(&1);
    assert_error!(missing, Error::NoSuchProcedure { .. });
}

fn dropped_transfer_does_not_write_freed_memory(net: &Net) {
    let pair = net.pair();
    let data = pattern(6, LONG);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    for round in (0..8).step_by(8 / rounds(8)) {
        let ours = pair.client.expose(vec![0u8; LONG], BulkMode::ReadWrite).unwrap();
        let transfer = remote.start_pull_into(ours);
        thread::sleep(Duration::from_micros(300 * round));
        drop(transfer);
        // The new owner of that memory must be its only writer.
        let fresh = vec![0x77u8; LONG];
        thread::sleep(Duration::from_millis(2));
        assert!(all_are(&fresh, 0x77));
        let ours = pair.client.expose(vec![0x33u8; LONG / 8], BulkMode::ReadWrite).unwrap();
        drop(remote.start_push_from(ours));
    }
    assert_usable(&pair, &theirs);
    let theirs = theirs.reclaim();
    assert!(theirs[LONG / 8..] == data[LONG / 8..]);
}

fn transfer_dropped_after_a_poll_leaves_the_link_usable(net: &Net) {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Waker};
    let pair = net.pair();
    let theirs = pair.server.expose(pattern(6, LONG), BulkMode::ReadWrite).unwrap();
    for _ in 0..4 {
        let ours = pair.client.expose(vec![0u8; LONG], BulkMode::ReadWrite).unwrap();
        let mut transfer = theirs.bulk().on(&pair.to_server).start_pull_into(ours);
        let _ = Pin::new(&mut transfer).poll(&mut Context::from_waker(Waker::noop()));
        drop(transfer);
    }
    assert_usable(&pair, &theirs);
}

fn leaked_transfer_leaves_the_link_usable(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(pattern(7, LEN), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    for _ in 0..3 {
        let ours = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        std::mem::forget(remote.start_pull_into(ours));
        let ours = pair.client.expose(vec![1u8; LEN], BulkMode::ReadWrite).unwrap();
        std::mem::forget(remote.start_push_from(ours));
    }
    assert_usable(&pair, &theirs);
    assert_eq!(theirs.reclaim().len(), LEN);
}

fn transfer_started_on_another_thread_is_waited_for(net: &Net) {
    let pair = net.pair();
    let data = pattern(8, LEN);
    let theirs = pair.server.expose_read_only(data.clone()).unwrap();
    let ours = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let transfer = theirs.bulk().on(&pair.to_server).start_pull_into(ours);
    let (result, ours) = thread::spawn(move || transfer.wait()).join().unwrap();
    assert_eq!(result.unwrap(), LEN);
    assert!(ours.reclaim() == data);
}

fn pulled_bytes_are_visible_before_the_transfer_ends(net: &Net) {
    // Bytes are written directly, not copied at the end: progress can be observed.
    let pair = net.pair();
    let theirs = pair.server.expose(vec![9u8; LONG], BulkMode::ReadOnly).unwrap();
    let ours = pair.client.expose(vec![0u8; LONG], BulkMode::WriteOnly).unwrap();
    let whole = ours.slice(0, LONG).unwrap();
    let transfer = theirs.bulk().on(&pair.to_server).start_pull_into(whole);
    let begin = Instant::now();
    let mut byte = [0u8];
    while byte[0] == 0 {
        ours.read_at(0, &mut byte).unwrap();
        assert!(begin.elapsed() < BOUND);
    }
    let (result, _whole) = transfer.wait();
    assert_eq!(result.unwrap(), LONG);
    assert!(all_are(&ours.reclaim(), 9));
}

suite![
    started_transfer_returns_result_and_buffer,
    awaited_transfer_returns_result_and_buffer,
    many_concurrent_transfers_succeed,
    failed_transfer_returns_the_buffer,
    transfer_beyond_its_timeout_fails_with_timeout,
    cancelled_pull_ends_soon_and_writes_no_more,
    cancelled_push_ends_soon,
    cancel_of_a_completed_transfer_keeps_the_result,
    dropped_transfer_does_not_write_freed_memory,
    transfer_dropped_after_a_poll_leaves_the_link_usable,
    leaked_transfer_leaves_the_link_usable,
    transfer_started_on_another_thread_is_waited_for,
    pulled_bytes_are_visible_before_the_transfer_ends,
];
