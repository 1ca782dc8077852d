//! Loans: memory of this side that the peer reads in place.
//!
//! ```text
//!   owner   granted = id, record ─────────────────────▶ granted = 0; fence; wait while the reader's word is id
//!   reader                 reading = id; fence; granted == id?; copy; granted == id still?; reading = 0 … finished = id
//! ```
//! Whichever fence comes first, one side sees the other's word: the reader does not begin, or the owner waits. The reader
//! discards what it read while the grant was withdrawn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::segment::{CLOSED, SLOTS, see};
use crate::deferred_log::defer;
use crate::memory::{Loan, Operation, ReadAccess, Slice};
use crate::sync::atomic::{Ordering, fence};
use crate::sync::thread;

/// How long a reader may take for one step, which is mostly one system call. A reader that takes longer was stopped, or is hostile:
/// its connection is cut, and it discards what it reads.
const STEP_LIMIT: Duration = Duration::from_secs(1);
/// Time between two checks whether the reader still lives.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

struct ShmLoan {
    connection: Arc<Connection>,
    slot: usize,
    id: u64,
    /// The operation that the peer reads it for.
    operation: Operation,
}

impl Loan for ShmLoan {
    fn withdraw(&self) {
        let granted = &self.connection.mine.words().granted[self.slot];
        // It may hold `CLOSED` already: then the link has ended, and the reader may still be reading.
        let _ = granted.compare_exchange(self.id, 0, Ordering::SeqCst, Ordering::SeqCst);
        // A reader that sees what the owner writes after this also sees the loan withdrawn.
        fence(Ordering::SeqCst);
    }

    fn is_discarded(&self) -> bool {
        true
    }

    fn is_over(&self) -> bool {
        self.operation.has_ended()
    }

    fn wait(&self, since: Instant) {
        let mut next_check = Instant::now() + CHECK_INTERVAL;
        while self.is_read() {
            thread::yield_now();
            let now = Instant::now();
            if now < next_check && now < since + STEP_LIMIT {
                continue;
            }
            next_check = now + CHECK_INTERVAL;
            // A peer whose connection was cut gets no further time for its other loans.
            if self.connection.peer.is_gone() || self.connection.peer.is_cut() {
                return;
            }
            if now >= since + STEP_LIMIT {
                let pid = self.connection.peer.pid;
                defer(move || tracing::warn!(target: "calomel::shm", pid, "a read of a loan takes too long: the link is cut"));
                return self.connection.peer.cut();
            }
        }
    }
}

impl ShmLoan {
    fn is_read(&self) -> bool {
        see(&self.connection.theirs.words().reading[self.slot]) == self.id
    }
}

struct LoanSlot {
    grant: Arc<dyn Loan>,
    /// Keeps the memory alive, and unlends it when the loan ends.
    memory: Slice,
    id: u64,
    payload: u64,
}

/// The loans of one link.
#[derive(Default)]
pub(super) struct Loans {
    slots: [Option<LoanSlot>; SLOTS],
    last: u64,
    /// Payloads with loans: their number, and whether all of their parts are lent or sent.
    payloads: Vec<(u64, bool)>,
}

impl Loans {
    pub(super) fn free_slot(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.payloads.is_empty()
    }

    /// Lends a part of a payload's memory, and returns the id to send to the peer.
    pub(super) fn lend(
        &mut self,
        connection: &Arc<Connection>,
        slot: usize,
        access: &ReadAccess<'_>,
        part: Slice,
        payload: u64,
    ) -> u64 {
        self.last += 1;
        let id = self.last;
        let grant: Arc<dyn Loan> = Arc::new(ShmLoan { connection: connection.clone(), slot, id, operation: part.operation() });
        access.lend(grant.clone());
        connection.mine.words().granted[slot].store(id, Ordering::Release);
        self.slots[slot] = Some(LoanSlot { grant, memory: part, id, payload });
        if self.payloads.last().is_none_or(|(last, _)| *last != payload) {
            self.payloads.push((payload, false));
        }
        id
    }

    /// No further part of a payload will be lent. True when a part of it was.
    pub(super) fn complete(&mut self, payload: u64) -> bool {
        let entry = self.payloads.iter_mut().find(|(number, _)| *number == payload);
        entry.map(|(_, whole)| *whole = true).is_some()
    }

    /// True when the peer has finished a loan.
    pub(super) fn has_finished(&self, connection: &Connection) -> bool {
        let finished = |slot: usize| see(&connection.theirs.words().finished[slot]);
        self.slots.iter().enumerate().any(|(slot, entry)| entry.as_ref().is_some_and(|entry| entry.id == finished(slot)))
    }

    /// Ends the loans that the peer has finished, and returns how many payloads that completes.
    pub(super) fn sweep(&mut self, connection: &Connection) -> usize {
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            let finished = see(&connection.theirs.words().finished[slot]);
            if let Some(done) = entry.take_if(|entry| entry.id == finished) {
                done.memory.region.unlend(&done.grant);
                connection.mine.words().granted[slot].store(0, Ordering::Relaxed);
            }
        }
        let before = self.payloads.len();
        let slots = &self.slots;
        self.payloads.retain(|(payload, whole)| !whole || slots.iter().flatten().any(|entry| entry.payload == *payload));
        before - self.payloads.len()
    }

    /// Withdraws all loans of a link that is over, and returns those that the peer is reading at this moment.
    pub(super) fn end(&mut self, connection: &Arc<Connection>) -> Vec<Lingering> {
        let mut lingering = Vec::new();
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            let Some(entry) = entry.take() else { continue };
            connection.mine.words().granted[slot].store(CLOSED, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            lingering.push(Lingering { connection: connection.clone(), slot, entry, since: Instant::now() });
        }
        self.payloads.clear();
        lingering.retain(|lingering| !lingering.settle());
        lingering
    }
}

/// A loan of a closed link that the peer announces to be reading. A fence of the memory waits for it; without a fence, it must
/// still end, so that the link's memory and descriptors are freed.
pub(super) struct Lingering {
    connection: Arc<Connection>,
    slot: usize,
    entry: LoanSlot,
    since: Instant,
}

impl Lingering {
    /// Ends the loan if the peer does not read it any more, is dead, or has exceeded [`STEP_LIMIT`]. False: not yet.
    pub(super) fn settle(&self) -> bool {
        let over = see(&self.connection.theirs.words().reading[self.slot]) != self.entry.id
            || self.since.elapsed() >= STEP_LIMIT
            || self.connection.peer.is_gone();
        if over {
            self.entry.memory.region.unlend(&self.entry.grant);
        }
        over
    }
}
