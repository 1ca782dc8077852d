//! Synchronization primitives. Code that `tests/models` checks takes them from here, and the models replace them by loom's,
//! which explore the orders of events.

pub(crate) use std::sync::atomic;
pub(crate) use std::time::Instant;
pub(crate) use std::{thread, thread_local};

pub(crate) use crossbeam_utils::sync::{Parker, Unparker};
pub(crate) use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
