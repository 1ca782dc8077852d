//! Sequences of numbers, of points, which are arrays of a few floats, and of keys, which are arrays of bytes, encoded and decoded as
//! a whole; and arrays of bytes and floats, wherever they are.
//!
//! Serde hands elements over one at a time, a nanosecond or more for each. The bytes of most numbers on the wire are those in
//! memory, so a whole slice can be copied. What is known here is only the type: that a sequence is a `Vec` or a slice of
//! them, and that a visitor is serde's own one for a `Vec`. Any other code decodes its elements itself.

#![allow(unsafe_code)]

use std::any::{Any, TypeId};
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::sync::Arc;
use std::{ptr, slice};

use bytemuck::{NoUninit, Pod, Zeroable};
use postcard::{Error, Result};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde::ser::{Serialize, Serializer};

use super::Leaf;
use super::numbers::{LONGEST, decode_numbers, encode_number, encode_numbers, unzigzag, zigzag};
use crate::copy;
use crate::payload::TrailingList;

/// A type of elements.
pub(super) trait Plain: Copy + 'static {
    /// The least number of bytes that an element takes on the wire.
    const MIN_SIZE: usize;
    /// Bytes of each number that it consists of, if its bytes on the wire are those in memory and may be any; else 0.
    const WIDTH: u8 = 0;

    fn encode(elements: &[Self], out: &mut Vec<u8>);

    /// Decodes so many elements at the front of `rest`, which has at least the bytes that they must take.
    fn decode(count: usize, rest: &mut &[u8]) -> Result<Vec<Self>>;

    /// So many elements, whose memory is that of `parts`, a vector of `u8`, `f32` or `f64`, if it can be theirs. It is left empty then.
    fn adopt(_count: usize, _parts: &mut dyn Any) -> Option<Vec<Self>> {
        None
    }
}

fn split<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8]> {
    rest.split_off(..len).ok_or(Error::DeserializeUnexpectedEnd)
}

/// The elements whose memory has these bytes. By `bytemuck` it would be cleared first.
fn copied<T: Pod>(bytes: &[u8]) -> Vec<T> {
    let count = bytes.len() / size_of::<T>();
    let mut elements = Vec::<T>::with_capacity(count);
    // SAFETY: there is room for so many elements, which take no more than the bytes, and it is new.
    unsafe { copy::bytes(bytes.as_ptr(), elements.as_mut_ptr().cast(), count * size_of::<T>()) };
    // SAFETY: the memory of so many elements has just been written, and any bytes are a `T`.
    unsafe { elements.set_len(count) };
    elements
}

/// Makes a vector one of so many other elements, if these have the same alignment and all of its bytes.
fn adopted<T: Pod>(count: usize, parts: &mut dyn Any) -> Option<Vec<T>> {
    macro_rules! adopt {
        ($($part:ty)*) => {
            $(if let Some(parts) = parts.downcast_mut::<Vec<$part>>() {
                if count.checked_mul(size_of::<T>()) != Some(size_of_val(&parts[..])) {
                    return None;
                }
                let cast = bytemuck::allocation::try_cast_vec(mem::take(parts));
                return cast.map_err(|(_, refused)| *parts = refused).ok();
            })*
        };
    }
    adopt!(u8 f32 f64);
    None
}

macro_rules! copied {
    ($($ty:ty)*) => {$(
        impl Plain for $ty {
            const MIN_SIZE: usize = size_of::<$ty>();
            const WIDTH: u8 = size_of::<$ty>() as u8;

            fn encode(elements: &[$ty], out: &mut Vec<u8>) {
                if cfg!(target_endian = "little") {
                    copy::append(bytemuck::cast_slice(elements), out);
                } else {
                    out.extend(elements.iter().flat_map(|element| element.to_le_bytes()));
                }
            }

            fn decode(count: usize, rest: &mut &[u8]) -> Result<Vec<$ty>> {
                let bytes = split(rest, count * size_of::<$ty>())?;
                if cfg!(target_endian = "little") {
                    return Ok(copied(bytes));
                }
                let (elements, _) = bytes.as_chunks();
                Ok(elements.iter().map(|element| <$ty>::from_le_bytes(*element)).collect())
            }

            fn adopt(count: usize, parts: &mut dyn Any) -> Option<Vec<$ty>> {
                adopted(count, parts)
            }
        }
    )*};
}

copied! { u8 i8 f32 f64 }

macro_rules! points {
    ($($ty:ty)*) => {$(
        impl<const N: usize> Plain for [$ty; N] {
            const MIN_SIZE: usize = {
                assert!(N > 0, "lengths are divided by this");
                size_of::<[$ty; N]>()
            };
            const WIDTH: u8 = <$ty>::WIDTH;

            fn encode(elements: &[[$ty; N]], out: &mut Vec<u8>) {
                Plain::encode(elements.as_flattened(), out);
            }

            fn decode(count: usize, rest: &mut &[u8]) -> Result<Vec<[$ty; N]>> {
                if cfg!(target_endian = "little") {
                    return Ok(copied(split(rest, count * size_of::<[$ty; N]>())?));
                }
                let elements = <$ty>::decode(count * N, rest)?;
                Ok(elements.as_chunks().0.to_vec())
            }

            fn adopt(count: usize, parts: &mut dyn Any) -> Option<Vec<[$ty; N]>> {
                adopted(count, parts)
            }
        }
    )*};
}

points! { u8 f32 f64 }

impl Plain for bool {
    const MIN_SIZE: usize = 1;

    fn encode(elements: &[bool], out: &mut Vec<u8>) {
        copy::append(bytemuck::cast_slice(elements), out);
    }

    fn decode(count: usize, rest: &mut &[u8]) -> Result<Vec<bool>> {
        let bytes = split(rest, count)?;
        if bytes.iter().fold(0, |all, byte| all | byte) > 1 {
            return Err(Error::DeserializeBadBool);
        }
        Ok(bytes.iter().map(|byte| *byte == 1).collect())
    }
}

macro_rules! numbers {
    ($($ty:ty: $to_wire:expr, $from_wire:expr;)*) => {$(
        impl Plain for $ty {
            const MIN_SIZE: usize = 1;

            fn encode(elements: &[$ty], out: &mut Vec<u8>) {
                encode_numbers(elements, $to_wire, out);
            }

            fn decode(count: usize, rest: &mut &[u8]) -> Result<Vec<$ty>> {
                decode_numbers::<{ <$ty>::BITS }, _>(count, rest, $from_wire)
            }
        }
    )*};
}

numbers! {
    u16: u64::from, |number| number as u16;
    u32: u64::from, |number| number as u32;
    u64: |value| value, |number| number;
    i16: |value| zigzag(value.into()), |number| unzigzag(number) as i16;
    i32: |value| zigzag(value.into()), |number| unzigzag(number) as i32;
    i64: zigzag, unzigzag;
}

/// Sends 64 bits; a receiver of 32 must check each element.
#[cfg(target_pointer_width = "64")]
mod pointer_sized {
    use super::*;

    numbers! {
        usize: |value| value as u64, |number| number as usize;
        isize: |value| zigzag(value as i64), |number| unzigzag(number) as isize;
    }
}

/// Calls a macro with the types of elements whose bytes on the wire are those in memory, where that is little endian.
macro_rules! for_each_copied {
    ($then:ident!) => {
        $then!(u8 i8 bool f32 f64 [u8; 16] [u8; 32] [f32; 2] [f32; 3] [f32; 4] [f64; 2] [f64; 3] [f64; 4]);
    };
}
pub(super) use for_each_copied;

/// Calls a macro with all types of elements.
macro_rules! for_each_plain {
    ($then:ident!) => {
        $crate::shape::plain::for_each_copied!($then!);
        $then!(u16 u32 u64 i16 i32 i64);
        #[cfg(target_pointer_width = "64")]
        $then!(usize isize);
    };
}
pub(super) use for_each_plain;

/// The elements of a sequence, if it is a slice or `Vec` of `T`.
#[inline]
pub(super) fn slice_of<I, T: Plain>(sequence: &I) -> Option<&[T]> {
    let ty = typeid::of::<I>();
    let sequence = &raw const *sequence;
    if ty == TypeId::of::<&[T]>() {
        // SAFETY: `I` is a `&[T]`, for a lifetime that is at least the result's, since `sequence` was borrowed for that.
        Some(unsafe { *sequence.cast::<&[T]>() })
    } else if ty == TypeId::of::<&Vec<T>>() {
        // SAFETY: as above, with a `&Vec<T>`.
        Some(unsafe { *sequence.cast::<&Vec<T>>() })
    } else {
        None
    }
}

/// A list of numbers or points, or a text, whose bytes on the wire are those in memory, behind their count: all of a message. Or an
/// `Option` that has one.
///
/// It encodes as a list of one of them, or as an empty text, which shows of the type what the whole list shows.
pub(crate) struct InPlace<'a> {
    of: ElementType,
    /// Numbers or points, or bytes of the text.
    count: usize,
    /// As [`Plain::WIDTH`].
    width: u8,
    is_option: bool,
    pub bytes: &'a [u8],
}

/// The type of a list's elements; `str` for a text. It encodes as the list does, or as the text.
#[derive(Clone, Copy)]
struct ElementType(TypeId);

/// The memory of such a list or text.
pub(crate) type OwnedContent = Arc<dyn AsRef<[u8]> + Send + Sync>;

struct List<T>(Vec<T>);

impl<T: Plain + NoUninit> AsRef<[u8]> for List<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl<'a> InPlace<'a> {
    /// The content of a value of these types, and of no other: whatever `Serialize` hands out may be gone when it returns.
    #[inline]
    pub(crate) fn of<A: ?Sized>(value: &'a &A) -> Option<InPlace<'a>> {
        macro_rules! find {
            ($($ty:ty)*) => {
                $(if let Some(numbers) = slice_of::<&A, $ty>(value) {
                    return Some(InPlace::list(numbers, false));
                }
                if let Some(option) = value_as::<A, Option<Vec<$ty>>>(value) {
                    return option.as_deref().map(|numbers| InPlace::list(numbers, true));
                })*
            };
        }
        if cfg!(target_endian = "little") {
            for_each_copied!(find!);
        }
        if let Some(option) = value_as::<A, Option<String>>(value) {
            return option.as_deref().map(|text| InPlace::text(text, true));
        }
        Some(InPlace::text(text_of(value)?, false))
    }

    fn list<T: Plain + NoUninit>(elements: &'a [T], is_option: bool) -> InPlace<'a> {
        let (of, count) = (ElementType(TypeId::of::<T>()), elements.len());
        InPlace { of, count, width: T::WIDTH, is_option, bytes: bytemuck::cast_slice(elements) }
    }

    fn text(text: &'a str, is_option: bool) -> InPlace<'a> {
        InPlace { of: ElementType(TypeId::of::<str>()), count: text.len(), width: 1, is_option, bytes: text.as_bytes() }
    }

    /// What shows the type, and stands before the bytes, where the value that has them moves.
    pub(crate) fn without_bytes(&self) -> InPlace<'static> {
        InPlace { bytes: &[], ..*self }
    }

    /// Takes the memory out of a value that owns such content.
    pub(crate) fn take<R: 'static>(value: R) -> OwnedContent {
        let mut value = Some(value);
        let value: &mut dyn Any = &mut value;
        macro_rules! take {
            ($($ty:ty)*) => {
                $(if let Some(list) = taken::<Vec<$ty>>(value) {
                    return Arc::new(List(fitted(list)));
                })*
            };
        }
        for_each_copied!(take!);
        let text = taken::<String>(value).expect("the value has content in place");
        InPlace::take(text.into_bytes())
    }

    /// What stands before the bytes on the wire.
    pub(crate) fn head(&self) -> Vec<u8> {
        let mut head = Vec::with_capacity(1 + LONGEST);
        if self.is_option {
            head.push(1);
        }
        encode_number(self.count as u64, &mut head);
        head
    }

    /// What a body ends with that has such a head, and the bytes behind it.
    pub(crate) fn trailing_list(&self, head: &[u8]) -> Option<TrailingList> {
        (self.width > 0).then_some(TrailingList { head: head.len() as u64, width: self.width })
    }
}

/// The list in memory that is hardly longer: a peer that is slow to read it holds all of that, and the limits count its bytes.
fn fitted<T>(mut list: Vec<T>) -> Vec<T> {
    if list.capacity() - list.len() > list.len() / 4 {
        list.shrink_to_fit();
    }
    list
}

/// Takes a `T` out of an `Option` of it, or of an `Option` of that.
fn taken<T: 'static>(value: &mut dyn Any) -> Option<T> {
    match value.downcast_mut::<Option<T>>() {
        Some(value) => value.take(),
        None => value.downcast_mut::<Option<Option<T>>>()?.take()?,
    }
}

impl Serialize for InPlace<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        if self.is_option { serializer.serialize_some(&self.of) } else { self.of.serialize(serializer) }
    }
}

impl Serialize for ElementType {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        macro_rules! show {
            ($($ty:ty)*) => {
                $(if self.0 == TypeId::of::<$ty>() {
                    return [<$ty>::zeroed()][..].serialize(serializer);
                })*
            };
        }
        for_each_copied!(show!);
        serializer.serialize_str("")
    }
}

/// The elements of the array type of this identity and size, and their number, if its bytes on the wire are those in memory.
///
/// It is no generic function: unoptimized programs have it once, and in others, where both arguments are constants, so is the result.
#[inline]
fn array_type(ty: TypeId, size: usize) -> Option<(Leaf, u32)> {
    macro_rules! find {
        ($element:ident $leaf:ident: $($len:literal)*) => {
            match size / size_of::<$element>() {
                $($len if ty == TypeId::of::<[$element; $len]>() => return Some((Leaf::$leaf, $len)),)*
                _ => {}
            }
        };
        ($($element:ident $leaf:ident)*) => {
            $(find!($element $leaf: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32);)*
        };
    }
    if cfg!(target_endian = "little") {
        find!(u8 U8 f32 F32 f64 F64);
    }
    None
}

/// An array of bytes or floats.
pub(super) struct PlainArray<'a> {
    /// What it has so many of.
    pub of: Leaf,
    pub count: u32,
    pub bytes: &'a [u8],
}

/// The content of a value that is an array of bytes or floats.
#[inline]
pub(super) fn array_of<T: ?Sized>(value: &T) -> Option<PlainArray<'_>> {
    let (of, count) = array_type(typeid::of::<T>(), size_of_val(value))?;
    // SAFETY: it is an array of bytes or floats, which has no gaps, and this is its size.
    let bytes = unsafe { slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of_val(value)) };
    Some(PlainArray { of, count, bytes })
}

/// Whether `T` is an array of bytes or floats, which [`decode_array`] decodes.
#[inline]
pub(crate) fn is_plain_array<T>() -> bool {
    array_type(typeid::of::<T>(), size_of::<T>()).is_some()
}

/// Decodes an array of bytes or floats at the front of the bytes.
#[inline]
pub(crate) fn decode_array<T>(rest: &mut &[u8]) -> Result<T> {
    assert!(is_plain_array::<T>());
    let bytes = split(rest, size_of::<T>())?;
    // SAFETY: there are as many bytes as a `T` has, and any bytes are an array of bytes or floats.
    Ok(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The value, if it is a `T`, which is a type without lifetimes.
#[inline]
fn value_as<'a, A: ?Sized, T: 'static>(value: &'a &A) -> Option<&'a T> {
    // SAFETY: `A` is `T`, since `T` has no lifetimes; so this is a `&T`, for a lifetime that is at least the result's.
    (typeid::of::<A>() == TypeId::of::<T>()).then(|| unsafe { *(&raw const *value).cast::<&T>() })
}

/// The text, if it is a `str` or `String`.
#[inline]
fn text_of<'a, A: ?Sized>(value: &'a &A) -> Option<&'a str> {
    if typeid::of::<A>() == TypeId::of::<str>() {
        // SAFETY: `A` is `str`, so this is a `&str`, for a lifetime that is at least the result's.
        return Some(unsafe { *(&raw const *value).cast::<&str>() });
    }
    value_as::<A, String>(value).map(String::as_str)
}

/// The seed by which serde's own impls decode a `T`, once more.
#[inline]
pub(crate) fn stateless_seed<S, T>(seed: &S) -> Option<S> {
    // SAFETY: it is a `PhantomData`, which may be copied.
    (typeid::of::<S>() == typeid::of::<PhantomData<T>>()).then(|| unsafe { ptr::read(seed) })
}

/// How a `Vec` of numbers or points is decoded as a whole.
pub(crate) struct PlainDecoder<R> {
    /// Bytes that an element takes in memory.
    pub element_size: usize,
    /// The least number of bytes that an element takes on the wire.
    pub min_size: usize,
    /// Decodes so many elements, at least `min_size` bytes each, at the front of the bytes.
    pub decode: fn(usize, &mut &[u8]) -> Result<R>,
    /// The list of so many elements whose memory is that of a vector of `u8`, `f32` or `f64`, if it can be. The vector is empty then.
    pub adopt: fn(usize, &mut dyn Any) -> Option<R>,
}

/// The decoder of what `V` makes, if that is serde's visitor of a `Vec` of numbers or points.
#[inline]
pub(crate) fn decoder<'de, V: Visitor<'de>>() -> Option<PlainDecoder<V::Value>> {
    macro_rules! find {
        ($($ty:ty)*) => {
            $(if typeid::of::<V::Value>() == TypeId::of::<Vec<$ty>>() && typeid::of::<V>() == visitor_of::<Vec<$ty>>() {
                return Some(PlainDecoder {
                    element_size: size_of::<$ty>(),
                    min_size: <$ty>::MIN_SIZE,
                    decode: decode_as::<$ty, V::Value>,
                    adopt: adopt_as::<$ty, V::Value>,
                });
            })*
        };
    }
    for_each_plain!(find!);
    None
}

fn decode_as<T: Plain, R>(count: usize, rest: &mut &[u8]) -> Result<R> {
    Ok(list_as(T::decode(count, rest)?))
}

fn adopt_as<T: Plain, R>(count: usize, parts: &mut dyn Any) -> Option<R> {
    T::adopt(count, parts).map(list_as)
}

/// A list, whose type is `R`.
fn list_as<T: Plain, R>(list: Vec<T>) -> R {
    assert!(typeid::of::<R>() == TypeId::of::<Vec<T>>());
    let list = ManuallyDrop::new(list);
    // SAFETY: `R` is `Vec<T>`, which has no lifetimes; the original is not dropped.
    unsafe { mem::transmute_copy::<ManuallyDrop<Vec<T>>, R>(&list) }
}

/// The visitor that `T` hands to a deserializer when it asks for a sequence.
#[inline]
fn visitor_of<'de, T: Deserialize<'de>>() -> TypeId {
    match T::deserialize(VisitorProbe) {
        Err(Visited(Some(visitor))) => visitor,
        // No visitor of anything else is this one.
        _ => TypeId::of::<VisitorProbe>(),
    }
}

/// A deserializer that refuses everything, and tells by which visitor a sequence would have been visited.
struct VisitorProbe;

#[derive(Debug)]
struct Visited(Option<TypeId>);

impl<'de> Deserializer<'de> for VisitorProbe {
    type Error = Visited;

    #[inline]
    fn deserialize_seq<V: Visitor<'de>>(self, _visitor: V) -> std::result::Result<V::Value, Visited> {
        Err(Visited(Some(typeid::of::<V>())))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> std::result::Result<V::Value, Visited> {
        Err(Visited(None))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct
        tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl std::fmt::Display for Visited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nothing is decoded")
    }
}

impl std::error::Error for Visited {}

impl de::Error for Visited {
    fn custom<T: std::fmt::Display>(_message: T) -> Visited {
        Visited(None)
    }
}

#[cfg(all(test, not(few_tests)))]
#[path = "../../tests/unit/plain.rs"]
mod tests;
