//! `Endpoint`: a peer, or one of its providers, as an engine calls it.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use super::{Engine, EngineShared, deadline};
use crate::progress::{Completion, OperationOutcome, error_of};
use crate::proto::{Failure, LinkId, PeerId, PeerTag};
use crate::{Address, Result, Scheme};

/// A peer that can be called, or one provider of it. Cheap to clone; dropping it does not disconnect.
///
/// Endpoints are equal when they belong to the same engine, and name the same provider of the same peer.
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

    /// The address that the peer listens at; for one that does not listen, the address that its connection comes from.
    pub fn address(&self) -> Address {
        self.tag.address.clone()
    }

    /// An endpoint for the provider with this number, of the same peer.
    pub fn provider(&self, id: u16) -> Endpoint {
        Endpoint { provider: id, ..self.clone() }
    }

    /// The number of this endpoint's provider; 0 is the engine itself.
    pub fn provider_id(&self) -> u16 {
        self.provider
    }

    /// True while there is a connection. There is none before the first call, and none after the peer has disconnected; the
    /// next call connects again.
    pub fn is_connected(&self) -> bool {
        self.connection().is_some()
    }

    /// The transport of the current connection; `None` while there is none. It can differ from the address's scheme: a tcp or
    /// verbs address of the same host may be reached through shared memory.
    pub fn transport(&self) -> Option<Scheme> {
        self.shared.core.scheme_of(self.connection()?)
    }

    /// The link to the peer; a forked child has none.
    fn connection(&self) -> Option<LinkId> {
        let core = &self.shared.core;
        if core.is_forked() { None } else { core.with_proto(|proto| proto.connection(self.tag.id)) }
    }

    /// The engine that this endpoint belongs to. The handle keeps it alive.
    pub fn engine(&self) -> Engine {
        Engine::from_shared(self.shared.clone()).clone()
    }

    /// Asks the peer to finalize itself. Returns when it has accepted, before it is finalized.
    ///
    /// # Errors
    /// [`Error::AccessDenied`](crate::Error::AccessDenied) where that is not allowed by
    /// [`EngineBuilder::remote_shutdown`](crate::EngineBuilder::remote_shutdown), and what any call may end with.
    pub fn shutdown(&self) -> Result<()> {
        self.shared.check("remote shutdown")?;
        let timeout = self.shared.limits.default_timeout;
        let completion = Completion::new();
        let now = Instant::now();
        let deadline = deadline(now, timeout);
        let started = self.shared.core.exec(|proto| proto.shut_down_peer(self.tag.id, deadline, completion.clone(), now));
        let error = |failure| error_of(failure, &self.tag.address, "remote shutdown".to_owned(), "shutdown", timeout, 0);
        started.map_err(error)?;
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
