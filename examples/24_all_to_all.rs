//! Every rank of a job calls every other rank, and pulls from its memory; then rank 0 prints what that took. The job's engines
//! have a key where the launcher can hand one out.
//!
//! ```text
//! cargo build --release --package calomel-examples --example 24_all_to_all
//! mpiexec -n 64 target/release/examples/24_all_to_all
//! CALOMEL_SAME_HOST_UPGRADE=false mpiexec -n 64 target/release/examples/24_all_to_all     # over tcp also on one host
//! ```

use std::fs;
use std::time::{Duration, Instant};

use calomel::launch::{World, job_key};
use calomel::{Bulk, BulkMode, EngineConfig, Request};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes that each rank exposes, and that all others pull.
const EXPOSED: usize = 64 << 10;

fn main() -> calomel::Result<()> {
    let mut builder = EngineConfig::from_env()?.builder()?.listen("tcp").default_timeout(TIMEOUT);
    match job_key(TIMEOUT) {
        Ok(key) => builder = builder.pre_shared_key(key),
        Err(error) => eprintln!("without a key: {error}"),
    }
    let engine = builder.build()?;
    let at_start = Footprint::read();

    let begin = Instant::now();
    let memory = engine.expose(vec![0u8; EXPOSED], BulkMode::ReadWrite)?;
    let bulk = memory.bulk();
    engine.define("memory", move |_: &Request, (): ()| bulk.clone())?;
    let world = World::from_env(&engine, TIMEOUT)?;
    let joined = begin.elapsed();
    let (rank, size) = (world.rank(), world.size());
    memory.write_at(0, &vec![rank as u8; EXPOSED])?;
    world.barrier(TIMEOUT)?;

    let begin = Instant::now();
    let ask = engine.procedure::<(), Bulk>("memory");
    let local = engine.expose(vec![0u8; EXPOSED], BulkMode::WriteOnly)?;
    let mut pulled = vec![0; EXPOSED];
    // Each rank begins with the one behind it, so that they do not all call the same one.
    for other in (1..size).map(|distance| (rank + distance) % size) {
        let endpoint = world.endpoint(other);
        let remote = ask.on(&endpoint).call(&())?;
        assert_eq!(remote.on(&endpoint).pull_into(&local)?, EXPOSED);
        local.read_at(0, &mut pulled)?;
        assert!(pulled.iter().all(|byte| *byte == other as u8), "of rank {other}");
    }
    let finished = begin.elapsed();
    world.barrier(TIMEOUT)?;

    // With CALOMEL_IDLE_TIMEOUT, what is left when connections have not been used for a while.
    if let Some(idle) = engine.config().idle_timeout {
        std::thread::sleep(3 * idle);
    }
    let now = Footprint::read();
    let stats = engine.stats();
    let connections: u64 = stats.transports.iter().map(|transport| transport.open).sum();
    let mine = [
        joined.as_micros() as u64,
        finished.as_micros() as u64,
        connections,
        at_start.memory,
        now.memory,
        now.descriptors.saturating_sub(at_start.descriptors),
        now.threads,
    ];
    let gathered = world.all_gather(&mine.map(u64::to_le_bytes).concat(), TIMEOUT)?;
    if rank == 0 {
        let column = |index: usize| {
            let value = |figures: &Vec<u8>| u64::from_le_bytes(figures[8 * index..][..8].try_into().unwrap());
            let mut values: Vec<u64> = gathered.iter().map(value).collect();
            values.sort_unstable();
            (values[0], values[size / 2], values[size - 1])
        };
        println!("{size} ranks, {} pairs called and pulled {} KiB", size * (size - 1), EXPOSED >> 10);
        println!("{:<34}{:>10}{:>10}{:>10}", "of each rank", "least", "median", "most");
        let rows = [
            "time to join, µs",
            "time for all calls and pulls, µs",
            "connections at the end",
            "memory at the start, KiB",
            "memory at the end, KiB",
            "descriptors that were opened",
            "threads at the end",
        ];
        for (index, row) in rows.into_iter().enumerate() {
            let (least, median, most) = column(index);
            println!("{row:<34}{least:>10}{median:>10}{most:>10}");
        }
    }
    // Others may still call this rank until they have come here.
    world.barrier(TIMEOUT)
}

/// What the process takes of its system.
struct Footprint {
    /// Its memory in KiB, without that of the program's file: the heap, stacks, and its part of what it shares with others.
    memory: u64,
    descriptors: u64,
    threads: u64,
}

impl Footprint {
    fn read() -> Footprint {
        // `VmRSS` counts what several processes map for each of them.
        let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
        let value = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
        let memory =
            rollup.lines().filter(|line| line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:")).filter_map(value).sum();
        let entries = |path: &str| fs::read_dir(path).map_or(0, |entries| entries.count() as u64);
        Footprint { memory, descriptors: entries("/proc/self/fd"), threads: entries("/proc/self/task") }
    }
}
