//! Small calls and transfers over `loop://`, which `ci/miri` runs in an interpreter.

use std::sync::mpsc;
use std::time::Duration;

use crate::{Bulk, BulkMode, Endpoint, Engine, Error, Request, Transfer};

/// An interpreter is slow.
const LONG_TIMEOUT: Duration = Duration::from_secs(600);

/// A server, a client, and the client's endpoint of the server.
fn pair() -> (Engine, Engine, Endpoint) {
    let builder = || {
        Engine::builder()
            .default_timeout(LONG_TIMEOUT)
            .peer_timeout(LONG_TIMEOUT)
            .connect_timeout(LONG_TIMEOUT)
            .finalize_timeout(LONG_TIMEOUT)
    };
    let server = builder().listen("loop://").build().unwrap();
    let client = builder().transport("loop").build().unwrap();
    let to = client.lookup(server.address()).unwrap();
    (server, client, to)
}

fn end(server: &Engine, client: &Engine) {
    client.finalize().unwrap();
    server.finalize().unwrap();
}

#[test]
fn calls_return_their_results() {
    let (server, client, to) = pair();
    server.define("add", |_: &Request, (a, b): (u32, u32)| a + b).unwrap();
    server.define("length", |_: &Request, bytes: Vec<u8>| bytes.len()).unwrap();
    let add = client.procedure::<(u32, u32), u32>("add").on(&to);
    assert_eq!(add.call(&(1, 2)).unwrap(), 3);
    let pending = add.start(&(3, 4)).unwrap();
    assert_eq!(pending.wait().unwrap(), 7);
    // Longer than one frame. The second arrives in memory that the list takes over.
    for _ in 0..2 {
        assert_eq!(client.procedure::<Vec<u8>, usize>("length").on(&to).call(&vec![1; 17 << 10]).unwrap(), 17 << 10);
    }
    // These are sent from where the handler has left them.
    server.define("points", |_: &Request, len: usize| vec![[0.5f64, 1.0, 2.0]; len]).unwrap();
    server.define("text", |_: &Request, len: usize| Some("a".repeat(len))).unwrap();
    let points = client.procedure::<usize, Vec<[f64; 3]>>("points").on(&to);
    let text = client.procedure::<usize, Option<String>>("text").on(&to);
    for _ in 0..2 {
        assert_eq!(points.call(&800).unwrap(), vec![[0.5, 1.0, 2.0]; 800]);
        assert_eq!(text.call(&(17 << 10)).unwrap().unwrap(), "a".repeat(17 << 10));
    }
    // It may still be on its way.
    drop(text.start(&(17 << 10)).unwrap());
    end(&server, &client);
}

#[test]
fn transfers_copy_the_bytes() {
    let (server, client, to) = pair();
    let owned = server.expose((0..200).collect::<Vec<u8>>(), BulkMode::ReadWrite).unwrap();
    let bulk = owned.bulk();
    server.define("memory", move |_: &Request, ()| bulk.clone()).unwrap();
    let memory = client.procedure::<(), Bulk>("memory").on(&to).call(&()).unwrap();
    let mut bytes = vec![0u8; 200];
    assert_eq!(memory.on(&to).pull_into(&mut bytes).unwrap(), 200);
    assert!(bytes.iter().copied().eq(0..200));
    assert_eq!(memory.slice(50, 100).unwrap().on(&to).push_from(&[7u8; 100]).unwrap(), 100);
    // Into an allocated buffer, which is exposed itself.
    let local = client.expose(client.alloc(200), BulkMode::ReadWrite).unwrap();
    let (moved, local) = memory.on(&to).start_pull_into(local).wait();
    assert_eq!(moved.unwrap(), 200);
    assert_eq!(local.reclaim()[50..150], [7; 100]);
    let mut back = owned.reclaim();
    back[0] = 1;
    assert_eq!(back[50..150], [7; 100]);
    assert!(matches!(memory.on(&to).pull_into(&mut bytes), Err(Error::Revoked { .. })));
    end(&server, &client);
}

#[test]
fn borrowed_segments_and_started_transfers_alias_nothing() {
    let (server, client, to) = pair();
    let (mut numbers, mut byte, mut value) = (vec![1u32; 20], [2u8; 1], 3u64);
    let mut parts = [[0u8; 40], [0; 40]];
    server
        .scope(|s| {
            let bulk = s.expose((&mut numbers, &mut byte, vec![&mut value]), BulkMode::ReadWrite)?;
            let remote = bulk.on(&to);
            client.scope(|s| {
                let [first, second] = &mut parts;
                let mut pulls = vec![s.start_pull_into(&remote, first), s.start_pull_into(&remote.slice(40, 40)?, second)];
                let (_, (result, part)) = Transfer::wait_any(&mut pulls);
                assert_eq!(result?, 40);
                part[0] = 9;
                let (result, part) = s.start_push_from(&remote, &*part).wait();
                assert_eq!((result?, part[0]), (40, 9));
                // The other ends, and one is dropped at once.
                for (result, part) in Transfer::wait_all(pulls) {
                    assert_eq!(result?, 40);
                    drop(s.start_pull_into(&remote, part));
                }
                drop(s.start_push_from(&remote, &[5u8; 89]));
                Ok(())
            })
        })
        .unwrap();
    parts.iter_mut().for_each(|part| part.fill(0));
    numbers.push(byte[0].into());
    value += 1;
    assert!(numbers.len() == 21 && value > 0);
    end(&server, &client);
}

/// The buffer is written as soon as it is reclaimed, while a peer still tries to read it.
#[test]
fn memory_reclaimed_during_pulls_is_not_read_again() {
    let (server, client, to) = pair();
    let owned = server.expose(vec![5u8; 100], BulkMode::ReadWrite).unwrap();
    let bulk = owned.bulk();
    server.define("memory", move |_: &Request, ()| bulk.clone()).unwrap();
    let memory = client.procedure::<(), Bulk>("memory").on(&to).call(&()).unwrap();
    let (first_pull, first_pull_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let (memory, to) = (&memory, &to);
        let reader = scope.spawn(move || {
            let mut bytes = vec![0u8; 100];
            loop {
                match memory.on(to).pull_into(&mut bytes) {
                    Ok(moved) => assert!(moved == 100 && bytes == [5; 100]),
                    Err(error) => return error,
                }
                let _ = first_pull.send(());
            }
        });
        first_pull_done.recv().unwrap();
        let mut back = owned.reclaim();
        back.fill(9);
        assert!(matches!(reader.join().unwrap(), Error::Revoked { .. }));
    });
    end(&server, &client);
}
