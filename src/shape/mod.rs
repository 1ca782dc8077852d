//! Shapes: the structure of types, by which both sides of a call compare theirs. `README.md`, in this folder, explains how.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | the shape of a type or of values as a tree, and which values fit which type |
//! | `encoder.rs` | encodes values, and records what they show of their type |
//! | `elements.rs` | encodes elements of lists that show nothing new |
//! | `plain.rs` | lists of numbers, points and keys, and arrays, as a whole |
//! | `numbers.rs` | numbers on the wire |
//! | `encode_error.rs` | why values can't be encoded |
//! | `known.rs` | what values have shown so far |
//! | `of_type.rs` | a `Deserializer` that synthesizes values, run many times: the shape of a receiver's type |
//! | `graph.rs` | what those runs have learned so far, and what the next one should try |
//! | `knowledge.rs` | the numbers of declarations, and which receivers have accepted them |
//! | `trailing.rs` | the long list that an encoded value ends with |
//! | `wire.rs` | the encoding of shapes, decoded from untrusted peers |
//! | `display.rs` | shapes in error messages |

mod display;
mod elements;
mod encode_error;
mod encoder;
mod graph;
mod knowledge;
mod known;
mod numbers;
mod of_type;
mod plain;
#[cfg(all(test, not(few_tests)))]
// The tests trace these types and read none of the values.
#[allow(dead_code)]
#[path = "../../tests/unit/shape.rs"]
mod tests;
mod trailing;
mod wire;

use std::borrow::Cow;

use std::collections::HashSet;

use serde::Deserialize;

use crate::text::clipped;

pub(crate) use knowledge::{DeclarationNumbers, Declared, Encoded, Knowledge, Mismatch, Receiver, Receivers, Verdicts};
pub(crate) use numbers::{decode_number, unzigzag};
pub(crate) use plain::{InPlace, PlainDecoder, decode_array, decoder as plain_decoder, is_plain_array, stateless_seed};
pub(crate) use trailing::trailing_list;

/// Deeper parts are unknown. Also bounds the recursion of everything that walks a shape.
const MAX_DEPTH: usize = 32;

/// Shapes have at most this many nodes; what would go beyond is unknown. Real argument types have some dozens.
const MAX_NODES: usize = 1024;

/// Longest name of a field, variant or type, in bytes. Longer ones are cut, the same way on both sides.
const MAX_NAME: usize = 128;

/// Maximum number of pairs of nodes that one [`Shape::accepts`] compares. An honest pair needs at most [`MAX_NODES`]; a peer
/// may craft runs within runs that a recursive tuple at the receiver would unfold exponentially.
const MAX_COMPARISONS: usize = 64 * MAX_NODES;

/// Deepest nesting of a comparison: a few times around a recursive type, which the two sides may enter at different places.
const MAX_COMPARED_DEPTH: usize = 8 * MAX_DEPTH;

/// An unknown name, which matches any.
const ANY_NAME: &str = "?";

/// A name of a field, a variant or a type: static where it comes from serde, owned where it came from a peer. In the
/// shape of a type it may list alternatives with `|` between them (`#[serde(alias)]`).
type Name = Cow<'static, str>;

/// What a value looks like on the wire, and what its parts mean.
///
/// Newtype structs are transparent, unit structs are `()`, tuple structs are tuples and arrays are tuples too: that is how
/// postcard writes them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Shape {
    /// Not known: there was no value (an empty `Vec`, `None`), the type needs a self-describing format (`deserialize_any`),
    /// tracing failed, or a limit was reached.
    Unknown,
    /// The elements of one list have different shapes (an untagged enum): a type of known shape can't read all of them.
    Mixed,
    /// A type without parts.
    Leaf(Leaf),
    Option(Box<Shape>),
    Seq(Box<Shape>),
    /// Keys and values.
    Map(Box<(Shape, Shape)>),
    /// Runs of equal elements, so that `[u8; 32]` is one run.
    Tuple(Vec<Run>),
    /// The name is for messages only; client and server may call the type differently.
    Struct(Name, Vec<Field>),
    /// The name is for messages only. A type has all its variants, a value those that were seen; in ascending order of their
    /// indices.
    Enum(Name, Vec<Variant>),
    /// A recursive type: the node so many levels above (1 is the parent).
    Up(u8),
}

macro_rules! leaves {
    ($($leaf:ident $text:literal,)*) => {
        /// A shape without parts.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Leaf {
            $($leaf,)*
        }

        impl Leaf {
            /// By their tags on the wire.
            const ALL: &[Leaf] = &[$(Leaf::$leaf),*];

            fn text(self) -> &'static str {
                match self {
                    $(Leaf::$leaf => $text,)*
                }
            }
        }
    };
}

// New ones come at the end, as the order is that of the tags on the wire.
leaves! {
    Bool "bool", I8 "i8", I16 "i16", I32 "i32", I64 "i64", I128 "i128", U8 "u8", U16 "u16", U32 "u32", U64 "u64", U128 "u128",
    F32 "f32", F64 "f64", Char "char", Str "str", Bytes "bytes", Unit "()",
}

/// A run of elements of a tuple, all of one shape.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    count: u32,
    shape: Shape,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Field {
    name: Name,
    shape: Shape,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Variant {
    index: u32,
    name: Name,
    /// `()` for a unit variant, the content itself for a newtype variant, else a tuple or a struct.
    content: Shape,
}

impl Shape {
    /// The shape of a type, found by having its `Deserialize` read synthetic values. Takes microseconds to a few
    /// milliseconds, so callers keep the result.
    pub(crate) fn of_type<'de, T: Deserialize<'de>>() -> Shape {
        of_type::trace::<T>()
    }

    /// The shape that one value shows by itself.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of_value<T: serde::Serialize + ?Sized>(value: &T) -> Shape {
        let known = encoder::encode_alone(value, &mut Vec::new()).expect("the value can be encoded");
        Shape::decode(&known.encode()).expect("what is known keeps to the limits")
    }

    /// Whether a receiver whose type has this shape may decode a value of that shape.
    pub(crate) fn accepts(&self, value: &Shape) -> bool {
        let mut comparison = Comparison { left: MAX_COMPARISONS, deeper: MAX_COMPARED_DEPTH, assumed: HashSet::new() };
        comparison.fits(&Ancestor { shape: self, up: None }, &Ancestor { shape: value, up: None })
    }

    /// Number of nodes in the tree.
    #[cfg(test)]
    fn nodes(&self) -> usize {
        1 + match self {
            Shape::Unknown | Shape::Mixed | Shape::Leaf(_) | Shape::Up(_) => 0,
            Shape::Option(inner) | Shape::Seq(inner) => inner.nodes(),
            Shape::Map(parts) => parts.0.nodes() + parts.1.nodes(),
            Shape::Tuple(runs) => runs.iter().map(|run| run.shape.nodes()).sum(),
            Shape::Struct(_, fields) => fields.iter().map(|field| field.shape.nodes()).sum(),
            Shape::Enum(_, variants) => variants.iter().map(|variant| variant.content.nodes()).sum(),
        }
    }
}

/// A node together with the way to it from the root, for [`Shape::Up`].
struct Ancestor<'a> {
    shape: &'a Shape,
    up: Option<&'a Ancestor<'a>>,
}

impl<'a> Ancestor<'a> {
    fn below(&'a self, shape: &'a Shape) -> Ancestor<'a> {
        Ancestor { shape, up: Some(self) }
    }

    fn ancestor(&'a self, levels: u8) -> Option<&'a Ancestor<'a>> {
        (0..levels).try_fold(self, |frame, _| frame.up)
    }
}

/// A comparison of a type with values, in progress.
struct Comparison {
    left: usize,
    deeper: usize,
    /// Pairs of ancestors that are being compared, where a recursive type has led to: they fit if everything else does.
    assumed: HashSet<(*const Shape, *const Shape)>,
}

impl Comparison {
    /// Whether `value` fits the type at `ty`.
    fn fits(&mut self, ty: &Ancestor<'_>, value: &Ancestor<'_>) -> bool {
        let (Some(left), Some(deeper)) = (self.left.checked_sub(1), self.deeper.checked_sub(1)) else {
            return false;
        };
        (self.left, self.deeper) = (left, deeper);
        let fits = self.fits_here(ty, value);
        self.deeper += 1;
        fits
    }

    fn fits_here(&mut self, ty: &Ancestor<'_>, value: &Ancestor<'_>) -> bool {
        let mut parts = |a: &Shape, b: &Shape| self.fits(&ty.below(a), &value.below(b));
        match (ty.shape, value.shape) {
            (Shape::Unknown, _) | (_, Shape::Unknown) => true,
            (Shape::Up(levels), _) => ty.ancestor(*levels).is_none_or(|target| self.fits(target, value)),
            (_, Shape::Up(levels)) => value
                .ancestor(*levels)
                .is_none_or(|target| !self.assumed.insert((ty.shape, target.shape)) || self.fits(ty, target)),
            (Shape::Leaf(a), Shape::Leaf(b)) => a == b,
            // Both have the same layout, and `&[u8]` is written as a sequence but read as bytes.
            (Shape::Leaf(Leaf::Bytes), Shape::Seq(element)) | (Shape::Seq(element), Shape::Leaf(Leaf::Bytes)) => {
                matches!(**element, Shape::Unknown | Shape::Leaf(Leaf::U8))
            }
            (Shape::Option(a), Shape::Option(b)) | (Shape::Seq(a), Shape::Seq(b)) => parts(a, b),
            (Shape::Map(a), Shape::Map(b)) => parts(&a.0, &b.0) && parts(&a.1, &b.1),
            (Shape::Tuple(a), Shape::Tuple(b)) => overlaps(a, b).is_some_and(|pairs| pairs.into_iter().all(|(a, b)| parts(a, b))),
            (Shape::Struct(_, a), Shape::Struct(_, b)) => {
                a.len() >= b.len()
                    // Whether these exist is not known either.
                    && a[b.len()..].iter().all(|field| field.name == ANY_NAME && field.shape == Shape::Unknown)
                    && a.iter().zip(b).all(|(a, b)| name_fits(&a.name, &b.name) && parts(&a.shape, &b.shape))
            }
            (Shape::Enum(_, a), Shape::Enum(_, b)) => {
                let mut common = b.iter().filter_map(|b| {
                    let at = a.binary_search_by_key(&b.index, |a| a.index).ok()?;
                    Some((&a[at], b))
                });
                let mut any = false;
                let fit = common.all(|(a, b)| {
                    any = true;
                    name_fits(&a.name, &b.name) && parts(&a.content, &b.content)
                });
                // A value of a variant that the type does not have is refused when it is decoded; the others can pass.
                fit && (any || b.is_empty())
            }
            _ => false,
        }
    }
}

/// Whether one of the alternatives of `ty` is one of `value`'s.
fn name_fits(ty: &str, value: &str) -> bool {
    ty == value || ty == ANY_NAME || ty.split('|').any(|a| value.split('|').any(|b| a == b))
}

/// The shapes of the ranges over which both tuples have one run; `None` when their lengths differ.
fn overlaps<'a>(a: &'a [Run], b: &'a [Run]) -> Option<Vec<(&'a Shape, &'a Shape)>> {
    let length = |runs: &[Run]| runs.iter().map(|run| u64::from(run.count)).sum::<u64>();
    if length(a) != length(b) {
        return None;
    }
    let mut pairs = Vec::with_capacity(a.len().max(b.len()));
    let (mut a, mut b) = (a.iter(), b.iter());
    let (mut run_a, mut run_b) = (a.next(), b.next());
    let (mut used_a, mut used_b) = (0, 0);
    while let (Some(left), Some(right)) = (run_a, run_b) {
        let count = (left.count - used_a).min(right.count - used_b);
        pairs.push((&left.shape, &right.shape));
        (used_a, used_b) = (used_a + count, used_b + count);
        if used_a == left.count {
            (run_a, used_a) = (a.next(), 0);
        }
        if used_b == right.count {
            (run_b, used_b) = (b.next(), 0);
        }
    }
    Some(pairs)
}

/// Appends elements to a tuple; `true` if they joined the last run, and no node was added.
fn push_run(runs: &mut Vec<Run>, count: u32, shape: Shape) -> bool {
    match runs.last_mut() {
        Some(last) if last.shape == shape => {
            last.count = last.count.saturating_add(count);
            true
        }
        _ => {
            runs.push(Run { count, shape });
            false
        }
    }
}

/// A name from serde, cut to what a shape may hold.
fn name(full: &'static str) -> Name {
    Cow::Borrowed(clipped(full, MAX_NAME))
}
