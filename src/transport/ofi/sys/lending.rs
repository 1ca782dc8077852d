//! Users' memory while a provider reads or writes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::memory::{Loan, Slice};

/// How long memory that is wanted back may stay with the provider before the endpoint is closed that it was lent to: a peer
/// that is alive takes a chunk in far less.
const PATIENCE: Duration = Duration::from_millis(250);

/// Whom the memory was lent to.
pub(in super::super) trait LoanHost: Send + Sync {
    /// Handles completions, so that loans end.
    fn collect(&self);
    /// Ends all loans of the endpoint by closing it.
    fn end_by_force(&self);
    /// Some of the memory is wanted back: if that lasts, `end_by_force` is called, also if nobody waits for it.
    fn reclaiming(&self, until: Instant);
}

/// Memory that a provider may access until the operation has completed, or its endpoint is closed.
pub(in super::super) struct MemoryLoan {
    memory: Slice,
    /// Gone: its endpoint is closed.
    host: Weak<dyn LoanHost>,
    withdrawn: AtomicBool,
    ended: AtomicBool,
}

impl MemoryLoan {
    pub(super) fn new(memory: &Slice, host: Weak<dyn LoanHost>) -> Arc<MemoryLoan> {
        Arc::new(MemoryLoan { memory: memory.clone(), host, withdrawn: AtomicBool::new(false), ended: AtomicBool::new(false) })
    }

    /// The provider accesses the memory no more.
    pub(super) fn end(self: &Arc<Self>) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            let own: Arc<dyn Loan> = self.clone();
            self.memory.region.unlend(&own);
        }
    }

    /// True when the memory is wanted back, and the provider still has it.
    pub(super) fn is_withheld(&self) -> bool {
        self.withdrawn.load(Ordering::Acquire) && !self.has_ended()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

impl Loan for MemoryLoan {
    /// What is in progress can't be stopped but by closing the endpoint, so it gets the time to complete.
    fn withdraw(&self) {
        self.withdrawn.store(true, Ordering::Release);
        if let Some(host) = self.host.upgrade().filter(|_| !self.has_ended()) {
            host.reclaiming(Instant::now() + PATIENCE);
        }
    }

    fn wait(&self, since: Instant) {
        while !self.has_ended() {
            // A host that is gone has closed its endpoint, or is about to.
            if let Some(host) = self.host.upgrade() {
                host.collect();
                if since.elapsed() > PATIENCE {
                    host.end_by_force();
                }
            }
            std::thread::yield_now();
        }
    }

    fn is_over(&self) -> bool {
        self.memory.has_ended()
    }
}
