//! A call, from the caller's side: its procedure, how it starts, and how its end is waited for.

use std::any::type_name;
use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::bounded;
use super::calling::calling_handler;
use super::span::CallSpan;
use crate::engine::{
    CallPath, EncodeBuffer, EncodeMessage, EndedCall, Endpoint, Engine, EngineShared, ListInPlace, MonitoredCall, ProcedureInfo,
    completed, deadline, decoding, encode_message, outgoing_body,
};
use crate::memory::{SentRegion, Slice};
use crate::progress::{Awaited, Completion, EngineEnv, OperationOutcome, OwnCompletion, error_of, spare, wait_any};
use crate::proto::{Answer, Body, CallId, CallSpec, Declaration, Failure, Placed, Rejected};
use crate::shape::{InPlace, Mismatch, Shape, Verdicts};
use crate::{Error, MessageSide, Result, TraceContext};

/// The name of a remote procedure, with the types of its arguments and of its result. Cheap to clone. Made by
/// [`Engine::procedure`](crate::Engine::procedure).
///
/// The types are compared with the peer's by their structure: field names and primitive types must agree, names of structs
/// need not.
pub struct Procedure<A: ?Sized, R> {
    shared: Arc<EngineShared>,
    info: Arc<ProcedureInfo>,
    _types: PhantomData<fn() -> (*const A, R)>,
}

impl Engine {
    /// A remote procedure to call: its name, and the types of its arguments and of its result. Cheap to make and to clone; the
    /// engine keeps what it has learned of the types as long as it lives, some 2 kB for each name. So what differs from call to
    /// call, such as a key, belongs into the arguments. [`Engine::define`] lists the types that can be sent.
    pub fn procedure<A: ?Sized, R>(&self, name: &str) -> Procedure<A, R> {
        let shared = self.shared();
        let info = if shared.core.is_forked() {
            // Its calls fail. The table may be locked by a thread that the child does not have.
            ProcedureInfo::new(name, 0)
        } else {
            shared.procedures.intern(name, type_name::<A>(), type_name::<R>())
        };
        Procedure { shared: shared.clone(), info, _types: PhantomData }
    }
}

impl<A: ?Sized, R> Procedure<A, R> {
    /// The name by which peers define the procedure.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// The procedure at an endpoint, ready to be called. The endpoint must be of the same engine as the procedure: calls at
    /// an endpoint of another engine end with [`Error::OtherEngine`].
    pub fn on(&self, endpoint: impl AsRef<Endpoint>) -> Call<A, R> {
        let (shared, info, endpoint) = (self.shared.clone(), self.info.clone(), endpoint.as_ref().clone());
        let timeout = shared.config.default_timeout;
        Call { target: CallTarget { shared, info, endpoint, timeout, trace: None }, _types: PhantomData }
    }
}

impl<A: ?Sized, R> Clone for Procedure<A, R> {
    fn clone(&self) -> Self {
        Procedure { shared: self.shared.clone(), info: self.info.clone(), _types: PhantomData }
    }
}

impl<A: ?Sized, R> fmt::Debug for Procedure<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Procedure({}: {} -> {})", self.info.name, type_name::<A>(), type_name::<R>())
    }
}

/// The procedure, the endpoint and the timeout of a call.
#[derive(Clone)]
struct CallTarget {
    shared: Arc<EngineShared>,
    info: Arc<ProcedureInfo>,
    endpoint: Endpoint,
    timeout: Duration,
    /// The trace that the program has set.
    trace: Option<Arc<TraceContext>>,
}

/// A call that is begun, where it stays: to move it takes longer than most that is done with it.
struct StartedCall {
    completion: OwnCompletion,
    id: CallId,
    /// `None` where the protocol watches it.
    deadline: Option<Instant>,
    beginning: CallBeginning,
}

impl StartedCall {
    /// One that [`Call::begin`] begins.
    fn new() -> StartedCall {
        StartedCall {
            completion: OwnCompletion::new(),
            id: CallId::default(),
            deadline: None,
            beginning: CallBeginning::default(),
        }
    }
}

/// What is measured of a call when it begins.
#[derive(Default)]
struct CallBeginning {
    /// On the engine's clock.
    at: u64,
    /// The handler that calls: see [`CallPath::parent`].
    parent: u32,
    /// Bytes of the arguments.
    sent: usize,
    one_way: bool,
    /// The monitor's number for it; 0 without a monitor.
    monitored: u64,
    span: CallSpan,
}

/// What became of a call that was to be started.
enum Begun {
    Started,
    /// It is a one-way call, and the peer has not granted credit for its cost.
    NoCredit(Option<u32>),
}

/// A procedure at an endpoint; made by [`Procedure::on`].
pub struct Call<A: ?Sized, R> {
    target: CallTarget,
    _types: PhantomData<fn() -> (*const A, R)>,
}

impl<A: ?Sized, R> Clone for Call<A, R> {
    fn clone(&self) -> Self {
        Call { target: self.target.clone(), _types: PhantomData }
    }
}

impl<A: ?Sized, R> fmt::Debug for Call<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallTarget { info, endpoint, .. } = &self.target;
        write!(f, "Call(Procedure({}: {} -> {}) on {endpoint:?})", info.name, type_name::<A>(), type_name::<R>())
    }
}

impl<A: Serialize + ?Sized, R> Call<A, R> {
    /// How long the call may take, from when its arguments are encoded until the response is there; the server sees the time that
    /// is left. The default is [`EngineBuilder::default_timeout`](crate::EngineBuilder::default_timeout).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.target.timeout = timeout;
        self
    }

    /// The trace that the call belongs to, and the span that makes it: it travels with the call, and the handler has it in
    /// [`Request::trace_context`](crate::Request::trace_context). With the feature `opentelemetry` a call takes it from the current
    /// span of `tracing`, and this replaces it; without, there is none but this.
    pub fn trace_context(mut self, context: TraceContext) -> Self {
        self.target.trace = Some(Arc::new(context));
        self
    }

    /// Calls, and blocks until the response has arrived. Arguments that are nothing but a text (`str`, `String`) or a list (`[T]`,
    /// `Vec<T>`) of bytes, `bool`s, floats, points (`[f64; 3]`, and other arrays of two to four floats) or keys (`[u8; 16]`,
    /// `[u8; 32]`), or an `Option` of a `String` or such a `Vec`, are sent from where they lie; others, and those of [`Call::start`]
    /// and [`Call::notify`], are copied into a buffer first. That makes a difference from some 100 KiB on.
    ///
    /// # Errors
    /// Any but those of listening and exposing; see [`Error`]. The call is made at most once, and never repeated by the
    /// library.
    pub fn call(&self, arguments: &A) -> Result<R>
    where
        R: DeserializeOwned,
    {
        if let Some(content) = InPlace::of(&arguments).filter(|content| content.bytes.len() > self.eager_limit()) {
            return self.call_in_place(&content);
        }
        let mut started = StartedCall::new();
        self.begin(arguments, None, None, CallForm::default(), &mut started)?;
        self.target.wait(&started)
    }

    /// As `call`, with the arguments sent from where they lie: to copy a large message into a buffer of its own, and out of the
    /// caches, takes as long as to send it.
    fn call_in_place(&self, content: &InPlace<'_>) -> Result<R>
    where
        R: DeserializeOwned,
    {
        let head = content.head();
        // Closed when the call has ended, however it ends: what is still being sent of it then gets no further access.
        let sent = SentRegion::new([&head[..], content.bytes]);
        let body = ListInPlace { body: Slice::whole(sent.region()), list: content.trailing_list(&head) };
        let mut started = StartedCall::new();
        self.begin(content, Some(body), None, CallForm::default(), &mut started)?;
        self.target.wait(&started)
    }

    fn eager_limit(&self) -> usize {
        self.target.shared.config.eager_limit
    }

    /// Calls, and returns at once. The result comes through the [`Pending`]: wait for it, or await it.
    ///
    /// # Errors
    /// What is known at once: arguments that can't be encoded or are too large, a finalized engine, an endpoint of another
    /// engine. The rest comes through the `Pending`.
    pub fn start(&self, arguments: &A) -> Result<Pending<R>> {
        let mut started = StartedCall::new();
        self.begin(arguments, None, None, CallForm { timed: true, ..CallForm::default() }, &mut started)?;
        Ok(Pending { target: self.target.clone(), started, _result: PhantomData })
    }

    /// Calls one way: the server sends no response. Returns when the arguments are queued on the connection; where there is
    /// none, when it has been made.
    ///
    /// After `Ok` the call is handled exactly once, as long as both engines live and the connection holds. It is also handled
    /// when this engine is finalized or dropped right after, and when its deadline has passed meanwhile. The peer has granted
    /// credit for it: where it is behind with the one-way calls of this engine, this waits until it has caught up. A large call
    /// (of more than 32 KiB, or than the eager limit) takes a round trip, in which the peer accepts the call.
    /// A handler that waits here is not over, so handlers of two engines that make more one-way calls to each other than
    /// there is credit for (up to 4096 calls or 1 MiB, less where many peers share the limits) may wait for each other, until
    /// their deadlines.
    ///
    /// A call is lost after `Ok`
    /// - when the connection is lost before the peer has read all of it, which includes that this process is killed, and that
    ///   the peer takes nothing for a second while this engine is finalized;
    /// - when the peer is finalized or dies before its handler has run;
    /// - when the peer has no such procedure or provider, when the arguments are not of its type or can't be decoded, when it
    ///   denies the call ([`EngineBuilder::authorize`](crate::EngineBuilder::authorize)), and when checksums show that the body
    ///   was corrupted in transit;
    /// - when its values alone, with its message, need more than 15/16 of the memory that the peer's limits allow
    ///   ([`EngineBuilder::max_bytes_in_flight_per_peer`](crate::EngineBuilder::max_bytes_in_flight_per_peer)). Where only
    ///   other calls use that memory, the call waits at the peer, undecoded, until they have ended. Later one-way calls of this
    ///   engine whose values need memory wait behind it; others may be handled before it. A call that waits while its procedure
    ///   is removed is lost.
    ///
    /// One-way calls of one engine are received in the order in which they were sent, and that is not promised of their handlers:
    /// several may run at the same time, and a later one may end first. Where the order matters, number them, or send the next
    /// one from a response.
    ///
    /// The peer counts these, and handlers that panic or fail, in [`Refusals::one_way`](crate::Refusals::one_way), and logs
    /// them; this engine learns of none of them.
    ///
    /// Memory whose bulk is among the arguments must stay exposed until the handler has transferred, and this returns before
    /// the handler has begun: wait with `exposed.released().wait_timeout(timeout)?`
    /// ([`Exposed::released`](crate::Exposed::released)) before the `Exposed` is dropped. Memory that is dropped at once is
    /// revoked, and the handler's pull fails with [`Error::Revoked`].
    ///
    /// # Errors
    /// What prevents sending: [`Error::Unreachable`], [`Error::MessageTooLarge`] and their like. [`Error::Busy`] when the peer
    /// has not caught up by the deadline, or has no room for a large call because of calls from other peers; the call is not
    /// made then. [`Error::Timeout`] when there is no connection by the deadline, or no response to the announcement of a large
    /// call: that one may be handled.
    pub fn notify(&self, arguments: &A) -> Result<()> {
        let until = deadline(Instant::now(), self.target.timeout);
        loop {
            let mut started = StartedCall::new();
            self.begin(arguments, None, Some(until), CallForm { one_way: true, ..CallForm::default() }, &mut started)?;
            match self.target.wait_until_sent(&started) {
                // The peer has refused the announcement, and may accept it when it has handled other calls.
                Err(Error::Busy { .. }) if self.target.await_credit(None, until) => {}
                sent => return sent,
            }
        }
    }

    pub(super) fn pause(&self, time: Duration) {
        self.target.shared.pause(time);
    }

    /// As [`Call::notify`], for async code: it waits for a connection and for credit without blocking the thread. Dropping the
    /// future before it is ready leaves open whether the call is made.
    ///
    /// # Errors
    /// As [`Call::notify`].
    pub async fn notify_async(&self, arguments: &A) -> Result<()> {
        let until = deadline(Instant::now(), self.target.timeout);
        loop {
            let (mut started, form) =
                (StartedCall::new(), CallForm { one_way: true, returns_without_credit: true, timed: false });
            let (sent, cost) = match self.begin(arguments, None, Some(until), form, &mut started)? {
                Begun::Started => (self.target.sent(&started, until).await, None),
                Begun::NoCredit(cost) => {
                    let error = self.target.behind(cost);
                    self.target.note_end(&started.beginning, None, 0, Some(&error));
                    (Err(error), cost)
                }
            };
            // Its span ends here, and not with the wait for credit.
            drop(started);
            match sent {
                Err(Error::Busy { .. }) if self.target.credit(cost, until).await => {}
                sent => return sent,
            }
        }
    }

    /// Encodes the arguments, and starts the call. `body` is what to send where it need not be encoded: then the arguments only
    /// show their type.
    fn begin(
        &self,
        arguments: &(impl Serialize + ?Sized),
        body: Option<ListInPlace>,
        until: Option<Instant>,
        form: CallForm,
        started: &mut StartedCall,
    ) -> Result<Begun> {
        let CallTarget { shared, info, .. } = &self.target;
        let encode: EncodeMessage<'_, '_> =
            &mut |buffer, leases| encode_message(arguments, buffer, leases, shared, &info.arguments);
        self.target.begin(encode, body, until, form, started)
    }
}

/// How a call is made.
#[derive(Clone, Copy, Default)]
struct CallForm {
    /// The protocol watches its deadline.
    timed: bool,
    one_way: bool,
    /// Where a one-way call has no credit, it does not wait for that.
    returns_without_credit: bool,
}

/// A waiter for credit. Behind a stuck peer, waiters that timed out or were dropped would pile up.
struct CreditWaiter<'a> {
    target: &'a CallTarget,
    credit: &'a Arc<Completion>,
}

impl Drop for CreditWaiter<'_> {
    fn drop(&mut self) {
        if !self.credit.is_ready() {
            let CallTarget { shared, endpoint, .. } = self.target;
            let forget = |waiter: &Arc<Completion>| Arc::ptr_eq(waiter, self.credit);
            shared.core.exec_unless_forked(|proto| proto.forget_waiter(endpoint.peer(), forget));
        }
    }
}

impl CallTarget {
    /// Encodes the arguments by `encode`, or takes `body` in their place, and starts the call. It knows nothing of their type, so that
    /// programs have one copy of this code, and not one for each procedure.
    fn begin(
        &self,
        encode: EncodeMessage<'_, '_>,
        body: Option<ListInPlace>,
        until: Option<Instant>,
        form: CallForm,
        started: &mut StartedCall,
    ) -> Result<Begun> {
        let CallTarget { shared, info, endpoint, .. } = self;
        shared.check_with(|| format!("call of `{}`", info.name))?;
        shared.check_same_engine(endpoint.shared(), "the endpoint", || format!("call of `{}`", info.name))?;
        self.note_begin(&mut started.beginning, form.one_way);
        let begun = self.begin_encoded(encode, body, until, form, started);
        let beginning = &mut started.beginning;
        if shared.statistics.is_on() {
            beginning.at = shared.core.clock();
        }
        begun.map_err(|error| {
            self.note_end(beginning, None, 0, Some(&error));
            *error
        })
    }

    /// The error is boxed, since results of this size are moved at no cost.
    fn begin_encoded(
        &self,
        encode: EncodeMessage<'_, '_>,
        body: Option<ListInPlace>,
        until: Option<Instant>,
        form: CallForm,
        started: &mut StartedCall,
    ) -> std::result::Result<Begun, Box<Error>> {
        let CallTarget { shared, info, endpoint, timeout, .. } = self;
        let StartedCall { completion, id, deadline: watched, beginning } = started;
        let (mut buffer, mut leases) = (EncodeBuffer::take(), Vec::new());
        let declared = encode(&mut buffer, &mut leases)
            .map_err(|failed| Box::new(failed.error(&endpoint.address(), MessageSide::Arguments, &info.name)))?;
        // Encoding runs user code, for as long as that likes: none of it is the peer's, whose silence is measured from here.
        let now = Instant::now();
        let deadline = until.unwrap_or_else(|| deadline(now, *timeout));
        *watched = (!form.timed).then_some(deadline);
        let mut spec = CallSpec {
            peer: endpoint.peer(),
            label: info.label,
            procedure: declared.number,
            name: &info.name,
            shape: &declared.shape,
            provider: endpoint.provider_id(),
            content: outgoing_body(body, &mut buffer, shared.config.eager_limit),
            leases,
            deadline,
            trace: beginning.span.trace(),
            timed: form.timed,
            one_way: form.one_way,
            waiter: &**completion,
        };
        beginning.sent = spec.content.len();
        match self.start(&mut spec, now, form) {
            Ok(started) => {
                *id = started;
                Ok(Begun::Started)
            }
            Err(Rejected::NoCredit(cost)) => Ok(Begun::NoCredit(cost)),
            Err(Rejected::Failed(failure)) => Err(Box::new(self.error(*failure))),
        }
    }

    /// Starts the call. Where a one-way call has no credit, it waits for that, unless its form says otherwise.
    fn start(
        &self,
        spec: &mut CallSpec<'_, EngineEnv>,
        mut now: Instant,
        form: CallForm,
    ) -> std::result::Result<CallId, Rejected> {
        let core = &self.shared.core;
        loop {
            match core.exec_start(now, |proto| proto.call(spec, now)) {
                Err(Rejected::NoCredit(cost)) if !form.returns_without_credit => {
                    if !self.await_credit(cost, spec.deadline) {
                        return Err(Rejected::Failed(Box::new(core.with_proto(|proto| proto.behind(spec.peer, cost)))));
                    }
                    now = Instant::now();
                }
                started => return started,
            }
        }
    }

    fn error(&self, failure: Failure) -> Error {
        let what = format!("call of `{}`", self.info.name);
        error_of(failure, &self.endpoint.address(), what, &self.info.name, self.timeout, self.endpoint.provider_id())
    }

    fn check_process(&self) -> Result<()> {
        self.shared.check_process(|| format!("call of `{}`", self.info.name))
    }

    /// A call begins.
    #[inline]
    fn note_begin(&self, beginning: &mut CallBeginning, one_way: bool) {
        let CallTarget { shared, info, endpoint, trace, .. } = self;
        if shared.statistics.is_on() {
            beginning.parent = calling_handler(&shared.core);
        }
        beginning.one_way = one_way;
        beginning.span = CallSpan::begin(shared, &info.name, endpoint, one_way, trace.as_deref());
        beginning.monitored = shared.monitored_id();
        if beginning.monitored > 0 {
            shared.tell_monitor(|monitor| monitor.call_begins(&self.monitored(beginning)));
        }
    }

    fn monitored(&self, beginning: &CallBeginning) -> MonitoredCall<'_> {
        let CallTarget { info, endpoint, .. } = self;
        MonitoredCall {
            id: beginning.monitored,
            procedure: &info.name,
            provider: endpoint.provider_id(),
            peer: endpoint,
            one_way: beginning.one_way,
        }
    }

    /// Counts a call that has ended, and tells the monitor.
    #[inline]
    fn note_end(&self, beginning: &CallBeginning, ended: Option<u64>, received: usize, error: Option<&Error>) {
        if self.shared.core.is_forked() {
            // A thread that the child does not have may hold the lock.
            return;
        }
        if self.shared.statistics.is_on() {
            self.info.calls.record(&EndedCall {
                path: CallPath { peer: self.endpoint.peer(), provider: self.endpoint.provider_id(), parent: beginning.parent },
                sent: beginning.sent,
                received,
                time: ended.map(|ended| ended.saturating_sub(beginning.at)),
                error: error.map(Error::kind),
            });
        }
        beginning.span.end(&self.shared, &self.info.name, &self.endpoint, ended, error);
        if beginning.monitored > 0 {
            self.shared.tell_monitor(|monitor| monitor.call_ended(&self.monitored(beginning), error));
        }
    }

    /// Waits until the call has ended.
    #[inline]
    fn wait_for_end(&self, started: &StartedCall) -> Result<()> {
        self.check_process()?;
        let core = &self.shared.core;
        if !started.completion.wait(core, started.deadline, Awaited::Answer(self.endpoint.peer())) {
            // Without effect if the response has arrived at the last moment.
            core.exec(|proto| proto.abandon_call(started.id, Failure::Timeout));
            self.shared.check_may_wait(|| format!("call of `{}`", self.info.name))?;
            started.completion.wait(core, None, Awaited::Other);
        }
        Ok(())
    }

    /// Takes the answer of a call that has ended, and makes its result of it.
    #[inline]
    fn finish<T>(&self, started: &StartedCall, use_answer: impl FnOnce(Placed<Answer<EngineEnv>>) -> Result<T>) -> Result<T> {
        let (failure, ended) = match started.completion.take() {
            Some(OperationOutcome::Answered(Ok(answer), ended)) => {
                let received = answer.body.len();
                let result = use_answer(answer);
                self.note_end(&started.beginning, ended, received, result.as_ref().err());
                return result;
            }
            Some(OperationOutcome::Answered(Err(failure), ended)) => (*failure, ended),
            Some(OperationOutcome::Transferred(..)) | None => (Failure::Cancelled, None),
        };
        let error = self.error(failure);
        self.note_end(&started.beginning, ended, 0, Some(&error));
        Err(error)
    }

    /// Waits until the peer has granted credit for a one-way call of this cost, or may accept an announced one that it has
    /// refused. False when the deadline passes first, or when there is no reason to wait.
    fn await_credit(&self, cost: Option<u32>, deadline: Instant) -> bool {
        let (core, credit) = (&self.shared.core, OwnCompletion::new());
        let _waiter = CreditWaiter { target: self, credit: &credit };
        let now = Instant::now();
        core.exec(|proto| proto.await_credit(self.endpoint.peer(), cost, credit.clone(), now))
            && credit.wait(core, Some(deadline), Awaited::Other)
    }

    /// As `await_credit`, for async code.
    async fn credit(&self, cost: Option<u32>, deadline: Instant) -> bool {
        let (core, credit) = (&self.shared.core, OwnCompletion::new());
        let waiter = CreditWaiter { target: self, credit: &credit };
        let now = Instant::now();
        if !core.exec(|proto| proto.await_credit(self.endpoint.peer(), cost, credit.clone(), now)) {
            return false;
        }
        let granted = completed(core, &credit, Some(deadline)).await;
        drop(waiter);
        granted
    }

    /// The error for a one-way call of this cost that has found no credit in time.
    fn behind(&self, cost: Option<u32>) -> Error {
        self.error(self.shared.core.with_proto(|proto| proto.behind(self.endpoint.peer(), cost)))
    }

    /// Resolves when a one-way call has been sent.
    async fn sent(&self, started: &StartedCall, deadline: Instant) -> Result<()> {
        let core = &self.shared.core;
        if !completed(core, &started.completion, Some(deadline)).await {
            self.check_process()?;
            // Without effect if it has been sent at the last moment.
            core.exec(|proto| proto.abandon_call(started.id, Failure::Timeout));
        }
        self.finish(started, |_| Ok(()))
    }

    /// Waits until a one-way call has been sent.
    fn wait_until_sent(&self, started: &StartedCall) -> Result<()> {
        self.wait_for_end(started)?;
        self.finish(started, |_| Ok(()))
    }

    fn wait<R: DeserializeOwned>(&self, started: &StartedCall) -> Result<R> {
        self.wait_for_end(started)?;
        self.finish(started, |answer| self.decode(answer))
    }

    fn decode<R: DeserializeOwned>(&self, answer: Placed<Answer<EngineEnv>>) -> Result<R> {
        let (Answer { link, body, declaration, leases }, place) = answer.take();
        spare::keep_answer_place(place);
        // Before anything is decoded: see `HandlerBase::open`.
        let checked = self.check::<R>(declaration.as_deref());
        decoding(&self.shared, link, leases, || {
            checked?;
            let limit = self.shared.config.value_limit();
            let mut ask = |memory: usize| (memory <= limit).then_some(limit);
            let decoded = match body {
                Body::Small(bytes) => bounded::decode_within(&bytes, &mut ask),
                Body::Large(memory) => {
                    let none = Verdicts::default();
                    let verdicts = declaration.as_deref().map_or(&none, |declaration| &declaration.verdicts);
                    bounded::decode_message(&mut memory.region.take_message(), verdicts, &mut ask)
                }
            };
            decoded.map(|(value, _)| value).map_err(|reason| Error::Decode {
                peer: self.endpoint.address(),
                side: MessageSide::Result,
                name: self.info.name.to_string(),
                reason,
            })
        })
    }

    fn check<R: DeserializeOwned>(&self, declaration: Option<&Declaration<EngineEnv>>) -> Result<()> {
        let (results, of_type) = (&self.info.results, Shape::of_type::<R>);
        let checked = match declaration {
            Some(declaration) => results.check(&declaration.verdicts, &declaration.shape, of_type),
            // A response without a declaration fits no type.
            None => results.check(&Verdicts::default(), &[], of_type),
        };
        checked.map_err(|Mismatch { expected, found }| Error::TypeMismatch {
            peer: self.endpoint.address(),
            side: MessageSide::Result,
            name: self.info.name.to_string(),
            expected,
            found,
        })
    }
}

/// A call in progress; made by [`Call::start`](crate::Call::start). Wait for its result, or await it, on any executor.
///
/// Dropping it cancels the call, and sends the server a cancellation.
#[must_use = "a pending call that is dropped is cancelled"]
pub struct Pending<R> {
    target: CallTarget,
    started: StartedCall,
    _result: PhantomData<fn() -> R>,
}

impl<R> Pending<R> {
    /// True when the result has arrived: waiting does not block any more.
    pub fn is_ready(&self) -> bool {
        let ready = self.is_over();
        if !ready {
            // A caller that polls must not wait for a request that is still corked.
            self.target.shared.core.uncork_unless_forked();
        }
        ready
    }

    /// A forked child gets an error at once.
    fn is_over(&self) -> bool {
        self.started.completion.is_ready() || self.target.shared.core.is_forked()
    }

    /// Cancels the call: its result is [`Error::Cancelled`](crate::Error::Cancelled), unless there was one already. The server
    /// gets a cancellation.
    pub fn cancel(&self) {
        self.target.shared.core.exec_unless_forked(|proto| proto.abandon_call(self.started.id, Failure::Cancelled));
    }
}

impl<R: DeserializeOwned> Pending<R> {
    /// Blocks until the result has arrived, or the call's deadline has passed.
    ///
    /// # Errors
    /// As [`Call::call`](crate::Call::call).
    pub fn wait(self) -> Result<R> {
        self.target.wait(&self.started)
    }

    /// Blocks until one of the calls has its result, removes that call from the list, and returns its index and its result. The
    /// order of the others does not change.
    ///
    /// # Panics
    /// When the list is empty.
    pub fn wait_any(pending: &mut Vec<Pending<R>>) -> (usize, Result<R>) {
        assert!(!pending.is_empty(), "wait_any needs at least one call");
        let index = wait_any(pending, Pending::is_over, |call| Some((&*call.target.shared.core, &call.started.completion)));
        let call = pending.remove(index);
        (index, call.wait())
    }

    /// Blocks until all the calls have their results, in the order of the calls.
    pub fn wait_all(pending: Vec<Pending<R>>) -> Vec<Result<R>> {
        pending.into_iter().map(Pending::wait).collect()
    }
}

impl<R: DeserializeOwned> Future for Pending<R> {
    type Output = Result<R>;

    /// # Panics
    /// When polled again after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R>> {
        if let Err(error) = self.target.check_process() {
            return Poll::Ready(Err(error));
        }
        if !self.target.shared.core.poll_operation(&self.started.completion, context.waker(), true) {
            return Poll::Pending;
        }
        Poll::Ready(self.target.finish(&self.started, |answer| self.target.decode(answer)))
    }
}

impl<R> Drop for Pending<R> {
    fn drop(&mut self) {
        if !self.started.completion.is_ready() {
            self.cancel();
        }
        let core = &self.target.shared.core;
        core.forget_polls(&self.started.completion);
        // One whose result was not taken has not been counted yet.
        let beginning = &self.started.beginning;
        let counts = self.target.shared.statistics.is_on() || beginning.monitored > 0 || beginning.span.is_open();
        if counts && !core.is_forked() && self.started.completion.holds_outcome() {
            let _ = self.target.finish(&self.started, |_| Ok(()));
        }
    }
}

impl<R> fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending(`{}` at {:?}", self.target.info.name, self.target.endpoint)?;
        f.write_str(if self.is_ready() { ", ready)" } else { ")" })
    }
}
