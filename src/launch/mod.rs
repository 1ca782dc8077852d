//! Start on many nodes: rank, size and the endpoints of all ranks, however the job was started.
//!
//! [`World::from_env`] reads the environment that a launcher has made, and waits until all ranks have come:
//!
//! ```
//! use std::time::Duration;
//!
//! use calomel::launch::World;
//! use calomel::{Engine, Request};
//!
//! # fn main() -> calomel::Result<()> {
//! let engine = Engine::server("tcp")?; // any free port, all interfaces
//! engine.define("square", |_: &Request, x: usize| x * x)?;
//! let timeout = Duration::from_secs(60);
//! let world = World::from_env(&engine, timeout)?; // all ranks have defined their procedures
//!
//! let next = world.endpoint((world.rank() + 1) % world.size());
//! let square = engine.procedure::<usize, usize>("square");
//! assert_eq!(square.on(&next).call(&world.rank())?, world.rank() * world.rank());
//!
//! let names = world.all_gather(format!("rank {}", world.rank()).as_bytes(), timeout)?;
//! assert_eq!(names[world.rank()], format!("rank {}", world.rank()).as_bytes());
//! world.barrier(timeout)?; // before the first rank ends: others may still call it
//! # Ok(())
//! # }
//! ```
//!
//! # How the ranks find each other
//!
//! The first of these that the environment has is used:
//!
//! | variables | how |
//! |---|---|
//! | `CALOMEL_ENDPOINTS=tcp://a:7000,tcp://b:7000` | the addresses of all ranks, in order; an engine that does not listen at its own yet does so |
//! | `CALOMEL_RENDEZVOUS=tcp://host:port` | rank 0, which has to run on that host, listens there too, and the others ask it |
//! | `CALOMEL_RENDEZVOUS=dir:/path` | rank 0 leaves its address in this directory, which all share |
//! | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` | as `tcp://MASTER_ADDR:MASTER_PORT`: what `torchrun` and its like set |
//! | `PMI_FD`, `PMI_RANK`, `PMI_SIZE` | through the launcher, by PMI-1: `mpiexec` of MPICH and of Intel MPI, `srun --mpi=pmi2`, Flux |
//! | `OMPI_COMM_WORLD_RANK`, … | `mpirun` of Open MPI, on one host: the directory of its session (`PMIX_SERVER_TMPDIR`) |
//! | `SLURM_PROCID`, `SLURM_STEP_NODELIST`, … | `srun` without PMI: as `tcp://` the first host of the step, at a port that depends on job and step |
//! | none | a world of one rank |
//!
//! With `CALOMEL_ENDPOINTS` and `CALOMEL_RENDEZVOUS`, the rank is `CALOMEL_RANK`, and the number of ranks `CALOMEL_SIZE`, or
//! else those of the launcher that has started the process: `RANK` and `WORLD_SIZE`, `PMI_RANK` and `PMI_SIZE`,
//! `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE`, `SLURM_PROCID` and `SLURM_STEP_NUM_TASKS`. Two jobs that use one port or
//! one directory at the same time need different names, `CALOMEL_JOB`; jobs of Slurm, Open MPI and `torchrun` have one.
//! Variables that are empty count as not set.
//!
//! The addresses that ranks exchange are those of [`Engine::addresses`]: the first of tcp or verbs, or else the first. So an
//! engine that listens at `tcp` is reached from other hosts, and one that listens at `tcp://127.0.0.1:0` is not. Where hosts
//! have several networks, name the interface of the one that they share: `tcp://ib0:0`.
//!
//! All calls here block. In async code, make them where blocking work belongs.
//!
//! # What it is not
//!
//! No MPI: there are no other operations, no groups, and no ranks that come later. A program that uses MPI as well must leave
//! PMI to it: broadcast the addresses by MPI, and make the world with [`World::from_addresses`].
//!
//! Ranks trust each other, and each peer that may call their engines: it could read what was gathered last, or take the place
//! of a rank that has not come. Give the engines a key
//! ([`EngineBuilder::pre_shared_key`](crate::EngineBuilder::pre_shared_key)) or certificates, which the meeting of the ranks
//! uses, too. [`job_key`] makes a key for each job, where the launcher can hand it out.
//!
//! The world's own calls go to provider 65535: a hook of
//! [`EngineBuilder::authorize`](crate::EngineBuilder::authorize) must let them pass.

mod collective;
mod directory;
mod env;
mod inherited;
mod job_key;
mod pmi;
mod rendezvous;
mod wait;

use std::collections::HashMap;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::sync::Mutex;
use crate::{Address, Endpoint, Engine, Error, FinalizeHook, Responder, Result, Transport, random};
use collective::{Collective, Member, RankAsk, RankReply, Ranks};
use directory::{RendezvousFile, meeting_of, notice, read_notice};
use env::{LaunchPlan, StartMethod};
use rendezvous::{Attendee, Host, MeetingPlace, Roster, attend, look_up, other_host, take_name};
use wait::{Attempts, TimeLimit};

pub use job_key::{JobKey, job_key};

/// The provider of the world's own procedures: no user's procedure is there.
const PROVIDER: u16 = u16::MAX;

/// All ranks of a job, each with an engine: made by [`World::from_env`]. See the [module](self).
///
/// It keeps its engine alive. Dropping it leaves the world: other ranks that wait in [`World::barrier`] or
/// [`World::all_gather`], or come there later, get [`Error::Disconnected`]; endpoints and the engine stay as they are. A world
/// that has failed stays failed, since its ranks disagree on what they have done together: every further call returns the
/// same failure at once, at all ranks.
///
/// An engine can be in several worlds, which do not know of each other. All ranks must make them in the same order.
pub struct World {
    ranks: Ranks,
    hook: FinalizeHook,
}

impl World {
    /// Joins the job that this process was started in, as the environment describes it, and waits until all its ranks have
    /// joined. The [module](self) has the variables, and which of them count.
    ///
    /// `engine` must listen, except with `CALOMEL_ENDPOINTS`, since all ranks are called by others. Define its procedures
    /// first: when this returns, all ranks have called it, and what they have defined before is there. With
    /// `CALOMEL_RENDEZVOUS=tcp://…` and its like, rank 0 goes on listening at that address, too.
    ///
    /// A process can use PMI once, for one world.
    ///
    /// # Errors
    /// [`Error::Launch`], which names the variable: one that is missing or wrong, two ranks with one number, a rank of another
    /// job, an engine that does not listen. [`Error::Timeout`] when some ranks have not come by the timeout; it names them, or
    /// what this rank waits for; a rank that dies before all have come is one that has not come. [`Error::Disconnected`] when
    /// one dies after that, and what any call may end with.
    pub fn from_env(engine: &Engine, timeout: Duration) -> Result<World> {
        let limit = TimeLimit::new(timeout);
        let LaunchPlan { rank, size, job, method } = env::plan(&|name| std::env::var_os(name))?;
        if let StartMethod::List(addresses) = method {
            listen_at_own(engine, &addresses[rank], limit)?;
            return World::join(engine, rank, number_of(&addresses), addresses, limit);
        }
        let address = own_address(engine)?;
        let own = Attendee { job, rank: rank as u32, size: size as u32, address, ticket: random_number()? };
        let roster = match method {
            StartMethod::List(_) | StartMethod::Alone => Roster { world: random_number()?, addresses: vec![own.address] },
            StartMethod::Meet { address, variable } => by_port(engine, own, &address, &variable, limit)?,
            StartMethod::Directory { path, variable, .. } => by_directory(engine, own, &path, &variable, limit)?,
            StartMethod::Pmi(descriptor) => by_pmi(engine, own, descriptor, limit)?,
        };
        World::join(engine, rank, roster.world, roster.addresses, limit)
    }

    /// Joins the world of the engines at these addresses, in the order of their ranks: where the program has a way of its own
    /// to exchange them, such as MPI or another world. Waits until all have joined, by the same list.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use calomel::launch::World;
    /// use calomel::{Address, Engine};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let engines = [Engine::server("loop://")?, Engine::server("loop://")?];
    /// let addresses: Vec<Address> = engines.iter().map(|engine| engine.address()).collect();
    /// std::thread::scope(|threads| {
    ///     for (rank, engine) in engines.iter().enumerate() {
    ///         let addresses = &addresses;
    ///         threads.spawn(move || {
    ///             let timeout = Duration::from_secs(20);
    ///             let world = World::from_addresses(engine, rank, addresses, timeout)?;
    ///             assert_eq!(world.all_gather(&[rank as u8], timeout)?, [[0], [1]]);
    ///             world.barrier(timeout)
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`World::from_env`]; [`Error::Launch`] for a rank that is not in the list, and an address that is there twice.
    pub fn from_addresses(engine: &Engine, rank: usize, addresses: &[Address], timeout: Duration) -> Result<World> {
        if rank >= addresses.len() {
            let reason = format!("ranks are less than {}, the number of addresses", addresses.len());
            return Err(Error::Launch { what: format!("rank {rank}"), reason });
        }
        own_address(engine)?;
        World::join(engine, rank, number_of(addresses), addresses.to_vec(), TimeLimit::new(timeout))
    }

    /// The number of this process among the ranks: less than [`World::size`].
    pub fn rank(&self) -> usize {
        self.ranks.member.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.endpoints.len()
    }

    /// The engine of a rank; that of this rank, too.
    ///
    /// # Panics
    /// When there is no such rank: `rank` must be less than [`World::size`].
    pub fn endpoint(&self, rank: usize) -> Endpoint {
        let size = self.size();
        assert!(rank < size, "there is no rank {rank} in a world of {size}");
        self.ranks.endpoints[rank].clone()
    }

    /// Waits until all ranks have called this: the n-th call of each returns when all have made theirs.
    ///
    /// # Errors
    /// [`Error::Timeout`] when some have not come by the timeout. [`Error::Disconnected`], which names the rank, when one has
    /// died or left: at all ranks, and as soon as its engine's neighbours know, which is after the peer timeout at the latest
    /// ([`EngineBuilder::peer_timeout`](crate::EngineBuilder::peer_timeout)). [`Error::Failed`] when another rank can't go on,
    /// or has called [`World::all_gather`] instead. [`Error::Unsupported`] while another thread of this rank waits in such a
    /// call. After all of these but the last the world has ended, for all ranks.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        self.ranks.gather(Collective::Barrier, &[], TimeLimit::new(timeout)).map(drop)
    }

    /// Gives each rank the values of all, in the order of the ranks. They may differ in length, and have at most 4 MiB
    /// divided by the number of ranks each: exchange what is larger as bulk data.
    ///
    /// # Errors
    /// As [`World::barrier`], and [`Error::MessageTooLarge`] for a value that is too long.
    pub fn all_gather(&self, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.ranks.gather(Collective::AllGather, value, TimeLimit::new(timeout))
    }

    /// Makes the world once its number and the addresses are known.
    fn join(engine: &Engine, rank: usize, number: u64, addresses: Vec<Address>, limit: TimeLimit) -> Result<World> {
        let mut seen = HashMap::new();
        for (rank, address) in addresses.iter().enumerate() {
            if let Some(other) = seen.insert(address, rank) {
                let what = format!("{address}");
                return Err(Error::Launch { what, reason: format!("ranks {other} and {rank} have the same address") });
            }
        }
        let member = Member::new(rank, addresses.clone());
        let (name, registration) = define_next(engine, &format!("world-{number:016x}"), |name| {
            let member = member.clone();
            let answer = move |reply: Responder<RankReply>, ask: RankAsk| member.asked(reply, ask);
            engine.provider(PROVIDER).define_deferred(name, answer)
        })?;
        let leaving = member.clone();
        let hook = engine.on_prefinalize(move || leaving.leave());
        let ask = engine.procedure::<RankAsk, RankReply>(&name);
        let ranks = Ranks { engine: engine.clone(), member, endpoints: Vec::new(), ask, turn: Mutex::new(()) };
        let mut world = World { ranks, hook };
        // The name is free for another attempt then. In a world that was made, it stays: a slower rank may still ask.
        world.find_ranks(&addresses, limit).inspect_err(|_| {
            registration.remove();
        })?;
        Ok(world)
    }

    fn find_ranks(&mut self, addresses: &[Address], limit: TimeLimit) -> Result<()> {
        for address in addresses {
            let mut attempts = Attempts::new();
            let endpoint = loop {
                match look_up(&self.ranks.engine, address, limit)? {
                    Ok(endpoint) => break endpoint,
                    Err(reason) if limit.is_over() => {
                        let what = format!("joining the world ({reason})");
                        return Err(Error::Timeout { peer: address.clone(), what, after: limit.timeout });
                    }
                    Err(_) => attempts.pause(&self.ranks.engine, limit),
                }
            };
            self.ranks.endpoints.push(endpoint);
        }
        self.ranks.greet(limit)?;
        self.ranks.gather(Collective::Join, &[], limit).map(drop)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.hook.remove();
        self.ranks.member.leave();
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World(rank {} of {})", self.rank(), self.size())
    }
}

/// Through a port of rank 0's host.
fn by_port(engine: &Engine, own: Attendee, address: &Address, variable: &str, limit: TimeLimit) -> Result<Roster> {
    let base = format!("rendezvous-{address}");
    if own.rank == 0 {
        let world = random_number()?;
        listen_for_all(engine, address, variable, limit)?;
        let (_, host) = define_next(engine, &base, |name| Host::open(engine, name, world, own.clone()))?;
        return host.wait(engine, &own.address, limit);
    }
    let (name, registration) = define_next(engine, &base, |name| take_name(engine, name, own.rank))?;
    let place = || Ok(Ok(MeetingPlace { address: address.clone(), name: name.clone(), may_be_stale: false }));
    attend(engine, &own, variable, limit, place).inspect_err(|_| {
        registration.remove();
    })
}

/// Through a file of rank 0 in a directory.
fn by_directory(engine: &Engine, own: Attendee, path: &Path, variable: &str, limit: TimeLimit) -> Result<Roster> {
    let file = RendezvousFile::new(path, &own.job, variable);
    if own.rank != 0 {
        return attend(engine, &own, variable, limit, || file.read());
    }
    let world = random_number()?;
    let host = Host::open(engine, &meeting_of(world), world, own.clone())?;
    let mut published = file.write(world, &own.address, false)?;
    if published.is_none() {
        if let Some(reason) = file.read()?.ok().and_then(|place| other_host(engine, &own, &place, limit)) {
            return Err(Error::Launch { what: variable.to_owned(), reason });
        }
        published = file.write(world, &own.address, true)?;
    }
    let roster = host.wait(engine, &own.address, limit);
    drop(published);
    roster
}

/// Through the launcher.
fn by_pmi(engine: &Engine, own: Attendee, descriptor: i32, limit: TimeLimit) -> Result<Roster> {
    let variable = format!("PMI_FD={descriptor}");
    if own.rank == 0 {
        let world = random_number()?;
        let host = Host::open(engine, &meeting_of(world), world, own.clone())?;
        pmi::exchange_address(descriptor, Some(&notice(world, &own.address)), &own.address, limit)?;
        return host.wait(engine, &own.address, limit);
    }
    let text = pmi::exchange_address(descriptor, None, &own.address, limit)?;
    let failed = || Error::Launch { what: variable.clone(), reason: format!("rank 0 announces `{text}`, which is no address") };
    let (world, address) = read_notice(&text).ok_or_else(failed)?;
    let place = || Ok(Ok(MeetingPlace { address: address.clone(), name: meeting_of(world), may_be_stale: false }));
    attend(engine, &own, &variable, limit, place)
}

/// The address at which other ranks reach this one.
fn own_address(engine: &Engine) -> Result<Address> {
    let addresses = engine.addresses();
    let other_hosts = |address: &&Address| matches!(address.scheme(), Transport::Tcp | Transport::Verbs | Transport::Ofi(_));
    addresses.iter().find(other_hosts).or(addresses.first()).cloned().ok_or_else(|| Error::Launch {
        what: "the engine does not listen".to_owned(),
        reason: "all ranks of a world are called by others: make it with `Engine::server(\"tcp\")`".to_owned(),
    })
}

/// Listens at this rank's address of a list, unless the engine does.
fn listen_at_own(engine: &Engine, address: &Address, limit: TimeLimit) -> Result<()> {
    let own = engine.addresses();
    let resolved = look_up(engine, address, limit)?.map(|endpoint| endpoint.address());
    if own.contains(address) || resolved.is_ok_and(|resolved| own.contains(&resolved)) {
        return Ok(());
    }
    listen_for_all(engine, address, "CALOMEL_ENDPOINTS", limit)
}

/// Listens at an address that other ranks know.
fn listen_for_all(engine: &Engine, address: &Address, variable: &str, limit: TimeLimit) -> Result<()> {
    let listen = |address: Address| {
        let engine = engine.clone();
        limit.run(move || engine.listen(address))
    };
    let port = |address: &Address| address.to_string().rsplit(':').next().map(str::to_owned);
    let listened = match listen(address.clone())? {
        // Behind NAT or a load balancer the host has another address than others see.
        Some(Err(Error::Io { cause, .. })) if cause.kind() == ErrorKind::AddrNotAvailable => {
            let everywhere = format!("tcp://0.0.0.0:{}", port(address).unwrap_or_default());
            listen(everywhere.parse::<Address>()?)?
        }
        listened => listened,
    };
    match listened {
        Some(Ok(_)) => Ok(()),
        // By this engine, for an earlier world or on all interfaces.
        Some(Err(Error::AddressInUse { .. }))
            if engine.addresses().iter().any(|own| own.scheme() == address.scheme() && port(own) == port(address)) =>
        {
            Ok(())
        }
        Some(Err(error @ Error::Finalized { .. })) => Err(error),
        Some(Err(error)) => {
            let reason = format!("this rank can't listen at {address}: {error}");
            Err(Error::Launch { what: variable.to_owned(), reason })
        }
        None => {
            let what = format!("joining the world (the host name in {address} was not resolved in time)");
            Err(Error::Timeout { peer: address.clone(), what, after: limit.timeout })
        }
    }
}

/// Defines the first of `base-0`, `base-1` and so on that was not defined with this engine before. Names are never free again,
/// so all ranks that make their worlds in the same order find the same one.
fn define_next<T>(engine: &Engine, base: &str, define: impl Fn(&str) -> Result<T>) -> Result<(String, T)> {
    let taken = engine.provider(PROVIDER).procedures();
    let mut names = (0u64..).map(|number| format!("{base}-{number}"));
    loop {
        let Some(name) = names.find(|name| !taken.contains(name)) else {
            return Err(Error::AlreadyDefined { name: base.to_owned(), provider: PROVIDER });
        };
        match define(&name) {
            // Another thread was faster.
            Err(Error::AlreadyDefined { .. }) => {}
            Err(error) => return Err(error),
            Ok(defined) => return Ok((name, defined)),
        }
    }
}

/// The number of a world that is defined by a list: all ranks compute the same one.
fn number_of(addresses: &[Address]) -> u64 {
    let mut hash = Sha256::new();
    addresses.iter().for_each(|address| hash.update(format!("{address}\n")));
    let digest = hash.finalize();
    digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn random_number() -> Result<u64> {
    let bytes = random::from_system().map_err(|error| Error::io("can't get random numbers from the system", error))?;
    Ok(u64::from_ne_bytes(bytes))
}
