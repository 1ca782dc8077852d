//! One-way calls that wait, undecoded, until there is memory for their values.
//!
//! Their callers take them as sent, so a lack of memory that passes does not refuse them. A call that waits counts with its
//! message. It is handled again when there is room for the memory that it has requested and a quarter more, not counting the
//! messages of others that wait: so they can't keep each other waiting, and each is decoded a few times at most.
//!
//! ```text
//!   handed out ──no memory──▶ waits ──there is room──▶ handed out again, with the memory reserved
//!                               └──this engine ends──▶ lost
//! ```

use std::collections::{HashMap, VecDeque};

use super::limits::{VALUES_AHEAD, VALUES_COUNT, VALUES_PART_AHEAD};
use super::wire::Status;
use super::{EngineStage, Env, Incoming, LinkId, Output, Proto, RequestId};

/// The calls that wait, in order of arrival: by link, and under the null link those of peers that are gone.
#[derive(Default)]
pub(super) struct Parked {
    queues: HashMap<LinkId, ParkedQueue>,
    /// The links that have calls here, or had; those that are gone, too, until their turns come. They take turns.
    turns: VecDeque<LinkId>,
    /// Those of them that have got memory back: they need not wait for their turns.
    freed: Vec<LinkId>,
    /// Values have given memory back: there may be room for any call.
    is_much_free: bool,
    /// Bytes of all calls that wait.
    bytes: usize,
}

#[derive(Default)]
struct ParkedQueue {
    requests: VecDeque<RequestId>,
    bytes: usize,
    /// It is in `freed`.
    is_freed: bool,
}

/// Links that one step serves beside those that have got memory back, and calls of each that it hands out. These cause a
/// further step when they end, and links that have requests are watched, which causes steps too.
const LINKS_AT_A_TIME: usize = 64;
const CALLS_AT_A_TIME: usize = 16;
/// Links that one step serves in vain when no values have given memory back: short calls of other peers must not take longer
/// for each link at which calls wait.
const LINKS_IN_VAIN: usize = 4;
/// One part in so many of the limit may be taken by what the peer itself releases: bulks and answers.
const PART_TAKEN: usize = 32;

impl Parked {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    #[cfg(test)]
    pub(super) fn turns(&self) -> usize {
        self.turns.len()
    }

    /// Bytes of the calls that wait, of this link and in total.
    pub(super) fn bytes(&self, link: LinkId) -> (usize, usize) {
        (self.queues.get(&link).map_or(0, |queue| queue.bytes), self.bytes)
    }

    pub(super) fn has(&self, link: LinkId) -> bool {
        self.queues.get(&link).is_some_and(|queue| !queue.requests.is_empty())
    }

    /// Memory that was taken by a request of a connection is free: the next that waits there may have it. If it was taken by
    /// values, it may be enough for those of other connections, too.
    #[inline]
    pub(super) fn freed(&mut self, link: LinkId, values: bool) {
        if !self.is_empty() {
            self.note_freed(link, values);
        }
    }

    #[cold]
    fn note_freed(&mut self, link: LinkId, values: bool) {
        self.is_much_free |= values;
        if let Some(queue) = self.queues.get_mut(&link)
            && !std::mem::replace(&mut queue.is_freed, true)
        {
            self.freed.push(link);
        }
    }

    pub(super) fn add(&mut self, link: LinkId, id: RequestId, bytes: usize, first: bool) {
        let queue = self.queues.entry(link).or_insert_with(|| {
            self.turns.push_back(link);
            ParkedQueue::default()
        });
        if first {
            queue.requests.push_front(id);
        } else {
            queue.requests.push_back(id);
        }
        queue.bytes += bytes;
        self.bytes += bytes;
    }

    /// Removes the first call of a link; `cost` gives its bytes.
    fn take(&mut self, link: LinkId, cost: impl FnOnce(RequestId) -> usize) -> Option<RequestId> {
        let queue = self.queues.get_mut(&link)?;
        let id = queue.requests.pop_front()?;
        let bytes = cost(id);
        queue.bytes -= bytes;
        self.bytes -= bytes;
        Some(id)
    }

    /// A link is gone. It keeps its place among the turns, where it is skipped: to search for it would take longer with each
    /// link that has calls here.
    pub(super) fn orphan(&mut self, link: LinkId) {
        let Some(mut gone) = self.queues.remove(&link) else { return };
        let orphans = self.queues.entry(LinkId::default()).or_insert_with(|| {
            self.turns.push_back(LinkId::default());
            ParkedQueue::default()
        });
        orphans.requests.append(&mut gone.requests);
        orphans.bytes += gone.bytes;
    }
}

impl<E: Env> Proto<E> {
    /// The link under which a request waits.
    fn queue_of(&self, link: LinkId) -> LinkId {
        if self.links.contains_key(link) { link } else { LinkId::default() }
    }

    /// Whether a request that is handed out for the first time has to wait behind parked ones.
    pub(super) fn is_behind_parked(&self, id: RequestId) -> bool {
        let request = self.requests.get(id).filter(|request| request.one_way.is_some() && request.wants == 0);
        request.is_some_and(|request| self.parked.has(self.queue_of(request.link)))
    }

    /// Parks a one-way call whose values would have taken so much memory and more. It is handed out again when there is room
    /// for them.
    pub(crate) fn park(&mut self, incoming: Incoming<E>, memory: usize) {
        let id = incoming.request;
        let is_over = self.stage == EngineStage::Closed;
        let Some(request) = self.requests.get_mut(id).filter(|_| !is_over) else { return self.lose(incoming) };
        let again = request.wants > 0;
        request.wants = memory.saturating_add(memory / VALUES_PART_AHEAD).saturating_add(VALUES_AHEAD);
        request.parked = Some(Box::new(incoming));
        let link = request.link;
        // A smaller amount is never refused.
        let _ = self.count_values(id, 0);
        let (link, cost) = (self.queue_of(link), self.requests[id].cost);
        self.parked.add(link, id, cost, again);
        // There may be room meanwhile.
        self.parked.freed(link, false);
    }

    /// Hands out the calls that there is room for.
    pub(super) fn resume_parked(&mut self) {
        for link in std::mem::take(&mut self.parked.freed) {
            if let Some(queue) = self.parked.queues.get_mut(&link) {
                queue.is_freed = false;
                self.resume_of(link);
            }
        }
        let most_in_vain = if std::mem::take(&mut self.parked.is_much_free) { LINKS_AT_A_TIME } else { LINKS_IN_VAIN };
        let mut in_vain = 0;
        for _ in 0..self.parked.turns.len().min(LINKS_AT_A_TIME) {
            let Some(link) = self.parked.turns.pop_front() else { return };
            if !self.parked.has(link) {
                self.parked.queues.remove(&link);
                continue;
            }
            let any = self.resume_of(link);
            if self.parked.has(link) {
                self.parked.turns.push_back(link);
            } else {
                self.parked.queues.remove(&link);
            }
            in_vain += usize::from(!any);
            if in_vain == most_in_vain {
                return;
            }
        }
    }

    /// Hands out what there is room for of one connection. False if there was none.
    fn resume_of(&mut self, link: LinkId) -> bool {
        for count in 0..CALLS_AT_A_TIME {
            let requests = &self.requests;
            let Some(id) = self.parked.take(link, |id| requests[id].cost) else { return count > 0 };
            if !self.reserve(id) {
                let cost = self.requests[id].cost;
                self.parked.add(link, id, cost, true);
                return count > 0;
            }
            if let Some(incoming) = self.requests[id].parked.take() {
                self.outputs.push_back(Output::Request(*incoming));
            }
        }
        true
    }

    /// Reserves memory for the values of a request, if there is as much as it wants, or as much as it could ever get.
    fn reserve(&mut self, id: RequestId) -> bool {
        let request = &self.requests[id];
        let most = self.most_alone(request.link);
        let most = (most - most / PART_TAKEN).saturating_sub(request.cost).saturating_mul(VALUES_COUNT);
        let wanted = request.wants.min(most);
        self.count_values(id, wanted).is_ok()
    }

    /// This engine ends: the calls that wait are lost.
    pub(super) fn lose_parked(&mut self) {
        for (_, queue) in std::mem::take(&mut self.parked).queues {
            for id in queue.requests {
                if let Some(incoming) = self.requests.get_mut(id).and_then(|request| request.parked.take()) {
                    self.lose(*incoming);
                }
            }
        }
    }

    fn lose(&mut self, incoming: Incoming<E>) {
        self.release(incoming.link, incoming.leases);
        // A one-way call has no caller that waits for the answer.
        let _ = self.respond(incoming.request, Err(Status::Finalizing));
    }
}
