//! Models of the driver lock by itself: its guarantees to each thread, with any driver.

use std::sync::Arc;

use loom::thread;

use super::seat::{Sat, Seat};
use super::with_sleeper;
use crate::model;

/// The progress thread holds the driver lock, and sleeps in the reactor if `parked`.
fn driver_lock(parked: bool) -> Arc<Seat> {
    let driver_lock = Arc::new(Seat::default());
    assert!(driver_lock.sit_back());
    assert!(!parked || driver_lock.park());
    driver_lock
}

/// A caller that waits for the driver lock as long as it takes.
fn waits_for(driver_lock: &Arc<Seat>) -> thread::JoinHandle<()> {
    let driver_lock = driver_lock.clone();
    thread::spawn(move || {
        with_sleeper(|sleeper| {
            while let Sat::Queued { .. } = driver_lock.sit_or_queue(&sleeper.waiter) {
                sleeper.sleep(None);
            }
        });
        driver_lock.get_up();
    })
}

/// A caller asks for the driver lock while its holder, the progress thread, goes to sleep: the holder stays awake, or the
/// caller borrows the lock.
pub(crate) fn no_caller_queues_behind_a_sleeping_holder() {
    model(4, || {
        let driver_lock = driver_lock(false);
        let asked = {
            let driver_lock = driver_lock.clone();
            thread::spawn(move || with_sleeper(|sleeper| driver_lock.sit_or_queue(&sleeper.waiter)))
        };
        let parked = driver_lock.park();
        match asked.join().unwrap() {
            Sat::Borrowed => assert!(parked),
            Sat::Queued { soon } => assert!(soon && !parked && driver_lock.is_wanted() && !driver_lock.is_parked()),
            Sat::Yes => panic!("the progress thread held the driver lock"),
        }
    });
}

/// However a caller releases the lock, the next waiter gets it.
pub(crate) fn each_form_of_release_wakes_the_next_waiter() {
    for gives_back in [true, false] {
        model(4, move || {
            let driver_lock = driver_lock(true);
            assert_eq!(driver_lock.sit(), Some(Sat::Borrowed));
            let next = waits_for(&driver_lock);
            if gives_back {
                assert!(driver_lock.give_back());
            } else {
                assert!(driver_lock.keep());
                assert!(!driver_lock.is_borrowed() && !driver_lock.give_back(), "the caller now holds it");
                driver_lock.get_up();
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
        driver_lock.vacate();
        next.join().unwrap();
        assert!(!driver_lock.is_wanted() && driver_lock.sit_back());
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
        let acquired = driver_lock.sit();
        let given_back = acquired.is_some() && driver_lock.give_back();
        let has_lock = progress.join().unwrap();
        assert_eq!(has_lock, acquired.is_none() || given_back);
        assert!(!driver_lock.is_borrowed() && !driver_lock.is_parked() && !driver_lock.is_free());
        if has_lock {
            driver_lock.vacate()
        } else {
            driver_lock.get_up()
        }
        assert!(driver_lock.is_free() && driver_lock.sit_back());
    });
}
