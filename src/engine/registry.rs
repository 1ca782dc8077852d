//! The procedures that an engine serves, with the pools that run them; and those that it calls, with what it has learned of their
//! types.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::{Mutex, RwLock};

use super::statistics::{CallCounts, CallPath, CallTable};
use crate::progress::{Handler, Workers};
use crate::shape::{DeclarationNumbers, Knowledge, Receivers};

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
pub(crate) enum LookupResult {
    Handler(Arc<dyn Handler>),
    NoProcedure,
    NoProvider,
}

impl Registry {
    #[inline]
    pub(crate) fn find(&self, provider: u16, name: &Arc<str>) -> LookupResult {
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

    /// Adds a handler, and returns its number. `None` when the name is taken.
    pub(crate) fn add(&self, provider: u16, name: &str, handler: Arc<dyn Handler>, pool: Option<HandlerPool>) -> Option<u64> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = HandlerEntry { handler, number, _pool: pool };
        let mut providers = self.providers.write();
        match providers.entry(provider).or_default().entry(name.into()) {
            std::collections::hash_map::Entry::Occupied(_) => {
                drop(providers);
                // The user's closure is dropped where no lock is held.
                drop(entry);
                None
            }
            std::collections::hash_map::Entry::Vacant(vacant) => {
                vacant.insert(entry);
                Some(number)
            }
        }
    }

    /// Removes the handler of this number; false when it is not there any more.
    pub(crate) fn remove(&self, provider: u16, name: &str, number: u64) -> bool {
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

    /// Removes all handlers of a provider, and returns how many there were.
    pub(crate) fn remove_provider(&self, provider: u16) -> usize {
        let (removed, last) = {
            let mut providers = self.providers.write();
            (providers.remove(&provider), self.last.lock().take())
        };
        drop(last);
        // The users' closures are dropped where no lock is held.
        removed.map_or(0, |removed| removed.len())
    }

    /// The providers with procedures and their names, in order.
    pub(crate) fn names(&self) -> Vec<(u16, String)> {
        let providers = self.providers.read();
        let named = |(id, procedures): (&u16, &HashMap<Arc<str>, HandlerEntry>)| {
            procedures.keys().map(|name| (*id, name.to_string())).collect::<Vec<_>>()
        };
        let mut names: Vec<(u16, String)> = providers.iter().flat_map(named).collect();
        names.sort_unstable();
        names
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

    pub(crate) fn workers(&self) -> Arc<Workers> {
        self.inner.workers.clone()
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

/// A procedure's name, what is known of the shapes of its types, and the calls of it so far.
pub(crate) struct ProcedureInfo {
    pub name: Arc<str>,
    /// Identifies it within its engine, for [`Procedures::labels`].
    pub label: u32,
    pub calls: CallTable,
    pub arguments: Knowledge,
    pub results: Receivers,
}

impl ProcedureInfo {
    pub(crate) fn new(name: &str, label: u32) -> Arc<ProcedureInfo> {
        let name: Arc<str> = name.into();
        let (arguments, results) = (Knowledge::new(Some(name.clone())), Receivers::default());
        Arc::new(ProcedureInfo { name, label, calls: CallTable::default(), arguments, results })
    }
}

/// The name, and the names of the two types.
type ProcedureKey = (String, &'static str, &'static str);

/// All procedures that the program has named, so that each type's shape is learned once. (Different types of one name are
/// distinguished by the shapes of their values.)
#[derive(Default)]
pub(crate) struct Procedures {
    known: Mutex<HashMap<ProcedureKey, Arc<ProcedureInfo>>>,
    pub numbers: DeclarationNumbers,
}

impl Procedures {
    pub(crate) fn intern(&self, name: &str, arguments: &'static str, result: &'static str) -> Arc<ProcedureInfo> {
        let mut known = self.known.lock();
        let label = u32::try_from(known.len() + 1).unwrap_or(0);
        known.entry((name.to_owned(), arguments, result)).or_insert_with(|| ProcedureInfo::new(name, label)).clone()
    }

    /// The names of the procedures, by their labels.
    pub(crate) fn labels(&self) -> HashMap<u32, String> {
        self.known.lock().values().map(|info| (info.label, info.name.to_string())).collect()
    }

    /// The counts of all calls of this engine, by procedure and path.
    pub(crate) fn calls(&self) -> Vec<(Arc<str>, CallPath, Box<CallCounts>)> {
        let known: Vec<Arc<ProcedureInfo>> = self.known.lock().values().cloned().collect();
        let of = |info: &Arc<ProcedureInfo>| {
            let name = info.name.clone();
            info.calls.snapshot().into_iter().map(move |(path, counts)| (name.clone(), path, counts))
        };
        known.iter().flat_map(of).collect()
    }
}
