//! The test that decides on RMA, and what RMA promises where it has passed.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::super::limits::SELF_TEST;
use super::super::self_test;
use super::{BOUND, provider};
use crate::address::OfiProvider;

/// The provider that is asked, at the address of the device of `ci/softroce`.
fn device() -> SocketAddr {
    let ip: IpAddr = std::env::var("CALOMEL_VERBS").expect("an RDMA device").parse().unwrap();
    SocketAddr::new(ip, 0)
}

/// Software stands in for devices, by the providers of the first two whose names are opaque.
#[test]
fn the_test_of_a_provider_ends_in_time() {
    for name in [OfiProvider::Cxi, OfiProvider::Opx] {
        if let Err(reason) = provider::available(name) {
            println!("skipped: {reason}");
            continue;
        }
        let begin = Instant::now();
        let outcome = self_test::run(name, "127.0.0.1:0".parse().unwrap());
        println!("{name}: {outcome:?} after {:?}", begin.elapsed());
        assert!(begin.elapsed() < SELF_TEST + BOUND);
    }
}

/// With `FI_MR_CACHE_MAX_COUNT=0` libfabric has no cache of registrations.
#[test]
#[ignore = "needs an RDMA device: ci/ofi --softroce"]
fn a_cache_of_registrations_rules_rma_out() {
    let is_cached = std::env::var("FI_MR_CACHE_MAX_COUNT").is_err();
    let begin = Instant::now();
    let outcome = self_test::run(OfiProvider::Verbs, device());
    println!("{outcome:?} after {:?}", begin.elapsed());
    match outcome {
        Ok(_) => assert!(!is_cached, "memory is open after its registration was closed, and the test has not noticed"),
        Err(reason) => assert!(is_cached && reason.contains("does not revoke"), "{reason}"),
    }
}
