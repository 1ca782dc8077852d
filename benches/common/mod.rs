//! What both benchmarks share: two processes, interleaved rounds, statistics and the report.
#![allow(dead_code, reason = "each benchmark uses its part")]

pub mod cpu;
pub mod raw;
pub mod report;
pub mod stats;

use std::{
    env,
    error::Error,
    io::{self, BufRead, BufReader, Read, Write},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use calomel::Engine;
use stats::Series;

pub type Outcome = Result<(), Box<dyn Error>>;

/// Between two rounds: time enough for either side to stop spinning and to park.
const SETTLE: Duration = Duration::from_millis(30);

/// How much is measured.
#[derive(Clone, Copy)]
pub struct Plan {
    pub quick: bool,
    pub rounds: usize,
}

impl Plan {
    fn from_environment() -> Plan {
        let asked = env::args().any(|argument| argument == "quick");
        let quick = asked || env::var_os("CALOMEL_BENCH_QUICK").is_some_and(|value| value != "0");
        Plan { quick, rounds: if quick { 5 } else { 9 } }
    }

    /// Iterations a round.
    pub fn count(&self, full: usize) -> usize {
        if self.quick { (full / 5).max(1) } else { full }
    }
}

/// The body of each benchmark's `main`. Started with the argument `server` it is the other process.
pub fn main(define: fn(&Engine) -> calomel::Result<()>, measure: fn(Plan) -> Outcome) -> Outcome {
    if cfg!(debug_assertions) {
        println!("built without optimisation, nothing measured: use `cargo bench`");
        return Ok(());
    }
    if env::args().nth(1).is_some_and(|argument| argument == "server") {
        return serve(define);
    }
    measure(Plan::from_environment())
}

fn serve(define: fn(&Engine) -> calomel::Result<()>) -> Outcome {
    let engine = Engine::server("tcp://127.0.0.1:0")?;
    define(&engine)?;
    let raw = raw::start_server()?;
    println!("{} {raw}", engine.address());
    io::stdout().flush()?;
    // The end of the input is the end of the client, even of one that was killed.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The other process. Dropped, also by a panic, it is killed.
pub struct Server {
    process: Child,
    /// Where its engine listens.
    pub address: String,
    pub raw: SocketAddr,
}

impl Server {
    pub fn start() -> Result<Server, Box<dyn Error>> {
        let mut process = Command::new(env::current_exe()?).arg("server").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().ok_or("the server has no output")?;
        // From here on an error drops the server, which ends the process.
        let mut server = Server { process, address: String::new(), raw: ([0, 0, 0, 0], 0).into() };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let (address, raw) = line.trim().split_once(' ').ok_or("the server did not start")?;
        server.address = address.to_owned();
        server.raw = raw.parse()?;
        Ok(server)
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Takes rounds in turn: ours, raw, ours, raw, and so on.
pub fn interleave(
    plan: Plan,
    mut ours: impl FnMut(&mut Vec<f64>) -> Outcome,
    mut raw: impl FnMut(&mut Vec<f64>) -> Outcome,
) -> Result<(Series, Series), Box<dyn Error>> {
    let mut series = (Series::default(), Series::default());
    for _ in 0..plan.rounds {
        series.0.push_round(round(&mut ours)?);
        series.1.push_round(round(&mut raw)?);
    }
    Ok(series)
}

/// Rounds of a figure that has no raw limit.
pub fn alone(plan: Plan, mut ours: impl FnMut(&mut Vec<f64>) -> Outcome) -> Result<Series, Box<dyn Error>> {
    let mut series = Series::default();
    for _ in 0..plan.rounds {
        series.push_round(round(&mut ours)?);
    }
    Ok(series)
}

fn round(measure: &mut impl FnMut(&mut Vec<f64>) -> Outcome) -> Result<Vec<f64>, Box<dyn Error>> {
    thread::sleep(SETTLE);
    let mut samples = Vec::new();
    measure(&mut samples)?;
    Ok(samples)
}

/// Calls `warm_up` times untimed, then `count` times, with a sample in nanoseconds for each.
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
