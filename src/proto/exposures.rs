//! Memory that peers may reach, by token; and who holds a bulk of it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use slotmap::KeyData;

use super::policy::PolicyState;
use super::refusals::Cause;
use super::transfers::PeerAccesses;
use super::wire::{Message, Range, Status};
use super::{EngineStage, Env, Lease, LeaseRange, LinkId, Memory, Output, Proto};

/// What peers may do with exposed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub read: bool,
    pub write: bool,
}

struct ExposedMemory<M> {
    memory: M,
    mode: Mode,
    /// Mostly there is none, and an exposure no larger than it takes.
    grant: Option<Box<PolicyState>>,
    accesses: PeerAccesses,
}

/// How many tokens of memory that was taken back are remembered, to say `Revoked` instead of `AccessDenied`.
const REMEMBERED: usize = 4096;

/// Tokens of memory that was taken back, the last of them. Peers ask for tokens by the thousand: there is no search.
#[derive(Default)]
struct RevokedTokens {
    in_order: VecDeque<u128>,
    all: HashSet<u128, BuildHasherDefault<TokenHasher>>,
}

impl RevokedTokens {
    fn remember(&mut self, token: u128) {
        if self.in_order.len() == REMEMBERED
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.all.remove(&oldest);
        }
        self.in_order.push_back(token);
        self.all.insert(token);
    }

    fn contains(&self, token: u128) -> bool {
        self.all.contains(&token)
    }
}

pub(super) struct Exposures<E: Env> {
    live: HashMap<u128, ExposedMemory<E::Memory>, BuildHasherDefault<TokenHasher>>,
    revoked: RevokedTokens,
    /// How many of them are for one call.
    pub for_calls: usize,
}

/// The tokens in the table are this engine's own, and random already; a peer can only ask for others.
///
/// How long a look takes tells nothing of use. The table goes by 64 bits of the token: by those that say in which place to look,
/// and by seven more that are compared in one step for sixteen places. A guess that agrees in all of these, with a token that
/// is there, costs a comparison of two words more, some nanoseconds; who could measure them from outside would learn so
/// many bits, seven and the logarithm of the table's size, of *some* token. Of the other hundred and more bits, nothing is
/// compared piece by piece, so that one could be found after the other. Each guess is counted, too.
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
        Exposures { live: HashMap::default(), revoked: RevokedTokens::default(), for_calls: 0 }
    }
}

impl<E: Env> Exposures<E> {
    pub(super) fn clear(&mut self) {
        self.live.clear();
        self.for_calls = 0;
    }

    pub(super) fn insert(&mut self, token: u128, memory: E::Memory, mode: Mode, grant: Option<Box<PolicyState>>) {
        self.for_calls += usize::from(grant.as_ref().is_some_and(|grant| grant.is_for_call()));
        self.live.insert(token, ExposedMemory { memory, mode, grant, accesses: PeerAccesses::default() });
    }

    pub(super) fn grant_mut(&mut self, token: u128) -> Option<&mut PolicyState> {
        self.live.get_mut(&token)?.grant.as_deref_mut()
    }

    pub(super) fn accesses_mut(&mut self, token: u128) -> Option<&mut PeerAccesses> {
        Some(&mut self.live.get_mut(&token)?.accesses)
    }

    /// What is exposed under a token, whoever may use it.
    pub(super) fn memory(&self, token: u128) -> Option<E::Memory> {
        self.live.get(&token).map(|exposure| exposure.memory.clone())
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }
}

impl<E: Env> Proto<E> {
    /// Locks peers out. What they had begun ends, and they are told; an access that is in progress in a transport is the
    /// memory's own gate to wait for.
    pub(crate) fn revoke(&mut self, token: u128) {
        let Some(exposure) = self.exposures.live.remove(&token) else { return };
        if let Some(grant) = exposure.grant {
            self.exposures.for_calls -= usize::from(grant.is_for_call());
            self.end_grant(token, &grant);
        }
        self.exposures.revoked.remember(token);
        self.stop_access(token, exposure.accesses, &Status::Revoked);
        self.tell_stale(token, None);
    }

    /// The memory that a peer names, for a transfer that begins now, if it may do that with it. A refusal is noted.
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

    /// As for a peer's range, for this engine's own bulks.
    pub(crate) fn access(&mut self, token: u128, offset: u64, len: u64, write: bool, now: Instant) -> Result<E::Memory, Status> {
        self.permit(None, token, (offset, len), write, now).map_err(|cause| cause.status())
    }

    /// The one place where it is decided whether a transfer may begin; `link` is where it comes from, `None` for this
    /// engine's own. What may be used up is used up only if it may.
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
        let terms = exposure.grant.is_some();
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
        if terms && let Some(grant) = self.exposures.grant_mut(token) {
            let left = grant.quota();
            if len > left {
                return Err(Cause::Quota { len, left });
            }
            grant.use_up(len);
        }
        Ok(part)
    }

    /// What this engine exposes under a token, whoever may use it.
    pub(crate) fn exposed(&self, token: u128) -> Option<E::Memory> {
        self.exposures.memory(token)
    }

    /// Numbers the leases that go out with a message.
    pub(super) fn lease(&mut self, id: LinkId, leases: Vec<E::Lease>) -> LeaseRange {
        if leases.is_empty() {
            return LeaseRange::default();
        }
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

    /// Bulks that came from a peer with these leases are no longer held here.
    pub(crate) fn release(&mut self, link: LinkId, leases: LeaseRange) {
        if leases.count > 0
            && let Some(entry) = self.links.get_mut(link)
        {
            entry.queue_control(&Message::Release(leases));
            self.mark_ready(link);
        }
    }

    pub(super) fn handle_release(&mut self, link: LinkId, leases: LeaseRange) {
        let entry = &self.links[link];
        // The count is the peer's word: no more steps than there are leases.
        let range = leases.first..leases.first.saturating_add(u64::from(leases.count));
        let numbers: Vec<u64> = entry.leases.range(range).map(|(number, _)| *number).collect();
        for number in numbers {
            let known = self.links.get_mut(link).and_then(|entry| entry.leases.remove(&number));
            if let Some(lease) = known {
                self.unlease(link, number, lease);
            }
        }
        self.recount(link);
    }

    /// A peer has no longer what it was given, or is gone.
    pub(super) fn unlease(&mut self, link: LinkId, number: u64, lease: E::Lease) {
        self.holders.remove(&(lease.token(), link, number));
        self.bulk_dropped(link, number, lease.token());
        self.outputs.push_back(Output::LeaseReleased(lease));
    }

    pub(super) fn handle_revoked(&mut self, link: LinkId, token: u128) {
        // Of its own memory an engine knows better.
        if self.exposures.live.contains_key(&token) || self.exposures.revoked.contains(token) {
            return;
        }
        self.outputs.push_back(Output::Stale { token });
        self.tell_stale(token, Some(link));
    }

    /// Tells the peers that hold a bulk of this memory: they may have a copy of its content.
    /// Each holder is told once, and whoever has told us is not: else two engines that hold each other's bulks would go on
    /// telling each other for ever.
    fn tell_stale(&mut self, token: u128, except: Option<LinkId>) {
        let mut told = except;
        let least = LinkId::from(KeyData::from_ffi(0));
        while let Some(&holder) = self.holders.range((token, least, 0)..).next().filter(|holder| holder.0 == token) {
            self.holders.remove(&holder);
            let (_, id, _) = holder;
            // Those of a link are next to each other.
            if told != Some(id) && except != Some(id) {
                told = Some(id);
                self.links[id].queue_frame(&Message::Revoked { token: token.to_le_bytes() }, &[]);
                self.mark_ready(id);
            }
        }
    }
}
