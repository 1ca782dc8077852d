//! What both benchmarks share: two processes, interleaved rounds, statistics and the report.
#![allow(dead_code, reason = "each benchmark uses its part")]

pub mod cpu;
pub mod raw;
pub mod report;
pub mod stats;

use std::{
    cell::Cell,
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

/// How many rounds may be taken again in a whole run, lest it takes for ever on a busy machine.
const RETRIES: usize = 80;

/// How long to let others work before a round is taken again.
const RETRY: Duration = Duration::from_millis(200);

/// How much is measured, and how well that went.
pub struct Plan {
    pub quick: bool,
    pub rounds: usize,
    /// The other process, while it runs.
    server: Cell<Option<u32>>,
    /// Rounds that other processes disturbed, and that were taken again.
    pub repeated: Cell<usize>,
    /// Disturbed rounds that count nevertheless, as the machine would not become quiet.
    pub disturbed: Cell<usize>,
}

impl Plan {
    fn from_environment() -> Plan {
        let asked = env::args().any(|argument| argument == "quick");
        let quick = asked || env::var_os("CALOMEL_BENCH_QUICK").is_some_and(|value| value != "0");
        let rounds = if quick { 5 } else { 9 };
        Plan { quick, rounds, server: Cell::default(), repeated: Cell::default(), disturbed: Cell::default() }
    }

    /// Iterations a round.
    pub fn count(&self, full: usize) -> usize {
        if self.quick { (full / 5).max(1) } else { full }
    }

    /// Has `round` taken as often as the plan says, and again where others disturbed it.
    fn rounds<R>(&self, mut round: impl FnMut() -> Result<R, Box<dyn Error>>) -> Result<Vec<R>, Box<dyn Error>> {
        let mut taken = Vec::new();
        while taken.len() < self.rounds {
            let others = cpu::Others::watch(self.server.get())?;
            let samples = round()?;
            let disturbed = others.disturbed()?;
            if disturbed && !self.quick && self.repeated.get() < RETRIES {
                self.repeated.update(|count| count + 1);
                thread::sleep(RETRY);
                continue;
            }
            self.disturbed.update(|count| count + usize::from(disturbed));
            taken.push(samples);
        }
        Ok(taken)
    }
}

/// The body of each benchmark's `main`. Started with the argument `server` it is the other process.
pub fn main(define: fn(&Engine) -> calomel::Result<()>, measure: fn(&Plan) -> Outcome) -> Outcome {
    if cfg!(debug_assertions) {
        println!("built without optimisation, nothing measured: use `cargo bench`");
        return Ok(());
    }
    if env::args().nth(1).is_some_and(|argument| argument == "server") {
        return serve(define);
    }
    measure(&Plan::from_environment())
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
pub struct Server<'a> {
    plan: &'a Plan,
    process: Child,
    /// Where its engine listens.
    pub address: String,
    pub raw: SocketAddr,
}

impl Server<'_> {
    pub fn start(plan: &Plan) -> Result<Server<'_>, Box<dyn Error>> {
        let mut process = Command::new(env::current_exe()?).arg("server").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().ok_or("the server has no output")?;
        // From here on an error drops the server, which ends the process.
        let mut server = Server { plan, process, address: String::new(), raw: ([0, 0, 0, 0], 0).into() };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let (address, raw) = line.trim().split_once(' ').ok_or("the server did not start")?;
        server.address = address.to_owned();
        server.raw = raw.parse()?;
        plan.server.set(Some(server.pid()));
        Ok(server)
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        self.plan.server.set(None);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Takes rounds in turn: ours, raw, ours, raw, and so on.
pub fn interleave(
    plan: &Plan,
    mut ours: impl FnMut(&mut Vec<f64>) -> Outcome,
    mut raw: impl FnMut(&mut Vec<f64>) -> Outcome,
) -> Result<(Series, Series), Box<dyn Error>> {
    let pairs = plan.rounds(|| Ok((take(&mut ours)?, take(&mut raw)?)))?;
    let (ours, raw): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    Ok((Series::new(ours), Series::new(raw)))
}

/// Rounds of a figure that has no raw limit.
pub fn alone(plan: &Plan, mut ours: impl FnMut(&mut Vec<f64>) -> Outcome) -> Result<Series, Box<dyn Error>> {
    Ok(Series::new(plan.rounds(|| take(&mut ours))?))
}

/// The samples of one round.
fn take(measure: &mut impl FnMut(&mut Vec<f64>) -> Outcome) -> Result<Vec<f64>, Box<dyn Error>> {
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
