//! Distributions of durations: how they are counted, and what users see of them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets of a histogram: four for each power of two of nanoseconds, from 4 ns to 2^38 ns, which is 275 s.
const BUCKETS: usize = 144;
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

/// A distribution of durations. They are counted in buckets, four for each power of two, so a quantile is up to a quarter above
/// the exact one. What takes more than 4.5 minutes is counted in one bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Latency {
    /// How many durations there are.
    pub count: u64,
    /// Their sum.
    #[serde(with = "nanoseconds")]
    pub total: Duration,
    /// The median.
    #[serde(with = "nanoseconds")]
    pub p50: Duration,
    /// Nine of ten are not above it.
    #[serde(with = "nanoseconds")]
    pub p90: Duration,
    /// 99 of 100 are not above it.
    #[serde(with = "nanoseconds")]
    pub p99: Duration,
    /// The longest; exact.
    #[serde(with = "nanoseconds")]
    pub max: Duration,
    /// The buckets that are not empty, in order: their upper ends in nanoseconds, and how many durations are below that and not
    /// in an earlier bucket.
    pub buckets: Vec<(u64, u64)>,
}

impl Latency {
    pub(crate) fn new(histogram: &Histogram) -> Latency {
        let buckets: Vec<(u64, u64)> = histogram.buckets().collect();
        let (total, max) = (Duration::from_nanos(histogram.total), Duration::from_nanos(histogram.max));
        let count = buckets.iter().map(|(_, count)| count).sum();
        let mut latency = Latency { count, total, max, buckets, ..Latency::default() };
        latency.p50 = latency.quantile(0.5);
        latency.p90 = latency.quantile(0.9);
        latency.p99 = latency.quantile(0.99);
        latency
    }

    /// The mean; zero where there is none.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(u64::try_from(self.total.as_nanos()).unwrap_or(u64::MAX).checked_div(self.count).unwrap_or(0))
    }

    /// The duration that this part of them is not above: 0.999 for all but one in a thousand. Zero where there are none.
    pub fn quantile(&self, part: f64) -> Duration {
        let rank = ((self.count as f64 * part).ceil() as u64).max(1);
        let mut below = 0;
        let bucket = self.buckets.iter().find(|(_, count)| {
            below += count;
            below >= rank
        });
        bucket.map_or(self.max, |(end, _)| self.max.min(Duration::from_nanos(*end)))
    }
}

/// Durations as numbers, for what people read as JSON.
pub(crate) mod nanoseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_nanos)
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
}
