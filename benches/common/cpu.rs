//! CPU time and wake-ups, read from `/proc`: what an idle process costs, and what others used while we measured.

use std::{
    fs, io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// The first of the fields `utime`, `stime`, `cutime` and `cstime` of `/proc/PID/stat`, counted behind the name.
const UTIME: usize = 11;

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

/// Watches how busy everything else on the machine is. Figures taken beside a busy neighbour say nothing.
pub struct Others {
    since: Instant,
    busy: u64,
}

impl Others {
    pub fn watch() -> io::Result<Others> {
        Ok(Others { since: Instant::now(), busy: busy_elsewhere()? })
    }

    /// The share of one core that others have used since, processes that ended and were waited for counting as ours.
    pub fn share(&self) -> io::Result<f64> {
        // A tick is 10 ms.
        let used = busy_elsewhere()?.saturating_sub(self.busy) as f64 * 0.01;
        Ok(used / self.since.elapsed().as_secs_f64())
    }
}

/// Ticks in user space and in system calls, of all processes but this one and its children. Interrupts are left out:
/// most of them are our own network traffic.
fn busy_elsewhere() -> io::Result<u64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let all: u64 = stat.split_whitespace().skip(1).take(3).filter_map(|n| n.parse::<u64>().ok()).sum();
    Ok(all.saturating_sub(stat_numbers(Path::new("/proc/self/stat"), UTIME, 4)?))
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
        sum.ticks += stat_numbers(&task.join("stat"), UTIME, 2)?;
        sum.cpu_ns += first_number(&fs::read_to_string(task.join("schedstat"))?);
        let status = fs::read_to_string(task.join("status"))?;
        let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum.wake_ups += first_number(switches.unwrap_or(""));
    }
    Ok(sum)
}

/// The sum of `count` fields of a `stat` file, counted behind the name in parentheses, which may hold blanks.
fn stat_numbers(file: &Path, first: usize, count: usize) -> io::Result<u64> {
    let stat = fs::read_to_string(file)?;
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    Ok(fields.split_whitespace().skip(first).take(count).filter_map(|n| n.parse::<u64>().ok()).sum())
}

fn first_number(text: &str) -> u64 {
    text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}
