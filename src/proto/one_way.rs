//! One-way calls: how many may be in flight, and what becomes of those that can't be handled.
//!
//! No answer slows their caller down, so their receiver does: a caller has *credit*, in calls and in bytes, and waits when that
//! is used up. The receiver accepts each call that it has given credit for, whatever else it holds, and returns the credit when
//! the call has been handled. A call of more than [`MAX_COST`](super::credit::MAX_COST) bytes, or with a streamed body, takes
//! no credit. It is *announced*: the receiver answers at once that it accepts the call, or why not, and the caller waits for
//! that. A peer that leaves many unanswered, which their callers have given up, gets no more until it answers.
//!
//! ```text
//!   small:      credit ──notify──▶ in flight ──▶ handled ──Handled──▶ credit
//!   announced:  ──notify──▶ Response ──▶ notify is done, the body goes on        or  ──▶ Refuse ──▶ the error of notify
//! ```

use std::time::Instant;

use super::admission::PeerLimits;
use super::credit::Amount;
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

    /// Completes the waiter, as a call that is done, when the peer reports more one-way calls as handled, or answers one of too
    /// many that were given up: at once if there is credit for this cost or, for a call that was announced and refused, if
    /// there has been a report since. False when no report is to be expected. While a waiter is left, the peer is watched.
    pub(crate) fn await_credit(&mut self, peer: PeerId, cost: Option<u32>, waiter: E::Waiter, now: Instant) -> bool {
        let id = self.peers.get(peer).and_then(|peer| peer.link);
        let outgoing = id.and_then(|id| self.links.get_mut(id)).map(|link| &mut link.outgoing);
        let waits = match &outgoing {
            Some(outgoing) if !outgoing.has(cost) => true,
            Some(_) if cost.is_some() => false,
            Some(outgoing) if outgoing.out == 0 => return false,
            Some(outgoing) => !outgoing.has_report_since(),
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

    /// The failure of a one-way call of this cost that has waited for credit in vain.
    pub(crate) fn behind(&self, peer: PeerId, cost: Option<u32>) -> Failure {
        let link = self.peers.get(peer).and_then(|peer| peer.link).and_then(|link| self.links.get(link));
        let (out, abandoned) = link.map_or((0, 0), |link| (link.outgoing.out, link.outgoing.abandoned.len()));
        Failure::Refused(Status::Busy(match cost {
            Some(_) => format!("it has {out} one-way calls of this engine to handle, and accepts no more"),
            None => format!("it has not answered {abandoned} one-way calls of this engine that were given up"),
        }))
    }

    /// The peer has answered a call that is over; it may be an announced one that was given up.
    pub(super) fn abandoned_answered(&mut self, id: LinkId, call: u64, accepted: bool) {
        let waiting = self.links[id].outgoing.abandoned_answered(call, accepted);
        self.call_again(waiting);
    }

    /// Completes callers that have waited for credit.
    fn call_again(&mut self, waiting: Vec<E::Waiter>) {
        self.outputs.extend(waiting.into_iter().map(|waiter| Output::CallDone { waiter, result: Err(Failure::Cancelled) }));
    }

    pub(super) fn handle_handled(&mut self, id: LinkId, count: u32, calls: u32, bytes: u32) {
        let waiting = self.links[id].outgoing.handled(count, calls, bytes);
        self.call_again(waiting);
    }
}
