//! Benchmark of small calls under load: many connections, large transfers, too many calls.

mod common;

use std::{
    collections::VecDeque,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use calomel::{Bulk, BulkMode, Engine, Error, Pending, Procedure, Request};
use common::{
    Outcome, Plan, Site, Transport,
    caller::{self, Caller},
    guest::Guest,
    interleave, memory,
    raw::shared::raise_file_limit,
    report::{Figure, Goal, Report, Unit},
    stats::Series,
    store, timed,
};

/// Connections to one server, and the number of steps in which they are made.
const CONNECTIONS: usize = 10_000;
const STEPS: usize = 5;
/// Other files that the benchmark and its server have open.
const OTHER_FILES: u64 = 200;

/// The size of the transfer beside which small calls are made.
const LARGE: usize = 1 << 30;
const LARGE_QUICK: usize = 256 << 20;

/// How long a handler of the overload takes; so many of them run at a time by default.
const WORK: Duration = Duration::from_millis(2);
const HANDLERS: usize = 64;
/// The overload factor of the calls, and its duration.
const EXCESS: usize = 10;
const BURST: Duration = Duration::from_millis(200);
const BURST_QUICK: Duration = Duration::from_millis(100);
/// Bytes of the arguments of such a call.
const ARGUMENTS: usize = 1 << 10;
/// The memory allowed for the calls that a server keeps: 16 Ki calls per connection with their arguments, and overhead.
const BOUND_MIB: f64 = 64.0;
/// Calls in flight when the rate before and after is taken, and their number.
const WINDOW: usize = 64;
const RATED: usize = 20_000;

fn main() -> Outcome {
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    caller::define(engine)?;
    store::define(engine)?;
    engine.define("work", |_: &Request, arguments: Vec<u64>| {
        thread::sleep(WORK);
        arguments.len()
    })?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("scale", plan);
    connections(plan, &mut report)?;
    for transport in Transport::ALL {
        let Some(site) = Site::open(plan, &mut report, transport, define)? else { continue };
        beside_transfer(plan, &mut report, &site, "pull")?;
        beside_transfer(plan, &mut report, &site, "push")?;
        overload(plan, &mut report, &site)?;
    }
    report.finish()?;
    Ok(())
}

/// Two servers: one with one connection, the other with very many.
fn connections(plan: &Plan, report: &mut Report<'_>) -> Outcome {
    let files = raise_file_limit()?;
    let count = CONNECTIONS.min(files.saturating_sub(OTHER_FILES) as usize);
    if count < CONNECTIONS {
        report.skip(format!("tcp: {count} instead of {CONNECTIONS} connections: a process may open {files} files"));
    }
    let Some(lonely) = Site::open(plan, report, Transport::Tcp, define)? else { return Ok(()) };
    let Some(crowded) = Site::open(plan, report, Transport::Tcp, define)? else { return Ok(()) };
    let (alone, together) = (Caller::new(&lonely), Caller::new(&crowded));
    together.call()?;

    // The engine of the measured calls is one of them.
    let address: SocketAddr = crowded.address.trim_start_matches("tcp://").parse()?;
    let mut guests: Vec<Guest> = Vec::with_capacity(count);
    let mut each = Vec::new();
    for step in 1..=STEPS {
        let before = memory::resident(crowded.process.pid())?;
        let upto = (count - 1) * step / STEPS;
        let new = upto - guests.len();
        for _ in 0..new {
            guests.push(Guest::enter(address)?);
        }
        // An answer shows that the handshake is complete.
        guests.last_mut().ok_or("no connection")?.round_trip("empty")?;
        guests.iter_mut().try_for_each(Guest::tend)?;
        let grown = memory::resident(crowded.process.pid())?.saturating_sub(before);
        each.push(vec![grown as f64 / 1024.0 / new as f64]);
    }
    let figure = Figure::new("tcp: resident memory of an idle connection", Unit::Count("KiB"), &Series::new(each));
    report.add(figure.goal(Goal::AtMost(16.0)));

    let (warm_up, calls) = (plan.count(500), plan.count(2000));
    let (ours, raw) = interleave(
        plan,
        |samples| together.round_trips(warm_up, calls, samples),
        |samples| {
            // Servers probe the liveness of idle connections.
            guests.iter_mut().try_for_each(Guest::tend)?;
            alone.round_trips(warm_up, calls, samples)
        },
    )?;
    let name = format!("tcp: empty RPC to a server with {count} connections");
    report.add(Figure::new(name, Unit::Time, &ours).raw("1 connection", &raw).goal(Goal::TimeAtMost(1.2)));

    // All guests send first, and receive afterwards.
    let mut rounds = Vec::new();
    let mut times = Vec::new();
    for _ in 0..plan.rounds {
        let begun = Instant::now();
        for guest in &mut guests {
            guest.call("empty")?;
        }
        let answered = guests.iter_mut().map(|guest| guest.answer().is_ok()).filter(|&answered| answered).count();
        times.push(vec![begun.elapsed().as_nanos() as f64 / guests.len() as f64]);
        rounds.push(vec![(guests.len() - answered) as f64]);
    }
    let name = format!("tcp: calls of {} connections at once", guests.len());
    report.add(Figure::new(format!("{name}, unanswered"), Unit::Count("calls"), &Series::new(rounds)).goal(Goal::Zero));
    report.add(Figure::new(name, Unit::Rate, &Series::new(times)));
    Ok(())
}

/// Small calls while large transfers go sequentially over the same connection.
fn beside_transfer(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, verb: &str) -> Outcome {
    let size = if plan.quick { LARGE_QUICK } else { LARGE };
    let caller = Caller::new(site);
    site.client.procedure::<(usize, u8), ()>("prepare").on(&site.peer).call(&(size, 1))?;
    let exposed = site.client.expose(vec![1u8; size], BulkMode::ReadWrite)?;
    let transfer: Procedure<Bulk, usize> = site.client.procedure(verb);
    let count = plan.count(2000);
    let rounds = plan.rounds(|| {
        let mut moved = 0.0;
        let ours = plan.take(&mut |samples| {
            let begun = Instant::now();
            let pending = transfer.on(&site.peer).start(&exposed.bulk())?;
            while !pending.is_ready() {
                caller.round_trips(0, 1, samples)?;
            }
            pending.wait()?;
            moved = begun.elapsed().as_nanos() as f64;
            Ok(())
        })?;
        let raw = plan.take(&mut |samples| caller.round_trips(count / 10, count, samples))?;
        Ok((ours, raw, moved))
    })?;
    let ours = Series::new(rounds.iter().map(|round| round.0.clone()).collect());
    let raw = Series::new(rounds.iter().map(|round| round.1.clone()).collect());
    let moved = Series::new(rounds.iter().map(|round| vec![round.2]).collect());
    site.client.procedure::<u8, bool>("finish").on(&site.peer).call(&1)?;
    drop(exposed);
    let name = format!("{}: empty RPCs beside a {verb} of {}", site.name(), common::readable(size));
    report.add(Figure::new(name, Unit::Time, &ours).raw("without it", &raw).goal(Goal::TailAtMost(3.0)));
    let name = format!("{}: the {verb} beside them", site.name());
    report.add(Figure::new(name, Unit::Bytes(size), &moved));
    Ok(())
}

/// The outcomes of the calls of a burst.
#[derive(Default)]
struct Outcomes {
    served: usize,
    refused: usize,
    lost: usize,
}

impl Outcomes {
    fn note(&mut self, outcome: calomel::Result<usize>) {
        match outcome {
            Ok(_) => self.served += 1,
            Err(Error::Busy { .. }) => self.refused += 1,
            Err(error) => {
                if self.lost == 0 {
                    eprintln!("  a call was neither served nor refused: {error}");
                }
                self.lost += 1;
            }
        }
    }
}

/// Starts calls without pause, and waits for them all.
fn burst_of(calls: usize, work: &Procedure<Vec<u64>, usize>, site: &Site<'_>, arguments: &Vec<u64>) -> Outcomes {
    let mut outcomes = Outcomes::default();
    let mut flight: VecDeque<Pending<usize>> = VecDeque::new();
    for _ in 0..calls {
        match work.on(&site.peer).start(arguments) {
            Ok(pending) => flight.push_back(pending),
            Err(error) => outcomes.note(Err(error)),
        }
        while flight.front().is_some_and(Pending::is_ready)
            && let Some(pending) = flight.pop_front()
        {
            outcomes.note(pending.wait());
        }
    }
    flight.into_iter().for_each(|pending| outcomes.note(pending.wait()));
    outcomes
}

/// Many more calls than the handlers can serve, and the throughput and memory afterwards.
fn overload(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    let caller = Caller::new(site);
    let work: Procedure<Vec<u64>, usize> = site.client.procedure("work");
    let arguments = vec![u64::MAX >> 8; ARGUMENTS / 8];
    let burst = if plan.quick { BURST_QUICK } else { BURST };
    let calls = (burst.as_micros() / WORK.as_micros()) as usize * HANDLERS * EXCESS;
    let rated = plan.count(RATED);
    timed(0, 100, &mut Vec::new(), || caller.call())?;
    memory::forget_peak(site.server_pid())?;
    let before = memory::resident(site.server_pid())?;
    let rounds = plan.rounds(|| {
        let alone = plan.take(&mut |samples| caller.sliding(WINDOW, rated, samples))?;
        let begun = Instant::now();
        let outcomes = burst_of(calls, &work, site, &arguments);
        let served = begun.elapsed().as_nanos() as f64 / outcomes.served.max(1) as f64;
        let grown = memory::peak(site.server_pid())?.saturating_sub(before) as f64 / f64::from(1 << 20);
        let after = plan.take(&mut |samples| caller.sliding(WINDOW, rated, samples))?;
        Ok((alone, after, [outcomes.lost as f64, outcomes.refused as f64, served, grown]))
    })?;
    let alone = Series::new(rounds.iter().map(|round| round.0.clone()).collect());
    let after = Series::new(rounds.iter().map(|round| round.1.clone()).collect());
    let [lost, refused, served, grown] =
        std::array::from_fn(|which| Series::new(rounds.iter().map(|round| vec![round.2[which]]).collect()));
    let name = |what: &str| format!("{}: overload of {calls} calls, {what}", site.name());
    report.add(Figure::new(name("neither served nor refused"), Unit::Count("calls"), &lost).goal(Goal::Zero));
    report.add(Figure::new(name("refused as busy"), Unit::Count("calls"), &refused));
    report.add(Figure::new(name("served"), Unit::Rate, &served));
    let memory = Figure::new(name("server's peak of memory"), Unit::Count("MiB"), &grown);
    report.add(if site.local.is_some() { memory } else { memory.goal(Goal::AtMost(BOUND_MIB)) });
    let figure = Figure::new(name("empty RPCs afterwards"), Unit::Rate, &after).raw("before", &alone);
    report.add(figure.goal(Goal::SpeedAtLeast(0.9)));
    Ok(())
}
