//! An operation in progress: what a provider holds until it completes.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;

use super::lending::MemoryLoan;
use super::raw::{FI_ETRUNC, ProviderContext};
use super::text_of;
use crate::sync::Mutex;

/// What the caller of an operation knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Label {
    /// A message: all receives for messages are alike.
    Message,
    /// A message of a link, by its number among those to the same peer.
    Sent { backlog: u64, number: u64 },
    /// A payload of a link, by the number that its sender gave it.
    Payload { link: u64, number: u64 },
    /// A receive of a link for payloads that come at once.
    Slot { link: u64, slot: u8 },
    /// A part of a transfer by RMA, by the link's number of the transfer.
    Rma { link: u64, number: u64 },
}

/// The loans of one operation.
pub(super) type MemoryLoans = SmallVec<[Arc<MemoryLoan>; 4]>;

/// The memory of an operation.
pub(super) enum OperationMemory {
    Owned(Vec<u8>),
    Lent(MemoryLoans),
}

/// An operation.
#[repr(C)]
pub(super) struct PostedOperation {
    // First, since providers take the address of the operation for that of their own memory.
    provider: ProviderContext,
    label: Label,
    is_send: bool,
    /// `None`: it is not in progress.
    memory: Option<OperationMemory>,
}

/// The operations of one completion queue. Some may never complete, so they are freed with the queue.
#[derive(Default)]
pub(super) struct Operations(Mutex<OperationPool>);

#[derive(Default)]
struct OperationPool {
    all: Vec<NonNull<PostedOperation>>,
    /// Those that are not in progress.
    free: Vec<NonNull<PostedOperation>>,
}

// SAFETY: the pointers are to boxes that the pool owns.
unsafe impl Send for OperationPool {}

impl Operations {
    /// The context to post an operation with.
    pub fn begin(&self, label: Label, is_send: bool, memory: OperationMemory) -> NonNull<PostedOperation> {
        let begun = PostedOperation { provider: ProviderContext::default(), label, is_send, memory: Some(memory) };
        let mut pool = self.0.lock();
        if let Some(operation) = pool.free.pop() {
            // SAFETY: it is not in progress, so nothing else refers to it.
            unsafe { operation.write(begun) };
            return operation;
        }
        let operation = NonNull::from(Box::leak(Box::new(begun)));
        pool.all.push(operation);
        operation
    }

    /// Takes an operation back: it was not posted.
    ///
    /// # Safety
    /// It must come from `begin`, and no provider may have it.
    pub unsafe fn take_back(&self, mut operation: NonNull<PostedOperation>) -> Option<OperationMemory> {
        // SAFETY: as the caller promises, nothing else refers to it.
        let memory = unsafe { operation.as_mut() }.memory.take();
        self.0.lock().free.push(operation);
        memory
    }

    /// Ends an operation. Memory that was lent is its owner's again. `None` for a null context.
    ///
    /// # Safety
    /// The context must be null, or that of an operation that has completed, and be passed once.
    pub unsafe fn complete(&self, context: *mut c_void, result: Result<usize, CompletionError>, data: u64) -> Option<Completion> {
        let operation = NonNull::new(context.cast::<PostedOperation>())?;
        // SAFETY: the context is the address of an operation that `begin` has made, and that no provider has any more.
        let &PostedOperation { label, is_send, .. } = unsafe { operation.as_ref() };
        // SAFETY: as above.
        let memory = unsafe { self.take_back(operation) };
        let buffer = match memory {
            Some(OperationMemory::Owned(buffer)) => Some(buffer),
            Some(OperationMemory::Lent(loans)) => {
                loans.iter().for_each(MemoryLoan::end);
                None
            }
            None => None,
        };
        Some(Completion { label, is_send, buffer, result, data })
    }
}

impl Drop for Operations {
    fn drop(&mut self) {
        for operation in self.0.get_mut().all.drain(..) {
            // SAFETY: `begin` has made it from a box. The queue is closed, so no provider has it any more.
            drop(unsafe { Box::from_raw(operation.as_ptr()) });
        }
    }
}

/// An operation has completed.
pub(in super::super) struct Completion {
    pub label: Label,
    pub is_send: bool,
    /// The buffer, if it was the operation's own.
    pub buffer: Option<Vec<u8>>,
    /// The length of what was received.
    pub result: Result<usize, CompletionError>,
    /// What the sender had go beside it; 0 for none.
    pub data: u64,
}

/// Why an operation has failed.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct CompletionError(i32);

impl CompletionError {
    pub(super) fn new(error: i32) -> CompletionError {
        CompletionError(error)
    }

    /// What has arrived was longer than the buffer.
    pub fn is_truncated(self) -> bool {
        self.0 == FI_ETRUNC
    }
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", text_of(self.0), self.0)
    }
}

impl From<CompletionError> for io::Error {
    fn from(error: CompletionError) -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionReset, format!("the provider reports: {error}"))
    }
}
