//! `Transfer`: a transfer in progress, which owns its local buffer.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::exposed::{Exposed, ExposedSlice};
use super::remote::{RemoteBulk, StartedTransfer};
use crate::Result;
use crate::memory::{Buffer, Slice, Writable};
use crate::progress::{Completion, OperationOutcome};
use crate::proto::{Failure, TransferId};

/// The local buffer of a started transfer: an [`Exposed`] buffer, or an [`ExposedSlice`] of one.
pub trait Local: sealed::Local {
    /// The buffer's type, a parameter of [`Transfer`].
    type Buffer: Buffer;
    /// [`Writable`](crate::Writable) or [`ReadOnly`](crate::ReadOnly).
    type Access;
}

mod sealed {
    use super::RemoteBulk;
    use crate::Result;
    use crate::memory::Slice;

    pub trait Local {
        #[doc(hidden)]
        fn memory(&self) -> Slice;
        /// Fails when it is exposed by another engine than the one that transfers.
        #[doc(hidden)]
        fn check(&self, remote: &RemoteBulk) -> Result<()>;
    }
}

impl<B: Buffer, A> Local for Exposed<B, A> {
    type Buffer = B;
    type Access = A;
}

impl<B: Buffer, A> sealed::Local for Exposed<B, A> {
    fn memory(&self) -> Slice {
        self.whole()
    }

    fn check(&self, remote: &RemoteBulk) -> Result<()> {
        remote.check_local(self.shared())
    }
}

impl<A> Local for ExposedSlice<A> {
    type Buffer = [u8; 0];
    type Access = A;
}

impl<A> sealed::Local for ExposedSlice<A> {
    fn memory(&self) -> Slice {
        self.slice.clone()
    }

    fn check(&self, remote: &RemoteBulk) -> Result<()> {
        remote.check_local(self.shared())
    }
}

/// A transfer in progress. It owns the local buffer, and returns it at the end, on success or error: wait for it, or await it,
/// on any executor.
///
/// Dropping it cancels the transfer, fences the buffer, and frees it.
#[must_use = "a transfer that is dropped is cancelled"]
pub struct Transfer<B: Buffer, L = Exposed<B>> {
    remote: RemoteBulk,
    pull: bool,
    len: usize,
    /// `None` once it has been returned.
    local: Option<L>,
    memory: Slice,
    state: TransferState,
    _buffer: PhantomData<fn() -> B>,
}

enum TransferState {
    /// It had ended when it was started.
    Done(Option<Result<usize>>),
    InProgress(Arc<Completion>, TransferId),
}

impl<B: Buffer, L> Unpin for Transfer<B, L> {}

impl<B: Buffer, L: Local> Transfer<B, L> {
    pub(super) fn start(remote: &RemoteBulk, pull: bool, local: L) -> Transfer<B, L> {
        let completion = Completion::new();
        let memory = local.memory();
        let (started, len) = match local.check(remote) {
            Ok(()) => remote.start(pull, &memory, &completion, true),
            Err(error) => (StartedTransfer::Done(Err(error)), 0),
        };
        let state = match started {
            StartedTransfer::Done(result) => TransferState::Done(Some(result)),
            StartedTransfer::InProgress(id) => TransferState::InProgress(completion, id),
        };
        Transfer { remote: remote.clone(), pull, len, local: Some(local), memory, state, _buffer: PhantomData }
    }
}

impl RemoteBulk {
    /// Starts a pull, and returns at once. The transfer owns the local buffer until it has ended, and returns it then.
    pub fn start_pull_into<L: Local<Access = Writable>>(&self, local: L) -> Transfer<L::Buffer, L> {
        Transfer::start(self, true, local)
    }

    /// Starts a push, and returns at once. The transfer owns the local buffer until it has ended, and returns it then.
    pub fn start_push_from<L: Local>(&self, local: L) -> Transfer<L::Buffer, L> {
        Transfer::start(self, false, local)
    }
}

impl<B: Buffer, L> Transfer<B, L> {
    /// True when it has ended: waiting does not block any more.
    pub fn is_ready(&self) -> bool {
        match &self.state {
            TransferState::Done(_) => true,
            TransferState::InProgress(completion, _) => completion.is_ready() || self.is_forked(),
        }
    }

    /// Cancels the transfer: it ends with [`Error::Cancelled`](crate::Error::Cancelled), unless it had ended already. The peer
    /// gets a cancellation.
    pub fn cancel(&self) {
        if let TransferState::InProgress(_, id) = &self.state {
            self.remote.shared().core.exec_unless_forked(|proto| proto.abandon_transfer(*id, Failure::Cancelled));
        }
    }

    /// Blocks until the transfer has ended. Returns the number of bytes, or the error, and the buffer.
    pub fn wait(mut self) -> (Result<usize>, L) {
        if let TransferState::InProgress(completion, _) = &self.state
            && !self.is_forked()
        {
            completion.wait(&self.remote.shared().core, None);
        }
        self.finish()
    }

    /// In a forked child no transfer ends, and the thread that holds the memory's gate may not exist.
    fn is_forked(&self) -> bool {
        self.remote.shared().core.is_forked()
    }

    fn finish(&mut self) -> (Result<usize>, L) {
        if let Err(error) = self.remote.shared().check_process(|| "transfer".to_owned()) {
            let Some(local) = self.local.take() else { panic!("a transfer was polled after it had ended") };
            return (Err(error), local);
        }
        let result = match &mut self.state {
            TransferState::Done(result) => result.take(),
            TransferState::InProgress(completion, _) => match completion.take() {
                Some(OperationOutcome::Transferred(result)) => {
                    Some(result.map_err(|failure| self.remote.error(self.pull, self.len, failure)))
                }
                _ => None,
            },
        };
        let result = result.unwrap_or_else(|| Err(self.remote.error(self.pull, self.len, Failure::Cancelled)));
        if result.is_err() {
            // An access that is in progress still belongs to the transfer.
            self.memory.region.fence();
        }
        let Some(local) = self.local.take() else { panic!("a transfer was polled after it had ended") };
        (result, local)
    }
}

impl<B: Buffer, L> Future for Transfer<B, L> {
    type Output = (Result<usize>, L);

    /// # Panics
    /// When polled again after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<(Result<usize>, L)> {
        let this = self.get_mut();
        if let TransferState::InProgress(completion, _) = &this.state
            && !this.is_forked()
            && completion.wake_task(context.waker())
        {
            return Poll::Pending;
        }
        Poll::Ready(this.finish())
    }
}

impl<B: Buffer, L> Drop for Transfer<B, L> {
    fn drop(&mut self) {
        if self.local.is_some() && matches!(self.state, TransferState::InProgress(..)) && !self.is_forked() {
            // Cancelling has no effect if the transfer has ended; an access that was in progress then still belongs to it.
            self.cancel();
            self.memory.region.fence();
        }
    }
}

impl<B: Buffer, L> fmt::Debug for Transfer<B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.pull { "pull" } else { "push" };
        write!(f, "Transfer({verb} of {} bytes{})", self.len, if self.is_ready() { ", ready" } else { "" })
    }
}
