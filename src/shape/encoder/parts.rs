//! Encodes the parts of a value: elements, entries, fields.

use std::any::type_name;
use std::slice;

use serde::ser::{self, Serialize};

use super::{EncodeError, LookAhead, Position, same};
use crate::shape::known::{DONE, KnownKind, KnownPart, NodeIndex};

/// The elements of a sequence.
pub(super) struct EncodedItems<'l, 'a> {
    pub look_ahead: &'l mut LookAhead<'a>,
    pub at: NodeIndex,
}

impl ser::SerializeSeq for EncodedItems<'_, '_> {
    type Ok = ();
    type Error = EncodeError;

    #[inline]
    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), EncodeError> {
        self.look_ahead.part(value, self.at)
    }

    #[inline]
    fn end(self) -> Result<(), EncodeError> {
        Ok(())
    }
}

/// The entries of a map.
pub(super) struct EncodedEntries<'l, 'a> {
    pub look_ahead: &'l mut LookAhead<'a>,
    pub keys: NodeIndex,
    pub values: NodeIndex,
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
        self.look_ahead.part(value, self.values)
    }

    #[inline]
    fn end(self) -> Result<(), EncodeError> {
        Ok(())
    }
}

/// The elements of a tuple, or the fields of a struct.
pub(super) struct EncodedParts<'l, 'a> {
    look_ahead: &'l mut LookAhead<'a>,
    /// The known parts that are still to come.
    known: slice::Iter<'a, KnownPart>,
    /// Number of elements of the last run that are left; their position is `part`.
    left: u32,
    part: NodeIndex,
    /// The position of the tuple or struct itself.
    at: NodeIndex,
    /// Whether it was not known before. Then `run` is the part that the last element belongs to, and `used` how many elements
    /// it had.
    learning: bool,
    run: u32,
    used: u32,
}

impl<'l, 'a> EncodedParts<'l, 'a> {
    #[inline]
    pub(super) fn new(Position { look_ahead, at, ty }: Position<'l, 'a>, kind: KnownKind, name: &'static str) -> Self {
        let (parts, at, learning) = match look_ahead.parts_before(at, kind) {
            Some(parts) => (parts, at, false),
            None => (&[][..], look_ahead.settle(at, ty, kind, name).unwrap_or(DONE), true),
        };
        EncodedParts { look_ahead, known: parts.iter(), left: 0, part: DONE, at, learning, run: 0, used: 0 }
    }

    #[inline]
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

    #[inline]
    fn field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), EncodeError> {
        let at = match self.known.next() {
            Some(part) if same(part.name, name) => part.at,
            Some(_) => self.fail(false),
            None => self.learn("", Some(name)),
        };
        self.look_ahead.part(value, at)
    }

    /// The position of an element, or of the field of this name, which was not known before.
    #[cold]
    fn learn(&mut self, ty: &'static str, field: Option<&'static str>) -> NodeIndex {
        if self.at == DONE {
            return DONE;
        }
        if !self.learning {
            return self.fail(true);
        }
        let node = self.look_ahead.known().node(self.at);
        let (end, is_used_up) = (node.parts.len() as u32, |part: &KnownPart| part.number == self.used);
        if self.run + 1 < end && node.parts.get(self.run as usize).is_some_and(is_used_up) {
            (self.run, self.used) = (self.run + 1, 0);
        }
        let at = match node.parts.get(self.run as usize) {
            Some(part) if self.used < part.number => {
                if field.is_some_and(|name| name != part.name) {
                    return self.fail(false);
                }
                part.at
            }
            _ if node.sealed => return self.fail(true),
            _ => {
                let known = self.look_ahead.grow();
                if let Some(at) = known.join(self.at, ty) {
                    at
                } else if let Some(at) = known.add(self.at, end as usize, 1, field.unwrap_or(ty)) {
                    (self.run, self.used) = (end, 0);
                    at
                } else {
                    self.at = self.look_ahead.cut(self.at);
                    return DONE;
                }
            }
        };
        self.used += 1;
        at
    }

    /// Records that the value is another tuple or struct.
    #[cold]
    fn fail(&mut self, but_for_names: bool) -> NodeIndex {
        self.look_ahead.contradict(self.at, but_for_names);
        (self.known, self.left, self.at) = ([].iter(), 0, DONE);
        DONE
    }

    #[inline]
    fn finish(mut self) -> Result<(), EncodeError> {
        if self.learning || self.left > 0 || self.known.len() > 0 {
            self.seal();
        }
        Ok(())
    }

    #[cold]
    fn seal(&mut self) {
        if self.at == DONE {
            return;
        }
        let node = self.look_ahead.known().node(self.at);
        let last = node.parts.last();
        if !self.learning || self.run as usize + 1 < node.parts.len() || last.is_some_and(|part| part.number != self.used) {
            self.fail(true);
        } else if !node.sealed {
            self.look_ahead.grow().node_mut(self.at).sealed = true;
        }
    }

    /// A skipped field is an error: the receiver would decode the next field in its place.
    #[cold]
    fn skip(&mut self, key: &'static str) -> Result<(), EncodeError> {
        let name = self.look_ahead.known().nodes.get(self.at as usize).map_or("", |node| node.name);
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

            #[inline]
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
