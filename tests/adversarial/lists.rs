//! What the adversary says of the lists that its messages end with is false: it gets the answer to what it has sent.

use crate::adversary::Adversary;
use crate::common::wire::{ANYTHING, Message, Stream};
use crate::over_both;
use crate::scene::{Scene, report};
use crate::support::*;

/// Of all bytes, in their order.
pub fn digest(key: &str, value: &[u8]) -> u64 {
    key.bytes().chain(value.iter().copied()).fold(value.len() as u64, |sum, byte| sum.rotate_left(5) ^ u64::from(byte))
}

/// The number by which it declares the procedure: what is learnt of a declaration lasts as long as the connection.
const NUMBER: u32 = 9;

fn put(adversary: &mut Adversary, is_first: bool, lists: &[(u64, bool, u64, u8)], body: &[u8]) -> u64 {
    adversary.next_call += 1;
    let call = adversary.next_call;
    for (before, is_answer, head, width) in lists {
        let call = call.wrapping_sub(*before);
        adversary.tell(&Message::List { call, is_answer: *is_answer, head: *head, width: *width }, &[]);
    }
    let declaration = is_first.then(|| ("put".to_owned(), vec![ANYTHING]));
    let request = Message::Request {
        call,
        procedure: NUMBER,
        declaration,
        provider: 0,
        budget_us: 10_000_000,
        one_way: false,
        leases: (0, 0),
        size: body.len() as u64,
    };
    adversary.tell(&request, &[]);
    for (offset, chunk) in (0..).step_by(100_000).zip(body.chunks(100_000)) {
        adversary.data(Stream::Request, call, offset, chunk);
    }
    call
}

fn false_lists_change_no_value() {
    let _watchdog = Watchdog::start("lists::false_lists_change_no_value");
    let scene = Scene::new();
    let begin = std::time::Instant::now();
    let value: Vec<u8> = (0..250_000u64).map(|n| ((n * n) >> 7) as u8).collect();
    let arguments = ("key".to_owned(), value);
    let body = postcard::to_stdvec(&arguments).unwrap();
    let (len, head) = (body.len() as u64, (body.len() - arguments.1.len()) as u64);
    // From where it is, to where it can't be.
    let heads = [head, 0, 1, 3, head - 1, head + 1, head + 8, 5000, len - 1, len, len + 1, u64::MAX];
    for width in [1, 0, 2, 4, 8, 255] {
        for at in heads {
            // What was learnt of one connection's lists is not kept for the next.
            let mut adversary = Adversary::after_handshake(&scene.address);
            let told: [&[_]; 5] = [
                &[],
                &[(0, false, head, 1)],
                &[(0, false, at, width)],
                &[(1, false, at, width), (0, true, at, width)],
                &[(0, false, head, 1), (0, false, at, width)],
            ];
            for (number, lists) in told.into_iter().enumerate() {
                let call = put(&mut adversary, number == 0, lists, &body);
                let answer: u64 = postcard::from_bytes(&adversary.answer(call).unwrap()).unwrap();
                assert_eq!(answer, digest(&arguments.0, &arguments.1), "{lists:?}");
            }
        }
    }
    scene.assert_unharmed(&[]);
    report("false lists", "the values are those that were sent", begin);
}

over_both!(false_lists_change_no_value);
