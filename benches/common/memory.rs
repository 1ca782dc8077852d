//! Resident memory of a process, read from `/proc`.

use std::{fs, io};

/// Resident bytes, to the page.
pub fn resident(pid: u32) -> io::Result<u64> {
    kibibytes(&format!("/proc/{pid}/smaps_rollup"), "Rss:")
}

/// Resets [`peak`].
pub fn forget_peak(pid: u32) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5")
}

/// The largest resident size since the reset, in bytes.
pub fn peak(pid: u32) -> io::Result<u64> {
    kibibytes(&format!("/proc/{pid}/status"), "VmHWM:")
}

fn kibibytes(file: &str, name: &str) -> io::Result<u64> {
    let text = fs::read_to_string(file)?;
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
    number.map(|kib| kib << 10).ok_or_else(|| io::Error::other(format!("no {name} in {file}")))
}
