//! Memory that is asked for where it is not, by those who may not, or by guessing.

use crate::common::wire::{Message, Range, Status, Stream};
use crate::liar::Liar;
use crate::over_both;
use crate::scene::{Begun, Lie, Then, lie, table};
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

/// Pulls and pushes, one of each for each range, with what a push brings along.
fn each(liar: &mut Liar, ranges: impl IntoIterator<Item = Range>) {
    for (number, range) in ranges.into_iter().enumerate() {
        let number = 2 * number as u64;
        liar.tell(&Message::Pull(Range { transfer: number, ..range }), &[]);
        liar.tell(&Message::Push(Range { transfer: number + 1, ..range }), &[]);
        liar.data(Stream::Push, number + 1, 0, &[0x66; 100]);
    }
}

fn pulls(liar: &mut Liar, ranges: impl IntoIterator<Item = Range>) {
    for (number, range) in ranges.into_iter().enumerate() {
        liar.tell(&Message::Pull(Range { transfer: number as u64, ..range }), &[]);
    }
}

fn flipped(range: Range, bit: usize) -> Range {
    let mut token = range.token;
    token[bit / 8] ^= 1 << (bit % 8);
    Range { token, ..range }
}

/// Pushes what is there already, so that nothing changes.
fn push(liar: &mut Liar, range: Range) {
    liar.tell(&Message::Push(range), &[]);
    liar.data(Stream::Push, range.transfer, 0, &pattern(2, LEN)[range.offset as usize..][..range.len as usize]);
}

const RANGES: &[Lie] = &[
    lie("ranges that are not inside", Then::Says("OutOfRange", 20), |liar, scene| {
        let all = scene.range(0, Kind::ReadWrite);
        each(liar, OUTSIDE.map(|(offset, len)| Range { offset, len, ..all }));
    }),
    lie("nothing, anywhere inside", Then::Says("Ok", 6), |liar, scene| {
        let all = scene.range(0, Kind::ReadWrite);
        for (number, offset) in [0, 1, LEN as u64].into_iter().enumerate() {
            let range = Range { transfer: number as u64, offset, len: 0, ..all };
            liar.tell(&Message::Pull(range), &[]);
            liar.tell(&Message::Push(Range { transfer: 100 + range.transfer, ..range }), &[]);
        }
    }),
    lie("a push into what may only be read", Then::Says("AccessDenied", 1), |liar, scene| {
        let range = scene.range(1, Kind::ReadOnly);
        liar.tell(&Message::Push(range), &[]);
        liar.data(Stream::Push, 1, 0, &[0x66; 1000]);
    }),
    lie("a pull of what may only be written", Then::Says("AccessDenied", 1), |liar, scene| {
        liar.tell(&Message::Pull(scene.range(1, Kind::WriteOnly)), &[]);
    }),
    lie("what may be done is done", Then::GoesOn, |liar, scene| {
        assert!(liar.pull(scene.range(1, Kind::ReadOnly)).unwrap() == pattern(1, LEN));
        push(liar, scene.range(2, Kind::ReadWrite));
        liar.expect("the end of a push", |m| *m == Message::Done { transfer: 2, status: Status::Ok });
        let some = Range { offset: 1000, len: 5, ..scene.range(3, Kind::ReadWrite) };
        liar.tell(&Message::Push(some), &[]);
        liar.data(Stream::Push, 3, 0, b"WORDS");
        liar.expect("the end of a push", |m| *m == Message::Done { transfer: 3, status: Status::Ok });
        assert_eq!(liar.pull(Range { transfer: 4, ..some }).unwrap(), b"WORDS");
        push(liar, Range { transfer: 5, ..some });
        liar.expect("the end of a push", |m| *m == Message::Done { transfer: 5, status: Status::Ok });
    }),
    lie("a push of more than was said", Then::HangsUp, |liar, scene| {
        liar.tell(&Message::Push(Range { len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        liar.announce(Stream::Push, 1, 0, 101);
    }),
    lie("a push that does not begin at its beginning", Then::HangsUp, |liar, scene| {
        liar.tell(&Message::Push(Range { len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        liar.announce(Stream::Push, 1, 50, 50);
    }),
    lie("a push that begins before its beginning", Then::HangsUp, |liar, scene| {
        liar.tell(&Message::Push(Range { offset: 100, len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        liar.announce(Stream::Push, 1, u64::MAX - 99, 100);
    }),
    lie("a push that is begun twice", Then::HangsUp, |liar, scene| {
        let range = Range { len: 100, ..scene.range(1, Kind::ReadWrite) };
        liar.tell(&Message::Push(range), &[]);
        liar.tell(&Message::Push(range), &[]);
    }),
    lie("a push that is given up, and goes on", Then::GoesOn, |liar, scene| {
        let range = Range { len: 100, ..scene.range(1, Kind::ReadWrite) };
        liar.tell(&Message::Push(range), &[]);
        liar.tell(&Message::Abort { transfer: 1, push: true }, &[]);
        liar.data(Stream::Push, 1, 0, &[0x66; 100]);
        liar.data(Stream::Push, 1, 100, &[0x66; 100]);
    }),
    lie("a push whose memory was gone", Then::Says("Revoked", 1), |liar, scene| {
        liar.tell(&Message::Push(Range { len: 100, ..scene.range(1, Kind::ReadWrite) }), &[]);
        liar.announce(Stream::Push, 1, 0, 100);
        liar.way.put_payload(&pattern(2, 100), false, BOUND);
    }),
    lie("a push of nothing but its announcement", Then::Leaves, |liar, scene| {
        liar.tell(&Message::Push(scene.range(1, Kind::ReadWrite)), &[]);
        liar.assert_listens();
    }),
    // It is hung up on if it is seen to: one may be over before the next is asked for.
    lie("one number for a hundred pulls", Then::Leaves, |liar, scene| {
        let range = Range { len: 1000, ..scene.range(1, Kind::ReadOnly) };
        (0..100).all(|_| liar.tell(&Message::Pull(range), &[]));
    }),
    lie("pulls that are given up at once", Then::GoesOn, |liar, scene| {
        for transfer in 0..100 {
            liar.tell(&Message::Pull(scene.range(transfer, Kind::ReadOnly)), &[]);
            liar.tell(&Message::Abort { transfer, push: false }, &[]);
        }
    }),
];

fn ranges() {
    table("ranges", Begun::ByLiar, RANGES);
}

const TOKENS: &[Lie] = &[
    lie("2000 tokens at random", Then::Says("AccessDenied", 2000), |liar, scene| {
        let owner = scene.incarnation();
        let random = || Range { transfer: 0, owner, token: rand::random(), offset: 0, len: 16 };
        each(liar, std::iter::repeat_with(random).take(1000));
    }),
    lie("the secret's token but for one bit", Then::Says("AccessDenied", 256), |liar, scene| {
        let secret = scene.range(0, Kind::Secret);
        each(liar, (0..128).map(|bit| flipped(secret, bit)));
    }),
    lie("tokens made of known ones", Then::Says("AccessDenied", 14), |liar, scene| {
        let [read, write] = [Kind::ReadOnly, Kind::ReadWrite].map(|kind| scene.range(0, kind));
        let halves: Vec<u8> = read.token[..8].iter().chain(&write.token[8..]).copied().collect();
        let mut backwards = read.token;
        backwards.reverse();
        let xor = std::array::from_fn(|i| read.token[i] ^ write.token[i]);
        let next = (u128::from_le_bytes(write.token) + 1).to_le_bytes();
        let tokens = [[0; 16], [0xff; 16], halves.try_into().unwrap(), backwards, xor, next, [7; 16]];
        each(liar, tokens.map(|token| Range { token, ..read }));
    }),
    lie("a token of another's", Then::Says("AccessDenied", 2), |liar, scene| {
        let there = Range::of(0, &scene.bound);
        each(liar, [Range { offset: 0, len: 16, ..there }]);
    }),
    lie("memory for one peer, asked for in each way", Then::Says("AccessDenied", 20), |liar, scene| {
        let there = Range::of(0, &scene.bound);
        // Who it is for is looked at before what it is.
        each(liar, OUTSIDE.map(|(offset, len)| Range { offset, len, ..there }));
    }),
    lie("owners that the memory has not", Then::Says("Restarted", 10), |liar, scene| {
        let range = scene.range(0, Kind::ReadWrite);
        let owners = [0, u64::MAX, range.owner ^ 1, range.owner.swap_bytes(), liar.incarnation];
        each(liar, owners.map(|owner| Range { owner, ..range }));
    }),
    lie("memory that was taken back", Then::Says("Revoked", 4), |liar, scene| {
        let range = scene.range(0, Kind::Gone);
        each(liar, [range, Range { offset: u64::MAX, len: u64::MAX, ..range }]);
    }),
    lie("a thousand guesses, and then what is right", Then::Says("AccessDenied", 1000), |liar, scene| {
        let range = scene.range(0, Kind::ReadOnly);
        pulls(liar, (0..1000).map(|i| Range { token: [i as u8; 16], ..range }));
        assert!(liar.pull(Range { transfer: 5000, ..range }).unwrap() == pattern(1, LEN));
    }),
];

fn tokens() {
    table("tokens", Begun::ByLiar, TOKENS);
}

over_both!(ranges, tokens);
