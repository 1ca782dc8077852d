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
//!   any serde types, of any size up to [`EngineBuilder::max_message_size`].
//! - **Bulk data.** [`Engine::expose`] lends a buffer to peers, as a [`Bulk`] that travels inside calls. Whoever has it pulls
//!   from it and pushes into it ([`RemoteBulk`]), whole or in slices, without a copy on the way.
//!   [`Engine::scope`] does so with borrowed memory.
//! - **Transports.** `tcp://host:port`, `shm://name` on one host, and `loop://name` within a process. A tcp address of this
//!   host is reached through shared memory by itself, if both sides are of one user;
//!   [`EngineBuilder::same_host_upgrade`] turns that off, and [`Endpoint::transport`] tells.
//!
//! # Guarantees, by transport
//!
//! | | `tcp://` | `shm://` | `loop://` |
//! |---|---|---|---|
//! | token, bounds and mode of each access are checked by | the owner | the owner | the owner |
//! | memory that was taken back | is not touched any more | is not touched any more; a peer that is stopped in the middle of reading it is waited for, for a second, and then cut off | is not touched any more |
//! | accesses of the same memory at the same time | take turns, chunk by chunk | take turns, chunk by chunk; what a peer reads by itself (see below) may be written meanwhile | take turns, chunk by chunk |
//! | copies made by this library on the way | none (the system's socket buffers are between) | two, at a time, through a ring; one where memory is lent | one, from memory to memory |
//! | a peer that dies | is known at once; a silent one after [`EngineBuilder::heartbeat`] | the same | is this process |
//! | who can connect | whoever reaches the port; nothing is encrypted | processes of the same user, or of [`EngineBuilder::shm_group`] | this process |
//!
//! Over shared memory peers read by themselves what [`Engine::alloc`] gave, and what the system lets them read of other
//! memory; never what was not exposed to them, if they keep to the rules. Processes of one user can read each other's memory anyway,
//! where the system permits it: between those this library guards against mistakes, not against malice. No
//! engine writes into the memory of another process.
//!
//! # Thread safety
//!
//! Everything is `Send` and `Sync` where its content is. Engines, endpoints, procedures and bulks are cheap to clone and can
//! be used from any number of threads. Handlers run on the engine's threads; they may block, call (their caller too), and
//! transfer. Only wakers of futures and `Drop` of what handlers capture must not wait for the engine that runs them.
//!
//! # Resource cleanup
//!
//! Dropping the last [`Engine`] handle finalizes it, as [`Engine::finalize`] does. Dropping an [`Exposed`] locks peers out
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

#![deny(unsafe_code)]

mod address;
mod bulk;
mod endpoint;
mod engine;
mod error;
mod memory;
mod progress;
mod proto;
mod rpc;
mod sync;
#[cfg(test)]
mod tests;
mod transport;

pub use address::{Address, IntoAddress, Scheme};
pub use bulk::{Bulk, BulkMode, Exposed, ExposedSlice, Local, PullTarget, PushSource, Released, RemoteBulk, Scope, Transfer};
pub use endpoint::Endpoint;
pub use engine::{Engine, EngineBuilder, Timer};
pub use error::{Error, Result, Side};
pub use memory::{
    Buffer, BufferPool, Element, EngineBuffer, PooledBuffer, ReadElement, ReadOnly, Segments, View, Writable, WritableBuffer,
};
pub use progress::Progress;
pub use rpc::{BorrowedArgs, Call, HandlerPool, Pending, Procedure, Provider, Registration, Request, Responder};

/// Keeps the example of the README running.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
