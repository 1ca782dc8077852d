//! Benchmark of RPCs as programs make them: lists and records as arguments, many threads, async tasks, async handlers.
//!
//! The reference of each figure is the plainest call of calomel that does as much.

mod common;

use std::{
    future::Future,
    hint::black_box,
    pin::Pin,
    thread,
    time::{Duration, Instant},
};

use calomel::{Bulk, BulkMode, Call, Engine, Procedure, Request, Responder};
use common::{
    Outcome, Plan, Site, Transport, alone,
    caller::{self, Caller},
    interleave,
    record::{Particle, Record, particle, record},
    report::{Figure, Goal, Report, Unit},
    timed,
};
use futures_util::future::join_all;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{runtime::Runtime, sync::oneshot, task::JoinSet};

/// Bytes of a list, in memory.
const LIST: usize = 64 << 10;
/// Bytes of a list that is sent from where it lies.
const LONG_LIST: usize = 4 << 20;
/// Numbers of concurrent callers of one process, threads or tasks.
const CROWDS: [usize; 3] = [2, 4, 64];
const TASKS: usize = 64;
const BETWEEN_TASKS: Duration = Duration::from_micros(100);

fn main() -> Outcome {
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    caller::define(engine)?;
    engine.define_async("empty async", |_: Request, (): ()| async {})?;
    engine.define("text", |_: &Request, text: String| black_box(text).len())?;
    define_list::<u8>(engine)?;
    define_list::<i8>(engine)?;
    define_list::<f32>(engine)?;
    define_list::<f64>(engine)?;
    define_list::<u64>(engine)?;
    define_list::<[f64; 3]>(engine)?;
    define_list::<Particle>(engine)?;
    engine.define("record", |_: &Request, record: Record| record)?;
    engine.define("give", |_: &Request, len: usize| vec![1u8; len])?;
    engine.define("put", |_: &Request, pair: (String, Vec<u8>)| black_box(pair).1.len())?;
    let (later, owed) = std::sync::mpsc::channel::<Responder<()>>();
    // Ends when the engine, and with it the handler, is gone.
    thread::spawn(move || owed.iter().for_each(|responder| responder.respond(&()).expect("its caller waits")));
    engine.define_deferred("answered elsewhere", move |responder, (): ()| later.send(responder).expect("that thread runs"))?;
    let pool = engine.buffer_pool(LIST, TASKS);
    engine.define("pull", move |request: &Request, remote: Bulk| {
        let mut buffer = pool.take_timeout(Duration::from_secs(10)).expect("as many as there are callers");
        remote.on(request.endpoint()).pull_into(&mut buffer[..]).expect("it is exposed");
    })?;
    define_relay(engine)
}

/// A service that asks another one, of the same process, for each of its answers.
fn define_relay(engine: &Engine) -> calomel::Result<()> {
    let address = engine.address().to_string();
    let transport = Transport::ALL.into_iter().find(|transport| address.starts_with(transport.name()));
    let other = transport.expect("the server listens").server()?;
    caller::define(&other)?;
    let to_other = engine.lookup(other.address())?;
    let empty = engine.procedure::<(), ()>("empty").on(&to_other);
    engine.define("blocking relay", move |_: &Request, (): ()| empty.call(&()).expect("it answers"))?;
    engine.define_async("relay", move |request: Request, (): ()| {
        let _kept = &other;
        let pending = request.engine().procedure::<(), ()>("empty").on(&to_other).start(&());
        async move { pending.expect("it is open").await.expect("it answers") }
    })?;
    Ok(())
}

fn list_name<T>() -> String {
    let of = std::any::type_name::<T>();
    format!("Vec<{}>", of.rsplit("::").next().unwrap_or(of))
}

fn define_list<T: DeserializeOwned + 'static>(engine: &Engine) -> calomel::Result<()> {
    engine.define(&list_name::<T>(), |_: &Request, list: Vec<T>| black_box(list).len())?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("programs", plan).beside("plain call");
    for transport in Transport::ALL {
        let Some(site) = Site::open(plan, &mut report, transport, define)? else { continue };
        let caller = Caller::new(&site);
        list(plan, &mut report, &site, Goal::TimeAtMost(1.5), (0..LIST).map(|n| n as u8).collect::<Vec<u8>>())?;
        list(plan, &mut report, &site, Goal::TimeAtMost(1.5), (0..LIST).map(|n| n as i8).collect::<Vec<i8>>())?;
        list(plan, &mut report, &site, Goal::TimeAtMost(1.5), (0..LIST / 4).map(|n| n as f32).collect::<Vec<f32>>())?;
        list(plan, &mut report, &site, Goal::TimeAtMost(1.5), (0..LIST / 8).map(|n| n as f64).collect::<Vec<f64>>())?;
        list(plan, &mut report, &site, Goal::TimeAtMost(2.0), (0..LIST as u64 / 8).collect::<Vec<u64>>())?;
        hashes(plan, &mut report, &site)?;
        list(plan, &mut report, &site, Goal::TimeAtMost(1.5), vec![[0.5, 1.0, 2.0]; LIST / 24])?;
        list(plan, &mut report, &site, Goal::None, (0..LIST as u64 / 64).map(particle).collect::<Vec<Particle>>())?;
        result(plan, &mut report, &site, LIST, 300)?;
        result(plan, &mut report, &site, LONG_LIST, 60)?;
        key_and_value(plan, &mut report, &site)?;
        records(plan, &mut report, &site, &caller)?;
        threads(plan, &mut report, &site, &caller)?;
        tasks(plan, &mut report, &site, &caller)?;
    }
    report.finish()?;
    Ok(())
}

fn list<T: Serialize>(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, goal: Goal, list: Vec<T>) -> Outcome {
    lists(plan, report, site, goal, &list_name::<T>(), &[list])
}

/// Numbers whose length on the wire can't be foreseen: nine bytes or ten. Other ones in each call.
fn hashes(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    let mut last = 1u64;
    let mut hash = || {
        last = last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        last ^ (last >> 32)
    };
    let hashes: [Vec<u64>; 16] = std::array::from_fn(|_| (0..LIST / 8).map(|_| hash()).collect());
    lists(plan, report, site, Goal::TimeAtMost(2.0), "Vec<u64> of hashes", &hashes)
}

/// One of these lists after the other, beside a `String` of as many bytes as each takes in memory.
fn lists<T: Serialize>(
    plan: &Plan,
    report: &mut Report<'_>,
    site: &Site<'_>,
    goal: Goal,
    name: &str,
    lists: &[Vec<T>],
) -> Outcome {
    let count = plan.count(300);
    let take: Procedure<Vec<T>, usize> = site.client.procedure(&list_name::<T>());
    let text: Procedure<str, usize> = site.client.procedure("text");
    let (take, text) = (take.on(&site.peer), text.on(&site.peer));
    let string = "a".repeat(LIST);
    let mut lists = lists.iter().cycle();
    let mut next = || lists.next().expect("there is a list");
    let (ours, plain) = interleave(
        plan,
        |samples| Ok(timed(count / 10, count, samples, || take.call(next()).map(drop))?),
        |samples| Ok(timed(count / 10, count, samples, || text.call(&string).map(drop))?),
    )?;
    let name = format!("{}: RPC with 64 KiB as {name}", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw("a String", &plain).goal(goal));
    Ok(())
}

/// Beside a list of as many bytes in the arguments.
fn result(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, len: usize, calls: usize) -> Outcome {
    let count = plan.count(calls);
    let list: Vec<u8> = (0..len).map(|n| n as u8).collect();
    let give: Procedure<usize, Vec<u8>> = site.client.procedure("give");
    let take: Procedure<Vec<u8>, usize> = site.client.procedure(&list_name::<u8>());
    let (give, take) = (give.on(&site.peer), take.on(&site.peer));
    let (ours, plain) = interleave(
        plan,
        |samples| Ok(timed(count / 10, count, samples, || give.call(&len).map(drop))?),
        |samples| Ok(timed(count / 10, count, samples, || take.call(&list).map(drop))?),
    )?;
    let size = if len == LIST { "64 KiB" } else { "4 MiB" };
    let name = format!("{}: RPC that answers with {size} as Vec<u8>", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw("as arguments", &plain).goal(Goal::TimeAtMost(1.5)));
    Ok(())
}

/// As stores take them, beside the value alone.
fn key_and_value(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    let count = plan.count(60);
    let pair = ("users/17/picture".to_owned(), vec![7u8; LONG_LIST]);
    let put: Procedure<(String, Vec<u8>), usize> = site.client.procedure("put");
    let take: Procedure<Vec<u8>, usize> = site.client.procedure(&list_name::<u8>());
    let (put, take) = (put.on(&site.peer), take.on(&site.peer));
    let (ours, plain) = interleave(
        plan,
        |samples| Ok(timed(count / 10, count, samples, || put.call(&pair).map(drop))?),
        |samples| Ok(timed(count / 10, count, samples, || take.call(&pair.1).map(drop))?),
    )?;
    let name = format!("{}: RPC with 4 MiB as (String, Vec<u8>)", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw("the Vec<u8> alone", &plain).goal(Goal::TimeAtMost(2.0)));
    Ok(())
}

fn records(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let (warm_up, count) = (plan.count(500), plan.count(3000));
    let echo: Procedure<Record, Record> = site.client.procedure("record");
    let (echo, record) = (echo.on(&site.peer), record());
    let (ours, plain) = interleave(
        plan,
        |samples| Ok(timed(warm_up, count, samples, || echo.call(&record).map(drop))?),
        |samples| caller.round_trips(warm_up, count, samples),
    )?;
    let name = format!("{}: record with enums and lists, there and back", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw("an empty RPC", &plain).goal(Goal::TimeAtMost(1.3)));
    Ok(())
}

/// Calls per second that a transport should reach, by blocking threads and by tasks.
fn goals(transport: Transport) -> (f64, f64) {
    if transport == Transport::Tcp { (110e3, 600e3) } else { (220e3, 1.5e6) }
}

/// The average time of a call, over `count` of them that `crowd` callers share.
fn rate(count: usize, crowd: usize, samples: &mut Vec<f64>, run: impl FnOnce(usize) -> Outcome) -> Outcome {
    let each = count.div_ceil(crowd);
    let begun = Instant::now();
    run(each)?;
    samples.push(begun.elapsed().as_nanos() as f64 / (each * crowd) as f64);
    Ok(())
}

fn threads(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let count = plan.count(20_000);
    for crowd in CROWDS {
        let many = |each: usize| -> Outcome {
            thread::scope(|scope| {
                let one = || (0..each).try_for_each(|_| caller.call());
                let threads: Vec<_> = (0..crowd).map(|_| scope.spawn(one)).collect();
                threads.into_iter().try_for_each(|thread| thread.join().expect("no caller panics"))
            })?;
            Ok(())
        };
        let (ours, plain) = interleave(
            plan,
            |samples| rate(count, crowd, samples, many),
            |samples| rate(count, 1, samples, |each| Ok((0..each).try_for_each(|_| caller.call())?)),
        )?;
        let name = format!("{}: {crowd} threads that call", site.name());
        let goal = Goal::PerSecond(goals(site.transport).0);
        report.add(Figure::new(name, Unit::Rate, &ours).raw("one thread", &plain).goal(goal));
    }
    Ok(())
}

fn tasks(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, caller: &Caller) -> Outcome {
    let current_thread = tokio::runtime::Builder::new_current_thread().build()?;
    let workers = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    let runtimes = [("current-thread runtime", &current_thread, 2.0), ("two workers", &workers, 3.0)];
    let (warm_up, count) = (plan.count(300), plan.count(2000));
    for (what, runtime, goal) in runtimes {
        let (ours, plain) = interleave(
            plan,
            |samples| on(runtime, one_by_one(site, warm_up, count, samples)),
            |samples| caller.round_trips(warm_up, count, samples),
        )?;
        let name = format!("{}: a task that calls, {what}", site.name());
        report.add(Figure::new(name, Unit::Time, &ours).raw("a thread", &plain).goal(Goal::TimeAtMost(goal)));
    }
    let count = plan.count(500);
    let call = site.client.procedure::<(), ()>("empty").on(&site.peer);
    let (ours, plain) = interleave(
        plan,
        |samples| spawned(&current_thread, count, samples, Some(call.clone())),
        |samples| spawned(&current_thread, count, samples, None),
    )?;
    let name = format!("{}: a task from another thread begins beside one that calls", site.name());
    report.add(Figure::new(name, Unit::Time, &ours).raw("beside none", &plain).goal(Goal::TimeAtMost(1.0)));
    let count = plan.count(60_000);
    for (what, runtime, _) in runtimes {
        let ours = alone(plan, |samples| {
            rate(count, TASKS, samples, |each| on(runtime, all_at_once::<_, ()>(site, "empty", &(), each)))
        })?;
        let name = format!("{}: {TASKS} tasks that call, {what}", site.name());
        report.add(Figure::new(name, Unit::Rate, &ours).goal(Goal::PerSecond(goals(site.transport).1)));
    }
    let (ours, plain) = interleave(
        plan,
        |samples| rate(count, TASKS, samples, |each| on(&current_thread, joined(site, each))),
        |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, ()>(site, "empty", &(), each))),
    )?;
    let name = format!("{}: {TASKS} calls at a time that a task joins", site.name());
    report.add(Figure::new(name, Unit::Rate, &ours).raw("as many tasks", &plain).goal(Goal::SpeedAtLeast(0.8)));
    let (ours, plain) = interleave(
        plan,
        |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, ()>(site, "empty async", &(), each))),
        |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, ()>(site, "empty", &(), each))),
    )?;
    let name = format!("{}: {TASKS} tasks that call an async handler", site.name());
    report.add(Figure::new(name, Unit::Rate, &ours).raw("a plain handler", &plain).goal(Goal::SpeedAtLeast(0.83)));
    for (handler, what, goal) in [
        ("answered elsewhere", "leaves the answer to another thread", 0.25),
        ("relay", "awaits a call of another service", 0.25),
        ("blocking relay", "blocks in a call of another service", 0.1),
    ] {
        let (ours, plain) = interleave(
            plan,
            |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, ()>(site, handler, &(), each))),
            |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, ()>(site, "empty", &(), each))),
        )?;
        let name = format!("{}: {TASKS} tasks that call a handler which {what}", site.name());
        report.add(Figure::new(name, Unit::Rate, &ours).raw("a plain handler", &plain).goal(Goal::SpeedAtLeast(goal)));
    }
    let give = site.client.procedure::<usize, Vec<u8>>("give").on(&site.peer);
    let (count, half) = (plan.count(6000), LIST / 2);
    let (ours, plain) = interleave(
        plan,
        |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, Vec<u8>>(site, "give", &half, each))),
        |samples| rate(count, 1, samples, |each| Ok((0..each).try_for_each(|_| give.call(&half).map(drop))?)),
    )?;
    let name = format!("{}: {TASKS} tasks that get 32 KiB each", site.name());
    report.add(Figure::new(name, Unit::Rate, &ours).raw("one thread", &plain).goal(Goal::SpeedAtLeast(1.0)));
    // Memory that the server may also write is not sent inside the call.
    let data = site.client.expose(vec![1u8; LIST], BulkMode::ReadWrite)?;
    let pull = site.client.procedure::<Bulk, ()>("pull").on(&site.peer);
    let (ours, plain) = interleave(
        plan,
        |samples| rate(count, TASKS, samples, |each| on(&current_thread, all_at_once::<_, ()>(site, "pull", &data.bulk(), each))),
        |samples| rate(count, 1, samples, |each| Ok((0..each).try_for_each(|_| pull.call(&data.bulk()))?)),
    )?;
    let name = format!("{}: {TASKS} tasks that call a handler which pulls 64 KiB", site.name());
    report.add(Figure::new(name, Unit::Rate, &ours).raw("one thread", &plain).goal(Goal::SpeedAtLeast(1.0)));
    Ok(())
}

fn on(runtime: &Runtime, work: impl Future<Output = calomel::Result<()>>) -> Outcome {
    Ok(runtime.block_on(work)?)
}

/// A task that is spawned, as those of a program are: what is not runs on the thread that waits for the runtime.
fn one_by_one<'s>(
    site: &Site<'_>,
    warm_up: usize,
    count: usize,
    samples: &'s mut Vec<f64>,
) -> Pin<Box<dyn Future<Output = calomel::Result<()>> + 's>> {
    let call = site.client.procedure::<(), ()>("empty").on(&site.peer);
    let task = async move {
        let mut samples = Vec::with_capacity(count);
        for done in 0..warm_up + count {
            let begun = Instant::now();
            call.start(&())?.await?;
            if done >= warm_up {
                samples.push(begun.elapsed().as_nanos() as f64);
            }
        }
        calomel::Result::Ok(samples)
    };
    Box::pin(async move {
        samples.extend(tokio::spawn(task).await.expect("no task panics")?);
        Ok(())
    })
}

/// How long a task that another thread spawns takes to begin, where another one makes the call again and again, or none does.
fn spawned(runtime: &Runtime, count: usize, samples: &mut Vec<f64>, beside: Option<Call<(), ()>>) -> Outcome {
    let (end, ended) = oneshot::channel::<()>();
    let one = || {
        let (begins, begun) = std::sync::mpsc::sync_channel(1);
        let spawned = Instant::now();
        runtime.spawn(async move { begins.send(spawned.elapsed()) });
        let took = begun.recv().expect("a runtime runs its tasks").as_nanos() as f64;
        thread::sleep(BETWEEN_TASKS);
        took
    };
    thread::scope(|scope| {
        let spawner = scope.spawn(move || {
            let samples: Vec<_> = std::iter::repeat_with(one).take(count).collect();
            drop(end);
            samples
        });
        let caller = beside.map(|call| {
            runtime.spawn(async move {
                loop {
                    call.start(&())?.await?;
                }
                #[expect(unreachable_code, reason = "it tells the type")]
                calomel::Result::Ok(())
            })
        });
        runtime.block_on(ended).expect_err("the spawner has ended");
        if let Some(caller) = caller {
            caller.abort();
            let error = runtime.block_on(caller).expect_err("no call has failed meanwhile");
            assert!(error.is_cancelled());
        }
        samples.extend(spawner.join().expect("it does not panic"));
    });
    Ok(())
}

async fn all_at_once<A, R>(site: &Site<'_>, name: &str, arguments: &A, each: usize) -> calomel::Result<()>
where
    A: Serialize + Clone + Send + Sync + 'static,
    R: DeserializeOwned + Send + 'static,
{
    let call = site.client.procedure::<A, R>(name).on(&site.peer);
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (call, arguments) = (call.clone(), arguments.clone());
        tasks.spawn(async move {
            for _ in 0..each {
                call.start(&arguments)?.await?;
            }
            calomel::Result::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no task panics")?;
    }
    Ok(())
}

/// Makes as many calls as there are tasks elsewhere, and waits for them all before it makes the next ones.
async fn joined(site: &Site<'_>, times: usize) -> calomel::Result<()> {
    let call = site.client.procedure::<(), ()>("empty").on(&site.peer);
    for _ in 0..times {
        let calls = (0..TASKS).map(|_| async { call.start(&())?.await });
        join_all(calls).await.into_iter().collect::<calomel::Result<()>>()?;
    }
    Ok(())
}
