//! What an engine serves.

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
    /// What was found last. Changes with `providers` locked.
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
    /// Tells a definition from a later one of the same name.
    number: u64,
    /// The pool lives as long as something is defined on it.
    _pool: Option<HandlerPool>,
}

/// What was found under a provider and a name.
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
        // It may be the last that holds a closure.
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
        // What the closure holds is dropped here, where no lock is held.
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

/// Threads that run handlers: as many at a time as it has been given, started when they are needed. Clones are the same
/// pool. Those that wait inside a call of this library don't count, so that nested calls can't use up a pool.
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

/// One of several objects behind an engine's address, told apart by a number: the same procedure can be defined by each.
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

    /// Its number.
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
        let kind = HandlerClass::in_pool(self.pool.as_ref().map(|pool| pool.inner.workers.clone()));
        let base = HandlerBase::new(&self.shared, kind);
        let registry = &self.shared.registry;
        let number = registry.next.fetch_add(1, Ordering::Relaxed);
        let entry = HandlerEntry { handler: handler(base), number, _pool: self.pool.clone() };
        if !registry.add(self.id, name, entry) {
            return Err(Error::AlreadyDefined { name: name.to_owned(), provider: self.id });
        }
        // When the engine was finalized meanwhile, it may have let go of its handlers before this one was there.
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

/// A procedure that was defined. Dropping this leaves it defined.
#[derive(Clone, Debug)]
pub struct Registration {
    shared: Weak<EngineShared>,
    provider: u16,
    name: Arc<str>,
    number: u64,
}

impl Registration {
    /// Takes the procedure away: calls that come later find none of its name. Handlers in progress go on. False when it
    /// was taken away before.
    pub fn remove(&self) -> bool {
        let shared = self.shared.upgrade().filter(|shared| !shared.core.is_forked());
        shared.is_some_and(|shared| shared.registry.remove(self.provider, &self.name, self.number))
    }

    /// The name that it was defined by.
    pub fn name(&self) -> &str {
        &self.name
    }
}
