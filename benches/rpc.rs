//! Benchmark of RPCs: latency of empty, rare and blocked calls and of calls with arguments, and calls per second.
//!
//! The reference of each figure is the same exchange over a bare TCP connection or bare shared memory between the same two
//! processes.

mod common;

use std::{hint::black_box, thread, time::Duration};

use calomel::{Endpoint, Engine, Procedure, Request};
use common::{
    Outcome, Plan, Site, Transport, alone,
    caller::{self, Caller},
    interleave, interleave_all,
    raw::shared::OneCore,
    readable,
    report::{Figure, Goal, Report, Unit},
    stats::{Pace, Series},
    timed,
};

/// Bytes of a raw message over tcp: about the frame of an empty RPC.
const MESSAGE: usize = 64;
/// The pause before a call of a parked engine; long enough for all threads to sleep.
const PAUSE: Duration = Duration::from_millis(20);
/// Calls in a burst, and the pause between two of them.
const BURST: usize = 200;
const BETWEEN_BURSTS: Duration = Duration::from_millis(5);
/// Calls in flight, and calls in a round.
const WINDOWS: [(usize, usize); 3] = [(1, 4_000), (8, 20_000), (64, 60_000)];
/// How long a handler blocks, and the number of concurrent callers.
const BLOCKED: Duration = Duration::from_millis(1);
const CALLERS: usize = 8;
/// Bytes of arguments, and calls in a round.
const SIZES: [(usize, usize); 11] = [
    (64, 2000),
    (1 << 10, 2000),
    (4 << 10, 1000),
    (16 << 10, 600),
    (64 << 10, 300),
    (256 << 10, 150),
    (1 << 20, 60),
    (2 << 20, 40),
    (8 << 20, 20),
    (32 << 20, 10),
    (LARGEST, 5),
];
/// The most bytes that fit in the largest message by default, with their length.
const LARGEST: usize = (64 << 20) - 4;

fn main() -> Outcome {
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    caller::define(engine)?;
    engine.define("block", |_: &Request, (): ()| thread::sleep(BLOCKED))?;
    engine.define_borrowed::<[u8], _, _>("take", |_: &Request, bytes: &[u8]| black_box(bytes).len())?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("rpc", plan);
    for transport in Transport::ALL {
        let Some(site) = Site::open(plan, &mut report, transport, define)? else { continue };
        let caller = Caller::new(&site);
        empty(plan, &mut report, &site, &caller)?;
        parked(plan, &mut report, &site, &caller)?;
        in_bursts(plan, &mut report, &site, &caller)?;
        blocked(plan, &mut report, &site, &caller)?;
        in_flight(plan, &mut report, &site, &caller)?;
        with_arguments(plan, &mut report, &site)?;
    }
    for (transport, goal) in [(Transport::Tcp, 22e3), (Transport::Shm, 11e3)] {
        on_one_core(plan, &mut report, transport, goal)?;
    }
    report.finish()?;
    Ok(())
}

fn empty(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let (warm_up, count) = (plan.count(500), plan.count(3000));
    let mut raw = site.raw.borrow_mut();
    let (ours, limit) = interleave(
        plan,
        |samples| caller.round_trips(warm_up, count, samples),
        |samples| match site.transport {
            Transport::Tcp => Ok(raw.ping_pong(MESSAGE, warm_up, count, samples)?),
            // A single one is shorter than reading the clock twice.
            _ => Ok(raw.lines(1, count * 10, &mut Pace::new(count, samples))?),
        },
    )?;
    let (what, goal) = match site.transport {
        Transport::Tcp => ("TCP ping-pong", 1.2),
        _ => ("cache line", 5.0),
    };
    let name = format!("{}: empty RPC", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw(what, &limit).goal(Goal::TimeAtMost(goal)));
    Ok(())
}

/// Both processes, with all their threads, share a core.
fn on_one_core(plan: &Plan, report: &mut Report<'_>, transport: Transport, goal: f64) -> Outcome {
    let _kept = OneCore::keep()?;
    let Some(site) = Site::open(plan, report, transport, define)? else { return Ok(()) };
    let caller = Caller::new(&site);
    let (warm_up, count) = (plan.count(500), plan.count(3000));
    let ours = alone(plan, |samples| caller.round_trips(warm_up, count, samples))?;
    let name = format!("{}: empty RPC, both processes on one core", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).goal(Goal::AtMost(goal)));
    Ok(())
}

fn parked(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let count = plan.count(15);
    let mut raw = site.raw.borrow_mut();
    let (ours, limit) = interleave(
        plan,
        |samples| caller.rare_round_trips(PAUSE, count, samples),
        |samples| match site.transport {
            Transport::Tcp => Ok(raw.ping_pong_parked(MESSAGE, PAUSE, count, samples)?),
            _ => Ok(raw.doorbells(PAUSE, count, samples)?),
        },
    )?;
    let what = if site.transport == Transport::Tcp { "TCP + epoll" } else { "eventfd + epoll" };
    let name = format!("{}: empty RPC every 20 ms", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw(what, &limit).goal(Goal::TimeAtMost(1.2)));
    Ok(())
}

/// As a program calls that computes in between: the kernel often wakes both sides on one processor.
fn in_bursts(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let count = plan.count(40);
    let (ours, steady) = interleave(
        plan,
        |samples| caller.bursts(BETWEEN_BURSTS, BURST, count, samples),
        |samples| caller.round_trips(500, count * BURST, samples),
    )?;
    let name = format!("{}: empty RPC, in bursts of {BURST}, 5 ms apart", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw("without pauses", &steady).goal(Goal::TimeAtMost(2.0)));
    Ok(())
}

/// Several concurrent callers of a handler that blocks, and empty calls beside them.
fn blocked(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let count = plan.count(50);
    let block: Procedure<(), ()> = site.client.procedure("block");
    let peer = &site.peer;
    let crowd = |count: usize| -> calomel::Result<Vec<f64>> {
        thread::scope(|scope| {
            let one = || {
                let mut samples = Vec::new();
                timed(3, count, &mut samples, || block.on(peer).call(&()))?;
                Ok(samples)
            };
            let threads: Vec<_> = (0..CALLERS).map(|_| scope.spawn(one)).collect();
            let lists = threads.into_iter().map(|thread| thread.join().expect("no caller panics"));
            Ok(lists.collect::<calomel::Result<Vec<_>>>()?.concat())
        })
    };
    let ours = alone(plan, |samples| {
        samples.extend(crowd(count)?);
        Ok(())
    })?;
    let name = format!("{}: RPC that blocks 1 ms, {CALLERS} callers at once", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).goal(Goal::AtMost(1.3e6)));

    let (beside, limit) = interleave(
        plan,
        |samples| {
            thread::scope(|scope| {
                let crowd = scope.spawn(|| crowd(count));
                while !crowd.is_finished() {
                    caller.round_trips(0, 1, samples)?;
                    thread::sleep(BLOCKED / 5);
                }
                crowd.join().expect("no caller panics")?;
                Ok(())
            })
        },
        |samples| caller.rare_round_trips(BLOCKED / 5, count, samples),
    )?;
    let name = format!("{}: empty RPC beside those, every 0.2 ms", site.name());
    report.add(Figure::new(name, Unit::Time, &beside).raw("without them", &limit));
    Ok(())
}

fn in_flight(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let mut raw = site.raw.borrow_mut();
    let mut limit = |window: usize, count: usize, samples: &mut Vec<f64>| match site.transport {
        Transport::Tcp => raw.pipelined(MESSAGE, window, count, &mut Pace::new(count / 10, samples)),
        _ => raw.lines(window, count, &mut Pace::new(count / 10, samples)),
    };
    let what = if site.transport == Transport::Tcp { "TCP, as many" } else { "cache lines, as many" };
    let goal = if site.transport == Transport::Tcp { 1e6 } else { 4e6 };
    for (window, count) in WINDOWS {
        let count = plan.count(count);
        let (ours, raw) =
            interleave(plan, |samples| caller.sliding(window, count, samples), |samples| Ok(limit(window, count, samples)?))?;
        let name = format!("{}: {window} in flight", site.name());
        let goal = if window == 64 { Goal::PerSecond(goal) } else { Goal::None };
        report.add(Figure::new(name, Unit::Rate, &ours).raw(what, &raw).goal(goal));
    }
    let (window, count) = (WINDOWS[2].0, plan.count(WINDOWS[2].1));
    let ours = alone(plan, |samples| caller.any_of(window, count, samples))?;
    report.add(Figure::new(format!("{}: {window} in flight, wait_any", site.name()), Unit::Rate, &ours));
    Ok(())
}

fn with_arguments(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    for (size, count) in SIZES {
        let count = plan.count(count);
        let warm_up = count.div_ceil(10);
        let mut call = carrying(&site.client, &site.peer, size);
        let mut ours = |samples: &mut Vec<f64>| timed(warm_up, count, samples, &mut call);
        let source = vec![1u8; size];
        let (ours, (what, limit)) = match site.transport {
            Transport::Tcp => {
                let mut raw = site.raw.borrow_mut();
                let (ours, limit) = interleave(plan, ours, |samples| Ok(raw.stream_in(&source, warm_up, count, samples)?))?;
                (ours, ("TCP stream, spinning", limit))
            }
            _ => {
                let mut ring = |samples: &mut Vec<f64>| Ok(site.raw.borrow_mut().ring_in(&source, warm_up, count, samples)?);
                let mut vm = |samples: &mut Vec<f64>| Ok(site.raw.borrow_mut().vm_in(&source, warm_up, count, samples)?);
                let [ours, ring, vm] = interleave_all(plan, [&mut ours, &mut ring, &mut vm])?;
                (ours, Series::faster(("copy through a ring", ring), ("process_vm_readv", vm)))
            }
        };
        let name = format!("{}: RPC with {}", site.name(), readable(size));
        let figure = Figure::new(name, Unit::Time, &ours).raw(what, &limit).goal(Goal::TimeAtMost(1.3));
        report.add(figure.plotted(site.name(), "call", size));
    }
    Ok(())
}

/// A call with `size` bytes of arguments.
fn carrying(client: &Engine, peer: &Endpoint, size: usize) -> impl FnMut() -> Outcome {
    let take: Procedure<[u8], usize> = client.procedure("take");
    let (peer, bytes) = (peer.clone(), vec![1; size]);
    move || {
        let taken = take.on(&peer).call(&bytes)?;
        if taken == size { Ok(()) } else { Err(format!("{taken} of {size} bytes arrived").into()) }
    }
}
