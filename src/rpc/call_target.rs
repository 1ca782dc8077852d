//! A call's target, and how its end is waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::bounded;
use crate::engine::{EngineShared, ProcedureInfo, decoding};
use crate::progress::{Completion, EngineEnv, OperationOutcome, error_of};
use crate::proto::{Answer, Body, CallId, Declaration, Failure};
use crate::shape::{Mismatch, Shape, Verdicts};
use crate::{Endpoint, Error, Result, Side};

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
