//! The engine's core, which connects the protocol and the transports: the one place that knows both.
//!
//! [`Core::exec`] shows the pattern of every step ([`steps`]): it locks the protocol for one step, takes the outputs, unlocks,
//! and executes them. No system call and no user code runs under the lock. The thread that holds the driver lock ([`driver_lock`])
//! feeds the events of the transports into the protocol. Waiting threads drive by themselves ([`Core::wait`]), and so do futures
//! while they are polled ([`polls`]); a progress thread ([`threads`]), or the program's own event loop ([`external`]), does when
//! none waits.

mod answers;
mod completion;
mod drive;
mod driver_lock;
mod external;
mod failure;
mod frame_log;
mod handler_paused;
mod link_table;
mod own_completion;
mod pacer;
mod polls;
mod processor;
mod signal;
pub(crate) mod spare;
mod steps;
mod threads;
mod timers;
mod workers;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::sync::{Mutex, RwLock, TimedMutex, TimedMutexGuard};
use serde::{Deserialize, Serialize};
use slotmap::SecondaryMap;

pub(crate) use crate::fork::CreatorProcess;
use crate::memory::{Region, Slice};
use crate::proto::{self, Declaration, Lease, LinkId, Memory, PeerTag, Proto, RequestId, TrailingList};
#[cfg(feature = "ofi")]
use crate::transport::Ofi;
#[cfg(feature = "verbs")]
use crate::transport::Verbs;
use crate::transport::{Credentials, Injected, Link, Loopback, Reactor, Shm, ShmOptions, Tcp, TcpOptions, TransportDriver};
pub(crate) use crate::transport::{DeviceAccess, RemoteKeys};
use crate::{Address, Error, Result, Transport};
pub(crate) use completion::{Awaited, Completion, OperationOutcome, wait_any, wake_quietly};
pub(crate) use failure::error_of;
pub(crate) use own_completion::OwnCompletion;
pub(crate) use steps::{REFUSED_BY_FILTER, poll_task};
pub use workers::ThreadsDump;
pub(crate) use workers::{Blocking, Copying, in_job};
pub(crate) use workers::{Handler, HandlerClass, Job, JobKind, Workers, nanos};

/// How the engine waits for events, or that the program does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Progress {
    /// Spins for a moment after an event, then sleeps. Does not spin on a machine with one core.
    #[default]
    Adaptive,
    /// Sleeps at once: the least use of processors, and the slowest answers.
    Park,
    /// Never sleeps: occupies a core for the engine's whole life.
    Spin,
    /// The caller's own event loop makes progress: the engine starts no thread for it. The loop waits for the descriptor of
    /// [`Engine::as_fd`](crate::Engine::as_fd), and calls [`Engine::progress`](crate::Engine::progress) when it is readable.
    ///
    /// While no thread calls `progress`, and none waits in a call or a transfer of the engine or polls a future of one, nothing
    /// moves: the engine neither answers nor sends heartbeats, no deadline and no timer expires. Peers disconnect an engine that
    /// is silent for their [peer timeout](crate::EngineBuilder::peer_timeout).
    ///
    /// - Calls that wait, such as [`Call::call`](crate::Call::call), drive by themselves, on any thread. What arrives meanwhile
    ///   for handlers goes to the handler threads, or with [`handler_threads(0)`](crate::EngineBuilder::handler_threads) waits
    ///   for the next `progress`. So a handler that calls its caller back, or two engines in one loop that call each other,
    ///   need handler threads, or calls that are started.
    /// - `progress` runs handlers on the calling thread, and a handler that blocks blocks its loop: no other thread takes over.
    ///   Handlers that have turned out to be slow start on handler threads, as with the other settings; so do async handlers
    ///   that are woken. With `handler_threads(0)` all run in `progress`.
    /// - Timers, and the deadlines of futures, run in `progress`.
    ///
    /// So with `handler_threads(0)` the engine has no thread at all, with these exceptions: finalizing by a peer or in a
    /// handler, `finalize_async`, and resolving host names in async code take a thread until they are done.
    /// [`Engine::finalize`](crate::Engine::finalize), dropping the last handle, and
    /// [`Engine::wait_for_finalize`](crate::Engine::wait_for_finalize) drive, and run handlers, on the calling thread. They
    /// wait up to a second for peers that are served by the same thread, and so do not end their connections meanwhile.
    External,
}

/// The environment of the protocol in an engine.
pub(crate) enum EngineEnv {}

impl proto::Env for EngineEnv {
    type Memory = Slice;
    type Waiter = Arc<Completion>;
    type Lease = LeaseKeepAlive;
    type Verdicts = crate::shape::Verdicts;
    type Carrier = Arc<dyn Link>;

    // Large buffers are mapped lazily, so a peer's claim of a size costs little until the bytes arrive.
    #[allow(unsafe_code)]
    fn body_memory(len: usize, declaration: Option<&Declaration<EngineEnv>>, list: Option<TrailingList>) -> Slice {
        let is_taken = declaration.is_some_and(|declaration| declaration.verdicts.takes_lists());
        let region = match list.filter(|_| is_taken).and_then(|list| list.head_of(len)) {
            // SAFETY: only what handles a request, or gets an answer, takes the message out of the region. The protocol hands the region
            // to it once the chunks that follow each other have filled it, and transports report a chunk when they have written it.
            Some((head, width)) => unsafe { Region::for_list(head, len - head, width) },
            None => Region::for_message(len),
        };
        Slice::whole(&region)
    }

    fn request_place() -> Box<Option<proto::Incoming<EngineEnv>>> {
        spare::request_place()
    }

    fn answer_place() -> Box<Option<proto::Answer<EngineEnv>>> {
        spare::answer_place()
    }
}

impl proto::Carrier for Arc<dyn Link> {
    fn injects(&self) -> bool {
        (**self).injects()
    }

    fn inject(&self, bytes: &[u8]) -> Injected {
        // A message is taken apart to be logged, which is not to be waited for.
        if frame_log::is_on() { Injected::No } else { (**self).inject(bytes) }
    }

    fn gathers(&self) -> bool {
        (**self).gathers()
    }

    fn takes_system_calls(&self) -> bool {
        (**self).takes_system_calls()
    }
}

impl Memory for Slice {
    fn len(&self) -> usize {
        self.len
    }

    fn part(&self, offset: usize, len: usize) -> Option<Slice> {
        Slice::part(self, offset, len)
    }

    fn for_one_operation(&self) -> Slice {
        Slice::for_one_operation(self)
    }

    fn that_may_lapse(&self) -> Slice {
        Slice::that_may_lapse(self)
    }

    fn end(&self) {
        Slice::end(self);
    }
}

/// Keeps a value alive as long as a peer holds a bulk.
pub(crate) struct LeaseKeepAlive {
    pub token: u128,
    /// Dropped when the peer does not hold the bulk any more; kept alive, never read.
    pub _kept: Arc<dyn Any + Send + Sync>,
}

impl Lease for LeaseKeepAlive {
    fn token(&self) -> u128 {
        self.token
    }
}

/// Receives what peers want of this engine.
pub(crate) trait Service: Send + Sync {
    /// A call has arrived: the job that handles it, or `None` when the call is answered already.
    fn request(&self, incoming: proto::Placed<proto::Incoming<EngineEnv>>) -> Option<Job>;
    /// The caller of this request does not accept an answer any more.
    fn cancelled(&self, request: RequestId);
    /// Copies of the content of the memory with this token are stale.
    fn stale(&self, token: u128);
    fn shutdown_asked(&self);
    fn peer_changed(&self, peer: Arc<PeerTag>, change: PeerChange);
}

/// A change of the connection to a peer.
pub(crate) enum PeerChange {
    Connected,
    Lost(proto::Failure),
    /// It was closed, as it was idle.
    Idle,
}

pub(crate) struct CoreSettings {
    pub proto: proto::Config,
    pub progress: Progress,
    pub handler_threads: usize,
    pub incarnation: u64,
    pub seed: [u8; 32],
    pub shm: ShmOptions,
    pub tcp: TcpOptions,
    pub dial_filter: Option<DialFilter>,
    pub measures: bool,
}

/// Decides whether an address that a peer has named may be dialled.
pub(crate) type DialFilter = Box<dyn Fn(&Address) -> bool + Send + Sync>;

/// The core of an engine: protocol, transports, threads.
pub(crate) struct Core {
    proto: Mutex<Proto<EngineEnv>>,
    transports: Vec<Box<dyn TransportDriver>>,
    links: RwLock<link_table::LinkTable<Arc<dyn Link>>>,
    /// The own addresses of links that are being dialled by a same-host address.
    fallback_addresses: Mutex<SecondaryMap<LinkId, Address>>,
    driver_lock: driver_lock::DriverLock,
    driver: TimedMutex<drive::Driver>,
    waker: Arc<mio::Waker>,
    pacer: pacer::PollPacer,
    polls: polls::Polls,
    /// The protocol has frames to send that a thread has left for the driver. Changes under the protocol's lock only.
    unsent: AtomicBool,
    /// What is unsent, if anything is, are calls and transfers that may wait for more. Changes under the protocol's lock only.
    unsent_may_wait: AtomicBool,
    /// Answers are among what is unsent, which other threads have left. Changes under the protocol's lock only.
    answers_left: AtomicBool,
    /// When the sleeping driver wakes by itself, in microseconds after `start`; `u64::MAX` for never, 0 for awake.
    asleep_until: AtomicU64,
    start: Instant,
    timers: Mutex<timers::Timers>,
    service: OnceLock<Box<dyn Service>>,
    workers: Arc<Workers>,
    /// Runs the functions of timers, which must not wait for handlers.
    timer_workers: Arc<Workers>,
    threads: threads::Threads,
    /// Handlers run on the progress thread only.
    handlers_inline: bool,
    spin: Option<Duration>,
    /// How long jobs stay behind a handler that waits.
    stay: Duration,
    /// The caller's event loop takes the place of the progress thread.
    external: Option<external::External>,
    stopping: AtomicBool,
    dial_filter: Option<DialFilter>,
    /// Whether the ends of operations are timed.
    measures: bool,
    /// The beginning of the driver's clock, on the system's.
    clock_start: u64,
    /// The process that made the engine.
    process: CreatorProcess,
}

/// How long to wait for a thread that was rung out of the reactor, before ringing again: it takes less, unless the machine is
/// overloaded.
const RING_AGAIN: Duration = Duration::from_millis(10);

/// How long a thread spins after an event. A round trip in which both sides have to be woken takes 100 to 350 µs: if they spun
/// for less, two engines that have once slept would find each other asleep at every call.
const SPIN: Duration = Duration::from_micros(400);
/// So many polls of futures return to their runtime in each round: see `polls`. Where a task is always ready, as the one that leads,
/// runtimes look once in so many polls of tasks for one that another thread has spawned or woken (tokio: in 31), and for sockets and
/// timers (in 61).
const RETURNS: u32 = 64;

impl Core {
    pub(crate) fn new(
        settings: CoreSettings,
        wrap: &dyn Fn(Box<dyn TransportDriver>) -> Box<dyn TransportDriver>,
    ) -> Result<Arc<Core>> {
        let failed = |error| Error::io("can't make the engine's reactor", error);
        let driver = drive::Driver::new().map_err(failed)?;
        let waker = Arc::new(driver.waker().map_err(failed)?);
        let reactor = |index: usize| -> Result<Reactor> {
            let registry = driver.registry().map_err(failed)?;
            Ok(Reactor { registry, waker: waker.clone(), first_token: drive::first_token(index) })
        };
        let transports: Vec<Box<dyn TransportDriver>> = vec![
            wrap(Box::new(Loopback::new(reactor(0)?))),
            wrap(Box::new(Shm::new(reactor(1)?, settings.shm)?)),
            wrap(Box::new(Tcp::new(reactor(2)?, settings.tcp)?)),
            #[cfg(feature = "verbs")]
            wrap(Box::new(Verbs::new(reactor(3)?, settings.incarnation, proto::wire::VERSIONS))),
            #[cfg(feature = "ofi")]
            wrap(Box::new(Ofi::new(
                // Its place in this list.
                reactor(3 + usize::from(cfg!(feature = "verbs")))?,
                settings.incarnation,
                proto::wire::VERSIONS,
                settings.proto.key.is_some(),
            ))),
        ];
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = match settings.progress {
            Progress::Adaptive | Progress::External => (cores > 1).then_some(SPIN),
            Progress::Park => None,
            Progress::Spin => Some(Duration::MAX),
        };
        let external = (settings.progress == Progress::External).then(|| external::External::new(driver.reactor()));
        let pacer = pacer::PollPacer::new();
        let clock_start = steps::monotonic().saturating_sub(pacer.nanos_at(Instant::now()));
        Ok(Arc::new(Core {
            proto: Mutex::new(Proto::new(settings.proto, settings.incarnation, settings.seed)),
            transports,
            links: RwLock::default(),
            fallback_addresses: Mutex::default(),
            driver_lock: driver_lock::DriverLock::default(),
            driver: TimedMutex::new(driver),
            waker,
            pacer,
            polls: polls::Polls::default(),
            unsent: AtomicBool::new(false),
            unsent_may_wait: AtomicBool::new(false),
            answers_left: AtomicBool::new(false),
            asleep_until: AtomicU64::new(0),
            start: Instant::now(),
            timers: Mutex::default(),
            service: OnceLock::new(),
            workers: Workers::new("handler", settings.handler_threads),
            timer_workers: Workers::new("timer", timers::MAX_RUNNING),
            threads: threads::Threads::default(),
            handlers_inline: settings.handler_threads == 0,
            spin,
            stay: handler_paused::stay(cores),
            external: external.transpose().map_err(failed)?,
            stopping: AtomicBool::new(false),
            dial_filter: settings.dial_filter,
            measures: settings.measures,
            clock_start,
            process: CreatorProcess::this(),
        }))
    }

    pub(crate) fn transport(&self, scheme: Transport) -> Result<&dyn TransportDriver> {
        let found = self.transports.iter().find(|transport| transport.serves(scheme));
        let found = found.ok_or_else(|| Error::Unsupported {
            what: format!("transport {}", scheme.name()),
            reason: match scheme {
                Transport::Nowhere => "it is the address of an engine that does not listen",
                Transport::Ofi(_) => "it is built with feature `ofi` only",
                _ => "it is built with feature `verbs` only",
            }
            .to_owned(),
        })?;
        found.available(scheme)?;
        Ok(&**found)
    }

    pub(crate) fn listen(&self, address: &Address) -> Result<Address> {
        let bound = self.transport(address.scheme())?.listen(address)?;
        for (transport, local_address) in self.local_addresses(&bound, false) {
            if let Err(error) = transport.listen(&local_address) {
                tracing::debug!(target: "calomel::progress", %error, "no same-host address for this listener");
            }
        }
        self.wake();
        Ok(bound)
    }

    /// The addresses of the same listener at other transports.
    fn local_addresses(&self, address: &Address, dialled: bool) -> impl Iterator<Item = (&dyn TransportDriver, Address)> {
        self.transports.iter().flat_map(move |transport| {
            transport.local_addresses(address, dialled).into_iter().map(move |local_address| (&**transport, local_address))
        })
    }

    /// The scheme of the transport that carries a link.
    pub(crate) fn scheme_of(&self, link: LinkId) -> Option<Transport> {
        Some(self.transport_link(link)?.scheme())
    }

    /// The process at the other end of a link, where the kernel reports it.
    pub(crate) fn process_of(&self, link: LinkId) -> Option<Credentials> {
        self.transport_link(link)?.process()
    }

    /// The certificate of the peer at the other end of a link.
    #[cfg(feature = "tls")]
    pub(crate) fn certificate_of(&self, link: LinkId) -> Option<Arc<[u8]>> {
        self.transport_link(link)?.certificate()
    }

    /// Whether a job runs on the thread that receives requests, or in the event loop. Others go to their pool, or to the handler threads.
    fn runs_inline(&self, job: &Job) -> bool {
        let class = job.class();
        job.is_timer() || class.pool.is_none() && (self.handlers_inline || !class.is_slow())
    }

    /// Gives a job to its pool, or to the handler threads.
    pub(crate) fn dispatch(&self, job: Job) {
        let waited = job.waited(self.pacer.nanos());
        match &job.class().pool {
            Some(pool) => pool.clone().push(job, waited),
            None if self.handlers_inline || self.is_external() && job.is_timer() => {
                let left = self.threads.give(self, job);
                debug_assert!(left.is_none(), "no handler pauses such a thread");
            }
            None => self.workers.push(job, waited),
        }
    }

    /// Gives the task of an async handler, which has been woken, to the progress thread, as if that had received a request; or to other
    /// threads, where they would run the handler of such a request. To wake a thread for each task takes longer than most polls.
    pub(crate) fn dispatch_woken(&self, job: Job) {
        let left = if self.runs_inline(&job) && !self.is_external() { self.threads.give(self, job) } else { Some(job) };
        if let Some(job) = left {
            self.dispatch(job);
        }
    }

    /// Locks the reactor for the driver, which is going to sleep there. A progress thread that has lost the driver lock may
    /// stay there a moment longer. `None`: it has not left before the deadline.
    fn reactor(&self, deadline: Option<Instant>) -> Option<TimedMutexGuard<'_, drive::Driver>> {
        loop {
            if let Some(driver) = self.driver.try_lock_for(RING_AGAIN) {
                return Some(driver);
            }
            self.ring();
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
        }
    }

    /// How often the RDMA devices have changed; 0 where there are none.
    pub(crate) fn devices(&self) -> u32 {
        self.transports.iter().map(|transport| transport.devices()).sum()
    }

    /// Registers the memory with a device, so that peers reach it by these keys until its gate is closed. `None` without a
    /// device.
    pub(crate) fn keys(&self, region: &Region, access: DeviceAccess) -> Result<Option<RemoteKeys>> {
        for transport in &self.transports {
            let keys = transport.expose(region, access);
            if let Some(keys) = keys.map_err(|error| Error::io("can't register the memory with a device", error))? {
                return Ok(Some(keys));
            }
        }
        Ok(None)
    }

    /// As `keys`, for one peer; `None` without a connection to it.
    pub(crate) fn keys_for(&self, peer: proto::PeerId, region: &Region, access: DeviceAccess) -> Result<Option<RemoteKeys>> {
        let link = self.with_proto(|proto| proto.connection(peer)).and_then(|link| self.transport_link(link));
        let keys = link.map_or(Ok(None), |link| link.expose(region, access));
        keys.map_err(|error| Error::io("can't register the memory with a device", error))
    }

    pub(crate) fn stop_listening(&self) {
        self.transports.iter().for_each(|transport| transport.stop_listening());
    }

    /// How often a thread has slept in the reactor, and been woken.
    pub(crate) fn sleeps(&self) -> u64 {
        self.pacer.sleeps.load(Ordering::Relaxed)
    }

    /// The threads that run handlers, without those of the program's own pools.
    pub(crate) fn handler_threads(&self) -> ThreadsDump {
        let (queued_for_progress, handling) = self.threads.load();
        ThreadsDump { queued_for_progress, handling, ..self.workers.dump() }
    }

    #[cfg(test)]
    pub(crate) fn leftovers(&self) -> Vec<String> {
        self.with_proto(Proto::leftovers)
    }
}
