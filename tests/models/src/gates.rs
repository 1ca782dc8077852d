//! Models of a region's gate: conflicting accesses never overlap, and none happens after `close`, or after the end of an
//! operation.

use std::sync::Arc;

use loom::thread;

use crate::memory::{CopyOutcome, CopyPath, Region, Slice, copy};
use crate::model;
use crate::watched::Watched;

/// A region, and the memory that it stands for.
struct Tracked {
    region: Arc<Region>,
    memory: Watched,
}

impl Tracked {
    fn new() -> Arc<Tracked> {
        Arc::new(Tracked { region: Region::from_vec(vec![0; 4]), memory: Watched::default() })
    }

    /// A system call during which any other thread may run.
    fn read_through(&self, slice: &Slice) {
        if let Some(access) = slice.read_access() {
            self.memory.read();
            drop(access);
        }
    }

    fn write_through(&self, slice: &Slice) {
        if let Some(access) = slice.write_access() {
            self.memory.write();
            drop(access);
        }
    }
}

pub(crate) fn no_access_after_close() {
    model(8, || {
        let tracked = Tracked::new();
        let (reading, writing) = (tracked.clone(), tracked.clone());
        let reader = thread::spawn(move || reading.read_through(&Slice::whole(&reading.region)));
        let writer = thread::spawn(move || writing.write_through(&Slice::whole(&writing.region)));
        tracked.region.close();
        tracked.memory.write();
        reader.join().unwrap();
        writer.join().unwrap();
    });
}

pub(crate) fn no_write_after_an_operation_ends() {
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
        tracked.memory.write();
        writer.join().unwrap();
    });
}

pub(crate) fn copies_in_both_directions_do_not_deadlock() {
    model(8, || {
        let mut regions = [Region::from_vec(vec![1; 4]), Region::from_vec(vec![2; 4])];
        // Gates are passed in the order of addresses, which must be the same in each run of the model.
        regions.sort_by_key(Arc::as_ptr);
        let [a, b] = regions;
        let (here, there) = (Slice::whole(&a), Slice::whole(&b));
        let back = (there.clone(), here.clone());
        let other = thread::spawn(move || copy(&back.0, &back.1, CopyPath::Cached));
        let copied = [copy(&here, &there, CopyPath::Cached), other.join().unwrap()];
        assert_eq!(copied, [CopyOutcome::All; 2]);
        assert_eq!(*a.take_message(), *b.take_message());
    });
}
