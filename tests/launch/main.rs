//! The ways to start the ranks of a job: each test starts them as a launcher does, as processes with an environment, and one
//! is the launcher itself.
//!
//! As in `tests/processes`, the ranks are this program again, in the test [`child`].

// Signals are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/namespaces.rs"]
mod namespaces;
#[path = "../processes/support.rs"]
#[macro_use]
mod support;

mod dying;
mod launcher;
mod rank;
mod ways;
mod wrong;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if std::env::var(support::ROLE).is_ok() {
        support::over_parents_carrier(rank::run);
    }
}
