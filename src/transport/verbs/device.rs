//! A device in use: its queues, receive buffers, and links.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::link::VerbsLink;
use super::memory::Slab;
use super::outbox::SENDS;
use super::sys::{
    AccessFlags, AsyncEvent, CompletionChannel, Context, Cq, DeviceLimits, Pd, ReceiveRequest, Srq, WorkCompletion,
};
use crate::random;

/// Longest message, in bytes.
pub(super) const MESSAGE: usize = 4096;
/// Messages that a link's peer may send before it gets credits back.
pub(super) const CREDITS: u16 = 16;
/// Buffers for messages that need no credit: two that return credits, as many as there may be staged segments whose reading
/// is reported, a farewell, and four about this RMA queue pair and the next.
pub(super) const UNCREDITED: u16 = 3 + super::STAGED as u16 + 4;
/// Receive buffers of one link.
const BUFFERS: usize = (CREDITS + UNCREDITED) as usize;
/// Links that share a queue set.
const SHARING: usize = 64;
/// Receive buffers that links may lose by ending in the middle of a message; a set that lost more takes no new links.
const LOST: usize = 32;
/// Buffers are reposted in batches of this size.
const REFILL: usize = 8;
/// Length of a staged segment, in bytes.
pub(super) const STAGE: usize = 256 << 10;
/// Staging buffers that are kept for reuse.
const KEPT: usize = 8;

/// Kind of a work request: the upper bits of its id.
const RECEIVED: u64 = 1 << 60;
pub(super) const SENT: u64 = 2 << 60;
pub(super) const RMA: u64 = 3 << 60;
const KIND_MASK: u64 = 15 << 60;
/// Number of a work request: the lower bits. The bits between hold the generation of the RMA queue pair.
pub(super) const NUMBER_MASK: u64 = (1 << 40) - 1;

/// Devices of all engines of this process: an asynchronous event reaches only one of the engines.
static ALL: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

pub(super) struct Device {
    /// Identifies the device within its engine, and so the remote keys that are valid for it.
    pub domain: u64,
    pub context: Context,
    pub limits: DeviceLimits,
    pub pd: Arc<Pd>,
    pub completions: Arc<CompletionChannel>,
    queue_sets: RwLock<Vec<Arc<QueueSet>>>,
    /// Counts changes of the queue sets of all of the engine's devices.
    changes: Arc<AtomicU32>,
    /// Links by the numbers of their queue pairs.
    links: RwLock<HashMap<u32, Arc<VerbsLink>>>,
    stages: Mutex<Vec<Slab>>,
    /// Number of the next work request.
    next: AtomicU64,
}

/// A completion queue and a shared receive queue with its buffers, for up to [`SHARING`] links.
pub(super) struct QueueSet {
    pub cq: Arc<Cq>,
    pub srq: Arc<Srq>,
    state: Mutex<QueueSetState>,
    /// The completion channel is to be notified of the next completion.
    armed: AtomicBool,
}

#[derive(Default)]
struct QueueSetState {
    /// Completions that were polled, and not handled yet.
    stash: Vec<WorkCompletion>,
    slabs: Vec<Slab>,
    /// Buffers that were read, and are to be reposted; and for each the link whose peer then gets a credit.
    empty: Vec<(u64, Option<Weak<VerbsLink>>)>,
    links: usize,
    /// Buffers that ended links may have taken with them.
    lost: usize,
}

impl Device {
    pub(super) fn new(context: Context, changes: &Arc<AtomicU32>) -> io::Result<Arc<Device>> {
        let limits = context.limits()?;
        let device = Arc::new(Device {
            domain: u64::from_ne_bytes(random::from_system()?),
            context,
            limits,
            pd: Pd::new(context)?,
            completions: CompletionChannel::new(context)?,
            queue_sets: RwLock::default(),
            changes: changes.clone(),
            links: RwLock::default(),
            stages: Mutex::default(),
            next: AtomicU64::new(1),
        });
        let mut all = ALL.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&device));
        Ok(device)
    }

    /// Makes room for one more link.
    pub(super) fn admit(&self) -> io::Result<Arc<QueueSet>> {
        let mut queue_sets = self.queue_sets.write();
        if let Some(queue_set) = queue_sets.iter().find(|queue_set| queue_set.has_room()) {
            queue_set.admit(&self.pd)?;
            return Ok(queue_set.clone());
        }
        // The completion queue must hold all that can be outstanding: receives, sends, and RMA requests.
        let receives = (SHARING + 1) * BUFFERS + LOST;
        // Twice for RMA: completions of a broken queue pair may be left when the next is there.
        let wanted = u32::try_from(receives + SHARING * (SENDS + 2 * super::rma_queue_pair::MAX_OUTSTANDING)).unwrap_or(u32::MAX);
        if wanted > self.limits.completions || receives > self.limits.receives as usize {
            let DeviceLimits { completions, receives: room, .. } = self.limits;
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "the device's queues hold {completions} completions and {room} messages; {wanted} and {receives} are needed"
                ),
            ));
        }
        let queue_set = Arc::new(QueueSet {
            cq: Cq::new(self.context, &self.completions, wanted)?,
            srq: Srq::new(&self.pd, receives as u32)?,
            state: Mutex::default(),
            armed: AtomicBool::new(false),
        });
        queue_set.admit(&self.pd)?;
        queue_sets.push(queue_set.clone());
        self.changes.fetch_add(1, Ordering::Release);
        Ok(queue_set)
    }

    /// A link has ended.
    pub(super) fn release(&self, queue_set: &Arc<QueueSet>) {
        let mut queue_sets = self.queue_sets.write();
        let left = {
            let mut state = queue_set.state.lock();
            state.links -= 1;
            state.lost += 1;
            state.links
        };
        // The next queue set starts with all of its buffers.
        if left == 0 {
            queue_sets.retain(|other| !Arc::ptr_eq(other, queue_set));
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    pub(super) fn queue_sets(&self) -> SmallVec<[Arc<QueueSet>; 2]> {
        self.queue_sets.read().iter().cloned().collect()
    }

    /// Routes completions of a queue pair to their link.
    pub(super) fn insert_link(&self, queue_pair: u32, link: &Arc<VerbsLink>) {
        self.links.write().insert(queue_pair, link.clone());
    }

    pub(super) fn remove_link(&self, queue_pair: u32) {
        self.links.write().remove(&queue_pair);
    }

    /// All links of the device.
    pub(super) fn links(&self) -> Vec<Arc<VerbsLink>> {
        self.links.read().values().cloned().collect()
    }

    /// Passes an asynchronous event on: any engine of this process may have received it.
    pub(super) fn dispatch_async_event(context: Context, event: &AsyncEvent) {
        let all: Vec<Arc<Device>> = ALL.lock().iter().filter_map(Weak::upgrade).collect();
        for device in all.iter().filter(|device| device.context == context) {
            device.links().iter().for_each(|link| link.async_event(event));
        }
    }

    pub(super) fn link(&self, queue_pair: u32) -> Option<Arc<VerbsLink>> {
        self.links.read().get(&queue_pair).cloned()
    }

    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) & NUMBER_MASK
    }

    pub(super) fn take_stage(&self) -> io::Result<Slab> {
        if let Some(stage) = self.stages.lock().pop() {
            return Ok(stage);
        }
        Slab::new(&self.pd, STAGE, AccessFlags { local_write: true, ..AccessFlags::default() })
    }

    pub(super) fn give_stage(&self, stage: Slab) {
        let mut stages = self.stages.lock();
        if stages.len() < KEPT {
            stages.push(stage);
        }
    }

    /// Polls completions, and keeps them for the driver, but for those of RMA requests, which are handled at once. Callable from
    /// any thread.
    pub(super) fn collect_completions(&self, queue_set: &QueueSet) -> io::Result<bool> {
        let mut moved = SmallVec::<[WorkCompletion; 8]>::new();
        let any = {
            let mut state = queue_set.state.lock();
            let from = state.stash.len();
            while queue_set.cq.poll(&mut state.stash)? {}
            let any = state.stash.len() > from;
            state.stash.retain(|completion| {
                let is_move = completion.id & KIND_MASK == RMA;
                moved.extend(is_move.then_some(*completion));
                !is_move
            });
            any
        };
        let mut touched = SmallVec::<[Arc<VerbsLink>; 4]>::new();
        for completion in moved {
            if let Some(link) = self.link(completion.queue_pair) {
                link.rma_completed(&completion);
                if !touched.iter().any(|other| Arc::ptr_eq(other, &link)) {
                    touched.push(link);
                }
            }
        }
        // Once for all of them: posting is slow where a device is emulated.
        touched.iter().for_each(|link| link.continue_rma());
        Ok(any)
    }
}

/// Kind of a completion that the driver handles.
pub(super) enum CompletionKind {
    Message,
    Sent,
}

impl QueueSet {
    fn has_room(&self) -> bool {
        let state = self.state.lock();
        state.links < SHARING && state.lost < LOST
    }

    fn admit(&self, pd: &Arc<Pd>) -> io::Result<()> {
        let mut state = self.state.lock();
        // Some have been read, and wait to be reposted in a batch.
        let needed = (state.links + 1) * BUFFERS + state.lost + REFILL;
        while state.slabs.len() * BUFFERS < needed {
            let only_local = AccessFlags { local_write: true, ..AccessFlags::default() };
            let slab = Slab::new(pd, BUFFERS * MESSAGE, only_local)?;
            let first = state.slabs.len() * BUFFERS;
            state.slabs.push(slab);
            self.post(&state, (first..first + BUFFERS).map(|index| index as u64))?;
        }
        state.links += 1;
        Ok(())
    }

    fn post(&self, state: &QueueSetState, buffers: impl Iterator<Item = u64>) -> io::Result<()> {
        let receive = |index: u64| {
            let (slab, at) = (index as usize / BUFFERS, index as usize % BUFFERS * MESSAGE);
            ReceiveRequest { id: RECEIVED | index, buffer: state.slabs[slab].sge(at, MESSAGE) }
        };
        let receives: SmallVec<[ReceiveRequest; 32]> = buffers.map(receive).collect();
        // SAFETY: the slabs are registered for local writes as long as the queue set is there, and the device forgets each before
        // its memory is freed, should the queue outlive it. A buffer is handed over when it is new, or has been read, and is not
        // read again before its next completion.
        unsafe { self.srq.post(&receives) }
    }

    /// Requests a notification of the next completion.
    pub(super) fn arm(&self) -> io::Result<()> {
        if !self.armed.swap(true, Ordering::AcqRel) {
            self.cq.arm()?;
        }
        Ok(())
    }

    pub(super) fn notified(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// Takes the completions that were polled.
    pub(super) fn take(&self, into: &mut Vec<WorkCompletion>) {
        into.append(&mut self.state.lock().stash);
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.state.lock().stash.is_empty()
    }

    /// Reads the message of a completion, whose buffer must then be given back with [`QueueSet::recycle`].
    pub(super) fn read_message(&self, completion: &WorkCompletion, out: &mut Vec<u8>) {
        out.clear();
        let index = (completion.id & !KIND_MASK) as usize;
        let state = self.state.lock();
        let (slab, at) = (index / BUFFERS, index % BUFFERS * MESSAGE);
        // SAFETY: the buffer's completion has been taken, and it has not been handed back.
        out.extend_from_slice(unsafe { state.slabs[slab].read(at, (completion.len as usize).min(MESSAGE)) });
    }

    /// The message has been read. When its buffer is reposted, the sender gets a credit, if the message took one. True when there
    /// are enough buffers for a batch.
    pub(super) fn recycle(&self, completion: &WorkCompletion, credited: Option<&Arc<VerbsLink>>) -> bool {
        let mut state = self.state.lock();
        state.empty.push((completion.id & !KIND_MASK, credited.map(Arc::downgrade)));
        state.empty.len() >= REFILL
    }

    /// Reposts buffers that have been read.
    pub(super) fn repost(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.empty.is_empty() {
            return Ok(());
        }
        self.post(&state, state.empty.iter().map(|(index, _)| *index))?;
        let empty = std::mem::take(&mut state.empty);
        drop(state);
        empty.into_iter().filter_map(|(_, link)| link?.upgrade()).for_each(|link| link.return_credit());
        Ok(())
    }
}

/// Kind of a completion; `None` for RMA requests.
pub(super) fn completion_kind(completion: &WorkCompletion) -> Option<CompletionKind> {
    match completion.id & KIND_MASK {
        RECEIVED => Some(CompletionKind::Message),
        SENT => Some(CompletionKind::Sent),
        _ => None,
    }
}
