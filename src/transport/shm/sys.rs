//! Direct system calls: reading another process's memory, and the credentials of a socket's peer.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::super::Credentials;
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
    // As much of the target as is read, and the nonce behind it.
    let mut left = total as usize;
    near.retain(|piece| {
        piece.iov_len = piece.iov_len.min(left);
        left -= piece.iov_len;
        piece.iov_len > 0
    });
    let mut found = 0u64;
    near.push(IoVec { iov_base: (&raw mut found).cast(), iov_len: size_of::<u64>() });
    let there = RemoteIoVec { address: nonce.1, len: size_of::<u64>() as u64 };
    let far: smallvec::SmallVec<[IoVec; 8]> = far
        .iter()
        .chain([&there])
        .map(|piece| IoVec { iov_base: piece.address as *mut _, iov_len: piece.len as usize })
        .collect();
    let (near_len, far_len) = (near.len() as libc::c_ulong, far.len() as libc::c_ulong);
    // SAFETY: the near pieces are memory that `target` keeps valid for writes, exclusively, and `found`; the far ones are
    // addresses in the other process, which the kernel checks.
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
}
