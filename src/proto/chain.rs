//! Doubly linked lists through a table, such as the calls of one link: found without a search, joined and left in a few steps.

use slotmap::{Key, SlotMap};

/// The entries before and after one.
pub(super) struct Neighbours<K> {
    before: Option<K>,
    after: Option<K>,
}

impl<K> Default for Neighbours<K> {
    fn default() -> Neighbours<K> {
        Neighbours { before: None, after: None }
    }
}

/// An entry that has neighbours.
pub(super) trait Chained<K> {
    fn neighbours(&mut self) -> &mut Neighbours<K>;
}

/// Adds an entry to the table, behind the last of its chain.
pub(super) fn add<K: Key, V: Chained<K>>(table: &mut SlotMap<K, V>, last: &mut Option<K>, mut entry: V) -> K {
    entry.neighbours().before = *last;
    let key = table.insert(entry);
    if let Some(before) = last.and_then(|last| table.get_mut(last)) {
        before.neighbours().after = Some(key);
    }
    *last = Some(key);
    key
}

/// Unlinks an entry with these neighbours, which has been removed from the table.
pub(super) fn unlink<K: Key, V: Chained<K>>(table: &mut SlotMap<K, V>, last: &mut Option<K>, gone: &Neighbours<K>) {
    if let Some(before) = gone.before.and_then(|before| table.get_mut(before)) {
        before.neighbours().after = gone.after;
    }
    match gone.after.and_then(|after| table.get_mut(after)) {
        Some(after) => after.neighbours().before = gone.before,
        None => *last = gone.before,
    }
}

/// The keys of a chain, first to last.
pub(super) fn all<K: Key, V: Chained<K>>(table: &mut SlotMap<K, V>, last: Option<K>) -> Vec<K> {
    let mut keys = Vec::new();
    let mut next = last;
    while let Some(key) = next {
        keys.push(key);
        next = table.get_mut(key).and_then(|entry| entry.neighbours().before);
    }
    keys.reverse();
    keys
}
