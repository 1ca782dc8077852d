//! Remote procedure calls with closures, and bulk data transferred directly between the memories of two processes.
//!
//! The entry point is [`Engine`]: it serves procedures, calls those of its peers, exposes memory, and transfers bulk data. The
//! book, `docs/src` in the repository, explains it chapter by chapter.
//!
//! # Quick start
//!
//! A client exposes a string; a server pulls six of its nine bytes into memory of its own, and answers with them.
//!
//! ```
//! use calomel::{Bulk, BulkMode, Engine, HandlerResult, Request};
//!
//! # fn main() -> calomel::Result<()> {
//! let server = Engine::server("tcp://127.0.0.1:0")?;
//! server.define_try("do_rdma", |request: &Request, remote: Bulk| -> HandlerResult<String> {
//!     let local = request.engine().expose(vec![0u8; 6], BulkMode::WriteOnly)?;
//!     remote.on(request.endpoint()).pull_into(&local)?;
//!     Ok(String::from_utf8(local.reclaim())?)
//! })?;
//!
//! let client = Engine::client("tcp")?;
//! let peer = client.lookup(server.address())?;
//! let name = client.expose_read_only(String::from("Matthieu\0"))?;
//!
//! let do_rdma = client.procedure::<Bulk, String>("do_rdma");
//! assert_eq!(do_rdma.on(&peer).call(&name.bulk())?, "Matthi");
//! # Ok(())
//! # }
//! ```
//!
//! # What there is
//!
//! - **Calls.** [`Engine::define`] serves a closure, [`Engine::procedure`] names it, and [`Call::call`], [`Call::start`] and
//!   [`Call::notify`] call it: blocking, for later (a [`Pending`] can be waited for and awaited), or one way. Arguments are
//!   serde types that need no format that describes itself (see [`Engine::define`]), of any size up to
//!   [`EngineBuilder::max_message_size`].
//! - **Bulk data.** [`Engine::expose`] makes a buffer reachable for peers, as a [`Bulk`] that travels inside calls. A peer that
//!   has the bulk pulls from it and pushes into it ([`RemoteBulk`]), whole or in slices, without a copy on the way.
//!   [`Engine::scope`] does so with borrowed memory. A [`Grant`] restricts what a bulk is good for: to one peer, one call, one
//!   transfer, a number of bytes, a time; [`Engine::refusals`] counts refused accesses.
//! - **Start on many nodes.** [`launch::World::from_env`] gives rank, size and the endpoints of all ranks, however the job was
//!   started: by `mpiexec`, `mpirun`, `srun`, `torchrun`, or by hand.
//! - **Transports.** `tcp://host:port`, `verbs://ip:port` through an RDMA card (with the feature `verbs`), `shm://name` on one
//!   host, `loop://name` within a process, and `ofi+PROVIDER://ip:port` through libfabric (with the feature `ofi`, see
//!   [`OfiProvider`]). A tcp or verbs address of this host is reached through shared memory, if both
//!   sides run as one user; [`EngineBuilder::same_host_upgrade`] turns that off, and [`Endpoint::transport`] returns the
//!   transport in use.
//!
//! # Guarantees, by transport
//!
//! | | `tcp://` | `shm://` | `loop://` | `verbs://` |
//! |---|---|---|---|---|
//! | **a call or transfer** ends in | one result or one error, by its deadline (30 s by default) | the same, with one exception (see below) | the same as tcp | the same; a transfer may take 100 ms more, until the device no longer accesses local memory |
//! | a one-way call after `Ok` | is handled once, while both engines live and the connection holds, if the peer can accept it: see [`Call::notify`] | the same | the same | the same |
//! | arguments and results | are decoded only after the receiver has compared the sender's declared type with its own ([`Error::TypeMismatch`]) | the same | the same | the same |
//! | a transfer that has returned | has moved all of its bytes, where both sides see them | the same | the same | the same |
//! | a transfer that timed out, or was cancelled | does not touch local memory any more | the same | the same | the same |
//! | copies by this library between the two memories | none (the socket buffers of the system are between); with TLS two on each side | two at a time, through a ring; one where the peer has a loan or maps the memory | one, from memory to memory | none; two where the owner has to send |
//! | **access to memory** takes | a token of 128 random bits, within the restrictions of its [`Grant`] | the same; see below for what peers of the same user could read | the same as tcp | a key of 32 bits, good for each peer that is connected through the same device; memory with a [`Grant`] has no key, unless the grant names one peer and nothing else |
//! | token, bounds and mode of each transfer are checked by | the owner | the owner | the owner | the owner's device: key, bounds of each exposed segment, and mode; not the token |
//! | accesses to the same memory at the same time | take turns, chunk by chunk | the same; what a peer reads by itself may be written meanwhile | the same as tcp | do not take turns: a reader may see half of a write |
//! | memory that was reclaimed | is not touched any more; reclaiming takes microseconds, whatever peers do | the same; a peer that stops while it reads is waited for, for a second, and then disconnected | the same as tcp | is not touched any more: the device has forgotten it, which takes longer the more memory there is |
//! | a later transfer | fails with [`Error::Revoked`]; after 4096 further revocations with [`Error::AccessDenied`] | the same | the same | the same; the device refuses, and the owner gives the reason |
//! | **a peer that dies** | is detected at once if its system lives; else after the peer timeout ([`EngineBuilder::peer_timeout`]), while the engine waits for it | the same | is this process | as tcp; a process that is stopped still serves its memory |
//! | a peer that restarts at the same address | is recognized as new: old bulks fail with [`Error::PeerRestarted`] | the same | the same | the same |
//! | a killed process leaves behind | nothing | nothing: sockets and memory have no files | does not apply | nothing |
//! | **access control**: a connection is open to | peers with the key ([`EngineBuilder::pre_shared_key`]) or a trusted certificate (feature `tls`), where they are set; else all that reach the port | processes of the same user, or of [`EngineBuilder::shm_group`]; with a key, those that have it | engines of this process; with a key, those that have it | peers with the key, where it is set; else all that reach the device |
//! | others in the network | read and change everything; with TLS nothing, bulk data included | are not on the way | are not on the way | read and change everything |
//! | corruption in transit | is detected, and ends in [`Error::Checksum`]: in the heads of messages always, in all else with [`EngineBuilder::payload_checksums`] or TLS | the same, for messages | the same, for messages | the same, for messages; the device checks bulk data |
//! | malformed bytes from a peer | never cause a panic, an access outside of exposed memory, or more memory than the limits allow | the same | the same | the same, for messages |
//! | more than [`EngineBuilder`]'s limits allow | is refused with [`Error::Busy`], or disconnected; one-way calls wait for credit | the same | the same | the same, for messages |
//!
//! Over `ofi+PROVIDER://`, what holds is what the column `tcp://` says, with these exceptions:
//!
//! | | `ofi+tcp://`, `ofi+tcp+rxm://` | `ofi+verbs://`; also `ofi+cxi://`, `ofi+opx://`, `ofi+efa://`, which have run on no card yet |
//! |---|---|---|
//! | a transfer, or a call with large arguments, that timed out or was cancelled | may take 250 ms more, until the provider no longer accesses local memory; if it does then, the connection ends | as tcp; with RMA as the other column |
//! | copies by this library between the two memories | none; two at memory of many segments, with checksums, or with a [`Grant`] that may lapse | two; none with RMA |
//! | accesses to the same memory at the same time | do not take turns: a reader may see half of a write | as tcp; with RMA as the other column |
//! | access to memory, its mode and bounds | as tcp | as tcp; with RMA as `verbs://`, but that memory with a [`Grant`] that restricts has no key |
//! | memory that was reclaimed | is not touched any more; a peer that stalls within a chunk is waited for, for 250 ms, and then disconnected | as tcp; with RMA as `verbs://` |
//! | access control | the pre-shared key; there is no TLS | the same |
//! | who must reach whom | both sides each other, at ports that the system chooses: there is no way through NAT | the same |
//! | a peer that dies | is detected within half a second, if its system lives, and lets a further TCP connection through; else after the peer timeout | the same |
//! | what a peer is sent and does not read | 64 messages are kept by the provider and 64 by the link, of 8 KiB each; more end the link | the same, for each link |
//! | strangers | can keep an engine from receiving while they hold connections open in the middle of messages | the same |
//!
//! RMA is used where a test of the provider has shown that it enforces what a registration says, and that closing one revokes it:
//! over `ofi+verbs://` if the environment has `FI_MR_CACHE_MAX_COUNT=0`, which turns libfabric's cache of registrations off, the
//! engine listens at the address of a device and not at all addresses, and the engines have no pre-shared key, for which a device
//! does not ask. A line at level INFO of the target `calomel::ofi` says which
//! way bulk data goes, and why. See
//! [Over RDMA devices](#over-rdma-devices) for what RMA means.
//!
//! ## Over shared memory
//!
//! No engine writes into the memory of another process. Peers of the same user read memory of [`Engine::alloc`] directly, and
//! other memory where the system permits it; never what was not exposed to them, if they keep to the protocol. Processes of one
//! user can read each other's memory anyway, where the system permits it: this library guards them against mistakes, not
//! against malice. Peers of another user ([`EngineBuilder::shm_group`]) read no memory directly, and learn no addresses: all
//! that they get goes through a ring.
//!
//! - **What a peer keeps.** A peer maps memory of [`Engine::alloc`] when it pulls from it while all of it is exposed for
//!   reading without a [`Grant`]'s restrictions: not for a part of it, nor within a scope, nor because something is pushed out
//!   of it. It can read what it has mapped until the buffer is reclaimed, dropped or not. After that it sees at most what it
//!   could read before: before other data is written into the buffer, its content moves to memory that no peer maps.
//! - **What a deadline does not end.** Where the system copies out of a peer's memory (see [`EngineBuilder::shm_kernel_copy`]),
//!   the copy lasts as long as the system needs to get that memory. A peer of the same user can make that long; no deadline
//!   ends it, and other peers wait.
//! - **Forked children** do not have the engine memory of their parent; see [`EngineBuffer`].
//!
//! ## Over RDMA devices
//!
//! Messages are checked as on each transport. Bulk data is not sent: the initiator's device reads and writes the
//! owner's memory through the owner's device, and no software of the owner takes part. A bulk carries the keys that this takes.
//! If the device fails, for whatever reason, the initiator asks the owner, which checks, and sends, as over tcp.
//!
//! - **What is checked.** The initiator's library checks whether the [`Bulk`] allows the access, if that peer keeps to
//!   the protocol. The owner's device checks that it knows the key, that the access lies within the exposed segment,
//!   and that the segment may be read or written, as its [`BulkMode`] allows. It does not check tokens, nor
//!   [`Bulk::slice`], which is no restriction on any transport.
//! - **Access control.** A key is good for each peer that is connected to the same engine through the same device. It has 32
//!   bits, and devices may give keys out in order: a peer that received none can guess one. A wrong guess costs it a part of
//!   its connection, which is renewed. When memory has been deregistered, its key may be given to memory that is exposed later.
//!   So a peer that does not keep to the protocol may reach whatever this engine exposes at that moment, as its mode allows,
//!   and may read of large messages to and from others. It reaches nothing else of the process. Let only peers connect over
//!   `verbs://` that you trust that far.
//! - **One peer alone.** Memory that is exposed with [`Engine::expose_to`] has keys that are good on that peer's connection
//!   only, where the owner's device has type 2 memory windows; where it has none, there are no keys, and the owner checks.
//! - **Other restrictions.** Memory with other restrictions of a [`Grant`] has no keys at all: the owner is asked for each
//!   transfer, checks the token, and sends.
//! - **Reclaiming.** [`Exposed::reclaim`] deregisters the memory from the device before it returns the buffer. The device
//!   refuses a later access, which breaks the queue pair on which it was made. That queue pair serves such accesses alone:
//!   another takes its place, and messages go on. The owner is then asked for the transfer, and its answer is exact
//!   ([`Error::Revoked`], [`Error::AccessDenied`]); so are other transfers of that connection that were in progress, and they
//!   succeed.
//! - **Bytes that change.** A device writes at any moment. [`Exposed::read_at`] may see a part of what a peer pushes, and a
//!   pull may see a part of what [`Exposed::write_at`] writes: old and new bytes mixed, in no order. That is never an invalid
//!   value, since elements are plain data ([`Element`]), for which any bytes will do.
//! - **When bytes are there.** A pull's bytes are there when it has returned; a push's when its owner receives a call that was
//!   started after it has returned. Memory is never registered for relaxed ordering, so what a device writes is visible before
//!   its notification. Nothing else is a signal: a byte that `read_at` sees changed does not imply that the others have
//!   changed.
//! - **Deadlines.** A transfer that timed out or was cancelled is fenced before its memory comes back: the device gets
//!   no further operations, those in progress have 100 ms to end, and those that have not ended then end with their queue pair.
//! - **The end of a peer.** When a process dies, its system ends its connections. When a host fails, the device stops after its
//!   retries, some seconds, or the peer timeout ends the connection. A process that is stopped answers no calls, but its device
//!   goes on serving its memory.
//! - **Memory is locked.** What is exposed while a device is in use is registered with it, which takes time for each page and
//!   counts against the limit on locked memory (`ulimit -l`). Plain slices are registered for one transfer: for several, expose
//!   memory once.
//!
//! # Thread safety
//!
//! Each type is `Send` and `Sync` where its content is. Engines, endpoints, procedures and bulks are cheap to clone and can be
//! used from any number of threads. Handlers run on the engine's threads, or with [`Progress::External`] in the program's own
//! event loop; they may block, call (their caller too), and transfer. Wakers of futures, hooks ([`EngineBuilder::authorize`],
//! [`EngineBuilder::dial_filter`]) and `Drop` of what handlers capture, however, must not wait for the engine that runs them.
//!
//! # Resource cleanup
//!
//! Dropping the last [`Engine`] handle finalizes it, as [`Engine::finalize`] does. What the engine itself keeps (handlers,
//! their futures, timers, callbacks) holds it by [`Request::engine`] or by a [`WeakEngine`]: a clone that is captured there is
//! a handle like any other, and the engine ends by [`Engine::finalize`] only. Endpoints, procedures, providers, exposures and
//! bulks keep no engine alive; used after its end they give [`Error::Finalized`]. Dropping an [`Exposed`] revokes peers' access
//! and frees the buffer; [`Exposed::reclaim`] returns it. Dropping a [`Pending`] or a [`Transfer`] cancels it. Dropping a
//! [`Registration`] or a [`Timer`] changes nothing. Calls and transfers have deadlines, and no timeout returns memory that a
//! peer or a device may still touch.
//!
//! # Layers
//!
//! `proto` is the protocol, and does no input or output; `transport` moves bytes; `progress` joins the two and decides which
//! thread does what; `memory` owns what is exposed; `shape` compares types; the rest is what users hold. DESIGN.md has the
//! reasons.
//!
//! # Features
//!
//! - `bytes`: a `bytes::Bytes` can be exposed read-only, a `bytes::BytesMut` for writing too.
//! - `config`: an [`EngineConfig`] is read from TOML and JSON (`EngineConfig::from_file`). Without it that takes any other crate
//!   for a serde format.
//! - `json`: engines write their statistics when they are finalized, to the file that the environment variable `CALOMEL_STATS`
//!   names, and what they have in progress when the signal arrives that `CALOMEL_STATS_SIGNAL` names.
//! - `macros`: the attribute `service` makes a client and a server of a trait.
//! - `memmap2`: a `memmap2::Mmap` can be exposed read-only, a `memmap2::MmapMut` for writing too. The constructors of maps of
//!   files are unsafe, since others can change or truncate the file: their caller promises that this does not happen while the
//!   map exists, which includes the time that it is exposed. Reading what was truncated can end the process with `SIGBUS`, also
//!   when it is a peer's pull that reads. A kernel may refuse to register a map of a file with RDMA devices (Linux 6.1: a
//!   read-only one): then the owner moves its content on request, and a line at level DEBUG says so.
//! - `metrics`: `Engine::publish_metrics` publishes the engine's statistics to the recorder of the crate `metrics` that the
//!   program has installed, such as one for Prometheus.
//! - `ndarray`: an `ndarray::Array` can be exposed, an `ArcArray` read-only. Peers see the elements in memory order, which is
//!   the logical order of arrays in standard layout, and another one of those in Fortran layout. An array that is not
//!   contiguous gets [`Error::Unsupported`].
//! - `ofi`: the transports `ofi+PROVIDER://`, by way of libfabric 2, which is loaded when it is first needed: building takes
//!   nothing. `CALOMEL_LIBFABRIC` names the library where the dynamic linker does not find `libfabric.so.1`.
//! - `tls`: TLS 1.3 on tcp (`Tls`, `EngineBuilder::tls`). Building it needs a C compiler.
//! - `tokio`: async handlers run within a tokio runtime (`EngineBuilder::tokio`). All else that is async works on any
//!   executor, without this feature.
//! - `verbs`: the transport `verbs://`. Building it needs the headers of rdma-core and libclang; the README lists the packages.

// docs.rs names the feature that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod address;
mod builder;
mod bulk;
mod checksum;
mod config;
mod copy;
mod deferred_log;
mod engine;
mod error;
mod fork;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(test, not(any(fuzzing, few_tests))))]
mod fuzzing;
mod into_address;
mod latency;
pub mod launch;
mod memory;
mod payload;
mod progress;
mod proto;
mod random;
mod rpc;
mod shape;
mod sync;
#[cfg(test)]
#[path = "../tests/unit/engine/mod.rs"]
mod tests;
mod text;
#[cfg(feature = "tls")]
mod tls;
mod trace_context;
mod transport;

pub use address::{Address, OfiProvider, Transport};
pub use builder::EngineBuilder;
pub use bulk::{
    BorrowedSegments, BorrowedSegmentsMut, Bulk, BulkMode, Exposed, ExposedSlice, Grant, LocalMemory, PullTarget, PushSource,
    Released, RemoteBulk, Scope, Transfer, TransferBuffer,
};
pub use config::EngineConfig;
pub use engine::{
    CallStats, Endpoint, Engine, EngineDump, FinalizeHook, HandlerPool, HandlerStats, Monitor, MonitoredCall, MonitoredTransfer,
    PeerEvent, Stats, Timer, TransferStats, TransportStatus, WeakEngine,
};
pub use error::{Error, MessageSide, Result};
pub use into_address::IntoAddress;
pub use latency::Latency;
pub use memory::{
    Buffer, BufferPool, BufferView, Element, EngineBuffer, PooledBuffer, ReadElement, ReadOnly, Segments, Writable,
    WritableBuffer,
};
pub use progress::{Progress, ThreadsDump};
pub use proto::{
    CallDump, ConnectionDump, LimitCounts, PeerStats, Refusals, RequestDump, RequestState, Traffic, TransferDirection,
    TransferDump, TransportStats,
};
pub use rpc::{
    BorrowedArgs, Call, Caller, HandlerResult, PeerProcess, Pending, Procedure, Provider, Registration, Request, Responder,
    RetriedCall, Retry,
};
#[cfg(feature = "tls")]
pub use tls::Tls;
pub use trace_context::TraceContext;

/// Makes a client and a server of a trait: one declaration for both sides. Needs the feature `macros`.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Mutex;
///
/// use calomel::{Bulk, BulkMode, Engine, Pending, Request};
///
/// /// A key-value store.
/// #[calomel::service]
/// pub trait Store {
///     /// Stores a value; returns the old one.
///     fn put(&self, key: String, value: Vec<u8>) -> Option<Vec<u8>>;
///     /// The caller gets the error as it is.
///     fn get(&self, key: String) -> Result<Vec<u8>, String>;
///     /// Pulls the value out of the caller's memory, and so takes the request. The caller's call fails with the error's text.
///     #[fallible]
///     fn fill(&self, request: &Request, key: String, memory: Bulk) -> calomel::Result<usize>;
///     /// The engine polls the future.
///     #[fallible]
///     async fn relay(&self, request: &Request, key: String) -> calomel::Result<u64>;
///     /// No response is sent.
///     #[one_way]
///     fn forget(&self, key: String);
/// }
///
/// #[derive(Default)]
/// struct MemoryStore(Mutex<HashMap<String, Vec<u8>>>);
///
/// impl Store for MemoryStore {
///     fn put(&self, key: String, value: Vec<u8>) -> Option<Vec<u8>> {
///         self.0.lock().unwrap().insert(key, value)
///     }
///
///     fn get(&self, key: String) -> Result<Vec<u8>, String> {
///         self.0.lock().unwrap().get(&key).cloned().ok_or_else(|| format!("no value of {key}"))
///     }
///
///     fn fill(&self, request: &Request, key: String, memory: Bulk) -> calomel::Result<usize> {
///         let mut value = vec![0; memory.len()];
///         let moved = memory.on(request.endpoint()).pull_into(&mut value[..])?;
///         self.put(key, value);
///         Ok(moved)
///     }
///
///     async fn relay(&self, request: &Request, key: String) -> calomel::Result<u64> {
///         let hash = request.engine().procedure::<str, u64>("hash");
///         hash.on(request.endpoint()).start(&key)?.await
///     }
///
///     fn forget(&self, key: String) {
///         self.0.lock().unwrap().remove(&key);
///     }
/// }
///
/// # fn main() -> calomel::Result<()> {
/// let server = Engine::server("tcp://127.0.0.1:0")?;
/// let served = StoreServer::serve(&server, MemoryStore::default())?;
///
/// let client = Engine::client("tcp")?;
/// client.define("hash", |_: &Request, key: String| key.len() as u64)?;
/// let store = StoreClient::new(client.lookup(server.address())?);
/// assert_eq!(store.put("a", b"one")?, None);
/// assert_eq!(store.get("b")?, Err("no value of b".to_owned()));
/// let memory = client.expose_read_only(vec![1u8; 1000])?;
/// assert_eq!(store.fill("b", &memory.bulk())?, 1000);
/// assert_eq!(store.relay("four")?, 4);
/// store.forget("b")?;
///
/// // Each method, started: a `Pending` can be waited for, and awaited.
/// let started = ["a", "b"].map(|key| store.start_get(key));
/// for pending in started {
///     pending?.wait()?.ok();
/// }
/// assert!(served.remove());
/// # Ok(())
/// # }
/// ```
///
/// # What is generated
///
/// For a trait `Store`, with its visibility and its methods' documentation:
///
/// - **`Store`**, for the server to implement. It has the supertraits `Send`, `Sync` and `'static`, and is implemented for
///   `Arc<T>` where `T` implements it. An async method returns a future that is `Send`; `async fn` implements it.
/// - **`StoreServer`**: `StoreServer::serve(&engine, store)` defines the procedures at the engine, and
///   `StoreServer::serve_at(&provider, store)` at a [`Provider`], on its [`HandlerPool`] if it has one. If a name is taken,
///   none of them is defined. Dropping the `StoreServer` leaves them defined; `remove` removes them. The engine owns `store`,
///   which must not hold a clone of the engine: see [`Engine::define`].
/// - **`StoreClient`**: `StoreClient::new(&endpoint)` is a client of a peer, or of the provider that the endpoint names. It is
///   cheap to clone, and keeps no engine alive. `client.timeout(duration)` is the same client with another timeout. For each
///   method it has one that calls, as [`Call::call`] does, and one with `start_` before its name that starts a call, as
///   [`Call::start`] does; for a one-way method one that sends, as [`Call::notify`] does, and one with `_async` after its
///   name, as [`Call::notify_async`].
///
/// The procedures are named `Store.put`, and have the argument itself, or a tuple of several. So programs without the macro can
/// call them: `engine.procedure::<(String, Vec<u8>), Option<Vec<u8>>>("Store.put")`.
///
/// # Rules
///
/// - A method takes `&self`, since several calls run at a time, and up to 16 arguments, which have names, and serde types that
///   [`Engine::define`] lists. It has no generic parameters and no body.
/// - The client takes a `String` as `&str`, a `Vec<T>` as `&[T]`, numbers, `bool` and `char` by value, an `Option` as an option
///   of these, and all else by reference. A type is recognized by its name, not through an alias.
/// - Arguments and results own what they hold. A method that needs the call itself takes `request: &Request` as its first
///   argument, which the client does not have.
/// - A method's result is sent as it is, also a `Result`. With `#[fallible]` only what its `Ok` holds is sent, and of an `Err`
///   the caller gets [`Error::Failed`] with the error's text, as with [`Engine::define_try`]. Where several kinds of errors
///   meet, it returns a [`HandlerResult`].
/// - A method with `#[one_way]` returns nothing, or a `Result<(), E>` if it is fallible.
/// - Methods named `new` and `timeout`, and `start_put` beside `put`, do not compile: the client has functions of these names.
///
/// # Options
///
/// - `#[service(name = "kv")]`: the procedures are named `kv.put`, not `Store.put`.
/// - `#[rename = "set"]` on a method `put`: its procedure is named `Store.set`.
/// - `#[service(crate = "path::to::calomel")]`: where calomel is found, if not at `::calomel`.
#[cfg(feature = "macros")]
#[doc(inline)]
pub use calomel_macros::service;

/// Tests the examples of the README and of the book.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/src/getting-started.md")]
    struct GettingStarted;
    #[doc = include_str!("../docs/src/rpc.md")]
    struct Rpc;
    #[doc = include_str!("../docs/src/bulk.md")]
    struct Bulk;
    #[doc = include_str!("../docs/src/async.md")]
    struct Async;
    #[doc = include_str!("../docs/src/errors.md")]
    struct Errors;
    #[doc = include_str!("../docs/src/deployment.md")]
    struct Deployment;
    #[doc = include_str!("../docs/src/performance.md")]
    struct Performance;
    #[doc = include_str!("../docs/src/monitoring.md")]
    struct Monitoring;
    #[doc = include_str!("../docs/src/tracing.md")]
    struct Tracing;
    #[doc = include_str!("../docs/src/security.md")]
    struct Security;
    #[doc = include_str!("../docs/src/mochi.md")]
    struct Mochi;
    #[doc = include_str!("../docs/src/faq.md")]
    struct Faq;
}
