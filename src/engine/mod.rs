//! `Engine`: the handle that serves, calls, exposes memory and transfers.

mod builder;
mod finalize;
mod weak;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use builder::EngineBuilder;
pub use weak::WeakEngine;

use crate::bulk::{self, ForeignCopies, Origin, Scope};
use crate::memory::{BufferPool, EngineBuffer};
use crate::progress::Core;
use crate::proto::RequestId;
use crate::rpc::{self, Authorize, HandlerPool, Procedures, Provider, Registry};
use crate::{Address, BulkMode, Endpoint, Error, Exposed, Grant, IntoAddress, ReadOnly, Refusals, Result, Writable};
use finalize::Finalizing;

/// The limits and timeouts that the layers above progress use.
#[derive(Clone, Debug)]
pub(crate) struct EngineLimits {
    pub default_timeout: Duration,
    pub eager: usize,
    pub eager_bulk: usize,
    pub finalize_timeout: Duration,
    /// Bytes of memory that the values in a response may take.
    pub values: usize,
}

/// The state that all objects of one engine share.
pub(crate) struct EngineShared {
    pub core: Arc<Core>,
    pub limits: EngineLimits,
    pub incarnation: u64,
    pub addresses: Vec<Address>,
    pub origin: Arc<Origin>,
    pub registry: Registry,
    /// The authorization hook.
    pub authorize: Option<Authorize>,
    pub procedures: Procedures,
    /// Async handlers in progress: dropped when their callers are gone.
    pub tasks: Mutex<HashMap<RequestId, async_task::Task<()>>>,
    /// Copies and keys of other engines' memory.
    pub copies: ForeignCopies,
    finalizing: Finalizing,
    alive: Mutex<Weak<EngineHandles>>,
}

impl EngineShared {
    /// Fails when the engine is finalized, or belongs to another process.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        self.check_with(|| what.to_owned())
    }

    pub(crate) fn check_with(&self, what: impl Fn() -> String) -> Result<()> {
        self.check_process(&what)?;
        if self.finalizing.is_closed() { Err(Error::Finalized { what: what() }) } else { Ok(()) }
    }

    /// Fails when the engine belongs to another process.
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
        let (belongs_to, used_with) = (owner.addresses.first().cloned(), self.addresses.first().cloned());
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

    pub(crate) fn from_shared(shared: Arc<EngineShared>) -> Engine {
        Engine { shared, alive: None }
    }

    pub(crate) fn shared(&self) -> &Arc<EngineShared> {
        &self.shared
    }

    /// The first address that the engine listens at, with the real port. For an engine that does not listen this is
    /// `tcp://0.0.0.0:0`, which can't be dialled.
    pub fn address(&self) -> Address {
        self.shared.addresses.first().cloned().unwrap_or_else(Address::nowhere)
    }

    /// All addresses that the engine listens at.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.addresses.clone()
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
        let address = self.shared.core.transport(address.scheme())?.resolve(&address)?;
        let tag = self.shared.core.exec(|proto| {
            let tag = proto.lookup(&address);
            proto.choose(tag.id, &address);
            tag
        });
        Ok(Endpoint::new(self.shared.clone(), tag, 0))
    }

    /// Provider 0 of this engine, which [`Engine::define`] and its like define procedures at.
    fn root(&self) -> Provider {
        Provider::new(&self.shared, 0, None)
    }

    /// Serves a procedure with a closure: `define("sum", |_: &Request, (x, y): (i32, i32)| x + y)`.
    ///
    /// It may block, call others (its caller too), and transfer. It runs where the request was received as long as it is
    /// quick, and on a handler thread once it has blocked or has taken long. When it panics, the caller gets
    /// [`Error::HandlerPanicked`].
    ///
    /// The engine owns the closure, so a closure that captures a clone of it, as in `move |…| engine.…`, keeps it alive until
    /// [`Engine::finalize`] is called: dropping the other handles does not end it, and the engine goes on serving. Use
    /// [`Request::engine`](crate::Request::engine) in it, or capture a [`WeakEngine`]. Endpoints, procedures, providers, bulks
    /// and exposures can be captured: they do not keep an engine alive. An engine that finds, when it is finalized, that its
    /// handlers have captured handles of it, logs a warning under the target `calomel::engine`.
    ///
    /// # Types
    /// Arguments and results are written without names or types, so the two ends are compared first, by structure, and a
    /// caller whose types differ gets [`Error::TypeMismatch`]. Serde types travel as long as they can be read without asking
    /// what comes next. `rename`, `alias`, `skip`, `transparent`, `with`, `from` and `into` work. Enums with
    /// `#[serde(untagged)]` or `#[serde(tag = "…")]` and types such as `serde_json::Value` can't be received
    /// ([`Error::Decode`]), `#[serde(flatten)]` can't be sent ([`Error::Encode`]), nor can a field that
    /// `skip_serializing_if` leaves out. `default` has no effect: a field that only one side has is a mismatch.
    ///
    /// # Errors
    /// [`Error::AlreadyDefined`], [`Error::Finalized`], and [`Error::MessageTooLarge`] for a name of more than 1024 bytes.
    pub fn define<A, R, F>(&self, name: &str, handler: F) -> Result<rpc::Registration>
    where
        A: serde::de::DeserializeOwned + 'static,
        R: serde::Serialize + 'static,
        F: Fn(&rpc::Request, A) -> R + Send + Sync + 'static,
    {
        self.root().define(name, handler)
    }

    /// Serves a procedure with an async closure. No executor is needed: the engine polls the future. When the caller cancels,
    /// times out or disconnects, the future is dropped. What the closure captures must not keep the engine alive, as with
    /// [`Engine::define`]; a future that holds a clone of the engine keeps it alive until the future is done or dropped.
    ///
    /// # Errors
    /// As [`Engine::define`].
    pub fn define_async<A, R, F, Fut>(&self, name: &str, handler: F) -> Result<rpc::Registration>
    where
        A: serde::de::DeserializeOwned + 'static,
        R: serde::Serialize + 'static,
        F: Fn(rpc::Request, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
    {
        self.root().define_async(name, handler)
    }

    /// Serves a procedure that responds later, from any thread, through the [`Responder`](crate::Responder).
    ///
    /// # Errors
    /// As [`Engine::define`].
    pub fn define_deferred<A, R, F>(&self, name: &str, handler: F) -> Result<rpc::Registration>
    where
        A: serde::de::DeserializeOwned + 'static,
        R: serde::Serialize + 'static,
        F: Fn(rpc::Responder<R>, A) + Send + Sync + 'static,
    {
        self.root().define_deferred(name, handler)
    }

    /// Serves a procedure whose arguments are borrowed from the bytes that were received: no copy of a large `str` or `[u8]` is
    /// made. The type parameter names what is borrowed: `define_borrowed::<str, _, _>("len", |_: &Request, s: &str| s.len())`.
    ///
    /// # Errors
    /// As [`Engine::define`].
    pub fn define_borrowed<A, R, F>(&self, name: &str, handler: F) -> Result<rpc::Registration>
    where
        A: rpc::BorrowedArgs + ?Sized + 'static,
        R: serde::Serialize + 'static,
        F: for<'a> Fn(&rpc::Request, A::With<'a>) -> R + Send + Sync + 'static,
    {
        self.root().define_borrowed::<A, R, F>(name, handler)
    }

    /// The provider of this number: its procedures are its own, and callers reach them through [`Endpoint::provider`]. Provider
    /// 0 is the engine itself.
    pub fn provider(&self, id: u16) -> Provider {
        Provider::new(&self.shared, id, None)
    }

    /// Provider 0, with `pool` to run the handlers that are defined through it.
    pub fn pool(&self, pool: &HandlerPool) -> Provider {
        Provider::new(&self.shared, 0, Some(pool.clone()))
    }

    /// A remote procedure to call: its name, and the types of its arguments and of its result. Cheap to make and to clone; the
    /// engine keeps what it has learned of the types. [`Engine::define`] lists the types that can be sent.
    pub fn procedure<A: ?Sized, R>(&self, name: &str) -> rpc::Procedure<A, R> {
        rpc::Procedure::new(&self.shared, name)
    }

    /// Exposes a buffer to peers that receive its [`Bulk`](crate::Bulk). The returned [`Exposed`] owns the buffer;
    /// [`Exposed::reclaim`](crate::Exposed::reclaim) returns it, and dropping the `Exposed` frees it. `mode` is what *peers*
    /// may do.
    ///
    /// # Errors
    /// [`Error::Finalized`]; [`Error::Busy`] when [`EngineBuilder::max_exposures`] regions are exposed; [`Error::Io`] when an
    /// RDMA device can't register it. On an error the buffer is dropped.
    pub fn expose<B>(&self, buffer: B, mode: BulkMode) -> Result<Exposed<B, Writable>>
    where
        B: crate::WritableBuffer + Send + 'static,
    {
        bulk::expose(&self.shared, buffer, mode, &Grant::new())
    }

    /// Exposes a buffer that peers may read, and that this program can read meanwhile.
    ///
    /// # Errors
    /// As [`Engine::expose`].
    pub fn expose_read_only<B>(&self, buffer: B) -> Result<Exposed<B, ReadOnly>>
    where
        B: crate::Buffer + Send + 'static,
    {
        bulk::expose_read_only(&self.shared, buffer, &Grant::new())
    }

    /// Exposes a buffer as [`Engine::expose`] does, with the restrictions of a [`Grant`]: for one peer, one call, one transfer,
    /// a number of bytes, a time.
    ///
    /// # Errors
    /// As [`Engine::expose`]; [`Error::OtherEngine`](crate::Error::OtherEngine) for an endpoint of another engine.
    pub fn expose_with<B>(&self, buffer: B, mode: BulkMode, grant: &Grant) -> Result<Exposed<B, Writable>>
    where
        B: crate::WritableBuffer + Send + 'static,
    {
        bulk::expose(&self.shared, buffer, mode, grant)
    }

    /// Exposes a buffer as [`Engine::expose_read_only`] does, with the restrictions of a [`Grant`].
    ///
    /// # Errors
    /// As [`Engine::expose_with`].
    pub fn expose_read_only_with<B>(&self, buffer: B, grant: &Grant) -> Result<Exposed<B, ReadOnly>>
    where
        B: crate::Buffer + Send + 'static,
    {
        bulk::expose_read_only(&self.shared, buffer, grant)
    }

    /// Exposes a buffer to one peer: to the engine that is connected at `endpoint` now, or, without a connection, to the first
    /// engine that connects there. Other peers that receive the [`Bulk`](crate::Bulk) get
    /// [`Error::AccessDenied`](crate::Error::AccessDenied). Short for [`Engine::expose_with`] and [`Grant::only`].
    ///
    /// Over `verbs://` the peer gets keys that are valid on its connection only, where this engine's device has type 2 memory
    /// windows and the connection exists; else the peer asks this engine for each transfer.
    ///
    /// # Errors
    /// As [`Engine::expose_with`].
    pub fn expose_to<B>(&self, endpoint: impl AsRef<Endpoint>, buffer: B, mode: BulkMode) -> Result<Exposed<B, Writable>>
    where
        B: crate::WritableBuffer + Send + 'static,
    {
        self.expose_with(buffer, mode, &Grant::new().only(endpoint))
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

    /// Exposes borrowed memory for as long as a closure runs, as [`std::thread::scope`] does with threads. When the closure
    /// returns or panics, peers' access is revoked before the borrow ends.
    ///
    /// # Errors
    /// What the closure returns, and [`Error::Finalized`].
    pub fn scope<'env, T, F>(&self, work: F) -> Result<T>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    {
        self.shared.check("scope")?;
        bulk::scope(&self.shared, work)
    }

    /// `len` bytes of zeroed memory for [`Engine::expose`], which peers of the same user on this host may map.
    pub fn alloc(&self, len: usize) -> EngineBuffer {
        EngineBuffer::new(len)
    }

    /// A pool of `count` buffers of `buffer_len` bytes each, allocated now and reused.
    pub fn buffer_pool(&self, buffer_len: usize, count: usize) -> BufferPool {
        BufferPool::new(buffer_len, count)
    }

    /// Runs `f` once after `delay`, on the engine's timer thread. When the engine is finalized before that, `f` is dropped.
    /// A clone of the engine that `f` captures keeps it alive until then; a [`WeakEngine`] does not.
    ///
    /// # Errors
    /// [`Error::Finalized`].
    pub fn timer(&self, delay: Duration, f: impl FnOnce() + Send + 'static) -> Result<Timer> {
        self.shared.check("timer")?;
        let key = self.shared.core.add_timer(delay, Box::new(f));
        Ok(Timer { core: Arc::downgrade(&self.shared.core), key })
    }

    /// Ends the engine: pre-finalize callbacks run, no new requests are taken, handlers in progress are waited for up to the
    /// finalize timeout, own calls and transfers that are still in progress end with [`Error::Finalized`], queued responses and
    /// one-way calls whose `notify` has returned `Ok` are sent, peers lose their access to exposed memory, connections and
    /// threads end, and finalize callbacks run.
    ///
    /// This returns when each peer has read what was sent and has ended the connection, which usually takes far less than a
    /// millisecond. A peer that reads nothing for a second is disconnected, and so is one that has not read all of it within
    /// the finalize timeout: then messages may be lost.
    ///
    /// It may be called any number of times, from any thread. From a handler or a callback it starts finalizing, and
    /// returns; elsewhere it returns when the engine is finalized.
    ///
    /// # Errors
    /// [`Error::Timeout`] when handlers in progress did not end within the finalize timeout; the engine is finalized all
    /// the same.
    pub fn finalize(&self) -> Result<()> {
        finalize::finalize(&self.shared)
    }

    /// Blocks until the engine is finalized, by any thread or peer. In a forked child it returns at once.
    pub fn wait_for_finalize(&self) {
        if !self.shared.core.is_forked() {
            self.shared.finalizing.wait();
        }
    }

    /// True when the engine has been finalized.
    pub fn is_finalized(&self) -> bool {
        self.shared.finalizing.is_done()
    }

    /// Runs `f` when finalizing begins, while the engine still works. A clone of the engine that `f` captures keeps it alive,
    /// so that only [`Engine::finalize`] ends it; a [`WeakEngine`] does not. When finalizing has begun already, `f` is dropped.
    pub fn on_prefinalize(&self, f: impl FnOnce() + Send + 'static) {
        if !self.shared.core.is_forked() {
            self.shared.finalizing.on_prefinalize(Box::new(f));
        }
    }

    /// Runs `f` when the engine is finalized, and no longer works. For what `f` captures, and when it is dropped, see
    /// [`Engine::on_prefinalize`].
    pub fn on_finalize(&self, f: impl FnOnce() + Send + 'static) {
        if !self.shared.core.is_forked() {
            self.shared.finalizing.on_finalize(Box::new(f));
        }
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
        let alive = self.alive.clone().or_else(|| self.shared.alive.lock().upgrade());
        Engine { shared: self.shared.clone(), alive }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.alive.is_some() {
            finalize::note_dropped(&self.shared);
        }
    }
}

impl AsRef<Engine> for Engine {
    fn as_ref(&self) -> &Engine {
        self
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("addresses", &self.addresses()).field("finalized", &self.is_finalized()).finish()
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
