//! What an engine is doing at a moment: for finding out why a program hangs.

use std::time::Instant;

use serde::Serialize;

use super::Engine;
use crate::Address;
use crate::progress::ThreadsDump;
use crate::proto::{CallDump, ConnectionDump, RequestDump, TransferDump};

/// What an engine had in progress when it was asked; made by [`Engine::dump`]. Written as JSON, durations are numbers of
/// nanoseconds.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct EngineDump {
    /// The id of the engine's process.
    pub process: u32,
    /// The number of the engine within its process; the first has number 1.
    pub engine: u64,
    /// The addresses at which peers reach the engine.
    pub addresses: Vec<Address>,
    /// The engine has been finalized, or its operations are being ended for that.
    pub closed: bool,
    /// Calls that this engine has made and that have not ended, the oldest first.
    pub calls: Vec<CallDump>,
    /// Calls of peers that have not been answered, the oldest first.
    pub requests: Vec<RequestDump>,
    /// Transfers that this engine has made and that have not ended, the oldest first.
    pub transfers: Vec<TransferDump>,
    /// The connections, and those that are being made.
    pub connections: Vec<ConnectionDump>,
    /// Regions that are exposed.
    pub exposed_regions: u64,
    /// Their bytes.
    pub exposed_bytes: u64,
    /// Async handlers that are not done, and have waited.
    pub async_handlers: u64,
    /// The threads that run handlers.
    pub threads: ThreadsDump,
}

impl Engine {
    /// What is in progress at this moment: calls, handlers, transfers, connections with their queues. It waits for no call, and
    /// works when all of them hang. `None` in a forked child.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use calomel::{Engine, Responder};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::server("loop://")?;
    /// server.define_deferred("stuck", |responder: Responder<()>, _: ()| std::mem::forget(responder))?;
    /// let client = Engine::client("loop")?;
    /// let call = client.procedure::<(), ()>("stuck").on(&client.lookup(server.address())?).start(&())?;
    ///
    /// let dump = client.dump().expect("this is no forked child");
    /// assert_eq!(dump.calls[0].procedure.as_deref(), Some("stuck"));
    /// eprintln!("{dump:#?}");
    /// # drop(call);
    /// # Ok(())
    /// # }
    /// ```
    pub fn dump(&self) -> Option<EngineDump> {
        let shared = &self.shared;
        if shared.core.is_forked() {
            return None;
        }
        let (names, now) = (shared.procedures.labels(), Instant::now());
        let (addresses, async_handlers) = (shared.addresses(), shared.tasks.lock().len() as u64);
        let (mut found, (regions, bytes)) = shared.core.with_proto(|proto| (proto.dump(&names, now), proto.exposed_memory()));
        found.calls.sort_by_key(|call| std::cmp::Reverse(call.age));
        found.requests.sort_by_key(|request| std::cmp::Reverse(request.age));
        found.transfers.sort_by_key(|transfer| std::cmp::Reverse(transfer.age));
        Some(EngineDump {
            process: std::process::id(),
            engine: shared.statistics.number,
            addresses,
            closed: shared.finalizing.is_closed(),
            calls: found.calls,
            requests: found.requests,
            transfers: found.transfers,
            connections: found.connections,
            exposed_regions: regions as u64,
            exposed_bytes: bytes as u64,
            async_handlers,
            threads: shared.core.handler_threads(),
        })
    }
}
