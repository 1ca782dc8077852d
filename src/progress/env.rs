//! What the protocol's opaque types are in a live engine.

use std::any::Any;
use std::sync::Arc;

use super::completion::Completion;
use crate::memory::{Region, Slice};
use crate::proto::{Env, Lease, Memory};
use crate::shape::Verdicts;

/// The protocol as an engine runs it.
pub(crate) enum EngineEnv {}

impl Env for EngineEnv {
    type Memory = Slice;
    type Waiter = Arc<Completion>;
    type Lease = LeaseKeepAlive;
    type Verdicts = Verdicts;
}

impl Memory for Slice {
    fn allocate(len: usize) -> Slice {
        // Pages that are not written take no memory: a peer's claim of a size costs nothing until the bytes come.
        Slice::whole(&Region::for_message(len))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn part(&self, offset: usize, len: usize) -> Option<Slice> {
        Slice::part(self, offset, len)
    }

    fn for_one_operation(&self) -> Slice {
        Slice::for_one_operation(self)
    }

    fn end(&self) {
        Slice::end(self);
    }
}

/// Keeps something as long as a peer holds a bulk.
pub(crate) struct LeaseKeepAlive {
    pub token: u128,
    /// Dropped when the peer holds the bulk no more; nobody looks at it.
    pub _kept: Arc<dyn Any + Send + Sync>,
}

impl Lease for LeaseKeepAlive {
    fn token(&self) -> u128 {
        self.token
    }
}
