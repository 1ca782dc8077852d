//! Tests of the bounded decoder: collections take no more memory than it accounts for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet, LinkedList, VecDeque};

use serde::de::DeserializeOwned;

use super::decode_within;

/// Counts what a thread has allocated, with what the allocator adds.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn taken(size: usize) -> usize {
    (size + 8).next_multiple_of(16).max(32)
}

// SAFETY: each method is the system's, called with what it was called with; the others are made of these.
#[expect(unsafe_code, reason = "an allocator is unsafe to write")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get().wrapping_add(taken(layout.size())));
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.set(ALLOCATED.get().wrapping_sub(taken(layout.size())));
        // SAFETY: as above; it came from the same allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// What a collection of `count` elements takes is at most a fifth more than what is accounted.
fn assert_accounted<T: DeserializeOwned>(count: usize, elements: &[u8]) {
    let bytes = [&postcard::to_stdvec(&count).unwrap(), elements].concat();
    let before = ALLOCATED.get();
    let (value, accounted) = decode_within::<T>(&bytes, &mut |_| Some(usize::MAX)).unwrap();
    let taken = ALLOCATED.get().wrapping_sub(before);
    drop(value);
    assert!(
        taken <= accounted + accounted / 5 + 16,
        "{}: {count} elements take {taken} bytes, {accounted} are accounted",
        std::any::type_name::<T>()
    );
}

#[test]
fn collections_take_what_is_accounted() {
    type Nothing = Option<[u64; 32]>;
    // Less than a mebibyte each: beyond it, an array that grows has up to as much room as it uses.
    for count in (0..=300).chain([1_000, 1_793, 3_600]) {
        // Ascending; a tree's nodes are half full then.
        let keys = (0..count as u32).flat_map(|n| postcard::to_stdvec(&n).unwrap()).collect::<Vec<_>>();
        let entries = (0..count as u32).flat_map(|n| postcard::to_stdvec(&(n, 0u8)).unwrap()).collect::<Vec<_>>();
        let zeros = vec![0; count];
        assert_accounted::<Vec<u32>>(count, &keys);
        assert_accounted::<Vec<Nothing>>(count, &zeros);
        assert_accounted::<VecDeque<u32>>(count, &keys);
        assert_accounted::<BinaryHeap<Nothing>>(count, &zeros);
        assert_accounted::<LinkedList<u8>>(count, &zeros);
        assert_accounted::<LinkedList<Nothing>>(count, &zeros);
        assert_accounted::<BTreeSet<u32>>(count, &keys);
        assert_accounted::<BTreeSet<(u32, Nothing)>>(count, &entries);
        assert_accounted::<HashSet<u32>>(count, &keys);
        assert_accounted::<HashSet<(u32, Nothing)>>(count, &entries);
        assert_accounted::<BTreeMap<u32, u8>>(count, &entries);
        assert_accounted::<BTreeMap<u32, Nothing>>(count, &entries);
        assert_accounted::<HashMap<u32, u8>>(count, &entries);
        assert_accounted::<HashMap<u32, Nothing>>(count, &entries);
    }
}
