//! Tests of bulk data: exposing memory, transfers, and reclaiming it.

mod basics;
mod borrowed;
mod buffers;
mod denied;
mod eager;
mod forged;
mod forward;
mod grants;
mod model;
mod overlap;
mod reclaim;
mod released;
mod scope;
mod sizes;
mod slices;
mod transfer;
