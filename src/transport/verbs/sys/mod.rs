//! The verbs and the connection manager of rdma-core, as values that free what they hold: all that the transport knows of
//! `rdma-sys`. Nothing here blocks, but for the system calls that make and unmake things.

#![allow(unsafe_code)]

mod cm;
mod device;
mod qp;

use std::ffi::CStr;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

pub(super) use cm::{Event, EventChannel, EventKind, Id, Reads};
pub(super) use device::{Access, Async, Completion, Completions, Context, Cq, Limits, Memory, Pd, Window};
pub(super) use qp::{Capacity, Kind, Path, Piece, Qp, Receive, Srq, Work};

/// What a function of verbs has returned: 0, or the error's number.
fn verbs(what: &str, returned: libc::c_int) -> io::Result<()> {
    match returned {
        0 => Ok(()),
        // Some set `errno` instead.
        error if error < 0 => Err(failed(what, &io::Error::last_os_error())),
        error => Err(failed(what, &io::Error::from_raw_os_error(error))),
    }
}

/// What a function that sets `errno` has returned.
fn errno(what: &str, returned: libc::c_int) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(failed(what, &io::Error::last_os_error())) }
}

fn failed(what: &str, error: &io::Error) -> io::Error {
    let kind = match error.raw_os_error() {
        Some(libc::ENODEV) => io::ErrorKind::NotFound,
        _ => error.kind(),
    };
    io::Error::new(kind, format!("{what}: {error}"))
}

/// Reading from a descriptor of the library's waits for nothing from now on.
fn do_not_block(fd: RawFd) -> io::Result<()> {
    // SAFETY: whoever calls has the descriptor open, and keeps it open during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// A text of the library's, which is there for ever.
///
/// # Safety
/// It must be null, or a text with a 0 at its end that is never freed.
unsafe fn text(text: *const libc::c_char) -> &'static str {
    if text.is_null() {
        return "";
    }
    // SAFETY: as whoever calls promises.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("")
}

/// The process that uses devices; 0 when none does.
static USER: AtomicU32 = AtomicU32::new(0);

/// Notes that this process uses devices. An error in a child of one that did: what the library keeps is its parent's.
fn note_user() -> io::Result<()> {
    let own = std::process::id();
    match USER.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(user) if user != own => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "this process was forked from one that uses RDMA devices"))
        }
        _ => Ok(()),
    }
}

/// True in a forked child, which must leave alone what its parent has made.
pub(super) fn is_forked() -> bool {
    USER.load(Ordering::Relaxed) != std::process::id()
}

/// Ends of what the system holds for the library must not fail: memory would be freed that a device may still touch.
fn must(what: &str, returned: libc::c_int) {
    // The device has gone, and with it all that the kernel had of it.
    if returned == libc::EIO || returned < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EIO) {
        return tracing::warn!(target: "calomel::verbs", what, "the device has gone");
    }
    if let Err(error) = verbs(what, returned) {
        tracing::error!(target: "calomel::verbs", %error, what, "a device does not let go of memory; the process ends");
        eprintln!("calomel: {what}: {error}: a device does not let go of memory");
        std::process::abort();
    }
}

/// A completion's status, as the library's users know it, with its number.
pub(super) fn status_text(status: u32) -> String {
    // SAFETY: the function takes any number.
    let name = unsafe { rdma_sys::ibv_wc_status_str(status) };
    // SAFETY: it returns one of its constants.
    format!("{} (status {status})", unsafe { text(name) })
}

/// What a process may lock in memory, in bytes; `None` where that is not limited.
pub(super) fn locked_memory_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}
