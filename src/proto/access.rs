//! What peers do with exposed memory.

use super::{Env, LinkId};

/// A push of a peer into memory exposed here.
pub(super) struct IncomingPush<E: Env> {
    pub memory: E::Memory,
    pub arrived: usize,
    pub token: u128,
}

/// What a peer does with exposed memory.
#[derive(Clone, Copy)]
pub(super) struct PeerAccess {
    pub link: LinkId,
    /// The peer's number for the transfer.
    pub number: u64,
    pub push: bool,
}

/// The accesses of peers to one exposure. Those that have ended are removed only when there are too many. So the end of one
/// costs nothing here, and revoking takes no search through all that peers are doing.
#[derive(Default)]
pub(super) struct PeerAccesses {
    all: Vec<PeerAccess>,
    /// Number of accesses at which ended ones are removed.
    sweep_at: usize,
}

/// So many accesses are kept without a sweep.
const FEW_ACCESSES: usize = 4;

impl PeerAccesses {
    /// Adds an access. Earlier ones that are no longer `in_progress` are removed when there are many.
    pub(super) fn add(&mut self, access: PeerAccess, in_progress: impl Fn(PeerAccess) -> bool) {
        if self.all.len() >= self.sweep_at {
            self.all.retain(|access| in_progress(*access));
            self.sweep_at = FEW_ACCESSES.max(2 * self.all.len());
        }
        self.all.push(access);
    }

    pub(super) fn into_all(self) -> Vec<PeerAccess> {
        self.all
    }
}
