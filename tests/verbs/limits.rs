//! What a process may lock in memory, for devices to reach it, is limited.

use std::os::unix::process::CommandExt;

use calomel::{BulkMode, Error};

use crate::assert_error;
use crate::pair::Pair;
use crate::support::*;

const LIMIT: u64 = 8 << 20;
const CAP_IPC_LOCK: libc::c_ulong = 14;

fn memory_that_may_not_be_locked_is_refused_with_the_limit() {
    let mut child = Child::start_as("little may be locked", &[], |command| {
        let limit = || {
            let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
            // SAFETY: the limit is a variable of the right type.
            let limited = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) };
            // Root is not held to it, unless it can't have this capability.
            // SAFETY: changes what this process may do, and nothing else.
            let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) };
            if limited == 0 && dropped == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: the closure makes two system calls, and no more.
        unsafe { command.pre_exec(limit) };
    });
    child.hear("refused well");
    assert!(child.wait(BOUND).success());
}

/// The role behind [`memory_that_may_not_be_locked_is_refused_with_the_limit`].
pub fn little_may_be_locked() {
    let pair = Pair::new();
    pair.assert_serves();
    for len in [9 << 20, 64 << 20] {
        for engine in [&pair.server, &pair.client] {
            let error = engine.expose(vec![1u8; len], BulkMode::ReadWrite).map(drop).unwrap_err();
            let text = error.to_string();
            let named =
                [len.to_string(), LIMIT.to_string(), format!("ulimit -l {}", LIMIT / 1024), format!("{} KiB", 2 * len / 1024)];
            assert!(named.iter().all(|named| text.contains(named)), "{text}");
            assert_error!(Err::<(), _>(error), Error::Io { .. });
        }
        pair.assert_serves();
    }
    // What fits is lent and moved.
    let small = pair.server.expose(pattern(1, 1 << 20), BulkMode::ReadWrite).unwrap();
    let mut copy = vec![0u8; 1 << 20];
    small.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(copy == pattern(1, 1 << 20));
    // Memory that is borrowed for one transfer, and can't be locked, is moved in another way.
    let large = pattern(2, 3 << 20);
    let lent = pair.server.expose(large.clone(), BulkMode::ReadWrite).unwrap();
    let mut copy = vec![0u8; 3 << 20];
    lent.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(copy == large);
    // Connections lock memory, too: the one that finds none left fails, and says why.
    let mut more = Vec::new();
    let refused = (0..200).find_map(|_| {
        let client = builder().build().unwrap();
        let to_server = client.lookup(pair.server.address()).unwrap();
        let called = client.procedure::<(u32, u32), u32>("add").on(&to_server).call(&(1, 2));
        more.push(client);
        called.err()
    });
    let refused = refused.expect("there is memory for more than was allowed");
    eprintln!("{} connections, then: {refused}", more.len());
    assert!(refused.is_disconnected() && refused.to_string().contains(&LIMIT.to_string()), "{refused}");
    more.clear();
    pair.assert_serves();
    say("refused well");
}

on_device!(memory_that_may_not_be_locked_is_refused_with_the_limit);
