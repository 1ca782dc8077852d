//! The conformance suite: each test of the public API runs over every transport.
//!
//! A test is a function that takes a [`Net`](support::Net), which makes engines on the transport under test; `suite!`
//! turns a list of such functions into one `#[test]` per transport.

/// Runs the tests of a module over every transport. A new transport needs one line here.
macro_rules! suite {
    ($($test:ident),* $(,)?) => {
        suite!(@ on_loop, "loop", "loop://", |builder| builder, [$($test),*]);
        suite!(@ on_tcp, "tcp", "tcp://127.0.0.1:0", |builder| builder.same_host_upgrade(false), [$($test),*]);
        // Engines that share a key, with checksums of all payloads.
        suite!(@ on_tcp_guarded, "tcp", "tcp://127.0.0.1:0", crate::support::guarded, [$($test),*]);
        #[cfg(feature = "tls")]
        suite!(@ on_tcp_tls, "tcp", "tcp://127.0.0.1:0", |builder| builder.tls(crate::authority::everybodys()), [$($test),*]);
        suite!(@ on_shm, "shm", "shm://", |builder| builder, [$($test),*]);
        // Payloads are always copied by the kernel, out of the peer's memory.
        suite!(@ on_shm_kernel_copy, "shm", "shm://", |builder| builder.shm_kernel_copy(true), [$($test),*]);
        // As on systems that forbid processes to read each other's memory.
        suite!(@ on_shm_no_kernel_copy, "shm", "shm://", |builder| builder.shm_kernel_copy(false), [$($test),*]);
        #[cfg(feature = "verbs")]
        suite!(@ on_device, [$($test),*]);
        #[cfg(feature = "ofi")]
        suite!(@ on_fabric on_ofi_tcp, "ofi+tcp", |builder| builder.same_host_upgrade(false), [$($test),*]);
        #[cfg(feature = "ofi")]
        suite!(@ on_fabric on_ofi_tcp_guarded, "ofi+tcp", crate::support::guarded, [$($test),*]);
        #[cfg(feature = "ofi")]
        suite!(@ on_request on_ofi_tcp_rxm, "ofi+tcp+rxm", [$($test),*]);
        #[cfg(feature = "ofi")]
        suite!(@ on_request on_ofi_verbs, "ofi+verbs", [$($test),*]);
    };
    (@ $module:ident, $scheme:literal, $listen:literal, $knobs:expr, [$($test:ident),*]) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    let name = concat!(module_path!(), "::", stringify!($test));
                    crate::support::run(name, $scheme, $listen, $knobs, super::$test);
                }
            )*
        }
    };
    // Where libfabric is missing, or too old, a line says so, and the test does nothing.
    (@ on_fabric $module:ident, $scheme:literal, $knobs:expr, [$($test:ident),*]) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    let name = concat!(module_path!(), "::", stringify!($test));
                    if crate::common::has_fabric($scheme) {
                        let listen = crate::common::fabric_address($scheme);
                        crate::support::run(name, $scheme, &listen, $knobs, super::$test);
                    }
                }
            )*
        }
    };
    // Slow, or without a device on most machines: only on request.
    (@ on_request $module:ident, $scheme:literal, [$($test:ident),*]) => {
        mod $module {
            $(
                #[test]
                #[ignore = "runs on request: ci/ofi"]
                fn $test() {
                    let name = concat!(module_path!(), "::", stringify!($test));
                    let listen = crate::common::fabric_address($scheme);
                    crate::support::run(name, $scheme, &listen, crate::support::slow_to_connect, super::$test);
                }
            )*
        }
    };
    // Few machines have an RDMA device, so these tests run only on request.
    (@ on_device, [$($test:ident),*]) => {
        mod on_verbs {
            $(
                #[test]
                #[ignore = "needs an RDMA device: ci/verbs"]
                fn $test() {
                    let name = concat!(module_path!(), "::", stringify!($test));
                    let listen = crate::common::verbs_address(0);
                    crate::support::run(name, "verbs", &listen, |builder| builder.same_host_upgrade(false), super::$test);
                }
            )*
        }
    };
}

#[cfg(feature = "tls")]
#[path = "../tls/authority.rs"]
mod authority;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/event_loop.rs"]
mod event_loop;
mod support;

mod bulk;
mod engine;
mod rpc;
