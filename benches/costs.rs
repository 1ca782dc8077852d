//! Benchmark of what an operation costs besides time: system calls, sleeps and page faults of both processes together.
//!
//! `ci/instructions` counts the instructions.

mod common;

use std::{hint::black_box, thread, time::Duration};

use calomel::{Bulk, BulkMode, Engine, Procedure, Request};
use common::{
    Outcome, Plan, Site, Transport,
    caller::{self, Caller},
    cpu,
    record::{Record, record},
    report::{Figure, Report, Unit},
    stats::Series,
    store,
    system_calls::{self, Counter},
};

/// The pause before a call of a parked engine; long enough for all threads to sleep.
const PAUSE: Duration = Duration::from_millis(20);

fn main() -> Outcome {
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    caller::define(engine)?;
    store::define(engine)?;
    engine.define("list", |_: &Request, list: Vec<u8>| black_box(list).len())?;
    engine.define_borrowed::<str, _, _>("text", |_: &Request, text: &str| black_box(text).len())?;
    engine.define("record", |_: &Request, record: Record| record)?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("costs", plan);
    let unavailable = system_calls::unavailable();
    if let Some(reason) = &unavailable {
        report.skip(format!("system calls: skipped: {reason}"));
    }
    let with_calls = unavailable.is_none();
    for transport in [Transport::Tcp, Transport::Shm] {
        let Some(site) = Site::open(plan, &mut report, transport, define)? else { continue };
        let mut costs = Costs { plan, report: &mut report, site: &site, with_calls };
        calls(&mut costs)?;
        pulls(&mut costs)?;
    }
    report.finish()?;
    Ok(())
}

struct Costs<'a, 'r> {
    plan: &'a Plan,
    report: &'a mut Report<'r>,
    site: &'a Site<'a>,
    with_calls: bool,
}

impl Costs<'_, '_> {
    /// The averages of `times` operations, each round after as many that are not counted.
    fn count(&mut self, what: &str, times: usize, mut operation: impl FnMut() -> calomel::Result<()>) -> Outcome {
        let Costs { plan, site, with_calls, .. } = *self;
        let times = plan.count(times);
        let mut pids = vec![std::process::id()];
        pids.extend(Some(site.server_pid()).filter(|_| site.local.is_none()));
        let mut repeat = |times| (0..times).try_for_each(|_| operation());
        let average = |count: u64| vec![count as f64 / times as f64];
        let used = plan.rounds(|| {
            repeat(times)?;
            let before = cpu::so_far(&pids)?;
            repeat(times)?;
            Ok(cpu::so_far(&pids)?.since(&before))
        })?;
        let mut add = |word: &str, rounds: Vec<Vec<f64>>| {
            self.report.add(Figure::new(format!("{}: {what}, {word}", site.name()), Unit::Count(""), &Series::new(rounds)));
        };
        add("sleeps", used.iter().map(|used| average(used.wake_ups)).collect());
        add("page faults", used.iter().map(|used| average(used.faults)).collect());
        if !with_calls {
            return Ok(());
        }
        // Rounds of their own, since perf makes this process sleep. It takes a while to start.
        let rounds = if plan.quick { 1 } else { plan.rounds };
        let calls = (0..rounds).map(|_| {
            let counter = Counter::start(&pids)?;
            repeat(times)?;
            counter.stop()
        });
        let calls = calls.collect::<Outcome<Vec<_>>>()?;
        add("system calls", calls.iter().map(|calls| average(calls.all.saturating_sub(calls.spinning))).collect());
        add("system calls that spin", calls.iter().map(|calls| average(calls.spinning)).collect());
        Ok(())
    }
}

fn calls(costs: &mut Costs<'_, '_>) -> Outcome {
    let site = costs.site;
    let caller = Caller::new(site);
    costs.count("empty RPC", 5000, || caller.call())?;

    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let empty = site.client.procedure::<(), ()>("empty").on(&site.peer);
    costs.count("empty RPC, awaited", 5000, || runtime.block_on(async { empty.start(&())?.await }))?;

    let echo = site.client.procedure::<Record, Record>("record").on(&site.peer);
    let record = record();
    costs.count("record with enums and lists, there and back", 2000, || echo.call(&record).map(drop))?;

    let take = site.client.procedure::<Vec<u8>, usize>("list").on(&site.peer);
    let list = vec![1u8; 64 << 10];
    costs.count("RPC with 64 KiB as Vec<u8>", 1000, || take.call(&list).map(drop))?;

    let take = site.client.procedure::<str, usize>("text").on(&site.peer);
    let text = "a".repeat(2 << 20);
    costs.count("RPC with 2 MiB of bytes", 100, || take.call(&text).map(drop))?;

    costs.count("empty RPC every 20 ms, with the pause", 50, || {
        thread::sleep(PAUSE);
        caller.call()
    })
}

fn pulls(costs: &mut Costs<'_, '_>) -> Outcome {
    let site = costs.site;
    let prepare: Procedure<(usize, u8), ()> = site.client.procedure("prepare");
    let finish: Procedure<u8, bool> = site.client.procedure("finish");
    let pull: Procedure<Bulk, usize> = site.client.procedure("pull");
    for (size, what, times) in [(4 << 10, "RPC + pull of 4 KiB", 2000), (1 << 20, "RPC + pull of 1 MiB", 200)] {
        // Memory that the server may also write is not sent inside the call.
        let exposed = site.client.expose(vec![1u8; size], BulkMode::ReadWrite)?;
        let bulk = exposed.bulk();
        prepare.on(&site.peer).call(&(size, 7))?;
        costs.count(what, times, || pull.on(&site.peer).call(&bulk).map(drop))?;
        if !finish.on(&site.peer).call(&1)? {
            return Err(format!("a pull of {size} bytes left wrong bytes").into());
        }
    }
    Ok(())
}
