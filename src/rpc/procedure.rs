//! Procedures and calls, from the caller's side.

use std::any::type_name;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::call_target::{CallTarget, StartedCall};
use super::codec;
use super::pending::Pending;
use crate::engine::{Endpoint, Engine, EngineShared, ProcedureInfo, deadline};
use crate::progress::{Completion, EngineEnv};
use crate::proto::{CallId, CallSpec, Failure, Rejected};
use crate::{Error, MessageSide, Result};

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
    /// engine keeps what it has learned of the types. [`Engine::define`] lists the types that can be sent.
    pub fn procedure<A: ?Sized, R>(&self, name: &str) -> Procedure<A, R> {
        let shared = self.shared();
        let info = if shared.core.is_forked() {
            // Its calls fail. The table may be locked by a thread that the child does not have.
            ProcedureInfo::new(name)
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
        let timeout = shared.limits.default_timeout;
        Call { target: CallTarget { shared, info, endpoint, timeout }, _types: PhantomData }
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

/// A one-way call that was to be started.
enum Begun {
    Started(StartedCall),
    /// The peer has not granted credit for its cost.
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
    /// How long the call may take, sending the arguments and the response included; the server sees the time that is left. The
    /// default is [`EngineBuilder::default_timeout`](crate::EngineBuilder::default_timeout).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.target.timeout = timeout;
        self
    }

    /// Calls, and blocks until the response has arrived.
    ///
    /// # Errors
    /// Any but those of listening and exposing; see [`Error`]. The call is made at most once, and never repeated by the
    /// library.
    pub fn call(&self, arguments: &A) -> Result<R>
    where
        R: DeserializeOwned,
    {
        let (started, deadline) = self.begin(arguments, None, false, false)?;
        self.target.wait(&started, Some(deadline))
    }

    /// Calls, and returns at once. The result comes through the [`Pending`]: wait for it, or await it.
    ///
    /// # Errors
    /// What is known at once: arguments that can't be encoded or are too large, a finalized engine, an endpoint of another
    /// engine. The rest comes through the `Pending`.
    pub fn start(&self, arguments: &A) -> Result<Pending<R>> {
        let (started, _) = self.begin(arguments, None, true, false)?;
        Ok(Pending::new(self.target.clone(), started))
    }

    /// Calls one way: the server sends no response. Returns when the arguments are queued on the connection; where there is
    /// none, when it has been made.
    ///
    /// After `Ok` the call is handled exactly once, as long as both engines live and the connection holds. It is also handled
    /// when this engine is finalized or dropped right after, and when its deadline has passed meanwhile. The peer has granted
    /// credit for it: where it is behind with the one-way calls of this engine, this waits until it has caught up. A large call
    /// (of more than 32 KiB, or than the eager limit) takes a round trip, in which the peer accepts the call.
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
            let (started, _) = self.begin(arguments, Some(until), false, true)?;
            match self.target.wait_until_sent(&started, until) {
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
            let (sent, cost) = match self.try_begin(arguments, until)? {
                Begun::Started(started) => (self.target.sent(&started, until).await, None),
                Begun::NoCredit(cost) => (Err(self.target.behind(cost)), cost),
            };
            match sent {
                Err(Error::Busy { .. }) if self.target.credit(cost, until).await => {}
                sent => return sent,
            }
        }
    }

    /// Starts a one-way call, if the peer has granted credit for it.
    fn try_begin(&self, arguments: &A, until: Instant) -> Result<Begun> {
        self.encoded(arguments, Some(until), false, true, |spec, now| {
            match self.target.shared.core.exec_call(now, |proto| proto.call(spec, now)) {
                Ok(id) => Ok(Ok(id)),
                Err(Rejected::Failed(failure)) => Err(failure),
                Err(Rejected::NoCredit(_, cost)) => Ok(Err(cost)),
            }
        })
        .map(|(completion, begun, _)| match begun {
            Ok(id) => Begun::Started(StartedCall { completion, id }),
            Err(cost) => Begun::NoCredit(cost),
        })
    }

    fn begin(&self, arguments: &A, until: Option<Instant>, timed: bool, one_way: bool) -> Result<(StartedCall, Instant)> {
        let (completion, id, deadline) =
            self.encoded(arguments, until, timed, one_way, |spec, now| self.start_call(spec, now))?;
        Ok((StartedCall { completion, id }, deadline))
    }

    /// Encodes the arguments, and starts the call by `start`. Returns its completion, what `start` returned, and the deadline.
    fn encoded<T>(
        &self,
        arguments: &A,
        until: Option<Instant>,
        timed: bool,
        one_way: bool,
        start: impl FnOnce(CallSpec<'_, EngineEnv>, Instant) -> std::result::Result<T, Failure>,
    ) -> Result<(Arc<Completion>, T, Instant)> {
        let CallTarget { shared, info, endpoint, timeout } = &self.target;
        shared.check_with(|| format!("call of `{}`", info.name))?;
        shared.check_same_engine(endpoint.shared(), "the endpoint", || format!("call of `{}`", info.name))?;
        let completion = Completion::new();
        let now = Instant::now();
        let deadline = until.unwrap_or_else(|| deadline(now, *timeout));
        let started = codec::with_buffer(|buffer| {
            let (leases, declared) = codec::encode(arguments, &mut buffer.bytes, shared, &info.arguments)
                .map_err(|failed| failed.error(&endpoint.address(), MessageSide::Arguments, &info.name))?;
            let spec = CallSpec {
                peer: endpoint.peer(),
                procedure: declared.number,
                name: &info.name,
                shape: &declared.shape,
                provider: endpoint.provider_id(),
                content: buffer.outgoing(shared.limits.eager),
                leases,
                deadline,
                timed,
                one_way,
                waiter: completion.clone(),
            };
            start(spec, now).map_err(|failure| self.target.error(failure))
        })?;
        Ok((completion, started, deadline))
    }

    /// Starts the call; waits for credit first where a one-way call has none.
    fn start_call(&self, mut spec: CallSpec<'_, EngineEnv>, now: Instant) -> std::result::Result<CallId, Failure> {
        let core = &self.target.shared.core;
        loop {
            match core.exec_call(now, |proto| proto.call(spec, now)) {
                Ok(id) => return Ok(id),
                Err(Rejected::Failed(failure)) => return Err(failure),
                Err(Rejected::NoCredit(again, cost)) => {
                    if !self.target.await_credit(cost, again.deadline) {
                        return Err(core.with_proto(|proto| proto.behind(again.peer, cost)));
                    }
                    spec = *again;
                }
            }
        }
    }
}
