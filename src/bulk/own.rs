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
    /// Its bulks are good in a call of its engine.
    pub for_one_call: bool,
    access: Access,
    /// Where nobody can write it, and everybody may have it: then it may be copied.
    constant: Option<Weak<Region>>,
    reach: Reach,
    keys: Mutex<Made>,
}

/// Who may reach the memory without asking.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Whoever has a bulk.
    Everybody,
    /// One peer's device, as far as a device can tell peers apart.
    Only(PeerId),
    /// The owner has to be asked for each transfer.
    Nobody,
}

/// By which devices reach the memory.
#[derive(Clone)]
struct Made {
    keys: Option<Keys>,
    /// How often the devices had changed by then.
    devices: u32,
}

impl Made {
    fn new(core: &Core, region: &Region, access: Access, reach: Reach, devices: u32) -> Result<Made> {
        let keys = match reach {
            _ if devices == 0 => None,
            Reach::Everybody => core.keys(region, access.of_devices())?,
            Reach::Only(peer) => core.keys_for(peer, region, access.of_devices())?,
            Reach::Nobody => None,
        };
        Ok(Made { keys, devices })
    }
}

impl Own {
    /// An error when a device is there, and can't be told of the memory.
    pub(super) fn new(core: &Core, region: &Arc<Region>, access: Access, reach: Reach, for_one_call: bool) -> Result<Arc<Own>> {
        let keys = Mutex::new(Made::new(core, region, access, reach, core.devices())?);
        let free = access == Access::Constant && reach == Reach::Everybody;
        let constant = free.then(|| Arc::downgrade(region));
        Ok(Arc::new(Own { leases: Leases::default(), for_one_call, access, constant, reach, keys }))
    }

    /// The memory, where a copy of it may be sent along.
    pub(super) fn constant(&self) -> Option<Arc<Region>> {
        self.constant.as_ref()?.upgrade()
    }

    /// By which devices reach the memory that `core` exposes under the token. They are made anew when a device has come into
    /// use since.
    pub(super) fn keys(&self, core: &Core, token: u128) -> Option<Keys> {
        let made = self.keys.lock().clone();
        let devices = core.devices();
        if devices == made.devices || self.reach != Reach::Everybody || core.is_forked() {
            return made.keys;
        }
        let Some(whole) = core.look(|proto| proto.exposed(token)) else { return made.keys };
        let anew = Made::new(core, &whole.region, self.access, self.reach, devices).unwrap_or_else(|error| {
            tracing::debug!(target: "calomel::bulk", %error, "a new device does not reach the memory");
            // It is not asked again; what the others know holds.
            Made { devices, ..made }
        });
        self.keys.lock().clone_from(&anew);
        anew.keys
    }
}
