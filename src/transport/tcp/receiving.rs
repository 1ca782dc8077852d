//! What is being received from one socket.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::super::partial_frame::keep_partial_frame;
use super::super::{Consumed, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use super::sending::{COVERED, COVERED_GONE, GONE, WHOLE, sum_behind};
use super::sys;
use crate::memory::Slice;

/// Besides payload, what a read takes in at most while one arrives: the next frames' beginning.
pub(super) const BEHIND_PAYLOAD: usize = 4 << 10;

#[derive(Default)]
pub(super) struct TcpReceiver {
    /// The beginning of a frame.
    partial: Vec<u8>,
    payload: Option<TcpPayload>,
    /// A payload has come with a checksum: from then on, all do.
    has_covered: bool,
}

/// A payload that is arriving.
struct TcpPayload {
    place: ReceiveTarget<Slice>,
    got: usize,
    /// The target was there whenever some of it arrived.
    valid: bool,
    /// The checksum of what has arrived, where one is to come behind it.
    sum: Option<u32>,
    /// The beginning of what comes behind it.
    trailer: SmallVec<[u8; 5]>,
}

pub(super) struct Read {
    pub total: usize,
    pub in_scratch: usize,
    /// There may be more.
    pub more: bool,
}

impl TcpReceiver {
    /// One read: to where the payload belongs, if one is arriving, and what is behind it to the scratch buffer.
    pub(super) fn read(&mut self, fd: RawFd, scratch: &mut [u8]) -> io::Result<Read> {
        if let Some(payload) = &mut self.payload {
            let left = payload.place.len - payload.got;
            if let Some(target) = payload.place.memory.as_ref().filter(|_| payload.valid && left > 0) {
                let rest = &mut scratch[..BEHIND_PAYLOAD];
                match sys::receive(fd, target, payload.got, rest, payload.sum.as_mut())? {
                    Some(arrived) => {
                        payload.got += arrived.placed;
                        let total = arrived.placed + arrived.rest;
                        return Ok(Read { total, in_scratch: arrived.rest, more: total == arrived.asked });
                    }
                    None => payload.valid = false,
                }
            }
        }
        let n = sys::receive_plain(fd, scratch)?;
        Ok(Read { total: n, in_scratch: n, more: n == scratch.len() })
    }

    pub(super) fn has_payload(&self) -> bool {
        self.payload.is_some()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn partial(&self) -> &Vec<u8> {
        &self.partial
    }

    /// Takes in bytes from the scratch buffer. False when the link was closed because of them; an error when it is to be.
    /// `covered`: from now on, payloads come with checksums.
    pub(super) fn feed(&mut self, key: LinkKey, mut data: &[u8], covered: &AtomicBool, sink: &mut dyn Sink) -> io::Result<bool> {
        loop {
            if let Some(payload) = &mut self.payload {
                let n = data.len().min(payload.place.len - payload.got);
                payload.take(&data[..n]);
                data = &data[n..];
                if payload.got < payload.place.len {
                    return Ok(true);
                }
                let Some(landed) = payload.end(&mut data, &mut self.has_covered)? else { return Ok(true) };
                self.payload = None;
                sink.payload_done(key, landed);
            }
            if data.is_empty() && self.partial.is_empty() {
                return Ok(true);
            }
            let Some(place) = self.frames(key, &mut data, sink) else { return Ok(false) };
            match place {
                Some(place) => {
                    let sum = covered.load(Ordering::Relaxed).then_some(0);
                    self.payload = Some(TcpPayload { place, got: 0, valid: true, sum, trailer: SmallVec::new() });
                }
                None => return Ok(true),
            }
        }
    }

    /// Offers frames to the sink; what is left of the data is behind a payload's place, or kept for later. `None`: the link
    /// was closed.
    fn frames(&mut self, key: LinkKey, data: &mut &[u8], sink: &mut dyn Sink) -> Option<Option<ReceiveTarget<Slice>>> {
        if self.partial.is_empty() {
            let Consumed { used, target: place } = sink.bytes(key, data)?;
            *data = &data[used..];
            if place.is_none() {
                self.partial.extend_from_slice(data);
                *data = &[];
            }
            return Some(place);
        }
        let before = self.partial.len();
        self.partial.extend_from_slice(data);
        let Consumed { used, target: place } = sink.bytes(key, &self.partial)?;
        if place.is_none() {
            keep_partial_frame(&mut self.partial, used);
            *data = &[];
        } else {
            // A frame that was not complete before ends within the new data.
            *data = &data[used.saturating_sub(before)..];
            self.partial = Vec::new();
        }
        Some(place)
    }
}

impl TcpPayload {
    fn take(&mut self, bytes: &[u8]) {
        if let Some(target) = self.place.memory.as_ref().filter(|_| self.valid && !bytes.is_empty()) {
            let part = target.part(self.got, bytes.len());
            self.valid = part.is_some_and(|part| part.write(bytes));
            if let Some(sum) = &mut self.sum {
                *sum = crc32c::crc32c_append(*sum, bytes);
            }
        }
        self.got += bytes.len();
    }

    /// Takes what comes behind the payload out of the data; `None`: there is more of it to come. An error says that it is
    /// nothing that could be there.
    fn end(&mut self, data: &mut &[u8], has_covered: &mut bool) -> io::Result<Option<PayloadStatus>> {
        loop {
            let whole = match self.trailer[..] {
                [] => false,
                [WHOLE | GONE] if !*has_covered => true,
                [COVERED | COVERED_GONE, ..] => self.trailer.len() == 5,
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "what is behind a payload was changed on the way")),
            };
            if whole {
                break;
            }
            let Some((&byte, rest)) = data.split_first() else { return Ok(None) };
            self.trailer.push(byte);
            *data = rest;
        }
        let (state, told) = (self.trailer[0], self.trailer[1..].try_into().map(u32::from_le_bytes));
        let (gone, right) = match (state, told) {
            (COVERED_GONE, Ok(told)) => (true, told == sum_behind(0, state)),
            // What nobody wants was not looked at, nor was what came when its place was gone.
            (COVERED, Ok(told)) if self.place.memory.is_some() && self.valid => {
                (false, self.sum.is_some_and(|sum| told == sum_behind(sum, state)))
            }
            (state, _) => (matches!(state, GONE | COVERED_GONE), true),
        };
        *has_covered |= matches!(state, COVERED | COVERED_GONE);
        Ok(Some(match (right, gone, self.valid) {
            (false, _, _) => PayloadStatus::Damaged,
            (true, true, _) => PayloadStatus::SourceGone,
            (true, false, false) => PayloadStatus::TargetGone,
            (true, false, true) => PayloadStatus::Whole,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_of_nothing(mut data: &[u8], mut has_covered: bool) -> io::Result<Option<PayloadStatus>> {
        let place = ReceiveTarget { memory: None, len: 0 };
        let mut payload = TcpPayload { place, got: 0, valid: true, sum: None, trailer: SmallVec::new() };
        payload.end(&mut data, &mut has_covered)
    }

    #[test]
    fn a_checksum_that_is_left_out_is_refused_without_waiting_for_more() {
        assert_eq!(end_of_nothing(&[WHOLE], false).unwrap(), Some(PayloadStatus::Whole));
        for byte in [WHOLE, GONE] {
            assert_eq!(end_of_nothing(&[byte], true).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
