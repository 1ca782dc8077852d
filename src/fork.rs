//! Detects forks: a forked child has its parent's memory and sockets, but none of its threads.

#![allow(unsafe_code)]

#[cfg(feature = "json")]
use std::sync::Arc;
#[cfg(not(miri))]
use std::sync::Once;
#[cfg(any(feature = "json", feature = "ofi"))]
use std::sync::OnceLock;
#[cfg(feature = "json")]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of forks between the process that first called [`generation`] and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A number that differs between a process and its children.
fn generation() -> u32 {
    // Miri supports neither `pthread_atfork` nor forks. See `ci/miri`.
    #[cfg(not(miri))]
    static WATCH: Once = Once::new();
    #[cfg(not(miri))]
    WATCH.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as the program, and is async-signal-safe, as a child of a
        // program with threads requires: it changes one atomic.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            tracing::warn!(target: "calomel::engine", "forks can't be detected: pthread_atfork failed");
        }
    });
    GENERATION.load(Ordering::Relaxed)
}

#[cfg(feature = "json")]
static FORKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Set in the children of a process that has asked for it, for signal handlers.
#[cfg(feature = "json")]
pub(crate) fn forked_flag() -> Arc<AtomicBool> {
    FORKED.get_or_init(Arc::default).clone()
}

/// True in a child of a process that has asked for this flag.
#[cfg(feature = "json")]
pub(crate) fn is_flagged_child() -> bool {
    FORKED.get().is_some_and(|flag| flag.load(Ordering::SeqCst))
}

/// The process that a value was made in.
#[derive(Clone, Copy)]
pub(crate) struct CreatorProcess(u32);

impl CreatorProcess {
    pub(crate) fn this() -> CreatorProcess {
        CreatorProcess(generation())
    }

    /// True in a forked child of that process: there, locks may be held by threads that do not exist, and operations in
    /// progress do not end.
    pub(crate) fn is_forked_child(self) -> bool {
        generation() != self.0
    }
}

/// What the slot has, or what `find` returns, which is kept. Threads that call it at the same time all run `find`, and one result
/// is kept. If one waited for the other, it would wait for ever in a child that is forked meanwhile.
#[cfg(feature = "ofi")]
pub(crate) fn find_once<T>(slot: &OnceLock<T>, find: impl FnOnce() -> T) -> &T {
    if let Some(found) = slot.get() {
        return found;
    }
    let found = find();
    slot.get_or_init(|| found)
}

#[cfg_attr(miri, allow(dead_code, reason = "there are no forks"))]
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    #[cfg(feature = "json")]
    if let Some(flag) = FORKED.get() {
        flag.store(true, Ordering::SeqCst);
    }
}

#[cfg(all(test, feature = "ofi"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_once_waits_for_no_other_thread() {
        let (slot, (begun, begins)) = (OnceLock::new(), std::sync::mpsc::channel());
        let (go, waits) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let slot = &slot;
            let slow = scope.spawn(move || {
                *find_once(slot, || {
                    begun.send(()).unwrap();
                    waits.recv().unwrap()
                })
            });
            begins.recv().unwrap();
            // As in a forked child, where the other thread does not exist.
            assert_eq!(*find_once(slot, || 1), 1);
            go.send(2).unwrap();
            assert_eq!(slow.join().unwrap(), 1, "one result is kept");
        });
        assert_eq!(*find_once(&slot, || 3), 1);
    }
}
