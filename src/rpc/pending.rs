//! A call that has been made, until its result has been fetched.

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

/// A call that has been made, as it is waited for.
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

    /// Waits for the end, up to the deadline, if the protocol does not watch that.
    fn outcome(&self, begun: &StartedCall, deadline: Option<Instant>) -> Result<Answer<EngineEnv>> {
        self.check_process()?;
        let core = &self.shared.core;
        if !begun.completion.wait(core, deadline) {
            // If the answer has come at the last moment, this does nothing.
            core.exec(|proto| proto.abandon_call(begun.id, Failure::Timeout));
            self.shared.check_may_wait(|| format!("call of `{}`", self.info.name))?;
            begun.completion.wait(core, None);
        }
        self.take(begun)
    }

    fn take(&self, begun: &StartedCall) -> Result<Answer<EngineEnv>> {
        match begun.completion.take() {
            Some(OperationOutcome::Answered(result)) => result.map_err(|failure| self.error(failure)),
            Some(OperationOutcome::Transferred(_)) | None => Err(self.error(Failure::Cancelled)),
        }
    }

    /// Waits until the peer may take a one-way call of this cost, or an announced one that it has refused. False when the deadline
    /// comes first, or when nothing is to be waited for.
    pub(super) fn await_credit(&self, cost: Option<u32>, deadline: Instant) -> bool {
        let (core, peer, credit) = (&self.shared.core, self.endpoint.peer(), Completion::new());
        let now = Instant::now();
        if !core.exec(|proto| proto.await_credit(peer, cost, credit.clone(), now)) {
            return false;
        }
        let told = credit.wait(core, Some(deadline));
        if !told {
            // A peer that is stuck may leave many waiting in vain, one after the other.
            core.exec(|proto| proto.forget_waiter(peer, |waiter| Arc::ptr_eq(waiter, &credit)));
        }
        told
    }

    /// Waits until a one-way call is on its way.
    pub(super) fn sent(&self, begun: &StartedCall, deadline: Instant) -> Result<()> {
        self.outcome(begun, Some(deadline)).map(drop)
    }

    pub(super) fn wait<R: DeserializeOwned>(&self, begun: &StartedCall, deadline: Option<Instant>) -> Result<R> {
        self.outcome(begun, deadline).and_then(|answer| self.decode(answer))
    }

    fn decode<R: DeserializeOwned>(&self, answer: Answer<EngineEnv>) -> Result<R> {
        let Answer { link, body, declaration, leases } = answer;
        // Before anything is decoded: see `Base::open`.
        let checked = self.check::<R>(declaration.as_deref());
        codec::decoding(&self.shared, link, leases, || {
            checked?;
            let most = self.shared.limits.values;
            let mut within = |memory: usize| (memory <= most).then_some(most);
            let decoded = match body {
                Body::Small(bytes) => bounded::decode_within(&bytes, &mut within),
                Body::Large(memory) => bounded::decode_within(&memory.region.take_message(), &mut within),
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
            // What is not declared fits nowhere.
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
/// Dropped, the call is cancelled: the server learns that nobody takes the answer any more.
#[must_use = "a pending call that is dropped is cancelled"]
pub struct Pending<R> {
    target: CallTarget,
    begun: StartedCall,
    _result: PhantomData<fn() -> R>,
}

impl<R> Pending<R> {
    pub(super) fn new(target: CallTarget, begun: StartedCall) -> Pending<R> {
        Pending { target, begun, _result: PhantomData }
    }

    /// True when the result is here: waiting does not block any more.
    pub fn is_ready(&self) -> bool {
        let ready = self.is_over();
        if !ready {
            // Who asks again and again must not wait for what has not been sent.
            self.target.shared.core.uncork_unless_forked();
        }
        ready
    }

    /// In a forked child there is an error for whoever waits.
    fn is_over(&self) -> bool {
        self.begun.completion.is_ready() || self.target.shared.core.is_forked()
    }

    /// Asks for the end of the call: its result is [`Error::Cancelled`], unless there was one already. The server is told.
    pub fn cancel(&self) {
        self.target.shared.core.exec_unless_forked(|proto| proto.abandon_call(self.begun.id, Failure::Cancelled));
    }
}

impl<R: DeserializeOwned> Pending<R> {
    /// Blocks until the result is here, or the call's deadline has passed.
    ///
    /// # Errors
    /// As [`Call::call`](crate::Call::call).
    pub fn wait(self) -> Result<R> {
        self.target.wait(&self.begun, None)
    }

    /// Blocks until one of the calls has its result, takes it out of the list, and returns where it stood and what it
    /// brought. The order of the others does not change.
    ///
    /// # Panics
    /// When the list is empty: there is nothing to wait for.
    pub fn wait_any(pending: &mut Vec<Pending<R>>) -> (usize, Result<R>) {
        assert!(!pending.is_empty(), "wait_any of no calls");
        let ready = || pending.iter().position(Pending::is_over);
        let index = ready().unwrap_or_else(|| {
            let first = &pending[0].target.shared.core;
            // Calls of other engines have their own drivers, and wake this thread.
            pending.iter().for_each(|call| call.target.shared.core.uncork_unless_forked());
            first.wait(
                &|| ready().is_some(),
                &|thread| pending.iter().all(|call| call.begun.completion.wake_thread(thread)),
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
        if self.begun.completion.wake_task(context.waker()) {
            self.target.shared.core.uncork_unless_forked();
            return Poll::Pending;
        }
        match self.target.take(&self.begun) {
            Ok(answer) => Poll::Ready(self.target.decode(answer)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<R> Drop for Pending<R> {
    fn drop(&mut self) {
        if !self.begun.completion.is_ready() {
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
