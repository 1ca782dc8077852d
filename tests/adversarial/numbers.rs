//! Numbers of calls, transfers and leases that belong to other peers, or do not exist.

use crate::adversary::{Adversary, MOVED};
use crate::common::wire::{ANYTHING, Message, Range, Status, Stream};
use crate::over_both;
use crate::scene::{Begun, Case, Scene, Then, case, table};
use crate::support::*;
use crate::victim::{Kind, LEN};

/// Numbers as engines assign them: a slot in a table, and how often it was used. Only the first few are used here.
fn guesses() -> impl Iterator<Item = u64> {
    let places = (0..12u64).flat_map(|place| (0..40u64).map(move |used| used << 32 | place));
    places.chain([u64::MAX, u64::MAX >> 32, 1 << 63, 0])
}

/// The victim has many operations in progress with the honest peer, which the adversary must not end. Its own are left out.
fn others(adversary: &Adversary) -> Vec<u64> {
    let own = [adversary.call, adversary.pull, adversary.push];
    guesses().filter(|number| !own.contains(number)).collect()
}

fn slow_handlers_begun(adversary: &mut Adversary) -> u64 {
    let number = adversary.request("slow handlers begun", &());
    postcard::from_bytes(&adversary.answer(number).unwrap()).unwrap()
}

/// A response with a large body, of which nothing has been sent.
fn large(number: u64, size: u64) -> Message {
    Message::Response { call: number, result: 0, shape: Vec::new(), leases: (0, 0), released: (0, 0), size }
}

fn refusal(number: u64) -> Message {
    Message::Refuse { call: number, status: Status::Failed("the adversary refused".to_owned()) }
}

fn done(transfer: u64, status: Status) -> Message {
    Message::Done { transfer, status }
}

/// While the honest peer holds a bulk of the victim's, the adversary releases its lease.
fn holding(scene: &Scene, give_back: impl FnOnce()) {
    let bulk = scene.honest.procedure::<(), calomel::Bulk>("export").on(&scene.to).call(&()).unwrap();
    give_back();
    let is_held = || scene.honest.procedure::<(), bool>("is held").on(&scene.to).call(&()).unwrap();
    assert!(is_held(), "the victim lost track of the honest peer's lease");
    let mut bytes = vec![0u8; LEN];
    assert_eq!(bulk.on(&scene.to).pull_into(&mut bytes).unwrap(), LEN);
    assert!(bytes == pattern(1, LEN));
    drop(bulk);
    eventually("the lease is released", || !is_held());
}

const OTHERS: &[Case] = &[
    case("responses to other peers' calls", Then::Continues, |adversary, _| {
        for number in others(adversary) {
            adversary.tell(&Message::answer(number, 17), &[&[16][..], &[0x66; 16]].concat());
        }
    }),
    case("large responses to other peers' calls", Then::Continues, |adversary, _| {
        for number in others(adversary) {
            adversary.tell(&large(number, 17), &[]);
            adversary.data(Stream::Response, number, 0, &[0x66; 17]);
        }
    }),
    case("refusals of other peers' calls", Then::Continues, |adversary, _| {
        for number in others(adversary) {
            adversary.tell(&refusal(number), &[]);
        }
    }),
    case("the end of other peers' transfers", Then::Continues, |adversary, _| {
        for number in others(adversary) {
            for status in [Status::Ok, Status::Revoked, Status::Restarted] {
                adversary.tell(&done(number, status), &[]);
            }
        }
    }),
    case("data for other peers' streams", Then::Continues, |adversary, _| {
        for number in others(adversary) {
            for stream in [Stream::Pull, Stream::Push, Stream::Request, Stream::Response] {
                adversary.data(stream, number, 0, &[0x66; 20]);
            }
        }
    }),
    case("other peers' calls and transfers, cancelled", Then::Continues, |adversary, _| {
        for number in others(adversary) {
            adversary.tell(&Message::Cancel { call: number }, &[]);
            adversary.tell(&Message::Abort { transfer: number, push: true }, &[]);
            adversary.tell(&Message::Abort { transfer: number, push: false }, &[]);
        }
    }),
    case("other peers' one-way calls, handled", Then::Continues, |adversary, _| {
        for count in [0, 1, u32::MAX, u32::MAX] {
            adversary.tell(&Message::Handled { count, calls: count, bytes: count }, &[]);
        }
    }),
    case("other peers' leases, released", Then::Continues, |adversary, scene| {
        holding(scene, || {
            for (first, count) in
                [(0, u32::MAX), (0, 1), (1, 1), (u64::MAX, u32::MAX), (u64::MAX, 1), (0, 0), (1 << 63, u32::MAX)]
            {
                adversary.tell(&Message::Release { first, count }, &[]);
            }
            adversary.assert_listens();
        });
    }),
    case("own leases, released twice", Then::Continues, |adversary, scene| {
        holding(scene, || {
            let number = adversary.request("export", &());
            adversary.answer(number).unwrap();
            for _ in 0..3 {
                adversary.tell(&Message::Release { first: 0, count: u32::MAX }, &[]);
            }
            adversary.assert_listens();
        });
    }),
    case("the victim's memory, reported as revoked", Then::Continues, |adversary, scene| {
        for kind in [Kind::Secret, Kind::ReadOnly, Kind::WriteOnly, Kind::ReadWrite, Kind::Gone] {
            adversary.tell(&Message::Revoked { token: scene.range(0, kind).token }, &[]);
        }
        adversary.tell(&Message::Revoked { token: Range::of(0, &scene.bound).token }, &[]);
        assert!(adversary.pull(scene.range(1, Kind::ReadOnly)).unwrap() == pattern(1, LEN));
        scene.assert_bound_is_reached();
    }),
    case("unknown tokens, reported as revoked", Then::Continues, |adversary, _| {
        for i in 0..1000u128 {
            adversary.tell(&Message::Revoked { token: (i << 64 | 7).to_le_bytes() }, &[]);
        }
    }),
    case("a shutdown of the engine", Then::EndsWith("AccessDenied", 2), |adversary, _| {
        adversary.tell(&Message::Shutdown { call: 1 }, &[]);
        adversary.tell(&Message::Shutdown { call: adversary.call }, &[]);
    }),
];

fn numbers_of_other_peers_are_ignored() {
    table("other peers' numbers", Begun::ByAdversary, OTHERS);
}

pub const OWN: &[Case] = &[
    case("two responses", Then::Continues, |adversary, _| {
        for byte in [1, 2] {
            adversary.tell(&Message::answer(adversary.call, 2), &[1, byte]);
        }
    }),
    case("a response, a refusal and a response", Then::Continues, |adversary, _| {
        adversary.tell(&Message::answer(adversary.call, 2), &[1, 1]);
        adversary.tell(&refusal(adversary.call), &[]);
        adversary.tell(&large(adversary.call, 100), &[]);
        adversary.data(Stream::Response, adversary.call, 0, &[0x66; 100]);
    }),
    case("refusals of each kind", Then::Continues, |adversary, _| {
        let text = || "x".repeat(100_000);
        let statuses = [
            Status::Ok,
            Status::Failed(text()),
            Status::Panicked(text()),
            Status::TypeMismatch { expected: text(), found: text() },
            Status::TooLarge { size: 0, limit: u64::MAX },
            Status::OutOfRange { offset: u64::MAX, len: u64::MAX, size: 0 },
            Status::Restarted,
            Status::Revoked,
            Status::Finalizing,
            Status::Checksum,
            Status::Encode(String::new()),
            Status::NoResponse,
        ];
        for status in statuses {
            adversary.tell(&Message::Refuse { call: adversary.call, status }, &[]);
            adversary.messages.clear();
            // The next call.
            adversary.engage();
        }
    }),
    case("an end of a pull of each kind", Then::Continues, |adversary, _| {
        let statuses =
            [Status::NoSuchProcedure, Status::TooLarge { size: 1, limit: 0 }, Status::Busy("b".repeat(50_000)), Status::Checksum];
        for status in statuses {
            adversary.tell(&done(adversary.pull, status.clone()), &[]);
            adversary.tell(&done(adversary.push, status), &[]);
            adversary.messages.clear();
            adversary.engage();
        }
    }),
    case("a malformed response", Then::Continues, |adversary, _| {
        // A vector that claims more than there is.
        adversary.tell(&Message::answer(adversary.call, 10), &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
    }),
    case("an empty response", Then::Continues, |adversary, _| {
        adversary.tell(&Message::answer(adversary.call, 0), &[]);
    }),
    case("a response of another shape", Then::Continues, |adversary, _| {
        let answer = Message::Response {
            call: adversary.call,
            result: 0,
            shape: vec![0xff; 1000],
            leases: (0, 0),
            released: (0, 0),
            size: 2,
        };
        adversary.tell(&answer, &[1, 1]);
    }),
    case("a response whose type was never declared", Then::HangsUp, |adversary, _| {
        let answer =
            Message::Response { call: adversary.call, result: 7, shape: Vec::new(), leases: (0, 0), released: (0, 0), size: 2 };
        adversary.tell(&answer, &[1, 1]);
    }),
    case("a response whose type is declared twice", Then::HangsUp, |adversary, _| {
        for call in [adversary.call, adversary.call + 1] {
            let answer = Message::Response { call, result: 7, shape: vec![ANYTHING], leases: (0, 0), released: (0, 0), size: 2 };
            adversary.tell(&answer, &[1, 1]);
        }
    }),
    case("a response without a declaration", Then::Continues, |adversary, _| {
        let answer =
            Message::Response { call: adversary.call, result: 0, shape: Vec::new(), leases: (0, 0), released: (0, 0), size: 2 };
        adversary.tell(&answer, &[1, 1]);
    }),
    case("a response with leases of nothing", Then::Continues, |adversary, _| {
        let answer = Message::Response {
            call: adversary.call,
            result: 0,
            shape: Vec::new(),
            leases: (u64::MAX - 1, 5),
            released: (0, 0),
            size: 80,
        };
        adversary.tell(&answer, &[&[79][..], &[1; 79]].concat());
        adversary.expect("the leases", |m| matches!(m, Message::Release { count: 5, .. }));
    }),
    case("a response with more leases than it can have", Then::HangsUp, |adversary, _| {
        adversary.tell(
            &Message::Response { call: adversary.call, result: 0, shape: Vec::new(), leases: (0, 9), released: (0, 0), size: 2 },
            &[1, 1],
        );
    }),
    case("a response longer than its size", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::answer(adversary.call, 2), &[1, 1, 1]);
    }),
    case("a response shorter than its size", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::answer(adversary.call, 200), &[1; 100]);
    }),
    case("a response of 2^64 - 1 bytes", Then::Continues, |adversary, _| {
        adversary.tell(&large(adversary.call, u64::MAX), &[]);
        adversary.expect("the call's end", |m| matches!(m, Message::Cancel { .. }));
        adversary.data(Stream::Response, adversary.call, 0, &[1; 1000]);
    }),
    case("a response that is announced twice", Then::HangsUp, |adversary, _| {
        adversary.tell(&large(adversary.call, 1000), &[]);
        adversary.tell(&large(adversary.call, 1000), &[]);
    }),
    case("a response of more than was announced", Then::HangsUp, |adversary, _| {
        adversary.tell(&large(adversary.call, 1000), &[]);
        adversary.announce(Stream::Response, adversary.call, 0, 1001);
    }),
    case("a response out of order", Then::HangsUp, |adversary, _| {
        adversary.tell(&large(adversary.call, 1000), &[]);
        adversary.announce(Stream::Response, adversary.call, 500, 500);
    }),
    case("a one-way call whose memory was revoked", Then::HangsUp, |adversary, _| {
        let mut message = Message::call(1, "swallow", 1000);
        if let Message::Request { one_way, .. } = &mut message {
            *one_way = true;
        }
        adversary.tell(&message, &[]);
        adversary.announce(Stream::Request, 1, 0, 1000);
        adversary.channel.put_payload(&[1; 1000], false, BOUND);
    }),
    case("a response whose memory was revoked", Then::HangsUp, |adversary, _| {
        adversary.tell(&large(adversary.call, 1000), &[]);
        adversary.announce(Stream::Response, adversary.call, 0, 1000);
        adversary.channel.put_payload(&[1; 1000], false, BOUND);
    }),
    case("half a response", Then::Continues, |adversary, _| {
        adversary.tell(&large(adversary.call, 1000), &[]);
        adversary.data(Stream::Response, adversary.call, 0, &[1; 500]);
    }),
    case("data of a response before the response", Then::Continues, |adversary, _| {
        adversary.data(Stream::Response, adversary.call, 0, &[1; 500]);
        adversary.tell(&Message::answer(adversary.call, 2), &[1, 1]);
    }),
    case("a response before all arguments have arrived", Then::Continues, |adversary, _| {
        let number = adversary.request("engage more", &());
        let is_it = |m: &Message| matches!(m, Message::Request { size, .. } if *size > 1 << 20);
        let (Message::Request { call, .. }, _) = adversary.expect("a large call", is_it) else { unreachable!() };
        adversary.tell(&Message::answer(call, 2), &[1, 1]);
        adversary.answer(number).unwrap();
    }),
    case("a response to a one-way call", Then::Continues, |adversary, _| {
        adversary.request("engage more", &());
        let is_it = |m: &Message| matches!(m, Message::Request { one_way: true, .. });
        let (Message::Request { call, .. }, _) = adversary.expect("a one-way call", is_it) else { unreachable!() };
        adversary.tell(&Message::answer(call, 2), &[1, 1]);
        adversary.tell(&refusal(call), &[]);
        adversary.tell(&large(call, 1000), &[]);
        adversary.data(Stream::Response, call, 0, &[1; 1000]);
    }),
    case("a response to a transfer, and the end of a call", Then::Continues, |adversary, _| {
        for number in [adversary.pull, adversary.push] {
            // Calls and transfers have separate tables: these numbers may also be calls.
            if number != adversary.call {
                adversary.tell(&Message::answer(number, 2), &[1, 1]);
            }
        }
        adversary.tell(&Message::Abort { transfer: adversary.call, push: true }, &[]);
        adversary.tell(&Message::Cancel { call: adversary.call }, &[]);
    }),
    case("the victim's own transfers, aborted by the adversary", Then::Continues, |adversary, _| {
        for transfer in [adversary.pull, adversary.push] {
            for push in [false, true] {
                adversary.tell(&Message::Abort { transfer, push }, &[]);
            }
        }
    }),
    case("the end of a pull without any data", Then::Continues, |adversary, _| {
        adversary.tell(&done(adversary.pull, Status::Ok), &[]);
        adversary.tell(&done(adversary.pull, Status::Ok), &[]);
    }),
    case("two ends of a push", Then::Continues, |adversary, _| {
        adversary.tell(&done(adversary.push, Status::Ok), &[]);
        adversary.tell(&done(adversary.push, Status::Revoked), &[]);
    }),
    case("a pull of more than was asked for", Then::HangsUp, |adversary, _| {
        adversary.announce(Stream::Pull, adversary.pull, 0, MOVED as u32 + 1);
    }),
    case("a pull of more than was asked for, in parts", Then::HangsUp, |adversary, _| {
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![1; MOVED - 1]);
        adversary.announce(Stream::Pull, adversary.pull, MOVED as u64 - 1, 2);
    }),
    case("a pull out of order", Then::HangsUp, |adversary, _| {
        adversary.announce(Stream::Pull, adversary.pull, 1, 100);
    }),
    case("a pull that begins before its start", Then::HangsUp, |adversary, _| {
        adversary.announce(Stream::Pull, adversary.pull, u64::MAX - 99, 100);
    }),
    case("a pull of half of it, and its end", Then::Continues, |adversary, _| {
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![1; MOVED / 2]);
        adversary.tell(&done(adversary.pull, Status::Ok), &[]);
    }),
    case("a pull whose memory was revoked", Then::Continues, |adversary, _| {
        adversary.announce(Stream::Pull, adversary.pull, 0, 1000);
        adversary.channel.put_payload(&[1; 1000], false, BOUND);
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![1; MOVED]);
    }),
    case("a pull, and more of it when it has ended", Then::Continues, |adversary, _| {
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![1; MOVED]);
        adversary.data(Stream::Pull, adversary.pull, MOVED as u64, &[2; 1000]);
        adversary.data(Stream::Pull, adversary.pull, 0, &vec![3; MOVED]);
    }),
    case("a pull under an alias of its number", Then::Continues, |adversary, _| {
        // The lowest bit of a slot's use count is always set, and a peer may omit it.
        let alias = adversary.pull & !(1 << 32);
        adversary.data(Stream::Pull, alias, 0, &vec![1; MOVED / 2]);
        adversary.data(Stream::Pull, adversary.pull, MOVED as u64 / 2, &vec![1; MOVED / 2]);
    }),
    case("empty parts, without end", Then::Continues, |adversary, _| {
        adversary.tell(&large(adversary.call, 1000), &[]);
        for _ in 0..1000 {
            adversary.data(Stream::Pull, adversary.pull, 0, &[]);
            adversary.data(Stream::Response, adversary.call, 0, &[]);
        }
    }),
    case("pushes into what was pulled", Then::Continues, |adversary, _| {
        adversary.data(Stream::Push, adversary.pull, 0, &[1; 100]);
        adversary.data(Stream::Pull, adversary.push, 0, &[1; 100]);
        adversary.data(Stream::Request, adversary.call, 0, &[1; 100]);
    }),
    case("a goodbye, and more", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::Goodbye, &[]);
        adversary.tell(&Message::call(1, "add", 2), &[1, 2]);
    }),
    case("more one-way calls than it has credit for", Then::HangsUp, |adversary, _| {
        let call = |n: u64| {
            let mut message = Message::call(1000 + n, "slow", 1);
            if let Message::Request { procedure, one_way, declaration, .. } = &mut message {
                (*procedure, *one_way) = (1000, true);
                *declaration = declaration.take().filter(|_| n == 0);
            }
            message.frame(&[1])
        };
        // More than the largest credit, and what may be handled meanwhile.
        let _ = adversary.bytes(&(0..20_000).flat_map(call).collect::<Vec<u8>>());
    }),
    case("resumption tokens", Then::Continues, |adversary, _| {
        for ticket in [0, 1, u128::MAX] {
            adversary.tell(&Message::Ticket { ticket }, &[]);
        }
    }),
    case("one call twice, while it is in progress", Then::HangsUp, |adversary, _| {
        for _ in 0..2 {
            adversary.tell(&Message::call(1, "slow", 2), &postcard::to_stdvec(&300u64).unwrap());
        }
    }),
    case("one call twice, sequentially", Then::Continues, |adversary, _| {
        for _ in 0..2 {
            adversary.tell(&Message::call(1, "add", 2), &[1, 2]);
            assert_eq!(adversary.answer(1), Ok(vec![3]));
        }
    }),
    case("a cancelled call, made again", Then::HangsUp, |adversary, _| {
        // One that is cancelled before its handler begins has ended.
        let before = slow_handlers_begun(adversary);
        adversary.tell(&Message::call(1, "slow", 2), &postcard::to_stdvec(&300u64).unwrap());
        eventually("the handler begins", || slow_handlers_begun(adversary) > before);
        adversary.tell(&Message::Cancel { call: 1 }, &[]);
        adversary.tell(&Message::Cancel { call: 1 }, &[]);
        adversary.tell(&Message::call(1, "slow", 2), &postcard::to_stdvec(&300u64).unwrap());
    }),
    case("calls by the victim's own numbers", Then::Continues, |adversary, _| {
        for number in guesses() {
            adversary.tell(&Message::call(number, "add", 2), &[1, 2]);
            assert_eq!(adversary.answer(number), Ok(vec![3]));
        }
    }),
];

fn misused_own_numbers_are_ignored_or_disconnect() {
    table("own numbers", Begun::ByAdversary, OWN);
}

over_both!(numbers_of_other_peers_are_ignored, misused_own_numbers_are_ignored_or_disconnect);
