//! What TLS on tcp alone has to hold: who is let in, what is said to who is not, and that nothing on the way can change,
//! cut or hold up more than the connection that it is on.
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
