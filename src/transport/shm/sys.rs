//! Direct system calls: reading another process's memory, and the credentials of a socket's peer.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::super::Credentials;
use crate::copy;
use crate::memory::{IoVec, WriteAccess};

/// Pieces in one call, on either side. The kernel accepts 1024; the copy of the list costs time.
pub(super) const MAX_PIECES: usize = 64;

/// A piece of another process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteIoVec {
    pub address: u64,
    pub len: u64,
}

/// The credentials of the process at the other end of a local socket.
pub(super) fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let out = (&raw mut found).cast();
    // SAFETY: the option is written to `found`, which has room for `len` bytes, and any numbers are a `ucred`.
    let failed = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, out, &raw mut len) };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Credentials { pid: found.pid, uid: found.uid, gid: found.gid })
}

/// The supplementary groups of the process at the other end; none where the kernel does not report them.
pub(super) fn groups(socket: BorrowedFd<'_>) -> Vec<u32> {
    let mut groups = vec![0u32; 64];
    loop {
        let mut len = size_of_val(&groups[..]) as libc::socklen_t;
        let out = groups.as_mut_ptr().cast();
        // SAFETY: the option is written to `groups`, which has room for `len` bytes, and any numbers are groups.
        let failed = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, out, &raw mut len) };
        let count = len as usize / size_of::<u32>();
        if failed == 0 {
            groups.truncate(count);
            return groups;
        }
        // There are more than the buffer holds: the kernel has returned the number.
        if io::Error::last_os_error().raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Vec::new();
        }
        groups.resize(count, 0);
    }
}

/// How many bytes from offset `skip` on one call can fill.
pub(super) fn max_call_len(target: &WriteAccess<'_>, skip: usize) -> usize {
    target.pieces(skip, MAX_PIECES, &mut smallvec::SmallVec::new())
}

/// Reads another process's memory, all of `far` in order, into local memory from offset `skip` on; `far` must not be longer
/// than [`max_call_len`]. The same call reads `nonce` from the address that the process sent, so that a successor under the
/// same process number is noticed. False when not all could be read.
pub(super) fn read_process(
    pid: i32,
    far: &[RemoteIoVec],
    target: &WriteAccess<'_>,
    skip: usize,
    nonce: (u64, u64),
) -> io::Result<bool> {
    let total: u64 = far.iter().map(|piece| piece.len).sum();
    let mut near = smallvec::SmallVec::new();
    let covered = target.pieces(skip, MAX_PIECES, &mut near);
    assert!(total <= covered as u64, "{total} bytes for a target of {covered}");
    // As much of the target as is read.
    let mut left = total as usize;
    near.retain(|piece| {
        piece.iov_len = piece.iov_len.min(left);
        left -= piece.iov_len;
        piece.iov_len > 0
    });
    if !runs(far, &near).any(|run| run.is_slow()) {
        // SAFETY: the near pieces are memory that `target` keeps valid for writes, exclusively.
        return unsafe { read_pieces(pid, far, near, nonce) };
    }
    // What lies between two slow runs is read at once.
    let (mut far_between, mut near_between) = (smallvec::SmallVec::<[RemoteIoVec; 8]>::new(), smallvec::SmallVec::new());
    let read_between = |far: &mut smallvec::SmallVec<[RemoteIoVec; 8]>, near: &mut smallvec::SmallVec<[IoVec; 8]>| {
        let (far, near) = (std::mem::take(far), std::mem::take(near));
        // SAFETY: as above.
        if far.is_empty() { Ok(true) } else { unsafe { read_pieces(pid, &far, near, nonce) } }
    };
    for run in runs(far, &near) {
        if !run.is_slow() {
            far_between.push(run.far);
            near_between.push(run.near());
            continue;
        }
        // SAFETY: as above.
        if !read_between(&mut far_between, &mut near_between)? || !unsafe { run.read_slowly(pid, nonce)? } {
            return Ok(false);
        }
    }
    read_between(&mut far_between, &mut near_between)
}

/// Bytes that follow each other in both memories.
#[derive(Clone, Copy)]
struct ReadRun {
    far: RemoteIoVec,
    near: *mut u8,
}

/// Bytes read into a buffer at a time.
const BUFFERED: usize = 16 << 10;

/// The runs of a read. The pieces on both sides hold as many bytes together.
fn runs(far: &[RemoteIoVec], near: &[IoVec]) -> impl Iterator<Item = ReadRun> {
    let (mut far, mut near) = (far.iter().copied(), near.iter().copied());
    let (mut from, mut to) = (far.next(), near.next());
    std::iter::from_fn(move || {
        let ((from_piece, to_piece), len) = match (&mut from, &mut to) {
            (Some(from), Some(to)) => {
                let len = from.len.min(to.iov_len as u64);
                ((from, to), len)
            }
            _ => return None,
        };
        let run = ReadRun { far: RemoteIoVec { address: from_piece.address, len }, near: to_piece.iov_base.cast() };
        from_piece.address += len;
        from_piece.len -= len;
        to_piece.iov_base = to_piece.iov_base.wrapping_byte_add(len as usize);
        to_piece.iov_len -= len as usize;
        if from_piece.len == 0 {
            from = far.next();
        }
        if to.is_some_and(|to| to.iov_len == 0) {
            to = near.next();
        }
        Some(run)
    })
}

impl ReadRun {
    /// Whether the kernel would copy it a byte at a time: see `crate::copy`.
    fn is_slow(&self) -> bool {
        self.far.len >= copy::PAGE as u64 && copy::is_slow(self.far.address as usize, self.near.addr())
    }

    fn near(&self) -> IoVec {
        IoVec { iov_base: self.near.cast(), iov_len: self.far.len as usize }
    }

    /// Reads it by way of a buffer that lies in its page as the source does in its own.
    ///
    /// # Safety
    /// Its near memory must be valid for writes, and no other thread may access it.
    // With its buffer it would lengthen the stack of every read.
    #[inline(never)]
    unsafe fn read_slowly(&self, pid: i32, nonce: (u64, u64)) -> io::Result<bool> {
        let mut buffer = MaybeUninit::<[u8; BUFFERED + copy::PAGE]>::uninit();
        let begin = buffer.as_mut_ptr().cast::<u8>();
        let begin = begin.wrapping_add(copy::distance(begin.addr(), self.far.address as usize));
        let mut done = 0;
        while done < self.far.len {
            let len = (self.far.len - done).min(BUFFERED as u64);
            let far = RemoteIoVec { address: self.far.address + done, len };
            let near = IoVec { iov_base: begin.cast(), iov_len: len as usize };
            // SAFETY: the buffer is longer by a page, and `begin` lies within its first page.
            if !unsafe { read_pieces(pid, &[far], smallvec::smallvec![near], nonce)? } {
                return Ok(false);
            }
            // SAFETY: the kernel has written these bytes of the buffer; the target is a part of the run, for which the caller
            // promises that.
            unsafe { copy::bytes(begin, self.near.wrapping_add(done as usize), len as usize) };
            done += len;
        }
        Ok(true)
    }
}

/// Reads all of `far` into the memory of `near`, and the nonce with it, in one system call.
///
/// # Safety
/// The memory of `near` must be valid for writes, and no other thread may access it.
unsafe fn read_pieces(
    pid: i32,
    far: &[RemoteIoVec],
    mut near: smallvec::SmallVec<[IoVec; 8]>,
    nonce: (u64, u64),
) -> io::Result<bool> {
    let total: u64 = far.iter().map(|piece| piece.len).sum();
    let mut found = 0u64;
    near.push(IoVec { iov_base: (&raw mut found).cast(), iov_len: size_of::<u64>() });
    let there = RemoteIoVec { address: nonce.1, len: size_of::<u64>() as u64 };
    let far: smallvec::SmallVec<[IoVec; 8]> = far
        .iter()
        .chain([&there])
        .map(|piece| IoVec { iov_base: piece.address as *mut _, iov_len: piece.len as usize })
        .collect();
    let (near_len, far_len) = (near.len() as libc::c_ulong, far.len() as libc::c_ulong);
    // SAFETY: the near pieces are valid for writes, exclusively, as the caller promises, and `found` is; the far ones are addresses
    // in the other process, which the kernel checks.
    let n = unsafe { libc::process_vm_readv(pid, near.as_ptr(), near_len, far.as_ptr(), far_len, 0) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(n as u64 == total + size_of::<u64>() as u64 && found == nonce.0)
}

/// Reads a word of another process's memory.
pub(super) fn read_word(pid: i32, address: u64) -> io::Result<u64> {
    let mut word = 0u64;
    let near = IoVec { iov_base: (&raw mut word).cast(), iov_len: size_of::<u64>() };
    let far = IoVec { iov_base: address as *mut _, iov_len: size_of::<u64>() };
    // SAFETY: the near piece is `word`; the far one is an address in the other process, which the kernel checks.
    let n = unsafe { libc::process_vm_readv(pid, &raw const near, 1, &raw const far, 1, 0) };
    match n {
        8 => Ok(word),
        n if n < 0 => Err(io::Error::last_os_error()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Region, Slice};

    fn target() -> Slice {
        Slice::whole(&Region::from_vec(vec![0; 10]))
    }

    #[test]
    fn read_of_process_memory_succeeds_only_with_the_right_nonce() {
        let (bytes, nonce) = (*b"0123456789", 42u64);
        let at = |offset: usize, len| RemoteIoVec { address: bytes[offset..].as_ptr() as u64, len };
        let me = std::process::id() as i32;
        let there = (&raw const nonce) as u64;
        let target = target();
        let access = target.write_access().unwrap();
        assert!(read_process(me, &[at(4, 2), at(0, 3)], &access, 5, (42, there)).unwrap());
        assert!(!read_process(me, &[at(0, 1)], &access, 0, (43, there)).unwrap(), "another nonce");
        assert!(read_process(me, &[RemoteIoVec { address: 16, len: 1 }], &access, 0, (42, there)).is_err());
        drop(access);
        assert_eq!(target.region.take_message()[5..], *b"45012");
        assert_eq!(read_word(me, there).unwrap(), 42);
    }

    /// Wherever the target lies in its page, and however the pieces on both sides are cut.
    #[test]
    fn memory_of_a_process_is_read_alike_by_way_of_a_buffer() {
        let (nonce, me) = (42u64, std::process::id() as i32);
        let there = (&raw const nonce) as u64;
        let source: Vec<u8> = (0..60_000u32).map(|number| (number * 7 + number / 251) as u8).collect();
        for cuts in [vec![60_000], vec![3, 59_997], vec![5000, 1, 40_000, 14_999]] {
            let mut at = source.as_ptr() as u64;
            let far: Vec<RemoteIoVec> = cuts
                .iter()
                .map(|len| {
                    at += len;
                    RemoteIoVec { address: at - len, len: *len }
                })
                .collect();
            for behind in [0, 1, 8, 16, 31, 32, 100] {
                let mut memory = vec![0xee; 70_000];
                let first = copy::distance(memory.as_ptr().addr(), source.as_ptr().addr() + behind);
                let parts = [(first, 20_000), (first + 20_000, 40_000)];
                let parts = parts.map(|(at, len)| (memory[at..at + len].as_mut_ptr(), len));
                // SAFETY: the test leaves the memory alone while the region is used.
                let region = unsafe { Region::new(parts) };
                let target = Slice::whole(&region);
                assert!(read_process(me, &far, &target.write_access().unwrap(), 0, (42, there)).unwrap());
                drop(target);
                assert_eq!(memory[first..first + 60_000], source, "{cuts:?} {behind}");
                assert!(memory[..first].iter().chain(&memory[first + 60_000..]).all(|byte| *byte == 0xee));
            }
        }
    }
}
