//! What threads meet at. The code that has to be right in every order of events takes it from here, and `tests/models` puts
//! something else in its place that tries them all.

pub(crate) use std::sync::atomic;
pub(crate) use std::time::Instant;
pub(crate) use std::{thread, thread_local};

pub(crate) use crossbeam_utils::sync::{Parker, Unparker};
pub(crate) use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
