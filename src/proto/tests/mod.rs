//! Engines without engines: [`Proto`]s in simulated time, joined by links that delay, cut to pieces and get lost.
//!
//! [`net`] is the network, [`host`] an engine in it, [`env`](self::env) what moves. Every story ends with [`net::Net::end`],
//! which finds what is left over: operations that did not end exactly once, table entries, timers, memory.

// The fuzzer goes by the same network, and needs none of the stories.
#![cfg_attr(not(test), allow(dead_code, unused_imports, unused_macros))]

mod access_policy;
mod arbitrary;
mod calls;
mod cancelling;
mod carrier;
mod checksums;
mod claims;
mod conversation;
mod devices;
mod env;
#[cfg(test)]
mod format;
pub(crate) mod fuzzing;
#[cfg(test)]
mod garbage;
mod handshake;
mod host;
mod identity_spoofing;
mod impostors;
mod keys;
mod leases;
mod limits;
mod malformed;
mod names;
mod net;
mod one_way;
mod overload;
mod peer_timeout;
mod random_workload;
mod raw;
mod reconnecting;
mod reflection;
mod refused;
mod revoking;
mod rma;
mod shutdown;
mod simultaneous_connect;
mod tokens;
mod transfers;
mod wires;
#[cfg(test)]
mod work;

use super::*;
