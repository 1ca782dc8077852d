//! Loans and device registrations: accesses to a region's memory from outside of this process, and how they end.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

/// Permission to access memory of a region from outside of this process for a while: for a peer that reads exported memory, or
/// a device that carries out a transfer.
pub(crate) trait Loan: Send + Sync {
    /// Ends the permission without waiting: a peer that follows the protocol discards what it reads from now on.
    fn withdraw(&self);
    /// Returns when the access that was in progress at the withdrawal, at `since`, has ended, or the peer or device is gone. An
    /// access that takes too long from then on is ended by force.
    fn wait(&self, since: Instant);
    /// True when the access is another process's, which discards what it has read after the withdrawal: memory that is lent to be
    /// read need not stay until the access has ended.
    fn is_discarded(&self) -> bool {
        false
    }
    /// True when its operation is over, though the access may not have ended.
    fn is_over(&self) -> bool {
        false
    }
}

/// The registration of a region's memory with a device.
pub(crate) trait DeviceRegistration: Any + Send + Sync {
    /// Deregisters the memory. When this returns, the device does not access it any more, at the request of any peer.
    fn end(&self);
}

/// Loans that were all withdrawn at one moment, so waiting for all takes no longer than for the slowest.
pub(super) struct Withdrawn(Option<(Vec<Arc<dyn Loan>>, Instant)>);

impl Withdrawn {
    pub(super) fn new(loans: Vec<Arc<dyn Loan>>) -> Withdrawn {
        if loans.is_empty() {
            // The common case, which need not read the clock.
            return Withdrawn(None);
        }
        loans.iter().for_each(|loan| loan.withdraw());
        Withdrawn(Some((loans, Instant::now())))
    }

    pub(super) fn wait(self) {
        self.wait_for(|_| true);
    }

    fn wait_for(self, which: impl Fn(&dyn Loan) -> bool) {
        if let Some((loans, since)) = self.0 {
            loans.iter().filter(|loan| which(&***loan)).for_each(|loan| loan.wait(since));
        }
    }
}

/// A region whose gate is closed, while accesses from outside may still be in progress.
#[must_use]
pub(crate) struct ClosedRegion {
    loans: Withdrawn,
    registrations: Vec<Arc<dyn DeviceRegistration>>,
}

impl ClosedRegion {
    pub(super) fn new(loans: Vec<Arc<dyn Loan>>, registrations: Vec<Arc<dyn DeviceRegistration>>) -> ClosedRegion {
        ClosedRegion { loans: Withdrawn::new(loans), registrations }
    }

    /// Returns when these accesses have ended.
    pub(crate) fn wait(self) {
        self.loans.wait();
        self.registrations.iter().for_each(|registration| registration.end());
    }

    /// As `wait`, for memory that peers only read: not for those that discard what they read from now on.
    pub(crate) fn wait_for_devices(self) {
        self.loans.wait_for(|loan| !loan.is_discarded());
        self.registrations.iter().for_each(|registration| registration.end());
    }
}
