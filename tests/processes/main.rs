//! Two processes, one of which dies, freezes, restarts, or is no engine; over tcp, over shared memory, and, unless the test is
//! about sockets, over an RDMA device.
//!
//! A test starts this program again as the process at the other end: with `CALOMEL_TEST_ROLE` set, the test [`child`] plays
//! that role, and prints the lines that its parent waits for.

// Signals, limits and process state are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
mod support;

mod corruption;
mod dying;
mod foreign;
mod forking;
mod goodbye;
mod leftovers;
#[path = "../common/namespaces.rs"]
mod namespaces;
mod networks;
mod proxy;
mod restart;
mod roles;
mod siblings;
mod signals;
mod transfers;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if let Ok(role) = std::env::var(support::ROLE) {
        support::over_parents_carrier(|| roles::run(&role));
    }
}
