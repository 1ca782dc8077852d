//! What reaches a region's memory but this process's threads, and how that ends.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

/// What outside of this process may reach memory of a region for a while: a peer that reads what was lent to it, a
/// device that carries out a transfer.
pub(crate) trait Loan: Send + Sync {
    /// Ends the permission, and does not wait: what is read from now on is of no use to a peer that keeps to the rules.
    fn withdraw(&self);
    /// Returns when the access that was in progress when the permission was withdrawn, at `since`, has ended, or what had it is
    /// gone. What takes too long from then on is ended by force.
    fn wait(&self, since: Instant);
    /// True when the operation that it was given for is over, though the access may not have ended.
    fn is_over(&self) -> bool {
        false
    }
}

/// What a device knows of a region's memory, and by which keys it is reached there.
pub(crate) trait DeviceRegistration: Any + Send + Sync {
    /// The device forgets the memory. When this returns it does not touch it any more, whoever asks it to.
    fn end(&self);
}

/// Loans that were all withdrawn at one moment: so all of them together are waited for no longer than one.
pub(super) struct Withdrawn(Option<(Vec<Arc<dyn Loan>>, Instant)>);

impl Withdrawn {
    pub(super) fn new(lent: Vec<Arc<dyn Loan>>) -> Withdrawn {
        if lent.is_empty() {
            // Mostly so, and then not worth a look at the clock.
            return Withdrawn(None);
        }
        lent.iter().for_each(|loan| loan.withdraw());
        Withdrawn(Some((lent, Instant::now())))
    }

    pub(super) fn wait(self) {
        if let Some((lent, since)) = self.0 {
            lent.iter().for_each(|loan| loan.wait(since));
        }
    }
}

/// A region whose gate is closed, while accesses from outside may still be in progress.
#[must_use]
pub(crate) struct ClosedRegion {
    lent: Withdrawn,
    registered: Vec<Arc<dyn DeviceRegistration>>,
}

impl ClosedRegion {
    pub(super) fn new(lent: Vec<Arc<dyn Loan>>, registered: Vec<Arc<dyn DeviceRegistration>>) -> ClosedRegion {
        ClosedRegion { lent: Withdrawn::new(lent), registered }
    }

    /// Returns when they have ended.
    pub(crate) fn wait(self) {
        self.lent.wait();
        self.registered.iter().for_each(|registration| registration.end());
    }
}
