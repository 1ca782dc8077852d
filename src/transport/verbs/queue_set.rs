//! The queues that several links share, and their receive buffers.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::sync::Mutex;
use smallvec::SmallVec;

use super::device::{Device, KIND_MASK, RECEIVED, RMA, SENT};
use super::limits::{CREDITS, MESSAGE, RMA_REQUESTS, SENDS, UNCREDITED};
use super::slab::Slab;
use super::sys::{AccessFlags, Cq, DeviceLimits, Pd, ReceiveRequest, Srq, WorkCompletion};

/// Receive buffers of one link.
const BUFFERS: usize = (CREDITS + UNCREDITED) as usize;
/// Links that share a queue set.
const SHARING: usize = 64;
/// Receive buffers that links may lose by ending in the middle of a message; a set that lost more takes no new links.
const LOST: usize = 32;
/// Buffers are reposted in batches of this size.
const REFILL: usize = 8;

/// A completion queue and a shared receive queue with its buffers, for up to [`SHARING`] links of type `L`.
pub(super) struct QueueSet<L> {
    pub cq: Arc<Cq>,
    pub srq: Arc<Srq>,
    state: Mutex<QueueSetState<L>>,
    /// The completion channel is to be notified of the next completion.
    armed: AtomicBool,
}

struct QueueSetState<L> {
    /// Completions that were polled, and not handled yet.
    stash: Vec<WorkCompletion>,
    slabs: Vec<Slab>,
    /// Buffers that were read, and are to be reposted; and for each the link whose peer then gets a credit.
    empty: Vec<(u64, Option<Weak<L>>)>,
    links: usize,
    /// Buffers that ended links may have taken with them.
    lost: usize,
}

/// Kind of a completion that the driver handles.
pub(super) enum CompletionKind {
    Message,
    Sent,
}

impl<L> QueueSet<L> {
    /// An error when the device's queues are too short.
    pub(super) fn new(device: &Device) -> io::Result<QueueSet<L>> {
        // The completion queue must hold all that can be outstanding: receives, sends, and RMA requests.
        let receives = (SHARING + 1) * BUFFERS + LOST;
        // Twice for RMA: completions of a broken queue pair may be left when the next is there.
        let wanted = u32::try_from(receives + SHARING * (SENDS + 2 * RMA_REQUESTS)).unwrap_or(u32::MAX);
        let DeviceLimits { completions, receives: room, .. } = device.limits;
        if wanted > completions || receives > room as usize {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "the device's queues hold {completions} completions and {room} messages; {wanted} and {receives} are needed"
                ),
            ));
        }
        let state = QueueSetState { stash: Vec::new(), slabs: Vec::new(), empty: Vec::new(), links: 0, lost: 0 };
        Ok(QueueSet {
            cq: Cq::new(device.context, &device.completions, wanted)?,
            srq: Srq::new(&device.pd, receives as u32)?,
            state: Mutex::new(state),
            armed: AtomicBool::new(false),
        })
    }

    pub(super) fn has_room(&self) -> bool {
        let state = self.state.lock();
        state.links < SHARING && state.lost < LOST
    }

    /// Takes one more link, with its receive buffers.
    pub(super) fn admit(&self, pd: &Arc<Pd>) -> io::Result<()> {
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

    /// A link has ended. True when no link is left.
    pub(super) fn release(&self) -> bool {
        let mut state = self.state.lock();
        state.links -= 1;
        state.lost += 1;
        state.links == 0
    }

    fn post(&self, state: &QueueSetState<L>, buffers: impl Iterator<Item = u64>) -> io::Result<()> {
        let receive = |index: u64| {
            let (slab, at) = (index as usize / BUFFERS, index as usize % BUFFERS * MESSAGE);
            ReceiveRequest { id: RECEIVED | index, buffer: state.slabs[slab].sge(at, MESSAGE) }
        };
        let receives: SmallVec<[ReceiveRequest; 32]> = buffers.map(receive).collect();
        // SAFETY: the slabs are registered for local writes as long as the queue set is there, and the device forgets each
        // before its memory is freed, should the queue outlive it. A buffer is handed over when it is new, or has been read,
        // and is not read again before its next completion.
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

    /// Polls completions. Those of RMA requests go to `rma`, the others are kept for the driver.
    pub(super) fn poll(&self, rma: &mut SmallVec<[WorkCompletion; 8]>) -> io::Result<()> {
        let mut state = self.state.lock();
        while self.cq.poll(&mut state.stash)? {}
        state.stash.retain(|completion| {
            let is_rma = completion.id & KIND_MASK == RMA;
            rma.extend(is_rma.then_some(*completion));
            !is_rma
        });
        Ok(())
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

    /// The message has been read. When its buffer is reposted, the sender gets a credit, if the message took one. True when
    /// there are enough buffers for a batch.
    pub(super) fn recycle(&self, completion: &WorkCompletion, credited: Option<&Arc<L>>) -> bool {
        let mut state = self.state.lock();
        state.empty.push((completion.id & !KIND_MASK, credited.map(Arc::downgrade)));
        state.empty.len() >= REFILL
    }

    /// Reposts buffers that have been read, and then calls `credit` for each link whose peer gets a credit.
    pub(super) fn repost(&self, credit: impl Fn(&L)) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.empty.is_empty() {
            return Ok(());
        }
        self.post(&state, state.empty.iter().map(|(index, _)| *index))?;
        let empty = std::mem::take(&mut state.empty);
        drop(state);
        empty.into_iter().filter_map(|(_, link)| link?.upgrade()).for_each(|link| credit(&link));
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
