//! Simulated RDMA devices: they access the memory of other hosts by key.

use std::time::Instant;

use super::env::Mem;
use super::host::Host;
use super::net::Net;
use super::{LinkId, Memory, Mode, RemoteKeys};

/// An RMA operation that a device has accepted.
pub struct DeviceRma {
    pub at: Instant,
    pub host: usize,
    pub link: LinkId,
    pub number: u64,
    pub pull: bool,
    pub memory: Mem,
    pub keys: RemoteKeys,
    pub offset: u64,
    pub cancelled: bool,
}

/// The remote keys of the memory that is exposed under this token; they are valid until it is revoked.
pub fn keys(token: u128, mode: Mode) -> RemoteKeys {
    let mut keys = token.to_le_bytes().to_vec();
    keys.extend([u8::from(mode.read), u8::from(mode.write)]);
    keys.into()
}

impl DeviceRma {
    /// Copies all bytes, or fails. `far` is the owner of the remote memory.
    fn execute(&self, far: Option<&Host>) -> Result<(), String> {
        let Some((token, &[read, write])) = self.keys.split_first_chunk::<16>() else { return Err("no keys".into()) };
        let far = far.and_then(|far| far.exposed.get(&u128::from_le_bytes(*token))).filter(|far| far.is_open());
        let far = far.ok_or("invalid remote key")?;
        let far = far.part(self.offset as usize, self.memory.len()).ok_or("range outside of the registered memory")?;
        if (if self.pull { read } else { write }) == 0 {
            return Err("access not permitted by the key".into());
        }
        if !self.memory.is_open() {
            return Err("the local memory is closed".into());
        }
        let (from, to) = if self.pull { (&far, &self.memory) } else { (&self.memory, &far) };
        to.write(0, &from.bytes());
        Ok(())
    }
}

impl Net {
    /// When the next RMA operation completes.
    pub(super) fn next_rma(&self) -> Option<Instant> {
        self.rma_operations.iter().filter(|each| self.far_end(each).is_some()).map(|each| each.at).min()
    }

    /// The host at the other end of the operation's link, unless the wire is frozen.
    fn far_end(&self, each: &DeviceRma) -> Option<usize> {
        let (wire, side) = self.hosts[each.host].wires.get(&each.link)?;
        let wire = &self.wires[*wire];
        (!wire.frozen).then_some(wire.ends[1 - side].host)
    }

    /// Executes an RMA operation that is due; false if there is none.
    pub(super) fn step_rma(&mut self) -> bool {
        // The end of a link ends its RMA operations.
        let hosts = &self.hosts;
        self.rma_operations.retain(|each| hosts[each.host].wires.contains_key(&each.link));
        let due = self.rma_operations.iter().position(|each| each.at <= self.now && self.far_end(each).is_some());
        let Some(due) = due else { return false };
        let due = self.rma_operations.swap_remove(due);
        let fails = self.settings.rma_fails || self.random.as_mut().is_some_and(|random| random.once_in(5));
        let result = if due.cancelled {
            Err("cancelled".to_owned())
        } else if fails {
            if due.pull && due.memory.is_open() {
                // It fails halfway.
                due.memory.write(0, &vec![0xee; due.memory.len() / 2]);
            }
            Err("the device failed".to_owned())
        } else {
            due.execute(self.far_end(&due).and_then(|far| self.hosts.get(far)))
        };
        self.rma_completed += usize::from(result.is_ok());
        self.hosts[due.host].proto.handle_rma_done(due.link, due.number, result);
        self.pump(due.host);
        true
    }
}
