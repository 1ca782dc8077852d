//! A deserializer for postcard that bounds depth, elements and memory, for bytes from an untrusted peer.
//!
//! Postcard trusts its input. A recursive type nests as deep as the bytes say, until the stack overflows; a sequence of
//! elements of size zero has as many as the bytes say, up to 2^64; an empty `String` takes one byte in the message and 24 in
//! memory. All of that is bounded here. The first two bounds refuse nothing that an honest peer sends, but for nesting beyond
//! [`MAX_DEPTH`] and more than [`FREE_ELEMENTS`] elements without bytes.
//!
//! **Memory.** The deserializer adds up the memory of the elements of lists and maps, with the slots that sets and maps leave
//! free, the allocator's overhead for each list and string, and the content of boxes, as far as it is larger than the box. (The
//! characters of a string do not count: they take as much in the message.) Beyond [`free_memory`], the caller has to grant more,
//! or decoding fails.
//!
//! Postcard itself decodes primitive values, but for numbers of 16 to 64 bits. A `Vec` of numbers or points is decoded as a whole, by
//! [`plain_decoder`], and elements in which there is nothing to account for by [`flat`]. The rest is decoded here, by postcard's wire
//! format 1.0: a tuple or struct is its fields, a sequence or map its length and its elements, an option a byte, an enum a number.

use std::any::Any;
use std::cell::Cell;
use std::mem;

use postcard::Error;
use postcard::de_flavors::Slice;
use serde::Deserialize;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};

use super::flat::{self, is_serdes_own};
use crate::copy;
use crate::memory::ReceivedMessage;
use crate::shape::{PlainDecoder, Verdicts, decode_array, decode_number, is_plain_array, plain_decoder, unzigzag};
use crate::text::beginning;

/// Maximum nesting depth. A thread's stack of 2 MiB has 16 KiB for each; an enum with thirteen fields takes 8 KiB in a
/// debug build.
const MAX_DEPTH: u32 = 128;

/// Bytes of the stack that nested values may take, where a level takes more than that: half of a thread's usual stack. The other
/// half is for the innermost level.
const MAX_STACK: usize = 1 << 20;

/// Most elements that a `Deserialize` by others than serde itself is told to expect. Such an impl may reserve memory for all of
/// them, however large they are; serde's own reserve a mebibyte at most.
const MAX_EXPECTED: usize = 4096;

/// Elements that take no bytes in the message, as those of `Vec<()>`. All others take at least one byte each. Decoding so many
/// takes some microseconds.
const FREE_ELEMENTS: usize = 16 << 10;

/// Elements are first decoded by [`flat`]. In programs that are not optimized each level of lists would take more stack for it.
const FLAT: bool = cfg!(any(not(debug_assertions), test));

/// Bytes that the allocator adds to a small allocation.
const ALLOCATION: usize = 32;
/// Bytes that values may take beyond the message's length without a grant. So a list of bytes or of floats, which takes no more
/// but for its allocation, needs none, nor do a few small maps.
const FREE_MEMORY: usize = 2 << 10;

/// Bytes of the text of an error that a type has made. A peer's bytes may be in it.
const MAX_REFUSAL: usize = 300;

/// Bytes of memory that the values in a message of `len` bytes may take without a grant.
pub(super) fn free_memory(len: usize) -> usize {
    len.saturating_add(FREE_MEMORY)
}

/// Decodes the whole of `bytes`. Returns the value, and how many bytes of memory it takes beside its own size. Calls `more`
/// where that is more than [`free_memory`].
///
/// # Errors
/// The cause, with the numbers: bytes that are no `T`, bytes left over, and values beyond the bounds.
#[inline]
pub(crate) fn decode_within<'a, T: Deserialize<'a>>(bytes: &'a [u8], more: AskForMemory<'_>) -> Result<(T, usize), String> {
    let mut bounded = Bounded::new(bytes, bytes.len(), size_of::<T>(), more);
    let decoded = T::deserialize(&mut bounded);
    bounded.finish(decoded)
}

/// As [`decode_within`], of a long message. A list or text that it ends with takes over its memory, where it can; `verdicts` learn
/// whether the next message should have such memory.
// Once in a program for each type: `decode_within` is inlined for short messages.
#[inline(never)]
pub(crate) fn decode_message<T: DeserializeOwned>(
    message: &mut ReceivedMessage,
    verdicts: &Verdicts,
    more: AskForMemory<'_>,
) -> Result<(T, usize), String> {
    let had_list = message.list().is_some();
    let _copied = had_list.then(|| CopiedOnPanic(verdicts));
    loop {
        let mut bounded = match message.list() {
            Some(list) => {
                let len = list.len();
                let (head, vector) = list.parts();
                let apart = Some(Apart { vector, len: len - head.len() });
                Bounded { apart, ..Bounded::new(head, len, size_of::<T>(), &mut *more) }
            }
            None => Bounded::new(message, message.len(), size_of::<T>(), &mut *more),
        };
        let decoded = T::deserialize(&mut bounded);
        // What is refused for want of memory stays as it is, to be decoded later.
        if bounded.apart.is_none() || matches!(bounded.exceeded, Some(Bound::Memory { .. })) {
            let decoded = bounded.finish(decoded);
            if !had_list && decoded.is_ok() {
                verdicts.note_long();
            }
            return decoded;
        }
        // The type does not take the elements as a whole.
        verdicts.note_copied();
        message.join();
    }
}

/// A type that panics where it finds no elements would do so with each message.
struct CopiedOnPanic<'v>(&'v Verdicts);

impl Drop for CopiedOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.note_copied();
        }
    }
}

/// As `decode_within`, without a bound on memory: for tests and fuzzers.
#[cfg(any(test, fuzzing))]
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, String> {
    decode_within(bytes, &mut |_| Some(usize::MAX)).map(|(value, _)| value)
}

/// Called with the bytes of memory that the values take by now. Returns how many they may take, at least as many, or `None` to
/// refuse.
pub(super) type AskForMemory<'a> = &'a mut dyn FnMut(usize) -> Option<usize>;

/// The bytes are refused; [`Bounded`] or [`REFUSAL`] has the reason. An error of any size would lie in each result between its
/// tag and the value, and a value that a function returns would be copied around it in pieces: a list of structs took a third
/// longer.
#[derive(Debug)]
struct Undecodable;

thread_local! {
    /// The text of the last error, where the type has made it.
    static REFUSAL: Cell<Option<String>> = const { Cell::new(None) };
}

/// A thread that ends has no place for a text any more; then it is lost.
fn replace_refusal(text: Option<String>) -> Option<String> {
    REFUSAL.try_with(|refusal| refusal.replace(text)).ok().flatten()
}

type Decoded<T> = Result<T, Undecodable>;

impl std::fmt::Display for Undecodable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the value can't be decoded")
    }
}

impl std::error::Error for Undecodable {}

impl de::Error for Undecodable {
    #[cold]
    fn custom<T: std::fmt::Display>(message: T) -> Undecodable {
        replace_refusal(Some(beginning(message, MAX_REFUSAL)));
        Undecodable
    }
}

/// The elements of the list or text that the message ends with, where they have memory of their own and have not been taken.
struct Apart<'m> {
    /// A `Vec<u8>`, `Vec<f32>` or `Vec<f64>`, which is empty once it was taken.
    vector: &'m mut (dyn Any + Send),
    /// How many bytes it has.
    len: usize,
}

/// Postcard's deserializer, and what is left of the bounds.
struct Bounded<'de, 'm> {
    postcard: postcard::Deserializer<'de, Slice<'de>>,
    apart: Option<Apart<'m>>,
    /// Of the whole message.
    len: usize,
    levels: u32,
    /// Where the stack was when decoding began.
    stack: usize,
    elements: usize,
    /// Bytes of memory that the values take; they may take `allowed`: any, once elements have been taken, without which the message can't be
    /// decoded again. No bytes of it are left then, so that only fields which are not in it can take more, as much as the type says.
    memory: usize,
    allowed: usize,
    /// Bytes, already counted, of the memory that the value which is being decoded is stored in: those of its own field, not of
    /// all that lies around it, which may be as large as what is in a box of it.
    container: usize,
    more: AskForMemory<'m>,
    /// The bound that was exceeded.
    exceeded: Option<Bound>,
    /// What else was wrong last; unless [`REFUSAL`] has a text.
    error: Error,
    /// Number of variants of the enum that is being decoded.
    variants: u32,
}

#[derive(Clone, Copy)]
enum Bound {
    Depth,
    Stack,
    Elements,
    Memory {
        allowed: usize,
    },
    /// The type needs a format that describes itself.
    Undescribed,
    Variant(u32),
}

impl<'de, 'm> Bounded<'de, 'm> {
    #[inline]
    fn new(bytes: &'de [u8], len: usize, container: usize, more: AskForMemory<'m>) -> Bounded<'de, 'm> {
        Bounded {
            postcard: postcard::Deserializer::from_bytes(bytes),
            apart: None,
            len,
            levels: MAX_DEPTH,
            elements: len + FREE_ELEMENTS,
            memory: 0,
            allowed: free_memory(len),
            stack: stack_position(),
            container,
            more,
            exceeded: None,
            error: Error::SerdeDeCustom,
            variants: 0,
        }
    }

    #[inline]
    fn finish<T>(self, decoded: Decoded<T>) -> Result<(T, usize), String> {
        let Bounded { postcard, len, exceeded, error, memory, .. } = self;
        let rest = postcard.finalize();
        match decoded {
            Ok(value) if exceeded.is_none() && matches!(rest, Ok([])) => Ok((value, memory)),
            Ok(_) => Err(explain(std::any::type_name::<T>(), len, exceeded, rest)),
            Err(Undecodable) => Err(explain(std::any::type_name::<T>(), len, exceeded, Err(error))),
        }
    }

    /// Decodes the content of a value, one level down.
    #[inline]
    fn descend<T>(&mut self, inside: impl FnOnce(&mut Self) -> Decoded<T>) -> Decoded<T> {
        if self.levels == 0 {
            return Err(self.exceed(Bound::Depth));
        }
        let container = self.container;
        if size_of::<T>() > container {
            self.enter_box(size_of::<T>())?;
        }
        self.levels -= 1;
        let decoded = inside(self);
        self.levels += 1;
        self.container = container;
        decoded
    }

    /// A value of so many bytes is larger than its container, so it is most likely in a box.
    #[cold]
    fn enter_box(&mut self, size: usize) -> Decoded<()> {
        self.check_stack()?;
        self.count(size + ALLOCATION)?;
        self.container = size;
        Ok(())
    }

    /// Each recursion goes through a box, a list or a map, so it is enough to ask there. Under Miri, and with the sanitizer that
    /// fuzzers use, variables do not lie on a stack.
    #[inline]
    fn check_stack(&mut self) -> Decoded<()> {
        if !cfg!(any(miri, fuzzing)) && self.stack.abs_diff(stack_position()) > MAX_STACK {
            Err(self.exceed(Bound::Stack))
        } else {
            Ok(())
        }
    }

    /// Accounts for so many more bytes of memory.
    #[inline]
    fn count(&mut self, bytes: usize) -> Decoded<()> {
        self.memory = self.memory.saturating_add(bytes);
        if self.memory > self.allowed { self.ask() } else { Ok(()) }
    }

    #[cold]
    fn ask(&mut self) -> Decoded<()> {
        match (self.more)(self.memory) {
            Some(allowed) => {
                self.allowed = allowed;
                Ok(())
            }
            None => Err(self.exceed(Bound::Memory { allowed: self.allowed })),
        }
    }

    /// Decodes the length of a sequence or map. All of its elements are accounted for here, so that a false length costs no
    /// time.
    #[inline]
    fn decode_length(&mut self) -> Decoded<usize> {
        self.check_stack()?;
        let length = self.number::<{ usize::BITS }>()? as usize;
        match self.elements.checked_sub(length) {
            Some(elements) => {
                self.elements = elements;
                if length > 0 {
                    self.count(ALLOCATION)?;
                }
                Ok(length)
            }
            None => Err(self.exceed(Bound::Elements)),
        }
    }

    /// Decodes a primitive value by postcard.
    #[inline]
    fn primitive<T: Deserialize<'de>>(&mut self) -> Decoded<T> {
        T::deserialize(&mut self.postcard).map_err(|error| self.refuse(error))
    }

    /// Decodes a number of at most so many bits.
    #[inline]
    fn number<const BITS: u32>(&mut self) -> Decoded<u64> {
        self.decode_by(decode_number::<BITS>)
    }

    /// Decodes a text or some bytes that the value will own.
    #[inline]
    fn owned<T: Deserialize<'de> + AsRef<[u8]>>(&mut self) -> Decoded<T> {
        let bytes: T = self.primitive()?;
        self.count(if bytes.as_ref().is_empty() { 0 } else { ALLOCATION })?;
        Ok(bytes)
    }

    /// The bytes of the text or byte string that follows, if they are those that lie apart. Else nothing is decoded.
    #[cold]
    fn take_bytes(&mut self) -> Decoded<Option<Vec<u8>>> {
        let before = self.rest()?;
        let len = self.number::<{ usize::BITS }>()? as usize;
        let is_all = self.rest()?.is_empty();
        let has_them = |apart: &Apart<'_>| apart.vector.downcast_ref().is_some_and(|bytes: &Vec<u8>| bytes.len() == len);
        if !is_all || !self.apart.as_ref().is_some_and(has_them) {
            self.postcard = postcard::Deserializer::from_bytes(before);
            return Ok(None);
        }
        // A message that is refused memory is decoded again: so before anything is taken.
        self.count(ALLOCATION)?;
        let taken = self.apart.take().and_then(|apart| apart.vector.downcast_mut());
        self.allowed = usize::MAX;
        Ok(taken.map(mem::take))
    }

    /// The text that follows, if it lies apart.
    #[cold]
    fn take_text(&mut self) -> Decoded<Option<String>> {
        let text = self.take_bytes()?.map(String::from_utf8).transpose();
        text.map_err(|_| self.refuse(Error::DeserializeBadUtf8))
    }

    /// As `decode_numbers`, of a list whose elements lie apart, if it is all that is left.
    #[cold]
    fn take_numbers<R>(&mut self, count: usize, plain: PlainDecoder<R>) -> Decoded<R> {
        let (is_all, len) = (self.rest()?.is_empty(), count.checked_mul(plain.element_size));
        // Memory is asked for only where the elements are there.
        if let (Some(len), Some(apart)) = (len, &self.apart)
            && is_all
            && apart.len == len
        {
            self.count(len)?;
            if let Some(list) = self.apart.as_mut().and_then(|apart| (plain.adopt)(count, apart.vector)) {
                (self.apart, self.allowed) = (None, usize::MAX);
                return Ok(list);
            }
        }
        Err(self.refuse(Error::DeserializeUnexpectedEnd))
    }

    /// The bytes that are still to be decoded.
    #[inline]
    fn rest(&mut self) -> Decoded<&'de [u8]> {
        let rest = mem::replace(&mut self.postcard, postcard::Deserializer::from_bytes(&[])).finalize();
        let rest = rest.map_err(|error| self.refuse(error))?;
        self.postcard = postcard::Deserializer::from_bytes(rest);
        Ok(rest)
    }

    /// Decodes what is at the front of the bytes.
    #[inline]
    fn decode_by<T>(&mut self, decode: impl FnOnce(&mut &'de [u8]) -> postcard::Result<T>) -> Decoded<T> {
        let mut rest = self.rest()?;
        let decoded = decode(&mut rest);
        self.postcard = postcard::Deserializer::from_bytes(rest);
        decoded.map_err(|error| self.refuse(error))
    }

    /// Decodes a list of numbers or points as a whole.
    fn decode_numbers<R>(&mut self, count: usize, plain: PlainDecoder<R>) -> Decoded<R> {
        self.count(count.saturating_mul(plain.element_size))?;
        self.decode_by(|rest| (plain.decode)(count, rest))
    }

    /// Decodes an element by [`flat`], if it can.
    #[inline]
    fn decode_flat<S: DeserializeSeed<'de>>(&mut self, seed: &S) -> Option<S::Value> {
        let mut rest = self.rest().ok()?;
        let value = flat::decode(seed, self.levels, &mut rest)?;
        self.postcard = postcard::Deserializer::from_bytes(rest);
        Some(value)
    }

    #[cold]
    fn refuse(&mut self, error: Error) -> Undecodable {
        replace_refusal(None);
        self.error = error;
        Undecodable
    }

    #[cold]
    fn exceed(&mut self, bound: Bound) -> Undecodable {
        self.exceeded = Some(bound);
        Undecodable
    }
}

/// Where the stack is, about: an address in the frame of the calling function.
#[inline(always)]
fn stack_position() -> usize {
    let here = 0u8;
    (&raw const here).addr()
}

/// Why `len` bytes were refused. The exceeded bound is reported even where a `Deserialize` impl has discarded the error.
#[cold]
fn explain(ty: &str, len: usize, exceeded: Option<Bound>, rest: postcard::Result<&[u8]>) -> String {
    match (exceeded, rest) {
        (Some(Bound::Depth), _) => format!("nested deeper than {MAX_DEPTH} levels"),
        (Some(Bound::Stack), _) => format!("nested so deep that decoding takes more than {MAX_STACK} bytes of the stack"),
        (Some(Bound::Elements), _) => format!("more elements than {len} bytes can hold"),
        (Some(Bound::Memory { allowed }), _) => {
            format!("the values in {len} bytes would take more than {allowed} bytes of memory")
        }
        (Some(Bound::Undescribed), _) => format!(
            "`{ty}` can only be read from a format that describes itself, as it asks what comes next: enums that are untagged or \
             have a tag of their own (`#[serde(untagged)]`, `#[serde(tag = \"…\")]`), `#[serde(flatten)]` and types of any content \
             such as `serde_json::Value` do; use an enum without these attributes, or send it as text"
        ),
        (Some(Bound::Variant(variant)), _) => format!("variant {variant} is none of the type's ({len} bytes)"),
        (None, Ok(rest)) => format!("{} of {len} bytes are left over", rest.len()),
        (None, Err(error)) => match replace_refusal(None) {
            Some(refusal) => format!("{refusal} ({len} bytes)"),
            None => format!("{error} ({len} bytes)"),
        },
    }
}

macro_rules! primitives {
    ($($method:ident $visit:ident |$inside:ident| $value:expr;)*) => {$(
        #[inline]
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
            let $inside = self;
            visitor.$visit($value)
        }
    )*};
}

/// Methods that only a format that describes itself can serve.
macro_rules! reject_as_undescribed {
    ($($method:ident)*) => {$(
        #[cold]
        fn $method<V: Visitor<'de>>(self, _visitor: V) -> Decoded<V::Value> {
            Err(self.exceed(Bound::Undescribed))
        }
    )*};
}

impl<'de> de::Deserializer<'de> for &mut Bounded<'de, '_> {
    type Error = Undecodable;

    primitives! {
        deserialize_bool visit_bool |inside| inside.primitive()?;
        deserialize_i8 visit_i8 |inside| inside.primitive()?;
        deserialize_i16 visit_i16 |inside| unzigzag(inside.number::<16>()?) as i16;
        deserialize_i32 visit_i32 |inside| unzigzag(inside.number::<32>()?) as i32;
        deserialize_i64 visit_i64 |inside| unzigzag(inside.number::<64>()?);
        deserialize_i128 visit_i128 |inside| inside.primitive()?;
        deserialize_u8 visit_u8 |inside| inside.primitive()?;
        deserialize_u16 visit_u16 |inside| inside.number::<16>()? as u16;
        deserialize_u32 visit_u32 |inside| inside.number::<32>()? as u32;
        deserialize_u64 visit_u64 |inside| inside.number::<64>()?;
        deserialize_u128 visit_u128 |inside| inside.primitive()?;
        deserialize_f32 visit_f32 |inside| inside.primitive()?;
        deserialize_f64 visit_f64 |inside| inside.primitive()?;
        deserialize_char visit_char |inside| inside.primitive()?;
        deserialize_str visit_borrowed_str |inside| inside.primitive()?;
        deserialize_bytes visit_borrowed_bytes |inside| inside.primitive()?;
    }

    reject_as_undescribed! { deserialize_any deserialize_identifier deserialize_ignored_any }

    #[inline]
    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
        if self.apart.is_some()
            && let Some(text) = self.take_text()?
        {
            return visitor.visit_string(text);
        }
        let text = self.owned::<&'de str>()?;
        match copy::of_long_text(text) {
            Some(copy) => visitor.visit_string(copy),
            None => visitor.visit_str(text),
        }
    }

    #[inline]
    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
        if self.apart.is_some()
            && let Some(bytes) = self.take_bytes()?
        {
            return visitor.visit_byte_buf(bytes);
        }
        let bytes = self.owned::<&'de [u8]>()?;
        match copy::of_long(bytes) {
            Some(copy) => visitor.visit_byte_buf(copy),
            None => visitor.visit_bytes(bytes),
        }
    }

    #[inline]
    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
        visitor.visit_unit()
    }

    #[inline]
    fn deserialize_unit_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Decoded<V::Value> {
        visitor.visit_unit()
    }

    #[inline]
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
        match self.primitive::<u8>()? {
            0 => visitor.visit_none(),
            1 => self.descend(|inside| visitor.visit_some(inside)),
            _ => Err(self.refuse(Error::DeserializeBadOption)),
        }
    }

    #[inline]
    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Decoded<V::Value> {
        self.descend(|inside| visitor.visit_newtype_struct(inside))
    }

    #[inline]
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
        let left = self.decode_length()?;
        self.descend(|inside| match plain_decoder::<V>() {
            // Memory is asked for only where the elements can be there; the cause is that of the first that is not.
            Some(plain) if inside.rest()?.len() / plain.min_size >= left => inside.decode_numbers(left, plain),
            Some(plain) if inside.apart.is_some() => inside.take_numbers(left, plain),
            _ => match Collection::of::<V::Value>() {
                Collection::Array => visitor.visit_seq(BoundedElements::<_, ARRAY>::of::<V>(inside, left)),
                Collection::Linked => visitor.visit_seq(BoundedElements::<_, LINKED>::of::<V>(inside, left)),
                Collection::Table => visitor.visit_seq(BoundedElements::<_, TABLE>::of::<V>(inside, left)),
            },
        })
    }

    #[inline]
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Decoded<V::Value> {
        let left = self.decode_length()?;
        self.descend(|inside| visitor.visit_map(BoundedElements::<_, TABLE>::of::<V>(inside, left)))
    }

    #[inline]
    fn deserialize_tuple<V: Visitor<'de>>(self, left: usize, visitor: V) -> Decoded<V::Value> {
        // Not in a closure that others have, nor inlined always: where nothing is optimized, a level would take more stack for it.
        if is_serdes_own::<V>() && is_plain_array::<V::Value>() {
            return self.descend(|inside| inside.decode_by(decode_array));
        }
        self.descend(|inside| visitor.visit_seq(BoundedElements::<_, IN_PLACE>::of::<V>(inside, left)))
    }

    #[inline]
    fn deserialize_tuple_struct<V: Visitor<'de>>(self, _name: &'static str, len: usize, visitor: V) -> Decoded<V::Value> {
        self.deserialize_tuple(len, visitor)
    }

    #[inline]
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Decoded<V::Value> {
        self.deserialize_tuple(fields.len(), visitor)
    }

    #[inline]
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Decoded<V::Value> {
        self.variants = u32::try_from(variants.len()).unwrap_or(u32::MAX);
        self.descend(|inside| visitor.visit_enum(inside))
    }

    #[inline]
    fn is_human_readable(&self) -> bool {
        false
    }
}

/// What holds the elements of a sequence. It decides how much memory they take.
enum Collection {
    Array,
    Linked,
    Table,
}

impl Collection {
    /// The kind of `T`, by its name: its identity is unknown without `'static`. A collection that is unknown is a table, which
    /// takes most for each element.
    #[inline]
    fn of<T>() -> Collection {
        let name = std::any::type_name::<T>();
        if ["alloc::vec::Vec<", "alloc::collections::vec_deque::VecDeque<", "alloc::collections::binary_heap::BinaryHeap<"]
            .iter()
            .any(|array| name.starts_with(array))
        {
            Collection::Array
        } else if name.starts_with("alloc::collections::linked_list::LinkedList<") {
            Collection::Linked
        } else {
            Collection::Table
        }
    }
}

/// Elements of a tuple or struct lie in it, and are counted with it.
const IN_PLACE: u8 = 0;
/// Elements of an array take their own size.
const ARRAY: u8 = 1;
/// So do those of a linked list, which has an allocation for each.
const LINKED: u8 = 2;
/// Sets and maps have free slots: `HashMap` fills between 7/16 and 7/8 of its slots, `BTreeMap` between 5/11 and 1 of those of
/// its nodes, and the first entry makes a node with all of its slots.
const TABLE: u8 = 3;
const FIRST_SLOTS: usize = 11;
const SLOTS: usize = 2;
/// Bytes that an entry takes beside its slots: its share of the head, the edges and the allocation of a tree's nodes, or of a
/// hash table's control bytes.
const ENTRY: usize = 8;

/// The remaining elements of a sequence, tuple, struct or map; `IN` says where they will lie.
struct BoundedElements<B, const IN: u8> {
    inside: B,
    left: usize,
    /// The container is told to expect so many at most.
    most: usize,
    /// Slots of a table that the next element takes.
    slots: usize,
    /// All elements so far were decoded by [`flat`].
    flat: bool,
}

impl<'a, 'de, 'm, const IN: u8> BoundedElements<&'a mut Bounded<'de, 'm>, IN> {
    /// The elements that `V` will visit.
    #[inline]
    fn of<V>(inside: &'a mut Bounded<'de, 'm>, left: usize) -> Self {
        // Containers reserve memory for so many elements before they decode the first, so it is at most the message's length.
        let most = if is_serdes_own::<V>() { inside.len } else { inside.len.min(MAX_EXPECTED) };
        BoundedElements { inside, left, most, slots: FIRST_SLOTS, flat: IN != IN_PLACE }
    }

    /// Accounts for the memory of one element, the key or the only part of its entry.
    #[inline]
    fn account_element<T>(&mut self) -> Decoded<()> {
        match IN {
            IN_PLACE => {}
            ARRAY => self.inside.count(size_of::<T>())?,
            LINKED => self.inside.count(size_of::<T>() + ALLOCATION)?,
            _ => self.inside.count(self.slots * size_of::<T>() + ENTRY)?,
        }
        self.inside.container = size_of::<T>();
        Ok(())
    }
}

impl<'de, const IN: u8> de::SeqAccess<'de> for BoundedElements<&mut Bounded<'de, '_>, IN> {
    type Error = Undecodable;

    #[inline]
    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Decoded<Option<S::Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        self.account_element::<S::Value>()?;
        self.slots = SLOTS;
        if FLAT && IN != IN_PLACE && self.flat {
            match self.inside.decode_flat(&seed) {
                Some(value) => return Ok(Some(value)),
                None => self.flat = false,
            }
        }
        seed.deserialize(&mut *self.inside).map(Some)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        Some(self.left.min(self.most))
    }
}

impl<'de> de::MapAccess<'de> for BoundedElements<&mut Bounded<'de, '_>, TABLE> {
    type Error = Undecodable;

    #[inline]
    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Decoded<Option<S::Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        self.account_element::<S::Value>()?;
        seed.deserialize(&mut *self.inside).map(Some)
    }

    #[inline]
    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Decoded<S::Value> {
        self.inside.count(mem::replace(&mut self.slots, SLOTS) * size_of::<S::Value>())?;
        self.inside.container = size_of::<S::Value>();
        if FLAT && self.flat {
            match self.inside.decode_flat(&seed) {
                Some(value) => return Ok(value),
                None => self.flat = false,
            }
        }
        seed.deserialize(&mut *self.inside)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        Some(self.left.min(self.most))
    }
}

impl<'de> de::EnumAccess<'de> for &mut Bounded<'de, '_> {
    type Error = Undecodable;
    type Variant = Self;

    #[inline]
    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Decoded<(S::Value, Self)> {
        let variant = self.number::<{ u32::BITS }>()? as u32;
        // `#[serde(other)]` would accept the number, and leave the variant's content unread.
        if variant >= self.variants && self.variants > 0 {
            return Err(self.exceed(Bound::Variant(variant)));
        }
        Ok((seed.deserialize(variant.into_deserializer())?, self))
    }
}

/// The enum counts as a level; its variant does not count again.
impl<'de> de::VariantAccess<'de> for &mut Bounded<'de, '_> {
    type Error = Undecodable;

    #[inline]
    fn unit_variant(self) -> Decoded<()> {
        Ok(())
    }

    #[inline]
    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Decoded<S::Value> {
        self.container = size_of::<S::Value>();
        seed.deserialize(self)
    }

    #[inline]
    fn tuple_variant<V: Visitor<'de>>(self, left: usize, visitor: V) -> Decoded<V::Value> {
        visitor.visit_seq(BoundedElements::<_, IN_PLACE>::of::<V>(self, left))
    }

    #[inline]
    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Decoded<V::Value> {
        visitor.visit_seq(BoundedElements::<_, IN_PLACE>::of::<V>(self, fields.len()))
    }
}

#[cfg(all(test, not(few_tests)))]
#[path = "../../tests/unit/bounded.rs"]
mod tests;

#[cfg(all(test, not(few_tests)))]
#[path = "../../tests/unit/arrived_lists.rs"]
mod arrived_lists;

/// Its allocator counts; release builds of the tests count instructions, so they are without it.
#[cfg(all(test, debug_assertions))]
#[path = "../../tests/unit/collections.rs"]
mod collections;
