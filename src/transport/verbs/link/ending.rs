//! How transfers and links end: what is under way is waited for, within bounds, and then ended by force.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::sys::is_forked;
use super::VerbsLink;
use crate::memory::{Loan, Slice};

/// How long a link that is closed may take to say what it has said.
const LINGER: Duration = Duration::from_secs(1);
/// How long the requests of a transfer that is over may take to end by themselves; then the lane is ended, and they with it.
const GRACE: Duration = Duration::from_millis(100);

/// A transfer's hold on local memory.
pub(super) struct MoveLoan {
    pub link: Arc<VerbsLink>,
    pub number: u64,
    pub local: Slice,
}

impl Loan for MoveLoan {
    fn withdraw(&self) {
        self.link.stop_number(self.number);
    }

    fn wait(&self, since: Instant) {
        self.link.end_number(self.number, since);
    }

    fn is_over(&self) -> bool {
        self.local.is_over()
    }
}

impl VerbsLink {
    /// Goes on with the end of a link that was closed. True when it is over.
    pub(in super::super) fn linger(&self, now: Instant) -> bool {
        let Some(line) = self.line.get() else {
            self.bury();
            return true;
        };
        let since = *self.closing.get_or_init(|| now);
        let done = self.failed.load(Ordering::Acquire) || now >= since + LINGER || line.hello.get().is_none() || {
            let mut out = line.out.lock();
            // What was said last may not have left.
            let _ = out.resume();
            out.is_flushed() && out.farewell().unwrap_or(true)
        };
        if done {
            self.bury();
        }
        done
    }

    /// Frees what the link has of its device.
    pub(in super::super) fn bury(&self) {
        let id = self.id.lock().take();
        if let Some(line) = self.line.get() {
            if let Some(lane) = line.lane.lock().as_mut() {
                lane.close();
            }
            self.deliver(line.lane.lock());
            let (qp, stages) = line.out.lock().close();
            if let Some(qp) = qp {
                id.iter().for_each(|id| id.disconnect());
                // Messages that nobody has looked at go with the queue pair, and their buffers.
                if let Err(error) = line.device.gather(&line.group) {
                    tracing::error!(target: "calomel::verbs", %error, "completions can't be taken");
                }
                line.device.leave(line.queue_pair);
                drop(qp);
                // Nobody reads them any more.
                drop(stages);
                line.device.dismiss(&line.group);
            }
        }
        if let Some(id) = id {
            self.shared.forget(&id);
        }
    }

    /// Has the device begin nothing more of a transfer.
    fn stop_number(&self, number: u64) {
        // What the parent of a forked child has begun ends there.
        let Some(line) = self.line.get().filter(|_| !is_forked()) else { return };
        let mut lane = line.lane.lock();
        if let Some(lane) = lane.as_mut() {
            lane.stop(number);
        }
        self.deliver(lane);
        // What was gathered is for whatever drives.
        self.shared.wake();
    }

    /// Waits for the end of a transfer that was stopped at `since`: when this returns the device does not touch its memory.
    fn end_number(&self, number: u64, since: Instant) {
        // What the parent of a forked child has begun ends there.
        let Some(line) = self.line.get().filter(|_| !is_forked()) else { return };
        let until = since + GRACE;
        loop {
            let is_under_way = line.lane.lock().as_mut().is_some_and(|lane| {
                lane.stop(number);
                lane.is_under_way(number)
            });
            if !is_under_way {
                break;
            }
            if Instant::now() >= until {
                tracing::debug!(target: "calomel::verbs", "a transfer that is over does not end; its lane does");
                self.break_lane(line, |lane| lane.is_under_way(number), "a transfer was given up");
                break;
            }
            if let Err(error) = line.device.gather(&line.group) {
                tracing::error!(target: "calomel::verbs", %error, "completions can't be taken");
            }
            std::thread::yield_now();
        }
        self.deliver(line.lane.lock());
        // What was gathered is for whoever drives.
        self.shared.wake();
    }
}
