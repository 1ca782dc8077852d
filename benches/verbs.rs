//! Benchmark of calls and transfers over an RDMA device. The references are the perftest tools on the same device: an empty RPC
//! against two messages (`ib_send_lat`), pulls against `ib_read_bw`, pushes against `ib_write_bw`.
//!
//! `CALOMEL_VERBS` is the device's address; `ci/verbs-bench` sets it, in a guest if necessary.

mod common;

use std::process::Command;
use std::{env, fs};

use common::{
    Outcome, Plan,
    fabric::{self, Killed, Pair, Tools, Transfers},
    report::Report,
};

/// Bytes of a message; calomel's empty call and answer are a little longer.
const MESSAGE: usize = 64;
const TRANSFERS: [Transfers; 4] = [
    Transfers { size: 4 << 10, count: 2000, window: 128, goal: None },
    Transfers { size: 64 << 10, count: 400, window: 64, goal: Some(0.95) },
    Transfers { size: 1 << 20, count: 40, window: 16, goal: Some(0.95) },
    Transfers { size: 16 << 20, count: 6, window: 4, goal: None },
];

fn main() -> Outcome {
    let Ok(ip) = env::var("CALOMEL_VERBS") else {
        println!("skipped: CALOMEL_VERBS names no RDMA device; ci/verbs-bench has one");
        return Ok(());
    };
    if fabric::is_over(TRANSFERS[3].size)? {
        return Ok(());
    }
    // The kernel's CPU time for a software device would be counted as a disturbance.
    let plan = Plan { repeats: false, ..Plan::from_environment() };
    let tools = Perftest::new(&ip)?;
    let mut report = Report::new("verbs", &plan).beside("perftest");
    let pair = Pair::new(&plan, "verbs", &format!("verbs://{ip}:0"))?;
    if fabric::wanted("rpc") {
        pair.empty_calls(&mut report, &tools)?;
    }
    for (pull, part) in [(true, "pull"), (false, "push")] {
        for transfers in TRANSFERS.into_iter().filter(|_| fabric::wanted(part)) {
            pair.transfers(&mut report, &tools, pull, transfers)?;
        }
    }
    report.finish()?;
    Ok(())
}

// ---- perftest -----------------------------------------------------------------------------------------------------------

/// The perftest tools; both sides run on the device that has the address.
struct Perftest {
    device: String,
    gid: String,
    port: u16,
}

impl Perftest {
    fn new(ip: &str) -> Outcome<Perftest> {
        let ip: std::net::Ipv4Addr = ip.parse()?;
        let gid = ip.to_ipv6_mapped().segments().map(|part| format!("{part:04x}")).join(":");
        let mut found = None;
        for device in fs::read_dir("/sys/class/infiniband")? {
            let device = device?.path();
            for entry in fs::read_dir(device.join("ports/1/gids"))? {
                let entry = entry?.path();
                // An address has one GID for each version of RoCE; the last is of the newest version.
                if fs::read_to_string(&entry).is_ok_and(|text| text.trim() == gid) {
                    let name = |path: &std::path::Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
                    found = found.max(name(&entry).and_then(|gid| gid.parse::<u32>().ok()).zip(name(&device)));
                }
            }
        }
        let (gid, device) = found.ok_or("no RDMA device has the address CALOMEL_VERBS")?;
        Ok(Perftest { device, gid: gid.to_string(), port: fabric::free_port()? })
    }

    /// The output of the tool's client.
    fn run(&self, tool: &str, size: usize, count: usize, more: &[&str]) -> Outcome<String> {
        let (size, count, port) = (size.to_string(), count.to_string(), self.port.to_string());
        let mut arguments = vec!["-F", "-d", &self.device, "-x", &self.gid, "-p", &port, "-s", &size, "-n", &count];
        arguments.extend(more);
        let server = Killed::quiet(Command::new(tool).args(&arguments));
        let _server = server.map_err(|error| format!("{tool} can't be run (package perftest): {error}"))?;
        fabric::wait_for_listener(tool, self.port)?;
        let output = Command::new(tool).args(&arguments).arg("127.0.0.1").output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() { Ok(text) } else { Err(format!("{tool} failed: {text}").into()) }
    }
}

fn bandwidth_tool(pull: bool) -> &'static str {
    if pull { "ib_read_bw" } else { "ib_write_bw" }
}

impl Tools for Perftest {
    fn round_trips(&self, count: usize) -> Outcome<Vec<f64>> {
        let text = self.run("ib_send_lat", MESSAGE, count, &["-U"])?;
        // Lines of a number and microseconds.
        let sample = |line: &str| match line.split(',').map(|field| field.trim().parse::<f64>()).collect::<Vec<_>>()[..] {
            [Ok(_), Ok(time)] => Some(2.0 * 1e3 * time),
            _ => None,
        };
        let samples: Vec<f64> = text.lines().filter_map(sample).collect();
        if samples.is_empty() { Err(format!("ib_send_lat prints no times: {text}").into()) } else { Ok(samples) }
    }

    fn round_trip_name(&self) -> String {
        format!("2 x ib_send_lat -s {MESSAGE}")
    }

    fn call_goal(&self) -> f64 {
        1.2
    }

    fn transfer_name(&self, pull: bool, Transfers { size, window, .. }: Transfers) -> String {
        format!("{} -s {size} -t {window}", bandwidth_tool(pull))
    }

    fn transfer(&self, pull: bool, Transfers { size, count, window, .. }: Transfers) -> Outcome<f64> {
        let tool = bandwidth_tool(pull);
        let text = self.run(tool, size, count, &["-N", "-t", &window.to_string()])?;
        // Size, count, peak, average in MiB/s, messages.
        let fields = |line: &str| line.split_whitespace().map(|field| field.parse::<f64>().ok()).collect::<Option<Vec<_>>>();
        let average = text.lines().filter_map(fields).find(|line| line.len() == 5 && line[0] == size as f64);
        let average = average.ok_or_else(|| format!("{tool} prints no bandwidth: {text}"))?[3];
        Ok(size as f64 / (average * f64::from(1 << 20)) * 1e9)
    }
}
