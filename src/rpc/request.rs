//! A call, from the server's end.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::codec;
use crate::engine::EngineShared;
use crate::memory::{Region, Slice};
use crate::progress::{EngineEnv, error_of};
use crate::proto::{self, Body, Declaration, Failure, Incoming, LeaseRange, LinkId, Reply, RequestId, Status};
use crate::shape::Knowledge;
use crate::{Endpoint, Engine, Error, Result, Side};

/// Who called, what, and until when. Clones can be kept, and do not keep the engine alive.
pub struct Request {
    engine: Engine,
    endpoint: Endpoint,
    id: RequestId,
    declaration: Arc<Declaration<EngineEnv>>,
    provider: u16,
    deadline: Option<Instant>,
    one_way: bool,
}

impl Request {
    pub(super) fn new(shared: &Arc<EngineShared>, incoming: Incoming<EngineEnv>) -> (Request, RequestContent) {
        let Incoming { request: id, link, peer, provider, declaration, deadline, one_way, body, leases, again: _ } = incoming;
        let endpoint = Endpoint::new(shared.clone(), peer, 0);
        let engine = Engine::from_shared(shared.clone());
        let request = Request { engine, endpoint, id, declaration, provider, deadline, one_way };
        (request, RequestContent { link, leases, body })
    }

    /// The engine that was called. The reference does not keep it alive; a clone does, as every handle, so a handler that keeps
    /// one for longer than its call should keep what [`Engine::downgrade`] gives.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Who called: bulks that came with the call are its own, and it can be called in turn.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// When the caller gives up.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The time that the caller still waits; zero when it has given up. Without a deadline, the longest there is.
    pub fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// True when nobody takes the answer any more: the caller cancelled, gave up at its deadline, or went away; and in a
    /// forked child, which can't answer. A one-way call has no answer: that its caller goes away does not cancel it.
    pub fn is_cancelled(&self) -> bool {
        let core = &self.engine.shared().core;
        self.remaining().is_zero() || core.is_forked() || !core.with_proto(|proto| proto.is_wanted(self.id))
    }

    /// The name that the procedure was called by.
    pub fn procedure(&self) -> &str {
        &self.declaration.name
    }

    /// The provider that was called.
    pub fn provider_id(&self) -> u16 {
        self.provider
    }

    /// True when the caller wants no answer.
    pub fn is_one_way(&self) -> bool {
        self.one_way
    }

    pub(super) fn declaration(&self) -> &Declaration<EngineEnv> {
        &self.declaration
    }

    pub(super) fn id(&self) -> RequestId {
        self.id
    }
}

impl Clone for Request {
    fn clone(&self) -> Request {
        let Request { ref engine, ref endpoint, id, ref declaration, provider, deadline, one_way } = *self;
        // A clone of the engine would be a handle, which keeps it alive: async handlers get, and keep, clones of requests.
        let engine = Engine::from_shared(engine.shared().clone());
        let (endpoint, declaration) = (endpoint.clone(), declaration.clone());
        Request { engine, endpoint, id, declaration, provider, deadline, one_way }
    }
}

/// What came with a request, for its handler.
pub(super) struct RequestContent {
    pub link: LinkId,
    pub leases: LeaseRange,
    pub body: Body<Slice>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request(`{}` of provider {} by {:?})", self.procedure(), self.provider, self.endpoint)
    }
}

thread_local! {
    /// The request whose deferred handler runs on this thread.
    pub(super) static HANDLING: Cell<Option<RequestId>> = const { Cell::new(None) };
}

/// The right, and the duty, to answer one call. It can be kept, and given to another thread.
///
/// Dropped unanswered, the caller gets [`Error::NoResponse`].
pub struct Responder<R> {
    request: Request,
    /// What is known of the results of this registration.
    results: Arc<Knowledge>,
    answered: bool,
    _result: PhantomData<fn(&R)>,
}

impl<R> Responder<R> {
    pub(super) fn new(request: Request, results: Arc<Knowledge>) -> Responder<R> {
        Responder { request, results, answered: false, _result: PhantomData }
    }

    /// The call that is to be answered.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Answers that the procedure failed: the caller gets [`Error::Failed`] with the message.
    pub fn fail(self, message: impl Into<String>) {
        let _ = self.refuse(Status::Failed(Status::clip(message.into())));
    }

    /// The arguments of this one-way call would have taken so much memory and more: its handler gets it again when there is as
    /// much.
    pub(super) fn wait_for_memory(mut self, content: RequestContent, memory: usize) {
        self.answered = true;
        let Request { endpoint, id, declaration, provider, deadline, one_way, .. } = &self.request;
        let incoming = Incoming {
            request: *id,
            link: content.link,
            peer: endpoint.tag().clone(),
            provider: *provider,
            declaration: declaration.clone(),
            deadline: *deadline,
            one_way: *one_way,
            again: true,
            body: content.body,
            leases: content.leases,
        };
        self.request.engine.shared().core.exec_unless_forked(|proto| proto.park(incoming, memory));
    }

    pub(super) fn refuse(mut self, status: Status) -> Result<()> {
        self.answer(Err(status))
    }

    fn answer(&mut self, reply: std::result::Result<Reply<'_, EngineEnv>, Status>) -> Result<()> {
        self.answered = true;
        let request = &self.request;
        let shared = request.engine.shared();
        shared.check_process(|| format!("answer to `{}`", request.procedure()))?;
        let answered = shared.core.exec(|proto| proto.respond(request.id, reply));
        shared.finalizing().look_again();
        answered.map_err(|failure| self.error(failure))
    }

    fn error(&self, failure: Failure) -> Error {
        let Request { endpoint, provider, .. } = &self.request;
        let name = self.request.procedure();
        error_of(failure, &endpoint.address(), format!("answer to `{name}`"), name, Duration::ZERO, *provider)
    }
}

impl<R: Serialize> Responder<R> {
    /// Answers.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when nobody takes the answer any more, [`Error::MessageTooLarge`] (the caller gets it too), and
    /// [`Error::Encode`] for a value that can't be encoded.
    pub fn respond(mut self, result: &R) -> Result<()> {
        let eager = self.request.engine.shared().limits.eager;
        codec::with_buffer(|buffer| {
            if self.request.one_way {
                return self.answer(Ok(Reply {
                    content: proto::OutgoingBody::Small(&[]),
                    result: 0,
                    shape: &[],
                    leases: Vec::new(),
                }));
            }
            let (leases, declared) = match codec::encode(result, buffer, self.request.engine.shared(), &self.results) {
                Ok(encoded) => encoded,
                Err(failed) => {
                    let error = failed.error(&self.request.endpoint.address(), Side::Result, self.request.procedure());
                    let reason = match &error {
                        Error::Encode { reason, .. } => reason.clone(),
                        error => error.to_string(),
                    };
                    let _ = self.answer(Err(Status::Encode(Status::clip(reason))));
                    return Err(error);
                }
            };
            let content = if buffer.len() > eager {
                proto::OutgoingBody::Large(Slice::whole(&Region::from_vec(std::mem::take(buffer))))
            } else {
                proto::OutgoingBody::Small(buffer)
            };
            self.answer(Ok(Reply { content, result: declared.number, shape: &declared.shape, leases }))
        })
    }
}

impl<R> Drop for Responder<R> {
    fn drop(&mut self) {
        if self.answered || self.request.engine.shared().core.is_forked() {
            return;
        }
        let status = if std::thread::panicking() {
            if HANDLING.get() == Some(self.request.id) {
                // Its handler is unwinding: whoever catches that knows what the panic said.
                return;
            }
            Status::Panicked("the thread that was to answer".to_owned())
        } else {
            Status::NoResponse
        };
        let _ = self.answer(Err(status));
    }
}

impl<R> fmt::Debug for Responder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responder({:?})", self.request)
    }
}
