//! Limits that the system sets: other processes' memory that may not be read, and descriptors that run out.

use std::fs::File;
use std::io::BufRead;

use calomel::BulkMode;

use crate::roles::{FORBID, Far, add, define, start, uniform};
use crate::support::*;
use crate::users::assert_bulks_in_both_directions;

/// From now on, this thread and those that it starts may not read memory of other processes.
pub fn forbid_reading_processes() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // The system call's number is the first word; this call fails, the others do not.
    let mut program = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 1, libc::SYS_process_vm_readv as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program is valid for its length, for as long as the call lasts.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    let (mut to, from) = (0u64, 7u64);
    let near = libc::iovec { iov_base: (&raw mut to).cast(), iov_len: 8 };
    let far = libc::iovec { iov_base: (&raw const from).cast_mut().cast(), iov_len: 8 };
    let own = std::process::id() as i32;
    // SAFETY: both are variables of this function, of this length.
    assert_eq!(unsafe { libc::process_vm_readv(own, &near, 1, &far, 1, 0) }, -1);
}

#[test]
fn transfers_succeed_when_one_side_may_not_read_the_other() {
    let _watchdog = Watchdog::start("limits::transfers_succeed_when_one_side_may_not_read_the_other");
    over(Carrier::Shm, || ());
    let (_child, address) = start(&[(FORBID, "1")]);
    let far = Far::new(&server(), &address);
    far.assert_serves();
    assert_bulks_in_both_directions(&far);
    assert_eq!(far.to.transport(), Some(calomel::Transport::Shm));
}

#[test]
fn transfers_succeed_when_neither_side_may_read_the_other() {
    let _watchdog = Watchdog::start("limits::transfers_succeed_when_neither_side_may_read_the_other");
    over(Carrier::Shm, || ());
    let (_child, address) = start(&[(FORBID, "1")]);
    // The filter applies to threads that are started under it, so to the engine's.
    std::thread::spawn(move || {
        over(Carrier::Shm, || ());
        forbid_reading_processes();
        let far = Far::new(&server(), &address);
        far.assert_serves();
        assert_bulks_in_both_directions(&far);
    })
    .join()
    .unwrap();
}

/// Opens files until no descriptor is left.
fn use_up_descriptors() -> Vec<File> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = libc::rlimit { rlim_cur: open + 20, rlim_max: open + 20 };
    // SAFETY: the limit is valid for as long as the call lasts.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// The role behind the tests below: an engine without descriptors, or with few.
pub fn few_descriptors() {
    let engine = server();
    define(&engine);
    let mut files = use_up_descriptors();
    files.truncate(0);
    say(&format!("address {}", engine.address()));
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.split_once(' ').unwrap() {
            ("use", _) => {
                files.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
                say("used");
            }
            ("free", count) => {
                files.truncate(files.len().saturating_sub(count.parse().unwrap()));
                say("freed");
            }
            ("add", address) => say(&format!("sum {}", add(&engine, address))),
            ("alloc", _) => {
                let mut buffer = engine.alloc(1 << 20);
                assert!(all_are(&buffer, 0));
                buffer.fill(8);
                let exposed = engine.expose(buffer, BulkMode::ReadWrite).unwrap();
                say(&format!("allocated {:?}", uniform(&exposed.reclaim())));
            }
            ("pull", address) => {
                let far = Far::new(&engine, address);
                let result = engine.procedure::<bool, calomel::Bulk>("shown").on(&far.to).call(&true).and_then(|bulk| {
                    let mut copy = vec![0; 1 << 20];
                    bulk.on(&far.to).pull_into(&mut copy)?;
                    assert_eq!(uniform(&copy), Ok(3));
                    Ok(())
                });
                say(&format!("pulled {:?}", result.map_err(|e| e.to_string())));
            }
            (order, _) => panic!("no order `{order}`"),
        }
    }
    std::process::exit(0);
}

#[test]
fn client_without_descriptors_gets_clear_errors() {
    let _watchdog = Watchdog::start("limits::client_without_descriptors_gets_clear_errors");
    over(Carrier::Shm, || ());
    let (_server, address) = start(&[]);
    let mut child = Child::start("few descriptors", &[]);
    child.hear("address");
    child.tell("use all");
    child.hear("used");
    child.tell("alloc one");
    assert_eq!(child.hear("allocated"), "Ok(8)");
    // Each descriptor that is freed allows one step more; in the end the call succeeds.
    let mut last = String::new();
    for _ in 0..12 {
        child.tell(&format!("add {address}"));
        last = child.hear("sum");
        if last == "3 by Some(Shm)" {
            break;
        }
        let clear = ["too many", "Too many", "descriptor"].iter().any(|word| last.contains(word));
        assert!(clear, "{last}");
        child.tell("free 1");
        child.hear("freed");
    }
    assert_eq!(last, "3 by Some(Shm)");
    // Memory that can be mapped only by a descriptor.
    child.tell("use all");
    child.hear("used");
    child.tell(&format!("pull {address}"));
    let pulled = child.hear("pulled");
    eprintln!("with no descriptor left: {pulled}");
    child.tell("free 10");
    child.hear("freed");
    child.tell(&format!("add {address}"));
    assert_eq!(child.hear("sum"), "3 by Some(Shm)");
    child.tell(&format!("pull {address}"));
    assert_eq!(child.hear("pulled"), "Ok(())");
}

#[test]
fn server_without_descriptors_serves_its_connected_clients() {
    let _watchdog = Watchdog::start("limits::server_without_descriptors_serves_its_connected_clients");
    over(Carrier::Shm, || ());
    let mut child = Child::start("few descriptors", &[]);
    let address = child.hear("address");
    let known = client();
    assert_eq!(add(&known, &address), "3 by Some(Shm)");
    child.tell("use all");
    child.hear("used");
    let mut last = String::new();
    for free in 0..12 {
        let client = client();
        last = add(&client, &address);
        if last == "3 by Some(Shm)" {
            break;
        }
        assert!(last.contains("can't be reached"), "{free}: {last}");
        // Clients that were connected before are served.
        assert_eq!(add(&known, &address), "3 by Some(Shm)");
        child.tell("free 1");
        child.hear("freed");
    }
    assert_eq!(last, "3 by Some(Shm)");
}
