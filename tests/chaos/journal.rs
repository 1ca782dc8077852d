//! Records how each operation of a process ended, and whether in time.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use calomel::Error;

use crate::support::{patience, say};

/// How often the journal checks what is in progress.
const TICK: Duration = Duration::from_millis(50);

/// No operation takes longer than its own limit and this.
pub fn bound() -> Duration {
    patience() * Duration::from_secs(2)
}

/// Identifies an operation that must be executed once: its caller, and a number.
pub type Id = (u32, u32);

#[derive(Default)]
pub struct Journal {
    counts: Mutex<BTreeMap<String, u64>>,
    running: Mutex<HashMap<u64, Running>>,
    next: AtomicU64,
    /// Milliseconds for which this process was stopped or not scheduled.
    stalled: AtomicU64,
    handled: Mutex<HashMap<u32, Vec<u64>>>,
    /// Operations of this process may now end with `Finalized`.
    leaving: AtomicBool,
}

struct Running {
    what: String,
    begin: Instant,
    limit: Duration,
    stalled: u64,
    reported: bool,
}

impl Running {
    /// How long it has taken while this process was able to run.
    fn took(&self, stalled: u64) -> Duration {
        self.begin.elapsed().saturating_sub(Duration::from_millis(stalled - self.stalled))
    }
}

/// Reports a violated guarantee to the parent.
pub fn loss(text: &str) {
    say(&format!("loss {}", text.replace('\n', " ")));
}

impl Journal {
    pub fn count(&self, key: impl Into<String>, by: u64) {
        *self.counts.lock().unwrap().entry(key.into()).or_default() += by;
    }

    /// Runs an operation that must end within `limit` and the bound.
    pub fn timed<R>(&self, what: impl Fn() -> String, limit: Duration, work: impl FnOnce() -> R) -> R {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let stalled = self.stalled.load(Ordering::SeqCst);
        let running = Running { what: what(), begin: Instant::now(), limit, stalled, reported: false };
        self.running.lock().unwrap().insert(number, running);
        let result = work();
        let running = self.running.lock().unwrap().remove(&number).unwrap();
        if running.reported {
            loss(&format!("hang: {} has ended now, after {:?}", running.what, running.begin.elapsed()));
        }
        result
    }

    /// Watches what is in progress, and reports the counts to the parent, as long as the process lives.
    pub fn watch(&self) {
        let mut reported = Instant::now();
        let mut before = Instant::now();
        loop {
            std::thread::sleep(TICK);
            let pause = before.elapsed();
            before = Instant::now();
            if pause > 3 * TICK {
                self.stalled.fetch_add((pause - TICK).as_millis() as u64, Ordering::SeqCst);
            }
            let stalled = self.stalled.load(Ordering::SeqCst);
            for running in self.running.lock().unwrap().values_mut().filter(|running| !running.reported) {
                if running.took(stalled) > running.limit + bound() {
                    running.reported = true;
                    loss(&format!(
                        "hang: {} has not ended after {:?}, and {:?} were allowed",
                        running.what,
                        running.took(stalled),
                        running.limit
                    ));
                }
            }
            if reported.elapsed() > 8 * TICK {
                reported = Instant::now();
                self.tell();
            }
        }
    }

    pub fn tell(&self) {
        let counts = self.counts.lock().unwrap().clone();
        let text: Vec<String> = counts.iter().map(|(key, count)| format!("{key}={count}")).collect();
        say(&format!("counts {}", text.join(";")));
    }

    /// Records the end of an operation of a class. `expected` are the kinds of errors that it may end with beside those that
    /// faults cause.
    pub fn ended<T>(&self, class: &str, result: &Result<T, Error>, expected: &[&str]) {
        let kind = result.as_ref().map_or_else(kind, |_| "ok");
        self.count(format!("{class} {kind}"), 1);
        let by_faults = ["ok", "timeout", "unreachable", "disconnected", "restarted", "busy", "undefined"];
        let leaving = kind == "finalized" && self.leaving.load(Ordering::SeqCst);
        if let Err(error) = result
            && !by_faults.contains(&kind)
            && !expected.contains(&kind)
            && !leaving
        {
            loss(&format!("{class} ended with {error:?}"));
        }
    }

    pub fn leave(&self) {
        self.leaving.store(true, Ordering::SeqCst);
    }

    /// Records that something is handled here.
    pub fn handles(&self, what: &str, (caller, number): Id) {
        let mut handled = self.handled.lock().unwrap();
        let words = handled.entry(caller).or_default();
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        if words[word] & bit != 0 {
            loss(&format!("{what} {number} of {caller:x} is handled twice"));
        }
        words[word] |= bit;
    }

    pub fn in_progress(&self) -> usize {
        self.running.lock().unwrap().len()
    }
}

/// An error's kind in a word. `undefined`: the process listens already, and has not defined its procedures yet.
pub fn kind(error: &Error) -> &'static str {
    match error {
        Error::Timeout { .. } => "timeout",
        Error::Cancelled { .. } => "cancelled",
        Error::Unreachable { .. } => "unreachable",
        Error::Disconnected { .. } => "disconnected",
        Error::PeerRestarted { .. } => "restarted",
        Error::NoSuchProcedure { .. } => "undefined",
        Error::NoResponse { .. } => "no response",
        Error::Failed { .. } => "failed",
        Error::AccessDenied { .. } => "denied",
        Error::Revoked { .. } => "revoked",
        Error::Finalized { .. } => "finalized",
        Error::Busy { .. } => "busy",
        _ => "other",
    }
}
