//! A deserializer for elements of lists, and values of maps, that have neither texts nor lists within them, nor large boxes.
//!
//! What they take is bounded by their type, so this one keeps no account. It is the rest of the bytes and little more, which the
//! compiler keeps in registers, where [`Bounded`](super::bounded) loads and stores its account at each field. What is not known here
//! is refused without a cause; then `Bounded` decodes the element again, and the others of the list.

use std::any::TypeId;
use std::fmt::{self, Display};

use serde::de::{self, DeserializeSeed, IntoDeserializer, Visitor};

use crate::shape::{decode_array, decode_number, is_plain_array, stateless_seed, unzigzag};

/// Levels of values within an element.
const MAX_LEVELS: u32 = 8;

/// Decodes the element at the front of `rest`; `None`, with `rest` as it was, where [`Bounded`](super::bounded) has to.
#[inline]
pub(super) fn decode<'de, S: DeserializeSeed<'de>>(seed: &S, levels: u32, rest: &mut &'de [u8]) -> Option<S::Value> {
    macro_rules! is_one_of {
        ($($ty:ty)*) => { [$(TypeId::of::<$ty>()),*].contains(&typeid::of::<S::Value>()) };
    }
    // Those have no fields for which there would be an account.
    if is_one_of!(bool u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 char String) {
        return None;
    }
    let mut flat = Flat { rest, container: size_of::<S::Value>(), levels: levels.min(MAX_LEVELS), refused: false };
    let value = stateless_seed::<S, S::Value>(seed)?.deserialize(&mut flat).ok()?;
    // An impl may have discarded the error.
    if flat.refused {
        return None;
    }
    *rest = flat.rest;
    Some(value)
}

/// Whether `V` is a visitor of serde's own impls. If serde renames their module, lists grow step by step, and arrays are decoded
/// element by element.
#[inline]
pub(super) fn is_serdes_own<V>() -> bool {
    let visitor = std::any::type_name::<V>();
    visitor.starts_with("serde_core::de::impls::") || visitor.starts_with("serde::de::impls::")
}

/// The element needs more than is known here, or is none.
#[derive(Debug)]
struct NotFlat;

impl Display for NotFlat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the element is not flat")
    }
}

impl std::error::Error for NotFlat {}

impl de::Error for NotFlat {
    fn custom<T: Display>(_message: T) -> NotFlat {
        NotFlat
    }
}

type FlatResult<T> = Result<T, NotFlat>;

struct Flat<'de> {
    rest: &'de [u8],
    /// Bytes of the memory that the value which is being decoded is stored in. A larger one is most likely in a box.
    container: usize,
    levels: u32,
    /// Something was refused, though the element's impl may go on.
    refused: bool,
}

/// Short numbers, whose length mostly is that of the last ones at their place: the processor foresees it, and `decode_number`, which
/// computes it, takes up to half as long again.
macro_rules! short_numbers {
    ($($ty:ident)*) => {$(
        #[inline]
        fn $ty(&mut self) -> FlatResult<$ty> {
            const MOST: u32 = $ty::BITS.div_ceil(7);
            let mut number = 0;
            for place in 0..MOST {
                let Some((byte, rest)) = self.rest.split_first() else { break };
                self.rest = rest;
                number |= $ty::from(byte & 0x7f) << (7 * place);
                if *byte < 0x80 {
                    if place + 1 < MOST || byte >> ($ty::BITS - 7 * place) == 0 {
                        return Ok(number);
                    }
                    break;
                }
            }
            self.refuse()
        }
    )*};
}

impl<'de> Flat<'de> {
    #[inline(always)]
    fn take<const N: usize>(&mut self) -> FlatResult<[u8; N]> {
        let Some((bytes, rest)) = self.rest.split_first_chunk() else { return self.refuse() };
        self.rest = rest;
        Ok(*bytes)
    }

    #[inline(always)]
    fn refuse<T>(&mut self) -> FlatResult<T> {
        self.refused = true;
        Err(NotFlat)
    }

    short_numbers! { u16 u32 }

    #[inline]
    fn u64(&mut self) -> FlatResult<u64> {
        decode_number::<{ u64::BITS }>(&mut self.rest).or_else(|_| self.refuse())
    }

    #[inline]
    fn array<T>(&mut self) -> FlatResult<T> {
        decode_array(&mut self.rest).or_else(|_| self.refuse())
    }

    /// Decodes the content of a value, one level down.
    #[inline]
    fn descend<T>(&mut self, inside: impl FnOnce(&mut Self) -> FlatResult<T>) -> FlatResult<T> {
        if self.levels == 0 || size_of::<T>() > self.container {
            return self.refuse();
        }
        self.levels -= 1;
        let decoded = inside(self);
        self.levels += 1;
        decoded
    }
}

macro_rules! primitives {
    ($($method:ident $visit:ident |$flat:ident| $value:expr;)*) => {$(
        #[inline]
        fn $method<V: Visitor<'de>>(self, visitor: V) -> FlatResult<V::Value> {
            let $flat = self;
            visitor.$visit($value)
        }
    )*};
}

macro_rules! refuse {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, _visitor: V) -> FlatResult<V::Value> {
            self.refuse()
        }
    )*};
}

impl<'de> de::Deserializer<'de> for &mut Flat<'de> {
    type Error = NotFlat;

    primitives! {
        deserialize_i8 visit_i8 |flat| i8::from_le_bytes(flat.take()?);
        deserialize_i16 visit_i16 |flat| unzigzag(flat.u16()?.into()) as i16;
        deserialize_i32 visit_i32 |flat| unzigzag(flat.u32()?.into()) as i32;
        deserialize_i64 visit_i64 |flat| unzigzag(flat.u64()?);
        deserialize_u8 visit_u8 |flat| u8::from_le_bytes(flat.take()?);
        deserialize_u16 visit_u16 |flat| flat.u16()?;
        deserialize_u32 visit_u32 |flat| flat.u32()?;
        deserialize_u64 visit_u64 |flat| flat.u64()?;
        deserialize_f32 visit_f32 |flat| f32::from_le_bytes(flat.take()?);
        deserialize_f64 visit_f64 |flat| f64::from_le_bytes(flat.take()?);
    }

    refuse! {
        deserialize_any deserialize_identifier deserialize_ignored_any deserialize_i128 deserialize_u128 deserialize_char
        deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf deserialize_seq deserialize_map
    }

    #[inline]
    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> FlatResult<V::Value> {
        match self.take()? {
            [byte @ (0 | 1)] => visitor.visit_bool(byte == 1),
            _ => self.refuse(),
        }
    }

    #[inline]
    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> FlatResult<V::Value> {
        visitor.visit_unit()
    }

    #[inline]
    fn deserialize_unit_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> FlatResult<V::Value> {
        visitor.visit_unit()
    }

    #[inline]
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> FlatResult<V::Value> {
        match self.take()? {
            [0] => visitor.visit_none(),
            [1] => self.descend(|inside| visitor.visit_some(inside)),
            _ => self.refuse(),
        }
    }

    #[inline]
    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> FlatResult<V::Value> {
        self.descend(|inside| visitor.visit_newtype_struct(inside))
    }

    #[inline]
    fn deserialize_tuple<V: Visitor<'de>>(self, left: usize, visitor: V) -> FlatResult<V::Value> {
        if is_serdes_own::<V>() && is_plain_array::<V::Value>() {
            return self.descend(Flat::array);
        }
        self.descend(|inside| visitor.visit_seq(FlatFields { inside, left }))
    }

    #[inline]
    fn deserialize_tuple_struct<V: Visitor<'de>>(self, _name: &'static str, len: usize, visitor: V) -> FlatResult<V::Value> {
        self.deserialize_tuple(len, visitor)
    }

    #[inline]
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> FlatResult<V::Value> {
        self.deserialize_tuple(fields.len(), visitor)
    }

    #[inline]
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> FlatResult<V::Value> {
        self.descend(|inside| visitor.visit_enum(FlatEnum { inside, variants: variants.len() }))
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        false
    }
}

/// The fields that are left.
struct FlatFields<'a, 'de> {
    inside: &'a mut Flat<'de>,
    left: usize,
}

impl<'de> de::SeqAccess<'de> for FlatFields<'_, 'de> {
    type Error = NotFlat;

    #[inline]
    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> FlatResult<Option<S::Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        self.inside.container = size_of::<S::Value>();
        seed.deserialize(&mut *self.inside).map(Some)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

struct FlatEnum<'a, 'de> {
    inside: &'a mut Flat<'de>,
    variants: usize,
}

impl<'de> de::EnumAccess<'de> for FlatEnum<'_, 'de> {
    type Error = NotFlat;
    type Variant = Self;

    #[inline]
    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> FlatResult<(S::Value, Self)> {
        let variant = self.inside.u32()?;
        if variant as usize >= self.variants {
            return self.inside.refuse();
        }
        Ok((seed.deserialize(variant.into_deserializer())?, self))
    }
}

impl<'de> de::VariantAccess<'de> for FlatEnum<'_, 'de> {
    type Error = NotFlat;

    #[inline]
    fn unit_variant(self) -> FlatResult<()> {
        Ok(())
    }

    #[inline]
    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> FlatResult<S::Value> {
        self.inside.container = size_of::<S::Value>();
        seed.deserialize(&mut *self.inside)
    }

    #[inline]
    fn tuple_variant<V: Visitor<'de>>(self, left: usize, visitor: V) -> FlatResult<V::Value> {
        visitor.visit_seq(FlatFields { inside: self.inside, left })
    }

    #[inline]
    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> FlatResult<V::Value> {
        visitor.visit_seq(FlatFields { inside: self.inside, left: fields.len() })
    }
}
