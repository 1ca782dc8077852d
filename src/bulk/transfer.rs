//! `Transfer`: a transfer in progress, which owns its local buffer.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use super::exposed::{Exposed, ExposedSlice};
use super::remote::{RemoteBulk, StartedTransfer, TransferBeginning};
use crate::Result;
use crate::memory::{BorrowedSlice, Buffer, Element, ReadElement, Slice, Writable};
use crate::progress::{Awaited, OperationOutcome, OwnCompletion, wait_any};
use crate::proto::{Failure, TransferId};

/// Polls drive for transfers of at most so many bytes: for longer ones that means to copy, which takes longer than a poll may.
const DRIVEN_BY_POLLS: usize = 64 << 10;

/// What a [`Transfer`] owns while it is in progress, and returns at its end: an [`Exposed`] buffer, an [`ExposedSlice`] of one,
/// or a slice that a [`Scope`](crate::Scope) borrows.
pub trait TransferBuffer: sealed::TransferBuffer {}

/// The local buffer of a transfer that [`RemoteBulk`] starts: an [`Exposed`] buffer, or an [`ExposedSlice`] of one. Transfers
/// with borrowed memory are started by [`Scope::start_pull_into`](crate::Scope::start_pull_into).
#[diagnostic::on_unimplemented(
    message = "a transfer that is started can't own `{Self}`",
    note = "give an `Exposed` buffer or an `ExposedSlice`, by value: the transfer returns it",
    note = "borrowed memory is used inside a scope: `engine.scope(|s| s.start_pull_into(&remote, &mut buf[..]).wait().0)`"
)]
pub trait LocalMemory: TransferBuffer + sealed::LocalMemory {
    /// The buffer's type, a parameter of [`Transfer`].
    type Buffer: Buffer;
    /// [`Writable`](crate::Writable) or [`ReadOnly`](crate::ReadOnly).
    type Access;
}

mod sealed {
    use super::RemoteBulk;
    use crate::Result;
    use crate::memory::Slice;

    pub trait TransferBuffer: Sized {
        /// What keeps it meanwhile. A reference to memory that a transfer writes must not exist.
        #[doc(hidden)]
        type Kept;
        /// The transfer has ended, and no access is in progress. In a forked child, none can be, and no gate can be waited for.
        #[doc(hidden)]
        fn restore(kept: Self::Kept, is_forked: bool) -> Self;
    }

    pub trait LocalMemory: TransferBuffer<Kept = Self> {
        #[doc(hidden)]
        fn memory(&self) -> Slice;
        /// Fails when it is exposed by another engine than the one that transfers.
        #[doc(hidden)]
        fn check(&self, remote: &RemoteBulk) -> Result<()>;
    }
}

macro_rules! kept_as_it_is {
    ($([$($generics:tt)*] $kind:ty),*) => {$(
        impl<$($generics)*> TransferBuffer for $kind {}
        impl<$($generics)*> sealed::TransferBuffer for $kind {
            type Kept = Self;
            fn restore(kept: Self, _: bool) -> Self {
                kept
            }
        }
    )*};
}

kept_as_it_is!([B: Buffer, A] Exposed<B, A>, [A] ExposedSlice<A>, [T: ReadElement] &[T]);

impl<T: Element> TransferBuffer for &mut [T] {}

impl<'a, T: Element> sealed::TransferBuffer for &'a mut [T] {
    type Kept = BorrowedSlice<'a, T>;

    fn restore(kept: BorrowedSlice<'a, T>, is_forked: bool) -> &'a mut [T] {
        kept.take(is_forked)
    }
}

impl<B: Buffer, A> LocalMemory for Exposed<B, A> {
    type Buffer = B;
    type Access = A;
}

impl<B: Buffer, A> sealed::LocalMemory for Exposed<B, A> {
    fn memory(&self) -> Slice {
        self.whole()
    }

    fn check(&self, remote: &RemoteBulk) -> Result<()> {
        remote.check_local(self.shared())
    }
}

impl<A> LocalMemory for ExposedSlice<A> {
    type Buffer = [u8; 0];
    type Access = A;
}

impl<A> sealed::LocalMemory for ExposedSlice<A> {
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
pub struct Transfer<B: Buffer, L: TransferBuffer = Exposed<B>> {
    remote: RemoteBulk,
    pull: bool,
    len: usize,
    /// `None` once it has been returned.
    local: Option<<L as sealed::TransferBuffer>::Kept>,
    memory: Slice,
    state: TransferState,
    beginning: TransferBeginning,
    _buffer: PhantomData<fn() -> B>,
}

enum TransferState {
    /// It had ended when it was started.
    Done(Option<Result<usize>>),
    InProgress(OwnCompletion, TransferId),
}

impl<B: Buffer, L: TransferBuffer> Unpin for Transfer<B, L> {}

impl<B: Buffer, L: TransferBuffer> Transfer<B, L> {
    /// Starts a transfer with the memory, which `local` keeps, unless `allowed` is an error.
    pub(super) fn start(
        remote: &RemoteBulk,
        pull: bool,
        local: <L as sealed::TransferBuffer>::Kept,
        memory: Slice,
        allowed: Result<()>,
    ) -> Transfer<B, L> {
        let completion = OwnCompletion::new();
        let beginning = remote.beginning(pull, memory.len.min(remote.len()), Instant::now());
        let (started, len) = match allowed {
            Ok(()) => remote.start(pull, &memory, &completion, true),
            Err(error) => (StartedTransfer::Done(Err(error)), 0),
        };
        let state = match started {
            StartedTransfer::Done(result) => {
                remote.note_end(&beginning, None, &result);
                TransferState::Done(Some(result))
            }
            StartedTransfer::InProgress(id) => TransferState::InProgress(completion, id),
        };
        Transfer { remote: remote.clone(), pull, len, local: Some(local), memory, state, beginning, _buffer: PhantomData }
    }
}

impl RemoteBulk {
    /// Starts a pull, and returns at once. The transfer owns the local buffer until it has ended, and returns it then.
    pub fn start_pull_into<L: LocalMemory<Access = Writable>>(&self, local: L) -> Transfer<L::Buffer, L> {
        let (memory, allowed) = (local.memory(), local.check(self));
        Transfer::start(self, true, local, memory, allowed)
    }

    /// Starts a push, and returns at once. The transfer owns the local buffer until it has ended, and returns it then.
    pub fn start_push_from<L: LocalMemory>(&self, local: L) -> Transfer<L::Buffer, L> {
        let (memory, allowed) = (local.memory(), local.check(self));
        Transfer::start(self, false, local, memory, allowed)
    }
}

impl<B: Buffer, L: TransferBuffer> Transfer<B, L> {
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
            completion.wait(&self.remote.shared().core, None, Awaited::Transfer);
        }
        self.finish()
    }

    /// In a forked child no transfer ends, and the thread that holds the memory's gate may not exist.
    fn is_forked(&self) -> bool {
        self.remote.shared().core.is_forked()
    }

    fn finish(&mut self) -> (Result<usize>, L) {
        if let Err(error) = self.remote.shared().check_process(|| "transfer".to_owned()) {
            return (Err(error), self.restore());
        }
        let result = self.take_result().unwrap_or_else(|| Err(self.remote.error(self.pull, self.len, Failure::Cancelled)));
        if result.is_err() {
            // An access that is in progress still belongs to the transfer.
            self.memory.region.fence();
        }
        (result, self.restore())
    }

    /// The result, if there is one that was not taken yet. One that comes from the protocol is counted here.
    fn take_result(&mut self) -> Option<Result<usize>> {
        let completion = match &mut self.state {
            TransferState::Done(result) => return result.take(),
            TransferState::InProgress(completion, _) => completion,
        };
        let Some(OperationOutcome::Transferred(result, ended)) = completion.take() else { return None };
        let result = result.map_err(|failure| self.remote.error(self.pull, self.len, *failure));
        self.remote.note_end(&self.beginning, ended, &result);
        Some(result)
    }

    fn restore(&mut self) -> L {
        let Some(local) = self.local.take() else { panic!("a transfer was polled after it had ended") };
        L::restore(local, self.is_forked())
    }

    /// Blocks until one of the transfers has ended, removes that one from the list, and returns its index, and its result and
    /// buffer. The order of the others does not change.
    ///
    /// # Panics
    /// When the list is empty.
    pub fn wait_any(transfers: &mut Vec<Transfer<B, L>>) -> (usize, (Result<usize>, L)) {
        assert!(!transfers.is_empty(), "wait_any needs at least one transfer");
        let index = wait_any(transfers, Transfer::is_ready, |transfer| match &transfer.state {
            TransferState::Done(_) => None,
            TransferState::InProgress(completion, _) => Some((&transfer.remote.shared().core, completion)),
        });
        let transfer = transfers.remove(index);
        (index, transfer.wait())
    }

    /// Blocks until all the transfers have ended. Returns their results and buffers, in the order of the transfers.
    pub fn wait_all(transfers: Vec<Transfer<B, L>>) -> Vec<(Result<usize>, L)> {
        transfers.into_iter().map(Transfer::wait).collect()
    }
}

impl<B: Buffer, L: TransferBuffer> Future for Transfer<B, L> {
    type Output = (Result<usize>, L);

    /// # Panics
    /// When polled again after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<(Result<usize>, L)> {
        let this = self.get_mut();
        if let TransferState::InProgress(completion, _) = &this.state
            && !this.is_forked()
            && !this.remote.shared().core.poll_operation(completion, context.waker(), this.len <= DRIVEN_BY_POLLS)
        {
            return Poll::Pending;
        }
        Poll::Ready(this.finish())
    }
}

impl<B: Buffer, L: TransferBuffer> Drop for Transfer<B, L> {
    fn drop(&mut self) {
        if let TransferState::InProgress(completion, _) = &self.state {
            self.remote.shared().core.forget_polls(completion);
        }
        let Some(local) = self.local.take() else { return };
        if self.is_forked() {
            // A forked child leaks the buffer, whose gate it can't close.
            std::mem::forget(local);
            return;
        }
        if matches!(self.state, TransferState::InProgress(..)) {
            // Cancelling has no effect if the transfer has ended; an access that was in progress then still belongs to it.
            self.cancel();
            self.memory.region.fence();
            let _ = self.take_result();
        }
    }
}

impl<B: Buffer, L: TransferBuffer> fmt::Debug for Transfer<B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.pull { "pull" } else { "push" };
        write!(f, "Transfer({verb} of {} bytes{})", self.len, if self.is_ready() { ", ready" } else { "" })
    }
}
