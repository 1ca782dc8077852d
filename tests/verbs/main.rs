//! What only real RDMA does: run with `ci/softroce`, on a machine that has a device or in a guest that emulates one.
//!
//! `CALOMEL_VERBS` is the address of a device. Without it the tests say so, and that they have tested nothing.
#![cfg(feature = "verbs")]

mod moving;
mod support;
