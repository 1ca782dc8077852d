//! Answers of threads that do not drive: where the peer waits for several, the driver sends them together.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::steps::{Outputs, collect};
use super::{Core, EngineEnv};
use crate::proto::{MayWait, Proto};

/// A driver that has read the clock within this time is taken to be polling.
const POLLED_WITHIN: Duration = Duration::from_micros(50);

impl Core {
    /// As `exec`, for a step that answers a request. Where the peer waits for several answers, and a thread drives, that thread sends it
    /// at its next poll: a thread that answers many requests one by one would else make a system call for each.
    pub(crate) fn exec_answer<R>(&self, step: impl FnOnce(&mut Proto<EngineEnv>) -> R) -> R {
        if self.is_corked() || self.spin.is_none() {
            return self.exec(step);
        }
        let mut outputs = Outputs::new();
        let left;
        let result = {
            let mut proto = self.proto.lock();
            proto.may_send_later();
            let result = step(&mut proto);
            left = proto.may_send_later() != MayWait::No && self.polls_now();
            if left {
                proto.poll_unsent(&mut outputs.queue);
                self.leave_unsent(false);
                self.answers_left.store(true, Ordering::SeqCst);
            } else {
                collect(self, &mut proto, &mut outputs);
            }
            result
        };
        self.execute_outputs(outputs, None);
        // The driver may have gone without having seen the flag; if it has since, it sees that.
        if left && !self.drives_now() {
            self.send_left_answers();
        }
        self.check_alarm();
        result
    }

    /// Whether a thread drives, and runs no handler.
    fn drives_now(&self) -> bool {
        self.driver_lock.holder_is_awake() == Some(true) && !self.threads.is_handling()
    }

    /// Whether a thread drives, and is likely to have a processor, and not to run a waker or a hook: then it reads the clock often.
    fn polls_now(&self) -> bool {
        let since = || self.pacer.nanos_at(Instant::now()).saturating_sub(self.pacer.nanos());
        self.drives_now() && since() < POLLED_WITHIN.as_nanos() as u64
    }

    /// Sends the answers that were left for a driver. For what it does next it may not be back soon.
    pub(super) fn send_left_answers(&self) {
        if self.answers_left.load(Ordering::SeqCst) {
            self.exec(|_| ());
        }
    }
}
