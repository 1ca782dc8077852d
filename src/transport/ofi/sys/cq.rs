//! A completion queue.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::domain::Domain;
use super::fabric::{close, note};
use super::operation::{Completion, CompletionError, Operations};
use super::raw::{
    CqAttr, CqEntry, CqErrEntry, FI_CQ_FORMAT_TAGGED, FI_EAVAIL, FI_GETWAIT, FI_REMOTE_CQ_DATA, FI_WAIT_FD, FI_WAIT_NONE, Fid,
    FidCq, FidDomain,
};
use super::{check, failed};
use crate::fork::CreatorProcess;

/// Completions that it holds without allocating; providers keep more in a list.
const SIZE: usize = 4096;
/// Completions polled at a time.
const BATCH: usize = 32;

pub(in super::super) struct Cq {
    raw: NonNull<FidCq>,
    /// Becomes readable at the next event, once `try_wait` has returned true. `None`: the provider has none.
    pub fd: Option<RawFd>,
    /// Freed after the queue is closed.
    pub(super) operations: Operations,
    domain: Arc<Domain>,
    process: CreatorProcess,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// With a descriptor, if it is wanted and the provider has one.
    pub fn open(domain: &Arc<Domain>, descriptor: bool) -> io::Result<Arc<Cq>> {
        let with = if descriptor { Cq::raw(domain, FI_WAIT_FD).ok() } else { None };
        let (raw, fd) = match with {
            Some(raw) => (raw, Some(Cq::descriptor(raw)?)),
            None => (Cq::raw(domain, FI_WAIT_NONE)?, None),
        };
        let operations = Operations::default();
        Ok(Arc::new(Cq { raw, fd, operations, domain: domain.clone(), process: CreatorProcess::this() }))
    }

    fn raw(domain: &Arc<Domain>, wait_obj: i32) -> io::Result<NonNull<FidCq>> {
        let mut attributes = CqAttr {
            size: SIZE,
            flags: 0,
            format: FI_CQ_FORMAT_TAGGED,
            wait_obj,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: ptr::null_mut(),
        };
        // SAFETY: the domain is open, and its table has this function in all versions.
        let open = unsafe { FidDomain::ops(domain.as_ptr()) }.cq_open;
        let mut raw = ptr::null_mut();
        // SAFETY: the domain is open, and the attributes are complete.
        let returned = unsafe { open(domain.as_ptr(), &raw mut attributes, &raw mut raw, ptr::null_mut()) };
        check("fi_cq_open", returned)?;
        Ok(NonNull::new(raw).ok_or(io::ErrorKind::Other)?)
    }

    fn descriptor(cq: NonNull<FidCq>) -> io::Result<RawFd> {
        let fid = cq.as_ptr().cast::<Fid>();
        // SAFETY: the queue was opened, and its table has this function in all versions.
        let control = unsafe { Fid::ops(fid) }.control;
        let mut fd: RawFd = -1;
        // SAFETY: this command takes a pointer to a descriptor, for a queue that was opened with FI_WAIT_FD.
        check("fi_control of a completion queue", unsafe { control(fid, FI_GETWAIT, (&raw mut fd).cast()) })?;
        Ok(fd)
    }

    pub(super) fn as_ptr(&self) -> *mut FidCq {
        self.raw.as_ptr()
    }

    /// True when a thread may wait for the descriptor.
    pub fn try_wait(&self) -> bool {
        // SAFETY: it is a queue of a domain of this fabric, and has a descriptor, or none, and then no thread waits for it.
        self.fd.is_some() && unsafe { self.domain.fabric.try_wait(self.as_ptr().cast()) }
    }

    /// Polls completions, up to a number that bounds the time; false when there are no more.
    pub fn poll(&self, found: &mut VecDeque<Completion>) -> io::Result<bool> {
        let mut room = [const { MaybeUninit::<CqEntry>::uninit() }; BATCH];
        // SAFETY: the queue is open, and its table has this function in all versions.
        let read = unsafe { FidCq::ops(self.as_ptr()) }.read;
        // SAFETY: there is room for so many entries of the format that the queue was opened with.
        let count = unsafe { read(self.as_ptr(), room.as_mut_ptr().cast(), BATCH) };
        if count == -(libc::EAGAIN as isize) || count == 0 {
            return Ok(false);
        }
        if count == -(FI_EAVAIL as isize) {
            return self.poll_error(found);
        }
        let count = usize::try_from(count).map_err(|_| failed("fi_cq_read", -count as i32))?;
        for entry in &room[..count] {
            // SAFETY: the call has written `count` entries.
            let entry = unsafe { entry.assume_init_ref() };
            let data = if entry.flags & FI_REMOTE_CQ_DATA != 0 { entry.data } else { 0 };
            // SAFETY: each operation is posted with a context of its own, and completes once.
            found.extend(unsafe { self.operations.complete(entry.op_context, Ok(entry.len), data) });
        }
        // Asking an empty queue costs a system call.
        Ok(count == BATCH)
    }

    fn poll_error(&self, found: &mut VecDeque<Completion>) -> io::Result<bool> {
        let mut entry = CqErrEntry {
            op_context: ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            // The provider's own description, which is not wanted.
            err_data: ptr::null_mut(),
            err_data_size: 0,
            src_addr: 0,
        };
        // SAFETY: the queue is open, and its table has this function in all versions.
        let read = unsafe { FidCq::ops(self.as_ptr()) }.readerr;
        // SAFETY: there is room for one entry, and none for a description.
        let count = unsafe { read(self.as_ptr(), &raw mut entry, 0) };
        if count == -(libc::EAGAIN as isize) {
            return Ok(false);
        }
        if count < 0 {
            return Err(failed("fi_cq_readerr", -count as i32));
        }
        // SAFETY: as for `poll`.
        found.extend(unsafe { self.operations.complete(entry.op_context, Err(CompletionError::new(entry.err)), 0) });
        Ok(true)
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if !self.process.is_forked_child() {
            // SAFETY: it is open, and the endpoints that it is bound to are closed, since they hold an `Arc` of it.
            note(unsafe { close("fi_close of a completion queue", self.raw.as_ptr().cast()) });
        }
    }
}
