//! Peers that break the protocol of the transport, in each way that there is: the engine hangs up, says so in its log, and
//! nothing else happens to it.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use calomel::{Bulk, Error, Request};

use crate::common::wire;
use crate::forged::*;
use crate::roles::{Far, start};
use crate::support::*;

/// A victim, and a client of it that means well.
struct Scene {
    child: Child,
    address: String,
    far: Far,
    canary: Bulk,
    before: (usize, usize, usize),
}

const CANARY: usize = 200_000;

impl Scene {
    fn new() -> Scene {
        let (child, address) = start(&[]);
        let far = Far::new(&client(), &address);
        let canary = far.open(42, CANARY, false);
        let shared = far.open(42, CANARY, true);
        let mut copy = vec![0u8; CANARY];
        shared.on(&far.to).pull_into(&mut copy).unwrap();
        // What is made once and kept is no leftover.
        far.assert_serves();
        Forged::after_handshake(&address, true);
        let scene = Scene { before: (0, 0, 0), child, address, far, canary };
        let mut before = holdings(scene.child.pid());
        // Until the first visitor is gone.
        eventually("it settles", || {
            std::thread::sleep(Duration::from_millis(100));
            let now = holdings(scene.child.pid());
            std::mem::replace(&mut before, now) == now
        });
        Scene { before, ..scene }
    }

    /// The victim is as it was before.
    #[track_caller]
    fn assert_unharmed(&self, after: &str) {
        let (begin, mut now) = (Instant::now(), holdings(self.child.pid()));
        while now.0 > self.before.0 || now.1 > self.before.1 || now.2 > self.before.2 + 3 {
            assert!(begin.elapsed() < Duration::from_secs(8), "after {after}: {:?} before, {now:?} now", self.before);
            std::thread::sleep(Duration::from_millis(2));
            now = holdings(self.child.pid());
        }
        assert!(self.far.to.is_connected(), "after {after}: another's connection has ended");
        assert_serves(&self.far.engine, &self.far.to);
        let mut copy = vec![0u8; CANARY];
        assert_eq!(self.canary.on(&self.far.to).pull_into(&mut copy).unwrap(), CANARY);
        assert!(copy.iter().all(|b| *b == 42), "after {after}");
    }
}

#[test]
fn one_that_keeps_to_the_rules_is_served() {
    let _watchdog = Watchdog::start("malformed::one_that_keeps_to_the_rules_is_served");
    let (_child, address) = over_shm(|| start(&[]));
    for reads in [true, false] {
        let mut peer = Forged::after_handshake(&address, reads);
        let arguments = [postcard::to_stdvec(&(100_000usize)).unwrap(), vec![1; 100_000]].concat();
        peer.call(1, "swallow", arguments.len(), &[]);
        let (here, through) = (60_000, arguments.len() - 60_000);
        peer.tell(&Message::Data { stream: Stream::Request, id: 1, offset: 0, len: here as u32 }, &[]);
        peer.lend(0, 1, &[[0, arguments.as_ptr() as u64, 50_000], [0, arguments[50_000..].as_ptr() as u64, 10_000]]);
        peer.tell(&Message::Data { stream: Stream::Request, id: 1, offset: here as u64, len: through as u32 }, &[]);
        for piece in arguments[here..].chunks(MAX_BODY) {
            peer.put(PAYLOAD, piece);
        }
        // A frame, behind its prefix: `Response`, number of the call; no shape, no leases, size; the result.
        let answer = loop {
            let frame = peer.take(BYTES);
            if frame.get(wire::PREFIX_LEN) == Some(&1) {
                break frame;
            }
        };
        assert!(answer.ends_with(&postcard::to_stdvec(&100_000usize).unwrap()), "{answer:?}");
        assert_eq!(peer.get(Word::Finished(0)), 1);
    }
}

/// Sets the carrier for the children and engines of this thread.
fn over_shm<T>(f: impl FnOnce() -> T) -> T {
    over(Carrier::Shm, || ());
    f()
}

type Lie = (&'static str, fn(&str) -> Forged, Option<&'static str>);

/// Dials, and says a hello with these descriptors.
fn hello_with(address: &str, fds: &[&OwnedFd]) -> Forged {
    let peer = Forged::dial(address);
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    peer.send(&Packet::Hello(Hello::honest()), &fds);
    peer
}

fn own_segment(peer: &Forged) -> OwnedFd {
    peer.segment().try_clone_to_owned().unwrap()
}

/// Before anything is agreed on: what the peer does, and part of the reason that it is told.
const HANDSHAKE: &[Lie] = &[
    (
        "another magic",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello { magic: *b"GET / HT", ..Hello::honest() }), &[peer.segment()]);
            peer
        },
        Some("not a calomel engine"),
    ),
    (
        "another version",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello { version: 7, ..Hello::honest() }), &[peer.segment()]);
            peer
        },
        Some("version 7"),
    ),
    ("no descriptor", |address| hello_with(address, &[]), Some("no shared memory")),
    ("a segment that is too short", |address| hello_with(address, &[&memory(LEN as u64 - 1, true)]), Some("announced")),
    ("a segment of no length", |address| hello_with(address, &[&memory(0, true)]), Some("announced")),
    ("a segment that can be made shorter", |address| hello_with(address, &[&memory(LEN as u64, false)]), Some("shorter")),
    ("a file", |address| hello_with(address, &[&std::fs::File::open("/proc/self/exe").unwrap().into()]), Some("sealed")),
    ("a folder", |address| hello_with(address, &[&std::fs::File::open("/tmp").unwrap().into()]), Some("sealed")),
    ("a device", |address| hello_with(address, &[&std::fs::File::open("/dev/zero").unwrap().into()]), Some("sealed")),
    (
        "a socket",
        |address| {
            let peer = Forged::dial(address);
            hello_with(address, &[&peer.socket])
        },
        Some("sealed"),
    ),
    (
        "twenty descriptors",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello::honest()), &[peer.segment(); 20]);
            peer
        },
        None,
    ),
    (
        "garbage",
        |address| {
            let peer = Forged::dial(address);
            peer.send_raw(&[0xff; 200], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a packet of nothing",
        |address| {
            let peer = Forged::dial(address);
            peer.send_raw(&[], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a packet that is too long",
        |address| {
            let peer = Forged::dial(address);
            peer.send_raw(&[1; 5000], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "half a hello",
        |address| {
            let peer = Forged::dial(address);
            let bytes = postcard::to_stdvec(&Packet::Hello(Hello::honest())).unwrap();
            peer.send_raw(&bytes[..10], &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a welcome to whoever welcomes",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Welcome { hello: Hello::honest(), reads: true }, &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "ready at once",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Ready { reads: true }, &[]);
            peer
        },
        None,
    ),
    (
        "a block at once",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Block { id: 1, len: LEN as u64 }, &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "two hellos",
        |address| {
            let peer = hello_with(address, &[&own_segment(&Forged::dial(address))]);
            let fd = own_segment(&peer);
            peer.send(&Packet::Hello(Hello::honest()), &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "a hello, and the end",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello::honest()), &[peer.segment()]);
            rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).unwrap();
            peer
        },
        None,
    ),
    (
        "ready twice",
        |address| {
            let peer = Forged::connect(address, true);
            peer.send(&Packet::Ready { reads: true }, &[]);
            peer
        },
        None,
    ),
    (
        "refused when all is agreed on",
        |address| {
            let peer = Forged::connect(address, true);
            peer.send(&Packet::Refused { reason: "no".to_owned() }, &[]);
            peer
        },
        None,
    ),
    // These are given up when connecting has taken too long.
    ("silence", |address| Forged::dial(address), None),
    (
        "bells and nothing else",
        |address| {
            let peer = Forged::dial(address);
            (0..100).for_each(|_| peer.ring());
            peer
        },
        None,
    ),
    (
        "a hello and nothing else",
        |address| {
            let peer = Forged::dial(address);
            peer.send(&Packet::Hello(Hello::honest()), &[peer.segment()]);
            peer
        },
        None,
    ),
    ("no greeting in the ring", |address| Forged::connect(address, true), None),
];

#[test]
fn in_the_handshake() {
    let _watchdog = Watchdog::start("malformed::in_the_handshake");
    let scene = over_shm(Scene::new);
    for (lie, tell, reason) in HANDSHAKE {
        let begin = Instant::now();
        let said = tell(&scene.address).hung_up();
        assert!(begin.elapsed() < Duration::from_secs(4), "{lie}: {:?}", begin.elapsed());
        if let Some(reason) = reason {
            assert!(said.as_deref().is_some_and(|said| said.contains(reason)), "{lie}: {said:?}");
        }
        scene.assert_unharmed(lie);
    }
}

/// Announces, and lends at once.
fn lending(address: &str, announced: usize, slot: u64, id: u64, pieces: &[[u64; 3]]) -> Forged {
    let mut peer = Forged::after_handshake(address, true);
    peer.announce(announced);
    peer.lend(slot, id, pieces);
    peer
}

static BYTES_OF_MINE: [u8; 4096] = [6; 4096];

fn here() -> u64 {
    BYTES_OF_MINE.as_ptr() as u64
}

/// Announces, and puts a record.
fn putting(address: &str, announced: Option<usize>, kind: u64, len: usize) -> Forged {
    let mut peer = Forged::after_handshake(address, true);
    if let Some(announced) = announced {
        peer.announce(announced);
    }
    peer.put(kind, &vec![0; len]);
    peer
}

/// A first record with this header.
fn header(address: &str, header: u64) -> Forged {
    let mut peer = Forged::after_handshake(address, true);
    peer.put_header(header, &[]);
    peer
}

/// Asks for more than the ring holds, and says that it has taken this much of it.
fn having_taken(address: &str, steps: &[u64]) -> Forged {
    let mut peer = Forged::after_handshake(address, false);
    peer.call(1, "big", 3, &postcard::to_stdvec(&1_000_000usize).unwrap());
    for step in steps {
        // It has sent what there is room for, and looks again when it is rung for.
        std::thread::sleep(Duration::from_millis(20));
        peer.set(Word::Taken, *step);
    }
    peer
}

const RECORDS: &[Lie] = &[
    ("a record of no kind", |address| header(address, 7), None),
    ("a record of kind 6", |address| header(address, 6 << 32 | 8), None),
    ("a record of the last kind", |address| header(address, u64::MAX), None),
    ("a record longer than any", |address| header(address, BYTES << 32 | (MAX_BODY as u64 + 1)), None),
    ("a record longer than the ring", |address| header(address, PAYLOAD << 32 | 0xffff_ffff), None),
    ("taken: all", |address| having_taken(address, &[u64::MAX]), None),
    ("taken: ahead", |address| having_taken(address, &[RING as u64 * 2]), None),
    (
        "taken: back again",
        |address| {
            let mut peer = having_taken(address, &[]);
            // More than the ring holds: so it has seen that something was taken.
            while peer.theirs_at < RING + RING / 2 {
                peer.next();
            }
            peer.set(Word::Taken, 0);
            peer
        },
        None,
    ),
    ("slot 16", |address| lending(address, 4096, 16, 1, &[[0, here(), 4096]]), None),
    ("the last slot", |address| lending(address, 4096, u64::MAX, 1, &[[0, here(), 4096]]), None),
    ("loan 0", |address| lending(address, 4096, 0, 0, &[[0, here(), 4096]]), None),
    ("a loan of nothing", |address| lending(address, 4096, 0, 1, &[]), None),
    ("a piece of nothing", |address| lending(address, 4096, 0, 1, &[[0, here(), 0]]), None),
    ("a piece that wraps", |address| lending(address, 4096, 0, 1, &[[0, u64::MAX - 10, 4096]]), None),
    ("pieces that are too long together", |address| lending(address, 4096, 0, 1, &[[0, 16, 1 << 63], [0, 16, 1 << 63]]), None),
    ("a huge piece", |address| lending(address, 4096, 0, 1, &[[0, 16, u64::MAX - 16]]), None),
    ("one byte too much", |address| lending(address, 4095, 0, 1, &[[0, here(), 4096]]), None),
    ("65 pieces", |address| lending(address, 650, 0, 1, &[[0, here(), 10]; 65]), None),
    ("addresses of nothing", |address| lending(address, 4096, 0, 1, &[[0, 4096, 4096]]), None),
    ("addresses of the system", |address| lending(address, 4096, 0, 1, &[[0, 0xffff_8000_0000_0000, 4096]]), None),
    ("half of it is not there", |address| lending(address, 4096, 0, 1, &[[0, here(), 2048], [0, 4096, 2048]]), None),
    ("a block that nobody knows", |address| lending(address, 4096, 0, 1, &[[99, 0, 4096]]), None),
    (
        "more than a block has",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.announce(4096);
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[fd.as_fd()]);
            peer.lend(0, 1, &[[3, 1, 4096]]);
            peer
        },
        None,
    ),
    (
        "a block that was forgotten",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[fd.as_fd()]);
            peer.announce(4096);
            peer.put(FORGET, &3u64.to_le_bytes());
            std::thread::sleep(Duration::from_millis(20));
            peer.put(FORGET, &3u64.to_le_bytes());
            peer.lend(0, 1, &[[3, 0, 4096]]);
            peer
        },
        None,
    ),
    (
        "a block longer than it is",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 3, len: 1 << 40 }, &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "a block of nothing",
        |address| {
            let peer = Forged::after_handshake(address, true);
            peer.send(&Packet::Block { id: 3, len: 0 }, &[peer.segment()]);
            peer
        },
        None,
    ),
    (
        "a block without a descriptor",
        |address| {
            let peer = Forged::after_handshake(address, true);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[]);
            peer
        },
        None,
    ),
    (
        "a block that can be made shorter",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(4096, false);
            peer.send(&Packet::Block { id: 3, len: 4096 }, &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "a block that would take up the addresses of others",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(8 << 40, true);
            peer.send(&Packet::Block { id: 1, len: 8 << 40 }, &[fd.as_fd()]);
            peer
        },
        None,
    ),
    (
        "blocks without end",
        |address| {
            let peer = Forged::after_handshake(address, true);
            let fd = memory(4096, true);
            for id in 1..1000 {
                peer.send(&Packet::Block { id, len: 4096 }, &[fd.as_fd()]);
            }
            peer
        },
        None,
    ),
    (
        "one slot twice",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.announce(1 << 20);
            for id in 1..1000 {
                peer.lend(0, id, &[[0, here(), 1]]);
            }
            peer
        },
        None,
    ),
    ("a payload that was not announced", |address| putting(address, None, PAYLOAD, 100), None),
    (
        "a loan that was not announced",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.lend(0, 1, &[[0, here(), 4096]]);
            peer
        },
        None,
    ),
    ("the end of nothing", |address| putting(address, None, GONE, 0), None),
    ("one byte more than announced", |address| putting(address, Some(100), PAYLOAD, 101), None),
    ("a payload of nothing", |address| putting(address, Some(100), PAYLOAD, 0), None),
    ("frames inside a payload", |address| putting(address, Some(100), BYTES, 10), None),
    ("a loan of odd length", |address| putting(address, Some(100), LOAN, 17), None),
    ("a loan of an odd number of words", |address| putting(address, Some(100), LOAN, 32), None),
    (
        "a payload and a frame in one record",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.call(1, "swallow", 1 << 20, &[]);
            let frame = postcard::to_stdvec(&Message::Data { stream: Stream::Request, id: 1, offset: 0, len: 5 }).unwrap();
            let frame = wire::frame(&frame, &[]);
            peer.put(BYTES, &[frame.clone(), frame].concat());
            peer
        },
        None,
    ),
    (
        "an announcement, and the end",
        |address| {
            let mut peer = Forged::after_handshake(address, true);
            peer.announce(1 << 20);
            rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).unwrap();
            peer
        },
        None,
    ),
    ("garbage in the ring", |address| putting(address, None, BYTES, 1000), None),
];

#[test]
fn in_the_ring() {
    let _watchdog = Watchdog::start("malformed::in_the_ring");
    let scene = over_shm(Scene::new);
    for (lie, tell, _) in RECORDS {
        let begin = Instant::now();
        tell(&scene.address).hung_up();
        // At once, and not because it has been silent for long.
        assert!(begin.elapsed() < HEARTBEAT * 9 / 10, "{lie}: {:?}", begin.elapsed());
        scene.assert_unharmed(lie);
    }
}

#[test]
fn a_piece_that_is_not_there_leaves_what_is_behind_it_alone() {
    // Half of a part can be read: what has arrived of it must not count.
    let _watchdog = Watchdog::start("malformed::a_piece_that_is_not_there_leaves_what_is_behind_it_alone");
    let scene = over_shm(Scene::new);
    for pieces in [[[0, here(), 2048], [0, 4096, 2048]], [[0, 4096, 2048], [0, here(), 2048]]] {
        let mut peer = Forged::after_handshake(&scene.address, true);
        peer.announce(4096);
        peer.lend(0, 1, &pieces);
        peer.hung_up();
        scene.assert_unharmed("a missing piece");
    }
}

#[test]
fn floods_stop_nobody_else() {
    let _watchdog = Watchdog::start("malformed::floods_stop_nobody_else");
    let scene = over_shm(Scene::new);
    let floods: [fn(&Forged); 2] = [
        |peer| peer.ring(),
        |peer| {
            let fd = memory(4096, true);
            peer.send(&Packet::Block { id: 1, len: 4096 }, &[fd.as_fd()]);
        },
    ];
    for flood in floods {
        let (peer, begin, time) = (Forged::after_handshake(&scene.address, true), Instant::now(), Duration::from_millis(1500));
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while begin.elapsed() < time {
                        flood(&peer);
                    }
                });
            }
            while begin.elapsed() < time {
                let call = Instant::now();
                assert_serves(&scene.far.engine, &scene.far.to);
                assert!(call.elapsed() < Duration::from_millis(700), "{:?}", call.elapsed());
            }
        });
        drop(peer);
        scene.assert_unharmed("a flood");
    }
}

#[test]
fn one_that_is_hung_up_on_and_talks_on_is_not_listened_to() {
    let _watchdog = Watchdog::start("malformed::one_that_is_hung_up_on_and_talks_on_is_not_listened_to");
    let scene = over_shm(Scene::new);
    let mut peer = Forged::after_handshake(&scene.address, true);
    rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both).unwrap();
    // Pings: always something in the ring, as fast as it is taken.
    let ping = postcard::to_stdvec(&9u32).unwrap();
    let ping = wire::frame(&ping, &[]);
    let (begin, mut looked) = (Instant::now(), Instant::now());
    loop {
        peer.put(BYTES, &ping);
        // No faster than it listens, while it does.
        while peer.get(Word::Taken) + (RING as u64) / 2 < peer.at as u64 && begin.elapsed() < Duration::from_secs(3) {
            std::hint::spin_loop();
        }
        if looked.elapsed() > Duration::from_millis(50) {
            looked = Instant::now();
            if holdings(scene.child.pid()).0 <= scene.before.0 {
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(3), "it listens on");
        }
    }
    scene.assert_unharmed("talking on");
}

#[test]
fn what_was_lent_for_a_cancelled_call_is_not_the_next_ones() {
    const LEN: usize = 100_000;
    let _watchdog = Watchdog::start("malformed::what_was_lent_for_a_cancelled_call_is_not_the_next_ones");
    let engine = |builder: calomel::EngineBuilder| builder.listen("shm://").build().unwrap();
    let (server, client) = (engine(calomel::Engine::builder()), engine(calomel::Engine::builder()));
    server.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    let echo = client.procedure::<Vec<u8>, Vec<u8>>("echo").on(client.lookup(server.address()).unwrap());
    let word = b"SECRET-OF-ANOTHER-PEER!";
    let secret: Vec<u8> = word.iter().copied().cycle().take(LEN - 3).collect();
    let lent = vec![6u8; LEN];
    for _ in 0..10 {
        // What messages arrive in is used again.
        let calls: Vec<_> = (0..4).map(|_| echo.start(&secret).unwrap()).collect();
        assert!(calls.into_iter().all(|call| call.wait().unwrap() == secret));
        let mut liar = Forged::after_handshake(&server.address().to_string(), false);
        liar.call(7, "echo", LEN, &[]);
        liar.tell(&Message::Data { stream: Stream::Request, id: 7, offset: 0, len: LEN as u32 }, &[]);
        liar.set(Word::Granted(0), 1);
        let loan = [0, 1, 0, lent.as_ptr() as u64, LEN as u64];
        // In one turn, so that the memory is lent to the first call, and is read when there is the second.
        let again = [Message::Cancel { call: 7 }.frame(&[]), Message::call(7, "echo", LEN).frame(&[])].concat();
        liar.put_two((LOAN, &loan.map(u64::to_le_bytes).concat()), (BYTES, &again));
        let (begin, mut heard) = (Instant::now(), Vec::new());
        while begin.elapsed() < Duration::from_millis(50) {
            heard.extend(liar.try_next().map(|(_, body)| body).unwrap_or_default());
        }
        assert!(!heard.windows(word.len()).any(|bytes| bytes == word), "a peer is told what another has sent");
    }
    assert_eq!(echo.call(&secret).unwrap(), secret);
}

#[test]
fn what_is_read_may_change_meanwhile() {
    // A frame that another thread of the peer writes while it is taken: one or the other, or garbage, and no harm.
    let _watchdog = Watchdog::start("malformed::what_is_read_may_change_meanwhile");
    let scene = over_shm(Scene::new);
    for round in 0..30u64 {
        let mut peer = Forged::after_handshake(&scene.address, true);
        peer.announce(1 << 20);
        let mut random = Random(round);
        let begin = Instant::now();
        let base = peer.at;
        while begin.elapsed() < Duration::from_millis(10) {
            // Headers, bodies and words of all the ring, over and over, with values that are nearly right.
            let place = (base + 64 * random.below(8)) % RING;
            let value = match random.below(4) {
                0 => LOAN << 32 | 40,
                1 => PAYLOAD << 32 | random.below(MAX_BODY + 2) as u64,
                2 => random.below(20) as u64,
                _ => here(),
            };
            peer.scribble(place + 8 * random.below(6), value);
            peer.set([Word::Granted(0), Word::Reading(3), Word::Finished(0), Word::Waiting][random.below(4)], value % 5);
        }
        drop(peer);
        if round % 10 == 9 {
            scene.assert_unharmed("scribbling");
        }
    }
}

#[test]
fn servers_that_are_none() {
    let _watchdog = Watchdog::start("malformed::servers_that_are_none");
    over(Carrier::Shm, || ());
    // The last of them says nothing: that is waited for. The others answer at once, where the machine lets them.
    let engine = configured().connect_timeout(Duration::from_secs(4)).build().unwrap();
    define_add(&engine);
    type Serve = fn(Forged);
    let lies: [(&str, Serve, &str); 7] = [
        (
            "another version",
            |peer| {
                peer.receive();
                let hello = Hello { version: 9, ..Hello::honest() };
                peer.send(&Packet::Welcome { hello, reads: true }, &[peer.segment()]);
                peer.hung_up();
            },
            "version 9",
        ),
        (
            "another magic",
            |peer| {
                peer.receive();
                let hello = Hello { magic: *b"SSH-2.0-", ..Hello::honest() };
                peer.send(&Packet::Welcome { hello, reads: true }, &[peer.segment()]);
                peer.hung_up();
            },
            "not a calomel engine",
        ),
        (
            "no segment",
            |peer| {
                peer.receive();
                peer.send(&Packet::Welcome { hello: Hello::honest(), reads: true }, &[]);
                peer.hung_up();
            },
            "no shared memory",
        ),
        (
            "a refusal",
            |peer| {
                peer.receive();
                peer.send(&Packet::Refused { reason: "it rains".to_owned() }, &[]);
                peer.hung_up();
            },
            "it rains",
        ),
        (
            "garbage",
            |peer| {
                peer.send_raw(&[0x77; 300], &[]);
                peer.hung_up();
            },
            "packet",
        ),
        ("nothing", drop, ""),
        ("silence", |peer| drop(peer.hung_up()), ""),
    ];
    for (lie, serve, reason) in lies {
        let address = format!("shm://lies-{}-{}", std::process::id(), lie.replace(' ', "-"));
        let listener = listen(&address);
        std::thread::scope(|s| {
            s.spawn(|| serve(Forged::accept(&listener)));
            let endpoint = engine.lookup(&address).unwrap();
            let begin = Instant::now();
            let error = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(8), "{lie}: {:?}", begin.elapsed());
            let text = error.to_string();
            assert!(text.contains(reason) && text.contains(&address), "{lie}: {text}");
            crate::assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
        });
    }
    assert_lives(&engine);
    let _ = engine.define("unused", |_: &Request, ()| ());
}
