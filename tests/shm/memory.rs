//! Engine memory, which peers on the same host map: in every role, in any number, and freed.

use calomel::{BulkMode, EngineBuffer, Segments};

use crate::roles::{Far, start, uniform};
use crate::support::*;

const LEN: usize = 300_001;

fn filled(engine: &calomel::Engine, bytes: &[u8]) -> EngineBuffer {
    let mut buffer = engine.alloc(bytes.len());
    buffer.copy_from_slice(bytes);
    buffer
}

fn assert_every_role(carrier: Carrier) {
    over(carrier, || ());
    let (server, client) = (server(), client());
    let to = client.lookup(server.address()).unwrap();
    let whole = pattern(1, 3 * LEN);
    // Alone, beside ordinary memory on either side of it, and several.
    type Mixed = (EngineBuffer, Vec<u8>, EngineBuffer);
    let mixed = |engine: &calomel::Engine, first: bool, bytes: &[u8]| -> Mixed {
        let (a, rest) = bytes.split_at(if first { 100_003 } else { 7 });
        let (b, c) = rest.split_at(LEN);
        (filled(engine, a), b.to_vec(), filled(engine, c))
    };
    let flat = |buffers: Mixed| [&buffers.0[..], &buffers.1[..], &buffers.2[..]].concat();
    for (first, second) in [(true, true), (true, false), (false, true), (false, false)] {
        let exposed = server.expose(mixed(&server, first, &whole), BulkMode::ReadWrite).unwrap();
        for (offset, len) in [(0, whole.len()), (5, 200_000), (100_000, 10), (90_000, 400_000), (LEN + 1, 2 * LEN - 1)] {
            let part = exposed.bulk().slice(offset, len).unwrap();
            let target = client.expose(mixed(&client, second, &vec![0; whole.len()]), BulkMode::ReadWrite).unwrap();
            let (result, _) = part.on(&to).start_pull_into(target.slice(11, len.min(whole.len() - 11)).unwrap()).wait();
            let moved = result.unwrap();
            let now = flat(target.reclaim());
            assert!(now[11..11 + moved] == whole[offset..offset + moved], "{first} {second} {offset} {len}");
            assert!(now[..11].iter().chain(&now[11 + moved..]).all(|b| *b == 0), "{first} {second} {offset} {len}: too much");
            let fresh = pattern(offset as u64, len);
            let source = client.expose(filled(&client, &fresh), BulkMode::ReadOnly).unwrap();
            assert_eq!(part.on(&to).start_push_from(source).wait().0.unwrap(), len);
            let mut now = vec![0; whole.len()];
            exposed.read_at(0, &mut now).unwrap();
            assert!(now[offset..offset + len] == fresh, "{first} {second} {offset} {len}");
            assert!(now[..offset] == whole[..offset] && now[offset + len..] == whole[offset + len..]);
            exposed.write_at(0, &whole).unwrap();
        }
    }
    let many = Segments((0..100).map(|n| filled(&server, &pattern(n, 64 << 10))).collect::<Vec<_>>());
    let all = (0..100).flat_map(|n| pattern(n, 64 << 10)).collect::<Vec<u8>>();
    let exposed = server.expose(many, BulkMode::ReadWrite).unwrap();
    let mut copy = vec![0; all.len()];
    exposed.bulk().on(&to).pull_into(&mut copy).unwrap();
    assert!(copy == all);
}

#[test]
fn engine_memory_works_in_every_role() {
    let _watchdog = Watchdog::start("memory::engine_memory_works_in_every_role");
    assert_every_role(Carrier::Shm);
}

#[test]
fn engine_memory_works_in_every_role_by_the_ring() {
    let _watchdog = Watchdog::start("memory::engine_memory_works_in_every_role_by_the_ring");
    assert_every_role(Carrier::ShmNoKernelCopy);
}

#[test]
fn more_buffers_than_a_peer_maps_are_all_transferred() {
    let _watchdog = Watchdog::start("memory::more_buffers_than_a_peer_maps_are_all_transferred");
    for carrier in [Carrier::Shm, Carrier::ShmNoKernelCopy] {
        over(carrier, || ());
        let (child, address) = start(&[]);
        let far = Far::new(&client(), &address);
        let fetch = far.engine.procedure::<(calomel::Bulk, bool), Result<u8, String>>("fetch");
        let len = 64 << 10;
        // The second round uses the places of the first.
        for round in 0..2u8 {
            let exposed: Vec<_> = (0..300u32)
                .map(|n| {
                    let mut buffer = far.engine.alloc(len);
                    buffer.fill((n as u8).wrapping_add(round));
                    far.engine.expose(buffer, BulkMode::ReadWrite).unwrap()
                })
                .collect();
            for _ in 0..2 {
                for (n, exposed) in exposed.iter().enumerate() {
                    assert_eq!(fetch.on(&far.to).call(&(exposed.bulk(), false)).unwrap(), Ok((n as u8).wrapping_add(round)));
                }
            }
            let maps = crate::support::holdings(child.pid()).1;
            assert!(maps <= 300, "{maps}");
        }
        // One at a time: each is freed before the next is allocated, mostly in the same place.
        for n in 0..600u32 {
            let mut buffer = far.engine.alloc(len);
            buffer.fill(n as u8);
            let exposed = far.engine.expose(buffer, BulkMode::ReadWrite).unwrap();
            assert_eq!(fetch.on(&far.to).call(&(exposed.bulk(), false)).unwrap(), Ok(n as u8));
        }
        far.assert_serves();
    }
}

#[test]
fn pooled_buffers_are_transferred_and_reused() {
    let _watchdog = Watchdog::start("memory::pooled_buffers_are_transferred_and_reused");
    over(Carrier::Shm, || ());
    let (_child, address) = start(&[]);
    let far = Far::new(&client(), &address);
    let pool = far.engine.buffer_pool(256 << 10, 3);
    let fetch = far.engine.procedure::<(calomel::Bulk, bool), Result<u8, String>>("fetch");
    for n in 0..100u32 {
        let mut buffer = pool.take().unwrap();
        buffer.fill(n as u8);
        let exposed = far.engine.expose(buffer, BulkMode::ReadWrite).unwrap();
        assert_eq!(fetch.on(&far.to).call(&(exposed.bulk(), n % 2 == 0)).unwrap(), Ok(n as u8));
        let theirs = far.open(n as u8, 256 << 10, n % 3 == 0);
        let (result, back) = theirs.on(&far.to).start_pull_into(exposed).wait();
        assert_eq!(result.unwrap(), 256 << 10);
        assert_eq!(uniform(&back.reclaim()), Ok(n as u8));
    }
    assert_eq!(pool.available(), 3);
}

#[test]
fn dropped_engine_memory_is_freed_though_peers_map_it() {
    let _watchdog = Watchdog::start("memory::dropped_engine_memory_is_freed_though_peers_map_it");
    over(Carrier::Shm, || ());
    let mut child = Child::start("freed", &[]);
    child.hear("freed");
    assert!(child.wait(BOUND).success());
}

/// The role behind [`dropped_engine_memory_is_freed_though_peers_map_it`].
pub fn freed() {
    let mib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
    };
    let (server, client) = (server(), client());
    let to = client.lookup(server.address()).unwrap();
    let before = mib();
    let exposed = server.expose(filled(&server, &vec![1; 64 << 20]), BulkMode::ReadWrite).unwrap();
    let mut copy = vec![0; 64 << 20];
    exposed.bulk().on(&to).pull_into(&mut copy).unwrap();
    // Both have it mapped.
    assert!(mib() >= before + 128, "{} MiB, {before} before", mib());
    drop(exposed.reclaim());
    // The client keeps the mapping until another buffer is announced; the pages are gone.
    assert!(mib() < before + 16, "{} MiB, {before} before", mib());
    say("freed");
}

#[test]
fn buffer_dropped_in_forked_child_stays_in_the_parent() {
    let _watchdog = Watchdog::start("memory::buffer_dropped_in_forked_child_stays_in_the_parent");
    over(Carrier::Shm, || ());
    let mut child = Child::start("fork", &[]);
    child.hear("forked well");
    assert!(child.wait(BOUND).success());
}

/// The role behind [`buffer_dropped_in_forked_child_stays_in_the_parent`].
pub fn fork() {
    let engine = server();
    let buffer = filled(&engine, &[5; 1 << 20]);
    // SAFETY: the child drops a buffer and ends; no other thread holds a lock that this takes.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(buffer);
        // SAFETY: ends the process, without running what belongs to the parent.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to a variable of the right type.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!((status, uniform(&buffer)), (0, Ok(5)));
    say("forked well");
}
