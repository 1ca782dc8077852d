//! How long an empty RPC takes, how many go through a second, and what an idle engine costs.
//!
//! Over tcp each figure stands beside the same exchange over a bare TCP connection between the same two processes.

mod common;

use std::{collections::VecDeque, process, thread, time::Duration};

use calomel::{Endpoint, Engine, Pending, Procedure, Request};
use common::{
    Outcome, Plan, Server, alone, cpu, interleave, raw,
    report::{Goal, Report, Unit},
    stats::{Pace, Series},
    timed,
};

/// Bytes of a raw message: about what an empty RPC's frame takes.
const MESSAGE: usize = 64;
/// Calls in flight, and how many calls a round makes.
const WINDOWS: [(usize, usize); 3] = [(1, 4_000), (8, 20_000), (64, 40_000)];
/// The pause before a call of the parked kind; long enough for everything to be asleep.
const PAUSE: Duration = Duration::from_millis(20);

/// So long after the last call an engine has let its last timers run out: a connection on which something has just come is
/// looked after once more, halfway to the 10 s after which a silent peer is given up.
const FORGOTTEN: Duration = Duration::from_secs(6);

fn main() -> Outcome {
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    engine.define("empty", |_: &Request, (): ()| ())?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("rpc", plan);

    let server = Server::start(plan)?;
    let client = Engine::client("tcp")?;
    tcp(plan, &mut report, &server, &Caller::new(&client, &server.address)?)?;

    // Both engines in this process.
    let neighbour = Engine::server(format!("loop://bench-rpc-{}", process::id()))?;
    define(&neighbour)?;
    let local = Engine::client("loop")?;
    in_process(plan, &mut report, &Caller::new(&local, &neighbour.address().to_string())?)?;

    idle_seconds(plan, &mut report, &[("idle client and loop engines", process::id()), ("idle tcp server", server.pid())])?;
    report.finish()?;
    Ok(())
}

fn tcp(plan: &Plan, report: &mut Report<'_>, server: &Server<'_>, caller: &Caller) -> Outcome {
    let mut raw = raw::Connection::open(server.raw)?;

    let (warm_up, count) = (plan.count(500), plan.count(3000));
    let (ours, limit) = interleave(
        plan,
        |samples| caller.round_trips(warm_up, count, samples),
        |samples| Ok(raw.ping_pong(MESSAGE, warm_up, count, samples)?),
    )?;
    report.add("tcp: empty RPC", Unit::Time, &ours, Some(&limit), Goal::TimeAtMost(2.0));

    let count = plan.count(25);
    let (ours, limit) = interleave(
        plan,
        |samples| caller.rare_round_trips(count, samples),
        |samples| Ok(raw.ping_pong_parked(MESSAGE, PAUSE, count, samples)?),
    )?;
    report.add("tcp: empty RPC every 20 ms", Unit::Time, &ours, Some(&limit), Goal::None);

    for (window, count) in WINDOWS {
        let count = plan.count(count);
        let (ours, limit) = interleave(
            plan,
            |samples| caller.sliding(window, count, samples),
            |samples| Ok(raw.pipelined(MESSAGE, window, count, &mut Pace::new(count / 10, samples))?),
        )?;
        report.add(format!("tcp: {window} in flight"), Unit::Rate, &ours, Some(&limit), Goal::None);
    }
    let (window, count) = (WINDOWS[2].0, plan.count(WINDOWS[2].1));
    let (ours, limit) = interleave(
        plan,
        |samples| caller.any_of(window, count, samples),
        |samples| Ok(raw.pipelined(MESSAGE, window, count, &mut Pace::new(count / 10, samples))?),
    )?;
    report.add(format!("tcp: {window} in flight, wait_any"), Unit::Rate, &ours, Some(&limit), Goal::None);
    Ok(())
}

fn in_process(plan: &Plan, report: &mut Report<'_>, caller: &Caller) -> Outcome {
    let (warm_up, count) = (plan.count(500), plan.count(3000));
    let ours = alone(plan, |samples| caller.round_trips(warm_up, count, samples))?;
    report.add("loop: empty RPC", Unit::Time, &ours, None, Goal::None);

    let ours = alone(plan, |samples| caller.rare_round_trips(plan.count(25), samples))?;
    report.add("loop: empty RPC every 20 ms", Unit::Time, &ours, None, Goal::None);

    for (window, count) in WINDOWS {
        let ours = alone(plan, |samples| caller.sliding(window, plan.count(count), samples))?;
        report.add(format!("loop: {window} in flight"), Unit::Rate, &ours, None, Goal::None);
    }
    let (window, count) = WINDOWS[2];
    let ours = alone(plan, |samples| caller.any_of(window, plan.count(count), samples))?;
    report.add(format!("loop: {window} in flight, wait_any"), Unit::Rate, &ours, None, Goal::None);
    Ok(())
}

/// Calls the server's empty procedure in several manners.
struct Caller {
    empty: Procedure<(), ()>,
    server: Endpoint,
}

impl Caller {
    fn new(engine: &Engine, address: &str) -> calomel::Result<Caller> {
        Ok(Caller { empty: engine.procedure("empty"), server: engine.lookup(address)? })
    }

    fn round_trips(&self, warm_up: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        timed(warm_up, count, samples, || self.empty.on(&self.server).call(&()))?;
        Ok(())
    }

    fn rare_round_trips(&self, count: usize, samples: &mut Vec<f64>) -> Outcome {
        for _ in 0..count {
            thread::sleep(PAUSE);
            self.round_trips(0, 1, samples)?;
        }
        Ok(())
    }

    /// Keeps `window` calls on their way and waits for the oldest.
    fn sliding(&self, window: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let mut flight = VecDeque::with_capacity(window);
        rate(window, count, samples, |starts| {
            for _ in 0..starts {
                flight.push_back(self.empty.on(&self.server).start(&())?);
            }
            flight.pop_front().expect("a call is in flight").wait()
        })
    }

    /// Keeps `window` calls on their way and waits for whichever is answered first.
    fn any_of(&self, window: usize, count: usize, samples: &mut Vec<f64>) -> Outcome {
        let mut flight = Vec::with_capacity(window);
        rate(window, count, samples, |starts| {
            for _ in 0..starts {
                flight.push(self.empty.on(&self.server).start(&())?);
            }
            Pending::wait_any(&mut flight).1
        })
    }
}

/// Has `count` calls made; `step` starts as many as it is told and waits for one.
fn rate(window: usize, count: usize, samples: &mut Vec<f64>, mut step: impl FnMut(usize) -> calomel::Result<()>) -> Outcome {
    let mut pace = Pace::new(count / 10, samples);
    let mut started = 0;
    for done in 0..count {
        let starts = (done + window).min(count) - started;
        step(starts)?;
        started += starts;
        pace.reached(done + 1);
    }
    Ok(())
}

/// Seconds in which nobody calls anything, with connections open.
fn idle_seconds(plan: &Plan, report: &mut Report<'_>, processes: &[(&str, u32)]) -> Outcome {
    thread::sleep(FORGOTTEN);
    let pids: Vec<u32> = processes.iter().map(|&(_, pid)| pid).collect();
    let seconds = (0..if plan.quick { 1 } else { 5 }).map(|_| cpu::second(&pids)).collect::<Result<Vec<_>, _>>()?;
    for (at, (name, _)) in processes.iter().enumerate() {
        let series =
            |value: fn(&cpu::Usage) -> u64| Series::new(seconds.iter().map(|second| vec![value(&second[at]) as f64]).collect());
        let ticks = series(|usage| usage.ticks);
        report.add(format!("{name}, CPU in 1 s"), Unit::Count("ticks"), &ticks, None, Goal::Zero);
        let cpu = series(|usage| usage.cpu_ns);
        report.add(format!("{name}, CPU in 1 s"), Unit::Time, &cpu, None, Goal::None);
        let wake_ups = series(|usage| usage.wake_ups);
        report.add(format!("{name}, sleeps in 1 s"), Unit::Count("switches"), &wake_ups, None, Goal::Zero);
    }
    Ok(())
}
