//! Protection domains.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as raw;

use super::context::Context;
use super::{failed, is_forked, verbs};
use crate::deferred_log::defer;

/// A protection domain: memory and queue pairs that may be used together.
pub(in super::super) struct Pd {
    raw: NonNull<raw::ibv_pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub fn new(context: Context) -> io::Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let made = unsafe { raw::ibv_alloc_pd(context.as_ptr()) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_alloc_pd", &io::Error::last_os_error()))?;
        Ok(Arc::new(Pd { raw }))
    }

    pub(super) fn as_ptr(&self) -> *mut raw::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: each user of it holds an `Arc` of it, so there is none.
        let freed = verbs("ibv_dealloc_pd", unsafe { raw::ibv_dealloc_pd(self.as_ptr()) });
        if let Err(error) = freed {
            defer(move || tracing::error!(target: "calomel::verbs", %error, "a protection domain can't be freed"));
        }
    }
}
