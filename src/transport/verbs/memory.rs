//! Registered memory: the transport's own buffers, and regions that users expose.

#![allow(unsafe_code)]

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::Device;
use super::sys::{AccessFlags, Mr, Mw, Pd, Qp, Sge};
use super::wire::RemoteSegment;
use crate::memory::{DeviceRegistration, IoVec, Region};

const PAGE: usize = 4096;

/// A registered buffer of the transport's own, zeroed at first.
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
        // SAFETY: the memory is the slab's own, and no device writes it, as the caller promises, nor this process, since writing
        // takes a unique reference.
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

/// A user's region, as registered with one device.
pub(super) struct Registered {
    domain: u64,
    access: AccessFlags,
    /// The region's segments that are not empty.
    segments: Vec<RegisteredSegment>,
    /// Dropping these deregisters the memory.
    memory: Mutex<Vec<Mr>>,
}

struct RegisteredSegment {
    /// Offset in the region.
    start: usize,
    remote: RemoteSegment,
    local_key: u32,
}

impl DeviceRegistration for Registered {
    fn end(&self) {
        self.memory.lock().clear();
    }
}

impl Registered {
    /// A registration of the region with the device, with at least the wanted access: an existing one, or a new one. `None` when
    /// the region's gate is closed.
    pub(super) fn of(region: &Region, device: &Device, access: AccessFlags) -> Option<io::Result<Arc<Registered>>> {
        let suits = |found: &Registered| {
            let has = |wanted: bool, given: bool| given || !wanted;
            found.domain == device.domain
                && has(access.local_write, found.access.local_write)
                && has(access.remote_read, found.access.remote_read)
                && has(access.remote_write, found.access.remote_write)
                && has(access.windows, found.access.windows)
        };
        match region.registration(suits) {
            Some(found) => Some(Ok(found)),
            None => region.register(|pieces| Registered::new(pieces, device, access)),
        }
    }

    fn new(pieces: &[IoVec], device: &Device, access: AccessFlags) -> io::Result<Registered> {
        let (mut segments, mut known) = (Vec::new(), Vec::new());
        let mut start = 0;
        for piece in pieces.iter() {
            if piece.iov_len > 0 {
                // SAFETY: the region closes its gate, and then ends this registration, before its memory goes anywhere. Where
                // writing is allowed there is no reference to it until then.
                let memory = unsafe { Mr::register(&device.pd, piece.iov_base.cast(), piece.iov_len, access) }?;
                let remote =
                    RemoteSegment { address: piece.iov_base.addr() as u64, len: piece.iov_len as u64, key: memory.remote_key };
                segments.push(RegisteredSegment { start, remote, local_key: memory.local_key });
                known.push(memory);
            }
            start += piece.iov_len;
        }
        Ok(Registered { domain: device.domain, access, segments, memory: Mutex::new(known) })
    }

    /// Addresses and keys for peers.
    pub(super) fn remote_segments(&self) -> Vec<RemoteSegment> {
        self.segments.iter().map(|segment| segment.remote).collect()
    }

    /// Appends entries for at most `len` bytes of the region from `offset` on, at most `max` of them. Returns how many bytes they
    /// cover.
    pub(super) fn sges(&self, offset: usize, len: usize, max: usize, out: &mut Vec<Sge>) -> usize {
        let mut index = self.segments.partition_point(|s| s.start + s.remote.len as usize <= offset);
        let (mut at, mut left) = (offset, len);
        let room = out.len() + max;
        while left > 0 && out.len() < room {
            let Some(segment) = self.segments.get(index) else { break };
            let skip = at - segment.start;
            let take = left.min(segment.remote.len as usize - skip);
            out.push(Sge::new(segment.remote.address + skip as u64, take as u32, segment.local_key));
            at += take;
            left -= take;
            index += 1;
        }
        len - left
    }
}

/// A user's region as one peer accesses it, and no other: through memory windows that are bound to that link's RMA queue pair.
pub(super) struct Windowed {
    /// In the order in which they are dropped.
    open: Mutex<Vec<(Mw, Mr)>>,
    remote_segments: Vec<RemoteSegment>,
}

impl DeviceRegistration for Windowed {
    fn end(&self) {
        self.open.lock().clear();
    }
}

impl Windowed {
    /// Windows that are not bound yet, one for each segment. `None` when the region's gate is closed.
    pub(super) fn of(region: &Region, device: &Device, access: AccessFlags) -> Option<io::Result<Arc<Windowed>>> {
        region.register(|pieces| {
            let (mut open, mut remote_segments) = (Vec::new(), Vec::new());
            let own = AccessFlags { local_write: access.remote_write, windows: true, ..AccessFlags::default() };
            for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
                let window = Mw::new(&device.pd)?;
                // SAFETY: as for `Registered`.
                let memory = unsafe { Mr::register(&device.pd, piece.iov_base.cast(), piece.iov_len, own) }?;
                remote_segments.push(RemoteSegment {
                    address: piece.iov_base.addr() as u64,
                    len: piece.iov_len as u64,
                    key: window.key,
                });
                open.push((window, memory));
            }
            Ok(Windowed { open: Mutex::new(open), remote_segments })
        })
    }

    pub(super) fn remote_segments(&self) -> &[RemoteSegment] {
        &self.remote_segments
    }

    /// Binds the windows: when that has completed, the peer of the queue pair can use their keys. False when the region is
    /// closed.
    pub(super) fn open(&self, qp: &Qp, id: u64, access: AccessFlags) -> io::Result<bool> {
        let open = self.open.lock();
        let windows: Vec<_> = open
            .iter()
            .zip(&self.remote_segments)
            .map(|((window, memory), remote)| (window, memory, remote.address, remote.len))
            .collect();
        // SAFETY: windows are dropped before their memory, which the region keeps where it is until then.
        unsafe { qp.open(id, &windows, access) }?;
        Ok(!windows.is_empty())
    }
}
