//! The encoding of shapes: for each node a tag, then its parts; numbers are LEB128, names have their length in front.

use std::borrow::Cow;

use super::numbers::encode_number;
use super::{Field, Leaf, MAX_DEPTH, MAX_NAME, MAX_NODES, Name, Run, Shape, Variant};

// Leaves may become more, up to here, without a change of what is written today.
pub(super) const UNKNOWN: u8 = 32;
pub(super) const OPTION: u8 = 33;
pub(super) const SEQ: u8 = 34;
pub(super) const MAP: u8 = 35;
pub(super) const TUPLE: u8 = 36;
pub(super) const STRUCT: u8 = 37;
pub(super) const ENUM: u8 = 38;
pub(super) const UP: u8 = 39;
pub(super) const MIXED: u8 = 40;

impl Shape {
    /// Appends this shape to `out`.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Shape::Unknown => out.push(UNKNOWN),
            Shape::Mixed => out.push(MIXED),
            Shape::Leaf(leaf) => out.push(*leaf as u8),
            Shape::Option(inner) => {
                out.push(OPTION);
                inner.encode(out);
            }
            Shape::Seq(element) => {
                out.push(SEQ);
                element.encode(out);
            }
            Shape::Map(parts) => {
                out.push(MAP);
                parts.0.encode(out);
                parts.1.encode(out);
            }
            Shape::Tuple(runs) => {
                out.push(TUPLE);
                encode_length(runs.len(), out);
                for run in runs {
                    encode_number(run.count.into(), out);
                    run.shape.encode(out);
                }
            }
            Shape::Struct(name, fields) => {
                out.push(STRUCT);
                encode_name(name, out);
                encode_length(fields.len(), out);
                for field in fields {
                    encode_name(&field.name, out);
                    field.shape.encode(out);
                }
            }
            Shape::Enum(name, variants) => {
                out.push(ENUM);
                encode_name(name, out);
                encode_length(variants.len(), out);
                for variant in variants {
                    encode_number(variant.index.into(), out);
                    encode_name(&variant.name, out);
                    variant.content.encode(out);
                }
            }
            Shape::Up(levels) => out.extend([UP, *levels]),
        }
    }

    /// Reads what `encode` wrote. `None` for anything else, and for shapes beyond the limits, before
    /// memory is spent on them.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Shape> {
        let mut reader = Reader { bytes, nodes_left: MAX_NODES };
        let shape = reader.shape(0)?;
        reader.bytes.is_empty().then_some(shape)
    }
}

/// For lengths that [`MAX_NODES`] or [`MAX_NAME`] bounds.
pub(super) fn encode_length(length: usize, out: &mut Vec<u8>) {
    encode_number(length as u64, out);
}

pub(super) fn encode_name(name: &str, out: &mut Vec<u8>) {
    encode_length(name.len(), out);
    out.extend(name.as_bytes());
}

struct Reader<'a> {
    bytes: &'a [u8],
    nodes_left: usize,
}

impl Reader<'_> {
    fn shape(&mut self, depth: usize) -> Option<Shape> {
        self.nodes_left = self.nodes_left.checked_sub(1)?;
        if depth > MAX_DEPTH {
            return None;
        }
        Some(match self.byte()? {
            UNKNOWN => Shape::Unknown,
            MIXED => Shape::Mixed,
            OPTION => Shape::Option(Box::new(self.shape(depth + 1)?)),
            SEQ => Shape::Seq(Box::new(self.shape(depth + 1)?)),
            MAP => Shape::Map(Box::new((self.shape(depth + 1)?, self.shape(depth + 1)?))),
            TUPLE => Shape::Tuple(self.list(|reader| {
                let count = reader.number()?;
                let shape = reader.shape(depth + 1)?;
                // A run of length zero would make two equal tuples differ.
                (count > 0).then_some(Run { count, shape })
            })?),
            STRUCT => {
                let name = self.name()?;
                Shape::Struct(name, self.list(|reader| Some(Field { name: reader.name()?, shape: reader.shape(depth + 1)? }))?)
            }
            ENUM => {
                let name = self.name()?;
                let variants = self.list(|reader| {
                    Some(Variant { index: reader.number()?, name: reader.name()?, content: reader.shape(depth + 1)? })
                })?;
                // Variants are looked up by binary search.
                if !variants.is_sorted_by(|a, b| a.index < b.index) {
                    return None;
                }
                Shape::Enum(name, variants)
            }
            UP => {
                let levels = self.byte()?;
                if levels == 0 || usize::from(levels) > depth {
                    return None;
                }
                Shape::Up(levels)
            }
            tag => Shape::Leaf(*Leaf::ALL.get(usize::from(tag))?),
        })
    }

    /// The list grows only as its items arrive: the length in front is a claim.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let length = self.number()?;
        (0..length).map(|_| item(self)).collect()
    }

    fn name(&mut self) -> Option<Name> {
        let length = self.number()? as usize;
        if length > MAX_NAME {
            return None;
        }
        let (name, rest) = self.bytes.split_at_checked(length)?;
        self.bytes = rest;
        Some(Cow::Owned(str::from_utf8(name).ok()?.to_owned()))
    }

    fn number(&mut self) -> Option<u32> {
        let mut number = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(number).ok();
            }
        }
        None
    }

    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(first)
    }
}
