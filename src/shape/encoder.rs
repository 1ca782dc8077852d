//! Postcard's encoding of a value, which notes on its way what the value shows of its type.
//!
//! The bytes are postcard's. Beside each part goes its position in what is [`Known`] of the type; only where a value shows
//! something new, a copy of that is made, and grows.

mod parts;

use std::any::type_name;
use std::fmt::{self, Display};

use postcard::ser_flavors::Flavor;
use serde::ser::{self, Serialize, Serializer};

use super::Leaf;
use super::known::{At, Kind, Known, ROOT};
use parts::{Entries, Fields, Items};

/// What stands here need not be looked at, nor what is in it.
const DONE: At = At::MAX;

/// From here on: what stands here is this leaf.
const LEAVES: At = DONE - 64;

/// Why a value can't be encoded.
#[derive(Debug)]
pub(crate) struct Fault(Box<str>);

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

impl ser::Error for Fault {
    #[cold]
    fn custom<T: Display>(message: T) -> Fault {
        Fault(message.to_string().into())
    }
}

/// A postcard flavor that appends to a vector.
struct Append<'a>(&'a mut Vec<u8>);

impl Flavor for Append<'_> {
    type Output = ();
    #[inline]
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }
    #[inline]
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// What a value has shown.
pub(super) enum Seen {
    /// Nothing that was not known.
    Nothing,
    /// More: what was known before, and this.
    More(Known),
    /// Something else than what was known: the value has to be looked at by itself.
    Otherwise,
}

/// Encodes a value at the end of `out`, while looking at what it shows beyond `known`.
#[inline]
pub(super) fn encode<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>, known: &Known) -> Result<Seen, Fault> {
    let mut look = Look::new(out, known, false);
    look.root(value)?;
    Ok(match look {
        Look { otherwise: true, .. } => Seen::Otherwise,
        Look { grown: None, .. } => Seen::Nothing,
        Look { grown: Some(grown), .. } => Seen::More(*grown),
    })
}

/// Encodes a value at the end of `out`: what it shows by itself.
#[cold]
pub(super) fn encode_alone<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) -> Result<Known, Fault> {
    let nothing = Known::nothing();
    let mut look = Look::new(out, &nothing, true);
    look.root(value)?;
    Ok(look.grown.map_or_else(Known::nothing, |grown| *grown))
}

/// The state of an encoding.
struct Look<'a> {
    out: postcard::Serializer<Append<'a>>,
    before: &'a Known,
    grown: Option<Box<Known>>,
    /// Nothing but this value counts: where it contradicts itself, or goes beyond the limits, nothing is said of the part.
    alone: bool,
    otherwise: bool,
}

impl<'a> Look<'a> {
    #[inline]
    fn new(out: &'a mut Vec<u8>, before: &'a Known, alone: bool) -> Look<'a> {
        Look { out: postcard::Serializer { output: Append(out) }, before, grown: None, alone, otherwise: false }
    }

    #[inline]
    fn root<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        self.part(value, ROOT)
    }

    /// Encodes a part at a position.
    #[inline]
    fn part<T: Serialize + ?Sized>(&mut self, value: &T, at: At) -> Result<(), Fault> {
        let at = if at >= LEAVES {
            at
        } else {
            match self.known().kind(at) {
                Kind::New => self.grow().enter(at, type_name::<T>()),
                Kind::Link(to) => *to,
                _ => at,
            }
        };
        value.serialize(Part { look: self, at })
    }

    #[inline]
    fn known(&self) -> &Known {
        self.grown.as_deref().unwrap_or(self.before)
    }

    #[cold]
    fn grow(&mut self) -> &mut Known {
        let before = self.before;
        self.grown.get_or_insert_with(|| Box::new(before.clone()))
    }

    /// There is no room for the parts of a position: nothing is said of it.
    #[cold]
    fn cut(&mut self, at: At) -> At {
        self.grow().set(at, Kind::Cut);
        DONE
    }

    /// The value is not what stands at a position.
    #[cold]
    fn contradict(&mut self, at: At) -> At {
        if !self.alone {
            self.otherwise = true;
        } else if at < LEAVES {
            self.cut(at);
        }
        DONE
    }

    #[inline]
    fn leaf(&mut self, at: At, leaf: Leaf) {
        if at == DONE || at == LEAVES + leaf as At {
            return;
        }
        if at >= LEAVES {
            self.contradict(at);
            return;
        }
        match self.known().kind(at) {
            Kind::Leaf(known) if *known == leaf => {}
            Kind::New => self.grow().set(at, Kind::Leaf(leaf)),
            Kind::Cut => {}
            _ => drop(self.contradict(at)),
        }
    }

    /// The position of what is in an option, sequence or map, of which there are `count` in a row.
    #[inline]
    fn inside(&mut self, at: At, of: impl Fn(&Kind) -> Option<At>, count: usize, make: impl FnOnce(At) -> Kind) -> At {
        if at == DONE {
            return DONE;
        }
        if at >= LEAVES {
            return self.contradict(at);
        }
        let kind = self.known().kind(at);
        if let Some(part) = of(kind) {
            return part;
        }
        match kind {
            Kind::Cut => DONE,
            Kind::New => match self.grow().allocate(at, count) {
                Some(part) => {
                    self.grow().set(at, make(part));
                    part
                }
                None => self.cut(at),
            },
            _ => self.contradict(at),
        }
    }

    #[inline]
    fn option(&mut self, at: At) -> At {
        self.inside(at, |kind| if let Kind::Option(part) = kind { Some(*part) } else { None }, 1, Kind::Option)
    }

    #[inline]
    fn seq(&mut self, at: At) -> At {
        self.inside(at, |kind| if let Kind::Seq(part) = kind { Some(*part) } else { None }, 1, Kind::Seq)
    }

    #[inline]
    fn map(&mut self, at: At) -> At {
        self.inside(at, |kind| if let Kind::Map(keys) = kind { Some(*keys) } else { None }, 2, Kind::Map)
    }

    /// The position of the content of a variant.
    #[inline]
    fn variant(&mut self, at: At, name: &'static str, index: u32, variant: &'static str) -> At {
        if at == DONE {
            return DONE;
        }
        if at >= LEAVES {
            return self.contradict(at);
        }
        match self.known().kind(at) {
            Kind::Enum { variants, .. } => match variants.binary_search_by_key(&index, |(index, ..)| *index) {
                Ok(found) if variants[found].1 == variant => variants[found].2,
                Ok(_) => self.contradict(at),
                Err(place) => self.new_variant(at, place, (index, variant)),
            },
            Kind::New => {
                self.grow().set(at, Kind::Enum { name, variants: Vec::new() });
                self.new_variant(at, 0, (index, variant))
            }
            Kind::Cut => DONE,
            _ => self.contradict(at),
        }
    }

    #[cold]
    fn new_variant(&mut self, at: At, place: usize, (index, variant): (u32, &'static str)) -> At {
        // Of the variants that there is room for, everything stays known.
        let Some(content) = self.grow().allocate(at, 1) else { return self.contradict(at) };
        if let Kind::Enum { variants, .. } = &mut self.grow().nodes[at as usize].kind {
            variants.insert(place, (index, variant, content));
        }
        content
    }

    /// Where the elements of a sequence behind its first one stand: if that showed all there is, they need not be looked at;
    /// leaves are, as that costs next to nothing.
    #[inline]
    fn others(&self, at: At) -> At {
        if at >= LEAVES {
            return at;
        }
        match &self.before.nodes.get(at as usize) {
            Some(node) if node.complete => match node.kind {
                Kind::Leaf(leaf) => LEAVES + leaf as At,
                _ => DONE,
            },
            _ => at,
        }
    }

    fn length(&mut self, len: usize) -> Result<(), Fault> {
        self.leaf_bytes(|out| out.serialize_u64(len as u64))
    }

    #[inline]
    fn leaf_bytes(
        &mut self,
        put: impl FnOnce(&mut postcard::Serializer<Append<'a>>) -> postcard::Result<()>,
    ) -> Result<(), Fault> {
        put(&mut self.out).map_err(ser::Error::custom)
    }
}

/// A value that is to be encoded, at its position.
struct Part<'l, 'a> {
    look: &'l mut Look<'a>,
    at: At,
}

macro_rules! leaves {
    ($($method:ident($type:ty) $leaf:ident;)*) => {
        $(#[inline]
        fn $method(self, value: $type) -> Result<(), Fault> {
            self.look.leaf(self.at, Leaf::$leaf);
            self.look.leaf_bytes(|out| out.$method(value))
        })*
    };
}

impl<'l, 'a> Serializer for Part<'l, 'a> {
    type Ok = ();
    type Error = Fault;
    type SerializeSeq = Items<'l, 'a>;
    type SerializeTuple = Items<'l, 'a>;
    type SerializeTupleStruct = Items<'l, 'a>;
    type SerializeTupleVariant = Items<'l, 'a>;
    type SerializeMap = Entries<'l, 'a>;
    type SerializeStruct = Fields<'l, 'a>;
    type SerializeStructVariant = Fields<'l, 'a>;

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

    #[inline]
    fn serialize_unit(self) -> Result<(), Fault> {
        self.look.leaf(self.at, Leaf::Unit);
        Ok(())
    }

    #[inline]
    fn serialize_none(self) -> Result<(), Fault> {
        self.look.option(self.at);
        self.look.leaf_bytes(|out| out.serialize_none())
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Fault> {
        let part = self.look.option(self.at);
        self.look.leaf_bytes(|out| out.serialize_u8(1))?;
        self.look.part(value, part)
    }

    #[inline]
    fn serialize_unit_variant(self, name: &'static str, index: u32, variant: &'static str) -> Result<(), Fault> {
        let content = self.look.variant(self.at, name, index, variant);
        self.look.leaf(content, Leaf::Unit);
        self.look.leaf_bytes(|out| out.serialize_u32(index))
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _name: &'static str, value: &T) -> Result<(), Fault> {
        value.serialize(self)
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Fault> {
        let content = self.look.variant(self.at, name, index, variant);
        self.look.leaf_bytes(|out| out.serialize_u32(index))?;
        self.look.part(value, content)
    }

    #[inline]
    fn serialize_seq(self, len: Option<usize>) -> Result<Items<'l, 'a>, Fault> {
        let Some(len) = len else { return Err(unknown_length("a sequence")) };
        let part = self.look.seq(self.at);
        self.look.length(len)?;
        Ok(Items::of_sequence(self.look, part))
    }

    #[inline]
    fn serialize_tuple(self, _len: usize) -> Result<Items<'l, 'a>, Fault> {
        Ok(Items::of_tuple(self.look, self.at))
    }

    #[inline]
    fn serialize_tuple_struct(self, _name: &'static str, _len: usize) -> Result<Items<'l, 'a>, Fault> {
        Ok(Items::of_tuple(self.look, self.at))
    }

    #[inline]
    fn serialize_tuple_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Items<'l, 'a>, Fault> {
        let content = self.look.variant(self.at, name, index, variant);
        self.look.leaf_bytes(|out| out.serialize_u32(index))?;
        Ok(Items::of_tuple(self.look, content))
    }

    #[inline]
    fn serialize_map(self, len: Option<usize>) -> Result<Entries<'l, 'a>, Fault> {
        let Some(len) = len else { return Err(unknown_length("a map, or a struct with `#[serde(flatten)]`,")) };
        let keys = self.look.map(self.at);
        self.look.length(len)?;
        Ok(Entries::new(self.look, keys))
    }

    #[inline]
    fn serialize_struct(self, name: &'static str, _len: usize) -> Result<Fields<'l, 'a>, Fault> {
        Ok(Fields::new(self.look, self.at, name))
    }

    #[inline]
    fn serialize_struct_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Fields<'l, 'a>, Fault> {
        let content = self.look.variant(self.at, name, index, variant);
        self.look.leaf_bytes(|out| out.serialize_u32(index))?;
        Ok(Fields::new(self.look, content, ""))
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<(), Fault> {
        self.serialize_str(&value.to_string())
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        false
    }
}

#[cold]
fn unknown_length(what: &str) -> Fault {
    ser::Error::custom(format_args!(
        "{what} does not say how many entries follow, and the format has no mark for their end: collect them first, \
         or give what is flattened a field of its own"
    ))
}
