//! The state of an exposure that its bulks share: leases, visibility to devices, and device keys.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::descriptor::ExposeMode;
use super::lease::LeaseCount;
use crate::Result;
use crate::memory::Region;
use crate::progress::{Core, RemoteKeys};
use crate::proto::PeerId;

/// Shared by all bulks of an exposure. It keeps neither the memory nor the engine alive: bulks may outlive both.
pub(super) struct ExposureState {
    pub leases: LeaseCount,
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
        let keys = Mutex::new(DeviceKeys::new(core, region, access, visibility, core.devices())?);
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
