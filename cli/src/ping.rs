//! `calomel ping`: round trips to an engine.

use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Address, Endpoint, Error};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::connection::Connection;
use crate::histogram::{Percentiles, bars, percentiles};
use crate::units::{self, parse_duration};
use crate::{Failure, Outcome, print};

#[derive(Args)]
#[command(after_help = "\
Examples:
  calomel ping tcp://10.0.0.1:7000
  calomel ping --count 1 --deadline 3s tcp://10.0.0.1:7000    a health check: exit code 0 if the engine answers in time
  calomel ping --count 1000 --interval 0 --json shm://store")]
pub(crate) struct Arguments {
    /// The engine's address, such as tcp://10.0.0.1:7000.
    address: String,
    /// How many round trips.
    #[arg(short, long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Time between the beginnings of two round trips.
    #[arg(short, long, default_value = "200ms", value_parser = parse_duration)]
    interval: Duration,
    /// Time limit of connecting and of each round trip.
    #[arg(short, long, default_value = "5s", value_parser = parse_duration)]
    timeout: Duration,
    /// Time limit of the whole command, which fails when it has passed.
    #[arg(long, value_parser = parse_duration)]
    deadline: Option<Duration>,
    /// Print JSON, times in nanoseconds.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Serialize)]
struct Report {
    address: Address,
    transport: Option<String>,
    /// Until the first answer, in nanoseconds.
    connecting: u64,
    /// Round trips that were begun, without the one that connected.
    sent: u32,
    lost: u32,
    /// `None` where no round trip was completed.
    round_trip: Option<Percentiles>,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    if let Some(deadline) = arguments.deadline {
        // A health check must end whatever hangs: names that are being resolved, or the end of a connection.
        thread::spawn(move || {
            thread::sleep(deadline);
            eprintln!("error: not done within {deadline:?}");
            std::process::exit(1);
        });
    }
    let engine = arguments.connection.builder()?.connect_timeout(arguments.timeout).build()?;
    let peer = engine.lookup(arguments.address.as_str())?;
    let begin = Instant::now();
    peer.ping(arguments.timeout)?;
    let connecting = begin.elapsed();
    let mut report = Report {
        address: peer.address(),
        transport: peer.transport().map(|transport| transport.to_string()),
        connecting: connecting.as_nanos() as u64,
        sent: 0,
        lost: 0,
        round_trip: None,
    };
    let (samples, end) = round_trips(arguments, &peer, &mut report);
    engine.finalize()?;
    report.round_trip = percentiles(&samples);
    let text = if arguments.json {
        serde_json::to_string_pretty(&report).map_err(|error| Failure::Other(error.to_string()))? + "\n"
    } else {
        summary(&report, &samples)
    };
    print(text.as_bytes())?;
    match end {
        Some(error) => Err(error.into()),
        None if report.lost > 0 => Err(Failure::Other(format!("{} of {} round trips timed out", report.lost, report.sent))),
        None => Ok(()),
    }
}

/// Measures; returns the times in nanoseconds, and the error that ended it early.
fn round_trips(arguments: &Arguments, peer: &Endpoint, report: &mut Report) -> (Vec<u64>, Option<Error>) {
    // Drawn on the standard error, and only if that is a terminal.
    let line = ProgressBar::new(arguments.count.into());
    line.set_style(ProgressStyle::with_template("{pos}/{len}  {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut samples = Vec::new();
    let mut end = None;
    let mut next = Instant::now();
    for _ in 0..arguments.count {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next += arguments.interval;
        report.sent += 1;
        match peer.ping(arguments.timeout) {
            Ok(time) => samples.push(time.as_nanos() as u64),
            Err(Error::Timeout { .. }) => report.lost += 1,
            Err(error) => {
                report.lost += 1;
                end = Some(error);
                break;
            }
        }
        line.inc(1);
        if let (Some(last), false) = (samples.last(), line.is_hidden()) {
            line.set_message(format!("{}, {} lost", units::time(*last as f64), report.lost));
        }
    }
    line.finish_and_clear();
    (samples, end)
}

fn summary(report: &Report, samples: &[u64]) -> String {
    let Report { address, transport, connecting, sent, lost, .. } = report;
    let mut text = String::new();
    let over = transport.as_ref().map_or_else(String::new, |transport| format!(" over {transport}"));
    // Writing to a string can't fail.
    let _ = writeln!(text, "connected to {address}{over} in {}", units::time(*connecting as f64));
    let _ = write!(text, "{sent} round trips, {lost} lost");
    if let Some(Percentiles { min, median, p90, p99, max }) = report.round_trip.clone() {
        let [min, median, p90, p99, max] = [min, median, p90, p99, max].map(|ns| units::time(ns as f64));
        let _ = write!(text, ": min {min}, median {median}, p90 {p90}, p99 {p99}, max {max}\n{}", bars(samples));
    } else {
        text.push('\n');
    }
    text
}
