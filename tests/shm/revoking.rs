//! Memory that is reclaimed, and overwritten at once, while another process reads it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, EngineBuffer, Exposed};

use crate::roles::{Far, start};
use crate::support::*;

/// Several chunks; a few steps; and a single step, which reads all of it.
const LENS: [usize; 3] = [4 << 20, 500_000, 128 << 10];
/// Longest reclaim beside a stopped reader, with slack.
const RECLAIMED: Duration = Duration::from_millis(1800);

enum Memory {
    Own(Exposed<Vec<u8>>),
    Shared(Exposed<EngineBuffer>),
}

impl Memory {
    /// Full of ones.
    fn new(engine: &Engine, shared: bool, len: usize) -> Memory {
        if shared {
            let mut buffer = engine.alloc(len);
            buffer.fill(1);
            return Memory::Shared(engine.expose(buffer, BulkMode::ReadWrite).unwrap());
        }
        Memory::Own(engine.expose(vec![1; len], BulkMode::ReadWrite).unwrap())
    }

    fn bulk(&self) -> Bulk {
        match self {
            Memory::Own(exposed) => exposed.bulk(),
            Memory::Shared(exposed) => exposed.bulk(),
        }
    }

    /// Reclaims it, fills it with twos at once, from its end; returns how long the reclaim took.
    fn overwrite(self) -> Duration {
        let begin = Instant::now();
        let overwrite = |bytes: &mut [u8]| {
            let took = begin.elapsed();
            bytes.rchunks_mut(64 << 10).for_each(|chunk| chunk.fill(2));
            took
        };
        match self {
            Memory::Own(exposed) => overwrite(&mut exposed.reclaim()),
            Memory::Shared(exposed) => overwrite(&mut exposed.reclaim()),
        }
    }
}

type Fetched = calomel::Result<Result<u8, String>>;

fn fetch(far: &Far, bulk: &Bulk, into_shared: bool) -> calomel::Pending<Result<u8, String>> {
    far.engine.procedure::<(Bulk, bool), Result<u8, String>>("fetch").on(&far.to).start(&(bulk.clone(), into_shared)).unwrap()
}

/// True if the pull succeeded with the original content; false if it failed for the right reason.
#[track_caller]
fn is_good(fetched: Fetched) -> bool {
    match fetched {
        Ok(Ok(1)) => true,
        Ok(Err(text)) if text.contains("taken back") || text.contains("revoked") || text.contains("disconnected") => false,
        Err(error) if error.is_disconnected() => false,
        other => panic!("{other:?}"),
    }
}

fn assert_pulls_bring_no_later_writes(carrier: Carrier) {
    let _watchdog = Watchdog::start("revoking::assert_pulls_bring_no_later_writes");
    over(carrier, || ());
    let (_child, address) = start(&[]);
    let far = Far::new(&client(), &address);
    let mut random = Random(0xf00d);
    // How long an undisturbed pull takes.
    let begin = Instant::now();
    far.assert_serves();
    let usual = LENS.map(|len| {
        let whole = Memory::new(&far.engine, false, len);
        let times = (0..5).map(|_| {
            let once = Instant::now();
            assert!(is_good(fetch(&far, &whole.bulk(), false).wait()));
            once.elapsed().as_micros() as usize
        });
        times.min().unwrap()
    });
    let (mut good, mut failed) = (0, 0);
    // A busy machine needs longer for as many.
    while begin.elapsed() < Duration::from_secs(2) || (good == 0 || failed <= 10) && begin.elapsed() < BOUND {
        let (shared, size) = (random.below(2) == 0, [0, 1, 2, 2, 2, 2][random.below(6)]);
        let memory = Memory::new(&far.engine, shared, LENS[size]);
        let pending = fetch(&far, &memory.bulk(), random.below(2) == 0);
        let until = Instant::now() + Duration::from_micros(random.below(usual[size] * 3 / 2) as u64);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let took = memory.overwrite();
        assert!(took < RECLAIMED, "{took:?}");
        match is_good(pending.wait()) {
            true => good += 1,
            false => failed += 1,
        }
    }
    assert!(good > 0 && failed > 10, "{good} pulls were good, {failed} failed: this test tests little");
    far.assert_serves();
}

#[test]
fn pull_by_the_kernel_never_brings_writes_after_reclaim() {
    assert_pulls_bring_no_later_writes(Carrier::Shm);
}

#[test]
fn pull_by_the_ring_never_brings_writes_after_reclaim() {
    assert_pulls_bring_no_later_writes(Carrier::ShmNoKernelCopy);
}

fn reclaim_while_reader_gets(signal: i32) {
    over(Carrier::Shm, || ());
    let (other, address) = start(&[]);
    let bystander = Far::new(&client(), &address);
    let engine = bystander.engine.clone();
    let mut random = Random(0xdead);
    let (mut child, mut address) = start(&[]);
    for round in 0..12 {
        let far = Far::new(&engine, &address);
        far.assert_serves();
        let memory = Memory::new(&engine, round % 2 == 0, LENS[0]);
        let pending = fetch(&far, &memory.bulk(), round % 4 < 2);
        std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
        child.signal(signal);
        let took = memory.overwrite();
        assert!(took < RECLAIMED, "{took:?}");
        assert_serves(&engine, &bystander.to);
        if signal == libc::SIGSTOP {
            child.signal(libc::SIGCONT);
        } else {
            (child, address) = start(&[]);
        }
        is_good(pending.wait());
    }
    bystander.assert_serves();
    drop(other);
}

#[test]
fn reader_killed_during_reclaim_delays_it_briefly() {
    let _watchdog = Watchdog::start("revoking::reader_killed_during_reclaim_delays_it_briefly");
    reclaim_while_reader_gets(libc::SIGKILL);
}

#[test]
fn reader_stopped_during_reclaim_delays_it_briefly() {
    let _watchdog = Watchdog::start("revoking::reader_stopped_during_reclaim_delays_it_briefly");
    reclaim_while_reader_gets(libc::SIGSTOP);
}

/// The peer is stopped while it reads the arguments out of the caller's memory: the call ends at its deadline, and what the
/// caller writes there afterwards is never seen.
#[test]
fn call_whose_arguments_a_stopped_peer_reads_ends_at_its_deadline() {
    let _watchdog = Watchdog::start("revoking::call_whose_arguments_a_stopped_peer_reads_ends_at_its_deadline");
    over(Carrier::Shm, || ());
    let (child, address) = start(&[]);
    let far = Far::new(&client(), &address);
    far.assert_serves();
    let swallow = far.engine.procedure::<Vec<u8>, usize>("swallow").on(&far.to);
    let mut random = Random(0xbeef);
    let mut arguments = vec![1u8; 8 << 20];
    let pid = rustix::process::Pid::from_raw(child.pid()).unwrap();
    let mut timed_out = 0;
    for round in 0..16 {
        let after = Duration::from_micros(random.below(2500) as u64);
        let outcome = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(after);
                rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            });
            let begin = Instant::now();
            let outcome = swallow.clone().timeout(Duration::from_millis(100)).call(&arguments);
            // A reader that is stopped would be waited for, for a second.
            assert!(begin.elapsed() < Duration::from_millis(100) + patience() * Duration::from_millis(500), "round {round}");
            outcome
        });
        arguments.fill(2);
        child.signal(libc::SIGCONT);
        arguments.fill(1);
        match outcome {
            Ok(len) => assert_eq!(len, arguments.len()),
            Err(error) => {
                assert!(error.is_timeout(), "{error}");
                timed_out += 1;
            }
        }
        assert_serves(&far.engine, &far.to);
    }
    assert!(timed_out > 0, "no call was disturbed: this test tests little");
}

#[test]
fn reclaim_with_many_readers_reveals_no_later_writes() {
    let _watchdog = Watchdog::start("revoking::reclaim_with_many_readers_reveals_no_later_writes");
    over(Carrier::Shm, || ());
    let children: Vec<_> = (0..4).map(|_| start(&[])).collect();
    let engine = client();
    let fars: Arc<Vec<Far>> = Arc::new(children.iter().map(|(_, address)| Far::new(&engine, address)).collect());
    for round in 0..20 {
        let memory = Memory::new(&engine, round % 2 == 0, LENS[0]);
        let pendings: Vec<_> = fars.iter().map(|far| fetch(far, &memory.bulk(), false)).collect();
        std::thread::sleep(Duration::from_micros(200 * round));
        assert!(memory.overwrite() < RECLAIMED);
        for pending in pendings {
            is_good(pending.wait());
        }
    }
    fars.iter().for_each(Far::assert_serves);
}
