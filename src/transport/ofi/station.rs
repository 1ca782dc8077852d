//! An endpoint with all that belongs to it: its domain, its address vector, and its completion queue.
//!
//! Each endpoint has a domain of its own. A provider goes on with the events of a domain when one of its endpoints is closed, and
//! the provider `tcp` of libfabric 2.1 then touches the freed endpoint, if a peer was connecting to it. So nothing is asked of a
//! domain any more once its endpoint is closed.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use mio::unix::SourceFd;
use mio::{Interest, Token};

use super::provider;
use super::sys::{Av, Completion, Cq, Domain, Endpoint, Info};
use crate::address::OfiProvider;
use crate::deferred_log::defer;
use crate::sync::Mutex;

/// Completions that are handled in one poll, so that other transports get their turns.
const MAX_TURN: usize = 256;

pub(super) struct Station {
    pub provider: OfiProvider,
    /// Where it is bound; may be a wildcard address. Where names are opaque: of a listener, where its name is asked for.
    pub socket: SocketAddr,
    registry: mio::Registry,
    token: Token,
    completions: Mutex<Completions>,
    // In the order in which they are closed.
    pub endpoint: Endpoint,
    cq: Arc<Cq>,
    pub av: Arc<Av>,
    pub domain: Arc<Domain>,
}

#[derive(Default)]
struct Completions {
    /// Those that are not handled yet, in their order.
    found: VecDeque<Completion>,
    /// The endpoint is closed, and the queue must not be asked.
    closed: bool,
}

impl Station {
    /// `at`: its socket address where its name does not tell one.
    pub(super) fn open(
        provider: OfiProvider,
        info: Info,
        at: SocketAddr,
        registry: &mio::Registry,
        token: Token,
    ) -> io::Result<Station> {
        let domain = Domain::open(info)?;
        let (av, cq) = (Av::open(&domain)?, Cq::open(&domain, provider::has_descriptor(provider))?);
        let endpoint = Endpoint::open(&domain, &av, &cq)?;
        let opaque = domain.info.opaque_names;
        let socket = if opaque { at } else { endpoint.name().socket().ok_or(io::ErrorKind::Other)? };
        let registry = registry.try_clone()?;
        if let Some(fd) = cq.fd {
            registry.register(&mut SourceFd(&fd), token, Interest::READABLE)?;
        }
        let completions = Mutex::default();
        Ok(Station { provider, socket, registry, token, completions, endpoint, cq, av, domain })
    }

    /// Names of endpoints are not socket addresses.
    pub(super) fn has_opaque_names(&self) -> bool {
        self.domain.info.opaque_names
    }

    pub(super) fn has_descriptor(&self) -> bool {
        self.cq.fd.is_some()
    }

    /// Takes completions from the provider, which ends the loans among them. Returns how many wait to be handled. Any thread may
    /// call it.
    pub(super) fn collect(&self) -> io::Result<usize> {
        let mut completions = self.completions.lock();
        let Completions { found, closed } = &mut *completions;
        if *closed {
            return Ok(0);
        }
        let most = found.len() + MAX_TURN;
        while found.len() < most && self.cq.poll(found)? {}
        Ok(found.len())
    }

    /// The first of those that wait to be handled.
    pub(super) fn next_completion(&self) -> Option<Completion> {
        self.completions.lock().found.pop_front()
    }

    /// What has completed since the last call.
    pub(super) fn take_completions(&self) -> io::Result<VecDeque<Completion>> {
        self.collect()?;
        Ok(std::mem::take(&mut self.completions.lock().found))
    }

    /// True when the driver may sleep until the descriptor is readable.
    pub(super) fn park(&self) -> bool {
        let completions = self.completions.lock();
        if completions.closed {
            return true;
        }
        if !completions.found.is_empty() {
            return false;
        }
        let Some(fd) = self.cq.fd else { return true };
        if !self.cq.try_wait() {
            return false;
        }
        // The reactor reports changes only: this has it report a descriptor that is readable already.
        if let Err(error) = self.registry.reregister(&mut SourceFd(&fd), self.token, Interest::READABLE) {
            self.log_failure(&error);
        }
        true
    }

    pub(super) fn log_failure(&self, error: &io::Error) {
        let (provider, error) = (self.provider, error.to_string());
        defer(move || tracing::error!(target: "calomel::ofi", %provider, error, "the provider fails"));
    }

    /// Ends all operations, without completions, and all loans. False where the provider does not close the endpoint.
    pub(super) fn close(&self) -> bool {
        let mut completions = self.completions.lock();
        if !std::mem::replace(&mut completions.closed, true)
            && let Some(fd) = self.cq.fd
        {
            let _ = self.registry.deregister(&mut SourceFd(&fd));
        }
        completions.found.clear();
        self.endpoint.close()
    }

    #[cfg(test)]
    pub(super) fn is_locked(&self) -> bool {
        self.completions.is_held()
    }
}
