//! Which way large payloads take: through the ring, or copied by the kernel. The side that receives them measures both, and
//! asks the sender for the faster one. It needs no clock of its own: it is told how long each payload took.

/// How a payload gets from one memory to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyWay {
    /// Two copies, by both sides at the same time.
    Ring,
    /// One copy, by the receiver's system call.
    Kernel,
}

/// Payloads of the way that is not used, in one trial. The first ones are not measured, see `ShmInbox::measure`.
const TRIAL: u32 = 4;
/// A trial may cost this part of the time between two trials, as a divisor.
const WORTH: f64 = 50.0;
/// Payloads between two trials, at least.
const BETWEEN: f64 = 64.0;
/// Payloads over which the pace of a way is averaged. A sender that shares its processor stands still for milliseconds now and
/// then, which a short average would either miss or take for the rule.
const REMEMBERED: u32 = 128;
/// As how many payloads the pace from an earlier time counts, when a way is used again: the machine may have changed.
const STALE: u32 = 16;
/// The other way is taken where it needs less than this part of the time: less is not worth a change.
const GAIN: f64 = 0.95;
/// A payload of a trial counts as at most so many of the settled way: one pause must not put off trials for long.
const DEAREST: f64 = 8.0;

/// Average nanoseconds per byte.
#[derive(Clone, Copy, Default)]
struct Pace {
    average: f64,
    samples: u32,
}

impl Pace {
    fn add(&mut self, pace: f64) {
        self.samples = (self.samples + 1).min(REMEMBERED);
        self.average += (pace - self.average) / f64::from(self.samples);
    }
}

/// The choice for payloads of one size class that arrive over one link.
///
/// ```text
///   settled ──after a while──▶ trial of the other way ──TRIAL payloads──▶ settled, on the faster one
///      └──the other way was faster at its last trial──▶ settled, on that one
/// ```
pub(super) struct CopyChoice {
    ring: Pace,
    kernel: Pace,
    settled: CopyWay,
    /// Payloads of the other way that the trial still takes; 0: no trial.
    trial: u32,
    /// Nanoseconds of transfers until the next trial.
    rest: f64,
}

impl Default for CopyChoice {
    /// Settled on the ring, until its pace is known.
    fn default() -> Self {
        CopyChoice { ring: Pace::default(), kernel: Pace::default(), settled: CopyWay::Ring, trial: 0, rest: 0.0 }
    }
}

impl CopyChoice {
    /// The way that the next payload should take. The sender need not follow: what it can't lend goes through the ring, and
    /// payloads are under way already.
    pub(super) fn wanted(&self) -> CopyWay {
        if self.trial > 0 { self.other() } else { self.settled }
    }

    fn other(&self) -> CopyWay {
        match self.settled {
            CopyWay::Ring => CopyWay::Kernel,
            CopyWay::Kernel => CopyWay::Ring,
        }
    }

    fn pace(&mut self, way: CopyWay) -> &mut Pace {
        match way {
            CopyWay::Ring => &mut self.ring,
            CopyWay::Kernel => &mut self.kernel,
        }
    }

    /// A payload of `len` bytes has arrived by this way, and took so long.
    pub(super) fn arrived(&mut self, way: CopyWay, len: usize, nanoseconds: f64) {
        self.pace(way).add(nanoseconds / len as f64);
        let settled = *self.pace(self.settled);
        if way != self.settled {
            let usual = len as f64 * settled.average;
            self.rest += WORTH * (nanoseconds.min(DEAREST * usual) - usual).max(0.0);
            if self.trial > 0 {
                self.trial -= 1;
                if self.trial == 0 {
                    self.settle(len);
                }
            }
        } else if self.trial == 0 {
            self.rest -= nanoseconds;
            let other = self.other();
            if self.is_other_faster() {
                self.settle(len);
            } else if settled.samples >= TRIAL && self.rest <= 0.0 {
                self.trial = TRIAL;
                self.revive(other);
            }
        }
    }

    fn is_other_faster(&mut self) -> bool {
        let (settled, other) = (*self.pace(self.settled), *self.pace(self.other()));
        other.samples > 0 && other.average < GAIN * settled.average
    }

    fn revive(&mut self, way: CopyWay) {
        let pace = self.pace(way);
        pace.samples = pace.samples.min(STALE);
    }

    /// Settles on the faster way; a trial is over. `len` is the length of a payload as they arrive now.
    fn settle(&mut self, len: usize) {
        if self.is_other_faster() {
            self.settled = self.other();
            self.rest = 0.0;
            self.revive(self.settled);
        }
        let between = BETWEEN * len as f64 * self.pace(self.settled).average;
        self.rest = self.rest.max(0.0) + between;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 128 << 10;

    /// A machine, as what a payload takes by either way, in nanoseconds.
    fn transfer(choice: &mut CopyChoice, payloads: usize, mut takes: impl FnMut(usize, CopyWay) -> f64) -> f64 {
        let mut total = 0.0;
        for number in 0..payloads {
            let way = choice.wanted();
            let nanoseconds = takes(number, way);
            choice.arrived(way, LEN, nanoseconds);
            total += nanoseconds;
        }
        total
    }

    fn paced(ring: f64, kernel: f64) -> impl Fn(usize, CopyWay) -> f64 {
        move |_, way| if way == CopyWay::Ring { ring } else { kernel }
    }

    #[test]
    fn transfers_take_hardly_longer_than_by_the_faster_way() {
        for (ring, kernel) in [(5e3, 20e3), (20e3, 5e3), (10e3, 13e3), (13e3, 10e3), (10e3, 10.5e3), (10e3, 10e3), (40e3, 4e3)] {
            let mut choice = CopyChoice::default();
            let total = transfer(&mut choice, 20_000, paced(ring, kernel));
            let ratio = total / (20_000.0 * ring.min(kernel));
            assert!(ratio < 1.06, "{ring} {kernel}: {ratio}");
        }
    }

    /// Ring and kernel swap their paces, there and back.
    #[test]
    fn choice_follows_a_machine_that_changes() {
        let mut choice = CopyChoice::default();
        transfer(&mut choice, 20_000, paced(5e3, 20e3));
        for (ring, kernel) in [(20e3, 5e3), (5e3, 20e3), (20e3, 5e3)] {
            let ratio = transfer(&mut choice, 5_000, paced(ring, kernel)) / (5_000.0 * 5e3);
            assert!(ratio < 1.5, "{ring} {kernel}: {ratio}");
            let ratio = transfer(&mut choice, 5_000, paced(ring, kernel)) / (5_000.0 * 5e3);
            assert!(ratio < 1.03, "{ring} {kernel}, later: {ratio}");
        }
    }

    /// The owner shares its processor: every so often the ring stands still. The kernel's copy is slower than the ring while the
    /// ring moves, and faster on average.
    #[test]
    fn way_that_often_stands_still_is_left() {
        let mut choice = CopyChoice::default();
        let total = transfer(&mut choice, 20_000, |number, way| match way {
            CopyWay::Ring if number % 100 == 50 => 3e6,
            CopyWay::Ring => 10e3,
            CopyWay::Kernel => 15e3,
        });
        assert!(total < 1.25 * 20_000.0 * 15e3, "{}", total / (20_000.0 * 15e3));
    }

    #[test]
    fn one_long_pause_is_forgotten() {
        let mut choice = CopyChoice::default();
        transfer(&mut choice, 2_000, paced(5e3, 20e3));
        let total = transfer(&mut choice, 2_000, |number, way| if number == 0 { 3e6 } else { paced(5e3, 20e3)(number, way) });
        assert!(choice.settled == CopyWay::Ring && total < 1.9 * 2_000.0 * 5e3, "{total}");
    }

    /// A sender that may not lend, or lends all, whatever this side asks for.
    #[test]
    fn sender_that_does_not_follow_is_put_up_with() {
        for way in [CopyWay::Ring, CopyWay::Kernel] {
            let mut choice = CopyChoice::default();
            (0..1000).for_each(|_| choice.arrived(way, LEN, 1e4));
            // Then it follows.
            let total = transfer(&mut choice, 5_000, paced(8e3, 5e3));
            assert!(total < 1.1 * 5_000.0 * 5e3, "{way:?}: {total}");
        }
    }
}
