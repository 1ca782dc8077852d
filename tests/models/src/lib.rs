//! The concurrent parts of calomel under [loom](loom), which runs them in every order of threads, and with every value that
//! weak memory lets a load return. The code itself is calomel's; what it stands on is replaced: `crate::sync` by loom's
//! primitives, `mio` by a reactor of one flag, the protocol and the transports by a few lines. Nothing here has a clock: who
//! must be woken and is not sleeps for ever, which loom reports as a deadlock.
#![cfg(test)]
// Of what is taken from calomel, the models use a part.
#![allow(dead_code, unused_macros)]

/// Calomel's files say `mio::`.
extern crate self as mio;

#[path = "../../../src/memory/region.rs"]
mod region;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

mod completions;
mod gates;
mod progress;
mod proto;
mod reactor;
mod seats;
mod sync;

pub(crate) use reactor::{Events, Poll, Registry, Token, Waker, event};

/// Tries every order of events with at most so many preemptions: nearly all that goes wrong does so with two.
#[track_caller]
fn model(preemptions: usize, story: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    let orders = Arc::new(AtomicUsize::new(0));
    let tried = orders.clone();
    builder.check(move || {
        tried.fetch_add(1, Ordering::Relaxed);
        story();
    });
    println!("{}: {} orders", std::panic::Location::caller(), orders.load(Ordering::Relaxed));
}
