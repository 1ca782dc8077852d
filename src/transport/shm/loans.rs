//! Memory of this side that the peer reads where it is.
//!
//! ```text
//!   owner   granted = id, record ─────────────────────▶ granted = 0; fence; waits while the reader's word is id
//!   reader                 reading = id; fence; granted == id? copies; granted == id still?; reading = 0 … finished = id
//! ```
//! Whichever fence comes first, one side sees the other's word: the reader does not begin, or the owner waits. What was read
//! while the grant went away is thrown away by the reader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::segment::{CLOSED, SLOTS, see};
use crate::deferred_log::defer;
use crate::memory::{Loan, Operation, ReadAccess, Slice};
use crate::sync::atomic::{Ordering, fence};
use crate::sync::thread;

/// How long a reader may take for one step, which is one system call. One that takes longer has been stopped in the middle of
/// it, or lies; it loses the connection, and with it the right to what it reads.
const STEP_LIMIT: Duration = Duration::from_secs(1);
/// Between two looks at whether a reader that is waited for still lives.
const LOOK: Duration = Duration::from_millis(1);

struct ShmLoan {
    line: Arc<Connection>,
    slot: usize,
    id: u64,
    /// What it is read for.
    operation: Operation,
}

impl Loan for ShmLoan {
    fn withdraw(&self) {
        let granted = &self.line.mine.words().granted[self.slot];
        // If it is not granted any more, the link may have ended while the reader goes on.
        let _ = granted.compare_exchange(self.id, 0, Ordering::SeqCst, Ordering::SeqCst);
        // What the owner writes from now on comes after that, also for a reader that looks at it later.
        fence(Ordering::SeqCst);
    }

    fn is_over(&self) -> bool {
        self.operation.has_ended()
    }

    fn wait(&self, since: Instant) {
        let mut look = Instant::now() + LOOK;
        while self.is_read() {
            thread::yield_now();
            let now = Instant::now();
            if now < look && now < since + STEP_LIMIT {
                continue;
            }
            look = now + LOOK;
            // Who was cut off once has no time for its other loans.
            if self.line.peer.is_gone() || self.line.peer.is_cut() {
                return;
            }
            if now >= since + STEP_LIMIT {
                let pid = self.line.peer.pid;
                defer(move || tracing::warn!(target: "calomel::shm", pid, "a peer does not end its read; it is cut off"));
                return self.line.peer.cut();
            }
        }
    }
}

impl ShmLoan {
    fn is_read(&self) -> bool {
        see(&self.line.theirs.words().reading[self.slot]) == self.id
    }
}

struct LoanSlot {
    grant: Arc<dyn Loan>,
    /// Keeps the memory, and is told when it is no longer lent.
    memory: Slice,
    id: u64,
    payload: u64,
}

/// What this side has lent over one link.
#[derive(Default)]
pub(super) struct Loans {
    slots: [Option<LoanSlot>; SLOTS],
    last: u64,
    /// Payloads of which something is lent, or will be: their number, and whether all of their parts have been lent.
    payloads: Vec<(u64, bool)>,
}

impl Loans {
    pub(super) fn free_slot(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.payloads.is_empty()
    }

    /// Lends a part of a payload's memory; the number to tell the peer.
    pub(super) fn lend(
        &mut self,
        line: &Arc<Connection>,
        slot: usize,
        access: &ReadAccess<'_>,
        part: Slice,
        payload: u64,
    ) -> u64 {
        self.last += 1;
        let id = self.last;
        let grant: Arc<dyn Loan> = Arc::new(ShmLoan { line: line.clone(), slot, id, operation: part.operation() });
        access.lend(grant.clone());
        line.mine.words().granted[slot].store(id, Ordering::Release);
        self.slots[slot] = Some(LoanSlot { grant, memory: part, id, payload });
        if self.payloads.last().is_none_or(|(last, _)| *last != payload) {
            self.payloads.push((payload, false));
        }
        id
    }

    /// Nothing more of a payload will be lent. True when something of it has been.
    pub(super) fn complete(&mut self, payload: u64) -> bool {
        let entry = self.payloads.iter_mut().find(|(number, _)| *number == payload);
        entry.map(|(_, whole)| *whole = true).is_some()
    }

    /// True when the peer is done with something.
    pub(super) fn has_finished(&self, line: &Connection) -> bool {
        let finished = |slot: usize| see(&line.theirs.words().finished[slot]);
        self.slots.iter().enumerate().any(|(slot, entry)| entry.as_ref().is_some_and(|entry| entry.id == finished(slot)))
    }

    /// Takes back what the peer is done with; how many payloads that were.
    pub(super) fn sweep(&mut self, line: &Connection) -> usize {
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            let finished = see(&line.theirs.words().finished[slot]);
            if let Some(done) = entry.take_if(|entry| entry.id == finished) {
                done.memory.region.unlend(&done.grant);
                line.mine.words().granted[slot].store(0, Ordering::Relaxed);
            }
        }
        let before = self.payloads.len();
        let slots = &self.slots;
        self.payloads.retain(|(payload, whole)| !whole || slots.iter().flatten().any(|entry| entry.payload == *payload));
        before - self.payloads.len()
    }

    /// The link is over: nothing is lent any more. What is being read at this moment comes back.
    pub(super) fn end(&mut self, line: &Arc<Connection>) -> Vec<Lingering> {
        let mut lingering = Vec::new();
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            let Some(entry) = entry.take() else { continue };
            line.mine.words().granted[slot].store(CLOSED, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            lingering.push(Lingering { line: line.clone(), slot, entry, since: Instant::now() });
        }
        self.payloads.clear();
        lingering.retain(|lingering| !lingering.settle());
        lingering
    }
}

/// A loan of a link that is over, of which the peer says that it reads it. Whoever takes the memory back waits for that; where
/// nobody does, it must not keep the link's memory and descriptors for ever.
pub(super) struct Lingering {
    line: Arc<Connection>,
    slot: usize,
    entry: LoanSlot,
    since: Instant,
}

impl Lingering {
    /// Ends the loan if nobody reads it any more, or has had the time for it. False: not yet.
    pub(super) fn settle(&self) -> bool {
        let over = see(&self.line.theirs.words().reading[self.slot]) != self.entry.id
            || self.since.elapsed() >= STEP_LIMIT
            || self.line.peer.is_gone();
        if over {
            self.entry.memory.region.unlend(&self.entry.grant);
        }
        over
    }
}
