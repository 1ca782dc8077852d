//! Benchmark of other RPC libraries: an empty call, calls with 64 KiB and 1 MiB of arguments, and calls of tokio tasks, over TCP
//! to another process. The tools of UCX and libfabric are run where they are installed.

#[path = "../../common/mod.rs"]
mod common;
mod tools;

use std::{
    env,
    hint::black_box,
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Instant,
};

use calomel::{Call, Engine, Procedure, Request};
use calomel_peers::{Calls, Failure, Kind, LEFT_OUT, PEERS, Peer, many_tasks, one_task};
use common::{
    Outcome, Plan, Site, Transport,
    caller::{self, Caller},
    interleave, readable,
    report::{Figure, Report, Unit},
    timed,
};
use serde::{Serialize, Serializer};

/// Bytes of arguments, and calls in a round.
const SIZES: [(usize, usize); 3] = [(0, 1000), (64 << 10, 300), (1 << 20, 60)];
/// Tasks that call at once, and the calls of all of them in a round.
const TASKS: (usize, usize) = (64, 20_000);

fn main() -> Outcome {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [role, name, kind] = &arguments[..]
        && role == "peer"
    {
        let peer = PEERS.iter().find(|peer| peer.name == name).ok_or("no peer has that name")?;
        let kind = Kind::ALL.into_iter().find(|known| known.name() == kind).ok_or("no runtime has that name")?;
        return (peer.serve)(kind.runtime()?);
    }
    common::main(define, measure)
}

fn define(engine: &Engine) -> calomel::Result<()> {
    caller::define(engine)?;
    engine.define_borrowed::<[u8], _, _>("take", |_: &Request, bytes: &[u8]| black_box(bytes).len())?;
    Ok(())
}

fn measure(plan: &Plan) -> Outcome {
    let mut report = Report::new("peers", plan).beside("peer");
    for line in LEFT_OUT {
        report.skip((*line).to_owned());
    }
    if let Some(site) = Site::open(plan, &mut report, Transport::Tcp, define)? {
        for peer in PEERS {
            beside(plan, &mut report, &site, peer)?;
            for &kind in peer.tasks {
                tasks_beside(plan, &mut report, &site, peer, kind)?;
            }
        }
        tools::beside(plan, &mut report, &site)?;
    }
    if let Some(site) = Site::open(plan, &mut report, Transport::Shm, define)? {
        tools::beside(plan, &mut report, &site)?;
    }
    report.finish()?;
    Ok(())
}

/// Bytes that serde passes on as one slice.
struct Octets(Vec<u8>);

impl Serialize for Octets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

fn beside(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, peer: &Peer) -> Outcome {
    let server = Server::start(plan, peer, peer.own)?;
    let mut client = (peer.connect)(server.address, peer.own.runtime()?)?;
    let caller = Caller::new(site);
    let take: Procedure<Octets, usize> = site.client.procedure("take");
    for (size, count) in SIZES {
        let count = plan.count(count);
        let warm_up = count.div_ceil(5);
        let octets = Octets(vec![1; size]);
        let (ours, theirs) = interleave(
            plan,
            |samples| match size {
                0 => caller.round_trips(warm_up, count, samples),
                _ => timed(warm_up, count, samples, || match take.on(&site.peer).call(&octets)? {
                    taken if taken == size => Ok(()),
                    taken => Err(format!("{taken} of {size} bytes arrived").into()),
                }),
            },
            |samples| client.round(size, warm_up, count, samples),
        )?;
        let name = if size == 0 { "empty call".to_owned() } else { format!("call with {}", readable(size)) };
        report.add(Figure::new(format!("{}: {name} ({})", site.name(), peer.name), Unit::Time, &ours).raw(peer.name, &theirs));
    }
    Ok(())
}

#[derive(Clone)]
struct Ours(Call<(), ()>);

impl Calls for Ours {
    async fn call(&mut self) -> Result<(), Failure> {
        let outcome = async { self.0.start(&())?.await }.await;
        outcome.map_err(|error: calomel::Error| error.to_string())
    }
}

/// Calls of tasks, on a runtime of that kind for either library, and for the peer's server.
fn tasks_beside(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>, peer: &Peer, kind: Kind) -> Outcome {
    let server = Server::start(plan, peer, kind)?;
    let mut client = (peer.connect)(server.address, kind.runtime()?)?;
    let runtime = kind.runtime()?;
    let ours = Ours(site.client.procedure("empty").on(&site.peer));

    let count = plan.count(SIZES[0].1);
    let warm_up = count.div_ceil(5);
    let (alone, beside) = interleave(
        plan,
        |samples| one_task(&runtime, ours.clone(), warm_up, count, samples),
        |samples| client.one_task(warm_up, count, samples),
    )?;
    let name = format!("{}: a task that calls, {} ({})", site.name(), kind.name(), peer.name);
    report.add(Figure::new(name, Unit::Time, &alone).raw(peer.name, &beside));

    let (tasks, count) = TASKS;
    let each = plan.count(count).div_ceil(tasks);
    let rate = |samples: &mut Vec<f64>, calls: &mut dyn FnMut(usize) -> Outcome| -> Outcome {
        calls(each.div_ceil(10))?;
        let begun = Instant::now();
        calls(each)?;
        samples.push(begun.elapsed().as_nanos() as f64 / (tasks * each) as f64);
        Ok(())
    };
    let (crowd, beside) = interleave(
        plan,
        |samples| rate(samples, &mut |each| many_tasks(&runtime, &ours, tasks, each)),
        |samples| rate(samples, &mut |each| client.many_tasks(tasks, each)),
    )?;
    let name = format!("{}: {tasks} tasks that call, {} ({})", site.name(), kind.name(), peer.name);
    report.add(Figure::new(name, Unit::Rate, &crowd).raw(peer.name, &beside));
    Ok(())
}

/// The process in which a peer serves. It is killed when this is dropped.
struct Server<'a> {
    plan: &'a Plan,
    child: Child,
    address: SocketAddr,
}

impl Server<'_> {
    fn start<'a>(plan: &'a Plan, peer: &Peer, kind: Kind) -> Outcome<Server<'a>> {
        let mut command = Command::new(env::current_exe()?);
        let mut child = command.args(["peer", peer.name, kind.name()]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or("the server has no output")?;
        plan.servers.borrow_mut().push(child.id());
        let mut server = Server { plan, child, address: ([0, 0, 0, 0], 0).into() };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        server.address = line.trim().parse()?;
        Ok(server)
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.plan.servers.borrow_mut().retain(|&server| server != self.child.id());
    }
}
