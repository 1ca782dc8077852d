//! Noticing that the process has been forked: a child has its parent's memory and sockets, but none of its threads.

#![allow(unsafe_code)]

#[cfg(not(miri))]
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the process that first asked and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Differs between a process and its children.
fn generation() -> u32 {
    // Miri has neither the call nor forks. See `ci/miri`.
    #[cfg(not(miri))]
    static WATCH: Once = Once::new();
    #[cfg(not(miri))]
    WATCH.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as the program, and does what a child of a program with
        // threads may do: it touches one atomic.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            tracing::warn!(target: "calomel::engine", "forks can't be noticed");
        }
    });
    GENERATION.load(Ordering::Relaxed)
}

/// The process that something was made in.
#[derive(Clone, Copy)]
pub(crate) struct CreatorProcess(u32);

impl CreatorProcess {
    pub(crate) fn this() -> CreatorProcess {
        CreatorProcess(generation())
    }

    /// True in a child of that process: locks may be held there by threads that are not there, and what was begun never ends.
    pub(crate) fn is_forked_child(self) -> bool {
        generation() != self.0
    }
}

#[cfg_attr(miri, allow(dead_code, reason = "there are no forks"))]
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
