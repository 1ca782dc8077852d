//! What an engine measures of calls, handlers and transfers. `stats.rs` makes what users see of it.
//!
//! An empty call takes a few microseconds, so each of these is a lock that is hardly ever contended, and plain additions: that
//! takes less than atomic operations on each of the numbers would.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::Error;
use crate::proto::TransferDirection;
use crate::sync::Mutex;

/// Buckets of a histogram: four for each power of two of nanoseconds, from 4 ns to 2^38 ns, which is 275 s.
const BUCKETS: usize = 144;
/// Combinations of provider and calling handler that are counted apart, for each procedure that is called; others are counted
/// together.
const MAX_PATHS: usize = 64;
/// Procedures whose handlers are counted apart.
const MAX_HANDLED: usize = 4096;
/// Transfers of up to so many bytes are counted together.
const SIZE_CLASSES: [u64; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, u64::MAX];

/// Counts of durations, by buckets of a quarter of a power of two.
#[derive(Clone)]
pub(crate) struct Histogram {
    counts: [u64; BUCKETS],
    /// In nanoseconds: it wraps after 584 years.
    pub total: u64,
    pub max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [0; BUCKETS], total: 0, max: 0 }
    }
}

impl Histogram {
    /// Records a duration in nanoseconds.
    #[inline]
    pub(crate) fn record(&mut self, nanos: u64) {
        self.counts[Histogram::bucket(nanos)] += 1;
        self.total = self.total.wrapping_add(nanos);
        self.max = self.max.max(nanos);
    }

    #[inline]
    fn bucket(nanos: u64) -> usize {
        let nanos = nanos.max(4);
        let power = nanos.ilog2();
        let quarter = (nanos >> (power - 2)) as usize - 4;
        (4 * (power as usize - 2) + quarter).min(BUCKETS - 1)
    }

    /// The buckets that have counts: their upper ends, which are not within them, and the counts.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let end = |index: usize| (5 + index as u64 % 4) << (index / 4);
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(move |(index, count)| (end(index), *count))
    }

    pub(crate) fn add(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.total = self.total.wrapping_add(other.total);
        self.max = self.max.max(other.max);
    }
}

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallPath {
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
    #[inline]
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
pub(crate) struct CallTable(Mutex<Vec<(CallPath, CallCounts)>>);

impl CallTable {
    #[inline(always)]
    pub(crate) fn record(&self, call: &EndedCall) {
        let mut table = self.0.lock();
        match table.first_mut() {
            // Most procedures are called in one way.
            Some((path, counts)) if *path == call.path => counts.record(call),
            _ => CallTable::counts_of(&mut table, call.path).record(call),
        }
    }

    #[inline(never)]
    fn counts_of(table: &mut Vec<(CallPath, CallCounts)>, path: CallPath) -> &mut CallCounts {
        let others = CallPath { provider: 0, parent: CallPath::OTHERS };
        let find = |table: &[(CallPath, CallCounts)], path| table.iter().position(|(known, _)| *known == path);
        let path = if table.len() < MAX_PATHS || find(table, path).is_some() { path } else { others };
        let index = find(table, path).unwrap_or_else(|| {
            table.push((path, CallCounts::default()));
            table.len() - 1
        });
        &mut table[index].1
    }

    pub(crate) fn snapshot(&self) -> Vec<(CallPath, CallCounts)> {
        self.0.lock().clone()
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
    fn a_bucket_holds_what_is_below_its_end_and_no_more_than_a_quarter_below() {
        let mut nanos = 1;
        while nanos < 1 << 38 {
            let mut histogram = Histogram::default();
            histogram.record(nanos);
            let [(end, 1)] = histogram.buckets().collect::<Vec<_>>()[..] else { panic!("{nanos}") };
            assert!(nanos < end && (nanos < 4 || end - nanos <= nanos / 4 + 1), "{nanos} ns in the bucket that ends at {end}");
            nanos += nanos / 7 + 1;
        }
        // All that is longer is in the last one.
        assert_eq!(Histogram::bucket(1 << 38), BUCKETS - 1);
        assert_eq!(Histogram::bucket((1 << 38) - 1), BUCKETS - 1);
        assert_eq!(Histogram::bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn calls_by_more_than_64_paths_are_counted_together() {
        let table = CallTable::default();
        for parent in 0..1000 {
            let path = CallPath { provider: 1, parent };
            table.record(&EndedCall { path, sent: 1, received: 2, time: None, error: Some("Timeout") });
        }
        let found = table.snapshot();
        assert_eq!(found.len(), MAX_PATHS + 1);
        let (path, counts) = found.last().unwrap();
        assert_eq!((path.parent, counts.calls), (CallPath::OTHERS, 1000 - MAX_PATHS as u64));
        assert_eq!(found.iter().map(|(_, counts)| counts.received_bytes).sum::<u64>(), 2000);
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
