//! Benchmark of calls and transfers over an RDMA device. The references are the perftest tools on the same device: an empty RPC
//! against two messages (`ib_send_lat`), pulls against `ib_read_bw`, pushes against `ib_write_bw`.
//!
//! `CALOMEL_VERBS` is the device's address; `ci/verbs-bench` sets it, in a guest if necessary.

mod common;

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuilder, Exposed, Request};
use common::{
    Outcome, Plan,
    caller::{self, Caller},
    interleave, readable,
    report::{Figure, Goal, Report, Unit},
    store::holds,
};

/// Bytes of a message; calomel's empty call and answer are a little shorter.
const MESSAGE: usize = 64;
/// Calls in a round, and as many exchanges of perftest.
const CALLS: usize = 1000;

/// Bytes of a transfer, transfers in a round, transfers in flight, and whether the figure is judged.
const SIZES: [(usize, usize, usize, bool); 4] =
    [(4 << 10, 2000, 128, false), (64 << 10, 400, 64, true), (1 << 20, 40, 16, true), (16 << 20, 6, 4, false)];

/// The byte that fills the server's memory, and the one that the client pushes.
const THERE: u8 = 1;
const HERE: u8 = 2;
/// The minimum number of perftest's exchanges.
const FEWEST: usize = 5;
/// The time limit for a tool of perftest to listen.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Outcome {
    let Ok(ip) = env::var("CALOMEL_VERBS") else {
        println!("skipped: CALOMEL_VERBS names no RDMA device; ci/verbs-bench has one");
        return Ok(());
    };
    if cfg!(debug_assertions) {
        println!("built without optimisation, nothing measured: use `cargo bench`");
        return Ok(());
    }
    if env::args().nth(1).is_some_and(|first| first == "server") {
        return serve(&ip);
    }
    // The kernel's CPU time for a software device would be counted as a disturbance.
    measure(&ip, &Plan { repeats: false, ..Plan::from_environment() })
}

/// Without the upgrade, two engines on one host would use shared memory.
fn builder() -> EngineBuilder {
    Engine::builder().same_host_upgrade(false)
}

// ---- The server process --------------------------------------------------------------------------------------------------

fn serve(ip: &str) -> Outcome {
    let engine = builder().listen(format!("verbs://{ip}:0")).build()?;
    caller::define(&engine)?;
    let exposed = engine.expose(vec![THERE; largest()], BulkMode::ReadWrite)?;
    let bulk = exposed.bulk();
    engine.define("memory", move |_: &Request, (): ()| bulk.clone())?;
    println!("{}", engine.address());
    io::stdout().flush()?;
    // The input ends with the client, even with one that was killed.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn largest() -> usize {
    SIZES.iter().map(|(size, ..)| *size).max().unwrap_or(0)
}

/// A child process that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// ---- What is measured ---------------------------------------------------------------------------------------------------

fn measure(ip: &str, plan: &Plan) -> Outcome {
    let tools = Perftest::new(ip)?;
    let mut report = Report::new("verbs", plan).beside("perftest");
    let child = Command::new(env::current_exe()?).arg("server").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut server = Killed(child);
    let mut address = String::new();
    BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).read_line(&mut address)?;
    let client = builder().build()?;
    let peer = client.lookup(address.trim())?;

    let only = env::args().find(|argument| ["rpc", "pull", "push"].contains(&argument.as_str()));
    let wanted = |part: &str| only.as_ref().is_none_or(|only| only == part);
    if wanted("rpc") {
        empty_calls(plan, &mut report, &tools, &client, &peer)?;
    }
    let bulk: Bulk = client.procedure::<(), Bulk>("memory").on(&peer).call(&())?;
    for (pull, part) in [(true, "pull"), (false, "push")] {
        for size in SIZES.into_iter().filter(|_| wanted(part)) {
            transfers(plan, &mut report, &tools, &client, (&peer, &bulk), pull, size)?;
        }
    }
    let carrier = peer.transport().map(|transport| format!("{transport:?}"));
    if carrier.as_deref() != Some("Verbs") {
        return Err(format!("the transfer went over {carrier:?}").into());
    }
    report.finish()?;
    Ok(())
}

fn empty_calls(plan: &Plan, report: &mut Report<'_>, tools: &Perftest, client: &Engine, peer: &Endpoint) -> Outcome {
    let caller = Caller::of(client, peer);
    let count = plan.count(CALLS);
    let (ours, raw) = interleave(
        plan,
        |samples| caller.round_trips(count / 10, count, samples),
        |samples| {
            samples.extend(tools.latencies(count)?.iter().map(|one_way| 2.0 * one_way));
            Ok(())
        },
    )?;
    let figure = Figure::new("verbs: empty RPC", Unit::Time, &ours);
    report.add(figure.raw(format!("2 x ib_send_lat -s {MESSAGE}"), &raw).goal(Goal::TimeAtMost(1.2)));
    Ok(())
}

fn transfers(
    plan: &Plan,
    report: &mut Report<'_>,
    tools: &Perftest,
    client: &Engine,
    (peer, bulk): (&Endpoint, &Bulk),
    pull: bool,
    (size, count, window, judged): (usize, usize, usize, bool),
) -> Outcome {
    let remote = bulk.slice(0, size)?.on(peer);
    let local = client.expose(vec![HERE; size], BulkMode::WriteOnly)?;
    let part = local.slice(0, size)?;
    let count = plan.count(count).max(window).max(FEWEST);
    let (verb, tool) = if pull { ("pull", "ib_read_bw") } else { ("push", "ib_write_bw") };
    let (ours, raw) = interleave(
        plan,
        |samples| {
            let mut flight = VecDeque::with_capacity(window);
            let begun = Instant::now();
            for _ in 0..count {
                if flight.len() == window {
                    finish(flight.pop_front(), size)?;
                }
                let one = if pull { remote.start_pull_into(part.clone()) } else { remote.start_push_from(part.clone()) };
                flight.push_back(one);
            }
            flight.into_iter().try_for_each(|one| finish(Some(one), size))?;
            samples.push(begun.elapsed().as_nanos() as f64 / count as f64);
            Ok(())
        },
        |samples| {
            samples.push(tools.bandwidth(tool, size, count, window)?);
            Ok(())
        },
    )?;
    check(pull, &remote, local)?;
    let name = format!("verbs: {verb} of {}, {window} at a time", readable(size));
    let goal = if judged { Goal::SpeedAtLeast(0.95) } else { Goal::None };
    let figure = Figure::new(name, Unit::Bytes(size), &ours).plotted("verbs", verb, size);
    report.add(figure.raw(format!("{tool} -s {size} -t {window}"), &raw).goal(goal));
    Ok(())
}

type OneTransfer = calomel::Transfer<[u8; 0], calomel::ExposedSlice>;

fn finish(transfer: Option<OneTransfer>, size: usize) -> Outcome {
    let moved = transfer.map_or(Ok(0), |transfer| transfer.wait().0)?;
    if moved == size { Ok(()) } else { Err(format!("{moved} of {size} bytes moved").into()) }
}

/// Checks the pulled bytes here or the pushed bytes there, and restores the server's memory.
fn check(pull: bool, remote: &calomel::RemoteBulk, local: Exposed<Vec<u8>>) -> Outcome {
    let mut there = local.reclaim();
    if pull {
        return if holds(&there, THERE) { Ok(()) } else { Err("wrong bytes were pulled".into()) };
    }
    there.fill(0);
    remote.pull_into(&mut there)?;
    if !holds(&there, HERE) {
        return Err("wrong bytes were pushed".into());
    }
    there.fill(THERE);
    remote.push_from(&there)?;
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
        // Any free port.
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        Ok(Perftest { device, gid: gid.to_string(), port })
    }

    /// The output of the tool's client.
    fn run(&self, tool: &str, size: usize, count: usize, more: &[&str]) -> Outcome<String> {
        let (size, count, port) = (size.to_string(), count.to_string(), self.port.to_string());
        let mut arguments = vec!["-F", "-d", &self.device, "-x", &self.gid, "-p", &port, "-s", &size, "-n", &count];
        arguments.extend(more);
        let quiet = |command: &mut Command| command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server = quiet(Command::new(tool).args(&arguments));
        let _server = Killed(server.map_err(|error| format!("{tool} can't be run (package perftest): {error}"))?);
        self.wait_for_listener(tool)?;
        let output = Command::new(tool).args(&arguments).arg("127.0.0.1").output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() { Ok(text) } else { Err(format!("{tool} failed: {text}").into()) }
    }

    /// Reads the listening sockets from `/proc`: the tool would take a test connection for its client.
    fn wait_for_listener(&self, tool: &str) -> Outcome {
        let until = Instant::now() + PATIENCE;
        let local = format!(":{:04X}", self.port);
        while Instant::now() < until {
            let sockets = ["tcp", "tcp6"].map(|file| fs::read_to_string(format!("/proc/net/{file}")).unwrap_or_default());
            let is_it = |line: &str| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                // The fourth column is the state: 0A is LISTEN.
                fields.len() > 3 && fields[1].ends_with(&local) && fields[3] == "0A"
            };
            if sockets.iter().flat_map(|text| text.lines()).any(is_it) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Err(format!("{tool} does not listen").into())
    }

    /// One-way times, in nanoseconds.
    fn latencies(&self, count: usize) -> Outcome<Vec<f64>> {
        let text = self.run("ib_send_lat", MESSAGE, count, &["-U"])?;
        // Lines of a number and microseconds.
        let sample = |line: &str| match line.split(',').map(|field| field.trim().parse::<f64>()).collect::<Vec<_>>()[..] {
            [Ok(_), Ok(time)] => Some(1e3 * time),
            _ => None,
        };
        let samples: Vec<f64> = text.lines().filter_map(sample).collect();
        if samples.is_empty() { Err(format!("ib_send_lat prints no times: {text}").into()) } else { Ok(samples) }
    }

    /// Nanoseconds for each transfer.
    fn bandwidth(&self, tool: &str, size: usize, count: usize, window: usize) -> Outcome<f64> {
        let text = self.run(tool, size, count, &["-N", "-t", &window.to_string()])?;
        // Size, count, peak, average in MiB/s, messages.
        let fields = |line: &str| line.split_whitespace().map(|field| field.parse::<f64>().ok()).collect::<Option<Vec<_>>>();
        let average = text.lines().filter_map(fields).find(|line| line.len() == 5 && line[0] == size as f64);
        let average = average.ok_or_else(|| format!("{tool} prints no bandwidth: {text}"))?[3];
        Ok(size as f64 / (average * f64::from(1 << 20)) * 1e9)
    }
}
