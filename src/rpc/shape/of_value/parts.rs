//! The parts of a value: elements, entries, fields.

use serde::ser::{self, Serialize};

use super::merge::merge;
use super::{Halt, Tracer, Within, Work, part};
use crate::rpc::shape::{Field, Run, Shape, name, push_run};

/// Elements of a sequence, or entries of a map, looked at when the first does not tell everything.
const MAX_SAMPLES: usize = 32;

/// Once a value has taken so many steps, its sequences are judged by one element each: sequences within sequences
/// would multiply.
const MAX_SAMPLING_STEPS: usize = 2048;

/// Elements of a tuple looked at. Tuples are short; what is longer is an array, with more of the same.
const MAX_ELEMENTS: usize = 1024;

/// Once a value has taken so many steps, the arrays in it are looked at no further: arrays within arrays would multiply.
const MAX_ARRAY_STEPS: usize = 16 * 1024;

/// So many equal neighbours make an array of a tuple. serde's own tuples end here.
const ARRAY: u32 = 16;

pub(super) struct SeqTracer<'a> {
    pub(super) tracer: Tracer<'a>,
    pub(super) seen: usize,
    pub(super) element: Shape,
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

pub(super) struct MapTracer<'a> {
    pub(super) tracer: Tracer<'a>,
    pub(super) seen: usize,
    pub(super) parts: Box<(Shape, Shape)>,
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

pub(super) struct TupleTracer<'a> {
    pub(super) tracer: Tracer<'a>,
    pub(super) within: Within,
    pub(super) len: usize,
    pub(super) seen: usize,
    pub(super) runs: Vec<Run>,
}

impl<'a> TupleTracer<'a> {
    pub(super) fn start(tracer: Tracer<'a>, within: Within, len: usize) -> Result<Self, Halt> {
        // For the run of those that are not looked at.
        match tracer.work.pay(1) {
            Ok(()) => Ok(TupleTracer { tracer, within, len, seen: 0, runs: Vec::new() }),
            Err(_) => Err(Halt::Enough(Box::new(within.wrap(Shape::Unknown)))),
        }
    }

    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Halt> {
        let left = self.tracer.work.nodes_left;
        let is_array = self.runs.last().is_some_and(|run| run.count >= ARRAY);
        if self.seen == MAX_ELEMENTS || (is_array && self.tracer.work.steps > MAX_ARRAY_STEPS) || self.tracer.work.pay(1).is_err()
        {
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

pub(super) struct StructTracer<'a> {
    pub(super) tracer: Tracer<'a>,
    pub(super) within: Within,
    pub(super) name: &'static str,
    pub(super) fields: Vec<Field>,
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

/// Looks at one more element of a sequence, whose elements so far look like `known`. `false` if they have nothing in
/// common, so that looking further is useless.
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
