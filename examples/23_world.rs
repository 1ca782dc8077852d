//! The ranks of a job find each other, wait for each other, share values, and call their neighbours. Any launcher starts it:
//!
//! ```text
//! cargo build --example 23_world
//! mpiexec -n 4 target/debug/examples/23_world       # MPICH, Intel MPI
//! mpirun -n 4 target/debug/examples/23_world        # Open MPI
//! srun -n 4 target/debug/examples/23_world          # Slurm
//! target/debug/examples/23_world                    # alone: one rank
//! ```

use std::time::Duration;

use calomel::launch::World;
use calomel::{Engine, Request};

const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> calomel::Result<()> {
    // Any free port, all interfaces: the other ranks may be on other hosts.
    let engine = Engine::server("tcp")?;
    engine.define("greet", |_: &Request, name: String| format!("hello, {name}"))?;

    let world = World::from_env(&engine, TIMEOUT)?;
    let (rank, size) = (world.rank(), world.size());
    world.barrier(TIMEOUT)?;

    let processes = world.all_gather(&std::process::id().to_le_bytes(), TIMEOUT)?;
    assert_eq!(processes.len(), size);
    assert_eq!(processes[rank], std::process::id().to_le_bytes());

    let next = (rank + 1) % size;
    let greet = engine.procedure::<str, String>("greet");
    let greeting = greet.on(world.endpoint(next)).call(&format!("rank {next}, from rank {rank} of {size}"))?;
    println!("{greeting}");

    // Before a rank ends: the one before it may still call.
    world.barrier(TIMEOUT)
}
