//! The registry of handlers, providers and handler pools.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::handlers::{AsyncHandler, BorrowedArgs, BorrowingHandler, ClosureHandler, DeferredHandler, HandlerBase};
use super::request::{Request, Responder};
use crate::engine::EngineShared;
use crate::progress::{Handler, HandlerClass, Workers};
use crate::proto::wire::MAX_NAME;
use crate::{Error, Result};

/// Handlers by provider and name.
#[derive(Default)]
pub(crate) struct Registry {
    providers: RwLock<HashMap<u16, HashMap<Arc<str>, HandlerEntry>>>,
    /// The last lookup's result. Changes only while `providers` is locked.
    last: Mutex<Option<Last>>,
    next: AtomicU64,
}

struct Last {
    provider: u16,
    name: Arc<str>,
    handler: Arc<dyn Handler>,
}

struct HandlerEntry {
    handler: Arc<dyn Handler>,
    /// Distinguishes this definition from a later one of the same name.
    number: u64,
    /// Keeps the pool alive while a procedure is defined on it.
    _pool: Option<HandlerPool>,
}

/// The result of looking up a provider and a name.
pub(super) enum LookupResult {
    Handler(Arc<dyn Handler>),
    NoProcedure,
    NoProvider,
}

impl Registry {
    pub(super) fn find(&self, provider: u16, name: &Arc<str>) -> LookupResult {
        if let Some(last) = &*self.last.lock()
            && last.provider == provider
            && last.name == *name
        {
            return LookupResult::Handler(last.handler.clone());
        }
        let providers = self.providers.read();
        let handler = match providers.get(&provider) {
            Some(procedures) => match procedures.get(&**name) {
                Some(entry) => entry.handler.clone(),
                None => return LookupResult::NoProcedure,
            },
            None if provider == 0 => return LookupResult::NoProcedure,
            None => return LookupResult::NoProvider,
        };
        let before = self.last.lock().replace(Last { provider, name: name.clone(), handler: handler.clone() });
        drop(providers);
        // This may drop a user's closure, so no lock is held.
        drop(before);
        LookupResult::Handler(handler)
    }

    /// False when the name is taken.
    fn add(&self, provider: u16, name: &str, entry: HandlerEntry) -> bool {
        let mut providers = self.providers.write();
        match providers.entry(provider).or_default().entry(name.into()) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(vacant) => {
                vacant.insert(entry);
                true
            }
        }
    }

    fn remove(&self, provider: u16, name: &str, number: u64) -> bool {
        let mut providers = self.providers.write();
        let Some(procedures) = providers.get_mut(&provider) else { return false };
        let found = procedures.get(name).is_some_and(|entry| entry.number == number);
        let removed = if found { procedures.remove(name) } else { None };
        if procedures.is_empty() {
            providers.remove(&provider);
        }
        let last = self.last.lock().take();
        drop(providers);
        drop(last);
        // The user's closure is dropped where no lock is held.
        removed.is_some()
    }

    pub(crate) fn clear(&self) {
        let (all, last) = {
            let mut providers = self.providers.write();
            (std::mem::take(&mut *providers), self.last.lock().take())
        };
        drop((all, last));
    }
}

/// A pool of threads that run handlers. Threads start when they are needed; a thread that waits inside a call of this library
/// does not count against the pool's size, so nested calls can't exhaust it. Clones are the same pool. Its threads end when the
/// last clone is dropped and no procedure is defined on it any more.
#[derive(Clone)]
pub struct HandlerPool {
    inner: Arc<PoolInner>,
}

struct PoolInner {
    workers: Arc<Workers>,
}

impl HandlerPool {
    /// A pool that runs up to `threads` handlers at a time; at least one.
    pub fn new(threads: usize) -> HandlerPool {
        HandlerPool { inner: Arc::new(PoolInner { workers: Workers::new("pool", threads) }) }
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        self.workers.stop();
    }
}

impl fmt::Debug for HandlerPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerPool")
    }
}

/// One of several sets of procedures behind an engine's address, identified by a number: each can define the same names.
/// Made by [`Engine::provider`](crate::Engine::provider).
#[derive(Clone)]
pub struct Provider {
    shared: Arc<EngineShared>,
    id: u16,
    pool: Option<HandlerPool>,
}

impl Provider {
    pub(crate) fn new(shared: &Arc<EngineShared>, id: u16, pool: Option<HandlerPool>) -> Provider {
        Provider { shared: shared.clone(), id, pool }
    }

    /// The provider's number; 0 is the engine itself.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// The same provider, with `pool` to run the handlers that are defined through it.
    pub fn pool(&self, pool: &HandlerPool) -> Provider {
        Provider { pool: Some(pool.clone()), ..self.clone() }
    }

    /// As [`Engine::define`](crate::Engine::define), for this provider.
    ///
    /// # Errors
    /// As there.
    pub fn define<A, R, F>(&self, name: &str, handler: F) -> Result<Registration>
    where
        A: DeserializeOwned + 'static,
        R: Serialize + 'static,
        F: Fn(&Request, A) -> R + Send + Sync + 'static,
    {
        self.add(name, |base| Arc::new(ClosureHandler { base, f: handler, _types: PhantomData::<fn(A) -> R> }))
    }

    /// As [`Engine::define_async`](crate::Engine::define_async), for this provider.
    ///
    /// # Errors
    /// As there.
    pub fn define_async<A, R, F, Fut>(&self, name: &str, handler: F) -> Result<Registration>
    where
        A: DeserializeOwned + 'static,
        R: Serialize + 'static,
        F: Fn(Request, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
    {
        self.add(name, |base| Arc::new(AsyncHandler { base, f: handler, _types: PhantomData::<fn(A) -> R> }))
    }

    /// As [`Engine::define_deferred`](crate::Engine::define_deferred), for this provider.
    ///
    /// # Errors
    /// As there.
    pub fn define_deferred<A, R, F>(&self, name: &str, handler: F) -> Result<Registration>
    where
        A: DeserializeOwned + 'static,
        R: Serialize + 'static,
        F: Fn(Responder<R>, A) + Send + Sync + 'static,
    {
        self.add(name, |base| Arc::new(DeferredHandler { base, f: handler, _types: PhantomData::<fn(A) -> R> }))
    }

    /// As [`Engine::define_borrowed`](crate::Engine::define_borrowed), for this provider.
    ///
    /// # Errors
    /// As there.
    pub fn define_borrowed<A, R, F>(&self, name: &str, handler: F) -> Result<Registration>
    where
        A: BorrowedArgs + ?Sized + 'static,
        R: Serialize + 'static,
        F: for<'a> Fn(&Request, A::With<'a>) -> R + Send + Sync + 'static,
    {
        self.add(name, |base| Arc::new(BorrowingHandler { base, f: handler, _types: PhantomData::<fn(&A) -> R> }))
    }

    fn add(&self, name: &str, handler: impl FnOnce(HandlerBase) -> Arc<dyn Handler>) -> Result<Registration> {
        self.shared.check("define")?;
        if name.len() > MAX_NAME {
            return Err(Error::MessageTooLarge { size: name.len(), limit: MAX_NAME });
        }
        let class = HandlerClass::in_pool(self.pool.as_ref().map(|pool| pool.inner.workers.clone()));
        let base = HandlerBase::new(&self.shared, class);
        let registry = &self.shared.registry;
        let number = registry.next.fetch_add(1, Ordering::Relaxed);
        let entry = HandlerEntry { handler: handler(base), number, _pool: self.pool.clone() };
        if !registry.add(self.id, name, entry) {
            return Err(Error::AlreadyDefined { name: name.to_owned(), provider: self.id });
        }
        // The engine may have been finalized meanwhile, and have dropped its handlers before this one was added.
        self.shared.check("define").inspect_err(|_| {
            registry.remove(self.id, name, number);
        })?;
        Ok(Registration { shared: Arc::downgrade(&self.shared), provider: self.id, name: name.into(), number })
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Provider({})", self.id)
    }
}

/// A defined procedure. Dropping this leaves the procedure defined; [`Registration::remove`] removes it.
#[derive(Clone, Debug)]
pub struct Registration {
    shared: Weak<EngineShared>,
    provider: u16,
    name: Arc<str>,
    number: u64,
}

impl Registration {
    /// Removes the procedure: later calls end with [`Error::NoSuchProcedure`], handlers in progress go on. False when it was
    /// removed before.
    pub fn remove(&self) -> bool {
        let shared = self.shared.upgrade().filter(|shared| !shared.core.is_forked());
        shared.is_some_and(|shared| shared.registry.remove(self.provider, &self.name, self.number))
    }

    /// The name that the procedure was defined with.
    pub fn name(&self) -> &str {
        &self.name
    }
}
