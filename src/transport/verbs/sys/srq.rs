//! Shared receive queues.

use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys as raw;
use smallvec::SmallVec;

use super::mr::Sge;
use super::pd::Pd;
use super::{failed, is_forked, must, verbs};

/// A receive buffer.
pub(in super::super) struct ReceiveRequest {
    pub id: u64,
    pub buffer: Sge,
}

/// Receive buffers for several queue pairs.
pub(in super::super) struct Srq {
    pub(super) raw: NonNull<raw::ibv_srq>,
    _pd: Arc<Pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    pub fn new(pd: &Arc<Pd>, size: u32) -> io::Result<Arc<Srq>> {
        let mut wanted = raw::ibv_srq_init_attr {
            srq_context: null_mut(),
            attr: raw::ibv_srq_attr { max_wr: size, max_sge: 1, srq_limit: 0 },
        };
        // SAFETY: the domain is there.
        let made = unsafe { raw::ibv_create_srq(pd.as_ptr(), &raw mut wanted) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_create_srq", &io::Error::last_os_error()))?;
        Ok(Arc::new(Srq { raw, _pd: pd.clone() }))
    }

    /// Posts receive buffers.
    ///
    /// # Safety
    /// Until the completion of a buffer has been polled, or this queue is dropped, its memory must be registered for local
    /// writes, and must not be accessed.
    pub unsafe fn post(&self, buffers: &[ReceiveRequest]) -> io::Result<()> {
        let mut sges: SmallVec<[raw::ibv_sge; 32]> = buffers.iter().map(|buffer| buffer.buffer.0).collect();
        let mut requests: SmallVec<[raw::ibv_recv_wr; 32]> = SmallVec::new();
        for (buffer, sge) in buffers.iter().zip(&mut sges) {
            requests.push(raw::ibv_recv_wr { wr_id: buffer.id, next: null_mut(), sg_list: sge, num_sge: 1 });
        }
        for at in 1..requests.len() {
            requests[at - 1].next = &raw mut requests[at];
        }
        if requests.is_empty() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: the queue is there; the list and what it points to are on this stack; the caller promises the rest about the
        // memory.
        verbs("ibv_post_srq_recv", unsafe { raw::ibv_post_srq_recv(self.raw.as_ptr(), requests.as_mut_ptr(), &raw mut bad) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: each queue pair that uses it holds an `Arc` of it, so there is none.
        must("ibv_destroy_srq", unsafe { raw::ibv_destroy_srq(self.raw.as_ptr()) });
    }
}
