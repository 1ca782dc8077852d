//! The links of a device: the queue sets that they share, and the link that each queue pair belongs to.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use crate::sync::{Mutex, RwLock};
use smallvec::SmallVec;

use super::super::device::Device;
use super::super::queue_set::QueueSet;
use super::super::sys::{AsyncEvent, Context, WorkCompletion};
use super::VerbsLink;

/// Devices of all engines of this process: an asynchronous event reaches only one of the engines.
static ALL: Mutex<Vec<Weak<DeviceLinks>>> = Mutex::new(Vec::new());

pub(in super::super) struct DeviceLinks {
    pub device: Arc<Device>,
    queue_sets: RwLock<Vec<Arc<QueueSet<VerbsLink>>>>,
    /// Counts changes of the queue sets of all of the engine's devices.
    changes: Arc<AtomicU32>,
    /// By the numbers of their queue pairs.
    links: RwLock<HashMap<u32, Arc<VerbsLink>>>,
}

impl DeviceLinks {
    pub(in super::super) fn new(context: Context, changes: &Arc<AtomicU32>) -> io::Result<Arc<DeviceLinks>> {
        let links = Arc::new(DeviceLinks {
            device: Device::new(context)?,
            queue_sets: RwLock::default(),
            changes: changes.clone(),
            links: RwLock::default(),
        });
        let mut all = ALL.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&links));
        Ok(links)
    }

    /// Makes room for one more link.
    pub(super) fn admit(&self) -> io::Result<Arc<QueueSet<VerbsLink>>> {
        let mut queue_sets = self.queue_sets.write();
        if let Some(queue_set) = queue_sets.iter().find(|queue_set| queue_set.has_room()) {
            queue_set.admit(&self.device.pd)?;
            return Ok(queue_set.clone());
        }
        let queue_set = Arc::new(QueueSet::new(&self.device)?);
        queue_set.admit(&self.device.pd)?;
        queue_sets.push(queue_set.clone());
        self.changes.fetch_add(1, Ordering::Release);
        Ok(queue_set)
    }

    /// A link has ended.
    pub(super) fn release(&self, queue_set: &Arc<QueueSet<VerbsLink>>) {
        let mut queue_sets = self.queue_sets.write();
        // The next queue set starts with all of its buffers.
        if queue_set.release() {
            queue_sets.retain(|other| !Arc::ptr_eq(other, queue_set));
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    pub(in super::super) fn queue_sets(&self) -> SmallVec<[Arc<QueueSet<VerbsLink>>; 2]> {
        self.queue_sets.read().iter().cloned().collect()
    }

    /// Routes completions of a queue pair to their link.
    pub(super) fn insert(&self, queue_pair: u32, link: &Arc<VerbsLink>) {
        self.links.write().insert(queue_pair, link.clone());
    }

    pub(super) fn remove(&self, queue_pair: u32) {
        self.links.write().remove(&queue_pair);
    }

    /// The link that a queue pair belongs to.
    pub(in super::super) fn link(&self, queue_pair: u32) -> Option<Arc<VerbsLink>> {
        self.links.read().get(&queue_pair).cloned()
    }

    /// All links of the device.
    pub(in super::super) fn all(&self) -> Vec<Arc<VerbsLink>> {
        self.links.read().values().cloned().collect()
    }

    /// Passes an asynchronous event on: any engine of this process may have received it.
    pub(in super::super) fn dispatch_async_event(context: Context, event: &AsyncEvent) {
        let devices: Vec<Arc<DeviceLinks>> = ALL.lock().iter().filter_map(Weak::upgrade).collect();
        for links in devices.iter().filter(|links| links.device.context == context) {
            links.all().iter().for_each(|link| link.async_event(event));
        }
    }

    /// Polls completions, and keeps them for the driver, but for those of RMA requests, which are handled at once. Callable
    /// from any thread.
    pub(in super::super) fn collect_completions(&self, queue_set: &QueueSet<VerbsLink>) -> io::Result<()> {
        let mut completed = SmallVec::<[WorkCompletion; 8]>::new();
        queue_set.poll(&mut completed)?;
        let mut touched = SmallVec::<[Arc<VerbsLink>; 4]>::new();
        for completion in completed {
            if let Some(link) = self.link(completion.queue_pair) {
                link.rma_completed(&completion);
                if !touched.iter().any(|other| Arc::ptr_eq(other, &link)) {
                    touched.push(link);
                }
            }
        }
        // Once for all of them: posting is slow where a device is emulated.
        touched.iter().for_each(|link| link.continue_rma());
        Ok(())
    }
}
