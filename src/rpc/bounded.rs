//! Postcard with bounds, for bytes from a peer that nobody vouches for.
//!
//! Postcard believes what it reads. A recursive type nests as deep as the bytes say, until the stack overflows; a sequence of
//! elements that take no bytes has as many as the bytes say, up to 2^64. Both are bounded here, and neither bound refuses what
//! an honest peer sends, but for nesting beyond [`MAX_DEPTH`] and more than [`FREE_ELEMENTS`] elements of no bytes.
//!
//! Values that hold no others are postcard's. Those that do are read here, by postcard's wire format 1.0: a tuple or struct
//! is its fields, a sequence or map its length and its elements, an option a byte, an enum the number of its variant.

use postcard::de_flavors::Slice;
use postcard::{Error, Result};
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IntoDeserializer, Visitor};

/// Levels of values in values. A thread's stack of 2 MiB has 16 KiB for each; an enum with thirteen fields takes 8 KiB in a
/// debug build.
const MAX_DEPTH: u32 = 128;

/// Elements that need no bytes to stand for them, as those of `Vec<()>`. All others take a byte each, or more.
const FREE_ELEMENTS: usize = 1_000_000;

/// Decodes the whole of `bytes`.
///
/// # Errors
/// What was wrong, with the numbers: bytes that are no `T`, bytes left over, and values beyond the bounds.
#[inline]
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> std::result::Result<T, String> {
    let mut bounded = Bounded::new(bytes);
    let decoded = T::deserialize(&mut bounded);
    bounded.finish(decoded)
}

/// Postcard's deserializer, and what may still be decoded by it.
struct Bounded<'de> {
    postcard: postcard::Deserializer<'de, Slice<'de>>,
    len: usize,
    levels: u32,
    elements: usize,
    /// Postcard's errors hold no text of ours.
    exceeded: Option<Bound>,
}

#[derive(Clone, Copy)]
enum Bound {
    Depth,
    Elements,
}

impl<'de> Bounded<'de> {
    #[inline]
    fn new(bytes: &'de [u8]) -> Bounded<'de> {
        Bounded {
            postcard: postcard::Deserializer::from_bytes(bytes),
            len: bytes.len(),
            levels: MAX_DEPTH,
            elements: bytes.len() + FREE_ELEMENTS,
            exceeded: None,
        }
    }

    #[inline]
    fn finish<T>(self, decoded: Result<T>) -> std::result::Result<T, String> {
        let Bounded { postcard, len, exceeded, .. } = self;
        let rest = postcard.finalize();
        match decoded {
            Ok(value) if exceeded.is_none() && matches!(rest, Ok([])) => Ok(value),
            decoded => Err(explain(len, exceeded, decoded.and(rest))),
        }
    }

    /// Decodes what is in a value, one level down.
    #[inline]
    fn descend<T>(&mut self, inside: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.levels == 0 {
            return Err(self.exceed(Bound::Depth));
        }
        self.levels -= 1;
        let decoded = inside(self);
        self.levels += 1;
        decoded
    }

    /// The length of a sequence or map. All of its elements are paid for here, so that a lie costs no more than the truth.
    #[inline]
    fn take_length(&mut self) -> Result<usize> {
        let length = usize::deserialize(&mut self.postcard)?;
        match self.elements.checked_sub(length) {
            Some(elements) => {
                self.elements = elements;
                Ok(length)
            }
            None => Err(self.exceed(Bound::Elements)),
        }
    }

    #[cold]
    fn exceed(&mut self, bound: Bound) -> Error {
        self.exceeded = Some(bound);
        Error::SerdeDeCustom
    }
}

/// Why `len` bytes were refused. A bound is named even where a `Deserialize` has swallowed the error.
#[cold]
fn explain(len: usize, exceeded: Option<Bound>, rest: Result<&[u8]>) -> String {
    match (exceeded, rest) {
        (Some(Bound::Depth), _) => format!("nested deeper than {MAX_DEPTH} levels"),
        (Some(Bound::Elements), _) => format!("more elements than {len} bytes can hold"),
        (None, Ok(rest)) => format!("{} of {len} bytes are left over", rest.len()),
        (None, Err(error)) => format!("{error} ({len} bytes)"),
    }
}

/// Values that hold no others, and what postcard refuses.
macro_rules! by_postcard {
    ($($method:ident)*) => {$(
        #[inline]
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
            self.postcard.$method(visitor)
        }
    )*};
}

impl<'de> de::Deserializer<'de> for &mut Bounded<'de> {
    type Error = Error;

    by_postcard! {
        deserialize_bool
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64 deserialize_char
        deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf
        deserialize_unit deserialize_any deserialize_identifier deserialize_ignored_any
    }

    #[inline]
    fn deserialize_unit_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value> {
        self.postcard.deserialize_unit_struct(name, visitor)
    }

    #[inline]
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match u8::deserialize(&mut self.postcard)? {
            0 => visitor.visit_none(),
            1 => self.descend(|inside| visitor.visit_some(inside)),
            _ => Err(Error::DeserializeBadOption),
        }
    }

    #[inline]
    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Result<V::Value> {
        self.descend(|inside| visitor.visit_newtype_struct(inside))
    }

    #[inline]
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        let left = self.take_length()?;
        self.descend(|inside| visitor.visit_seq(Elements { inside, left }))
    }

    #[inline]
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        let left = self.take_length()?;
        self.descend(|inside| visitor.visit_map(Elements { inside, left }))
    }

    #[inline]
    fn deserialize_tuple<V: Visitor<'de>>(self, left: usize, visitor: V) -> Result<V::Value> {
        self.descend(|inside| visitor.visit_seq(Elements { inside, left }))
    }

    #[inline]
    fn deserialize_tuple_struct<V: Visitor<'de>>(self, _name: &'static str, len: usize, visitor: V) -> Result<V::Value> {
        self.deserialize_tuple(len, visitor)
    }

    #[inline]
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        self.deserialize_tuple(fields.len(), visitor)
    }

    #[inline]
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        self.descend(|inside| visitor.visit_enum(inside))
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        false
    }
}

/// What is left of a sequence, tuple, struct or map.
struct Elements<'b, 'de> {
    inside: &'b mut Bounded<'de>,
    left: usize,
}

impl Elements<'_, '_> {
    /// Room is made for as many, before any of them has been seen. So it is no more than bytes were received.
    #[inline]
    fn expected(&self) -> Option<usize> {
        Some(self.left.min(self.inside.len))
    }
}

impl<'de> de::SeqAccess<'de> for Elements<'_, 'de> {
    type Error = Error;

    #[inline]
    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        seed.deserialize(&mut *self.inside).map(Some)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        self.expected()
    }
}

impl<'de> de::MapAccess<'de> for Elements<'_, 'de> {
    type Error = Error;

    #[inline]
    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        seed.deserialize(&mut *self.inside).map(Some)
    }

    #[inline]
    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value> {
        seed.deserialize(&mut *self.inside)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        self.expected()
    }
}

impl<'de> de::EnumAccess<'de> for &mut Bounded<'de> {
    type Error = Error;
    type Variant = Self;

    #[inline]
    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self)> {
        let variant = u32::deserialize(&mut self.postcard)?;
        Ok((seed.deserialize(variant.into_deserializer())?, self))
    }
}

/// The enum was a level already; its variant, with fields or without, is none of its own.
impl<'de> de::VariantAccess<'de> for &mut Bounded<'de> {
    type Error = Error;

    #[inline]
    fn unit_variant(self) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value> {
        seed.deserialize(self)
    }

    #[inline]
    fn tuple_variant<V: Visitor<'de>>(self, left: usize, visitor: V) -> Result<V::Value> {
        visitor.visit_seq(Elements { inside: self, left })
    }

    #[inline]
    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Result<V::Value> {
        visitor.visit_seq(Elements { inside: self, left: fields.len() })
    }
}

#[cfg(test)]
mod tests;
