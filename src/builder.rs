//! `EngineBuilder`: an engine's options and limits.

use std::io;
use std::time::Duration;

use crate::config::{HiddenKey, LONGEST, MAX_EAGER, MIN_KEY, MIN_PEER_TIMEOUT};
use crate::engine::{Engine, EngineHooks, EngineShared, Monitor, PeerEvent, STATS_VARIABLE, Statistics, TaskRuntime};
use crate::progress::{Core, CoreSettings, DialFilter, Progress};
use crate::proto;
use crate::rpc::{Caller, EngineService, authorization, serve_stats};
use crate::transport::{KernelCopyPolicy, ShmOptions, TcpOptions, TransportDriver};
use crate::{Address, EngineConfig, Error, IntoAddress, Result, Transport, random};

/// Connections whose handshake is not complete. With 10,000 peers that connect at the same moment, there are hardly ever more
/// than some dozens.
const HANDSHAKES: usize = 1024;

type Wrap = Box<dyn Fn(Box<dyn TransportDriver>) -> Box<dyn TransportDriver>>;

/// Options and limits of an engine; made by [`Engine::builder`], or by [`EngineConfig::builder`] from a file. The defaults suit
/// most programs. Dropping it makes no engine.
pub struct EngineBuilder {
    config: EngineConfig,
    /// The first text that was no address or transport.
    invalid: Option<Error>,
    hooks: EngineHooks,
    dial_filter: Option<DialFilter>,
    #[cfg(feature = "tls")]
    tls: Option<crate::Tls>,
    runtime: TaskRuntime,
    wrap: Wrap,
}

impl Default for EngineBuilder {
    fn default() -> EngineBuilder {
        EngineBuilder::of(EngineConfig::default())
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

    /// An engine with the options and limits of `config`. To add what is no data, such as access control, use
    /// [`EngineConfig::builder`].
    ///
    /// # Errors
    /// [`Error::Config`] with the field and what it may be, also for a file of a key or of certificates that can't be read; and
    /// those of [`EngineBuilder::build`].
    pub fn from_config(config: &EngineConfig) -> Result<Engine> {
        config.builder()?.build()
    }
}

impl EngineConfig {
    /// A builder with these options and limits.
    ///
    /// # Errors
    /// [`Error::Config`] with the field and what it may be: see [`EngineConfig::validate`].
    pub fn builder(&self) -> Result<EngineBuilder> {
        self.validate()?;
        Ok(EngineBuilder::of(self.clone()))
    }
}

impl EngineBuilder {
    fn of(config: EngineConfig) -> EngineBuilder {
        EngineBuilder {
            config,
            invalid: None,
            hooks: EngineHooks::default(),
            dial_filter: None,
            #[cfg(feature = "tls")]
            tls: None,
            runtime: TaskRuntime::default(),
            wrap: Box::new(|transport| transport),
        }
    }

    /// Keeps the value, or the first error for `build`.
    fn keep<T>(&mut self, value: Result<T>, store: impl FnOnce(&mut EngineConfig, T)) {
        match value {
            Ok(value) => store(&mut self.config, value),
            Err(error) => drop(self.invalid.get_or_insert(error)),
        }
    }

    /// Listens at `address`. Call it several times for several addresses, also of different transports.
    pub fn listen(mut self, address: impl IntoAddress) -> Self {
        self.keep(address.into_listen_address(), |config, address| config.listen.push(address));
        self
    }

    /// The address that peers use to reach this engine, in place of those of its listeners: where they see another one than the
    /// engine does, as behind a load balancer, with published ports of containers, or on a host with several networks. It is
    /// what [`Engine::address`] returns, and what bulks carry to other hosts. Port 0 stands for the port of the first listener
    /// of that transport. Call it several times for several addresses.
    pub fn advertise(mut self, address: impl IntoAddress) -> Self {
        self.keep(address.into_address(), |config, address| config.advertise.push(address));
        self
    }

    /// Requires a transport that the engine can dial with, such as `"tcp"`: `build` fails where it is not available.
    pub fn transport(mut self, name: &str) -> Self {
        let transport = Transport::parse(name)
            .ok_or_else(|| Error::InvalidAddress { text: name.to_owned(), reason: crate::address::UNKNOWN_SCHEME.to_owned() });
        self.keep(transport, |config, transport| config.transports.push(transport));
        self
    }

    /// Maximum number of handler threads that run at a time (default 64, started when needed). Threads that wait inside a call
    /// of this library don't count. With 0, handlers run on the progress thread, and another one takes its place while a handler
    /// blocks: handlers that block still run at the same time. With [`Progress::External`]
    /// they run sequentially, in [`Engine::progress`].
    pub fn handler_threads(mut self, count: usize) -> Self {
        self.config.handler_threads = count;
        self
    }

    /// How the engine's threads wait for events (default [`Progress::Adaptive`]), or whose they are ([`Progress::External`]).
    pub fn progress(mut self, progress: Progress) -> Self {
        self.config.progress = progress;
        self
    }

    /// Timeout of calls and transfers that set none themselves (default 30 s).
    pub fn default_timeout(mut self, timeout: Duration) -> Self {
        self.config.default_timeout = timeout;
        self
    }

    /// The largest message that is sent or accepted, in bytes (default 64 MiB). Bulk transfers are not limited.
    pub fn max_message_size(mut self, bytes: usize) -> Self {
        self.config.max_message_size = bytes;
        self
    }

    /// Messages up to this many bytes are sent in one frame (default 16 KiB, at most 512 KiB); longer ones in chunks, between
    /// which other messages are sent.
    pub fn eager_limit(mut self, bytes: usize) -> Self {
        self.config.eager_limit = bytes.min(MAX_EAGER);
        self
    }

    /// The content of read-only bulks up to this many bytes is sent inside the call (default 4 KiB); 0 turns that off.
    pub fn eager_bulk_limit(mut self, bytes: usize) -> Self {
        self.config.eager_bulk_limit = bytes;
        self
    }

    /// Peer timeout: a peer from which nothing arrives for this long, while the engine waits for it, is disconnected (default
    /// 10 s, at least 10 ms).
    pub fn peer_timeout(mut self, timeout: Duration) -> Self {
        self.config.peer_timeout = timeout.clamp(MIN_PEER_TIMEOUT, LONGEST);
        self
    }

    /// How long connecting may take (default 5 s).
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout.min(LONGEST);
        self
    }

    /// Closes connections that have not been used for this long (default never; at least 1 ms), so that an engine which calls
    /// thousands of peers in turn does not keep a connection to each. The next call or transfer of either side connects again.
    /// Nothing is lost: both sides have to agree that nothing is in progress. Endpoints and bulks stay valid, and
    /// [`PeerEvent::Idle`] reports it.
    ///
    /// - It is for the connections that this engine has dialled: set it for all engines of a job. They are closed between one
    ///   and two times the timeout after they were used last.
    /// - A connection stays open while one side holds bulks that came over it, and while the peer could not connect again: it
    ///   holds an [`Endpoint`](crate::Endpoint) of this engine, and this engine does not listen, or not where the peer could
    ///   dial it (its [`dial_filter`](EngineBuilder::dial_filter) counts). An engine that does not listen and exposes memory
    ///   keeps all its connections.
    /// - Peers that call this engine back dial an address at which it listens; that must lead to it, also through firewalls.
    ///   Behind an address that leads to several engines, the next call may reach another one.
    /// - Connecting again may fail as the first time, with [`Error::Unreachable`](crate::Error::Unreachable): where the peer has
    ///   reached its [`max_connections`](EngineBuilder::max_connections), or does not answer within the
    ///   [`connect_timeout`](EngineBuilder::connect_timeout).
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.config.idle_timeout = Some(timeout.clamp(proto::MIN_IDLE, LONGEST));
        self
    }

    /// How long [`Engine::finalize`] waits for handlers in progress (default 5 s).
    pub fn finalize_timeout(mut self, timeout: Duration) -> Self {
        self.config.finalize_timeout = timeout.min(LONGEST);
        self
    }

    /// Whether peers may finalize this engine with [`Endpoint::shutdown`](crate::Endpoint::shutdown) (default no).
    pub fn remote_shutdown(mut self, allowed: bool) -> Self {
        self.config.remote_shutdown = allowed;
        self
    }

    /// A secret that a group of engines shares: 16 random bytes or more. Each side of a new connection proves to the other that
    /// it has the key, without sending it; a peer that can't is refused during the handshake. Calls to an engine with another
    /// key, or none, end with [`Error::AccessDenied`]. This holds on every transport. A shorter key makes `build` fail.
    ///
    /// The key authenticates peers. It does not encrypt: an attacker in the network can still read and change what is sent
    /// afterwards; use TLS against that.
    pub fn pre_shared_key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.config.key = Some(HiddenKey(key.as_ref().to_vec()));
        self.config.pre_shared_key_file = None;
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

    /// Reports each connection that is made to a peer, lost, or closed because it was idle, in order. `hook` is called where
    /// messages are received, so it must be quick, and must not call, transfer or wait. To start something that takes long, send the event to a thread of yours.
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

    /// Whether the engine counts and measures calls, handlers and transfers for [`Engine::stats`] (default yes). It adds 2.8
    /// percent to the instructions of an empty call, and takes some kilobytes for each procedure. Connections, traffic, limits and
    /// refusals are counted in any case.
    ///
    /// With the environment variable `CALOMEL_STATS`, an engine is measured in any case, and writes its statistics when it is
    /// finalized, with `CALOMEL_STATS_SIGNAL` also on a signal: see the chapter on monitoring of the book.
    pub fn statistics(mut self, on: bool) -> Self {
        self.config.statistics = on;
        self
    }

    /// Whether peers may ask for this engine's statistics with [`Endpoint::stats`](crate::Endpoint::stats) (default no). They
    /// contain names of procedures, and addresses of other peers. [`EngineBuilder::authorize`] decides on each peer: the
    /// procedure is named `calomel.stats`.
    pub fn remote_stats(mut self, allowed: bool) -> Self {
        self.config.remote_stats = allowed;
        self
    }

    /// Logs the calls of this engine, and its handlers of peers' calls, that take this long or longer: at level INFO, with target
    /// `calomel::rpc` and the procedure, its provider, the peer and the time, up to 100 lines a minute (default: none are logged).
    /// A call takes the time from [`Call::call`](crate::Call::call) and its like to the arrival of the response, or until a
    /// one-way call is sent; a handler that from its arguments to its response.
    pub fn slow_calls(mut self, threshold: Duration) -> Self {
        self.config.slow_calls = Some(threshold);
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
    /// [`Error::Checksum`]. Bulk data has checksums over tcp and `ofi+…`: verbs devices have their own, and the other transports
    /// cross no network.
    pub fn payload_checksums(mut self, on: bool) -> Self {
        self.config.payload_checksums = on;
        self
    }

    /// How many further connections this engine makes to a peer that it has reached over tcp, for bulk data (default 1, at most
    /// 16). The first large transfer, of 1 MiB or more in either direction, has them made, under the same access control as the
    /// connection itself; transfers from 64 KiB on that begin later take the one with the fewest transfers, so that calls do not
    /// wait behind them. 0: bulk data stays on the connection of the calls. Where no further connection can be made, too.
    pub fn bulk_connections(mut self, count: usize) -> Self {
        self.config.bulk_connections = count.min(proto::MAX_LANES);
        self
    }

    /// Whether a tcp or verbs address of this host is reached through shared memory (default yes). Both sides must have it on,
    /// and run as the same user, whatever [`EngineBuilder::shm_group`] allows; else the address is dialled as it is. An engine
    /// with TLS has it off. [`Endpoint::transport`](crate::Endpoint::transport) returns the transport in use.
    pub fn same_host_upgrade(mut self, on: bool) -> Self {
        self.config.same_host_upgrade = on;
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
        let EngineConfig { tls_ca, tls_certificate, tls_key, tls_server_name, tls_anonymous_clients, .. } = &mut self.config;
        (*tls_ca, *tls_certificate, *tls_key, *tls_server_name, *tls_anonymous_clients) = (None, None, None, None, false);
        self
    }

    /// Lets processes of the group with this number connect over shared memory. Without this only processes of the engine's own
    /// user may. Bulk data of peers of another user goes through a ring only: they map no memory, and the kernel copies none
    /// between them and this engine.
    pub fn shm_group(mut self, gid: u32) -> Self {
        self.config.shm_group = Some(gid);
        self
    }

    /// Whether the kernel copies bulk data between this engine and peers of the same user on this host, with one copy
    /// (`process_vm_readv`): always where the system permits it, or never; then the data goes through a ring, which takes two
    /// copies, by both sides at the same time. Without this each connection measures both, and two ways to write into the ring, and
    /// uses the fastest.
    pub fn shm_kernel_copy(mut self, on: bool) -> Self {
        self.config.shm_kernel_copy = Some(on);
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
    /// [`Error::InvalidAddress`], [`Error::AddressInUse`], [`Error::Unsupported`] (also for a key of less than 16 bytes),
    /// [`Error::Config`] for a file named by an [`EngineConfig`] that can't be used, and [`Error::Io`] when the system refuses.
    pub fn build(self) -> Result<Engine> {
        if let Some(error) = self.invalid {
            return Err(error);
        }
        let mut config = self.config;
        let runtime = self.runtime;
        #[cfg(feature = "tokio")]
        let runtime = TaskRuntime { handle: runtime.handle.or_else(|| tokio::runtime::Handle::try_current().ok()) };
        let refused = |error: io::Error| Error::io("can't get random numbers from the system", error);
        let incarnation = u64::from_ne_bytes(random::from_system().map_err(refused)?);
        let seed = random::from_system().map_err(refused)?;
        let key = config.load_key()?.map(checked_key).transpose()?;
        config.key = None;
        #[cfg(feature = "tls")]
        let tls = match self.tls {
            Some(tls) => Some(tls),
            None => config.load_tls()?,
        };
        // Shared memory has no certificates.
        #[cfg(feature = "tls")]
        {
            config.same_host_upgrade &= tls.is_none();
        }
        let limits = peer_limits(&config);
        config.max_bytes_in_flight_per_peer = Some(limits.peer_bytes);
        config.max_bytes_in_flight = Some(limits.bytes);
        let file = std::env::var_os(STATS_VARIABLE).map(Into::into);
        let statistics = Statistics::new(config.statistics || file.is_some(), file);
        let core = Core::new(
            CoreSettings {
                proto: proto::Config {
                    max_message: config.max_message_size,
                    peer_timeout: config.peer_timeout,
                    connect: config.connect_timeout,
                    idle_timeout: config.idle_timeout,
                    filters_dials: self.dial_filter.is_some(),
                    limits,
                    remote_shutdown: config.remote_shutdown,
                    key,
                    checksums: config.payload_checksums,
                    lanes: config.bulk_connections,
                    worth_a_lane: proto::WORTH_A_LANE,
                },
                progress: config.progress,
                handler_threads: config.handler_threads,
                incarnation,
                seed,
                shm: ShmOptions {
                    group: config.shm_group,
                    lending: match config.shm_kernel_copy {
                        None => KernelCopyPolicy::Measured,
                        Some(true) => KernelCopyPolicy::Always,
                        Some(false) => KernelCopyPolicy::Never,
                    },
                    local_addresses: config.same_host_upgrade,
                },
                dial_filter: self.dial_filter,
                measures: statistics.is_on() || config.slow_calls.is_some(),
                tcp: TcpOptions {
                    peer_timeout: config.peer_timeout,
                    #[cfg(feature = "tls")]
                    tls: tls.map(|tls| (tls, config.connect_timeout)),
                },
            },
            &*self.wrap,
        )?;
        for transport in &config.transports {
            core.transport(*transport)?;
        }
        let (listen, remote_stats) = (std::mem::take(&mut config.listen), config.remote_stats);
        let shared = EngineShared::new(core, config, incarnation, self.hooks, statistics, runtime);
        if remote_stats {
            serve_stats(&Engine::from_shared(shared.clone()))?;
        }
        for address in &listen {
            shared.listen(address)?;
        }
        if let Err(error) = shared.core.run(Box::new(EngineService::new(&shared))) {
            shared.core.stop();
            return Err(error);
        }
        #[cfg(feature = "json")]
        shared.write_on_signal();
        Ok(Engine::new(shared))
    }
}

fn peer_limits(config: &EngineConfig) -> proto::PeerLimits {
    let (peer_bytes, bytes) = config.byte_limits();
    proto::PeerLimits {
        connections: config.max_connections,
        handshakes: HANDSHAKES,
        peer_requests: config.max_requests_per_peer,
        requests: config.max_requests,
        peer_transfers: config.max_transfers_per_peer,
        peer_bytes,
        bytes,
        exposures: config.max_exposures,
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
        self.config.max_connections = count;
        self
    }

    /// How many requests of one peer may be in progress at a time: arriving, waiting for a handler, or being handled (default
    /// 16,384). Those beyond are refused with [`Error::Busy`](crate::Error::Busy). One-way calls that take credit
    /// count, and are not refused: their credit limits them, see [`Call::notify`](crate::Call::notify).
    pub fn max_requests_per_peer(mut self, count: usize) -> Self {
        self.config.max_requests_per_peer = count;
        self
    }

    /// The same for all peers together (default 262,144).
    pub fn max_requests(mut self, count: usize) -> Self {
        self.config.max_requests = count;
        self
    }

    /// How many pulls and pushes of one peer, to and from memory that is exposed here, may be in progress at a time (default
    /// 16,384). Those beyond fail with [`Error::Busy`](crate::Error::Busy). Transfers that an RDMA device carries out by itself
    /// don't count.
    pub fn max_transfers_per_peer(mut self, count: usize) -> Self {
        self.config.max_transfers_per_peer = count;
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
        self.config.max_bytes_in_flight_per_peer = Some(bytes);
        self
    }

    /// The same for all peers together (default four times that of one peer).
    pub fn max_bytes_in_flight(mut self, bytes: usize) -> Self {
        self.config.max_bytes_in_flight = Some(bytes);
        self
    }

    /// How many regions may be exposed at a time (default 1,048,576). Exposing one more fails with
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn max_exposures(mut self, count: usize) -> Self {
        self.config.max_exposures = count;
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
        f.debug_struct("EngineBuilder").field("listen", &self.config.listen).finish_non_exhaustive()
    }
}
