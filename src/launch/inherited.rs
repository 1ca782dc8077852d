//! Descriptors that a launcher has opened for this process.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// A descriptor of its own for what `number` refers to. The original stays open.
///
/// # Errors
/// That of the system, where there is no descriptor of this number.
pub(super) fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: this takes no pointers, and fails for a number that is no descriptor.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the system has made this descriptor a moment ago, and nothing else has its number.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn duplicate_is_the_same_socket() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let mut copy = UnixStream::from(duplicate(there.as_raw_fd()).unwrap());
        here.write_all(b"x").unwrap();
        let mut byte = [0];
        copy.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn number_of_no_descriptor_is_an_error() {
        assert_eq!(duplicate(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(duplicate(RawFd::MAX).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
