//! What a script says: the bytes of a stream, and what happens meanwhile.

use std::collections::BTreeMap;

use super::super::sending::{COVERED, COVERED_GONE, GONE, WHOLE};
use super::plan::{CLOSE, LONGEST, PLACE, PLAIN};
use crate::fuzzing::script::script;

/// After so many bytes nothing more is said.
const MOST: usize = 120_000;

script! {
    /// How the bytes arrive, where steps say nothing else.
    struct Arrival {
        /// So many at a time; 0: all together.
        every: u16,
        /// From a socket; else from a buffer, as those that were decrypted do.
        socket: bool,
        /// The scratch buffer is as short as it may be.
        short: bool,
    }
}

script! {
    enum Count { Small { n: u8 }, Middle { n: u16 }, Long { n: u16 } }
}

script! {
    /// What stands behind a payload. What is flipped of a checksum makes it wrong.
    enum Trailer { Whole, Gone, Covered { flip: u32 }, CoveredGone { flip: u32 }, Byte { byte: u8 }, Missing }
}

script! {
    enum Step {
        Frame { bytes: Vec<u8> },
        Long { len: u16 },
        Payload { len: Count, how: u8, seed: u8, trailer: Trailer },
        /// Anything.
        Bytes { bytes: Vec<u8> },
        /// The one who is told closes the link because of it.
        Close,
        /// These happen when all is there but so many bytes of what is said up to here. From then on payloads have checksums:
        Cover { back: Count },
        /// The target of the last payload is taken back.
        Withdraw { back: Count },
        /// What comes from there on arrives otherwise.
        Cut { back: Count, socket: bool },
    }
}

/// What happens when so many bytes have arrived.
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

/// The bytes that the steps say, and what happens meanwhile.
pub(super) fn stream(steps: &[Step]) -> (Vec<u8>, BTreeMap<usize, Mark>) {
    let (mut said, mut marks) = (Vec::new(), BTreeMap::<usize, Mark>::new());
    let fill = |said: &mut Vec<u8>, len: usize, seed: u8| {
        said.extend((0..len as u32).map(|n| (n.wrapping_mul(0x9e37_79b1) >> 23) as u8 ^ seed));
    };
    for step in steps {
        if said.len() > MOST {
            break;
        }
        let end = said.len();
        match step {
            Step::Frame { bytes } => said.extend([&[PLAIN, bytes.len() as u8, 0][..], bytes].concat()),
            Step::Long { len } => {
                said.extend([&[PLAIN][..], &len.to_le_bytes()].concat());
                fill(&mut said, usize::from(*len), 0);
            }
            Step::Payload { len, how, seed, trailer } => {
                let len = count(len) % (LONGEST + 1);
                said.push(PLACE);
                said.extend(&(len as u32).to_le_bytes()[..3]);
                said.push(*how);
                let begin = said.len();
                fill(&mut said, len, *seed);
                match trailer {
                    Trailer::Whole => said.push(WHOLE),
                    Trailer::Gone => said.push(GONE),
                    Trailer::Covered { flip } => {
                        said.push(COVERED);
                        said.extend((crc32c::crc32c(&said[begin..]) ^ flip).to_le_bytes());
                    }
                    Trailer::CoveredGone { flip } => {
                        said.push(COVERED_GONE);
                        said.extend((crc32c::crc32c(&[COVERED_GONE]) ^ flip).to_le_bytes());
                    }
                    Trailer::Byte { byte } => said.push(*byte),
                    Trailer::Missing => {}
                }
            }
            Step::Bytes { bytes } => said.extend(bytes),
            Step::Close => said.push(CLOSE),
            Step::Cover { back } => marks.entry(end.saturating_sub(count(back))).or_default().covers = true,
            Step::Withdraw { back } => marks.entry(end.saturating_sub(count(back))).or_default().withdraws = true,
            Step::Cut { back, socket } => {
                marks.entry(end.saturating_sub(count(back))).or_default().socket = Some(*socket);
            }
        }
    }
    (said, marks)
}
