//! CPU time, wake-ups and page faults from `/proc`: what a process costs, and the CPU time that other processes used meanwhile.

use std::{
    fs, io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Linux reports CPU time to user space in ticks of 10 ms.
const TICKS_PER_SECOND: f64 = 100.0;

/// The first of the fields `utime`, `stime`, `cutime` and `cstime` of `/proc/PID/stat`, and those of page faults, counted behind
/// the name.
const UTIME: usize = 11;

const MINFLT: usize = 7;
const MAJFLT: usize = 9;

/// CPU time, wake-ups and page faults of the threads of a process so far.
#[derive(Clone, Copy, Default)]
pub struct Usage {
    /// User and system time in clock ticks, as the scheduler accounts it.
    pub ticks: u64,
    /// Time on a CPU in nanoseconds; fine enough to show a single wake-up.
    pub cpu_ns: u64,
    /// Voluntary context switches: how often a thread went to sleep, and so how often it was woken.
    pub wake_ups: u64,
    pub faults: u64,
}

/// The cost of one second in which the benchmark does nothing, for each of `pids`.
///
/// The thread that measures is left out: it sleeps, wakes and reads `/proc` itself.
pub fn second(pids: &[u32]) -> io::Result<Vec<Usage>> {
    let measuring = fs::read_link("/proc/thread-self")?;
    let read_all = || pids.iter().map(|&pid| read(pid, Some(&measuring))).collect::<io::Result<Vec<_>>>();
    let before = read_all()?;
    thread::sleep(Duration::from_secs(1));
    let after = read_all()?;
    Ok(before.iter().zip(after).map(|(before, after)| after.since(before)).collect())
}

/// All that the threads of these processes have used so far, together.
pub fn so_far(pids: &[u32]) -> io::Result<Usage> {
    pids.iter().try_fold(Usage::default(), |sum, &pid| Ok(sum.plus(read(pid, None)?)))
}

/// Detects other processes that use CPU time: measurements beside a busy process are not comparable.
pub struct Others {
    servers: Vec<u32>,
    since: Instant,
    busy: i64,
}

impl Others {
    /// `servers` are the benchmark's other processes.
    pub fn watch(servers: &[u32]) -> io::Result<Others> {
        Ok(Others { servers: servers.to_vec(), since: Instant::now(), busy: busy_elsewhere(servers)? })
    }

    /// True if other processes have used more than 5 % of a core since then; two ticks more are within the accounting error.
    pub fn disturbed(&self) -> io::Result<bool> {
        let used = busy_elsewhere(&self.servers)? - self.busy;
        let elapsed = self.since.elapsed().as_secs_f64() * TICKS_PER_SECOND;
        Ok(used as f64 > 2.0 + 0.05 * elapsed)
    }
}

/// Ticks that the CPUs spent on anything but this process, its past children, and its servers.
fn busy_elsewhere(servers: &[u32]) -> io::Result<i64> {
    let stat = fs::read_to_string("/proc/stat")?;
    // user, nice, system, (idle, iowait,) irq, softirq
    let fields: Vec<i64> = stat.split_whitespace().skip(1).take(7).filter_map(|n| n.parse().ok()).collect();
    let all: i64 = fields.iter().take(3).chain(fields.iter().skip(5)).sum();
    let mut ours = stat_numbers(Path::new("/proc/self/stat"), UTIME, 4)?;
    for pid in servers {
        ours += stat_numbers(Path::new(&format!("/proc/{pid}/stat")), UTIME, 2)?;
    }
    Ok(all - ours as i64)
}

impl Usage {
    fn plus(self, other: Usage) -> Usage {
        Usage {
            ticks: self.ticks + other.ticks,
            cpu_ns: self.cpu_ns + other.cpu_ns,
            wake_ups: self.wake_ups + other.wake_ups,
            faults: self.faults + other.faults,
        }
    }

    pub fn since(self, before: &Usage) -> Usage {
        Usage {
            ticks: self.ticks.saturating_sub(before.ticks),
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            wake_ups: self.wake_ups.saturating_sub(before.wake_ups),
            faults: self.faults.saturating_sub(before.faults),
        }
    }
}

/// Without the thread `but`, a folder in `/proc`.
fn read(pid: u32, but: Option<&Path>) -> io::Result<Usage> {
    let process = format!("/proc/{pid}/stat");
    let process = Path::new(&process);
    let faults = stat_numbers(process, MINFLT, 1)? + stat_numbers(process, MAJFLT, 1)?;
    let mut sum = Usage { faults, ..Usage::default() };
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if but.is_some_and(|but| task.strip_prefix("/proc").is_ok_and(|task| task == but)) {
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

/// The sum of `count` fields of a `stat` file, counted behind the name in parentheses, which may contain blanks.
fn stat_numbers(file: &Path, first: usize, count: usize) -> io::Result<u64> {
    let stat = fs::read_to_string(file)?;
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    Ok(fields.split_whitespace().skip(first).take(count).filter_map(|n| n.parse::<u64>().ok()).sum())
}

fn first_number(text: &str) -> u64 {
    text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}
