//! Memory that this engine exposes, as its owner holds it.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::descriptor::{Bulk, BulkMode, ExposeMode};
use super::exposure_state::{ExposureState, Visibility};
use super::grant::Grant;
use super::lease::Released;
use crate::engine::EngineShared;
use crate::memory::{Buffer, ReadOnly, Region, RegionBuffer, Slice, View, Writable, WritableBuffer};
use crate::progress::error_of;
use crate::{Address, Error, Result};

/// A buffer that peers can reach, until it is taken back with [`reclaim`](Exposed::reclaim) or dropped. Made by
/// [`Engine::expose`](crate::Engine::expose) and [`Engine::expose_read_only`](crate::Engine::expose_read_only), or, on the terms
/// of a [`Grant`](crate::Grant), by [`Engine::expose_with`](crate::Engine::expose_with) and its like.
///
/// While it is exposed for writing, nobody has a reference to the buffer: [`read_at`](Exposed::read_at) and
/// [`write_at`](Exposed::write_at) copy. Exposed read-only it can be looked at with [`view`](Exposed::view).
///
/// Dropping it locks peers out, waits for accesses in progress as [`reclaim`](Exposed::reclaim) does, and frees the buffer.
/// Leaking it leaks the buffer, exposed.
///
/// ```compile_fail,E0599
/// # let engine = calomel::Engine::client("loop").unwrap();
/// let local = engine.expose(vec![0u8; 6], calomel::BulkMode::WriteOnly).unwrap();
/// local.view(); // peers may write it at any moment
/// ```
pub struct Exposed<B: Buffer, A = <B as Buffer>::Access> {
    held: BufferGuard<B>,
    exposure: Exposure,
    _access: PhantomData<fn() -> A>,
}

/// The buffer, while it is exposed.
struct BufferGuard<B: Buffer> {
    /// `None` once it has been taken back.
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
        // A forked child leaves the buffer where it is: who holds its gate may not be there.
        if self.shared.core.is_forked() {
            std::mem::forget(self.held.take());
        }
    }
}

/// What peers know the memory by.
pub(super) struct Exposure {
    shared: Arc<EngineShared>,
    bulk: Bulk,
    own: Arc<ExposureState>,
}

impl Exposure {
    /// An error when a device can't be told of the memory, or when the terms make no sense.
    pub(super) fn new(shared: &Arc<EngineShared>, region: &Arc<Region>, access: ExposeMode, grant: &Grant) -> Result<Exposure> {
        let (terms, reach) = grant.terms(shared)?;
        let own = ExposureState::new(&shared.core, region, access, reach, terms.for_one_call)?;
        let mode = access.mode().access();
        // What rides on it is that a peer which may pull may see all of the memory, until it is taken back.
        let unrestricted = mode.read && reach == Visibility::Everybody;
        let memory = if unrestricted { Slice::unrestricted(region) } else { Slice::whole(region) };
        let exposed = shared.core.exec(|proto| {
            proto.admit_exposure()?;
            let token = proto.secret();
            proto.expose(token, memory, mode, terms);
            Ok(token)
        });
        let token = exposed.map_err(|failure| {
            let here = shared.addresses.first().cloned().unwrap_or_else(Address::nowhere);
            error_of(failure, &here, "expose".to_owned(), "expose", Duration::ZERO, 0)
        })?;
        let bulk = Bulk::own(token, region, access, shared.origin.clone(), &own);
        Ok(Exposure { shared: shared.clone(), bulk, own })
    }

    pub(super) fn bulk(&self) -> Bulk {
        self.bulk.clone()
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        self.shared.core.exec_unless_forked(|proto| proto.revoke(self.bulk.token));
    }
}

pub(crate) fn expose<B: WritableBuffer>(
    shared: &Arc<EngineShared>,
    buffer: B,
    mode: BulkMode,
    grant: &Grant,
) -> Result<Exposed<B, Writable>> {
    shared.check("expose")?;
    let held = RegionBuffer::writable(buffer);
    let exposure = Exposure::new(shared, held.region(), ExposeMode::Changing(mode), grant)?;
    Ok(Exposed { held: BufferGuard::new(held, shared), exposure, _access: PhantomData })
}

pub(crate) fn expose_read_only<B: Buffer>(shared: &Arc<EngineShared>, buffer: B, grant: &Grant) -> Result<Exposed<B, ReadOnly>> {
    shared.check("expose")?;
    let held = RegionBuffer::read_only(buffer);
    let exposure = Exposure::new(shared, held.region(), ExposeMode::Constant, grant)?;
    Ok(Exposed { held: BufferGuard::new(held, shared), exposure, _access: PhantomData })
}

impl<B: Buffer, A> Exposed<B, A> {
    fn held(&self) -> &RegionBuffer<B> {
        self.held.held.as_ref().unwrap_or_else(|| unreachable!("only `reclaim` takes it, and consumes the value"))
    }

    pub(super) fn whole(&self) -> Slice {
        Slice::whole(self.held().region())
    }

    pub(super) fn shared(&self) -> &Arc<EngineShared> {
        &self.exposure.shared
    }

    /// The value that stands for this memory towards peers.
    pub fn bulk(&self) -> Bulk {
        self.exposure.bulk()
    }

    /// Length in bytes, all segments together.
    pub fn len(&self) -> usize {
        self.held().region().len()
    }

    /// True when there are no bytes in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What peers may do.
    pub fn mode(&self) -> BulkMode {
        self.exposure.bulk.mode()
    }

    /// The part of `len` bytes at `offset`, both in bytes, as a target or source of transfers.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<ExposedSlice<A>> {
        let slice = self.whole().part(offset, len).ok_or(Error::OutOfRange { offset, len, size: self.len() })?;
        Ok(ExposedSlice { slice, shared: self.exposure.shared.clone(), _access: PhantomData })
    }

    /// Takes the buffer back: peers are locked out, accesses in progress end, and only then the buffer is returned. Transfers
    /// that were in progress end with [`Error::Revoked`].
    ///
    /// That takes some microseconds, whatever the peers do. Over shared memory peers that were stopped while they read are waited
    /// for, for a second at most, however many there are. Over `verbs://` the device forgets the memory, which takes longer the more there is, and
    /// own transfers with it that are under way have 100 ms to end.
    ///
    /// In a forked child this is the child's copy of the buffer, as it was when the process forked; but of
    /// [`EngineBuffer`](crate::EngineBuffer)s, which a child does not have: they can be dropped there, and not be looked at.
    #[allow(unsafe_code)]
    pub fn reclaim(mut self) -> B {
        let held = self.held.held.take().unwrap_or_else(|| unreachable!("only `reclaim` takes it, and consumes the value"));
        if self.exposure.shared.core.is_forked() {
            // SAFETY: nothing of the engine works in a forked child, and what reaches the region does so through this value,
            // or through an operation of the engine, which is refused.
            return unsafe { held.take_unfenced() };
        }
        let Exposed { exposure, .. } = self;
        drop(exposure);
        held.take()
    }

    /// Copies `out.len()` bytes from `offset` on out of the exposed memory. Peers' writes come before it or after it, but over
    /// `verbs://`: there a device writes at any moment, also in between, and some of the bytes may be old and some new.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Unsupported`] in a forked child.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.exposure.shared.check_process(|| "reading exposed memory".to_owned())?;
        let size = self.len();
        let part = self.whole().part(offset, out.len()).ok_or(Error::OutOfRange { offset, len: out.len(), size })?;
        let open = part.read(out);
        debug_assert!(open, "the gate closes when the buffer is taken back");
        Ok(())
    }

    /// Tells when no peer holds a [`Bulk`] of this memory any more.
    pub fn released(&self) -> Released {
        let owner = self.exposure.bulk.origin.addresses.first().cloned();
        Released::new(&self.exposure.own, owner.unwrap_or_else(Address::nowhere))
    }
}

impl<B: WritableBuffer> Exposed<B, Writable> {
    /// Copies `bytes` into the exposed memory at `offset`. Peers' writes come before it or after it, and so do reads, but of
    /// peers that reach the memory by themselves: over `verbs://`, where their writes may come in between as well, and over
    /// `shm://`, where memory is lent. Such a peer may read some of the bytes as they were, and some as they are now.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Unsupported`] in a forked child.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.exposure.shared.check_process(|| "writing exposed memory".to_owned())?;
        let size = self.len();
        let part = self.whole().part(offset, bytes.len()).ok_or(Error::OutOfRange { offset, len: bytes.len(), size })?;
        let open = part.write(bytes);
        debug_assert!(open, "the gate closes when the buffer is taken back");
        Ok(())
    }
}

impl<B: Buffer + View> Exposed<B, ReadOnly> {
    /// The buffer's content: nobody writes it while it is exposed read-only.
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

/// A part of an [`Exposed`] buffer, as a target or source of transfers. Once the buffer has been taken back, transfers with
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

    /// True when there are no bytes in it.
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
