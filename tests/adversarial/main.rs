//! Peers that lie: programs that speak the protocol by hand and say what no engine says. Whatever it is, the engine that they
//! say it to hangs up, refuses, or pays no heed; its memory stays as it is and unread; its other peers notice nothing; what it
//! had under way with the liar ends; and when the liar is gone, nothing of it is left.
//!
//! The lies are told over tcp and over shared memory alike. `loop://` has no bytes that a liar could make: what goes through it
//! comes from an engine. What lies about shared memory itself there are is in `tests/shm`.
//!
//! The engine that is lied to, the victim, is another process: this program again, in the test [`child`]. Each lie that has come
//! to nothing prints a line (`cargo test --test adversarial -- --nocapture`).

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

/// The victim tells how much it has allocated.
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
