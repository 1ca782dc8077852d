//! Engines with tcp addresses that find each other through shared memory, because they are on one host; or do not.

use std::net::{IpAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::Command;

use calomel::{Engine, Request, Scheme};

use crate::forged::{Forged, Packet, listen};
use crate::roles::{Far, GROUP, NO_UPGRADE, add, start, start_as};
use crate::support::*;

const BY_SHM: &str = "3 by Some(Shm)";
const BY_TCP: &str = "3 by Some(Tcp)";

/// As users have it: nothing said about the upgrade.
fn plain() -> calomel::EngineBuilder {
    over(Carrier::Shm, || ());
    configured()
}

/// Of a tcp address.
fn port(address: &str) -> u16 {
    address.rsplit_once(':').unwrap().1.parse().unwrap()
}

/// An address of this machine that others could use, if it has one.
fn outer_address() -> Option<IpAddr> {
    // Sends nothing: only the way is looked up.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("203.0.113.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[test]
fn by_each_address_of_this_host() {
    let _watchdog = Watchdog::start("upgrade::by_each_address_of_this_host");
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
    // Everything works over it, both ways.
    crate::users::bulks_both_ways(&Far::new(&client, &own));
}

#[test]
fn not_where_either_side_does_not_want_it() {
    let _watchdog = Watchdog::start("upgrade::not_where_either_side_does_not_want_it");
    let (willing, unwilling) = (plain().build().unwrap(), plain().same_host_upgrade(false).build().unwrap());
    let (_child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    assert_eq!(add(&unwilling, &address), BY_TCP);
    assert_eq!(add(&willing, &address), BY_SHM);
    let (_child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0"), (NO_UPGRADE, "1")]);
    assert_eq!(add(&willing, &address), BY_TCP);
    assert_eq!(add(&unwilling, &address), BY_TCP);
}

#[test]
fn a_restarted_server_is_found_again() {
    let _watchdog = Watchdog::start("upgrade::a_restarted_server_is_found_again");
    let client = plain().build().unwrap();
    let (mut child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    for round in 0..6 {
        // Now with the upgrade, now without.
        let settings = [(LISTEN, &*address), (NO_UPGRADE, "1")];
        let wanted = if round % 2 == 0 { BY_SHM } else { BY_TCP };
        assert_eq!(add(&client, &address), wanted, "round {round}");
        child.signal(libc::SIGKILL);
        drop(child);
        eventually("its end is noticed", || !client.lookup(&address).unwrap().is_connected());
        child = start(&settings[..if round % 2 == 0 { 2 } else { 1 }]).0;
    }
}

#[test]
fn a_client_can_be_called_back() {
    let _watchdog = Watchdog::start("upgrade::a_client_can_be_called_back");
    let clients = [plain().build().unwrap(), plain().listen("tcp://127.0.0.1:0").build().unwrap()];
    let (_child, address) = start(&[(LISTEN, "tcp://127.0.0.1:0")]);
    for client in clients {
        define_add(&client);
        let to = client.lookup(&address).unwrap();
        let back = client.procedure::<(), Result<u32, String>>("call back");
        assert_eq!(back.on(&to).call(&()).unwrap(), Ok(7));
        assert_eq!(to.transport(), Some(Scheme::Shm));
    }
}

/// An engine that says who it is.
fn named(name: &'static str, builder: calomel::EngineBuilder) -> Option<Engine> {
    let engine = builder.build().ok()?;
    engine.define("who", move |_: &Request, ()| name.to_owned()).unwrap();
    Some(engine)
}

#[test]
fn another_engine_at_the_same_port_is_not_mistaken_for_the_one_that_is_meant() {
    let _watchdog = Watchdog::start("upgrade::another_engine_at_the_same_port_is_not_mistaken_for_the_one_that_is_meant");
    let client = plain().build().unwrap();
    let who = client.procedure::<(), String>("who");
    let ask = |address: String| who.on(client.lookup(&address).unwrap()).call(&()).unwrap();
    let everywhere = named("all of IPv4", plain().listen("tcp://0.0.0.0:0")).unwrap();
    let port = port(&everywhere.address().to_string());
    // It has the same port of the other family, and no shortcut.
    let other = plain().listen(format!("tcp://[::1]:{port}")).same_host_upgrade(false);
    let Some(_other) = named("one of IPv6", other) else { return eprintln!("skipped: no IPv6 here, or the port is taken") };
    assert_eq!(ask(format!("tcp://127.0.0.1:{port}")), "all of IPv4");
    assert_eq!(ask(format!("tcp://[::1]:{port}")), "one of IPv6");
}

#[test]
fn a_server_of_another_user_is_reached_by_tcp() {
    let _watchdog = Watchdog::start("upgrade::a_server_of_another_user_is_reached_by_tcp");
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
        crate::users::bulks_both_ways(&Far::new(&client, &address));
        // Also where both sides admit each other: a member of the group could answer for any address of this host.
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
fn another_network_namespace_is_another_host() {
    let _watchdog = Watchdog::start("upgrade::another_network_namespace_is_another_host");
    if !rustix::process::geteuid().is_root() || !succeeds("ip", "link show lo") || !succeeds("unshare", "-n true") {
        return eprintln!("skipped: it takes root, and the programs ip and unshare, to make a network namespace");
    }
    let client = plain().build().unwrap();
    let (child, address) = start_as(&[(LISTEN, "tcp://0.0.0.0:0")], |command| {
        let leave = || {
            // SAFETY: takes a number only; between fork and exec this is a system call and nothing else.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: it makes a system call only.
        unsafe { command.pre_exec(leave) };
    });
    // A cable between the two; it goes away with the process.
    let (pid, near) = (child.pid(), format!("cal{}", child.pid()));
    let made = succeeds("ip", &format!("link add {near} type veth peer name far netns {pid}"))
        && succeeds("ip", &format!("addr add 198.51.100.1/30 dev {near}"))
        && succeeds("ip", &format!("link set {near} up"))
        && succeeds("nsenter", &format!("-t {pid} -n ip addr add 198.51.100.2/30 dev far"))
        && succeeds("nsenter", &format!("-t {pid} -n ip link set far up"));
    if !made {
        return eprintln!("skipped: no cable between network namespaces can be made");
    }
    // An engine here at the same port, which has a shortcut, must not be taken for it.
    let here = plain().listen(format!("tcp://0.0.0.0:{}", port(&address))).build().unwrap();
    define_add(&here);
    assert_eq!(add(&client, &format!("tcp://198.51.100.2:{}", port(&address))), BY_TCP);
    assert_eq!(add(&client, &format!("tcp://198.51.100.1:{}", port(&address))), BY_SHM);
    crate::users::bulks_both_ways(&Far::new(&client, &format!("tcp://198.51.100.2:{}", port(&address))));
}

#[test]
fn an_address_that_one_could_only_listen_at_is_another_hosts() {
    let _watchdog = Watchdog::start("upgrade::an_address_that_one_could_only_listen_at_is_another_hosts");
    const KNOB: &str = "/proc/sys/net/ipv4/ip_nonlocal_bind";
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: it takes root to make a network namespace");
    }
    // This thread, and the engines that it makes, live in a network namespace of their own.
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
            // The files are those of the namespace of whoever opens them.
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

/// Whoever has the name that a tcp address leads to may still not be somebody to talk to: then it is tcp.
#[test]
fn a_shortcut_that_leads_nowhere_is_left() {
    let _watchdog = Watchdog::start("upgrade::a_shortcut_that_leads_nowhere_is_left");
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
