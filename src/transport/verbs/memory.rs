//! Memory that a device knows: the transport's own, and what users expose.

#![allow(unsafe_code)]

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::Device;
use super::sys::{Access, Memory, Pd, Piece, Qp, Window};
use super::wire::Stretch;
use crate::memory::{IoVec, Region, Registration};

const PAGE: usize = 4096;

/// Registered memory of the transport's own, zeroed at first.
pub(super) struct Slab {
    /// `None` only while it is being dropped.
    memory: Option<Memory>,
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Slab {}
// SAFETY: a shared slab gives shared references only, to what nobody writes: see `read`.
unsafe impl Sync for Slab {}

impl Slab {
    pub(super) fn new(pd: &Arc<Pd>, len: usize, access: Access) -> io::Result<Slab> {
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(io::Error::other)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut slab = Slab { memory: None, start, layout };
        // SAFETY: the memory is the slab's own, which drops the registration before it frees it. Nobody counts on its
        // content where a device may write: see `read`.
        slab.memory = Some(unsafe { Memory::register(pd, start.as_ptr(), len, access) }?);
        Ok(slab)
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.layout.size()), "{len} bytes at {at} of a slab");
    }

    pub(super) fn address(&self, at: usize) -> u64 {
        self.start.as_ptr().addr() as u64 + at as u64
    }

    /// As the other side reaches it.
    pub(super) fn remote_key(&self) -> u32 {
        self.memory.as_ref().map_or(0, |memory| memory.remote_key)
    }

    pub(super) fn piece(&self, at: usize, len: usize) -> Piece {
        self.check(at, len);
        Piece::new(self.address(at), len as u32, self.memory.as_ref().map_or(0, |memory| memory.local_key))
    }

    /// What is in it.
    ///
    /// # Safety
    /// As long as the reference lives no device may write there: whatever was asked of one has ended.
    pub(super) unsafe fn read(&self, at: usize, len: usize) -> &[u8] {
        self.check(at, len);
        // SAFETY: it lies inside.
        let start = unsafe { self.start.add(at) };
        // SAFETY: the memory is the slab's own, and nobody writes it, as whoever calls promises, and since writing takes a
        // unique reference.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
    }

    /// To be filled.
    ///
    /// # Safety
    /// As `read`; and what a device reads there meanwhile may be anything.
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
        // The device forgets it first.
        self.memory = None;
        // SAFETY: it was allocated with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Memory of a region, as one device knows it.
pub(super) struct Registered {
    domain: u64,
    access: Access,
    /// The region's segments that are not empty.
    segments: Vec<Segment>,
    /// What keeps them known.
    memory: Mutex<Vec<Memory>>,
}

struct Segment {
    /// Where it begins in the region.
    start: usize,
    stretch: Stretch,
    local_key: u32,
}

impl Registration for Registered {
    fn end(&self) {
        self.memory.lock().clear();
    }
}

impl Registered {
    /// How the device knows a region, with at least the access that is asked for: made now, if need be. `None` when the
    /// region's gate is closed.
    pub(super) fn of(region: &Region, device: &Device, access: Access) -> Option<io::Result<Arc<Registered>>> {
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

    fn new(pieces: &[IoVec], device: &Device, access: Access) -> io::Result<Registered> {
        let (mut segments, mut known) = (Vec::new(), Vec::new());
        let mut start = 0;
        for piece in pieces.iter() {
            if piece.iov_len > 0 {
                // SAFETY: the region closes its gate, and then ends this registration, before its memory goes anywhere. Where
                // writing is allowed nobody has a reference to it until then.
                let memory = unsafe { Memory::register(&device.pd, piece.iov_base.cast(), piece.iov_len, access) }?;
                let stretch =
                    Stretch { address: piece.iov_base.addr() as u64, len: piece.iov_len as u64, key: memory.remote_key };
                segments.push(Segment { start, stretch, local_key: memory.local_key });
                known.push(memory);
            }
            start += piece.iov_len;
        }
        Ok(Registered { domain: device.domain, access, segments, memory: Mutex::new(known) })
    }

    /// What peers reach it by.
    pub(super) fn stretches(&self) -> Vec<Stretch> {
        self.segments.iter().map(|segment| segment.stretch).collect()
    }

    /// The pieces that make up at most `len` bytes from `offset` of the region on, at most `max` of them; how many bytes.
    pub(super) fn pieces(&self, offset: usize, len: usize, max: usize, out: &mut Vec<Piece>) -> usize {
        let mut index = self.segments.partition_point(|s| s.start + s.stretch.len as usize <= offset);
        let (mut at, mut left) = (offset, len);
        let room = out.len() + max;
        while left > 0 && out.len() < room {
            let Some(segment) = self.segments.get(index) else { break };
            let skip = at - segment.start;
            let take = left.min(segment.stretch.len as usize - skip);
            out.push(Piece::new(segment.stretch.address + skip as u64, take as u32, segment.local_key));
            at += take;
            left -= take;
            index += 1;
        }
        len - left
    }
}

/// Memory of a region as one peer reaches it, and no other: through windows that are good on its lane only.
pub(super) struct Windowed {
    /// In the order in which they are dropped.
    open: Mutex<Vec<(Window, Memory)>>,
    stretches: Vec<Stretch>,
}

impl Registration for Windowed {
    fn end(&self) {
        self.open.lock().clear();
    }
}

impl Windowed {
    /// Windows that are not open yet, one for each segment. `None` when the region's gate is closed.
    pub(super) fn of(region: &Region, device: &Device, access: Access) -> Option<io::Result<Arc<Windowed>>> {
        region.register(|pieces| {
            let (mut open, mut stretches) = (Vec::new(), Vec::new());
            let own = Access { local_write: access.remote_write, windows: true, ..Access::default() };
            for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
                let window = Window::new(&device.pd)?;
                // SAFETY: as for `Registered`.
                let memory = unsafe { Memory::register(&device.pd, piece.iov_base.cast(), piece.iov_len, own) }?;
                stretches.push(Stretch { address: piece.iov_base.addr() as u64, len: piece.iov_len as u64, key: window.key });
                open.push((window, memory));
            }
            Ok(Windowed { open: Mutex::new(open), stretches })
        })
    }

    pub(super) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Has the other side of a queue pair look through them, from when that has ended on. False when the region is closed.
    pub(super) fn open(&self, qp: &Qp, id: u64, access: Access) -> io::Result<bool> {
        let open = self.open.lock();
        let windows: Vec<_> = open
            .iter()
            .zip(&self.stretches)
            .map(|((window, memory), stretch)| (window, memory, stretch.address, stretch.len))
            .collect();
        // SAFETY: windows are dropped before their memory, which the region keeps where it is until then.
        unsafe { qp.open(id, &windows, access) }?;
        Ok(!windows.is_empty())
    }
}
