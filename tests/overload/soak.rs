//! A mixed load for `CALOMEL_SOAK_SECONDS`: the processes' memory, descriptors and threads are printed every other second, and
//! must not grow.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Address, Bulk, BulkMode, Endpoint, Engine, Error, Request};

use crate::memory;
use crate::raw::{Raw, request};
use crate::support::*;

const MIB: usize = 1 << 20;
/// Allowed growth from the second to the last third: the allocator caches memory for each thread.
const GROWTH: usize = 32 * MIB;
const WORKERS: u64 = 6;
/// At most so many samples are taken, so that the least of a third of them is one at which little is exposed.
const SAMPLES: u32 = 60;

/// The server, with a procedure that returns the number of its exposed regions.
pub fn run() {
    let engine = Engine::builder().listen("tcp://127.0.0.1:0").build().unwrap();
    define_add(&engine);
    engine.define("echo", |_: &Request, text: String| text).unwrap();
    engine.define("sleep", |_: &Request, ms: u64| thread::sleep(Duration::from_millis(ms))).unwrap();
    engine.define_async("think", |_: Request, n: u64| async move { n + 1 }).unwrap();
    engine
        .define("fetch", |request: &Request, bulk: Bulk| -> Result<usize, String> {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes).map_err(|error| error.to_string())
        })
        .unwrap();
    engine
        .define("fill", |request: &Request, bulk: Bulk| -> Result<usize, String> {
            bulk.on(request.endpoint()).push_from(&vec![7u8; bulk.len()]).map_err(|error| error.to_string())
        })
        .unwrap();
    // Exposed as long as the caller holds it.
    engine
        .define("open", |request: &Request, len: usize| {
            let exposed = request.engine().expose(vec![1u8; len], BulkMode::ReadWrite).unwrap();
            let bulk = exposed.bulk();
            let (engine, released) = (request.engine().clone(), exposed.released());
            LIVE.fetch_add(1, Ordering::Relaxed);
            let timer = engine.timer(Duration::from_millis(200), move || {
                let _ = released.wait_timeout(Duration::from_secs(5));
                drop(exposed);
                LIVE.fetch_sub(1, Ordering::Relaxed);
            });
            std::mem::forget(timer);
            bulk
        })
        .unwrap();
    engine.define("live", |_: &Request, ()| LIVE.load(Ordering::Relaxed)).unwrap();
    say(&format!("address {}", engine.address()));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

/// Regions that this process has exposed.
static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Worker {
    engine: Engine,
    to: Endpoint,
    random: Random,
}

impl Worker {
    fn new(address: &Address, seed: u64) -> Worker {
        // Every second client uses shared memory.
        let engine = Engine::builder().same_host_upgrade(seed.is_multiple_of(2)).build().unwrap();
        let to = engine.lookup(address).unwrap();
        Worker { engine, to, random: Random(seed) }
    }

    /// Mostly small, now and then large.
    fn size(&mut self) -> usize {
        let most = [100, 20_000, 200_000, 3 * MIB][self.random.below(4)];
        self.random.below(most)
    }

    fn step(&mut self) {
        let size = self.size();
        let Worker { engine, to, random } = self;
        match random.below(10) {
            0..3 => {
                let text = "x".repeat(size);
                assert!(engine.procedure::<String, String>("echo").on(&*to).call(&text).unwrap() == text);
            }
            3 => {
                let think = engine.procedure::<u64, u64>("think");
                let pendings: Vec<_> = (0..100).map(|n| think.on(&*to).start(&n).unwrap()).collect();
                for (n, pending) in pendings.into_iter().enumerate() {
                    if random.below(10) == 0 {
                        pending.cancel();
                    } else {
                        assert_eq!(pending.wait().unwrap(), n as u64 + 1);
                    }
                }
            }
            4 => {
                let sleep = engine.procedure::<u64, ()>("sleep").on(&*to).timeout(Duration::from_millis(3));
                match sleep.call(&5) {
                    Ok(()) | Err(Error::Timeout { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            5 => {
                let notify = engine.procedure::<u64, ()>("sleep");
                (0..20).for_each(|_| notify.on(&*to).notify(&0).unwrap());
            }
            6 | 7 => {
                LIVE.fetch_add(1, Ordering::Relaxed);
                let exposed = engine.expose(vec![3u8; size], BulkMode::ReadWrite).unwrap();
                let name = ["fetch", "fill"][random.below(2)];
                let moved = engine.procedure::<Bulk, Result<usize, String>>(name).on(&*to).call(&exposed.bulk());
                assert_eq!(moved.unwrap(), Ok(size));
                drop(exposed.reclaim());
                LIVE.fetch_sub(1, Ordering::Relaxed);
            }
            8 => {
                let bulk = engine.procedure::<usize, Bulk>("open").on(&*to).call(&size).unwrap();
                let mut bytes = vec![0u8; size];
                let whole = random.below(3) > 0;
                let pull = bulk.on(&*to);
                match if whole { pull } else { pull.timeout(Duration::from_micros(300)) }.pull_into(&mut bytes) {
                    Ok(n) => assert!(n == size && all_are(&bytes, 1)),
                    Err(Error::Timeout { .. }) if !whole => {}
                    Err(error) => panic!("{error}"),
                }
            }
            _ => {
                // A new client, which connects, calls and ends; with `finalize` or without.
                let new = Engine::builder().same_host_upgrade(random.below(2) == 0).build().unwrap();
                assert_serves(&new, &new.lookup(to.address()).unwrap());
                let mut raw = Raw::enter(&to.address());
                let bytes = request(1, 0, Some("echo"), false, &vec![7; 10_000]);
                raw.stream.write_all(&bytes[..random.below(bytes.len())]).unwrap();
                if random.below(2) == 0 {
                    new.finalize().unwrap();
                }
            }
        }
    }
}

/// What the processes hold at one time.
#[derive(Clone, Copy)]
struct Sample {
    memory: [usize; 2],
    descriptors: [usize; 2],
    threads: [usize; 2],
}

impl Sample {
    fn new(pids: [u32; 2]) -> Sample {
        Sample {
            memory: pids.map(memory::resident),
            descriptors: pids.map(memory::descriptors),
            threads: pids.map(memory::threads),
        }
    }
}

/// The least, which contains what stays: the regions that happen to be exposed take up to 50 MiB more in the others.
fn least(samples: &[Sample], of: impl Fn(&Sample) -> usize) -> usize {
    samples.iter().map(of).min().unwrap()
}

#[test]
#[ignore = "takes as long as CALOMEL_SOAK_SECONDS says"]
fn mixed_load_does_not_grow_memory_descriptors_or_threads() {
    let seconds = std::env::var("CALOMEL_SOAK_SECONDS").map_or(20, |seconds| seconds.parse().unwrap());
    let mut server = Child::start("soak", &[]);
    let address: Address = server.hear("address").parse().unwrap();
    let pids = [server.pid() as u32, std::process::id()];
    let watcher = Engine::builder().build().unwrap();
    let to_server = watcher.lookup(&address).unwrap();
    let (begin, stop, steps) = (Instant::now(), AtomicBool::new(false), AtomicUsize::new(0));
    let mut samples = Vec::new();
    println!("seconds     steps  memory of server and clients  descriptors    threads  exposed");
    thread::scope(|scope| {
        for number in 0..WORKERS {
            let (address, stop, steps) = (&address, &stop, &steps);
            scope.spawn(move || {
                let mut worker = Worker::new(address, number);
                while !stop.load(Ordering::Relaxed) {
                    // A panic of one worker stops the others.
                    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.step()));
                    if let Err(panic) = failed {
                        stop.store(true, Ordering::Relaxed);
                        std::panic::resume_unwind(panic);
                    }
                    steps.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while begin.elapsed() < Duration::from_secs(seconds) && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_secs(seconds) / SAMPLES);
            let sample = Sample::new(pids);
            let live = watcher.procedure::<(), usize>("live").on(&to_server).call(&()).unwrap();
            println!(
                "{:7} {:9} {:14.1} {:8.1} MiB {:8} {:5} {:6} {:5} {:6} {:3}",
                begin.elapsed().as_secs(),
                steps.load(Ordering::Relaxed),
                sample.memory[0] as f64 / MIB as f64,
                sample.memory[1] as f64 / MIB as f64,
                sample.descriptors[0],
                sample.descriptors[1],
                sample.threads[0],
                sample.threads[1],
                live,
                LIVE.load(Ordering::Relaxed)
            );
            samples.push(sample);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let third = samples.len() / 3;
    // In the first third the allocator's caches grow.
    let (early, late) = (&samples[third..2 * third], &samples[2 * third..]);
    for (side, name) in ["server", "clients"].iter().enumerate() {
        let [before, after] = [early, late].map(|samples| least(samples, |sample| sample.memory[side]));
        println!(
            "{name}: at least {:.1} MiB in the second third, {:.1} in the last",
            before as f64 / MIB as f64,
            after as f64 / MIB as f64
        );
        assert!(after < before + GROWTH, "the memory of the {name} grows");
        let [before, after] = [early, late].map(|samples| least(samples, |sample| sample.descriptors[side]));
        assert!(after < before + 100, "the descriptors of the {name} grow from {before} to {after}");
        let [before, after] = [early, late].map(|samples| least(samples, |sample| sample.threads[side]));
        assert!(after < before + 50, "the threads of the {name} grow from {before} to {after}");
    }
    eventually("nothing is exposed any more", || watcher.procedure::<(), usize>("live").on(&to_server).call(&()).unwrap() == 0);
    eventually("all but one connection is gone", || memory::descriptors(pids[0]) < 30);
}
