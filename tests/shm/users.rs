//! Processes of another user. These tests need to be root, to start them.

use std::os::unix::process::CommandExt;

use calomel::{Bulk, BulkMode};

use crate::roles::{Far, GROUP, add, start_as, uniform};
use crate::support::*;

const OTHER_USER: u32 = 65534;

/// True, with the reason on standard error, when a test can't run.
fn skipped() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: it takes root to start a process of another user");
    }
    over(Carrier::Shm, || ());
    !root
}

/// A child that runs as another user; in the group of root, if `grouped`.
fn other(grouped: bool, settings: &[(&str, &str)]) -> (Child, String) {
    start_as(settings, |command| {
        command.uid(OTHER_USER).gid(if grouped { 0 } else { OTHER_USER });
    })
}

#[test]
fn client_of_another_user_is_refused() {
    let _watchdog = Watchdog::start("users::client_of_another_user_is_refused");
    if skipped() {
        return;
    }
    let server = server();
    define_add(&server);
    // It refuses the server; and if it accepts it, the server refuses it.
    for (settings, reason) in [
        (&[(LISTEN, "none")][..], "it runs as user 0, and this engine as user 65534"),
        (&[(LISTEN, "none"), (GROUP, "0")][..], "it refused the connection: it runs as user 65534"),
    ] {
        let (mut child, _) = other(false, settings);
        for _ in 0..3 {
            child.tell(&format!("add {}", server.address()));
            let sum = child.hear("sum");
            assert!(sum.contains(reason), "{sum}");
        }
        assert_lives(&server);
    }
}

#[test]
fn server_of_another_user_is_refused() {
    let _watchdog = Watchdog::start("users::server_of_another_user_is_refused");
    if skipped() {
        return;
    }
    let (_child, address) = other(false, &[]);
    let client = client();
    let error = add(&client, &address);
    assert!(error.contains("it runs as user 65534, and this engine as user 0"), "{error}");
    // Nor if it is in a group, unless it is the group that was named.
    let picky = configured().shm_group(4242).build().unwrap();
    let error = add(&picky, &address);
    assert!(error.contains("nor in group 4242"), "{error}");
    assert_lives(&client);
}

#[test]
fn members_of_the_group_call_and_transfer() {
    let _watchdog = Watchdog::start("users::members_of_the_group_call_and_transfer");
    if skipped() {
        return;
    }
    // The child may not read memory of root; root may read any process's.
    let (mut child, address) = other(true, &[(GROUP, "0")]);
    let engine = configured().shm_group(0).listen("shm://").build().unwrap();
    define_add(&engine);
    assert_eq!(add(&engine, &address), "3 by Some(Shm)");
    assert_bulks_in_both_directions(&Far::new(&engine, &address));
    child.tell(&format!("add {}", engine.address()));
    assert_eq!(child.hear("sum"), "3 by Some(Shm)");
    // A member only through its supplementary groups.
    let (mut member, _) = start_as(&[(GROUP, "0"), (LISTEN, "none")], |command| {
        let join = || {
            // SAFETY: the list is valid for its length; between fork and exec this is a system call and nothing else.
            let done = unsafe { libc::setgroups(1, [0].as_ptr()) } == 0 && unsafe { libc::setgid(OTHER_USER) } == 0;
            // SAFETY: as above.
            if done && unsafe { libc::setuid(OTHER_USER) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: the closure makes system calls only.
        unsafe { command.pre_exec(join) };
    });
    member.tell(&format!("add {}", engine.address()));
    assert_eq!(member.hear("sum"), "3 by Some(Shm)");
}

/// Bulks of each kind, pulled and pushed by each side.
pub fn assert_bulks_in_both_directions(far: &Far) {
    const LEN: usize = 3_000_001;
    for shared in [false, true] {
        let theirs = far.open(11, LEN, shared);
        let mut copy = vec![0u8; LEN];
        assert_eq!(theirs.on(&far.to).pull_into(&mut copy).unwrap(), LEN);
        assert_eq!(uniform(&copy), Ok(11));
        copy.fill(12);
        assert_eq!(theirs.on(&far.to).push_from(&copy).unwrap(), LEN);
        assert_eq!(theirs.on(&far.to).pull_into(&mut copy[..]).unwrap(), LEN);
        assert_eq!(uniform(&copy), Ok(12));
        let mut buffer = far.engine.alloc(LEN);
        buffer.fill(13);
        let ours = far.engine.expose(buffer, BulkMode::ReadWrite).unwrap();
        let fetch = far.engine.procedure::<(Bulk, bool), Result<u8, String>>("fetch");
        assert_eq!(fetch.on(&far.to).call(&(ours.bulk(), shared)).unwrap(), Ok(13));
        let fill = far.engine.procedure::<(Bulk, u8, bool), Result<usize, String>>("fill");
        assert_eq!(fill.on(&far.to).call(&(ours.bulk(), 14, shared)).unwrap(), Ok(LEN));
        assert_eq!(uniform(&ours.reclaim()), Ok(14));
        let ours = far.engine.expose(vec![15; LEN], BulkMode::ReadWrite).unwrap();
        assert_eq!(fetch.on(&far.to).call(&(ours.bulk(), shared)).unwrap(), Ok(15));
        assert_eq!(fill.on(&far.to).call(&(ours.bulk(), 16, shared)).unwrap(), Ok(LEN));
        assert_eq!(uniform(&ours.reclaim()), Ok(16));
    }
}
