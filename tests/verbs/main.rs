//! What RDMA devices alone have to hold: how they and their addresses fail, several of them, memory that is taken back while a
//! device moves it, peers that die, peers that lie, and what is left behind.
//!
//! They run where there is a device: `ci/verbs`. As in `tests/processes`, the process at the other end is this program again,
//! in the test [`child`].
#![cfg(feature = "verbs")]
// Signals, limits, capabilities and devices are the system's.
#![allow(unsafe_code)]

/// One `#[test]` for each of these functions, run where there is an RDMA device; or while no other test uses it.
macro_rules! on_device {
    (alone: $($test:ident),* $(,)?) => { on_device!(@ write, $($test),*); };
    ($($test:ident),* $(,)?) => { on_device!(@ read, $($test),*); };
    (@ $share:ident, $($test:ident),*) => {
        mod on_device {
            $(
                #[test]
                #[ignore = "needs an RDMA device: ci/verbs"]
                fn $test() {
                    let _share = $crate::DEVICES.$share();
                    let _watchdog = $crate::support::Watchdog::start(concat!(module_path!(), "::", stringify!($test)));
                    $crate::support::over($crate::support::Carrier::Verbs, super::$test);
                }
            )*
        }
    };
}

/// Read by the tests that use the devices; written by the test that counts what is in use there.
static DEVICES: std::sync::RwLock<()> = std::sync::RwLock::new(());

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../processes/support.rs"]
mod support;

mod addresses;
mod devices;
mod dying;
mod foreign;
mod leftovers;
mod limits;
mod logging;
mod moving;
mod pair;
mod raw;
mod revoking;
mod roles;
mod segments;

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if let Ok(role) = std::env::var(support::ROLE) {
        support::over_parents_carrier(|| roles::run(&role));
    }
}
