//! An RPC whose handler pulls the caller's memory into its own, or pushes its own into the caller's.
//!
//! Over tcp it stands beside a bare TCP stream of as many bytes between the same two processes, in process beside `memcpy`.

mod common;

use std::{
    hint::black_box,
    process,
    sync::{Arc, Mutex},
};

use calomel::{Bulk, BulkMode, Engine, Exposed, Procedure, Request};
use common::{
    Outcome, Plan, Server, interleave, raw,
    report::{Goal, Report, Unit},
};

/// Bytes of a transfer, and how many of them a round makes.
const SIZES: [(usize, usize); 5] = [(4 << 10, 1000), (64 << 10, 500), (1 << 20, 100), (16 << 20, 10), (256 << 20, 2)];

/// Fills what a transfer has to overwrite. Not zero: zeroed memory would not have been touched.
const STALE: u8 = 7;

/// From this size on the bandwidth is judged; below, the latency of the RPC decides.
const JUDGED: usize = 1 << 20;

fn main() -> Outcome {
    common::main(define, measure)
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Pull,
    Push,
}

/// The server keeps one exposed buffer at a time, as long as the client says.
fn define(engine: &Engine) -> calomel::Result<()> {
    let kept: Arc<Mutex<Option<Exposed<Vec<u8>>>>> = Arc::default();

    let slot = Arc::clone(&kept);
    engine.define("prepare", move |request: &Request, (len, fill): (usize, u8)| {
        let exposed = request.engine().expose(vec![fill; len], BulkMode::ReadWrite);
        *slot.lock().expect("no handler panicked") = Some(exposed.expect("the buffer is exposed"));
    })?;

    let slot = Arc::clone(&kept);
    engine.define("pull", move |request: &Request, bulk: Bulk| {
        let kept = slot.lock().expect("no handler panicked");
        bulk.on(request.endpoint()).pull_into(kept.as_ref().expect("prepared")).expect("the memory is pulled")
    })?;

    let slot = Arc::clone(&kept);
    engine.define("push", move |request: &Request, bulk: Bulk| {
        let kept = slot.lock().expect("no handler panicked");
        bulk.on(request.endpoint()).push_from(kept.as_ref().expect("prepared")).expect("the memory is pushed")
    })?;

    // Gives the buffer up and says whether every byte of it is `fill`.
    engine.define("finish", move |_: &Request, fill: u8| {
        let exposed = kept.lock().expect("no handler panicked").take();
        holds(&exposed.expect("prepared").reclaim(), fill)
    })?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("bulk", plan);
    tcp(plan, &mut report)?;
    in_process(plan, &mut report)?;
    report.finish()?;
    Ok(())
}

fn tcp(plan: &Plan, report: &mut Report<'_>) -> Outcome {
    let server = Server::start(plan)?;
    let mut raw = raw::Connection::open(server.raw)?;
    let engine = Engine::client("tcp")?;
    against(plan, report, &engine, &server.address, "tcp", |direction, buffer, warm_up, count, samples| {
        match direction {
            Direction::Pull => raw.stream_in(buffer, warm_up, count, samples)?,
            Direction::Push => raw.stream_out(buffer, warm_up, count, samples)?,
        }
        Ok(())
    })
}

/// Both engines in this process.
fn in_process(plan: &Plan, report: &mut Report<'_>) -> Outcome {
    let server = Engine::server(format!("loop://bench-bulk-{}", process::id()))?;
    define(&server)?;
    let engine = Engine::client("loop")?;
    let mut source = Vec::new();
    against(plan, report, &engine, &server.address().to_string(), "loop", |_, buffer, warm_up, count, samples| {
        if source.len() != buffer.len() {
            source = vec![1u8; buffer.len()];
        }
        common::timed(warm_up, count, samples, || {
            buffer.copy_from_slice(black_box(&source));
            black_box(&buffer);
            Ok(())
        })
    })
}

/// Measures every size in both directions; `raw` gets a buffer of that size, the warm-up and the count of transfers.
fn against(
    plan: &Plan,
    report: &mut Report<'_>,
    engine: &Engine,
    address: &str,
    transport: &str,
    mut raw: impl FnMut(Direction, &mut [u8], usize, usize, &mut Vec<f64>) -> Outcome,
) -> Outcome {
    let server = engine.lookup(address)?;
    let prepare = engine.procedure::<(usize, u8), ()>("prepare");
    let finish = engine.procedure::<u8, bool>("finish");
    for (direction, verb) in [(Direction::Pull, "pull"), (Direction::Push, "push")] {
        let transfer: Procedure<Bulk, usize> = engine.procedure(verb);
        for (size, count) in SIZES {
            let count = plan.count(count);
            let warm_up = count.div_ceil(10);
            let (fill, mode) = match direction {
                Direction::Pull => (1, BulkMode::ReadOnly),
                Direction::Push => (2, BulkMode::WriteOnly),
            };
            let (mine, yours) = if direction == Direction::Pull { (fill, STALE) } else { (STALE, fill) };
            prepare.on(&server).call(&(size, yours))?;
            // Filled on both sides, so every page has been touched.
            let exposed = engine.expose(vec![mine; size], mode)?;
            let bulk = exposed.bulk();
            let mut beside = vec![1u8; size];

            let (ours, limit) = interleave(
                plan,
                |samples| {
                    common::timed(warm_up, count, samples, || {
                        let moved = transfer.on(&server).call(&bulk)?;
                        if moved == size { Ok(()) } else { Err(format!("{moved} of {size} bytes moved").into()) }
                    })
                },
                |samples| raw(direction, &mut beside, warm_up, count, samples),
            )?;

            let arrived = finish.on(&server).call(&fill)? && holds(&exposed.reclaim(), fill);
            if !arrived {
                return Err(format!("a {verb} of {size} bytes over {transport} left wrong bytes").into());
            }
            let goal = if size >= JUDGED { Goal::SpeedAtLeast(0.7) } else { Goal::None };
            let name = format!("{transport}: RPC + {verb} of {}", readable(size));
            report.add(name, Unit::Bytes(size), &ours, Some(&limit), goal);
        }
    }
    Ok(())
}

fn holds(buffer: &[u8], fill: u8) -> bool {
    buffer.iter().all(|&byte| byte == fill)
}

fn readable(size: usize) -> String {
    if size >= 1 << 20 { format!("{} MiB", size >> 20) } else { format!("{} KiB", size >> 10) }
}
