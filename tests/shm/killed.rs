//! A killed process leaves nothing behind, neither in the system nor in the processes that it was connected to.

use std::time::{Duration, Instant};

use crate::roles::{Far, start};
use crate::support::*;

/// Names related to this library, in places where processes leave things.
fn left_in_the_system() -> Vec<String> {
    let listed = |folder: &str| -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| format!("{folder}/{}", entry.file_name().display())).filter(|name| name.contains("calomel")).collect()
    };
    [listed("/dev/shm"), listed("/tmp"), listed("/run"), listed("/dev/mqueue")].concat()
}

/// Whether a local socket has this name.
fn is_named(address: &str) -> bool {
    let name = format!("@calomel/{}", address.strip_prefix("shm://").unwrap());
    std::fs::read_to_string("/proc/net/unix").unwrap().lines().any(|line| line.ends_with(&name))
}

#[test]
fn clients_killed_during_a_transfer_leave_nothing() {
    let _watchdog = Watchdog::start("killed::clients_killed_during_a_transfer_leave_nothing");
    over(Carrier::Shm, || ());
    let files = left_in_the_system();
    let (owner, address) = start(&[]);
    let far = Far::new(&client(), &address);
    far.assert_serves();
    let mut before = None;
    let mut random = Random(0x51);
    // The first few create what is made once and kept.
    for round in 0..11 {
        let mut clients: Vec<Child> = (0..5).map(|_| start(&[(LISTEN, "none")]).0).collect();
        for (number, client) in clients.iter_mut().enumerate() {
            client.tell(&format!("pulls {} {address}", ["own", "shared"][number % 2]));
        }
        for client in &mut clients {
            client.hear("begins");
            std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
            client.signal(libc::SIGKILL);
        }
        drop(clients);
        assert_serves(&far.engine, &far.to);
        let Some(before) = before else {
            std::thread::sleep(Duration::from_millis(500));
            before = Some(holdings(owner.pid()));
            continue;
        };
        let (begin, mut now) = (Instant::now(), holdings(owner.pid()));
        while now.0 > before.0 || now.1 > before.1 || now.2 > before.2 + 3 {
            assert!(begin.elapsed() < Duration::from_secs(5), "round {round}: {before:?} before, {now:?} now");
            std::thread::sleep(Duration::from_millis(2));
            now = holdings(owner.pid());
        }
    }
    assert_eq!(left_in_the_system(), files);
}

#[test]
fn killed_server_frees_its_name() {
    let _watchdog = Watchdog::start("killed::killed_server_frees_its_name");
    over(Carrier::Shm, || ());
    let files = left_in_the_system();
    let (server, address) = start(&[]);
    let far = Far::new(&client(), &address);
    far.assert_serves();
    assert!(is_named(&address));
    server.signal(libc::SIGKILL);
    drop(server);
    assert!(!is_named(&address));
    assert_eq!(left_in_the_system(), files);
    eventually("the disconnect is noticed", || !far.to.is_connected());
    assert_lives(&far.engine);
}
