//! A domain: a network interface, or device, of a fabric.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::check;
use super::fabric::{Fabric, close, note};
use super::info::Info;
use super::raw::{FidDomain, FidFabric};
use crate::fork::CreatorProcess;

pub(in super::super) struct Domain {
    raw: NonNull<FidDomain>,
    pub info: Info,
    pub(super) fabric: Arc<Fabric>,
    process: CreatorProcess,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub fn open(info: Info) -> io::Result<Arc<Domain>> {
        let fabric = Fabric::open(&info)?;
        // SAFETY: the fabric is open, and its table has this function in all versions.
        let open = unsafe { FidFabric::ops(fabric.as_ptr()) }.domain;
        let mut raw = ptr::null_mut();
        // SAFETY: the fabric is that of the entry.
        let returned = unsafe { open(fabric.as_ptr(), info.as_ptr(), &raw mut raw, ptr::null_mut()) };
        check("fi_domain", returned)?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        Ok(Arc::new(Domain { raw, info, fabric, process: CreatorProcess::this() }))
    }

    pub(super) fn as_ptr(&self) -> *mut FidDomain {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !self.process.is_forked_child() {
            // SAFETY: it is open, and what was made from it is closed, since that holds an `Arc` of it.
            note(unsafe { close("fi_close of a domain", self.raw.as_ptr().cast()) });
        }
    }
}
