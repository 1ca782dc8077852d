//! What an engine keeps of memory that it exposes, for whoever holds a bulk of it.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::descriptor::ExposeMode;
use super::lease::LeaseCount;
use crate::Result;
use crate::memory::Region;
use crate::progress::{Core, RemoteKeys};
use crate::proto::PeerId;

/// Keeps neither the memory nor the engine: bulks may outlive both.
pub(super) struct ExposureState {
    pub leases: LeaseCount,
    /// Its bulks are good in a call of its engine.
    pub for_one_call: bool,
    access: ExposeMode,
    /// Where nobody can write it, and everybody may have it: then it may be copied.
    constant: Option<Weak<Region>>,
    reach: Visibility,
    keys: Mutex<DeviceKeys>,
}

/// Who may reach the memory without asking.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Visibility {
    /// Whoever has a bulk.
    Everybody,
    /// One peer's device, as far as a device can tell peers apart.
    Only(PeerId),
    /// The owner has to be asked for each transfer.
    Nobody,
}

/// By which devices reach the memory.
#[derive(Clone)]
struct DeviceKeys {
    keys: Option<RemoteKeys>,
    /// How often the devices had changed by then.
    devices: u32,
}

impl DeviceKeys {
    fn new(core: &Core, region: &Region, access: ExposeMode, reach: Visibility, devices: u32) -> Result<DeviceKeys> {
        let keys = match reach {
            _ if devices == 0 => None,
            Visibility::Everybody => core.keys(region, access.of_devices())?,
            Visibility::Only(peer) => core.keys_for(peer, region, access.of_devices())?,
            Visibility::Nobody => None,
        };
        Ok(DeviceKeys { keys, devices })
    }
}

impl ExposureState {
    /// An error when a device is there, and can't be told of the memory.
    pub(super) fn new(
        core: &Core,
        region: &Arc<Region>,
        access: ExposeMode,
        reach: Visibility,
        for_one_call: bool,
    ) -> Result<Arc<ExposureState>> {
        let keys = Mutex::new(DeviceKeys::new(core, region, access, reach, core.devices())?);
        let free = access == ExposeMode::Constant && reach == Visibility::Everybody;
        let constant = free.then(|| Arc::downgrade(region));
        Ok(Arc::new(ExposureState { leases: LeaseCount::default(), for_one_call, access, constant, reach, keys }))
    }

    /// The memory, where a copy of it may be sent along.
    pub(super) fn constant(&self) -> Option<Arc<Region>> {
        self.constant.as_ref()?.upgrade()
    }

    /// By which devices reach the memory that `core` exposes under the token. They are made anew when a device has come into
    /// use since.
    pub(super) fn keys(&self, core: &Core, token: u128) -> Option<RemoteKeys> {
        let made = self.keys.lock().clone();
        let devices = core.devices();
        if devices == made.devices || self.reach != Visibility::Everybody || core.is_forked() {
            return made.keys;
        }
        let Some(whole) = core.with_proto(|proto| proto.exposed(token)) else { return made.keys };
        let anew = DeviceKeys::new(core, &whole.region, self.access, self.reach, devices).unwrap_or_else(|error| {
            tracing::debug!(target: "calomel::bulk", %error, "a new device does not reach the memory");
            // It is not asked again; what the others know holds.
            DeviceKeys { devices, ..made }
        });
        self.keys.lock().clone_from(&anew);
        anew.keys
    }
}
