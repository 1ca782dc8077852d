//! The byte stream of a tcp link: frames, and payloads with what follows them; sent, and received.
//!
//! On the wire one byte follows a payload. It reports whether the memory was there until the end: memory may be revoked when
//! half of the payload is sent, and its announced length must be sent anyway. If payloads have checksums, a CRC-32C of the
//! payload and this byte follows. It covers the bytes that the socket has accepted, since the memory may change between two
//! system calls.

use std::io;
#[cfg(feature = "tls")]
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::super::{LinkKey, PartialFrame, PayloadStatus, ReceiveTarget, Sink};
use super::sys::{self, WriteRequest};
use crate::memory::Slice;

/// Most bytes that a read takes from behind a payload while one is arriving.
pub(super) const BEHIND_PAYLOAD: usize = 4 << 10;

/// The byte behind a payload that is whole, or whose memory was gone; `COVERED` ones are followed by a checksum. Those differ
/// from the others in many bits, so that a few changed bits do not turn one into another.
pub(super) const GONE: u8 = 0;
pub(super) const WHOLE: u8 = 1;
pub(super) const COVERED: u8 = 0x5a;
pub(super) const COVERED_GONE: u8 = 0xa5;

#[cfg(feature = "tls")]
pub(super) const MAX_TRAILER: usize = 5;

/// The checksum to send, from that of the payload (0 if its memory was gone) and the byte behind it.
fn sum_behind(payload: u32, state: u8) -> u32 {
    crc32c::crc32c_append(payload, &[state])
}

/// A send that is not complete.
pub(super) struct TcpSend {
    pub bytes: Vec<u8>,
    payload: Option<Slice>,
    written: usize,
    /// The payload's memory was there at each send so far.
    valid: bool,
    /// The checksum of what is sent of the payload, if one is to follow.
    sum: Option<u32>,
}

impl TcpSend {
    pub(super) fn new(bytes: Vec<u8>, payload: Option<Slice>, covered: bool) -> TcpSend {
        let sum = (covered && payload.is_some()).then_some(0);
        TcpSend { bytes, payload, written: 0, valid: true, sum }
    }

    /// The length of the payload; 0 where there is none.
    fn payload_len(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.len)
    }

    pub(super) fn is_done(&self) -> bool {
        let trailer = match (&self.payload, self.sum) {
            (None, _) => 0,
            (Some(_), None) => 1,
            (Some(_), Some(_)) => 5,
        };
        self.written == self.bytes.len() + self.payload_len() + trailer
    }

    /// Encodes what follows the payload with this checksum.
    fn trailer(&self, sum: Option<u32>) -> SmallVec<[u8; 5]> {
        let mut trailer = SmallVec::new();
        match sum {
            None => trailer.push(if self.valid { WHOLE } else { GONE }),
            Some(sum) => {
                let (state, sum) = if self.valid { (COVERED, sum) } else { (COVERED_GONE, 0) };
                trailer.push(state);
                trailer.extend_from_slice(&sum_behind(sum, state).to_le_bytes());
            }
        }
        trailer
    }

    /// Sends some of it, straight from its memory, and returns how many bytes: `most` and the trailer at most.
    pub(super) fn send(&mut self, fd: RawFd, most: usize) -> io::Result<usize> {
        let head = self.bytes.len();
        let end = head + self.payload_len();
        let n = if self.sum.is_some() && self.written >= end {
            let trailer = self.trailer(self.sum);
            sys::send(fd, &mut WriteRequest::plain(&trailer[self.written - end..]))?
        } else {
            // If only the last byte is missing, this covers no byte of the payload.
            let skip = self.written.saturating_sub(head);
            let bytes = &self.bytes[self.written.min(head)..];
            if bytes.len() >= most {
                let n = sys::send(fd, &mut WriteRequest::plain(&bytes[..most]))?;
                self.written += n;
                return Ok(n);
            }
            let mut outgoing = WriteRequest {
                bytes,
                payload: self.payload.as_ref().map(|slice| (slice, skip)),
                most: most - bytes.len(),
                tail: self.sum.is_none().then_some([GONE, WHOLE]),
                valid: self.valid,
                sum: self.sum,
            };
            let n = sys::send(fd, &mut outgoing)?;
            (self.valid, self.sum) = (outgoing.valid, outgoing.sum);
            n
        };
        self.written += n;
        Ok(n)
    }

    /// Prepares up to `limit` bytes for encryption: returns a range of `bytes`, and copies what follows it to `staged`.
    #[cfg(feature = "tls")]
    pub(super) fn stage(&mut self, limit: usize, staged: &mut Vec<u8>) -> Range<usize> {
        staged.clear();
        let head = self.bytes.len();
        let begin = self.written.min(head);
        let end = head.min(begin + limit);
        let Some(payload) = self.payload.as_ref().filter(|_| end == head) else { return begin..end };
        let skip = self.written.saturating_sub(head);
        let room = limit - (end - begin);
        let n = room.min(payload.len.saturating_sub(skip));
        staged.resize(n, 0);
        if self.valid && n > 0 {
            self.valid = payload.part(skip, n).is_some_and(|part| part.read(staged));
        }
        if skip + n >= payload.len && room - n >= MAX_TRAILER {
            let before = skip.saturating_sub(payload.len);
            let sum = self.sum.map(|sum| crc32c::crc32c_append(sum, staged));
            staged.extend_from_slice(&self.trailer(sum)[before..]);
        }
        begin..end
    }

    /// Advances behind `n` bytes that were encrypted.
    #[cfg(feature = "tls")]
    pub(super) fn advance(&mut self, n: usize, staged: &[u8]) {
        let (head, payload) = (self.bytes.len(), self.payload_len());
        let before = self.written.saturating_sub(head).min(payload);
        self.written += n;
        let after = self.written.saturating_sub(head).min(payload);
        if let Some(sum) = &mut self.sum {
            *sum = crc32c::crc32c_append(*sum, &staged[..after - before]);
        }
    }
}

#[derive(Default)]
pub(super) struct TcpReceiver {
    partial: PartialFrame,
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
        self.partial.buffer()
    }

    /// Handles bytes from the scratch buffer. False when the sink closed the link because of them; an error when the caller
    /// must close it. `covered`: from now on, payloads have checksums.
    pub(super) fn feed(&mut self, key: LinkKey, data: &[u8], covered: &AtomicBool, sink: &mut dyn Sink) -> io::Result<bool> {
        let mut data = data;
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
            let Some((receive_target, behind)) = self.partial.offer(data, |bytes| sink.bytes(key, bytes)) else {
                return Ok(false);
            };
            let Some(receive_target) = receive_target else { return Ok(true) };
            let sum = covered.load(Ordering::Relaxed).then_some(0);
            self.payload = Some(TcpPayload { receive_target, got: 0, valid: true, sum, trailer: SmallVec::new() });
            data = behind;
        }
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
        let receive_target = ReceiveTarget { memory: None, len: 0, total: 0 };
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
