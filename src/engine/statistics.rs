//! What an engine measures of calls, handlers and transfers. `stats.rs` makes what users see of it.
//!
//! An empty call takes a few microseconds, so each of these is a lock that is hardly ever contended, and plain additions: that
//! takes less than atomic operations on each of the numbers would.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::Error;
use crate::latency::Histogram;
use crate::proto::{PeerId, TransferDirection};
use crate::sync::Mutex;

/// Combinations of peer, provider and calling handler that are counted apart, for each procedure that is called; others are
/// counted together.
const MAX_PATHS: usize = 1024;
/// Procedures whose handlers are counted apart.
const MAX_HANDLED: usize = 4096;
/// Transfers of up to so many bytes are counted together.
const SIZE_CLASSES: [u64; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, u64::MAX];

/// Counts of errors, by their kinds. There are few kinds.
#[derive(Clone, Default)]
pub(crate) struct ErrorCounts(Vec<(&'static str, u64)>);

impl ErrorCounts {
    pub(crate) fn count(&mut self, kind: &'static str) {
        self.count_many(kind, 1);
    }

    fn count_many(&mut self, kind: &'static str, times: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += times,
            None => self.0.push((kind, times)),
        }
    }

    pub(crate) fn add(&mut self, other: &ErrorCounts) {
        other.0.iter().for_each(|(kind, count)| self.count_many(kind, *count));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().copied()
    }
}

/// By which way a procedure is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallPath {
    pub peer: PeerId,
    pub provider: u16,
    /// The [`HandledCalls::number`] of the handler that calls; 0 for none, [`CallPath::OTHERS`] for one of many.
    pub parent: u32,
}

impl CallPath {
    pub(crate) const OTHERS: u32 = u32::MAX;
}

/// A call of this engine, once it has ended.
pub(crate) struct EndedCall {
    pub path: CallPath,
    /// Bytes of the arguments and of the result.
    pub sent: usize,
    pub received: usize,
    /// From the call to the response, in nanoseconds; `None` for one that was not sent.
    pub time: Option<u64>,
    pub error: Option<&'static str>,
}

#[derive(Clone, Default)]
pub(crate) struct CallCounts {
    pub calls: u64,
    pub errors: ErrorCounts,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    pub time: Histogram,
}

impl CallCounts {
    #[inline(always)]
    fn record(&mut self, call: &EndedCall) {
        self.calls += 1;
        self.sent_bytes += call.sent as u64;
        self.received_bytes += call.received as u64;
        if let Some(time) = call.time {
            self.time.record(time);
        }
        if let Some(kind) = call.error {
            self.errors.count(kind);
        }
    }

    pub(crate) fn add(&mut self, other: &CallCounts) {
        self.calls += other.calls;
        self.errors.add(&other.errors);
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.time.add(&other.time);
    }
}

/// The calls of one procedure that this engine has made, by their paths.
#[derive(Default)]
pub(crate) struct CallTable(Mutex<CountedPaths>);

#[derive(Default)]
struct CountedPaths {
    all: Vec<(CallPath, Box<CallCounts>)>,
    /// Where each path is among them.
    index: HashMap<CallPath, usize>,
    /// Where the path of the last call is.
    last: usize,
}

impl CallTable {
    #[inline(always)]
    pub(crate) fn record(&self, call: &EndedCall) {
        let mut table = self.0.lock();
        let last = table.last;
        match table.all.get_mut(last) {
            // Most calls go the way of the one before.
            Some((path, counts)) if *path == call.path => counts.record(call),
            _ => table.counts_of(call.path).record(call),
        }
    }

    pub(crate) fn snapshot(&self) -> Vec<(CallPath, Box<CallCounts>)> {
        self.0.lock().all.clone()
    }
}

impl CountedPaths {
    #[inline(never)]
    fn counts_of(&mut self, mut path: CallPath) -> &mut CallCounts {
        if self.all.len() >= MAX_PATHS && !self.index.contains_key(&path) {
            path = CallPath { peer: PeerId::default(), provider: 0, parent: CallPath::OTHERS };
        }
        self.last = *self.index.entry(path).or_insert(self.all.len());
        if self.last == self.all.len() {
            self.all.push((path, Box::default()));
        }
        &mut self.all[self.last].1
    }
}

/// The calls of peers that one procedure has handled.
pub(crate) struct HandledCalls {
    pub provider: u16,
    pub name: Arc<str>,
    /// Identifies it within its engine; from 1.
    pub number: u32,
    counts: Mutex<HandlerCounts>,
}

#[derive(Clone, Default)]
pub(crate) struct HandlerCounts {
    pub calls: u64,
    pub errors: ErrorCounts,
    pub received_bytes: u64,
    pub sent_bytes: u64,
    /// From the arrival to the beginning of the handler.
    pub waiting: Histogram,
    /// From the beginning of the handler to the response.
    pub running: Histogram,
}

impl HandlerCounts {
    #[inline]
    fn answered(&mut self, sent: usize, error: Option<&'static str>, ran: u64) {
        self.calls += 1;
        self.sent_bytes += sent as u64;
        self.running.record(ran);
        if let Some(kind) = error {
            self.errors.count(kind);
        }
    }
}

impl HandledCalls {
    /// A call was answered after its handler had returned, or might have; it took so many nanoseconds.
    pub(crate) fn answered(&self, sent: usize, error: Option<&'static str>, ran: u64) {
        self.counts.lock().answered(sent, error, ran);
    }

    /// A handler has returned; its call has waited for it, and it took, so many nanoseconds.
    /// `sent`: what it has answered meanwhile.
    pub(crate) fn returned(&self, received: usize, sent: Option<usize>, error: Option<&'static str>, waited: u64, ran: u64) {
        let mut counts = self.counts.lock();
        counts.received_bytes += received as u64;
        counts.waiting.record(waited);
        if let Some(sent) = sent {
            counts.answered(sent, error, ran);
        }
    }

    pub(crate) fn snapshot(&self) -> HandlerCounts {
        self.counts.lock().clone()
    }
}

/// The transfers of one direction and size class.
#[derive(Clone, Default)]
pub(crate) struct TransferCounts {
    pub transfers: u64,
    pub bytes: u64,
    pub errors: ErrorCounts,
    pub time: Histogram,
}

/// By direction, and the largest size of a class.
type TransferTable = BTreeMap<(TransferDirection, u64), Box<TransferCounts>>;

/// By provider and name.
type HandledTable = BTreeMap<(u16, Arc<str>), Arc<HandledCalls>>;

/// What an engine measures, but for the calls that it makes: their counts are with their procedures.
pub(crate) struct Statistics {
    on: bool,
    pub began: Instant,
    /// Of the engine, within its process; from 1.
    pub number: u64,
    /// Where the statistics are written to in the end.
    pub file: Option<PathBuf>,
    handled: Mutex<HandledTable>,
    /// Calls of peers that named no procedure that is defined.
    pub unknown: AtomicU64,
    transfers: Mutex<TransferTable>,
}

impl Statistics {
    pub(crate) fn new(on: bool, file: Option<PathBuf>) -> Statistics {
        static ENGINES: AtomicU64 = AtomicU64::new(0);
        Statistics {
            on,
            began: Instant::now(),
            number: ENGINES.fetch_add(1, Ordering::Relaxed) + 1,
            file,
            handled: Mutex::default(),
            unknown: AtomicU64::new(0),
            transfers: Mutex::default(),
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Where the calls of a procedure are counted that is being defined; the same if it was defined before. `None` where nothing
    /// is measured. Only defined procedures have an entry: peers can't make entries by calling names that they make up.
    pub(crate) fn handled(&self, provider: u16, name: &str) -> Option<Arc<HandledCalls>> {
        if !self.on {
            return None;
        }
        let mut all = self.handled.lock();
        let number = all.len() as u32 + 1;
        let mut key: (u16, Arc<str>) = (provider, name.into());
        if all.len() >= MAX_HANDLED && !all.contains_key(&key) {
            key = (0, "(others)".into());
        }
        let new = |(provider, name): &(u16, Arc<str>)| {
            Arc::new(HandledCalls { provider: *provider, name: name.clone(), number, counts: Mutex::default() })
        };
        Some(all.entry(key).or_insert_with_key(new).clone())
    }

    /// All procedures that have handled calls, or could have.
    pub(crate) fn all_handled(&self) -> Vec<Arc<HandledCalls>> {
        self.handled.lock().values().cloned().collect()
    }

    /// A transfer of `len` bytes has ended, after so many nanoseconds.
    pub(crate) fn record_transfer(
        &self,
        direction: TransferDirection,
        len: usize,
        time: u64,
        result: std::result::Result<usize, &Error>,
    ) {
        let class = SIZE_CLASSES.into_iter().find(|largest| len as u64 <= *largest).unwrap_or(u64::MAX);
        let mut transfers = self.transfers.lock();
        let counts = transfers.entry((direction, class)).or_default();
        counts.transfers += 1;
        counts.time.record(time);
        match result {
            Ok(bytes) => counts.bytes += bytes as u64,
            Err(error) => counts.errors.count(error.kind()),
        }
    }

    pub(crate) fn transfers(&self) -> Vec<((TransferDirection, u64), TransferCounts)> {
        self.transfers.lock().iter().map(|(class, counts)| (*class, (**counts).clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_by_more_paths_than_the_limit_are_counted_together() {
        let table = CallTable::default();
        for parent in 0..2000 {
            let path = CallPath { peer: PeerId::default(), provider: 1, parent };
            table.record(&EndedCall { path, sent: 1, received: 2, time: None, error: Some("Timeout") });
        }
        let found = table.snapshot();
        assert_eq!(found.len(), MAX_PATHS + 1);
        let (path, counts) = found.last().unwrap();
        assert_eq!((path.parent, counts.calls), (CallPath::OTHERS, 2000 - MAX_PATHS as u64));
        assert_eq!(found.iter().map(|(_, counts)| counts.received_bytes).sum::<u64>(), 4000);
    }

    #[test]
    fn procedures_that_come_and_go_take_bounded_memory() {
        let statistics = Statistics::new(true, None);
        let first = statistics.handled(3, "again").unwrap();
        for number in 0..2 * MAX_HANDLED {
            statistics.handled(0, &number.to_string()).unwrap();
        }
        assert!(statistics.all_handled().len() <= MAX_HANDLED + 1);
        let others = statistics.handled(0, "one more").unwrap();
        assert!(Arc::ptr_eq(&others, &statistics.handled(7, "another one").unwrap()));
        assert_eq!((first.number, &*others.name), (1, "(others)"));
        assert!(Arc::ptr_eq(&first, &statistics.handled(3, "again").unwrap()));
        assert!(Statistics::new(false, None).handled(0, "off").is_none());
    }
}
