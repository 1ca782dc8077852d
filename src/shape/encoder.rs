//! Encodes values as postcard does, and records what each value shows of its type.
//!
//! The encoder follows each part's position in what is known of the type. Only where a value shows something new, it copies
//! that, and extends the copy.

use std::any::type_name;
use std::fmt::{Display, Write};
use std::{array, slice};

use serde::ser::{self, Serialize, SerializeSeq as _, Serializer};

use super::Leaf;
use super::elements::{self, MANY};
use super::encode_error::{EncodeError, other_length, unknown_length};
use super::known::{self, DONE, KnownKind, KnownPart, KnownShape, LEAVES, NodeIndex, same};
use super::numbers::{encode_number, encode_u128, zigzag};
use super::plain::{self, Plain, for_each_plain};
use super::trailing::{EncodedList, note_encoded};
use crate::copy;
use crate::payload::LONG_LIST;

/// What a value has shown.
pub(super) enum Seen {
    /// Nothing new.
    Nothing,
    /// Something new: what was known before, extended.
    More(KnownShape),
    /// A contradiction to what was known: the value has to be encoded by itself.
    Otherwise,
}

/// Encodes a value at the end of `out`, and reports what it shows beyond `known`.
#[inline]
pub(super) fn encode<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>, known: &KnownShape) -> Result<Seen, EncodeError> {
    let mut look_ahead = LookAhead::new(out, known, false);
    look_ahead.part(value, known.root)?;
    note_encoded(look_ahead.list, look_ahead.out.len());
    Ok(match look_ahead {
        LookAhead { otherwise: true, .. } => Seen::Otherwise,
        LookAhead { grown: None, .. } => Seen::Nothing,
        LookAhead { grown: Some(grown), .. } => Seen::More(*grown),
    })
}

/// Encodes a value at the end of `out`, and returns the shape that it shows by itself.
#[cold]
pub(super) fn encode_alone<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) -> Result<KnownShape, EncodeError> {
    let nothing = KnownShape::nothing();
    let mut look_ahead = LookAhead::new(out, &nothing, true);
    look_ahead.part(value, nothing.root)?;
    note_encoded(look_ahead.list, look_ahead.out.len());
    Ok(look_ahead.grown.map_or_else(KnownShape::nothing, |grown| *grown))
}

/// The state of an encoding.
struct LookAhead<'a> {
    out: &'a mut Vec<u8>,
    before: &'a KnownShape,
    grown: Option<Box<KnownShape>>,
    /// The value is encoded by itself: contradictions within it, and parts beyond the limits, are recorded.
    alone: bool,
    otherwise: bool,
    /// How often it has grown.
    growths: u32,
    /// The last long list.
    list: Option<EncodedList>,
}

impl<'a> LookAhead<'a> {
    #[inline]
    fn new(out: &'a mut Vec<u8>, before: &'a KnownShape, alone: bool) -> LookAhead<'a> {
        LookAhead { out, before, grown: None, alone, otherwise: false, growths: 0, list: None }
    }

    /// Encodes the elements of a sequence; returns how many there were.
    #[inline]
    fn elements<T: Serialize>(&mut self, mut elements: impl Iterator<Item = T>, at: NodeIndex) -> Result<usize, EncodeError> {
        let mut count = 0;
        if self.elements_until_growth(&mut elements, at, &mut count, 0)? {
            count += self.elements_after_growth(elements, at, count)?;
        }
        Ok(count)
    }

    /// Encodes elements, and counts them. True if it pays to look back at what they have shown, as it does from the `next` one on.
    #[inline]
    fn elements_until_growth<T: Serialize>(
        &mut self,
        elements: &mut impl Iterator<Item = T>,
        at: NodeIndex,
        count: &mut usize,
        next: usize,
    ) -> Result<bool, EncodeError> {
        let before = self.growths;
        let mut are_known = self.before.is_whole(at);
        while are_known {
            let (known, other) = elements::encode(elements, at, self.before, self.out);
            *count += known;
            let Some(element) = other else { return Ok(false) };
            self.part(&element, at)?;
            *count += 1;
            if *count >= next && self.pays_to_look_back(before, elements) {
                return Ok(true);
            }
            are_known = known >= MANY;
        }
        while let Some(element) = elements.next() {
            self.part(&element, at)?;
            *count += 1;
            if *count >= next && self.pays_to_look_back(before, elements) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether it has grown since, and a copy of what this value has shown costs less than so many elements that take the long way.
    #[inline]
    fn pays_to_look_back(&self, growths: u32, elements: &impl Iterator) -> bool {
        let pays = |grown: &KnownShape| elements.size_hint().0 >= MANY.max(grown.nodes.len());
        self.growths != growths && self.grown.as_deref().is_some_and(pays)
    }

    /// Encodes further elements of a sequence, whose first `count` have shown something new. That is known before the others:
    /// these take the short way also in the first value of a type, and in one that contradicts what was known.
    #[cold]
    #[inline(never)]
    fn elements_after_growth<T: Serialize>(
        &mut self,
        mut elements: impl Iterator<Item = T>,
        mut at: NodeIndex,
        mut count: usize,
    ) -> Result<usize, EncodeError> {
        let first = count;
        loop {
            let mut shown = self.grown.take();
            if let Some(known) = shown.as_deref_mut().filter(|_| !self.alone) {
                // Contradictions to leaves are recorded in nodes only, and matter where the value is encoded alone.
                known.finish();
                at = known.resolved(at);
            }
            let before = shown.as_deref().unwrap_or(self.before);
            let mut rest = LookAhead { out: self.out, before, grown: None, ..*self };
            // This element may be the last that is new.
            let next = 2 * count;
            let looks_back = rest.elements_until_growth(&mut elements, at, &mut count, next)?;
            let LookAhead { grown, otherwise, growths, list, .. } = rest;
            (self.otherwise, self.growths, self.list) = (otherwise, growths, list);
            self.grown = grown.or(shown);
            if !looks_back {
                return Ok(count - first);
            }
        }
    }

    /// Encodes a part at a position.
    #[inline]
    fn part<T: Serialize + ?Sized>(&mut self, value: &T, at: NodeIndex) -> Result<(), EncodeError> {
        Position { look_ahead: self, at, ty: type_name::<T>() }.value(value)
    }

    /// The parts that were known before this value, if the position is of this kind. Extending does not change them.
    #[inline]
    fn parts_before(&self, at: NodeIndex, kind: KnownKind) -> Option<&'a [KnownPart]> {
        self.before.nodes.get(at as usize).filter(|node| node.kind == kind).map(|node| &node.parts[..])
    }

    /// As `parts_before`, for a struct or tuple. One that is still being learned, around the list of which this is an element, has
    /// more parts than are known.
    #[inline]
    fn whole_before(&self, at: NodeIndex, kind: KnownKind) -> Option<&'a [KnownPart]> {
        self.before.nodes.get(at as usize).filter(|node| node.kind == kind && node.sealed).map(|node| &node.parts[..])
    }

    /// The elements of a list or text have been encoded. Width 0: their bytes on the wire are others than in memory, or may be wrong.
    #[inline]
    fn note_list(&mut self, bytes: usize, width: u8) {
        if bytes >= LONG_LIST && width > 0 {
            self.list = Some(EncodedList::new(bytes, width, self.out.len()));
        }
    }

    fn known(&self) -> &KnownShape {
        self.grown.as_deref().unwrap_or(self.before)
    }

    #[cold]
    fn grow(&mut self) -> &mut KnownShape {
        let before = self.before;
        self.growths = self.growths.wrapping_add(1);
        self.grown.get_or_insert_with(|| Box::new(before.clone()))
    }

    /// Marks a position whose parts exceed the limits as unknown.
    #[cold]
    fn cut(&mut self, at: NodeIndex) -> NodeIndex {
        self.grow().node_mut(at).kind = KnownKind::Cut;
        DONE
    }

    /// Records that the value contradicts a position. `but_for_names`: it does even when names are ignored.
    #[cold]
    fn contradict(&mut self, at: NodeIndex, but_for_names: bool) -> NodeIndex {
        if !self.alone {
            self.otherwise = true;
        } else if but_for_names && self.known().is_one_type_at(at) {
            // A receiver's single type can't fit all of them.
            self.grow().node_mut(at).kind = KnownKind::Mixed;
        } else {
            self.cut(at);
        }
        DONE
    }

    /// Enters a value of this kind at a position where no such value was known before. Returns the position to continue at, or
    /// `None` if the value is not to be recorded.
    #[cold]
    fn settle(&mut self, mut at: NodeIndex, ty: &'static str, kind: KnownKind, name: &'static str) -> Option<NodeIndex> {
        if at >= LEAVES {
            self.otherwise |= at != DONE;
            return None;
        }
        if self.known().node(at).kind == KnownKind::New {
            at = self.grow().enter(at, ty);
        }
        if let KnownKind::Link(to) = self.known().node(at).kind {
            at = to;
        }
        match (self.known().node(at).kind, kind) {
            (known, kind) if known == kind => return Some(at),
            (KnownKind::New, _) => {
                let node = self.grow().node_mut(at);
                (node.kind, node.name) = (kind, name);
                return Some(at);
            }
            (KnownKind::Cut | KnownKind::Mixed, _) => {}
            // Both have the same layout.
            (KnownKind::Leaf(Leaf::Bytes), KnownKind::Seq) | (KnownKind::Seq, KnownKind::Leaf(Leaf::Bytes)) => {
                self.contradict(at, false);
            }
            _ => {
                self.contradict(at, true);
            }
        }
        None
    }

    /// The positions of the content of an option, sequence or map.
    #[cold]
    fn inside<const N: usize>(&mut self, at: NodeIndex, ty: &'static str, kind: KnownKind) -> [NodeIndex; N] {
        let Some(at) = self.settle(at, ty, kind, "") else { return [DONE; N] };
        if self.known().node(at).parts.is_empty() && !(0..N).all(|place| self.grow().add(at, place, 1, "").is_some()) {
            self.cut(at);
            return [DONE; N];
        }
        array::from_fn(|place| self.known().node(at).parts[place].at)
    }

    /// The position of the content of a variant that may be new.
    #[cold]
    fn variant(&mut self, at: NodeIndex, ty: &'static str, name: &'static str, index: u32, variant: &'static str) -> NodeIndex {
        let Some(at) = self.settle(at, ty, KnownKind::Enum, name) else { return DONE };
        let variants = &self.known().node(at).parts;
        match variants.binary_search_by_key(&index, |variant| variant.number) {
            Ok(found) if variants[found].name == variant => variants[found].at,
            Ok(_) => self.contradict(at, false),
            // The variants that fit into the limits stay known.
            Err(place) => self.grow().add(at, place, index, variant).unwrap_or_else(|| self.contradict(at, false)),
        }
    }
}

/// The serializer of one value, at its position.
struct Position<'l, 'a> {
    look_ahead: &'l mut LookAhead<'a>,
    at: NodeIndex,
    /// The name of its type.
    ty: &'static str,
}

impl<'l, 'a> Position<'l, 'a> {
    /// Encodes the value that is there.
    #[inline]
    fn value<T: Serialize + ?Sized>(self, value: &T) -> Result<(), EncodeError> {
        match plain::array_of(value) {
            None => value.serialize(self),
            Some(array) => match self.look_ahead.whole_before(self.at, KnownKind::Tuple) {
                Some([run]) if (run.number, run.at) == (array.count, known::leaf(array.of)) => {
                    copy::append(array.bytes, self.look_ahead.out);
                    Ok(())
                }
                _ => self.new_array(value),
            },
        }
    }

    /// Encodes an array whose type is not known yet.
    #[cold]
    #[inline(never)]
    fn new_array<T: Serialize + ?Sized>(self, value: &T) -> Result<(), EncodeError> {
        value.serialize(self)
    }

    #[inline]
    fn leaf(&mut self, leaf: Leaf) {
        if self.at != known::leaf(leaf) {
            self.look_ahead.settle(self.at, self.ty, KnownKind::Leaf(leaf), "");
        }
    }

    #[inline]
    fn inside<const N: usize>(&mut self, kind: KnownKind) -> [NodeIndex; N] {
        match self.look_ahead.parts_before(self.at, kind) {
            Some(parts) if parts.len() == N => array::from_fn(|place| parts[place].at),
            _ => self.look_ahead.inside(self.at, self.ty, kind),
        }
    }

    /// Writes the number of a variant. Returns the position of its content.
    #[inline]
    fn variant(self, name: &'static str, index: u32, variant: &'static str) -> Position<'l, 'a> {
        encode_number(index.into(), self.look_ahead.out);
        let variants = self.look_ahead.parts_before(self.at, KnownKind::Enum).unwrap_or(&[]);
        let at = match known::variant(variants, index) {
            Some(found) if same(found.name, variant) => found.at,
            _ => self.look_ahead.variant(self.at, self.ty, name, index, variant),
        };
        Position { look_ahead: self.look_ahead, at, ty: "" }
    }

    /// Encodes a sequence of numbers or points.
    fn numbers<T: Plain + Serialize>(mut self, numbers: &[T]) -> Result<(), EncodeError> {
        self.length(Some(numbers.len()), "a sequence")?;
        let [at] = self.inside(KnownKind::Seq);
        if let Some(first) = numbers.first() {
            // It shows what all of them show. Its bytes are written again with the others'.
            let len = self.look_ahead.out.len();
            self.look_ahead.part(&first, at)?;
            self.look_ahead.out.truncate(len);
        }
        T::encode(numbers, self.look_ahead.out);
        self.look_ahead.note_list(size_of_val(numbers), T::WIDTH);
        Ok(())
    }

    /// Writes the bytes of a text or byte string.
    #[inline]
    fn bytes(self, bytes: &[u8]) -> Result<(), EncodeError> {
        encode_bytes(bytes, self.look_ahead.out);
        self.look_ahead.note_list(bytes.len(), 1);
        Ok(())
    }

    /// Writes how many elements or entries follow.
    #[inline]
    fn length(&mut self, len: Option<usize>, what: &str) -> Result<usize, EncodeError> {
        let len = len.ok_or_else(|| unknown_length(what))?;
        encode_number(len as u64, self.look_ahead.out);
        Ok(len)
    }
}

macro_rules! leaves {
    ($($method:ident($value:ident: $type:ty) $leaf:ident |$out:ident| $write:expr;)*) => {
        $(#[inline]
        fn $method(mut self, $value: $type) -> Result<(), EncodeError> {
            self.leaf(Leaf::$leaf);
            let $out = &mut *self.look_ahead.out;
            $write;
            Ok(())
        })*
    };
}

#[inline]
fn encode_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    encode_number(bytes.len() as u64, out);
    copy::append(bytes, out);
}

impl<'l, 'a> Serializer for Position<'l, 'a> {
    type Ok = ();
    type Error = EncodeError;
    type SerializeSeq = EncodedItems<'l, 'a>;
    type SerializeTuple = EncodedParts<'l, 'a>;
    type SerializeTupleStruct = EncodedParts<'l, 'a>;
    type SerializeTupleVariant = EncodedParts<'l, 'a>;
    type SerializeMap = EncodedEntries<'l, 'a>;
    type SerializeStruct = EncodedParts<'l, 'a>;
    type SerializeStructVariant = EncodedParts<'l, 'a>;

    leaves! {
        serialize_bool(value: bool) Bool |out| out.push(value.into());
        serialize_i8(value: i8) I8 |out| out.push(value as u8);
        serialize_i16(value: i16) I16 |out| encode_number(zigzag(value.into()), out);
        serialize_i32(value: i32) I32 |out| encode_number(zigzag(value.into()), out);
        serialize_i64(value: i64) I64 |out| encode_number(zigzag(value), out);
        serialize_i128(value: i128) I128 |out| encode_u128(((value << 1) ^ (value >> 127)) as u128, out);
        serialize_u8(value: u8) U8 |out| out.push(value);
        serialize_u16(value: u16) U16 |out| encode_number(value.into(), out);
        serialize_u32(value: u32) U32 |out| encode_number(value.into(), out);
        serialize_u64(value: u64) U64 |out| encode_number(value, out);
        serialize_u128(value: u128) U128 |out| encode_u128(value, out);
        serialize_f32(value: f32) F32 |out| out.extend_from_slice(&value.to_le_bytes());
        serialize_f64(value: f64) F64 |out| out.extend_from_slice(&value.to_le_bytes());
        serialize_char(value: char) Char |out| encode_bytes(value.encode_utf8(&mut [0; 4]).as_bytes(), out);
    }

    #[inline]
    fn serialize_str(mut self, value: &str) -> Result<(), EncodeError> {
        self.leaf(Leaf::Str);
        self.bytes(value.as_bytes())
    }

    #[inline]
    fn serialize_bytes(mut self, value: &[u8]) -> Result<(), EncodeError> {
        self.leaf(Leaf::Bytes);
        self.bytes(value)
    }

    #[inline]
    fn serialize_unit(mut self) -> Result<(), EncodeError> {
        self.leaf(Leaf::Unit);
        Ok(())
    }

    #[inline]
    fn serialize_unit_struct(self, _name: &'static str) -> Result<(), EncodeError> {
        self.serialize_unit()
    }

    #[inline]
    fn serialize_none(mut self) -> Result<(), EncodeError> {
        let [_] = self.inside(KnownKind::Option);
        self.look_ahead.out.push(0);
        Ok(())
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(mut self, value: &T) -> Result<(), EncodeError> {
        let [part] = self.inside(KnownKind::Option);
        self.look_ahead.out.push(1);
        self.look_ahead.part(value, part)
    }

    #[inline]
    fn serialize_unit_variant(self, name: &'static str, index: u32, variant: &'static str) -> Result<(), EncodeError> {
        self.variant(name, index, variant).serialize_unit()
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _name: &'static str, value: &T) -> Result<(), EncodeError> {
        self.value(value)
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), EncodeError> {
        let content = self.variant(name, index, variant);
        content.look_ahead.part(value, content.at)
    }

    #[inline]
    fn serialize_seq(mut self, len: Option<usize>) -> Result<EncodedItems<'l, 'a>, EncodeError> {
        let left = self.length(len, "a sequence")?;
        let [at] = self.inside(KnownKind::Seq);
        Ok(EncodedItems { look_ahead: self.look_ahead, at, left })
    }

    #[inline]
    fn serialize_tuple(self, _len: usize) -> Result<EncodedParts<'l, 'a>, EncodeError> {
        Ok(EncodedParts::new(self, KnownKind::Tuple, ""))
    }

    #[inline]
    fn serialize_tuple_struct(self, _name: &'static str, _len: usize) -> Result<EncodedParts<'l, 'a>, EncodeError> {
        Ok(EncodedParts::new(self, KnownKind::Tuple, ""))
    }

    #[inline]
    fn serialize_tuple_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<EncodedParts<'l, 'a>, EncodeError> {
        Ok(EncodedParts::new(self.variant(name, index, variant), KnownKind::Tuple, ""))
    }

    #[inline]
    fn serialize_map(mut self, len: Option<usize>) -> Result<EncodedEntries<'l, 'a>, EncodeError> {
        let left = self.length(len, "a map, or a struct with `#[serde(flatten)]`,")?;
        let [keys, values] = self.inside(KnownKind::Map);
        Ok(EncodedEntries { look_ahead: self.look_ahead, keys, values, left })
    }

    #[inline]
    fn serialize_struct(self, name: &'static str, _len: usize) -> Result<EncodedParts<'l, 'a>, EncodeError> {
        Ok(EncodedParts::new(self, KnownKind::Struct, name))
    }

    #[inline]
    fn serialize_struct_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<EncodedParts<'l, 'a>, EncodeError> {
        Ok(EncodedParts::new(self.variant(name, index, variant), KnownKind::Struct, ""))
    }

    #[inline]
    fn collect_seq<I: IntoIterator<Item: Serialize>>(self, sequence: I) -> Result<(), EncodeError> {
        macro_rules! find {
            ($($ty:ty)*) => {
                $(if let Some(numbers) = plain::slice_of::<I, $ty>(&sequence) {
                    return self.numbers(numbers);
                })*
            };
        }
        for_each_plain!(find!);
        let elements = sequence.into_iter();
        let len = match elements.size_hint() {
            (least, Some(most)) if least == most => Some(least),
            _ => None,
        };
        let mut items = self.serialize_seq(len)?;
        let count = items.look_ahead.elements(elements, items.at)?;
        items.left = items.left.wrapping_sub(count);
        items.end()
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<(), EncodeError> {
        let mut text = String::new();
        write!(text, "{value}")
            .map_err(|_| <EncodeError as ser::Error>::custom("a `Display` that is sent as text has failed"))?;
        self.serialize_str(&text)
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        false
    }
}

/// The elements of a sequence.
struct EncodedItems<'l, 'a> {
    look_ahead: &'l mut LookAhead<'a>,
    at: NodeIndex,
    /// Elements that are still to come.
    left: usize,
}

impl ser::SerializeSeq for EncodedItems<'_, '_> {
    type Ok = ();
    type Error = EncodeError;

    #[inline]
    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), EncodeError> {
        self.left = self.left.wrapping_sub(1);
        self.look_ahead.part(value, self.at)
    }

    #[inline]
    fn end(self) -> Result<(), EncodeError> {
        if self.left == 0 { Ok(()) } else { Err(other_length("a sequence")) }
    }
}

/// The entries of a map.
struct EncodedEntries<'l, 'a> {
    look_ahead: &'l mut LookAhead<'a>,
    keys: NodeIndex,
    values: NodeIndex,
    /// Entries that are still to come.
    left: usize,
}

impl ser::SerializeMap for EncodedEntries<'_, '_> {
    type Ok = ();
    type Error = EncodeError;

    #[inline]
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), EncodeError> {
        self.look_ahead.part(key, self.keys)
    }

    #[inline]
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), EncodeError> {
        self.left = self.left.wrapping_sub(1);
        self.look_ahead.part(value, self.values)
    }

    #[inline]
    fn end(self) -> Result<(), EncodeError> {
        if self.left == 0 { Ok(()) } else { Err(other_length("a map")) }
    }
}

/// The elements of a tuple, or the fields of a struct.
///
/// The compiler keeps this in registers while the parts that were known before are encoded, as long as its address is never
/// taken. So what is rare works on a copy of [`PartsLearned`], and returns it; and what derived code calls for each part is always
/// inlined.
struct EncodedParts<'l, 'a> {
    look_ahead: &'l mut LookAhead<'a>,
    /// The known parts that are still to come.
    known: slice::Iter<'a, KnownPart>,
    /// Number of elements of the last run that are left; their position is `part`.
    left: u32,
    part: NodeIndex,
    learned: PartsLearned,
}

/// What a tuple or struct needs to know when it shows something new.
#[derive(Clone, Copy)]
struct PartsLearned {
    /// Its position.
    at: NodeIndex,
    /// Whether it was not known before. Then `run` is the part that the last element belongs to, and `used` how many elements
    /// it had.
    learning: bool,
    run: u32,
    used: u32,
}

impl<'l, 'a> EncodedParts<'l, 'a> {
    #[inline]
    fn new(Position { look_ahead, at, ty }: Position<'l, 'a>, kind: KnownKind, name: &'static str) -> Self {
        let (parts, at, learning) = match look_ahead.whole_before(at, kind) {
            Some(parts) => (parts, at, false),
            None => (&[][..], look_ahead.settle(at, ty, kind, name).unwrap_or(DONE), true),
        };
        let learned = PartsLearned { at, learning, run: 0, used: 0 };
        EncodedParts { look_ahead, known: parts.iter(), left: 0, part: DONE, learned }
    }

    #[inline(always)]
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), EncodeError> {
        if self.left == 0 {
            (self.left, self.part) = match self.known.next() {
                Some(run) => (run.number, run.at),
                None => (1, self.learn(type_name::<T>(), None)),
            };
        }
        self.left -= 1;
        self.look_ahead.part(value, self.part)
    }

    #[inline(always)]
    fn field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), EncodeError> {
        let at = match self.known.next() {
            Some(part) if same(part.name, name) => part.at,
            Some(_) => {
                self.known = [].iter();
                self.learned = self.learned.fail(self.look_ahead, false);
                DONE
            }
            None => self.learn("", Some(name)),
        };
        self.look_ahead.part(value, at)
    }

    #[inline(always)]
    fn learn(&mut self, ty: &'static str, field: Option<&'static str>) -> NodeIndex {
        let (learned, at) = self.learned.learn(self.look_ahead, ty, field);
        self.learned = learned;
        at
    }

    #[inline]
    fn finish(self) -> Result<(), EncodeError> {
        if self.learned.learning || self.left > 0 || self.known.len() > 0 {
            self.learned.seal(self.look_ahead);
        }
        Ok(())
    }

    /// A skipped field is an error: the receiver would decode the next field in its place.
    fn skip(&mut self, key: &'static str) -> Result<(), EncodeError> {
        self.learned.skip(self.look_ahead, key)
    }
}

impl PartsLearned {
    /// The position of an element, or of the field of this name, which was not known before.
    #[cold]
    fn learn(
        mut self,
        look_ahead: &mut LookAhead<'_>,
        ty: &'static str,
        field: Option<&'static str>,
    ) -> (PartsLearned, NodeIndex) {
        if self.at == DONE {
            return (self, DONE);
        }
        if !self.learning {
            return (self.fail(look_ahead, true), DONE);
        }
        let node = look_ahead.known().node(self.at);
        let (end, is_used_up) = (node.parts.len() as u32, |part: &KnownPart| part.number == self.used);
        if self.run + 1 < end && node.parts.get(self.run as usize).is_some_and(is_used_up) {
            (self.run, self.used) = (self.run + 1, 0);
        }
        let at = match node.parts.get(self.run as usize) {
            Some(part) if self.used < part.number => {
                if field.is_some_and(|name| name != part.name) {
                    return (self.fail(look_ahead, false), DONE);
                }
                part.at
            }
            _ if node.sealed => return (self.fail(look_ahead, true), DONE),
            _ => {
                let known = look_ahead.grow();
                if let Some(at) = known.join(self.at, ty) {
                    at
                } else if let Some(at) = known.add(self.at, end as usize, 1, field.unwrap_or(ty)) {
                    (self.run, self.used) = (end, 0);
                    at
                } else {
                    self.at = look_ahead.cut(self.at);
                    return (self, DONE);
                }
            }
        };
        self.used += 1;
        (self, at)
    }

    /// Records that the value is another tuple or struct.
    #[cold]
    fn fail(mut self, look_ahead: &mut LookAhead<'_>, but_for_names: bool) -> PartsLearned {
        look_ahead.contradict(self.at, but_for_names);
        self.at = DONE;
        self
    }

    #[cold]
    fn seal(self, look_ahead: &mut LookAhead<'_>) {
        if self.at == DONE {
            return;
        }
        let node = look_ahead.known().node(self.at);
        let last = node.parts.last();
        if !self.learning || self.run as usize + 1 < node.parts.len() || last.is_some_and(|part| part.number != self.used) {
            self.fail(look_ahead, true);
        } else if !node.sealed {
            look_ahead.grow().node_mut(self.at).sealed = true;
        }
    }

    #[cold]
    fn skip(self, look_ahead: &LookAhead<'_>, key: &'static str) -> Result<(), EncodeError> {
        let name = look_ahead.known().nodes.get(self.at as usize).map_or("", |node| node.name);
        Err(ser::Error::custom(format_args!(
            "the field `{key}` of `{name}` is left out, as `#[serde(skip_serializing_if)]` does, and the format has no names by \
             which the receiver could tell: remove the attribute, or make it `skip`"
        )))
    }
}

macro_rules! compounds {
    ($($compound:ident $method:ident($($key:ident)?) $helper:ident $($skip:ident)?;)*) => {
        $(impl ser::$compound for EncodedParts<'_, '_> {
            type Ok = ();
            type Error = EncodeError;

            #[inline(always)]
            fn $method<T: Serialize + ?Sized>(&mut self, $($key: &'static str,)? value: &T) -> Result<(), EncodeError> {
                self.$helper($($key,)? value)
            }

            $(fn skip_field(&mut self, key: &'static str) -> Result<(), EncodeError> {
                self.$skip(key)
            })?

            #[inline]
            fn end(self) -> Result<(), EncodeError> {
                self.finish()
            }
        })*
    };
}

compounds! {
    SerializeTuple serialize_element() element;
    SerializeTupleStruct serialize_field() element;
    SerializeTupleVariant serialize_field() element;
    SerializeStruct serialize_field(key) field skip;
    SerializeStructVariant serialize_field(key) field skip;
}
