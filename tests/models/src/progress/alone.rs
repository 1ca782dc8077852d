//! The seat by itself: what it promises to each thread, whatever the driver makes of it.

use std::sync::Arc;

use loom::thread;

use super::seat::{Sat, Seat};
use super::with_sleeper;
use crate::model;

/// The progress thread has the seat, and sleeps there where `parked`.
fn seat(parked: bool) -> Arc<Seat> {
    let seat = Arc::new(Seat::default());
    assert!(seat.sit_back());
    assert!(!parked || seat.park());
    seat
}

/// A caller that waits for the seat for as long as it takes.
fn waits_for(seat: &Arc<Seat>) -> thread::JoinHandle<()> {
    let seat = seat.clone();
    thread::spawn(move || {
        with_sleeper(|sleeper| {
            while let Sat::Queued { .. } = seat.sit_or_queue(&sleeper.waiter) {
                sleeper.sleep(None);
            }
        });
        seat.get_up();
    })
}

/// The progress thread is about to sleep while a caller asks for the seat: it stays awake, or the caller has the seat.
pub(crate) fn nobody_queues_for_a_seat_that_sleeps() {
    model(4, || {
        let seat = seat(false);
        let asked = {
            let seat = seat.clone();
            thread::spawn(move || with_sleeper(|sleeper| seat.sit_or_queue(&sleeper.waiter)))
        };
        let parked = seat.park();
        match asked.join().unwrap() {
            Sat::Borrowed => assert!(parked),
            Sat::Queued { soon } => assert!(soon && !parked && seat.is_wanted() && !seat.is_parked()),
            Sat::Yes => panic!("the progress thread had the seat"),
        }
    });
}

/// However a caller gets up, the next one has its turn.
pub(crate) fn each_way_to_get_up_wakes_the_next() {
    for gives_back in [true, false] {
        model(4, move || {
            let seat = seat(true);
            assert_eq!(seat.sit(), Some(Sat::Borrowed));
            let next = waits_for(&seat);
            if gives_back {
                assert!(seat.give_back());
            } else {
                assert!(seat.keep());
                assert!(!seat.is_borrowed() && !seat.give_back(), "it is the caller's own now");
                seat.get_up();
            }
            next.join().unwrap();
            assert!(!seat.is_wanted());
        });
    }
}

/// The progress thread gets up for whoever wants the seat.
pub(crate) fn a_seat_that_is_vacated_is_taken() {
    model(4, || {
        let seat = seat(false);
        let next = waits_for(&seat);
        while !seat.is_wanted() {
            thread::yield_now();
        }
        seat.vacate();
        next.join().unwrap();
        assert!(!seat.is_wanted() && seat.sit_back());
    });
}

/// The progress thread wakes while a caller has its seat: one of the two sits in the end, and both know which.
pub(crate) fn a_borrowed_seat_has_one_owner() {
    model(6, || {
        let seat = seat(true);
        let progress = {
            let seat = seat.clone();
            thread::spawn(move || seat.unpark_progress())
        };
        let sat = seat.sit();
        let given_back = sat.is_some() && seat.give_back();
        let has_seat = progress.join().unwrap();
        assert_eq!(has_seat, sat.is_none() || given_back);
        assert!(!seat.is_borrowed() && !seat.is_parked() && !seat.is_free());
        if has_seat {
            seat.vacate()
        } else {
            seat.get_up()
        }
        assert!(seat.is_free() && seat.sit_back());
    });
}
