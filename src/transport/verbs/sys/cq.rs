//! Completion queues, and the channels that announce completions.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as raw;
use rdma_sys::ibv_wc;

use super::context::Context;
use super::{do_not_block, errno, failed, is_forked, verbs};
use crate::deferred_log::defer;

/// Announces that completions have arrived.
pub(in super::super) struct CompletionChannel {
    raw: NonNull<raw::ibv_comp_channel>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    pub fn new(context: Context) -> io::Result<Arc<CompletionChannel>> {
        // SAFETY: the context is open.
        let made = unsafe { raw::ibv_create_comp_channel(context.as_ptr()) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_create_comp_channel", &io::Error::last_os_error()))?;
        let channel = CompletionChannel { raw };
        do_not_block(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub fn fd(&self) -> RawFd {
        // SAFETY: it was made by `new`.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Takes all announcements.
    pub fn drain(&self) {
        loop {
            let mut cq = std::ptr::null_mut();
            let mut context = std::ptr::null_mut();
            // SAFETY: the channel is there, and the pointers are to pointers. It does not block: see `new`.
            if unsafe { raw::ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut context) } != 0 {
                return;
            }
            // SAFETY: the queue can't be destroyed before its event has been acknowledged, which is done once.
            unsafe { raw::ibv_ack_cq_events(cq, 1) };
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: each queue that uses it holds an `Arc` of it, so there is none.
        let freed = errno("ibv_destroy_comp_channel", unsafe { raw::ibv_destroy_comp_channel(self.raw.as_ptr()) });
        if let Err(error) = freed {
            defer(move || tracing::error!(target: "calomel::verbs", %error, "a completion channel can't be freed"));
        }
    }
}

/// A completion queue.
pub(in super::super) struct Cq {
    raw: NonNull<raw::ibv_cq>,
    _channel: Arc<CompletionChannel>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

/// A work request has completed.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct WorkCompletion {
    pub id: u64,
    /// 0 for success.
    pub status: u32,
    pub queue_pair: u32,
    /// Bytes received.
    pub len: u32,
}

impl WorkCompletion {
    /// The request was flushed because an earlier one had failed.
    pub fn is_flushed(&self) -> bool {
        self.status == raw::ibv_wc_status::IBV_WC_WR_FLUSH_ERR
    }
}

/// Completions polled at a time.
const BATCH: usize = 32;

impl Cq {
    pub fn new(context: Context, channel: &Arc<CompletionChannel>, size: u32) -> io::Result<Arc<Cq>> {
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        let nothing = std::ptr::null_mut();
        // SAFETY: the context is open, and the channel is there as long as the queue.
        let made = unsafe { raw::ibv_create_cq(context.as_ptr(), size, nothing, channel.raw.as_ptr(), 0) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_create_cq", &io::Error::last_os_error()))?;
        Ok(Arc::new(Cq { raw, _channel: channel.clone() }))
    }

    pub(super) fn as_ptr(&self) -> *mut raw::ibv_cq {
        self.raw.as_ptr()
    }

    /// Requests an announcement of the next completion.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue is there.
        verbs("ibv_req_notify_cq", unsafe { raw::ibv_req_notify_cq(self.as_ptr(), 0) })
    }

    /// Polls completions; false when there were none.
    pub fn poll(&self, found: &mut Vec<WorkCompletion>) -> io::Result<bool> {
        let mut room = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        // SAFETY: the queue is there, and there is room for so many.
        let count = unsafe { raw::ibv_poll_cq(self.as_ptr(), BATCH as i32, room.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("a completion queue is broken (ibv_poll_cq)"))?;
        found.extend(room[..count].iter().map(|entry| {
            // SAFETY: the call has written `count` entries.
            let entry = unsafe { entry.assume_init_ref() };
            WorkCompletion { id: entry.wr_id, status: entry.status, queue_pair: entry.qp_num, len: entry.byte_len }
        }));
        Ok(count > 0)
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: each queue pair that uses it holds an `Arc` of it, so there is none.
        let freed = verbs("ibv_destroy_cq", unsafe { raw::ibv_destroy_cq(self.as_ptr()) });
        if let Err(error) = freed {
            defer(move || tracing::error!(target: "calomel::verbs", %error, "a completion queue can't be freed"));
        }
    }
}
