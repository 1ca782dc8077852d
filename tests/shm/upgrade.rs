//! Engines with tcp addresses on one host, which use shared memory where both allow it.

use std::net::{IpAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::Command;

use calomel::{Engine, Request, Transport};

use crate::forged::{Forged, Packet, listen};
use crate::roles::{Far, GROUP, NO_UPGRADE, add, start, start_as};
use crate::support::*;

const BY_SHM: &str = "3 by Some(Shm)";
const BY_TCP: &str = "3 by Some(Tcp)";

/// The default configuration, without a choice about the upgrade.
fn plain() -> calomel::EngineBuilder {
    over(Carrier::Shm, || ());
    configured()
}

/// The port of a tcp address.
fn port(address: &str) -> u16 {
    address.rsplit_once(':').unwrap().1.parse().unwrap()
}

/// An address of this machine that other machines could use, if it has one.
fn outer_address() -> Option<IpAddr> {
    // Sends nothing: this only looks up the route.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("203.0.113.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[test]
fn each_address_of_this_host_leads_to_shm() {
    let _watchdog = Watchdog::start("upgrade::each_address_of_this_host_leads_to_shm");
    let client = plain().build().unwrap();
    let (_child, loopback) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    assert_eq!(add(&client, &loopback), BY_SHM);
    let (_child, v6) = start(&[(LISTEN, "tcp://[::1]:0")]);
    assert_eq!(add(&client, &v6), BY_SHM);
    let (_child, everywhere) = start(&[(LISTEN, "tcp://0.0.0.0:0")]);
    let everywhere = port(&everywhere);
    assert_eq!(add(&client, &format!("tcp://127.0.0.1:{everywhere}")), BY_SHM);
    assert_eq!(add(&client, &format!("tcp://127.9.8.7:{everywhere}")), BY_SHM);
    assert_eq!(add(&client, &format!("tcp://localhost:{everywhere}")), BY_SHM);
    let (_child, both) = start(&[(LISTEN, "tcp://[::]:0")]);
    assert_eq!(add(&client, &format!("tcp://[::1]:{}", port(&both))), BY_SHM);
    assert_eq!(add(&client, &format!("tcp://127.0.0.1:{}", port(&both))), BY_SHM);
    let Some(outer) = outer_address() else { return eprintln!("skipped: this machine has no address but loopback") };
    assert_eq!(add(&client, &format!("tcp://{outer}:{everywhere}")), BY_SHM);
    let (_child, own) = start(&[(LISTEN, &format!("tcp://{outer}:0"))]);
    assert_eq!(add(&client, &own), BY_SHM);
    // Everything works over it, in both directions.
    crate::users::assert_bulks_in_both_directions(&Far::new(&client, &own));
}

#[test]
fn upgrade_disabled_on_either_side_uses_tcp() {
    let _watchdog = Watchdog::start("upgrade::upgrade_disabled_on_either_side_uses_tcp");
    let (willing, unwilling) = (plain().build().unwrap(), plain().same_host_upgrade(false).build().unwrap());
    let (_child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    assert_eq!(add(&unwilling, &address), BY_TCP);
    assert_eq!(add(&willing, &address), BY_SHM);
    let (_child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0"), (NO_UPGRADE, "1")]);
    assert_eq!(add(&willing, &address), BY_TCP);
    assert_eq!(add(&unwilling, &address), BY_TCP);
}

#[test]
fn restarted_server_is_reached_again() {
    let _watchdog = Watchdog::start("upgrade::restarted_server_is_reached_again");
    let client = plain().build().unwrap();
    let (mut child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    for round in 0..6 {
        // Alternately with and without the upgrade.
        let settings = [(LISTEN, &*address), (NO_UPGRADE, "1")];
        let wanted = if round % 2 == 0 { BY_SHM } else { BY_TCP };
        assert_eq!(add(&client, &address), wanted, "round {round}");
        child.signal(libc::SIGKILL);
        drop(child);
        eventually("the disconnect is noticed", || !client.lookup(&address).unwrap().is_connected());
        child = start(&settings[..if round % 2 == 0 { 2 } else { 1 }]).0;
    }
}

#[test]
fn upgraded_client_can_be_called_back() {
    let _watchdog = Watchdog::start("upgrade::upgraded_client_can_be_called_back");
    let clients = [plain().build().unwrap(), plain().listen("tcp://127.0.0.1:0").build().unwrap()];
    let (_child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    for client in clients {
        define_add(&client);
        let to = client.lookup(&address).unwrap();
        let back = client.procedure::<(), Result<u32, String>>("call back");
        assert_eq!(back.on(&to).call(&()).unwrap(), Ok(7));
        assert_eq!(to.transport(), Some(Transport::Shm));
    }
}

/// An engine that returns its name.
fn named(name: &'static str, builder: calomel::EngineBuilder) -> Option<Engine> {
    let engine = builder.build().ok()?;
    engine.define("name", move |_: &Request, ()| name.to_owned()).unwrap();
    Some(engine)
}

#[test]
fn engine_at_same_port_of_another_family_is_told_apart() {
    let _watchdog = Watchdog::start("upgrade::engine_at_same_port_of_another_family_is_told_apart");
    let client = plain().build().unwrap();
    let name = client.procedure::<(), String>("name");
    let ask = |address: String| name.on(client.lookup(&address).unwrap()).call(&()).unwrap();
    let everywhere = named("all of IPv4", plain().listen("tcp://0.0.0.0:0")).unwrap();
    let port = port(&everywhere.address().to_string());
    // It has the same port of the other family, and no same-host address.
    let other = plain().listen(format!("tcp://[::1]:{port}")).same_host_upgrade(false);
    let Some(_other) = named("one of IPv6", other) else { return eprintln!("skipped: no IPv6 here, or the port is taken") };
    assert_eq!(ask(format!("tcp://127.0.0.1:{port}")), "all of IPv4");
    assert_eq!(ask(format!("tcp://[::1]:{port}")), "one of IPv6");
}

#[test]
fn server_of_another_user_is_reached_by_tcp() {
    let _watchdog = Watchdog::start("upgrade::server_of_another_user_is_reached_by_tcp");
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: it takes root to start a process of another user");
    }
    let client = plain().build().unwrap();
    for at in ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"] {
        let (_child, address) = start_as(&[(LISTEN, at)], |command| {
            command.uid(65534).gid(65534);
        });
        let address = format!("tcp://127.0.0.1:{}", port(&address));
        assert_eq!(add(&client, &address), BY_TCP);
        crate::users::assert_bulks_in_both_directions(&Far::new(&client, &address));
        // Also where both sides admit each other's group: any member could listen at the name of any address of this host.
        let (_child, address) = start_as(&[(LISTEN, at), (GROUP, "0")], |command| {
            command.uid(65534).gid(0);
        });
        let member = plain().shm_group(0).build().unwrap();
        assert_eq!(add(&member, &format!("tcp://127.0.0.1:{}", port(&address))), BY_TCP);
    }
}

/// Runs a program; false when it can't, or fails.
fn succeeds(program: &str, arguments: &str) -> bool {
    Command::new(program).args(arguments.split(' ')).output().is_ok_and(|output| output.status.success())
}

#[test]
fn server_in_another_network_namespace_is_reached_by_tcp() {
    let _watchdog = Watchdog::start("upgrade::server_in_another_network_namespace_is_reached_by_tcp");
    if !rustix::process::geteuid().is_root() || !succeeds("ip", "link show lo") || !succeeds("unshare", "-n true") {
        return eprintln!("skipped: it takes root, and the programs ip and unshare, to make a network namespace");
    }
    let client = plain().build().unwrap();
    let (child, address) = start_as(&[(LISTEN, "tcp://0.0.0.0:0")], |command| {
        let leave = || {
            // SAFETY: takes a number only; between fork and exec this is a system call and nothing else.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: the closure makes a system call only.
        unsafe { command.pre_exec(leave) };
    });
    // A veth pair between the two; it goes away with the process.
    let (pid, near) = (child.pid(), format!("cal{}", child.pid()));
    let made = succeeds("ip", &format!("link add {near} type veth peer name far netns {pid}"))
        && succeeds("ip", &format!("addr add 198.51.100.1/30 dev {near}"))
        && succeeds("ip", &format!("link set {near} up"))
        && succeeds("nsenter", &format!("-t {pid} -n ip addr add 198.51.100.2/30 dev far"))
        && succeeds("nsenter", &format!("-t {pid} -n ip link set far up"));
    if !made {
        return eprintln!("skipped: no veth pair between network namespaces can be made");
    }
    // An engine here at the same port, with a same-host address, must not be taken for it.
    let here = plain().listen(format!("tcp://0.0.0.0:{}", port(&address))).build().unwrap();
    define_add(&here);
    assert_eq!(add(&client, &format!("tcp://198.51.100.2:{}", port(&address))), BY_TCP);
    assert_eq!(add(&client, &format!("tcp://198.51.100.1:{}", port(&address))), BY_SHM);
    crate::users::assert_bulks_in_both_directions(&Far::new(&client, &format!("tcp://198.51.100.2:{}", port(&address))));
}

#[test]
fn nonlocal_bind_does_not_make_an_address_local() {
    let _watchdog = Watchdog::start("upgrade::nonlocal_bind_does_not_make_an_address_local");
    const KNOB: &str = "/proc/sys/net/ipv4/ip_nonlocal_bind";
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: it takes root to make a network namespace");
    }
    // This thread, and the engines that it makes, have a network namespace of their own.
    std::thread::spawn(|| {
        // SAFETY: takes a number only.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 || !succeeds("ip", "link set lo up") {
            return eprintln!("skipped: no network namespace can be made");
        }
        let server = plain().listen("tcp://0.0.0.0:0").build().unwrap();
        define_add(&server);
        let client = plain().build().unwrap();
        let port = port(&server.address().to_string());
        let ours_too = succeeds("ip", "addr add 198.51.100.9/32 dev lo");
        for knob in ["0", "1"] {
            // The files belong to the namespace of the process that opens them.
            if std::fs::write(KNOB, knob).is_err() {
                return eprintln!("skipped: {KNOB} can't be set");
            }
            assert!(!add(&client, &format!("tcp://203.0.113.7:{port}")).contains("3 by"), "with {knob}");
            if ours_too {
                assert_eq!(add(&client, &format!("tcp://198.51.100.9:{port}")), BY_SHM);
            }
        }
    })
    .join()
    .unwrap();
}

/// A process at the name that a tcp address leads to may refuse or hang up: then tcp is used.
#[test]
fn same_host_address_that_refuses_falls_back_to_tcp() {
    let _watchdog = Watchdog::start("upgrade::same_host_address_that_refuses_falls_back_to_tcp");
    let refuse: fn(Forged) = |peer| peer.send(&Packet::Refused { reason: "it rains".to_owned() }, &[]);
    for serve in [refuse, drop] {
        let client = plain().build().unwrap();
        let server = plain().same_host_upgrade(false).listen("tcp://127.0.0.1:0").build().unwrap();
        define_add(&server);
        let address = server.address().to_string();
        let listener = listen(&format!("shm://tcp:127.0.0.1:{}", port(&address)));
        std::thread::scope(|s| {
            s.spawn(|| serve(Forged::accept(&listener)));
            assert_eq!(add(&client, &address), BY_TCP);
        });
    }
}
