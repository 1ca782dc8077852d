//! Requests and responders: a call, from the server's side.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::codec;
use crate::engine::{Endpoint, Engine, EngineShared};
use crate::memory::Slice;
use crate::progress::{EngineEnv, error_of};
use crate::proto::{self, Body, Declaration, Failure, Incoming, LeaseRange, LinkId, Reply, RequestId, Status};
use crate::shape::Knowledge;
use crate::{Error, MessageSide, Result};

/// A call that is being handled: its caller, procedure and deadline. Clones can be kept, and do not keep the engine alive.
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

    /// The engine that was called. The reference does not keep it alive; a clone does, so a handler that keeps a handle for
    /// longer than its call should keep the [`WeakEngine`](crate::WeakEngine) that [`Engine::downgrade`] returns.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The caller. It owns the bulks that it did not forward from others, and can be called in turn.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// When the call times out at its caller; `None` without a deadline.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The time until the deadline; zero when it has passed, [`Duration::MAX`] without a deadline.
    pub fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// True when the caller no longer takes a response: it has cancelled the call, timed out, or disconnected; also in a forked
    /// child, which can't respond. A one-way call is not cancelled when its caller disconnects.
    pub fn is_cancelled(&self) -> bool {
        let core = &self.engine.shared().core;
        self.remaining().is_zero() || core.is_forked() || !core.with_proto(|proto| proto.is_wanted(self.id))
    }

    /// The name of the called procedure.
    pub fn procedure(&self) -> &str {
        &self.declaration.name
    }

    /// The number of the called provider.
    pub fn provider_id(&self) -> u16 {
        self.provider
    }

    /// True when the call is one-way: the caller gets no response.
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
        // Not a clone of the handle, which would keep the engine alive: async handlers keep clones of requests.
        let engine = Engine::from_shared(engine.shared().clone());
        let (endpoint, declaration) = (endpoint.clone(), declaration.clone());
        Request { engine, endpoint, id, declaration, provider, deadline, one_way }
    }
}

/// The body of a request and its leases, for the handler.
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
    pub(super) static DEFERRED_REQUEST: Cell<Option<RequestId>> = const { Cell::new(None) };
}

/// Sends the response to one call, once. It can be kept, and sent to another thread.
///
/// When it is dropped without a response, the caller gets [`Error::NoResponse`]; when a panicking thread drops it,
/// [`Error::HandlerPanicked`].
pub struct Responder<R> {
    request: Request,
    /// What is known of the shapes of this registration's results.
    results: Arc<Knowledge>,
    answered: bool,
    _result: PhantomData<fn(&R)>,
}

impl<R> Responder<R> {
    pub(super) fn new(request: Request, results: Arc<Knowledge>) -> Responder<R> {
        Responder { request, results, answered: false, _result: PhantomData }
    }

    /// The call that this responds to.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Responds that the procedure failed: the caller gets [`Error::Failed`] with the message.
    pub fn fail(self, message: impl Into<String>) {
        let _ = self.refuse(Status::Failed(Status::clip(message.into())));
    }

    /// Parks this one-way call, whose arguments need at least `memory` bytes: it is handled again when that much is free.
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
        shared.finalizing().recheck();
        answered.map_err(|failure| self.error(failure))
    }

    fn error(&self, failure: Failure) -> Error {
        let Request { endpoint, provider, .. } = &self.request;
        let name = self.request.procedure();
        error_of(failure, &endpoint.address(), format!("answer to `{name}`"), name, Duration::ZERO, *provider)
    }
}

impl<R: Serialize> Responder<R> {
    /// Sends the result to the caller.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the caller no longer takes a response; [`Error::MessageTooLarge`] and [`Error::Encode`] for a
    /// value that is too large or can't be encoded (the caller gets these too).
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
            let (leases, declared) = match codec::encode(result, &mut buffer.bytes, self.request.engine.shared(), &self.results) {
                Ok(encoded) => encoded,
                Err(failed) => {
                    let error = failed.error(&self.request.endpoint.address(), MessageSide::Result, self.request.procedure());
                    let reason = match &error {
                        Error::Encode { reason, .. } => reason.clone(),
                        error => error.to_string(),
                    };
                    let _ = self.answer(Err(Status::Encode(Status::clip(reason))));
                    return Err(error);
                }
            };
            let content = buffer.outgoing(eager);
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
            if DEFERRED_REQUEST.get() == Some(self.request.id) {
                // Its handler is unwinding; the thread that catches the panic responds with its message.
                return;
            }
            Status::Panicked("the thread that held the responder".to_owned())
        } else {
            if !self.request.one_way && !self.request.is_cancelled() {
                let Request { provider, endpoint, .. } = &self.request;
                tracing::warn!(
                    target: "calomel::handler", procedure = self.request.procedure(), provider, peer = %endpoint.address(),
                    "a responder was dropped without a response"
                );
            }
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
