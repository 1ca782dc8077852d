//! The system calls that read or write exposed memory, without a Rust reference to it, and those beside them.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use smallvec::SmallVec;

use crate::memory::{IoVec, Slice};

/// Pieces in one call. The kernel accepts 1024; the copy of the list costs time, and 64 of 4 KiB make a long enough read.
const MAX_PIECES: usize = 64;

static ZEROS: [u8; 16 << 10] = [0; 16 << 10];

fn piece(bytes: &[u8]) -> IoVec {
    IoVec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// What [`send`] sends: the bytes, then the payload from offset `skip` on, then one of the bytes of `tail`.
pub(super) struct WriteRequest<'a> {
    pub bytes: &'a [u8],
    pub payload: Option<(&'a Slice, usize)>,
    /// How many bytes of the payload to send at most; one or more.
    pub most: usize,
    /// The byte behind a payload whose memory was gone, and behind a whole one; `None` if something else follows.
    pub tail: Option<[u8; 2]>,
    /// Becomes false when the payload's memory is gone; then zeros are sent in its place.
    pub valid: bool,
    /// The checksum of what the socket has accepted of the payload.
    pub sum: Option<u32>,
}

impl<'a> WriteRequest<'a> {
    pub(super) fn plain(bytes: &'a [u8]) -> WriteRequest<'a> {
        WriteRequest { bytes, payload: None, most: usize::MAX, tail: None, valid: true, sum: None }
    }
}

/// Sends as much as the socket accepts.
pub(super) fn send(fd: RawFd, outgoing: &mut WriteRequest<'_>) -> io::Result<usize> {
    let Some((slice, skip)) = outgoing.payload else {
        // SAFETY: the bytes are borrowed for the call, which only reads them. No SIGPIPE: the error is enough.
        let n = unsafe { libc::send(fd, outgoing.bytes.as_ptr().cast(), outgoing.bytes.len(), libc::MSG_NOSIGNAL) };
        return if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) };
    };
    let mut pieces: SmallVec<[IoVec; 8]> = SmallVec::new();
    if !outgoing.bytes.is_empty() {
        pieces.push(piece(outgoing.bytes));
    }
    let left = slice.len - skip;
    // Held during the system call: the memory can't be revoked meanwhile.
    let access = if outgoing.valid { slice.read_access() } else { None };
    outgoing.valid = access.is_some();
    let now = left.min(outgoing.most);
    let mut covered = 0;
    if let Some(access) = &access {
        let head = pieces.len();
        pieces.extend(access.range(skip, now).take(MAX_PIECES - head));
        covered = pieces[head..].iter().map(|piece| piece.iov_len).sum();
    } else {
        while covered < now && pieces.len() < MAX_PIECES {
            let zeros = &ZEROS[..ZEROS.len().min(now - covered)];
            covered += zeros.len();
            pieces.push(piece(zeros));
        }
    }
    let tail = outgoing.tail.map(|tail| [tail[usize::from(outgoing.valid)]]);
    let mut flags = libc::MSG_NOSIGNAL;
    match &tail {
        Some(tail) if covered == left => pieces.push(piece(tail)),
        // The rest follows at once; the trailer in a call of its own.
        None if now == left => flags |= libc::MSG_MORE,
        _ => {}
    }
    // SAFETY: an all-zero `msghdr` is a valid value of it.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: the pieces point to `bytes`, `ZEROS`, `tail`, and memory that `access` keeps valid for reads; all of them
    // outlive the call, which only reads them. No SIGPIPE: the error is enough.
    let n = unsafe { libc::sendmsg(fd, &message, flags) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    let n = n as usize;
    if let (Some(access), Some(sum)) = (&access, &mut outgoing.sum) {
        let taken = n.saturating_sub(outgoing.bytes.len()).min(covered);
        // Under the same access, so these are the bytes that the call moved.
        *sum = access.checksum(skip, taken, *sum);
    }
    Ok(n)
}

/// Sends plain bytes from several places, as many as the socket accepts.
#[cfg(feature = "tls")]
pub(super) fn send_all(fd: RawFd, pieces: &[io::IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: an all-zero `msghdr` is a valid value of it.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // An `IoSlice` has the layout of an `iovec`. The call writes to neither.
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: the pieces are borrowed for the call, which only reads them. No SIGPIPE: the error is enough.
    let n = unsafe { libc::sendmsg(fd, &message, libc::MSG_NOSIGNAL) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// The outcome of [`receive`].
pub(super) struct ReadOutcome {
    /// Bytes that went to the target.
    pub placed: usize,
    /// Bytes that went to `rest`.
    pub rest: usize,
    /// Bytes for which there was room.
    pub asked: usize,
}

/// Reads into the target from offset `skip` on, and what follows into `rest`. `Ok(None)`: the target's memory is gone, and
/// nothing was read. A read of 0 bytes is the end of the stream. `sum`: the checksum of what is in the target.
pub(super) fn receive(
    fd: RawFd,
    target: &Slice,
    skip: usize,
    rest: &mut [u8],
    sum: Option<&mut u32>,
) -> io::Result<Option<ReadOutcome>> {
    let left = target.len - skip;
    let Some(access) = target.write_access() else { return Ok(None) };
    let mut pieces: SmallVec<[IoVec; 8]> = SmallVec::new();
    let covered = access.pieces(skip, MAX_PIECES, &mut pieces);
    let mut asked = covered;
    if covered == left {
        pieces.push(IoVec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() });
        asked += rest.len();
    }
    // SAFETY: the pieces point to memory that `access` keeps valid for writes, exclusively, and to `rest`,
    // which is borrowed uniquely; both outlive the call.
    let n = unsafe { libc::readv(fd, pieces.as_ptr(), pieces.len() as _) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    let n = n as usize;
    let placed = n.min(covered);
    if let Some(sum) = sum {
        // Under the same access, so these are the bytes that the call moved.
        *sum = access.checksum(skip, placed, *sum);
    }
    Ok(Some(ReadOutcome { placed, rest: n - placed, asked }))
}

/// Reads into a plain buffer.
pub(super) fn receive_plain(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is borrowed uniquely for the call, and has this length.
    let n = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// How many bytes the socket holds that the peer's kernel has not acknowledged; 0 if unknown.
pub(super) fn unacknowledged(fd: RawFd) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes one `int`, which outlives the call.
    let failed = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if failed != 0 { 0 } else { u64::try_from(bytes).unwrap_or(0) }
}
