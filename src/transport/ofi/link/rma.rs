//! Transfers by RMA: between memory here and memory that the peer has exposed, without the peer's taking part.
//!
//! They have an endpoint of their own. Where the peer's provider refuses an access, because the memory was revoked or the key is
//! wrong, the connection of that endpoint may break, with all that is under way there. So the endpoint is closed then, all its
//! transfers fail, which has the owner asked for each, and the next transfer opens another one.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::super::bulk::{BulkEndpoint, PayloadPosted};
use super::super::limits::{MAX_PARTS, PART, PARTS, RETRY, RMA_FAILURES, RMA_PAUSE, RMA_STALL, STALL_FAILURES};
use super::super::sys::{CompletionError, Label, RemoteExtent, RemotePlace};
use super::super::wire;
use super::OfiLink;
use crate::deferred_log::defer;
use crate::memory::Slice;
use crate::transport::{RemoteKeys, Sink};

/// Operations, and how they have ended.
type EndedTransfers = Vec<(u64, io::Result<()>)>;

#[derive(Default)]
pub(super) struct RmaTransfers {
    endpoint: Option<Arc<BulkEndpoint>>,
    /// Transfers by their numbers, which are not used again.
    transfers: HashMap<u64, OfiTransfer>,
    next: u64,
    /// The numbers of those that are not wholly posted; the first one posts next.
    queue: VecDeque<u64>,
    /// Parts that are under way.
    outstanding: usize,
    /// When a transfer was begun or a part posted at an idle endpoint, or the last part has completed.
    last_progress: Option<Instant>,
    /// Transfers that have ended and are not reported.
    done: EndedTransfers,
    /// How often it has failed since the last part that has completed.
    failures: u32,
    /// It has failed too often: then it is tried again.
    paused_until: Option<Instant>,
    closed: bool,
}

/// A transfer, posted in parts.
struct OfiTransfer {
    operation: u64,
    pull: bool,
    local: Slice,
    remote: Vec<RemoteExtent>,
    /// Progress of posting: bytes in all; index of the remote segment; bytes of that segment.
    posted: usize,
    segment: usize,
    within: u64,
    outstanding: usize,
    /// No more parts are posted.
    stopped: bool,
}

/// What can be posted now.
enum NextPart {
    Part(Slice, RemotePlace),
    /// As many are under way as may be.
    Enough,
    /// All is posted, or the memory is gone.
    Nothing,
}

impl OfiTransfer {
    fn is_posted(&self) -> bool {
        self.posted == self.local.len
    }

    fn next(&self, endpoint: &BulkEndpoint) -> NextPart {
        if self.stopped || self.is_posted() || self.local.is_over() {
            return NextPart::Nothing;
        }
        if self.outstanding >= PARTS {
            return NextPart::Enough;
        }
        let Some(extent) = self.remote.get(self.segment) else { return NextPart::Nothing };
        let longest = PART.min(endpoint.station.domain.info.longest);
        let left = usize::try_from(extent.len - self.within).unwrap_or(usize::MAX);
        let len = (self.local.len - self.posted).min(left).min(longest);
        let Some(part) = self.local.part(self.posted, len) else { return NextPart::Nothing };
        let len = len.min(endpoint.station.endpoint.takes(&part));
        let place = RemotePlace { address: extent.address + self.within, key: extent.key };
        match part.part(0, len) {
            Some(part) if len > 0 => NextPart::Part(part, place),
            _ => NextPart::Nothing,
        }
    }

    fn count_posted(&mut self, len: usize) {
        self.outstanding += 1;
        self.posted += len;
        self.within += len as u64;
        if self.remote.get(self.segment).is_some_and(|extent| extent.len == self.within) {
            self.segment += 1;
            self.within = 0;
        }
    }
}

impl RmaTransfers {
    /// Ends a transfer, and notes the report where one is due.
    fn end(&mut self, number: u64, result: io::Result<()>) {
        let Some(transfer) = self.transfers.remove(&number) else { return };
        if let Some(endpoint) = &self.endpoint {
            endpoint.end_payload();
        }
        self.done.push((transfer.operation, result));
    }

    /// Ends a transfer if no part of it is under way, and none is to come.
    fn end_if_done(&mut self, number: u64) {
        let Some(transfer) = self.transfers.get(&number) else { return };
        if transfer.outstanding > 0 {
            return;
        }
        if transfer.stopped {
            self.end(number, Err(io::ErrorKind::Interrupted.into()));
        } else if transfer.is_posted() {
            self.end(number, Ok(()));
        }
    }

    /// Posts the parts that there is room for. True when the provider has no room.
    fn post(&mut self, link: u64) -> io::Result<bool> {
        let Some(endpoint) = self.endpoint.clone() else { return Ok(false) };
        let mut passed = 0;
        while self.outstanding < MAX_PARTS && passed < self.queue.len() {
            let Some(number) = self.queue.pop_front() else { break };
            let Some(transfer) = self.transfers.get_mut(&number) else { continue };
            let (part, place) = match transfer.next(&endpoint) {
                NextPart::Part(part, place) => (part, place),
                NextPart::Enough => {
                    self.queue.push_back(number);
                    passed += 1;
                    continue;
                }
                NextPart::Nothing => {
                    transfer.stopped |= !transfer.is_posted();
                    self.end_if_done(number);
                    continue;
                }
            };
            match endpoint.access(transfer.pull, &part, place, Label::Rma { link, number })? {
                PayloadPosted::Begun => {
                    transfer.count_posted(part.len);
                    if self.outstanding == 0 {
                        self.last_progress = Some(Instant::now());
                    }
                    self.outstanding += 1;
                    self.queue.push_back(number);
                    passed = 0;
                }
                PayloadPosted::Busy => {
                    self.queue.push_front(number);
                    return Ok(true);
                }
                PayloadPosted::Gone => {
                    transfer.stopped = true;
                    self.end_if_done(number);
                }
            }
        }
        Ok(false)
    }

    fn count_failures(&mut self, count: u32, cause: &io::Error, remote: SocketAddr) {
        self.failures += count;
        if self.failures < RMA_FAILURES {
            return;
        }
        // One failure more, and the next pause begins.
        self.failures = RMA_FAILURES - 1;
        self.paused_until = Some(Instant::now() + RMA_PAUSE);
        let cause = cause.to_string();
        let what = "a link does without RMA for a while, which has failed several times in a row";
        defer(move || tracing::info!(target: "calomel::ofi", cause, %remote, "{what}"));
    }

    fn is_paused(&self) -> bool {
        self.paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Takes the endpoint, which is to be closed: it does no more. Its transfers have failed, which is reported when it is closed:
    /// until then parts may be carried out.
    fn fail(&mut self, cause: &io::Error) -> (Option<Arc<BulkEndpoint>>, EndedTransfers) {
        let numbers: Vec<u64> = self.transfers.keys().copied().collect();
        let ended = self.done.len();
        numbers.into_iter().for_each(|number| self.end(number, Err(io::Error::new(cause.kind(), cause.to_string()))));
        self.queue.clear();
        self.outstanding = 0;
        self.last_progress = None;
        (self.endpoint.take(), self.done.split_off(ended))
    }
}

impl OfiLink {
    /// The peer has told what its keys name its endpoint by; 0: there are none.
    pub(super) fn peer_is_target(&self, number: u64, sink: &mut dyn Sink) {
        if number != 0 && self.port.rma.is_some() && self.target.set(number).is_ok() {
            sink.rma_capable(self.key);
        }
    }

    pub(super) fn begin_transfer(&self, operation: u64, pull: bool, local: &Slice, keys: &RemoteKeys, offset: u64) -> bool {
        let Some(target) = self.target.get().filter(|_| !self.is_closed()) else { return false };
        // Payloads that have checksums go in messages; so does memory that its owner uses again without waiting.
        if self.covered.load(std::sync::atomic::Ordering::Relaxed) || local.may_lapse || local.is_over() {
            return false;
        }
        let Some(remote) = wire::decode_keys(keys, *target, offset, local.len as u64) else { return false };
        let (endpoint, posted) = {
            let mut rma = self.rma.lock();
            if rma.is_paused() {
                return false;
            }
            let endpoint = match self.rma_endpoint(&mut rma) {
                Ok(endpoint) => endpoint,
                Err(error) => {
                    defer(move || tracing::debug!(target: "calomel::ofi", %error, "no endpoint for RMA can be opened"));
                    return false;
                }
            };
            self.shared.begin_payload(&endpoint);
            let number = rma.next;
            rma.next += 1;
            if rma.transfers.is_empty() {
                rma.last_progress = Some(Instant::now());
            }
            let (local, outstanding, stopped) = (local.clone(), 0, false);
            let transfer = OfiTransfer { operation, pull, local, remote, posted: 0, segment: 0, within: 0, outstanding, stopped };
            rma.transfers.insert(number, transfer);
            rma.queue.push_back(number);
            let posted = rma.post(self.number);
            (endpoint, posted)
        };
        self.check_posted(&endpoint, posted);
        self.schedule_reports();
        true
    }

    /// The link's endpoint for RMA, opened when it is first needed, and after another one has failed.
    fn rma_endpoint(&self, rma: &mut RmaTransfers) -> io::Result<Arc<BulkEndpoint>> {
        if let Some(endpoint) = &rma.endpoint {
            return Ok(endpoint.clone());
        }
        let peer = self.peer.get().filter(|_| !rma.closed).ok_or(io::ErrorKind::NotConnected)?;
        let endpoint = self.shared.open_bulk(&self.port, self.remote, self.me.clone(), true)?;
        endpoint.set_peer(peer.name().bytes(), self.remote)?;
        Ok(rma.endpoint.insert(endpoint).clone())
    }

    /// Looks after what was posted: tries again later where the provider had no room, and gives the endpoint up where it failed.
    fn check_posted(&self, endpoint: &BulkEndpoint, posted: io::Result<bool>) {
        let now = Instant::now();
        match posted {
            Ok(busy) => self.wants_timer(now + if busy { RETRY } else { RMA_STALL }),
            Err(error) => self.fail_rma(endpoint, 1, &error),
        }
    }

    /// Ends all transfers of an endpoint: their owner is asked instead. It counts as so many failures.
    fn fail_rma(&self, failed: &BulkEndpoint, counts: u32, cause: &io::Error) {
        let (endpoint, failed) = {
            let mut rma = self.rma.lock();
            // Another one may have taken its place already.
            if !rma.endpoint.as_ref().is_some_and(|endpoint| std::ptr::eq(&raw const **endpoint, failed)) {
                return;
            }
            rma.count_failures(counts, cause, self.remote);
            rma.fail(cause)
        };
        if let Some(endpoint) = endpoint {
            let closed = endpoint.close();
            self.shared.forget_bulk(&endpoint);
            if !closed {
                // Nothing that may be carried out at any time can be reported as over.
                return self.fail(io::Error::new(cause.kind(), format!("an endpoint can't be closed after an error: {cause}")));
            }
        }
        {
            let mut rma = self.rma.lock();
            if !rma.closed {
                rma.done.extend(failed);
            }
        }
        self.schedule_reports();
    }

    /// An endpoint for RMA was closed, mostly since memory of this side was wanted back: that is no failure of RMA.
    pub(super) fn end_transfers_of(&self, bulk: &BulkEndpoint, cause: &io::Error) {
        self.fail_rma(bulk, 0, cause);
    }

    fn schedule_reports(&self) {
        if !self.rma.lock().done.is_empty() {
            self.shared.schedule(self.me.upgrade());
        }
    }

    /// Reports transfers that have ended.
    pub(in super::super) fn report_transfers(&self, sink: &mut dyn Sink) {
        let done = std::mem::take(&mut self.rma.lock().done);
        for (operation, result) in done {
            if !self.is_closed() {
                sink.rma_done(self.key, operation, result);
            }
        }
    }

    /// A part of a transfer has been carried out, or refused.
    pub(in super::super) fn rma_part_done(&self, number: u64, result: Result<(), CompletionError>, sink: &mut dyn Sink) {
        let (endpoint, posted) = {
            let mut rma = self.rma.lock();
            let Some(endpoint) = rma.endpoint.clone() else { return };
            let Some(transfer) = rma.transfers.get_mut(&number) else { return };
            let posted = match result {
                Ok(()) => {
                    transfer.outstanding -= 1;
                    rma.outstanding -= 1;
                    (rma.failures, rma.paused_until) = (0, None);
                    rma.last_progress = Some(Instant::now());
                    rma.end_if_done(number);
                    rma.post(self.number)
                }
                Err(error) => Err(error.into()),
            };
            (endpoint, posted)
        };
        self.check_posted(&endpoint, posted);
        self.report_transfers(sink);
    }

    /// Posts no more parts of a transfer. Those under way complete, or the thread that wants the memory back ends them.
    pub(super) fn stop_transfer(&self, operation: u64) {
        {
            let mut rma = self.rma.lock();
            let found = rma.transfers.iter_mut().find(|(_, transfer)| transfer.operation == operation);
            let Some((&number, transfer)) = found else { return };
            transfer.stopped = true;
            rma.end_if_done(number);
        }
        self.schedule_reports();
    }

    /// Tries again what the provider had no room for, and ends transfers without progress. Returns when to call it again.
    pub(super) fn check_transfers(&self, now: Instant, sink: &mut dyn Sink) -> Option<Instant> {
        let (endpoint, since, posted) = {
            let mut rma = self.rma.lock();
            let endpoint = rma.endpoint.clone()?;
            let posted = rma.post(self.number);
            let since = rma.last_progress.filter(|_| !rma.transfers.is_empty());
            (endpoint, since, posted)
        };
        let next = match posted {
            // Also while it has no room, or no connection.
            Ok(_) if since.is_some_and(|since| now >= since + RMA_STALL) => {
                let cause = io::Error::new(io::ErrorKind::TimedOut, format!("RMA makes no progress for {RMA_STALL:?}"));
                self.fail_rma(&endpoint, STALL_FAILURES, &cause);
                None
            }
            Ok(true) => Some(now + RETRY),
            Ok(false) => since.map(|since| since + RMA_STALL),
            Err(error) => {
                self.fail_rma(&endpoint, 1, &error);
                None
            }
        };
        self.report_transfers(sink);
        [next, endpoint.check_deadline(now)].into_iter().flatten().min()
    }

    /// The link has ended, and its transfers with it.
    pub(super) fn close_rma(&self) {
        let endpoint = {
            let mut rma = self.rma.lock();
            rma.closed = true;
            let (endpoint, _) = rma.fail(&io::ErrorKind::NotConnected.into());
            rma.done.clear();
            endpoint
        };
        if let Some(endpoint) = endpoint {
            endpoint.close();
            self.shared.forget_bulk(&endpoint);
        }
    }
}
