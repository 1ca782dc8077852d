//! The frames of the fuzzed stream, and the events that must follow from it.

use std::ops::Range;

use super::super::super::PayloadStatus;
use super::super::stream::{COVERED, COVERED_GONE, GONE, WHOLE};

/// Longest payload.
pub(super) const LONGEST: usize = 100_000;
/// First bytes of frames. Any other byte is a frame by itself.
pub(super) const PLAIN: u8 = 0x11;
pub(super) const CLOSE: u8 = 0x22;
pub(super) const PAYLOAD: u8 = 0x33;

/// The length of the frame at the beginning of the bytes, if it is complete.
pub(super) fn frame(bytes: &[u8]) -> Option<usize> {
    let len = match *bytes.first()? {
        PLAIN => 3 + usize::from(u16::from_le_bytes([*bytes.get(1)?, *bytes.get(2)?])),
        PAYLOAD => 5,
        _ => 1,
    };
    (bytes.len() >= len).then_some(len)
}

/// The payload that a frame announces.
pub(super) struct Announced {
    pub len: usize,
    /// It has no target.
    pub nowhere: bool,
    /// The target's memory is in pieces of so many bytes.
    pub piece: usize,
    /// Withdrawing the target ends its operation; else it closes the gate.
    pub ends: bool,
    /// The target is withdrawn before any byte arrives.
    pub over: bool,
}

pub(super) fn announced(frame: &[u8]) -> Option<Announced> {
    let &[PAYLOAD, a, b, c, how] = frame else { return None };
    let len = u32::from_le_bytes([a, b, c, 0]) as usize % (LONGEST + 1);
    let piece = [usize::MAX, 4096, 1000, 33][usize::from(how % 4)].max(len / 300);
    Some(Announced { len, piece, nowhere: how & 4 != 0, ends: how & 8 != 0, over: how & 16 != 0 })
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum StreamEvent {
    Frame(Vec<u8>),
    PayloadDone(PayloadStatus),
    /// The receiver returned an error.
    Refused,
    Closed,
}

/// A payload of the stream.
pub(super) struct ArrivingPayload {
    pub begin: usize,
    pub len: usize,
    /// The end of its trailer; `usize::MAX`: that is not in the stream.
    pub behind: usize,
    pub withdrawn: usize,
}

/// The events that must follow from a stream, however it is cut.
#[derive(Default)]
pub(super) struct StreamPlan {
    /// With the number of bytes after which each is due.
    pub events: Vec<(usize, StreamEvent)>,
    pub frames: Vec<Range<usize>>,
    pub payloads: Vec<ArrivingPayload>,
}

impl StreamPlan {
    /// `withdrawn`: where targets are withdrawn, in order. `covered`: from where on there are checksums.
    pub(super) fn new(stream: &[u8], withdrawn: &[usize], covered: usize) -> StreamPlan {
        let mut plan = StreamPlan::default();
        let (mut at, mut has_covered) = (0, false);
        while at < stream.len() {
            let Some(len) = frame(&stream[at..]) else {
                plan.frames.push(at..usize::MAX);
                break;
            };
            let frame_bytes = &stream[at..at + len];
            plan.frames.push(at..at + len);
            at += len;
            plan.events.push((at, StreamEvent::Frame(frame_bytes.to_vec())));
            if frame_bytes == [CLOSE] {
                plan.events.push((at, StreamEvent::Closed));
                break;
            }
            let Some(Announced { len, nowhere, over, .. }) = announced(frame_bytes) else { continue };
            let (begin, end) = (at, at + len);
            let withdrawn = if over { Some(&begin) } else { withdrawn.iter().find(|withdrawn| **withdrawn >= begin) };
            let withdrawn = *withdrawn.unwrap_or(&usize::MAX);
            plan.payloads.push(ArrivingPayload { begin, len, behind: usize::MAX, withdrawn });
            let gone = !nowhere && withdrawn < end;
            let Some(&state) = stream.get(end) else { break };
            let status = match state {
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
                    plan.events.push((end + 1, StreamEvent::Refused));
                    break;
                }
            };
            let Some(checksum) = stream.get(end + 1..at) else { break };
            let damaged = match state {
                COVERED if nowhere || gone => false,
                COVERED => covered >= begin || checksum != crc32c::crc32c(&stream[begin..=end]).to_le_bytes(),
                COVERED_GONE => checksum != crc32c::crc32c(&[COVERED_GONE]).to_le_bytes(),
                _ => false,
            };
            has_covered |= !checksum.is_empty();
            let status = if damaged { PayloadStatus::Damaged } else { status };
            plan.events.push((at, StreamEvent::PayloadDone(status)));
            plan.payloads.last_mut().expect("it was added above").behind = at;
        }
        plan
    }

    /// How many bytes of an incomplete frame are kept after so many bytes.
    pub(super) fn partial(&self, at: usize) -> usize {
        let next = self.frames.partition_point(|frame| frame.end <= at);
        self.frames.get(next).map_or(0, |frame| at.saturating_sub(frame.start))
    }

    /// Whether a payload is arriving after so many bytes.
    pub(super) fn is_arriving(&self, at: usize) -> bool {
        let next = self.payloads.partition_point(|payload| payload.behind <= at);
        self.payloads.get(next).is_some_and(|payload| payload.begin <= at)
    }
}
