//! The concurrent parts of calomel under [loom](loom), which runs them in every order of threads, and with every value that
//! weak memory lets a load return. The code itself is calomel's; what it stands on is replaced: `crate::sync` by loom's
//! primitives, `mio` by a reactor of one flag, shared memory by memory that loom watches, the protocol by a few lines.
//! Nothing here has a clock: who must be woken and is not sleeps for ever, which loom reports as a deadlock.

// Of what is taken from calomel, the models use a part.
#![allow(dead_code, unused_macros)]

/// Calomel's files say `mio::`.
extern crate self as mio;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

mod completions;
#[path = "../../../src/deferred_log.rs"]
mod deferred_log;
mod gates;
mod memory;
mod progress;
mod proto;
mod reactor;
mod rings;
mod seats;
mod sync;
mod transport;
mod watched;

use progress::alone;
pub(crate) use reactor::{Events, Poll, Registry, Token, Waker, event};

macro_rules! models {
    ($($file:ident: $($name:ident)*;)*) => {
        &[$($((concat!(stringify!($file), "::", stringify!($name)), $file::$name),)*)*]
    };
}

const MODELS: &[(&str, fn())] = models! {
    completions: a_thread_is_woken a_task_is_woken_also_when_it_has_moved one_of_two_takers_gets_it;
    gates: nothing_touches_memory_after_close nothing_is_written_after_an_operation_ends
        copies_in_both_directions_never_lock_each_other_out;
    seats: two_callers_get_what_they_wait_for a_turn_is_passed_on nobody_sits_and_queues
        an_end_from_elsewhere_is_not_slept_through the_progress_thread_gives_way_and_comes_back what_the_reactor_tells_is_not_lost
        nothing_is_left_by_a_caller_that_gets_up
        the_progress_thread_can_be_stopped_wherever_it_sleeps a_new_deadline_is_not_slept_through;
    alone: nobody_queues_for_a_seat_that_sleeps each_way_to_get_up_wakes_the_next a_seat_that_is_vacated_is_taken
        a_borrowed_seat_has_one_owner;
    rings: records_arrive_in_order nobody_sleeps_through_an_answer nothing_is_read_after_memory_is_taken_back
        what_was_lent_comes_back what_comes_back_is_taken_back the_end_of_a_link_ends_what_it_lent
        what_is_read_after_a_withdrawal_is_thrown_away;
};

/// How many orders the model that runs now has been run in.
static ORDERS: AtomicUsize = AtomicUsize::new(0);

/// Tries every order of events with at most so many preemptions: nearly all that goes wrong does so with two.
fn model(preemptions: usize, story: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    let story = Arc::new(story);
    builder.check(move || {
        ORDERS.fetch_add(1, Ordering::Relaxed);
        story();
    });
}

/// Runs the models whose names contain what is asked for.
fn main() -> ExitCode {
    let asked = std::env::args().nth(1).unwrap_or_default();
    for (name, model) in MODELS.iter().filter(|(name, _)| name.contains(&asked)) {
        ORDERS.store(0, Ordering::Relaxed);
        let begin = Instant::now();
        let held = std::panic::catch_unwind(model).is_ok();
        let outcome = if held { "holds" } else { "FAILS" };
        println!("{name} {outcome}: {} orders, {:.1?}", ORDERS.load(Ordering::Relaxed), begin.elapsed());
        if !held {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
