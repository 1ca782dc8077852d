//! What stands between a request's bytes and the user's closure.

use std::any::Any;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::request::{HANDLING, Request, RequestContent, Responder};
use super::{bounded, codec};
use crate::engine::EngineShared;
use crate::progress::{EngineEnv, Handler, HandlerClass, Job, JobKind};
use crate::proto::{Body, Incoming, Status};
use crate::shape::{Knowledge, Receiver, Shape};

/// Arguments that borrow from the bytes that were received; see
/// [`Engine::define_borrowed`](crate::Engine::define_borrowed). There are `str` and `[u8]`; a type of your own says what it
/// is with its lifetime:
///
/// ```
/// use calomel::BorrowedArgs;
///
/// #[derive(serde::Deserialize)]
/// struct Put<'a> {
///     key: &'a str,
///     #[serde(borrow)]
///     value: &'a [u8],
/// }
///
/// impl BorrowedArgs for Put<'static> {
///     type With<'a> = Put<'a>;
/// }
/// ```
pub trait BorrowedArgs {
    /// The type, for the time of one call.
    type With<'a>: Deserialize<'a>;
}

impl BorrowedArgs for str {
    type With<'a> = &'a str;
}

impl BorrowedArgs for [u8] {
    type With<'a> = &'a [u8];
}

/// A handler that runs, as finalizing counts it.
struct RunningHandler(Arc<EngineShared>);

impl Drop for RunningHandler {
    fn drop(&mut self) {
        self.0.finalizing().leave();
    }
}

/// What every handler has besides the user's closure.
pub(super) struct HandlerBase {
    shared: Weak<EngineShared>,
    pub(super) kind: Arc<HandlerClass>,
    arguments: Receiver,
    results: Arc<Knowledge>,
}

impl HandlerBase {
    pub(super) fn new(shared: &Arc<EngineShared>, kind: Arc<HandlerClass>) -> HandlerBase {
        HandlerBase { shared: Arc::downgrade(shared), kind, arguments: Receiver::new(), results: Arc::new(Knowledge::new(None)) }
    }

    /// The engine, which knows from now on that a handler runs. `None` when it is gone, or when nobody takes the answer any
    /// more: a caller that has given up while its request was queued is not worked for. (A one-way call has none to give up:
    /// it is handled also when its caller is gone.)
    fn enter(&self, incoming: &Incoming<EngineEnv>) -> Option<RunningHandler> {
        let shared = self.shared.upgrade()?;
        if !incoming.one_way && !shared.core.with_proto(|proto| proto.is_wanted(incoming.request)) {
            self.abandon(incoming);
            return None;
        }
        shared.finalizing().enter();
        Some(RunningHandler(shared))
    }

    /// Answers a request that will not be handled.
    fn abandon(&self, incoming: &Incoming<EngineEnv>) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.core.exec(|proto| {
            proto.release(incoming.link, incoming.leases);
            let status = if incoming.one_way { Status::Finalizing } else { Status::NoResponse };
            // That the caller may be gone already changes nothing here.
            let _ = proto.respond(incoming.request, Err(status));
        });
        shared.finalizing().look_again();
    }

    /// Takes a request apart: the responder, and what is made of its bytes by `use_bytes`. `None` when it is refused, or comes
    /// again.
    fn open<R, T>(
        &self,
        shared: &Arc<EngineShared>,
        incoming: Incoming<EngineEnv>,
        shape_of: fn() -> Shape,
        use_bytes: impl FnOnce(Responder<R>, &[u8]) -> Result<T, Unused<R>>,
    ) -> Option<T> {
        let (request, RequestContent { link, leases, body }) = Request::new(shared, incoming);
        let responder = Responder::<R>::new(request, self.results.clone());
        let declaration = responder.request().declaration();
        // The type may have to be traced, with values that are made up: bulks among them must not take over the message's leases.
        let checked = self.arguments.check(&declaration.verdicts, &declaration.shape, shape_of);
        let (used, too_early) = codec::decoding(shared, link, leases, || {
            if let Err(mismatch) = checked {
                let (expected, found) = (Status::clip(mismatch.expected), Status::clip(mismatch.found));
                let _ = responder.refuse(Status::TypeMismatch { expected, found });
                return (None, None);
            }
            match body {
                Body::Small(bytes) => match use_bytes(responder, &bytes) {
                    Err(Unused::TooEarly(responder, memory)) => (None, Some((responder, memory, Body::Small(bytes)))),
                    used => (used.ok(), None),
                },
                Body::Large(large) => {
                    let message = large.region.take_message();
                    match use_bytes(responder, &message) {
                        Err(Unused::TooEarly(responder, memory)) => {
                            large.region.put_back(message);
                            (None, Some((responder, memory, Body::Large(large))))
                        }
                        used => (used.ok(), None),
                    }
                }
            }
        });
        if let Some((responder, memory, body)) = too_early {
            responder.wait_for_memory(RequestContent { link, leases, body }, memory);
        }
        used
    }

    /// As `open`, for arguments that own what they hold.
    fn decode<A: DeserializeOwned, R>(
        &self,
        shared: &Arc<EngineShared>,
        incoming: Incoming<EngineEnv>,
    ) -> Option<(Responder<R>, A)> {
        let has_leases = incoming.leases.count > 0;
        self.open(shared, incoming, Shape::of_type::<A>, |responder, bytes| arguments(shared, responder, bytes, has_leases))
    }
}

/// Why no arguments are made of a request's bytes.
enum Unused<R> {
    /// The caller is told.
    Refused,
    /// There is no memory for the values just now, of which there would be so much and more.
    TooEarly(Responder<R>, usize),
}

/// Decodes arguments. What they take of memory beyond the length of the message counts for the peer, until it is answered.
fn arguments<'a, A: Deserialize<'a>, R>(
    shared: &EngineShared,
    responder: Responder<R>,
    bytes: &'a [u8],
    has_leases: bool,
) -> Result<(Responder<R>, A), Unused<R>> {
    let (id, one_way) = (responder.request().id(), responder.request().is_one_way());
    let (mut asked, mut refused, mut too_early) = (false, None, None);
    let decoded = bounded::decode_within(bytes, &mut |memory| {
        asked = true;
        match shared.core.exec(|proto| proto.admit_values(id, memory)) {
            Ok(granted) => return Some(granted),
            Err(Status::Busy(_)) if one_way => {
                too_early = Some(memory);
                if has_leases {
                    // What has been decoded is dropped next.
                    codec::DecodeContext::set_in_vain();
                }
            }
            Err(status) => refused = Some(status),
        }
        None
    });
    match decoded {
        Ok((arguments, memory)) => {
            if asked {
                // More was granted than is taken: to have less is never refused.
                let _ = shared.core.exec(|proto| proto.count_values(id, memory));
            }
            Ok((responder, arguments))
        }
        Err(reason) => {
            if let Some(memory) = too_early {
                return Err(Unused::TooEarly(responder, memory));
            }
            let _ = responder.refuse(refused.unwrap_or_else(|| Status::Decode(Status::clip(reason))));
            Err(Unused::Refused)
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> Status {
    let message = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    Status::Panicked(Status::clip(message.unwrap_or_else(|| "a panic without a message".to_owned())))
}

/// Ends a call with what the closure returned, or with its panic.
fn answer<R: Serialize>(responder: Responder<R>, outcome: std::thread::Result<R>) {
    let told = match outcome {
        Ok(result) => responder.respond(&result),
        Err(panic) => responder.refuse(panic_message(&*panic)),
    };
    if let Err(error) = told {
        tracing::debug!(target: "calomel::handler", %error, "an answer was not sent");
    }
}

pub(super) struct ClosureHandler<F, A, R> {
    pub base: HandlerBase,
    pub f: F,
    pub _types: PhantomData<fn(A) -> R>,
}

impl<F, A, R> Handler for ClosureHandler<F, A, R>
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(&Request, A) -> R + Send + Sync + 'static,
{
    fn kind(&self) -> &Arc<HandlerClass> {
        &self.base.kind
    }

    fn abandon(&self, incoming: Incoming<EngineEnv>) {
        self.base.abandon(&incoming);
    }

    fn handle(&self, incoming: Incoming<EngineEnv>) {
        let Some(entered) = self.base.enter(&incoming) else { return };
        if let Some((responder, arguments)) = self.base.decode::<A, R>(&entered.0, incoming) {
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.f)(responder.request(), arguments)));
            answer(responder, outcome);
        }
    }
}

pub(super) struct BorrowingHandler<F, A: ?Sized, R> {
    pub base: HandlerBase,
    pub f: F,
    pub _types: PhantomData<fn(&A) -> R>,
}

impl<F, A, R> Handler for BorrowingHandler<F, A, R>
where
    A: BorrowedArgs + ?Sized + 'static,
    R: Serialize + 'static,
    F: for<'a> Fn(&Request, A::With<'a>) -> R + Send + Sync + 'static,
{
    fn kind(&self) -> &Arc<HandlerClass> {
        &self.base.kind
    }

    fn abandon(&self, incoming: Incoming<EngineEnv>) {
        self.base.abandon(&incoming);
    }

    fn handle(&self, incoming: Incoming<EngineEnv>) {
        let Some(entered) = self.base.enter(&incoming) else { return };
        let has_leases = incoming.leases.count > 0;
        self.base.open(&entered.0, incoming, Shape::of_type::<A::With<'_>>, |responder: Responder<R>, bytes| {
            let (responder, arguments) = arguments::<A::With<'_>, R>(&entered.0, responder, bytes, has_leases)?;
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.f)(responder.request(), arguments)));
            answer(responder, outcome);
            Ok(())
        });
    }
}

pub(super) struct DeferredHandler<F, A, R> {
    pub base: HandlerBase,
    pub f: F,
    pub _types: PhantomData<fn(A) -> R>,
}

impl<F, A, R> Handler for DeferredHandler<F, A, R>
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(Responder<R>, A) + Send + Sync + 'static,
{
    fn kind(&self) -> &Arc<HandlerClass> {
        &self.base.kind
    }

    fn abandon(&self, incoming: Incoming<EngineEnv>) {
        self.base.abandon(&incoming);
    }

    fn handle(&self, incoming: Incoming<EngineEnv>) {
        let Some(entered) = self.base.enter(&incoming) else { return };
        let shared = &entered.0;
        let id = incoming.request;
        if let Some((responder, arguments)) = self.base.decode::<A, R>(shared, incoming) {
            let outer = HANDLING.replace(Some(id));
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.f)(responder, arguments)));
            HANDLING.set(outer);
            if let Err(panic) = outcome {
                // Whether the closure has kept the responder or not, this is the better answer, if it is not too late.
                let status = panic_message(&*panic);
                let _ = shared.core.exec(|proto| proto.respond(id, Err(status)));
            }
        }
    }
}

pub(super) struct AsyncHandler<F, A, R> {
    pub base: HandlerBase,
    pub f: F,
    pub _types: PhantomData<fn(A) -> R>,
}

impl<F, Fut, A, R> Handler for AsyncHandler<F, A, R>
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
{
    fn kind(&self) -> &Arc<HandlerClass> {
        &self.base.kind
    }

    fn abandon(&self, incoming: Incoming<EngineEnv>) {
        self.base.abandon(&incoming);
    }

    fn handle(&self, incoming: Incoming<EngineEnv>) {
        let Some(entered) = self.base.enter(&incoming) else { return };
        let shared = &entered.0;
        let Some((responder, arguments)) = self.base.decode::<A, R>(shared, incoming) else { return };
        let request = responder.request().clone();
        let id = request.id();
        let future = match catch_unwind(AssertUnwindSafe(|| (self.f)(request, arguments))) {
            Ok(future) => future,
            Err(panic) => return drop(responder.refuse(panic_message(&*panic))),
        };
        let engine = self.base.shared.clone();
        let task = async move {
            let mut future = pin!(future);
            let outcome = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
                Ok(Poll::Pending) => Poll::Pending,
                Ok(Poll::Ready(result)) => Poll::Ready(Ok(result)),
                Err(panic) => Poll::Ready(Err(panic)),
            })
            .await;
            let done = engine.upgrade().and_then(|shared| shared.tasks.lock().remove(&id));
            answer(responder, outcome);
            if let Some(done) = done {
                done.detach();
            }
        };
        let (kind, engine) = (self.base.kind.clone(), self.base.shared.clone());
        let schedule = move |runnable| {
            if let Some(shared) = engine.upgrade() {
                shared.core.hand_over(Job::new(&shared.core, JobKind::Task(runnable, kind.clone())));
            }
        };
        let (runnable, task) = async_task::spawn(task, schedule);
        shared.tasks.lock().insert(id, task);
        // The first step is taken here and now: most futures are ready then.
        runnable.run();
        if !shared.core.with_proto(|proto| proto.is_wanted(id)) {
            // Cancelled while the task was not in the table, or done.
            let gone = shared.tasks.lock().remove(&id);
            drop(gone);
        }
    }
}
