//! Accesses to memory outside its range, without permission, or with guessed tokens.

use crate::adversary::Adversary;
use crate::common::wire::{Message, Range, Status, Stream};
use crate::over_both;
use crate::scene::{Begun, Case, Then, case, table};
use crate::support::*;
use crate::victim::{Kind, LEN};

/// Ranges that are not inside `LEN` bytes.
const OUTSIDE: [(u64, u64); 10] = [
    (0, LEN as u64 + 1),
    (LEN as u64, 1),
    (LEN as u64 + 1, 0),
    (u64::MAX, 0),
    (u64::MAX, 1),
    (1, u64::MAX),
    (u64::MAX, u64::MAX),
    (1 << 63, 1 << 63),
    (u64::MAX - LEN as u64 + 1, LEN as u64),
    (LEN as u64 - 10, u64::MAX - 5),
];

/// A pull and a push for each range, with the payload of the push.
fn each(adversary: &mut Adversary, ranges: impl IntoIterator<Item = Range>) {
    for (number, range) in ranges.into_iter().enumerate() {
        let number = 2 * number as u64;
        adversary.tell(&Message::Pull(Range { transfer: number, ..range }), &[]);
        adversary.tell(&Message::Push(Range { transfer: number + 1, ..range }), &[]);
        adversary.data(Stream::Push, number + 1, 0, &[0x66; 100]);
    }
}

fn pulls(adversary: &mut Adversary, ranges: impl IntoIterator<Item = Range>) {
    for (number, range) in ranges.into_iter().enumerate() {
        adversary.tell(&Message::Pull(Range { transfer: number as u64, ..range }), &[]);
    }
}

fn flipped(range: Range, bit: usize) -> Range {
    let mut token = range.token;
    token[bit / 8] ^= 1 << (bit % 8);
    Range { token, ..range }
}

/// Pushes the bytes that are already there, so that nothing changes.
fn push(adversary: &mut Adversary, range: Range) {
    adversary.tell(&Message::Push(range), &[]);
    adversary.data(Stream::Push, range.transfer, 0, &pattern(2, LEN)[range.offset as usize..][..range.len as usize]);
}

const RANGES: &[Case] = &[
    case("ranges outside the memory", Then::EndsWith("OutOfRange", 20), |adversary, scene| {
        let all = scene.range(0, Kind::ReadWrite);
        each(adversary, OUTSIDE.map(|(offset, len)| Range { offset, len, ..all }));
    }),
    case("empty ranges inside the memory", Then::EndsWith("Ok", 6), |adversary, scene| {
        let all = scene.range(0, Kind::ReadWrite);
        for (number, offset) in [0, 1, LEN as u64].into_iter().enumerate() {
            let range = Range { transfer: number as u64, offset, len: 0, ..all };
            adversary.tell(&Message::Pull(range), &[]);
            adversary.tell(&Message::Push(Range { transfer: 100 + range.transfer, ..range }), &[]);
        }
    }),
    case("a push into read-only memory", Then::EndsWith("AccessDenied", 1), |adversary, scene| {
        let range = scene.range(1, Kind::ReadOnly);
        adversary.tell(&Message::Push(range), &[]);
        adversary.data(Stream::Push, 1, 0, &[0x66; 1000]);
    }),
    case("a pull of write-only memory", Then::EndsWith("AccessDenied", 1), |adversary, scene| {
        adversary.tell(&Message::Pull(scene.range(1, Kind::WriteOnly)), &[]);
    }),
    case("permitted transfers", Then::Continues, |adversary, scene| {
        assert!(adversary.pull(scene.range(1, Kind::ReadOnly)).unwrap() == pattern(1, LEN));
        push(adversary, scene.range(2, Kind::ReadWrite));
        adversary.expect("the end of a push", |m| *m == Message::Done { transfer: 2, status: Status::Ok });
        let some = Range { offset: 1000, len: 5, ..scene.range(3, Kind::ReadWrite) };
        adversary.tell(&Message::Push(some), &[]);
        adversary.data(Stream::Push, 3, 0, b"WORDS");
        adversary.expect("the end of a push", |m| *m == Message::Done { transfer: 3, status: Status::Ok });
        assert_eq!(adversary.pull(Range { transfer: 4, ..some }).unwrap(), b"WORDS");
        push(adversary, Range { transfer: 5, ..some });
        adversary.expect("the end of a push", |m| *m == Message::Done { transfer: 5, status: Status::Ok });
    }),
    case("a push of more than announced", Then::HangsUp, |adversary, scene| {
        adversary.tell(&Message::Push(Range { len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        adversary.announce(Stream::Push, 1, 0, 101);
    }),
    case("a push that does not begin at its start", Then::HangsUp, |adversary, scene| {
        adversary.tell(&Message::Push(Range { len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        adversary.announce(Stream::Push, 1, 50, 50);
    }),
    case("a push that begins before its start", Then::HangsUp, |adversary, scene| {
        adversary.tell(&Message::Push(Range { offset: 100, len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        adversary.announce(Stream::Push, 1, u64::MAX - 99, 100);
    }),
    case("a push that is started twice", Then::HangsUp, |adversary, scene| {
        let range = Range { len: 100, ..scene.range(1, Kind::ReadWrite) };
        adversary.tell(&Message::Push(range), &[]);
        adversary.tell(&Message::Push(range), &[]);
    }),
    case("a push that is aborted, and continues", Then::Continues, |adversary, scene| {
        let range = Range { len: 100, ..scene.range(1, Kind::ReadWrite) };
        adversary.tell(&Message::Push(range), &[]);
        adversary.tell(&Message::Abort { transfer: 1, push: true }, &[]);
        adversary.data(Stream::Push, 1, 0, &[0x66; 100]);
        adversary.data(Stream::Push, 1, 100, &[0x66; 100]);
    }),
    case("a push whose memory was revoked", Then::EndsWith("Revoked", 1), |adversary, scene| {
        adversary.tell(&Message::Push(Range { len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        adversary.announce(Stream::Push, 1, 0, 100);
        adversary.channel.put_payload(&pattern(2, 100), false, BOUND);
    }),
    case("an announced push without data", Then::Leaves, |adversary, scene| {
        adversary.tell(&Message::Push(scene.range(1, Kind::ReadWrite)), &[]);
        adversary.assert_listens();
    }),
    // The victim hangs up if the pulls overlap; one may have ended before the next is requested.
    case("one number for a hundred pulls", Then::Leaves, |adversary, scene| {
        let range = Range { len: 1000, ..scene.range(1, Kind::ReadOnly) };
        (0..100).all(|_| adversary.tell(&Message::Pull(range), &[]));
    }),
    case("pulls that are aborted at once", Then::Continues, |adversary, scene| {
        for transfer in 0..100 {
            adversary.tell(&Message::Pull(scene.range(transfer, Kind::ReadOnly)), &[]);
            adversary.tell(&Message::Abort { transfer, push: false }, &[]);
        }
    }),
];

fn accesses_outside_exposed_ranges_are_refused() {
    table("ranges", Begun::ByAdversary, RANGES);
}

const TOKENS: &[Case] = &[
    case("2000 random tokens", Then::EndsWith("AccessDenied", 2000), |adversary, scene| {
        let owner = scene.incarnation();
        let random = || Range { transfer: 0, owner, token: rand::random(), offset: 0, len: 16 };
        each(adversary, std::iter::repeat_with(random).take(1000));
    }),
    case("the secret token with one bit flipped", Then::EndsWith("AccessDenied", 256), |adversary, scene| {
        let secret = scene.range(0, Kind::Secret);
        each(adversary, (0..128).map(|bit| flipped(secret, bit)));
    }),
    case("tokens made of known ones", Then::EndsWith("AccessDenied", 14), |adversary, scene| {
        let [read, write] = [Kind::ReadOnly, Kind::ReadWrite].map(|kind| scene.range(0, kind));
        let halves: Vec<u8> = read.token[..8].iter().chain(&write.token[8..]).copied().collect();
        let mut backwards = read.token;
        backwards.reverse();
        let xor = std::array::from_fn(|i| read.token[i] ^ write.token[i]);
        let next = (u128::from_le_bytes(write.token) + 1).to_le_bytes();
        let tokens = [[0; 16], [0xff; 16], halves.try_into().unwrap(), backwards, xor, next, [7; 16]];
        each(adversary, tokens.map(|token| Range { token, ..read }));
    }),
    case("another peer's token", Then::EndsWith("AccessDenied", 2), |adversary, scene| {
        let there = Range::of(0, &scene.bound);
        each(adversary, [Range { offset: 0, len: 16, ..there }]);
    }),
    case("memory for one peer, accessed in each way", Then::EndsWith("AccessDenied", 20), |adversary, scene| {
        let there = Range::of(0, &scene.bound);
        // The permission is checked before the range.
        each(adversary, OUTSIDE.map(|(offset, len)| Range { offset, len, ..there }));
    }),
    case("wrong owners of the memory", Then::EndsWith("Restarted", 10), |adversary, scene| {
        let range = scene.range(0, Kind::ReadWrite);
        let owners = [0, u64::MAX, range.owner ^ 1, range.owner.swap_bytes(), adversary.incarnation];
        each(adversary, owners.map(|owner| Range { owner, ..range }));
    }),
    case("memory that was reclaimed", Then::EndsWith("Revoked", 4), |adversary, scene| {
        let range = scene.range(0, Kind::Gone);
        each(adversary, [range, Range { offset: u64::MAX, len: u64::MAX, ..range }]);
    }),
    case("a thousand guesses, then the right token", Then::EndsWith("AccessDenied", 1000), |adversary, scene| {
        let range = scene.range(0, Kind::ReadOnly);
        pulls(adversary, (0..1000).map(|i| Range { token: [i as u8; 16], ..range }));
        assert!(adversary.pull(Range { transfer: 5000, ..range }).unwrap() == pattern(1, LEN));
    }),
];

fn guessed_tokens_are_refused() {
    table("tokens", Begun::ByAdversary, TOKENS);
}

over_both!(accesses_outside_exposed_ranges_are_refused, guessed_tokens_are_refused);
