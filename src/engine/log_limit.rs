//! How many log lines of one kind there may be: what peers can cause again and again must not fill a disk.

use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// Lines of one kind that are logged in a [`LOG_PERIOD`].
const LOG_LINES: u32 = 100;
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// Which lines of one kind are logged.
#[derive(Default)]
pub(crate) struct LogLimit(Mutex<LoggedLines>);

impl LogLimit {
    /// How many lines were left out before this one; `None` if it is left out, too.
    pub(crate) fn next(&self, now: Instant) -> Option<u64> {
        self.0.lock().next(now)
    }
}

#[derive(Default)]
struct LoggedLines {
    /// Since when lines are counted.
    since: Option<Instant>,
    logged: u32,
    /// Lines that were left out since the last one.
    omitted: u64,
}

impl LoggedLines {
    fn next(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= LOG_PERIOD) {
            (self.since, self.logged) = (Some(now), 0);
        }
        if self.logged == LOG_LINES {
            self.omitted += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_and_told_later() {
        let lines = LogLimit::default();
        let begin = Instant::now();
        for _ in 0..LOG_LINES {
            assert_eq!(lines.next(begin), Some(0));
        }
        for _ in 0..3 {
            assert_eq!(lines.next(begin + LOG_PERIOD / 2), None);
        }
        assert_eq!(lines.next(begin + LOG_PERIOD), Some(3));
        assert_eq!(lines.next(begin + LOG_PERIOD), Some(0));
    }
}
