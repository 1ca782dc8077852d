//! TLS on tcp alone: access control, errors of refused peers, and a network that changes, cuts or delays bytes, which affects
//! no other connection.
//!
//! As in `tests/processes`, the process at the other end is this program again, in the test [`child`].

// Signals are the system's.
#![allow(unsafe_code)]

mod authority;
#[path = "../common/mod.rs"]
mod common;
#[path = "../processes/support.rs"]
mod support;

mod calls;
mod config;
mod foreign;
mod hostile;
mod identities;
mod memory;
mod narrow;
mod network;
mod refused;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if std::env::var(support::ROLE).is_ok() {
        memory::role();
    }
}
