//! The tables of a link: maps by the numbers that its peer sends, under a fast, seeded hash; the chains of its calls and
//! transfers, doubly linked lists through a slot map; and the numbers that stand for what was declared on it.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use slotmap::{Key, SlotMap};

use super::wire::{Declare, MAX_NAME};
use super::{Env, Failure, broken};

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

/// The entries before and after one in a chain, which is found without a search, joined and left in a few steps.
pub(super) struct Neighbours<K> {
    before: Option<K>,
    after: Option<K>,
}

/// An entry that has neighbours.
pub(super) trait Chained<K> {
    fn neighbours(&mut self) -> &mut Neighbours<K>;
}

/// Adds an entry to the table, behind the last of its chain. `make` makes it where it is needed, since moving it takes long.
#[inline]
pub(super) fn chain<K: Key, V: Chained<K>>(
    table: &mut SlotMap<K, V>,
    last: &mut Option<K>,
    make: impl FnOnce(Neighbours<K>) -> V,
) -> K {
    let key = table.insert(make(Neighbours { before: *last, after: None }));
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

// Numbers stand for what was declared once on a link: a procedure's name with the shape of its arguments, or the shape of a
// result. The first message that uses a number declares it. A link keeps the order of messages, so the receiver reads the
// declaration before any other use of the number. It keeps a declaration even if it refuses the message that brought it.

/// Largest number of declarations of one side on a link.
pub(super) const MAX_DECLARATIONS: usize = 1 << 16;
/// Limit on their bytes, with the overhead of each. Beyond it a declaration is for one message only.
pub(super) const MAX_DECLARED_BYTES: usize = 16 << 20;
/// Numbers from here on are not used on links: an engine that has so many declares for one message at a time.
const MAX_NUMBERS: usize = 16 * MAX_DECLARATIONS;
/// Overhead of a declaration, in bytes.
const DECLARATION_COST: usize = 192;

/// What a peer has declared.
#[derive(Debug)]
pub(crate) struct Declaration<E: Env> {
    /// Empty for a result.
    pub name: Arc<str>,
    /// The shape of the values, in a format that the protocol does not know.
    pub shape: Box<[u8]>,
    pub verdicts: E::Verdicts,
}

/// The numbers that this side has declared on a link.
#[derive(Default)]
pub(super) struct OwnDeclarations {
    /// One bit for each.
    numbers: Vec<u64>,
    count: usize,
    bytes: usize,
}

impl OwnDeclarations {
    fn has(&self, number: u32) -> bool {
        self.numbers.get(number as usize / 64).is_some_and(|bits| bits >> (number % 64) & 1 == 1)
    }

    /// Whether a declaration of `len` bytes has a number on this link, or can get one.
    pub(super) fn has_number(&self, number: u32, len: usize) -> bool {
        let is_room = || self.count < MAX_DECLARATIONS && self.bytes + len + DECLARATION_COST <= MAX_DECLARED_BYTES;
        self.has(number) || (number != 0 && is_room() && (number as usize) < MAX_NUMBERS)
    }

    /// The number to send for a declaration of `len` bytes (0: none), and whether the message has to declare it.
    pub(super) fn add(&mut self, number: u32, len: usize) -> (u32, bool) {
        if self.has(number) {
            return (number, false);
        }
        if !self.has_number(number, len) {
            return (0, true);
        }
        self.bytes += len + DECLARATION_COST;
        let word = number as usize / 64;
        if self.numbers.len() <= word {
            self.numbers.resize(word + 1, 0);
        }
        self.numbers[word] |= 1 << (number % 64);
        self.count += 1;
        (number, true)
    }
}

/// What the peer has declared on a link.
pub(super) struct PeerDeclarations<E: Env> {
    procedures: NumberMap<u32, Arc<Declaration<E>>>,
    results: NumberMap<u32, Arc<Declaration<E>>>,
    /// Bytes of them all.
    pub bytes: usize,
}

impl<E: Env> Default for PeerDeclarations<E> {
    fn default() -> Self {
        PeerDeclarations { procedures: NumberMap::default(), results: NumberMap::default(), bytes: 0 }
    }
}

impl<E: Env> PeerDeclarations<E> {
    /// What a request calls.
    pub(super) fn procedure(&mut self, number: u32, declared: Option<Declare<'_>>) -> Result<Arc<Declaration<E>>, Failure> {
        let Some(Declare { name, shape }) = declared else {
            let known = self.procedures.get(&number).cloned();
            return known.ok_or_else(|| broken(format!("procedure {number} was not declared")));
        };
        if name.len() > MAX_NAME {
            return Err(broken(format!("a name of {} bytes exceeds the limit of {MAX_NAME} bytes", name.len())));
        }
        if self.procedures.contains_key(&number) {
            return Err(broken(format!("procedure {number} was declared twice")));
        }
        let declaration = Arc::new(Declaration { name: name.into(), shape: shape.0.into(), verdicts: E::Verdicts::default() });
        if number != 0 {
            self.keep(name.len() + shape.0.len())?;
            self.procedures.insert(number, declaration.clone());
        }
        Ok(declaration)
    }

    /// The name of a procedure that the peer calls; `None` where it was declared for one message only.
    pub(super) fn name_of(&self, procedure: u32) -> Option<&str> {
        self.procedures.get(&procedure).map(|declaration| &*declaration.name)
    }

    /// The declaration of an answer's type; `None` for an answer that needs none.
    pub(super) fn result(&mut self, number: u32, shape: &[u8]) -> Result<Option<Arc<Declaration<E>>>, Failure> {
        let known = self.results.get(&number);
        if shape.is_empty() {
            return match known {
                None if number != 0 => Err(broken(format!("result {number} was not declared"))),
                known => Ok(known.cloned()),
            };
        }
        if known.is_some() {
            return Err(broken(format!("result {number} was declared twice")));
        }
        let declaration = Arc::new(Declaration { name: "".into(), shape: shape.into(), verdicts: E::Verdicts::default() });
        if number != 0 {
            self.keep(shape.len())?;
            self.results.insert(number, declaration.clone());
        }
        Ok(Some(declaration))
    }

    /// Accounts for one more declaration of the peer, which knows the limits: beyond them the link ends.
    fn keep(&mut self, len: usize) -> Result<(), Failure> {
        let count = self.procedures.len() + self.results.len();
        let bytes = self.bytes + len + DECLARATION_COST;
        if count == MAX_DECLARATIONS || bytes > MAX_DECLARED_BYTES {
            return Err(broken(format!(
                "{} declarations of {bytes} bytes exceed the limits of {MAX_DECLARATIONS} and {MAX_DECLARED_BYTES} bytes",
                count + 1
            )));
        }
        self.bytes = bytes;
        Ok(())
    }
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
