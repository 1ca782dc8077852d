//! Who drives: one thread at a time, in a seat.
//!
//! ```text
//!   a thread that waits for a call or a transfer sits down, if nobody sits; gets up when it has what it waits for
//!   the progress thread sits when nobody else does, and gets up when a waiting thread wants the seat
//!   while the progress thread sleeps in the seat, a waiting thread borrows it, and wakes nobody
//!   whoever gets up wakes the next thread that waits
//! ```
//!
//! Who sits stands in one word, so that sitting down and getting up cost one atomic operation each where nobody else wants
//! the seat. The queue is behind a lock; the word says whether anything is in it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion::ThreadWaiter;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct DriverLock {
    /// Who sits, some flags, and above them the number of sittings.
    word: AtomicU64,
    waiters: Mutex<Waiters>,
}

#[derive(Default)]
struct Waiters {
    /// Threads that wait for an operation while somebody else drives.
    queue: VecDeque<Arc<ThreadWaiter>>,
    /// Woken when a caller that had blocked gets up: the progress thread, which sleeps as long as somebody drives.
    parked_waiter: Option<Arc<ThreadWaiter>>,
}

/// Nobody sits when neither this nor one of the next two stands in the word.
const CALLER: u64 = 1;
const PROGRESS: u64 = 2;
/// A caller sits, while the progress thread sleeps in the reactor, and does not know.
const BORROWED: u64 = 3;
const HOLDER: u64 = 3;
/// The sitter blocks in the reactor, or is about to.
const PARKED: u64 = 4;
/// A caller wants the seat from the progress thread.
const WANTED: u64 = 8;
/// Somebody has to be woken by whoever gets up.
const HAS_WAITERS: u64 = 16;
const ACQUISITION: u64 = 32;

/// How a caller sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acquired {
    /// In its own right.
    Yes,
    /// In the progress thread's place, which sleeps in the reactor.
    Borrowed,
    /// It does not, and is in the queue. The progress thread sits, and will get up in a moment: it is worth waiting for
    /// when `soon`.
    Queued { soon: bool },
}

impl DriverLock {
    fn load(&self) -> u64 {
        self.word.load(Ordering::SeqCst)
    }

    /// Replaces the word by what `change` makes of it, unless that is nothing. What was there before, and what is now.
    fn change(&self, change: impl Fn(u64) -> Option<u64>) -> Result<(u64, u64), u64> {
        let mut word = self.load();
        loop {
            let Some(new) = change(word) else { return Err(word) };
            match self.word.compare_exchange_weak(word, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Ok((word, new)),
                Err(other) => word = other,
            }
        }
    }

    fn acquired_by_caller(word: u64) -> Option<u64> {
        match (word & HOLDER, word & PARKED) {
            (0, _) => Some((word & !WANTED) + CALLER + ACQUISITION),
            (PROGRESS, PARKED) => Some((word & !PARKED) - PROGRESS + BORROWED + ACQUISITION),
            _ => None,
        }
    }

    /// A caller that is not in the queue sits down, if it can at once.
    pub(super) fn try_acquire(&self) -> Option<Acquired> {
        let (before, _) = self.change(Self::acquired_by_caller).ok()?;
        Some(if before & HOLDER == 0 { Acquired::Yes } else { Acquired::Borrowed })
    }

    /// A caller sits down, or gets in the queue.
    pub(super) fn acquire_or_queue(&self, me: &Arc<ThreadWaiter>) -> Acquired {
        let mut line = self.waiters.lock();
        let taken = self.change(|word| {
            Self::acquired_by_caller(word).or_else(|| {
                let asked = if word & HOLDER == PROGRESS { WANTED } else { 0 };
                Some(word | HAS_WAITERS | asked)
            })
        });
        let (before, after) = taken.unwrap_or_else(|word| (word, word));
        if before & !(HAS_WAITERS | WANTED) == after & !(HAS_WAITERS | WANTED) {
            if !line.queue.iter().any(|other| Arc::ptr_eq(other, me)) {
                line.queue.push_back(me.clone());
            }
            return Acquired::Queued { soon: before & HOLDER == PROGRESS };
        }
        // Others must not be led to believe that this thread still waits for its turn.
        line.queue.retain(|other| !Arc::ptr_eq(other, me));
        self.update_flags(&line);
        if before & HOLDER == 0 { Acquired::Yes } else { Acquired::Borrowed }
    }

    /// A caller that was in the queue goes away. If it was its turn, it is the next one's now.
    pub(super) fn leave_queue(&self, me: &Arc<ThreadWaiter>) {
        let mut line = self.waiters.lock();
        let before = line.queue.len();
        line.queue.retain(|other| !Arc::ptr_eq(other, me));
        let word = self.load();
        let free = word & HOLDER == 0 || word & (HOLDER | PARKED) == PROGRESS | PARKED;
        if line.queue.len() == before && free {
            Self::wake_next(&mut line);
        }
        self.update_flags(&line);
    }

    /// Has the word say what is in the line.
    fn update_flags(&self, line: &Waiters) {
        if line.queue.is_empty() {
            let flags = if line.parked_waiter.is_none() { HAS_WAITERS | WANTED } else { WANTED };
            let _ = self.change(|word| (word & flags != 0).then_some(word & !flags));
        }
    }

    /// The progress thread sits down if the seat is free, and nobody has sat since `seen`, or waits to. Else what it needs
    /// to know to ask again.
    pub(super) fn acquire_as_progress(&self, seen: u64, me: &Arc<ThreadWaiter>) -> Result<(), Contended> {
        let mut line = self.waiters.lock();
        let nobody_waits = line.queue.is_empty();
        let sat =
            self.change(|word| (nobody_waits && word & HOLDER == 0 && word / ACQUISITION == seen).then_some(word + PROGRESS));
        let Err(word) = sat else { return Ok(()) };
        // Whoever is parked gets up only after taking the line, once this stands in the word.
        let heir = self.change(|word| (word & HOLDER != 0 && word & PARKED != 0).then_some(word | HAS_WAITERS)).is_ok();
        line.parked_waiter = heir.then(|| me.clone());
        Err(Contended { epoch: word / ACQUISITION, for_long: heir })
    }

    /// As `sit_as_progress`, right away when the seat is free.
    pub(super) fn try_acquire_as_progress(&self) -> bool {
        let line = self.waiters.lock();
        let nobody_waits = line.queue.is_empty();
        self.change(|word| (nobody_waits && word & HOLDER == 0).then_some(word + PROGRESS)).is_ok()
    }

    /// A caller gets up.
    pub(super) fn release(&self) {
        let up = |word: u64| word & !(HOLDER | PARKED);
        if self.change(|word| (word & HAS_WAITERS == 0).then(|| up(word))).is_err() {
            let mut line = self.waiters.lock();
            let _ = self.change(|word| Some(up(word)));
            self.wake_waiting(&mut line);
        }
    }

    /// True when the sitter has borrowed the seat, and the progress thread has not noticed.
    pub(super) fn is_borrowed(&self) -> bool {
        self.word.load(Ordering::Relaxed) & HOLDER == BORROWED
    }

    /// A caller gets up and leaves the seat to the progress thread, which sleeps in the reactor. False when it has woken
    /// meanwhile: then the caller still sits.
    pub(super) fn release_borrowed(&self) -> bool {
        let back = |word: u64| (word & HOLDER == BORROWED).then(|| (word - BORROWED + PROGRESS) | PARKED);
        match self.change(|word| back(word).filter(|_| word & HAS_WAITERS == 0)) {
            Ok(_) => true,
            Err(word) if word & HOLDER != BORROWED => false,
            Err(_) => {
                let mut line = self.waiters.lock();
                let given = self.change(back).is_ok();
                if given {
                    self.wake_waiting(&mut line);
                }
                given
            }
        }
    }

    /// The progress thread gets up, or the seat is taken from it.
    pub(super) fn release_as_progress(&self) {
        let mut line = self.waiters.lock();
        if self.change(|word| (word & HOLDER == PROGRESS).then_some(word & !(HOLDER | PARKED))).is_ok() {
            self.wake_waiting(&mut line);
        }
    }

    fn wake_waiting(&self, line: &mut Waiters) {
        Self::wake_next(line);
        if let Some(heir) = line.parked_waiter.take() {
            heir.wake();
        }
        self.update_flags(line);
    }

    fn wake_next(line: &mut Waiters) {
        if let Some(next) = line.queue.pop_front() {
            next.wake();
        }
    }

    /// A caller that sits in a borrowed seat needs the reactor, and keeps the seat. True when it was borrowed: the progress
    /// thread must be told to leave the reactor.
    pub(super) fn take_from_progress(&self) -> bool {
        self.change(|word| (word & HOLDER == BORROWED).then(|| word - BORROWED + CALLER)).is_ok()
    }

    /// The sitter is about to block in the reactor. False when it must not, because it is wanted.
    pub(super) fn park(&self) -> bool {
        self.change(|word| (word & WANTED == 0).then_some(word | PARKED)).is_ok()
    }

    /// A caller does not block any more.
    pub(super) fn unpark(&self) {
        let _ = self.change(|word| Some(word & !PARKED));
    }

    /// The progress thread does not block any more. False when somebody has taken its seat meanwhile.
    pub(super) fn unpark_progress(&self) -> bool {
        let woken = self.change(|word| match word & HOLDER {
            PROGRESS => Some(word & !PARKED),
            BORROWED => Some(word - BORROWED + CALLER),
            _ => None,
        });
        woken.is_ok_and(|(before, _)| before & HOLDER == PROGRESS)
    }

    /// Somebody sits, and blocks in the reactor.
    pub(super) fn is_parked(&self) -> bool {
        self.load() & PARKED != 0
    }

    /// A caller could sit down.
    pub(super) fn is_free(&self) -> bool {
        Self::acquired_by_caller(self.word.load(Ordering::Relaxed)).is_some()
    }

    /// A caller wants the progress thread to get up.
    pub(super) fn is_wanted(&self) -> bool {
        self.word.load(Ordering::Relaxed) & WANTED != 0
    }
}

/// The seat is not for the progress thread now.
pub(super) struct Contended {
    pub epoch: u64,
    /// Sleep until woken; else look again after a moment.
    pub for_long: bool,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::time::{Duration, Instant};

    use super::super::completion::ThreadSleeper;
    use super::*;

    /// One drives at a time, whatever the others do; and who queues gets the seat.
    #[test]
    fn one_sits_at_a_time_and_nobody_is_forgotten() {
        const CALLERS: usize = 3;
        const TIMES: usize = 3000;
        let seat = DriverLock::default();
        let sitting = AtomicUsize::new(0);
        let reactor = AtomicBool::new(false);
        let stop = AtomicBool::new(false);
        let alone = |what: &str| {
            assert_eq!(sitting.fetch_add(1, Ordering::SeqCst), 0, "{what} is not alone");
            std::thread::yield_now();
            sitting.fetch_sub(1, Ordering::SeqCst);
        };
        let caller = |number: usize| {
            let sleeper = ThreadSleeper::new();
            for time in 0..TIMES {
                let first = seat.try_acquire();
                let sat = first.unwrap_or_else(|| {
                    let begin = Instant::now();
                    loop {
                        match seat.acquire_or_queue(&sleeper.waiter) {
                            Acquired::Queued { .. } => {
                                sleeper.sleep(Some(Instant::now() + Duration::from_secs(5)));
                                assert!(begin.elapsed() < Duration::from_secs(5), "caller {number} is forgotten");
                            }
                            sat => break sat,
                        }
                    }
                });
                alone("a caller");
                match (sat, (time + number) % 7) {
                    (Acquired::Borrowed, 0) => {
                        if seat.take_from_progress() {
                            reactor.store(true, Ordering::SeqCst);
                        }
                        seat.release();
                    }
                    (Acquired::Borrowed, _) => {
                        if !seat.release_borrowed() {
                            seat.release();
                        }
                    }
                    (_, 1) if seat.park() => {
                        std::thread::yield_now();
                        seat.unpark();
                        seat.release();
                    }
                    _ => seat.release(),
                }
            }
        };
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..CALLERS).map(|number| scope.spawn(move || caller(number))).collect();
            scope.spawn(|| {
                let mut times = 0u32;
                while !stop.load(Ordering::SeqCst) {
                    if !seat.try_acquire_as_progress() {
                        std::thread::yield_now();
                        continue;
                    }
                    loop {
                        alone("the progress thread");
                        if seat.is_wanted() || stop.load(Ordering::SeqCst) {
                            seat.release_as_progress();
                            break;
                        }
                        if !seat.park() {
                            continue;
                        }
                        times += 1;
                        // In the reactor: until it is rung, or something comes.
                        let naps = times % 5;
                        for _ in 0..naps {
                            if !reactor.swap(false, Ordering::SeqCst) {
                                std::thread::yield_now();
                            }
                        }
                        if !seat.unpark_progress() {
                            break;
                        }
                    }
                }
            });
            for caller in callers {
                let outcome = caller.join();
                if outcome.is_err() {
                    stop.store(true, Ordering::SeqCst);
                }
                outcome.unwrap();
            }
            stop.store(true, Ordering::SeqCst);
        });
        assert_eq!(seat.load() & (HOLDER | PARKED | WANTED), 0);
        assert!(seat.waiters.lock().queue.is_empty());
    }
}
