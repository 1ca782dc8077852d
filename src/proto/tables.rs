//! Tables: a fast, seeded hash for maps whose keys are numbers, and doubly linked lists through a slot map, such as the calls of
//! one link: found without a search, joined and left in a few steps.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use slotmap::{Key, SlotMap};

/// A map whose keys are numbers, perhaps of a peer's choice. A peer that does not know the two random numbers of its hash, 127
/// bits, can't make keys collide on purpose: no hash is ever sent, and what a peer could learn from lookup times is blurred by
/// everything else that a frame costs.
///
/// This is no cryptographic hash, and need not be one, since collisions are bounded too: each such map belongs to one link, and
/// has as many entries as the limits allow that link (16,384 requests or transfers, 65,536 names). If all of them collided, a
/// lookup would take some 100 µs, at the cost of that link; an entry takes a frame, which costs more than what the entry adds
/// to each lookup. A fork copies the keys of `RandomState`. They are no secret between engines: workers whose maps hash alike
/// reveal no more of them than one worker does.
pub(super) type NumberMap<K, V> = HashMap<K, V, SeededHash>;

#[derive(Clone)]
pub(super) struct SeededHash {
    add: u64,
    multiply: u64,
}

impl Default for SeededHash {
    fn default() -> SeededHash {
        let random = RandomState::new();
        SeededHash { add: random.hash_one(0u8), multiply: random.hash_one(1u8) | 1 }
    }
}

impl BuildHasher for SeededHash {
    type Hasher = FoldHasher;
    fn build_hasher(&self) -> FoldHasher {
        FoldHasher { state: self.add, multiply: self.multiply }
    }
}

pub(super) struct FoldHasher {
    state: u64,
    multiply: u64,
}

/// XORs the halves of the product of 128 bits: each bit of a factor affects many bits of the result.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Hasher for FoldHasher {
    fn write_u64(&mut self, number: u64) {
        self.state = fold(self.state ^ number, self.multiply);
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    /// The discriminant of an enum.
    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    /// Folded once more: consecutive numbers are still consecutive after one fold.
    fn finish(&self) -> u64 {
        fold(self.state, self.multiply)
    }
}

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
pub(super) fn chain<K: Key, V: Chained<K>>(table: &mut SlotMap<K, V>, last: &mut Option<K>, mut entry: V) -> K {
    entry.neighbours().before = *last;
    let key = table.insert(entry);
    if let Some(before) = last.and_then(|last| table.get_mut(last)) {
        before.neighbours().after = Some(key);
    }
    *last = Some(key);
    key
}

/// Unlinks an entry with these neighbours, which has been removed from the table.
pub(super) fn unchain<K: Key, V: Chained<K>>(table: &mut SlotMap<K, V>, last: &mut Option<K>, gone: &Neighbours<K>) {
    if let Some(before) = gone.before.and_then(|before| table.get_mut(before)) {
        before.neighbours().after = gone.after;
    }
    match gone.after.and_then(|after| table.get_mut(after)) {
        Some(after) => after.neighbours().before = gone.before,
        None => *last = gone.before,
    }
}

/// The keys of a chain, first to last.
pub(super) fn chained<K: Key, V: Chained<K>>(table: &mut SlotMap<K, V>, last: Option<K>) -> Vec<K> {
    let mut keys = Vec::new();
    let mut next = last;
    while let Some(key) = next {
        keys.push(key);
        next = table.get_mut(key).and_then(|entry| entry.neighbours().before);
    }
    keys.reverse();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_numbers_and_multiples_hash_evenly() {
        let numbers = SeededHash::default();
        for step in [1u64, 2, 64, 1 << 20, 1 << 32, 1 << 33, 1 << 50] {
            // The map uses the upper 7 bits and the lower ones.
            let mut low = vec![0; 256];
            let mut high = vec![0; 128];
            for n in 0..4096u64 {
                let hash = numbers.hash_one(n.wrapping_mul(step));
                low[hash as usize % 256] += 1;
                high[(hash >> 57) as usize] += 1;
            }
            // 16 and 32 are expected.
            assert!(low.iter().all(|count| *count < 80), "step {step}: {low:?}");
            assert!(high.iter().all(|count| *count < 160), "step {step}: {high:?}");
        }
        assert_ne!(SeededHash::default().hash_one(7u64), SeededHash::default().hash_one(7u64));
    }
}
