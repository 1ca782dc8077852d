//! Replay: an adversary sends the recorded bytes of an honest connection again.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, Engine};

use crate::adversary::MOVED;
use crate::common::wire::{CHALLENGE, MAGIC, PIECE_LEN, REFUSAL};
use crate::scene::{Scene, report};
use crate::support::*;
use crate::victim::{BOUND_TO_ONE, HONEST, LEN, full_of};

/// The bytes sent on one connection, by either side.
struct Recorded {
    by_client: Vec<u8>,
    by_server: Vec<u8>,
}

/// Listens for one connection, forwards it, and records it.
fn recorder(target: &str) -> (String, thread::JoinHandle<Recorded>) {
    let target = target.strip_prefix("tcp://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let recorder = thread::spawn(move || {
        let near = listener.accept().unwrap().0;
        let far = TcpStream::connect(target).unwrap();
        let listen = |from: &TcpStream, to: &TcpStream| {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            thread::spawn(move || {
                let (mut sent, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
                while let Ok(n @ 1..) = from.read(&mut buffer) {
                    sent.extend_from_slice(&buffer[..n]);
                    if to.write_all(&buffer[..n]).is_err() {
                        break;
                    }
                }
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                sent
            })
        };
        let (by_client, by_server) = (listen(&near, &far), listen(&far, &near));
        Recorded { by_client: by_client.join().unwrap(), by_server: by_server.join().unwrap() }
    });
    (address, recorder)
}

/// Everything that a client does on one connection, so that the recording contains whatever could be useful to others.
fn converse(scene: &Scene, client: &Engine) -> Recorded {
    let (address, recorder) = recorder(&scene.address);
    let to = client.lookup(&address).unwrap();
    let add = client.procedure::<(u32, u32), u32>("add");
    assert_eq!(add.on(&to).call(&(1, 2)).unwrap(), 3);
    let theirs = client.expose_read_only(full_of(HONEST)).unwrap();
    let (_, bound) = client.procedure::<Bulk, (usize, Bulk)>("keep").on(&to).call(&theirs.bulk()).unwrap();
    let mut bytes = vec![0u8; LEN];
    assert_eq!(bound.on(&to).pull_into(&mut bytes).unwrap(), LEN);
    assert!(bytes == full_of(BOUND_TO_ONE));
    assert_eq!(bound.on(&to).push_from(&bytes).unwrap(), LEN);
    client.procedure::<u32, ()>("note").on(&to).notify(&1).unwrap();
    let swallow = client.procedure::<Vec<u8>, usize>("swallow");
    assert_eq!(swallow.on(&to).call(&vec![3; MOVED]).unwrap(), MOVED);
    assert_eq!(add.on(&to).call(&(3, 4)).unwrap(), 7);
    client.finalize().unwrap();
    recorder.join().unwrap()
}

/// Sends it all to the address, and returns what comes back. A recording that does not end with a goodbye is cut off.
fn replay(address: &str, sent: &[u8], ends: bool) -> Vec<u8> {
    let mut stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    let mut listening = stream.try_clone().unwrap();
    listening.set_read_timeout(Some(BOUND)).unwrap();
    let listener = thread::spawn(move || {
        let mut received = Vec::new();
        let _ = listening.read_to_end(&mut received);
        received
    });
    let _ = stream.write_all(sent);
    if !ends {
        let _ = stream.shutdown(Shutdown::Write);
    }
    listener.join().unwrap()
}

#[test]
fn replayed_connection_is_served_as_a_new_peer() {
    let _watchdog = Watchdog::start("replay::replayed_connection_is_served_as_a_new_peer");
    over(Carrier::Tcp, || {
        let scene = Scene::new();
        let begin = Instant::now();
        let recorded = converse(&scene, &client());
        for _ in 0..3 {
            let received = replay(&scene.address, &recorded.by_client, true);
            // The sender is served as a new peer: it can't access what belonged to the recorded one.
            assert!(received.starts_with(MAGIC));
            scene.assert_unharmed(&received);
        }
        // What the victim has sent, sent to the victim.
        let received = replay(&scene.address, &recorded.by_server, false);
        scene.assert_unharmed(&received);
        report("replay: a recorded connection", "served as a new peer", begin);
    });
}

const KEY: &str = "another key of more than sixteen bytes";

#[test]
fn replayed_connection_with_a_key_is_refused() {
    let _watchdog = Watchdog::start("replay::replayed_connection_with_a_key_is_refused");
    over(Carrier::Tcp, || {
        let scene = Scene::with(Some(KEY));
        let begin = Instant::now();
        let client = configured().pre_shared_key(KEY).build().unwrap();
        let recorded = converse(&scene, &client);
        let notes = scene.notes();
        for sent in [&recorded.by_client, &recorded.by_server] {
            let received = replay(&scene.address, sent, true);
            // A challenge and a refusal, if anything: no hello, no frame.
            let mut rest = &received[..];
            while !rest.is_empty() {
                assert!(rest.starts_with(MAGIC) && [CHALLENGE, REFUSAL].contains(&rest[PIECE_LEN - 1]), "{received:?}");
                rest = &rest[16 + u32::from_le_bytes(rest[12..16].try_into().unwrap()) as usize..];
            }
            scene.assert_unharmed(&received);
        }
        assert_eq!(scene.notes(), notes);
        report("replay: a recorded connection with a key", "the victim hangs up", begin);
        // The same by a peer that is dialled: the victim sends no frame to a peer without a fresh proof.
        let begin = Instant::now();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        scene.dial(&format!("tcp://{}", listener.local_addr().unwrap()), 0);
        // The victim may dial more than once: each of its operations may find the connection gone.
        let sent = recorded.by_server;
        listener.set_nonblocking(true).unwrap();
        let mut received = Vec::new();
        while begin.elapsed() < Duration::from_secs(3) {
            let Ok((mut stream, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(BOUND)).unwrap();
            let _ = stream.write_all(&sent);
            let _ = stream.read_to_end(&mut received);
        }
        assert!(received.starts_with(MAGIC));
        scene.assert_unharmed(&received);
        report("replay: the responses of a recorded connection with a key", "the victim hangs up", begin);
    });
}
