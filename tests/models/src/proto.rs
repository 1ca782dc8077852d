//! The protocol: a deadline, and the completion that it ends.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::progress::{Completion, OperationOutcome};
use crate::sync::Instant;

pub(crate) struct Answer<E>(PhantomData<E>);
pub(crate) struct Placed<T>(PhantomData<T>);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerId;

#[derive(Debug)]
pub(crate) enum Failure {
    Timeout,
}

#[derive(Default)]
pub(crate) struct Proto {
    timer: Option<(Instant, Arc<Completion>)>,
    due: Option<Arc<Completion>>,
}

impl Proto {
    pub(crate) fn set_timer(&mut self, at: Instant, ends: Arc<Completion>) {
        self.timer = Some((at, ends));
    }

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.timer.as_ref().map(|(at, _)| *at)
    }

    /// A future that waits alone.
    pub(crate) fn operations_in_progress(&self) -> usize {
        1
    }

    pub(crate) fn find_waiter<R>(&self, f: impl FnMut(&Arc<Completion>) -> Option<R>) -> Option<R> {
        self.timer.as_ref().map(|(_, ends)| ends).and_then(f)
    }

    pub(crate) fn handle_timeout(&mut self, _: Instant) {
        self.due = self.timer.take().map(|(_, ends)| ends);
    }

    pub(crate) fn poll(&mut self) -> Option<Arc<Completion>> {
        self.due.take()
    }
}

pub(crate) fn end(completion: &Completion) {
    completion.set(OperationOutcome::Transferred(Ok(0), None));
}
