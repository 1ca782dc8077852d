//! Which way large payloads take: through the ring, within the caches or past them, or copied by the kernel. Which is the fastest
//! depends on what caches the two processors share, on the length, and on what else the machine does. The side that receives the
//! payloads measures all, and asks the sender for the fastest. It needs no clock of its own: it is told how long each payload took.

use crate::memory::CopyPath;

/// How a payload gets from one memory to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyWay {
    /// Two copies, by both sides at the same time, within their caches.
    Ring,
    /// The same, but that the sender writes past its caches.
    PastCaches,
    /// One copy, by the receiver's system call.
    Kernel,
}

const WAYS: [CopyWay; 3] = [CopyWay::Ring, CopyWay::PastCaches, CopyWay::Kernel];

/// Payloads of the tried way that one trial counts. The first one is not counted: the way's code and tables are in no cache then, so
/// it takes up to ten times as long. Nor are those that overlap with some others, see `ShmInbox::measure`.
const TRIAL: u32 = 4;
/// A trial may cost this part of the time between two trials, as a divisor.
const WORTH: f64 = 50.0;
/// Payloads between two trials, at least.
const BETWEEN: f64 = 64.0;
/// Payloads of other ways after which a trial ends: the sender can't follow, or does not.
const PATIENCE: u32 = 64;
/// Payloads over which the pace of a way is averaged. A sender that shares its processor stands still for milliseconds now and
/// then, which a short average would either miss or take for the rule.
const REMEMBERED: u32 = 128;
/// As how many payloads the pace from an earlier time counts, when a way is used again: the machine may have changed.
const STALE: u32 = 16;
/// The first payloads of a link are not counted, since they wait for page faults.
const COLD: u32 = 8;
/// Another way is taken where it needs less than this part of the time: less is not worth a change.
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
///   settled ──after a while──▶ trial of the next other way ─TRIAL + 1 payloads─▶ settled, on the fastest one
///      │ ◀──────PATIENCE payloads of other ways─────────┘
///      └──another way was faster at its last trial──▶ settled, on that one
/// ```
pub(super) struct CopyChoice {
    paces: [Pace; WAYS.len()],
    /// The receiver can't read the sender's memory.
    without_kernel: bool,
    settled: CopyWay,
    trial: Option<Trial>,
    /// The way of the last trial.
    tried: CopyWay,
    /// Nanoseconds of transfers until the next trial.
    rest: f64,
    /// Payloads that are not counted yet.
    cold: u32,
}

struct Trial {
    way: CopyWay,
    /// Payloads of this way that it still takes.
    left: u32,
    patience: u32,
}

impl CopyChoice {
    /// Settled on what is the fastest on most machines, until the paces are known.
    pub(super) fn new(with_kernel: bool) -> CopyChoice {
        let (settled, tried) = (CopyWay::PastCaches, CopyWay::PastCaches);
        CopyChoice { paces: Default::default(), without_kernel: !with_kernel, settled, trial: None, tried, rest: 0.0, cold: COLD }
    }

    /// The way that the next payload should take. The sender need not follow: what it can't lend goes through the ring, and
    /// payloads are under way already.
    pub(super) fn wanted(&self) -> CopyWay {
        self.trial.as_ref().map_or(self.settled, |trial| trial.way)
    }

    /// Whether what goes through the ring should be written within the caches.
    pub(super) fn wants_caches(&self) -> bool {
        match self.wanted() {
            CopyWay::Ring => true,
            CopyWay::PastCaches => false,
            CopyWay::Kernel => {
                let [within, past] = [CopyWay::Ring, CopyWay::PastCaches].map(|way| self.paces[way as usize]);
                within.samples > 0 && within.average < past.average
            }
        }
    }

    /// A payload of `len` bytes has arrived by this way, and took so long.
    pub(super) fn arrived(&mut self, way: CopyWay, len: usize, nanoseconds: f64) {
        if self.cold > 0 {
            self.cold -= 1;
            return;
        }
        let first = self.trial.as_ref().is_some_and(|trial| trial.way == way && trial.left > TRIAL);
        if !first {
            self.paces[way as usize].add(nanoseconds / len as f64);
        }
        match &mut self.trial {
            Some(trial) if trial.way == way => {
                let usual = len as f64 * self.paces[self.settled as usize].average;
                self.rest += WORTH * (nanoseconds.min(DEAREST * usual) - usual).max(0.0);
                trial.left -= 1;
                if trial.left == 0 {
                    self.settle(len);
                }
            }
            Some(trial) => {
                trial.patience -= 1;
                if trial.patience == 0 {
                    self.settle(len);
                }
            }
            // By the settled way, or by another one, if the sender can't follow.
            None => {
                self.rest -= nanoseconds;
                if way == self.settled && self.faster().is_some() {
                    self.settle(len);
                } else if self.paces[way as usize].samples >= TRIAL && self.rest <= 0.0 {
                    self.begin_trial();
                }
            }
        }
    }

    fn begin_trial(&mut self) {
        let may = |way: &CopyWay| {
            *way != self.settled
                && match way {
                    // Without such stores it would be the same as the other one.
                    CopyWay::Ring => CopyPath::STREAMS,
                    CopyWay::PastCaches => true,
                    CopyWay::Kernel => !self.without_kernel,
                }
        };
        let Some(next) = WAYS.into_iter().cycle().skip(self.tried as usize + 1).take(WAYS.len()).find(may) else { return };
        self.tried = next;
        self.revive(self.tried);
        self.trial = Some(Trial { way: self.tried, left: TRIAL + 1, patience: PATIENCE });
    }

    /// The fastest other way, if it is faster than the settled one.
    fn faster(&self) -> Option<CopyWay> {
        let pace = |way: CopyWay| self.paces[way as usize];
        let most = GAIN * pace(self.settled).average;
        let others = WAYS.into_iter().filter(|way| *way != self.settled);
        let faster = others.filter(|way| pace(*way).samples > 0 && pace(*way).average < most);
        faster.min_by(|a, b| pace(*a).average.total_cmp(&pace(*b).average))
    }

    fn revive(&mut self, way: CopyWay) {
        let pace = &mut self.paces[way as usize];
        pace.samples = pace.samples.min(STALE);
    }

    /// Settles on the fastest way; a trial is over. `len` is the length of a payload as they arrive now.
    fn settle(&mut self, len: usize) {
        self.trial = None;
        if let Some(faster) = self.faster() {
            self.settled = faster;
            self.rest = 0.0;
            self.revive(faster);
        }
        let between = BETWEEN * len as f64 * self.paces[self.settled as usize].average;
        self.rest = self.rest.max(0.0) + between;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 128 << 10;

    /// A machine, as what a payload takes by each way, in nanoseconds.
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

    /// In the order of `WAYS`.
    fn paced(paces: [f64; 3]) -> impl Fn(usize, CopyWay) -> f64 {
        move |_, way| paces[way as usize]
    }

    /// A machine on which each way, in turn, takes the first of these times.
    fn turned([first, second, third]: [f64; 3]) -> [[f64; 3]; 6] {
        let [a, b, c] = [first, second, third];
        [[a, b, c], [a, c, b], [b, a, c], [c, a, b], [b, c, a], [c, b, a]]
    }

    #[test]
    fn transfers_take_hardly_longer_than_by_the_fastest_way() {
        for times in [[5e3, 20e3, 8e3], [10e3, 13e3, 40e3], [10e3, 10.5e3, 11e3], [10e3, 10e3, 10e3], [4e3, 40e3, 40e3]] {
            for paces in turned(times) {
                let total = transfer(&mut CopyChoice::new(true), 20_000, paced(paces));
                let ratio = total / (20_000.0 * times[0]);
                assert!(ratio < 1.07, "{paces:?}: {ratio}");
            }
        }
    }

    #[test]
    fn kernel_is_not_asked_for_where_it_can_not_copy() {
        let mut choice = CopyChoice::new(false);
        let total = transfer(&mut choice, 20_000, |_, way| {
            assert_ne!(way, CopyWay::Kernel);
            paced([20e3, 5e3, 1e3])(0, way)
        });
        assert!(total < 1.06 * 20_000.0 * 5e3, "{total}");
    }

    /// The ways swap their paces, there and back.
    #[test]
    fn choice_follows_a_machine_that_changes() {
        let mut choice = CopyChoice::new(true);
        transfer(&mut choice, 20_000, paced([5e3, 20e3, 20e3]));
        for paces in turned([5e3, 20e3, 20e3]).into_iter().chain(turned([5e3, 20e3, 9e3])) {
            let ratio = transfer(&mut choice, 5_000, paced(paces)) / (5_000.0 * 5e3);
            assert!(ratio < 1.6, "{paces:?}: {ratio}");
            let ratio = transfer(&mut choice, 5_000, paced(paces)) / (5_000.0 * 5e3);
            assert!(ratio < 1.03, "{paces:?}, later: {ratio}");
        }
    }

    /// Where the kernel is asked for, and the sender can't lend.
    #[test]
    fn ring_is_written_by_the_better_path_meanwhile() {
        for paces in [[20e3, 9e3, 5e3], [9e3, 20e3, 5e3]] {
            let mut choice = CopyChoice::new(true);
            transfer(&mut choice, 20_000, paced(paces));
            assert_eq!((choice.settled, choice.trial.is_none()), (CopyWay::Kernel, true));
            assert_eq!(choice.wants_caches(), paces[0] < paces[1]);
        }
    }

    /// The owner shares its processor: every so often the ring stands still. The kernel's copy is slower than the ring while the
    /// ring moves, and faster on average.
    #[test]
    fn way_that_often_stands_still_is_left() {
        let mut choice = CopyChoice::new(true);
        let total = transfer(&mut choice, 20_000, |number, way| match way {
            CopyWay::Kernel => 15e3,
            _ if number % 100 == 50 => 3e6,
            _ => 10e3,
        });
        assert!(total < 1.3 * 20_000.0 * 15e3, "{}", total / (20_000.0 * 15e3));
    }

    /// What it can't lend goes through the ring, as asked for, whose paces differ by less than a change is worth, or swap later.
    #[test]
    fn sender_that_never_lends_does_not_end_the_trials() {
        for paces in [[9.8e3, 10e3, 0.0], [10e3, 9.8e3, 0.0], [10e3, 10e3, 0.0]] {
            let mut choice = CopyChoice::new(true);
            // A while ago it lent.
            (0..200).for_each(|_| choice.arrived(CopyWay::Kernel, LEN, 1e3));
            choice.settle(LEN);
            let trials = std::cell::Cell::new(0);
            let mut go_on = |paces: [f64; 3], payloads: usize| {
                let mut total = 0.0;
                for _ in 0..payloads {
                    let was_tried = choice.trial.is_some();
                    let way = if choice.wants_caches() { CopyWay::Ring } else { CopyWay::PastCaches };
                    choice.arrived(way, LEN, paces[way as usize]);
                    total += paces[way as usize];
                    trials.set(trials.get() + usize::from(was_tried && choice.trial.is_none()));
                }
                total
            };
            go_on(paces, 20_000);
            assert!(trials.get() > 2, "{paces:?}: {} trials have ended", trials.get());
            for paces in [[5e3, 25e3, 0.0], [25e3, 5e3, 0.0]] {
                go_on(paces, 20_000);
                let ratio = go_on(paces, 20_000) / (20_000.0 * 5e3);
                assert!(ratio < 1.2, "{paces:?}: {ratio}");
            }
        }
    }

    #[test]
    fn one_long_pause_is_forgotten() {
        let mut choice = CopyChoice::new(true);
        let usual = paced([5e3, 20e3, 20e3]);
        transfer(&mut choice, 2_000, &usual);
        let total = transfer(&mut choice, 2_000, |number, way| if number == 0 { 3e6 } else { usual(number, way) });
        assert!(choice.settled == CopyWay::Ring && total < 2.0 * 2_000.0 * 5e3, "{total}");
    }

    /// The kernel's first copy takes several times as long as those that follow: the caches have neither its code nor its tables.
    #[test]
    fn first_payload_of_a_way_does_not_speak_for_the_others() {
        for paces in turned([4e3, 8.5e3, 8.5e3]) {
            let mut last = None;
            let total = transfer(&mut CopyChoice::new(true), 20_000, |_, way| {
                let first = last.replace(way) != Some(way);
                if first { 25e3 } else { paces[way as usize] }
            });
            let ratio = total / (20_000.0 * 4e3);
            assert!(ratio < 1.1, "{paces:?}: {ratio}");
        }
    }

    /// A trial costs its first payload, too: the dearer that is, the fewer trials there are.
    #[test]
    fn trials_with_a_dear_first_payload_are_rare() {
        let (mut choice, mut last, mut tried) = (CopyChoice::new(true), None, 0);
        let total = transfer(&mut choice, 20_000, |_, way| {
            let first = last.replace(way) != Some(way);
            tried += u32::from(first);
            if first { 60e3 } else { 10e3 }
        });
        assert!(tried > 10 && total < 1.04 * 20_000.0 * 10e3, "{tried}: {}", total / (20_000.0 * 10e3));
    }

    /// A sender that may not lend, or lends all, whatever this side asks for.
    #[test]
    fn sender_that_does_not_follow_is_put_up_with() {
        for way in WAYS {
            let mut choice = CopyChoice::new(true);
            (0..1000).for_each(|_| choice.arrived(way, LEN, 1e4));
            // Then it follows.
            let total = transfer(&mut choice, 5_000, paced([8e3, 9e3, 5e3]));
            assert!(total < 1.1 * 5_000.0 * 5e3, "{way:?}: {total}");
        }
    }
}
