//! A device in use, and the ids of the work requests that it is given.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

use super::limits::STAGE;
use super::slab::Slab;
use super::sys::{AccessFlags, CompletionChannel, Context, DeviceLimits, Pd};
use crate::random;

/// Staging buffers that are kept for reuse.
const KEPT: usize = 8;

/// Kind of a work request: the upper bits of its id.
pub(super) const RECEIVED: u64 = 1 << 60;
pub(super) const SENT: u64 = 2 << 60;
pub(super) const RMA: u64 = 3 << 60;
pub(super) const KIND_MASK: u64 = 15 << 60;
/// Number of a work request: the lower bits. The bits between hold the generation of the RMA queue pair.
pub(super) const NUMBER_MASK: u64 = (1 << 40) - 1;

pub(super) struct Device {
    /// Identifies the device within its engine, and so the remote keys that are valid for it.
    pub domain: u64,
    pub context: Context,
    pub limits: DeviceLimits,
    pub pd: Arc<Pd>,
    pub completions: Arc<CompletionChannel>,
    stages: Mutex<Vec<Slab>>,
    /// Number of the next work request.
    next: AtomicU64,
}

impl Device {
    pub(super) fn new(context: Context) -> io::Result<Arc<Device>> {
        let limits = context.limits()?;
        Ok(Arc::new(Device {
            domain: u64::from_ne_bytes(random::from_system()?),
            context,
            limits,
            pd: Pd::new(context)?,
            completions: CompletionChannel::new(context)?,
            stages: Mutex::default(),
            next: AtomicU64::new(1),
        }))
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
}
