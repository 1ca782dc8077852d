//! The engine itself: its handles, its end, its peers' endpoints, and what the layers above keep in it.
//!
//! `rpc` and `bulk` add their methods to [`Engine`], and [`builder`](crate::builder) makes it.

mod dump;
mod endpoint;
mod finalize;
mod foreign_copies;
mod listeners;
mod log_limit;
mod messages;
#[cfg(feature = "metrics")]
mod metrics;
mod monitor;
mod origin;
mod peer_event;
mod registry;
mod statistics;
mod stats;
mod stats_file;
#[cfg(feature = "json")]
mod stats_signal;
mod transport_status;
mod waiting;

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::sync::Mutex;

pub use dump::EngineDump;
pub use endpoint::Endpoint;
pub use finalize::FinalizeHook;
pub(crate) use foreign_copies::{ForeignCopies, StaleFlag};
pub(crate) use messages::{
    DecodeContext, EncodeBuffer, EncodeContext, EncodeMessage, ListInPlace, RemoteLease, decoding, encode_message, outgoing_body,
};
use monitor::MonitorSlot;
pub use monitor::{Monitor, MonitoredCall, MonitoredTransfer};
use peer_event::ConnectionLog;
pub use peer_event::PeerEvent;
pub(crate) use peer_event::PeerHook;
pub use registry::HandlerPool;
pub(crate) use registry::{LookupResult, ProcedureInfo, Procedures, Registry};
pub(crate) use statistics::{CallPath, EndedCall, HandledCalls, Statistics};
pub use stats::{CallStats, HandlerStats, Stats, TransferStats};
pub(crate) use stats_file::STATS_VARIABLE;
pub use transport_status::TransportStatus;
pub(crate) use waiting::completed;

use crate::memory::{BufferPool, EngineBuffer};
use crate::progress::{Awaited, Completion, Core, EngineEnv, in_job};
use crate::proto::{Incoming, RequestId};
use crate::{Address, EngineConfig, Error, IntoAddress, Refusals, Result};
use finalize::Finalizing;
use listeners::Listeners;
use log_limit::LogLimit;
pub(crate) use origin::{AddressTexts, Origin};

/// The runtime within which async handlers are polled, so that its timers and sockets work in them: none, or one of tokio.
#[derive(Clone, Default)]
pub(crate) struct TaskRuntime {
    #[cfg(feature = "tokio")]
    pub handle: Option<tokio::runtime::Handle>,
}

impl TaskRuntime {
    /// Runs `work` within the runtime.
    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "tokio")]
        let _entered = self.handle.as_ref().map(tokio::runtime::Handle::enter);
        work()
    }
}

pub(crate) type Authorize = Box<dyn Fn(&Arc<EngineShared>, &Incoming<EngineEnv>) -> bool + Send + Sync>;

/// Code of the program that an engine runs when something happens.
#[derive(Default)]
pub(crate) struct EngineHooks {
    pub authorize: Option<Authorize>,
    pub peer_hook: Option<PeerHook>,
    pub monitor: Option<Box<dyn Monitor>>,
}

/// The state that all objects of one engine share.
pub(crate) struct EngineShared {
    pub core: Arc<Core>,
    /// The configuration in force, without addresses of listeners and without the key.
    pub config: EngineConfig,
    pub incarnation: u64,
    listeners: Listeners,
    pub registry: Registry,
    /// Decides whether a peer's call is handled.
    pub authorize: Option<Authorize>,
    peer_hook: Option<PeerHook>,
    connection_log: ConnectionLog,
    /// The lines about slow calls and handlers.
    pub slow_log: LogLimit,
    pub statistics: Statistics,
    monitor: MonitorSlot,
    pub procedures: Procedures,
    /// Async handlers in progress: dropped when their callers are gone.
    pub tasks: Mutex<HashMap<RequestId, async_task::Task<()>>>,
    /// The runtime within which async handlers are polled.
    pub runtime: TaskRuntime,
    /// Copies and keys of other engines' memory.
    pub copies: ForeignCopies,
    finalizing: Finalizing,
    #[cfg(feature = "metrics")]
    published: metrics::PublishedEntries,
    alive: Mutex<Weak<EngineHandles>>,
}

impl EngineShared {
    pub(crate) fn new(
        core: Arc<Core>,
        config: EngineConfig,
        incarnation: u64,
        hooks: EngineHooks,
        statistics: Statistics,
        runtime: TaskRuntime,
    ) -> Arc<EngineShared> {
        let listeners = Listeners::new(&core, incarnation, config.advertise.clone());
        Arc::new(EngineShared {
            core,
            config,
            incarnation,
            listeners,
            registry: Registry::default(),
            authorize: hooks.authorize,
            peer_hook: hooks.peer_hook,
            connection_log: ConnectionLog::default(),
            slow_log: LogLimit::default(),
            monitor: MonitorSlot::new(hooks.monitor),
            statistics,
            procedures: Procedures::default(),
            tasks: Mutex::default(),
            runtime,
            copies: ForeignCopies::default(),
            finalizing: Finalizing::default(),
            #[cfg(feature = "metrics")]
            published: metrics::PublishedEntries::default(),
            alive: Mutex::default(),
        })
    }

    /// Fails when the engine is finalized, or belongs to another process.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        self.check_with(|| what.to_owned())
    }

    pub(crate) fn check_with(&self, what: impl Fn() -> String) -> Result<()> {
        self.check_process(&what)?;
        if self.finalizing.is_closed() { Err(Error::Finalized { what: what() }) } else { Ok(()) }
    }

    /// Fails when the engine belongs to another process.
    #[inline]
    pub(crate) fn check_process(&self, what: impl Fn() -> String) -> Result<()> {
        if !self.core.is_forked() {
            return Ok(());
        }
        let reason = "the process was forked after the engine was made: the child must make its own".to_owned();
        Err(Error::Unsupported { what: format!("{} in a forked child", what()), reason })
    }

    /// Fails when an object that is used with this engine belongs to another one.
    pub(crate) fn check_same_engine(
        &self,
        owner: &Arc<EngineShared>,
        object: &'static str,
        what: impl Fn() -> String,
    ) -> Result<()> {
        if std::ptr::eq(Arc::as_ptr(owner), self) {
            return Ok(());
        }
        let (belongs_to, used_with) = (owner.listens_at(), self.listens_at());
        Err(Error::OtherEngine { what: what(), object, belongs_to, used_with })
    }

    /// Fails on the thread that drives: what it would wait for arrives through that thread.
    pub(crate) fn check_may_wait(&self, what: impl Fn() -> String) -> Result<()> {
        if !self.core.is_driving() {
            return Ok(());
        }
        let reason = "this thread is the one that receives the answer, and runs a waker or a hook meanwhile".to_owned();
        Err(Error::Unsupported { what: format!("waiting for {}", what()), reason })
    }

    /// Listens at one more address, and returns the address at which others reach it.
    pub(crate) fn listen(&self, address: &Address) -> Result<Address> {
        let bound = self.listeners.listen(&self.core, address)?;
        tracing::info!(target: "calomel::engine", address = %bound, "listening");
        Ok(bound)
    }

    /// The engine as the owner of bulks.
    pub(crate) fn origin(&self) -> Arc<Origin> {
        self.listeners.origin()
    }

    /// The addresses at which peers reach the engine.
    pub(crate) fn addresses(&self) -> Vec<Address> {
        self.origin().addresses().iter().filter(|address| address.is_dialable()).cloned().collect()
    }

    /// The first address of the engine; `None` when it does not listen.
    pub(crate) fn listens_at(&self) -> Option<Address> {
        self.origin().addresses().first().cloned()
    }

    /// The same, for errors about this engine itself.
    pub(crate) fn own_address(&self) -> Address {
        self.listens_at().unwrap_or_else(Address::nowhere)
    }

    /// Lets time pass, while this thread drives, or another handler takes its place. Ends soon after the engine.
    pub(crate) fn pause(&self, time: Duration) {
        const CHECK_INTERVAL: Duration = Duration::from_millis(100);
        let until = deadline(Instant::now(), time);
        let over = Completion::new();
        loop {
            let now = Instant::now();
            if now >= until || self.finalizing.is_closed() || self.core.is_driving() {
                return;
            }
            over.wait(&self.core, Some(until.min(now + CHECK_INTERVAL)), Awaited::Other);
        }
    }

    pub(crate) fn finalizing(&self) -> &Finalizing {
        &self.finalizing
    }
}

/// Shared by all handles of an engine that keep it alive: dropping the last one finalizes the engine.
struct EngineHandles(Arc<EngineShared>);

impl Drop for EngineHandles {
    fn drop(&mut self) {
        if let Err(error) = finalize::finalize(&self.0) {
            tracing::warn!(target: "calomel::engine", %error, "finalizing a dropped engine failed");
        }
    }
}

/// One end of remote procedure calls and bulk transfers: it calls, serves, exposes memory, and transfers.
///
/// Clones are the same engine, and can be used from any thread. Dropping the last one finalizes the engine. Closures that the
/// engine itself keeps must not hold clones, which would keep it alive: see [`Engine::define`] and [`WeakEngine`].
///
/// ```
/// use calomel::{Engine, Request};
///
/// # fn main() -> calomel::Result<()> {
/// let server = Engine::server("tcp://127.0.0.1:0")?;
/// server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y)?;
///
/// let client = Engine::client("tcp")?;
/// let peer = client.lookup(server.address())?;
/// assert_eq!(client.procedure::<(i32, i32), i32>("sum").on(&peer).call(&(40, 2))?, 42);
/// # Ok(())
/// # }
/// ```
pub struct Engine {
    shared: Arc<EngineShared>,
    /// `None` where the library itself refers to the engine, which does not keep it alive.
    alive: Option<Arc<EngineHandles>>,
}

impl Engine {
    /// The first handle of an engine.
    pub(crate) fn new(shared: Arc<EngineShared>) -> Engine {
        let alive = Arc::new(EngineHandles(shared.clone()));
        *shared.alive.lock() = Arc::downgrade(&alive);
        Engine { shared, alive: Some(alive) }
    }

    /// A handle that does not keep the engine alive.
    pub(crate) fn from_shared(shared: Arc<EngineShared>) -> Engine {
        Engine { shared, alive: None }
    }

    pub(crate) fn shared(&self) -> &Arc<EngineShared> {
        &self.shared
    }

    /// Listens at one more address: at any time, so that an engine that serves can define its procedures first. Returns the
    /// address at which peers reach it, with the real port.
    ///
    /// Besides a host, `address` may name an interface (`tcp://eth0:7000`), all interfaces (`tcp://0.0.0.0:7000`,
    /// `tcp://[::]:7000`), or nothing but a transport: `tcp` is any free port on all interfaces, `shm` a name that the engine
    /// chooses. Where it listens on all interfaces, the result is the address of the first one that other hosts reach.
    ///
    /// ```
    /// use calomel::{Engine, Request};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::builder().build()?;
    /// server.define("double", |_: &Request, x: u32| 2 * x)?;
    /// let address = server.listen("tcp://127.0.0.1:0")?;
    ///
    /// let client = Engine::client("tcp")?;
    /// assert_eq!(client.procedure::<u32, u32>("double").on(client.lookup(address)?).call(&21)?, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidAddress`], [`Error::AddressInUse`], [`Error::Unsupported`] for a transport that is not there and for more
    /// than 16 addresses, [`Error::Finalized`], and [`Error::Io`] when the system refuses.
    pub fn listen(&self, address: impl IntoAddress) -> Result<Address> {
        let address = address.into_listen_address()?;
        let what = || format!("listening at {address}");
        self.shared.check_with(what)?;
        let bound = self.shared.listen(&address)?;
        // The engine may have been finalized meanwhile.
        self.shared.check_with(what).inspect_err(|_| self.shared.core.stop_listening())?;
        Ok(bound)
    }

    /// As [`Engine::listen`], for async code: a host name is resolved on a thread of its own.
    ///
    /// # Errors
    /// As [`Engine::listen`].
    pub async fn listen_async(&self, address: impl IntoAddress) -> Result<Address> {
        let address = address.into_listen_address()?;
        if address.is_host_name() {
            let engine = Engine::from_shared(self.shared.clone());
            return waiting::on_a_thread("listen", move || engine.listen(address)).await;
        }
        self.listen(address)
    }

    /// As [`Engine::lookup`], for async code: a host name is resolved on a thread of its own.
    ///
    /// # Errors
    /// As [`Engine::lookup`].
    pub async fn lookup_async(&self, address: impl IntoAddress) -> Result<Endpoint> {
        let address = address.into_address()?;
        if address.is_host_name() {
            let engine = Engine::from_shared(self.shared.clone());
            return waiting::on_a_thread("lookup", move || engine.lookup(address)).await;
        }
        self.lookup(address)
    }

    /// The first address at which peers reach the engine, with the real port. For an engine that does not listen this is
    /// `nowhere://`, which can't be dialled.
    pub fn address(&self) -> Address {
        self.shared.own_address()
    }

    /// All addresses at which peers reach the engine: those that it listens at, for all interfaces those of the interfaces, or
    /// those that [`EngineBuilder::advertise`](crate::EngineBuilder::advertise) names instead.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.addresses()
    }

    /// The configuration in force: with the addresses at which the engine listens now, with real ports, and with the limits that
    /// were computed. A pre-shared key is left out, and so are certificates and functions that were set on the builder.
    pub fn config(&self) -> EngineConfig {
        EngineConfig { listen: self.shared.listeners.bound(), ..self.shared.config.clone() }
    }

    /// What each transport can do in this build, on this machine, for this process.
    ///
    /// ```
    /// # fn main() -> calomel::Result<()> {
    /// for status in calomel::Engine::client("tcp")?.transports() {
    ///     println!("{status}"); // such as: verbs: unavailable: it is built with feature `verbs` only
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn transports(&self) -> Vec<TransportStatus> {
        transport_status::transports(&self.shared.core, &self.shared.config)
    }

    /// An endpoint for the engine at an address. Nothing is sent: the first call connects.
    ///
    /// A host name is resolved now, and the endpoint keeps the address found.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`], [`Error::Unsupported`] for a transport that is not there, [`Error::Unreachable`] for a
    /// host name that has no address, [`Error::Finalized`].
    pub fn lookup(&self, address: impl IntoAddress) -> Result<Endpoint> {
        let address = address.into_address()?;
        self.shared.check("lookup")?;
        if address.socket().is_some_and(|socket| socket.port() == 0) {
            let reason = "port 0 can't be dialled: it stands for any free port of a listener".to_owned();
            return Err(Error::InvalidAddress { text: address.to_string(), reason });
        }
        let address = self.shared.core.transport(address.scheme())?.resolve(&address)?;
        let tag = self.shared.core.exec(|proto| {
            let tag = proto.lookup(&address);
            proto.choose(tag.id, &address);
            tag
        });
        Ok(Endpoint::new(self.shared.clone(), tag, 0))
    }

    /// Counts of what peers were refused so far, by cause.
    ///
    /// Refusals are logged too, through `tracing` under the target `calomel::security`: with the peer's address, the operation,
    /// the reason and the cause's count. They are logged at each power of two of that count: the first, the second, the fourth,
    /// and so on. So a peer that is refused a million times writes twenty lines, and can't fill a disk. Causes that are
    /// ordinary, since memory may be revoked while a request for it is on its way (`revoked`, `restarted`, `expired`), are
    /// logged at debug level, others as warnings.
    pub fn refusals(&self) -> Refusals {
        self.shared.core.with_proto(|proto| proto.refusals())
    }

    /// `len` bytes of zeroed memory for [`Engine::expose`], which peers of the same user on this host may map.
    pub fn alloc(&self, len: usize) -> EngineBuffer {
        EngineBuffer::new(len)
    }

    /// A pool of `count` buffers of `buffer_len` bytes each, allocated now and reused.
    pub fn buffer_pool(&self, buffer_len: usize, count: usize) -> BufferPool {
        BufferPool::new(self.address(), buffer_len, count)
    }

    /// Runs `f` once after `delay`, on a thread for timers, or with [`Progress::External`](crate::Progress::External) in
    /// [`Engine::progress`]. When the engine is finalized before that, `f` is dropped.
    /// A clone of the engine that `f` captures keeps it alive until then; a [`WeakEngine`] does not.
    ///
    /// # Errors
    /// [`Error::Finalized`].
    pub fn timer(&self, delay: Duration, f: impl FnOnce() + Send + 'static) -> Result<Timer> {
        self.shared.check("timer")?;
        let key = self.shared.core.add_timer(delay, Box::new(f));
        Ok(Timer { core: Arc::downgrade(&self.shared.core), key })
    }

    /// The descriptor that the event loop of a [`Progress::External`](crate::Progress::External) engine waits for, with epoll,
    /// poll, `mio`, or `AsyncFd` of tokio: it is readable when [`Engine::progress`] has something to do. Only this engine reads
    /// it. It stays valid, and readable, when the engine has been finalized: deregister it then.
    ///
    /// It is an epoll descriptor that holds another one, so a loop may nest it two levels deeper at most.
    ///
    /// # Panics
    /// If the engine has another [`Progress`](crate::Progress), and makes progress by itself.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        let descriptor = self.shared.core.descriptor();
        descriptor.expect("`as_fd` is for engines with `Progress::External`; this one makes progress by itself")
    }

    /// Makes progress: reads, sends, runs handlers and timers on this thread, and expires deadlines, until something was
    /// handled or `timeout` is over. True when something was handled; then there may be more. `Duration::ZERO` polls once, and
    /// never waits. For engines with [`Progress::External`](crate::Progress::External).
    ///
    /// A loop that is told as long as the descriptor is readable (level-triggered) calls this once each time. One that is told
    /// of changes (edge-triggered, as `mio` and tokio do) has to call it until it returns false.
    ///
    /// Threads may call this at the same time, and while others wait in calls: one at a time drives. The others wait for it
    /// until their timeout, and run handlers meanwhile. With `Duration::ZERO` they get false, and when the lock is free the
    /// descriptor is readable again.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use calomel::{Engine, Progress, Request};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::builder().listen("tcp://127.0.0.1:0").progress(Progress::External).handler_threads(0).build()?;
    /// server.define("double", |_: &Request, x: u32| 2 * x)?;
    ///
    /// let client = Engine::client("tcp")?;
    /// let call = client.procedure::<u32, u32>("double").on(client.lookup(server.address())?).start(&21)?;
    /// while !call.is_ready() {
    ///     server.progress(Duration::from_millis(100))?;
    /// }
    /// assert_eq!(call.wait()?, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an engine with another [`Progress`](crate::Progress), in a handler, a timer, a waker or a hook
    /// of the engine, and in a forked child; [`Error::Finalized`].
    pub fn progress(&self, timeout: Duration) -> Result<bool> {
        let core = &self.shared.core;
        self.shared.check("progress")?;
        let unsupported =
            |reason: &str| Err(Error::Unsupported { what: "`Engine::progress`".to_owned(), reason: reason.to_owned() });
        if !core.is_external() {
            return unsupported("the engine makes progress by itself: it was not built with `Progress::External`");
        }
        if core.is_driving() || in_job(core) {
            return unsupported("this thread runs a handler, a timer, a waker or a hook of the engine");
        }
        Ok(core.progress(timeout))
    }

    /// A handle that does not keep the engine alive.
    pub fn downgrade(&self) -> WeakEngine {
        WeakEngine { shared: Arc::downgrade(&self.shared) }
    }

    /// Ends the engine's progress thread; the test drives with [`Core::turn`] instead.
    #[cfg(test)]
    pub(crate) fn by_hand(&self) -> Arc<Core> {
        self.shared.core.retire_progress();
        self.shared.core.clone()
    }

    /// Descriptions of what a finalized engine still holds: a test fails unless there are none.
    #[cfg(test)]
    pub(crate) fn leftovers(&self) -> Vec<String> {
        self.shared.core.leftovers()
    }
}

impl Clone for Engine {
    /// The same engine. A clone keeps it alive, also one made from [`Request::engine`](crate::Request::engine), unless it
    /// is being finalized already.
    fn clone(&self) -> Engine {
        // In a forked child a thread that does not exist may hold the lock.
        let others = || if self.shared.core.is_forked() { None } else { self.shared.alive.lock().upgrade() };
        Engine { shared: self.shared.clone(), alive: self.alive.clone().or_else(others) }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.alive.is_some() {
            finalize::note_dropped(&self.shared);
        }
    }
}

impl PartialEq for Engine {
    /// True for handles of the same engine.
    fn eq(&self, other: &Engine) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Engine {}

impl AsRef<Engine> for Engine {
    fn as_ref(&self) -> &Engine {
        self
    }
}

impl AsFd for Engine {
    /// As [`Engine::as_fd`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        Engine::as_fd(self)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("addresses", &self.addresses()).field("finalized", &self.is_finalized()).finish()
    }
}

/// A handle of an engine that does not keep it alive: for closures and values that the engine itself keeps, such as its
/// handlers. Made by [`Engine::downgrade`].
///
/// ```
/// use calomel::{Engine, Request};
///
/// # fn main() -> calomel::Result<()> {
/// let server = Engine::server("loop://")?;
/// let engine = server.downgrade();
/// server.define("addresses", move |_: &Request, ()| engine.upgrade().map_or(0, |engine| engine.addresses().len()))?;
/// # let client = Engine::client("loop")?;
/// # let peer = client.lookup(server.address())?;
/// # assert_eq!(client.procedure::<(), usize>("addresses").on(&peer).call(&())?, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct WeakEngine {
    shared: Weak<EngineShared>,
}

impl WeakEngine {
    /// A handle that keeps the engine alive. `None` when the last such handle has been dropped, which finalizes the engine, and
    /// in a forked child.
    pub fn upgrade(&self) -> Option<Engine> {
        let shared = self.shared.upgrade().filter(|shared| !shared.core.is_forked())?;
        let alive = shared.alive.lock().upgrade()?;
        Some(Engine { shared, alive: Some(alive) })
    }
}

impl fmt::Debug for WeakEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakEngine")
    }
}

/// A timer; see [`Engine::timer`]. Dropping this does not cancel it.
#[derive(Debug)]
pub struct Timer {
    core: Weak<Core>,
    /// `None` for a time beyond what the clock can represent: it never expires.
    key: Option<(Instant, u64)>,
}

impl Timer {
    /// Cancels the timer, and drops the function; false when the function has started or was dropped already.
    pub fn cancel(&self) -> bool {
        match (self.key, self.core.upgrade()) {
            (Some(key), Some(core)) => core.remove_timer(key),
            _ => false,
        }
    }
}

/// The deadline after `timeout`, cut to a hundred years where the clock can't represent it.
pub(crate) fn deadline(now: Instant, timeout: Duration) -> Instant {
    const LONG: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now.checked_add(timeout).unwrap_or_else(|| now + LONG)
}
