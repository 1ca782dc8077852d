//! The driver lock: the one thread that holds it polls the transports and the reactor.
//!
//! This is the Leader/Followers pattern (Schmidt, Stal, Rohnert and Buschmann, *Pattern-Oriented Software Architecture*,
//! volume 2): the holder is the leader, queued callers are the followers, and a release wakes the next of them.
//!
//! ```text
//!   a caller (a thread that waits for a call or a transfer) acquires the lock if it is free, and releases it when it has
//!       what it waits for
//!   the progress thread acquires the lock when no caller does, and releases it when a caller wants it
//!   while the progress thread holds the lock and sleeps in the reactor, a caller borrows the lock without waking it
//!   a release wakes the next waiter
//! ```
//!
//! The holder is stored in one atomic word, so acquiring and releasing take one atomic operation each while no other thread
//! wants the lock. The queue is behind a mutex; a flag in the word says whether any thread has to be woken.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion::ThreadWaiter;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct DriverLock {
    /// The holder, some flags, and above them the number of acquisitions by callers.
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

/// The lock is free when the holder bits are 0; else they are one of the next three.
const HOLDER: u64 = 3;
const CALLER: u64 = 1;
const PROGRESS: u64 = 2;
/// A caller holds the lock, while the progress thread sleeps in the reactor and does not know it.
const BORROWED: u64 = 3;
/// The holder blocks in the reactor, or is about to.
const PARKED: u64 = 4;
/// A caller wants the lock from the progress thread.
const WANTED: u64 = 8;
/// The releasing thread has to wake a waiter.
const HAS_WAITERS: u64 = 16;
const ACQUISITION: u64 = 32;

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
    fn load(&self) -> u64 {
        self.word.load(Ordering::SeqCst)
    }

    /// Applies `change` to the word atomically: the old and the new word, or the unchanged word if `change` returns `None`.
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

    /// Acquires the lock for a caller that is not queued, if that is possible at once.
    pub(super) fn try_acquire(&self) -> Option<Acquired> {
        let (before, _) = self.change(Self::acquired_by_caller).ok()?;
        Some(if before & HOLDER == 0 { Acquired::Yes } else { Acquired::Borrowed })
    }

    /// Acquires the lock for a caller, or queues it.
    pub(super) fn acquire_or_queue(&self, me: &Arc<ThreadWaiter>) -> Acquired {
        let mut waiters = self.waiters.lock();
        let changed = self.change(|word| {
            Self::acquired_by_caller(word).or_else(|| {
                let wanted = if word & HOLDER == PROGRESS { WANTED } else { 0 };
                Some(word | HAS_WAITERS | wanted)
            })
        });
        let (before, after) = changed.unwrap_or_else(|word| (word, word));
        if before & !(HAS_WAITERS | WANTED) == after & !(HAS_WAITERS | WANTED) {
            if !waiters.queue.iter().any(|other| Arc::ptr_eq(other, me)) {
                waiters.queue.push_back(me.clone());
            }
            return Acquired::Queued { soon: before & HOLDER == PROGRESS };
        }
        // A release must not spend its wake-up on this thread, which does not wait any more.
        waiters.queue.retain(|other| !Arc::ptr_eq(other, me));
        self.update_flags(&waiters);
        if before & HOLDER == 0 { Acquired::Yes } else { Acquired::Borrowed }
    }

    /// Removes a caller from the queue. If it has been woken to acquire the lock, the next waiter is woken in its place.
    pub(super) fn leave_queue(&self, me: &Arc<ThreadWaiter>) {
        let mut waiters = self.waiters.lock();
        let before = waiters.queue.len();
        waiters.queue.retain(|other| !Arc::ptr_eq(other, me));
        let word = self.load();
        let free = word & HOLDER == 0 || word & (HOLDER | PARKED) == PROGRESS | PARKED;
        if waiters.queue.len() == before && free {
            Self::wake_next(&mut waiters);
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
        let none_queued = waiters.queue.is_empty();
        let acquired =
            self.change(|word| (none_queued && word & HOLDER == 0 && word / ACQUISITION == seen).then_some(word + PROGRESS));
        let Err(word) = acquired else { return Ok(()) };
        // Once this flag is set, a parked holder locks the waiters before it releases the lock.
        let parked = self.change(|word| (word & HOLDER != 0 && word & PARKED != 0).then_some(word | HAS_WAITERS)).is_ok();
        waiters.parked_waiter = parked.then(|| me.clone());
        Err(Contended { epoch: word / ACQUISITION, until_woken: parked })
    }

    /// As [`DriverLock::acquire_as_progress`], also if a caller has held the lock a moment ago.
    pub(super) fn try_acquire_as_progress(&self) -> bool {
        let waiters = self.waiters.lock();
        let none_queued = waiters.queue.is_empty();
        self.change(|word| (none_queued && word & HOLDER == 0).then_some(word + PROGRESS)).is_ok()
    }

    /// Releases the lock for a caller.
    pub(super) fn release(&self) {
        let released = |word: u64| word & !(HOLDER | PARKED);
        if self.change(|word| (word & HAS_WAITERS == 0).then(|| released(word))).is_err() {
            let mut waiters = self.waiters.lock();
            let _ = self.change(|word| Some(released(word)));
            self.wake_waiters(&mut waiters);
        }
    }

    /// True when the holder has borrowed the lock, and the progress thread has not noticed.
    pub(super) fn is_borrowed(&self) -> bool {
        self.word.load(Ordering::Relaxed) & HOLDER == BORROWED
    }

    /// Returns a borrowed lock to the progress thread, which sleeps in the reactor. False when that thread has woken
    /// meanwhile: then the caller still holds the lock.
    pub(super) fn release_borrowed(&self) -> bool {
        let returned = |word: u64| (word & HOLDER == BORROWED).then(|| (word - BORROWED + PROGRESS) | PARKED);
        match self.change(|word| returned(word).filter(|_| word & HAS_WAITERS == 0)) {
            Ok(_) => true,
            Err(word) if word & HOLDER != BORROWED => false,
            Err(_) => {
                let mut waiters = self.waiters.lock();
                let was_borrowed = self.change(returned).is_ok();
                if was_borrowed {
                    self.wake_waiters(&mut waiters);
                }
                was_borrowed
            }
        }
    }

    /// Releases the lock for the progress thread; also called by other threads to take the lock from it.
    pub(super) fn release_as_progress(&self) {
        let mut waiters = self.waiters.lock();
        if self.change(|word| (word & HOLDER == PROGRESS).then_some(word & !(HOLDER | PARKED))).is_ok() {
            self.wake_waiters(&mut waiters);
        }
    }

    fn wake_waiters(&self, waiters: &mut Waiters) {
        Self::wake_next(waiters);
        if let Some(parked) = waiters.parked_waiter.take() {
            parked.wake();
        }
        self.update_flags(waiters);
    }

    fn wake_next(waiters: &mut Waiters) {
        if let Some(next) = waiters.queue.pop_front() {
            next.wake();
        }
    }

    /// Makes a borrowed lock the caller's own, since the caller needs the reactor itself. True when the lock was borrowed: then
    /// the caller has to wake the progress thread out of the reactor.
    pub(super) fn take_from_progress(&self) -> bool {
        self.change(|word| (word & HOLDER == BORROWED).then(|| word - BORROWED + CALLER)).is_ok()
    }

    /// Marks the holder as about to block in the reactor. False when it must not block, since a caller wants the lock.
    pub(super) fn park(&self) -> bool {
        self.change(|word| (word & WANTED == 0).then_some(word | PARKED)).is_ok()
    }

    /// Marks a caller that holds the lock as awake.
    pub(super) fn unpark(&self) {
        let _ = self.change(|word| Some(word & !PARKED));
    }

    /// Marks the progress thread as awake. False when a caller has taken the lock meanwhile.
    pub(super) fn unpark_progress(&self) -> bool {
        let woken = self.change(|word| match word & HOLDER {
            PROGRESS => Some(word & !PARKED),
            BORROWED => Some(word - BORROWED + CALLER),
            _ => None,
        });
        woken.is_ok_and(|(before, _)| before & HOLDER == PROGRESS)
    }

    /// True when the holder blocks in the reactor, or is about to.
    pub(super) fn is_parked(&self) -> bool {
        self.load() & PARKED != 0
    }

    /// Whether the holder is awake; `None` when no thread holds the lock.
    pub(super) fn holder_is_awake(&self) -> Option<bool> {
        let word = self.load();
        (word & HOLDER != 0).then_some(word & PARKED == 0)
    }

    /// True when a caller could acquire the lock.
    pub(super) fn is_free(&self) -> bool {
        Self::acquired_by_caller(self.word.load(Ordering::Relaxed)).is_some()
    }

    /// True when a caller wants the progress thread to release the lock.
    pub(super) fn is_wanted(&self) -> bool {
        self.word.load(Ordering::Relaxed) & WANTED != 0
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
        assert_eq!(lock.load() & (HOLDER | PARKED | WANTED), 0);
        assert!(lock.waiters.lock().queue.is_empty());
    }
}
