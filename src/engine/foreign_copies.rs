//! What an engine holds of other engines' memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::sync::Mutex;

/// Set when the owner has revoked the memory.
pub(crate) type StaleFlag = Arc<AtomicBool>;

/// The copies and keys of other engines' memory that this engine holds, so that they can be marked stale when the owner revokes
/// the memory.
#[derive(Default)]
pub(crate) struct ForeignCopies {
    known: Mutex<KnownTokens>,
}

#[derive(Default)]
struct KnownTokens {
    /// All bulks of one token share one flag.
    by_token: HashMap<u128, Weak<AtomicBool>>,
    /// The table's size at which dead entries are removed next.
    sweep_at: usize,
}

/// Below this size the table is not swept.
const MIN_SWEEP: usize = 64;

impl ForeignCopies {
    /// The flag that is set when the memory of this token is revoked.
    pub(crate) fn watch(&self, token: u128) -> StaleFlag {
        let mut known = self.known.lock();
        let KnownTokens { by_token, sweep_at } = &mut *known;
        if let Some(stale) = by_token.get(&token).and_then(Weak::upgrade) {
            return stale;
        }
        if by_token.len() >= *sweep_at {
            by_token.retain(|_, stale| stale.strong_count() > 0);
            *sweep_at = MIN_SWEEP.max(2 * by_token.len());
        }
        let stale = StaleFlag::default();
        by_token.insert(token, Arc::downgrade(&stale));
        stale
    }

    pub(crate) fn expire(&self, token: u128) {
        let known = self.known.lock().by_token.remove(&token);
        if let Some(stale) = known.and_then(|stale| stale.upgrade()) {
            stale.store(true, Ordering::Release);
        }
    }
}
