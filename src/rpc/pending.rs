//! A call in progress, from the caller's side.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use serde::de::DeserializeOwned;

use super::procedure::CallTarget;
use super::{bounded, codec};
use crate::progress::{Completion, EngineEnv, OperationOutcome, error_of};
use crate::proto::{Answer, Body, CallId, Declaration, Failure};
use crate::shape::{Mismatch, Shape, Verdicts};
use crate::{Error, Result, Side};

/// A call in progress: its completion, and its id.
pub(super) struct StartedCall {
    pub completion: Arc<Completion>,
    pub id: CallId,
}

impl CallTarget {
    pub(super) fn error(&self, failure: Failure) -> Error {
        let what = format!("call of `{}`", self.info.name);
        error_of(failure, &self.endpoint.address(), what, &self.info.name, self.timeout, self.endpoint.provider_id())
    }

    fn check_process(&self) -> Result<()> {
        self.shared.check_process(|| format!("call of `{}`", self.info.name))
    }

    /// Waits until the call has ended. `deadline` is given where the protocol does not watch it.
    fn outcome(&self, started: &StartedCall, deadline: Option<Instant>) -> Result<Answer<EngineEnv>> {
        self.check_process()?;
        let core = &self.shared.core;
        if !started.completion.wait(core, deadline) {
            // Without effect if the response has arrived at the last moment.
            core.exec(|proto| proto.abandon_call(started.id, Failure::Timeout));
            self.shared.check_may_wait(|| format!("call of `{}`", self.info.name))?;
            started.completion.wait(core, None);
        }
        self.take(started)
    }

    fn take(&self, started: &StartedCall) -> Result<Answer<EngineEnv>> {
        match started.completion.take() {
            Some(OperationOutcome::Answered(result)) => result.map_err(|failure| self.error(failure)),
            Some(OperationOutcome::Transferred(_)) | None => Err(self.error(Failure::Cancelled)),
        }
    }

    /// Waits until the peer has granted credit for a one-way call of this cost, or may accept an announced one that it has
    /// refused. False when the deadline passes first, or when there is no reason to wait.
    pub(super) fn await_credit(&self, cost: Option<u32>, deadline: Instant) -> bool {
        let (core, peer, credit) = (&self.shared.core, self.endpoint.peer(), Completion::new());
        let now = Instant::now();
        if !core.exec(|proto| proto.await_credit(peer, cost, credit.clone(), now)) {
            return false;
        }
        let granted = credit.wait(core, Some(deadline));
        if !granted {
            // Removed at once: behind a stuck peer, waiters that timed out would pile up.
            core.exec(|proto| proto.forget_waiter(peer, |waiter| Arc::ptr_eq(waiter, &credit)));
        }
        granted
    }

    /// Waits until a one-way call has been sent.
    pub(super) fn wait_until_sent(&self, started: &StartedCall, deadline: Instant) -> Result<()> {
        self.outcome(started, Some(deadline)).map(drop)
    }

    pub(super) fn wait<R: DeserializeOwned>(&self, started: &StartedCall, deadline: Option<Instant>) -> Result<R> {
        self.outcome(started, deadline).and_then(|answer| self.decode(answer))
    }

    fn decode<R: DeserializeOwned>(&self, answer: Answer<EngineEnv>) -> Result<R> {
        let Answer { link, body, declaration, leases } = answer;
        // Before anything is decoded: see `HandlerBase::open`.
        let checked = self.check::<R>(declaration.as_deref());
        codec::decoding(&self.shared, link, leases, || {
            checked?;
            let limit = self.shared.limits.values;
            let mut ask = |memory: usize| (memory <= limit).then_some(limit);
            let decoded = match body {
                Body::Small(bytes) => bounded::decode_within(&bytes, &mut ask),
                Body::Large(memory) => bounded::decode_within(&memory.region.take_message(), &mut ask),
            };
            decoded.map(|(value, _)| value).map_err(|reason| Error::Decode {
                peer: self.endpoint.address(),
                side: Side::Result,
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
            side: Side::Result,
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
    pub(super) fn new(target: CallTarget, started: StartedCall) -> Pending<R> {
        Pending { target, started, _result: PhantomData }
    }

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

    /// Cancels the call: its result is [`Error::Cancelled`], unless there was one already. The server gets a cancellation.
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
        self.target.wait(&self.started, None)
    }

    /// Blocks until one of the calls has its result, removes that call from the list, and returns its index and its result. The
    /// order of the others does not change.
    ///
    /// # Panics
    /// When the list is empty.
    pub fn wait_any(pending: &mut Vec<Pending<R>>) -> (usize, Result<R>) {
        assert!(!pending.is_empty(), "wait_any needs at least one call");
        let ready = || pending.iter().position(Pending::is_over);
        let index = ready().unwrap_or_else(|| {
            let first = &pending[0].target.shared.core;
            // Calls of other engines have their own drivers, and wake this thread.
            pending.iter().for_each(|call| call.target.shared.core.uncork_unless_forked());
            first.wait(
                &|| ready().is_some(),
                &|thread| pending.iter().all(|call| call.started.completion.wake_thread(thread)),
                None,
            );
            ready().unwrap_or(0)
        });
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
        if self.started.completion.wake_task(context.waker()) {
            self.target.shared.core.uncork_unless_forked();
            return Poll::Pending;
        }
        match self.target.take(&self.started) {
            Ok(answer) => Poll::Ready(self.target.decode(answer)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<R> Drop for Pending<R> {
    fn drop(&mut self) {
        if !self.started.completion.is_ready() {
            self.cancel();
        }
    }
}

impl<R> fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending(`{}` at {:?}", self.target.info.name, self.target.endpoint)?;
        f.write_str(if self.is_ready() { ", ready)" } else { ")" })
    }
}
