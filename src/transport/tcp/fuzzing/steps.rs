//! The script of a fuzz input: the bytes of a stream, and what happens meanwhile.

use std::collections::BTreeMap;

use super::super::stream::{COVERED, COVERED_GONE, GONE, WHOLE};
use super::plan::{CLOSE, LONGEST, PAYLOAD, PLAIN};
use crate::fuzzing::script::script;

/// After so many bytes, further steps are ignored.
const MAX_STREAM: usize = 120_000;

script! {
    /// How the bytes arrive, unless a step changes it.
    struct Arrival {
        /// So many at a time; 0: all at once.
        every: u16,
        /// From a socket; else from a buffer, like decrypted bytes.
        socket: bool,
        /// The scratch buffer has its minimal length.
        short: bool,
    }
}

script! {
    enum Count { Small { n: u8 }, Middle { n: u16 }, Long { n: u16 } }
}

script! {
    /// What follows a payload. Flipped bits make a checksum wrong.
    enum Trailer { Whole, Gone, Covered { flip: u32 }, CoveredGone { flip: u32 }, Byte { byte: u8 }, Missing }
}

script! {
    enum Step {
        Frame { bytes: Vec<u8> },
        Long { len: u16 },
        Payload { len: Count, how: u8, seed: u8, trailer: Trailer },
        /// Arbitrary bytes.
        Bytes { bytes: Vec<u8> },
        /// A frame because of which the sink closes the link.
        Close,
        /// This and the next two happen `back` bytes before the end of the stream so far. From there on, payloads have
        /// checksums.
        Cover { back: Count },
        /// The target of the last payload is withdrawn.
        Withdraw { back: Count },
        /// From there on, the bytes arrive by the other path.
        Cut { back: Count, socket: bool },
    }
}

/// What happens after a number of bytes.
#[derive(Default)]
pub(super) struct Mark {
    pub covers: bool,
    pub withdraws: bool,
    pub socket: Option<bool>,
}

fn count(count: &Count) -> usize {
    match *count {
        Count::Small { n } => n.into(),
        Count::Middle { n } => n.into(),
        Count::Long { n } => 3 * usize::from(n),
    }
}

/// The bytes of the steps, and what happens meanwhile.
pub(super) fn stream(steps: &[Step]) -> (Vec<u8>, BTreeMap<usize, Mark>) {
    let (mut stream, mut marks) = (Vec::new(), BTreeMap::<usize, Mark>::new());
    let fill = |stream: &mut Vec<u8>, len: usize, seed: u8| {
        stream.extend((0..len as u32).map(|n| (n.wrapping_mul(0x9e37_79b1) >> 23) as u8 ^ seed));
    };
    for step in steps {
        if stream.len() > MAX_STREAM {
            break;
        }
        let end = stream.len();
        match step {
            Step::Frame { bytes } => stream.extend([&[PLAIN, bytes.len() as u8, 0][..], bytes].concat()),
            Step::Long { len } => {
                stream.extend([&[PLAIN][..], &len.to_le_bytes()].concat());
                fill(&mut stream, usize::from(*len), 0);
            }
            Step::Payload { len, how, seed, trailer } => {
                let len = count(len) % (LONGEST + 1);
                stream.push(PAYLOAD);
                stream.extend(&(len as u32).to_le_bytes()[..3]);
                stream.push(*how);
                let begin = stream.len();
                fill(&mut stream, len, *seed);
                match trailer {
                    Trailer::Whole => stream.push(WHOLE),
                    Trailer::Gone => stream.push(GONE),
                    Trailer::Covered { flip } => {
                        stream.push(COVERED);
                        stream.extend((crc32c::crc32c(&stream[begin..]) ^ flip).to_le_bytes());
                    }
                    Trailer::CoveredGone { flip } => {
                        stream.push(COVERED_GONE);
                        stream.extend((crc32c::crc32c(&[COVERED_GONE]) ^ flip).to_le_bytes());
                    }
                    Trailer::Byte { byte } => stream.push(*byte),
                    Trailer::Missing => {}
                }
            }
            Step::Bytes { bytes } => stream.extend(bytes),
            Step::Close => stream.push(CLOSE),
            Step::Cover { back } => marks.entry(end.saturating_sub(count(back))).or_default().covers = true,
            Step::Withdraw { back } => marks.entry(end.saturating_sub(count(back))).or_default().withdraws = true,
            Step::Cut { back, socket } => {
                marks.entry(end.saturating_sub(count(back))).or_default().socket = Some(*socket);
            }
        }
    }
    (stream, marks)
}
