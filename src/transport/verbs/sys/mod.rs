//! Safe values for the objects of verbs and of the connection manager, freed when they are dropped: the only use of `rdma-sys`.
//! Nothing here blocks, but for the system calls that create and destroy objects. README.md explains the order of destruction.

#![allow(unsafe_code)]

mod cm;
mod context;
mod cq;
mod mr;
mod path;
mod pd;
mod qp;
mod srq;

use std::ffi::CStr;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::deferred_log::defer;

pub(super) use cm::{CmEvent, CmEventKind, CmId, EventChannel, ReadDepth};
pub(super) use context::{AsyncEvent, Context, DeviceLimits};
pub(super) use cq::{CompletionChannel, Cq, WorkCompletion};
pub(super) use mr::{AccessFlags, Mr, Mw, Sge};
pub(super) use path::ConnectionPath;
pub(super) use pd::Pd;
pub(super) use qp::{Opcode, Qp, QpCapacity, WorkRequest};
pub(super) use srq::{ReceiveRequest, Srq};

/// Return value of a verbs function: 0, or an error number.
fn verbs(what: &str, returned: libc::c_int) -> io::Result<()> {
    match returned {
        0 => Ok(()),
        // Some set `errno` instead.
        error if error < 0 => Err(failed(what, &io::Error::last_os_error())),
        error => Err(failed(what, &io::Error::from_raw_os_error(error))),
    }
}

/// Return value of a function that sets `errno`.
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

/// Makes one of the library's descriptors non-blocking.
fn do_not_block(fd: RawFd) -> io::Result<()> {
    // SAFETY: the caller keeps the descriptor open during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// A static text of the library's.
///
/// # Safety
/// It must be null, or a text with a 0 at its end that is never freed.
unsafe fn text(text: *const libc::c_char) -> &'static str {
    if text.is_null() {
        return "";
    }
    // SAFETY: the caller promises it.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("")
}

/// The process that uses devices; 0 when there is none.
static USER: AtomicU32 = AtomicU32::new(0);

/// Records that this process uses devices. An error in a forked child of one that did: the library's state is its parent's.
fn note_user() -> io::Result<()> {
    let own = std::process::id();
    match USER.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(user) if user != own => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "this process was forked from one that uses RDMA devices"))
        }
        _ => Ok(()),
    }
}

/// True in a forked child, which must not touch its parent's objects.
pub(super) fn is_forked() -> bool {
    USER.load(Ordering::Relaxed) != std::process::id()
}

/// Deregistering and destroying must not fail: memory would be freed that a device may still access.
fn must(what: &str, returned: libc::c_int) {
    // The device was removed, and with it everything that the kernel had of it.
    if returned == libc::EIO || returned < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EIO) {
        let what = what.to_owned();
        return defer(move || tracing::warn!(target: "calomel::verbs", what, "the device was removed"));
    }
    if let Err(error) = verbs(what, returned) {
        // Not logged: a subscriber is user code, and this may run under a lock.
        eprintln!("calomel: {what}: {error}: a device does not release memory, so the process ends");
        std::process::abort();
    }
}

/// A completion's status in the library's words, and its number.
pub(super) fn status_text(status: u32) -> String {
    // SAFETY: the function takes any number.
    let name = unsafe { rdma_sys::ibv_wc_status_str(status) };
    // SAFETY: it returns one of its constants.
    format!("{} (status {status})", unsafe { text(name) })
}

/// How much memory a process may lock, in bytes; `None` where that is not limited.
pub(super) fn locked_memory_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}
