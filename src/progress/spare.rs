//! Memory of requests and answers, which goes to the thread's next ones.

use std::cell::RefCell;
use std::thread::LocalKey;

use super::EngineEnv;
use crate::proto::{Answer, Incoming};

type Spare<T> = RefCell<Vec<Box<Option<T>>>>;

thread_local! {
    static SPARE_REQUESTS: Spare<Incoming<EngineEnv>> = const { RefCell::new(Vec::new()) };
    static SPARE_ANSWERS: Spare<Answer<EngineEnv>> = const { RefCell::new(Vec::new()) };
}

/// As many as callers mostly have in flight. A thread that receives for others, or handles what others receive, keeps no more than
/// this.
const KEEP: usize = 64;

pub(super) fn request_place() -> Box<Option<Incoming<EngineEnv>>> {
    place(&SPARE_REQUESTS)
}

pub(crate) fn keep_request_place(place: Box<Option<Incoming<EngineEnv>>>) {
    keep(&SPARE_REQUESTS, place);
}

pub(super) fn answer_place() -> Box<Option<Answer<EngineEnv>>> {
    place(&SPARE_ANSWERS)
}

pub(crate) fn keep_answer_place(place: Box<Option<Answer<EngineEnv>>>) {
    keep(&SPARE_ANSWERS, place);
}

// Both fail on a thread that is ending: then the memory is the allocator's.

fn place<T>(spare: &'static LocalKey<Spare<T>>) -> Box<Option<T>> {
    spare.try_with(|spare| spare.borrow_mut().pop()).ok().flatten().unwrap_or_default()
}

fn keep<T>(spare: &'static LocalKey<Spare<T>>, place: Box<Option<T>>) {
    debug_assert!(place.is_none(), "its value was taken");
    let _ = spare.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare.len() < KEEP {
            spare.push(place);
        }
    });
}
