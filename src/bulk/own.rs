//! What an engine keeps of memory that it exposes, for whoever holds a bulk of it.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::descriptor::Access;
use super::lease::Leases;
use crate::Result;
use crate::memory::Region;
use crate::progress::{Core, Keys};

/// Keeps neither the memory nor the engine: bulks may outlive both.
pub(super) struct Own {
    pub leases: Leases,
    core: Weak<Core>,
    region: Weak<Region>,
    access: Access,
    keys: Mutex<Made>,
}

/// By which devices reach the memory.
#[derive(Clone)]
struct Made {
    keys: Option<Keys>,
    /// How often the devices had changed by then.
    devices: u32,
}

impl Made {
    fn new(core: &Core, region: &Region, access: Access, devices: u32) -> Result<Made> {
        let keys = if devices > 0 { core.keys(region, access.of_devices())? } else { None };
        Ok(Made { keys, devices })
    }
}

impl Own {
    /// An error when a device is there, and can't be told of the memory.
    pub(super) fn new(core: &Arc<Core>, region: &Arc<Region>, access: Access) -> Result<Arc<Own>> {
        let keys = Mutex::new(Made::new(core, region, access, core.devices())?);
        let (core, region) = (Arc::downgrade(core), Arc::downgrade(region));
        Ok(Arc::new(Own { leases: Leases::default(), core, region, access, keys }))
    }

    /// The memory, where nobody can write it: then it may be copied.
    pub(super) fn constant(&self) -> Option<Arc<Region>> {
        (self.access == Access::Constant).then(|| self.region.upgrade())?
    }

    /// By which devices reach the memory. They are made anew when a device has come into use since.
    pub(super) fn keys(&self) -> Option<Keys> {
        let made = self.keys.lock().clone();
        let core = self.core.upgrade().filter(|core| !core.is_forked());
        let Some((core, region)) = core.filter(|core| core.devices() != made.devices).zip(self.region.upgrade()) else {
            return made.keys;
        };
        let devices = core.devices();
        let anew = Made::new(&core, &region, self.access, devices).unwrap_or_else(|error| {
            tracing::debug!(target: "calomel::bulk", %error, "a new device does not reach the memory");
            // It is not asked again; what the others know holds.
            Made { devices, ..made }
        });
        self.keys.lock().clone_from(&anew);
        anew.keys
    }
}
