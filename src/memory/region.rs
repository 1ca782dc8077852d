//! Regions: raw segments of memory behind a gate.

use std::any::Any;
use std::io;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::copying::CopyPath;
use super::loan::{ClosedRegion, DeviceRegistration, Loan, Withdrawn};
use super::message::{self, MessageBuffer, ReceivedMessage};
use super::shared::Block;

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// One contiguous part of the memory of a region.
#[derive(Clone, Copy)]
struct Segment {
    /// Where it begins in the region's own address space, in bytes.
    start: usize,
    address: *mut u8,
    len: usize,
}

/// A piece of memory as system calls take it: the layout of `struct iovec`.
pub(crate) type IoVec = libc::iovec;

/// Several segments, seen as one address space of `len` bytes, behind a gate.
///
/// ```text
///   open ──close()──▶ closed        (waits for the accesses in progress; nothing passes afterwards)
/// ```
pub(crate) struct Region {
    segments: SmallVec<[Segment; 1]>,
    len: usize,
    /// True while open. Readers of the lock read the memory, its writer writes it: so two accesses never race.
    gate: RwLock<bool>,
    /// Accesses to the memory from outside of this process's threads.
    outside: Mutex<Outside>,
    /// Memory that the region itself owns: bodies of large messages.
    owned: Mutex<Option<MessageBuffer>>,
    /// What owns its segments, where neither the creator nor `owned` does. Nothing reaches it before it is dropped with the region.
    _kept: Option<KeptMessage>,
    /// Those of its segments that peers on the same host can map, by their addresses.
    blocks: Box<[(usize, Weak<Block>)]>,
}

/// The head of a message, and a value of the program's that has the rest of it.
type KeptMessage = (Vec<u8>, Arc<dyn AsRef<[u8]> + Send + Sync>);

#[derive(Default)]
struct Outside {
    /// Peers and devices that may access the memory now.
    loans: Vec<Arc<dyn Loan>>,
    /// Devices that the memory is registered with.
    registrations: Vec<Arc<dyn DeviceRegistration>>,
}

// SAFETY: the segments are reached through the gate only, which orders accesses between threads; the creator of the region
// promises that the memory stays where it is until the gate is closed, on whichever thread that happens.
unsafe impl Send for Region {}
// SAFETY: as above: shared use is what the gate is for.
unsafe impl Sync for Region {}

impl Region {
    /// A region over memory that it does not own.
    ///
    /// # Safety
    /// Until [`Region::close`] has returned, or the region is dropped, each segment must be valid for reads of its length,
    /// and must not be written except through the region. If the region is asked for write access (see
    /// [`Slice::write_access`]), each segment must be valid for writes too, and must not be read except through the region, and
    /// no reference to it may exist.
    pub(crate) unsafe fn new(parts: impl IntoIterator<Item = (*mut u8, usize)>) -> Arc<Region> {
        // SAFETY: as the caller promises.
        unsafe { Region::with_blocks(parts, Vec::new()) }
    }

    /// As [`Region::new`]; each of the blocks is a segment, all of it.
    ///
    /// # Safety
    /// As for [`Region::new`].
    pub(crate) unsafe fn with_blocks(parts: impl IntoIterator<Item = (*mut u8, usize)>, blocks: Vec<Weak<Block>>) -> Arc<Region> {
        let mut segments = SmallVec::new();
        let mut start = 0usize;
        for (address, len) in parts {
            segments.push(Segment { start, address, len });
            // Segments may name the same memory, so they can exceed the address space together.
            start = start.checked_add(len).expect("the segments of a bulk are longer than the address space");
        }
        let begin = |block: Weak<Block>| Some((block.upgrade()?.mapping.address().addr(), block));
        // Most memory is not the engine's.
        let mut blocks: Box<[_]> =
            if blocks.is_empty() { Box::default() } else { blocks.into_iter().filter_map(begin).collect() };
        blocks.sort_unstable_by_key(|(begin, _)| *begin);
        let mut region = Region::of(segments);
        region.blocks = blocks;
        Arc::new(region)
    }

    /// Of these segments, one behind the other.
    fn of(segments: SmallVec<[Segment; 1]>) -> Region {
        Region {
            len: segments.last().map_or(0, |last| last.start + last.len),
            segments,
            gate: RwLock::new(true),
            outside: Mutex::default(),
            owned: Mutex::new(None),
            _kept: None,
            blocks: Box::default(),
        }
    }

    /// A region that owns the message which it has: its head, and the value that has the rest.
    pub(crate) fn keeping(head: Vec<u8>, value: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Arc<Region> {
        // The value stays borrowed until it is dropped with the region: it does not move, and is not reached in another way.
        let rest = (*value).as_ref();
        let segments = [
            Segment { start: 0, address: head.as_ptr().cast_mut(), len: head.len() },
            Segment { start: head.len(), address: rest.as_ptr().cast_mut(), len: rest.len() },
        ];
        let mut region = Region::of(SmallVec::from_slice(&segments));
        region._kept = Some((head, value));
        Arc::new(region)
    }

    /// A region that owns its memory.
    pub(crate) fn from_vec(bytes: Vec<u8>) -> Arc<Region> {
        Region::owning(MessageBuffer::Heap(bytes), 0)
    }

    /// Of a buffer, from this offset on.
    fn owning(mut buffer: MessageBuffer, begin: usize) -> Arc<Region> {
        debug_assert!(begin <= buffer.len());
        let segment = Segment { start: 0, address: buffer.address().wrapping_add(begin), len: buffer.len() - begin };
        let mut region = Region::of(SmallVec::from_buf([segment]));
        region.owned = Mutex::new(Some(buffer));
        Arc::new(region)
    }

    /// The block that an address of the region lies in.
    pub(crate) fn block(&self, address: *const u8) -> Option<Arc<Block>> {
        let behind = self.blocks.partition_point(|(begin, _)| *begin <= address.addr());
        let (begin, block) = self.blocks.get(behind.checked_sub(1)?)?;
        block.upgrade().filter(|block| address.addr() - begin < block.mapping.len())
    }

    /// A region that owns memory for a message that is to arrive.
    pub(crate) fn for_message(len: usize) -> Arc<Region> {
        Region::owning(message::buffer(len), message::BEGIN)
    }

    /// As [`Region::for_message`], for one that is a head and a list, of so many bytes each: the elements get a vector of their own.
    /// They consist of numbers of 1, 4 or 8 bytes each.
    ///
    /// # Safety
    /// Before [`Region::take_message`] each byte of the region must be written.
    pub(crate) unsafe fn for_list(head: usize, elements: usize, width: usize) -> Arc<Region> {
        let (buffer, [head_address, address]) = message::list_buffer(head, elements, width);
        let segments = [Segment { start: 0, address: head_address, len: head }, Segment { start: head, address, len: elements }];
        let mut region = Region::of(SmallVec::from_slice(&segments));
        region.owned = Mutex::new(Some(buffer));
        Arc::new(region)
    }

    /// Closes the gate and takes out the message that the region owns; an empty one if it owns none, or gave it away.
    pub(crate) fn take_message(&self) -> ReceivedMessage {
        self.close();
        let buffer = self.owned.lock().take();
        let begin = buffer.as_ref().map_or(0, |buffer| buffer.len().saturating_sub(self.len));
        let mut message = ReceivedMessage { buffer, begin };
        // SAFETY: as the creator of the region promises.
        unsafe { message.complete() };
        message
    }

    /// Puts back what was taken out, to be taken out again.
    pub(crate) fn put_back(&self, mut message: ReceivedMessage) {
        *self.owned.lock() = message.buffer.take();
    }

    /// Length in bytes, all segments together.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Offset and length of each segment, in bytes.
    pub(crate) fn segment_ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.segments.iter().map(|segment| (segment.start, segment.len))
    }

    /// Admits no further access, and returns when the last access in progress has ended. An access lasts for one copy of a
    /// chunk, or for the non-blocking system calls of one step, so this takes microseconds, whatever the peers do. (For processes
    /// that are stopped while they read exported memory, it waits up to a bound in total, and then cuts them off.)
    pub(crate) fn close(&self) {
        self.shut().wait();
    }

    /// Admits no further access; after [`ClosedRegion::wait`], the last access in progress has ended. To close several regions,
    /// shut all of them first, so that their waits overlap.
    pub(crate) fn shut(&self) -> ClosedRegion {
        *self.gate.write() = false;
        // No loan or registration can be added any more: that takes an open gate.
        let Outside { loans, registrations } = std::mem::take(&mut *self.outside.lock());
        ClosedRegion::new(loans, registrations)
    }

    /// Removes a loan that has ended.
    pub(crate) fn unlend(&self, loan: &Arc<dyn Loan>) {
        self.outside.lock().loans.retain(|other| !Arc::ptr_eq(other, loan));
    }

    /// Waits for the accesses in progress: those of this process, and the loans of operations that are over.
    pub(crate) fn fence(&self) {
        drop(self.gate.write());
        Withdrawn::new(self.loans_of_ended_operations()).wait();
    }

    /// Withdraws the loans of operations that are over, without waiting for them: for memory that is not returned to its owner.
    pub(crate) fn withdraw(&self) {
        // An access that began before the end of its operation may be about to add a loan.
        drop(self.gate.write());
        Withdrawn::new(self.loans_of_ended_operations());
    }

    fn loans_of_ended_operations(&self) -> Vec<Arc<dyn Loan>> {
        // They are asked with nothing locked: whether one is over may depend on the gate.
        let mut loans = self.outside.lock().loans.clone();
        loans.retain(|loan| loan.is_over());
        loans
    }

    /// The registration of type `R` that `which` selects.
    #[cfg_attr(not(any(feature = "verbs", feature = "ofi")), allow(dead_code, reason = "for transports that have devices"))]
    pub(crate) fn registration<R: DeviceRegistration>(&self, which: impl Fn(&R) -> bool) -> Option<Arc<R>> {
        let outside = self.outside.lock();
        let found = outside.registrations.iter().map(|registration| registration.clone() as Arc<dyn Any + Send + Sync>);
        found.filter_map(|any| any.downcast::<R>().ok()).find(|registration| which(registration))
    }

    /// Registers the memory with a device: `register` gets address and length of each segment. `None` when the gate is closed.
    /// The gate can't be closed meanwhile, so memory is not reclaimed while it is being registered.
    #[cfg_attr(not(any(test, feature = "verbs", feature = "ofi")), allow(dead_code, reason = "for transports that have devices"))]
    pub(crate) fn register<R: DeviceRegistration>(
        &self,
        register: impl FnOnce(&[IoVec]) -> io::Result<R>,
    ) -> Option<io::Result<Arc<R>>> {
        let gate = self.gate.read();
        if !*gate {
            return None;
        }
        let pieces: SmallVec<[IoVec; 1]> =
            self.segments.iter().map(|segment| IoVec { iov_base: segment.address.cast(), iov_len: segment.len }).collect();
        let registered = register(&pieces).map(Arc::new);
        if let Ok(registration) = &registered {
            self.outside.lock().registrations.push(registration.clone());
        }
        Some(registered)
    }

    /// Whether parts of it lie in blocks that peers can map.
    pub(crate) fn has_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// The first segment that ends behind `offset`.
    fn segment_at(&self, offset: usize) -> usize {
        let is_before = |segment: &Segment| segment.start + segment.len <= offset;
        // They are mostly of one length, and a search through a thousand takes as long as to copy some KiB.
        let guess = offset / (self.len / self.segments.len().max(1)).max(1);
        match self.segments.get(guess) {
            Some(segment) if segment.start <= offset && !is_before(segment) => guess,
            _ => self.segments.partition_point(is_before),
        }
    }

    /// The raw pieces that make up `len` bytes from `offset`.
    fn pieces(&self, offset: usize, len: usize) -> impl Iterator<Item = IoVec> {
        debug_assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        let first = self.segment_at(offset);
        let (mut at, mut left) = (offset, len);
        let pieces = self.segments[first..].iter().map_while(move |segment| {
            if left == 0 {
                return None;
            }
            let skip = at - segment.start;
            let take = left.min(segment.len - skip);
            at += take;
            left -= take;
            Some(IoVec { iov_base: segment.address.wrapping_add(skip).cast(), iov_len: take })
        });
        pieces.filter(|piece| piece.iov_len > 0)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.outside.get_mut().registrations.drain(..).for_each(|registration| registration.end());
        // A mapping that was not taken out may be of a message that never came: its pages are not there.
        if let Some(buffer @ MessageBuffer::Heap(_)) = self.owned.get_mut().take() {
            message::keep(buffer);
        }
    }
}

/// A range of a region, as transports and the protocol use it.
///
/// It is `pub` for the sake of sealed traits, and not reachable from outside.
#[derive(Clone)]
pub struct Slice {
    pub(crate) region: Arc<Region>,
    pub(crate) offset: usize,
    pub(crate) len: usize,
    /// True when the operation that this slice was made for is over: then it grants no access any more.
    over: Option<Arc<AtomicBool>>,
    /// A peer that reads it may read all of the region, as often as it likes, until the gate is closed.
    pub(crate) unrestricted: bool,
    /// Its owner uses the memory again once the operation is over, without a fence: it can't be lent.
    #[cfg_attr(not(feature = "ofi"), allow(dead_code, reason = "for transports that borrow memory"))]
    pub(crate) may_lapse: bool,
}

/// The operation that a slice was made for, if any.
pub(crate) struct Operation(Option<Arc<AtomicBool>>);

impl Operation {
    pub(crate) fn has_ended(&self) -> bool {
        self.0.as_ref().is_some_and(|over| over.load(Ordering::Acquire))
    }
}

/// Permission to read a region's memory, now. Keep it for one copy, or the non-blocking system calls of one step, only.
pub(crate) struct ReadAccess<'a> {
    slice: &'a Slice,
    _gate: RwLockReadGuard<'a, bool>,
}

/// Permission to write a region's memory, now; no other thread reads or writes it meanwhile.
pub(crate) struct WriteAccess<'a> {
    slice: &'a Slice,
    _gate: RwLockWriteGuard<'a, bool>,
}

impl Slice {
    pub(crate) fn whole(region: &Arc<Region>) -> Slice {
        Slice { region: region.clone(), offset: 0, len: region.len, over: None, unrestricted: false, may_lapse: false }
    }

    /// As `whole`, for peers that may read all of the region until the gate is closed.
    pub(crate) fn unrestricted(region: &Arc<Region>) -> Slice {
        Slice { unrestricted: true, ..Slice::whole(region) }
    }

    /// The part of `len` bytes at `offset` of this slice; `None` when it does not lie inside.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Slice> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        Some(Slice { offset: self.offset + offset, len, ..self.clone() })
    }

    /// `None` when the gate is closed, or the operation that this slice was made for is over.
    pub(crate) fn read_access(&self) -> Option<ReadAccess<'_>> {
        let gate = self.region.gate.read();
        (*gate && !self.has_ended()).then_some(ReadAccess { slice: self, _gate: gate })
    }

    /// `None` when the gate is closed, or the operation that this slice was made for is over.
    pub(crate) fn write_access(&self) -> Option<WriteAccess<'_>> {
        let gate = self.region.gate.write();
        (*gate && !self.has_ended()).then_some(WriteAccess { slice: self, _gate: gate })
    }

    /// True when the operation that this slice was made for is over.
    pub(crate) fn has_ended(&self) -> bool {
        self.over.as_ref().is_some_and(|over| over.load(Ordering::Acquire))
    }

    /// The operation that this slice was made for, to check later whether it is over. Keeps no memory alive.
    pub(crate) fn operation(&self) -> Operation {
        Operation(self.over.clone())
    }

    /// True when the operation that this slice was made for is over, or the gate is closed.
    #[cfg_attr(not(any(test, feature = "verbs", feature = "ofi")), allow(dead_code, reason = "for transports that have devices"))]
    pub(crate) fn is_over(&self) -> bool {
        self.has_ended() || !*self.region.gate.read()
    }

    fn pieces(&self, skip: usize, len: usize) -> impl Iterator<Item = IoVec> {
        debug_assert!(skip.checked_add(len).is_some_and(|end| end <= self.len));
        self.region.pieces(self.offset + skip, len)
    }

    fn add_pieces(&self, skip: usize, max: usize, out: &mut SmallVec<[IoVec; 8]>) -> usize {
        let before = out.len();
        out.extend(self.pieces(skip, self.len - skip).take(max.saturating_sub(before)));
        out[before..].iter().map(|piece| piece.iov_len).sum()
    }

    /// The same memory, for one operation: until [`Slice::end`].
    pub(crate) fn for_one_operation(&self) -> Slice {
        Slice { over: Some(Arc::default()), ..self.clone() }
    }

    /// As `for_one_operation`, for memory that its owner uses again once that is over, without a fence.
    pub(crate) fn that_may_lapse(&self) -> Slice {
        Slice { may_lapse: true, ..self.for_one_operation() }
    }

    /// Ends the operation: it gets no further access. [`Region::fence`] waits for one in progress.
    pub(crate) fn end(&self) {
        if let Some(over) = &self.over {
            over.store(true, Ordering::Release);
        }
    }

    /// Copies the whole slice out, in one access; false when the gate is closed.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn read(&self, out: &mut [u8]) -> bool {
        assert_eq!(out.len(), self.len);
        let Some(access) = self.read_access() else { return false };
        let mut at = 0;
        for piece in access.range(0, self.len) {
            let target = out[at..at + piece.iov_len].as_mut_ptr();
            // SAFETY: the piece lies in a segment valid for reads, which no thread writes while the access lasts; the target is
            // a slice of exactly this length, and can't overlap with memory behind a gate.
            unsafe { crate::copy::bytes(piece.iov_base.cast::<u8>(), target, piece.iov_len) };
            at += piece.iov_len;
        }
        true
    }

    /// Copies `bytes` in, in one access; false when the gate is closed.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn write(&self, bytes: &[u8]) -> bool {
        assert_eq!(bytes.len(), self.len);
        let Some(access) = self.write_access() else { return false };
        let mut at = 0;
        for piece in access.range(0, self.len) {
            let source = bytes[at..at + piece.iov_len].as_ptr();
            // SAFETY: the piece lies in a segment valid for writes, which no other thread accesses while the access lasts; the
            // source is a slice of exactly this length, and can't overlap with memory behind a gate.
            unsafe { crate::copy::bytes(source, piece.iov_base.cast::<u8>(), piece.iov_len) };
            at += piece.iov_len;
        }
        true
    }
}

impl ReadAccess<'_> {
    /// Adds the raw pieces from `skip` bytes into the slice on, at most `max` in the list; how many bytes they hold together.
    pub(crate) fn pieces(&self, skip: usize, max: usize, out: &mut SmallVec<[IoVec; 8]>) -> usize {
        self.slice.add_pieces(skip, max, out)
    }

    /// The raw pieces of `len` bytes from `skip` bytes into the slice on.
    pub(crate) fn range(&self, skip: usize, len: usize) -> impl Iterator<Item = IoVec> {
        self.slice.pieces(skip, len)
    }

    /// Adds a loan, which outlasts this access. Closing the gate ends it.
    pub(crate) fn lend(&self, loan: Arc<dyn Loan>) {
        self.slice.region.outside.lock().loans.push(loan);
    }
}

impl WriteAccess<'_> {
    /// As [`ReadAccess::pieces`].
    pub(crate) fn pieces(&self, skip: usize, max: usize, out: &mut SmallVec<[IoVec; 8]>) -> usize {
        self.slice.add_pieces(skip, max, out)
    }

    /// As [`ReadAccess::range`].
    pub(crate) fn range(&self, skip: usize, len: usize) -> impl Iterator<Item = IoVec> {
        self.slice.pieces(skip, len)
    }
}

/// How a copy between regions ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyOutcome {
    All,
    SourceClosed,
    TargetClosed,
}

/// Longest copy under one access, in bytes: closing a gate waits for one such copy (some 20 µs).
const COPY_CHUNK: usize = 256 << 10;

/// Copies between two slices of equal length, also of different segments, or of the same memory: if they overlap, the target
/// ends up with what the source held, as with `memmove`.
pub(crate) fn copy(source: &Slice, target: &Slice, path: CopyPath) -> CopyOutcome {
    // A message is complete once all of it is said to be copied.
    assert_eq!(source.len, target.len);
    let len = source.len;
    // Overlapping bytes have to be read before they are written, whatever the order of chunks and pieces.
    let backwards = Arc::ptr_eq(&source.region, &target.region) && source.offset < target.offset;
    let mut done = 0;
    while done < len {
        let step = COPY_CHUNK.min(len - done);
        let at = if backwards { len - done - step } else { done };
        let part = |s: &Slice| Slice { offset: s.offset + at, len: step, ..s.clone() };
        match copy_chunk(&part(source), &part(target), path, backwards) {
            CopyOutcome::All => done += step,
            closed => return closed,
        }
    }
    CopyOutcome::All
}

fn copy_chunk(source: &Slice, target: &Slice, path: CopyPath, backwards: bool) -> CopyOutcome {
    let same = Arc::ptr_eq(&source.region, &target.region);
    // Two threads may copy A to B and B to A: gates are passed in the order of their addresses.
    let source_first = Arc::as_ptr(&source.region) < Arc::as_ptr(&target.region);
    let (_read, write) = if same {
        (None, target.write_access())
    } else if source_first {
        let Some(read) = source.read_access() else { return CopyOutcome::SourceClosed };
        (Some(read), target.write_access())
    } else {
        let write = target.write_access();
        let Some(read) = source.read_access() else { return CopyOutcome::SourceClosed };
        (Some(read), write)
    };
    if write.is_none() {
        return if same { CopyOutcome::SourceClosed } else { CopyOutcome::TargetClosed };
    }
    if same && source.has_ended() {
        return CopyOutcome::SourceClosed;
    }
    let mut from: SmallVec<[IoVec; 8]> = source.pieces(0, source.len).collect();
    let mut to: SmallVec<[IoVec; 8]> = target.pieces(0, target.len).collect();
    // What comes next is taken from the ends of the lists.
    if !backwards {
        from.reverse();
        to.reverse();
    }
    while let (Some(read), Some(written)) = (from.last_mut(), to.last_mut()) {
        let n = read.iov_len.min(written.iov_len);
        let (read, written) = (take(read, n, backwards), take(written, n, backwards));
        if same {
            // SAFETY: both pieces had at least `n` bytes left, in a segment valid for reads and writes, which the access, exclusive,
            // keeps all other threads from; `copy` allows overlap.
            unsafe { std::ptr::copy(read, written, n) };
        } else {
            // SAFETY: as above, with two regions, two accesses, and memory that does not overlap: what peers may write is exposed once.
            unsafe { path.copy(read, written, n) };
        }
        for list in [&mut from, &mut to] {
            if list.last().is_some_and(|piece| piece.iov_len == 0) {
                list.pop();
            }
        }
    }
    CopyOutcome::All
}

/// Takes `n` bytes off a piece, at its end or at its beginning; where they are.
fn take(piece: &mut IoVec, n: usize, at_end: bool) -> *mut u8 {
    let address = piece.iov_base.cast::<u8>();
    piece.iov_len -= n;
    if at_end {
        return address.wrapping_add(piece.iov_len);
    }
    piece.iov_base = piece.iov_base.wrapping_byte_add(n);
    address
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn region(parts: &mut [Vec<u8>]) -> Arc<Region> {
        // SAFETY: the tests keep the parts untouched while the region is used.
        unsafe { Region::new(parts.iter_mut().map(|p| (p.as_mut_ptr(), p.len()))) }
    }

    #[test]
    fn copy_between_differently_segmented_regions_preserves_byte_order() {
        for path in [CopyPath::Cached, CopyPath::Streaming] {
            let mut a = [vec![1, 2, 3], vec![], vec![4, 5, 6, 7, 8]];
            let mut b = [vec![0; 1], vec![0; 6], vec![0; 4]];
            let (ra, rb) = (region(&mut a), region(&mut b));
            let source = Slice::whole(&ra).part(1, 6).unwrap();
            let target = Slice::whole(&rb).part(2, 6).unwrap();
            assert_eq!(copy(&source, &target, path), CopyOutcome::All);
            rb.close();
            assert_eq!(b.concat(), [0, 0, 2, 3, 4, 5, 6, 7, 0, 0, 0]);
        }
    }

    #[test]
    fn overlapping_copy_within_a_region_preserves_the_source() {
        let region = Region::from_vec((0..10).collect());
        let whole = Slice::whole(&region);
        assert_eq!(copy(&whole.part(0, 8).unwrap(), &whole.part(2, 8).unwrap(), CopyPath::Cached), CopyOutcome::All);
        assert_eq!(*region.take_message(), [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn region_that_keeps_a_value_drops_it_in_the_end() {
        /// Its bytes move with it.
        struct Text {
            text: [u8; 3],
            _alive: Arc<()>,
        }
        impl AsRef<[u8]> for Text {
            fn as_ref(&self) -> &[u8] {
                &self.text
            }
        }
        let alive = Arc::new(());
        let kept = Region::keeping(vec![3], Arc::new(Text { text: *b"abc", _alive: alive.clone() }));
        let slice = Slice::whole(&kept);
        drop(kept);
        assert_eq!((slice.len, slice.region.segment_count()), (4, 2));
        let message = Region::for_message(4);
        assert_eq!(copy(&slice, &Slice::whole(&message), CopyPath::Cached), CopyOutcome::All);
        assert_eq!(*message.take_message(), *b"\x03abc");
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(slice);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn list_arrives_in_a_vector_of_its_own() {
        // SAFETY: all of it is written before the message is taken.
        let region = unsafe { Region::for_list(2, 24, 8) };
        let (whole, bytes) = (Slice::whole(&region), (0..26).collect::<Vec<u8>>());
        for range in [0..1, 1..10, 10..26] {
            assert!(whole.part(range.start, range.len()).unwrap().write(&bytes[range]));
        }
        region.put_back(region.take_message());
        let mut message = region.take_message();
        let (head, vector) = message.list().unwrap().parts();
        assert_eq!(head, [0, 1]);
        let list = std::mem::take(vector.downcast_mut::<Vec<f64>>().unwrap());
        assert_eq!(bytemuck::cast_slice::<f64, u8>(&list), &bytes[2..]);
        // What was taken does not come again.
        region.put_back(message);
        let mut message = region.take_message();
        message.join();
        assert_eq!(*message, [0, 1]);
        region.put_back(message);
        assert_eq!(*region.take_message(), [0, 1]);
    }

    #[test]
    fn list_that_is_not_taken_is_joined() {
        for number in [1, 4, 8] {
            // SAFETY: all of it is written before the message is taken.
            let region = unsafe { Region::for_list(3, 16, number) };
            let bytes: Vec<u8> = (0..19).collect();
            assert!(Slice::whole(&region).write(&bytes));
            let mut message = region.take_message();
            message.join();
            assert_eq!(*message, bytes[..]);
            region.put_back(message);
            assert_eq!(*region.take_message(), bytes[..]);
        }
    }

    /// splitmix64.
    fn random(state: &mut u64) -> usize {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)) as usize
    }

    #[test]
    fn random_overlapping_copies_within_a_region_equal_copy_within() {
        let mut state = 17;
        // Miri is too slow for the long ones.
        let (rounds, sizes) = if cfg!(miri) { (6, 2) } else { (60, 4) };
        for round in 0..rounds {
            // Segments shorter than a chunk and longer, of sizes that don't divide each other, some of them empty.
            let most = [5, 1009, COPY_CHUNK + 7, 2 * COPY_CHUNK + 1001][round % sizes];
            let mut parts: Vec<Vec<u8>> = (0..1 + random(&mut state) % 5)
                .map(|_| (0..random(&mut state) % most).map(|i| (i * 7 + i / 251 + round) as u8).collect())
                .collect();
            let mut model = parts.concat();
            let region = region(&mut parts);
            for _ in 0..4 {
                let len = random(&mut state) % (model.len() + 1);
                let mut position = || random(&mut state) % (model.len() - len + 1);
                let (from, to) = (position(), position());
                let part = |at| Slice::whole(&region).part(at, len).unwrap();
                assert_eq!(copy(&part(from), &part(to), CopyPath::Cached), CopyOutcome::All);
                model.copy_within(from..from + len, to);
            }
            region.close();
            assert!(parts.concat() == model, "round {round}");
        }
    }

    #[test]
    fn access_through_a_closed_gate_is_refused() {
        let (a, b) = (Region::from_vec(vec![1; 4]), Region::from_vec(vec![2; 4]));
        a.close();
        assert_eq!(copy(&Slice::whole(&a), &Slice::whole(&b), CopyPath::Cached), CopyOutcome::SourceClosed);
        assert_eq!(copy(&Slice::whole(&b), &Slice::whole(&a), CopyPath::Cached), CopyOutcome::TargetClosed);
        assert!(!Slice::whole(&a).read(&mut [0; 4]));
        assert!(!Slice::whole(&a).write(&[0; 4]));
        assert_eq!(*b.take_message(), [2; 4]);
    }

    #[test]
    fn access_for_an_ended_operation_is_refused() {
        let (a, b) = (Region::from_vec(vec![1; 4]), Region::from_vec(vec![2; 8]));
        let (over, part) = (Slice::whole(&a).for_one_operation(), Slice::whole(&b).part(4, 4).unwrap().for_one_operation());
        let rest = Slice::whole(&b).part(0, 4).unwrap();
        over.end();
        part.end();
        assert_eq!(copy(&over, &Slice::whole(&a), CopyPath::Cached), CopyOutcome::SourceClosed);
        assert_eq!(copy(&over, &rest, CopyPath::Cached), CopyOutcome::SourceClosed);
        assert_eq!(copy(&rest, &over, CopyPath::Cached), CopyOutcome::TargetClosed);
        assert_eq!(copy(&part, &rest, CopyPath::Cached), CopyOutcome::SourceClosed);
        assert!(!over.read(&mut [0; 4]) && !over.write(&[0; 4]));
        // Other operations on the same memory go on.
        assert!(Slice::whole(&a).read(&mut [0; 4]));
        assert_eq!(*b.take_message(), [2; 8]);
    }

    /// A loan that counts its withdrawals; the tests never wait for it.
    struct CountingLoan(Operation, Arc<std::sync::atomic::AtomicUsize>);

    impl Loan for CountingLoan {
        fn wait(&self, _: Instant) {
            unreachable!("the memory is not reclaimed")
        }
        fn withdraw(&self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
        fn is_over(&self) -> bool {
            self.0.has_ended()
        }
    }

    #[test]
    fn withdraw_ends_only_the_loans_of_ended_operations() {
        let region = Region::from_vec(vec![1; 4]);
        let [ended, other] = [(); 2].map(|()| Slice::whole(&region).for_one_operation());
        let withdrawn = [(); 3].map(|()| Arc::<std::sync::atomic::AtomicUsize>::default());
        for (slice, count) in [&ended.part(1, 2).unwrap(), &other, &Slice::whole(&region)].into_iter().zip(&withdrawn) {
            let loan = CountingLoan(slice.operation(), count.clone());
            slice.read_access().unwrap().lend(Arc::new(loan));
        }
        let counts = || withdrawn.each_ref().map(|count| count.load(Ordering::SeqCst));
        region.withdraw();
        assert_eq!(counts(), [0, 0, 0]);
        ended.end();
        region.withdraw();
        assert_eq!(counts(), [1, 0, 0]);
        // Closing the gate would wait for the loans.
        region.outside.lock().loans.clear();
    }

    #[test]
    fn close_waits_for_the_access_in_progress() {
        let region = Region::from_vec(vec![0; 4]);
        let slice = Slice::whole(&region);
        let access = slice.write_access().unwrap();
        let closed = Arc::new(std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|s| {
            let (region, flag) = (&region, closed.clone());
            let closer = s.spawn(move || {
                region.close();
                flag.store(true, std::sync::atomic::Ordering::SeqCst);
            });
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            assert!(!closed.load(std::sync::atomic::Ordering::SeqCst));
            drop(access);
            closer.join().unwrap();
        });
        assert!(closed.load(std::sync::atomic::Ordering::SeqCst));
    }

    #[test]
    fn part_out_of_range_or_overflowing_is_none() {
        let whole = Slice::whole(&Region::from_vec(vec![0; 8]));
        assert!(whole.part(8, 0).is_some());
        assert!(whole.part(9, 0).is_none());
        assert!(whole.part(usize::MAX, 2).is_none());
        assert!(whole.part(4, usize::MAX).is_none());
    }
}
