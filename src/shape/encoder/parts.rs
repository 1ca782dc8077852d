//! The parts of a value that is encoded: elements, entries, fields.

use std::any::type_name;
use std::slice;

use serde::ser::{self, Serialize};

use super::{Fault, Look, Position, same};
use crate::shape::known::{At, DONE, Kind, Part};

/// The elements of a sequence.
pub(super) struct Items<'l, 'a> {
    pub look: &'l mut Look<'a>,
    pub at: At,
}

impl ser::SerializeSeq for Items<'_, '_> {
    type Ok = ();
    type Error = Fault;

    #[inline]
    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        self.look.part(value, self.at)
    }

    #[inline]
    fn end(self) -> Result<(), Fault> {
        Ok(())
    }
}

/// The entries of a map.
pub(super) struct Entries<'l, 'a> {
    pub look: &'l mut Look<'a>,
    pub keys: At,
    pub values: At,
}

impl ser::SerializeMap for Entries<'_, '_> {
    type Ok = ();
    type Error = Fault;

    #[inline]
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Fault> {
        self.look.part(key, self.keys)
    }

    #[inline]
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        self.look.part(value, self.values)
    }

    #[inline]
    fn end(self) -> Result<(), Fault> {
        Ok(())
    }
}

/// The elements of a tuple, or the fields of a struct.
pub(super) struct Parts<'l, 'a> {
    look: &'l mut Look<'a>,
    name: &'static str,
    /// What was known before and has not come yet. So many elements of the last part are left, which stand there.
    known: slice::Iter<'a, Part>,
    left: u32,
    part: At,
    /// The tuple or struct itself.
    at: At,
    learning: Option<Learning>,
}

/// How far a tuple or struct has come that was not known before.
#[derive(Clone, Copy, Default)]
struct Learning {
    /// The part that the last element belongs to, and how many of it have been there.
    run: usize,
    used: u32,
}

impl<'l, 'a> Parts<'l, 'a> {
    #[inline]
    pub(super) fn new(Position { look, at, ty }: Position<'l, 'a>, kind: Kind, name: &'static str) -> Self {
        let (parts, at, learning) = match look.parts_before(at, kind) {
            Some(parts) => (parts, at, None),
            None => (&[][..], look.settle(at, ty, kind, name).unwrap_or(DONE), Some(Learning::default())),
        };
        Parts { look, name, known: parts.iter(), left: 0, part: DONE, at, learning }
    }

    /// The position of the next element, or of the next field, which has a name.
    #[inline]
    fn next(&mut self, ty: &'static str, field: Option<&'static str>) -> At {
        if self.left == 0 {
            match self.known.next() {
                Some(part) if field.is_none_or(|name| same(part.name, name)) => (self.left, self.part) = (part.number, part.at),
                part => return self.learn(ty, field, part.is_some()),
            }
        }
        self.left -= 1;
        self.part
    }

    /// The position of a part that was not there before, or not under this name.
    #[cold]
    fn learn(&mut self, ty: &'static str, field: Option<&'static str>, renamed: bool) -> At {
        if self.at == DONE {
            return DONE;
        }
        let Some(Learning { mut run, mut used }) = self.learning else { return self.fail(!renamed) };
        let node = self.look.known().node(self.at);
        if run + 1 < node.parts.len() && node.parts[run].number == used {
            (run, used) = (run + 1, 0);
        }
        let at = match node.parts.get(run) {
            Some(part) if used < part.number => {
                if field.is_some_and(|name| name != part.name) {
                    return self.fail(false);
                }
                part.at
            }
            _ if node.sealed => return self.fail(true),
            _ => {
                let end = node.parts.len();
                let known = self.look.grow();
                if let Some(at) = known.join(self.at, ty) {
                    at
                } else if let Some(at) = known.add(self.at, end, 1, field.unwrap_or(ty)) {
                    (run, used) = (end, 0);
                    at
                } else {
                    self.at = self.look.cut(self.at);
                    return DONE;
                }
            }
        };
        self.learning = Some(Learning { run, used: used + 1 });
        at
    }

    /// This is another tuple or struct, and not only by its names.
    #[cold]
    fn fail(&mut self, but_for_names: bool) -> At {
        self.look.contradict(self.at, but_for_names);
        (self.known, self.left, self.at) = ([].iter(), 0, DONE);
        DONE
    }

    #[inline]
    fn finish(mut self) -> Result<(), Fault> {
        if self.learning.is_some() || self.left > 0 || !self.known.as_slice().is_empty() {
            self.finish_learning();
        }
        Ok(())
    }

    #[cold]
    fn finish_learning(&mut self) {
        if self.at == DONE {
            return;
        }
        let node = self.look.known().node(self.at);
        let whole = self.learning.is_some_and(|Learning { run, used }| {
            run + 1 >= node.parts.len() && node.parts.last().is_none_or(|part| part.number == used)
        });
        if !whole {
            self.fail(true);
        } else if !node.sealed {
            self.look.grow().node_mut(self.at).sealed = true;
        }
    }

    #[inline]
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        let at = self.next(type_name::<T>(), None);
        self.look.part(value, at)
    }

    #[inline]
    fn field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Fault> {
        let at = self.next("", Some(name));
        self.look.part(value, at)
    }

    /// The receiver would take the next field for this one.
    #[cold]
    fn skip(&mut self, key: &'static str) -> Result<(), Fault> {
        Err(ser::Error::custom(format_args!(
            "the field `{key}` of `{}` is left out, as `#[serde(skip_serializing_if)]` does, and the format has no names by \
             which the receiver could tell: remove the attribute, or make it `skip`",
            self.name
        )))
    }
}

macro_rules! compounds {
    ($($compound:ident $method:ident($($key:ident)?) $helper:ident $($skip:ident)?;)*) => {
        $(impl ser::$compound for Parts<'_, '_> {
            type Ok = ();
            type Error = Fault;

            #[inline]
            fn $method<T: Serialize + ?Sized>(&mut self, $($key: &'static str,)? value: &T) -> Result<(), Fault> {
                self.$helper($($key,)? value)
            }

            $(fn skip_field(&mut self, key: &'static str) -> Result<(), Fault> {
                self.$skip(key)
            })?

            #[inline]
            fn end(self) -> Result<(), Fault> {
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
