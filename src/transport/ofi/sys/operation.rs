//! An operation in progress: what a provider holds until it completes.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::lending::MemoryLoan;
use super::raw::{FI_ETRUNC, ProviderContext};
use super::text_of;

/// What the caller of an operation knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Label {
    /// A message: all receives for messages are alike.
    Message,
    /// A payload of a link, by the number that its sender gave it.
    Payload { link: u64, number: u64 },
}

/// The memory of an operation.
pub(super) enum OperationMemory {
    Owned(Vec<u8>),
    Lent(Arc<MemoryLoan>),
}

/// An operation. It is freed when it has completed; if it never does, it leaks, together with its memory.
#[repr(C)]
pub(super) struct Operation {
    // First, since providers take the address of the operation for that of their own memory.
    provider: ProviderContext,
    label: Label,
    is_send: bool,
    memory: OperationMemory,
}

impl Operation {
    /// The context to post it with.
    pub fn begin(label: Label, is_send: bool, memory: OperationMemory) -> NonNull<Operation> {
        let operation = Box::new(Operation { provider: ProviderContext::default(), label, is_send, memory });
        NonNull::from(Box::leak(operation))
    }

    /// Takes it back: it was not posted.
    ///
    /// # Safety
    /// It must come from `begin`, and no provider may have it.
    pub unsafe fn take_back(operation: NonNull<Operation>) -> OperationMemory {
        // SAFETY: `begin` has made it from a box; it is taken back once.
        unsafe { Box::from_raw(operation.as_ptr()) }.memory
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
}

/// Why an operation has failed.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct CompletionError(i32);

impl CompletionError {
    pub(super) fn new(error: i32) -> CompletionError {
        CompletionError(error)
    }

    /// The endpoint was closed.
    pub fn is_canceled(self) -> bool {
        self.0 == libc::ECANCELED
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

/// Ends an operation. Memory that was lent is its owner's again. `None` for a null context.
///
/// # Safety
/// The context must be null, or that of an operation that has completed, and be passed once.
pub(super) unsafe fn complete(context: *mut c_void, result: Result<usize, CompletionError>) -> Option<Completion> {
    let operation = NonNull::new(context.cast::<Operation>())?;
    // SAFETY: the context is the address of an operation, which `begin` has made from a box.
    let Operation { label, is_send, memory, .. } = *unsafe { Box::from_raw(operation.as_ptr()) };
    let buffer = match memory {
        OperationMemory::Owned(buffer) => Some(buffer),
        OperationMemory::Lent(loan) => {
            loan.end();
            None
        }
    };
    Some(Completion { label, is_send, buffer, result })
}
