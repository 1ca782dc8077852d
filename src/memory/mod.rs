//! Exposed memory: its ownership, the accesses to it, and its return to the owner.
//!
//! Most of the crate's `unsafe` code is here; `tests/layers.rs` lists the other places. The argument for it is short. A
//! [`Region`] is a list of raw segments behind a gate, and each access by this process passes the gate for one copy or one
//! system call. Accesses from outside (devices, and peers that read exported memory) are recorded in the region. Closing the
//! gate admits no further access, and waits for those in progress, inside and outside. From then on the bytes belong to their
//! owner. `README.md` in this folder has the details.

#![allow(unsafe_code)]

mod buffer;
mod checksum;
mod copying;
mod engine_buffer;
mod foreign;
mod loan;
mod message;
mod region;
mod region_buffer;
pub(crate) mod shared;

pub use buffer::{Buffer, BufferView, Element, ReadElement, ReadOnly, Segments, Writable, WritableBuffer};
pub(crate) use copying::CopyPath;
pub use engine_buffer::{BufferPool, EngineBuffer, PooledBuffer};
#[cfg_attr(not(any(test, feature = "verbs")), allow(unused_imports, reason = "for transports that have devices"))]
pub(crate) use loan::DeviceRegistration;
pub(crate) use loan::{ClosedRegion, Loan};
pub(crate) use message::{MAPPED_BY_ALLOCATOR, ReceivedMessage, spare_to_encode};
pub use region::Slice;
pub(crate) use region::{CopyOutcome, IoVec, Operation, ReadAccess, Region, WriteAccess, copy};
pub use region_buffer::BorrowedSlice;
pub(crate) use region_buffer::{BorrowedRegion, RegionBuffer, SentRegion};
