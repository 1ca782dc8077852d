//! The end of an endpoint, which ends what its provider does with memory.
//!
//! An endpoint that can't be closed is kept for ever, with all that the provider may access on its behalf: the operations, their
//! buffers, and the loans of users' memory, which then do not end. So the process goes on. Only a thread that waits for such
//! memory can't: it tries again to close the endpoint, and ends the process when that is hopeless. It must not return, since the
//! memory would be used for something else, and it may be the thread that drives the engine, so it must not wait for ever.

use std::collections::VecDeque;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::av::Av;
use super::cq::Cq;
use super::domain::Domain;
use super::fabric::close;
use super::lending::{self, MemoryLoan, StuckEndpoint};
use super::raw::FidEp;
use crate::deferred_log::defer;
use crate::fork::CreatorProcess;

/// How long a provider may call an endpoint busy that is to be closed. A link's end waits for that.
const BUSY: Duration = Duration::from_millis(50);

/// An endpoint that is used no more, and what it needs until it is closed.
pub(super) struct ClosingEndpoint {
    pub raw: NonNull<FidEp>,
    /// Loans that may not have ended. The operations keep them.
    pub loans: Vec<Weak<MemoryLoan>>,
    pub cq: Arc<Cq>,
    pub _av: Arc<Av>,
    pub _domain: Arc<Domain>,
    pub process: CreatorProcess,
    /// The last attempt to close it has found it busy, and it may be tried again.
    pub is_busy: bool,
    /// The error of each attempt to close it, for tests.
    #[cfg(test)]
    pub obstacle: Arc<std::sync::atomic::AtomicI32>,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for ClosingEndpoint {}

impl ClosingEndpoint {
    /// Closes it, or keeps it for ever, and returns false. No thread may be in a call of it.
    pub fn close(mut self) -> bool {
        let begin = Instant::now();
        while let Err(error) = self.try_close() {
            self.is_busy = is_transient(&error);
            if !self.is_busy || begin.elapsed() > BUSY {
                self.each_loan(|loan| loan.note_stuck(!self.is_busy));
                defer(move || {
                    tracing::error!(target: "calomel::ofi", %error, "an endpoint can't be closed: its memory is never freed");
                });
                lending::keep(Box::new(self));
                return false;
            }
            self.complete();
            std::thread::yield_now();
        }
        true
    }

    fn each_loan(&self, act: impl Fn(&Arc<MemoryLoan>)) {
        self.loans.iter().filter_map(Weak::upgrade).for_each(|loan| act(&loan));
    }

    fn try_close(&self) -> io::Result<()> {
        #[cfg(test)]
        match self.obstacle.load(std::sync::atomic::Ordering::SeqCst) {
            0 => {}
            error => return Err(super::failed("fi_close of an endpoint", error)),
        }
        // SAFETY: it is open, and no thread is in a call of it: its owner has given it up. It is not closed again after success,
        // and after a failure only where the provider says that it is busy, so that it is as it was.
        unsafe { close("fi_close of an endpoint", self.raw.as_ptr().cast()) }?;
        // The provider accesses no memory of a closed endpoint.
        self.each_loan(|loan| loan.end());
        Ok(())
    }

    /// Lets the provider go on: what completes may be what keeps it busy. No one else asks for the completions any more.
    fn complete(&self) {
        let _ = self.cq.poll(&mut VecDeque::new());
    }
}

/// Whether the provider may be able to close it later. After other errors nothing is known of it, so it is not touched any more.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock)
}

impl StuckEndpoint for ClosingEndpoint {
    fn close_again(&mut self) -> bool {
        if !self.is_busy || self.process.is_forked_child() {
            return false;
        }
        self.complete();
        match self.try_close() {
            Ok(()) => true,
            Err(error) => {
                self.is_busy = is_transient(&error);
                self.each_loan(|loan| loan.note_stuck(!self.is_busy));
                false
            }
        }
    }
}
