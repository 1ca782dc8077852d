//! Memory that peers may reach: who holds it, who may touch it now, and how it comes back.
//!
//! This is where the crate's `unsafe` lives, beside the system calls of the transports. The whole argument is in two
//! sentences. A [`Region`] is a list of raw segments behind a gate, and every access, from whichever thread, passes the
//! gate for no longer than one copy or one non-blocking system call. Closing the gate waits for the accesses in progress
//! and lets no other in, so whoever owns the bytes may do as they like with them afterwards.

#![allow(unsafe_code)]

mod buffer;
mod checksum;
mod engine_buffer;
mod held;
mod loan;
mod message;
mod region;
pub(crate) mod shared;

pub use buffer::{Buffer, Element, ReadElement, ReadOnly, Segments, View, Writable, WritableBuffer};
pub use engine_buffer::{BufferPool, EngineBuffer, PooledBuffer};
pub(crate) use held::{Borrowed, Held};
#[cfg_attr(not(any(test, feature = "verbs")), allow(unused_imports, reason = "for transports that have devices"))]
pub(crate) use loan::Registration;
pub(crate) use loan::{Loan, Shut};
pub use region::Slice;
pub(crate) use region::{Copied, IoVec, Operation, ReadAccess, Region, WriteAccess, copy};
