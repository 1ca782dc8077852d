//! `calomel bench`: latency, rate and bandwidth between two engines.

use std::env;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, HandlerResult, Pending, Request};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::connection::Connection;
use crate::histogram::{Percentiles, percentiles};
use crate::units::{self, parse_duration, parse_size};
use crate::{Failure, Outcome, about, compare, html, print};

#[derive(Args)]
#[command(after_help = "\
Examples:
  calomel bench                                      both processes on this machine, over tcp and shm
  calomel bench --sizes 4KiB,1MiB --html report.html
  calomel bench --serve tcp://0.0.0.0:7000           on one machine: serves until it is killed
  calomel bench tcp://10.0.0.1:7000                  on the other
  calomel bench --compare before.json after.json")]
pub(crate) struct Arguments {
    /// Address of a server that was started with `--serve`. Without it a server is started on this machine.
    #[arg(conflicts_with_all = ["serve", "compare"])]
    address: Option<String>,
    /// Be the server, at this address.
    #[arg(long, value_name = "ADDRESS")]
    serve: Option<String>,
    /// Transports to measure on this machine.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values = ["tcp", "shm"], conflicts_with = "address")]
    transports: Vec<String>,
    /// Sizes of arguments, pulls and pushes.
    #[arg(long, value_delimiter = ',', value_parser = parse_size, default_value = "4KiB,64KiB,1MiB,16MiB")]
    sizes: Vec<usize>,
    /// Numbers of calls in flight.
    #[arg(long, value_delimiter = ',', default_value = "8,64", value_parser = clap::value_parser!(u16).range(1..))]
    in_flight: Vec<u16>,
    /// Time to spend on each row.
    #[arg(long, default_value = "300ms", value_parser = parse_duration)]
    time: Duration,
    /// Write the figures to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a report with plots to this file, one page of HTML that needs no other.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Compare the figures of two files that `--json` wrote, and measure nothing.
    #[arg(long, value_names = ["BEFORE", "AFTER"], num_args = 2, conflicts_with = "serve")]
    compare: Vec<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

/// What was measured.
#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    /// Of the format.
    pub version: u32,
    pub calomel: String,
    pub kernel: String,
    pub processors: usize,
    pub rows: Vec<Row>,
}

pub(crate) const FORMAT: u32 = 1;

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Row {
    pub transport: String,
    pub what: What,
    /// Bytes moved by an operation.
    pub size: usize,
    /// How many calls at a time.
    pub in_flight: u16,
    /// Times of single operations, in nanoseconds; of several in flight, those of batches divided by their number.
    pub times: Percentiles,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    /// A call without arguments.
    Call,
    /// A call with bytes as its arguments.
    Arguments,
    /// A call whose handler pulls from the caller.
    Pull,
    /// A call whose handler pushes to the caller.
    Push,
}

impl Row {
    /// What tells this row from others of a report.
    pub fn key(&self) -> (&str, What, usize, u16) {
        (&self.transport, self.what, self.size, self.in_flight)
    }

    pub fn label(&self) -> String {
        match self.what {
            What::Call if self.in_flight > 1 => format!("empty calls, {} in flight", self.in_flight),
            What::Call => "empty call".to_owned(),
            What::Arguments => format!("call with {}", units::size(self.size)),
            What::Pull => format!("call + pull of {}", units::size(self.size)),
            What::Push => format!("call + push of {}", units::size(self.size)),
        }
    }

    /// The rate or the bandwidth that the median means.
    pub fn speed(&self) -> String {
        let per_second = 1e9 / self.times.median.max(1) as f64;
        if self.size > 0 { units::bandwidth(self.size as f64 * per_second) } else { units::rate(per_second) }
    }
}

/// The procedures of the server.
const EMPTY: &str = "calomel.bench.empty";
const TAKE: &str = "calomel.bench.take";
const PULL: &str = "calomel.bench.pull";
const PUSH: &str = "calomel.bench.push";
/// The line by which a server tells its address.
const LISTENING: &str = "listening on ";
/// The server that another process starts ends when this is told to it, or its standard input ends.
const CHILD: &str = "CALOMEL_BENCH_CHILD";

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    if let [before, after] = &arguments.compare[..] {
        return print(compare::table(&read(before)?, &read(after)?).as_bytes());
    }
    if let Some(address) = &arguments.serve {
        return serve(address, &arguments.connection);
    }
    let mut rows = Vec::new();
    match &arguments.address {
        Some(address) => measure(arguments, address, &mut rows)?,
        None => {
            for transport in &arguments.transports {
                let server = Server::start(transport, &arguments.connection)?;
                measure(arguments, &server.address, &mut rows)?;
            }
        }
    }
    let report = Report {
        version: FORMAT,
        calomel: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        rows,
    };
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::Other(error.to_string()))?;
        std::fs::write(path, text + "\n").map_err(about(path))?;
    }
    if let Some(path) = &arguments.html {
        std::fs::write(path, html::page(&report)).map_err(about(path))?;
    }
    print(table(&report.rows).as_bytes())
}

fn read(path: &PathBuf) -> Outcome<Report> {
    let text = std::fs::read_to_string(path).map_err(about(path))?;
    let wrong = |reason: String| Failure::Other(format!("{}: {reason}", path.display()));
    let report: Report = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if report.version != FORMAT {
        return Err(wrong(format!("version {} of the format; this program knows {FORMAT}", report.version)));
    }
    Ok(report)
}

fn table(rows: &[Row]) -> String {
    let mut text = format!("{:<7} {:<28} {:>9} {:>9} {:>9}  {}\n", "", "", "median", "p90", "p99", "speed");
    for row in rows {
        let [median, p90, p99] = [row.times.median, row.times.p90, row.times.p99].map(|ns| units::time(ns as f64));
        // Writing to a string can't fail.
        let _ = writeln!(text, "{:<7} {:<28} {median:>9} {p90:>9} {p99:>9}  {}", row.transport, row.label(), row.speed());
    }
    text
}

// ---- The server ----------------------------------------------------------------------------------------------------------

fn serve(address: &str, connection: &Connection) -> Outcome {
    let engine = connection.builder()?.listen(address).build()?;
    engine.define(EMPTY, |_: &Request, ()| ())?;
    engine.define_borrowed::<[u8], _, _>(TAKE, |_: &Request, bytes: &[u8]| bytes.len())?;
    engine.define_try(PULL, |request: &Request, memory: Bulk| -> HandlerResult<usize> {
        with_memory(memory.len(), |local| Ok(memory.on(request.endpoint()).pull_into(local)?))
    })?;
    engine.define_try(PUSH, |request: &Request, memory: Bulk| -> HandlerResult<usize> {
        with_memory(memory.len(), |local| Ok(memory.on(request.endpoint()).push_from(&*local)?))
    })?;
    print(format!("{LISTENING}{}\n", engine.address()).as_bytes())?;
    if env::var_os(CHILD).is_some() {
        // Ends with the process that started this one.
        std::io::stdin().lines().for_each(drop);
        return Ok(engine.finalize()?);
    }
    engine.wait_for_finalize();
    Ok(())
}

/// A caller chooses the length, so it is bounded.
const MOST: usize = 1 << 30;

/// Runs `work` with memory that is kept from call to call.
fn with_memory(len: usize, work: impl FnOnce(&mut [u8]) -> HandlerResult<usize>) -> HandlerResult<usize> {
    static KEPT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    if len > MOST {
        return Err(format!("{len} bytes are more than {MOST}").into());
    }
    let mut memory = KEPT.lock().map_err(|_| "an earlier transfer panicked")?;
    if memory.len() < len {
        memory.resize(len, 1);
    }
    work(&mut memory[..len])
}

/// A server in a process of its own, on this machine.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(transport: &str, connection: &Connection) -> Outcome<Server> {
        let address = match transport {
            "tcp" => "tcp://127.0.0.1:0".to_owned(),
            "shm" => "shm://".to_owned(),
            other => {
                return Err(Failure::Other(format!(
                    "{other} can't be measured on one machine: tcp and shm can, and any address"
                )));
            }
        };
        let mut process = Command::new(env::current_exe()?)
            .args(["bench", "--serve", &address])
            .args(connection.arguments())
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take();
        let mut server = Server { process, address: String::new() };
        let mut line = String::new();
        if let Some(output) = output {
            BufReader::new(output).read_line(&mut line)?;
        }
        server.address = match line.trim_end().strip_prefix(LISTENING) {
            Some(address) => address.to_owned(),
            // It has said why.
            None => return Err(Failure::Other("the server did not start".to_owned())),
        };
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Neither has an effect on a process that has been waited for.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

// ---- The client ----------------------------------------------------------------------------------------------------------

/// Operations that are not timed, before those that are.
const WARM_UP: usize = 20;
/// Fewest and most operations of a row.
const FEWEST: usize = 10;
const SAMPLES: usize = 200_000;

fn measure(arguments: &Arguments, address: &str, rows: &mut Vec<Row>) -> Outcome {
    let mut builder = arguments.connection.builder()?;
    if arguments.address.is_none() {
        // Else tcp on one machine would be shared memory.
        builder = builder.same_host_upgrade(false);
    }
    let engine = builder.build()?;
    let peer = engine.lookup(address)?;
    let empty = engine.procedure::<(), ()>(EMPTY);
    empty.on(&peer).call(&())?;
    let transport = peer.transport().map_or_else(|| "?".to_owned(), |transport| transport.to_string());

    let sizes = || arguments.sizes.iter().copied().filter(|size| *size > 0);
    // Drawn on the standard error, and only if that is a terminal.
    let line = ProgressBar::new((1 + arguments.in_flight.len() + 3 * arguments.sizes.len()) as u64);
    line.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut add = |what, size, in_flight, operation: &mut dyn FnMut() -> calomel::Result<()>| -> Outcome {
        let mut row = Row { transport: transport.clone(), what, size, in_flight, times: Percentiles::default() };
        line.set_message(format!("{transport}, {}", row.label()));
        row.times = timed(arguments.time, in_flight, operation)?;
        rows.push(row);
        line.inc(1);
        Ok(())
    };

    add(What::Call, 0, 1, &mut || empty.on(&peer).call(&()))?;
    for &in_flight in &arguments.in_flight {
        add(What::Call, 0, in_flight, &mut || batch(&empty, &peer, in_flight))?;
    }
    let take = engine.procedure::<[u8], usize>(TAKE);
    for size in sizes() {
        let bytes = vec![1u8; size];
        // The largest message that the peer takes may be smaller.
        match take.on(&peer).call(&bytes) {
            Err(calomel::Error::MessageTooLarge { .. }) => continue,
            outcome => outcome?,
        };
        add(What::Arguments, size, 1, &mut || take.on(&peer).call(&bytes).map(drop))?;
    }
    for (what, name, mode) in [(What::Pull, PULL, BulkMode::ReadOnly), (What::Push, PUSH, BulkMode::WriteOnly)] {
        let procedure = engine.procedure::<Bulk, usize>(name);
        for size in sizes() {
            let memory = engine.expose(vec![1u8; size], mode)?;
            add(what, size, 1, &mut || procedure.on(&peer).call(&memory.bulk()).map(drop))?;
        }
    }
    line.finish_and_clear();
    Ok(engine.finalize()?)
}

fn batch(empty: &calomel::Procedure<(), ()>, peer: &Endpoint, in_flight: u16) -> calomel::Result<()> {
    let started: calomel::Result<Vec<Pending<()>>> = (0..in_flight).map(|_| empty.on(peer).start(&())).collect();
    Pending::wait_all(started?).into_iter().collect()
}

/// Repeats an operation, of `parts` calls each, for some time.
fn timed(time: Duration, parts: u16, operation: &mut dyn FnMut() -> calomel::Result<()>) -> calomel::Result<Percentiles> {
    let begin = Instant::now();
    for _ in 0..WARM_UP {
        operation()?;
        if begin.elapsed() > time {
            break;
        }
    }
    let mut samples = Vec::new();
    let begin = Instant::now();
    let mut last = begin;
    while samples.len() < FEWEST || (last - begin < time && samples.len() < SAMPLES) {
        operation()?;
        let now = Instant::now();
        samples.push((now - last).as_nanos() as u64 / u64::from(parts));
        last = now;
    }
    Ok(percentiles(&samples).unwrap_or_default())
}
