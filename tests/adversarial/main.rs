//! Adversarial peers: programs that speak the protocol by hand and violate it. For each violation, the victim hangs up,
//! refuses, or ignores it; its memory is neither changed nor read; its other peers are not affected; its own operations with
//! the adversary end; and when the adversary is gone, nothing of it is left.
//!
//! The cases run over tcp and over shared memory. `loop://` carries no bytes that an adversary could make: everything on it
//! comes from an engine. Violations of the shared-memory transport itself are in `tests/shm`.
//!
//! The victim is another process: this program again, in the test [`child`]. Each case prints a line with its outcome (`cargo
//! test --test adversarial -- --nocapture`).

// Sockets, shared memory and the state of processes are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "tests/shm uses the rest")]
#[path = "../shm/forged.rs"]
mod forged;
#[path = "../processes/support.rs"]
mod support;

mod adversary;
mod bulks;
mod channel;
mod floods;
mod frames;
mod handshakes;
mod identity;
mod lists;
mod numbers;
mod ranges;
mod reflection;
mod replay;
mod resumption;
mod scene;
mod servers;
mod slow;
mod victim;
mod work;

/// The victim reports how much it has allocated.
#[global_allocator]
static ALLOCATOR: work::Counting = work::Counting;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if std::env::var(support::ROLE).is_ok() {
        support::over_parents_carrier(victim::run);
    }
}

/// One `#[test]` over tcp and one over shared memory for each of these functions.
#[macro_export]
macro_rules! over_both {
    ($($test:ident),* $(,)?) => {
        mod over_tcp {
            $(
                #[test]
                fn $test() {
                    $crate::support::over($crate::support::Carrier::Tcp, super::$test);
                }
            )*
        }
        mod over_shm {
            $(
                #[test]
                fn $test() {
                    $crate::support::over($crate::support::Carrier::Shm, super::$test);
                }
            )*
        }
    };
}
