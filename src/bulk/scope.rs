//! `Scope`: exposes borrowed memory until a closure returns.

use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;

use super::descriptor::Bulk;
use super::exposed::Exposure;
use super::grant::Grant;
use super::mode::{BulkMode, ExposeMode};
use crate::Result;
use crate::engine::{Engine, EngineShared};
use crate::memory::{BorrowedRegion, ClosedRegion, Element, Region};

/// Exposes borrowed memory until it ends; see [`Engine::scope`](crate::Engine::scope).
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
    exposed: Mutex<Vec<(Exposure, Arc<Region>)>>,
}

impl Drop for ScopeInner {
    /// Closes the gates, and waits for the accesses in progress.
    fn drop(&mut self) {
        let exposed = std::mem::take(self.exposed.get_mut());
        if self.shared.core.is_forked() {
            // In a forked child the engine does not work, so no access is in progress, and the thread that holds a gate may not
            // exist.
            return;
        }
        // All gates first, whatever happens while the exposures are revoked.
        let shut: Vec<_> = exposed.iter().map(|(_, region)| region.shut()).collect();
        shut.into_iter().for_each(ClosedRegion::wait);
        drop(exposed);
    }
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Exposes borrowed memory. `mode` is what peers may do.
    ///
    /// # Errors
    /// As [`Engine::expose`](crate::Engine::expose).
    pub fn expose<T: Element>(&'scope self, buffer: &'scope mut [T], mode: BulkMode) -> Result<Bulk> {
        self.expose_with(buffer, mode, &Grant::new())
    }

    /// Exposes borrowed memory with the restrictions of a [`Grant`], until the scope ends at the latest.
    ///
    /// # Errors
    /// As [`Engine::expose_with`](crate::Engine::expose_with).
    pub fn expose_with<T: Element>(&'scope self, buffer: &'scope mut [T], mode: BulkMode, grant: &Grant) -> Result<Bulk> {
        self.add(BorrowedRegion::writable(bytemuck::cast_slice_mut(buffer)), ExposeMode::Changing(mode), grant)
    }

    /// Exposes borrowed memory, a slice or a `str`, for peers to read.
    ///
    /// # Errors
    /// As [`Engine::expose`](crate::Engine::expose).
    pub fn expose_read_only<T: AsBytes + ?Sized>(&'scope self, buffer: &'scope T) -> Result<Bulk> {
        self.expose_read_only_with(buffer, &Grant::new())
    }

    /// Exposes borrowed memory, a slice or a `str`, for peers to read, with the restrictions of a [`Grant`].
    ///
    /// # Errors
    /// As [`Engine::expose_with`](crate::Engine::expose_with).
    pub fn expose_read_only_with<T: AsBytes + ?Sized>(&'scope self, buffer: &'scope T, grant: &Grant) -> Result<Bulk> {
        self.add(BorrowedRegion::read_only(buffer.as_bytes()), ExposeMode::Constant, grant)
    }

    #[allow(unsafe_code)]
    fn add(&'scope self, borrowed: BorrowedRegion<'scope>, access: ExposeMode, grant: &Grant) -> Result<Bulk> {
        let ScopeInner { shared, exposed } = &*self.inner;
        shared.check("expose")?;
        let exposure = Exposure::new(shared, borrowed.region(), access, grant)?;
        let bulk = exposure.bulk();
        // SAFETY: `ScopeInner` closes the region when it is dropped, which `scope` does before `'scope` ends: it keeps the only
        // reference, and users have but a shared one to the `Scope` around it.
        let region = unsafe { borrowed.detach() };
        exposed.lock().push((exposure, region));
        Ok(bulk)
    }
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scope({} exposed)", self.inner.exposed.lock().len())
    }
}

/// What a scope can expose read-only: `[T]` and `str`.
pub trait AsBytes: sealed::AsBytes {}

mod sealed {
    pub trait AsBytes {
        #[doc(hidden)]
        fn as_bytes(&self) -> &[u8];
    }
}

impl<T: crate::memory::ReadElement> AsBytes for [T] {}

impl<T: crate::memory::ReadElement> sealed::AsBytes for [T] {
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl AsBytes for str {}

impl sealed::AsBytes for str {
    fn as_bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl Engine {
    /// Exposes borrowed memory for as long as a closure runs, as [`std::thread::scope`] does with threads. When the closure
    /// returns or panics, peers' access is revoked before the borrow ends.
    ///
    /// # Errors
    /// What the closure returns, and [`Error::Finalized`].
    pub fn scope<'env, T, F>(&self, work: F) -> Result<T>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    {
        self.shared().check("scope")?;
        let inner = Arc::new(ScopeInner { shared: self.shared().clone(), exposed: Mutex::default() });
        let scope = Scope { inner, _scope: PhantomData, _env: PhantomData };
        // The scope is dropped when `work` has returned or panicked.
        work(&scope)
    }
}
