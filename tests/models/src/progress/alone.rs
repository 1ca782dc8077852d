//! Models of the driver lock by itself: its guarantees to each thread, with any driver.

use std::sync::Arc;

use loom::thread;

use super::driver_lock::{Acquired, DriverLock};
use super::with_sleeper;
use crate::model;

/// The progress thread holds the driver lock, and sleeps in the reactor if `parked`.
fn driver_lock(parked: bool) -> Arc<DriverLock> {
    let driver_lock = Arc::new(DriverLock::default());
    assert!(driver_lock.try_acquire_as_progress());
    assert!(!parked || driver_lock.park());
    driver_lock
}

/// A caller that waits for the driver lock as long as it takes.
fn waits_for(driver_lock: &Arc<DriverLock>) -> thread::JoinHandle<()> {
    let driver_lock = driver_lock.clone();
    thread::spawn(move || {
        with_sleeper(|sleeper| {
            while let Acquired::Queued { .. } = driver_lock.acquire_or_queue(&sleeper.waiter) {
                sleeper.sleep(None);
            }
        });
        driver_lock.release();
    })
}

/// A caller asks for the driver lock while its holder, the progress thread, goes to sleep: the holder stays awake, or the
/// caller borrows the lock.
pub(crate) fn no_caller_queues_behind_a_sleeping_holder() {
    model(4, || {
        let driver_lock = driver_lock(false);
        let asked = {
            let driver_lock = driver_lock.clone();
            thread::spawn(move || with_sleeper(|sleeper| driver_lock.acquire_or_queue(&sleeper.waiter)))
        };
        let parked = driver_lock.park();
        match asked.join().unwrap() {
            Acquired::Borrowed => assert!(parked),
            Acquired::Queued { soon } => assert!(soon && !parked && driver_lock.is_wanted() && !driver_lock.is_parked()),
            Acquired::Yes => panic!("the progress thread held the driver lock"),
        }
    });
}

/// However a caller releases the lock, the next waiter gets it.
pub(crate) fn each_form_of_release_wakes_the_next_waiter() {
    for gives_back in [true, false] {
        model(4, move || {
            let driver_lock = driver_lock(true);
            assert_eq!(driver_lock.try_acquire(), Some(Acquired::Borrowed));
            let next = waits_for(&driver_lock);
            if gives_back {
                assert!(driver_lock.release_borrowed());
            } else {
                assert!(driver_lock.take_from_progress());
                assert!(!driver_lock.is_borrowed() && !driver_lock.release_borrowed(), "the caller now holds it");
                driver_lock.release();
            }
            next.join().unwrap();
            assert!(!driver_lock.is_wanted());
        });
    }
}

/// The progress thread releases the lock for a caller that wants it.
pub(crate) fn released_driver_lock_is_acquired_by_the_waiter() {
    model(4, || {
        let driver_lock = driver_lock(false);
        let next = waits_for(&driver_lock);
        while !driver_lock.is_wanted() {
            thread::yield_now();
        }
        driver_lock.release_as_progress();
        next.join().unwrap();
        assert!(!driver_lock.is_wanted() && driver_lock.try_acquire_as_progress());
    });
}

/// The progress thread wakes while a caller borrows its lock: one of the two holds it in the end, and both know which.
pub(crate) fn borrowed_driver_lock_has_one_holder() {
    model(6, || {
        let driver_lock = driver_lock(true);
        let progress = {
            let driver_lock = driver_lock.clone();
            thread::spawn(move || driver_lock.unpark_progress())
        };
        let acquired = driver_lock.try_acquire();
        let given_back = acquired.is_some() && driver_lock.release_borrowed();
        let has_lock = progress.join().unwrap();
        assert_eq!(has_lock, acquired.is_none() || given_back);
        assert!(!driver_lock.is_borrowed() && !driver_lock.is_parked() && !driver_lock.is_free());
        if has_lock {
            driver_lock.release_as_progress()
        } else {
            driver_lock.release()
        }
        assert!(driver_lock.is_free() && driver_lock.try_acquire_as_progress());
    });
}
