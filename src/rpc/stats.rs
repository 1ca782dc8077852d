//! Statistics of a peer: a procedure that engines define if they allow it.

use super::handlers::Request;
use crate::engine::{Endpoint, Engine, Stats};
use crate::{Error, Result};

const PROCEDURE: &str = "calomel.stats";

/// Lets peers ask for the statistics of the engine.
pub(crate) fn serve_stats(engine: &Engine) -> Result<()> {
    engine.define(PROCEDURE, |request: &Request, (): ()| request.engine().stats().bounded()).map(drop)
}

impl Endpoint {
    /// The statistics of the peer, whichever of its providers this endpoint names. It is a call like any other, of the procedure
    /// `calomel.stats`, with the default timeout, and both engines have to be built with the same version of this library. Of
    /// calls, handlers and peers the peer sends up to 256 each, those with the most calls; [`Stats::left_out`] says how many
    /// more there are.
    ///
    /// ```
    /// use calomel::Engine;
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::builder().listen("loop://").remote_stats(true).build()?;
    /// let client = Engine::client("loop")?;
    /// let stats = client.lookup(server.address())?.stats()?;
    /// assert_eq!(stats.addresses, server.addresses());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::AccessDenied`] where the peer does not allow it
    /// ([`EngineBuilder::remote_stats`](crate::EngineBuilder::remote_stats)), [`Error::TypeMismatch`] from one with another
    /// version of this library, and what any call may end with.
    pub fn stats(&self) -> Result<Stats> {
        let engine = Engine::from_shared(self.shared().clone());
        engine.procedure::<(), Stats>(PROCEDURE).on(self.provider(0)).call(&()).map_err(|error| match error {
            Error::NoSuchProcedure { peer, .. } => {
                let reason = "it does not let peers ask for its statistics".to_owned();
                Error::AccessDenied { peer, what: "statistics".to_owned(), reason }
            }
            other => other,
        })
    }
}
