//! Log records. What peers can cause is logged at powers of two of its count, so that no peer can flood the log; so is what
//! this engine's user may do many times.

use super::refusals::{Cause, Dropped};
use super::{Env, Failure, LinkId, Output, Proto};
use crate::Address;

/// A record of the log. A peer is named by its address as the transport knows it. A count is of all events of that kind and
/// cause so far, including those that were not logged.
#[derive(Clone, Debug)]
pub(crate) enum Log {
    /// A peer was refused something.
    Refused { peer: Address, what: String, cause: Cause, count: u64 },
    /// A limit was reached.
    Limit { what: &'static str, reason: String, count: u64 },
    /// A one-way call was lost; without a peer when its connection is gone.
    Dropped { peer: Option<Address>, name: String, reason: Dropped, count: u64 },
    /// This engine's user dropped exposed memory of `size` bytes while the peer, and maybe others, held a bulk of it.
    DroppedExposure { peer: Address, size: usize, count: u64 },
    /// A connection was closed because of a failure.
    LinkFailed { peer: Address, failure: String, count: u64 },
    /// A peer supports no version of the protocol that this engine does.
    OtherVersion { peer: Address, count: u64 },
    /// A device could not carry out a transfer; the owner of the memory is asked instead.
    Device { reason: String },
}

/// How many records of these kinds were logged, or would have been.
#[derive(Default)]
pub(super) struct LogCounts {
    dropped_exposures: u64,
    failed_links: u64,
    other_versions: u64,
}

fn is_next(count: &mut u64) -> bool {
    *count += 1;
    count.is_power_of_two()
}

impl<E: Env> Proto<E> {
    /// Closes a link because of a failure, and logs it.
    pub(crate) fn fail_link(&mut self, id: LinkId, failure: Failure) {
        if let Some(link) = self.links.get_mut(id) {
            // It does not end because it is idle.
            link.idle.left = false;
        }
        if let Some(link) = self.links.get(id)
            && is_next(&mut self.logged.failed_links)
        {
            let (peer, failure, count) = (link.remote.clone(), format!("{failure:?}"), self.logged.failed_links);
            self.outputs.push_back(Output::Log(Log::LinkFailed { peer, failure, count }));
        }
        self.close(id, failure);
    }

    pub(super) fn note_dropped_exposure(&mut self, holder: LinkId, size: usize) {
        if is_next(&mut self.logged.dropped_exposures) {
            let (peer, count) = (self.links[holder].remote.clone(), self.logged.dropped_exposures);
            self.outputs.push_back(Output::Log(Log::DroppedExposure { peer, size, count }));
        }
    }

    pub(super) fn note_other_version(&mut self, id: LinkId) {
        if is_next(&mut self.logged.other_versions) {
            let (peer, count) = (self.links[id].remote.clone(), self.logged.other_versions);
            self.outputs.push_back(Output::Log(Log::OtherVersion { peer, count }));
        }
    }

    /// Counts a refusal, and logs it at powers of two of the count: so a refused peer can't flood the log, and the refusals in
    /// between cost no more than the counting.
    pub(super) fn refused(&mut self, link: LinkId, what: impl FnOnce() -> String, cause: Cause) {
        let count = cause.count(&mut self.refusals);
        *count = count.saturating_add(1);
        let count = *count;
        if count.is_power_of_two()
            && let Some(link) = self.links.get(link)
        {
            let peer = link.remote.clone();
            self.outputs.push_back(Output::Log(Log::Refused { peer, what: what(), cause, count }));
        }
    }

    /// Counts a lost one-way call, which its caller takes as sent, and logs it at powers of two of the count.
    pub(super) fn note_dropped(&mut self, id: LinkId, procedure: u32, reason: Dropped) {
        let count = &mut self.refusals.one_way;
        *count = count.saturating_add(1);
        if count.is_power_of_two() {
            let (link, count) = (self.links.get(id), *count);
            let peer = link.map(|link| link.remote.clone());
            let name = link.and_then(|link| link.declarations.name_of(procedure)).unwrap_or("?").to_owned();
            self.outputs.push_back(Output::Log(Log::Dropped { peer, name, reason, count }));
        }
    }
}
