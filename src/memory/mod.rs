//! Memory that peers may reach: who holds it, who may touch it now, and how it comes back.
//!
//! Most of the crate's `unsafe` stands here; `tests/layers.rs` lists the other places. The whole argument is in two
//! sentences. A [`Region`] is a list of raw segments behind a gate, and each access of this process passes the gate for one
//! copy or one system call; accesses from outside (peers that read lent memory, devices) are noted in the region. Closing the
//! gate admits no further access, waits for those in progress, inside and outside, and then leaves the bytes to their owner.
//! `README.md`, in this folder, tells the rest.

#![allow(unsafe_code)]

mod buffer;
mod checksum;
mod engine_buffer;
mod loan;
mod message;
mod region;
mod region_buffer;
pub(crate) mod shared;

pub use buffer::{Buffer, Element, ReadElement, ReadOnly, Segments, View, Writable, WritableBuffer};
pub use engine_buffer::{BufferPool, EngineBuffer, PooledBuffer};
#[cfg_attr(not(any(test, feature = "verbs")), allow(unused_imports, reason = "for transports that have devices"))]
pub(crate) use loan::DeviceRegistration;
pub(crate) use loan::{ClosedRegion, Loan};
pub use region::Slice;
pub(crate) use region::{CopyOutcome, IoVec, Operation, ReadAccess, Region, WriteAccess, copy};
pub(crate) use region_buffer::{BorrowedRegion, RegionBuffer};
