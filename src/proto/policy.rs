//! Access policies: to which peer, for which call, how often, for how many bytes and until when memory is exposed.
//!
//! [`Proto::permit`](super::Proto::permit) checks them at each access. Memory that is exposed without restrictions has no
//! policy.

use std::ops::Range;
use std::time::Instant;

use super::refusals::Cause;
use super::timers::TimerKind;
use super::{Env, Lease, LinkId, Memory, Output, PeerId, Proto};

/// What peers may do with exposed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub read: bool,
    pub write: bool,
}

/// The restrictions of an exposure. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AccessPolicy {
    /// To this peer only.
    pub only: Option<PeerId>,
    /// For the first call that carries a bulk of it, until that call is over.
    pub for_one_call: bool,
    /// For one transfer.
    pub once: bool,
    /// For so many bytes in total.
    pub quota: Option<u64>,
    /// Until this time.
    pub expires: Option<Instant>,
}

/// A policy, and what has been used of it.
pub(super) struct PolicyState {
    only: Option<BoundPeer>,
    call: CallBinding,
    once: bool,
    used: bool,
    quota: Option<u64>,
    expires: Option<Instant>,
    expired: bool,
    /// When its timer fires, if it has one.
    timer: Option<Instant>,
}

/// The one peer that memory is exposed to.
struct BoundPeer {
    peer: PeerId,
    /// Which of the engines that are met there in turn.
    engine: u64,
}

/// ```text
///   Any                 (not restricted to a call)
///   Unbound ──call──▶ Bound ──answered / failed / timed out / cancelled───────────▶ Ended
///         └─one way─▶ Sent ──every bulk dropped / link lost / the call's deadline──▶ Ended
/// ```
enum CallBinding {
    Any,
    Unbound,
    Bound {
        link: LinkId,
    },
    /// So many bulks are left of those whose leases have these numbers.
    Sent {
        link: LinkId,
        leases: Range<u64>,
        bulks: usize,
        until: Instant,
    },
    Ended,
}

const CALL_OVER: Cause = Cause::OtherCall("the call that the memory was exposed for has ended");

impl PolicyState {
    /// When the next time limit ends.
    fn due(&self) -> Option<Instant> {
        let until = match self.call {
            CallBinding::Sent { until, .. } => Some(until),
            _ => None,
        };
        let expires = self.expires.filter(|_| !self.expired);
        [until, expires].into_iter().flatten().min()
    }

    pub(super) fn is_for_call(&self) -> bool {
        !matches!(self.call, CallBinding::Any)
    }

    /// The bytes that are left of the quota.
    pub(super) fn quota(&self) -> u64 {
        self.quota.unwrap_or(u64::MAX)
    }

    /// A transfer begins, for which the quota is large enough.
    pub(super) fn use_up(&mut self, len: u64) {
        self.used |= self.once;
        self.quota = self.quota.map(|left| left - len);
    }
}

impl<E: Env> Proto<E> {
    /// Exposes memory to peers that know the token, restricted by a policy.
    pub(crate) fn expose(&mut self, token: u128, memory: E::Memory, mode: Mode, policy: &AccessPolicy) {
        if *policy == AccessPolicy::default() {
            return self.exposures.insert(token, memory, mode, None);
        }
        let AccessPolicy { only, for_one_call, once, quota, expires } = *policy;
        // The policy means the engine that was last met there or, if none was, the first one to be met.
        let met = |peer| self.peers.get(peer).map_or(1, |entry| entry.engines.max(1));
        let only = only.map(|peer| BoundPeer { peer, engine: met(peer) });
        let call = if for_one_call { CallBinding::Unbound } else { CallBinding::Any };
        // The exposure may end before it is revoked; then transfers in progress must not continue.
        let ends = for_one_call || expires.is_some();
        let memory = if ends { memory.that_may_lapse() } else { memory };
        let grant = PolicyState { only, call, once, used: false, quota, expires, expired: false, timer: None };
        self.exposures.insert(token, memory, mode, Some(Box::new(grant)));
        self.set_timer(token);
    }

    /// Whether the policy allows a transfer to begin; `link` is where it comes from, `None` for this engine's own.
    pub(super) fn check_policy(&self, grant: &PolicyState, link: Option<LinkId>, now: Instant) -> Result<(), Cause> {
        if grant.only.as_ref().is_some_and(|only| !self.is_at(link, only)) {
            return Err(Cause::OtherPeer);
        }
        match &grant.call {
            CallBinding::Any => {}
            CallBinding::Unbound => return Err(Cause::OtherCall("the call that the memory is exposed for has not been made")),
            CallBinding::Ended => return Err(CALL_OVER),
            CallBinding::Bound { link: callee } | CallBinding::Sent { link: callee, .. } => {
                let is_callee = match link {
                    Some(link) => self.lead_to_one_engine(link, *callee),
                    None => self.links.get(*callee).is_some_and(|callee| callee.incarnation == self.incarnation),
                };
                if !is_callee {
                    return Err(Cause::OtherCall("the memory is exposed for another call"));
                }
            }
        }
        // The timer may be late, and an access may be dated to before it.
        if grant.expired || grant.expires.is_some_and(|at| now >= at) {
            return Err(Cause::Expired);
        }
        if grant.used { Err(Cause::UsedUp) } else { Ok(()) }
    }

    /// True for a link, its lanes, and another link to the same peer: there are two when both sides have dialled.
    fn lead_to_one_engine(&self, a: LinkId, b: LinkId) -> bool {
        let (Some(a), Some(b)) = (self.links.get(a), self.links.get(b)) else { return false };
        a.peer.is_some() && a.peer == b.peer && a.incarnation == b.incarnation
    }

    fn is_at(&self, link: Option<LinkId>, only: &BoundPeer) -> bool {
        let Some(peer) = self.peers.get(only.peer) else { return false };
        match link {
            Some(link) => {
                let link = &self.links[link];
                link.peer == Some(only.peer) && peer.incarnation == Some(link.incarnation) && peer.engines == only.engine
            }
            None => peer.incarnation == Some(self.incarnation) || self.addresses.contains(&peer.tag.address),
        }
    }

    /// Bulks go out with a call: memory that is exposed for one call is bound to this one, unless it is bound already.
    /// `one_way` is the deadline of a call that has no answer. Returns the tokens of what ends with the call.
    pub(super) fn bind_to_call(&mut self, link: LinkId, leases: &[E::Lease], one_way: Option<Instant>) -> Vec<u128> {
        let mut bound = Vec::new();
        if self.exposures.for_calls == 0 {
            return bound;
        }
        let first = self.links[link].next_lease;
        let numbers = first..first + leases.len() as u64;
        for token in leases.iter().map(Lease::token) {
            let Some(grant) = self.exposures.grant_mut(token) else { continue };
            match (&mut grant.call, one_way) {
                (CallBinding::Unbound, None) => {
                    grant.call = CallBinding::Bound { link };
                    bound.push(token);
                }
                (CallBinding::Unbound, Some(until)) => {
                    grant.call = CallBinding::Sent { link, leases: numbers.clone(), bulks: 1, until };
                    self.set_timer(token);
                }
                // Another bulk of it in the same call.
                (CallBinding::Sent { link: sent, leases, bulks, .. }, _) if *sent == link && *leases == numbers => *bulks += 1,
                _ => {}
            }
        }
        bound
    }

    /// A call is over, and so is what was exposed for it.
    pub(super) fn end_for_call(&mut self, token: u128) {
        if let Some(grant) = self.exposures.grant_mut(token) {
            grant.call = CallBinding::Ended;
            self.lapse(token, &CALL_OVER);
        }
    }

    /// The peer no longer holds a bulk. With the last one, a one-way call is over.
    pub(super) fn bulk_dropped(&mut self, link: LinkId, number: u64, token: u128) {
        if self.exposures.for_calls == 0 {
            return;
        }
        let Some(grant) = self.exposures.grant_mut(token) else { return };
        let CallBinding::Sent { link: sent, leases, bulks, .. } = &mut grant.call else { return };
        if *sent == link && leases.contains(&number) {
            *bulks -= 1;
            if *bulks == 0 {
                grant.call = CallBinding::Ended;
                self.lapse(token, &CALL_OVER);
            }
        }
    }

    /// The time limit of an exposure, or of the one-way call that it is for, has ended.
    pub(super) fn exposure_due(&mut self, token: u128, now: Instant) {
        let Some(grant) = self.exposures.grant_mut(token) else { return };
        grant.timer = None;
        let why = if grant.expires.is_some_and(|at| at <= now) {
            grant.expired = true;
            Cause::Expired
        } else {
            grant.call = CallBinding::Ended;
            CALL_OVER
        };
        self.lapse(token, &why);
    }

    /// Peers may not use the memory any more, though its owner has not revoked it. Transfers in progress end.
    fn lapse(&mut self, token: u128, why: &Cause) {
        self.set_timer(token);
        let Some(memory) = self.exposures.memory(token) else { return };
        memory.end();
        let accesses = self.exposures.accesses_mut(token).map(std::mem::take).unwrap_or_default();
        self.stop_access(token, accesses, &why.status());
        self.outputs.push_back(Output::Withdraw { memory });
    }

    /// Sets the timer for the next time limit.
    fn set_timer(&mut self, token: u128) {
        let Some(grant) = self.exposures.grant_mut(token) else { return };
        let due = grant.due();
        let before = std::mem::replace(&mut grant.timer, due);
        if let Some(at) = before {
            self.timers.remove(&(at, TimerKind::Exposure(token)));
        }
        if let Some(at) = due {
            self.timers.insert((at, TimerKind::Exposure(token)));
        }
    }

    /// The owner has revoked the memory.
    pub(super) fn end_grant(&mut self, token: u128, grant: &PolicyState) {
        if let Some(at) = grant.timer {
            self.timers.remove(&(at, TimerKind::Exposure(token)));
        }
    }
}
