//! What progress reports to the engine: calls of peers, which get their handlers here, and events.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::engine::{Engine, EngineShared, LookupResult};
use crate::progress::{EngineEnv, Job, JobKind, PeerChange, Service};
use crate::proto::{Incoming, PeerTag, Placed, RequestId, Status};

/// The engine's side of progress's [`Service`]. It does not keep the engine alive.
pub(crate) struct EngineService {
    shared: Weak<EngineShared>,
}

impl EngineService {
    pub(crate) fn new(shared: &Arc<EngineShared>) -> EngineService {
        EngineService { shared: Arc::downgrade(shared) }
    }
}

impl Service for EngineService {
    fn request(&self, incoming: Placed<Incoming<EngineEnv>>) -> Option<Job> {
        let shared = self.shared.upgrade()?;
        // A call that was parked for memory has been authorized already.
        if !incoming.again && !shared.authorize.as_ref().is_none_or(|allows| allows(&shared, &incoming)) {
            // Denied before the lookup, so that the caller can't find out which procedures exist.
            shared.core.exec(|proto| {
                proto.release(incoming.link, incoming.leases);
                proto.deny(incoming.request, incoming.link, &incoming.declaration.name);
            });
            shared.finalizing().recheck();
            return None;
        }
        let status = match shared.registry.find(incoming.provider, &incoming.declaration.name) {
            LookupResult::Handler(handler) => return Some(Job::new(&shared.core, JobKind::Request(handler, incoming))),
            LookupResult::NoProcedure => Status::NoSuchProcedure,
            LookupResult::NoProvider => Status::NoSuchProvider,
        };
        shared.statistics.unknown.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(target: "calomel::rpc", procedure = %incoming.declaration.name, provider = incoming.provider, ?status, "unknown procedure called");
        shared.core.exec(|proto| {
            proto.release(incoming.link, incoming.leases);
            // This fails where the caller is gone, which does not matter here.
            let _ = proto.respond(incoming.request, Err(status));
        });
        shared.finalizing().recheck();
        None
    }

    fn cancelled(&self, request: RequestId) {
        if let Some(shared) = self.shared.upgrade() {
            let task = shared.tasks.lock().remove(&request);
            // Dropped without the lock: the future is user code.
            drop(task);
            shared.finalizing().recheck();
        }
    }

    fn stale(&self, token: u128) {
        if let Some(shared) = self.shared.upgrade() {
            shared.copies.expire(token);
        }
    }

    fn peer_changed(&self, peer: Arc<PeerTag>, change: PeerChange) {
        if let Some(shared) = self.shared.upgrade() {
            shared.report_peer(peer, change);
        }
    }

    fn shutdown_asked(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let engine = Engine::from_shared(shared);
        // On a thread of its own: this one drives, and the response has not been sent yet.
        let name = "calomel-shutdown".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            if let Err(error) = engine.finalize() {
                tracing::warn!(target: "calomel::engine", %error, "remote shutdown failed");
            }
        });
        if let Err(error) = spawned {
            tracing::error!(target: "calomel::engine", %error, "can't start the thread that finalizes");
        }
    }
}
