//! A link's second queue pair, for one-sided reads and writes only. When an access is refused, the devices break the queue pair
//! that it was made on: messages continue on the first one, and the next generation replaces the broken one.
//!
//! ```text
//!   none ──offer sent──▶ offered ──peer's offer──▶ connected ──peer's `RmaConnected`──▶ up ──error──▶ offered, next generation
//! ```

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::super::device::{Device, NUMBER_MASK, RMA};
use super::super::limits::RMA_REQUESTS;
use super::super::memory::Windowed;
use super::super::queue_set::QueueSet;
use super::super::slab::Slab;
use super::super::sys::{AccessFlags, ConnectionPath, Opcode, Qp, QpCapacity, Sge, WorkCompletion, WorkRequest, status_text};
use super::super::wire::{QpOffer, StagedSegment};
use super::rma_transfer::RmaTransfer;
use super::{DeviceLinks, VerbsLink};
use crate::deferred_log::defer;
use crate::memory::DeviceRegistration;
use crate::random;

/// Outstanding requests of one transfer: 2 MiB, a hundred times what is in flight at 100 Gbit/s and 2 µs.
const MAX_PER_TRANSFER: u32 = 8;
/// A queue pair with outstanding requests that makes no progress for so long is replaced: longer than a device takes to give up
/// by itself, which soft-RoCE does not do when a read is refused in the middle.
const STALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Attempts to read a staged segment, each on the next queue pair.
const MAX_TRIES: u32 = 8;

/// What an operation does.
enum OperationKind {
    /// Reads a segment that the peer has staged.
    Fetch { stage: Slab, staged: StagedSegment, posted: bool, tries: u32 },
    /// Moves data between memories that users have exposed.
    Transfer(RmaTransfer),
    /// Binds memory windows; holds whether that has succeeded.
    Windows { opened: Arc<OnceLock<bool>> },
}

struct PendingOperation {
    kind: OperationKind,
    /// Requests that have not completed.
    outstanding: u32,
    /// No more requests are posted.
    stopped: bool,
}

/// An operation that has ended.
pub(in super::super) enum OperationDone {
    /// With the number that [`RmaQueuePair::fetch`] returned.
    Fetched {
        number: u64,
        stage: Slab,
        len: usize,
    },
    Transferred {
        operation: u64,
        result: io::Result<()>,
    },
}

pub(super) struct RmaQueuePair {
    /// Generation of the current queue pair; 0 before the first.
    generation: u32,
    local_qp: Option<LocalQp>,
    /// Windows that were bound to it.
    windows: Vec<Weak<Windowed>>,
    peer_offer: Option<QpOffer>,
    /// The last generation that the peer has offered, and the last that it has connected.
    offered: u32,
    confirmed: u32,
    /// Both sides are connected.
    up: bool,
    /// By number; fetches keep theirs when they are retried.
    operations: HashMap<u64, PendingOperation>,
    /// Operations with requests left to post, in round-robin order.
    queue: VecDeque<u64>,
    outstanding: usize,
    /// When a request was last posted to an idle queue pair, or completed.
    last_progress: Instant,
    closed: bool,
    link: Weak<VerbsLink>,
    device: Arc<Device>,
    links: Arc<DeviceLinks>,
    queue_set: Arc<QueueSet<VerbsLink>>,
    path: ConnectionPath,
    /// Reads that the peer's device answers at a time.
    reads: u8,
    done: Vec<OperationDone>,
}

struct LocalQp {
    qp: Qp,
    first: u32,
}

impl RmaQueuePair {
    pub(super) fn new(
        link: Weak<VerbsLink>,
        links: &Arc<DeviceLinks>,
        queue_set: &Arc<QueueSet<VerbsLink>>,
        path: ConnectionPath,
        reads: u8,
    ) -> RmaQueuePair {
        RmaQueuePair {
            generation: 0,
            local_qp: None,
            windows: Vec::new(),
            peer_offer: None,
            offered: 0,
            confirmed: 0,
            up: false,
            operations: HashMap::new(),
            queue: VecDeque::new(),
            outstanding: 0,
            last_progress: Instant::now(),
            closed: false,
            link,
            device: links.device.clone(),
            links: links.clone(),
            queue_set: queue_set.clone(),
            path,
            reads: reads.max(1),
            done: Vec::new(),
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.up && !self.closed
    }

    /// True while requests are outstanding.
    pub(super) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    pub(super) fn has_stalled(&self, now: Instant) -> bool {
        self.is_busy() && now >= self.last_progress + STALL_TIMEOUT
    }

    fn queue_pair(&self) -> Option<u32> {
        self.local_qp.as_ref().map(|local_qp| local_qp.qp.number)
    }

    /// Id of an operation's work requests, which includes the generation.
    fn id(&self, number: u64) -> u64 {
        RMA | u64::from(self.generation & 0xf_ffff) << 40 | number
    }

    /// Offers the first queue pair, if the peer's offer has not brought that about already.
    pub(super) fn start(&mut self) -> io::Result<Option<QpOffer>> {
        if self.generation > 0 { Ok(None) } else { self.offer().map(Some) }
    }

    /// Makes the next queue pair; returns the offer to send.
    fn offer(&mut self) -> io::Result<QpOffer> {
        let max_sge = self.device.limits.max_sge.min(16) as u32;
        let capacity = QpCapacity { requests: RMA_REQUESTS as u32, max_sge, inline: 0 };
        let qp = Qp::bare(&self.device.pd, &self.queue_set.cq, capacity)?;
        qp.prepare(&self.path, true)?;
        self.generation += 1;
        let first = u32::from_ne_bytes(random::from_system()?) & 0x00ff_ffff;
        let offer = QpOffer { generation: self.generation, queue_pair: qp.number, first };
        if let Some(link) = self.link.upgrade() {
            self.links.insert(qp.number, &link);
        }
        self.local_qp = Some(LocalQp { qp, first });
        Ok(offer)
    }

    /// The peer has made its end. Returns an offer of this side's, if there was none of this generation; and whether the queue
    /// pair is connected.
    pub(super) fn peer_offered(&mut self, offer: QpOffer) -> io::Result<(Option<QpOffer>, bool)> {
        let mut own = None;
        if self.closed {
            return Ok((None, false));
        }
        // Each side offers each generation once, and the next one only after it has confirmed that this one is connected.
        if offer.generation != self.offered + 1 || self.offered > self.confirmed {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it offers an RMA queue pair out of turn"));
        }
        self.offered = offer.generation;
        if offer.generation < self.generation {
            return Ok((None, false));
        }
        if offer.generation > self.generation {
            own = match self.generation {
                0 => Some(self.offer()?),
                _ => self.fail("the peer has replaced the RMA queue pair")?,
            };
        }
        let Some(local_qp) = &self.local_qp else { return Ok((own, false)) };
        let reads = (self.device.limits.reads_asked.min(self.reads), self.device.limits.reads_answered);
        local_qp.qp.connect(&self.path, offer.queue_pair, (local_qp.first, offer.first), reads)?;
        self.peer_offer = Some(offer);
        Ok((own, true))
    }

    /// The peer has connected its end. True when RMA may begin.
    pub(super) fn peer_connected(&mut self, generation: u32) -> io::Result<bool> {
        if generation != self.offered || generation == self.confirmed {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it confirms an RMA queue pair that it has not offered"));
        }
        self.confirmed = generation;
        self.up = generation == self.generation && self.peer_offer.is_some() && self.local_qp.is_some();
        Ok(self.up)
    }

    /// Destroys the queue pair, and makes the next one, whose offer is returned. Transfers end with an error, fetches wait for
    /// the next.
    pub(super) fn fail(&mut self, why: &str) -> io::Result<Option<QpOffer>> {
        // Windows go first: a device may wait for those that are bound to a queue pair before it destroys that.
        for windows in self.windows.drain(..).filter_map(|windows| windows.upgrade()) {
            windows.end();
        }
        // Once it is destroyed, the device accesses no memory for it.
        if let Some(local_qp) = self.local_qp.take() {
            self.links.remove(local_qp.qp.number);
        }
        self.peer_offer = None;
        self.up = false;
        self.outstanding = 0;
        self.queue.clear();
        let numbers: Vec<u64> = self.operations.keys().copied().collect();
        let mut unreadable = false;
        for number in numbers {
            let Some(entry) = self.operations.get_mut(&number) else { continue };
            entry.outstanding = 0;
            match &mut entry.kind {
                OperationKind::Fetch { posted, tries, .. } if !self.closed => {
                    *tries += u32::from(*posted);
                    unreadable |= *tries > MAX_TRIES;
                    *posted = false;
                    self.queue.push_back(number);
                }
                _ => self.end(number, Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned()))),
            }
        }
        if unreadable {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("data that it staged can't be read: {why}")));
        }
        if self.closed {
            return Ok(None);
        }
        let why = why.to_owned();
        defer(move || tracing::debug!(target: "calomel::verbs", why, "the RMA queue pair broke and is replaced"));
        self.offer().map(Some)
    }

    /// Ends it for good.
    pub(super) fn close(&mut self) {
        self.closed = true;
        // It can't fail: no further queue pair is made.
        let _ = self.fail("the connection is over");
    }

    /// Stops all transfers of users.
    pub(super) fn stop_transfers(&mut self) {
        let numbers: Vec<u64> = self.operations.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.stop(number));
    }

    /// Reads what the peer has staged; returns the operation's number.
    pub(super) fn fetch(&mut self, stage: Slab, staged: StagedSegment) -> u64 {
        let number = self.device.number();
        self.operations.insert(
            number,
            PendingOperation {
                kind: OperationKind::Fetch { stage, staged, posted: false, tries: 0 },
                outstanding: 0,
                stopped: false,
            },
        );
        self.queue.push_back(number);
        number
    }

    /// Binds windows; the result reports whether that has succeeded. `None` when it can't be done now.
    pub(super) fn open(&mut self, windows: &Arc<Windowed>, access: AccessFlags) -> io::Result<Option<Arc<OnceLock<bool>>>> {
        let count = windows.remote_segments().len();
        let (Some(local_qp), true) = (&self.local_qp, self.up && self.outstanding + count <= RMA_REQUESTS) else {
            return Ok(None);
        };
        let number = self.device.number();
        if !windows.open(&local_qp.qp, self.id(number), access)? {
            return Ok(None);
        }
        // Those of memory that is no longer exposed make room.
        if self.windows.len().is_power_of_two() {
            self.windows.retain(|windows| windows.strong_count() > 0);
        }
        self.windows.push(Arc::downgrade(windows));
        let opened = Arc::<OnceLock<bool>>::default();
        let kind = OperationKind::Windows { opened: opened.clone() };
        self.operations.insert(number, PendingOperation { kind, outstanding: count as u32, stopped: false });
        self.outstanding += count;
        Ok(Some(opened))
    }

    /// Begins a transfer under a number.
    pub(super) fn transfer(&mut self, number: u64, transfer: RmaTransfer) {
        self.operations
            .insert(number, PendingOperation { kind: OperationKind::Transfer(transfer), outstanding: 0, stopped: false });
        self.queue.push_back(number);
    }

    /// Posts no more requests of an operation, if it is a transfer. It ends when the outstanding ones have completed.
    pub(super) fn stop(&mut self, number: u64) {
        let Some(entry) = self.operations.get_mut(&number) else { return };
        if matches!(entry.kind, OperationKind::Transfer(_)) {
            entry.stopped = true;
            if entry.outstanding == 0 {
                self.end(number, Err(io::ErrorKind::Interrupted.into()));
            }
        }
    }

    pub(super) fn number_of(&self, operation: u64) -> Option<u64> {
        let is_it = |kind: &OperationKind| matches!(kind, OperationKind::Transfer(transfer) if transfer.operation == operation);
        self.operations.iter().find(|(_, entry)| is_it(&entry.kind)).map(|(number, _)| *number)
    }

    /// True while the device may access memory for an operation.
    pub(super) fn is_under_way(&self, number: u64) -> bool {
        self.operations.contains_key(&number)
    }

    pub(super) fn take_done(&mut self) -> Vec<OperationDone> {
        std::mem::take(&mut self.done)
    }

    fn end(&mut self, number: u64, result: io::Result<()>) {
        let Some(entry) = self.operations.remove(&number) else { return };
        match entry.kind {
            OperationKind::Fetch { stage, staged, .. } => match result {
                Ok(()) => self.done.push(OperationDone::Fetched { number, stage, len: staged.len as usize }),
                Err(_) => self.device.give_stage(stage),
            },
            OperationKind::Windows { opened } => {
                let _ = opened.set(result.is_ok());
            }
            OperationKind::Transfer(transfer) => {
                transfer.local.region.unlend(&transfer.loan);
                self.done.push(OperationDone::Transferred { operation: transfer.operation, result });
            }
        }
    }

    /// A request has completed. An error breaks the queue pair.
    pub(super) fn ended(&mut self, completion: &WorkCompletion) -> Result<(), String> {
        // It may be of an earlier generation, even with the same queue pair number.
        if self.queue_pair() != Some(completion.queue_pair) || completion.id & !NUMBER_MASK != self.id(0) {
            return Ok(());
        }
        if completion.status != 0 {
            return Err(status_text(completion.status));
        }
        let number = completion.id & NUMBER_MASK;
        let Some(entry) = self.operations.get_mut(&number) else { return Ok(()) };
        self.last_progress = Instant::now();
        self.outstanding -= 1;
        entry.outstanding -= 1;
        if entry.outstanding == 0 {
            let whole = match &entry.kind {
                OperationKind::Fetch { posted, .. } => *posted,
                OperationKind::Transfer(transfer) => transfer.posted == transfer.local.len,
                OperationKind::Windows { .. } => true,
            };
            if whole {
                self.end(number, Ok(()));
            } else if entry.stopped {
                self.end(number, Err(io::ErrorKind::Interrupted.into()));
            }
        }
        Ok(())
    }

    /// Posts the requests that there is room for.
    pub(super) fn post_pending(&mut self) -> io::Result<()> {
        if !self.is_connected() {
            return Ok(());
        }
        if self.outstanding == 0 {
            self.last_progress = Instant::now();
        }
        let mut idle = 0;
        while self.outstanding < RMA_REQUESTS && idle < self.queue.len() {
            let Some(number) = self.queue.pop_front() else { break };
            match self.post_next(number)? {
                PostOutcome::All => idle = 0,
                PostOutcome::Some => {
                    self.queue.push_back(number);
                    idle = 0;
                }
                PostOutcome::Nothing => {
                    self.queue.push_back(number);
                    idle += 1;
                }
            }
        }
        Ok(())
    }

    fn post_next(&mut self, number: u64) -> io::Result<PostOutcome> {
        let id = self.id(number);
        let Some(local_qp) = &self.local_qp else { return Ok(PostOutcome::All) };
        let Some(entry) = self.operations.get_mut(&number) else { return Ok(PostOutcome::All) };
        match &mut entry.kind {
            OperationKind::Fetch { stage, staged, posted, .. } => {
                let sge = stage.sge(0, staged.len as usize);
                let opcode = Opcode::Read { address: staged.address, key: staged.key };
                // Counted first: after an error it may be outstanding all the same, until the queue pair is destroyed.
                *posted = true;
                entry.outstanding += 1;
                self.outstanding += 1;
                // SAFETY: the stage is registered for local writes, and is read after this has ended.
                unsafe { local_qp.qp.post(&[WorkRequest { id, opcode, sges: &[sge], signalled: true }]) }?;
                Ok(PostOutcome::All)
            }
            OperationKind::Windows { .. } => Ok(PostOutcome::All),
            OperationKind::Transfer(transfer) => {
                let room = (RMA_REQUESTS - self.outstanding)
                    .min((MAX_PER_TRANSFER - entry.outstanding.min(MAX_PER_TRANSFER)) as usize)
                    .min(4);
                if room == 0 {
                    return Ok(PostOutcome::Nothing);
                }
                // While this guard is held the memory can't be reclaimed; later reclaims find the loan.
                let local = transfer.local.clone();
                let Some(_access) = local.read_access().filter(|_| !entry.stopped && !local.has_ended()) else {
                    self.stop(number);
                    return Ok(PostOutcome::All);
                };
                let mut sges: SmallVec<[Vec<Sge>; 4]> = SmallVec::new();
                let mut opcodes: SmallVec<[Opcode; 4]> = SmallVec::new();
                while opcodes.len() < room
                    && let Some((opcode, from)) = transfer.next(self.device.limits.max_sge.min(16))
                {
                    opcodes.push(opcode);
                    sges.push(from);
                }
                let work: SmallVec<[WorkRequest<'_>; 4]> = opcodes
                    .iter()
                    .zip(&sges)
                    .map(|(opcode, sges)| WorkRequest { id, opcode: *opcode, sges, signalled: true })
                    .collect();
                if work.is_empty() {
                    // The remote and local memory don't cover the transfer, which the lengths of keys and region rule out.
                    self.stop(number);
                    return Ok(PostOutcome::All);
                }
                entry.outstanding += work.len() as u32;
                self.outstanding += work.len();
                // SAFETY: the region is registered, for local writes if it is pulled into, and stays so until the loan has been
                // revoked, which waits for the end of this; it is memory that the user has set aside for transfers.
                unsafe { local_qp.qp.post(&work) }?;
                Ok(if transfer.posted == transfer.local.len { PostOutcome::All } else { PostOutcome::Some })
            }
        }
    }
}

enum PostOutcome {
    /// All requests of the operation have been posted.
    All,
    Some,
    /// There is no room.
    Nothing,
}
