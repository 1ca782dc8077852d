//! Memory regions (MR), which are registered with a device, and memory windows (MW), which limit a peer's view of them.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as raw;
use rdma_sys::ibv_access_flags as flags;

use super::pd::Pd;
use super::{failed, is_forked, must};

/// A scatter/gather entry: a segment of registered memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in super::super) struct Sge(pub(super) raw::ibv_sge);

impl Sge {
    pub fn new(address: u64, len: u32, key: u32) -> Sge {
        Sge(raw::ibv_sge { addr: address, length: len, lkey: key })
    }
}

/// What may be done with registered memory. Local reads, for sending, are always allowed. Relaxed ordering is never requested:
/// data must be visible when its completion is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct AccessFlags {
    pub local_write: bool,
    pub remote_read: bool,
    pub remote_write: bool,
    /// Memory windows may be bound to it.
    pub windows: bool,
}

/// Registered memory. Dropping it deregisters the memory.
pub(in super::super) struct Mr {
    raw: NonNull<raw::ibv_mr>,
    pub local_key: u32,
    pub remote_key: u32,
    _pd: Arc<Pd>,
}

impl Mr {
    pub(super) fn as_ptr(&self) -> *mut raw::ibv_mr {
        self.raw.as_ptr()
    }
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Fails with `ErrorKind::Unsupported` where the kernel lets no device use such memory.
    ///
    /// # Safety
    /// Until the value is dropped the memory must stay where it is. The device, and where that is allowed any peer, may read
    /// and write it at any moment, as `access` permits: no reference may assume that writable memory does not change.
    pub unsafe fn register(pd: &Arc<Pd>, address: *mut u8, len: usize, access: AccessFlags) -> io::Result<Mr> {
        let mut wanted = flags(0);
        // Remote writes imply local ones.
        for (is_wanted, flag) in [
            (access.local_write || access.remote_write, flags::IBV_ACCESS_LOCAL_WRITE),
            (access.remote_read, flags::IBV_ACCESS_REMOTE_READ),
            (access.remote_write, flags::IBV_ACCESS_REMOTE_WRITE),
            (access.windows, flags::IBV_ACCESS_MW_BIND),
        ] {
            wanted |= if is_wanted { flag } else { flags(0) };
        }
        // SAFETY: the domain is there, and the caller promises the rest.
        let made = unsafe { raw::ibv_reg_mr(pd.as_ptr(), address.cast(), len, wanted.0.cast_signed()) };
        let raw = NonNull::new(made).ok_or_else(|| refused(len, &io::Error::last_os_error()))?;
        // SAFETY: it was made above.
        let local_key = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let remote_key = unsafe { (*raw.as_ptr()).rkey };
        Ok(Mr { raw, local_key, remote_key, _pd: pd.clone() })
    }
}

/// Why memory can't be registered. The usual cause is the limit of locked memory.
fn refused(len: usize, error: &io::Error) -> io::Error {
    match (error.raw_os_error(), super::locked_memory_limit()) {
        (Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN), Some(limit)) => io::Error::new(
            error.kind(),
            format!(
                "{len} bytes can't be registered with the device ({error}): this process may lock {limit} bytes in memory, \
                 what is registered already included (ulimit -l {}); it needs at least {} KiB, or no limit: see `memlock` in \
                 /etc/security/limits.conf, and LimitMEMLOCK= of systemd",
                limit / 1024,
                (limit.max(len as u64) + len as u64).div_ceil(1024),
            ),
        ),
        // The memory is there. The kernel keeps pages of files for a device only in some cases, which differ by its version.
        (Some(libc::EFAULT), _) => io::Error::new(
            io::ErrorKind::Unsupported,
            format!("the kernel lets no device use these {len} bytes, as of a file that is mapped (ibv_reg_mr: {error})"),
        ),
        _ => failed(&format!("{len} bytes can't be registered with the device (ibv_reg_mr)"), error),
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: it came from `ibv_reg_mr`, and is not used any more.
        must("ibv_dereg_mr", unsafe { raw::ibv_dereg_mr(self.raw.as_ptr()) });
    }
}

/// A view of registered memory that is valid on one queue pair only. Dropping it revokes the peer's access through it.
pub(in super::super) struct Mw {
    raw: NonNull<raw::ibv_mw>,
    /// The key that it has once it is bound.
    pub key: u32,
    _pd: Arc<Pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    pub fn new(pd: &Arc<Pd>) -> io::Result<Mw> {
        // SAFETY: the domain is there.
        let made = unsafe { raw::ibv_alloc_mw(pd.as_ptr(), raw::ibv_mw_type::IBV_MW_TYPE_2) };
        let raw = made.and_then(NonNull::new).ok_or_else(|| failed("ibv_alloc_mw", &io::Error::last_os_error()))?;
        // SAFETY: it was made above.
        let first = unsafe { (*raw.as_ptr()).rkey };
        // SAFETY: the function takes any number.
        let key = unsafe { raw::ibv_inc_rkey(first) };
        Ok(Mw { raw, key, _pd: pd.clone() })
    }

    pub(super) fn as_ptr(&self) -> *mut raw::ibv_mw {
        self.raw.as_ptr()
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: it came from `ibv_alloc_mw`, and is not used any more.
        must("ibv_dealloc_mw", unsafe { raw::ibv_dealloc_mw(self.raw.as_ptr()) });
    }
}
