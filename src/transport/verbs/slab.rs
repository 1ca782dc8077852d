//! The transport's own registered buffers.

#![allow(unsafe_code)]

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::sys::{AccessFlags, Mr, Pd, Sge};

const PAGE: usize = 4096;

/// A registered buffer, zeroed at first.
pub(super) struct Slab {
    /// `None` only while it is being dropped.
    memory: Option<Mr>,
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Slab {}
// SAFETY: a shared slab gives shared references only, to memory that is not written meanwhile: see `read`.
unsafe impl Sync for Slab {}

impl Slab {
    pub(super) fn new(pd: &Arc<Pd>, len: usize, access: AccessFlags) -> io::Result<Slab> {
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(io::Error::other)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut slab = Slab { memory: None, start, layout };
        // SAFETY: the memory is the slab's own, which drops the registration before it frees it. No reference assumes its
        // content where a device may write: see `read`.
        slab.memory = Some(unsafe { Mr::register(pd, start.as_ptr(), len, access) }?);
        Ok(slab)
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.layout.size()), "{len} bytes at {at} of a slab");
    }

    pub(super) fn address(&self, at: usize) -> u64 {
        self.start.as_ptr().addr() as u64 + at as u64
    }

    /// The key by which the peer accesses it.
    pub(super) fn remote_key(&self) -> u32 {
        self.memory.as_ref().map_or(0, |memory| memory.remote_key)
    }

    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        self.check(at, len);
        Sge::new(self.address(at), len as u32, self.memory.as_ref().map_or(0, |memory| memory.local_key))
    }

    /// Its content.
    ///
    /// # Safety
    /// As long as the reference lives no device may write there: all requests that do have completed.
    pub(super) unsafe fn read(&self, at: usize, len: usize) -> &[u8] {
        self.check(at, len);
        // SAFETY: it lies inside.
        let start = unsafe { self.start.add(at) };
        // SAFETY: the memory is the slab's own, and no device writes it, as the caller promises, nor this process, since
        // writing takes a unique reference.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
    }

    /// Its content, to be written.
    ///
    /// # Safety
    /// As `read`; and a device that reads there meanwhile may send anything.
    pub(super) unsafe fn write(&mut self, at: usize, len: usize) -> &mut [u8] {
        self.check(at, len);
        // SAFETY: it lies inside.
        let start = unsafe { self.start.add(at) };
        // SAFETY: the memory is the slab's own, of which this is the only reference, and no device writes it.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // Deregistered first.
        self.memory = None;
        // SAFETY: it was allocated with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}
