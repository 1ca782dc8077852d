//! Encodes elements of lists that show nothing new of their types.
//!
//! That is nearly all of them, and of a list of small structs the bookkeeping of [`encoder`](super::encoder) would take most of the
//! time. So elements are first encoded by the serializer in this file, which compares each part with what is known, and can do no
//! more: where an element differs in anything, or does not fit into the room, its bytes are dropped, and the encoder takes it.
//! The room is cleared memory at the end of the message; what is left of it goes from call to call as a slice, in registers.
//!
//! So an element may be serialized twice. The `Serialize` of a [`Bulk`](crate::Bulk) takes a lease each time: it shows bytes, and
//! what may hold bytes is never encoded here ([`KnownShape::is_whole`]).

use std::fmt::{self, Display, Write};
use std::slice;

use serde::ser::{self, Serialize, Serializer};

use super::Leaf;
use super::known::{self, KnownKind, KnownPart, KnownShape, NodeIndex, same};
use super::numbers::{LONGEST, encode_in_place, zigzag};
use super::plain;
use crate::copy;

/// Where fewer in a row can be encoded here, or fit into the room, trying takes longer than it saves.
pub(super) const MANY: usize = 8;
/// Room for elements; larger ones are the encoder's. Making it clears it.
const ROOM: usize = 4 << 10;
/// Room for each of few elements.
const ELEMENT_ROOM: usize = 32;

/// Encodes elements at the end of `out`, up to the first one that differs from what is known at this position, which must be whole.
/// Returns their number, and that one.
#[inline]
pub(super) fn encode<T: Serialize>(
    elements: &mut impl Iterator<Item = T>,
    at: NodeIndex,
    known: &KnownShape,
    out: &mut Vec<u8>,
) -> (usize, Option<T>) {
    let (mut count, mut first) = (0, None);
    let mut size = elements.size_hint().0.saturating_mul(ELEMENT_ROOM).min(ROOM);
    loop {
        let filled = out.len();
        out.resize(filled + size, 0);
        let (more, used, other) = fill(&mut out[filled..], first, elements, at, known);
        out.truncate(filled + used);
        count += more;
        if other.is_none() || more < MANY && size == ROOM {
            return (count, other);
        }
        (first, size) = (other, ROOM);
    }
}

/// Fills some room with the first element and the others. Returns how many it has, how many bytes they take, and the next one.
#[inline]
fn fill<T: Serialize>(
    mut room: &mut [u8],
    first: Option<T>,
    elements: &mut impl Iterator<Item = T>,
    at: NodeIndex,
    known: &KnownShape,
) -> (usize, usize, Option<T>) {
    let (size, mut count) = (room.len(), 0);
    let mut next = first.or_else(|| elements.next());
    while let Some(element) = next {
        let used = size - room.len();
        let Ok(rest) = part(&element, Context { known, at, room }) else { return (count, used, Some(element)) };
        (room, count) = (rest, count + 1);
        // It may hold what the next one needs, as a lock.
        drop(element);
        next = elements.next();
    }
    (count, size - room.len(), None)
}

/// The value is not as it is known, or does not fit into the room.
#[derive(Debug)]
struct Differs;

impl Display for Differs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the value shows something new of its type")
    }
}

impl std::error::Error for Differs {}

/// The encoder will hear of it again, and report it.
impl ser::Error for Differs {
    fn custom<T: Display>(_message: T) -> Differs {
        Differs
    }
}

/// The room that is left.
type Put<'o> = Result<&'o mut [u8], Differs>;

/// The serializer of one value.
struct Context<'k, 'o> {
    known: &'k KnownShape,
    at: NodeIndex,
    room: &'o mut [u8],
}

#[inline]
fn put<const N: usize>(bytes: [u8; N], room: &mut [u8]) -> Put<'_> {
    let (place, rest) = room.split_first_chunk_mut().ok_or(Differs)?;
    *place = bytes;
    Ok(rest)
}

#[inline]
fn put_number(number: u64, room: &mut [u8]) -> Put<'_> {
    if number < 0x80 {
        return put([number as u8], room);
    }
    let len = encode_in_place(number, room.first_chunk_mut::<LONGEST>().ok_or(Differs)?);
    Ok(&mut room[len..])
}

#[inline]
fn put_bytes<'o>(bytes: &[u8], room: &'o mut [u8]) -> Put<'o> {
    copy::into(bytes, put_number(bytes.len() as u64, room)?).ok_or(Differs)
}

fn put_u128(mut value: u128, mut room: &mut [u8]) -> Put<'_> {
    while value >= 0x80 {
        room = put([value as u8 | 0x80], room)?;
        value >>= 7;
    }
    put([value as u8], room)
}

/// Encodes a value.
#[inline]
fn part<'o, T: Serialize + ?Sized>(value: &T, context: Context<'_, 'o>) -> Put<'o> {
    let Some(array) = plain::array_of(value) else { return value.serialize(context) };
    match context.parts(KnownKind::Tuple)? {
        [run] if (run.number, run.at) == (array.count, known::leaf(array.of)) => {
            copy::into(array.bytes, context.room).ok_or(Differs)
        }
        _ => Err(Differs),
    }
}

impl<'k, 'o> Context<'k, 'o> {
    /// The parts of the position, if it is of this kind.
    #[inline]
    fn parts(&self, kind: KnownKind) -> Result<&'k [KnownPart], Differs> {
        match self.known.nodes.get(self.at as usize) {
            Some(node) if node.kind == kind => Ok(&node.parts),
            _ => Err(Differs),
        }
    }

    #[inline]
    fn compound(self, kind: KnownKind) -> Result<Parts<'k, 'o>, Differs> {
        let parts = self.parts(kind)?.iter();
        Ok(Parts { known: self.known, parts, left: 0, part: 0, room: Some(self.room) })
    }

    #[inline]
    fn leaf(self, leaf: Leaf) -> Put<'o> {
        if self.at == known::leaf(leaf) { Ok(self.room) } else { Err(Differs) }
    }

    /// Writes the number of a variant.
    #[inline]
    fn variant(self, index: u32, variant: &'static str) -> Result<Context<'k, 'o>, Differs> {
        let found =
            known::variant(self.parts(KnownKind::Enum)?, index).filter(|found| same(found.name, variant)).ok_or(Differs)?;
        Ok(Context { at: found.at, room: put_number(index.into(), self.room)?, ..self })
    }
}

macro_rules! leaves {
    ($($method:ident($value:ident: $type:ty) $leaf:ident |$room:ident| $put:expr;)*) => {
        $(#[inline]
        fn $method(self, $value: $type) -> Put<'o> {
            let $room = self.leaf(Leaf::$leaf)?;
            $put
        })*
    };
}

impl<'k, 'o> Serializer for Context<'k, 'o> {
    type Ok = &'o mut [u8];
    type Error = Differs;
    type SerializeSeq = ser::Impossible<&'o mut [u8], Differs>;
    type SerializeTuple = Parts<'k, 'o>;
    type SerializeTupleStruct = Parts<'k, 'o>;
    type SerializeTupleVariant = Parts<'k, 'o>;
    type SerializeMap = ser::Impossible<&'o mut [u8], Differs>;
    type SerializeStruct = Parts<'k, 'o>;
    type SerializeStructVariant = Parts<'k, 'o>;

    leaves! {
        serialize_bool(value: bool) Bool |room| put([value.into()], room);
        serialize_i8(value: i8) I8 |room| put([value as u8], room);
        serialize_i16(value: i16) I16 |room| put_number(zigzag(value.into()), room);
        serialize_i32(value: i32) I32 |room| put_number(zigzag(value.into()), room);
        serialize_i64(value: i64) I64 |room| put_number(zigzag(value), room);
        serialize_i128(value: i128) I128 |room| put_u128(((value << 1) ^ (value >> 127)) as u128, room);
        serialize_u8(value: u8) U8 |room| put([value], room);
        serialize_u16(value: u16) U16 |room| put_number(value.into(), room);
        serialize_u32(value: u32) U32 |room| put_number(value.into(), room);
        serialize_u64(value: u64) U64 |room| put_number(value, room);
        serialize_u128(value: u128) U128 |room| put_u128(value, room);
        serialize_f32(value: f32) F32 |room| put(value.to_le_bytes(), room);
        serialize_f64(value: f64) F64 |room| put(value.to_le_bytes(), room);
        serialize_char(value: char) Char |room| put_bytes(value.encode_utf8(&mut [0; 4]).as_bytes(), room);
        serialize_str(value: &str) Str |room| put_bytes(value.as_bytes(), room);
    }

    fn serialize_bytes(self, _value: &[u8]) -> Put<'o> {
        Err(Differs)
    }

    #[inline]
    fn serialize_unit(self) -> Put<'o> {
        self.leaf(Leaf::Unit)
    }

    #[inline]
    fn serialize_unit_struct(self, _name: &'static str) -> Put<'o> {
        self.serialize_unit()
    }

    #[inline]
    fn serialize_none(self) -> Put<'o> {
        self.parts(KnownKind::Option)?;
        put([0], self.room)
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Put<'o> {
        let [content] = self.parts(KnownKind::Option)? else { return Err(Differs) };
        // What no value has shown yet may be a bulk.
        if self.known.is_new(content.at) {
            return Err(Differs);
        }
        part(value, Context { at: content.at, room: put([1], self.room)?, ..self })
    }

    #[inline]
    fn serialize_unit_variant(self, _name: &'static str, index: u32, variant: &'static str) -> Put<'o> {
        self.variant(index, variant)?.serialize_unit()
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _name: &'static str, value: &T) -> Put<'o> {
        part(value, self)
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Put<'o> {
        part(value, self.variant(index, variant)?)
    }

    fn serialize_seq(self, _len: Option<usize>) -> Result<Self::SerializeSeq, Differs> {
        Err(Differs)
    }

    #[inline]
    fn serialize_tuple(self, _len: usize) -> Result<Parts<'k, 'o>, Differs> {
        self.compound(KnownKind::Tuple)
    }

    #[inline]
    fn serialize_tuple_struct(self, _name: &'static str, _len: usize) -> Result<Parts<'k, 'o>, Differs> {
        self.compound(KnownKind::Tuple)
    }

    #[inline]
    fn serialize_tuple_variant(
        self,
        _name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Parts<'k, 'o>, Differs> {
        self.variant(index, variant)?.compound(KnownKind::Tuple)
    }

    fn serialize_map(self, _len: Option<usize>) -> Result<Self::SerializeMap, Differs> {
        Err(Differs)
    }

    #[inline]
    fn serialize_struct(self, _name: &'static str, _len: usize) -> Result<Parts<'k, 'o>, Differs> {
        self.compound(KnownKind::Struct)
    }

    #[inline]
    fn serialize_struct_variant(
        self,
        _name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Parts<'k, 'o>, Differs> {
        self.variant(index, variant)?.compound(KnownKind::Struct)
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Put<'o> {
        let mut text = String::new();
        write!(text, "{value}").map_err(|_| Differs)?;
        self.serialize_str(&text)
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        false
    }
}

/// The elements of a tuple, or the fields of a struct. What derived code calls for each part is always inlined: the compiler then keeps
/// this in registers.
struct Parts<'k, 'o> {
    known: &'k KnownShape,
    /// The parts that are still to come.
    parts: slice::Iter<'k, KnownPart>,
    /// Number of elements of the last run that are left; their position is `part`.
    left: u32,
    part: NodeIndex,
    /// `None` once a part has differed: a `Serialize` may discard the error.
    room: Option<&'o mut [u8]>,
}

impl<'o> Parts<'_, 'o> {
    #[inline(always)]
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Differs> {
        if self.left == 0 {
            let Some(run) = self.parts.next() else { return self.differ() };
            (self.left, self.part) = (run.number, run.at);
        }
        self.left -= 1;
        self.put(value, self.part)
    }

    #[inline(always)]
    fn field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Differs> {
        match self.parts.next() {
            Some(field) if same(field.name, name) => self.put(value, field.at),
            _ => self.differ(),
        }
    }

    #[inline(always)]
    fn put<T: Serialize + ?Sized>(&mut self, value: &T, at: NodeIndex) -> Result<(), Differs> {
        let room = self.room.take().ok_or(Differs)?;
        self.room = Some(part(value, Context { known: self.known, at, room })?);
        Ok(())
    }

    #[inline(always)]
    fn differ(&mut self) -> Result<(), Differs> {
        self.room = None;
        Err(Differs)
    }

    #[inline]
    fn finish(self) -> Put<'o> {
        self.room.filter(|_| self.left == 0 && self.parts.len() == 0).ok_or(Differs)
    }
}

macro_rules! compounds {
    ($($compound:ident $method:ident($($key:ident)?) $helper:ident $($skip:ident)?;)*) => {
        $(impl<'o> ser::$compound for Parts<'_, 'o> {
            type Ok = &'o mut [u8];
            type Error = Differs;

            #[inline(always)]
            fn $method<T: Serialize + ?Sized>(&mut self, $($key: &'static str,)? value: &T) -> Result<(), Differs> {
                self.$helper($($key,)? value)
            }

            $(fn $skip(&mut self, _key: &'static str) -> Result<(), Differs> {
                self.differ()
            })?

            #[inline]
            fn end(self) -> Put<'o> {
                self.finish()
            }
        })*
    };
}

compounds! {
    SerializeTuple serialize_element() element;
    SerializeTupleStruct serialize_field() element;
    SerializeTupleVariant serialize_field() element;
    SerializeStruct serialize_field(key) field skip_field;
    SerializeStructVariant serialize_field(key) field skip_field;
}
