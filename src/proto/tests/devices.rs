//! Devices that reach the memory of other hosts by themselves, as far as they have keys.

use std::time::Instant;

use super::env::Mem;
use super::host::Host;
use super::net::Net;
use super::{LinkId, Memory, Mode, RemoteKeys};

/// A move that a device is about to carry out.
pub struct DeviceMove {
    pub at: Instant,
    pub host: usize,
    pub link: LinkId,
    pub number: u64,
    pub pull: bool,
    pub memory: Mem,
    pub keys: RemoteKeys,
    pub offset: u64,
    pub given_up: bool,
}

/// What a device reaches memory by that is exposed under this token, for as long as it is.
pub fn keys(token: u128, mode: Mode) -> RemoteKeys {
    let mut keys = token.to_le_bytes().to_vec();
    keys.extend([u8::from(mode.read), u8::from(mode.write)]);
    keys.into()
}

impl DeviceMove {
    /// All of it, or an error. `far` is whose memory it concerns.
    fn carry_out(&self, far: Option<&Host>) -> Result<(), String> {
        let Some((token, &[read, write])) = self.keys.split_first_chunk::<16>() else { return Err("no keys".into()) };
        let far = far.and_then(|far| far.exposed.get(&u128::from_le_bytes(*token))).filter(|far| far.is_open());
        let far = far.ok_or("the key reaches no memory")?;
        let far = far.part(self.offset as usize, self.memory.len()).ok_or("out of what the key reaches")?;
        if (if self.pull { read } else { write }) == 0 {
            return Err("the key is not for that".into());
        }
        if !self.memory.is_open() {
            return Err("the near memory is gone".into());
        }
        let (from, to) = if self.pull { (&far, &self.memory) } else { (&self.memory, &far) };
        to.write(0, &from.bytes());
        Ok(())
    }
}

impl Net {
    /// When the next move is done that a device is at.
    pub(super) fn next_move(&self) -> Option<Instant> {
        self.moves.iter().filter(|each| self.far_end(each).is_some()).map(|each| each.at).min()
    }

    /// The host at the other end of a move's link, while things move there.
    fn far_end(&self, each: &DeviceMove) -> Option<usize> {
        let (wire, side) = self.hosts[each.host].wires.get(&each.link)?;
        let wire = &self.wires[*wire];
        (!wire.frozen).then_some(wire.ends[1 - side].host)
    }

    /// Carries out a move that is due; false when there is none.
    pub(super) fn step_move(&mut self) -> bool {
        // The end of a link is the end of its moves.
        let hosts = &self.hosts;
        self.moves.retain(|each| hosts[each.host].wires.contains_key(&each.link));
        let due = self.moves.iter().position(|each| each.at <= self.now && self.far_end(each).is_some());
        let Some(due) = due else { return false };
        let due = self.moves.swap_remove(due);
        let fails = self.settings.moves_fail || self.random.as_mut().is_some_and(|random| random.once_in(5));
        let result = if due.given_up {
            Err("given up".to_owned())
        } else if fails {
            if due.pull && due.memory.is_open() {
                // It got so far.
                due.memory.write(0, &vec![0xee; due.memory.len() / 2]);
            }
            Err("the device failed".to_owned())
        } else {
            due.carry_out(self.far_end(&due).and_then(|far| self.hosts.get(far)))
        };
        self.moved += usize::from(result.is_ok());
        self.hosts[due.host].proto.handle_moved(due.link, due.number, result);
        self.pump(due.host);
        true
    }
}
