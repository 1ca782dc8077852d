//! The receiving side of a tcp link: frames, and the payload that is arriving.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::super::partial_frame::keep_partial_frame;
use super::super::{Consumed, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use super::sending::{COVERED, COVERED_GONE, GONE, WHOLE, sum_behind};
use super::sys;
use crate::memory::Slice;

/// Most bytes that a read takes from behind a payload while one is arriving.
pub(super) const BEHIND_PAYLOAD: usize = 4 << 10;

#[derive(Default)]
pub(super) struct TcpReceiver {
    /// The beginning of a frame whose rest has not arrived.
    partial: Vec<u8>,
    payload: Option<TcpPayload>,
    /// A payload has arrived with a checksum: from then on, all must have one.
    has_covered: bool,
}

/// A payload that is arriving.
struct TcpPayload {
    receive_target: ReceiveTarget<Slice>,
    /// Bytes that have arrived.
    got: usize,
    /// The target's memory was there each time when bytes arrived.
    valid: bool,
    /// The checksum of what has arrived, if one is to follow the payload.
    sum: Option<u32>,
    /// What has arrived of the trailer: the byte behind the payload, and a checksum.
    trailer: SmallVec<[u8; 5]>,
}

pub(super) struct Read {
    pub total: usize,
    pub in_scratch: usize,
    /// There may be more.
    pub more: bool,
}

impl TcpReceiver {
    /// Reads once: into the target, if a payload is arriving, and what is behind it into the scratch buffer.
    pub(super) fn read(&mut self, fd: RawFd, scratch: &mut [u8]) -> io::Result<Read> {
        if let Some(payload) = &mut self.payload {
            let left = payload.receive_target.len - payload.got;
            if let Some(target) = payload.receive_target.memory.as_ref().filter(|_| payload.valid && left > 0) {
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

    /// Handles bytes from the scratch buffer. False when the sink closed the link because of them; an error when the caller
    /// must close it. `covered`: from now on, payloads have checksums.
    pub(super) fn feed(&mut self, key: LinkKey, mut data: &[u8], covered: &AtomicBool, sink: &mut dyn Sink) -> io::Result<bool> {
        loop {
            if let Some(payload) = &mut self.payload {
                let n = data.len().min(payload.receive_target.len - payload.got);
                payload.take(&data[..n]);
                data = &data[n..];
                if payload.got < payload.receive_target.len {
                    return Ok(true);
                }
                let Some(status) = payload.end(&mut data, &mut self.has_covered)? else { return Ok(true) };
                self.payload = None;
                sink.payload_done(key, status);
            }
            if data.is_empty() && self.partial.is_empty() {
                return Ok(true);
            }
            let Some(receive_target) = self.frames(key, &mut data, sink) else { return Ok(false) };
            match receive_target {
                Some(receive_target) => {
                    let sum = covered.load(Ordering::Relaxed).then_some(0);
                    self.payload = Some(TcpPayload { receive_target, got: 0, valid: true, sum, trailer: SmallVec::new() });
                }
                None => return Ok(true),
            }
        }
    }

    /// Offers frames to the sink. What is left of the data belongs to the payload that they announce, or is kept as a partial
    /// frame. `None`: the sink closed the link.
    fn frames(&mut self, key: LinkKey, data: &mut &[u8], sink: &mut dyn Sink) -> Option<Option<ReceiveTarget<Slice>>> {
        if self.partial.is_empty() {
            let Consumed { used, target: receive_target } = sink.bytes(key, data)?;
            *data = &data[used..];
            if receive_target.is_none() {
                self.partial.extend_from_slice(data);
                *data = &[];
            }
            return Some(receive_target);
        }
        let before = self.partial.len();
        self.partial.extend_from_slice(data);
        let Consumed { used, target: receive_target } = sink.bytes(key, &self.partial)?;
        if receive_target.is_none() {
            keep_partial_frame(&mut self.partial, used);
            *data = &[];
        } else {
            // A frame that was not complete before ends within the new data.
            *data = &data[used.saturating_sub(before)..];
            self.partial = Vec::new();
        }
        Some(receive_target)
    }
}

impl TcpPayload {
    fn take(&mut self, bytes: &[u8]) {
        if let Some(target) = self.receive_target.memory.as_ref().filter(|_| self.valid && !bytes.is_empty()) {
            let part = target.part(self.got, bytes.len());
            self.valid = part.is_some_and(|part| part.write(bytes));
            if let Some(sum) = &mut self.sum {
                *sum = crc32c::crc32c_append(*sum, bytes);
            }
        }
        self.got += bytes.len();
    }

    /// Takes the payload's trailer off the data; `None`: it is not complete. An error: it is not a valid trailer.
    fn end(&mut self, data: &mut &[u8], has_covered: &mut bool) -> io::Result<Option<PayloadStatus>> {
        loop {
            let complete = match self.trailer[..] {
                [] => false,
                [WHOLE | GONE] if !*has_covered => true,
                [COVERED | COVERED_GONE, ..] => self.trailer.len() == 5,
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "a payload's trailer was corrupted in transit")),
            };
            if complete {
                break;
            }
            let Some((&byte, rest)) = data.split_first() else { return Ok(None) };
            self.trailer.push(byte);
            *data = rest;
        }
        let (state, checksum) = (self.trailer[0], self.trailer[1..].try_into().map(u32::from_le_bytes));
        let (gone, valid) = match (state, checksum) {
            (COVERED_GONE, Ok(checksum)) => (true, checksum == sum_behind(0, state)),
            // Bytes without a target, and those that arrived when its memory was gone, were not checked.
            (COVERED, Ok(checksum)) if self.receive_target.memory.is_some() && self.valid => {
                (false, self.sum.is_some_and(|sum| checksum == sum_behind(sum, state)))
            }
            (state, _) => (matches!(state, GONE | COVERED_GONE), true),
        };
        *has_covered |= matches!(state, COVERED | COVERED_GONE);
        Ok(Some(match (valid, gone, self.valid) {
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

    fn end_of_empty_payload(mut data: &[u8], mut has_covered: bool) -> io::Result<Option<PayloadStatus>> {
        let receive_target = ReceiveTarget { memory: None, len: 0 };
        let mut payload = TcpPayload { receive_target, got: 0, valid: true, sum: None, trailer: SmallVec::new() };
        payload.end(&mut data, &mut has_covered)
    }

    #[test]
    fn missing_checksum_is_refused_at_the_first_byte() {
        assert_eq!(end_of_empty_payload(&[WHOLE], false).unwrap(), Some(PayloadStatus::Whole));
        for byte in [WHOLE, GONE] {
            assert_eq!(end_of_empty_payload(&[byte], true).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
