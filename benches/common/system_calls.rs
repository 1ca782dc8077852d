//! System calls of processes, counted by `perf`.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    process::{Child, Command, Stdio},
};

use super::Outcome;

const ALL: &str = "raw_syscalls:sys_enter";
const YIELDS: &str = "syscalls:sys_enter_sched_yield";
const ENDS: &str = "raw_syscalls:sys_exit";
/// `EAGAIN`: there was nothing to read, or no room to write.
const IN_VAIN: &str = "ret == -11";

/// System calls of some processes.
#[derive(Clone, Copy, Default)]
pub struct SystemCalls {
    pub all: u64,
    /// Those that only yielded the processor, or found nothing to do: a thread that spins makes them for as long as it waits.
    pub spinning: u64,
}

/// `perf` with the events to count.
fn perf() -> Command {
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x,", "-e", ALL, "-e", YIELDS, "-e", ENDS, "--filter", IN_VAIN]);
    perf
}

/// Why they can't be counted on this machine.
pub fn unavailable() -> Option<String> {
    match perf().arg("true").stderr(Stdio::null()).status() {
        Ok(status) if status.success() => None,
        Ok(_) => Some("perf may not count them".to_owned()),
        Err(error) => Some(format!("perf does not start: {error}")),
    }
}

/// Counts from [`Counter::start`] to [`Counter::stop`].
pub struct Counter {
    perf: Child,
}

impl Counter {
    pub fn start(pids: &[u32]) -> Outcome<Counter> {
        let pids = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let mut perf = perf();
        // perf counts for as long as the program runs that it starts, and that one echoes a line once all is set up.
        perf.args(["-p", &pids, "cat"]);
        let mut perf = perf.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let missing = || io::Error::other("perf has no pipes");
        perf.stdin.as_mut().ok_or_else(missing)?.write_all(b"\n")?;
        BufReader::new(perf.stdout.as_mut().ok_or_else(missing)?).read_line(&mut String::new())?;
        Ok(Counter { perf })
    }

    pub fn stop(mut self) -> Outcome<SystemCalls> {
        drop(self.perf.stdin.take());
        let mut text = String::new();
        self.perf.stderr.take().ok_or("perf has no output")?.read_to_string(&mut text)?;
        self.perf.wait()?;
        let count = |event: &str| -> Outcome<u64> {
            let line = text.lines().find(|line| line.contains(event)).ok_or_else(|| format!("perf says: {text}"))?;
            // `<not counted>` where there was none.
            Ok(line.split(',').next().and_then(|number| number.parse().ok()).unwrap_or(0))
        };
        Ok(SystemCalls { all: count(ALL)?, spinning: count(YIELDS)? + count(ENDS)? })
    }
}
