//! A call in progress, from the caller's side.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use serde::de::DeserializeOwned;

use super::call_target::{CallTarget, StartedCall};
use crate::Result;
use crate::progress::wait_any;
use crate::proto::Failure;

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
        self.target.wait(&self.started, None)
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
