//! How records are written into the ring: through the caches, or past them.
//!
//! What a processor has in its caches, another one fetches line by line. That is fast where the two share a cache, and slow where
//! they do not: of two machines' states that were measured, 64 bytes there and back take 0.2 µs in one and 0.63 µs in the other, and
//! a ring that is written through the caches moves 5.7 GB/s and 1.9 GB/s. What is written past the caches takes some 0.2 µs longer to
//! arrive, and then moves at 9 GB/s in both. So long records always go past the caches, and others where the caches are far apart,
//! which the writer notices: it has to wait for the lines of the ring, which the reader had last.

use std::time::{Duration, Instant};

use crate::memory::CopyPath;

/// Records of this length, and longer ones, always go past the caches.
const LONG: usize = 8 << 10;
/// Shorter ones never do: they take a few lines.
const SHORT: usize = 256;
/// A record of this length is longer than what a processor can have waiting to be written, so that it shows the pace.
const MEASURED: usize = 4 << 10;
/// The caches are far apart where it takes longer to write so many bytes, in nanoseconds. On the machine above it takes 80, or 300.
const FAR: u32 = 200;
const BYTES: u32 = 1000;
/// One measurement counts as no more than this, and as a quarter of the average: the writer may have been interrupted.
const MOST: u32 = 500;
/// Records that could be measured, between two that are.
const BETWEEN: u32 = 64;

/// The writer's choice for one ring.
///
/// ```text
///   close ◀──every BETWEEN records, one is measured, written through the caches──▶ far
/// ```
#[derive(Default)]
pub(super) struct RingPath {
    /// How long it takes to write [`BYTES`] bytes through the caches, in nanoseconds, on average.
    pace: u32,
    /// Records until the next measurement.
    rest: u32,
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
        match len {
            ..SHORT => Writing { path: CopyPath::Cached, measured: None },
            LONG.. => Writing { path: CopyPath::Streaming, measured: None },
            _ => self.begin_medium(len),
        }
    }

    fn begin_medium(&mut self, len: usize) -> Writing {
        if len >= MEASURED {
            if self.rest == 0 {
                return Writing { path: CopyPath::Cached, measured: Some(Instant::now()) };
            }
            self.rest -= 1;
        }
        Writing { path: if self.pace > FAR { CopyPath::Streaming } else { CopyPath::Cached }, measured: None }
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
        self.pace = (3 * self.pace + pace).div_ceil(4);
        self.rest = BETWEEN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes records on a machine where [`BYTES`] bytes take so long; how many of them went past the caches.
    fn written(path: &mut RingPath, records: u32, len: usize, mut pace: impl FnMut(u32) -> u64) -> u32 {
        let mut past = 0;
        for number in 0..records {
            let writing = path.begin(len);
            past += u32::from(writing.path == CopyPath::Streaming);
            if writing.measured.is_some() {
                path.note(Duration::from_nanos(pace(number) * len as u64 / u64::from(BYTES)), len);
            }
        }
        past
    }

    #[test]
    fn long_records_go_past_the_caches_and_short_ones_through_them_wherever_the_reader_is() {
        for pace in [80, 300] {
            let mut path = RingPath::default();
            written(&mut path, 1000, MEASURED, |_| pace);
            assert_eq!([0, 64, SHORT - 1, LONG, 16 << 10].map(|len| written(&mut path, 10, len, |_| 0)), [0, 0, 0, 10, 10]);
        }
    }

    /// And where it goes to while they are written.
    #[test]
    fn others_go_past_the_caches_where_the_reader_is_far() {
        let mut path = RingPath::default();
        for _ in 0..3 {
            let turn = written(&mut path, 4 * (BETWEEN + 1), MEASURED, |_| 80);
            assert_eq!(written(&mut path, 1000, MEASURED, |_| 80), 0, "{turn}");
            assert_eq!(written(&mut path, 1000, SHORT, |_| 80), 0);
            written(&mut path, 4 * (BETWEEN + 1), MEASURED, |_| 300);
            assert!(written(&mut path, 1000, MEASURED, |_| 300) >= 980);
            assert_eq!(written(&mut path, 1000, SHORT, |_| 300), 1000);
        }
    }

    #[test]
    fn single_interruption_changes_nothing() {
        let mut path = RingPath::default();
        written(&mut path, 1000, MEASURED, |_| 80);
        let mut interrupted = false;
        assert_eq!(
            written(&mut path, 1000, MEASURED, |_| if std::mem::replace(&mut interrupted, true) { 80 } else { 1 << 20 }),
            0
        );
    }
}
