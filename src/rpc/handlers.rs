//! Handlers: compare types, decode the arguments, run the user's closure, send the response.

use std::any::Any;
use std::error::Error as StdError;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bounded;
use super::request::{DEFERRED_REQUEST, Request, RequestContent, Responder};
use crate::Error;
use crate::engine::{DecodeContext, EngineShared, decoding};
use crate::progress::{EngineEnv, Handler, HandlerClass, Job, JobKind};
use crate::proto::{Body, Incoming, Status};
use crate::shape::{Knowledge, Receiver, Shape};

/// Arguments that borrow from the bytes that were received; see [`Engine::define_borrowed`](crate::Engine::define_borrowed).
/// Implemented for `str` and `[u8]`; a type of your own names itself with the lifetime:
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
    /// The type with the lifetime of one call.
    type With<'a>: Deserialize<'a>;
}

impl BorrowedArgs for str {
    type With<'a> = &'a str;
}

impl BorrowedArgs for [u8] {
    type With<'a> = &'a [u8];
}

/// Any error of a handler, as [`Engine::define_try`](crate::Engine::define_try) takes it.
pub(super) type HandlerError = Box<dyn StdError + Send + Sync>;

/// What a handler of [`Engine::define_try`](crate::Engine::define_try) may return: `?` turns every error into its error.
///
/// ```
/// use calomel::{Bulk, BulkMode, Engine, HandlerResult, Request};
///
/// # fn main() -> calomel::Result<()> {
/// # let server = Engine::server("loop://")?;
/// server.define_try("length", |request: &Request, text: Bulk| -> HandlerResult<usize> {
///     let local = request.engine().expose(vec![0u8; text.len()], BulkMode::WriteOnly)?;
///     text.on(request.endpoint()).pull_into(&local)?;
///     Ok(String::from_utf8(local.reclaim())?.chars().count())
/// })?;
/// # let client = Engine::client("loop")?;
/// # let peer = client.lookup(server.address())?;
/// # let text = client.expose_read_only("grüße")?;
/// # assert_eq!(client.procedure::<Bulk, usize>("length").on(&peer).call(&text.bulk())?, 5);
/// # Ok(())
/// # }
/// ```
pub type HandlerResult<T> = std::result::Result<T, HandlerError>;

/// The text that the caller gets. An error's `Display` is user code, and may panic.
fn text_of(error: impl Into<HandlerError>) -> String {
    error.into().to_string()
}

/// A running handler: finalizing waits for it.
struct RunningHandler(Arc<EngineShared>);

impl Drop for RunningHandler {
    fn drop(&mut self) {
        self.0.finalizing().leave();
    }
}

/// What all handlers have besides the user's closure.
pub(super) struct HandlerBase {
    shared: Weak<EngineShared>,
    class: Arc<HandlerClass>,
    arguments: Receiver,
    results: Arc<Knowledge>,
}

impl HandlerBase {
    pub(super) fn new(shared: &Arc<EngineShared>, class: Arc<HandlerClass>) -> HandlerBase {
        HandlerBase { shared: Arc::downgrade(shared), class, arguments: Receiver::new(), results: Arc::new(Knowledge::new(None)) }
    }

    pub(super) fn with<H: RequestHandler>(self, handle: H) -> Arc<dyn Handler> {
        Arc::new(BasedHandler { base: self, handle })
    }

    /// Counts a handler as running. `None` when the engine is gone, or when the caller has given up while its request was
    /// queued. A one-way call is handled also when its caller is gone.
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
            // This fails where the caller is gone, which does not matter here.
            let _ = proto.respond(incoming.request, Err(status));
        });
        shared.finalizing().recheck();
    }

    /// Checks the type of a request's arguments, and passes its bytes to `use_bytes`. `None` when the request was refused, or
    /// was parked to be handled again.
    fn open<R, T>(
        &self,
        shared: &Arc<EngineShared>,
        incoming: Incoming<EngineEnv>,
        shape_of: fn() -> Shape,
        use_bytes: impl FnOnce(Responder<R>, &[u8]) -> Result<T, NotDecoded<R>>,
    ) -> Option<T> {
        let (request, RequestContent { link, leases, body }) = Request::new(shared, incoming);
        let responder = Responder::<R>::new(request, self.results.clone());
        let declaration = responder.request().declaration();
        // Checked outside of `decoding`: tracing the type decodes synthetic values, and bulks among them must not take over the
        // message's leases.
        let checked = self.arguments.check(&declaration.verdicts, &declaration.shape, shape_of);
        if let Err(mismatch) = checked {
            // Its bulks are released first: a caller that has the response may drop their memory.
            decoding(shared, link, leases, || ());
            let (expected, found) = (Status::clip(mismatch.expected), Status::clip(mismatch.found));
            let _ = responder.refuse(Status::TypeMismatch { expected, found });
            return None;
        }
        let (used, no_memory) = decoding(shared, link, leases, || match body {
            Body::Small(bytes) => match use_bytes(responder, &bytes) {
                Err(NotDecoded::NoMemory(responder, memory)) => (None, Some((responder, memory, Body::Small(bytes)))),
                used => (used.ok(), None),
            },
            Body::Large(large) => {
                let message = large.region.take_message();
                match use_bytes(responder, &message) {
                    Err(NotDecoded::NoMemory(responder, memory)) => {
                        large.region.put_back(message);
                        (None, Some((responder, memory, Body::Large(large))))
                    }
                    used => (used.ok(), None),
                }
            }
        });
        if let Some((responder, memory, body)) = no_memory {
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

/// Why a request's arguments were not decoded.
enum NotDecoded<R> {
    /// The refusal has been sent to the caller.
    Refused,
    /// There is no memory for the values now; they need at least so many bytes.
    NoMemory(Responder<R>, usize),
}

/// Decodes arguments. The memory that they take beyond the message's length counts against the peer's limits until the
/// response.
fn arguments<'a, A: Deserialize<'a>, R>(
    shared: &EngineShared,
    responder: Responder<R>,
    bytes: &'a [u8],
    has_leases: bool,
) -> Result<(Responder<R>, A), NotDecoded<R>> {
    let (id, one_way) = (responder.request().id(), responder.request().is_one_way());
    let (mut requested, mut refused, mut no_memory) = (false, None, None);
    let decoded = bounded::decode_within(bytes, &mut |memory| {
        requested = true;
        match shared.core.exec(|proto| proto.admit_values(id, memory)) {
            Ok(granted) => return Some(granted),
            Err(Status::Busy(_)) if one_way => {
                no_memory = Some(memory);
                if has_leases {
                    // The values that were decoded so far are dropped next.
                    DecodeContext::set_will_retry();
                }
            }
            Err(status) => refused = Some(status),
        }
        None
    });
    match decoded {
        Ok((arguments, memory)) => {
            if requested {
                // Returns the memory that was granted and not used; that can't be refused.
                let _ = shared.core.exec(|proto| proto.count_values(id, memory));
            }
            Ok((responder, arguments))
        }
        Err(reason) => {
            if let Some(memory) = no_memory {
                return Err(NotDecoded::NoMemory(responder, memory));
            }
            let _ = responder.refuse(refused.unwrap_or_else(|| Status::Decode(Status::clip(reason))));
            Err(NotDecoded::Refused)
        }
    }
}

/// The status for a handler that has panicked, which is logged.
fn panicked(request: &Request, panic: &(dyn Any + Send)) -> Status {
    let message = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    let message = Status::clip(message.unwrap_or_else(|| "a panic without a message".to_owned()));
    tracing::error!(
        target: "calomel::handler", procedure = request.procedure(), provider = request.provider_id(),
        peer = %request.endpoint().address(), message, "a handler panicked"
    );
    Status::Panicked(message)
}

/// Responds with what the closure returned, or with its panic.
fn respond_with<R: Serialize>(responder: Responder<R>, outcome: std::thread::Result<R>) {
    respond_or_fail(responder, outcome.map(Ok));
}

/// Responds with what the closure returned, with the text of its error, or with its panic.
fn respond_or_fail<R: Serialize>(responder: Responder<R>, outcome: std::thread::Result<Result<R, String>>) {
    let sent = match outcome {
        Ok(Ok(result)) => responder.respond(&result),
        Ok(Err(message)) => responder.refuse(Status::Failed(Status::clip(message))),
        Err(panic) => {
            let status = panicked(responder.request(), &*panic);
            responder.refuse(status)
        }
    };
    match sent {
        Ok(()) => {}
        // Its caller has cancelled, timed out or disconnected, which is ordinary.
        Err(error @ Error::Cancelled { .. }) => {
            tracing::debug!(target: "calomel::handler", %error, "a response came too late");
        }
        Err(error) => tracing::warn!(target: "calomel::handler", %error, "a response was not sent"),
    }
}

/// What a handler does with a request, once it is counted as running.
pub(super) trait RequestHandler:
    Fn(&HandlerBase, &Arc<EngineShared>, Incoming<EngineEnv>) + Send + Sync + 'static
{
}

impl<H: Fn(&HandlerBase, &Arc<EngineShared>, Incoming<EngineEnv>) + Send + Sync + 'static> RequestHandler for H {}

struct BasedHandler<H> {
    base: HandlerBase,
    handle: H,
}

impl<H: RequestHandler> Handler for BasedHandler<H> {
    fn class(&self) -> &Arc<HandlerClass> {
        &self.base.class
    }

    fn abandon(&self, incoming: Incoming<EngineEnv>) {
        self.base.abandon(&incoming);
    }

    fn handle(&self, incoming: Incoming<EngineEnv>) {
        if let Some(running) = self.base.enter(&incoming) {
            (self.handle)(&self.base, &running.0, incoming);
        }
    }
}

/// The handler of a closure.
pub(super) fn blocking<A, R, F>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(&Request, A) -> R + Send + Sync + 'static,
{
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Incoming<EngineEnv>| {
        if let Some((responder, arguments)) = base.decode::<A, R>(shared, incoming) {
            let outcome = catch_unwind(AssertUnwindSafe(|| f(responder.request(), arguments)));
            respond_with(responder, outcome);
        }
    }
}

/// The handler of a closure that may fail.
pub(super) fn fallible<A, R, E, F>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    E: Into<HandlerError>,
    F: Fn(&Request, A) -> Result<R, E> + Send + Sync + 'static,
{
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Incoming<EngineEnv>| {
        if let Some((responder, arguments)) = base.decode::<A, R>(shared, incoming) {
            let outcome = catch_unwind(AssertUnwindSafe(|| f(responder.request(), arguments).map_err(text_of)));
            respond_or_fail(responder, outcome);
        }
    }
}

/// The handler of a closure whose arguments borrow from the request's bytes.
pub(super) fn borrowing<A, R, F>(f: F) -> impl RequestHandler
where
    A: BorrowedArgs + ?Sized + 'static,
    R: Serialize + 'static,
    F: for<'a> Fn(&Request, A::With<'a>) -> R + Send + Sync + 'static,
{
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Incoming<EngineEnv>| {
        let has_leases = incoming.leases.count > 0;
        base.open(shared, incoming, Shape::of_type::<A::With<'_>>, |responder: Responder<R>, bytes| {
            let (responder, arguments) = arguments::<A::With<'_>, R>(shared, responder, bytes, has_leases)?;
            let outcome = catch_unwind(AssertUnwindSafe(|| f(responder.request(), arguments)));
            respond_with(responder, outcome);
            Ok(())
        });
    }
}

/// The handler of a closure that responds later.
pub(super) fn deferred<A, R, F>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(Responder<R>, A) + Send + Sync + 'static,
{
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Incoming<EngineEnv>| {
        let id = incoming.request;
        if let Some((responder, arguments)) = base.decode::<A, R>(shared, incoming) {
            let request = responder.request().clone();
            let outer = DEFERRED_REQUEST.replace(Some(id));
            let outcome = catch_unwind(AssertUnwindSafe(|| f(responder, arguments)));
            DEFERRED_REQUEST.set(outer);
            if let Err(panic) = outcome {
                // The panic is the more exact response, wherever the responder is; it fails if there was one already.
                let status = panicked(&request, &*panic);
                let _ = shared.core.exec(|proto| proto.respond(id, Err(status)));
            }
        }
    }
}

/// The handler of an async closure.
pub(super) fn asynchronous<A, R, F, Fut>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
{
    spawning(f, respond_with::<R>)
}

/// The handler of an async closure that may fail.
pub(super) fn fallible_async<A, R, E, F, Fut>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    E: Into<HandlerError>,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<R, E>> + Send + 'static,
{
    let respond = |responder: Responder<R>, outcome: std::thread::Result<Result<R, String>>| respond_or_fail(responder, outcome);
    spawning(
        move |request, arguments: A| {
            let future = f(request, arguments);
            async move { future.await.map_err(text_of) }
        },
        respond,
    )
}

/// The handler of an async closure; `respond` sends what its future was ready with.
fn spawning<A, R, T, F, Fut>(f: F, respond: fn(Responder<R>, std::thread::Result<T>)) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    T: 'static,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = T> + Send + 'static,
{
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Incoming<EngineEnv>| {
        let Some((responder, arguments)) = base.decode::<A, R>(shared, incoming) else { return };
        let request = responder.request().clone();
        let id = request.id();
        let called = shared.runtime.within(|| catch_unwind(AssertUnwindSafe(|| f(request, arguments))));
        let future = match called {
            Ok(future) => future,
            Err(panic) => {
                let status = panicked(responder.request(), &*panic);
                return drop(responder.refuse(status));
            }
        };
        let engine = base.shared.clone();
        let task = async move {
            let runtime = engine.upgrade().map(|shared| shared.runtime.clone()).unwrap_or_default();
            let mut future = pin!(future);
            let outcome = poll_fn(|context| {
                let polled = runtime.within(|| catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))));
                match polled {
                    Ok(Poll::Pending) => Poll::Pending,
                    Ok(Poll::Ready(result)) => Poll::Ready(Ok(result)),
                    Err(panic) => Poll::Ready(Err(panic)),
                }
            })
            .await;
            let handle = engine.upgrade().and_then(|shared| shared.tasks.lock().remove(&id));
            respond(responder, outcome);
            if let Some(handle) = handle {
                handle.detach();
            }
        };
        let (class, engine) = (base.class.clone(), base.shared.clone());
        let schedule = move |runnable| {
            if let Some(shared) = engine.upgrade() {
                shared.core.dispatch(Job::new(&shared.core, JobKind::Task(runnable, class.clone())));
            }
        };
        let (runnable, task) = async_task::spawn(task, schedule);
        shared.tasks.lock().insert(id, task);
        // Polled here once, since most futures are ready at the first poll.
        runnable.run();
        if !shared.core.with_proto(|proto| proto.is_wanted(id)) {
            // The call was cancelled before the task was in the table, or has ended.
            let cancelled = shared.tasks.lock().remove(&id);
            drop(cancelled);
        }
    }
}
