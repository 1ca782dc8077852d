//! Calomel's `sync`, by loom.

pub(crate) use loom::sync::Condvar;
pub(crate) use loom::sync::MutexGuard;
pub(crate) use loom::sync::atomic;
pub(crate) use loom::sync::{RwLockReadGuard, RwLockWriteGuard};
pub(crate) use loom::thread;
use std::ops::Add;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// A clock that advances at each reading, so that the driver does not poll again before it checks for work and sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub(crate) fn now() -> Instant {
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        Instant(Duration::from_millis(LOOKS.fetch_add(1, std::sync::atomic::Ordering::Relaxed)))
    }

    pub(crate) fn saturating_duration_since(&self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, more: Duration) -> Instant {
        Instant(self.0 + more)
    }
}

#[derive(Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }

    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap()
    }
}

pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> RwLock<T> {
        RwLock(loom::sync::RwLock::new(value))
    }

    #[track_caller]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap()
    }

    #[track_caller]
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap()
    }
}

/// A flag that one thread waits for and clears.
#[derive(Default)]
pub(crate) struct Flag {
    up: Mutex<bool>,
    changed: Condvar,
}

impl Flag {
    pub(crate) fn raise(&self) {
        *self.up.lock() = true;
        self.changed.notify_one();
    }

    pub(crate) fn wait(&self) {
        let mut up = self.up.lock();
        while !*up {
            up = self.changed.wait(up).unwrap();
        }
        *up = false;
    }

    /// Clears it if it is set.
    pub(crate) fn take(&self) -> bool {
        std::mem::take(&mut *self.up.lock())
    }
}

pub(crate) struct Parker(Unparker);

#[derive(Clone)]
pub(crate) struct Unparker(Arc<Flag>);

impl Parker {
    pub(crate) fn new() -> Parker {
        Parker(Unparker(Arc::default()))
    }

    pub(crate) fn unparker(&self) -> &Unparker {
        &self.0
    }

    pub(crate) fn park(&self) {
        self.0.0.wait();
    }

    /// The deadline passes at once, which is one of its possible times.
    pub(crate) fn park_deadline(&self, _: Instant) {
        if !self.0.0.take() {
            loom::thread::yield_now();
        }
    }
}

impl Unparker {
    pub(crate) fn unpark(&self) {
        self.0.raise();
    }
}

/// The methods of `std`'s thread-local keys that loom's keys lack.
pub(crate) struct LocalKey<T: 'static>(pub &'static loom::thread::LocalKey<T>);

impl<T> LocalKey<T> {
    pub(crate) fn try_with<R>(&'static self, f: impl FnOnce(&T) -> R) -> Result<R, loom::thread::AccessError> {
        self.0.try_with(f)
    }
}

impl<T> LocalKey<std::cell::Cell<T>> {
    pub(crate) fn set(&'static self, value: T) {
        self.replace(value);
    }

    pub(crate) fn replace(&'static self, value: T) -> T {
        self.0.with(|cell| cell.replace(value))
    }

    pub(crate) fn get(&'static self) -> T
    where
        T: Copy,
    {
        self.0.with(|cell| cell.get())
    }
}

/// Loom's threads share a thread of the system: each needs its own value.
macro_rules! local_keys {
    ($($(#[$doc:meta])* $vis:vis static $name:ident: $type:ty = $init:expr;)*) => {$(
        $(#[$doc])*
        $vis static $name: crate::sync::LocalKey<$type> = {
            loom::thread_local!(static KEY: $type = $init);
            crate::sync::LocalKey(&KEY)
        };
    )*};
}
pub(crate) use local_keys as thread_local;
