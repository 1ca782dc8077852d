//! Benchmark of bulk transfers: an RPC whose handler pulls the caller's memory or pushes into it, and the cost of `expose`.
//!
//! Over tcp the reference is a bare TCP stream of as many bytes between the same two processes; over shared memory it is the
//! system call that does the same, or `memcpy`.

mod common;

use std::{
    hint::black_box,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use calomel::{Bulk, BulkMode, Engine, Procedure, Segments, WritableBuffer};
use common::{
    Outcome, Plan, Site, Transport, alone,
    caller::{self, Caller},
    interleave, interleave_all,
    process::DIRECT,
    readable,
    report::{Figure, Goal, Report, Unit},
    stats::Pace,
    store::{self, holds},
    timed,
};

/// Sizes of a transfer in bytes, and transfers in a round.
const SIZES: [(usize, usize); 5] = [(4 << 10, 1000), (64 << 10, 500), (1 << 20, 100), (16 << 20, 8), (256 << 20, 1)];

/// Fills the memory that a transfer has to overwrite. Not zero: the pages of zeroed memory would not have been touched.
const STALE: u8 = 7;

/// From this size on the bandwidth is judged; below it the latency of the RPC dominates.
const JUDGED: usize = 1 << 20;

/// Segments of a bulk with many segments, and the bytes of each.
const SEGMENTS: (usize, usize) = (1000, 4 << 10);

/// The buffer size for measuring `expose`.
const EXPOSED: [usize; 3] = [4 << 10, 1 << 20, 256 << 20];

fn main() -> Outcome {
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    caller::define(engine)?;
    store::define(engine)
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("bulk", plan);
    for transport in Transport::ALL {
        let Some(site) = Site::open(plan, &mut report, transport, define)? else { continue };
        let bench = Bench::new(plan, &site);
        for direction in [Direction::Pull, Direction::Push] {
            for (size, count) in SIZES {
                let count = plan.count(count);
                bench.transfers(&mut report, direction, Memory::Heap, count, size)?;
                if transport == Transport::Shm {
                    bench.transfers(&mut report, direction, Memory::Alloc, count, size)?;
                }
            }
        }
        for direction in [Direction::Pull, Direction::Push] {
            bench.segments(&mut report, direction)?;
        }
        if transport == Transport::Shm {
            // Memory that the server may also write is not sent inside the call.
            bench.small_pull(&mut report, 4 << 10, BulkMode::ReadOnly)?;
            bench.small_pull(&mut report, 4 << 10, BulkMode::ReadWrite)?;
            bench.small_pull(&mut report, DIRECT, BulkMode::ReadWrite)?;
        }
        bench.exposing(&mut report)?;
    }
    both_ways(plan, &mut report)?;
    report.finish()?;
    Ok(())
}

/// The two ways by which shm moves bulk data: the ring, which it takes where one peer fetches at a time, and the kernel's copy.
fn both_ways(plan: &Plan, report: &mut Report<'_>) -> Outcome {
    let Some(ring) = Site::open(plan, report, Transport::ShmRing, define)? else { return Ok(()) };
    let Some(kernel) = Site::open(plan, report, Transport::ShmKernelCopy, define)? else { return Ok(()) };
    let (ring, kernel) = (Bench::new(plan, &ring), Bench::new(plan, &kernel));
    for direction in [Direction::Pull, Direction::Push] {
        for &(size, count) in SIZES.iter().filter(|(size, _)| *size >= DIRECT) {
            let count = plan.count(count);
            let warm_up = count.div_ceil(10);
            let expose = |bench: &Bench<'_>| bench.site.client.expose(vec![direction.before(); size], direction.mode());
            let (in_ring, in_kernel) = (expose(&ring)?, expose(&kernel)?);
            let (ours, raw) = ring.serving(direction, size, |through_ring| {
                kernel.serving(direction, size, |by_kernel| {
                    interleave(
                        plan,
                        |samples| through_ring(&in_ring.bulk(), warm_up, count, samples),
                        |samples| by_kernel(&in_kernel.bulk(), warm_up, count, samples),
                    )
                })
            })?;
            let verb = direction.verb();
            for exposed in [in_ring, in_kernel] {
                if !holds(&exposed.reclaim(), direction.fill()) {
                    return Err(format!("a {verb} of {size} bytes over shm left wrong bytes").into());
                }
            }
            let name = format!("shm: RPC + {verb} of {}, through the ring", readable(size));
            let figure = Figure::new(name, Unit::Bytes(size), &ours).raw("by the kernel's copy", &raw);
            report.add(figure.goal(Goal::SpeedAtLeast(0.95)));
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Pull,
    Push,
}

impl Direction {
    fn verb(self) -> &'static str {
        if self == Direction::Pull { "pull" } else { "push" }
    }

    /// The byte that fills the transferred memory.
    fn fill(self) -> u8 {
        if self == Direction::Pull { 1 } else { 2 }
    }

    /// The byte that fills the caller's memory before the transfer.
    fn before(self) -> u8 {
        if self == Direction::Pull { self.fill() } else { STALE }
    }

    fn mode(self) -> BulkMode {
        if self == Direction::Pull { BulkMode::ReadOnly } else { BulkMode::WriteOnly }
    }
}

/// How the caller allocates the memory that it exposes.
#[derive(Clone, Copy)]
enum Memory {
    Heap,
    Alloc,
}

struct Bench<'a> {
    plan: &'a Plan,
    site: &'a Site<'a>,
    prepare: Procedure<(usize, u8), ()>,
    finish: Procedure<u8, bool>,
}

/// A buffer of the caller, of either type.
trait Bytes: WritableBuffer + Send + DerefMut<Target = [u8]> + 'static {}
impl<B: WritableBuffer + Send + Deref<Target = [u8]> + DerefMut + 'static> Bytes for B {}

impl<'a> Bench<'a> {
    fn new(plan: &'a Plan, site: &'a Site<'a>) -> Bench<'a> {
        Bench { plan, site, prepare: site.client.procedure("prepare"), finish: site.client.procedure("finish") }
    }

    fn transfers(&self, report: &mut Report<'_>, direction: Direction, memory: Memory, count: usize, size: usize) -> Outcome {
        match memory {
            Memory::Heap => self.transfer(report, direction, memory, count, vec![0u8; size]),
            Memory::Alloc => self.transfer(report, direction, memory, count, self.site.client.alloc(size)),
        }
    }

    fn transfer<B: Bytes>(
        &self,
        report: &mut Report<'_>,
        direction: Direction,
        memory: Memory,
        count: usize,
        mut buffer: B,
    ) -> Outcome {
        let size = buffer.len();
        let warm_up = count.div_ceil(10);
        // Filled on both sides, so that every page has been touched.
        buffer.fill(direction.before());
        let exposed = self.site.client.expose(buffer, direction.mode())?;
        let (ours, (what, limit)) = self.serving(direction, size, |call| {
            let mut beside = vec![1u8; size];
            let (ours, raw) = interleave(
                self.plan,
                |samples| call(&exposed.bulk(), warm_up, count, samples),
                |samples| self.limit(direction, memory, &mut beside, warm_up, count, samples),
            )?;
            Ok((ours, (self.limit_name(direction, memory), raw)))
        })?;
        if !holds(&exposed.reclaim(), direction.fill()) {
            return Err(format!("a {} of {size} bytes over {} left wrong bytes", direction.verb(), self.site.name()).into());
        }
        let (name, verb) = (self.site.name(), direction.verb());
        let (of, panel) = match memory {
            Memory::Heap => ("", name.to_owned()),
            Memory::Alloc => (" of engine.alloc", format!("{name}, memory of engine.alloc")),
        };
        let goal = if size >= JUDGED { Goal::SpeedAtLeast(0.95) } else { Goal::None };
        let figure = Figure::new(format!("{name}: RPC + {verb} of {}{of}", readable(size)), Unit::Bytes(size), &ours);
        report.add(figure.raw(what, &limit).goal(goal).plotted(panel, verb, size));
        Ok(())
    }

    /// Lets the server keep a buffer while `work` runs; `work` gets a function that makes transfers of a given size.
    fn serving<R>(
        &self,
        direction: Direction,
        size: usize,
        work: impl FnOnce(&dyn Fn(&Bulk, usize, usize, &mut Vec<f64>) -> Outcome) -> Outcome<R>,
    ) -> Outcome<R> {
        let peer = &self.site.peer;
        let transfer: Procedure<Bulk, usize> = self.site.client.procedure(direction.verb());
        self.prepare.on(peer).call(&(size, if direction == Direction::Pull { STALE } else { direction.fill() }))?;
        let measured = work(&|bulk, warm_up, count, samples| {
            timed(warm_up, count, samples, || {
                let moved = transfer.on(peer).call(bulk)?;
                if moved == size { Ok(()) } else { Err(format!("{moved} of {size} bytes moved").into()) }
            })
        })?;
        let name = self.site.name();
        match self.finish.on(peer).call(&direction.fill())? {
            true => Ok(measured),
            false => Err(format!("a {} of {size} bytes over {name} left wrong bytes at the server", direction.verb()).into()),
        }
    }

    /// A round of the raw side, with a buffer of the same size.
    fn limit(
        &self,
        direction: Direction,
        memory: Memory,
        buffer: &mut [u8],
        warm_up: usize,
        count: usize,
        samples: &mut Vec<f64>,
    ) -> Outcome {
        let mut raw = self.site.raw.borrow_mut();
        match (self.site.transport.scheme(), memory, direction) {
            ("tcp", _, Direction::Pull) => raw.stream_in(buffer, warm_up, count, samples)?,
            ("tcp", _, Direction::Push) => raw.stream_out(buffer, warm_up, count, samples)?,
            ("shm", Memory::Heap, Direction::Pull) => raw.vm_in(buffer, warm_up, count, samples)?,
            ("shm", Memory::Heap, Direction::Push) => raw.vm_out(buffer, warm_up, count, samples)?,
            ("shm", Memory::Alloc, Direction::Pull) => raw.copy_in(buffer, warm_up, count, samples)?,
            ("shm", Memory::Alloc, Direction::Push) => raw.copy_out(buffer.len(), warm_up, count, samples)?,
            _ => {
                let source = vec![1u8; buffer.len()];
                timed(warm_up, count, samples, || {
                    buffer.copy_from_slice(black_box(&source));
                    black_box(&buffer);
                    Outcome::Ok(())
                })?;
            }
        }
        Ok(())
    }

    fn limit_name(&self, direction: Direction, memory: Memory) -> &'static str {
        match (self.site.transport.scheme(), memory, direction) {
            ("tcp", ..) => "TCP stream, spinning",
            ("shm", Memory::Heap, Direction::Pull) => "process_vm_readv",
            ("shm", Memory::Heap, Direction::Push) => "process_vm_writev",
            _ => "memcpy",
        }
    }

    /// Many segments, compared with one buffer of the same total size.
    fn segments(&self, report: &mut Report<'_>, direction: Direction) -> Outcome {
        let (segments, len) = SEGMENTS;
        let size = segments * len;
        let count = self.plan.count(40);
        let warm_up = count.div_ceil(10);
        let many = Segments(vec![vec![direction.before(); len]; segments]);
        let many = self.site.client.expose(many, direction.mode())?;
        let one = self.site.client.expose(vec![direction.before(); size], direction.mode())?;
        let (ours, raw) = self.serving(direction, size, |call| {
            interleave(
                self.plan,
                |samples| call(&many.bulk(), warm_up, count, samples),
                |samples| call(&one.bulk(), warm_up, count, samples),
            )
        })?;
        if !many.reclaim().0.iter().all(|segment| holds(segment, direction.fill())) {
            return Err(format!("a {} of {segments} segments left wrong bytes", direction.verb()).into());
        }
        let name = format!("{}: RPC + {} of {segments} segments of {}", self.site.name(), direction.verb(), readable(len));
        let figure = Figure::new(name, Unit::Bytes(size), &ours).raw("one segment", &raw);
        report.add(figure.goal(Goal::SpeedAtLeast(0.8)));
        Ok(())
    }

    /// A pull so small that the calls around it take as long; the reference is an empty call plus the system call
    /// that reads as much.
    fn small_pull(&self, report: &mut Report<'_>, size: usize, mode: BulkMode) -> Outcome {
        let count = self.plan.count(2000);
        let warm_up = count.div_ceil(10);
        let caller = Caller::new(self.site);
        let exposed = self.site.client.expose(vec![Direction::Pull.fill(); size], mode)?;
        let [ours, empty, read] = self.serving(Direction::Pull, size, |call| {
            let process = &self.site.process;
            interleave_all(
                self.plan,
                [
                    &mut |samples| call(&exposed.bulk(), warm_up, count, samples),
                    &mut |samples| caller.round_trips(warm_up, count, samples),
                    &mut |samples| {
                        let raw = self.site.raw.borrow();
                        Ok(raw.vm_read(process.pid(), process.memory, size, warm_up, count, samples)?)
                    },
                ],
            )
        })?;
        let what = if mode == BulkMode::ReadOnly { "read-only" } else { "read-write" };
        let name = format!("{}: RPC + pull of {}, {what}", self.site.name(), readable(size));
        let figure = Figure::new(name, Unit::Time, &ours).raw("empty RPC + process_vm_readv", &empty.plus(&read));
        report.add(figure.goal(Goal::TimeAtMost(1.2)));
        Ok(())
    }

    /// The cost of `expose`, without allocating and freeing the memory.
    fn exposing(&self, report: &mut Report<'_>) -> Outcome {
        let count = self.plan.count(20_000);
        let engine = &self.site.client;
        // So that the engine has a peer whose access it must revoke.
        Caller::new(self.site).call()?;
        for size in EXPOSED {
            let memory: Arc<[u8]> = vec![1u8; size].into();
            let ours = alone(self.plan, |samples| {
                let mut pace = Pace::new(count / 10, samples);
                for number in 0..count {
                    drop(black_box(engine.expose_read_only(memory.clone())?));
                    pace.reached(number + 1);
                }
                Ok(())
            })?;
            let name = format!("{}: expose + drop of {}", self.site.name(), readable(size));
            report.add(Figure::new(name, Unit::Time, &ours).goal(Goal::AtMost(200.0)));
            drop(memory);

            let mut buffer = Some(vec![1u8; size]);
            let ours = alone(self.plan, |samples| {
                let mut pace = Pace::new(count / 10, samples);
                for number in 0..count {
                    let exposed = engine.expose(buffer.take().expect("it came back"), BulkMode::ReadWrite)?;
                    buffer = Some(black_box(exposed).reclaim());
                    pace.reached(number + 1);
                }
                Ok(())
            })?;
            let name = format!("{}: expose + reclaim of {}", self.site.name(), readable(size));
            report.add(Figure::new(name, Unit::Time, &ours).goal(Goal::AtMost(200.0)));
        }
        Ok(())
    }
}
