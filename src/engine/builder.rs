//! How engines are made.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::finalize::Finalizing;
use super::{Engine, EngineHandles, EngineLimits, EngineShared};
use crate::bulk::{ForeignCopies, Origin};
use crate::progress::{Core, CoreSettings, DialFilter, Progress};
use crate::proto;
use crate::rpc::{Authorize, Caller, EngineService, Procedures, Registry};
use crate::transport::{KernelCopyPolicy, ShmOptions, TcpOptions, Transport};
use crate::{Address, Error, IntoAddress, Result, Scheme, random};

/// Largest eager limit: a frame of 1 MiB holds it, with the message's head.
const MAX_EAGER: usize = 512 << 10;
/// Handler threads by default: enough for handlers that block, and none is started before it is needed.
const HANDLER_THREADS: usize = 64;

/// A recorded proof lets keys be tried without talking to anybody, so that short ones would be found.
const MIN_KEY: usize = 16;

/// Durations that the clock is added to are cut to a year: that is for ever, and no clock overflows.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// What was said of it, or else the defaults.
struct LimitOverrides {
    connections: usize,
    peer_requests: usize,
    requests: usize,
    peer_transfers: usize,
    peer_bytes: Option<usize>,
    bytes: Option<usize>,
    exposures: usize,
}

/// Peers that have connected and not greeted: 10,000 that come at the same moment are greeted as they come, and hardly ever
/// are there more than some dozens.
const HANDSHAKES: usize = 1024;
/// So many of the largest messages may be in flight for one peer, and times as much for all; of small ones, more.
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
        // With less, the largest message would always be refused.
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

type Wrap = Box<dyn Fn(Box<dyn Transport>) -> Box<dyn Transport>>;

/// What an engine can be told; made by [`Engine::builder`]. The defaults need no tuning.
pub struct EngineBuilder {
    listen: Vec<Result<Address>>,
    transports: Vec<String>,
    handler_threads: usize,
    progress: Progress,
    default_timeout: Duration,
    max_message: usize,
    eager: usize,
    eager_bulk: usize,
    heartbeat: Duration,
    connect: Duration,
    finalize: Duration,
    remote_shutdown: bool,
    key: Option<Vec<u8>>,
    checksums: bool,
    authorize: Option<Authorize>,
    dial_filter: Option<DialFilter>,
    most: LimitOverrides,
    shm: ShmOptions,
    #[cfg(feature = "tls")]
    tls: Option<crate::Tls>,
    wrap: Wrap,
}

impl Default for EngineBuilder {
    fn default() -> EngineBuilder {
        EngineBuilder {
            listen: Vec::new(),
            transports: Vec::new(),
            handler_threads: HANDLER_THREADS,
            progress: Progress::default(),
            default_timeout: Duration::from_secs(30),
            max_message: 64 << 20,
            eager: 16 << 10,
            eager_bulk: 4 << 10,
            heartbeat: Duration::from_secs(10),
            connect: Duration::from_secs(5),
            finalize: Duration::from_secs(5),
            remote_shutdown: false,
            key: None,
            checksums: false,
            authorize: None,
            dial_filter: None,
            most: LimitOverrides::default(),
            shm: ShmOptions { group: None, lending: KernelCopyPolicy::Crowded, local_addresses: true },
            #[cfg(feature = "tls")]
            tls: None,
            wrap: Box::new(|transport| transport),
        }
    }
}

impl EngineBuilder {
    /// Listens at `address`; several calls, several addresses, of different transports too.
    pub fn listen(mut self, address: impl IntoAddress) -> Self {
        self.listen.push(address.into_address());
        self
    }

    /// Names a transport that the engine must be able to dial with, such as `"tcp"`: `build` fails where it can't.
    pub fn transport(mut self, name: &str) -> Self {
        self.transports.push(name.to_owned());
        self
    }

    /// How many handlers may run on threads of their own at a time (default 64, started when needed). Those that wait
    /// inside a call of this library don't count. 0: handlers run where progress is made, one after the other.
    pub fn handler_threads(mut self, count: usize) -> Self {
        self.handler_threads = count;
        self
    }

    /// How the engine waits (default [`Progress::Adaptive`]).
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// How long calls and transfers may take that say nothing else (default 30 s).
    pub fn default_timeout(mut self, timeout: Duration) -> Self {
        self.default_timeout = timeout;
        self
    }

    /// The largest message that is sent or taken, in bytes (default 64 MiB). Bulk transfers have no limit.
    pub fn max_message_size(mut self, bytes: usize) -> Self {
        self.max_message = bytes;
        self
    }

    /// Messages up to this many bytes travel in one piece (default 16 KiB, at most 512 KiB); longer ones in chunks between
    /// which others get through.
    pub fn eager_limit(mut self, bytes: usize) -> Self {
        self.eager = bytes.min(MAX_EAGER);
        self
    }

    /// Read-only bulks up to this many bytes ride inside the call that they are sent with (default 4 KiB); 0 turns it off.
    pub fn eager_bulk_limit(mut self, bytes: usize) -> Self {
        self.eager_bulk = bytes;
        self
    }

    /// A peer that is silent for this long, while something is expected of it, is given up (default 10 s).
    pub fn heartbeat(mut self, silence: Duration) -> Self {
        self.heartbeat = silence.clamp(Duration::from_millis(10), LONGEST);
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

    /// A secret that all engines of a group are given, 16 bytes or more of it, at random. Each side of a new connection proves to
    /// the other that it has it, without showing it; who can't is told so and let go, before anything is kept of it. Calls to
    /// an engine with another key, or none, end with [`Error::AccessDenied`]. This holds on every transport.
    ///
    /// It is about who connects. What is said afterwards can still be read, and changed, by whoever controls the network.
    pub fn pre_shared_key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(key.as_ref().to_vec());
        self
    }

    /// Decides on each call that peers make here, before it is known whether the procedure exists: false, and the caller gets
    /// [`Error::AccessDenied`]; a one-way call is dropped. Without this all calls are allowed. Whether peers may finalize this
    /// engine is for [`remote_shutdown`](EngineBuilder::remote_shutdown) to say, and what they may do with memory for its
    /// exposure.
    ///
    /// `decide` runs where messages are received, for one call after the other: it must be quick, and must not call, transfer or
    /// wait. If it panics, the call is denied.
    ///
    /// ```
    /// use calomel::{Engine, Error, Request, Scheme};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::builder()
    ///     .listen("tcp://127.0.0.1:0")
    ///     .authorize(|caller| caller.procedure() != "stop" || caller.transport() == Some(Scheme::Loop))
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
        self.authorize = Some(Box::new(decide));
        self
    }

    /// Decides on each address that a *peer* makes this engine dial, before it is dialled: false, and what needed the connection
    /// ends with [`Error::Unreachable`], which says so. Without this all such addresses are dialled. They are the addresses in
    /// bulks ([`Bulk::origin`](crate::Bulk::origin)), and those that a peer has claimed when it connected, which are dialled
    /// when that connection is gone; and the ways through shared memory that lead to such addresses (`shm://…`). Addresses that
    /// [`Engine::lookup`] was given are this program's own choice, and are not asked about.
    ///
    /// `decide` runs where connections are made, while nothing is locked: it must be quick, and must not call, transfer or wait.
    /// If it panics, the address is refused.
    pub fn dial_filter(mut self, decide: impl Fn(&Address) -> bool + Send + Sync + 'static) -> Self {
        self.dial_filter = Some(Box::new(decide));
        self
    }

    /// Whether arguments, results and bulk data have checksums (CRC-32C), in both directions, on the connections of this engine
    /// (default no; messages' own heads always have them). What does not match ends with [`Error::Checksum`]. Bulk data has
    /// them on tcp, where it crosses a network: a verbs device has its own, and on one host there is none to cross.
    pub fn payload_checksums(mut self, on: bool) -> Self {
        self.checksums = on;
        self
    }

    /// Whether a tcp or verbs address of this host is reached through shared memory (default yes). Both sides must have it on;
    /// where that does not work out, the address is dialled as it is: also where what answers runs as another user, whatever
    /// [`EngineBuilder::shm_group`] says. [`Endpoint::transport`](crate::Endpoint::transport) tells which is in use. An engine that speaks TLS has it off.
    pub fn same_host_upgrade(mut self, on: bool) -> Self {
        self.shm.local_addresses = on;
        self
    }

    /// Speaks TLS on every tcp connection, dialled or accepted, and takes no other. Who shows no certificate that is accepted,
    /// where one is wanted, is refused before anything that it says is looked at; whoever is refused by either side gets
    /// [`Error::AccessDenied`] with the reason, and [`Error::Unreachable`] where no TLS is spoken.
    ///
    /// No address is reached through shared memory by itself then, in neither direction, since nobody shows a certificate
    /// there. The other transports are as they were: who listens at `shm://` or `verbs://` too is reached without TLS there.
    ///
    /// Bulk data costs two copies and its encryption on either side. Needs the feature `tls`.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: crate::Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Over shared memory, who else may connect: members of the group of this number. Without this only processes of the
    /// engine's own user may. Peers of another user get bulk data through a ring only: they map no memory, and none is copied
    /// by the system between them and this engine.
    pub fn shm_group(mut self, gid: u32) -> Self {
        self.shm.group = Some(gid);
        self
    }

    /// Whether peers of the same user on this host copy bulk data straight out of this engine's memory, by the system, in one go,
    /// and this engine out of theirs: always where the system permits it, or never. Without this they do so where several fetch at a time, or there is one core; else the
    /// data goes through a ring, in two copies at a time, which is faster.
    pub fn shm_kernel_copy(mut self, on: bool) -> Self {
        self.shm.lending = if on { KernelCopyPolicy::Always } else { KernelCopyPolicy::Never };
        self
    }

    /// Puts something around each transport: tests break them this way.
    #[cfg(test)]
    pub(crate) fn wrap(mut self, wrap: impl Fn(Box<dyn Transport>) -> Box<dyn Transport> + 'static) -> Self {
        self.wrap = Box::new(wrap);
        self
    }

    /// Makes the engine, and starts it.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`], [`Error::AddressInUse`], [`Error::Unsupported`] (for a key that is too short, too), and
    /// [`Error::Io`] when the system refuses.
    pub fn build(self) -> Result<Engine> {
        let listen = self.listen.into_iter().collect::<Result<Vec<Address>>>()?;
        let refused = |error: io::Error| Error::io("can't get random numbers from the system", error);
        let incarnation = u64::from_ne_bytes(random::from_system().map_err(refused)?);
        let seed = random::from_system().map_err(refused)?;
        let key = self.key.map(checked_key).transpose()?;
        #[cfg(feature = "tls")]
        let shm = ShmOptions { local_addresses: self.shm.local_addresses && self.tls.is_none(), ..self.shm };
        #[cfg(not(feature = "tls"))]
        let shm = self.shm;
        let core = Core::new(
            CoreSettings {
                proto: proto::Config {
                    max_message: self.max_message,
                    peer_timeout: self.heartbeat,
                    connect: self.connect,
                    limits: self.most.limits(self.max_message),
                    remote_shutdown: self.remote_shutdown,
                    key,
                    checksums: self.checksums,
                },
                progress: self.progress,
                handler_threads: self.handler_threads,
                incarnation,
                seed,
                shm,
                dial_filter: self.dial_filter,
                tcp: TcpOptions {
                    peer_timeout: self.heartbeat,
                    #[cfg(feature = "tls")]
                    tls: self.tls.map(|tls| (tls, self.connect)),
                },
            },
            &*self.wrap,
        )?;
        for name in &self.transports {
            let scheme = Scheme::parse(name).ok_or_else(|| Error::InvalidAddress {
                text: name.clone(),
                reason: "the transport is none of tcp, shm, verbs, loop".to_owned(),
            })?;
            core.transport(scheme)?;
        }
        let addresses = listen.iter().map(|address| core.listen(address)).collect::<Result<Vec<Address>>>()?;
        core.exec(|proto| proto.set_addresses(addresses.clone()));
        let limits = EngineLimits {
            default_timeout: self.default_timeout,
            eager: self.eager,
            eager_bulk: self.eager_bulk,
            finalize_timeout: self.finalize,
            values: self.most.limits(self.max_message).peer_bytes.saturating_mul(proto::VALUES_COUNT),
        };
        let origin = Arc::new(Origin { core: Arc::downgrade(&core), incarnation, addresses: addresses.clone() });
        let shared = Arc::new(EngineShared {
            core,
            limits,
            incarnation,
            origin,
            addresses,
            registry: Registry::default(),
            authorize: self.authorize,
            procedures: Procedures::default(),
            tasks: Mutex::default(),
            copies: ForeignCopies::default(),
            finalizing: Finalizing::default(),
            alive: Mutex::new(Weak::new()),
        });
        if let Err(error) = shared.core.run(Box::new(EngineService::new(&shared))) {
            shared.core.stop();
            return Err(error);
        }
        let alive = Arc::new(EngineHandles(shared.clone()));
        *shared.alive.lock() = Arc::downgrade(&alive);
        Ok(Engine { shared, alive: Some(alive) })
    }
}

/// Limits, so that no number of peers, and nothing that they do, makes the engine's memory grow without bound. The defaults let
/// 10,000 peers connect. Where a limit is for all peers together, only those that have more than their share (the limit divided
/// by the number of connections) are refused: a few greedy ones don't lock the others out.
impl EngineBuilder {
    /// How many connections of others the engine keeps at a time (default 16,384). Who connects beyond that is turned away, and
    /// its calls fail with [`Error::Disconnected`](crate::Error::Disconnected) or
    /// [`Error::Unreachable`](crate::Error::Unreachable), which can be retried. Connections that the engine makes itself don't
    /// count. Of connections whose peer has not greeted yet there are 1024 more at most, and beyond that the oldest is dropped.
    ///
    /// A process may have only so many files open: over tcp a connection takes one, over shared memory
    /// several.
    pub fn max_connections(mut self, count: usize) -> Self {
        self.most.connections = count;
        self
    }

    /// How many requests of one peer may be in progress at a time: arriving, waiting for a handler, or being handled (default
    /// 16,384). Those beyond are answered with [`Error::Busy`](crate::Error::Busy). One-way calls that take credit
    /// count, and are not refused: their credit limits them, see [`Call::notify`](crate::Call::notify).
    pub fn max_requests_per_peer(mut self, count: usize) -> Self {
        self.most.peer_requests = count;
        self
    }

    /// The same of all peers together (default 262,144).
    pub fn max_requests(mut self, count: usize) -> Self {
        self.most.requests = count;
        self
    }

    /// How many pulls and pushes of one peer, to and from memory that is exposed here, may be in progress at a time (default
    /// 16,384). Those beyond fail with [`Error::Busy`](crate::Error::Busy). Transfers that an RDMA device carries out by itself
    /// don't count.
    pub fn max_transfers_per_peer(mut self, count: usize) -> Self {
        self.most.peer_transfers = count;
        self
    }

    /// How many bytes of messages the engine holds for one peer at a time: of its requests, from their announcement to the answer,
    /// and of answers until they are sent (default four times the largest message, at least 64 MiB; never less than the
    /// largest message). Requests beyond that are answered with [`Error::Busy`](crate::Error::Busy), and so is a request whose
    /// answer does not fit, because the peer is slow to read: then its handler has run. Exposed memory does not count.
    ///
    /// Arguments may take many times as much memory as they did in the message: an empty `String` took one byte, and takes
    /// twenty-four. Where they take more than the message, a quarter of them counts too, from the decoding to the answer. So
    /// with the defaults a message of the largest size may become thirteen times as large, which numbers of 64 bits do, and
    /// texts of four letters and more; smaller messages more. A one-way call that was sent waits until there is room: its message
    /// counts meanwhile, but not against other calls that wait, so a peer may have twice this number of bytes then. A request whose arguments alone would be too much fails
    /// with [`Error::Decode`](crate::Error::Decode), and so does an answer whose value would take more than four times this
    /// number of bytes.
    pub fn max_bytes_in_flight_per_peer(mut self, bytes: usize) -> Self {
        self.most.peer_bytes = Some(bytes);
        self
    }

    /// The same for all peers together (default four times that of one peer).
    pub fn max_bytes_in_flight(mut self, bytes: usize) -> Self {
        self.most.bytes = Some(bytes);
        self
    }

    /// How many regions may be exposed at a time (default 1,048,576). To expose one more fails with
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn max_exposures(mut self, count: usize) -> Self {
        self.most.exposures = count;
        self
    }
}

fn checked_key(secret: Vec<u8>) -> Result<proto::PreSharedKey> {
    if secret.len() < MIN_KEY {
        return Err(Error::Unsupported {
            what: format!("a pre-shared key of {} bytes", secret.len()),
            reason: format!("it could be guessed: it takes {MIN_KEY} at least"),
        });
    }
    Ok(proto::PreSharedKey::new(secret))
}

impl std::fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineBuilder").field("listen", &self.listen).finish_non_exhaustive()
    }
}
