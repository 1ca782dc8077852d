//! Infrastructure of the benchmarks: two processes, interleaved rounds, statistics, the report and its plots.
#![allow(dead_code, reason = "each benchmark uses its part")]

pub mod caller;
pub mod cpu;
pub mod fabric;
pub mod guest;
pub mod memory;
pub mod plan;
pub mod plot;
pub mod process;
pub mod raw;
pub mod record;
pub mod report;
pub mod site;
pub mod stats;
pub mod store;
pub mod system_calls;
pub mod transport;
#[path = "../../tests/common/wire.rs"]
pub mod wire;

use std::{env, error::Error, time::Instant};

use calomel::Engine;

#[allow(unused_imports, reason = "each benchmark uses its part")]
pub use plan::{Plan, alone, interleave, interleave_all};
pub use site::Site;
pub use transport::Transport;

pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The body of each benchmark's `main`. Started with the argument `server`, the process is the server.
pub fn main(define: fn(&Engine) -> calomel::Result<()>, measure: fn(&Plan) -> Outcome) -> Outcome {
    if cfg!(debug_assertions) {
        println!("built without optimisation, nothing measured: use `cargo bench`");
        return Ok(());
    }
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "server") {
        return process::serve(define, &arguments[1..]);
    }
    measure(&Plan::from_environment())
}

/// Calls `warm_up` times without timing, then `count` times with one sample in nanoseconds each.
pub fn timed<E>(warm_up: usize, count: usize, samples: &mut Vec<f64>, mut call: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    for _ in 0..warm_up {
        call()?;
    }
    samples.reserve(count);
    for _ in 0..count {
        let begun = Instant::now();
        call()?;
        samples.push(begun.elapsed().as_nanos() as f64);
    }
    Ok(())
}

/// A size in bytes, with a binary unit; of mebibytes and more the nearest whole number.
pub fn readable(size: usize) -> String {
    match size {
        size if size >= 1 << 30 => format!("{} GiB", size >> 30),
        size if size >= 1 << 20 => format!("{} MiB", (size + (1 << 19)) >> 20),
        size if size >= 1 << 10 => format!("{} KiB", size >> 10),
        size => format!("{size} B"),
    }
}
