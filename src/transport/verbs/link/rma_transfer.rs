//! A transfer between memory here and a peer's, as a sequence of RMA requests.

use std::sync::Arc;

use super::super::memory::Registered;
use super::super::sys::{Opcode, Sge};
use super::super::wire::RemoteSegment;
use crate::memory::{Loan, Slice};

/// Longest request, in bytes: a transfer can be cancelled between requests, others get their turn, and a large one keeps
/// several outstanding.
const MAX_REQUEST: usize = 256 << 10;

/// A transfer between memories that users have exposed.
pub(super) struct RmaTransfer {
    pub(super) operation: u64,
    pull: bool,
    pub(super) local: Slice,
    registered: Arc<Registered>,
    remote: Vec<RemoteSegment>,
    /// Progress of posting: bytes in all; index of the remote segment; bytes of that segment.
    pub(super) posted: usize,
    segment: usize,
    within: u64,
    pub(super) loan: Arc<dyn Loan>,
}

impl RmaTransfer {
    pub(super) fn new(
        operation: u64,
        pull: bool,
        local: &Slice,
        registered: Arc<Registered>,
        remote: Vec<RemoteSegment>,
        loan: &Arc<dyn Loan>,
    ) -> RmaTransfer {
        let (local, loan) = (local.clone(), loan.clone());
        RmaTransfer { operation, pull, local, registered, remote, posted: 0, segment: 0, within: 0, loan }
    }

    /// The next request: as much as fits of one remote segment and of `most` local ones.
    pub(super) fn next(&mut self, most: usize) -> Option<(Opcode, Vec<Sge>)> {
        let left = self.local.len - self.posted;
        let segment = self.remote.get(self.segment).filter(|_| left > 0)?;
        let len = left.min(usize::try_from(segment.len - self.within).unwrap_or(usize::MAX)).min(MAX_REQUEST);
        let mut sges = Vec::new();
        let len = self.registered.sges(self.local.offset + self.posted, len, most, &mut sges);
        if len == 0 {
            return None;
        }
        let (address, key) = (segment.address + self.within, segment.key);
        self.posted += len;
        self.within += len as u64;
        if self.within == segment.len {
            self.segment += 1;
            self.within = 0;
        }
        Some((if self.pull { Opcode::Read { address, key } } else { Opcode::Write { address, key } }, sges))
    }
}
