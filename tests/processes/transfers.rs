//! Transfers during which the process of either side dies or freezes, once their bytes have begun to arrive.

use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, Exposed};

use crate::support::*;

const LEN: usize = 256 << 20;
const SIGNALS: [i32; 2] = [libc::SIGKILL, libc::SIGSTOP];

struct Setup {
    child: Child,
    engine: Engine,
    endpoint: Endpoint,
    signal: i32,
}

/// A child that may signal itself, and an engine here that has called it once.
fn setup(signal: i32) -> Setup {
    setup_with(signal, server())
}

fn setup_with(signal: i32, engine: Engine) -> Setup {
    let (child, address) = Child::server(&[(STRIKE, &signal.to_string())]);
    let endpoint = engine.lookup(&address).unwrap();
    assert_serves(&engine, &endpoint);
    Setup { child, engine, endpoint, signal }
}

impl Setup {
    /// Asserts that this side is not affected, and that a frozen peer works again once it continues.
    fn finish(self) {
        assert_lives(&self.engine);
        if self.signal == libc::SIGSTOP {
            self.child.signal(libc::SIGCONT);
            assert_serves(&self.engine, &self.endpoint);
            let open = self.engine.procedure::<(u8, usize), Bulk>("open");
            let bulk = open.on(&self.endpoint).call(&(7, 100_000)).unwrap();
            let mut copy = vec![0u8; 100_000];
            assert_eq!(bulk.on(&self.endpoint).pull_into(&mut copy).unwrap(), 100_000);
            assert!(all_are(&copy, 7));
        }
        self.engine.finalize().unwrap();
    }
}

/// Waits until the first byte of the memory is no longer zero.
fn wait_until_touched(memory: &Exposed<Vec<u8>>) {
    let begin = Instant::now();
    let mut byte = [0u8];
    while byte[0] == 0 {
        memory.read_at(0, &mut byte).unwrap();
        assert!(begin.elapsed() < BOUND, "no byte arrived");
    }
}

/// The memory is this process' own again: nothing writes to it.
#[track_caller]
fn assert_quiet(bytes: &[u8], time: Duration) {
    let snapshot = bytes.to_vec();
    stays("nothing is written", time, || std::hint::black_box(bytes) == snapshot);
}

fn owner_killed_or_stopped_ends_the_pull(signal: i32) {
    let setup = setup(signal);
    let open = setup.engine.procedure::<(u8, usize), Bulk>("open");
    let bulk = open.on(&setup.endpoint).call(&(1, LEN)).unwrap();
    let local = setup.engine.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let transfer = bulk.on(&setup.endpoint).start_pull_into(local.slice(0, LEN).unwrap());
    wait_until_touched(&local);
    setup.child.signal(signal);
    let begin = Instant::now();
    let (result, _slice) = transfer.wait();
    assert_disconnected(result, begin);
    let mut bytes = local.reclaim();
    assert!(bytes[LEN - 1] == 0, "the transfer was over before the signal: this test tests nothing");
    bytes.fill(9);
    setup.finish();
    assert!(all_are(&bytes, 9));
}

fn owner_killed_or_stopped_ends_the_push(signal: i32) {
    let setup = setup(signal);
    let open = setup.engine.procedure::<usize, Bulk>("open, signalled when touched");
    let bulk = open.on(&setup.endpoint).call(&LEN).unwrap();
    let signalled = setup.child.struck();
    let local = setup.engine.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
    let (result, local) = bulk.on(&setup.endpoint).start_push_from(local).wait();
    let end = Instant::now();
    assert_disconnected(result, end);
    let took = end.saturating_duration_since(signalled.join().unwrap());
    assert!(took < NOTICED, "{took:?}");
    assert!(all_are(&local.reclaim(), 1));
    setup.finish();
}

fn owner_killed_or_stopped_ends_the_push_of_a_borrowed_slice(signal: i32) {
    let setup = setup(signal);
    let open = setup.engine.procedure::<usize, Bulk>("open, signalled when touched");
    let bulk = open.on(&setup.endpoint).call(&LEN).unwrap();
    let signalled = setup.child.struck();
    let mut bytes = vec![1u8; LEN];
    let result = bulk.on(&setup.endpoint).push_from(&bytes);
    let end = Instant::now();
    assert_disconnected(result, end);
    assert!(end.saturating_duration_since(signalled.join().unwrap()) < NOTICED);
    bytes.fill(2);
    setup.finish();
}

fn puller_killed_or_stopped_releases_the_memory(signal: i32) {
    let setup = setup(signal);
    let exposed = setup.engine.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
    let pull = setup.engine.procedure::<Bulk, Result<usize, String>>("pull, signalled when touched");
    let pending = pull.on(&setup.endpoint).start(&exposed.bulk()).unwrap();
    let signalled = setup.child.struck();
    let result = pending.wait();
    let end = Instant::now();
    assert_disconnected(result, end);
    assert!(end.saturating_duration_since(signalled.join().unwrap()) < NOTICED);
    // No peer reads it any more: it is returned at once, and may be written. Over shared memory, a reader that was stopped in
    // the middle of a read is waited for, up to a second.
    let begin = Instant::now();
    let mut bytes = exposed.reclaim();
    assert!(begin.elapsed() < patience() * Duration::from_millis(1500), "{:?}", begin.elapsed());
    assert!(all_are(&bytes, 1));
    bytes.fill(2);
    setup.finish();
}

fn pusher_killed_or_stopped_releases_the_memory(signal: i32) {
    let setup = setup(signal);
    let exposed = setup.engine.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
    let push = setup.engine.procedure::<(u8, Bulk), Result<usize, String>>("push");
    let pending = push.on(&setup.endpoint).start(&(1, exposed.bulk())).unwrap();
    wait_until_touched(&exposed);
    setup.child.signal(signal);
    let begin = Instant::now();
    // Reclaimed while the pusher is gone, and before the disconnect is known.
    let bytes = exposed.reclaim();
    assert!(begin.elapsed() < patience() * Duration::from_secs(1));
    assert!(bytes[LEN - 1] == 0, "the transfer was over before the signal: this test tests nothing");
    let prefix = &bytes[..8 << 20];
    assert_quiet(prefix, Duration::from_millis(100));
    assert_disconnected(pending.wait(), begin);
    assert!(bytes[LEN - 1] == 0);
    let snapshot = bytes.clone();
    setup.finish();
    assert!(bytes == snapshot);
}

fn transfers_with_stopped_peer_time_out() {
    let _watchdog = Watchdog::start("transfers::transfers_with_stopped_peer_time_out");
    // Not given up before the deadlines, on a slow machine either.
    let engine = configured().peer_timeout(patience() * HEARTBEAT).listen(anywhere()).build().unwrap();
    let setup = setup_with(libc::SIGSTOP, engine);
    let open = setup.engine.procedure::<(u8, usize), Bulk>("open");
    let bulk = open.on(&setup.endpoint).call(&(1, LEN)).unwrap();
    setup.child.signal(libc::SIGSTOP);
    let begin = Instant::now();
    // A device serves RMA for a frozen peer, and the memory must be registered first, which counts towards the deadline.
    let mut bytes = vec![0u8; if is_over_verbs() { LEN / 16 } else { LEN }];
    let result = bulk.on(&setup.endpoint).timeout(Duration::from_millis(100)).pull_into(&mut bytes);
    assert!(result.as_ref().is_err_and(calomel::Error::is_timeout), "{result:?}");
    assert!(begin.elapsed() < patience() * Duration::from_millis(900), "{:?}", begin.elapsed());
    bytes.fill(3);
    let result = bulk.on(&setup.endpoint).timeout(Duration::from_millis(100)).push_from(&bytes);
    assert!(result.as_ref().is_err_and(calomel::Error::is_timeout), "{result:?}");
    // The peer continues, and sends what was requested long ago: it is discarded.
    setup.child.signal(libc::SIGCONT);
    assert_serves(&setup.engine, &setup.endpoint);
    assert!(all_are(&bytes, 3));
    let mut copy = vec![0u8; 1000];
    assert_eq!(bulk.on(&setup.endpoint).pull_into(&mut copy).unwrap(), 1000);
    setup.engine.finalize().unwrap();
}

macro_rules! with_each_signal {
    ($($test:ident),*) => {
        /// With each of the signals.
        mod with_each_signal {
            use super::*;
            $(
                pub fn $test() {
                    let _watchdog = Watchdog::start(concat!("transfers::", stringify!($test)));
                    for signal in SIGNALS {
                        super::$test(signal);
                    }
                }
            )*
        }
        mod tests {
            use super::with_each_signal::*;
            over_each!($($test),*);
            over_each!(@ over_shm_no_kernel_copy, ShmNoKernelCopy, $($test),*);
        }
    };
}

with_each_signal!(
    owner_killed_or_stopped_ends_the_pull,
    owner_killed_or_stopped_ends_the_push,
    owner_killed_or_stopped_ends_the_push_of_a_borrowed_slice,
    puller_killed_or_stopped_releases_the_memory,
    pusher_killed_or_stopped_releases_the_memory
);

over_each!(transfers_with_stopped_peer_time_out);
