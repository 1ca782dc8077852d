//! The resources that a process holds, read from `/proc`.

use std::fs;

fn status(pid: u32, name: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name} in the status"));
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Resident memory, in bytes.
pub fn resident(pid: u32) -> usize {
    status(pid, "VmRSS:") << 10
}

/// The peak of resident memory since [`forget_peak`], in bytes.
pub fn peak(pid: u32) -> usize {
    status(pid, "VmHWM:") << 10
}

pub fn forget_peak(pid: u32) {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
}

pub fn threads(pid: u32) -> usize {
    status(pid, "Threads:")
}

pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Raises the limit of open files as far as the system allows; returns it.
pub fn raise_file_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one `rlimit`, which outlives the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: reads one `rlimit`, which outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    limit.rlim_cur
}
