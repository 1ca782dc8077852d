//! The shape of a value: a `Serializer` that writes nothing and notes what it is told.

use std::fmt::{self, Display};

use serde::ser::{self, Serialize, Serializer};

use super::merge::merge;
use super::{Field, Leaf, MAX_DEPTH, MAX_NODES, Run, Shape, Variant, name, push_run};

/// Elements of a sequence, or entries of a map, looked at when the first does not tell everything.
const MAX_SAMPLES: usize = 32;

/// Once a value has taken so many steps, its sequences are judged by one element each: sequences
/// within sequences would multiply.
const MAX_SAMPLING_STEPS: usize = 2048;

/// Elements of a tuple looked at. Tuples are short; what is longer is an array, with more of the
/// same.
const MAX_ELEMENTS: usize = 1024;

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

/// Looks at one more element of a sequence, whose elements so far look like `known`. `false` if
/// they have nothing in common, so that looking further is useless.
fn sample<T: Serialize + ?Sized>(known: &mut Shape, value: &T, work: &mut Work, depth: usize) -> bool {
    let before = known.nodes();
    let budget = work.nodes_left + before;
    let seen = part(value, work, depth);
    let merged = merge(std::mem::replace(known, Shape::Unknown), seen);
    match merged.and_then(|shape| Some((budget.checked_sub(shape.nodes())?, shape))) {
        Some((left, shape)) => {
            work.nodes_left = left;
            *known = shape;
            true
        }
        None => {
            work.nodes_left = budget - 1;
            false
        }
    }
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

struct SeqTracer<'a> {
    tracer: Tracer<'a>,
    seen: usize,
    element: Shape,
}

impl ser::SerializeSeq for SeqTracer<'_> {
    type Ok = Shape;
    type Error = Halt;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Halt> {
        let Tracer { work, depth } = &mut self.tracer;
        let alike = sample(&mut self.element, value, work, *depth + 1);
        self.seen += 1;
        if alike && !self.element.is_complete() && self.seen < MAX_SAMPLES && work.steps < MAX_SAMPLING_STEPS {
            return Ok(());
        }
        let element = std::mem::replace(&mut self.element, Shape::Unknown);
        Err(Halt::Enough(Box::new(Shape::Seq(Box::new(element)))))
    }

    fn end(self) -> Result<Shape, Halt> {
        Ok(Shape::Seq(Box::new(self.element)))
    }
}

struct MapTracer<'a> {
    tracer: Tracer<'a>,
    seen: usize,
    parts: Box<(Shape, Shape)>,
}

impl MapTracer<'_> {
    fn enough(&mut self) -> Halt {
        let parts = std::mem::replace(&mut *self.parts, (Shape::Unknown, Shape::Unknown));
        Halt::Enough(Box::new(Shape::Map(Box::new(parts))))
    }
}

impl ser::SerializeMap for MapTracer<'_> {
    type Ok = Shape;
    type Error = Halt;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Halt> {
        let Tracer { work, depth } = &mut self.tracer;
        if sample(&mut self.parts.0, key, work, *depth + 1) { Ok(()) } else { Err(self.enough()) }
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Halt> {
        let Tracer { work, depth } = &mut self.tracer;
        let alike = sample(&mut self.parts.1, value, work, *depth + 1);
        self.seen += 1;
        if alike
            && !(self.parts.0.is_complete() && self.parts.1.is_complete())
            && self.seen < MAX_SAMPLES
            && work.steps < MAX_SAMPLING_STEPS
        {
            return Ok(());
        }
        Err(self.enough())
    }

    fn end(self) -> Result<Shape, Halt> {
        Ok(Shape::Map(self.parts))
    }
}

struct TupleTracer<'a> {
    tracer: Tracer<'a>,
    within: Within,
    len: usize,
    seen: usize,
    runs: Vec<Run>,
}

impl<'a> TupleTracer<'a> {
    fn start(tracer: Tracer<'a>, within: Within, len: usize) -> Result<Self, Halt> {
        // For the run of those that are not looked at.
        match tracer.work.pay(1) {
            Ok(()) => Ok(TupleTracer { tracer, within, len, seen: 0, runs: Vec::new() }),
            Err(_) => Err(Halt::Enough(Box::new(within.wrap(Shape::Unknown)))),
        }
    }

    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Halt> {
        let left = self.tracer.work.nodes_left;
        if self.seen == MAX_ELEMENTS || self.tracer.work.pay(1).is_err() {
            let rest = u32::try_from(self.len.saturating_sub(self.seen)).unwrap_or(u32::MAX).max(1);
            push_run(&mut self.runs, rest, Shape::Unknown);
            let tuple = Shape::Tuple(std::mem::take(&mut self.runs));
            return Err(Halt::Enough(Box::new(self.within.wrap(tuple))));
        }
        self.seen += 1;
        let shape = self.tracer.part(value);
        if push_run(&mut self.runs, 1, shape) {
            self.tracer.work.nodes_left = left;
        }
        Ok(())
    }

    fn finish(self) -> Result<Shape, Halt> {
        Ok(self.within.wrap(Shape::Tuple(self.runs)))
    }
}

struct StructTracer<'a> {
    tracer: Tracer<'a>,
    within: Within,
    name: &'static str,
    fields: Vec<Field>,
}

impl StructTracer<'_> {
    fn field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), Halt> {
        if self.tracer.work.pay(1).is_err() {
            return Err(Halt::Enough(Box::new(self.within.wrap(Shape::Unknown))));
        }
        let shape = self.tracer.part(value);
        self.fields.push(Field { name: name(key), shape });
        Ok(())
    }

    fn finish(self) -> Result<Shape, Halt> {
        Ok(self.within.wrap(Shape::Struct(name(self.name), self.fields)))
    }
}

macro_rules! compounds {
    ($($compound:ident: $tracer:ident $method:ident($($key:ident)?) $helper:ident;)*) => {
        $(impl ser::$compound for $tracer<'_> {
            type Ok = Shape;
            type Error = Halt;

            fn $method<T: Serialize + ?Sized>(&mut self, $($key: &'static str,)? value: &T) -> Result<(), Halt> {
                self.$helper($($key,)? value)
            }

            fn end(self) -> Result<Shape, Halt> {
                self.finish()
            }
        })*
    };
}

compounds! {
    SerializeTuple: TupleTracer serialize_element() element;
    SerializeTupleStruct: TupleTracer serialize_field() element;
    SerializeTupleVariant: TupleTracer serialize_field() element;
    SerializeStruct: StructTracer serialize_field(key) field;
    SerializeStructVariant: StructTracer serialize_field(key) field;
}
