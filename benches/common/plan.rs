//! The measurement plan: how many rounds and iterations, and when a round is repeated.

use std::{
    cell::{Cell, RefCell},
    env, thread,
    time::Duration,
};

use super::{Outcome, cpu, stats::Series};

/// The pause between two rounds: long enough for both sides to stop spinning and to park.
const SETTLE: Duration = Duration::from_millis(20);
const SETTLE_QUICK: Duration = Duration::from_millis(5);

/// How many rounds may be repeated in a whole run, which bounds its duration on a busy machine.
const RETRIES: usize = 40;

/// The pause before a round is repeated.
const RETRY: Duration = Duration::from_millis(200);

/// The number of rounds and iterations, and how many rounds were disturbed.
pub struct Plan {
    pub quick: bool,
    pub rounds: usize,
    /// Rounds that other processes disturb are repeated.
    pub repeats: bool,
    /// The benchmark's other processes, while they run.
    pub servers: RefCell<Vec<u32>>,
    /// Rounds that were disturbed by other processes and repeated.
    pub repeated: Cell<usize>,
    /// Disturbed rounds that count nevertheless, since the limit of repetitions was reached.
    pub disturbed: Cell<usize>,
}

impl Plan {
    pub fn from_environment() -> Plan {
        let asked = env::args().any(|argument| argument == "quick");
        let quick = asked || env::var_os("CALOMEL_BENCH_QUICK").is_some_and(|value| value != "0");
        let rounds = if quick { 3 } else { 7 };
        Plan {
            quick,
            rounds,
            repeats: !quick,
            servers: RefCell::default(),
            repeated: Cell::default(),
            disturbed: Cell::default(),
        }
    }

    /// Iterations in a round.
    pub fn count(&self, full: usize) -> usize {
        if self.quick { full.div_ceil(5) } else { full }
    }

    /// Runs `round` as often as the plan requires, and repeats it when other processes disturbed it.
    pub fn rounds<R>(&self, mut round: impl FnMut() -> Outcome<R>) -> Outcome<Vec<R>> {
        let mut taken = Vec::new();
        while taken.len() < self.rounds {
            let others = cpu::Others::watch(&self.servers.borrow())?;
            let samples = round()?;
            let disturbed = others.disturbed()?;
            if disturbed && self.repeats && self.repeated.get() < RETRIES {
                self.repeated.update(|count| count + 1);
                thread::sleep(RETRY);
                continue;
            }
            self.disturbed.update(|count| count + usize::from(disturbed));
            taken.push(samples);
        }
        Ok(taken)
    }

    fn settle(&self) -> Duration {
        if self.quick { SETTLE_QUICK } else { SETTLE }
    }

    /// The samples of one round of one side.
    pub fn take(&self, measure: Round<'_>) -> Outcome<Vec<f64>> {
        thread::sleep(self.settle());
        let mut samples = Vec::new();
        measure(&mut samples)?;
        Ok(samples)
    }
}

/// Takes the samples of one round.
type Round<'a> = &'a mut dyn FnMut(&mut Vec<f64>) -> Outcome;

/// Runs rounds alternately: ours, raw, ours, raw, and so on.
pub fn interleave(
    plan: &Plan,
    mut ours: impl FnMut(&mut Vec<f64>) -> Outcome,
    mut raw: impl FnMut(&mut Vec<f64>) -> Outcome,
) -> Outcome<(Series, Series)> {
    let [ours, raw] = interleave_all(plan, [&mut ours, &mut raw])?;
    Ok((ours, raw))
}

/// The same with any number of sides.
pub fn interleave_all<const N: usize>(plan: &Plan, mut sides: [Round<'_>; N]) -> Outcome<[Series; N]> {
    let rounds = plan.rounds(|| sides.iter_mut().map(|side| plan.take(*side)).collect::<Outcome<Vec<_>>>())?;
    Ok(std::array::from_fn(|side| Series::new(rounds.iter().map(|round| round[side].clone()).collect())))
}

/// Rounds of a figure without a raw reference.
pub fn alone(plan: &Plan, mut ours: impl FnMut(&mut Vec<f64>) -> Outcome) -> Outcome<Series> {
    let [series] = interleave_all(plan, [&mut ours])?;
    Ok(series)
}
