//! Addresses without a device, without an engine, or of a device that does not work, and machines without a device.

use std::process::Command;
use std::time::{Duration, Instant};

use calomel::{Engine, Error};

use crate::assert_error;
use crate::pair::{Pair, patient};
use crate::support::*;

/// The engine still serves, over tcp: whatever is wrong with its devices.
#[track_caller]
fn assert_lives_over_tcp(engine: &Engine) {
    let other = Engine::builder().same_host_upgrade(false).listen("tcp://127.0.0.1:0").build().unwrap();
    define_add(&other);
    assert_serves(engine, &engine.lookup(other.address()).unwrap());
}

/// Runs everywhere, for few machines have a device.
#[test]
fn a_machine_without_a_device_says_so() {
    let _watchdog = Watchdog::start("addresses::a_machine_without_a_device_says_so");
    let devices = std::fs::read_dir("/sys/class/infiniband").map_or(0, |entries| entries.count());
    let client = Engine::client("verbs").map(drop);
    if devices > 0 {
        return client.unwrap();
    }
    let tcp = Engine::client("tcp").unwrap();
    let server = Engine::server("verbs://127.0.0.1:0").map(drop);
    let both = Engine::builder().listen("tcp://127.0.0.1:0").listen("verbs://127.0.0.1:0").build().map(drop);
    for refused in [client, server, both, tcp.lookup("verbs://10.9.0.1:1").map(drop)] {
        let error = refused.unwrap_err();
        assert!(error.to_string().contains("no RDMA device"), "{error}");
        assert_error!(Err::<(), _>(error), Error::Unsupported { .. });
        assert_lives_over_tcp(&tcp);
    }
}

fn an_address_of_no_device_is_refused_to_listeners() {
    for address in ["verbs://192.0.2.1:0", "verbs://[2001:db8::1]:0"] {
        let error = Engine::server(address).map(drop).unwrap_err();
        let text = error.to_string();
        // The error lists the devices that there are.
        assert!(text.contains(address) && text.contains("no RDMA device") && text.contains("rxe0"), "{text}");
        assert_error!(Err::<(), _>(error), Error::Io { .. });
    }
    Pair::new().assert_serves();
}

/// A loopback address is one of no device, too.
fn a_loopback_address_is_refused_to_listeners() {
    let error = Engine::server("verbs://127.0.0.1:0").map(drop).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("127.0.0.1") && text.contains("no RDMA device"), "{text}");
    Pair::new().assert_serves();
}

#[track_caller]
fn assert_unreachable(engine: &Engine, address: &str, bound: Duration) -> String {
    let begin = Instant::now();
    let to = engine.lookup(address).unwrap();
    let error = engine.procedure::<(u32, u32), u32>("add").on(&to).call(&(1, 2)).unwrap_err();
    assert!(begin.elapsed() < bound, "{:?}: {error}", begin.elapsed());
    assert!(error.to_string().contains(address), "{error}");
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    error.to_string()
}

fn addresses_of_no_device_are_unreachable() {
    let pair = Pair::new();
    let engine = patient().connect_timeout(Duration::from_secs(5)).build().unwrap();
    for address in ["verbs://192.0.2.1:7", "verbs://127.0.0.1:7", "verbs://[::1]:7", "verbs://10.9.0.77:7"] {
        let text = assert_unreachable(&engine, address, Duration::from_secs(8));
        eprintln!("{text}");
        assert!(!text.contains("status"), "a number without words: {text}");
    }
    assert_serves(&engine, &engine.lookup(pair.server.address()).unwrap());
    pair.assert_serves();
}

fn where_nobody_listens_that_is_said_at_once() {
    let pair = Pair::new();
    for _ in 0..3 {
        let text = assert_unreachable(&pair.client, &nowhere(), Duration::from_secs(2));
        assert!(text.contains("no process listens"), "{text}");
    }
    pair.assert_serves();
}

fn an_address_in_use_is_refused() {
    let pair = Pair::new();
    let taken = pair.server.address();
    let error = Engine::server(&taken).map(drop).unwrap_err();
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
    assert_error!(Err::<(), _>(error), Error::AddressInUse { .. });
    pair.assert_serves();
    // It is free again when its engine has gone.
    pair.server.finalize().unwrap();
    drop(pair);
    Pair::at(&taken.to_string()).assert_serves();
}

/// An engine that may use one of two addresses only listens at neither: the one that it has taken is free again.
fn an_engine_that_can_not_be_made_leaves_no_listener() {
    let pair = Pair::new();
    let taken = pair.server.address().to_string();
    pair.server.finalize().unwrap();
    drop(pair);
    let error = patient().listen(taken.as_str()).listen("verbs://192.0.2.1:0").build().map(drop).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
    Pair::at(&taken).assert_serves();
}

#[track_caller]
fn system(command: &str) {
    let status = Command::new("bash").args(["-c", command]).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// A device of a test's own, at 10.9.7.1.
struct OwnDevice;

impl OwnDevice {
    fn new() -> OwnDevice {
        let own = OwnDevice;
        system(
            "export PATH=$PATH:/usr/sbin:/sbin; ip link add vown type veth peer name vownp && ip address add 10.9.7.1/24 dev vown &&
             ip link set vownp up && ip link set vown up && rdma link add rxeown type rxe netdev vown &&
             for n in $(seq 100); do grep -q ':0a09:0701$' /sys/class/infiniband/rxeown/ports/1/gids/* 2>/dev/null && exit; sleep 0.1; done;
             exit 1",
        );
        own
    }
}

impl Drop for OwnDevice {
    fn drop(&mut self) {
        let remove = "export PATH=$PATH:/usr/sbin:/sbin; rdma link delete rxeown; ip link delete vown";
        let _ = Command::new("bash").args(["-c", remove]).status();
    }
}

/// In a process of its own: what devices there are is asked once.
fn a_port_that_is_down_is_named() {
    let _own = OwnDevice::new();
    let mut child = Child::start("port goes down", &[]);
    child.hear("refused well");
    assert!(child.wait(BOUND).success());
}

/// The role behind [`a_port_that_is_down_is_named`].
pub fn port_goes_down() {
    let server = patient().listen("verbs://10.9.7.1:0").build().unwrap();
    define_add(&server);
    let address = server.address().to_string();
    let client = patient().connect_timeout(Duration::from_secs(3)).peer_timeout(Duration::from_secs(2)).build().unwrap();
    let to_server = client.lookup(&address).unwrap();
    assert_serves(&client, &to_server);
    system("export PATH=$PATH:/usr/sbin:/sbin; ip link set vown down");
    let error = Engine::server("verbs://10.9.7.1:0").map(drop).unwrap_err();
    eprintln!("listening: {error}");
    assert!(error.to_string().contains("10.9.7.1"), "{error}");
    assert!(["not active", "no RDMA device"].iter().any(|said| error.to_string().contains(said)), "{error}");
    let text = assert_unreachable(&patient().build().unwrap(), &address, Duration::from_secs(8));
    eprintln!("dialling: {text}");
    // The one that was connected is told too, in bounds, and goes on over other devices.
    let begin = Instant::now();
    let call = client.procedure::<(u32, u32), u32>("add").on(&to_server).call(&(1, 2));
    eprintln!("connected: {call:?} after {:?}", begin.elapsed());
    assert!(call.is_err_and(|error| error.is_disconnected()) && begin.elapsed() < BOUND);
    Pair::new().assert_serves();
    // Whether it can be used when it is back is the system's: the emulated one's connection manager stays broken.
    say("refused well");
}

on_device!(
    an_address_of_no_device_is_refused_to_listeners,
    a_loopback_address_is_refused_to_listeners,
    addresses_of_no_device_are_unreachable,
    where_nobody_listens_that_is_said_at_once,
    an_address_in_use_is_refused,
    an_engine_that_can_not_be_made_leaves_no_listener,
    a_port_that_is_down_is_named,
);
