//! A fabric: what the domains of one provider belong to.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::check;
use super::info::Info;
use super::library::library;
use super::raw::{Fid, FidFabric};
use crate::deferred_log::defer;
use crate::fork::CreatorProcess;

pub(super) struct Fabric {
    raw: NonNull<FidFabric>,
    process: CreatorProcess,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for Fabric {}
// SAFETY: as above.
unsafe impl Sync for Fabric {}

impl Fabric {
    pub fn open(info: &Info) -> io::Result<Arc<Fabric>> {
        let library = library().map_err(|reason| io::Error::new(io::ErrorKind::Unsupported, reason))?;
        // SAFETY: the library sets the attributes of each entry.
        let attributes = unsafe { (*info.as_ptr()).fabric_attr };
        let mut raw = ptr::null_mut();
        // SAFETY: the attributes are those of an entry that the library has made.
        let returned = unsafe { (library.fabric)(attributes.cast::<c_void>(), &raw mut raw, ptr::null_mut()) };
        check("fi_fabric", returned)?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        Ok(Arc::new(Fabric { raw, process: CreatorProcess::this() }))
    }

    pub fn as_ptr(&self) -> *mut FidFabric {
        self.raw.as_ptr()
    }

    /// True when a thread may wait for the descriptor of this object: it becomes readable at the next event.
    ///
    /// # Safety
    /// It must be an object of this fabric that has a descriptor.
    pub unsafe fn try_wait(&self, fid: *mut Fid) -> bool {
        let mut fids = [fid];
        // SAFETY: the fabric is open, and its table has this function in all versions.
        let try_wait = unsafe { FidFabric::ops(self.as_ptr()) }.trywait;
        // SAFETY: as the caller promises; there is one object.
        unsafe { try_wait(self.as_ptr(), fids.as_mut_ptr(), 1) == 0 }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if !self.process.is_forked_child() {
            // SAFETY: it is open, and what was made from it is closed, since that holds an `Arc` of it.
            note(unsafe { close("fi_close of a fabric", self.raw.as_ptr().cast()) });
        }
    }
}

/// Closes an object.
///
/// # Safety
/// It must be open, and not be used any more; objects that were made from it must be closed.
pub(super) unsafe fn close(what: &str, fid: *mut Fid) -> io::Result<()> {
    // SAFETY: each object begins with a `fid`, which has a table of functions.
    let close = unsafe { Fid::ops(fid) }.close;
    // SAFETY: as the caller promises.
    check(what, unsafe { close(fid) })
}

/// A failure leaves the object open, which does no harm: no memory of users belongs to it.
pub(super) fn note(closed: io::Result<()>) {
    if let Err(error) = closed {
        defer(move || tracing::error!(target: "calomel::ofi", %error, "an object of libfabric can't be closed"));
    }
}
