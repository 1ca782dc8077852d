//! Numbers that stand for what was declared once on a link: a procedure's name with the shape of its arguments, or the shape of
//! a result.
//!
//! The first message that uses a number declares it. A link keeps the order of messages, so the receiver reads the declaration
//! before any other use of the number. It keeps a declaration even if it refuses the message that brought it.

use std::sync::Arc;

use super::tables::NumberMap;
use super::wire::{Declare, MAX_NAME};
use super::{Env, Failure, broken};

/// Largest number of declarations of one side on a link.
pub(super) const MAX_DECLARATIONS: usize = 1 << 16;
/// Limit on their bytes, with the overhead of each. Beyond it a declaration is for one message only.
pub(super) const MAX_BYTES: usize = 16 << 20;
/// Numbers from here on are not used on links: an engine that has so many declares for one message at a time.
const MAX_NUMBERS: usize = 16 * MAX_DECLARATIONS;
/// Overhead of a declaration, in bytes.
pub(super) const COST: usize = 192;

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
        let is_room = || self.count < MAX_DECLARATIONS && self.bytes + len + COST <= MAX_BYTES;
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
        self.bytes += len + COST;
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
        let bytes = self.bytes + len + COST;
        if count == MAX_DECLARATIONS || bytes > MAX_BYTES {
            return Err(broken(format!(
                "{} declarations of {bytes} bytes exceed the limits of {MAX_DECLARATIONS} and {MAX_BYTES} bytes",
                count + 1
            )));
        }
        self.bytes = bytes;
        Ok(())
    }
}
