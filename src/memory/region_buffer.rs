//! Buffers while they are exposed: no reference to them exists, and their bytes do not move.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::buffer::{Buffer, BufferView, Element, WritableBuffer};
use super::region::Region;
use super::shared::Block;

/// Address and length of each segment.
type SegmentParts = SmallVec<[(*mut u8, usize); 4]>;

/// A buffer and the region over its bytes. The buffer lies in a box of its own to which no reference exists, so moving or
/// leaking a `RegionBuffer` neither moves a byte nor invalidates the region.
pub(crate) struct RegionBuffer<B> {
    region: Arc<Region>,
    buffer: NonNull<B>,
    _owns: PhantomData<B>,
}

// SAFETY: the pointer is to a box that this value owns.
unsafe impl<B: Send> Send for RegionBuffer<B> {}
// SAFETY: a shared `RegionBuffer` gives shared references to the buffer, and only where it is not written.
unsafe impl<B: Sync> Sync for RegionBuffer<B> {}

/// The blocks that peers can map, of those that the buffer consists of.
fn blocks(buffer: &impl Buffer) -> Vec<Weak<Block>> {
    let mut blocks = Vec::new();
    buffer.engine_memory(&mut |memory| blocks.push(Arc::downgrade(memory.0)));
    blocks
}

impl<B: Buffer> RegionBuffer<B> {
    /// Holds a buffer that will only be read, by peers and here.
    pub(crate) fn read_only(buffer: B) -> RegionBuffer<B> {
        let buffer = NonNull::from(Box::leak(Box::new(buffer)));
        let mut parts = SegmentParts::new();
        // SAFETY: the box was made above, and no other reference to it exists.
        let shared = unsafe { buffer.as_ref() };
        shared.read_segments(&mut |bytes: &[u8]| parts.push((bytes.as_ptr().cast_mut(), bytes.len())));
        // SAFETY: the bytes belong to the boxed buffer, whose segments stay put until it is dropped or taken, and both
        // close the region first. They are not written: only shared references to the buffer are given out, and a read-only
        // exposure is never asked for write access.
        let region = unsafe { Region::with_blocks(parts, blocks(shared)) };
        RegionBuffer { region, buffer, _owns: PhantomData }
    }

    /// Holds a buffer that peers, and transfers here, may write.
    pub(crate) fn writable(buffer: B) -> RegionBuffer<B>
    where
        B: WritableBuffer,
    {
        let mut buffer = NonNull::from(Box::leak(Box::new(buffer)));
        let mut parts = SegmentParts::new();
        // SAFETY: the box was made above, and no other reference to it exists.
        let unique = unsafe { buffer.as_mut() };
        unique.write_segments(&mut |bytes: &mut [u8]| parts.push((bytes.as_mut_ptr(), bytes.len())));
        // Only after `write_segments`, which moves an engine buffer out of a block that a peer has mapped.
        let blocks = blocks(unique);
        // SAFETY: the bytes belong to the boxed buffer, whose segments stay put until it is dropped or taken, and both
        // close the region first. No reference to the buffer is made in between: `view` is for read-only exposures.
        let region = unsafe { Region::with_blocks(parts, blocks) };
        RegionBuffer { region, buffer, _owns: PhantomData }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Closes the region, and gives the buffer back.
    pub(crate) fn take(self) -> B {
        self.region.close();
        self.take_open()
    }

    /// Gives the buffer back without closing the gate: for a forked child, where the thread that holds the gate may not exist.
    ///
    /// # Safety
    /// The region must not be used any more.
    pub(crate) unsafe fn take_unfenced(self) -> B {
        self.take_open()
    }

    fn take_open(self) -> B {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, so its region is dropped once, here.
        drop(unsafe { std::ptr::read(&this.region) });
        // SAFETY: the pointer came from a box, and `this` is not used again, so that this is the only owner.
        let buffer = unsafe { Box::from_raw(this.buffer.as_ptr()) };
        *buffer
    }

    /// # Safety
    /// The buffer must be held by [`RegionBuffer::read_only`].
    pub(crate) unsafe fn view(&self) -> &B::Target
    where
        B: BufferView,
    {
        // SAFETY: a buffer that is held read-only is not written.
        unsafe { self.buffer.as_ref() }.view()
    }
}

impl<B> Drop for RegionBuffer<B> {
    fn drop(&mut self) {
        self.region.close();
        // SAFETY: the pointer came from a box that only this value owns; the gate is closed, so its bytes are not accessed.
        drop(unsafe { Box::from_raw(self.buffer.as_ptr()) });
    }
}

/// A region over memory that a call or a scope borrows. Dropping it closes the region.
///
/// Forgetting it would leave the gate open, so it must not reach user code: calls and scopes keep it on their own stack.
pub(crate) struct BorrowedRegion<'a> {
    region: Arc<Region>,
    _memory: PhantomData<&'a mut [u8]>,
}

impl<'a> BorrowedRegion<'a> {
    /// A region over several borrows, its segments. They may overlap.
    pub(crate) fn read_only(segments: impl IntoIterator<Item = &'a [u8]>) -> BorrowedRegion<'a> {
        let parts = segments.into_iter().map(|bytes| (bytes.as_ptr().cast_mut(), bytes.len()));
        // SAFETY: the borrows last until after `drop` has closed the region, and are shared, so the bytes are not written.
        let region = unsafe { Region::new(parts) };
        BorrowedRegion { region, _memory: PhantomData }
    }

    /// A region over several borrows, its segments.
    pub(crate) fn writable(segments: impl IntoIterator<Item = &'a mut [u8]>) -> BorrowedRegion<'a> {
        let parts = segments.into_iter().map(|bytes| (bytes.as_mut_ptr(), bytes.len()));
        // SAFETY: the borrows last until after `drop` has closed the region, and are unique, so no other reference to the bytes
        // exists.
        let region = unsafe { Region::new(parts) };
        BorrowedRegion { region, _memory: PhantomData }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The region alone.
    ///
    /// # Safety
    /// It must be closed before the borrow ends.
    pub(crate) unsafe fn detach(self) -> Arc<Region> {
        // Dropping `self` would close the region at once.
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, so its region is moved out.
        unsafe { std::ptr::read(&this.region) }
    }
}

impl Drop for BorrowedRegion<'_> {
    fn drop(&mut self) {
        self.region.close();
    }
}

/// As [`BorrowedRegion`], for memory that is only read, while a call lasts. Dropping it does not wait for processes that are
/// reading at that moment, and discard what they have read: one that is stopped would hold its caller for longer than the call
/// may take.
pub(crate) struct SentRegion<'a> {
    region: Arc<Region>,
    _memory: PhantomData<&'a [u8]>,
}

impl<'a> SentRegion<'a> {
    pub(crate) fn new(segments: impl IntoIterator<Item = &'a [u8]>) -> SentRegion<'a> {
        let parts = segments.into_iter().map(|bytes| (bytes.as_ptr().cast_mut(), bytes.len()));
        // SAFETY: the borrows last until after `drop` has closed the gate and waited for devices, so nothing in this process reads
        // them later; they are shared, so the bytes are not written. Another process reads them as it could read any memory of this
        // one, whatever is there.
        let region = unsafe { Region::new(parts) };
        SentRegion { region, _memory: PhantomData }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl Drop for SentRegion<'_> {
    fn drop(&mut self) {
        self.region.shut().wait_for_devices();
    }
}

/// A unique borrow of a slice whose bytes a transfer writes: no reference to it exists until [`BorrowedSlice::take`].
///
/// Forgetting it leaves the gate open: only within a scope, which closes the region too, may it reach user code.
///
/// It is `pub` for the sake of a sealed trait, and not reachable from outside.
pub struct BorrowedSlice<'a, T> {
    region: BorrowedRegion<'a>,
    slice: NonNull<[T]>,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a unique borrow, which can be sent where its elements can.
unsafe impl<T: Send> Send for BorrowedSlice<'_, T> {}
// SAFETY: a shared `BorrowedSlice` gives no reference to the elements.
unsafe impl<T: Sync> Sync for BorrowedSlice<'_, T> {}

impl<'a, T: Element> BorrowedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> BorrowedSlice<'a, T> {
        let len = size_of_val(slice);
        let slice = NonNull::from(slice);
        // SAFETY: the borrow lasts until after the region has been closed, by `take` or by the drop of `BorrowedRegion`; it is
        // unique, and only the pointer is kept of it, so no reference to the bytes exists. Any bytes are valid elements.
        let region = unsafe { Region::new([(slice.as_ptr().cast::<u8>(), len)]) };
        BorrowedSlice { region: BorrowedRegion { region, _memory: PhantomData }, slice, _borrow: PhantomData }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        self.region.region()
    }

    /// Closes the region, and returns the borrow. A forked child can't close it, since the thread that holds the gate may not
    /// exist there; apart from this value, only refused operations reach the region in a child.
    pub(crate) fn take(self, is_forked: bool) -> &'a mut [T] {
        // Dropping the region would close it.
        let mut this = std::mem::ManuallyDrop::new(self);
        if !is_forked {
            this.region.region.close();
            // SAFETY: `this` is not used again, so its region is dropped once, here.
            drop(unsafe { std::ptr::read(&this.region) });
        }
        // SAFETY: the pointer comes from a unique borrow that lasts as long. The region is closed, or belongs to an engine that
        // does not work in this process, and `this` is not used again, so no other reference to the bytes exists.
        unsafe { this.slice.as_mut() }
    }
}
