//! Forged bulks, passed to handlers that use them.
//!
//! A handler that gets a bulk acts for its sender. It must reach nothing that the sender could not reach.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::adversary::Adversary;
use crate::common::wire::{Described, Message, Range, Status};
use crate::over_both;
use crate::scene::{Begun, Case, Scene, Then, case, table};
use crate::support::*;
use crate::victim::{Kind, LEN, SECRET, full_of};

/// A bulk that claims this range.
fn of(range: Range) -> Described {
    let Range { token, offset, len, owner, .. } = range;
    Described { offset, ..Described::new(token, len, calomel::BulkMode::ReadWrite, owner) }
}

/// Calls with this many leases.
fn call(adversary: &mut Adversary, name: &str, arguments: &impl Serialize, count: u32) -> u64 {
    let body = postcard::to_stdvec(arguments).unwrap();
    let number = rand::random::<u64>() >> 1;
    let mut message = Message::call(number, name, body.len());
    if let Message::Request { leases, .. } = &mut message {
        *leases = (7, count);
    }
    adversary.tell(&message, &body);
    number
}

/// What a handler gets that pulls from the bulk; the victim's pulls from the adversary are refused.
fn taken(adversary: &mut Adversary, bulk: &Described, origin: bool) -> Result<Vec<u8>, String> {
    let number = call(adversary, "take", &(bulk, origin), u32::from(bulk.lease.is_some()));
    outcome(adversary, number)
}

fn outcome<T: serde::de::DeserializeOwned>(adversary: &mut Adversary, number: u64) -> Result<T, String> {
    let begin = Instant::now();
    let is_answer = |m: &Message| matches!(m, Message::Response { call, .. } | Message::Refuse { call, .. } if *call == number);
    adversary.until("an answer", |adversary| {
        adversary.messages.iter().any(|(m, _)| is_answer(m) || matches!(m, Message::Pull(_) | Message::Push(_)))
    });
    let asked = adversary.messages.iter().position(|(m, _)| matches!(m, Message::Pull(_) | Message::Push(_)));
    if let Some((Message::Pull(Range { transfer, .. }) | Message::Push(Range { transfer, .. }), _)) =
        asked.and_then(|at| adversary.messages.remove(at))
    {
        adversary.tell(&Message::Done { transfer, status: Status::Failed("the adversary was asked".to_owned()) }, &[]);
    }
    let answer = adversary.answer(number);
    assert!(begin.elapsed() < patience() * Duration::from_secs(8), "{:?}", begin.elapsed());
    match answer {
        Ok(bytes) => postcard::from_bytes::<Result<T, String>>(&bytes).unwrap(),
        Err(status) => Err(format!("{status:?}")),
    }
}

/// What a handler gets that pushes into the bulk.
fn filled(adversary: &mut Adversary, bulk: &Described, origin: bool) -> Result<usize, String> {
    let number = call(adversary, "fill", &(bulk, origin), 0);
    outcome(adversary, number)
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, String>, why: &str) {
    assert!(result.as_ref().is_err_and(|text| text.contains(why)), "{why} expected: {:?}", result.map(|_| "a success"));
}

/// Part of the error for memory that belongs to another peer than the one it is used with.
const NOT_ITS_OWN: &str = "and was used with the engine at";

/// For each use of the victim's own memory by a handler: the adversary does not own it, and its origin refuses it.
#[track_caller]
fn assert_of_no_use(adversary: &mut Adversary, bulk: &Described, why: &str) {
    for (origin, why) in [(false, NOT_ITS_OWN), (true, why)] {
        assert_refused(taken(adversary, bulk, origin), why);
        assert_refused(filled(adversary, bulk, origin), why);
    }
}

/// The request goes to the adversary itself, and to no other peer.
#[track_caller]
fn assert_adversary_is_asked(adversary: &mut Adversary, bulk: &Described) {
    for origin in [false, true] {
        assert_refused(taken(adversary, bulk, origin), "the adversary was asked");
    }
}

/// These addresses lead to no peer; the operation fails in bounded time.
fn leads_nowhere(adversary: &mut Adversary, addresses: &[String]) {
    for address in addresses {
        let bulk = Described { owner: rand::random(), addresses: vec![address.clone()], ..adversary.claimed_memory(1000) };
        let result = taken(adversary, &bulk, true);
        assert!(result.is_err(), "{address}: {result:?}");
    }
}

const BULKS: &[Case] = &[
    case("the victim's own memory, with guessed tokens", Then::Continues, |adversary, scene| {
        let secret = scene.range(0, Kind::Secret);
        for bit in (0..128).step_by(9) {
            let mut token = secret.token;
            token[bit / 8] ^= 1 << (bit % 8);
            assert_of_no_use(adversary, &of(Range { token, ..secret }), "no memory is exposed under this token");
        }
    }),
    case("the victim's own memory, exposed to another peer", Then::Continues, |adversary, scene| {
        let bulk = of(Range::of(0, &scene.bound));
        assert_of_no_use(adversary, &bulk, "another peer");
        // With a lease, and as a part.
        assert_refused(taken(adversary, &Described { lease: Some(0), ..bulk.clone() }, false), NOT_ITS_OWN);
        assert_refused(taken(adversary, &Described { lease: Some(0), ..bulk.clone() }, true), "another peer");
        let number = call(adversary, "part", &(bulk, 10usize, 10usize), 0);
        assert_refused(outcome::<usize>(adversary, number), NOT_ITS_OWN);
    }),
    case("the victim's own memory, in a mode that is not exposed", Then::Continues, |adversary, scene| {
        assert_refused(filled(adversary, &of(scene.range(0, Kind::ReadOnly)), true), "not exposed for peers to write");
        assert_refused(taken(adversary, &of(scene.range(0, Kind::WriteOnly)), true), "not exposed for peers to read");
        assert_of_no_use(adversary, &of(scene.range(0, Kind::Gone)), "was revoked");
    }),
    case("the victim's own memory, outside its range", Then::Continues, |adversary, scene| {
        for (offset, len) in
            [(LEN as u64, 1000), (u64::MAX, 1000), (u64::MAX - 999, 1000), (1 << 63, 1 << 63), (LEN as u64 - 9, u64::MAX)]
        {
            let bulk = of(Range { offset, len, ..scene.range(0, Kind::ReadWrite) });
            assert!(taken(adversary, &bulk, false).is_err() && taken(adversary, &bulk, true).is_err());
            assert!(filled(adversary, &bulk, false).is_err() && filled(adversary, &bulk, true).is_err());
        }
    }),
    case("the victim's own memory, with a forged content", Then::Continues, |adversary, scene| {
        let range = Range { len: 1000, ..scene.range(0, Kind::ReadOnly) };
        let bulk = Described { mode: calomel::BulkMode::ReadOnly, lease: Some(0), content: Some(vec![0x66; 1000]), ..of(range) };
        assert_refused(taken(adversary, &bulk, false), NOT_ITS_OWN);
        assert_eq!(taken(adversary, &bulk, true), Ok(pattern(1, LEN)[..1000].to_vec()));
    }),
    case("another peer's memory, with guessed tokens", Then::Continues, |adversary, scene| {
        let owner = scene.honest_incarnation();
        for _ in 0..10 {
            let bulk = of(Range { transfer: 0, owner, token: rand::random(), offset: 0, len: 1000 });
            assert_refused(taken(adversary, &bulk, true), "no memory is exposed under this token");
            assert_refused(filled(adversary, &bulk, true), "no memory is exposed under this token");
            assert_refused(taken(adversary, &bulk, false), NOT_ITS_OWN);
        }
    }),
    case("another peer's memory, with a forged content", Then::Continues, |adversary, scene| {
        // It is not the adversary's memory. The scene checks what other peers get.
        let range = Range { len: 16, ..Range::of(0, &scene.theirs.bulk()) };
        let bulk = Described { mode: calomel::BulkMode::ReadOnly, lease: Some(0), content: Some(vec![0x66; 16]), ..of(range) };
        assert_refused(taken(adversary, &bulk, false), NOT_ITS_OWN);
        adversary.tell(&Message::Revoked { token: range.token }, &[]);
    }),
    case("memory of more bytes than possible", Then::Continues, |adversary, _| {
        for len in [u64::MAX, 1 << 63, LEN as u64 + 1] {
            let bulk = Described { len, segments: u32::MAX, ..adversary.claimed_memory(0) };
            assert_adversary_is_asked(adversary, &bulk);
        }
    }),
    case("memory of no bytes", Then::Continues, |adversary, _| {
        let bulk = Described { segments: 0, ..adversary.claimed_memory(0) };
        assert_refused(taken(adversary, &bulk, false), "the adversary was asked");
    }),
    case("parts that wrap", Then::Continues, |adversary, _| {
        for (start, offset, len) in
            [(u64::MAX - 5, 10, 5), (u64::MAX, 1, 1), (0, u64::MAX, 1), (0, 1, u64::MAX), (0, u64::MAX, u64::MAX)]
        {
            let bulk = Described { offset: start, ..adversary.claimed_memory(1000) };
            let number = call(adversary, "part", &(bulk, offset, len), 0);
            assert!(outcome::<usize>(adversary, number).is_err());
        }
    }),
    case("contents that are too long, too short, or missing", Then::Continues, |adversary, _| {
        let bulk = Described { mode: calomel::BulkMode::ReadOnly, lease: Some(0), ..adversary.claimed_memory(100) };
        for content in [vec![0x66; 101], vec![0x66; 99], Vec::new(), vec![0x66; 100_000]] {
            assert_adversary_is_asked(adversary, &Described { content: Some(content), ..bulk.clone() });
        }
        // Without a lease it could not become stale.
        assert_adversary_is_asked(adversary, &Described { lease: None, content: Some(vec![0x66; 100]), ..bulk.clone() });
        let right = Described { content: Some(vec![0x66; 100]), ..bulk };
        assert_eq!(taken(adversary, &right, false), Ok(vec![0x66; 100]));
    }),
    case("device keys", Then::Continues, |adversary, _| {
        for keys in [Vec::new(), vec![0; 7], vec![0xff; 8], vec![0; 28], vec![0x66; 64 << 10], vec![0x66; 200_000]] {
            let bulk = Described { keys: Some(keys), lease: Some(0), ..adversary.claimed_memory(1000) };
            assert_adversary_is_asked(adversary, &bulk);
        }
    }),
    case("leases of another message", Then::Continues, |adversary, _| {
        for lease in [1, 2, u32::MAX] {
            let bulk = Described { lease: Some(lease), ..adversary.claimed_memory(1000) };
            assert_adversary_is_asked(adversary, &bulk);
        }
    }),
    case("unknown modes", Then::EndsWith("Decode", 2), |adversary, _| {
        for mode in [3u8, 0x7f] {
            let mut bytes = postcard::to_stdvec(&(adversary.claimed_memory(1000), false)).unwrap();
            // Behind the length of the bulk's bytes.
            bytes[1 + Described::MODE_AT] = mode;
            let number = 100 + u64::from(mode);
            adversary.tell(&Message::call(number, "take", bytes.len()), &bytes);
        }
    }),
    case("more addresses than allowed", Then::EndsWith("Decode", 2), |adversary, _| {
        for count in [17, 10_000] {
            let bulk = Described { addresses: vec!["tcp://127.0.0.1:1".to_owned(); count], ..adversary.claimed_memory(1000) };
            let bytes = postcard::to_stdvec(&(bulk, true)).unwrap();
            let number = count as u64;
            adversary.tell(&Message::call(number, "take", bytes.len()), &[]);
            for (at, part) in bytes.chunks(100_000).enumerate() {
                adversary.data(crate::common::wire::Stream::Request, number, 100_000 * at as u64, part);
            }
        }
    }),
    case("invalid addresses", Then::Continues, |adversary, _| {
        let texts = ["", "://", "tcp://", "tcp://[::", "http://127.0.0.1:80", "tcp://127.0.0.1:99999", "shm://../..", "\0"];
        leads_nowhere(adversary, &texts.map(str::to_owned));
        leads_nowhere(adversary, &["tcp://".to_owned() + &"x".repeat(290) + ":1"]);
    }),
    case("addresses that are too long", Then::EndsWith("Decode", 2), |adversary, _| {
        for len in [301, 30_000] {
            let bulk = Described { addresses: vec!["x".repeat(len)], ..adversary.claimed_memory(1000) };
            let bytes = postcard::to_stdvec(&(bulk, true)).unwrap();
            adversary.tell(&Message::call(len as u64, "take", bytes.len()), &[]);
            adversary.data(crate::common::wire::Stream::Request, len as u64, 0, &bytes);
        }
    }),
    case("addresses without an engine", Then::Continues, |adversary, _| {
        let closed = format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
        let others = ["tcp://0.0.0.0:1", "tcp://[::]:1", "shm://absent-engine", "loop://absent", "verbs://127.0.0.1:1", "shm://"];
        leads_nowhere(adversary, &[&[closed][..], &others.map(str::to_owned)].concat());
    }),
    case("an address that never answers", Then::Continues, |adversary, _| {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        leads_nowhere(adversary, &[format!("tcp://{}", silent.local_addr().unwrap())]);
    }),
    case("addresses of other peers", Then::Continues, |adversary, scene| {
        // They are dialled, and identify as another engine than the owner.
        leads_nowhere(adversary, &[scene.address.clone(), scene.honest.address().to_string()]);
    }),
];

fn forged_bulks_in_handlers_reach_nothing_of_others() {
    table("bulks", Begun::ByAdversary, BULKS);
}

over_both!(forged_bulks_in_handlers_reach_nothing_of_others);

/// Checks the check: `assert_kept_to_itself` finds the secret when it is read.
#[test]
fn secret_read_with_its_token_is_detected() {
    let _watchdog = Watchdog::start("bulks::secret_read_with_its_token_is_detected");
    let scene = Scene::new();
    let mut adversary = Adversary::after_handshake(&scene.address);
    // The token alone grants the access.
    assert!(adversary.pull(scene.range(1, Kind::Secret)).unwrap() == full_of(SECRET));
    let received = adversary.received;
    let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scene.assert_kept_to_itself(&received)));
    assert!(found.is_err(), "the secret was read, and the check missed it");
}
