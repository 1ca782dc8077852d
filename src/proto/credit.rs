//! Credit for one-way calls: how many may be in flight, from the view of either side of a link.

use std::collections::HashSet;

use super::{Failure, broken};

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
    pub(super) fn spend(&mut self, cost: Option<u32>) {
        if let Some(cost) = cost {
            self.credit.calls -= 1;
            self.credit.bytes -= cost;
            self.out += 1;
        }
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
    pub(super) fn has_report_since(&self) -> bool {
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
