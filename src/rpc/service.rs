//! What an engine makes of its peers' requests.

use std::sync::{Arc, Weak};

use super::authorize::is_allowed;
use super::define::LookupResult;
use crate::Engine;
use crate::engine::EngineShared;
use crate::progress::{EngineEnv, Job, JobKind, Service};
use crate::proto::{Incoming, RequestId, Status};

/// The engine, as progress knows it. It keeps nothing alive.
pub(crate) struct EngineService {
    shared: Weak<EngineShared>,
}

impl EngineService {
    pub(crate) fn new(shared: &Arc<EngineShared>) -> EngineService {
        EngineService { shared: Arc::downgrade(shared) }
    }
}

impl Service for EngineService {
    fn request(&self, incoming: Incoming<EngineEnv>) -> Option<Job> {
        let shared = self.shared.upgrade()?;
        // A call that has waited for memory has been decided on.
        if !incoming.again && !is_allowed(&shared, &incoming) {
            // Which procedures there are is no business of theirs.
            shared.core.exec_with_others(|proto| {
                proto.release(incoming.link, incoming.leases);
                proto.deny(incoming.request, incoming.link, &incoming.declaration.name);
            });
            shared.finalizing().look_again();
            return None;
        }
        let status = match shared.registry.find(incoming.provider, &incoming.declaration.name) {
            LookupResult::Handler(handler) => return Some(Job::new(&shared.core, JobKind::Request(handler, incoming))),
            LookupResult::NoProcedure => Status::NoSuchProcedure,
            LookupResult::NoProvider => Status::NoSuchProvider,
        };
        tracing::debug!(target: "calomel::rpc", name = %incoming.declaration.name, provider = incoming.provider, ?status, "a call of nothing");
        shared.core.exec_with_others(|proto| {
            proto.release(incoming.link, incoming.leases);
            // That the caller may be gone already changes nothing here.
            let _ = proto.respond(incoming.request, Err(status));
        });
        shared.finalizing().look_again();
        None
    }

    fn cancelled(&self, request: RequestId) {
        if let Some(shared) = self.shared.upgrade() {
            let task = shared.tasks.lock().remove(&request);
            // Dropped without the lock: the future may hold anything.
            drop(task);
            shared.finalizing().look_again();
        }
    }

    fn stale(&self, token: u128) {
        if let Some(shared) = self.shared.upgrade() {
            shared.copies.expire(token);
        }
    }

    fn shutdown_asked(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let engine = Engine::from_shared(shared);
        // Whoever drives must go on driving: the answer is not out yet.
        let name = "calomel-shutdown".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            if let Err(error) = engine.finalize() {
                tracing::warn!(target: "calomel::engine", %error, "remote shutdown");
            }
        });
        if let Err(error) = spawned {
            tracing::error!(target: "calomel::engine", %error, "can't start the thread that finalizes");
        }
    }
}
