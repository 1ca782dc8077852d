//! The state of type checking: what a sender's values have shown so far, and which declarations a receiver has accepted.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::sync::Mutex;
use serde::Serialize;

use super::Shape;
use super::encode_error::EncodeError;
use super::encoder::{self, Seen};
use super::known::KnownShape;

/// The numbers of an engine's declarations: of a name and a shape, or of a shape alone.
#[derive(Default)]
pub(crate) struct DeclarationNumbers {
    given: Mutex<HashMap<DeclarationContent, u32>>,
}

/// The name of a procedure (`None` for a result), and a shape.
type DeclarationContent = (Option<Arc<str>>, Arc<[u8]>);

impl DeclarationNumbers {
    /// The number of a declaration of equal content, if there is one.
    fn given_to(&self, name: &Option<Arc<str>>, shape: &Arc<[u8]>) -> Option<u32> {
        self.given.lock().get(&(name.clone(), shape.clone())).copied()
    }

    /// The number of a declaration, the same for equal content. Never zero.
    fn of(&self, name: &Option<Arc<str>>, shape: &Arc<[u8]>) -> u32 {
        let mut given = self.given.lock();
        let next = u32::try_from(given.len() + 1).unwrap_or(0);
        *given.entry((name.clone(), shape.clone())).or_insert(next)
    }
}

/// The shape that is declared for values: the union of all that they have shown so far.
pub(crate) struct DeclaredShape {
    /// Zero for a declaration that is valid for one message only.
    pub number: u32,
    pub shape: Arc<[u8]>,
    known: KnownShape,
}

/// Values that contradict what was known are declared by themselves. So many of their shapes get numbers; the others are
/// declared again with each message.
const MAX_ALONE: usize = 64;

/// What is known of the type of a procedure's arguments, or of a registration's results.
pub(crate) struct Knowledge {
    /// The procedure's name, which is declared together with the shape.
    name: Option<Arc<str>>,
    /// Set once further values can show nothing new.
    whole: OnceLock<Arc<DeclaredShape>>,
    latest: Mutex<Latest>,
    /// The length of the last message, if it was so long that its memory is worth keeping for the next; else 0.
    pub(crate) long_message: AtomicUsize,
}

struct Latest {
    declared: Arc<DeclaredShape>,
    alone: usize,
}

/// The shape to declare for a value.
pub(crate) enum Declared<'a> {
    /// That of all values of the type: calls of many threads don't count their references to it.
    Whole(&'a Arc<DeclaredShape>),
    Latest(Arc<DeclaredShape>),
}

impl Deref for Declared<'_> {
    type Target = Arc<DeclaredShape>;

    fn deref(&self) -> &Arc<DeclaredShape> {
        match self {
            Declared::Whole(shape) => shape,
            Declared::Latest(shape) => shape,
        }
    }
}

/// The result of encoding a value.
pub(crate) enum Encoded<'a> {
    As(Declared<'a>),
    /// The value contradicts earlier ones: discard the bytes, and use [`Knowledge::encode_alone`].
    Unlike,
}

impl Knowledge {
    /// For the arguments of a procedure of this name, or, without a name, for results.
    pub(crate) fn new(name: Option<Arc<str>>) -> Knowledge {
        let declared = Arc::new(DeclaredShape { number: 0, shape: Arc::default(), known: KnownShape::nothing() });
        Knowledge {
            name,
            whole: OnceLock::new(),
            latest: Mutex::new(Latest { declared, alone: 0 }),
            long_message: AtomicUsize::new(0),
        }
    }

    /// Encodes a value at the end of `out`.
    pub(crate) fn encode<T: Serialize + ?Sized>(
        &self,
        value: &T,
        out: &mut Vec<u8>,
        numbers: &DeclarationNumbers,
    ) -> Result<Encoded<'_>, EncodeError> {
        let before = self.whole.get().map_or_else(|| Declared::Latest(self.latest.lock().declared.clone()), Declared::Whole);
        Ok(match encoder::encode(value, out, &before.known)? {
            Seen::Nothing => Encoded::As(before),
            Seen::More(known) => Encoded::As(Declared::Latest(self.learn(known, &before, numbers))),
            Seen::Otherwise => Encoded::Unlike,
        })
    }

    /// Stores an extended shape. If another thread has stored one meanwhile, this value is declared by its own, and the next
    /// value starts from the stored one.
    #[cold]
    fn learn(&self, mut known: KnownShape, before: &Arc<DeclaredShape>, numbers: &DeclarationNumbers) -> Arc<DeclaredShape> {
        known.finish();
        let complete = known.is_complete();
        let shape: Arc<[u8]> = known.encode().into();
        let declared = Arc::new(DeclaredShape { number: numbers.of(&self.name, &shape), shape, known });
        let mut latest = self.latest.lock();
        if Arc::ptr_eq(&latest.declared, before) {
            latest.declared = declared.clone();
            if complete {
                let _ = self.whole.set(declared.clone());
            }
        }
        declared
    }

    /// Encodes a value that contradicts earlier ones at the end of `out`. The declared shape is that of these bytes, since a
    /// `Serialize` impl may write something else each time.
    #[cold]
    pub(crate) fn encode_alone<T: Serialize + ?Sized>(
        &self,
        value: &T,
        out: &mut Vec<u8>,
        numbers: &DeclarationNumbers,
    ) -> Result<Arc<DeclaredShape>, EncodeError> {
        let known = encoder::encode_alone(value, out)?;
        let shape: Arc<[u8]> = known.encode().into();
        let number = numbers.given_to(&self.name, &shape).unwrap_or_else(|| {
            let is_one_more = {
                let mut latest = self.latest.lock();
                latest.alone += 1;
                latest.alone <= MAX_ALONE
            };
            if is_one_more { numbers.of(&self.name, &shape) } else { 0 }
        });
        Ok(Arc::new(DeclaredShape { number, shape, known }))
    }
}

/// Which receivers have accepted a declaration.
#[derive(Debug, Default)]
pub(crate) struct Verdicts {
    /// The receiver that was added last, and the earlier ones.
    last: AtomicU64,
    others: Mutex<Vec<u64>>,
    /// Whether long messages of the declaration are taken over: one of the `LISTS_` values.
    lists: AtomicU8,
}

/// No long message has arrived yet.
const LISTS_UNKNOWN: u8 = 0;
/// The receivers own what they decode, and none has left a list's memory behind.
const LISTS_TAKEN: u8 = 1;
/// One has.
const LISTS_COPIED: u8 = 2;

/// Maximum number of receivers that are stored; further ones compare each time.
const MAX_VERDICTS: usize = 16;

impl Verdicts {
    #[inline]
    fn has(&self, receiver: u64) -> bool {
        self.last.load(Ordering::Relaxed) == receiver || self.has_kept(receiver)
    }

    #[cold]
    fn has_kept(&self, receiver: u64) -> bool {
        let kept = self.others.lock().contains(&receiver);
        if kept {
            self.last.store(receiver, Ordering::Relaxed);
        }
        kept
    }

    /// Whether the next long message, if it ends with a list or text, should arrive in memory that a value can take over.
    pub(crate) fn takes_lists(&self) -> bool {
        self.lists.load(Ordering::Relaxed) == LISTS_TAKEN
    }

    /// A long message that has arrived in one piece was decoded to a value that owns what it has: the next may be taken over.
    pub(crate) fn note_long(&self) {
        let _ = self.lists.compare_exchange(LISTS_UNKNOWN, LISTS_TAKEN, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A list's memory was not taken over.
    pub(crate) fn note_copied(&self) {
        self.lists.store(LISTS_COPIED, Ordering::Relaxed);
    }

    fn add(&self, receiver: u64) {
        let mut others = self.others.lock();
        if others.len() >= MAX_VERDICTS {
            others.swap_remove(receiver as usize % MAX_VERDICTS);
        }
        others.push(receiver);
        self.last.store(receiver, Ordering::Relaxed);
    }
}

/// The receiver of values of one type: a registration, or the results of a procedure.
pub(crate) struct Receiver {
    /// Unique in the process.
    number: u64,
    shape: OnceLock<Shape>,
}

/// The receivers of the results of a procedure: nearly always one. Two types may have the same name, so they are distinguished
/// by the address of their code.
#[derive(Default)]
pub(crate) struct Receivers {
    first: OnceLock<(usize, Receiver)>,
    others: Mutex<Vec<Arc<(usize, Receiver)>>>,
}

impl Receivers {
    /// As [`Receiver::check`].
    #[inline]
    pub(crate) fn check(&self, verdicts: &Verdicts, shape: &[u8], of_type: fn() -> Shape) -> Result<(), Mismatch> {
        let code = of_type as usize;
        let (first, receiver) = self.first.get_or_init(|| (code, Receiver::new()));
        if *first == code { receiver.check(verdicts, shape, of_type) } else { self.other(code).1.check(verdicts, shape, of_type) }
    }

    #[cold]
    fn other(&self, code: usize) -> Arc<(usize, Receiver)> {
        let mut others = self.others.lock();
        if let Some(other) = others.iter().find(|other| other.0 == code) {
            return other.clone();
        }
        let other = Arc::new((code, Receiver::new()));
        others.push(other.clone());
        other
    }
}

/// The two shapes of a mismatch, for the error.
pub(crate) struct Mismatch {
    pub expected: String,
    pub found: String,
}

impl Receiver {
    pub(crate) fn new() -> Receiver {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Receiver { number: NEXT.fetch_add(1, Ordering::Relaxed), shape: OnceLock::new() }
    }

    /// Whether values that are declared as `shape` may be decoded here. Shapes are compared once for each declaration.
    #[inline]
    pub(crate) fn check(&self, verdicts: &Verdicts, shape: &[u8], of_type: fn() -> Shape) -> Result<(), Mismatch> {
        if verdicts.has(self.number) { Ok(()) } else { self.compare(verdicts, shape, of_type) }
    }

    #[cold]
    fn compare(&self, verdicts: &Verdicts, shape: &[u8], of_type: fn() -> Shape) -> Result<(), Mismatch> {
        let expected = self.shape.get_or_init(of_type);
        let found = Shape::decode(shape);
        if found.as_ref().is_some_and(|found| expected.accepts(found)) {
            verdicts.add(self.number);
            return Ok(());
        }
        let found = found.map_or_else(|| "nothing readable".to_owned(), |found| found.to_string());
        Err(Mismatch { expected: expected.to_string(), found })
    }
}
