//! A device that is in use: its queues, the buffers that messages arrive in, and the links that it carries.

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
use super::sys::{Access, Async, Completion, Completions, Context, Cq, Limits, Pd, Receive, Srq};
use crate::random;

/// Longest message that is sent and received, in bytes.
pub(super) const MESSAGE: usize = 4096;
/// Messages of a link that there is room for, and that its peer may count on.
pub(super) const CREDITS: u16 = 16;
/// Room besides, for what is sent without a credit: two messages that bring credits, as many as there may be staged pieces of
/// which the end is told, a farewell, and what is said of a lane and of the next.
pub(super) const UNCREDITED: u16 = 3 + super::STAGED as u16 + 4;
/// Buffers that a link takes.
const BUFFERS: usize = (CREDITS + UNCREDITED) as usize;
/// Links that share their queues.
const SHARING: usize = 64;
/// Buffers that may be lost with links that ended in the middle of a message, before no more links come.
const LOST: usize = 32;
/// So many buffers are handed back at once.
const REFILL: usize = 8;
/// Length of a staged piece.
pub(super) const STAGE: usize = 256 << 10;
/// Staging memory that is kept for the next.
const KEPT: usize = 8;

/// What a completion is of: the upper bits of its number.
const RECEIVED: u64 = 1 << 60;
pub(super) const SENT: u64 = 2 << 60;
pub(super) const MOVED: u64 = 3 << 60;
const WHAT: u64 = 15 << 60;
/// The lower ones: what is left is for which lane it was.
pub(super) const NUMBER: u64 = (1 << 40) - 1;

/// The devices of all engines of this process: what one of them tells only one of them hears.
static ALL: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

pub(super) struct Device {
    /// Names it, and with it the keys that are good for it.
    pub domain: u64,
    pub context: Context,
    pub limits: Limits,
    pub pd: Arc<Pd>,
    pub completions: Arc<Completions>,
    groups: RwLock<Vec<Arc<Group>>>,
    /// How often the groups of the engine's devices have changed.
    changes: Arc<AtomicU32>,
    /// Links by the numbers of their queue pairs.
    links: RwLock<HashMap<u32, Arc<VerbsLink>>>,
    stages: Mutex<Vec<Slab>>,
    /// Numbers what devices are asked for.
    next: AtomicU64,
}

/// Links that share a completion queue and their receive buffers.
pub(super) struct Group {
    pub cq: Arc<Cq>,
    pub srq: Arc<Srq>,
    state: Mutex<GroupState>,
    /// The channel is told of the next completion.
    armed: AtomicBool,
}

#[derive(Default)]
struct GroupState {
    /// Completions that were taken, and not looked at.
    stash: Vec<Completion>,
    slabs: Vec<Slab>,
    /// Buffers that have been read, and are to be handed back; and who gets a credit for each.
    empty: Vec<(u64, Option<Weak<VerbsLink>>)>,
    links: usize,
    /// Buffers that links which are gone may have taken with them.
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
            completions: Completions::new(context)?,
            groups: RwLock::default(),
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
    pub(super) fn admit(&self) -> io::Result<Arc<Group>> {
        let mut groups = self.groups.write();
        if let Some(group) = groups.iter().find(|group| group.has_room()) {
            group.admit(&self.pd)?;
            return Ok(group.clone());
        }
        // The queue must hold whatever may be under way: what is received, and what is sent and moved.
        let receives = (SHARING + 1) * BUFFERS + LOST;
        // Of a lane that broke, completions may be left when the next is there.
        let wanted = u32::try_from(receives + SHARING * (SENDS + 2 * super::lane::MOVES)).unwrap_or(u32::MAX);
        if wanted > self.limits.completions || receives > self.limits.receives as usize {
            let Limits { completions, receives: room, .. } = self.limits;
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "the device's queues hold {completions} completions and {room} messages; {wanted} and {receives} are needed"
                ),
            ));
        }
        let group = Arc::new(Group {
            cq: Cq::new(self.context, &self.completions, wanted)?,
            srq: Srq::new(&self.pd, receives as u32)?,
            state: Mutex::default(),
            armed: AtomicBool::new(false),
        });
        group.admit(&self.pd)?;
        groups.push(group.clone());
        self.changes.fetch_add(1, Ordering::Release);
        Ok(group)
    }

    /// A link has gone.
    pub(super) fn dismiss(&self, group: &Arc<Group>) {
        let mut groups = self.groups.write();
        let left = {
            let mut state = group.state.lock();
            state.links -= 1;
            state.lost += 1;
            state.links
        };
        // Its buffers are whole again when the next is made.
        if left == 0 {
            groups.retain(|other| !Arc::ptr_eq(other, group));
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    pub(super) fn groups(&self) -> SmallVec<[Arc<Group>; 2]> {
        self.groups.read().iter().cloned().collect()
    }

    /// Has completions of a queue pair find their link.
    pub(super) fn enter(&self, queue_pair: u32, link: &Arc<VerbsLink>) {
        self.links.write().insert(queue_pair, link.clone());
    }

    pub(super) fn leave(&self, queue_pair: u32) {
        self.links.write().remove(&queue_pair);
    }

    /// All that it carries.
    pub(super) fn links(&self) -> Vec<Arc<VerbsLink>> {
        self.links.read().values().cloned().collect()
    }

    /// The device has told something, to whichever engine of this process listened first.
    pub(super) fn tell(context: Context, event: &Async) {
        let all: Vec<Arc<Device>> = ALL.lock().iter().filter_map(Weak::upgrade).collect();
        for device in all.iter().filter(|device| device.context == context) {
            device.links().iter().for_each(|link| link.told(event));
        }
    }

    pub(super) fn link(&self, queue_pair: u32) -> Option<Arc<VerbsLink>> {
        self.links.read().get(&queue_pair).cloned()
    }

    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) & NUMBER
    }

    pub(super) fn take_stage(&self) -> io::Result<Slab> {
        if let Some(stage) = self.stages.lock().pop() {
            return Ok(stage);
        }
        Slab::new(&self.pd, STAGE, Access { local_write: true, ..Access::default() })
    }

    pub(super) fn give_stage(&self, stage: Slab) {
        let mut stages = self.stages.lock();
        if stages.len() < KEPT {
            stages.push(stage);
        }
    }

    /// Takes what has come, for whoever drives to look at; ends of moves are seen to at once. May be called by any thread.
    pub(super) fn gather(&self, group: &Group) -> io::Result<bool> {
        let mut moved = SmallVec::<[Completion; 8]>::new();
        let any = {
            let mut state = group.state.lock();
            let from = state.stash.len();
            while group.cq.poll(&mut state.stash)? {}
            let any = state.stash.len() > from;
            state.stash.retain(|completion| {
                let is_move = completion.id & WHAT == MOVED;
                moved.extend(is_move.then_some(*completion));
                !is_move
            });
            any
        };
        let mut touched = SmallVec::<[Arc<VerbsLink>; 4]>::new();
        for completion in moved {
            if let Some(link) = self.link(completion.queue_pair) {
                link.move_ended(&completion);
                if !touched.iter().any(|other| Arc::ptr_eq(other, &link)) {
                    touched.push(link);
                }
            }
        }
        // Once for all that has ended: to ask for something takes as long as it takes where a device is emulated.
        touched.iter().for_each(|link| link.go_on());
        Ok(any)
    }
}

/// What came of a completion.
pub(super) enum Came {
    Message,
    Sent,
}

impl Group {
    fn has_room(&self) -> bool {
        let state = self.state.lock();
        state.links < SHARING && state.lost < LOST
    }

    fn admit(&self, pd: &Arc<Pd>) -> io::Result<()> {
        let mut state = self.state.lock();
        // Some have been read, and wait to be handed back together.
        let needed = (state.links + 1) * BUFFERS + state.lost + REFILL;
        while state.slabs.len() * BUFFERS < needed {
            let only_local = Access { local_write: true, ..Access::default() };
            let slab = Slab::new(pd, BUFFERS * MESSAGE, only_local)?;
            let first = state.slabs.len() * BUFFERS;
            state.slabs.push(slab);
            self.post(&state, (first..first + BUFFERS).map(|index| index as u64))?;
        }
        state.links += 1;
        Ok(())
    }

    fn post(&self, state: &GroupState, buffers: impl Iterator<Item = u64>) -> io::Result<()> {
        let receive = |index: u64| {
            let (slab, at) = (index as usize / BUFFERS, index as usize % BUFFERS * MESSAGE);
            Receive { id: RECEIVED | index, buffer: state.slabs[slab].piece(at, MESSAGE) }
        };
        let receives: SmallVec<[Receive; 32]> = buffers.map(receive).collect();
        // SAFETY: the slabs are registered for local writes as long as the group is there, and the device forgets each before its
        // memory is freed, should the queue outlive it. A buffer is handed over when it is new, or has been read, and is not read
        // again before its next completion.
        unsafe { self.srq.post(&receives) }
    }

    /// Has the channel tell of what comes.
    pub(super) fn arm(&self) -> io::Result<()> {
        if !self.armed.swap(true, Ordering::AcqRel) {
            self.cq.arm()?;
        }
        Ok(())
    }

    pub(super) fn told(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// What has been gathered.
    pub(super) fn take(&self, into: &mut Vec<Completion>) {
        into.append(&mut self.state.lock().stash);
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.state.lock().stash.is_empty()
    }

    /// Reads the message of a completion. It must be given back with [`Group::empty`].
    pub(super) fn message(&self, completion: &Completion, out: &mut Vec<u8>) {
        out.clear();
        let index = (completion.id & !WHAT) as usize;
        let state = self.state.lock();
        let (slab, at) = (index / BUFFERS, index % BUFFERS * MESSAGE);
        // SAFETY: the buffer's completion has been taken, and it has not been handed back.
        out.extend_from_slice(unsafe { state.slabs[slab].read(at, (completion.len as usize).min(MESSAGE)) });
    }

    /// The message has been read; its sender gets a credit, if it took one, when its buffer is handed back.
    pub(super) fn empty(&self, completion: &Completion, credited: Option<&Arc<VerbsLink>>) -> bool {
        let mut state = self.state.lock();
        state.empty.push((completion.id & !WHAT, credited.map(Arc::downgrade)));
        state.empty.len() >= REFILL
    }

    /// Hands empty buffers back.
    pub(super) fn refill(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.empty.is_empty() {
            return Ok(());
        }
        self.post(&state, state.empty.iter().map(|(index, _)| *index))?;
        let empty = std::mem::take(&mut state.empty);
        drop(state);
        empty.into_iter().filter_map(|(_, link)| link?.upgrade()).for_each(|link| link.owe());
        Ok(())
    }
}

/// What a completion is of.
pub(super) fn came(completion: &Completion) -> Option<Came> {
    match completion.id & WHAT {
        RECEIVED => Some(Came::Message),
        SENT => Some(Came::Sent),
        _ => None,
    }
}
