//! `Exposed` and `ExposedSlice`: memory that this engine exposes, from the owner's side.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::descriptor::{Bulk, byte_range};
use super::exposure_state::{ExposureState, Released, Visibility};
use super::grant::Grant;
use super::mode::{BulkMode, ExposeMode};
use crate::engine::{Endpoint, Engine, EngineShared, Origin};
use crate::memory::{Buffer, BufferView, Element, ReadElement, ReadOnly, Region, RegionBuffer, Slice, Writable, WritableBuffer};
use crate::progress::error_of;
use crate::{Address, Error, Result};

/// A buffer that peers can reach, until it is reclaimed with [`reclaim`](Exposed::reclaim) or dropped. Made by
/// [`Engine::expose`](crate::Engine::expose) and [`Engine::expose_read_only`](crate::Engine::expose_read_only), or, with the
/// restrictions of a [`Grant`](crate::Grant), by [`Engine::expose_with`](crate::Engine::expose_with) and its like.
///
/// While the buffer is exposed for writing, safe code can't have a reference to it: [`read_at`](Exposed::read_at) and
/// [`write_at`](Exposed::write_at) copy. A buffer that is exposed read-only can be read with [`view`](Exposed::view).
///
/// Dropping it revokes peers' access, waits for accesses in progress as [`reclaim`](Exposed::reclaim) does, and frees the
/// buffer. Leaking it leaks the buffer, which stays exposed.
///
/// So it has to live until peers have transferred. A call that has a response is over then; a one-way call
/// ([`Call::notify`](crate::Call::notify)) returns before its receiver has begun: wait for [`Exposed::released`], or keep the
/// `Exposed`. The receiver's transfers fail with [`Error::Revoked`] else. (Up to
/// [`EngineBuilder::eager_bulk_limit`](crate::EngineBuilder::eager_bulk_limit), 4,096 bytes by default, the content of
/// read-only memory is sent inside the call, and may be used until the receiver learns that the memory was dropped. That is a
/// race, which short messages tend to win in tests.) An `Exposed` that is dropped while a peer holds its bulk is logged as a
/// warning, with its size and the peer, at powers of two of the number of times.
///
/// ```
/// # use std::time::Duration;
/// # use calomel::{Bulk, Engine, Request};
/// # fn main() -> calomel::Result<()> {
/// # let server = Engine::server("loop://")?;
/// # server.define("store", |request: &Request, bulk: Bulk| {
/// #     let _ = bulk.on(request.endpoint()).pull_into(&mut vec![0u8; bulk.len()]);
/// # })?;
/// # let client = Engine::client("loop")?;
/// # let peer = client.lookup(server.address())?;
/// let exposed = client.expose_read_only(vec![7u8; 100_000])?;
/// client.procedure::<Bulk, ()>("store").on(&peer).notify(&exposed.bulk())?;
/// exposed.released().wait_timeout(Duration::from_secs(10))?; // the receiver has dropped the bulk
/// drop(exposed);
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # let engine = calomel::Engine::client("loop").unwrap();
/// let local = engine.expose(vec![0u8; 6], calomel::BulkMode::WriteOnly).unwrap();
/// local.view(); // peers may write it at any moment
/// ```
pub struct Exposed<B: Buffer, A = <B as Buffer>::Access> {
    buffer: BufferGuard<B>,
    exposure: Exposure,
    _access: PhantomData<fn() -> A>,
}

/// The buffer, while it is exposed.
struct BufferGuard<B: Buffer> {
    /// `None` once it has been reclaimed.
    held: Option<RegionBuffer<B>>,
    shared: Arc<EngineShared>,
}

impl<B: Buffer> BufferGuard<B> {
    fn new(held: RegionBuffer<B>, shared: &Arc<EngineShared>) -> BufferGuard<B> {
        BufferGuard { held: Some(held), shared: shared.clone() }
    }
}

impl<B: Buffer> Drop for BufferGuard<B> {
    fn drop(&mut self) {
        // A forked child leaks the buffer: the thread that holds its gate may not exist there.
        if self.shared.core.is_forked() {
            std::mem::forget(self.held.take());
        }
    }
}

/// The registration of the memory with the protocol and with devices.
pub(super) struct Exposure {
    shared: Arc<EngineShared>,
    state: Arc<ExposureState>,
    origin: Arc<Origin>,
    token: u128,
    len: u64,
    segments: u32,
    access: ExposeMode,
    /// Its end was asked for: by `reclaim`, or as that of a scope. Peers that hold a bulk then are no reason for a warning.
    end_is_expected: bool,
}

impl Exposure {
    /// Fails when a device can't register the memory, or when the grant is for another engine's endpoint.
    pub(super) fn new(shared: &Arc<EngineShared>, region: &Arc<Region>, access: ExposeMode, grant: &Grant) -> Result<Exposure> {
        let (policy, visibility) = grant.policy(shared)?;
        let state = ExposureState::new(&shared.core, region, access, visibility, policy.for_one_call)?;
        let mode = access.mode().access();
        // A peer of the same host may map unrestricted memory, and read all of it until it is reclaimed.
        let unrestricted = mode.read && visibility == Visibility::Holders;
        let exposed = shared.core.exec(|proto| {
            proto.admit_exposure()?;
            let token = proto.secret();
            let memory = if unrestricted { Slice::unrestricted(region) } else { Slice::whole(region) };
            proto.expose(token, memory, mode, &policy);
            Ok(token)
        });
        let token = exposed
            .map_err(|failure| error_of(failure, &shared.own_address(), "expose".to_owned(), "expose", Duration::ZERO, 0))?;
        let (len, segments) = (region.len() as u64, region.segment_count() as u32);
        let (shared, origin) = (shared.clone(), shared.origin());
        Ok(Exposure { shared, state, origin, token, len, segments, access, end_is_expected: false })
    }

    pub(super) fn bulk(&self) -> Bulk {
        let Exposure { state, origin, token, len, segments, access, .. } = self;
        Bulk::exposed(*token, (*len, *segments), access.mode(), origin.clone(), state)
    }

    pub(super) fn expect_end(&mut self) {
        self.end_is_expected = true;
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        self.shared.core.exec_unless_forked(|proto| match self.end_is_expected {
            true => proto.revoke(self.token),
            false => proto.revoke_dropped(self.token),
        });
    }
}

impl Engine {
    /// Exposes a buffer to peers that receive its [`Bulk`](crate::Bulk). The returned [`Exposed`] owns the buffer;
    /// [`Exposed::reclaim`](crate::Exposed::reclaim) returns it, and dropping the `Exposed` frees it, so keep that until peers
    /// have transferred: after a one-way call, wait for [`Exposed::released`](crate::Exposed::released). `mode` is what *peers*
    /// may do.
    ///
    /// # Errors
    /// [`Error::Finalized`]; [`Error::Busy`] when [`max_exposures`](crate::EngineBuilder::max_exposures) regions are exposed;
    /// [`Error::Io`] when an RDMA device can't register it; [`Error::Unsupported`] for an `ndarray::Array` that is not
    /// contiguous ([`Buffer::check_layout`](crate::Buffer::check_layout)). On an error the buffer is dropped.
    pub fn expose<B>(&self, buffer: B, mode: BulkMode) -> Result<Exposed<B, Writable>>
    where
        B: WritableBuffer + Send + 'static,
    {
        self.expose_with(buffer, mode, &Grant::new())
    }

    /// Exposes a buffer that peers may read, and that this program can read meanwhile.
    ///
    /// # Errors
    /// As [`Engine::expose`].
    pub fn expose_read_only<B>(&self, buffer: B) -> Result<Exposed<B, ReadOnly>>
    where
        B: Buffer + Send + 'static,
    {
        self.expose_read_only_with(buffer, &Grant::new())
    }

    /// Exposes a buffer as [`Engine::expose`] does, with the restrictions of a [`Grant`]: for one peer, one call, one transfer,
    /// a number of bytes, a time.
    ///
    /// # Errors
    /// As [`Engine::expose`]; [`Error::OtherEngine`](crate::Error::OtherEngine) for an endpoint of another engine.
    pub fn expose_with<B>(&self, buffer: B, mode: BulkMode, grant: &Grant) -> Result<Exposed<B, Writable>>
    where
        B: WritableBuffer + Send + 'static,
    {
        let shared = self.shared();
        shared.check("expose")?;
        check_layout(&buffer)?;
        let held = RegionBuffer::writable(buffer);
        let exposure = Exposure::new(shared, held.region(), ExposeMode::Changing(mode), grant)?;
        Ok(Exposed { buffer: BufferGuard::new(held, shared), exposure, _access: PhantomData })
    }

    /// Exposes a buffer as [`Engine::expose_read_only`] does, with the restrictions of a [`Grant`].
    ///
    /// # Errors
    /// As [`Engine::expose_with`].
    pub fn expose_read_only_with<B>(&self, buffer: B, grant: &Grant) -> Result<Exposed<B, ReadOnly>>
    where
        B: Buffer + Send + 'static,
    {
        let shared = self.shared();
        shared.check("expose")?;
        check_layout(&buffer)?;
        let held = RegionBuffer::read_only(buffer);
        let exposure = Exposure::new(shared, held.region(), ExposeMode::Constant, grant)?;
        Ok(Exposed { buffer: BufferGuard::new(held, shared), exposure, _access: PhantomData })
    }

    /// Exposes a buffer to one peer: to the engine that is connected at `endpoint` now, or, without a connection, to the first
    /// engine that connects there. Other peers that receive the [`Bulk`](crate::Bulk) get
    /// [`Error::AccessDenied`](crate::Error::AccessDenied). Short for [`Engine::expose_with`] and [`Grant::only`].
    ///
    /// Over `verbs://` the peer gets keys that are valid on its connection only, where this engine's device has type 2 memory
    /// windows and the connection exists; else the peer asks this engine for each transfer.
    ///
    /// # Errors
    /// As [`Engine::expose_with`].
    pub fn expose_to<B>(&self, endpoint: impl AsRef<Endpoint>, buffer: B, mode: BulkMode) -> Result<Exposed<B, Writable>>
    where
        B: WritableBuffer + Send + 'static,
    {
        self.expose_with(buffer, mode, &Grant::new().only(endpoint))
    }
}

fn check_layout(buffer: &impl Buffer) -> Result<()> {
    buffer.check_layout().map_err(|reason| Error::Unsupported { what: "exposing the buffer".to_owned(), reason })
}

impl<B: Buffer, A> Exposed<B, A> {
    fn held(&self) -> &RegionBuffer<B> {
        self.buffer.held.as_ref().unwrap_or_else(|| unreachable!("only `reclaim` takes it, and consumes the value"))
    }

    pub(super) fn whole(&self) -> Slice {
        Slice::whole(self.held().region())
    }

    pub(super) fn shared(&self) -> &Arc<EngineShared> {
        &self.exposure.shared
    }

    /// The handle to this memory that can be sent to peers.
    pub fn bulk(&self) -> Bulk {
        self.exposure.bulk()
    }

    /// Length in bytes, all segments together.
    pub fn len(&self) -> usize {
        self.held().region().len()
    }

    /// True when the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What peers may do with the memory.
    pub fn mode(&self) -> BulkMode {
        self.exposure.access.mode()
    }

    /// The part of `len` bytes at `offset`, both in bytes, as a target or source of transfers.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<ExposedSlice<A>> {
        let slice = self.whole().part(offset, len).ok_or(Error::OutOfRange { offset, len, size: self.len() })?;
        Ok(ExposedSlice { slice, shared: self.exposure.shared.clone(), _access: PhantomData })
    }

    /// Revokes peers' access, waits for accesses in progress, and returns the buffer. Transfers that were in progress end with
    /// [`Error::Revoked`].
    ///
    /// That usually takes some microseconds. Over `shm://` it waits for peers that were stopped while they read, for a second
    /// at most, however many they are. Over `verbs://` the device deregisters the memory, which takes time in proportion to its
    /// size, and this engine's own transfers with it that are in progress have 100 ms to end. Over `ofi+tcp://` it waits for
    /// a chunk in progress, for 250 ms at most: then the connection of a peer that stalls is ended.
    ///
    /// In a forked child this returns the child's copy of the buffer, as it was when the process forked. A child does not have
    /// the memory of [`EngineBuffer`](crate::EngineBuffer)s: they can be dropped there, and not be read or written.
    #[allow(unsafe_code)]
    pub fn reclaim(mut self) -> B {
        let held = self.buffer.held.take().unwrap_or_else(|| unreachable!("only `reclaim` takes it, and consumes the value"));
        if self.exposure.shared.core.is_forked() {
            // SAFETY: in a forked child the engine has no threads and refuses all operations, and apart from those only this
            // value reaches the region.
            return unsafe { held.take_unfenced() };
        }
        self.exposure.expect_end();
        drop(self.exposure);
        held.take()
    }

    /// Elements `first..first + count` of the memory seen as a list of `T`s, as a target or source of transfers:
    /// [`Exposed::slice`] in elements. See [`Bulk::slice_of`](crate::Bulk::slice_of).
    ///
    /// # Errors
    /// [`Error::OutOfRange`], in bytes, when the elements do not all lie inside.
    pub fn slice_of<T: ReadElement>(&self, first: usize, count: usize) -> Result<ExposedSlice<A>> {
        let (offset, len) = byte_range::<T>(first, count, self.len())?;
        self.slice(offset, len)
    }

    /// Number of segments: the buffers of a tuple or of [`Segments`](crate::Segments), in order.
    pub fn segment_count(&self) -> usize {
        self.held().region().segment_count()
    }

    /// The length of each segment in bytes, in order. Segment `i` begins at the sum of the lengths before it.
    ///
    /// ```
    /// # fn main() -> calomel::Result<()> {
    /// # let engine = calomel::Engine::client("loop")?;
    /// let exposed = engine.expose((vec![0u32; 10], vec![0f64; 10]), calomel::BulkMode::ReadWrite)?;
    /// assert_eq!(exposed.segment_lens(), [40, 80]);
    /// exposed.segment(1)?.write_elements_at(9, &[1.5])?; // the last f64
    /// # assert_eq!(exposed.reclaim().1[9], 1.5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn segment_lens(&self) -> Vec<usize> {
        self.held().region().segment_ranges().map(|(_, len)| len).collect()
    }

    /// One segment, as a target or source of transfers, and to read and write. The first has index 0.
    ///
    /// # Errors
    /// [`Error::NoSuchSegment`] when there are no more than `index` segments.
    pub fn segment(&self, index: usize) -> Result<ExposedSlice<A>> {
        let range = self.held().region().segment_ranges().nth(index);
        let (offset, len) = range.ok_or(Error::NoSuchSegment { index, count: self.segment_count() })?;
        self.slice(offset, len)
    }

    /// Copies `out.len()` bytes from `offset` on, in bytes, out of the exposed memory. Peers' writes happen entirely before or
    /// after it, except over `verbs://` and `ofi+…://`: a device, or the provider, may write meanwhile, and some of the bytes
    /// may be old and some new.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Unsupported`] in a forked child.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        read(&self.whole(), self.shared(), offset, out)
    }

    /// Copies elements `first..first + out.len()` of the memory seen as a list of `T`s: [`Exposed::read_at`] in elements, not
    /// in bytes.
    ///
    /// ```
    /// # fn main() -> calomel::Result<()> {
    /// # let engine = calomel::Engine::client("loop")?;
    /// let exposed = engine.expose(vec![10u32, 11, 12, 13], calomel::BulkMode::ReadWrite)?;
    /// let mut two = [0u32; 2];
    /// exposed.read_elements_at(2, &mut two)?; // from element 2, which is byte 8
    /// assert_eq!(two, [12, 13]);
    /// exposed.write_elements_at(0, &[7u32])?;
    /// assert_eq!(exposed.reclaim(), [7, 11, 12, 13]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Exposed::read_at`]; [`Error::OutOfRange`] is in bytes.
    pub fn read_elements_at<T: Element>(&self, first: usize, out: &mut [T]) -> Result<()> {
        let (offset, _) = byte_range::<T>(first, out.len(), self.len())?;
        self.read_at(offset, bytemuck::cast_slice_mut(out))
    }

    /// A future, which can also be waited for, that resolves when no peer holds a [`Bulk`] of this memory any more: from the
    /// moment when a call with the bulk was made until each holder has dropped it, or has disconnected. It is how to know that
    /// the receiver of a one-way call is done; see the example at [`Exposed`].
    pub fn released(&self) -> Released {
        let owner = self.exposure.origin.addresses().first().cloned();
        Released::new(&self.exposure.state, &self.exposure.shared.core, owner.unwrap_or_else(Address::nowhere))
    }
}

impl<B: WritableBuffer> Exposed<B, Writable> {
    /// Copies `bytes` into the exposed memory at `offset`, in bytes. Peers' reads and writes happen entirely before or after
    /// it, except where peers access the memory themselves: over `verbs://` and `ofi+tcp://`, where their writes may interleave
    /// too, and over `shm://`, where a peer has a loan. Such a peer may read some old and some new bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Unsupported`] in a forked child.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        write(&self.whole(), self.shared(), offset, bytes)
    }

    /// Copies `elements` into elements `first..first + elements.len()` of the memory seen as a list of `T`s:
    /// [`Exposed::write_at`] in elements, not in bytes. See [`Exposed::read_elements_at`].
    ///
    /// # Errors
    /// As [`Exposed::write_at`]; [`Error::OutOfRange`] is in bytes.
    pub fn write_elements_at<T: ReadElement>(&self, first: usize, elements: &[T]) -> Result<()> {
        let (offset, _) = byte_range::<T>(first, elements.len(), self.len())?;
        self.write_at(offset, bytemuck::cast_slice(elements))
    }
}

/// Copies bytes out of memory that this engine exposes.
fn read(memory: &Slice, shared: &EngineShared, offset: usize, out: &mut [u8]) -> Result<()> {
    shared.check_process(|| "reading exposed memory".to_owned())?;
    let part = memory.part(offset, out.len()).ok_or(Error::OutOfRange { offset, len: out.len(), size: memory.len })?;
    if part.read(out) { Ok(()) } else { Err(reclaimed(shared, "reading", out.len())) }
}

/// Copies bytes into memory that this engine exposes for writing.
fn write(memory: &Slice, shared: &EngineShared, offset: usize, bytes: &[u8]) -> Result<()> {
    shared.check_process(|| "writing exposed memory".to_owned())?;
    let part = memory.part(offset, bytes.len()).ok_or(Error::OutOfRange { offset, len: bytes.len(), size: memory.len })?;
    if part.write(bytes) { Ok(()) } else { Err(reclaimed(shared, "writing", bytes.len())) }
}

/// Slices may outlive their exposure.
fn reclaimed(shared: &EngineShared, verb: &str, len: usize) -> Error {
    Error::Revoked { peer: shared.own_address(), what: format!("{verb} {len} bytes") }
}

impl<B: Buffer + BufferView> Exposed<B, ReadOnly> {
    /// The buffer's content, which does not change while it is exposed read-only.
    #[allow(unsafe_code)]
    pub fn view(&self) -> &B::Target {
        // SAFETY: an `Exposed` with `ReadOnly` access is made by `expose_read_only` only, which holds the buffer read-only.
        unsafe { self.held().view() }
    }
}

impl<B: Buffer, A> fmt::Debug for Exposed<B, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exposed({} bytes, {:?})", self.len(), self.mode())
    }
}

/// A part of an [`Exposed`] buffer, as a target or source of transfers. Once the buffer has been reclaimed, transfers with
/// it end with [`Error::Revoked`].
pub struct ExposedSlice<A = Writable> {
    pub(super) slice: Slice,
    shared: Arc<EngineShared>,
    _access: PhantomData<fn() -> A>,
}

impl<A> ExposedSlice<A> {
    pub(super) fn shared(&self) -> &Arc<EngineShared> {
        &self.shared
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.slice.len
    }

    /// True when the length is zero.
    pub fn is_empty(&self) -> bool {
        self.slice.len == 0
    }

    /// The part of `len` bytes at `offset` of this slice, both in bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<ExposedSlice<A>> {
        let slice = self.slice.part(offset, len).ok_or(Error::OutOfRange { offset, len, size: self.len() })?;
        Ok(ExposedSlice { slice, shared: self.shared.clone(), _access: PhantomData })
    }

    /// As [`Exposed::slice_of`], within this slice: the list of `T`s begins at its first byte.
    ///
    /// # Errors
    /// As [`Exposed::slice_of`].
    pub fn slice_of<T: ReadElement>(&self, first: usize, count: usize) -> Result<ExposedSlice<A>> {
        let (offset, len) = byte_range::<T>(first, count, self.len())?;
        self.slice(offset, len)
    }

    /// As [`Exposed::read_at`], within this slice.
    ///
    /// # Errors
    /// As [`Exposed::read_at`]; [`Error::Revoked`] when the buffer was reclaimed or dropped.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        read(&self.slice, &self.shared, offset, out)
    }

    /// As [`Exposed::read_elements_at`], within this slice: the list of `T`s begins at its first byte.
    ///
    /// # Errors
    /// As [`ExposedSlice::read_at`].
    pub fn read_elements_at<T: Element>(&self, first: usize, out: &mut [T]) -> Result<()> {
        let (offset, _) = byte_range::<T>(first, out.len(), self.len())?;
        self.read_at(offset, bytemuck::cast_slice_mut(out))
    }
}

impl ExposedSlice<Writable> {
    /// As [`Exposed::write_at`], within this slice.
    ///
    /// # Errors
    /// As [`Exposed::write_at`]; [`Error::Revoked`] when the buffer was reclaimed or dropped.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        write(&self.slice, &self.shared, offset, bytes)
    }

    /// As [`Exposed::write_elements_at`], within this slice: the list of `T`s begins at its first byte.
    ///
    /// # Errors
    /// As [`ExposedSlice::write_at`].
    pub fn write_elements_at<T: ReadElement>(&self, first: usize, elements: &[T]) -> Result<()> {
        let (offset, _) = byte_range::<T>(first, elements.len(), self.len())?;
        self.write_at(offset, bytemuck::cast_slice(elements))
    }
}

impl<A> Clone for ExposedSlice<A> {
    fn clone(&self) -> Self {
        ExposedSlice { slice: self.slice.clone(), shared: self.shared.clone(), _access: PhantomData }
    }
}

impl<A> fmt::Debug for ExposedSlice<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExposedSlice({} bytes at {})", self.slice.len, self.slice.offset)
    }
}
