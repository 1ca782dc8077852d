//! Malformed frames: wrong lengths, checksums and parts.

use crate::adversary::Adversary;
use crate::common::wire::{self, Message, Stream, frame};
use crate::over_both;
use crate::scene::{Begun, Case, Scene, Then, call_of_add, case, report, table};
use crate::support::*;

const MAX_FRAME: u32 = 1 << 20;
/// Beside the length of a message: a checksum of the body follows the body.
const COVERED: u32 = 1 << 31;

/// A frame with these lengths, whatever it contains.
fn framed(len: u32, head: u32, message: &[u8], rest: &[u8]) -> Vec<u8> {
    let lengths = [len.to_le_bytes(), head.to_le_bytes()].concat();
    let sum = crc32c::crc32c(&[&lengths[..], message].concat());
    [&sum.to_le_bytes()[..], &lengths, message, rest].concat()
}

/// A frame whose body has a checksum, which may be wrong.
fn covered(message: &Message, body: &[u8], sum: u32) -> Vec<u8> {
    let message = message.bytes();
    let rest = [body, &sum.to_le_bytes()].concat();
    framed((message.len() + rest.len()) as u32, message.len() as u32 | COVERED, &message, &rest)
}

/// Makes a call use a procedure number, declared or not.
fn numbered(number: u32, declared: bool) -> impl FnOnce(&mut Message) {
    move |message| {
        if let Message::Request { procedure, declaration, .. } = message {
            *procedure = number;
            *declaration = declaration.take().filter(|_| declared);
        }
    }
}

/// A call with a change.
fn call_with(number: u64, name: &str, size: u64, change: impl FnOnce(&mut Message)) -> Message {
    let mut message = Message::call(number, name, size as usize);
    change(&mut message);
    message
}

fn one_byte_behind(message: &Message) -> Vec<u8> {
    frame(&[&message.bytes()[..], &[0]].concat(), &[])
}

/// Announces arguments, then a part of them.
fn part(adversary: &mut Adversary, size: usize, offset: u64, len: u32) {
    adversary.tell(&Message::call(1, "swallow", size), &[]);
    adversary.announce(Stream::Request, 1, offset, len);
}

const LENGTHS: &[Case] = &[
    case("a frame longer than the limit", Then::HangsUp, |adversary, _| {
        adversary.bytes(&framed(MAX_FRAME + 1, 1, &Message::Ping.bytes(), &[]));
    }),
    case("a frame of 4 GiB", Then::HangsUp, |adversary, _| {
        adversary.bytes(&framed(u32::MAX, 1, &Message::Ping.bytes(), &[]));
    }),
    case("a message longer than its frame", Then::HangsUp, |adversary, _| {
        adversary.bytes(&framed(1, 2, &Message::Ping.bytes(), &[0]));
    }),
    case("a message of 2 GiB", Then::HangsUp, |adversary, _| {
        adversary.bytes(&framed(1, COVERED - 1, &Message::Ping.bytes(), &[]));
    }),
    case("an empty frame", Then::HangsUp, |adversary, _| {
        adversary.bytes(&framed(0, 0, &[], &[]));
    }),
    case("a body without a message", Then::HangsUp, |adversary, _| {
        adversary.bytes(&framed(100, 0, &[], &[9; 100]));
    }),
    case("a truncated message", Then::HangsUp, |adversary, _| {
        let message = Message::call(1, "add", 2).bytes();
        adversary.bytes(&frame(&message[..message.len() - 1], &[]));
    }),
    case("a byte behind a message", Then::HangsUp, |adversary, _| {
        adversary.bytes(&one_byte_behind(&Message::Ping));
    }),
    case("a byte behind a response", Then::HangsUp, |adversary, _| {
        adversary.bytes(&one_byte_behind(&Message::answer(adversary.call, 0)));
    }),
    case("messages of unknown kinds", Then::HangsUp, |adversary, _| {
        adversary.bytes(&frame(&[0x7f], &[]));
    }),
    case("a message of another kind with a layout of its own", Then::HangsUp, |adversary, _| {
        adversary.bytes(&frame(&[0x85; 60], &[]));
    }),
    case("a request with an unknown flag", Then::HangsUp, |adversary, _| {
        let mut message = Message::call(1, "add", 2).bytes();
        message[1] |= 4;
        adversary.bytes(&frame(&message, &[1, 2]));
    }),
    case("an answer with other bytes where zeros belong", Then::HangsUp, |adversary, _| {
        let mut message = Message::answer(adversary.call, 1).bytes();
        message[3] = 1;
        adversary.bytes(&frame(&message, &[1]));
    }),
    case("a message of kind 2^63", Then::HangsUp, |adversary, _| {
        adversary.bytes(&frame(&[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01], &[]));
    }),
    case("a body shorter than its checksum", Then::HangsUp, |adversary, _| {
        let message = Message::call(1, "add", 2).bytes();
        adversary.bytes(&framed(message.len() as u32 + 2, message.len() as u32 | COVERED, &message, &[1, 2]));
    }),
    case("a name that is not UTF-8", Then::HangsUp, |adversary, _| {
        let mut message = Message::call(1, "swallow", 1).bytes();
        let at = message.windows(7).position(|part| part == b"swallow").unwrap();
        message[at..at + 2].copy_from_slice(&[0xc3, 0x28]);
        adversary.bytes(&frame(&message, &[0]));
    }),
    case("a name of 2^64 - 1 bytes", Then::HangsUp, |adversary, _| {
        // The name is behind the fields.
        let message = [&Message::call(1, "add", 2).bytes()[..44], &[0xff; 9], &[0x01], b"add"].concat();
        adversary.bytes(&frame(&message, &[]));
    }),
    case("a name longer than the limit", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::call(1, &"x".repeat(1025), 0), &[]);
    }),
    case("an empty name", Then::EndsWith("NoSuchProcedure", 1), |adversary, _| {
        adversary.tell(&Message::call(1, "", 0), &[]);
    }),
    case("a procedure that was never declared", Then::HangsUp, |adversary, _| {
        adversary.tell(&call_with(77, "add", 2, numbered(77, false)), &[1, 2]);
    }),
    case("an undeclared procedure without a number", Then::HangsUp, |adversary, _| {
        adversary.tell(&call_with(77, "add", 2, numbered(0, false)), &[1, 2]);
    }),
    case("a number declared for another procedure", Then::HangsUp, |adversary, _| {
        adversary.tell(&call_with(1, "add", 2, numbered(1, true)), &[1, 2]);
        adversary.tell(&call_with(2, "big", 2, numbered(1, true)), &[1, 2]);
    }),
    case("a procedure declared twice", Then::HangsUp, |adversary, _| {
        adversary.tell(&call_with(1, "add", 2, numbered(1, true)), &[1, 2]);
        adversary.tell(&call_with(2, "add", 2, numbered(1, true)), &[1, 2]);
    }),
    case("an unknown provider", Then::EndsWith("NoSuchProvider", 1), |adversary, _| {
        let elsewhere = |m: &mut Message| {
            if let Message::Request { provider, .. } = m {
                *provider = u16::MAX
            }
        };
        adversary.tell(&call_with(1, "add", 2, elsewhere), &[1, 2]);
    }),
    case("an unknown procedure", Then::EndsWith("NoSuchProcedure", 2), |adversary, _| {
        adversary.tell(&Message::call(1, "no such procedure", 2), &[1, 2]);
        adversary.tell(&Message::call(2, &"y".repeat(1024), 2), &[1, 2]);
    }),
    case("arguments of 2^64 - 1 bytes, and others too large", Then::EndsWith("TooLarge", 3), |adversary, _| {
        for (number, size) in [u64::MAX, 1 << 62, (16 << 20) + 1].into_iter().enumerate() {
            adversary.tell(&Message::call(number as u64, "swallow", size as usize), &[]);
        }
    }),
    case("a body longer than its size", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::call(1, "add", 2), &[1, 2, 3]);
    }),
    case("a body where the size is 0", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::call(1, "add", 0), &[1]);
    }),
    case("a body shorter than its size", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::call(1, "swallow", 100), &[1; 50]);
    }),
    case("malformed arguments", Then::EndsWith("Decode", 4), |adversary, _| {
        adversary.tell(&Message::call(1, "add", 0), &[]);
        adversary.tell(&Message::call(2, "add", 3), &[1, 2, 3]);
        // Vectors that claim more than there is.
        adversary.tell(&Message::call(3, "swallow", 10), &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
        adversary.tell(&Message::call(4, "swallow", 3), &[0xff, 0x7f, 0]);
    }),
    case("an endless shape", Then::HangsUp, |adversary, _| {
        let message = Message::call(1, "add", 2).bytes();
        // The length of the shape follows the name.
        let at = message.windows(3).position(|part| part == b"add").unwrap() + 3;
        let message = [&message[..at], &[0xff; 9], &[0x01], &message[at + 1..]].concat();
        adversary.bytes(&frame(&message, &[1, 2]));
    }),
    case("invalid shapes", Then::EndsWith("TypeMismatch", 5), |adversary, _| {
        for (number, bytes) in
            [vec![], vec![0xff; 3], vec![0; 900_000], vec![200; 100_000], pattern(3, 5000)].into_iter().enumerate()
        {
            let shaped = |m: &mut Message| {
                if let Message::Request { declaration: Some((_, shape)), .. } = m {
                    *shape = bytes
                }
            };
            adversary.tell(&call_with(number as u64, "add", 2, shaped), &[1, 2]);
        }
    }),
    case("more leases than a message can have", Then::HangsUp, |adversary, _| {
        let leased = |m: &mut Message| {
            if let Message::Request { leases, .. } = m {
                *leases = (0, 7)
            }
        };
        adversary.tell(&call_with(1, "swallow", 100, leased), &[&[99][..], &[1; 99]].concat());
    }),
    case("2^32 - 1 leases", Then::HangsUp, |adversary, _| {
        let leased = |m: &mut Message| {
            if let Message::Request { leases, .. } = m {
                *leases = (u64::MAX, u32::MAX)
            }
        };
        adversary.tell(&call_with(1, "swallow", 100, leased), &[&[99][..], &[1; 99]].concat());
    }),
    case("the last lease number", Then::Continues, |adversary, _| {
        let leased = |m: &mut Message| {
            if let Message::Request { leases, .. } = m {
                *leases = (u64::MAX, 5)
            }
        };
        adversary.tell(&call_with(1, "swallow", 100, leased), &[&[99][..], &[1; 99]].concat());
        assert_eq!(adversary.answer(1), Ok(vec![99]));
        // Leases without a holder are released, whatever their numbers.
        adversary.expect("the leases", |m| matches!(m, Message::Release { first: u64::MAX, count: 5 }));
    }),
    case("an endless deadline", Then::Continues, |adversary, _| {
        let patient = |m: &mut Message| {
            if let Message::Request { budget_us, .. } = m {
                *budget_us = u64::MAX
            }
        };
        adversary.tell(&call_with(1, "add", 2, patient), &[1, 2]);
        assert_eq!(adversary.answer(1), Ok(vec![3]));
        let hasty = |m: &mut Message| {
            if let Message::Request { budget_us, .. } = m {
                *budget_us = 0
            }
        };
        adversary.tell(&call_with(2, "add", 2, hasty), &[1, 2]);
    }),
];

fn wrong_lengths_are_refused_or_disconnect() {
    table("lengths", Begun::ByAdversary, LENGTHS);
}

const PAYLOADS: &[Case] = &[
    case("a part longer than the limit", Then::HangsUp, |adversary, _| part(adversary, 8 << 20, 0, (4 << 20) + 1)),
    case("a part of 4 GiB", Then::HangsUp, |adversary, _| part(adversary, 8 << 20, 0, u32::MAX)),
    case("a part of 4 GiB for an unknown stream", Then::HangsUp, |adversary, _| {
        adversary.announce(Stream::Push, 99, 0, u32::MAX)
    }),
    case("a part longer than its stream", Then::HangsUp, |adversary, _| part(adversary, 1000, 0, 1001)),
    case("a part out of order", Then::HangsUp, |adversary, _| part(adversary, 1000, 1, 100)),
    case("a part at the last offset", Then::HangsUp, |adversary, _| part(adversary, 1000, u64::MAX, 1)),
    case("a part that wraps", Then::HangsUp, |adversary, _| part(adversary, 1000, u64::MAX - 10, 1000)),
    case("a repeated part", Then::HangsUp, |adversary, _| {
        part(adversary, 1000, 0, 100);
        adversary.channel.put_payload(&[1; 100], true, BOUND);
        adversary.announce(Stream::Request, 1, 0, 100);
    }),
    case("a part behind the end", Then::HangsUp, |adversary, _| {
        adversary.tell(&Message::call(1, "swallow", 1000), &[]);
        adversary.data(Stream::Request, 1, 0, &[1; 999]);
        adversary.announce(Stream::Request, 1, 999, 2);
    }),
    case("arguments whose memory was revoked", Then::Continues, |adversary, _| {
        // As of a caller that has given the call up.
        part(adversary, 1000, 0, 1000);
        adversary.channel.put_payload(&[1; 1000], false, BOUND);
    }),
    case("parts for complete arguments", Then::Continues, |adversary, _| {
        adversary.tell(&Message::call(1, "slow", 1), &[100]);
        adversary.data(Stream::Request, 1, 0, &[1; 100]);
        adversary.data(Stream::Request, 1, u64::MAX, &[1; 100]);
    }),
    case("parts of unknown streams", Then::Continues, |adversary, _| {
        for stream in [Stream::Pull, Stream::Push, Stream::Request, Stream::Response] {
            for (id, offset) in [(0, 0), (1, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
                adversary.data(stream, id, offset, &[0x5a; 1000]);
            }
        }
    }),
    case("arguments that never come", Then::Continues, |adversary, _| {
        adversary.tell(&Message::call(1, "swallow", 16 << 20), &[]);
        adversary.data(Stream::Request, 1, 0, &[1; 1000]);
    }),
    case("arguments that are cancelled in the middle", Then::Continues, |adversary, _| {
        adversary.tell(&Message::call(1, "swallow", 16 << 20), &[]);
        adversary.data(Stream::Request, 1, 0, &[1; 1000]);
        adversary.tell(&Message::Cancel { call: 1 }, &[]);
        adversary.data(Stream::Request, 1, 1000, &[1; 1000]);
        // The number may be used again.
        adversary.tell(&Message::call(1, "swallow", 1), &[0]);
        assert_eq!(adversary.answer(1), Ok(vec![0]));
    }),
    case("more arguments in progress than allowed", Then::EndsWith("Busy", 6), |adversary, _| {
        for number in 0..10 {
            // Four of them are the limit in flight for one peer.
            adversary.tell(&Message::call(number, "swallow", 15 << 20), &[]);
        }
    }),
    case("a payload that is cut short", Then::Leaves, |adversary, _| {
        part(adversary, 1000, 0, 1000);
        let half = if adversary.channel.in_line() {
            adversary.bytes(&[1; 500])
        } else {
            adversary.channel.put_payload(&[1; 500], true, BOUND)
        };
        assert!(half);
    }),
    case("a connection that is reset inside a payload", Then::Leaves, |adversary, _| {
        part(adversary, 1 << 20, 0, 1 << 20);
        let half = vec![1; 300_000];
        let half =
            if adversary.channel.in_line() { adversary.bytes(&half) } else { adversary.channel.put_payload(&half, true, BOUND) };
        assert!(half);
        adversary.channel.break_off();
    }),
    case("the sending half, closed inside a payload", Then::HangsUp, |adversary, _| {
        part(adversary, 1000, 0, 1000);
        adversary.channel.shut_half();
    }),
    case("the sending half, closed inside a frame", Then::HangsUp, |adversary, _| {
        adversary.bytes(&call_of_add(1)[..20]);
        adversary.channel.shut_half();
    }),
];

fn wrong_parts_of_payloads_disconnect() {
    table("payloads", Begun::ByAdversary, PAYLOADS);
}

const CHECKSUMS: &[Case] = &[
    case("a frame with another frame's checksum", Then::HangsUp, |adversary, _| {
        let (mut one, other) = (Message::Ping.frame(&[]), Message::Pong.frame(&[]));
        one[..4].copy_from_slice(&other[..4]);
        adversary.bytes(&one);
    }),
    case("a frame with the checksum 0", Then::HangsUp, |adversary, _| {
        let mut frame = call_of_add(1);
        frame[..4].fill(0);
        adversary.bytes(&frame);
    }),
    case("arguments with a wrong checksum", Then::EndsWith("Checksum", 2), |adversary, _| {
        for (number, sum) in [(1, 0), (2, crc32c::crc32c(&[1, 2]) ^ 1)] {
            adversary.bytes(&covered(&Message::call(number, "add", 2), &[1, 2], sum));
        }
        // A correct checksum is accepted.
        adversary.bytes(&covered(&Message::call(3, "add", 2), &[1, 2], crc32c::crc32c(&[1, 2])));
        assert_eq!(adversary.answer(3), Ok(vec![3]));
    }),
    case("one-way arguments with a wrong checksum", Then::Continues, |adversary, scene| {
        let before = scene.notes();
        let one_way = |m: &mut Message| {
            if let Message::Request { one_way, .. } = m {
                *one_way = true
            }
        };
        for number in 1..10 {
            adversary.bytes(&covered(&call_with(number, "note", 1, one_way), &[1], 5));
        }
        adversary.assert_listens();
        assert_eq!(scene.notes(), before);
    }),
    case("a response with a wrong checksum", Then::Continues, |adversary, _| {
        adversary.bytes(&covered(&Message::answer(adversary.call, 3), &[2, 1, 1], 0));
    }),
];

fn wrong_checksums_are_refused_or_disconnect() {
    table("checksums", Begun::ByAdversary, CHECKSUMS);
}

/// Every bit of a frame, flipped one at a time, is detected.
fn frames_with_a_flipped_bit_disconnect() {
    let _watchdog = Watchdog::start("frames::frames_with_a_flipped_bit_disconnect");
    let scene = Scene::new();
    let (begin, served) = (std::time::Instant::now(), scene.served());
    let good = Message::Cancel { call: 5 }.frame(&[]);
    for bit in 0..8 * good.len() {
        let mut frame = good.clone();
        frame[bit / 8] ^= 1 << (bit % 8);
        let mut adversary = Adversary::after_handshake(&scene.address);
        // A length that claims more than there is must not be waited for.
        adversary.bytes(&[&frame[..], &[0; 40]].concat());
        adversary.assert_hung_up();
    }
    scene.assert_unharmed(&[]);
    assert!(scene.served() > served);
    report(&format!("{} bits of a frame, each flipped", 8 * good.len()), "the victim hangs up", begin);
}

/// A connection that is cut after each of its bytes.
fn connection_cut_after_any_byte_leaves_nothing() {
    let _watchdog = Watchdog::start("frames::connection_cut_after_any_byte_leaves_nothing");
    let scene = Scene::new();
    let begin = std::time::Instant::now();
    let mut sent = wire::greeting(77, 64 << 20);
    sent.extend(call_of_add(1));
    sent.extend(Message::call(2, "swallow", 20).frame(&[]));
    sent.extend(Message::Data { stream: Stream::Request, id: 2, offset: 0, len: 20 }.frame(&[]));
    for cut in 0..sent.len() {
        let mut adversary = Adversary::dial(&scene.address);
        adversary.bytes(&sent[..cut]);
        if cut % 3 == 0 {
            adversary.channel.break_off();
        }
    }
    scene.assert_unharmed(&[]);
    report(&format!("a connection cut after each of {} bytes", sent.len()), "the adversary disconnects", begin);
    // Sent byte by byte, it has the same effect as at once.
    let mut adversary = Adversary::dial(&scene.address);
    sent.iter().for_each(|byte| assert!(adversary.bytes(&[*byte])));
    adversary.channel.put_payload(&[&[19][..], &[1; 19]].concat(), true, BOUND);
    assert_eq!((adversary.answer(1), adversary.answer(2)), (Ok(vec![3]), Ok(vec![19])));
    drop(adversary);
    scene.assert_unharmed(&[]);
    report("a connection byte by byte", "answered", begin);
}

over_both!(
    wrong_lengths_are_refused_or_disconnect,
    wrong_parts_of_payloads_disconnect,
    wrong_checksums_are_refused_or_disconnect,
    frames_with_a_flipped_bit_disconnect,
    connection_cut_after_any_byte_leaves_nothing
);
