//! Synchronization primitives. Code that `tests/models` checks takes them from here, and the models replace them by loom's,
//! which explore the orders of events.
//!
//! The locks are `std`'s, which wait at the lock itself. `parking_lot` keeps the threads that wait for any lock of the process
//! in one table with locks of its own: a child that is forked while another thread holds one of those hangs at the first lock
//! that it waits for, also in engines that it made itself.

pub(crate) use std::sync::atomic;
pub(crate) use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
pub(crate) use std::time::Instant;
pub(crate) use std::{thread, thread_local};

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

pub(crate) use crossbeam_utils::sync::{Parker, Unparker};

/// `std`'s, without poisoning: code that may panic does not run under calomel's locks.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the lock is not free for so long that it must be the thread itself that holds it.
    #[cfg(test)]
    pub(crate) fn is_held(&self) -> bool {
        let end = Instant::now() + Duration::from_secs(5);
        while self.try_lock().is_none() {
            if Instant::now() > end {
                return true;
            }
            thread::yield_now();
        }
        false
    }
}

/// As [`Mutex`].
#[derive(Default)]
pub(crate) struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> RwLock<T> {
        RwLock(std::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `std`'s, which makes a system call for each notification; this one only where threads wait. What they wait for must be
/// changed under the mutex.
#[derive(Default)]
pub(crate) struct Condvar {
    waiting: AtomicUsize,
    inner: std::sync::Condvar,
}

impl Condvar {
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        // Under the mutex, so that a thread that locks it later sees this.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.inner.wait(guard).unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Also returns whether the time is over.
    pub(crate) fn wait_for<'a, T>(&self, guard: MutexGuard<'a, T>, timeout: Duration) -> (MutexGuard<'a, T>, bool) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (guard, result) = self.inner.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        (guard, result.timed_out())
    }

    /// As `wait_for`, until a deadline.
    pub(crate) fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, deadline: Instant) -> (MutexGuard<'a, T>, bool) {
        self.wait_for(guard, deadline.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn notify_one(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_all();
        }
    }
}

/// A mutex that a thread may wait for with a time limit, which `std`'s has not. Its value is in a box, which the thread that has
/// the lock takes.
pub(crate) struct TimedMutex<T> {
    free: Mutex<Option<Box<T>>>,
    unlocked: Condvar,
}

impl<T> TimedMutex<T> {
    pub(crate) fn new(value: T) -> TimedMutex<T> {
        TimedMutex { free: Mutex::new(Some(Box::new(value))), unlocked: Condvar::default() }
    }

    pub(crate) fn try_lock(&self) -> Option<TimedMutexGuard<'_, T>> {
        TimedMutexGuard::of(self, self.free.lock().take())
    }

    pub(crate) fn try_lock_for(&self, timeout: Duration) -> Option<TimedMutexGuard<'_, T>> {
        let deadline = Instant::now() + timeout;
        let (mut free, mut timed_out) = (self.free.lock(), false);
        while free.is_none() && !timed_out {
            (free, timed_out) = self.unlocked.wait_until(free, deadline);
        }
        TimedMutexGuard::of(self, free.take())
    }
}

/// The value of a [`TimedMutex`].
pub(crate) struct TimedMutexGuard<'a, T> {
    mutex: &'a TimedMutex<T>,
    /// `Some` until this is dropped.
    value: Option<Box<T>>,
}

impl<'a, T> TimedMutexGuard<'a, T> {
    fn of(mutex: &'a TimedMutex<T>, value: Option<Box<T>>) -> Option<TimedMutexGuard<'a, T>> {
        value.map(|value| TimedMutexGuard { mutex, value: Some(value) })
    }
}

impl<T> Deref for TimedMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("present until it is dropped")
    }
}

impl<T> DerefMut for TimedMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("present until it is dropped")
    }
}

impl<T> Drop for TimedMutexGuard<'_, T> {
    fn drop(&mut self) {
        *self.mutex.free.lock() = self.value.take();
        self.mutex.unlocked.notify_one();
    }
}
