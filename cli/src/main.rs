//! `calomel`: what this machine offers, whether an engine answers, what it does, and how fast it is.

mod bench;
mod compare;
mod connection;
mod histogram;
mod html;
mod info;
mod ping;
mod top;
mod units;

use std::io::{self, Write};
use std::process::ExitCode;

use calomel::Error;
use clap::{CommandFactory, Parser, Subcommand};

/// What this machine offers, whether an engine answers, what it does, and how fast it is.
#[derive(Parser)]
#[command(name = "calomel", version, max_term_width = 110, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 success, 1 failure (unreachable, timed out), 2 wrong usage, 3 access denied.";

#[derive(Subcommand)]
enum Command {
    /// Lists transports, addresses and limits of this machine, and says why a transport is not available.
    Info(info::Arguments),
    /// Measures round trips to an engine. With `--count 1`, a health check.
    Ping(ping::Arguments),
    /// Measures latency, rate and bandwidth, between two processes on this machine or on two machines.
    Bench(bench::Arguments),
    /// Shows what an engine does: rates and latencies by procedure, peers, connections, limits and refusals.
    Top(top::Arguments),
    /// Prints a script that completes this command's arguments in a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page, for `man -l -`.
    Man,
}

/// Why a command failed.
pub(crate) enum Failure {
    Calomel(Error),
    Other(String),
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Calomel(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Other(error.to_string())
    }
}

/// An error about a file.
pub(crate) fn about(path: &std::path::Path) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::Other(format!("{}: {error}", path.display()))
}

impl Failure {
    fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Calomel(Error::AccessDenied { .. }) => ExitCode::from(3),
            Failure::Calomel(Error::InvalidAddress { .. }) => ExitCode::from(2),
            Failure::Calomel(_) | Failure::Other(_) => ExitCode::FAILURE,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Calomel(error) => error.fmt(f),
            Failure::Other(text) => f.write_str(text),
        }
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Info(arguments) => info::run(&arguments),
        Command::Ping(arguments) => ping::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "calomel", &mut script);
            print(&script)
        }
        Command::Man => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(Failure::from).and_then(|()| print(&page))
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.exit_code()
        }
    }
}

/// Writes to the standard output. A reader that has read enough, as `head` does, is no failure.
pub(crate) fn print(text: &[u8]) -> Outcome {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_declared_without_contradictions() {
        Cli::command().debug_assert();
    }
}
