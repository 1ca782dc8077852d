//! How transfers and links end: they wait for outstanding requests, within bounds, and are then ended by force.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::sys::is_forked;
use super::VerbsLink;
use crate::deferred_log::defer;
use crate::memory::{Loan, Slice};

/// How long a closed link may take to send its last messages.
const LINGER: Duration = Duration::from_secs(1);
/// How long the outstanding requests of a cancelled transfer may take to complete; then their queue pair is destroyed.
const GRACE: Duration = Duration::from_millis(100);

/// A transfer's hold on local memory.
pub(super) struct RmaLoan {
    pub link: Arc<VerbsLink>,
    pub number: u64,
    pub local: Slice,
}

impl Loan for RmaLoan {
    fn withdraw(&self) {
        self.link.stop_transfer(self.number);
    }

    fn wait(&self, since: Instant) {
        self.link.await_transfer(self.number, since);
    }

    fn is_over(&self) -> bool {
        self.local.is_over()
    }
}

impl VerbsLink {
    /// Continues closing a link. True when it has ended.
    pub(in super::super) fn linger(&self, now: Instant) -> bool {
        let Some(connection) = self.connection.get() else {
            self.destroy();
            return true;
        };
        let since = *self.closing.get_or_init(|| now);
        let done = self.failed.load(Ordering::Acquire) || now >= since + LINGER || connection.hello.get().is_none() || {
            let mut out = connection.out.lock();
            // The last frames may not have been sent yet.
            let _ = out.resume();
            out.is_flushed() && out.farewell().unwrap_or(true)
        };
        if done {
            self.destroy();
        }
        done
    }

    /// Frees what the link has of its device, in the order that README.md explains.
    pub(in super::super) fn destroy(&self) {
        let id = self.id.lock().take();
        if let Some(connection) = self.connection.get() {
            if let Some(rma) = connection.rma.lock().as_mut() {
                rma.close();
            }
            self.deliver(connection.rma.lock());
            let (qp, stages) = connection.out.lock().close();
            if let Some(qp) = qp {
                id.iter().for_each(|id| id.disconnect());
                // Messages that were not handled are lost with the queue pair, and their buffers.
                if let Err(error) = connection.links.collect_completions(&connection.queue_set) {
                    defer(move || tracing::error!(target: "calomel::verbs", %error, "can't take completions"));
                }
                connection.links.remove(connection.queue_pair);
                drop(qp);
                // The peer can read them no more.
                drop(stages);
                connection.links.release(&connection.queue_set);
            }
        }
        if let Some(id) = id {
            self.shared.forget(&id);
        }
    }

    /// Posts no more requests of a transfer.
    fn stop_transfer(&self, number: u64) {
        // In a forked child, the operations are the parent's.
        let Some(connection) = self.connection.get().filter(|_| !is_forked()) else { return };
        let mut rma = connection.rma.lock();
        if let Some(rma) = rma.as_mut() {
            rma.stop(number);
        }
        self.deliver(rma);
        // The driver handles the completions that were polled here.
        self.shared.wake();
    }

    /// Waits for the end of a transfer that was stopped at `since`: when this returns the device does not access its memory.
    fn await_transfer(&self, number: u64, since: Instant) {
        // In a forked child, the operations are the parent's.
        let Some(connection) = self.connection.get().filter(|_| !is_forked()) else { return };
        let until = since + GRACE;
        loop {
            let is_under_way = connection.rma.lock().as_mut().is_some_and(|rma| {
                rma.stop(number);
                rma.is_under_way(number)
            });
            if !is_under_way {
                break;
            }
            if Instant::now() >= until {
                let what = "a cancelled transfer does not end: its queue pair is replaced";
                defer(move || tracing::debug!(target: "calomel::verbs", "{what}"));
                self.replace_rma_if(connection, |rma| rma.is_under_way(number), "a transfer was cancelled");
                break;
            }
            if let Err(error) = connection.links.collect_completions(&connection.queue_set) {
                defer(move || tracing::error!(target: "calomel::verbs", %error, "can't take completions"));
            }
            std::thread::yield_now();
        }
        self.deliver(connection.rma.lock());
        // The driver handles the completions that were polled here.
        self.shared.wake();
    }
}
