//! Numbers of calls, transfers and leases that are others', or nobody's.

use crate::common::wire::{ANYTHING, Message, Range, Status, Stream};
use crate::liar::{Liar, MOVED};
use crate::over_both;
use crate::scene::{Begun, Lie, Scene, Then, lie, table};
use crate::support::*;
use crate::victim::{Kind, LEN};

/// Numbers that engines give: a place in a table, and how often it was used. The first are all there are here.
fn guesses() -> impl Iterator<Item = u64> {
    let places = (0..12u64).flat_map(|place| (0..40u64).map(move |used| used << 32 | place));
    places.chain([u64::MAX, u64::MAX >> 32, 1 << 63, 0])
}

/// The victim has much under way with the honest peer: none of it is the liar's to end. Its own is left alone.
fn others(liar: &Liar) -> Vec<u64> {
    let own = [liar.call, liar.pull, liar.push];
    guesses().filter(|number| !own.contains(number)).collect()
}

/// An answer in large, of which nothing has come.
fn large(number: u64, size: u64) -> Message {
    Message::Response { call: number, result: 0, shape: Vec::new(), leases: (0, 0), size }
}

fn refusal(number: u64) -> Message {
    Message::Refuse { call: number, status: Status::Failed("it was the liar".to_owned()) }
}

fn done(transfer: u64, status: Status) -> Message {
    Message::Done { transfer, status }
}

/// While the honest peer holds a bulk of the victim's, somebody else gives it back.
fn holding(scene: &Scene, give_back: impl FnOnce()) {
    let lent = scene.honest.procedure::<(), calomel::Bulk>("lend").on(&scene.to).call(&()).unwrap();
    give_back();
    let is_lent = || scene.honest.procedure::<(), bool>("is lent").on(&scene.to).call(&()).unwrap();
    assert!(is_lent(), "the victim thinks that the honest peer has dropped its bulk");
    let mut bytes = vec![0u8; LEN];
    assert_eq!(lent.on(&scene.to).pull_into(&mut bytes).unwrap(), LEN);
    assert!(bytes == pattern(1, LEN));
    drop(lent);
    eventually("nobody holds a bulk", || !is_lent());
}

const OTHERS: &[Lie] = &[
    lie("answers to others' calls", Then::GoesOn, |liar, _| {
        for number in others(liar) {
            liar.tell(&Message::answer(number, 17), &[&[16][..], &[0x66; 16]].concat());
        }
    }),
    lie("large answers to others' calls", Then::GoesOn, |liar, _| {
        for number in others(liar) {
            liar.tell(&large(number, 17), &[]);
            liar.data(Stream::Response, number, 0, &[0x66; 17]);
        }
    }),
    lie("refusals of others' calls", Then::GoesOn, |liar, _| {
        for number in others(liar) {
            liar.tell(&refusal(number), &[]);
        }
    }),
    lie("the end of others' transfers", Then::GoesOn, |liar, _| {
        for number in others(liar) {
            for status in [Status::Ok, Status::Revoked, Status::Restarted] {
                liar.tell(&done(number, status), &[]);
            }
        }
    }),
    lie("data for others' streams", Then::GoesOn, |liar, _| {
        for number in others(liar) {
            for stream in [Stream::Pull, Stream::Push, Stream::Request, Stream::Response] {
                liar.data(stream, number, 0, &[0x66; 20]);
            }
        }
    }),
    lie("others' calls and transfers, given up", Then::GoesOn, |liar, _| {
        for number in others(liar) {
            liar.tell(&Message::Cancel { call: number }, &[]);
            liar.tell(&Message::Abort { transfer: number, push: true }, &[]);
            liar.tell(&Message::Abort { transfer: number, push: false }, &[]);
        }
    }),
    lie("others' one-way calls, handled", Then::GoesOn, |liar, _| {
        for count in [0, 1, u32::MAX, u32::MAX] {
            liar.tell(&Message::Handled { count, calls: count, bytes: count }, &[]);
        }
    }),
    lie("others' leases, given back", Then::GoesOn, |liar, scene| {
        holding(scene, || {
            for (first, count) in
                [(0, u32::MAX), (0, 1), (1, 1), (u64::MAX, u32::MAX), (u64::MAX, 1), (0, 0), (1 << 63, u32::MAX)]
            {
                liar.tell(&Message::Release { first, count }, &[]);
            }
            liar.assert_listens();
        });
    }),
    lie("own leases, given back twice", Then::GoesOn, |liar, scene| {
        holding(scene, || {
            let number = liar.request("lend", &());
            liar.answer(number).unwrap();
            for _ in 0..3 {
                liar.tell(&Message::Release { first: 0, count: u32::MAX }, &[]);
            }
            liar.assert_listens();
        });
    }),
    lie("the victim's memory, said to be taken back", Then::GoesOn, |liar, scene| {
        for kind in [Kind::Secret, Kind::ReadOnly, Kind::WriteOnly, Kind::ReadWrite, Kind::Gone] {
            liar.tell(&Message::Revoked { token: scene.range(0, kind).token }, &[]);
        }
        liar.tell(&Message::Revoked { token: Range::of(0, &scene.bound).token }, &[]);
        assert!(liar.pull(scene.range(1, Kind::ReadOnly)).unwrap() == pattern(1, LEN));
        scene.assert_bound_is_reached();
    }),
    lie("tokens of nobody's, said to be taken back", Then::GoesOn, |liar, _| {
        for i in 0..1000u128 {
            liar.tell(&Message::Revoked { token: (i << 64 | 7).to_le_bytes() }, &[]);
        }
    }),
    lie("the end of the engine", Then::Says("AccessDenied", 2), |liar, _| {
        liar.tell(&Message::Shutdown { call: 1 }, &[]);
        liar.tell(&Message::Shutdown { call: liar.call }, &[]);
    }),
];

fn of_others() {
    table("others' numbers", Begun::ByLiar, OTHERS);
}

pub const OWN: &[Lie] = &[
    lie("two answers", Then::GoesOn, |liar, _| {
        for byte in [1, 2] {
            liar.tell(&Message::answer(liar.call, 2), &[1, byte]);
        }
    }),
    lie("an answer, a refusal and an answer", Then::GoesOn, |liar, _| {
        liar.tell(&Message::answer(liar.call, 2), &[1, 1]);
        liar.tell(&refusal(liar.call), &[]);
        liar.tell(&large(liar.call, 100), &[]);
        liar.data(Stream::Response, liar.call, 0, &[0x66; 100]);
    }),
    lie("refusals of each kind", Then::GoesOn, |liar, _| {
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
            liar.tell(&Message::Refuse { call: liar.call, status }, &[]);
            liar.said.clear();
            // The next call.
            liar.engage();
        }
    }),
    lie("an end of a pull of each kind", Then::GoesOn, |liar, _| {
        let statuses =
            [Status::NoSuchProcedure, Status::TooLarge { size: 1, limit: 0 }, Status::Busy("b".repeat(50_000)), Status::Checksum];
        for status in statuses {
            liar.tell(&done(liar.pull, status.clone()), &[]);
            liar.tell(&done(liar.push, status), &[]);
            liar.said.clear();
            liar.engage();
        }
    }),
    lie("an answer that is none", Then::GoesOn, |liar, _| {
        // A vector of more than there is.
        liar.tell(&Message::answer(liar.call, 10), &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
    }),
    lie("an answer of nothing", Then::GoesOn, |liar, _| {
        liar.tell(&Message::answer(liar.call, 0), &[]);
    }),
    lie("an answer of another shape", Then::GoesOn, |liar, _| {
        let answer = Message::Response { call: liar.call, result: 0, shape: vec![0xff; 1000], leases: (0, 0), size: 2 };
        liar.tell(&answer, &[1, 1]);
    }),
    lie("an answer whose type was never declared", Then::HangsUp, |liar, _| {
        let answer = Message::Response { call: liar.call, result: 7, shape: Vec::new(), leases: (0, 0), size: 2 };
        liar.tell(&answer, &[1, 1]);
    }),
    lie("an answer whose type is declared twice", Then::HangsUp, |liar, _| {
        for call in [liar.call, liar.call + 1] {
            let answer = Message::Response { call, result: 7, shape: vec![ANYTHING], leases: (0, 0), size: 2 };
            liar.tell(&answer, &[1, 1]);
        }
    }),
    lie("an answer that nothing is said of", Then::GoesOn, |liar, _| {
        let answer = Message::Response { call: liar.call, result: 0, shape: Vec::new(), leases: (0, 0), size: 2 };
        liar.tell(&answer, &[1, 1]);
    }),
    lie("an answer with leases of nothing", Then::GoesOn, |liar, _| {
        let answer = Message::Response { call: liar.call, result: 0, shape: Vec::new(), leases: (u64::MAX - 1, 5), size: 80 };
        liar.tell(&answer, &[&[79][..], &[1; 79]].concat());
        liar.expect("the leases", |m| matches!(m, Message::Release { count: 5, .. }));
    }),
    lie("an answer with more leases than it can have", Then::HangsUp, |liar, _| {
        liar.tell(&Message::Response { call: liar.call, result: 0, shape: Vec::new(), leases: (0, 9), size: 2 }, &[1, 1]);
    }),
    lie("an answer longer than it says", Then::HangsUp, |liar, _| {
        liar.tell(&Message::answer(liar.call, 2), &[1, 1, 1]);
    }),
    lie("an answer shorter than it says", Then::HangsUp, |liar, _| {
        liar.tell(&Message::answer(liar.call, 200), &[1; 100]);
    }),
    lie("an answer of 2^64 - 1 bytes", Then::GoesOn, |liar, _| {
        liar.tell(&large(liar.call, u64::MAX), &[]);
        liar.expect("the call's end", |m| matches!(m, Message::Cancel { .. }));
        liar.data(Stream::Response, liar.call, 0, &[1; 1000]);
    }),
    lie("an answer that is announced twice", Then::HangsUp, |liar, _| {
        liar.tell(&large(liar.call, 1000), &[]);
        liar.tell(&large(liar.call, 1000), &[]);
    }),
    lie("an answer of more than was announced", Then::HangsUp, |liar, _| {
        liar.tell(&large(liar.call, 1000), &[]);
        liar.announce(Stream::Response, liar.call, 0, 1001);
    }),
    lie("an answer out of order", Then::HangsUp, |liar, _| {
        liar.tell(&large(liar.call, 1000), &[]);
        liar.announce(Stream::Response, liar.call, 500, 500);
    }),
    lie("an answer that was taken back", Then::HangsUp, |liar, _| {
        liar.tell(&large(liar.call, 1000), &[]);
        liar.announce(Stream::Response, liar.call, 0, 1000);
        liar.way.put_payload(&[1; 1000], false, BOUND);
    }),
    lie("an answer of which half comes", Then::GoesOn, |liar, _| {
        liar.tell(&large(liar.call, 1000), &[]);
        liar.data(Stream::Response, liar.call, 0, &[1; 500]);
    }),
    lie("an answer's data before the answer", Then::GoesOn, |liar, _| {
        liar.data(Stream::Response, liar.call, 0, &[1; 500]);
        liar.tell(&Message::answer(liar.call, 2), &[1, 1]);
    }),
    lie("an answer before the arguments are all there", Then::GoesOn, |liar, _| {
        let number = liar.request("engage more", &());
        let is_it = |m: &Message| matches!(m, Message::Request { size, .. } if *size > 1 << 20);
        let (Message::Request { call, .. }, _) = liar.expect("a large call", is_it) else { unreachable!() };
        liar.tell(&Message::answer(call, 2), &[1, 1]);
        liar.answer(number).unwrap();
    }),
    lie("an answer to a one-way call", Then::GoesOn, |liar, _| {
        liar.request("engage more", &());
        let is_it = |m: &Message| matches!(m, Message::Request { one_way: true, .. });
        let (Message::Request { call, .. }, _) = liar.expect("a one-way call", is_it) else { unreachable!() };
        liar.tell(&Message::answer(call, 2), &[1, 1]);
        liar.tell(&refusal(call), &[]);
        liar.tell(&large(call, 1000), &[]);
        liar.data(Stream::Response, call, 0, &[1; 1000]);
    }),
    lie("an answer to a transfer, and the end of a call", Then::GoesOn, |liar, _| {
        for number in [liar.pull, liar.push] {
            // Numbers of calls and of transfers are of two tables: these may be calls, too.
            if number != liar.call {
                liar.tell(&Message::answer(number, 2), &[1, 1]);
            }
        }
        liar.tell(&Message::Abort { transfer: liar.call, push: true }, &[]);
        liar.tell(&Message::Cancel { call: liar.call }, &[]);
    }),
    lie("the victim's own transfers, given up by the liar", Then::GoesOn, |liar, _| {
        for transfer in [liar.pull, liar.push] {
            for push in [false, true] {
                liar.tell(&Message::Abort { transfer, push }, &[]);
            }
        }
    }),
    lie("the end of a pull of which nothing came", Then::GoesOn, |liar, _| {
        liar.tell(&done(liar.pull, Status::Ok), &[]);
        liar.tell(&done(liar.pull, Status::Ok), &[]);
    }),
    lie("two ends of a push", Then::GoesOn, |liar, _| {
        liar.tell(&done(liar.push, Status::Ok), &[]);
        liar.tell(&done(liar.push, Status::Revoked), &[]);
    }),
    lie("a pull of more than was asked for", Then::HangsUp, |liar, _| {
        liar.announce(Stream::Pull, liar.pull, 0, MOVED as u32 + 1);
    }),
    lie("a pull of more than was asked for, in parts", Then::HangsUp, |liar, _| {
        liar.data(Stream::Pull, liar.pull, 0, &vec![1; MOVED - 1]);
        liar.announce(Stream::Pull, liar.pull, MOVED as u64 - 1, 2);
    }),
    lie("a pull out of order", Then::HangsUp, |liar, _| {
        liar.announce(Stream::Pull, liar.pull, 1, 100);
    }),
    lie("a pull that begins before its beginning", Then::HangsUp, |liar, _| {
        liar.announce(Stream::Pull, liar.pull, u64::MAX - 99, 100);
    }),
    lie("a pull of half of it, and its end", Then::GoesOn, |liar, _| {
        liar.data(Stream::Pull, liar.pull, 0, &vec![1; MOVED / 2]);
        liar.tell(&done(liar.pull, Status::Ok), &[]);
    }),
    lie("a pull whose memory was gone", Then::GoesOn, |liar, _| {
        liar.announce(Stream::Pull, liar.pull, 0, 1000);
        liar.way.put_payload(&[1; 1000], false, BOUND);
        liar.data(Stream::Pull, liar.pull, 0, &vec![1; MOVED]);
    }),
    lie("a pull, and more of it when it has ended", Then::GoesOn, |liar, _| {
        liar.data(Stream::Pull, liar.pull, 0, &vec![1; MOVED]);
        liar.data(Stream::Pull, liar.pull, MOVED as u64, &[2; 1000]);
        liar.data(Stream::Pull, liar.pull, 0, &vec![3; MOVED]);
    }),
    lie("a pull under another name for its number", Then::GoesOn, |liar, _| {
        // The lowest bit of how often a place was used is always set, and a peer may leave it out.
        let alias = liar.pull & !(1 << 32);
        liar.data(Stream::Pull, alias, 0, &vec![1; MOVED / 2]);
        liar.data(Stream::Pull, liar.pull, MOVED as u64 / 2, &vec![1; MOVED / 2]);
    }),
    lie("parts of nothing, without end", Then::GoesOn, |liar, _| {
        liar.tell(&large(liar.call, 1000), &[]);
        for _ in 0..1000 {
            liar.data(Stream::Pull, liar.pull, 0, &[]);
            liar.data(Stream::Response, liar.call, 0, &[]);
        }
    }),
    lie("pushes into what was pulled", Then::GoesOn, |liar, _| {
        liar.data(Stream::Push, liar.pull, 0, &[1; 100]);
        liar.data(Stream::Pull, liar.push, 0, &[1; 100]);
        liar.data(Stream::Request, liar.call, 0, &[1; 100]);
    }),
    lie("a goodbye, and more", Then::HangsUp, |liar, _| {
        liar.tell(&Message::Goodbye, &[]);
        liar.tell(&Message::call(1, "add", 2), &[1, 2]);
    }),
    lie("more one-way calls than it has credit for", Then::HangsUp, |liar, _| {
        let call = |n: u64| {
            let mut message = Message::call(1000 + n, "slow", 1);
            if let Message::Request { procedure, one_way, declaration, .. } = &mut message {
                (*procedure, *one_way) = (1000, true);
                *declaration = declaration.take().filter(|_| n == 0);
            }
            message.frame(&[1])
        };
        let _ = liar.bytes(&(0..100).flat_map(call).collect::<Vec<u8>>());
    }),
    lie("tickets", Then::GoesOn, |liar, _| {
        for ticket in [0, 1, u128::MAX] {
            liar.tell(&Message::Ticket { ticket }, &[]);
        }
    }),
    lie("one call twice, while it is in progress", Then::HangsUp, |liar, _| {
        for _ in 0..2 {
            liar.tell(&Message::call(1, "slow", 2), &postcard::to_stdvec(&300u64).unwrap());
        }
    }),
    lie("one call twice, one after the other", Then::GoesOn, |liar, _| {
        for _ in 0..2 {
            liar.tell(&Message::call(1, "add", 2), &[1, 2]);
            assert_eq!(liar.answer(1), Ok(vec![3]));
        }
    }),
    lie("a cancelled call, made again", Then::HangsUp, |liar, _| {
        liar.tell(&Message::call(1, "slow", 2), &postcard::to_stdvec(&300u64).unwrap());
        liar.tell(&Message::Cancel { call: 1 }, &[]);
        liar.tell(&Message::Cancel { call: 1 }, &[]);
        liar.tell(&Message::call(1, "slow", 2), &postcard::to_stdvec(&300u64).unwrap());
    }),
    lie("calls by the victim's own numbers", Then::GoesOn, |liar, _| {
        for number in guesses() {
            liar.tell(&Message::call(number, "add", 2), &[1, 2]);
            assert_eq!(liar.answer(number), Ok(vec![3]));
        }
    }),
];

fn of_its_own() {
    table("own numbers", Begun::ByLiar, OWN);
}

over_both!(of_others, of_its_own);
