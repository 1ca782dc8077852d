//! Processes on hosts of their own, as far as the network goes: a network namespace for each, and one for the bridge that
//! connects them. They go away with the processes that hold them.

// Each suite uses what it needs.
#![allow(dead_code)]

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

pub struct Hosts {
    /// Each holds a namespace; the last one that of the bridge.
    holders: Vec<Child>,
}

fn must(error: i32) -> std::io::Result<()> {
    if error == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// An idle process in a network namespace of its own.
fn holder() -> std::io::Result<Child> {
    let mut command = Command::new("sleep");
    command.arg("100000").stdin(Stdio::null()).stdout(Stdio::null());
    let enter = || {
        // SAFETY: takes numbers only.
        must(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
        // SAFETY: takes a number; the process has one thread.
        must(unsafe { libc::unshare(libc::CLONE_NEWNET) })
    };
    // SAFETY: what runs in the child makes system calls only.
    unsafe { command.pre_exec(enter) };
    command.spawn()
}

/// The address of a host.
pub fn ip(host: usize) -> String {
    format!("10.77.0.{}", host + 1)
}

impl Hosts {
    /// The error where namespaces are not permitted.
    pub fn new(count: usize) -> Result<Hosts, String> {
        let holders: std::io::Result<Vec<Child>> = (0..=count).map(|_| holder()).collect();
        let hosts = Hosts { holders: holders.map_err(|error| format!("no network namespaces: {error}"))? };
        hosts.ip(count, "link add name calomel type bridge")?;
        hosts.ip(count, "link set calomel up")?;
        for host in 0..count {
            hosts.ip(host, "link set lo up")?;
            let switch = hosts.holders[count].id();
            hosts.ip(host, &format!("link add name near type veth peer name far{host} netns {switch}"))?;
            hosts.ip(host, &format!("address add {}/24 dev near", ip(host)))?;
            hosts.ip(host, "link set near up")?;
            hosts.ip(count, &format!("link set far{host} master calomel"))?;
            hosts.ip(count, &format!("link set far{host} up"))?;
        }
        Ok(hosts)
    }

    fn switch(&self) -> usize {
        self.holders.len() - 1
    }

    fn network(&self, host: usize) -> String {
        format!("/proc/{}/ns/net", self.holders[host].id())
    }

    fn run(&self, host: usize, program: &str, arguments: &str) -> Result<(), String> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network(host))).arg(program).args(arguments.split(' '));
        let output = command.output().map_err(|error| format!("{program}: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }

    fn ip(&self, host: usize, arguments: &str) -> Result<(), String> {
        self.run(host, "ip", arguments)
    }

    /// Starts a process on a host.
    pub fn enter(&self, host: usize, command: &mut Command) {
        let network = std::ffi::CString::new(self.network(host)).unwrap();
        let enter = move || {
            // SAFETY: the text ends with a zero; the descriptor is new, and closed with the next program.
            let fd = unsafe { libc::open(network.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            // SAFETY: takes numbers; the process has one thread.
            must(unsafe { libc::setns(fd, libc::CLONE_NEWNET) })
        };
        // SAFETY: what runs in the child makes system calls only.
        unsafe { command.pre_exec(enter) };
    }

    /// Runs `work` on a thread of its own, and what it starts, on a host.
    pub fn on<T: Send>(&self, host: usize, work: impl FnOnce() -> T + Send) -> T {
        let network = std::fs::File::open(self.network(host)).unwrap();
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                // SAFETY: takes numbers; it changes this thread alone, which ends with `work`.
                must(unsafe { libc::setns(std::os::fd::AsRawFd::as_raw_fd(&network), libc::CLONE_NEWNET) }).unwrap();
                work()
            });
            running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Takes the link of a host down or up.
    pub fn plug(&self, host: usize, plugged: bool) -> Result<(), String> {
        self.ip(self.switch(), &format!("link set far{host} {}", if plugged { "up" } else { "down" }))
    }

    /// Packets from one host to another are lost; the other direction is not affected.
    pub fn block(&self, host: usize, other: usize, blocked: bool) -> Result<(), String> {
        self.ip(host, &format!("route {} blackhole {}/32", if blocked { "add" } else { "del" }, ip(other)))
    }

    /// Removes or restores the address of a host.
    pub fn address(&self, host: usize, there: bool) -> Result<(), String> {
        self.ip(host, &format!("address {} {}/24 dev near", if there { "add" } else { "del" }, ip(host)))
    }

    /// Limits the bandwidth of a host; excess packets are lost.
    pub fn narrow(&self, host: usize, narrow: bool) -> Result<(), String> {
        let (verb, how) = if narrow { ("add", " tbf rate 8mbit burst 8kb latency 30ms") } else { ("del", "") };
        self.run(host, "tc", &format!("qdisc {verb} dev near root{how}"))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for holder in &mut self.holders {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}
