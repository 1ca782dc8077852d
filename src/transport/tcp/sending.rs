//! A send that is not all out yet.
//!
//! On the wire a payload is followed by one byte, which says whether it is what the sender's memory held: memory may be
//! taken back while half of a payload is out, and what was announced has to be sent all the same. Where payloads have
//! checksums, that of the payload and this byte is behind the byte. It is that of the bytes which the socket has taken: between
//! two of its bites, memory may well change.

use std::io;
#[cfg(feature = "tls")]
use std::ops::Range;
use std::os::fd::RawFd;

use smallvec::SmallVec;

use super::sys::{self, WriteRequest};
use crate::memory::Slice;

/// What stands behind a payload that was whole, or was not; and where its checksum follows. The latter differ in many bits from
/// the former, so that none is taken for another when a few are changed.
pub(super) const GONE: u8 = 0;
pub(super) const WHOLE: u8 = 1;
pub(super) const COVERED: u8 = 0x5a;
pub(super) const COVERED_GONE: u8 = 0xa5;

#[cfg(feature = "tls")]
const MAX_TRAILER: usize = 5;

/// The checksum behind a payload of this one; of nothing for one that was not there.
pub(super) fn sum_behind(payload: u32, state: u8) -> u32 {
    crc32c::crc32c_append(payload, &[state])
}

pub(super) struct TcpSend {
    pub bytes: Vec<u8>,
    payload: Option<Slice>,
    written: usize,
    /// The payload's memory was there whenever some of it was sent.
    valid: bool,
    /// The checksum of what is out of the payload, where one is to follow.
    sum: Option<u32>,
}

impl TcpSend {
    pub(super) fn new(bytes: Vec<u8>, payload: Option<Slice>, covered: bool) -> TcpSend {
        let sum = (covered && payload.is_some()).then_some(0);
        TcpSend { bytes, payload, written: 0, valid: true, sum }
    }

    /// How long the payload is; 0 where there is none.
    fn payload(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.len)
    }

    pub(super) fn is_done(&self) -> bool {
        let trailer = match (&self.payload, self.sum) {
            (None, _) => 0,
            (Some(_), None) => 1,
            (Some(_), Some(_)) => 5,
        };
        self.written == self.bytes.len() + self.payload() + trailer
    }

    /// What goes behind the payload, whose checksum this is.
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

    /// Sends some of it, straight from where it is; how many bytes.
    pub(super) fn send(&mut self, fd: RawFd) -> io::Result<usize> {
        let head = self.bytes.len();
        let end = head + self.payload();
        let n = if self.sum.is_some() && self.written >= end {
            let trailer = self.trailer(self.sum);
            sys::send(fd, &mut WriteRequest::plain(&trailer[self.written - end..]))?
        } else {
            // When only the last byte is missing, the payload's part is empty.
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

    /// The next bytes to go out, so many at most: a part of `bytes`, and behind that `staged`, to where the payload's are
    /// copied.
    #[cfg(feature = "tls")]
    pub(super) fn stage(&mut self, most: usize, staged: &mut Vec<u8>) -> Range<usize> {
        staged.clear();
        let head = self.bytes.len();
        let begin = self.written.min(head);
        let end = head.min(begin + most);
        let Some(payload) = self.payload.as_ref().filter(|_| end == head) else { return begin..end };
        let skip = self.written.saturating_sub(head);
        let room = most - (end - begin);
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

    /// So many of those are encrypted.
    #[cfg(feature = "tls")]
    pub(super) fn took(&mut self, n: usize, staged: &[u8]) {
        let (head, payload) = (self.bytes.len(), self.payload());
        let before = self.written.saturating_sub(head).min(payload);
        self.written += n;
        let after = self.written.saturating_sub(head).min(payload);
        if let Some(sum) = &mut self.sum {
            *sum = crc32c::crc32c_append(*sum, &staged[..after - before]);
        }
    }
}
