//! The parts of a value that is encoded: elements, entries, fields.

use std::any::type_name;

use serde::ser::{self, Serialize};

use super::{DONE, Fault, LEAVES, Look};
use crate::shape::known::{At, Kind, Run, is_one_type};

/// The elements of a sequence or of a tuple.
pub(super) struct Items<'l, 'a> {
    look: &'l mut Look<'a>,
    /// Sequence: of the next element. Tuple: of itself.
    at: At,
    /// Tuple: the run that the next element belongs to, and how many of it have been there.
    run: usize,
    used: u32,
}

impl<'l, 'a> Items<'l, 'a> {
    #[inline]
    pub(super) fn of_sequence(look: &'l mut Look<'a>, at: At) -> Self {
        Items { look, at, run: 0, used: 0 }
    }

    #[inline]
    pub(super) fn of_tuple(look: &'l mut Look<'a>, at: At) -> Self {
        let at = look.compound(at, || Kind::Tuple { runs: Vec::new(), sealed: false });
        Items { look, at, run: 0, used: 0 }
    }

    /// The position of the next element of a tuple.
    #[inline]
    fn next<T: ?Sized>(&mut self) -> At {
        if self.at == DONE {
            return DONE;
        }
        let Kind::Tuple { runs, sealed } = self.look.known().kind(self.at) else { return self.fail() };
        if runs.get(self.run).is_some_and(|run| run.count == self.used) && self.run + 1 < runs.len() {
            (self.run, self.used) = (self.run + 1, 0);
        }
        match runs.get(self.run) {
            Some(run) if self.used < run.count => {
                self.used += 1;
                run.at
            }
            _ if *sealed => self.fail(),
            _ => self.push(type_name::<T>()),
        }
    }

    /// One more element than has been here so far.
    #[cold]
    fn push(&mut self, ty: &'static str) -> At {
        let known = self.look.grow();
        let Kind::Tuple { runs, .. } = &mut known.nodes[self.at as usize].kind else { return DONE };
        if let Some(run) = runs.last_mut().filter(|run| run.ty == ty && is_one_type(ty) && run.count < u32::MAX) {
            run.count += 1;
            self.used += 1;
            return run.at;
        }
        self.run = runs.len();
        let Some(at) = known.allocate(self.at, 1) else { return self.cut() };
        if let Kind::Tuple { runs, .. } = &mut known.nodes[self.at as usize].kind {
            runs.push(Run { count: 1, at, ty });
        }
        self.used = 1;
        at
    }

    #[cold]
    fn fail(&mut self) -> At {
        self.look.contradict(self.at);
        self.at = DONE;
        DONE
    }

    #[cold]
    fn cut(&mut self) -> At {
        self.look.cut(self.at);
        self.at = DONE;
        DONE
    }

    #[inline]
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        let at = self.next::<T>();
        self.look.part(value, at)
    }

    #[inline]
    fn finish(mut self) -> Result<(), Fault> {
        if self.at != DONE {
            let Kind::Tuple { runs, sealed } = self.look.known().kind(self.at) else {
                self.fail();
                return Ok(());
            };
            let whole = self.run + 1 >= runs.len() && runs.last().is_none_or(|run| run.count == self.used);
            if !whole {
                self.fail();
            } else if !sealed && let Kind::Tuple { sealed, .. } = &mut self.look.grow().nodes[self.at as usize].kind {
                *sealed = true;
            }
        }
        Ok(())
    }
}

impl ser::SerializeSeq for Items<'_, '_> {
    type Ok = ();
    type Error = Fault;

    #[inline]
    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        self.look.part(value, self.at)?;
        self.at = self.look.others(self.at);
        Ok(())
    }

    #[inline]
    fn end(self) -> Result<(), Fault> {
        Ok(())
    }
}

/// The entries of a map.
pub(super) struct Entries<'l, 'a> {
    look: &'l mut Look<'a>,
    keys: At,
    values: At,
}

impl<'l, 'a> Entries<'l, 'a> {
    #[inline]
    pub(super) fn new(look: &'l mut Look<'a>, keys: At) -> Self {
        let values = if keys < LEAVES { keys + 1 } else { keys };
        Entries { look, keys, values }
    }
}

impl ser::SerializeMap for Entries<'_, '_> {
    type Ok = ();
    type Error = Fault;

    #[inline]
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Fault> {
        self.look.part(key, self.keys)?;
        self.keys = self.look.others(self.keys);
        Ok(())
    }

    #[inline]
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Fault> {
        self.look.part(value, self.values)?;
        self.values = self.look.others(self.values);
        Ok(())
    }

    #[inline]
    fn end(self) -> Result<(), Fault> {
        Ok(())
    }
}

/// The fields of a struct.
pub(super) struct Fields<'l, 'a> {
    look: &'l mut Look<'a>,
    at: At,
    name: &'static str,
    next: usize,
}

impl<'l, 'a> Fields<'l, 'a> {
    #[inline]
    pub(super) fn new(look: &'l mut Look<'a>, at: At, name: &'static str) -> Self {
        let at = look.compound(at, || Kind::Struct { name, fields: Vec::new(), sealed: false });
        Fields { look, at, name, next: 0 }
    }

    /// The position of the next field.
    #[inline]
    fn next(&mut self, key: &'static str) -> At {
        if self.at == DONE {
            return DONE;
        }
        let Kind::Struct { fields, sealed, .. } = self.look.known().kind(self.at) else { return self.fail() };
        match fields.get(self.next) {
            Some((known, part)) if *known == key => {
                self.next += 1;
                *part
            }
            None if !*sealed => self.push(key),
            _ => self.fail(),
        }
    }

    #[cold]
    fn push(&mut self, key: &'static str) -> At {
        let known = self.look.grow();
        let Some(part) = known.allocate(self.at, 1) else { return self.cut() };
        if let Kind::Struct { fields, .. } = &mut known.nodes[self.at as usize].kind {
            fields.push((key, part));
        }
        self.next += 1;
        part
    }

    #[cold]
    fn fail(&mut self) -> At {
        self.look.contradict(self.at);
        self.at = DONE;
        DONE
    }

    #[cold]
    fn cut(&mut self) -> At {
        self.look.cut(self.at);
        self.at = DONE;
        DONE
    }

    #[inline]
    fn field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), Fault> {
        let at = self.next(key);
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

    #[inline]
    fn finish(mut self) -> Result<(), Fault> {
        if self.at != DONE {
            let Kind::Struct { fields, sealed, .. } = self.look.known().kind(self.at) else {
                self.fail();
                return Ok(());
            };
            if fields.len() != self.next {
                self.fail();
            } else if !sealed && let Kind::Struct { sealed, .. } = &mut self.look.grow().nodes[self.at as usize].kind {
                *sealed = true;
            }
        }
        Ok(())
    }
}

macro_rules! compounds {
    ($($compound:ident: $type:ident $method:ident($($key:ident)?) $helper:ident $($skip:ident)?;)*) => {
        $(impl ser::$compound for $type<'_, '_> {
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
    SerializeTuple: Items serialize_element() element;
    SerializeTupleStruct: Items serialize_field() element;
    SerializeTupleVariant: Items serialize_field() element;
    SerializeStruct: Fields serialize_field(key) field skip;
    SerializeStructVariant: Fields serialize_field(key) field skip;
}

impl Look<'_> {
    /// The position of a tuple or struct, whose kind is `make` when nothing has come here before.
    #[inline]
    fn compound(&mut self, at: At, make: impl FnOnce() -> Kind) -> At {
        if at == DONE {
            return DONE;
        }
        if at >= LEAVES {
            return self.contradict(at);
        }
        match self.known().kind(at) {
            Kind::New => self.grow().set(at, make()),
            Kind::Cut => return DONE,
            _ => {}
        }
        at
    }
}
