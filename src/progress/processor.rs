//! Which processor a thread runs on.

use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Moves this thread to another processor, if its affinity permits one, and restores the affinity.
pub(super) fn leave() {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut others = allowed;
    others.unset(sched_getcpu());
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
            let before = sched_getcpu();
            leave();
            sched_getcpu() != before
        });
        assert!(left.count() > 50);
        assert!(sched_getaffinity(None).unwrap() == allowed);
    }

    #[test]
    fn a_thread_that_is_bound_to_a_processor_stays() {
        let here = sched_getcpu();
        let mut only = sched_getaffinity(None).unwrap();
        only.clear();
        only.set(here);
        sched_setaffinity(None, &only).unwrap();
        leave();
        assert_eq!(sched_getcpu(), here);
        assert!(sched_getaffinity(None).unwrap() == only);
    }
}
