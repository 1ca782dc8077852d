//! One-way calls: how many may be in flight, and what becomes of those that can't be handled.
//!
//! No answer slows their caller down, so their receiver does: a caller has *credit*, in calls and in bytes, and waits when that
//! is used up. The receiver accepts each call that it has given credit for, whatever else it holds, and returns the credit when
//! the call has been handled. A call of more than [`MAX_COST`] bytes, or with a streamed body, takes
//! no credit. It is *announced*: the receiver answers at once that it accepts the call, or why not, and the caller waits for
//! that. A peer that leaves many unanswered, which their callers have given up, gets no more until it answers.
//!
//! ```text
//!   small:      credit ──notify──▶ in flight ──▶ handled ──Handled──▶ credit
//!   announced:  ──notify──▶ Response ──▶ notify is done, the body goes on        or  ──▶ Refuse ──▶ the error of notify
//! ```

use std::collections::HashSet;
use std::time::Instant;

use super::admission::PeerLimits;
use super::wire::{Message, Status};
use super::{Env, Failure, LinkId, Output, PeerId, Proto, broken};

/// Credit, given or used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Amount {
    pub calls: u32,
    /// Of bodies and declarations.
    pub bytes: u32,
}

/// The credit of each link at first, and its minimum: the receiver reserves as much for each link.
pub(super) const LEAST: Amount = Amount { calls: 16, bytes: 64 << 10 };
/// The largest credit of a link. A caller that uses its credit gets more, within the total limits, also while none of its calls
/// is over (up to half of all credit): handlers at both ends that make one-way calls would else soon wait for each other.
pub(super) const MOST: Amount = Amount { calls: 4096, bytes: 1 << 20 };
/// Largest body and declaration of a call that takes credit. A report is due when a quarter of the credit has been handled, so
/// there is enough for one more such call when all have been handled.
pub(super) const MAX_COST: usize = LEAST.bytes as usize / 2;

/// Announced calls of one link that their callers have given up, and that the peer has not answered: with so many, no more are
/// announced. Some callers give up early, or the peer is slow; a peer that never answers must not make the list of them grow.
pub(super) const MAX_ABANDONED: usize = 256;

/// The caller's side of a link.
pub(super) struct SendCredit<W> {
    credit: Amount,
    /// Calls that the peer has accepted, or will, and has not reported as handled.
    pub out: u32,
    /// Callers that wait for a report.
    pub waiting: Vec<W>,
    /// Reports so far, and how many there were when the peer last refused an announced call.
    reports: u64,
    refused_at: u64,
    /// Announced calls that their callers have given up, and that the peer has not accepted or refused yet.
    pub abandoned: HashSet<u64>,
}

impl<W> Default for SendCredit<W> {
    fn default() -> Self {
        SendCredit { credit: LEAST, out: 0, waiting: Vec::new(), reports: 0, refused_at: 0, abandoned: HashSet::new() }
    }
}

impl<W> SendCredit<W> {
    /// Whether there is credit for a call. One without a cost is announced, and needs none, but the peer has to answer.
    pub(super) fn has(&self, cost: Option<u32>) -> bool {
        match cost {
            Some(cost) => self.credit.calls > 0 && self.credit.bytes >= cost,
            None => self.abandoned.len() < MAX_ABANDONED,
        }
    }

    /// Uses credit, which must be there.
    pub(super) fn spend(&mut self, cost: u32) {
        self.credit.calls -= 1;
        self.credit.bytes -= cost;
        self.out += 1;
    }

    /// The peer has handled so many calls more, and returns credit. Returns the callers that waited for that.
    pub(super) fn handled(&mut self, count: u32, calls: u32, bytes: u32) -> Vec<W> {
        self.out = self.out.saturating_sub(count);
        self.credit.calls = self.credit.calls.saturating_add(calls);
        self.credit.bytes = self.credit.bytes.saturating_add(bytes);
        self.reports += 1;
        std::mem::take(&mut self.waiting)
    }

    /// The peer has accepted or refused this call, if it is one that was given up. Returns the callers that waited for that.
    pub(super) fn abandoned_answered(&mut self, call: u64, accepted: bool) -> Vec<W> {
        let could_announce = self.has(None);
        if self.abandoned.remove(&call) && accepted {
            self.out += 1;
        }
        if could_announce { Vec::new() } else { std::mem::take(&mut self.waiting) }
    }

    /// The peer has refused an announced call.
    pub(super) fn refused(&mut self) {
        self.refused_at = self.reports;
    }

    /// Whether there has been a report since the peer last refused an announced call.
    fn has_report_since(&self) -> bool {
        self.reports != self.refused_at
    }
}

/// The receiver's side of a link.
#[derive(Clone, Copy)]
pub(super) struct ReceiveWindow {
    /// All the credit that the peer has, or has used for calls that are not yet reported as handled.
    granted: Amount,
    /// What it has not used.
    left: Amount,
    /// Credit of handled calls that is not yet returned, and how many calls that are, including announced ones.
    over: Amount,
    count: u32,
    /// An announced call was refused: its caller waits for the next report.
    is_awaited: bool,
}

impl Default for ReceiveWindow {
    fn default() -> Self {
        let over = Amount { calls: 0, bytes: 0 };
        ReceiveWindow { granted: LEAST, left: LEAST, over, count: 0, is_awaited: false }
    }
}

impl ReceiveWindow {
    /// A call that takes credit has arrived.
    pub(super) fn enter(&mut self, cost: u32) -> Result<(), Failure> {
        match (self.left.calls.checked_sub(1), self.left.bytes.checked_sub(cost)) {
            (Some(calls), Some(bytes)) => {
                self.left = Amount { calls, bytes };
                Ok(())
            }
            _ => Err(broken(format!(
                "a one-way call of {cost} bytes exceeds its credit of {} calls and {} bytes",
                self.left.calls, self.left.bytes
            ))),
        }
    }

    /// Whether more credit is due: half of it is used, and less than this link's share of all credit has been granted.
    pub(super) fn is_short(&self, shares: (usize, usize)) -> bool {
        let is_short =
            |left: u32, granted: u32, most: u32, share| left < granted / 2 && granted < most && (granted as usize) < share;
        let ReceiveWindow { left, granted, .. } = self;
        is_short(left.calls, granted.calls, MOST.calls, shares.0) || is_short(left.bytes, granted.bytes, MOST.bytes, shares.1)
    }

    /// An announced call is accepted: its end will be reported in any case.
    pub(super) fn admit(&mut self) {
        self.is_awaited = false;
    }

    /// A call has been handled. True when a report is due.
    pub(super) fn leave(&mut self, cost: Option<u32>) -> bool {
        self.count += 1;
        if let Some(cost) = cost {
            self.over.calls += 1;
            self.over.bytes += cost;
        }
        let Amount { calls, bytes } = self.over;
        cost.is_none() || self.is_awaited || calls >= self.granted.calls / 4 || bytes >= self.granted.bytes / 4
    }

    /// An announced call is refused: its caller waits for the next report. True if one is due, as there is something to report.
    pub(super) fn refuse(&mut self) -> bool {
        self.is_awaited = true;
        self.count > 0
    }

    /// Reports how many calls have been handled, and returns their credit, and more or less than it: `shares` and `spare` are
    /// this link's share of all credit, and what is left of it, in calls and in bytes.
    pub(super) fn report(&mut self, shares: (usize, usize), spare: (usize, usize)) -> (u32, Amount) {
        let ReceiveWindow { left, over, granted, .. } = self;
        let calls = return_credit(&mut granted.calls, left.calls, over.calls, [LEAST.calls, MOST.calls], shares.0, spare.0);
        let bytes = return_credit(&mut granted.bytes, left.bytes, over.bytes, [LEAST.bytes, MOST.bytes], shares.1, spare.1);
        *left = Amount { calls: left.calls + calls, bytes: left.bytes + bytes };
        *over = Amount { calls: 0, bytes: 0 };
        (std::mem::take(&mut self.count), Amount { calls, bytes })
    }

    /// The link's credit beyond the minimum.
    pub(super) fn extra(&self) -> (usize, usize) {
        ((self.granted.calls - LEAST.calls) as usize, (self.granted.bytes - LEAST.bytes) as usize)
    }
}

/// How much credit to return: what was handled, and more to a peer that has used half of its credit; less, down to the minimum,
/// if more than its share has been granted.
fn return_credit(granted: &mut u32, left: u32, over: u32, range: [u32; 2], share: usize, spare: usize) -> u32 {
    let [least, most] = range;
    let share = u32::try_from(share).unwrap_or(most).clamp(least, most);
    if *granted > share {
        let less = over.min(*granted - share);
        *granted -= less;
        return over - less;
    }
    let wanted = if left < *granted / 2 { granted.saturating_mul(2).min(share) } else { *granted };
    let more = (wanted - *granted).min(u32::try_from(spare).unwrap_or(most));
    *granted += more;
    over + more
}

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

    /// An announced call is refused: its caller waits for the next report, if one is to come.
    pub(super) fn report_to_refused(&mut self, id: LinkId) {
        if self.links[id].window.refuse() {
            self.report_handled(id);
        }
    }

    /// One link's share of all credit, and what is left of that, in calls and in bytes.
    fn credit(&self) -> [(usize, usize); 2] {
        let peers = self.links.len().max(1);
        let PeerLimits { requests, bytes, .. } = self.config.limits;
        [(requests / peers, bytes / peers), (requests.saturating_sub(self.granted.0), bytes.saturating_sub(self.granted.1))]
    }

    /// Takes the credit of a one-way call that has arrived, and grants more where the caller is about to run out of it. An error
    /// if the caller does not have as much.
    pub(super) fn take_credit(&mut self, id: LinkId, cost: u32) -> Result<(), Failure> {
        let [shares, spare] = self.credit();
        let window = &mut self.links[id].window;
        window.enter(cost)?;
        // Half of all credit is kept for links whose handlers end.
        let PeerLimits { requests, bytes, .. } = self.config.limits;
        if window.is_short(shares) && spare.0 > requests / 2 && spare.1 > bytes / 2 {
            self.report_handled(id);
        }
        Ok(())
    }

    /// Reports what was handled, and returns credit.
    fn report_handled(&mut self, id: LinkId) {
        let [shares, spare] = self.credit();
        let Some(link) = self.links.get_mut(id) else { return };
        let window = &mut link.window;
        let before = window.extra();
        let (count, Amount { calls, bytes }) = window.report(shares, spare);
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
            // Also when that was the last report.
            Some(outgoing) if outgoing.has_report_since() => false,
            Some(outgoing) if outgoing.out == 0 => return false,
            Some(_) => true,
            None => false,
        };
        match (id, outgoing) {
            (Some(id), Some(outgoing)) if waits => {
                outgoing.waiting.push(waiter);
                self.watch(id, now);
            }
            _ => self.outputs.push_back(Output::CallDone { waiter, result: Err(Box::new(Failure::Cancelled)) }),
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
        self.outputs
            .extend(waiting.into_iter().map(|waiter| Output::CallDone { waiter, result: Err(Box::new(Failure::Cancelled)) }));
    }

    pub(super) fn handle_handled(&mut self, id: LinkId, count: u32, calls: u32, bytes: u32) {
        let waiting = self.links[id].outgoing.handled(count, calls, bytes);
        self.call_again(waiting);
    }
}
