//! Traces the shape of a type: a `Deserializer` that synthesizes values, run repeatedly until the type has shown all its
//! variants.

mod parts;

use std::fmt::{self, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::de::{self, Deserialize, Deserializer, Visitor};

use parts::{TracedChoice, TracedElements, TracedEntries, TracedParts};

use super::graph::{Graph, NodeId, NodeKey, NodeKind, ROOT};
use super::{Leaf, Shape};

/// Synthetic texts. At first one that most types accept which want any text at all, then common formats.
const TEXTS: [&str; 16] = [
    "a",
    "1",
    "",
    "1.0.0",
    "127.0.0.1",
    "2000-01-01T00:00:00Z",
    "2000-01-01",
    "http://a/",
    "00000000-0000-4000-8000-000000000001",
    "2000-01-01T00:00:00",
    "00:00:00",
    "a@a.aa",
    "127.0.0.1:1",
    "10.0.0.0/8",
    "Mon",
    "00",
];

/// Lengths of synthetic byte strings: of anything, and of identifiers, addresses, keys and hashes.
const LENGTHS: [usize; 16] = [1, 0, 16, 32, 4, 8, 20, 64, 12, 24, 6, 2, 33, 48, 28, 3];

const CHARS: [char; 4] = ['a', '1', 'A', ' '];

pub(super) fn trace<'de, T: Deserialize<'de>>() -> Shape {
    let mut graph = Graph::new();
    while graph.begin_run() {
        // The synthetic values may hit an `unwrap` in the type, or in its `Drop`: what is known up to there is the shape.
        let run = catch_unwind(AssertUnwindSafe(|| drop(ask(&mut graph, ROOT, |tracer| T::deserialize(tracer)))));
        if run.is_err() {
            break;
        }
    }
    graph.into_shape()
}

/// A synthetic value was refused, or none could be synthesized. The graph knows more.
#[derive(Debug)]
struct Refused;

impl Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the shape of the type is traced no further on this way")
    }
}

impl std::error::Error for Refused {}

impl de::Error for Refused {
    fn custom<T: Display>(_: T) -> Self {
        Refused
    }
}

/// Has the type at a position read a value.
fn ask<R>(graph: &mut Graph, at: NodeId, read: impl FnOnce(Tracer<'_>) -> Result<R, Refused>) -> Result<R, Refused> {
    let result = read(Tracer { graph: &mut *graph, at });
    graph.judge(at, result.is_ok());
    result
}

struct Tracer<'g> {
    graph: &'g mut Graph,
    at: NodeId,
}

impl Tracer<'_> {
    fn visit<R>(
        self,
        key: Option<NodeKey>,
        kind: NodeKind,
        present: impl FnOnce(&mut Graph, NodeId) -> Result<R, Refused>,
    ) -> Result<R, Refused> {
        let entered = self.graph.enter(self.at, key, kind).ok_or(Refused)?;
        let result = present(self.graph, entered.id);
        self.graph.leave(entered, result.is_ok());
        result
    }

    /// A fixed number of parts, one position each.
    fn visit_parts<'de, V: Visitor<'de>>(
        self,
        key: Option<NodeKey>,
        kind: NodeKind,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.visit(key, kind, |graph, id| {
            let mut parts = TracedParts { graph, id, len, next: 0, is_tuple: matches!(kind, NodeKind::Tuple(_)) };
            let value = visitor.visit_seq(&mut parts)?;
            let asked_for = parts.next;
            graph.asked_for(id, asked_for);
            Ok(value)
        })
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $leaf:ident $type:ty;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
            self.visit(None, NodeKind::Leaf(Leaf::$leaf), |graph, _| visitor.$visit(<$type>::from(graph.number())))
        })*
    };
}

macro_rules! opaque {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Refused> {
            self.visit(None, NodeKind::Opaque, |_, _| Err(Refused))
        })*
    };
}

impl<'de> Deserializer<'de> for Tracer<'_> {
    type Error = Refused;

    numbers! {
        deserialize_i16 visit_i16 I16 i16;
        deserialize_i32 visit_i32 I32 i32;
        deserialize_i64 visit_i64 I64 i64;
        deserialize_i128 visit_i128 I128 i128;
        deserialize_u8 visit_u8 U8 u8;
        deserialize_u16 visit_u16 U16 u16;
        deserialize_u32 visit_u32 U32 u32;
        deserialize_u64 visit_u64 U64 u64;
        deserialize_u128 visit_u128 U128 u128;
        deserialize_f32 visit_f32 F32 f32;
        deserialize_f64 visit_f64 F64 f64;
    }

    // postcard cannot decode these.
    opaque! { deserialize_any deserialize_identifier deserialize_ignored_any }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Leaf(Leaf::Bool), |graph, _| {
            visitor.visit_bool([true, false, false, true][graph.attempt() % 4])
        })
    }

    fn deserialize_i8<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Leaf(Leaf::I8), |graph, _| visitor.visit_i8(graph.number() as i8))
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Leaf(Leaf::Char), |graph, _| visitor.visit_char(CHARS[graph.attempt() % CHARS.len()]))
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Leaf(Leaf::Str), |graph, _| visitor.visit_borrowed_str(TEXTS[graph.attempt() % TEXTS.len()]))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        // Sixty-four of them are a bulk: see `bulk/wire.rs`.
        const BYTES: &[u8] = &[1; 64];
        self.visit(None, NodeKind::Leaf(Leaf::Bytes), |graph, _| {
            visitor.visit_borrowed_bytes(&BYTES[..LENGTHS[graph.attempt() % LENGTHS.len()]])
        })
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.deserialize_bytes(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Option, |graph, id| {
            let inner = graph.child(id, 0).ok_or(Refused)?;
            if graph.choose_some(id, inner) {
                ask(graph, inner, |tracer| visitor.visit_some(tracer))
            } else {
                visitor.visit_none()
            }
        })
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Leaf(Leaf::Unit), |_, _| visitor.visit_unit())
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Result<V::Value, Refused> {
        self.deserialize_unit(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Refused> {
        let key = NodeKey::of::<V, V::Value>(name, &[]);
        let at = self.graph.enter_newtype(self.at, key).ok_or(Refused)?;
        let result = visitor.visit_newtype_struct(Tracer { graph: &mut *self.graph, at });
        self.graph.leave_newtype();
        result
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Seq, |graph, id| {
            let element = graph.child(id, 0).ok_or(Refused)?;
            let left = graph.choose_length(id, &[element]);
            visitor.visit_seq(TracedElements { graph, element, left })
        })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Refused> {
        self.visit_parts(None, NodeKind::Tuple(len), len, visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(self, name: &'static str, len: usize, visitor: V) -> Result<V::Value, Refused> {
        let key = NodeKey::of::<V, V::Value>(name, &[]);
        self.visit_parts(key, NodeKind::Tuple(len), len, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.visit(None, NodeKind::Map, |graph, id| {
            let key = graph.child(id, 0).ok_or(Refused)?;
            let value = graph.child(id, 1).ok_or(Refused)?;
            let left = graph.choose_length(id, &[key, value]);
            visitor.visit_map(TracedEntries { graph, key, value, left })
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        let key = NodeKey::of::<V, V::Value>(name, fields);
        self.visit_parts(key, NodeKind::Struct(name, fields), fields.len(), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        let key = NodeKey::of::<V, V::Value>(name, variants);
        self.visit(key, NodeKind::Enum(name, variants), |graph, id| {
            let (variant, content) = graph.choose_variant(id).ok_or(Refused)?;
            let value = visitor.visit_enum(TracedChoice { graph: &mut *graph, id, variant, content })?;
            graph.variant_works(id, variant);
            Ok(value)
        })
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}
