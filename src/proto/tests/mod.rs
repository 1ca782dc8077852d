//! Engines without engines: [`Proto`]s in simulated time, joined by links that delay, cut to pieces and get lost.
//!
//! [`net`] is the network, [`host`] an engine in it, [`env`](self::env) what moves. Every story ends with [`net::Net::end`],
//! which finds what is left over: operations that did not end exactly once, table entries, timers, memory.

// The fuzzer goes by the same network, and needs none of the stories.
#![cfg_attr(not(test), allow(dead_code, unused_imports, unused_macros))]

mod arbitrary;
mod calls;
mod cancelling;
mod carrier;
mod checksums;
mod claims;
mod conversation;
mod devices;
mod env;
mod forgeries;
#[cfg(test)]
mod format;
pub(crate) mod fuzzing;
#[cfg(test)]
mod garbage;
mod greeting;
mod host;
mod impostors;
mod keys;
mod leases;
mod limits;
mod moves;
mod names;
mod net;
mod one_way;
mod overload;
mod raw;
mod reconnecting;
mod reflection;
mod refused;
mod revoking;
mod shutdown;
mod silence;
mod terms;
mod theft;
mod tokens;
mod transfers;
mod twins;
mod walk;
mod wires;
#[cfg(test)]
mod work;

use super::*;
