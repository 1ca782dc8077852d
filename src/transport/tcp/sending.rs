//! A send over tcp that is not complete.
//!
//! On the wire one byte follows a payload. It reports whether the memory was there until the end: memory may be revoked when
//! half of the payload is sent, and its announced length must be sent anyway. If payloads have checksums, a CRC-32C of the
//! payload and this byte follows. It covers the bytes that the socket has accepted, since the memory may change between two
//! system calls.

use std::io;
#[cfg(feature = "tls")]
use std::ops::Range;
use std::os::fd::RawFd;

use smallvec::SmallVec;

use super::sys::{self, WriteRequest};
use crate::memory::Slice;

/// The byte behind a payload that is whole, or whose memory was gone; `COVERED` ones are followed by a checksum. Those differ
/// from the others in many bits, so that a few changed bits do not turn one into another.
pub(super) const GONE: u8 = 0;
pub(super) const WHOLE: u8 = 1;
pub(super) const COVERED: u8 = 0x5a;
pub(super) const COVERED_GONE: u8 = 0xa5;

#[cfg(feature = "tls")]
const MAX_TRAILER: usize = 5;

/// The checksum to send, from that of the payload (0 if its memory was gone) and the byte behind it.
pub(super) fn sum_behind(payload: u32, state: u8) -> u32 {
    crc32c::crc32c_append(payload, &[state])
}

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

    /// Sends some of it, straight from its memory, and returns how many bytes.
    pub(super) fn send(&mut self, fd: RawFd) -> io::Result<usize> {
        let head = self.bytes.len();
        let end = head + self.payload_len();
        let n = if self.sum.is_some() && self.written >= end {
            let trailer = self.trailer(self.sum);
            sys::send(fd, &mut WriteRequest::plain(&trailer[self.written - end..]))?
        } else {
            // If only the last byte is missing, this covers no byte of the payload.
            let skip = self.written.saturating_sub(head);
            let mut outgoing = WriteRequest {
                bytes: &self.bytes[self.written.min(head)..],
                payload: self.payload.as_ref().map(|slice| (slice, skip)),
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
