//! Samples of times: their percentiles, and a picture of their distribution.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::units;

/// Percentiles of some times, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Percentiles {
    pub min: u64,
    pub median: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
}

/// Percentiles by the nearest rank; `None` of no samples.
pub(crate) fn percentiles(samples: &[u64]) -> Option<Percentiles> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let (&min, &max) = (sorted.first()?, sorted.last()?);
    let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
    Some(Percentiles { min, median: at(50), p90: at(90), p99: at(99), max })
}

/// Longest bar, in characters.
const WIDTH: usize = 50;
/// Most bars.
const BARS: usize = 12;

/// A bar for each class of times, four to a power of two or, where these would be too many, two or one.
pub(crate) fn bars(samples: &[u64]) -> String {
    let class_of = |ns: u64, per_octave: f64| ((ns.max(1) as f64).log2() * per_octave).floor() as i32;
    let (Some(&min), Some(&max)) = (samples.iter().min(), samples.iter().max()) else { return String::new() };
    let fits = |per_octave: &f64| (class_of(max, *per_octave) - class_of(min, *per_octave)) < BARS as i32;
    let per_octave = [4.0, 2.0, 1.0].into_iter().find(fits).unwrap_or(0.5);
    let (first, last) = (class_of(min, per_octave), class_of(max, per_octave));
    let mut counts = vec![0usize; (last - first) as usize + 1];
    for &sample in samples {
        counts[(class_of(sample, per_octave) - first) as usize] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let mut text = String::new();
    for (class, count) in (first..).zip(&counts) {
        let bound = |class: i32| units::time((f64::from(class) / per_octave).exp2());
        let bar = "#".repeat((count * WIDTH).div_ceil(most));
        // Writing to a string can't fail.
        let _ = writeln!(text, "  {:>9} to {:>9}  {count:>7}  {bar}", bound(class), bound(class + 1));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        assert_eq!(percentiles(&[]), None);
        assert_eq!(percentiles(&[7]), Some(Percentiles { min: 7, median: 7, p90: 7, p99: 7, max: 7 }));
        let samples: Vec<u64> = (1..=200).rev().collect();
        assert_eq!(percentiles(&samples), Some(Percentiles { min: 1, median: 100, p90: 180, p99: 198, max: 200 }));
    }

    #[test]
    fn bars_count_each_sample_once_and_are_few() {
        let samples = [0, 1, 1_000, 1_100, 1_000_000, u64::MAX];
        let picture = bars(&samples);
        let counts: Vec<usize> =
            picture.lines().map(|line| line.split_whitespace().rev().find_map(|w| w.parse().ok()).unwrap()).collect();
        assert_eq!(counts.iter().sum::<usize>(), samples.len(), "{picture}");
        assert!(counts.len() <= 33, "{picture}");
        assert_eq!(bars(&[5_000; 3]).lines().count(), 1);
        assert_eq!(bars(&[]), "");
    }
}
