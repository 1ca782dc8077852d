//! Names of engines on one host.

use calomel::{Engine, Error};

use crate::assert_error;
use crate::roles::{add, start};
use crate::support::*;

/// Another test may start a process at this moment: until that is another program, it has all descriptors of this one, and so
/// the names.
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
fn a_name_in_use_is_an_error_and_free_at_once_after_a_kill() {
    let _watchdog = Watchdog::start("names::a_name_in_use_is_an_error_and_free_at_once_after_a_kill");
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
        eventually("the death is noticed", || !client.lookup(&name).unwrap().is_connected());
        assert_eq!(add(&client, &name), "3 by Some(Shm)");
        successor.finalize().unwrap();
        eventually("the end is noticed", || !client.lookup(&name).unwrap().is_connected());
        eventually("nobody is there", || add(&client, &name).contains("nobody listens under this name"));
    }
}

#[test]
fn names_are_as_long_as_the_system_allows() {
    let _watchdog = Watchdog::start("names::names_are_as_long_as_the_system_allows");
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
    // To listen at, one is chosen; to dial, it means nothing.
    let (a, b) = (server(), server());
    assert_ne!(a.address(), b.address());
    assert_error!(client.lookup("shm://"), Error::InvalidAddress { .. });
}

#[test]
fn a_finalized_engine_gives_its_names_up() {
    let _watchdog = Watchdog::start("names::a_finalized_engine_gives_its_names_up");
    over(Carrier::Shm, || ());
    let name = format!("shm://given-up-{}", std::process::id());
    for _ in 0..50 {
        built(&name).finalize().unwrap();
        // By being dropped, too.
        drop(built(&name));
    }
}
