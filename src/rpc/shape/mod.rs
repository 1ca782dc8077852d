//! The shape of a value or of a type, as postcard lays it out.
//!
//! postcard writes no types: a receiver whose type differs from the sender's decodes garbage, or something that looks
//! right. So the sender states the shape of the value ([`Shape::of_value`], from running its `Serialize`), and the
//! receiver compares it with the shape of its own type ([`Shape::of_type`], from running its `Deserialize`). What
//! cannot be told is [`Shape::Unknown`] and matches anything: a shape may miss a difference, but a call whose two
//! types agree is not refused. The exceptions are types that do not write what they read: names given apart with
//! `rename(serialize = .., deserialize = ..)`, variants that only `#[serde(other)]` catches, and a hand-written
//! `Deserialize` that takes another way on values which none of the made-up ones resembles.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | the tree, and which value fits which type |
//! | `of_value.rs` | a `Serializer` that notes what it is told |
//! | `of_type.rs` | a `Deserializer` that makes values up, driven many times |
//! | `graph.rs` | what those runs have found out so far, and what the next one should try |
//! | `wire.rs` | shapes as bytes, from peers that nobody trusts |
//! | `display.rs` | shapes in error messages |

mod display;
mod graph;
mod of_type;
mod of_value;
#[cfg(test)]
// The types of these tests are traced; nobody reads the values.
#[allow(dead_code)]
mod tests;
mod wire;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Deeper parts are unknown. Also bounds the recursion of everything that walks a shape.
const MAX_DEPTH: usize = 32;

/// Shapes have at most this many nodes; what would go beyond is unknown. Real argument types have some dozens.
const MAX_NODES: usize = 1024;

/// Longest name of a field, variant or type, in bytes. Longer ones are cut, the same way on both sides.
const MAX_NAME: usize = 128;

/// Most pairs of nodes that one [`Shape::accepts`] compares. An honest pair needs at most [`MAX_NODES`]; a peer may
/// craft runs within runs that a recursive tuple at the receiver would unfold exponentially.
const MAX_COMPARISONS: usize = 64 * MAX_NODES;

/// Stands for a name that is not known, and matches any.
const ANY_NAME: &str = "?";

/// A name of a field, a variant or a type: static where it comes from serde, owned where it came from a peer. In the
/// shape of a type it may list alternatives with `|` between them (`#[serde(alias)]`).
type Name = Cow<'static, str>;

/// What a value looks like on the wire, and what its parts mean.
///
/// Newtype structs are transparent, unit structs are `()`, tuple structs are tuples and arrays are tuples too: that
/// is how postcard writes them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Shape {
    /// Not known: nothing was there to look at (an empty `Vec`, `None`), the type does not say (`deserialize_any`),
    /// tracing failed, or a limit was reached.
    Unknown,
    /// Something without parts.
    Leaf(Leaf),
    Option(Box<Shape>),
    Seq(Box<Shape>),
    /// Keys and values.
    Map(Box<(Shape, Shape)>),
    /// Equal neighbours stand together, so that `[u8; 32]` is one run.
    Tuple(Vec<Run>),
    /// The name is for messages only; client and server may call the type differently.
    Struct(Name, Vec<Field>),
    /// The name is for messages only. A type has all its variants, a value those that were seen; in ascending order
    /// of their indices.
    Enum(Name, Vec<Variant>),
    /// A recursive type: the node so many levels above (1 is the parent).
    Up(u8),
}

/// A shape without parts. The order is that of the tags on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Leaf {
    Bool,
    I8,
    I16,
    I32,
    I64,
    I128,
    U8,
    U16,
    U32,
    U64,
    U128,
    F32,
    F64,
    Char,
    Str,
    Bytes,
    Unit,
}

/// So many neighbouring elements of a tuple, all of one shape.
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
    /// The shape of a type, found by having its `Deserialize` read made-up values. Costs microseconds to a few
    /// milliseconds, whatever the type; worth keeping.
    pub(crate) fn of_type<'de, T: Deserialize<'de>>() -> Shape {
        of_type::trace::<T>()
    }

    /// The shape of one value. Looks at one element of a sequence where that one tells everything, at a few where it
    /// does not, so that large values cost little.
    pub(crate) fn of_value<T: Serialize + ?Sized>(value: &T) -> Shape {
        of_value::trace(value)
    }

    /// Whether every other value of the same Rust type has this shape too, or one that is accepted wherever this one
    /// is: then it need not be looked at again.
    ///
    /// A `Some` with a complete inside is complete, for the `None` of the same type matches whatever that matches.
    /// Untagged and internally tagged enums, `skip_serializing_if` and `dyn` values deceive this: they write different
    /// shapes without saying so.
    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Shape::Unknown | Shape::Enum(..) | Shape::Up(_) => false,
            Shape::Leaf(_) => true,
            Shape::Option(inner) | Shape::Seq(inner) => inner.is_complete(),
            Shape::Map(parts) => parts.0.is_complete() && parts.1.is_complete(),
            Shape::Tuple(runs) => runs.iter().all(|run| run.shape.is_complete()),
            Shape::Struct(_, fields) => fields.iter().all(|field| field.shape.is_complete()),
        }
    }

    /// Whether a receiver whose type has this shape may decode a value of that shape.
    pub(crate) fn accepts(&self, value: &Shape) -> bool {
        let mut left = MAX_COMPARISONS;
        fits(&Frame { shape: self, up: None }, value, &mut left)
    }

    /// Number of nodes in the tree.
    fn nodes(&self) -> usize {
        1 + match self {
            Shape::Unknown | Shape::Leaf(_) | Shape::Up(_) => 0,
            Shape::Option(inner) | Shape::Seq(inner) => inner.nodes(),
            Shape::Map(parts) => parts.0.nodes() + parts.1.nodes(),
            Shape::Tuple(runs) => runs.iter().map(|run| run.shape.nodes()).sum(),
            Shape::Struct(_, fields) => fields.iter().map(|field| field.shape.nodes()).sum(),
            Shape::Enum(_, variants) => variants.iter().map(|variant| variant.content.nodes()).sum(),
        }
    }
}

/// A node together with the way to it from the root, for [`Shape::Up`].
struct Frame<'a> {
    shape: &'a Shape,
    up: Option<&'a Frame<'a>>,
}

impl<'a> Frame<'a> {
    fn below(&'a self, shape: &'a Shape) -> Frame<'a> {
        Frame { shape, up: Some(self) }
    }

    fn ancestor(&'a self, levels: u8) -> Option<&'a Frame<'a>> {
        (0..levels).try_fold(self, |frame, _| frame.up)
    }
}

/// Whether `value` fits the type at `ty`. Ends because each step goes down in `value`: `Up` leads to a node that has
/// parts, never to another `Up`.
fn fits(ty: &Frame<'_>, value: &Shape, left: &mut usize) -> bool {
    let Some(remaining) = left.checked_sub(1) else {
        return false;
    };
    *left = remaining;
    match (ty.shape, value) {
        (Shape::Unknown, _) | (_, Shape::Unknown | Shape::Up(_)) => true,
        (Shape::Up(levels), _) => ty.ancestor(*levels).is_none_or(|target| fits(target, value, left)),
        (Shape::Leaf(a), Shape::Leaf(b)) => a == b,
        // One layout, and `&[u8]` is written as a sequence but read as bytes.
        (Shape::Leaf(Leaf::Bytes), Shape::Seq(element)) | (Shape::Seq(element), Shape::Leaf(Leaf::Bytes)) => {
            matches!(**element, Shape::Unknown | Shape::Leaf(Leaf::U8))
        }
        (Shape::Option(a), Shape::Option(b)) | (Shape::Seq(a), Shape::Seq(b)) => fits(&ty.below(a), b, left),
        (Shape::Map(a), Shape::Map(b)) => fits(&ty.below(&a.0), &b.0, left) && fits(&ty.below(&a.1), &b.1, left),
        (Shape::Tuple(a), Shape::Tuple(b)) => {
            overlaps(a, b).is_some_and(|pairs| pairs.into_iter().all(|(_, a, b)| fits(&ty.below(a), b, left)))
        }
        (Shape::Struct(_, a), Shape::Struct(_, b)) => {
            a.len() >= b.len()
                // Whether these are there at all is not known either.
                && a[b.len()..].iter().all(|field| field.name == ANY_NAME && field.shape == Shape::Unknown)
                && a.iter().zip(b).all(|(a, b)| {
                    name_fits(&a.name, &b.name) && fits(&ty.below(&a.shape), &b.shape, left)
                })
        }
        (Shape::Enum(_, a), Shape::Enum(_, b)) => b.iter().all(|b| {
            a.binary_search_by_key(&b.index, |a| a.index)
                .is_ok_and(|at| name_fits(&a[at].name, &b.name) && fits(&ty.below(&a[at].content), &b.content, left))
        }),
        _ => false,
    }
}

/// Whether one of the alternatives of `ty` is one of `value`'s.
fn name_fits(ty: &str, value: &str) -> bool {
    ty == value || ty == ANY_NAME || ty.split('|').any(|a| value.split('|').any(|b| a == b))
}

/// The stretches over which two tuples both keep their shape; `None` when their lengths differ.
fn overlaps<'a>(a: &'a [Run], b: &'a [Run]) -> Option<Vec<(u32, &'a Shape, &'a Shape)>> {
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
        pairs.push((count, &left.shape, &right.shape));
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
    Cow::Borrowed(&full[..full.floor_char_boundary(MAX_NAME)])
}
