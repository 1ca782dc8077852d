//! What frames are here, and what has to come of a stream.

use std::ops::Range;

use super::super::super::PayloadStatus;
use super::super::sending::{COVERED, COVERED_GONE, GONE, WHOLE};

/// Longest payload.
pub(super) const LONGEST: usize = 100_000;
/// What frames begin with. Of any other byte, each is a frame.
pub(super) const PLAIN: u8 = 0x11;
pub(super) const CLOSE: u8 = 0x22;
pub(super) const PLACE: u8 = 0x33;

/// The length of the frame that the bytes begin with, if it is all there.
pub(super) fn frame(bytes: &[u8]) -> Option<usize> {
    let len = match *bytes.first()? {
        PLAIN => 3 + usize::from(u16::from_le_bytes([*bytes.get(1)?, *bytes.get(2)?])),
        PLACE => 5,
        _ => 1,
    };
    (bytes.len() >= len).then_some(len)
}

/// The payload that a frame announces.
pub(super) struct Announced {
    pub len: usize,
    /// It is for nobody.
    pub nowhere: bool,
    /// The target's memory is in pieces of so many bytes.
    pub piece: usize,
    /// An operation ends that the target is for; else its gate is closed.
    pub ends: bool,
    /// That is so before any of it arrives.
    pub over: bool,
}

pub(super) fn announced(frame: &[u8]) -> Option<Announced> {
    let &[PLACE, a, b, c, how] = frame else { return None };
    let len = u32::from_le_bytes([a, b, c, 0]) as usize % (LONGEST + 1);
    let piece = [usize::MAX, 4096, 1000, 33][usize::from(how % 4)].max(len / 300);
    Some(Announced { len, piece, nowhere: how & 4 != 0, ends: how & 8 != 0, over: how & 16 != 0 })
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Happening {
    Frame(Vec<u8>),
    Placed(PayloadStatus),
    /// What arrived can't be.
    Refused,
    Closed,
}

/// A payload of the stream.
pub(super) struct ArrivingPayload {
    pub begin: usize,
    pub len: usize,
    /// The end of what is behind it; `usize::MAX`: that is not in the stream.
    pub behind: usize,
    pub withdrawn: usize,
}

/// What has to come of a stream, however it is cut.
#[derive(Default)]
pub(super) struct StreamPlan {
    /// With the number of bytes that must have arrived for it.
    pub happenings: Vec<(usize, Happening)>,
    pub frames: Vec<Range<usize>>,
    pub payloads: Vec<ArrivingPayload>,
}

impl StreamPlan {
    /// `withdrawn`: where targets are taken back, in order. `covered`: from where on there are checksums.
    pub(super) fn new(stream: &[u8], withdrawn: &[usize], covered: usize) -> StreamPlan {
        let mut plan = StreamPlan::default();
        let (mut at, mut has_covered) = (0, false);
        while at < stream.len() {
            let Some(len) = frame(&stream[at..]) else {
                plan.frames.push(at..usize::MAX);
                break;
            };
            let said = &stream[at..at + len];
            plan.frames.push(at..at + len);
            at += len;
            plan.happenings.push((at, Happening::Frame(said.to_vec())));
            if said == [CLOSE] {
                plan.happenings.push((at, Happening::Closed));
                break;
            }
            let Some(Announced { len, nowhere, over, .. }) = announced(said) else { continue };
            let (begin, end) = (at, at + len);
            let withdrawn = if over { Some(&begin) } else { withdrawn.iter().find(|withdrawn| **withdrawn >= begin) };
            let withdrawn = *withdrawn.unwrap_or(&usize::MAX);
            plan.payloads.push(ArrivingPayload { begin, len, behind: usize::MAX, withdrawn });
            let gone = !nowhere && withdrawn < end;
            let Some(&state) = stream.get(end) else { break };
            let landed = match state {
                GONE if !has_covered => PayloadStatus::SourceGone,
                WHOLE | COVERED if gone => PayloadStatus::TargetGone,
                WHOLE | COVERED => PayloadStatus::Whole,
                COVERED_GONE => PayloadStatus::SourceGone,
                _ => PayloadStatus::Damaged,
            };
            at = match state {
                WHOLE | GONE if !has_covered => end + 1,
                COVERED | COVERED_GONE => end + 5,
                _ => {
                    plan.happenings.push((end + 1, Happening::Refused));
                    break;
                }
            };
            let Some(told) = stream.get(end + 1..at) else { break };
            let damaged = match state {
                COVERED if nowhere || gone => false,
                COVERED => covered >= begin || told != crc32c::crc32c(&stream[begin..=end]).to_le_bytes(),
                COVERED_GONE => told != crc32c::crc32c(&[COVERED_GONE]).to_le_bytes(),
                _ => false,
            };
            has_covered |= !told.is_empty();
            let landed = if damaged { PayloadStatus::Damaged } else { landed };
            plan.happenings.push((at, Happening::Placed(landed)));
            plan.payloads.last_mut().expect("it was added above").behind = at;
        }
        plan
    }

    /// How many bytes of an unfinished frame there are when so many bytes have arrived.
    pub(super) fn partial(&self, at: usize) -> usize {
        let next = self.frames.partition_point(|frame| frame.end <= at);
        self.frames.get(next).map_or(0, |frame| at.saturating_sub(frame.start))
    }

    /// Whether a payload is arriving then.
    pub(super) fn is_arriving(&self, at: usize) -> bool {
        let next = self.payloads.partition_point(|payload| payload.behind <= at);
        self.payloads.get(next).is_some_and(|payload| payload.begin <= at)
    }
}
