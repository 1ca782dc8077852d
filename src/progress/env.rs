//! What an engine gives the protocol: its memory, and what a lease keeps.

use std::any::Any;
use std::sync::Arc;

use crate::memory::{Region, Slice};
use crate::proto::{Lease, Memory};

impl Memory for Slice {
    fn allocate(len: usize) -> Slice {
        // Large buffers are mapped lazily, so a peer's claim of a size costs little until the bytes arrive.
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

/// Keeps a value alive as long as a peer holds a bulk.
pub(crate) struct LeaseKeepAlive {
    pub token: u128,
    /// Dropped when the peer does not hold the bulk any more; kept alive, never read.
    pub _kept: Arc<dyn Any + Send + Sync>,
}

impl Lease for LeaseKeepAlive {
    fn token(&self) -> u128 {
        self.token
    }
}
