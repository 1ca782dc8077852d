//! How frames and short payloads are written into the ring: through the caches, or past them.
//!
//! What a processor has in its caches, another one fetches line by line. That is fast where the two share a cache, and slow where
//! they do not. What is written past the caches takes longer to begin to arrive, and then arrives at the same pace wherever the
//! reader is. Measured on one machine, whose two processors are now close and now far from each other: through the caches, a ring
//! moves 5.7 GB/s and 1.9 GB/s; past them, 9 GB/s. A record of 4 KiB, there and a word back, takes 0.75 and 2.7 µs, past them 0.85
//! and 1.2 µs; one of 16 KiB 2.4 and 9.1 µs, past them 1.9 and 2.1 µs.
//!
//! The writer notices how far the reader is: it has to wait for the lines of the ring, which the reader had last. For longer
//! payloads the reader measures, and asks for a way: see `copy_choice`.

use std::time::{Duration, Instant};

use crate::memory::CopyPath;

/// Shorter records always go through the caches: they take a few lines.
const SHORT: usize = 256;
/// A record of this length is longer than what a processor can have waiting to be written, so that it shows the pace.
const MEASURED: usize = 4 << 10;
/// From this length on, to begin earlier is worth less than to arrive faster.
const LONG: usize = 8 << 10;
/// What the pace is measured by.
const BYTES: u32 = 1000;
/// Long records go past the caches where it takes longer to write [`BYTES`] through them, in nanoseconds. On the machine above it
/// took 80, or 300.
const CLOSE: u32 = 60;
/// Other records go past them where it takes longer than this.
const FAR: u32 = 200;
/// One measurement counts as no more than this, and as a quarter of the average: the writer may have been interrupted.
const MOST: u32 = 500;
/// Records that could be measured, between two that are. Where the reader is far, one costs as much as several others.
const BETWEEN: u32 = 255;

/// The pace that is assumed before it is known.
const USUAL: u32 = 100;

/// The writer's choice for one ring.
pub(super) struct RingPath {
    /// How long it takes to write [`BYTES`] bytes through the caches, in nanoseconds, on average.
    pace: u32,
    /// Records until the next measurement.
    rest: u32,
}

impl Default for RingPath {
    fn default() -> Self {
        RingPath { pace: USUAL, rest: 0 }
    }
}

/// A record that is being written.
pub(super) struct Writing {
    pub path: CopyPath,
    measured: Option<Instant>,
}

impl RingPath {
    /// A record with a body of `len` bytes is to be written.
    #[inline]
    pub(super) fn begin(&mut self, len: usize) -> Writing {
        if len < SHORT { Writing { path: CopyPath::Cached, measured: None } } else { self.begin_longer(len) }
    }

    fn begin_longer(&mut self, len: usize) -> Writing {
        if len >= MEASURED {
            if self.rest == 0 {
                self.rest = BETWEEN;
                return Writing { path: CopyPath::Cached, measured: Some(Instant::now()) };
            }
            self.rest -= 1;
        }
        let most = if len >= LONG { CLOSE } else { FAR };
        Writing { path: if self.pace > most { CopyPath::Streaming } else { CopyPath::Cached }, measured: None }
    }

    /// It has been written.
    #[inline]
    pub(super) fn end(&mut self, writing: &Writing, len: usize) {
        if let Some(begun) = writing.measured {
            self.note(begun.elapsed(), len);
        }
    }

    fn note(&mut self, taken: Duration, len: usize) {
        let pace = (taken.as_nanos() as u64 * u64::from(BYTES) / len as u64).min(MOST.into()) as u32;
        self.pace = (3 * self.pace + pace) / 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes records on a machine where [`BYTES`] bytes take so long; how many of them went past the caches.
    fn written(path: &mut RingPath, records: u32, len: usize, mut pace: impl FnMut() -> u64) -> u32 {
        let mut past = 0;
        for _ in 0..records {
            let writing = path.begin(len);
            past += u32::from(writing.path == CopyPath::Streaming);
            if writing.measured.is_some() {
                path.note(Duration::from_nanos(pace() * len as u64 / u64::from(BYTES)), len);
            }
        }
        past
    }

    /// And where it goes to while they are written.
    #[test]
    fn path_depends_on_the_length_and_on_where_the_reader_is() {
        let mut path = RingPath::default();
        for (pace, medium, long) in
            [(30, false, false), (80, false, true), (300, true, true), (80, false, true), (30, false, false)]
        {
            written(&mut path, 12 * (BETWEEN + 1), LONG, || pace);
            for (len, expected) in [(SHORT - 1, false), (SHORT, medium), (MEASURED, medium), (LONG - 1, medium), (LONG, long)] {
                let past = written(&mut path, 1000, len, || pace);
                assert!(if expected { past > 990 } else { past == 0 }, "{pace} {len}: {past}");
            }
        }
    }

    #[test]
    fn single_interruption_changes_nothing() {
        let mut path = RingPath::default();
        written(&mut path, 1000, MEASURED, || 80);
        let mut interrupted = false;
        let pace = || if std::mem::replace(&mut interrupted, true) { 80 } else { 1 << 20 };
        assert_eq!(written(&mut path, 10 * BETWEEN, MEASURED, pace), 0);
    }
}
