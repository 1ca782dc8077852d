//! Overload, by misbehaving peers and by very many honest ones: the server's memory stays bounded, other peers are served
//! meanwhile, and afterwards the server recovers.
//!
//! A test starts this program again, as the server: with `CALOMEL_TEST_ROLE` set, the test [`child`] plays that role.

// Limits and signals are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../processes/support.rs"]
#[macro_use]
mod support;

mod engines;
mod floods;
mod many_clients;
mod memory;
mod processors;
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
