//! The seed corpus of the fuzz target.

use super::steps::{Arrival, Count, Step, Trailer};
use crate::fuzzing::script::written;

pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let seed = |every, socket, steps: &[Step]| {
        let arrival = Arrival { every, socket, short: every > 0 };
        [written(&[arrival]), written(steps)].concat()
    };
    let small = |n| Count::Small { n };
    let middle = |n| Count::Middle { n };
    let frame = |n: u8| Step::Frame { bytes: vec![n; n.into()] };
    let payload = |len, how, trailer| Step::Payload { len, how, seed: how, trailer };
    let (covered, covered_gone) = (Trailer::Covered { flip: 0 }, Trailer::CoveredGone { flip: 0 });
    let cover = || Step::Cover { back: middle(u16::MAX) };
    let plain = [
        frame(20),
        payload(middle(1000), 0, Trailer::Whole),
        frame(0),
        frame(40),
        payload(small(50), 2, Trailer::Whole),
        payload(middle(9000), 3, Trailer::Gone),
        payload(Count::Long { n: 30_000 }, 1, Trailer::Whole),
        frame(200),
    ];
    let covers = [
        payload(small(20), 0, Trailer::Whole),
        cover(),
        payload(small(30), 0, Trailer::Gone),
        payload(middle(700), 3, covered.clone()),
        Step::Cut { back: small(2), socket: false },
        frame(3),
        payload(middle(300), 0, Trailer::Covered { flip: 1 << 31 }),
        payload(small(100), 0, covered_gone.clone()),
        payload(small(100), 4, Trailer::Covered { flip: 1 }),
        payload(small(90), 0, Trailer::CoveredGone { flip: 1 }),
        frame(4),
        payload(small(80), 0, Trailer::Whole),
    ];
    let withdrawn = [
        payload(middle(5000), 0, Trailer::Whole),
        Step::Withdraw { back: middle(1000) },
        payload(middle(3000), 10, Trailer::Gone),
        Step::Withdraw { back: middle(3001) },
        frame(5),
        cover(),
        payload(middle(400), 8, covered.clone()),
        Step::Withdraw { back: small(6) },
        payload(middle(400), 0, covered.clone()),
        Step::Withdraw { back: small(5) },
        payload(small(30), 24, Trailer::Covered { flip: 1 }),
        payload(small(30), 16, covered_gone.clone()),
        frame(6),
    ];
    let nothing = [
        payload(small(0), 0, Trailer::Whole),
        payload(small(0), 16, Trailer::Whole),
        payload(small(0), 4, Trailer::Gone),
        payload(middle(2000), 4, Trailer::Whole),
        cover(),
        payload(small(0), 0, covered.clone()),
        payload(small(0), 0, Trailer::Covered { flip: 2 }),
        frame(1),
    ];
    let long = [
        Step::Long { len: 60_000 },
        Step::Cut { back: middle(50_000), socket: true },
        Step::Long { len: 30_000 },
        payload(small(10), 0, Trailer::Whole),
        Step::Long { len: 9000 },
        Step::Cut { back: small(20), socket: false },
    ];
    // More pieces than one read can take.
    let pieces = [payload(middle(9000), 3, Trailer::Whole), Step::Cut { back: middle(9001), socket: true }, frame(8)];
    let left_out = [
        payload(small(8), 0, Trailer::Gone),
        cover(),
        payload(small(8), 0, covered_gone.clone()),
        payload(small(8), 0, Trailer::Gone),
    ];
    let changed = [payload(small(10), 0, Trailer::Byte { byte: 7 }), frame(2)];
    let ends = [payload(small(40), 0, Trailer::Whole), frame(2), Step::Close, frame(3)];
    let unasked = [payload(small(40), 0, covered), frame(2), payload(small(4), 0, Trailer::Missing), frame(9)];
    vec![
        ("plain", seed(0, true, &plain)),
        ("plain-in-parts", seed(700, true, &plain)),
        ("covered", seed(0, true, &covers)),
        ("covered-in-parts", seed(3, false, &covers)),
        ("withdrawn", seed(0, true, &withdrawn)),
        ("withdrawn-in-parts", seed(100, false, &withdrawn)),
        ("nothing", seed(0, true, &nothing)),
        ("long", seed(0, false, &long)),
        ("pieces", seed(0, false, &pieces)),
        ("left-out", seed(0, true, &left_out)),
        ("changed", seed(0, true, &changed)),
        ("closed", seed(0, true, &ends)),
        ("unasked", seed(5, true, &unasked)),
    ]
}
