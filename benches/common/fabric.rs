//! Calls and transfers between two engines, beside what the fabric's own tools reach.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuilder, Exposed, Request};

use super::{
    Outcome, Plan,
    caller::{self, Caller},
    interleave, readable,
    report::{Figure, Goal, Report, Unit},
    store::holds,
};

/// Calls in a round, and as many exchanges of the tools.
const CALLS: usize = 1000;
/// The byte that fills the server's memory, and the one that the client pushes.
const THERE: u8 = 1;
const HERE: u8 = 2;
/// The minimum number of a tool's exchanges.
const FEWEST: usize = 5;
/// The time limit for a tool to listen.
const PATIENCE: Duration = Duration::from_secs(30);

/// Transfers of one size.
#[derive(Clone, Copy)]
pub struct Transfers {
    pub size: usize,
    /// In a round, and in flight.
    pub count: usize,
    pub window: usize,
    /// The speed to reach, as a share of the tool's.
    pub goal: Option<f64>,
}

/// What the fabric does without calomel, between the same processors.
pub trait Tools {
    /// Times of exchanges of two small messages, in nanoseconds, and what measures them.
    fn round_trips(&self, count: usize) -> Outcome<Vec<f64>>;
    fn round_trip_name(&self) -> String;
    /// The fewest exchanges that `round_trips` can measure.
    fn fewest_round_trips(&self) -> usize {
        0
    }
    /// The nanoseconds for each of some transfers.
    fn transfer(&self, pull: bool, transfers: Transfers) -> Outcome<f64>;
    fn transfer_name(&self, pull: bool, transfers: Transfers) -> String;
    /// The most that an empty call may take, as a multiple of a round trip.
    fn call_goal(&self) -> f64;
}

/// Without the upgrade, two engines on one host would use shared memory.
fn builder() -> EngineBuilder {
    Engine::builder().same_host_upgrade(false)
}

/// True when this process has nothing to measure: it was the server, or was built without optimisation.
pub fn is_over(largest: usize) -> Outcome<bool> {
    if cfg!(debug_assertions) {
        println!("built without optimisation, nothing measured: use `cargo bench`");
        return Ok(true);
    }
    let mut arguments = env::args().skip(1);
    if arguments.next().is_none_or(|first| first != "server") {
        return Ok(false);
    }
    serve(&arguments.next().ok_or("the server needs an address")?, largest)?;
    Ok(true)
}

/// The server process: listens, prints its address, and serves until its input ends.
fn serve(listen: &str, largest: usize) -> Outcome {
    let engine = builder().listen(listen).build()?;
    caller::define(&engine)?;
    let exposed = engine.expose(vec![THERE; largest], BulkMode::ReadWrite)?;
    let bulk = exposed.bulk();
    engine.define("memory", move |_: &Request, (): ()| bulk.clone())?;
    println!("{}", engine.address());
    io::stdout().flush()?;
    // The input ends with the client, even with one that was killed.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A child process that is killed when this is dropped.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    /// Starts a server, and returns the line in which it prints its address.
    pub fn server(command: &mut Command) -> Outcome<(Killed, String)> {
        let mut server = Killed(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
        let mut address = String::new();
        BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).read_line(&mut address)?;
        Ok((server, address.trim().to_owned()))
    }

    /// Starts a tool whose output does not matter.
    pub fn quiet(command: &mut Command) -> io::Result<Killed> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Killed)
    }
}

/// A port that was free a moment ago.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Reads the listening sockets from `/proc`: a tool would take a test connection for its client.
pub fn wait_for_listener(tool: &str, port: u16) -> Outcome {
    let until = Instant::now() + PATIENCE;
    let local = format!(":{port:04X}");
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

/// A server process of this benchmark, and an engine that is connected to it.
pub struct Pair<'a> {
    plan: &'a Plan,
    name: String,
    client: Engine,
    peer: Endpoint,
    server: Killed,
}

impl Drop for Pair<'_> {
    fn drop(&mut self) {
        self.plan.servers.borrow_mut().retain(|&server| server != self.server.0.id());
    }
}

impl Pair<'_> {
    /// `name` is that of the rows, and the scheme of the addresses.
    pub fn new<'a>(plan: &'a Plan, name: &str, listen: &str) -> Outcome<Pair<'a>> {
        let (server, address) = Killed::server(Command::new(env::current_exe()?).args(["server", listen]))?;
        let client = builder().build()?;
        let peer = client.lookup(address.as_str())?;
        Caller::of(&client, &peer).call()?;
        let carrier = peer.transport().map_or_else(String::new, |transport| transport.to_string());
        if carrier != name {
            return Err(format!("the calls went over {carrier:?}, not over {name}").into());
        }
        plan.servers.borrow_mut().push(server.0.id());
        Ok(Pair { plan, name: name.to_owned(), client, peer, server })
    }

    pub fn caller(&self) -> Caller {
        Caller::of(&self.client, &self.peer)
    }

    pub fn empty_calls(&self, report: &mut Report<'_>, tools: &dyn Tools) -> Outcome {
        // As many on either side: rounds begin slowly, as whatever follows a pause.
        let (caller, count) = (self.caller(), self.plan.count(CALLS).max(tools.fewest_round_trips()));
        let (ours, raw) = interleave(
            self.plan,
            |samples| caller.round_trips(count / 10, count, samples),
            |samples| {
                samples.extend(tools.round_trips(count)?);
                Ok(())
            },
        )?;
        let figure = Figure::new(format!("{}: empty RPC", self.name), Unit::Time, &ours);
        report.add(figure.raw(tools.round_trip_name(), &raw).goal(Goal::TimeAtMost(tools.call_goal())));
        Ok(())
    }

    /// Empty calls beside those of another pair.
    pub fn empty_calls_beside(&self, report: &mut Report<'_>, other: &Pair<'_>) -> Outcome {
        let (caller, beside, count) = (self.caller(), other.caller(), self.plan.count(CALLS));
        let (ours, theirs) = interleave(
            self.plan,
            |samples| caller.round_trips(count / 10, count, samples),
            |samples| beside.round_trips(count / 10, count, samples),
        )?;
        let figure = Figure::new(format!("{}: empty RPC, beside {}", self.name, other.name), Unit::Time, &ours);
        report.add(figure.raw(format!("{}: empty RPC", other.name), &theirs));
        Ok(())
    }

    fn memory(&self) -> Outcome<Bulk> {
        Ok(self.client.procedure::<(), Bulk>("memory").on(&self.peer).call(&())?)
    }

    /// The nanoseconds for each transfer; a tenth as many before are not timed.
    fn moved(&self, pull: bool, remote: &calomel::RemoteBulk, part: &calomel::ExposedSlice, of: Transfers) -> Outcome<f64> {
        let Transfers { size, count, window, .. } = of;
        let move_some = |count: usize| {
            let mut flight = VecDeque::with_capacity(window);
            for _ in 0..count {
                if flight.len() == window {
                    finish(flight.pop_front(), size)?;
                }
                let one = if pull { remote.start_pull_into(part.clone()) } else { remote.start_push_from(part.clone()) };
                flight.push_back(one);
            }
            flight.into_iter().try_for_each(|one| finish(Some(one), size))
        };
        move_some(window.max(count / 10))?;
        let begun = Instant::now();
        move_some(count)?;
        Ok(begun.elapsed().as_nanos() as f64 / count as f64)
    }

    pub fn transfers(&self, report: &mut Report<'_>, tools: &dyn Tools, pull: bool, of: Transfers) -> Outcome {
        let Transfers { size, count, window, goal } = of;
        let remote = self.memory()?.slice(0, size)?.on(&self.peer);
        let local = self.client.expose(vec![HERE; size], BulkMode::WriteOnly)?;
        let part = local.slice(0, size)?;
        let of = Transfers { count: self.plan.count(count).max(window).max(FEWEST), ..of };
        let (ours, raw) = interleave(
            self.plan,
            |samples| {
                samples.push(self.moved(pull, &remote, &part, of)?);
                Ok(())
            },
            |samples| {
                samples.push(tools.transfer(pull, of)?);
                Ok(())
            },
        )?;
        check(pull, &remote, local)?;
        let verb = if pull { "pull" } else { "push" };
        let name = format!("{}: {verb} of {}, {window} at a time", self.name, readable(size));
        let figure = Figure::new(name, Unit::Bytes(size), &ours).plotted(&self.name, verb, size);
        report.add(figure.raw(tools.transfer_name(pull, of), &raw).goal(goal.map_or(Goal::None, Goal::SpeedAtLeast)));
        Ok(())
    }
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

/// What the benchmark's arguments ask for: the parts `rpc`, `pull` and `push`, or all.
pub fn wanted(part: &str) -> bool {
    let only = env::args().find(|argument| ["rpc", "pull", "push"].contains(&argument.as_str()));
    only.is_none_or(|only| only == part)
}
