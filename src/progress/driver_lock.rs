//! The driver lock: the one thread that holds it polls the transports and the reactor.
//!
//! This is the Leader/Followers pattern (Schmidt, Stal, Rohnert and Buschmann, *Pattern-Oriented Software Architecture*,
//! volume 2): the holder is the leader, queued callers are the followers, and a release wakes the next of them.
//!
//! ```text
//!              acquire                    park
//!         ┌──────────────▶  Caller    ◀──────────▶  CallerParked
//!         │ ◀────────────     ▲          unpark
//!         │    release        │ take, or the progress thread wakes
//!         │                   │
//!       Free               Borrowed   ◀──────────▶  BorrowedParked     beside the caller's event loop only,
//!         │                 ▲   │     park, unpark                     which is in the place of a progress thread
//!         │         acquire │   │ return
//!         │                 │   ▼
//!         │            ProgressParked
//!         │                 ▲   │
//!         │            park │   │ unpark
//!         │    acquire      │   ▼
//!         └──────────────▶  Progress
//!           ◀────────────
//!              release
//! ```
//!
//! *Callers* are threads that wait for a call or a transfer, and futures that are polled. The progress thread acquires the lock
//! when no caller does, and releases it when a caller wants it. A holder that is *parked* blocks in the reactor, or is about to.
//! From a progress thread that is parked, a caller *borrows* the lock without waking it.
//!
//! The state is in one atomic word, so acquiring and releasing take one atomic operation each while no other thread wants the
//! lock. The queue is behind a mutex; a flag in the word says whether any thread has to be woken.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion::ThreadWaiter;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct DriverLock {
    /// The state, two flags, and above them the number of acquisitions by callers.
    word: AtomicU64,
    waiters: Mutex<Waiters>,
}

#[derive(Default)]
struct Waiters {
    /// Threads that wait for an operation while another thread drives.
    queue: VecDeque<Arc<ThreadWaiter>>,
    /// The progress thread, if it sleeps until the holder, which blocks in the reactor, has released the lock.
    parked_waiter: Option<Arc<ThreadWaiter>>,
}

/// Who holds the lock: see the picture above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Caller,
    CallerParked,
    Borrowed,
    BorrowedParked,
    Progress,
    ProgressParked,
}

/// An arrow of the picture above. The steps of the progress thread have names of their own where a caller's differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockStep {
    Acquire,
    Release,
    Take,
    Return,
    Park,
    Unpark,
    AcquireAsProgress,
    ReleaseAsProgress,
    UnparkAsProgress,
}

impl State {
    fn of(word: u64) -> State {
        match word & STATE {
            1 => State::Caller,
            2 => State::CallerParked,
            3 => State::Borrowed,
            4 => State::BorrowedParked,
            5 => State::Progress,
            6 => State::ProgressParked,
            _ => State::Free,
        }
    }

    /// The state after a step; `None` when the step is not possible.
    fn after(self, step: LockStep) -> Option<State> {
        use State::*;
        Some(match (step, self) {
            (LockStep::Acquire, Free) => Caller,
            (LockStep::Acquire, ProgressParked) => Borrowed,
            (LockStep::Release, Caller | CallerParked) => Free,
            (LockStep::Take, Borrowed) => Caller,
            (LockStep::Return, Borrowed | BorrowedParked) => ProgressParked,
            (LockStep::Park, Caller) => CallerParked,
            (LockStep::Park, Borrowed) => BorrowedParked,
            (LockStep::Park, Progress) => ProgressParked,
            (LockStep::Unpark, CallerParked) => Caller,
            (LockStep::Unpark, BorrowedParked) => Borrowed,
            (LockStep::AcquireAsProgress, Free) => Progress,
            (LockStep::ReleaseAsProgress, Progress | ProgressParked) => Free,
            (LockStep::UnparkAsProgress, ProgressParked) => Progress,
            // The caller holds the lock from now on, since the progress thread can't wait for its return in the reactor.
            (LockStep::UnparkAsProgress, Borrowed) => Caller,
            _ => return None,
        })
    }

    fn is_parked(self) -> bool {
        matches!(self, State::CallerParked | State::BorrowedParked | State::ProgressParked)
    }
}

/// The bits of the word that have the state. Above the flags is the number of acquisitions by callers.
const STATE: u64 = 7;
/// A caller wants the lock from the progress thread.
const WANTED: u64 = 8;
/// The releasing thread has to wake a waiter.
const HAS_WAITERS: u64 = 16;
const ACQUISITION: u64 = 32;

/// The word after a step; `None` when the step is not possible.
fn after(word: u64, step: LockStep) -> Option<u64> {
    let word = (word & !STATE) | State::of(word).after(step)? as u64;
    Some(if step == LockStep::Acquire { (word & !WANTED) + ACQUISITION } else { word })
}

/// How a caller got the lock, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acquired {
    /// The lock was free.
    Yes,
    /// Borrowed from the progress thread, which sleeps in the reactor.
    Borrowed,
    /// Not acquired: the caller is queued. If `soon`, the progress thread holds the lock and is awake, so it will release it
    /// in a moment, and spinning is worthwhile.
    Queued { soon: bool },
}

impl DriverLock {
    fn state(&self) -> State {
        State::of(self.word.load(Ordering::SeqCst))
    }

    /// Applies `change` to the word atomically: the word before, or the unchanged word if `change` returns `None`.
    fn change(&self, change: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        let mut word = self.word.load(Ordering::SeqCst);
        loop {
            let Some(new) = change(word) else { return Err(word) };
            match self.word.compare_exchange_weak(word, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Ok(word),
                Err(other) => word = other,
            }
        }
    }

    fn step(&self, step: LockStep) -> Result<u64, u64> {
        self.change(|word| after(word, step))
    }

    /// Makes a step after which others may acquire the lock, and wakes the next of them. False when it is not possible.
    fn step_and_wake(&self, step: LockStep) -> bool {
        match self.change(|word| after(word, step).filter(|_| word & HAS_WAITERS == 0)) {
            Ok(_) => true,
            Err(word) if State::of(word).after(step).is_none() => false,
            Err(_) => {
                let mut waiters = self.waiters.lock();
                let made = self.step(step).is_ok();
                if made {
                    waiters.wake_next();
                    if let Some(parked) = waiters.parked_waiter.take() {
                        parked.wake();
                    }
                    self.update_flags(&waiters);
                }
                made
            }
        }
    }

    fn acquired_from(word: u64) -> Acquired {
        if State::of(word) == State::Free { Acquired::Yes } else { Acquired::Borrowed }
    }

    /// Acquires the lock for a caller that is not queued, if that is possible at once.
    pub(super) fn try_acquire(&self) -> Option<Acquired> {
        self.step(LockStep::Acquire).ok().map(Self::acquired_from)
    }

    /// Acquires the lock for a caller, or queues it.
    pub(super) fn acquire_or_queue(&self, me: &Arc<ThreadWaiter>) -> Acquired {
        let mut waiters = self.waiters.lock();
        let queued_at = |word| {
            let wanted = if State::of(word) == State::Progress { WANTED } else { 0 };
            word | HAS_WAITERS | wanted
        };
        // The closure always returns a word.
        let before =
            self.change(|word| after(word, LockStep::Acquire).or_else(|| Some(queued_at(word)))).unwrap_or_else(|word| word);
        if after(before, LockStep::Acquire).is_none() {
            if !waiters.queue.iter().any(|other| Arc::ptr_eq(other, me)) {
                waiters.queue.push_back(me.clone());
            }
            return Acquired::Queued { soon: State::of(before) == State::Progress };
        }
        // A release must not spend its wake-up on this thread, which does not wait any more.
        waiters.queue.retain(|other| !Arc::ptr_eq(other, me));
        self.update_flags(&waiters);
        Self::acquired_from(before)
    }

    /// Removes a caller from the queue. If it has been woken to acquire the lock, the next waiter is woken in its place.
    pub(super) fn leave_queue(&self, me: &Arc<ThreadWaiter>) {
        let mut waiters = self.waiters.lock();
        let before = waiters.queue.len();
        waiters.queue.retain(|other| !Arc::ptr_eq(other, me));
        if waiters.queue.len() == before && self.state().after(LockStep::Acquire).is_some() {
            waiters.wake_next();
        }
        self.update_flags(&waiters);
    }

    /// Clears the flags in the word that the waiters do not justify any more.
    fn update_flags(&self, waiters: &Waiters) {
        if waiters.queue.is_empty() {
            let flags = if waiters.parked_waiter.is_none() { HAS_WAITERS | WANTED } else { WANTED };
            let _ = self.change(|word| (word & flags != 0).then_some(word & !flags));
        }
    }

    /// Acquires the lock for the progress thread if it is free, no caller is queued, and no caller has acquired it since epoch
    /// `seen`. Else returns how to try again.
    pub(super) fn acquire_as_progress(&self, seen: u64, me: &Arc<ThreadWaiter>) -> Result<(), Contended> {
        let mut waiters = self.waiters.lock();
        let may = waiters.queue.is_empty();
        let acquired = self.change(|word| after(word, LockStep::AcquireAsProgress).filter(|_| may && word / ACQUISITION == seen));
        let Err(word) = acquired else { return Ok(()) };
        // Once this flag is set, a parked holder locks the waiters before it releases the lock.
        let parked = self.change(|word| State::of(word).is_parked().then_some(word | HAS_WAITERS)).is_ok();
        waiters.parked_waiter = parked.then(|| me.clone());
        Err(Contended { epoch: word / ACQUISITION, until_woken: parked })
    }

    /// As [`DriverLock::acquire_as_progress`], also if a caller has held the lock a moment ago.
    pub(super) fn try_acquire_as_progress(&self) -> bool {
        let waiters = self.waiters.lock();
        waiters.queue.is_empty() && self.step(LockStep::AcquireAsProgress).is_ok()
    }

    /// Releases the lock for a caller.
    pub(super) fn release(&self) {
        self.step_and_wake(LockStep::Release);
    }

    /// Returns a borrowed lock to the progress thread, which sleeps in the reactor. False when that thread has woken
    /// meanwhile: then the caller still holds the lock.
    pub(super) fn release_borrowed(&self) -> bool {
        self.step_and_wake(LockStep::Return)
    }

    /// Releases the lock for the progress thread; also called by other threads to take the lock from it.
    pub(super) fn release_as_progress(&self) {
        self.step_and_wake(LockStep::ReleaseAsProgress);
    }

    /// Makes a borrowed lock the caller's own, since the caller needs the reactor itself. True when the lock was borrowed: then
    /// the caller has to wake the progress thread out of the reactor.
    pub(super) fn take_from_progress(&self) -> bool {
        self.step(LockStep::Take).is_ok()
    }

    /// Marks the holder as about to block in the reactor. False when it must not block, since a caller wants the lock.
    pub(super) fn park(&self) -> bool {
        self.change(|word| after(word, LockStep::Park).filter(|_| word & WANTED == 0)).is_ok()
    }

    /// Marks a caller that holds the lock as awake.
    pub(super) fn unpark(&self) {
        let _ = self.step(LockStep::Unpark);
    }

    /// Marks the progress thread as awake. False when a caller has taken the lock meanwhile.
    pub(super) fn unpark_progress(&self) -> bool {
        self.step(LockStep::UnparkAsProgress).is_ok_and(|before| State::of(before) == State::ProgressParked)
    }

    /// True when the holder has borrowed the lock, and the progress thread has not noticed.
    pub(super) fn is_borrowed(&self) -> bool {
        State::of(self.word.load(Ordering::Relaxed)).after(LockStep::Return).is_some()
    }

    /// True when the holder blocks in the reactor, or is about to.
    pub(super) fn is_parked(&self) -> bool {
        self.state().is_parked()
    }

    /// Whether the holder is awake; `None` when no thread holds the lock.
    pub(super) fn holder_is_awake(&self) -> Option<bool> {
        let state = self.state();
        (state != State::Free).then_some(!state.is_parked())
    }

    /// True when a caller could acquire the lock.
    pub(super) fn is_free(&self) -> bool {
        State::of(self.word.load(Ordering::Relaxed)).after(LockStep::Acquire).is_some()
    }

    /// True when a caller wants the progress thread to release the lock.
    pub(super) fn is_wanted(&self) -> bool {
        self.word.load(Ordering::Relaxed) & WANTED != 0
    }
}

impl Waiters {
    fn wake_next(&mut self) {
        if let Some(next) = self.queue.pop_front() {
            next.wake();
        }
    }
}

/// Why the progress thread could not acquire the lock.
pub(super) struct Contended {
    /// The number of acquisitions by callers: the next attempt succeeds only if it is still the same.
    pub epoch: u64,
    /// The holder blocks in the reactor, and wakes the progress thread at its release. Else try again after a moment.
    pub until_woken: bool,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::time::{Duration, Instant};

    use super::super::completion::ThreadSleeper;
    use super::*;

    /// The arrows of the picture, and no others.
    #[test]
    fn steps_are_those_of_the_picture() {
        use LockStep::*;
        use State::*;
        const STATES: [State; 7] = [Free, Caller, CallerParked, Borrowed, BorrowedParked, Progress, ProgressParked];
        let arrows = [
            (Acquire, vec![(Free, Caller), (ProgressParked, Borrowed)]),
            (Release, vec![(Caller, Free), (CallerParked, Free)]),
            (Take, vec![(Borrowed, Caller)]),
            (Return, vec![(Borrowed, ProgressParked), (BorrowedParked, ProgressParked)]),
            (Park, vec![(Caller, CallerParked), (Borrowed, BorrowedParked), (Progress, ProgressParked)]),
            (Unpark, vec![(CallerParked, Caller), (BorrowedParked, Borrowed)]),
            (AcquireAsProgress, vec![(Free, Progress)]),
            (ReleaseAsProgress, vec![(Progress, Free), (ProgressParked, Free)]),
            (UnparkAsProgress, vec![(Borrowed, Caller), (ProgressParked, Progress)]),
        ];
        for (step, expected) in arrows {
            for flags in [0, WANTED, HAS_WAITERS, WANTED | HAS_WAITERS] {
                let next = |state| after(state as u64 | flags | (7 * ACQUISITION), step);
                let made: Vec<_> = STATES.into_iter().filter_map(|state| Some((state, State::of(next(state)?)))).collect();
                assert_eq!(made, expected, "{step:?}");
                for word in STATES.into_iter().filter_map(next) {
                    let kept = if step == Acquire { flags & !WANTED } else { flags };
                    let acquisitions = if step == Acquire { 8 } else { 7 };
                    assert_eq!((word & (WANTED | HAS_WAITERS), word / ACQUISITION), (kept, acquisitions), "{step:?}");
                }
            }
        }
    }

    /// Callers acquire, borrow, park and queue at random times against a progress thread: one thread holds the lock at a time.
    #[test]
    fn contended_lock_has_one_holder_and_wakes_each_queued_caller() {
        const CALLERS: usize = 3;
        const ROUNDS: usize = 3000;
        let lock = DriverLock::default();
        let holders = AtomicUsize::new(0);
        let reactor = AtomicBool::new(false);
        let stop = AtomicBool::new(false);
        let assert_only_holder = |holder: &str| {
            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "{holder} is not the only holder");
            std::thread::yield_now();
            holders.fetch_sub(1, Ordering::SeqCst);
        };
        let caller = |number: usize| {
            let sleeper = ThreadSleeper::new();
            for round in 0..ROUNDS {
                let first = lock.try_acquire();
                let acquired = first.unwrap_or_else(|| {
                    let begin = Instant::now();
                    loop {
                        match lock.acquire_or_queue(&sleeper.waiter) {
                            Acquired::Queued { .. } => {
                                sleeper.sleep(Some(Instant::now() + Duration::from_secs(5)));
                                assert!(begin.elapsed() < Duration::from_secs(5), "caller {number} was not woken");
                            }
                            acquired => break acquired,
                        }
                    }
                });
                assert_only_holder("a caller");
                match (acquired, (round + number) % 7) {
                    (Acquired::Borrowed, 0) => {
                        if lock.take_from_progress() {
                            reactor.store(true, Ordering::SeqCst);
                        }
                        lock.release();
                    }
                    (Acquired::Borrowed, _) => {
                        if !lock.release_borrowed() {
                            lock.release();
                        }
                    }
                    (_, 1) if lock.park() => {
                        std::thread::yield_now();
                        lock.unpark();
                        lock.release();
                    }
                    _ => lock.release(),
                }
            }
        };
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..CALLERS).map(|number| scope.spawn(move || caller(number))).collect();
            scope.spawn(|| {
                let mut parks = 0u32;
                while !stop.load(Ordering::SeqCst) {
                    if !lock.try_acquire_as_progress() {
                        std::thread::yield_now();
                        continue;
                    }
                    loop {
                        assert_only_holder("the progress thread");
                        if lock.is_wanted() || stop.load(Ordering::SeqCst) {
                            lock.release_as_progress();
                            break;
                        }
                        if !lock.park() {
                            continue;
                        }
                        parks += 1;
                        // Stands for the reactor: sleeps until it is woken, or an event arrives.
                        let naps = parks % 5;
                        for _ in 0..naps {
                            if !reactor.swap(false, Ordering::SeqCst) {
                                std::thread::yield_now();
                            }
                        }
                        if !lock.unpark_progress() {
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
        assert_eq!((lock.state(), lock.is_wanted()), (State::Free, false));
        assert!(lock.waiters.lock().queue.is_empty());
    }
}
