//! Models of the concurrent parts of calomel under [loom](loom), which runs them in every order of threads, and with every
//! value that weak memory lets a load return. The code under test is calomel's; its dependencies are replaced: `crate::sync` by
//! loom's primitives, `mio` by a reactor of one flag, shared memory by memory that loom watches, the protocol by a few lines.
//! Each file under test is included as it is, by its path: with `cfg(loom)` in calomel itself, its `Core` would need a second
//! reactor, protocol and clock, since the real ones block in system calls that loom can't see; all of that stands here instead.
//! There is no clock: a thread that is not woken when it must be sleeps for ever, which loom reports as a deadlock.

// The models use only a part of what is included from calomel.
#![allow(dead_code, unused_macros)]

/// Calomel's files refer to `mio::`.
extern crate self as mio;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

mod completions;
#[path = "../../../src/copy.rs"]
mod copy;
#[path = "../../../src/deferred_log.rs"]
mod deferred_log;
mod driver_lock;
mod gates;
mod memory;
#[path = "../../../src/payload.rs"]
mod payload;
mod progress;
mod proto;
mod reactor;
mod rings;
mod sync;
mod transport;
mod watched;

use progress::{alone, signals};
pub(crate) use reactor::{Events, Poll, Registry, Token, Waker, event};

macro_rules! models {
    ($($file:ident: $($name:ident)*;)*) => {
        &[$($((concat!(stringify!($file), "::", stringify!($name)), $file::$name),)*)*]
    };
}

const MODELS: &[(&str, fn())] = models! {
    completions: waiting_thread_is_woken task_that_has_moved_is_woken task_that_is_to_lead_learns_of_the_end
        one_of_two_takers_gets_the_outcome;
    gates: no_access_after_close no_write_after_an_operation_ends copies_in_both_directions_do_not_deadlock;
    driver_lock: two_callers_get_their_outcomes handed_off_driver_lock_is_not_lost holder_is_not_in_the_queue
        outcome_from_another_thread_wakes_the_driver progress_thread_releases_the_lock_and_returns
        reactor_event_is_not_lost event_during_release_is_taken progress_thread_is_stopped_wherever_it_sleeps
        new_deadline_wakes_the_driver task_whose_polls_lead_is_woken
        task_behind_a_leader_that_is_kept_is_woken;
    alone: no_caller_queues_behind_a_sleeping_holder each_form_of_release_wakes_the_next_waiter
        released_driver_lock_is_acquired_by_the_waiter borrowed_driver_lock_has_one_holder;
    rings: records_arrive_in_order injected_records_arrive_in_order response_wakes_the_sleeping_end
        injected_response_wakes_the_sleeping_end no_read_after_reclaim loan_ends_when_the_reader_has_finished
        end_of_a_loan_and_reclaim_can_coincide end_of_a_link_ends_its_loans read_after_withdrawal_is_discarded;
    signals: edge_triggered_loop_misses_no_signal level_triggered_loop_goes_back_to_sleep
        loop_beside_another_thread_misses_no_signal;
};

/// In how many orders the current model has run.
static ORDERS: AtomicUsize = AtomicUsize::new(0);

/// Tries every order of events with at most this many preemptions: nearly all bugs need no more than two.
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

/// Runs the models whose names contain the argument.
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
