//! Access control for calls: what the authorization hook sees of a call and its caller.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::Transport;
use crate::engine::{Authorize, Endpoint, EngineShared};
use crate::progress::EngineEnv;
use crate::proto::Incoming;

/// A call that a peer makes, and what is known of that peer: the argument of the hook that
/// [`EngineBuilder::authorize`](crate::EngineBuilder::authorize) sets.
pub struct Caller<'a> {
    shared: &'a Arc<EngineShared>,
    incoming: &'a Incoming<EngineEnv>,
}

/// A process on this host, as the operating system identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PeerProcess {
    /// Process id; 0 where it is not visible from here, as between containers.
    pub pid: u32,
    /// The user id that it runs as.
    pub uid: u32,
    /// The group id that it runs as.
    pub gid: u32,
}

impl Caller<'_> {
    /// The name of the procedure.
    pub fn procedure(&self) -> &str {
        &self.incoming.declaration.name
    }

    /// The provider that is called.
    pub fn provider_id(&self) -> u16 {
        self.incoming.provider
    }

    /// The caller. Its address is a claim that can't be fully checked: decide by [`Caller::process`], by [`Caller::transport`]
    /// or by `Caller::certificate` (feature `tls`), or require a pre-shared key of all peers.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::new(self.shared.clone(), self.incoming.peer.clone(), 0)
    }

    /// The transport of the connection that the call arrived on; `None` when that connection has ended already.
    pub fn transport(&self) -> Option<Transport> {
        self.shared.core.scheme_of(self.incoming.link)
    }

    /// The calling process, where the operating system identifies it: over `shm://` and `loop://`. `None` elsewhere.
    pub fn process(&self) -> Option<PeerProcess> {
        let found = self.shared.core.process_of(self.incoming.link)?;
        Some(PeerProcess { pid: u32::try_from(found.pid).unwrap_or(0), uid: found.uid, gid: found.gid })
    }

    /// The certificate that the caller has presented on this connection, and whose private key it has proved to hold: X.509,
    /// encoded as DER. `None` where the connection does not use TLS, or the caller is anonymous. See
    /// [`EngineBuilder::tls`](crate::EngineBuilder::tls).
    #[cfg(feature = "tls")]
    pub fn certificate(&self) -> Option<Arc<[u8]>> {
        self.shared.core.certificate_of(self.incoming.link)
    }
}

impl fmt::Debug for Caller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({} of `{}`)", self.incoming.peer.address, self.procedure())
    }
}

/// The authorization of calls by a hook; one that panics denies the call.
pub(crate) fn authorization(decide: impl Fn(&Caller<'_>) -> bool + Send + Sync + 'static) -> Authorize {
    Box::new(move |shared, incoming| {
        let caller = Caller { shared, incoming };
        catch_unwind(AssertUnwindSafe(|| decide(&caller))).unwrap_or_else(|_| {
            tracing::error!(target: "calomel::security", ?caller, "the authorization hook panicked, the call is denied");
            false
        })
    })
}
