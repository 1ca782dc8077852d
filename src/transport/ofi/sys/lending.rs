//! Users' memory while a provider reads or writes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::memory::{Loan, Slice};
use crate::sync::Mutex;

/// How long memory that is wanted back may stay with the provider before the endpoint is closed that it was lent to: a peer
/// that is alive takes a chunk in far less.
pub(in super::super) const PATIENCE: Duration = Duration::from_millis(250);

/// How long a thread waits for memory whose endpoint is too busy to be closed, and how often it is tried again.
const LAST_PATIENCE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(5);

/// Whom the memory was lent to.
pub(in super::super) trait LoanHost: Send + Sync {
    /// Handles completions, so that loans end.
    fn collect(&self);
    /// Ends all loans of the endpoint by closing it.
    fn end_by_force(&self);
    /// Some of the memory is wanted back: if that lasts, `end_by_force` is called, also if no thread waits for it.
    fn reclaiming(&self, until: Instant);
}

/// An endpoint that could not be closed, with all that its provider may access.
pub(super) trait StuckEndpoint: Send {
    /// Tries again to close it, if that is possible. True when its loans have ended.
    fn close_again(&mut self) -> bool;
}

/// Only dropped once they are closed.
static STUCK: Mutex<Vec<Box<dyn StuckEndpoint>>> = Mutex::new(Vec::new());

/// Keeps an endpoint for ever, or until a thread that waits for its memory has closed it.
pub(super) fn keep(endpoint: Box<dyn StuckEndpoint>) {
    STUCK.lock().push(endpoint);
}

fn close_again() {
    // Nothing is locked meanwhile. Another thread that waits may find nothing to try, and tries again later.
    let stuck = std::mem::take(&mut *STUCK.lock());
    for mut endpoint in stuck {
        if !endpoint.close_again() {
            keep(endpoint);
        }
    }
}

/// Memory that a provider may access until the operation has completed, or its endpoint is closed.
pub(in super::super) struct MemoryLoan {
    memory: Slice,
    /// Gone: its endpoint is closed.
    host: Weak<dyn LoanHost>,
    /// Since when it is wanted back.
    withdrawn: OnceLock<Instant>,
    ended: AtomicBool,
    /// Its endpoint can't be closed now; or ever.
    stuck: AtomicBool,
    hopeless: AtomicBool,
}

impl MemoryLoan {
    pub(super) fn new(memory: &Slice, host: Weak<dyn LoanHost>) -> Arc<MemoryLoan> {
        Arc::new(MemoryLoan {
            memory: memory.clone(),
            host,
            withdrawn: OnceLock::new(),
            ended: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            hopeless: AtomicBool::new(false),
        })
    }

    /// The provider accesses the memory no more.
    pub(super) fn end(self: &Arc<Self>) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            let own: Arc<dyn Loan> = self.clone();
            self.memory.region.unlend(&own);
        }
    }

    /// Since when the memory is wanted back, if the provider still has it.
    pub(super) fn withheld_since(&self) -> Option<Instant> {
        self.withdrawn.get().copied().filter(|_| !self.has_ended())
    }

    /// Its endpoint can't be closed. `hopeless`: nor can it be tried again.
    pub(super) fn note_stuck(&self, hopeless: bool) {
        self.hopeless.fetch_or(hopeless, Ordering::AcqRel);
        self.stuck.store(true, Ordering::Release);
    }

    /// Tries again to end the loan. Ends the process after a time, or when that is hopeless.
    fn free(&self, since: Instant) {
        close_again();
        if self.has_ended() {
            return;
        }
        if self.hopeless.load(Ordering::Acquire) || since.elapsed() > LAST_PATIENCE {
            // Not logged: a subscriber is user code, and this may run under a lock.
            eprintln!("calomel: a provider of libfabric does not release memory that is wanted back, so the process ends");
            std::process::abort();
        }
        // No event tells when the provider could close the endpoint.
        std::thread::sleep(RETRY);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

impl Loan for MemoryLoan {
    /// What is in progress can't be stopped but by closing the endpoint, so it gets the time to complete.
    fn withdraw(&self) {
        let since = *self.withdrawn.get_or_init(Instant::now);
        if let Some(host) = self.host.upgrade().filter(|_| !self.has_ended()) {
            host.reclaiming(since + PATIENCE);
        }
    }

    fn wait(&self, since: Instant) {
        let mut stuck_since = None;
        while !self.has_ended() {
            if self.stuck.load(Ordering::Acquire) {
                self.free(*stuck_since.get_or_insert_with(Instant::now));
                continue;
            }
            // A host that is gone has closed its endpoint, or is about to.
            if let Some(host) = self.host.upgrade() {
                host.collect();
                if since.elapsed() > PATIENCE && !self.has_ended() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;

    /// Notes when memory is to be taken by force.
    #[derive(Default)]
    struct Host(Mutex<Vec<Instant>>);

    impl LoanHost for Host {
        fn collect(&self) {}
        fn end_by_force(&self) {}
        fn reclaiming(&self, until: Instant) {
            self.0.lock().push(until);
        }
    }

    /// Each loan has its own time from its withdrawal on.
    #[test]
    fn a_loan_that_has_ended_takes_no_time_from_the_next() {
        let host: Arc<Host> = Arc::default();
        let own: Weak<Host> = Arc::downgrade(&host);
        let memory = Slice::whole(&Region::from_vec(vec![1; 100]));
        let [first, second] = [(); 2].map(|()| MemoryLoan::new(&memory, own.clone()));
        assert_eq!(first.withheld_since(), None);
        first.withdraw();
        let since = first.withheld_since().unwrap();
        first.end();
        assert_eq!(first.withheld_since(), None);
        while Instant::now() <= since {
            std::hint::spin_loop();
        }
        second.withdraw();
        second.withdraw();
        let later = second.withheld_since().unwrap();
        assert!(later > since);
        assert_eq!(*host.0.lock(), [since, later, later].map(|since| since + PATIENCE));
    }
}
