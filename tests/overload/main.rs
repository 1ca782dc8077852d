//! Too much of everything, from peers that do not play by the rules and from very many that do: the server's memory stays
//! within bounds, others are served meanwhile, and all is as before afterwards.
//!
//! A test starts this very program again, as the server: with `CALOMEL_TEST_ROLE` set, the test [`child`] is that.

// Limits and signals are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../processes/support.rs"]
#[macro_use]
mod support;

mod floods;
mod many_clients;
mod memory;
mod raw;
mod server;
mod soak;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if let Ok(role) = std::env::var(support::ROLE) {
        support::over_parents_carrier(|| server::run(&role));
    }
}
