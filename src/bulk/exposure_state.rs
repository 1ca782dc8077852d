//! The state of an exposure that its bulks share: leases, visibility to devices, and device keys.
//!
//! Leases count the bulks that peers hold; [`Released`] waits until there are none.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

use super::mode::ExposeMode;
use crate::deferred_log;
use crate::memory::Region;
use crate::progress::{Awaited, Blocking, Core, CreatorProcess, RemoteKeys, wake_quietly};
use crate::proto::PeerId;
use crate::{Address, Error, Result};

/// Shared by all bulks of an exposure. It keeps neither the memory nor the engine alive: bulks may outlive both.
pub(super) struct ExposureState {
    leases: LeaseCount,
    /// Its bulks are valid in calls of its own engine only.
    pub for_one_call: bool,
    access: ExposeMode,
    /// Set for constant memory without restrictions: its content may be sent inside calls.
    constant: Option<Weak<Region>>,
    visibility: Visibility,
    keys: Mutex<DeviceKeys>,
}

/// Which peers' devices may reach the memory without a check by the owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Visibility {
    /// Those of all peers that hold a bulk.
    Holders,
    /// One peer's, as far as a device can restrict a key to one connection.
    Only(PeerId),
    /// None: the owner checks each transfer.
    OwnerOnly,
}

/// The keys by which devices reach the memory.
#[derive(Clone)]
struct DeviceKeys {
    keys: Option<RemoteKeys>,
    /// The number of device changes when the keys were made.
    devices: u32,
}

impl DeviceKeys {
    fn new(core: &Core, region: &Region, access: ExposeMode, visibility: Visibility, devices: u32) -> Result<DeviceKeys> {
        let keys = match visibility {
            _ if devices == 0 => None,
            Visibility::Holders => core.keys(region, access.of_devices())?,
            Visibility::Only(peer) => core.keys_for(peer, region, access.of_devices())?,
            Visibility::OwnerOnly => None,
        };
        Ok(DeviceKeys { keys, devices })
    }
}

impl ExposureState {
    /// Fails when a device can't register the memory.
    pub(super) fn new(
        core: &Core,
        region: &Arc<Region>,
        access: ExposeMode,
        visibility: Visibility,
        for_one_call: bool,
    ) -> Result<Arc<ExposureState>> {
        let keys = DeviceKeys::new(core, region, access, visibility, core.devices());
        // No lock is held here, and this thread may have nothing else to do with the engine.
        deferred_log::flush();
        let keys = Mutex::new(keys?);
        let unrestricted = access == ExposeMode::Constant && visibility == Visibility::Holders;
        let constant = unrestricted.then(|| Arc::downgrade(region));
        Ok(Arc::new(ExposureState { leases: LeaseCount::default(), for_one_call, access, constant, visibility, keys }))
    }

    /// The memory, where its content may be sent inside calls.
    pub(super) fn constant(&self) -> Option<Arc<Region>> {
        self.constant.as_ref()?.upgrade()
    }

    /// The keys by which devices reach the memory that `core` exposes under the token. They are renewed when a device has come
    /// into use since.
    pub(super) fn keys(&self, core: &Core, token: u128) -> Option<RemoteKeys> {
        let made = self.keys.lock().clone();
        let devices = core.devices();
        if devices == made.devices || self.visibility != Visibility::Holders || core.is_forked() {
            return made.keys;
        }
        let Some(whole) = core.with_proto(|proto| proto.exposed(token)) else { return made.keys };
        let renewed = DeviceKeys::new(core, &whole.region, self.access, self.visibility, devices).unwrap_or_else(|error| {
            tracing::debug!(target: "calomel::bulk", %error, "a new device can't register exposed memory");
            // The new device is not tried again; the other devices' keys stay valid.
            DeviceKeys { devices, ..made }
        });
        self.keys.lock().clone_from(&renewed);
        renewed.keys
    }
}

/// Counts the bulks of one exposure that peers hold.
#[derive(Default)]
struct LeaseCount {
    state: Mutex<LeaseCountState>,
    none_left: Condvar,
}

#[derive(Default)]
struct LeaseCountState {
    held: usize,
    /// The wakers of the waiting tasks: one for each `Released`, by its number.
    wakers: BTreeMap<u64, Waker>,
    next: u64,
}

/// Counts one bulk that was sent to a peer; dropped when the peer no longer holds the bulk, or its link has ended.
pub(super) struct LeaseGuard(Arc<ExposureState>);

impl LeaseGuard {
    pub(super) fn new(exposure: &Arc<ExposureState>) -> LeaseGuard {
        exposure.leases.state.lock().held += 1;
        LeaseGuard(exposure.clone())
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        let wakers = {
            let mut state = self.0.leases.state.lock();
            state.held -= 1;
            if state.held > 0 {
                return;
            }
            std::mem::take(&mut state.wakers)
        };
        self.0.leases.none_left.notify_all();
        wakers.into_values().for_each(wake_quietly);
    }
}

/// How often a thread that drives until memory is released looks whether another thread has received the release.
const POLL: Duration = Duration::from_millis(5);

/// Resolves when no peer holds a [`Bulk`](crate::Bulk) of an exposure any more: each one that was sent has been dropped by
/// the peer that received it, and by those it was forwarded to, or these have disconnected. Made by
/// [`Exposed::released`](crate::Exposed::released).
///
/// After a one-way call, which has no response, this shows when the memory is no longer in use.
///
/// It wakes the task that has polled it last. Dropping it stops the waiting, and changes nothing else.
pub struct Released {
    exposure: Arc<ExposureState>,
    core: Weak<Core>,
    owner: Address,
    process: CreatorProcess,
    /// The key of its task's waker, once it has been polled.
    number: Option<u64>,
}

impl Clone for Released {
    /// Another future for the same exposure; each wakes its own task.
    fn clone(&self) -> Released {
        let (exposure, core, owner) = (self.exposure.clone(), self.core.clone(), self.owner.clone());
        Released { exposure, core, owner, process: self.process, number: None }
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(number) = self.number.filter(|_| !self.process.is_forked_child()) {
            let waker = self.exposure.leases.state.lock().wakers.remove(&number);
            // Wakers are user code, their drop too.
            drop(waker);
        }
    }
}

impl Released {
    pub(super) fn new(exposure: &Arc<ExposureState>, core: &Arc<Core>, owner: Address) -> Released {
        let core = Arc::downgrade(core);
        Released { exposure: exposure.clone(), core, owner, process: CreatorProcess::this(), number: None }
    }

    /// True when no peer holds a bulk.
    pub fn is_released(&self) -> bool {
        !self.process.is_forked_child() && self.exposure.leases.state.lock().held == 0
    }

    /// Blocks until no peer holds a bulk. In a forked child it returns at once.
    pub fn wait(&self) {
        if self.process.is_forked_child() {
            return;
        }
        self.held_until(None);
    }

    /// Blocks until no peer holds a bulk, but no longer than `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`] when a peer still holds one; [`Error::Unsupported`] in a forked child.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<()> {
        if self.process.is_forked_child() {
            let reason = "what peers hold is known to the process that exposed the memory".to_owned();
            return Err(Error::Unsupported { what: "waiting for bulks to be released in a forked child".to_owned(), reason });
        }
        match self.held_until(Instant::now().checked_add(timeout)) {
            0 => Ok(()),
            held => {
                let what = format!("waiting for {held} bulks to be released");
                Err(Error::Timeout { peer: self.owner.clone(), what, after: timeout })
            }
        }
    }

    /// Blocks until no peer holds a bulk, or the deadline; returns how many are held.
    fn held_until(&self, deadline: Option<Instant>) -> usize {
        let leases = &self.exposure.leases;
        // Without a progress thread, this thread has to receive the releases.
        while let Some(core) = self.core.upgrade().filter(|core| core.is_external() && !core.is_driving()) {
            let now = Instant::now();
            if self.is_released() || deadline.is_some_and(|deadline| now >= deadline) {
                break;
            }
            // It is not woken when another thread receives the last one, so it looks from time to time.
            let next = deadline.map_or(now + POLL, |deadline| deadline.min(now + POLL));
            core.wait(&|| self.is_released(), &|_| true, Some(next), Awaited::Other);
        }
        let _blocking = Blocking::enter();
        let mut state = leases.state.lock();
        while state.held > 0 {
            let Some(deadline) = deadline else {
                state = leases.none_left.wait(state);
                continue;
            };
            let timed_out;
            (state, timed_out) = leases.none_left.wait_until(state, deadline);
            if timed_out {
                break;
            }
        }
        state.held
    }
}

impl Future for Released {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.process.is_forked_child() {
            return Poll::Ready(());
        }
        let waker = context.waker();
        {
            let state = this.exposure.leases.state.lock();
            if state.held == 0 {
                return Poll::Ready(());
            }
            let known = this.number.and_then(|number| state.wakers.get(&number));
            if known.is_some_and(|known| known.will_wake(waker)) {
                return Poll::Pending;
            }
        }
        // Cloned, and the earlier one dropped, where no lock is held: both are user code.
        let waker = waker.clone();
        let mut state = this.exposure.leases.state.lock();
        if state.held == 0 {
            return Poll::Ready(());
        }
        let number = *this.number.get_or_insert_with(|| {
            state.next += 1;
            state.next
        });
        let earlier = state.wakers.insert(number, waker);
        drop(state);
        drop(earlier);
        Poll::Pending
    }
}

impl std::fmt::Debug for Released {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.exposure.leases.state.try_lock() {
            Some(state) => write!(f, "Released({} bulks out)", state.held),
            None => f.write_str("Released(..)"),
        }
    }
}
