//! Lengths, checksums and parts that are not what they say.

use crate::common::wire::{self, Message, Stream, frame};
use crate::liar::Liar;
use crate::over_both;
use crate::scene::{Begun, Lie, Scene, Then, call_of_add, lie, report, table};
use crate::support::*;

const MAX_FRAME: u32 = 1 << 20;
/// Beside the length of a message: behind the body there is a checksum of it.
const COVERED: u32 = 1 << 31;

/// A frame that says these lengths, whatever is in it.
fn framed(len: u32, head: u32, message: &[u8], rest: &[u8]) -> Vec<u8> {
    let lengths = [len.to_le_bytes(), head.to_le_bytes()].concat();
    let sum = crc32c::crc32c(&[&lengths[..], message].concat());
    [&sum.to_le_bytes()[..], &lengths, message, rest].concat()
}

/// A frame whose body has a checksum, which may be a wrong one.
fn covered(message: &Message, body: &[u8], sum: u32) -> Vec<u8> {
    let message = message.bytes();
    let rest = [body, &sum.to_le_bytes()].concat();
    framed((message.len() + rest.len()) as u32, message.len() as u32 | COVERED, &message, &rest)
}

/// Has a call use a number, and declare it or not.
fn numbered(number: u32, declared: bool) -> impl FnOnce(&mut Message) {
    move |message| {
        if let Message::Request { procedure, declaration, .. } = message {
            *procedure = number;
            *declaration = declaration.take().filter(|_| declared);
        }
    }
}

/// A call with something else in it.
fn call_with(number: u64, name: &str, size: u64, change: impl FnOnce(&mut Message)) -> Message {
    let mut message = Message::call(number, name, size as usize);
    change(&mut message);
    message
}

fn one_byte_behind(message: &Message) -> Vec<u8> {
    frame(&[&message.bytes()[..], &[0]].concat(), &[])
}

/// Announces arguments, and then a part of them.
fn part(liar: &mut Liar, size: usize, offset: u64, len: u32) {
    liar.tell(&Message::call(1, "swallow", size), &[]);
    liar.announce(Stream::Request, 1, offset, len);
}

const LENGTHS: &[Lie] = &[
    lie("a frame longer than any", Then::HangsUp, |liar, _| {
        liar.bytes(&framed(MAX_FRAME + 1, 1, &Message::Ping.bytes(), &[]));
    }),
    lie("a frame of 4 GiB", Then::HangsUp, |liar, _| {
        liar.bytes(&framed(u32::MAX, 1, &Message::Ping.bytes(), &[]));
    }),
    lie("a message longer than its frame", Then::HangsUp, |liar, _| {
        liar.bytes(&framed(1, 2, &Message::Ping.bytes(), &[0]));
    }),
    lie("a message of 2 GiB", Then::HangsUp, |liar, _| {
        liar.bytes(&framed(1, COVERED - 1, &Message::Ping.bytes(), &[]));
    }),
    lie("a frame of nothing", Then::HangsUp, |liar, _| {
        liar.bytes(&framed(0, 0, &[], &[]));
    }),
    lie("a body without a message", Then::HangsUp, |liar, _| {
        liar.bytes(&framed(100, 0, &[], &[9; 100]));
    }),
    lie("a message that ends before its end", Then::HangsUp, |liar, _| {
        let message = Message::call(1, "add", 2).bytes();
        liar.bytes(&frame(&message[..message.len() - 1], &[]));
    }),
    lie("a byte behind a message", Then::HangsUp, |liar, _| {
        liar.bytes(&one_byte_behind(&Message::Ping));
    }),
    lie("a byte behind an answer", Then::HangsUp, |liar, _| {
        liar.bytes(&one_byte_behind(&Message::answer(liar.call, 0)));
    }),
    lie("messages of kinds that there are not", Then::HangsUp, |liar, _| {
        liar.bytes(&frame(&[17], &[]));
    }),
    lie("a message of kind 2^63", Then::HangsUp, |liar, _| {
        liar.bytes(&frame(&[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01], &[]));
    }),
    lie("a body shorter than its checksum", Then::HangsUp, |liar, _| {
        let message = Message::call(1, "add", 2).bytes();
        liar.bytes(&framed(message.len() as u32 + 2, message.len() as u32 | COVERED, &message, &[1, 2]));
    }),
    lie("a name that is no text", Then::HangsUp, |liar, _| {
        let mut message = Message::call(1, "swallow", 1).bytes();
        let at = message.windows(7).position(|part| part == b"swallow").unwrap();
        message[at..at + 2].copy_from_slice(&[0xc3, 0x28]);
        liar.bytes(&frame(&message, &[0]));
    }),
    lie("a name of 2^64 - 1 bytes", Then::HangsUp, |liar, _| {
        // Request, call 1, procedure 1, a name.
        let message = [&[0, 1, 1, 1][..], &[0xff; 9], &[0x01], b"add"].concat();
        liar.bytes(&frame(&message, &[]));
    }),
    lie("a name longer than any", Then::HangsUp, |liar, _| {
        liar.tell(&Message::call(1, &"x".repeat(1025), 0), &[]);
    }),
    lie("a name of no bytes", Then::Says("NoSuchProcedure", 1), |liar, _| {
        liar.tell(&Message::call(1, "", 0), &[]);
    }),
    lie("a procedure that was never declared", Then::HangsUp, |liar, _| {
        liar.tell(&call_with(77, "add", 2, numbered(77, false)), &[1, 2]);
    }),
    lie("a procedure of no number that is not declared", Then::HangsUp, |liar, _| {
        liar.tell(&call_with(77, "add", 2, numbered(0, false)), &[1, 2]);
    }),
    lie("a procedure that is declared anew", Then::HangsUp, |liar, _| {
        liar.tell(&call_with(1, "add", 2, numbered(1, true)), &[1, 2]);
        liar.tell(&call_with(2, "big", 2, numbered(1, true)), &[1, 2]);
    }),
    lie("a procedure that is declared again", Then::HangsUp, |liar, _| {
        liar.tell(&call_with(1, "add", 2, numbered(1, true)), &[1, 2]);
        liar.tell(&call_with(2, "add", 2, numbered(1, true)), &[1, 2]);
    }),
    lie("a provider that there is not", Then::Says("NoSuchProvider", 1), |liar, _| {
        let elsewhere = |m: &mut Message| {
            if let Message::Request { provider, .. } = m {
                *provider = u16::MAX
            }
        };
        liar.tell(&call_with(1, "add", 2, elsewhere), &[1, 2]);
    }),
    lie("a procedure that there is not", Then::Says("NoSuchProcedure", 2), |liar, _| {
        liar.tell(&Message::call(1, "no such procedure", 2), &[1, 2]);
        liar.tell(&Message::call(2, &"y".repeat(1024), 2), &[1, 2]);
    }),
    lie("arguments of 2^64 - 1 bytes, and others too large", Then::Says("TooLarge", 3), |liar, _| {
        for (number, size) in [u64::MAX, 1 << 62, (16 << 20) + 1].into_iter().enumerate() {
            liar.tell(&Message::call(number as u64, "swallow", size as usize), &[]);
        }
    }),
    lie("a body longer than its size", Then::HangsUp, |liar, _| {
        liar.tell(&Message::call(1, "add", 2), &[1, 2, 3]);
    }),
    lie("a body where the size is 0", Then::HangsUp, |liar, _| {
        liar.tell(&Message::call(1, "add", 0), &[1]);
    }),
    lie("a body shorter than its size", Then::HangsUp, |liar, _| {
        liar.tell(&Message::call(1, "swallow", 100), &[1; 50]);
    }),
    lie("arguments that are none", Then::Says("Decode", 4), |liar, _| {
        liar.tell(&Message::call(1, "add", 0), &[]);
        liar.tell(&Message::call(2, "add", 3), &[1, 2, 3]);
        // Vectors of more than there is.
        liar.tell(&Message::call(3, "swallow", 10), &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
        liar.tell(&Message::call(4, "swallow", 3), &[0xff, 0x7f, 0]);
    }),
    lie("a shape that goes on for ever", Then::HangsUp, |liar, _| {
        let message = Message::call(1, "add", 2).bytes();
        // The length of the shape stands behind the name.
        let at = message.windows(3).position(|part| part == b"add").unwrap() + 3;
        let message = [&message[..at], &[0xff; 9], &[0x01], &message[at + 1..]].concat();
        liar.bytes(&frame(&message, &[1, 2]));
    }),
    lie("shapes that are none", Then::Says("TypeMismatch", 5), |liar, _| {
        for (number, bytes) in
            [vec![], vec![0xff; 3], vec![0; 900_000], vec![200; 100_000], pattern(3, 5000)].into_iter().enumerate()
        {
            let shaped = |m: &mut Message| {
                if let Message::Request { declaration: Some((_, shape)), .. } = m {
                    *shape = bytes
                }
            };
            liar.tell(&call_with(number as u64, "add", 2, shaped), &[1, 2]);
        }
    }),
    lie("more leases than a message can have", Then::HangsUp, |liar, _| {
        let leased = |m: &mut Message| {
            if let Message::Request { leases, .. } = m {
                *leases = (0, 7)
            }
        };
        liar.tell(&call_with(1, "swallow", 100, leased), &[&[99][..], &[1; 99]].concat());
    }),
    lie("2^32 - 1 leases", Then::HangsUp, |liar, _| {
        let leased = |m: &mut Message| {
            if let Message::Request { leases, .. } = m {
                *leases = (u64::MAX, u32::MAX)
            }
        };
        liar.tell(&call_with(1, "swallow", 100, leased), &[&[99][..], &[1; 99]].concat());
    }),
    lie("the last lease that there can be", Then::GoesOn, |liar, _| {
        let leased = |m: &mut Message| {
            if let Message::Request { leases, .. } = m {
                *leases = (u64::MAX, 5)
            }
        };
        liar.tell(&call_with(1, "swallow", 100, leased), &[&[99][..], &[1; 99]].concat());
        assert_eq!(liar.answer(1), Ok(vec![99]));
        // What nobody has kept, is given back: all of it, whatever its numbers.
        liar.expect("the leases", |m| matches!(m, Message::Release { first: u64::MAX, count: 5 }));
    }),
    lie("time without end", Then::GoesOn, |liar, _| {
        let patient = |m: &mut Message| {
            if let Message::Request { budget_us, .. } = m {
                *budget_us = u64::MAX
            }
        };
        liar.tell(&call_with(1, "add", 2, patient), &[1, 2]);
        assert_eq!(liar.answer(1), Ok(vec![3]));
        let hasty = |m: &mut Message| {
            if let Message::Request { budget_us, .. } = m {
                *budget_us = 0
            }
        };
        liar.tell(&call_with(2, "add", 2, hasty), &[1, 2]);
    }),
];

fn lengths() {
    table("lengths", Begun::ByLiar, LENGTHS);
}

const PAYLOADS: &[Lie] = &[
    lie("a part longer than any", Then::HangsUp, |liar, _| part(liar, 8 << 20, 0, (4 << 20) + 1)),
    lie("a part of 4 GiB", Then::HangsUp, |liar, _| part(liar, 8 << 20, 0, u32::MAX)),
    lie("a part of 4 GiB for nobody", Then::HangsUp, |liar, _| liar.announce(Stream::Push, 99, 0, u32::MAX)),
    lie("a part longer than all", Then::HangsUp, |liar, _| part(liar, 1000, 0, 1001)),
    lie("a part that is not the next", Then::HangsUp, |liar, _| part(liar, 1000, 1, 100)),
    lie("a part at the last byte there can be", Then::HangsUp, |liar, _| part(liar, 1000, u64::MAX, 1)),
    lie("a part that wraps", Then::HangsUp, |liar, _| part(liar, 1000, u64::MAX - 10, 1000)),
    lie("a part that comes twice", Then::HangsUp, |liar, _| {
        part(liar, 1000, 0, 100);
        liar.way.put_payload(&[1; 100], true, BOUND);
        liar.announce(Stream::Request, 1, 0, 100);
    }),
    lie("a part behind the end", Then::HangsUp, |liar, _| {
        liar.tell(&Message::call(1, "swallow", 1000), &[]);
        liar.data(Stream::Request, 1, 0, &[1; 999]);
        liar.announce(Stream::Request, 1, 999, 2);
    }),
    lie("arguments that were taken back", Then::HangsUp, |liar, _| {
        part(liar, 1000, 0, 1000);
        liar.way.put_payload(&[1; 1000], false, BOUND);
    }),
    lie("parts for arguments that are all there", Then::GoesOn, |liar, _| {
        liar.tell(&Message::call(1, "slow", 1), &[100]);
        liar.data(Stream::Request, 1, 0, &[1; 100]);
        liar.data(Stream::Request, 1, u64::MAX, &[1; 100]);
    }),
    lie("parts that nobody waits for", Then::GoesOn, |liar, _| {
        for stream in [Stream::Pull, Stream::Push, Stream::Request, Stream::Response] {
            for (id, offset) in [(0, 0), (1, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
                liar.data(stream, id, offset, &[0x5a; 1000]);
            }
        }
    }),
    lie("arguments that never come", Then::GoesOn, |liar, _| {
        liar.tell(&Message::call(1, "swallow", 16 << 20), &[]);
        liar.data(Stream::Request, 1, 0, &[1; 1000]);
    }),
    lie("arguments that are cancelled in the middle", Then::GoesOn, |liar, _| {
        liar.tell(&Message::call(1, "swallow", 16 << 20), &[]);
        liar.data(Stream::Request, 1, 0, &[1; 1000]);
        liar.tell(&Message::Cancel { call: 1 }, &[]);
        liar.data(Stream::Request, 1, 1000, &[1; 1000]);
        // The number may be used again.
        liar.tell(&Message::call(1, "swallow", 1), &[0]);
        assert_eq!(liar.answer(1), Ok(vec![0]));
    }),
    lie("more arguments at a time than are waited for", Then::Says("Busy", 6), |liar, _| {
        for number in 0..10 {
            // Four of them are as much as may be in flight for one peer.
            liar.tell(&Message::call(number, "swallow", 15 << 20), &[]);
        }
    }),
    lie("a payload that is cut short", Then::Leaves, |liar, _| {
        part(liar, 1000, 0, 1000);
        let half = if liar.way.in_line() { liar.bytes(&[1; 500]) } else { liar.way.put_payload(&[1; 500], true, BOUND) };
        assert!(half);
    }),
    lie("a connection that is broken off inside a payload", Then::Leaves, |liar, _| {
        part(liar, 1 << 20, 0, 1 << 20);
        let half = vec![1; 300_000];
        let half = if liar.way.in_line() { liar.bytes(&half) } else { liar.way.put_payload(&half, true, BOUND) };
        assert!(half);
        liar.way.break_off();
    }),
    lie("half a connection, closed inside a payload", Then::HangsUp, |liar, _| {
        part(liar, 1000, 0, 1000);
        liar.way.shut_half();
    }),
    lie("half a connection, closed inside a frame", Then::HangsUp, |liar, _| {
        liar.bytes(&call_of_add(1)[..20]);
        liar.way.shut_half();
    }),
];

fn payloads() {
    table("payloads", Begun::ByLiar, PAYLOADS);
}

const CHECKSUMS: &[Lie] = &[
    lie("a frame with another's checksum", Then::HangsUp, |liar, _| {
        let (mut one, other) = (Message::Ping.frame(&[]), Message::Pong.frame(&[]));
        one[..4].copy_from_slice(&other[..4]);
        liar.bytes(&one);
    }),
    lie("a frame with the checksum 0", Then::HangsUp, |liar, _| {
        let mut frame = call_of_add(1);
        frame[..4].fill(0);
        liar.bytes(&frame);
    }),
    lie("arguments with a wrong checksum", Then::Says("Checksum", 2), |liar, _| {
        for (number, sum) in [(1, 0), (2, crc32c::crc32c(&[1, 2]) ^ 1)] {
            liar.bytes(&covered(&Message::call(number, "add", 2), &[1, 2], sum));
        }
        // One that is right is right.
        liar.bytes(&covered(&Message::call(3, "add", 2), &[1, 2], crc32c::crc32c(&[1, 2])));
        assert_eq!(liar.answer(3), Ok(vec![3]));
    }),
    lie("one-way arguments with a wrong checksum", Then::GoesOn, |liar, scene| {
        let before = scene.notes();
        let one_way = |m: &mut Message| {
            if let Message::Request { one_way, .. } = m {
                *one_way = true
            }
        };
        for number in 1..10 {
            liar.bytes(&covered(&call_with(number, "note", 1, one_way), &[1], 5));
        }
        liar.assert_listens();
        assert_eq!(scene.notes(), before);
    }),
    lie("an answer with a wrong checksum", Then::GoesOn, |liar, _| {
        liar.bytes(&covered(&Message::answer(liar.call, 3), &[2, 1, 1], 0));
    }),
];

fn checksums() {
    table("checksums", Begun::ByLiar, CHECKSUMS);
}

/// Every bit of what is said, flipped, one at a time: it is noticed, each time.
fn flipped() {
    let _watchdog = Watchdog::start("frames::flipped");
    let scene = Scene::new();
    let (begin, served) = (std::time::Instant::now(), scene.served());
    let good = Message::Cancel { call: 5 }.frame(&[]);
    for bit in 0..8 * good.len() {
        let mut frame = good.clone();
        frame[bit / 8] ^= 1 << (bit % 8);
        let mut liar = Liar::greeted(&scene.address);
        // Where a length claims more than there is, that must not be waited for.
        liar.bytes(&[&frame[..], &[0; 40]].concat());
        liar.assert_hung_up();
    }
    scene.assert_unharmed(&[]);
    assert!(scene.served() > served);
    report(&format!("{} bits of a frame, each flipped", 8 * good.len()), "the victim hangs up", begin);
}

/// A conversation that is cut after each of its bytes.
fn cut() {
    let _watchdog = Watchdog::start("frames::cut");
    let scene = Scene::new();
    let begin = std::time::Instant::now();
    let mut said = wire::greeting(77, 64 << 20);
    said.extend(call_of_add(1));
    said.extend(Message::call(2, "swallow", 20).frame(&[]));
    said.extend(Message::Data { stream: Stream::Request, id: 2, offset: 0, len: 20 }.frame(&[]));
    for cut in 0..said.len() {
        let mut liar = Liar::dial(&scene.address);
        liar.bytes(&said[..cut]);
        if cut % 3 == 0 {
            liar.way.break_off();
        }
    }
    scene.assert_unharmed(&[]);
    report(&format!("a conversation cut after each of {} bytes", said.len()), "the liar leaves", begin);
    // Byte by byte it is as good as at once.
    let mut liar = Liar::dial(&scene.address);
    said.iter().for_each(|byte| assert!(liar.bytes(&[*byte])));
    liar.way.put_payload(&[&[19][..], &[1; 19]].concat(), true, BOUND);
    assert_eq!((liar.answer(1), liar.answer(2)), (Ok(vec![3]), Ok(vec![19])));
    drop(liar);
    scene.assert_unharmed(&[]);
    report("a conversation byte by byte", "answered", begin);
}

over_both!(lengths, payloads, checksums, flipped, cut);
