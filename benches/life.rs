//! Benchmark of an engine's life cycle: start, end, memory, and idling.

mod common;

use std::{
    env, io, process,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use calomel::Engine;
use common::{
    Outcome, Plan, Site, Transport,
    caller::{self, Caller},
    cpu, memory,
    report::{Figure, Goal, Report, Unit},
    stats::Series,
};

/// After this time without calls an engine has no timer pending: a link that received something is checked once more, at half
/// of the 10 s peer timeout.
const FORGOTTEN: Duration = Duration::from_secs(6);

/// The pause between two clients; long enough for all threads to sleep.
const PAUSE: Duration = Duration::from_millis(5);

/// Engines that a process makes after its first one.
const FURTHER: usize = 10;

fn main() -> Outcome {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [role, transport, address] = &arguments[..]
        && role == "engines"
    {
        return engines(transport, address);
    }
    common::main(caller::define, measure)
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("life", plan);
    let mut sites = Vec::new();
    for transport in Transport::ALL {
        let Some(site) = Site::open(plan, &mut report, transport, caller::define)? else { continue };
        beginning_and_end(plan, &mut report, &site)?;
        resident(plan, &mut report, &site)?;
        // From here on it is idle, with an open connection.
        Caller::new(&site).call()?;
        sites.push(site);
    }
    idle(plan, &mut report, &sites)?;
    report.finish()?;
    Ok(())
}

fn beginning_and_end(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    let count = plan.count(10);
    let rounds = plan.rounds(|| {
        let [mut made, mut called, mut ended] = [const { Vec::new() }; 3];
        for _ in 0..count {
            // New clients come to servers that sleep.
            thread::sleep(PAUSE);
            let begun = Instant::now();
            let client = site.transport.client()?;
            made.push(begun.elapsed().as_nanos() as f64);
            let begun = Instant::now();
            let peer = client.lookup(&*site.address)?;
            Caller::of(&client, &peer).call()?;
            called.push(begun.elapsed().as_nanos() as f64);
            let begun = Instant::now();
            client.finalize()?;
            ended.push(begun.elapsed().as_nanos() as f64);
        }
        Ok([made, called, ended])
    })?;
    let limits = [("new client", Goal::None), ("its first call", Goal::AtMost(1e6)), ("its finalize", Goal::AtMost(5e6))];
    for (moment, (what, goal)) in limits.into_iter().enumerate() {
        let series = Series::new(rounds.iter().map(|round| round[moment].clone()).collect());
        report.add(Figure::new(format!("{}: {what}", site.name()), Unit::Time, &series).goal(goal));
    }
    Ok(())
}

/// Starts a new process that makes engines and prints the memory that they took.
fn resident(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    let rounds = plan.rounds(|| {
        let output = Command::new(env::current_exe()?).args(["engines", site.name(), &site.address]).output()?;
        let text = String::from_utf8(output.stdout)?;
        let numbers: Vec<f64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [first, each] = numbers[..] else { return Err("the process with engines failed".into()) };
        Ok((first / 1024.0, each / 1024.0))
    })?;
    let first = Series::new(rounds.iter().map(|round| vec![round.0]).collect());
    let further = Series::new(rounds.iter().map(|round| vec![round.1]).collect());
    let goal = Goal::AtMost(2048.0);
    let name = site.name();
    let figure = |name: String, series| Figure::new(name, Unit::Count("KiB"), series).goal(goal);
    report.add(figure(format!("{name}: resident memory of a process' first client"), &first));
    report.add(figure(format!("{name}: resident memory of each further client"), &further));
    Ok(())
}

/// The main function of the process that makes engines: clients, each of which has called the server once.
fn engines(transport: &str, address: &str) -> Outcome {
    let transport = Transport::parse(transport).ok_or("the argument `engines` needs a transport")?;
    let before = memory::resident(process::id())?;
    // This transport does not reach a server of another process; there is one more engine then.
    let local = if transport == Transport::Loop { Some(transport.server()?) } else { None };
    let mut address = address.to_owned();
    if let Some(server) = &local {
        caller::define(server)?;
        address = server.address().to_string();
    }
    let first = [called(transport, &address)?];
    let one = memory::resident(process::id())?;
    let more = (0..FURTHER).map(|_| called(transport, &address)).collect::<calomel::Result<Vec<Engine>>>()?;
    let all = memory::resident(process::id())?;
    let made = first.len() + usize::from(local.is_some());
    println!("{} {}", (one - before) / made as u64, all.saturating_sub(one) / more.len() as u64);
    Ok(())
}

fn called(transport: Transport, address: &str) -> calomel::Result<Engine> {
    let client = transport.client()?;
    let peer = client.lookup(address)?;
    Caller::of(&client, &peer).call()?;
    Ok(client)
}

/// Seconds without calls, with connections open.
fn idle(plan: &Plan, report: &mut Report<'_>, sites: &[Site<'_>]) -> Outcome {
    thread::sleep(FORGOTTEN);
    let clients: Vec<&str> = sites.iter().map(Site::name).collect();
    let mut processes = vec![(format!("idle: clients of {}", clients.join(", ")), process::id())];
    processes.extend(sites.iter().filter(|site| site.local.is_none()).map(|site| {
        let name = format!("idle: server of {}", site.name());
        (name, site.process.pid())
    }));
    let pids: Vec<u32> = processes.iter().map(|&(_, pid)| pid).collect();
    let count = if plan.quick { 1 } else { 5 };
    let seconds = (0..count).map(|_| cpu::second(&pids)).collect::<io::Result<Vec<_>>>()?;
    for (at, (name, _)) in processes.iter().enumerate() {
        let series =
            |value: fn(&cpu::Usage) -> u64| Series::new(seconds.iter().map(|second| vec![value(&second[at]) as f64]).collect());
        let ticks = series(|usage| usage.ticks);
        report.add(Figure::new(format!("{name}, CPU in 1 s"), Unit::Count("ticks"), &ticks).goal(Goal::Zero));
        let cpu = series(|usage| usage.cpu_ns);
        report.add(Figure::new(format!("{name}, CPU in 1 s"), Unit::Time, &cpu));
        let sleeps = series(|usage| usage.wake_ups);
        report.add(Figure::new(format!("{name}, sleeps in 1 s"), Unit::Count("switches"), &sleeps).goal(Goal::Zero));
    }
    Ok(())
}
