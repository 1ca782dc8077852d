//! `Scope`: exposes borrowed memory until a closure returns.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::sync::Mutex;

use super::borrowed::{BorrowedSegments, BorrowedSegmentsMut, SegmentList, SegmentListMut};
use super::descriptor::Bulk;
use super::exposed::Exposure;
use super::grant::Grant;
use super::mode::{BulkMode, ExposeMode};
use super::remote::RemoteBulk;
use super::transfer::Transfer;
use crate::Result;
use crate::engine::{Engine, EngineShared};
use crate::memory::{BorrowedRegion, BorrowedSlice, ClosedRegion, Element, ReadElement, Region, Slice};

/// Exposes borrowed memory until it ends; see [`Engine::scope`](crate::Engine::scope).
///
/// Several borrows are the segments of one bulk, whatever their element types:
///
/// ```
/// # use calomel::{Bulk, BulkMode, Engine, Request};
/// # fn main() -> calomel::Result<()> {
/// # let server = Engine::server("loop://")?;
/// # server.define("count", |_: &Request, bulk: Bulk| (bulk.segment_count(), bulk.len()))?;
/// # let client = Engine::client("loop")?;
/// # let peer = client.lookup(server.address())?;
/// # let count = client.procedure::<Bulk, (usize, usize)>("count");
/// let (mut ids, mut masses) = (vec![0u32; 10], [0f64; 10]);
/// let (segments, bytes) = client.scope(|s| {
///     let bulk = s.expose((&mut ids, &mut masses[..5]), BulkMode::ReadWrite)?;
///     count.on(&peer).call(&bulk)
/// })?;
/// assert_eq!((segments, bytes), (2, 10 * 4 + 5 * 8));
/// # Ok(())
/// # }
/// ```
///
/// Exposed memory stays borrowed until the scope ends, which revokes peers' access to it:
///
/// ```compile_fail,E0503
/// # use calomel::{BulkMode, Engine};
/// # let engine = Engine::client("loop").unwrap();
/// let mut buf = vec![0u8; 16];
/// engine.scope(|s| {
///     let bulk = s.expose(&mut buf[..], BulkMode::ReadWrite)?;
///     buf[0] = 1; // a peer may be writing it
///     Ok(())
/// }).unwrap();
/// ```
pub struct Scope<'scope, 'env: 'scope> {
    inner: Arc<ScopeInner>,
    /// Invariant, so that the borrows last as long as the scope, and no shorter.
    _scope: PhantomData<&'scope mut &'scope ()>,
    _env: PhantomData<&'env mut &'env ()>,
}

struct ScopeInner {
    shared: Arc<EngineShared>,
    regions: Mutex<Vec<ScopedRegion>>,
}

/// Borrowed memory, which is closed before the scope ends.
struct ScopedRegion {
    region: Arc<Region>,
    /// `None` for the memory of a transfer, which no peer can name.
    exposure: Option<Exposure>,
}

impl ScopeInner {
    fn keep(&self, exposure: Option<Exposure>, region: Arc<Region>) {
        let mut regions = self.regions.lock();
        let mut ended = Vec::new();
        if regions.len() == regions.capacity() {
            // Before the list grows, what ended transfers have left is removed. Only the list refers to that.
            let is_over = |kept: &mut ScopedRegion| kept.exposure.is_none() && Arc::strong_count(&kept.region) == 1;
            ended.extend(regions.extract_if(.., is_over));
        }
        regions.push(ScopedRegion { region, exposure });
        drop(regions);
        ended.iter().for_each(|kept: &ScopedRegion| kept.region.close());
    }
}

impl Drop for ScopeInner {
    /// Closes the gates, and waits for the accesses in progress.
    fn drop(&mut self) {
        let regions = std::mem::take(self.regions.get_mut());
        if self.shared.core.is_forked() {
            // In a forked child the engine does not work, so no access is in progress, and the thread that holds a gate may not
            // exist.
            return;
        }
        // All gates first, whatever happens while the exposures are revoked.
        let shut: Vec<_> = regions.iter().map(|kept| kept.region.shut()).collect();
        shut.into_iter().for_each(ClosedRegion::wait);
        drop(regions);
    }
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Exposes borrowed memory. `mode` is what peers may do.
    ///
    /// A tuple, an array or a `Vec` of borrows becomes one bulk: its segments are the borrowed slices in this order, and
    /// offsets in bytes count across all of them. A `&mut [T]` in a variable is moved; write `&mut *slice` to use it after the
    /// scope.
    ///
    /// # Errors
    /// As [`Engine::expose`](crate::Engine::expose).
    pub fn expose<B, Kind>(&'scope self, buffer: B, mode: BulkMode) -> Result<Bulk>
    where
        B: BorrowedSegmentsMut<'scope, Kind>,
    {
        self.expose_with(buffer, mode, &Grant::new())
    }

    /// Exposes borrowed memory with the restrictions of a [`Grant`], until the scope ends at the latest.
    ///
    /// # Errors
    /// As [`Engine::expose_with`](crate::Engine::expose_with).
    pub fn expose_with<B, Kind>(&'scope self, buffer: B, mode: BulkMode, grant: &Grant) -> Result<Bulk>
    where
        B: BorrowedSegmentsMut<'scope, Kind>,
    {
        let mut segments = SegmentListMut::new();
        buffer.append_to(&mut segments);
        self.add(BorrowedRegion::writable(segments), ExposeMode::Changing(mode), grant)
    }

    /// Exposes borrowed memory for peers to read: a slice, a value, text, or several of them as one bulk, as
    /// [`Scope::expose`] does.
    ///
    /// # Errors
    /// As [`Engine::expose`](crate::Engine::expose).
    pub fn expose_read_only<B, Kind>(&'scope self, buffer: B) -> Result<Bulk>
    where
        B: BorrowedSegments<'scope, Kind>,
    {
        self.expose_read_only_with(buffer, &Grant::new())
    }

    /// Exposes borrowed memory as [`Scope::expose_read_only`] does, with the restrictions of a [`Grant`].
    ///
    /// # Errors
    /// As [`Engine::expose_with`](crate::Engine::expose_with).
    pub fn expose_read_only_with<B, Kind>(&'scope self, buffer: B, grant: &Grant) -> Result<Bulk>
    where
        B: BorrowedSegments<'scope, Kind>,
    {
        let mut segments = SegmentList::new();
        buffer.append_to(&mut segments);
        self.add(BorrowedRegion::read_only(segments), ExposeMode::Constant, grant)
    }

    /// Starts a pull into borrowed memory, and returns at once. The transfer returns the slice when it has ended.
    ///
    /// Dropping the transfer cancels it. One that is leaked ends with the scope at the latest.
    ///
    /// # Errors
    /// They come through the [`Transfer`], as those of [`RemoteBulk::pull_into`], and
    /// [`Error::OtherEngine`](crate::Error::OtherEngine) when the remote bulk's endpoint is of another engine than this scope.
    ///
    /// ```
    /// # use calomel::{BulkMode, Engine, Transfer};
    /// # fn main() -> calomel::Result<()> {
    /// # let server = Engine::server("loop://")?;
    /// # let client = Engine::client("loop")?;
    /// # let theirs = server.expose_read_only((0..100u32).collect::<Vec<_>>())?;
    /// # let remote = theirs.bulk().on(&client.lookup(server.address())?);
    /// let mut numbers = [0u32; 100];
    /// let sum = client.scope(|s| {
    ///     let mut pulls = Vec::new();
    ///     for (i, part) in numbers.chunks_mut(25).enumerate() {
    ///         pulls.push(s.start_pull_into(&remote.slice_of::<u32>(25 * i, 25)?, part));
    ///     }
    ///     let mut sum = 0;
    ///     while !pulls.is_empty() {
    ///         let (_, (result, part)) = Transfer::wait_any(&mut pulls);
    ///         result?;
    ///         sum += part.iter().sum::<u32>(); // while the others go on
    ///     }
    ///     Ok(sum)
    /// })?;
    /// assert_eq!(sum, 4950);
    /// # Ok(())
    /// # }
    /// ```
    pub fn start_pull_into<T: Element>(
        &'scope self,
        remote: &RemoteBulk,
        target: &'scope mut [T],
    ) -> Transfer<[u8; 0], &'scope mut [T]> {
        let target = BorrowedSlice::new(target);
        self.inner.keep(None, target.region().clone());
        let memory = Slice::whole(target.region());
        Transfer::start(remote, true, target, memory, remote.check_scope(&self.inner.shared))
    }

    /// Starts a push from borrowed memory, and returns at once. The transfer returns the slice when it has ended; see
    /// [`Scope::start_pull_into`].
    ///
    /// # Errors
    /// As [`Scope::start_pull_into`].
    pub fn start_push_from<T: ReadElement>(
        &'scope self,
        remote: &RemoteBulk,
        source: &'scope [T],
    ) -> Transfer<[u8; 0], &'scope [T]> {
        let region = self.detach(BorrowedRegion::read_only([bytemuck::cast_slice(source)]));
        self.inner.keep(None, region.clone());
        Transfer::start(remote, false, source, Slice::whole(&region), remote.check_scope(&self.inner.shared))
    }

    fn add(&'scope self, borrowed: BorrowedRegion<'scope>, access: ExposeMode, grant: &Grant) -> Result<Bulk> {
        let shared = &self.inner.shared;
        shared.check("expose")?;
        let mut exposure = Exposure::new(shared, borrowed.region(), access, grant)?;
        exposure.expect_end();
        let bulk = exposure.bulk();
        self.inner.keep(Some(exposure), self.detach(borrowed));
        Ok(bulk)
    }

    /// The region of memory that is borrowed until the scope ends. The caller keeps it with the scope, next.
    #[allow(unsafe_code)]
    fn detach(&'scope self, borrowed: BorrowedRegion<'scope>) -> Arc<Region> {
        // SAFETY: `ScopeInner` closes the region when it is dropped, which `scope` does before `'scope` ends: it keeps the only
        // reference, and users have but a shared one to the `Scope` around it.
        unsafe { borrowed.detach() }
    }
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scope({} borrowed)", self.inner.regions.lock().len())
    }
}

impl Engine {
    /// Exposes borrowed memory for as long as a closure runs, as [`std::thread::scope`] does with threads. When the closure
    /// returns or panics, peers' access is revoked before the borrow ends.
    ///
    /// # Errors
    /// What the closure returns, and [`Error::Finalized`](crate::Error::Finalized).
    pub fn scope<'env, T, F>(&self, work: F) -> Result<T>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    {
        self.shared().check("scope")?;
        let inner = Arc::new(ScopeInner { shared: self.shared().clone(), regions: Mutex::default() });
        let scope = Scope { inner, _scope: PhantomData, _env: PhantomData };
        // The scope is dropped when `work` has returned or panicked.
        work(&scope)
    }
}
