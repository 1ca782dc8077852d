//! Shared memory alone: names, killed processes, other users, limits of the system, memory that is reclaimed while it is read,
//! and malformed input from peers.
//!
//! As in `tests/processes`, the process at the other end is this program again, in the test [`child`].

// Signals, limits, descriptors and shared memory are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../processes/support.rs"]
mod support;

#[allow(dead_code, reason = "tests/adversarial uses the rest")]
mod forged;
mod killed;
mod limits;
mod malformed;
mod memory;
mod memory_descriptors;
mod names;
mod readers;
mod revoking;
mod roles;
mod sizes;
mod strangers;
mod upgrade;
mod users;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if let Ok(role) = std::env::var(support::ROLE) {
        support::over_parents_carrier(|| roles::run(&role));
    }
}
