//! One-way calls: how many may be in flight, and what becomes of those that can't be handled.
//!
//! No answer slows their caller down, so their receiver does: a caller has *credit*, in calls and in bytes, and waits when that
//! is used up. The receiver accepts each call that it has given credit for, whatever else it holds, and returns the credit when
//! the call has been handled. A call of more than [`MAX_COST`](super::credit::MAX_COST) bytes, or with a streamed body, takes no credit. It is
//! *announced*: the receiver answers at once that it accepts the call, or why not, and the caller waits for that.
//!
//! ```text
//!   small:      credit ──notify──▶ in flight ──▶ handled ──Handled──▶ credit
//!   announced:  ──notify──▶ Response ──▶ notify is done, the body goes on        or  ──▶ Refuse ──▶ the error of notify
//! ```

use std::time::Instant;

use super::credit::Amount;
use super::limits::PeerLimits;
use super::wire::{Message, Status};
use super::{Env, Failure, LinkId, Output, PeerId, Proto};

/// A request that is not answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct OneWayRequest {
    pub procedure: u32,
    /// The credit that it takes; `None` if it was announced.
    pub cost: Option<u32>,
}

impl<E: Env> Proto<E> {
    /// A one-way call of the peer is over: returns the credit that it took, for many calls at a time.
    pub(super) fn one_way_over(&mut self, id: LinkId, cost: Option<u32>) {
        let Some(link) = self.links.get_mut(id) else { return };
        if link.window.leave(cost) {
            self.report_handled(id);
        }
    }

    /// An announced call was refused: its caller waits for the next report, if one is to come.
    pub(super) fn report_to_refused(&mut self, id: LinkId) {
        if self.links[id].window.refuse() {
            self.report_handled(id);
        }
    }

    fn report_handled(&mut self, id: LinkId) {
        let peers = self.links.len().max(1);
        let PeerLimits { requests, bytes, .. } = self.config.limits;
        let Some(link) = self.links.get_mut(id) else { return };
        let window = &mut link.window;
        let before = window.extra();
        let spare = (requests.saturating_sub(self.granted.0), bytes.saturating_sub(self.granted.1));
        let (count, Amount { calls, bytes }) = window.report((requests / peers, bytes / peers), spare);
        let now = window.extra();
        self.granted = (self.granted.0 - before.0 + now.0, self.granted.1 - before.1 + now.1);
        link.queue_control(&Message::Handled { count, calls, bytes });
        self.mark_ready(id);
    }

    /// Completes the waiter, as a call that is done, when the peer reports more one-way calls as handled: at once if there is
    /// credit for this cost or, for a call that was announced and refused, if there has been a report since. False when no
    /// report is to be expected. While a waiter is left, the peer is watched.
    pub(crate) fn await_credit(&mut self, peer: PeerId, cost: Option<u32>, waiter: E::Waiter, now: Instant) -> bool {
        let id = self.peers.get(peer).and_then(|peer| peer.link);
        let outgoing = id.and_then(|id| self.links.get_mut(id)).map(|link| &mut link.outgoing);
        let waits = match &outgoing {
            Some(outgoing) if cost.is_none() && outgoing.out == 0 => return false,
            Some(outgoing) if cost.is_none() => !outgoing.has_report_since(),
            Some(outgoing) => !outgoing.has(cost),
            None => false,
        };
        match (id, outgoing) {
            (Some(id), Some(outgoing)) if waits => {
                outgoing.waiting.push(waiter);
                self.watch(id, now);
            }
            _ => self.outputs.push_back(Output::CallDone { waiter, result: Err(Failure::Cancelled) }),
        }
        true
    }

    /// Removes a waiter for credit.
    pub(crate) fn forget_waiter(&mut self, peer: PeerId, is_it: impl Fn(&E::Waiter) -> bool) {
        let id = self.peers.get(peer).and_then(|peer| peer.link);
        if let Some(link) = id.and_then(|id| self.links.get_mut(id)) {
            link.outgoing.waiting.retain(|waiter| !is_it(waiter));
        }
    }

    /// The failure of a one-way call that has waited for credit in vain.
    pub(crate) fn behind(&self, peer: PeerId) -> Failure {
        let link = self.peers.get(peer).and_then(|peer| peer.link).and_then(|link| self.links.get(link));
        let out = link.map_or(0, |link| link.outgoing.out);
        Failure::Refused(Status::Busy(format!("it has {out} one-way calls of this engine to handle, and accepts no more")))
    }

    pub(super) fn handle_handled(&mut self, id: LinkId, count: u32, calls: u32, bytes: u32) {
        let waiting = self.links[id].outgoing.handled(count, calls, bytes);
        self.outputs.extend(waiting.into_iter().map(|waiter| Output::CallDone { waiter, result: Err(Failure::Cancelled) }));
    }
}
