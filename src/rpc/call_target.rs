//! A call's target, and how its end is waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::bounded;
use crate::engine::{Endpoint, EngineShared, ProcedureInfo, completed, decoding};
use crate::progress::{Completion, EngineEnv, OperationOutcome, error_of};
use crate::proto::{Answer, Body, CallId, Declaration, Failure};
use crate::shape::{Mismatch, Shape, Verdicts};
use crate::{Error, MessageSide, Result};

/// The procedure, the endpoint and the timeout of a call.
#[derive(Clone)]
pub(super) struct CallTarget {
    pub shared: Arc<EngineShared>,
    pub info: Arc<ProcedureInfo>,
    pub endpoint: Endpoint,
    pub timeout: Duration,
}

/// A call in progress: its completion, and its id.
pub(super) struct StartedCall {
    pub completion: Arc<Completion>,
    pub id: CallId,
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
    pub(super) fn error(&self, failure: Failure) -> Error {
        let what = format!("call of `{}`", self.info.name);
        error_of(failure, &self.endpoint.address(), what, &self.info.name, self.timeout, self.endpoint.provider_id())
    }

    pub(super) fn check_process(&self) -> Result<()> {
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

    pub(super) fn take(&self, started: &StartedCall) -> Result<Answer<EngineEnv>> {
        match started.completion.take() {
            Some(OperationOutcome::Answered(result)) => result.map_err(|failure| self.error(failure)),
            Some(OperationOutcome::Transferred(_)) | None => Err(self.error(Failure::Cancelled)),
        }
    }

    /// Waits until the peer has granted credit for a one-way call of this cost, or may accept an announced one that it has
    /// refused. False when the deadline passes first, or when there is no reason to wait.
    pub(super) fn await_credit(&self, cost: Option<u32>, deadline: Instant) -> bool {
        let (core, credit) = (&self.shared.core, Completion::new());
        let _waiter = CreditWaiter { target: self, credit: &credit };
        let now = Instant::now();
        core.exec(|proto| proto.await_credit(self.endpoint.peer(), cost, credit.clone(), now))
            && credit.wait(core, Some(deadline))
    }

    /// As `await_credit`, for async code.
    pub(super) async fn credit(&self, cost: Option<u32>, deadline: Instant) -> bool {
        let (core, credit) = (&self.shared.core, Completion::new());
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
    pub(super) fn behind(&self, cost: Option<u32>) -> Error {
        self.error(self.shared.core.with_proto(|proto| proto.behind(self.endpoint.peer(), cost)))
    }

    /// Resolves when a one-way call has been sent.
    pub(super) async fn sent(&self, started: &StartedCall, deadline: Instant) -> Result<()> {
        let core = &self.shared.core;
        if !completed(core, &started.completion, Some(deadline)).await {
            self.check_process()?;
            // Without effect if it has been sent at the last moment.
            core.exec(|proto| proto.abandon_call(started.id, Failure::Timeout));
        }
        self.take(started).map(drop)
    }

    /// Waits until a one-way call has been sent.
    pub(super) fn wait_until_sent(&self, started: &StartedCall, deadline: Instant) -> Result<()> {
        self.outcome(started, Some(deadline)).map(drop)
    }

    pub(super) fn wait<R: DeserializeOwned>(&self, started: &StartedCall, deadline: Option<Instant>) -> Result<R> {
        self.outcome(started, deadline).and_then(|answer| self.decode(answer))
    }

    pub(super) fn decode<R: DeserializeOwned>(&self, answer: Answer<EngineEnv>) -> Result<R> {
        let Answer { link, body, declaration, leases } = answer;
        // Before anything is decoded: see `HandlerBase::open`.
        let checked = self.check::<R>(declaration.as_deref());
        decoding(&self.shared, link, leases, || {
            checked?;
            let limit = self.shared.limits.values;
            let mut ask = |memory: usize| (memory <= limit).then_some(limit);
            let decoded = match body {
                Body::Small(bytes) => bounded::decode_within(&bytes, &mut ask),
                Body::Large(memory) => bounded::decode_within(&memory.region.take_message(), &mut ask),
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
