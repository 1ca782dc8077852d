//! One-way calls: how many may be in flight, and what becomes of those that can't be handled.
//!
//! No answer slows their caller down, so their receiver does: a caller has *credit*, in calls and in bytes, and waits when that
//! is used up. The receiver accepts each call that it has given credit for, whatever else it holds, and returns the credit when
//! the call has been handled. A call of more than [`MAX_COST`] bytes, or with a streamed body, takes no credit. It is
//! *announced*: the receiver answers at once that it accepts the call, or why not, and the caller waits for that.
//!
//! ```text
//!   small:      credit ──notify──▶ in flight ──▶ handled ──Handled──▶ credit
//!   announced:  ──notify──▶ Response ──▶ notify is done, the body goes on        or  ──▶ Refuse ──▶ the error of notify
//! ```

use std::collections::HashSet;
use std::time::Instant;

use super::limits::PeerLimits;
use super::link::broken;
use super::wire::{Message, Status};
use super::{Env, Failure, LinkId, Log, Output, PeerId, Proto};

/// Credit, given or used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Amount {
    pub calls: u32,
    /// Of bodies and declarations.
    pub bytes: u32,
}

/// The credit of each link at first, and its minimum: the receiver reserves as much for each link.
pub(super) const LEAST: Amount = Amount { calls: 16, bytes: 64 << 10 };
/// The largest credit of a link. A caller that uses its credit gets more, within the total limits.
pub(super) const MOST: Amount = Amount { calls: 4096, bytes: 1 << 20 };
/// Largest body and declaration of a call that takes credit. A report is due when a quarter of the credit has been handled, so
/// there is enough for one more such call when all have been handled.
pub(super) const MAX_COST: usize = LEAST.bytes as usize / 2;

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
    /// Whether there is credit for a call. One without a cost is announced, and needs none.
    pub(super) fn has(&self, cost: Option<u32>) -> bool {
        cost.is_none_or(|cost| self.credit.calls > 0 && self.credit.bytes >= cost)
    }

    /// Uses credit, which must be there.
    pub(super) fn spend(&mut self, cost: Option<u32>) {
        if let Some(cost) = cost {
            self.credit.calls -= 1;
            self.credit.bytes -= cost;
            self.out += 1;
        }
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

    /// An announced call is accepted: its end will be reported in any case.
    pub(super) fn admit(&mut self) {
        self.is_awaited = false;
    }

    /// A call has been handled. True when a report is due.
    fn leave(&mut self, cost: Option<u32>) -> bool {
        self.count += 1;
        if let Some(cost) = cost {
            self.over.calls += 1;
            self.over.bytes += cost;
        }
        let Amount { calls, bytes } = self.over;
        cost.is_none() || self.is_awaited || calls >= self.granted.calls / 4 || bytes >= self.granted.bytes / 4
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

/// Why a one-way call was not handled, or its handler failed. Its caller does not learn it.
#[derive(Clone, Debug)]
pub(crate) enum Dropped {
    /// The body was corrupted in transit.
    Checksum,
    /// The connection was lost while the body was arriving.
    Connection,
    /// The status that a waiting caller would have got.
    Refused(Status),
}

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dropped::Checksum | Dropped::Refused(Status::Checksum) => f.write_str("the arguments were corrupted in transit"),
            Dropped::Connection => f.write_str("the connection was lost before all of it had arrived"),
            Dropped::Refused(Status::NoSuchProcedure) => f.write_str("the procedure is not defined"),
            Dropped::Refused(Status::NoSuchProvider) => f.write_str("the provider is not defined"),
            Dropped::Refused(Status::Panicked(message)) => write!(f, "the handler panicked: {message}"),
            Dropped::Refused(Status::Failed(message)) => write!(f, "the handler failed: {message}"),
            Dropped::Refused(Status::Decode(reason)) => write!(f, "the arguments can't be decoded: {reason}"),
            Dropped::Refused(Status::TypeMismatch { expected, found }) => {
                write!(f, "the arguments are of another type: expected {expected}, found {found}")
            }
            Dropped::Refused(Status::AccessDenied(reason)) => f.write_str(reason),
            Dropped::Refused(Status::Finalizing) => f.write_str("this engine is being finalized"),
            Dropped::Refused(status) => write!(f, "{status:?}"),
        }
    }
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
        let window = &mut self.links[id].window;
        window.is_awaited = true;
        if window.count > 0 {
            self.report_handled(id);
        }
    }

    fn report_handled(&mut self, id: LinkId) {
        let peers = self.links.len().max(1);
        let PeerLimits { requests, bytes, .. } = self.config.limits;
        let Some(link) = self.links.get_mut(id) else { return };
        let window = &mut link.window;
        let (before, ReceiveWindow { left, over, .. }) = (window.extra(), *window);
        let spare = (requests.saturating_sub(self.granted.0), bytes.saturating_sub(self.granted.1));
        let granted = &mut window.granted;
        let calls =
            return_credit(&mut granted.calls, left.calls, over.calls, [LEAST.calls, MOST.calls], requests / peers, spare.0);
        let bytes = return_credit(&mut granted.bytes, left.bytes, over.bytes, [LEAST.bytes, MOST.bytes], bytes / peers, spare.1);
        window.left = Amount { calls: left.calls + calls, bytes: left.bytes + bytes };
        window.over = Amount { calls: 0, bytes: 0 };
        let count = std::mem::take(&mut window.count);
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
            Some(SendCredit { out: 0, .. }) if cost.is_none() => return false,
            Some(outgoing) if cost.is_none() => outgoing.reports == outgoing.refused_at,
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
        let outgoing = &mut self.links[id].outgoing;
        outgoing.out = outgoing.out.saturating_sub(count);
        outgoing.credit.calls = outgoing.credit.calls.saturating_add(calls);
        outgoing.credit.bytes = outgoing.credit.bytes.saturating_add(bytes);
        outgoing.reports += 1;
        let waiting = std::mem::take(&mut outgoing.waiting);
        self.outputs.extend(waiting.into_iter().map(|waiter| Output::CallDone { waiter, result: Err(Failure::Cancelled) }));
    }

    /// An announced call was refused.
    pub(super) fn note_refused(&mut self, id: LinkId) {
        let outgoing = &mut self.links[id].outgoing;
        outgoing.refused_at = outgoing.reports;
    }

    /// Counts a lost one-way call, which its caller takes as sent, and logs it at powers of two of the count.
    pub(super) fn note_dropped(&mut self, id: LinkId, procedure: u32, reason: Dropped) {
        let count = &mut self.refusals.one_way;
        *count = count.saturating_add(1);
        if count.is_power_of_two() {
            let (link, count) = (self.links.get(id), *count);
            let peer = link.map(|link| link.remote.clone());
            let name = link.and_then(|link| link.name_of(procedure)).unwrap_or("?").to_owned();
            self.outputs.push_back(Output::Log(Log::Dropped { peer, name, reason, count }));
        }
    }
}
