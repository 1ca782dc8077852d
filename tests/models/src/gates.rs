//! A region's gate: no access overlaps another that it must not, and none comes after `close`, or after an operation's end.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::model;
use crate::region::{Copied, Region, Slice, copy};

/// Memory that a region stands for; loom fails when accesses overlap or are not ordered.
struct Tracked {
    region: Arc<Region>,
    memory: UnsafeCell<u8>,
}

// SAFETY: that accesses are ordered is what loom checks.
unsafe impl Sync for Tracked {}
// SAFETY: as above.
unsafe impl Send for Tracked {}

impl Tracked {
    fn new() -> Arc<Tracked> {
        Arc::new(Tracked { region: Region::from_vec(vec![0; 4]), memory: UnsafeCell::new(0) })
    }

    /// The owner touches what is its own again.
    fn touch(&self) {
        self.memory.with_mut(|_| thread::yield_now());
    }

    /// A system call in the middle of which anything may happen.
    fn read_through(&self, slice: &Slice) {
        if let Some(access) = slice.read_access() {
            self.memory.with(|_| thread::yield_now());
            drop(access);
        }
    }

    fn write_through(&self, slice: &Slice) {
        if let Some(access) = slice.write_access() {
            self.memory.with_mut(|_| thread::yield_now());
            drop(access);
        }
    }
}

#[test]
fn nothing_touches_memory_after_close() {
    model(8, || {
        let tracked = Tracked::new();
        let (reading, writing) = (tracked.clone(), tracked.clone());
        let reader = thread::spawn(move || reading.read_through(&Slice::whole(&reading.region)));
        let writer = thread::spawn(move || writing.write_through(&Slice::whole(&writing.region)));
        tracked.region.close();
        tracked.touch();
        reader.join().unwrap();
        writer.join().unwrap();
    });
}

#[test]
fn nothing_is_written_after_an_operation_ends() {
    model(8, || {
        let tracked = Tracked::new();
        let slice = Slice::whole(&tracked.region).for_one_operation();
        let (writing, theirs) = (tracked.clone(), slice.part(1, 2).unwrap());
        let writer = thread::spawn(move || {
            writing.write_through(&theirs);
            writing.write_through(&theirs);
        });
        slice.end();
        tracked.region.fence();
        tracked.touch();
        writer.join().unwrap();
    });
}

#[test]
fn copies_in_both_directions_never_lock_each_other_out() {
    model(8, || {
        let mut regions = [Region::from_vec(vec![1; 4]), Region::from_vec(vec![2; 4])];
        // Gates are passed in the order of addresses, which must be the same in each run of the model.
        regions.sort_by_key(Arc::as_ptr);
        let [a, b] = regions;
        let (here, there) = (Slice::whole(&a), Slice::whole(&b));
        let back = (there.clone(), here.clone());
        let other = thread::spawn(move || copy(&back.0, &back.1));
        let copied = [copy(&here, &there), other.join().unwrap()];
        assert_eq!(copied, [Copied::All; 2]);
        assert_eq!(a.take_vec().unwrap(), b.take_vec().unwrap());
    });
}
