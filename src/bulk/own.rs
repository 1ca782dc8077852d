//! What an engine keeps of memory that it exposes, for whoever holds a bulk of it.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::descriptor::Access;
use super::lease::Leases;
use crate::Result;
use crate::memory::Region;
use crate::progress::{Core, Keys};
use crate::proto::PeerId;

/// Keeps neither the memory nor the engine: bulks may outlive both.
pub(super) struct Own {
    pub leases: Leases,
    access: Access,
    /// Where nobody can write it: then it may be copied.
    constant: Option<Weak<Region>>,
    /// The one peer that it is exposed to.
    only: Option<PeerId>,
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
    fn new(core: &Core, region: &Region, access: Access, only: Option<PeerId>, devices: u32) -> Result<Made> {
        let keys = match only {
            _ if devices == 0 => None,
            Some(peer) => core.keys_for(peer, region, access.of_devices())?,
            None => core.keys(region, access.of_devices())?,
        };
        Ok(Made { keys, devices })
    }
}

impl Own {
    /// An error when a device is there, and can't be told of the memory.
    pub(super) fn new(core: &Core, region: &Arc<Region>, access: Access, only: Option<PeerId>) -> Result<Arc<Own>> {
        let keys = Mutex::new(Made::new(core, region, access, only, core.devices())?);
        let constant = (access == Access::Constant).then(|| Arc::downgrade(region));
        Ok(Arc::new(Own { leases: Leases::default(), access, constant, only, keys }))
    }

    /// The memory, where nobody can write it: then it may be copied.
    pub(super) fn constant(&self) -> Option<Arc<Region>> {
        self.constant.as_ref()?.upgrade()
    }

    /// By which devices reach the memory that `core` exposes under the token. They are made anew when a device has come into
    /// use since.
    pub(super) fn keys(&self, core: &Core, token: u128) -> Option<Keys> {
        let made = self.keys.lock().clone();
        let devices = core.devices();
        if devices == made.devices || self.only.is_some() || core.is_forked() {
            return made.keys;
        }
        let write = !self.access.mode().access().read;
        let Ok(whole) = core.look(|proto| proto.access(token, 0, 0, write)) else { return made.keys };
        let anew = Made::new(core, &whole.region, self.access, None, devices).unwrap_or_else(|error| {
            tracing::debug!(target: "calomel::bulk", %error, "a new device does not reach the memory");
            // It is not asked again; what the others know holds.
            Made { devices, ..made }
        });
        self.keys.lock().clone_from(&anew);
        anew.keys
    }
}
