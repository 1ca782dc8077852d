//! Which processor a thread runs on.

use nix::sched::sched_getcpu;
use rustix::thread::{sched_getaffinity, sched_setaffinity};

/// Moves this thread to another processor, if its affinity permits one, and restores the affinity.
pub(super) fn leave() {
    // The C library's `getcpu`: that of rustix reads the kernel's page itself, which is not there under valgrind.
    let (Ok(allowed), Ok(here)) = (sched_getaffinity(None), sched_getcpu()) else { return };
    let mut others = allowed;
    others.unset(here);
    if others.count() > 0 && sched_setaffinity(None, &others).is_ok() {
        // It fails when the last of these processors has gone meanwhile: then the kernel has already chosen others.
        let _ = sched_setaffinity(None, &allowed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_leaves_its_processor_and_keeps_its_affinity() {
        let allowed = sched_getaffinity(None).unwrap();
        if allowed.count() < 2 {
            return;
        }
        // The kernel may move the thread back at any time, so it need not stay away each time.
        let left = (0..100).filter(|_| {
            let before = sched_getcpu().unwrap();
            leave();
            sched_getcpu().unwrap() != before
        });
        assert!(left.count() > 50);
        assert!(sched_getaffinity(None).unwrap() == allowed);
    }

    #[test]
    fn a_thread_that_is_bound_to_a_processor_stays() {
        let here = sched_getcpu().unwrap();
        let mut only = sched_getaffinity(None).unwrap();
        only.clear();
        only.set(here);
        sched_setaffinity(None, &only).unwrap();
        leave();
        assert_eq!(sched_getcpu().unwrap(), here);
        assert!(sched_getaffinity(None).unwrap() == only);
    }
}
