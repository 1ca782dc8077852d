//! The shape of a value: a `Serializer` that writes nothing and notes what it is told.

mod merge;
mod parts;

use std::fmt::{self, Display};

use serde::ser::{self, Serialize, Serializer};

use parts::{MapTracer, SeqTracer, StructTracer, TupleTracer};

use super::{Leaf, MAX_DEPTH, MAX_NODES, Shape, Variant, name};

pub(super) fn trace<T: Serialize + ?Sized>(value: &T) -> Shape {
    let mut work = Work { nodes_left: MAX_NODES - 1, steps: 0 };
    part(value, &mut work, 0)
}

/// What one value may still cost.
struct Work {
    /// Every node is paid for by its parent, before anything is known about it.
    nodes_left: usize,
    steps: usize,
}

impl Work {
    fn pay(&mut self, nodes: usize) -> Result<(), Halt> {
        self.nodes_left = self.nodes_left.checked_sub(nodes).ok_or_else(Halt::nothing_known)?;
        Ok(())
    }
}

/// Why a `Serialize` was made to stop, or stopped.
#[derive(Debug)]
enum Halt {
    /// Enough was seen: this is its shape. Not a failure.
    Enough(Box<Shape>),
    /// The `Serialize` itself failed.
    Failed,
}

impl Halt {
    fn nothing_known() -> Halt {
        Halt::Enough(Box::new(Shape::Unknown))
    }
}

impl Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the shape of the value is traced no further")
    }
}

impl std::error::Error for Halt {}

impl ser::Error for Halt {
    fn custom<T: Display>(_: T) -> Self {
        Halt::Failed
    }
}

/// The shape of a part that stands `depth` levels below the root.
fn part<T: Serialize + ?Sized>(value: &T, work: &mut Work, depth: usize) -> Shape {
    work.steps += 1;
    if depth >= MAX_DEPTH {
        return Shape::Unknown;
    }
    let left = work.nodes_left;
    let shape = match value.serialize(Tracer { work, depth }) {
        Ok(shape) => shape,
        Err(Halt::Enough(shape)) => *shape,
        Err(Halt::Failed) => Shape::Unknown,
    };
    if shape == Shape::Unknown {
        // What was paid for its parts is free for others.
        work.nodes_left = left;
    }
    shape
}

struct Tracer<'a> {
    work: &'a mut Work,
    depth: usize,
}

impl Tracer<'_> {
    /// A part of this one, which has been paid for.
    fn part<T: Serialize + ?Sized>(&mut self, value: &T) -> Shape {
        part(value, self.work, self.depth + 1)
    }
}

/// The enum variant that some content belongs to, if it does.
struct Within(Option<(&'static str, u32, &'static str)>);

impl Within {
    fn wrap(&self, content: Shape) -> Shape {
        match self.0 {
            None => content,
            Some((enumeration, index, variant)) => {
                Shape::Enum(name(enumeration), vec![Variant { index, name: name(variant), content }])
            }
        }
    }
}

macro_rules! leaves {
    ($($method:ident($type:ty) $leaf:ident;)*) => {
        $(fn $method(self, _: $type) -> Result<Shape, Halt> {
            Ok(Shape::Leaf(Leaf::$leaf))
        })*
    };
}

impl<'a> Serializer for Tracer<'a> {
    type Ok = Shape;
    type Error = Halt;
    type SerializeSeq = SeqTracer<'a>;
    type SerializeTuple = TupleTracer<'a>;
    type SerializeTupleStruct = TupleTracer<'a>;
    type SerializeTupleVariant = TupleTracer<'a>;
    type SerializeMap = MapTracer<'a>;
    type SerializeStruct = StructTracer<'a>;
    type SerializeStructVariant = StructTracer<'a>;

    leaves! {
        serialize_bool(bool) Bool;
        serialize_i8(i8) I8;
        serialize_i16(i16) I16;
        serialize_i32(i32) I32;
        serialize_i64(i64) I64;
        serialize_i128(i128) I128;
        serialize_u8(u8) U8;
        serialize_u16(u16) U16;
        serialize_u32(u32) U32;
        serialize_u64(u64) U64;
        serialize_u128(u128) U128;
        serialize_f32(f32) F32;
        serialize_f64(f64) F64;
        serialize_char(char) Char;
        serialize_str(&str) Str;
        serialize_bytes(&[u8]) Bytes;
        serialize_unit_struct(&'static str) Unit;
    }

    fn serialize_unit(self) -> Result<Shape, Halt> {
        Ok(Shape::Leaf(Leaf::Unit))
    }

    fn serialize_none(self) -> Result<Shape, Halt> {
        self.work.pay(1)?;
        Ok(Shape::Option(Box::new(Shape::Unknown)))
    }

    fn serialize_some<T: Serialize + ?Sized>(mut self, value: &T) -> Result<Shape, Halt> {
        self.work.pay(1)?;
        Ok(Shape::Option(Box::new(self.part(value))))
    }

    fn serialize_unit_variant(self, name: &'static str, index: u32, variant: &'static str) -> Result<Shape, Halt> {
        self.work.pay(1)?;
        Ok(Within(Some((name, index, variant))).wrap(Shape::Leaf(Leaf::Unit)))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _name: &'static str, value: &T) -> Result<Shape, Halt> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        mut self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<Shape, Halt> {
        self.work.pay(1)?;
        Ok(Within(Some((name, index, variant))).wrap(self.part(value)))
    }

    fn serialize_seq(self, _len: Option<usize>) -> Result<SeqTracer<'a>, Halt> {
        self.work.pay(1)?;
        Ok(SeqTracer { tracer: self, seen: 0, element: Shape::Unknown })
    }

    fn serialize_tuple(self, len: usize) -> Result<TupleTracer<'a>, Halt> {
        TupleTracer::start(self, Within(None), len)
    }

    fn serialize_tuple_struct(self, _name: &'static str, len: usize) -> Result<TupleTracer<'a>, Halt> {
        TupleTracer::start(self, Within(None), len)
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<TupleTracer<'a>, Halt> {
        let (tracer, within) = enter_variant(self, name, index, variant)?;
        TupleTracer::start(tracer, within, len)
    }

    fn serialize_map(self, _len: Option<usize>) -> Result<MapTracer<'a>, Halt> {
        self.work.pay(2)?;
        Ok(MapTracer { tracer: self, seen: 0, parts: Box::new((Shape::Unknown, Shape::Unknown)) })
    }

    fn serialize_struct(self, name: &'static str, _len: usize) -> Result<StructTracer<'a>, Halt> {
        Ok(StructTracer { tracer: self, within: Within(None), name, fields: Vec::new() })
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<StructTracer<'a>, Halt> {
        let (tracer, within) = enter_variant(self, name, index, variant)?;
        Ok(StructTracer { tracer, within, name: "", fields: Vec::new() })
    }

    /// The default would format the value.
    fn collect_str<T: Display + ?Sized>(self, _value: &T) -> Result<Shape, Halt> {
        Ok(Shape::Leaf(Leaf::Str))
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

/// Goes down to the content of a variant, which has parts of its own.
fn enter_variant<'a>(
    mut tracer: Tracer<'a>,
    name: &'static str,
    index: u32,
    variant: &'static str,
) -> Result<(Tracer<'a>, Within), Halt> {
    tracer.work.pay(1)?;
    tracer.depth += 1;
    let within = Within(Some((name, index, variant)));
    if tracer.depth >= MAX_DEPTH {
        return Err(Halt::Enough(Box::new(within.wrap(Shape::Unknown))));
    }
    Ok((tracer, within))
}
