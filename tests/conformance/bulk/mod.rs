//! Tests of bulk data: exposing memory, transfers, and reclaiming it.

mod basics;
mod beside;
mod borrowed;
mod buffers;
mod denied;
mod eager;
#[cfg(all(feature = "bytes", feature = "memmap2", feature = "ndarray"))]
mod foreign;
mod forged;
mod forward;
mod grants;
mod model;
mod overlap;
mod pool;
mod reclaim;
mod released;
mod scope;
mod segments;
mod sizes;
mod slices;
mod started;
mod transfer;
