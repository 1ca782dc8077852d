//! Memory exposed on terms, and what was refused.

use super::Engine;
use crate::{BulkMode, Endpoint, Exposed, Grant, ReadOnly, Refusals, Result, Writable, bulk};

impl Engine {
    /// Exposes a buffer as [`Engine::expose`] does, on the terms of a [`Grant`]: to one peer, for one call, for one transfer,
    /// for a number of bytes, for a time.
    ///
    /// # Errors
    /// As [`Engine::expose`]; [`Error::OtherEngine`](crate::Error::OtherEngine) for an endpoint of another engine.
    pub fn expose_with<B>(&self, buffer: B, mode: BulkMode, grant: &Grant) -> Result<Exposed<B, Writable>>
    where
        B: crate::WritableBuffer + Send + 'static,
    {
        bulk::expose(&self.shared, buffer, mode, grant)
    }

    /// Exposes a buffer as [`Engine::expose_read_only`] does, on the terms of a [`Grant`].
    ///
    /// # Errors
    /// As [`Engine::expose_with`].
    pub fn expose_read_only_with<B>(&self, buffer: B, grant: &Grant) -> Result<Exposed<B, ReadOnly>>
    where
        B: crate::Buffer + Send + 'static,
    {
        bulk::expose_read_only(&self.shared, buffer, grant)
    }

    /// Exposes a buffer to one peer: to the engine that is at `endpoint` now, if there is a connection, or else to the first
    /// that is found there. It is of no use to others that they are given the [`Bulk`](crate::Bulk): they get
    /// [`Error::AccessDenied`](crate::Error::AccessDenied). Short for [`Engine::expose_with`] and [`Grant::only`].
    ///
    /// On `verbs` the peer's device gets keys that are good on its connection only, where this engine's device has type 2
    /// memory windows and the connection is there; else the peer asks this engine for each transfer.
    ///
    /// # Errors
    /// As [`Engine::expose_with`].
    pub fn expose_to<B>(&self, endpoint: impl AsRef<Endpoint>, buffer: B, mode: BulkMode) -> Result<Exposed<B, Writable>>
    where
        B: crate::WritableBuffer + Send + 'static,
    {
        self.expose_with(buffer, mode, &Grant::new().only(endpoint))
    }

    /// What peers were refused so far, by cause.
    ///
    /// Refusals are logged too, through `tracing` under the target `calomel::security`: with the peer's address, what it
    /// wanted, the reason and how often it has come to that. Not each of them: the first, the second, the fourth, and so on,
    /// at each power of two of a cause's count. So a peer that is refused a million times writes twenty lines, and can't
    /// fill anybody's disk. Causes that are ordinary, since memory may go while peers are on their way
    /// (`revoked`, `restarted`, `expired`), are logged at the level of debugging, others as warnings.
    pub fn refusals(&self) -> Refusals {
        self.shared.core.with_proto(|proto| proto.refusals())
    }
}
