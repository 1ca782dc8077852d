//! What an idle process costs: CPU ticks and wake-ups of its threads, read from `/proc`.

use std::{fs, io, thread, time::Duration};

/// What the threads of a process have used up to now.
#[derive(Clone, Copy, Default)]
pub struct Usage {
    /// User and system time in clock ticks (10 ms on Linux), as the scheduler accounts it.
    pub ticks: u64,
    /// Time on a CPU in nanoseconds; fine enough to see a single wake-up.
    pub cpu_ns: u64,
    /// Voluntary context switches: how often a thread went to sleep, so how often it had been woken.
    pub wake_ups: u64,
}

/// The cost of one second in which the benchmark does nothing, for each of `pids`.
///
/// The thread that measures is left out: it sleeps, wakes and reads `/proc` itself.
pub fn second(pids: &[u32]) -> io::Result<Vec<Usage>> {
    let read_all = || pids.iter().map(|&pid| read(pid)).collect::<io::Result<Vec<_>>>();
    let before = read_all()?;
    thread::sleep(Duration::from_secs(1));
    let after = read_all()?;
    Ok(before.iter().zip(after).map(|(before, after)| after.since(before)).collect())
}

impl Usage {
    fn since(self, before: &Usage) -> Usage {
        Usage {
            ticks: self.ticks.saturating_sub(before.ticks),
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            wake_ups: self.wake_ups.saturating_sub(before.wake_ups),
        }
    }
}

fn read(pid: u32) -> io::Result<Usage> {
    let measuring = fs::read_link("/proc/thread-self")?;
    let mut sum = Usage::default();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if task.strip_prefix("/proc").is_ok_and(|task| task == measuring) {
            continue;
        }
        let stat = fs::read_to_string(task.join("stat"))?;
        // The name of the thread, in parentheses, may hold blanks; behind it `utime` and `stime` are fields 11 and 12.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        sum.ticks += fields.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum::<u64>();
        sum.cpu_ns += first_number(&fs::read_to_string(task.join("schedstat"))?);
        let status = fs::read_to_string(task.join("status"))?;
        let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum.wake_ups += first_number(switches.unwrap_or(""));
    }
    Ok(sum)
}

fn first_number(text: &str) -> u64 {
    text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}
