//! Whom to talk to.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use crate::engine::EngineShared;
use crate::progress::{Completion, OperationOutcome, error_of};
use crate::proto::{Failure, LinkId, PeerId, PeerTag};
use crate::rpc::deadline;
use crate::{Address, Engine, Result, Scheme};

/// An engine that can be called, as another engine sees it; or one provider of it. Cheap to clone.
///
/// Endpoints are equal when they mean the same provider of the same peer, seen from the same engine.
#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<EngineShared>,
    tag: Arc<PeerTag>,
    provider: u16,
}

impl Endpoint {
    pub(crate) fn new(shared: Arc<EngineShared>, tag: Arc<PeerTag>, provider: u16) -> Endpoint {
        Endpoint { shared, tag, provider }
    }

    pub(crate) fn shared(&self) -> &Arc<EngineShared> {
        &self.shared
    }

    pub(crate) fn peer(&self) -> PeerId {
        self.tag.id
    }

    pub(crate) fn tag(&self) -> &Arc<PeerTag> {
        &self.tag
    }

    /// Where the peer listens; for one that does not, where its connection comes from.
    pub fn address(&self) -> Address {
        self.tag.address.clone()
    }

    /// The same peer's provider of this number.
    pub fn provider(&self, id: u16) -> Endpoint {
        Endpoint { provider: id, ..self.clone() }
    }

    /// The number of the provider that this endpoint means; 0 is the engine itself.
    pub fn provider_id(&self) -> u16 {
        self.provider
    }

    /// True while there is a connection. There is none before the first call, and none after the peer went away; the next
    /// call makes one.
    pub fn is_connected(&self) -> bool {
        self.connection().is_some()
    }

    /// By which means the peer is reached now; `None` while there is no connection. It can differ from the address: peers on
    /// one host find each other through shared memory.
    pub fn transport(&self) -> Option<Scheme> {
        self.shared.core.scheme_of(self.connection()?)
    }

    /// A forked child has none.
    fn connection(&self) -> Option<LinkId> {
        let core = &self.shared.core;
        if core.is_forked() { None } else { core.with_proto(|proto| proto.connection(self.tag.id)) }
    }

    /// The engine that this endpoint was looked up by.
    pub fn engine(&self) -> Engine {
        Engine::from_shared(self.shared.clone()).clone()
    }

    /// Asks the peer to finalize itself. Returns when it has agreed to.
    ///
    /// # Errors
    /// [`Error::AccessDenied`](crate::Error::AccessDenied) where that is not enabled with
    /// [`EngineBuilder::remote_shutdown`](crate::EngineBuilder::remote_shutdown), and what any call may end with.
    pub fn shutdown(&self) -> Result<()> {
        self.shared.check("remote shutdown")?;
        let timeout = self.shared.limits.default_timeout;
        let completion = Completion::new();
        let now = Instant::now();
        let deadline = deadline(now, timeout);
        let begun = self.shared.core.exec(|proto| proto.shut_down_peer(self.tag.id, deadline, completion.clone(), now));
        let error = |failure| error_of(failure, &self.tag.address, "remote shutdown".to_owned(), "shutdown", timeout, 0);
        begun.map_err(error)?;
        if !completion.wait(&self.shared.core, None) {
            self.shared.check_may_wait(|| "remote shutdown".to_owned())?;
        }
        match completion.take() {
            Some(OperationOutcome::Answered(Ok(_))) => Ok(()),
            Some(OperationOutcome::Answered(Err(failure))) => Err(error(failure)),
            _ => Err(error(Failure::Finalized)),
        }
    }
}

impl AsRef<Endpoint> for Endpoint {
    fn as_ref(&self) -> &Endpoint {
        self
    }
}

impl PartialEq for Endpoint {
    fn eq(&self, other: &Endpoint) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.tag.id == other.tag.id && self.provider == other.provider
    }
}

impl Eq for Endpoint {}

impl Hash for Endpoint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.tag.id.hash(state);
        self.provider.hash(state);
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({}", self.tag.address)?;
        if self.provider != 0 {
            write!(f, ", provider {}", self.provider)?;
        }
        f.write_str(")")
    }
}
