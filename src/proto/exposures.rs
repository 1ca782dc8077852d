//! Memory that peers may access, by token; what they do with it at the moment; and the leases on it.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use slotmap::KeyData;

use super::policy::{Mode, PolicyState};
use super::refusals::Cause;
use super::wire::{Message, Range, Status};
use super::{EngineStage, Env, Lease, LeaseRange, LinkId, Memory, Output, Proto};

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

struct ExposedMemory<M> {
    memory: M,
    mode: Mode,
    /// Most exposures have none; a box keeps those small.
    grant: Option<Box<PolicyState>>,
    accesses: PeerAccesses,
}

/// How many revoked tokens are remembered at least, to answer `Revoked` instead of `AccessDenied`; twice as many at most.
const REMEMBERED: usize = 4096;

/// The tokens that were revoked last. They are looked up, not searched for: peers may ask for tokens by the thousand.
#[derive(Default)]
struct RevokedTokens {
    recent: HashSet<u128, BuildHasherDefault<TokenHasher>>,
    earlier: HashSet<u128, BuildHasherDefault<TokenHasher>>,
}

impl RevokedTokens {
    fn remember(&mut self, token: u128) {
        if self.recent.len() == REMEMBERED {
            std::mem::swap(&mut self.recent, &mut self.earlier);
            self.recent.clear();
        }
        self.recent.insert(token);
    }

    fn contains(&self, token: u128) -> bool {
        self.recent.contains(&token) || self.earlier.contains(&token)
    }
}

pub(super) struct Exposures<E: Env> {
    live: HashMap<u128, ExposedMemory<E::Memory>, BuildHasherDefault<TokenHasher>>,
    revoked: RevokedTokens,
    /// How many exposures are for one call.
    pub for_calls: usize,
    /// Bytes of them all.
    pub bytes: usize,
}

/// The hash of a token is 64 of its bits: the tokens in the table come from this engine and are random; a peer can only look
/// others up.
///
/// Lookup times reveal nothing of use. The table uses 64 bits of the token: some choose the slot, and seven more are compared
/// in one step for sixteen slots. A guess that agrees in all of these with a token in the table costs one more comparison of
/// two words, some nanoseconds. An attacker that could measure this from outside would learn that many bits (seven, and the
/// logarithm of the table's size) of *some* token. The other hundred or more bits are compared at once, so they can't be found
/// one by one. Each guess is counted, too.
#[derive(Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u128(&mut self, token: u128) {
        self.0 = token as u64;
    }
}

impl<E: Env> Default for Exposures<E> {
    fn default() -> Self {
        Exposures { live: HashMap::default(), revoked: RevokedTokens::default(), for_calls: 0, bytes: 0 }
    }
}

impl<E: Env> Exposures<E> {
    pub(super) fn clear(&mut self) {
        self.live.clear();
        self.for_calls = 0;
        self.bytes = 0;
    }

    pub(super) fn insert(&mut self, token: u128, memory: E::Memory, mode: Mode, grant: Option<Box<PolicyState>>) {
        self.for_calls += usize::from(grant.as_ref().is_some_and(|grant| grant.is_for_call()));
        self.bytes += memory.len();
        self.live.insert(token, ExposedMemory { memory, mode, grant, accesses: PeerAccesses::default() });
    }

    pub(super) fn grant_mut(&mut self, token: u128) -> Option<&mut PolicyState> {
        self.live.get_mut(&token)?.grant.as_deref_mut()
    }

    pub(super) fn accesses_mut(&mut self, token: u128) -> Option<&mut PeerAccesses> {
        Some(&mut self.live.get_mut(&token)?.accesses)
    }

    /// The memory that is exposed under a token, whatever its grant says.
    pub(super) fn memory(&self, token: u128) -> Option<E::Memory> {
        self.live.get(&token).map(|exposure| exposure.memory.clone())
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }
}

impl<E: Env> Proto<E> {
    /// Ends the access of peers: their transfers fail, and they are sent the reason. An access in progress in a transport is
    /// for the memory's gate to wait for.
    pub(crate) fn revoke(&mut self, token: u128) {
        self.revoke_from_holders(token);
    }

    /// As `revoke`, for memory that its owner has dropped without asking for it back: that is a mistake where a peer still
    /// holds a bulk of it, and is logged.
    pub(crate) fn revoke_dropped(&mut self, token: u128) {
        if let Some((holder, size)) = self.revoke_from_holders(token)
            && self.stage == EngineStage::Running
        {
            self.note_dropped_exposure(holder, size);
        }
    }

    /// Returns a link whose peer holds a bulk of the memory, if there is one, and the length of the memory.
    fn revoke_from_holders(&mut self, token: u128) -> Option<(LinkId, usize)> {
        let exposure = self.exposures.live.remove(&token)?;
        let size = exposure.memory.len();
        self.exposures.bytes -= size;
        if let Some(grant) = exposure.grant {
            self.exposures.for_calls -= usize::from(grant.is_for_call());
            self.end_grant(token, &grant);
        }
        self.exposures.revoked.remember(token);
        self.stop_access(token, exposure.accesses, &Status::Revoked);
        self.send_revoked(token, None).map(|holder| (holder, size))
    }

    /// The memory that a peer names for a transfer that begins now, if it may access it so. Refusals are counted.
    pub(super) fn check(&mut self, link: LinkId, range: Range, write: bool, now: Instant) -> Result<E::Memory, Status> {
        if self.stage == EngineStage::Closed {
            return Err(Status::Finalizing);
        }
        let permitted = if range.owner == self.incarnation {
            self.permit(Some(link), u128::from_le_bytes(range.token), (range.offset, range.len), write, now)
        } else {
            Err(Cause::Restarted)
        };
        permitted.map_err(|cause| {
            let status = cause.status();
            let verb = if write { "push" } else { "pull" };
            self.refused(link, || format!("{verb} of {} bytes at {}", range.len, range.offset), cause);
            status
        })
    }

    /// As `check`, for this engine's own bulks.
    pub(crate) fn access(&mut self, token: u128, offset: u64, len: u64, write: bool, now: Instant) -> Result<E::Memory, Status> {
        self.permit(None, token, (offset, len), write, now).map_err(|cause| cause.status())
    }

    /// The one place that decides whether a transfer may begin; `link` is where it comes from, `None` for this engine's own. A
    /// grant is used up only by a transfer that may begin.
    fn permit(
        &mut self,
        link: Option<LinkId>,
        token: u128,
        (offset, len): (u64, u64),
        write: bool,
        now: Instant,
    ) -> Result<E::Memory, Cause> {
        let Some(exposure) = self.exposures.live.get(&token) else {
            let known = self.exposures.revoked.contains(token);
            return Err(if known { Cause::Revoked } else { Cause::UnknownToken });
        };
        let has_grant = exposure.grant.is_some();
        if let Some(grant) = &exposure.grant {
            self.check_policy(grant, link, now)?;
        }
        let allowed = if write { exposure.mode.write } else { exposure.mode.read };
        if !allowed {
            return Err(Cause::Mode { write });
        }
        let part = match (usize::try_from(offset), usize::try_from(len)) {
            (Ok(offset), Ok(len)) => exposure.memory.part(offset, len),
            _ => None,
        };
        let part = part.ok_or(Cause::Range { offset, len, size: exposure.memory.len() as u64 })?;
        if has_grant && let Some(grant) = self.exposures.grant_mut(token) {
            let left = grant.quota();
            if len > left {
                return Err(Cause::Quota { len, left });
            }
            grant.use_up(len);
        }
        Ok(part)
    }

    /// What this engine exposes under a token, whatever its grant says.
    pub(crate) fn exposed(&self, token: u128) -> Option<E::Memory> {
        self.exposures.memory(token)
    }

    /// Numbers the leases that go out with a message.
    pub(super) fn lease(&mut self, id: LinkId, leases: Vec<E::Lease>) -> LeaseRange {
        let link = &mut self.links[id];
        let first = link.next_lease;
        let count = leases.len() as u32;
        for lease in leases {
            self.holders.insert((lease.token(), id, link.next_lease));
            link.leases.insert(link.next_lease, lease);
            link.next_lease += 1;
        }
        self.recount(id);
        LeaseRange { first, count }
    }

    /// This engine no longer holds the bulks that came from a peer with these leases.
    pub(crate) fn release(&mut self, link: LinkId, leases: LeaseRange) {
        if leases.count > 0
            && let Some(entry) = self.links.get_mut(link)
        {
            entry.release(leases);
            self.mark_ready(link);
        }
    }

    pub(super) fn handle_release(&mut self, link: LinkId, leases: LeaseRange) {
        let mut next = leases.first;
        let end = leases.first.saturating_add(u64::from(leases.count));
        // The peer chose the count: take no more steps than there are leases.
        while next < end
            && let Some(entry) = self.links.get_mut(link)
            && let Some((number, lease)) = entry.take_lease(next, end)
        {
            self.unlease(link, number, lease);
            next = number + 1;
        }
        self.recount(link);
    }

    /// A peer no longer holds a bulk, or is gone.
    pub(super) fn unlease(&mut self, link: LinkId, number: u64, lease: E::Lease) {
        self.holders.remove(&(lease.token(), link, number));
        self.bulk_dropped(link, number, lease.token());
        self.outputs.push_back(Output::LeaseReleased(lease));
    }

    pub(super) fn handle_revoked(&mut self, link: LinkId, token: u128) {
        // This engine knows the state of its own memory.
        if self.exposures.live.contains_key(&token) || self.exposures.revoked.contains(token) {
            return;
        }
        self.outputs.push_back(Output::Stale { token });
        self.send_revoked(token, Some(link));
    }

    /// Tells the peers that hold a bulk of this memory that their copies of its content are stale. Each is notified once, and
    /// the peer that reported it is not; otherwise two engines that hold each other's bulks would report it back and forth for
    /// ever. Returns a link that was notified.
    fn send_revoked(&mut self, token: u128, except: Option<LinkId>) -> Option<LinkId> {
        let mut notified = except;
        let least = LinkId::from(KeyData::from_ffi(0));
        while let Some(&holder) = self.holders.range((token, least, 0)..).next().filter(|holder| holder.0 == token) {
            self.holders.remove(&holder);
            let (_, id, _) = holder;
            // The leases of one link are adjacent.
            if notified != Some(id) && except != Some(id) {
                notified = Some(id);
                self.links[id].queue_frame(&Message::Revoked { token: token.to_le_bytes() }, &[]);
                self.mark_ready(id);
            }
        }
        notified
    }
}
