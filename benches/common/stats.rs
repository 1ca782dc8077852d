//! Samples in rounds, and their statistics.

use std::time::Instant;

/// The samples of one figure, kept by round so that they can be compared in pairs with the neighbouring raw rounds.
pub struct Series {
    rounds: Vec<Vec<f64>>,
}

impl Series {
    /// # Panics
    /// If a round is empty.
    pub fn new(rounds: Vec<Vec<f64>>) -> Series {
        assert!(rounds.iter().all(|round| !round.is_empty()), "a round without a sample");
        Series { rounds }
    }

    /// Sums sample by sample, round by round.
    pub fn plus(&self, other: &Series) -> Series {
        let sums = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a + b).collect();
        Series::new(self.rounds.iter().zip(&other.rounds).map(sums).collect())
    }

    /// The one with the lower median.
    pub fn faster(a: (&'static str, Series), b: (&'static str, Series)) -> (&'static str, Series) {
        if a.1.summary().median <= b.1.summary().median { a } else { b }
    }

    /// # Panics
    /// If nothing was measured.
    pub fn summary(&self) -> Summary {
        let mut all: Vec<f64> = self.rounds.iter().flatten().copied().collect();
        all.sort_by(f64::total_cmp);
        Summary {
            median: percentile(&all, 0.5),
            min: percentile(&all, 0.0),
            p99: percentile(&all, 0.99),
            samples: all.len(),
            rounds: self.rounds.iter().map(|round| median(round.clone())).collect(),
            tails: self.rounds.iter().map(|round| tail(round.clone())).collect(),
        }
    }
}

/// Times are in nanoseconds.
pub struct Summary {
    pub median: f64,
    pub min: f64,
    pub p99: f64,
    pub samples: usize,
    /// The median of each round.
    pub rounds: Vec<f64>,
    /// The 99th percentile of each round.
    pub tails: Vec<f64>,
}

impl Summary {
    /// The median of the ratios of neighbouring rounds. When the machine changes its speed during a run, both sides of a pair
    /// change; the quotient of two overall medians would mix the speeds.
    pub fn ratio_to(&self, raw: &Summary) -> f64 {
        paired(&self.rounds, &raw.rounds)
    }

    /// The same for the 99th percentiles.
    pub fn tail_ratio_to(&self, raw: &Summary) -> f64 {
        paired(&self.tails, &raw.tails)
    }
}

/// Turns the progress of a round into rate samples: the average time of an operation over [`Pace::BATCH`] of them.
pub struct Pace<'a> {
    samples: &'a mut Vec<f64>,
    /// The start of the current sample: operations done, and the time. `None` during the warm-up.
    begun: Option<(usize, Instant)>,
    next: usize,
}

impl<'a> Pace<'a> {
    const BATCH: usize = 100;

    /// The first `warm_up` operations are not timed.
    pub fn new(warm_up: usize, samples: &'a mut Vec<f64>) -> Pace<'a> {
        Pace { samples, begun: None, next: warm_up }
    }

    /// Records that `done` operations of the round are complete. If called often, a sample covers little more than a batch.
    pub fn reached(&mut self, done: usize) {
        if done < self.next {
            return;
        }
        let now = Instant::now();
        if let Some((before, begun)) = self.begun {
            self.samples.push((now - begun).as_nanos() as f64 / (done - before) as f64);
        }
        self.begun = Some((done, now));
        self.next = done + Self::BATCH;
    }
}

fn paired(ours: &[f64], raw: &[f64]) -> f64 {
    median(ours.iter().zip(raw).map(|(ours, raw)| ours / raw).collect())
}

fn tail(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    percentile(&values, 0.99)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    percentile(&values, 0.5)
}

/// Nearest rank, of sorted values.
fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let rank = (sorted.len() as f64 * fraction).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}
