//! Several processes call each other and transfer memory, while they are killed, stopped and restarted, and while their
//! connections are delayed, stalled and cut. All of it is drawn from a seed, which is printed: `CALOMEL_CHAOS_SEED` repeats the
//! faults and the order of calls, but not the timing. `CALOMEL_CHAOS_SECONDS` is the duration.
//!
//! Asserted: each call and transfer ends once, in time; each result is correct, to the byte; no call is handled twice;
//! afterwards each process reaches every other again; and nothing is left over.
//!
//! As in `tests/processes`, the other processes are this program again, in the test [`child`].

// Signals, network namespaces and process state are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../processes/support.rs"]
mod support;

mod content;
mod faults;
mod journal;
mod load;
#[path = "../common/namespaces.rs"]
mod namespaces;
mod network;
mod node;
mod row;
mod serve;

use row::{Over, run};

/// Not a test, but the other processes; does nothing when the suite runs.
#[test]
fn child() {
    if std::env::var(support::ROLE).is_ok() {
        support::over_parents_carrier(node::run);
    }
}

/// A few seconds of each.
mod short {
    use super::*;

    const SECONDS: u64 = 3;

    #[test]
    fn over_tcp() {
        run(Over::Proxies, SECONDS);
    }

    #[test]
    fn over_shm() {
        run(Over::Shm, SECONDS);
    }

    #[test]
    fn over_both() {
        run(Over::Both, SECONDS);
    }

    #[test]
    fn in_namespaces() {
        run(Over::Namespaces, SECONDS);
    }
}

/// As long as configured: `ci/chaos`.
mod long {
    use super::*;

    const SECONDS: u64 = 60;

    #[test]
    #[ignore = "takes a minute: ci/chaos"]
    fn over_tcp() {
        run(Over::Proxies, SECONDS);
    }

    #[test]
    #[ignore = "takes a minute: ci/chaos"]
    fn over_shm() {
        run(Over::Shm, SECONDS);
    }

    #[test]
    #[ignore = "takes a minute: ci/chaos"]
    fn over_both() {
        run(Over::Both, SECONDS);
    }

    #[test]
    #[ignore = "takes a minute: ci/chaos"]
    fn in_namespaces() {
        run(Over::Namespaces, SECONDS);
    }
}

#[cfg(feature = "ofi")]
mod over_ofi {
    use super::*;

    #[test]
    #[ignore = "runs on request: ci/ofi"]
    fn killed_stopped_and_restarted() {
        run(Over::Ofi, 10);
    }
}

#[cfg(feature = "verbs")]
mod over_verbs {
    use super::*;

    #[test]
    #[ignore = "needs an RDMA device: ci/verbs"]
    fn killed_stopped_and_restarted() {
        run(Over::Verbs, 20);
    }
}
