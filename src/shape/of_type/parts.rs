//! Synthesizes the parts of values: elements, entries, variants.

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IntoDeserializer, Visitor};

use super::{Refused, ask};
use crate::shape::MAX_NODES;
use crate::shape::graph::{Graph, NodeId};

/// The parts of a tuple or struct.
pub(super) struct TracedParts<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) id: NodeId,
    pub(super) len: usize,
    pub(super) next: usize,
    pub(super) is_tuple: bool,
}

impl<'de> de::SeqAccess<'de> for TracedParts<'_> {
    type Error = Refused;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Refused> {
        if self.next == self.len {
            return Ok(None);
        }
        let part = if self.is_tuple {
            self.graph.element(self.id, self.next, std::any::type_name::<S>())
        } else {
            self.graph.child(self.id, self.next)
        };
        self.next += 1;
        ask(self.graph, part.ok_or(Refused)?, |tracer| seed.deserialize(tracer)).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        // Some declare `usize::MAX` and read until nothing comes.
        Some(self.len - self.next).filter(|&left| left <= MAX_NODES)
    }
}

/// The elements of a sequence.
pub(super) struct TracedElements<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) element: NodeId,
    pub(super) left: usize,
}

impl<'de> de::SeqAccess<'de> for TracedElements<'_> {
    type Error = Refused;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Refused> {
        let Some(left) = self.left.checked_sub(1) else {
            return Ok(None);
        };
        self.left = left;
        ask(self.graph, self.element, |tracer| seed.deserialize(tracer)).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

/// The entries of a map.
pub(super) struct TracedEntries<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) key: NodeId,
    pub(super) value: NodeId,
    pub(super) left: usize,
}

impl<'de> de::MapAccess<'de> for TracedEntries<'_> {
    type Error = Refused;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Refused> {
        let Some(left) = self.left.checked_sub(1) else {
            return Ok(None);
        };
        self.left = left;
        ask(self.graph, self.key, |tracer| seed.deserialize(tracer)).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Refused> {
        ask(self.graph, self.value, |tracer| seed.deserialize(tracer))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

/// The variant that this run takes.
pub(super) struct TracedChoice<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) id: NodeId,
    pub(super) variant: usize,
    pub(super) content: NodeId,
}

impl<'de, 'g> de::EnumAccess<'de> for TracedChoice<'g> {
    type Error = Refused;
    type Variant = TracedContent<'g>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, TracedContent<'g>), Refused> {
        let index: de::value::U32Deserializer<Refused> = (self.variant as u32).into_deserializer();
        match seed.deserialize(index) {
            Ok(value) => Ok((value, TracedContent { graph: self.graph, at: self.content })),
            Err(refused) => {
                self.graph.no_such_variant(self.id, self.variant);
                Err(refused)
            }
        }
    }
}

/// What the variant contains.
pub(super) struct TracedContent<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) at: NodeId,
}

impl<'de> de::VariantAccess<'de> for TracedContent<'_> {
    type Error = Refused;

    fn unit_variant(self) -> Result<(), Refused> {
        ask(self.graph, self.at, |tracer| <()>::deserialize(tracer))
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Refused> {
        ask(self.graph, self.at, |tracer| seed.deserialize(tracer))
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Refused> {
        ask(self.graph, self.at, |tracer| tracer.deserialize_tuple(len, visitor))
    }

    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Result<V::Value, Refused> {
        ask(self.graph, self.at, |tracer| tracer.deserialize_struct("", fields, visitor))
    }
}
