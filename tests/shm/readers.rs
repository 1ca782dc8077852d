//! Peers that read exported memory, and never report that they have finished, or keep reporting that they still read.

use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode};

use crate::common::wire::{self, Described, Range, Status};
use crate::forged::*;
use crate::roles::{Far, start};
use crate::support::*;

/// The time that a reader has for one step, and slack for a busy machine.
const BOUND_MS: u64 = 1800;

struct Scene {
    child: Child,
    address: String,
    far: Far,
}

fn scene() -> Scene {
    over(Carrier::Shm, || ());
    let (child, address) = start(&[]);
    let far = Far::new(&client(), &address);
    far.assert_serves();
    Scene { child, address, far }
}

/// Pulls, and receives the first loan of the payload.
fn pull_first_loan(scene: &Scene, bulk: &Bulk) -> (Forged, usize, u64) {
    let mut peer = Forged::after_handshake(&scene.address, true);
    peer.send_message(&Message::Pull(Range::of(1, bulk)), &[]);
    let (slot, id, _) = peer.take_loan();
    assert_eq!(peer.get(Word::Granted(slot)), id);
    (peer, slot, id)
}

#[test]
fn reclaim_does_not_wait_for_loan_that_is_not_being_read() {
    let _watchdog = Watchdog::start("readers::reclaim_does_not_wait_for_loan_that_is_not_being_read");
    let scene = scene();
    // `assert_serves` opened number 0.
    for (index, shared) in [(1, false), (2, true)] {
        let bulk = scene.far.open(1, 3 << 20, shared);
        let (peer, slot, _) = pull_first_loan(&scene, &bulk);
        let took = scene.far.reclaim(index, 2);
        assert!(took < 500, "{took} ms");
        assert_eq!(peer.get(Word::Granted(slot)), 0);
        assert_serves(&scene.far.engine, &scene.far.to);
    }
}

#[test]
fn peer_that_never_ends_a_read_is_disconnected_by_reclaim() {
    let _watchdog = Watchdog::start("readers::peer_that_never_ends_a_read_is_disconnected_by_reclaim");
    let scene = scene();
    for (index, shared) in [(1, false), (2, true)] {
        let bulk = scene.far.open(1, 3 << 20, shared);
        let (peer, slot, id) = pull_first_loan(&scene, &bulk);
        peer.set(Word::Reading(slot), id);
        let took = scene.far.reclaim(index, 2);
        assert!((900..BOUND_MS).contains(&took), "{took} ms");
        assert_eq!(peer.hung_up(), None);
        assert_serves(&scene.far.engine, &scene.far.to);
    }
}

#[test]
fn peer_that_never_ends_several_reads_delays_reclaims_once() {
    let _watchdog = Watchdog::start("readers::peer_that_never_ends_several_reads_delays_reclaims_once");
    let scene = scene();
    let bulks = [scene.far.open(1, 8 << 20, false), scene.far.open(1, 8 << 20, true)];
    let mut peer = Forged::after_handshake(&scene.address, true);
    let mut loans = Vec::new();
    for (number, bulk) in bulks.iter().enumerate() {
        peer.send_message(&Message::Pull(Range::of(number as u64 + 1, bulk)), &[]);
    }
    while loans.len() < 4 {
        let (slot, id, _) = peer.take_loan();
        peer.set(Word::Reading(slot), id);
        loans.push(slot);
    }
    let took: Vec<u64> = (1..3).map(|index| scene.far.reclaim(index, 2)).collect();
    assert!(took.iter().sum::<u64>() < BOUND_MS, "{took:?} ms for {loans:?}");
    peer.hung_up();
    assert_serves(&scene.far.engine, &scene.far.to);
}

#[test]
fn many_peers_that_never_end_reads_delay_reclaim_once() {
    let _watchdog = Watchdog::start("readers::many_peers_that_never_end_reads_delay_reclaim_once");
    let scene = scene();
    let honest = Far::new(&client(), &scene.address);
    honest.assert_serves();
    let mut index = 2;
    for (count, shared) in [(6, false), (6, true), (20, false), (20, true)] {
        let bulk = scene.far.open(1, 3 << 20, shared);
        let peers: Vec<Forged> = (0..count)
            .map(|_| {
                let (peer, slot, id) = pull_first_loan(&scene, &bulk);
                peer.set(Word::Reading(slot), id);
                peer
            })
            .collect();
        let took = scene.far.reclaim(index, 2);
        assert!((900..BOUND_MS).contains(&took), "{took} ms for {count} readers");
        peers.iter().for_each(|peer| assert_eq!(peer.hung_up(), None));
        assert!(honest.to.is_connected() && scene.far.to.is_connected());
        assert_serves(&scene.far.engine, &scene.far.to);
        honest.assert_serves();
        index += 2;
    }
}

#[test]
fn scope_with_many_endless_reads_ends_after_one_delay() {
    let _watchdog = Watchdog::start("readers::scope_with_many_endless_reads_ends_after_one_delay");
    over(Carrier::Shm, || ());
    let engine = configured().listen("shm://").build().unwrap();
    define_add(&engine);
    let mut buffers = vec![vec![1u8; 1 << 20]; 6];
    let mut left = Instant::now();
    let peers = engine
        .scope(|scope| {
            let mut peers = Vec::new();
            for buffer in &mut buffers {
                let bulk = scope.expose(&mut buffer[..], BulkMode::ReadWrite)?;
                let mut peer = Forged::after_handshake(&engine.address().to_string(), true);
                peer.send_message(&Message::Pull(Range::of(1, &bulk)), &[]);
                let (slot, id, _) = peer.take_loan();
                peer.set(Word::Reading(slot), id);
                peers.push(peer);
            }
            left = Instant::now();
            Ok(peers)
        })
        .unwrap();
    let took = left.elapsed().as_millis() as u64;
    assert!((900..BOUND_MS).contains(&took), "{took} ms for {} readers", peers.len());
    assert_lives(&engine);
}

#[test]
fn peers_that_hang_up_during_reads_leave_nothing() {
    let _watchdog = Watchdog::start("readers::peers_that_hang_up_during_reads_leave_nothing");
    let scene = scene();
    let bulks = [scene.far.open(1, 3 << 20, false), scene.far.open(1, 3 << 20, true)];
    let pid = scene.child.pid();
    let before = holdings(pid);
    for round in 0..20 {
        let (peer, slot, id) = pull_first_loan(&scene, &bulks[round % 2]);
        peer.set(Word::Reading(slot), id);
        drop(peer);
    }
    // Their loans stay valid for the time of one step. The next connection ends them.
    let begin = Instant::now();
    loop {
        drop(Forged::after_handshake(&scene.address, true));
        let now = holdings(pid);
        // The last one may not be gone yet.
        if now.0 <= before.0 + 3 && now.1 <= before.1 + 2 {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(5), "{before:?} before, {now:?} now");
        std::thread::sleep(Duration::from_millis(50));
    }
    for index in 1..3 {
        assert!(scene.far.reclaim(index, 2) < BOUND_MS);
    }
    assert_serves(&scene.far.engine, &scene.far.to);
}

#[test]
fn invalid_loan_words_are_ignored() {
    let _watchdog = Watchdog::start("readers::invalid_loan_words_are_ignored");
    let scene = scene();
    let bulk = scene.far.open(1, 8 << 20, false);
    let (peer, slot, id) = pull_first_loan(&scene, &bulk);
    // Loans of the past, of the future, and of other slots.
    for value in [0, 1, id + 1, id + 1000, u64::MAX] {
        for other in (0..16).filter(|other| *other != slot) {
            peer.set(Word::Reading(other), value);
            peer.set(Word::Finished(other), value);
        }
    }
    peer.set(Word::Reading(slot), id + 1);
    peer.set(Word::Finished(slot), id.wrapping_sub(1));
    let took = scene.far.reclaim(1, 2);
    assert!(took < 500, "{took} ms");
    assert_serves(&scene.far.engine, &scene.far.to);
}

#[test]
fn response_of_peer_that_has_hung_up_arrives() {
    let _watchdog = Watchdog::start("readers::response_of_peer_that_has_hung_up_arrives");
    over(Carrier::Shm, || ());
    let engine = client();
    let address = format!("shm://gone-{}", std::process::id());
    let listener = listen(&address);
    for round in 0..20 {
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut peer = Forged::accept(&listener);
                peer.welcome(false);
                peer.shake_hands();
                assert!(peer.take(BYTES).starts_with(b"calomel\0"));
                let call = loop {
                    let frame = peer.take(BYTES);
                    if let Some((Message::Request { call, .. }, _)) = Message::take(&frame[wire::PREFIX_LEN..]) {
                        break call;
                    }
                };
                let body = postcard::to_stdvec(&7u32).unwrap();
                peer.send_message(&Message::answer(call, body.len()), &body);
                // Hangs up with packets unread.
            });
            let endpoint = engine.lookup(&address).unwrap();
            let answer = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2));
            assert_eq!(answer.map_err(|e| e.to_string()), Ok(7), "round {round}");
            eventually("the disconnect is noticed", || !endpoint.is_connected());
        });
    }
}

#[test]
fn loan_withdrawn_during_its_read_fails_the_pull() {
    let _watchdog = Watchdog::start("readers::loan_withdrawn_during_its_read_fails_the_pull");
    let scene = scene();
    const SIZE: usize = 4 << 20;
    let (mut caught, mut undisturbed, begin) = (0, 0, Instant::now());
    while (caught < 5 || undisturbed == 0) && begin.elapsed() < Duration::from_secs(20) {
        let mut peer = Forged::after_handshake(&scene.address, true);
        // Pages that are not populated yet, so that reading them takes time.
        let memory = vec![0u8; SIZE];
        let bulk = Described::new([7; 16], SIZE as u64, BulkMode::ReadOnly, peer.incarnation);
        let arguments = postcard::to_stdvec(&(bulk, false)).unwrap();
        peer.call(1, "fetch", arguments.len(), &arguments);
        let transfer = loop {
            let frame = peer.take(BYTES);
            if let Some((Message::Pull(range), _)) = Message::take(&frame[wire::PREFIX_LEN..]) {
                break range.transfer;
            }
        };
        peer.send_message(&Message::Data { stream: Stream::Pull, id: transfer, offset: 0, len: SIZE as u32 }, &[]);
        peer.send_loan(0, 1, &[[0, memory.as_ptr() as u64, SIZE as u64 - 16]]);
        // A payload through the ring waits for all loans before it, which are read in one step.
        peer.put(PAYLOAD, &[0; 16]);
        let disturbs = undisturbed > 0;
        let mut read = false;
        if disturbs {
            let waiting = Instant::now();
            while peer.get(Word::Reading(0)) != 1 && waiting.elapsed() < Duration::from_millis(200) {
                std::hint::spin_loop();
            }
            peer.set(Word::Granted(0), 0);
            read = peer.get(Word::Reading(0)) == 1;
        }
        peer.send_message(&Message::Done { transfer, status: Status::Ok }, &[]);
        let fetched = loop {
            let frame = peer.take(BYTES);
            if let Some((Message::Response { .. }, body)) = Message::take(&frame[wire::PREFIX_LEN..]) {
                break postcard::from_bytes::<Result<u8, String>>(body).unwrap();
            }
        };
        match disturbs {
            true if read => assert!(fetched.is_err(), "revoked bytes were accepted"),
            true => {}
            false => assert_eq!(fetched, Ok(0)),
        }
        (caught, undisturbed) = (caught + u32::from(read), undisturbed + u32::from(!disturbs));
        drop(memory);
    }
    assert!(caught >= 5, "the read was observed {caught} times");
    assert_serves(&scene.far.engine, &scene.far.to);
}
