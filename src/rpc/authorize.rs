//! Whether a call may be made here, by whom it is made.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::engine::EngineShared;
use crate::progress::EngineEnv;
use crate::proto::Incoming;
use crate::{Endpoint, Scheme};

/// A call that a peer makes, and what is known of that peer: what [`EngineBuilder::authorize`](crate::EngineBuilder::authorize)
/// decides by.
pub struct Caller<'a> {
    shared: &'a Arc<EngineShared>,
    incoming: &'a Incoming<EngineEnv>,
}

/// A process on this host, as the system knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PeerProcess {
    /// Its number; 0 where it can't be seen from here, as between containers.
    pub pid: u32,
    /// The user that it runs as.
    pub uid: u32,
    /// The group that it runs as.
    pub gid: u32,
}

pub(crate) type Authorize = Box<dyn Fn(&Caller<'_>) -> bool + Send + Sync>;

impl Caller<'_> {
    /// The name of the procedure.
    pub fn procedure(&self) -> &str {
        &self.incoming.declaration.name
    }

    /// The provider that is called.
    pub fn provider_id(&self) -> u16 {
        self.incoming.provider
    }

    /// Who calls. Its address is what the peer claims, as far as that can be checked: decide by [`Caller::process`], by
    /// [`Caller::transport`], or by what the engine wants of everybody, such as a key.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::new(self.shared.clone(), self.incoming.peer.clone(), 0)
    }

    /// By which means the call has come; `None` when the connection is gone already.
    pub fn transport(&self) -> Option<Scheme> {
        self.shared.core.scheme_of(self.incoming.link)
    }

    /// The calling process, where the system vouches for it: over shared memory, and within a process.
    pub fn process(&self) -> Option<PeerProcess> {
        let found = self.shared.core.process_of(self.incoming.link)?;
        Some(PeerProcess { pid: u32::try_from(found.pid).unwrap_or(0), uid: found.uid, gid: found.gid })
    }

    /// The certificate that the caller has shown on this connection, and proved to be its own: X.509, encoded as DER. Where the
    /// connection is no TLS, or the caller is anonymous, there is none. See [`EngineBuilder::tls`](crate::EngineBuilder::tls).
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

/// Whether the call may be made. Whoever can't decide denies.
pub(super) fn is_allowed(shared: &Arc<EngineShared>, incoming: &Incoming<EngineEnv>) -> bool {
    let Some(authorize) = &shared.authorize else { return true };
    let caller = Caller { shared, incoming };
    catch_unwind(AssertUnwindSafe(|| authorize(&caller))).unwrap_or_else(|_| {
        tracing::error!(target: "calomel::security", ?caller, "deciding on a call has panicked: it is denied");
        false
    })
}
