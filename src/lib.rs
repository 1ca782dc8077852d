//! Remote procedure calls with closures, and bulk data moved straight between the memories of two processes.
//!
//! The entry point is [`Engine`]: it serves procedures, calls those of others, exposes memory, and transfers.
//!
//! # Quick start
//!
//! A client exposes a string; a server pulls six of its nine bytes into memory of its own, and answers with them.
//!
//! ```
//! use calomel::{Bulk, BulkMode, Engine, Request};
//!
//! # fn main() -> calomel::Result<()> {
//! let server = Engine::server("tcp://127.0.0.1:0")?;
//! server.define("do_rdma", |request: &Request, remote: Bulk| {
//!     let local = request.engine().expose(vec![0u8; 6], BulkMode::WriteOnly).map_err(|e| e.to_string())?;
//!     remote.on(request.endpoint()).pull_into(&local).map_err(|e| e.to_string())?;
//!     String::from_utf8(local.reclaim()).map_err(|e| e.to_string())
//! })?;
//!
//! let client = Engine::client("tcp")?;
//! let peer = client.lookup(server.address())?;
//! let name = client.expose_read_only(String::from("Matthieu\0"))?;
//!
//! let do_rdma = client.procedure::<Bulk, Result<String, String>>("do_rdma");
//! assert_eq!(do_rdma.on(&peer).call(&name.bulk())?.as_deref(), Ok("Matthi"));
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
//! - **Bulk data.** [`Engine::expose`] lends a buffer to peers, as a [`Bulk`] that travels inside calls. Whoever has it pulls
//!   from it and pushes into it ([`RemoteBulk`]), whole or in slices, without a copy on the way.
//!   [`Engine::scope`] does so with borrowed memory. A [`Grant`] restricts what a bulk is good for: to one peer, one call, one
//!   transfer, a number of bytes, a time; [`Engine::refusals`] tells what peers tried in vain.
//! - **Transports.** `tcp://host:port`, `verbs://ip:port` by way of an RDMA card (with the feature `verbs`), `shm://name` on one
//!   host, and `loop://name` within a process. A tcp or verbs address of this host is reached through shared memory by itself,
//!   if both sides are of one user; [`EngineBuilder::same_host_upgrade`] turns that off, and [`Endpoint::transport`] tells.
//!
//! # Guarantees, by transport
//!
//! | | `tcp://` | `shm://` | `loop://` | `verbs://` |
//! |---|---|---|---|---|
//! | token, bounds and mode of each access are checked by | the owner | the owner | the owner | the owner's device: a key of 32 bits, the bounds of each exposed segment, and its mode; not the token (see below) |
//! | what keeps others out of memory | a token of 128 random bits, and the terms of its [`Grant`] | the same | the same | a key, which any peer can use that is connected to the same engine through the same device; memory with a [`Grant`] has none, but for one that names a peer and nothing else |
//! | memory that was taken back | is not touched any more | is not touched any more; a peer that is stopped in the middle of reading it is waited for, for a second, and then cut off | is not touched any more | is not touched any more: the device has forgotten it before the buffer is given back |
//! | who transfers later | gets [`Error::Revoked`] | the same | the same | the same; the device refuses, and the owner says why |
//! | accesses of the same memory at the same time | take turns, chunk by chunk | take turns, chunk by chunk; what a peer reads by itself (see below) may be written meanwhile | take turns, chunk by chunk | don't take turns: one may see half of what another writes |
//! | a transfer that has returned | has moved all of its bytes, where both sides see them | the same | the same | the same |
//! | a transfer that timed out, or was cancelled | touches the local memory no more | the same | the same | the same; it may take 100 ms to end what the device is doing |
//! | copies made by this library on the way | none (the system's socket buffers are between) | two, at a time, through a ring; one where memory is lent | one, from memory to memory | none; two where the owner sends (see below) |
//! | a peer that dies | is known at once; a silent one after [`EngineBuilder::heartbeat`] | the same | is this process | is known at once when its system lives on; else when the device or the heartbeat gives it up |
//! | who can connect | who has the key ([`EngineBuilder::pre_shared_key`]) or a certificate (feature `tls`), where they are set; else whoever reaches the port | processes of the same user, or of [`EngineBuilder::shm_group`], that have the key where one is set | this process's engines, that have the key where one is set | who has the key, where one is set; else whoever reaches the device |
//! | what others in the network can do | read and change everything, or nothing with TLS | are not in it | are not in it | read and change everything |
//! | bytes that are damaged on the way | are found, and end in [`Error::Checksum`]: messages' heads always, all else with [`EngineBuilder::payload_checksums`] or TLS | the same, for messages | the same, for messages | the same, for messages; the device checks bulk data |
//! | more than [`EngineBuilder`]'s limits allow | gets [`Error::Busy`], or is turned away | the same | the same | the same, for messages |
//!
//! Over shared memory peers of the same user read by themselves what [`Engine::alloc`] gave, and what the system lets them read
//! of other memory; never what was not exposed to them, if they keep to the rules. Processes of one user can read each other's
//! memory anyway, where the system permits it: between those this library guards against mistakes, not against malice. Peers of
//! another user ([`EngineBuilder::shm_group`]) read nothing by themselves, and are not told where memory lies: all that they
//! get goes through a ring. No engine writes into the memory of another process.
//!
//! - **What a peer keeps.** A peer maps memory of [`Engine::alloc`] when it pulls from it while all of it is exposed for reading
//!   without a [`Grant`]'s restrictions: not for a part of it, nor within a scope, nor because something is pushed out of it.
//!   What such a peer has mapped it can read until the buffer is reclaimed, dropped or not. After that it sees at most what it
//!   could read before: before other data is written into the buffer, its content moves to memory that no peer maps.
//! - **What a deadline does not end.** Where the system copies out of a peer's memory (see
//!   [`EngineBuilder::shm_kernel_copy`]), the copy lasts as long as the system needs to get that memory. A peer of the same user
//!   can make that long; no deadline ends it, and other peers wait.
//! - **Forked children** do not have the engine memory of their parent; see [`EngineBuffer`].
//!
//! ## Over RDMA devices
//!
//! Messages are checked as on every transport. Bulk data is not sent: the device of whoever transfers reads and writes the
//! owner's memory through the owner's device, and no software of the owner takes part. A bulk carries the keys that this takes.
//! Where it does not work out, for whatever reason, the owner is asked, checks, and sends, as over tcp.
//!
//! - **What is checked.** The library of whoever transfers checks whether the [`Bulk`] allows the access, if that peer keeps to
//!   the rules. The owner's device checks that the key is one that it knows, that the access lies within the exposed segment,
//!   and that the segment may be read or written, as its [`BulkMode`] says. It knows nothing of tokens, nor of
//!   [`Bulk::slice`], which is no restriction anywhere.
//! - **Who can get in.** A key is good for every peer that is connected to the same engine through the same device. It has 32
//!   bits, and devices may give keys out in order: a peer that was told none can guess. A wrong guess costs it a part of its
//!   connection, which is renewed. When memory has been taken back, its key may be given to what is exposed later. So a peer
//!   that does not keep to the rules may reach whatever this engine exposes at that moment, as its mode allows, and may
//!   read of large messages to and from others. It reaches nothing else of the process. Let only peers that you trust so far
//!   connect over `verbs://`.
//! - **One peer alone.** What is exposed with [`Engine::expose_to`] has keys that are good on that peer's connection only, where
//!   the owner's device has memory windows of type 2; where it has none, there are no keys, and the owner is asked.
//! - **Other terms.** What is exposed with other terms of a [`Grant`] has no keys at all: the owner is asked for each transfer,
//!   checks the token, and sends.
//! - **Taking memory back.** [`Exposed::reclaim`] has the device forget the memory before it gives the buffer back. A later
//!   access is refused by the device, which breaks the queue pair that it was made on. There is one for such accesses alone:
//!   another takes its place, and messages go on. The transfer is then put to the owner, whose answer is exact
//!   ([`Error::Revoked`], [`Error::AccessDenied`]); so are others of that connection that were under way, and they succeed.
//! - **Bytes that change.** A device writes at any moment. [`Exposed::read_at`] may see a part of what a peer pushes, and a pull
//!   may see a part of what [`Exposed::write_at`] writes: old and new bytes mixed, in no order. That is never an invalid value,
//!   since elements are plain data ([`Element`]), for which any bytes will do.
//! - **When bytes are there.** A pull's bytes are there when it has returned; a push's when its owner is told, by a call that
//!   begins after it has returned. Memory is never registered for relaxed ordering, so what a device writes is visible before
//!   what it tells of it. Nothing else is a signal: who watches memory with `read_at` until a byte changes knows nothing of
//!   the others.
//! - **Deadlines.** A transfer that timed out or was cancelled is fenced before its memory comes back: nothing more is asked of
//!   the device, what is under way has 100 ms to end, and what has not ended then ends with its queue pair.
//! - **The end of a peer.** When a process dies, its system ends its connections. Of a host that is gone the device hears
//!   nothing: it gives up after its retries, some seconds, and the heartbeat finds the silence. A process that is stopped
//!   answers no calls, but its device goes on serving its memory.
//! - **Memory is locked.** What is exposed while a device is in use is registered with it, which takes time for every page and
//!   counts against the limit on locked memory (`ulimit -l`). Plain slices are registered for one transfer: for several, expose
//!   memory once.
//!
//! # Thread safety
//!
//! Everything is `Send` and `Sync` where its content is. Engines, endpoints, procedures and bulks are cheap to clone and can
//! be used from any number of threads. Handlers run on the engine's threads; they may block, call (their caller too), and
//! transfer. Only wakers of futures and `Drop` of what handlers capture must not wait for the engine that runs them.
//!
//! # Resource cleanup
//!
//! Dropping the last [`Engine`] handle finalizes it, as [`Engine::finalize`] does. What the engine itself keeps (handlers, their
//! futures, timers, callbacks) holds it by [`Request::engine`] or by a [`WeakEngine`]: a clone that is captured there is a
//! handle like any other, and the engine ends by [`Engine::finalize`] only. Endpoints, procedures, providers, exposures and bulks
//! keep no engine alive; used after its end they give [`Error::Finalized`]. Dropping an [`Exposed`] locks peers out
//! and frees the buffer; [`Exposed::reclaim`] gives it back. Dropping a [`Pending`] or a [`Transfer`] cancels it. Dropping a
//! [`Registration`] or a [`Timer`] changes nothing. No operation waits without a deadline, and no timeout gives memory back
//! that somebody may still touch.
//!
//! # Layers
//!
//! `proto` says what engines tell each other, and does no input or output; `transport` moves bytes; `progress` joins the two
//! and decides which thread does what; `memory` owns what is exposed; the rest is what users hold. DESIGN.md has the reasons.
//!
//! # Features
//!
//! - `bytes`: a `bytes::Bytes` can be exposed read-only.
//! - `tls`: TLS 1.3 on tcp (`Tls`, `EngineBuilder::tls`). To build it takes a C compiler.
//! - `verbs`: the transport `verbs://`. To build it takes the headers of rdma-core and libclang; the README says which packages.

#![deny(unsafe_code)]

mod address;
mod bulk;
mod deferred_log;
mod endpoint;
mod engine;
mod error;
mod fork;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(test, not(fuzzing)))]
mod fuzzing;
mod memory;
mod progress;
mod proto;
mod random;
mod rpc;
mod shape;
mod sync;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;
mod transport;

pub use address::{Address, IntoAddress, Scheme};
pub use bulk::{
    Bulk, BulkMode, Exposed, ExposedSlice, Grant, Local, PullTarget, PushSource, Released, RemoteBulk, Scope, Transfer,
};
pub use endpoint::Endpoint;
pub use engine::{Engine, EngineBuilder, Timer, WeakEngine};
pub use error::{Error, Result, Side};
pub use memory::{
    Buffer, BufferPool, Element, EngineBuffer, PooledBuffer, ReadElement, ReadOnly, Segments, View, Writable, WritableBuffer,
};
pub use progress::Progress;
pub use proto::Refusals;
pub use rpc::{
    BorrowedArgs, Call, Caller, HandlerPool, PeerProcess, Pending, Procedure, Provider, Registration, Request, Responder,
};
#[cfg(feature = "tls")]
pub use tls::Tls;

/// Keeps the example of the README running.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
