//! `EngineBuilder`: an engine's options and limits.

use std::io;
use std::time::Duration;

use crate::engine::{
    Engine, EngineHooks, EngineLimits, EngineShared, Monitor, PeerEvent, STATS_VARIABLE, Statistics, TaskRuntime,
};
use crate::progress::{Core, CoreSettings, DialFilter, Progress};
use crate::proto;
use crate::rpc::{Caller, EngineService, authorization, serve_stats};
use crate::transport::{KernelCopyPolicy, ShmOptions, TcpOptions, TransportDriver};
use crate::{Address, Error, IntoAddress, Result, Transport, random};

/// Largest eager limit: the message with its head has to fit into a frame of 1 MiB.
const MAX_EAGER: usize = 512 << 10;
/// Default number of handler threads: enough for handlers that block; none is started before it is needed.
const HANDLER_THREADS: usize = 64;

/// Shortest key, in bytes: an attacker that has recorded a proof can try keys offline, and would find shorter ones.
const MIN_KEY: usize = 16;

/// Durations are cut to a year, so that adding them to the clock can't overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Limits on what an engine holds for its peers: those that were set, or the defaults.
struct LimitOverrides {
    connections: usize,
    peer_requests: usize,
    requests: usize,
    peer_transfers: usize,
    peer_bytes: Option<usize>,
    bytes: Option<usize>,
    exposures: usize,
}

/// Connections whose handshake is not complete. With 10,000 peers that connect at the same moment, there are hardly ever more
/// than some dozens.
const HANDSHAKES: usize = 1024;
/// The default byte limit for one peer allows so many messages of the largest size; that for all peers is so many times larger.
const MESSAGES: usize = 4;
const MIN_MESSAGE: usize = 16 << 20;

impl Default for LimitOverrides {
    fn default() -> LimitOverrides {
        LimitOverrides {
            connections: 16 << 10,
            peer_requests: 16 << 10,
            requests: 256 << 10,
            peer_transfers: 16 << 10,
            peer_bytes: None,
            bytes: None,
            exposures: 1 << 20,
        }
    }
}

impl LimitOverrides {
    fn limits(&self, max_message: usize) -> proto::PeerLimits {
        let peer_bytes = self.peer_bytes.unwrap_or_else(|| max_message.max(MIN_MESSAGE).saturating_mul(MESSAGES));
        // With less, every message of the largest size would be refused.
        let peer_bytes = peer_bytes.max(max_message);
        let bytes = self.bytes.unwrap_or_else(|| peer_bytes.saturating_mul(MESSAGES)).max(max_message);
        proto::PeerLimits {
            connections: self.connections,
            handshakes: HANDSHAKES,
            peer_requests: self.peer_requests,
            requests: self.requests,
            peer_transfers: self.peer_transfers,
            peer_bytes,
            bytes,
            exposures: self.exposures,
        }
    }
}

type Wrap = Box<dyn Fn(Box<dyn TransportDriver>) -> Box<dyn TransportDriver>>;

/// Options and limits of an engine; made by [`Engine::builder`]. The defaults suit most programs. Dropping it makes no
/// engine.
pub struct EngineBuilder {
    listen: Vec<Result<Address>>,
    advertise: Vec<Result<Address>>,
    transports: Vec<String>,
    handler_threads: usize,
    progress: Progress,
    default_timeout: Duration,
    max_message: usize,
    eager: usize,
    eager_bulk: usize,
    peer_timeout: Duration,
    connect: Duration,
    finalize: Duration,
    remote_shutdown: bool,
    key: Option<Vec<u8>>,
    checksums: bool,
    bulk_connections: usize,
    hooks: EngineHooks,
    dial_filter: Option<DialFilter>,
    statistics: bool,
    remote_stats: bool,
    overrides: LimitOverrides,
    shm: ShmOptions,
    #[cfg(feature = "tls")]
    tls: Option<crate::Tls>,
    runtime: TaskRuntime,
    wrap: Wrap,
}

impl Default for EngineBuilder {
    fn default() -> EngineBuilder {
        EngineBuilder {
            listen: Vec::new(),
            advertise: Vec::new(),
            transports: Vec::new(),
            handler_threads: HANDLER_THREADS,
            progress: Progress::default(),
            default_timeout: Duration::from_secs(30),
            max_message: 64 << 20,
            eager: 16 << 10,
            eager_bulk: 4 << 10,
            peer_timeout: Duration::from_secs(10),
            connect: Duration::from_secs(5),
            finalize: Duration::from_secs(5),
            remote_shutdown: false,
            key: None,
            checksums: false,
            bulk_connections: 1,
            hooks: EngineHooks::default(),
            dial_filter: None,
            statistics: true,
            remote_stats: false,
            overrides: LimitOverrides::default(),
            shm: ShmOptions { group: None, lending: KernelCopyPolicy::Measured, local_addresses: true },
            #[cfg(feature = "tls")]
            tls: None,
            runtime: TaskRuntime::default(),
            wrap: Box::new(|transport| transport),
        }
    }
}

impl Engine {
    /// An engine that listens at `address`, and can call too. Port 0 is any free port: [`Engine::address`] returns it.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`], [`Error::AddressInUse`], [`Error::Unsupported`] for a transport that is not there, and
    /// [`Error::Io`] when the system refuses.
    pub fn server(address: impl IntoAddress) -> Result<Engine> {
        Engine::builder().listen(address).build()
    }

    /// An engine that calls and exposes, and does not listen: peers transfer over the connections that it makes.
    ///
    /// `transport` is the one that must be available, such as `"tcp"`; the engine can dial the others as well.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a transport that is not there, [`Error::InvalidAddress`] for a name that is none.
    pub fn client(transport: &str) -> Result<Engine> {
        Engine::builder().transport(transport).build()
    }

    /// A builder with all options and limits of an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }
}

impl EngineBuilder {
    /// Listens at `address`. Call it several times for several addresses, also of different transports.
    pub fn listen(mut self, address: impl IntoAddress) -> Self {
        self.listen.push(address.into_listen_address());
        self
    }

    /// The address that peers use to reach this engine, in place of those of its listeners: where they see another one than the
    /// engine does, as behind a load balancer, with published ports of containers, or on a host with several networks. It is
    /// what [`Engine::address`] returns, and what bulks carry to other hosts. Port 0 stands for the port of the first listener
    /// of that transport. Call it several times for several addresses.
    pub fn advertise(mut self, address: impl IntoAddress) -> Self {
        self.advertise.push(address.into_address());
        self
    }

    /// Requires a transport that the engine can dial with, such as `"tcp"`: `build` fails where it is not available.
    pub fn transport(mut self, name: &str) -> Self {
        self.transports.push(name.to_owned());
        self
    }

    /// Maximum number of handler threads that run at a time (default 64, started when needed). Threads that wait inside a call
    /// of this library don't count. With 0, handlers run on the progress thread, and another one takes its place while a handler
    /// blocks: handlers that block still run at the same time. With [`Progress::External`]
    /// they run sequentially, in [`Engine::progress`].
    pub fn handler_threads(mut self, count: usize) -> Self {
        self.handler_threads = count;
        self
    }

    /// How the engine's threads wait for events (default [`Progress::Adaptive`]), or whose they are ([`Progress::External`]).
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// Timeout of calls and transfers that set none themselves (default 30 s).
    pub fn default_timeout(mut self, timeout: Duration) -> Self {
        self.default_timeout = timeout;
        self
    }

    /// The largest message that is sent or accepted, in bytes (default 64 MiB). Bulk transfers are not limited.
    pub fn max_message_size(mut self, bytes: usize) -> Self {
        self.max_message = bytes;
        self
    }

    /// Messages up to this many bytes are sent in one frame (default 16 KiB, at most 512 KiB); longer ones in chunks, between
    /// which other messages are sent.
    pub fn eager_limit(mut self, bytes: usize) -> Self {
        self.eager = bytes.min(MAX_EAGER);
        self
    }

    /// The content of read-only bulks up to this many bytes is sent inside the call (default 4 KiB); 0 turns that off.
    pub fn eager_bulk_limit(mut self, bytes: usize) -> Self {
        self.eager_bulk = bytes;
        self
    }

    /// Peer timeout: a peer from which nothing arrives for this long, while the engine waits for it, is disconnected (default
    /// 10 s, at least 10 ms).
    pub fn peer_timeout(mut self, timeout: Duration) -> Self {
        self.peer_timeout = timeout.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// How long connecting may take (default 5 s).
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect = timeout.min(LONGEST);
        self
    }

    /// How long [`Engine::finalize`] waits for handlers in progress (default 5 s).
    pub fn finalize_timeout(mut self, timeout: Duration) -> Self {
        self.finalize = timeout.min(LONGEST);
        self
    }

    /// Whether peers may finalize this engine with [`Endpoint::shutdown`](crate::Endpoint::shutdown) (default no).
    pub fn remote_shutdown(mut self, allowed: bool) -> Self {
        self.remote_shutdown = allowed;
        self
    }

    /// A secret that a group of engines shares: 16 random bytes or more. Each side of a new connection proves to the other that
    /// it has the key, without sending it; a peer that can't is refused during the handshake. Calls to an engine with another
    /// key, or none, end with [`Error::AccessDenied`]. This holds on every transport. A shorter key makes `build` fail.
    ///
    /// The key authenticates peers. It does not encrypt: an attacker in the network can still read and change what is sent
    /// afterwards; use TLS against that.
    pub fn pre_shared_key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(key.as_ref().to_vec());
        self
    }

    /// Access control for calls: `decide` is called for each call that a peer makes, before the procedure is looked up. When it
    /// returns false, the caller gets [`Error::AccessDenied`]; a one-way call is dropped. Without this all calls are allowed.
    /// Remote shutdown is controlled by [`remote_shutdown`](EngineBuilder::remote_shutdown), access to memory by its exposure.
    ///
    /// `decide` runs where messages are received, sequentially: it must be quick, and must not call, transfer or wait. If it
    /// panics, the call is denied.
    ///
    /// ```
    /// use calomel::{Engine, Error, Request, Transport};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::builder()
    ///     .listen("tcp://127.0.0.1:0")
    ///     .authorize(|caller| caller.procedure() != "stop" || caller.transport() == Some(Transport::Loop))
    ///     .build()?;
    /// server.define("stop", |_: &Request, _: ()| ())?;
    /// let client = Engine::client("tcp")?;
    /// let peer = client.lookup(server.address())?;
    /// let denied = client.procedure::<(), ()>("stop").on(&peer).call(&());
    /// assert!(matches!(denied, Err(Error::AccessDenied { .. })));
    /// # Ok(())
    /// # }
    /// ```
    pub fn authorize(mut self, decide: impl Fn(&Caller<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.hooks.authorize = Some(authorization(decide));
        self
    }

    /// Filters the addresses that *peers* make this engine dial: `decide` is called before such an address is dialled. When it
    /// returns false, the operation that needed the connection ends with [`Error::Unreachable`] and that reason. Without this
    /// all such addresses are dialled. They are the addresses in bulks ([`Bulk::origin`](crate::Bulk::origin)), those that a
    /// peer has claimed when it connected, which are dialled when that connection has ended, and the local addresses
    /// (`shm://…`) of both. Addresses that the program passed to [`Engine::lookup`] are not filtered.
    ///
    /// `decide` runs where connections are made, while no lock is held: it must be quick, and must not call, transfer or wait.
    /// If it panics, the address is refused.
    pub fn dial_filter(mut self, decide: impl Fn(&Address) -> bool + Send + Sync + 'static) -> Self {
        self.dial_filter = Some(Box::new(decide));
        self
    }

    /// Reports each connection that is made to a peer or lost, in order: `hook` is called where messages are received, so it must
    /// be quick, and must not call, transfer or wait. To start something that takes long, send the event to a thread of yours.
    ///
    /// ```
    /// use std::sync::mpsc;
    ///
    /// use calomel::{Engine, PeerEvent};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let (events, peers) = mpsc::channel();
    /// let server = Engine::builder().listen("loop://").on_peer_event(move |event| drop(events.send(event))).build()?;
    /// let client = Engine::client("loop")?;
    /// client.lookup(server.address())?.ping(std::time::Duration::from_secs(5))?;
    /// assert!(matches!(peers.recv(), Ok(PeerEvent::Connected(_))));
    /// client.finalize()?;
    /// assert!(matches!(peers.recv(), Ok(PeerEvent::Lost { .. })));
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_peer_event(mut self, hook: impl Fn(PeerEvent) + Send + Sync + 'static) -> Self {
        self.hooks.peer_hook = Some(Box::new(hook));
        self
    }

    /// Whether the engine counts and measures calls, handlers and transfers for [`Engine::stats`] (default yes). It adds two to
    /// three percent to the instructions of an empty call, and takes some kilobytes for each procedure. Connections, traffic,
    /// limits and refusals are counted in any case.
    ///
    /// With the environment variable `CALOMEL_STATS`, an engine is measured in any case, and writes its statistics when it is
    /// finalized: see the chapter on monitoring of the book.
    pub fn statistics(mut self, on: bool) -> Self {
        self.statistics = on;
        self
    }

    /// Whether peers may ask for this engine's statistics with [`Endpoint::stats`](crate::Endpoint::stats) (default no). They
    /// contain names of procedures, and addresses of other peers. [`EngineBuilder::authorize`] decides on each peer: the
    /// procedure is named `calomel.stats`.
    pub fn remote_stats(mut self, allowed: bool) -> Self {
        self.remote_stats = allowed;
        self
    }

    /// Runs code of the program before and after each call, handler and transfer: see [`Monitor`]. There is one monitor; a
    /// later one replaces it.
    pub fn monitor(mut self, monitor: impl Monitor) -> Self {
        self.hooks.monitor = Some(Box::new(monitor));
        self
    }

    /// Whether arguments, results and bulk data have checksums (CRC-32C), in both directions, on the connections of this engine
    /// (default no; the heads of messages have them in any case). A call or transfer with corrupted data ends with
    /// [`Error::Checksum`]. Bulk data has checksums over tcp only: verbs devices have their own, and the other transports cross
    /// no network.
    pub fn payload_checksums(mut self, on: bool) -> Self {
        self.checksums = on;
        self
    }

    /// How many further connections this engine makes to a peer that it has reached over tcp, for bulk data (default 1, at most
    /// 16). The first large transfer, of 1 MiB or more in either direction, has them made, under the same access control as the
    /// connection itself; transfers from 64 KiB on that begin later take the one with the fewest transfers, so that calls do not
    /// wait behind them. 0: bulk data stays on the connection of the calls. Where no further connection can be made, too.
    pub fn bulk_connections(mut self, count: usize) -> Self {
        self.bulk_connections = count.min(proto::MAX_LANES);
        self
    }

    /// Whether a tcp or verbs address of this host is reached through shared memory (default yes). Both sides must have it on,
    /// and run as the same user, whatever [`EngineBuilder::shm_group`] allows; else the address is dialled as it is. An engine
    /// with TLS has it off. [`Endpoint::transport`](crate::Endpoint::transport) returns the transport in use.
    pub fn same_host_upgrade(mut self, on: bool) -> Self {
        self.shm.local_addresses = on;
        self
    }

    /// Uses TLS on every tcp connection, dialled or accepted, and accepts no other. A peer that shows no trusted certificate,
    /// where one is required, is refused before any of its messages is read. Calls over a refused connection end with
    /// [`Error::AccessDenied`] and the reason, or with [`Error::Unreachable`] where the other side does not use TLS.
    ///
    /// Such an engine does not use shared memory for tcp addresses, in either direction, since shared memory has no
    /// certificates. TLS does not change the other transports: an engine that also listens at `shm://` or `verbs://` is reached
    /// without TLS there.
    ///
    /// With TLS, bulk data is encrypted, and copied twice on each side. Needs the feature `tls`.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: crate::Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Lets processes of the group with this number connect over shared memory. Without this only processes of the engine's own
    /// user may. Bulk data of peers of another user goes through a ring only: they map no memory, and the kernel copies none
    /// between them and this engine.
    pub fn shm_group(mut self, gid: u32) -> Self {
        self.shm.group = Some(gid);
        self
    }

    /// Whether the kernel copies bulk data between this engine and peers of the same user on this host, with one copy
    /// (`process_vm_readv`): always where the system permits it, or never; then the data goes through a ring, which takes two
    /// copies, by both sides at the same time. Without this each connection measures both, and uses the faster one.
    pub fn shm_kernel_copy(mut self, on: bool) -> Self {
        self.shm.lending = if on { KernelCopyPolicy::Always } else { KernelCopyPolicy::Never };
        self
    }

    /// The tokio runtime within which the engine polls its async handlers: in them, `tokio::time::sleep`, tokio's sockets and
    /// `tokio::spawn` work. Without this it is the runtime within which `build` is called, if there is one.
    ///
    /// The engine's own threads poll the handlers. Timers and sockets are the runtime's, which must be running: one of several
    /// threads is, one of the current thread is while it blocks on something. Needs the feature `tokio`.
    #[cfg(feature = "tokio")]
    pub fn tokio(mut self, runtime: tokio::runtime::Handle) -> Self {
        self.runtime.handle = Some(runtime);
        self
    }

    /// Wraps each transport: tests inject faults this way.
    #[cfg(test)]
    pub(crate) fn wrap(mut self, wrap: impl Fn(Box<dyn TransportDriver>) -> Box<dyn TransportDriver> + 'static) -> Self {
        self.wrap = Box::new(wrap);
        self
    }

    /// Makes the engine, and starts its threads.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`], [`Error::AddressInUse`], [`Error::Unsupported`] (also for a key of less than 16 bytes), and
    /// [`Error::Io`] when the system refuses.
    pub fn build(self) -> Result<Engine> {
        let listen = self.listen.into_iter().collect::<Result<Vec<Address>>>()?;
        let runtime = self.runtime;
        #[cfg(feature = "tokio")]
        let runtime = TaskRuntime { handle: runtime.handle.or_else(|| tokio::runtime::Handle::try_current().ok()) };
        let advertise = self.advertise.into_iter().collect::<Result<Vec<Address>>>()?;
        let refused = |error: io::Error| Error::io("can't get random numbers from the system", error);
        let incarnation = u64::from_ne_bytes(random::from_system().map_err(refused)?);
        let seed = random::from_system().map_err(refused)?;
        let key = self.key.map(checked_key).transpose()?;
        #[cfg(feature = "tls")]
        let shm = ShmOptions { local_addresses: self.shm.local_addresses && self.tls.is_none(), ..self.shm };
        #[cfg(not(feature = "tls"))]
        let shm = self.shm;
        let file = std::env::var_os(STATS_VARIABLE).map(Into::into);
        let statistics = Statistics::new(self.statistics || file.is_some(), file);
        let core = Core::new(
            CoreSettings {
                proto: proto::Config {
                    max_message: self.max_message,
                    peer_timeout: self.peer_timeout,
                    connect: self.connect,
                    limits: self.overrides.limits(self.max_message),
                    remote_shutdown: self.remote_shutdown,
                    key,
                    checksums: self.checksums,
                    lanes: self.bulk_connections,
                    worth_a_lane: proto::WORTH_A_LANE,
                },
                progress: self.progress,
                handler_threads: self.handler_threads,
                incarnation,
                seed,
                shm,
                dial_filter: self.dial_filter,
                measures: statistics.is_on(),
                tcp: TcpOptions {
                    peer_timeout: self.peer_timeout,
                    #[cfg(feature = "tls")]
                    tls: self.tls.map(|tls| (tls, self.connect)),
                },
            },
            &*self.wrap,
        )?;
        for name in &self.transports {
            let scheme = Transport::parse(name).ok_or_else(|| Error::InvalidAddress {
                text: name.clone(),
                reason: "the transport is not one of tcp, shm, verbs, loop".to_owned(),
            })?;
            core.transport(scheme)?;
        }
        let limits = EngineLimits {
            default_timeout: self.default_timeout,
            eager: self.eager,
            eager_bulk: self.eager_bulk,
            finalize_timeout: self.finalize,
            values: self.overrides.limits(self.max_message).peer_bytes.saturating_mul(proto::VALUES_COUNT),
        };
        let shared = EngineShared::new(core, limits, incarnation, advertise, self.hooks, statistics, runtime);
        if self.remote_stats {
            serve_stats(&Engine::from_shared(shared.clone()))?;
        }
        for address in &listen {
            shared.listen(address)?;
        }
        if let Err(error) = shared.core.run(Box::new(EngineService::new(&shared))) {
            shared.core.stop();
            return Err(error);
        }
        Ok(Engine::new(shared))
    }
}

/// Limits, which bound the memory that peers can make the engine use. The defaults let 10,000 peers connect. Where a limit is
/// for all peers together, only peers that use more than their share (the limit divided by the number of connections) are
/// refused, so a few greedy peers don't lock the others out.
impl EngineBuilder {
    /// How many accepted connections the engine keeps at a time (default 16,384). A peer that connects beyond that is refused,
    /// and its calls fail with [`Error::Disconnected`](crate::Error::Disconnected) or
    /// [`Error::Unreachable`](crate::Error::Unreachable), which can be retried. Connections that the engine dials itself don't
    /// count. As many connections for bulk data ([`EngineBuilder::bulk_connections`]) may come on top; where one is refused, bulk
    /// data stays on the first connection. Connections in the handshake are counted apart: there are 1024 at most, and beyond that the oldest is dropped.
    ///
    /// The system's limit on open files applies too: a tcp connection takes one, one over shared memory several.
    pub fn max_connections(mut self, count: usize) -> Self {
        self.overrides.connections = count;
        self
    }

    /// How many requests of one peer may be in progress at a time: arriving, waiting for a handler, or being handled (default
    /// 16,384). Those beyond are refused with [`Error::Busy`](crate::Error::Busy). One-way calls that take credit
    /// count, and are not refused: their credit limits them, see [`Call::notify`](crate::Call::notify).
    pub fn max_requests_per_peer(mut self, count: usize) -> Self {
        self.overrides.peer_requests = count;
        self
    }

    /// The same for all peers together (default 262,144).
    pub fn max_requests(mut self, count: usize) -> Self {
        self.overrides.requests = count;
        self
    }

    /// How many pulls and pushes of one peer, to and from memory that is exposed here, may be in progress at a time (default
    /// 16,384). Those beyond fail with [`Error::Busy`](crate::Error::Busy). Transfers that an RDMA device carries out by itself
    /// don't count.
    pub fn max_transfers_per_peer(mut self, count: usize) -> Self {
        self.overrides.peer_transfers = count;
        self
    }

    /// How many bytes of messages the engine holds for one peer at a time: of its requests, from their announcement to the
    /// response, and of responses until they are sent (default four times the largest message, at least 64 MiB; never less than
    /// the largest message). Requests beyond that are refused with [`Error::Busy`](crate::Error::Busy), and so is a request
    /// whose response does not fit, because the peer is slow to read: then its handler has run. Exposed memory does not count.
    ///
    /// Arguments may take many times as much memory as they did in the message: an empty `String` took one byte, and takes
    /// twenty-four. Where they take more than the message, a quarter of them counts too, from the decoding to the response. So
    /// with the defaults a message of the largest size may become thirteen times as large, which numbers of 64 bits do, and
    /// texts of four letters and more; smaller messages more. A one-way call that was sent waits until there is room: its
    /// message counts meanwhile, but not against other calls that wait, so a peer may have twice this number of bytes then. A
    /// request whose arguments alone would be too much fails with [`Error::Decode`](crate::Error::Decode), and so does a
    /// response whose value would take more than four times this number of bytes.
    pub fn max_bytes_in_flight_per_peer(mut self, bytes: usize) -> Self {
        self.overrides.peer_bytes = Some(bytes);
        self
    }

    /// The same for all peers together (default four times that of one peer).
    pub fn max_bytes_in_flight(mut self, bytes: usize) -> Self {
        self.overrides.bytes = Some(bytes);
        self
    }

    /// How many regions may be exposed at a time (default 1,048,576). Exposing one more fails with
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn max_exposures(mut self, count: usize) -> Self {
        self.overrides.exposures = count;
        self
    }
}

fn checked_key(secret: Vec<u8>) -> Result<proto::PreSharedKey> {
    if secret.len() < MIN_KEY {
        return Err(Error::Unsupported {
            what: format!("a pre-shared key of {} bytes", secret.len()),
            reason: format!("keys shorter than {MIN_KEY} bytes can be guessed"),
        });
    }
    Ok(proto::PreSharedKey::new(secret))
}

impl std::fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineBuilder").field("listen", &self.listen).finish_non_exhaustive()
    }
}
