//! Names of engines on one host.

use calomel::{Engine, Error};

use crate::assert_error;
use crate::roles::{add, start};
use crate::support::*;

/// Another test may start a process at this moment: until it executes another program, it has all descriptors of this one, and
/// so the names.
fn built(name: &str) -> Engine {
    let mut built = None;
    eventually("the name is free", || match configured().listen(name).build() {
        Ok(engine) => {
            built = Some(engine);
            true
        }
        Err(Error::AddressInUse { .. }) => false,
        Err(error) => panic!("{error}"),
    });
    built.unwrap()
}

#[test]
fn name_in_use_is_an_error_until_its_engine_is_killed() {
    let _watchdog = Watchdog::start("names::name_in_use_is_an_error_until_its_engine_is_killed");
    over(Carrier::Shm, || ());
    let name = format!("shm://names-{}", std::process::id());
    let client = client();
    for _ in 0..10 {
        let (child, address) = start(&[(LISTEN, &name)]);
        assert_eq!(address, name);
        assert_eq!(add(&client, &name), "3 by Some(Shm)");
        assert_error!(configured().listen(&name).build(), Error::AddressInUse { address } if address.to_string() == name);
        drop(child);
        let successor = built(&name);
        define_add(&successor);
        eventually("the disconnect is noticed", || !client.lookup(&name).unwrap().is_connected());
        assert_eq!(add(&client, &name), "3 by Some(Shm)");
        successor.finalize().unwrap();
        eventually("the disconnect is noticed", || !client.lookup(&name).unwrap().is_connected());
        eventually("no engine listens", || add(&client, &name).contains("listens under this name"));
    }
}

#[test]
fn names_longer_than_the_system_allows_are_errors() {
    let _watchdog = Watchdog::start("names::names_longer_than_the_system_allows_are_errors");
    over(Carrier::Shm, || ());
    let client = client();
    // 107 bytes, less those of `calomel/`.
    for (len, fits) in [(1, true), (98, true), (99, true), (100, false), (107, false), (108, false), (290, false)] {
        let name = format!("shm://{}", "n".repeat(len));
        match configured().listen(&name).build() {
            Ok(engine) => {
                assert!(fits, "{len}");
                define_add(&engine);
                assert_eq!(add(&client, &name), "3 by Some(Shm)");
            }
            Err(error) => {
                assert!(!fits && error.to_string().contains("too long"), "{len}: {error}");
                assert_error!(Err::<(), _>(error), Error::InvalidAddress { .. });
                assert_error!(client.lookup(&name), Error::InvalidAddress { .. });
            }
        }
    }
    // Listening picks a name; dialling needs one.
    let (a, b) = (server(), server());
    assert_ne!(a.address(), b.address());
    assert_error!(client.lookup("shm://"), Error::InvalidAddress { .. });
}

#[test]
fn finalized_engine_frees_its_names() {
    let _watchdog = Watchdog::start("names::finalized_engine_frees_its_names");
    over(Carrier::Shm, || ());
    let name = format!("shm://given-up-{}", std::process::id());
    for _ in 0..50 {
        built(&name).finalize().unwrap();
        // Dropping it has the same effect.
        drop(built(&name));
    }
}
