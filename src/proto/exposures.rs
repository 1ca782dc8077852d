//! Memory that peers may reach, by token; and who holds a bulk of it.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use super::wire::{Message, Range, Status};
use super::{Env, Lease, Leases, LinkId, Memory, Output, PeerId, Proto, Stage};

/// What peers may do with exposed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub read: bool,
    pub write: bool,
}

/// A lease that a peer has.
pub(super) struct LeaseOut<L> {
    pub lease: L,
    /// The peer knows that the memory was taken back.
    told: bool,
}

struct Exposure<M> {
    memory: M,
    mode: Mode,
    only: Option<Only>,
}

/// The one peer that memory is exposed to.
struct Only {
    peer: PeerId,
    /// Which engine that was, if it has been met.
    incarnation: Option<u64>,
}

/// How many tokens of memory that was taken back are remembered, to say `Revoked` instead of `AccessDenied`.
const REMEMBERED: usize = 4096;

pub(super) struct Exposures<E: Env> {
    live: HashMap<u128, Exposure<E::Memory>, BuildHasherDefault<TokenHasher>>,
    revoked: VecDeque<u128>,
}

/// The tokens in the table are this engine's own, and random already; a peer can only ask for others.
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
        Exposures { live: HashMap::default(), revoked: VecDeque::new() }
    }
}

impl<E: Env> Exposures<E> {
    pub(super) fn clear(&mut self) {
        self.live.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }
}

impl<E: Env> Proto<E> {
    /// Lets peers that know the token reach the memory.
    pub(crate) fn expose(&mut self, token: u128, memory: E::Memory, mode: Mode) {
        self.exposures.live.insert(token, Exposure { memory, mode, only: None });
    }

    /// As `expose`, for one peer: it is of no use to others that they know the token.
    pub(crate) fn expose_to(&mut self, peer: PeerId, token: u128, memory: E::Memory, mode: Mode) {
        let incarnation = self.peers.get(peer).and_then(|peer| peer.incarnation);
        self.exposures.live.insert(token, Exposure { memory, mode, only: Some(Only { peer, incarnation }) });
    }

    /// Locks peers out. What they had begun ends, and they are told; an access that is in progress in a transport is the
    /// memory's own gate to wait for.
    pub(crate) fn revoke(&mut self, token: u128) {
        if self.exposures.live.remove(&token).is_none() {
            return;
        }
        if self.exposures.revoked.len() == REMEMBERED {
            self.exposures.revoked.pop_front();
        }
        self.exposures.revoked.push_back(token);
        self.stop_access(token);
        self.tell_stale(token, None);
    }

    /// The memory that a range means, if whoever names it may do that with it.
    pub(super) fn check(&self, link: LinkId, range: Range, write: bool) -> Result<E::Memory, Status> {
        if self.stage == Stage::Closed {
            return Err(Status::Finalizing);
        }
        if range.owner != self.incarnation {
            return Err(Status::Restarted);
        }
        let token = u128::from_le_bytes(range.token);
        let only = self.exposures.live.get(&token).and_then(|exposure| exposure.only.as_ref());
        let is_it = |only: &Only| {
            let link = &self.links[link];
            link.peer == Some(only.peer) && only.incarnation.is_none_or(|incarnation| incarnation == link.incarnation)
        };
        if only.is_some_and(|only| !is_it(only)) {
            return Err(Status::AccessDenied("the memory is exposed to another peer".into()));
        }
        self.access(token, range.offset, range.len, write)
    }

    /// As for a peer's range, for this engine's own bulks.
    pub(crate) fn access(&self, token: u128, offset: u64, len: u64, write: bool) -> Result<E::Memory, Status> {
        let Some(exposure) = self.exposures.live.get(&token) else {
            return Err(if self.exposures.revoked.contains(&token) {
                Status::Revoked
            } else {
                Status::AccessDenied("no memory is exposed under this token".into())
            });
        };
        let allowed = if write { exposure.mode.write } else { exposure.mode.read };
        if !allowed {
            let verb = if write { "write" } else { "read" };
            return Err(Status::AccessDenied(format!("the memory is not exposed for peers to {verb}")));
        }
        let part = match (usize::try_from(offset), usize::try_from(len)) {
            (Ok(offset), Ok(len)) => exposure.memory.part(offset, len),
            _ => None,
        };
        part.ok_or(Status::OutOfRange { offset, len, size: exposure.memory.len() as u64 })
    }

    /// Numbers the leases that go out with a message.
    pub(super) fn lease(&mut self, link: LinkId, leases: Vec<E::Lease>) -> Leases {
        let link = &mut self.links[link];
        let first = link.next_lease;
        let count = leases.len() as u32;
        for lease in leases {
            link.leases.insert(link.next_lease, LeaseOut { lease, told: false });
            link.next_lease += 1;
        }
        Leases { first, count }
    }

    /// Bulks that came from a peer with these leases are no longer held here.
    pub(crate) fn release(&mut self, link: LinkId, leases: Leases) {
        if leases.count > 0
            && let Some(entry) = self.links.get_mut(link)
        {
            entry.say_back(&Message::Release(leases));
            self.mark_ready(link);
        }
    }

    pub(super) fn handle_release(&mut self, link: LinkId, leases: Leases) {
        let entry = &mut self.links[link];
        // The count is the peer's word: no more steps than there are leases.
        let range = leases.first..leases.first.saturating_add(u64::from(leases.count));
        let numbers: Vec<u64> = entry.leases.range(range).map(|(number, _)| *number).collect();
        for number in numbers {
            if let Some(LeaseOut { lease, .. }) = entry.leases.remove(&number) {
                self.outputs.push_back(Output::Unleased(lease));
            }
        }
    }

    pub(super) fn handle_revoked(&mut self, link: LinkId, token: u128) {
        // Of its own memory an engine knows better.
        if self.exposures.live.contains_key(&token) || self.exposures.revoked.contains(&token) {
            return;
        }
        self.outputs.push_back(Output::Stale { token });
        self.tell_stale(token, Some(link));
    }

    /// Tells the peers that hold a bulk of this memory: they may have a copy of its content.
    /// Each holder is told once, and whoever has told us is not: else two engines that hold each other's bulks would go on
    /// telling each other for ever.
    fn tell_stale(&mut self, token: u128, except: Option<LinkId>) {
        let mut told = Vec::new();
        for (id, link) in self.links.iter_mut().filter(|(id, _)| Some(*id) != except) {
            let holds = link.leases.values_mut().filter(|lease| lease.lease.token() == token && !lease.told);
            if holds.map(|lease| lease.told = true).count() > 0 {
                link.say(&Message::Revoked { token: token.to_le_bytes() }, &[]);
                told.push(id);
            }
        }
        told.into_iter().for_each(|id| self.mark_ready(id));
    }
}
