//! A call, from the server's side: finds its handler, compares types, decodes the arguments, runs the user's closure, sends
//! the response.

mod tasks;

use std::any::Any;
use std::cell::Cell;
use std::error::Error as StdError;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use slotmap::Key;

use super::arrived::ArrivedMessage;
use super::borrowed_args::BorrowedArgs;
use super::bounded;
use super::calling::{self, CallingHandler};
use super::span::HandlerSpan;
use crate::engine::{
    DecodeContext, EncodeBuffer, EncodeMessage, Endpoint, Engine, EngineShared, HandledCalls, ListInPlace, MonitoredCall,
    decoding, encode_message, outgoing_body,
};
use crate::memory::{Region, Slice};
use crate::progress::{EngineEnv, Handler, HandlerClass, error_of, nanos, spare};
use crate::proto::{Body, Declaration, Failure, Incoming, LeaseRange, LinkId, OutgoingBody, Placed, Reply, RequestId, Status};
use crate::shape::{InPlace, Knowledge, Receiver, Shape};
use crate::{Error, MessageSide, TraceContext};
pub(super) use tasks::{asynchronous, fallible_async};

/// What a handler does with a request, once it is counted as running.
pub(super) trait RequestHandler:
    Fn(&HandlerBase, &Arc<EngineShared>, Placed<Incoming<EngineEnv>>) + Send + Sync + 'static
{
}

impl<H: Fn(&HandlerBase, &Arc<EngineShared>, Placed<Incoming<EngineEnv>>) + Send + Sync + 'static> RequestHandler for H {}

struct BasedHandler<H> {
    base: HandlerBase,
    handle: H,
}

impl<H: RequestHandler> Handler for BasedHandler<H> {
    fn class(&self) -> &Arc<HandlerClass> {
        &self.base.class
    }

    fn abandon(&self, incoming: Placed<Incoming<EngineEnv>>) {
        self.base.abandon(&incoming);
    }

    fn handle(&self, incoming: Placed<Incoming<EngineEnv>>) {
        if self.base.side.calls.is_some() {
            calling::note_begin();
        }
        if let Some(running) = self.base.enter(&incoming) {
            let _calling = CallingHandler::enter(self.base.side.calls.as_deref());
            (self.handle)(&self.base, &running.0, incoming);
        }
    }

    fn returned(&self, waited: u64, ran: u64) {
        if let Some(calls) = &self.base.side.calls {
            calling::count(calls, waited, ran);
        }
    }
}

/// When the handlers of a registration answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerTime {
    /// Before they return.
    OnReturn,
    /// Any time.
    Later,
}

/// What the responders of a registration share.
struct RespondingSide {
    /// What is known of the shapes of the results.
    results: Knowledge,
    /// Where the calls are counted; `None` where nothing is measured.
    calls: Option<Arc<HandledCalls>>,
    answers: AnswerTime,
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
    side: Arc<RespondingSide>,
}

impl HandlerBase {
    pub(super) fn new(
        shared: &Arc<EngineShared>,
        class: Arc<HandlerClass>,
        answers: AnswerTime,
        calls: Option<Arc<HandledCalls>>,
    ) -> HandlerBase {
        let side = Arc::new(RespondingSide { results: Knowledge::new(None), calls, answers });
        HandlerBase { shared: Arc::downgrade(shared), class, arguments: Receiver::new(), side }
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

    /// Checks the type of a request's arguments, and passes its message to `use_message`. That is not called when the request was refused.
    /// The response that is owed is made in `slot`, where it stays: to move it from function to function takes longer than what most
    /// of them do.
    fn open(
        &self,
        shared: &Arc<EngineShared>,
        incoming: Placed<Incoming<EngineEnv>>,
        shape_of: fn() -> Shape,
        slot: &mut Option<OwedResponse>,
        use_message: UseMessage<'_>,
    ) {
        let (incoming, place) = incoming.take();
        spare::keep_request_place(place);
        let (link, leases) = (incoming.link, incoming.leases);
        let request = Request {
            endpoint: Endpoint::new(shared.clone(), incoming.peer, 0),
            id: incoming.request,
            declaration: incoming.declaration,
            provider: incoming.provider,
            deadline: incoming.deadline,
            one_way: incoming.one_way,
            trace: incoming.trace,
        };
        let (side, span, answered) = (self.side.clone(), HandlerSpan::default(), AtomicBool::new(false));
        let response = slot.insert(OwedResponse { request, side, span, answered });
        response.span = HandlerSpan::begin(shared, || response.request.monitored(), response.request.trace_context());
        if response.side.calls.is_some() {
            calling::note_received(incoming.body.len());
        }
        shared.tell_monitor(|monitor| monitor.handler_begins(&response.request.monitored()));
        let declaration = response.request.declaration();
        // Checked outside of `decoding`: tracing the type decodes synthetic values, and bulks among them must not take over the
        // message's leases.
        let checked = self.arguments.check(&declaration.verdicts, &declaration.shape, shape_of);
        if let Err(mismatch) = checked {
            // Its bulks are released first: a caller that has the response may drop their memory.
            decoding(shared, link, leases, || ());
            let (expected, found) = (Status::clip(mismatch.expected), Status::clip(mismatch.found));
            let _ = response.refuse(Status::TypeMismatch { expected, found });
            return;
        }
        let used = decoding(shared, link, leases, || match &incoming.body {
            Body::Small(bytes) => use_message(response, ArrivedMessage::Small(bytes)),
            Body::Large(large) => {
                let mut message = large.region.take_message();
                let used = use_message(response, ArrivedMessage::Large(&mut message));
                if let Err(NotDecoded::NoMemory(_)) = used {
                    large.region.put_back(message);
                }
                used
            }
        });
        if let Err(NotDecoded::NoMemory(memory)) = used {
            response.wait_for_memory(link, leases, incoming.body, memory);
        }
    }

    /// As `open`, for arguments that own what they hold. There are none when the request was refused, or was parked to be handled
    /// again.
    fn decode<A: DeserializeOwned>(
        &self,
        shared: &Arc<EngineShared>,
        incoming: Placed<Incoming<EngineEnv>>,
        (response, decoded): &mut (Option<OwedResponse>, Option<A>),
    ) {
        let has_leases = incoming.leases.count > 0;
        self.open(shared, incoming, Shape::of_type::<A>, response, &mut |response, mut message| {
            let verdicts = &response.request.declaration.verdicts;
            arguments(shared, response, has_leases, decoded, |admit| message.decode(verdicts, admit))
        });
    }
}

/// Decodes a request's arguments, and runs the handler or keeps them.
type UseMessage<'a> = &'a mut dyn FnMut(&OwedResponse, ArrivedMessage<'_>) -> Result<(), NotDecoded>;

/// Why a request's arguments were not decoded.
enum NotDecoded {
    /// The refusal has been sent to the caller.
    Refused,
    /// There is no memory for the values now; they need at least so many bytes.
    NoMemory(usize),
}

/// Has `decode` decode arguments. The memory that they take beyond the message's length counts against the peer's limits until the
/// response.
fn arguments<A>(
    shared: &EngineShared,
    response: &OwedResponse,
    has_leases: bool,
    decoded: &mut Option<A>,
    mut decode: impl FnMut(bounded::AskForMemory<'_>) -> Result<(A, usize), String>,
) -> Result<(), NotDecoded> {
    admitted(shared, response, has_leases, &mut |admit| {
        let (arguments, memory) = decode(admit)?;
        *decoded = Some(arguments);
        Ok(memory)
    })
}

/// Has `decode` decode arguments, and admits the memory that it asks for; it returns how much they took.
fn admitted(
    shared: &EngineShared,
    response: &OwedResponse,
    has_leases: bool,
    decode: &mut dyn FnMut(bounded::AskForMemory<'_>) -> Result<usize, String>,
) -> Result<(), NotDecoded> {
    let (id, one_way) = (response.request.id(), response.request.is_one_way());
    let (mut requested, mut refused, mut no_memory) = (false, None, None);
    let mut admit = |memory| {
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
    };
    let decoded = match catch_unwind(AssertUnwindSafe(|| decode(&mut admit))) {
        Ok(decoded) => decoded,
        // A `Deserialize` may panic because it is refused memory.
        Err(panic) if no_memory.is_none() && refused.is_none() => {
            let status = panicked(&response.request, &*panic);
            let _ = response.refuse(status);
            return Err(NotDecoded::Refused);
        }
        Err(_panic) => Err(String::new()),
    };
    match decoded {
        Ok(memory) => {
            if requested {
                // Returns the memory that was granted and not used; that can't be refused.
                let _ = shared.core.exec(|proto| proto.count_values(id, memory));
            }
            Ok(())
        }
        Err(reason) => {
            if let Some(memory) = no_memory {
                return Err(NotDecoded::NoMemory(memory));
            }
            let _ = response.refuse(refused.unwrap_or_else(|| Status::Decode(Status::clip(reason))));
            Err(NotDecoded::Refused)
        }
    }
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

/// The handler of a closure.
pub(super) fn blocking<A, R, F>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(&Request, A) -> R + Send + Sync + 'static,
{
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Placed<Incoming<EngineEnv>>| {
        let mut slot = (None, None);
        base.decode::<A>(shared, incoming, &mut slot);
        if let (Some(response), Some(arguments)) = (&slot.0, slot.1) {
            let outcome = response.span.run(|| f(&response.request, arguments));
            respond_with(response, outcome);
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
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Placed<Incoming<EngineEnv>>| {
        let mut slot = (None, None);
        base.decode::<A>(shared, incoming, &mut slot);
        if let (Some(response), Some(arguments)) = (&slot.0, slot.1) {
            let outcome = response.span.run(|| f(&response.request, arguments).map_err(text_of));
            respond_or_fail(response, outcome);
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
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Placed<Incoming<EngineEnv>>| {
        let has_leases = incoming.leases.count > 0;
        base.open(shared, incoming, Shape::of_type::<A::With<'_>>, &mut None, &mut |response, mut message| {
            let (mut decoded, bytes) = (None, message.bytes(&response.request.declaration.verdicts));
            arguments::<A::With<'_>>(shared, response, has_leases, &mut decoded, |admit| bounded::decode_within(bytes, admit))?;
            if let Some(arguments) = decoded {
                let outcome = response.span.run(|| f(&response.request, arguments));
                respond_with(response, outcome);
            }
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
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Placed<Incoming<EngineEnv>>| {
        let (id, mut slot) = (incoming.request, (None, None));
        base.decode::<A>(shared, incoming, &mut slot);
        if let (Some(response), Some(arguments)) = slot {
            let responder = Responder::<R>::new(response);
            let (request, span) = (responder.request().clone(), responder.span().clone());
            let outer = DEFERRED_REQUEST.replace(Some(id));
            let outcome = span.run(|| f(responder, arguments));
            DEFERRED_REQUEST.set(outer);
            if let Err(panic) = outcome {
                // The panic is the more exact response, wherever the responder is; it fails if there was one already.
                let status = panicked(&request, &*panic);
                let arrived = shared.core.with_proto(|proto| proto.arrival(id));
                let answered = shared.core.exec(|proto| proto.respond(id, Err(status.clone())));
                if answered.is_ok() {
                    let error = request.error(Failure::Refused(status));
                    request.note_end(&base.side, 0, arrived, Some(&error));
                    span.end(|| request.monitored(), Some(&error));
                }
            }
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
        peer = %request.endpoint().address(), panic = message, "a handler panicked"
    );
    Status::Panicked(message)
}

/// Responds with what the closure returned, or with its panic.
fn respond_with<R: Serialize + 'static>(response: &OwedResponse, outcome: std::thread::Result<R>) {
    respond_or_fail(response, outcome.map(Ok));
}

/// Responds with what the closure returned, with the text of its error, or with its panic.
fn respond_or_fail<R: Serialize + 'static>(response: &OwedResponse, outcome: std::thread::Result<Result<R, String>>) {
    let sent = match outcome {
        Ok(Ok(result)) => match response.try_respond_owned(result) {
            Ok(sent) => sent,
            // The caller has it.
            Err(_panic) => return,
        },
        Ok(Err(message)) => response.refuse(Status::Failed(Status::clip(message))),
        Err(panic) => response.refuse(panicked(&response.request, &*panic)),
    };
    if let Err(error) = sent {
        log_unsent(&error);
    }
}

#[cold]
fn log_unsent(error: &Error) {
    match error {
        // Its caller has cancelled, timed out or disconnected, which is ordinary.
        Error::Cancelled { .. } => tracing::debug!(target: "calomel::handler", %error, "a response came too late"),
        _ => tracing::warn!(target: "calomel::handler", %error, "a response was not sent"),
    }
}

/// A call that is being handled: its caller, procedure and deadline. Clones can be kept, and do not keep the engine alive.
#[derive(Clone)]
pub struct Request {
    endpoint: Endpoint,
    id: RequestId,
    declaration: Arc<Declaration<EngineEnv>>,
    provider: u16,
    deadline: Option<Instant>,
    one_way: bool,
    trace: Option<Arc<TraceContext>>,
}

impl Request {
    /// The engine that was called. The reference does not keep it alive; a clone does, so a handler that keeps a handle for
    /// longer than its call should keep the [`WeakEngine`](crate::WeakEngine) that [`Engine::downgrade`] returns.
    pub fn engine(&self) -> &Engine {
        self.endpoint.of_engine()
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
        let core = &self.shared().core;
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

    /// The trace that the call belongs to, and the caller's span in it, where the caller has sent them. With the feature
    /// `opentelemetry` the handler's span is a part of that trace.
    pub fn trace_context(&self) -> Option<&TraceContext> {
        self.trace.as_deref()
    }

    fn shared(&self) -> &Arc<EngineShared> {
        self.endpoint.shared()
    }

    fn declaration(&self) -> &Declaration<EngineEnv> {
        &self.declaration
    }

    fn id(&self) -> RequestId {
        self.id
    }

    fn error(&self, failure: Failure) -> Error {
        let name = self.procedure();
        error_of(failure, &self.endpoint.address(), format!("answer to `{name}`"), name, Duration::ZERO, self.provider)
    }

    fn monitored(&self) -> MonitoredCall<'_> {
        MonitoredCall {
            id: self.id.data().as_ffi(),
            procedure: self.procedure(),
            provider: self.provider,
            peer: &self.endpoint,
            one_way: self.one_way,
        }
    }

    /// Counts a call that was answered, with the bytes of its result, and tells the monitor.
    #[inline]
    fn note_end(&self, side: &RespondingSide, sent: usize, arrived: Option<Instant>, error: Option<&Error>) {
        let kind = error.map(Error::kind);
        match &side.calls {
            // On the thread that runs the handler, which counts it when the handler returns.
            Some(_) if side.answers == AnswerTime::OnReturn => calling::note_sent(sent, kind),
            Some(calls) => calls.answered(sent, kind, arrived.map_or(0, |arrived| nanos(arrived.elapsed()))),
            None => {}
        }
        self.shared().tell_monitor(|monitor| monitor.handler_ended(&self.monitored(), error));
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request(`{}` of provider {} by {:?})", self.procedure(), self.provider, self.endpoint)
    }
}

thread_local! {
    /// The request whose deferred handler runs on this thread.
    static DEFERRED_REQUEST: Cell<Option<RequestId>> = const { Cell::new(None) };
}

/// Sends the response to one call, once. It can be kept, and sent to another thread.
///
/// When it is dropped without a response, the caller gets [`Error::NoResponse`]; when a panicking thread drops it,
/// [`Error::HandlerPanicked`].
pub struct Responder<R> {
    response: OwedResponse,
    _result: PhantomData<fn(&R)>,
}

impl<R> Responder<R> {
    fn new(response: OwedResponse) -> Responder<R> {
        Responder { response, _result: PhantomData }
    }

    /// The call that this responds to.
    pub fn request(&self) -> &Request {
        &self.response.request
    }

    fn span(&self) -> &HandlerSpan {
        &self.response.span
    }

    /// Responds that the procedure failed: the caller gets [`Error::Failed`] with the message.
    pub fn fail(self, message: impl Into<String>) {
        let _ = self.response.refuse(Status::Failed(Status::clip(message.into())));
    }
}

/// Whether the caller gets the response. An [`Error`] is large, and a result that is moved for each call had better be small.
type Answered = Result<(), Box<Error>>;

/// The response that one request is owed. It knows nothing of the result's type, so that programs have one copy of its code, and
/// not one for each procedure.
struct OwedResponse {
    request: Request,
    side: Arc<RespondingSide>,
    span: HandlerSpan,
    answered: AtomicBool,
}

impl OwedResponse {
    /// Parks this one-way call, whose arguments need at least `memory` bytes: it is handled again when that much is free.
    fn wait_for_memory(&self, link: LinkId, leases: LeaseRange, body: Body<Slice>, memory: usize) {
        self.answered.store(true, Ordering::Relaxed);
        let Request { endpoint, id, declaration, provider, deadline, one_way, trace } = self.request.clone();
        let incoming = Incoming {
            request: id,
            link,
            peer: endpoint.tag().clone(),
            provider,
            declaration,
            deadline,
            one_way,
            again: true,
            stamp: 0,
            trace,
            body,
            leases,
        };
        self.request.shared().core.exec_unless_forked(|proto| proto.park(Placed::new(Box::default(), incoming), memory));
    }

    fn answer(&self, reply: &mut Reply<'_, EngineEnv>) -> Answered {
        self.answered.store(true, Ordering::Relaxed);
        let request = &self.request;
        let shared = request.shared();
        shared.check_process(|| format!("answer to `{}`", request.procedure()))?;
        let (sent, arrived) = (reply.content.len(), self.arrival());
        let answered = shared.core.exec_answer(|proto| proto.respond(request.id, Ok(reply)));
        shared.core.answered();
        match answered {
            Ok(()) => {
                request.note_end(&self.side, sent, arrived, None);
                self.span.end(|| request.monitored(), None);
                shared.finalizing().recheck();
                Ok(())
            }
            Err(failure) => Err(self.not_answered(sent, arrived, failure)),
        }
    }

    /// The caller did not get its result.
    #[cold]
    fn not_answered(&self, sent: usize, arrived: Option<Instant>, failure: Failure) -> Box<Error> {
        let error = self.request.error(failure);
        self.request.note_end(&self.side, sent, arrived, Some(&error));
        self.span.end(|| self.request.monitored(), Some(&error));
        self.request.shared().finalizing().recheck();
        Box::new(error)
    }

    #[cold]
    fn refuse(&self, status: Status) -> Answered {
        self.answered.store(true, Ordering::Relaxed);
        let request = &self.request;
        let shared = request.shared();
        shared.check_process(|| format!("answer to `{}`", request.procedure()))?;
        let (refusal, arrived) = (request.error(Failure::Refused(status.clone())), self.arrival());
        let answered = shared.core.exec(|proto| proto.respond(request.id, Err(status))).map_err(|failure| request.error(failure));
        shared.core.answered();
        let error = answered.as_ref().err().unwrap_or(&refusal);
        request.note_end(&self.side, 0, arrived, Some(error));
        self.span.end(|| request.monitored(), Some(error));
        shared.finalizing().recheck();
        answered.map_err(Box::new)
    }

    /// When the request arrived, where its handler is measured until the answer.
    #[inline]
    fn arrival(&self) -> Option<Instant> {
        if self.side.answers == AnswerTime::OnReturn || self.side.calls.is_none() {
            return None;
        }
        self.request.shared().core.with_proto(|proto| proto.arrival(self.request.id))
    }
}

impl<R: Serialize> Responder<R> {
    /// Sends the result to the caller.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the caller no longer takes a response; [`Error::MessageTooLarge`] and [`Error::Encode`] for a
    /// value that is too large or can't be encoded (the caller gets these too).
    ///
    /// # Panics
    /// If the value's `Serialize` does; the caller gets [`Error::HandlerPanicked`].
    pub fn respond(self, result: &R) -> crate::Result<()> {
        self.response.try_respond(result).unwrap_or_else(|panic| resume_unwind(panic)).map_err(|error| *error)
    }
}

impl OwedResponse {
    /// As [`Responder::respond`], with the panic of a value that panics while it is encoded, which the caller gets.
    fn try_respond<R: Serialize>(&self, result: &R) -> std::thread::Result<Answered> {
        let OwedResponse { request, side, .. } = self;
        self.respond(&mut |buffer, leases| encode_message(result, buffer, leases, request.shared(), &side.results), None)
    }

    /// As `try_respond`. A long list or text is sent from where it lies, as [`Call::call`](crate::Call::call) does with arguments.
    #[inline]
    fn try_respond_owned<R: Serialize + 'static>(&self, result: R) -> std::thread::Result<Answered> {
        let OwedResponse { request, side, .. } = self;
        let is_long = |content: &InPlace<'_>| content.bytes.len() > request.shared().config.eager_limit && !request.is_one_way();
        let Some(content) = InPlace::of(&&result).filter(is_long).map(|content| content.without_bytes()) else {
            return self.try_respond(&result);
        };
        let head = content.head();
        let list = content.trailing_list(&head);
        let body = ListInPlace { body: Slice::whole(&Region::keeping(head, InPlace::take(result))), list };
        self.respond(&mut |buffer, leases| encode_message(&content, buffer, leases, request.shared(), &side.results), Some(body))
    }

    /// Responds with what `encode` encodes. `body` is what to send where it need not be encoded: then `encode` only shows its type.
    fn respond(&self, encode: EncodeMessage<'_, '_>, body: Option<ListInPlace>) -> std::thread::Result<Answered> {
        let request = &self.request;
        if request.one_way {
            let content = OutgoingBody::Small(&[]);
            return Ok(self.answer(&mut Reply { content, result: 0, shape: &[], leases: Vec::new() }));
        }
        let (mut buffer, mut leases) = (EncodeBuffer::take(), Vec::new());
        let declared = match catch_unwind(AssertUnwindSafe(|| encode(&mut buffer, &mut leases))) {
            Ok(Ok(declared)) => declared,
            Ok(Err(failed)) => {
                let error = failed.error(&request.endpoint.address(), MessageSide::Result, request.procedure());
                let reason = match &error {
                    Error::Encode { reason, .. } => reason.clone(),
                    error => error.to_string(),
                };
                let _ = self.refuse(Status::Encode(Status::clip(reason)));
                return Ok(Err(Box::new(error)));
            }
            Err(panic) => {
                let _ = self.refuse(panicked(request, &*panic));
                return Err(panic);
            }
        };
        let content = outgoing_body(body, &mut buffer, request.shared().config.eager_limit);
        Ok(self.answer(&mut Reply { content, result: declared.number, shape: &declared.shape, leases }))
    }
}

impl Drop for OwedResponse {
    fn drop(&mut self) {
        if self.answered.load(Ordering::Relaxed) || self.request.shared().core.is_forked() {
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
        let _ = self.refuse(status);
    }
}

impl<R> fmt::Debug for Responder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responder({:?})", self.request())
    }
}
