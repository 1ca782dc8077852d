//! Sans-IO tests of the protocol: [`Proto`]s in simulated time, joined by links that delay, split and lose bytes.
//!
//! [`net`] is the network, [`host`] an engine in it, [`env`](self::env) its memory. Every test ends with [`net::Net::end`],
//! which finds what is left over: operations that did not end exactly once, table entries, timers, memory.

// The fuzz targets use the same network, and none of the tests.
#![cfg_attr(not(test), allow(dead_code, unused_imports, unused_macros))]

mod access_policy;
mod arbitrary;
mod calls;
mod cancelling;
mod checksums;
mod claimed_sizes;
mod conversation;
mod delivery;
mod devices;
mod env;
#[cfg(test)]
mod format;
pub(crate) mod fuzzing;
mod handshake;
mod host;
mod identity_spoofing;
mod idle;
mod idle_adversaries;
mod idle_orders;
mod impersonation;
#[cfg(test)]
mod injecting;
mod keys;
mod lanes;
mod leases;
mod limits;
#[cfg(test)]
mod lists;
mod malformed;
mod names;
mod net;
mod one_way;
mod overload;
mod peer_timeout;
#[cfg(test)]
mod random_bytes;
mod random_workload;
mod raw;
mod reconnecting;
mod reflection;
mod refusal_counts;
mod revoking;
mod rma;
mod shutdown;
mod simultaneous_connect;
mod tokens;
#[cfg(test)]
mod traces;
mod transfers;
mod wires;
#[cfg(test)]
mod work;

use super::*;
