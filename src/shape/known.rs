//! What the values of one type that were sent have shown of it: a tree of positions, which only ever grows.

use super::wire::{encode_length, encode_name, encode_number};
use super::{Leaf, MAX_DEPTH, MAX_NODES, name, wire};

/// A position: an index into the nodes. Parts stand behind what they are part of.
pub(super) type At = u32;

/// Where the value itself stands.
pub(super) const ROOT: At = 0;

#[derive(Clone)]
pub(super) struct Known {
    pub nodes: Vec<Node>,
}

#[derive(Clone)]
pub(super) struct Node {
    pub kind: Kind,
    /// Values of types without a choice look like this one: they need not be looked at.
    pub complete: bool,
    /// The Rust type of what stands here. A type within itself is the same position again.
    ty: &'static str,
    parent: At,
    depth: u8,
}

#[derive(Clone)]
pub(super) enum Kind {
    /// No value has come here: an empty sequence, `None`.
    New,
    /// Beyond the limits, or different things each time: nothing is said of it.
    Cut,
    Leaf(Leaf),
    Option(At),
    Seq(At),
    /// The position of the keys; that of the values is the next.
    Map(At),
    Tuple {
        runs: Vec<Run>,
        /// A value has been here to its end.
        sealed: bool,
    },
    Struct {
        name: &'static str,
        fields: Vec<(&'static str, At)>,
        sealed: bool,
    },
    /// Variants in the order of their numbers.
    Enum {
        name: &'static str,
        variants: Vec<(u32, &'static str, At)>,
    },
    /// As at this position, further up.
    Link(At),
}

/// Neighbouring elements of a tuple that are of one type.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub count: u32,
    pub at: At,
    pub ty: &'static str,
}

/// Whether all that has this name is of one type, as far as names tell. Behind `dyn` all types look the same, and so do the
/// fields of a type that `#[serde(serialize_with)]` writes.
pub(super) fn is_one_type(ty: &str) -> bool {
    !ty.contains("dyn ") && !ty.contains("__SerializeWith")
}

impl Known {
    pub(super) fn nothing() -> Known {
        Known { nodes: vec![Node { kind: Kind::New, complete: false, ty: "", parent: ROOT, depth: 0 }] }
    }

    pub(super) fn kind(&self, at: At) -> &Kind {
        &self.nodes[at as usize].kind
    }

    pub(super) fn set(&mut self, at: At, kind: Kind) {
        self.nodes[at as usize].kind = kind;
    }

    /// So many new positions in a row; `None` when that would be too many.
    pub(super) fn allocate(&mut self, parent: At, count: usize) -> Option<At> {
        let first = self.nodes.len();
        if first + count > MAX_NODES {
            return None;
        }
        let depth = self.nodes[parent as usize].depth + 1;
        let kind = if usize::from(depth) < MAX_DEPTH { Kind::New } else { Kind::Cut };
        self.nodes.extend((0..count).map(|_| Node { kind: kind.clone(), complete: false, ty: "", parent, depth }));
        Some(first as At)
    }

    /// A value of the type called `ty` comes to a new position: it is looked at here, or where its type stands already.
    pub(super) fn enter(&mut self, at: At, ty: &'static str) -> At {
        let mut above = at;
        while above != ROOT && is_one_type(ty) {
            above = self.nodes[above as usize].parent;
            if self.nodes[above as usize].ty == ty {
                self.set(at, Kind::Link(above));
                return above;
            }
        }
        self.nodes[at as usize].ty = ty;
        at
    }

    /// Finds out which positions are complete: all but those that have, or lead to, something that is not. Parts stand behind
    /// what they are part of, so that only links, which lead back, take another round.
    pub(super) fn finish(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.complete = true);
        let mut changed = true;
        while changed {
            changed = false;
            for at in (0..self.nodes.len()).rev() {
                let complete = |part: At| self.nodes[part as usize].complete;
                let is_complete = match &self.nodes[at].kind {
                    Kind::New | Kind::Enum { .. } => false,
                    Kind::Cut | Kind::Leaf(_) => true,
                    Kind::Option(part) | Kind::Seq(part) | Kind::Link(part) => complete(*part),
                    Kind::Map(keys) => complete(*keys) && complete(*keys + 1),
                    Kind::Tuple { runs, .. } => runs.iter().all(|run| complete(run.at)),
                    Kind::Struct { fields, .. } => fields.iter().all(|(_, part)| complete(*part)),
                };
                changed |= is_complete != complete(at as At);
                self.nodes[at].complete = is_complete;
            }
        }
    }

    /// Whether values can show nothing more.
    pub(super) fn is_complete(&self) -> bool {
        self.nodes[ROOT as usize].complete
    }

    /// The shape, as it travels.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(ROOT, &mut out);
        out
    }

    fn write(&self, at: At, out: &mut Vec<u8>) {
        let node = &self.nodes[at as usize];
        match &node.kind {
            Kind::New | Kind::Cut => out.push(wire::UNKNOWN),
            Kind::Leaf(leaf) => out.push(*leaf as u8),
            Kind::Option(part) => {
                out.push(wire::OPTION);
                self.write(*part, out);
            }
            Kind::Seq(part) => {
                out.push(wire::SEQ);
                self.write(*part, out);
            }
            Kind::Map(keys) => {
                out.push(wire::MAP);
                self.write(*keys, out);
                self.write(*keys + 1, out);
            }
            Kind::Tuple { runs, .. } => {
                out.push(wire::TUPLE);
                encode_length(runs.len(), out);
                for run in runs {
                    encode_number(run.count, out);
                    self.write(run.at, out);
                }
            }
            Kind::Struct { name: full, fields, .. } => {
                out.push(wire::STRUCT);
                encode_name(&name(full), out);
                encode_length(fields.len(), out);
                for (key, part) in fields {
                    encode_name(&name(key), out);
                    self.write(*part, out);
                }
            }
            Kind::Enum { name: full, variants } => {
                out.push(wire::ENUM);
                encode_name(&name(full), out);
                encode_length(variants.len(), out);
                for (index, variant, content) in variants {
                    encode_number(*index, out);
                    encode_name(&name(variant), out);
                    self.write(*content, out);
                }
            }
            Kind::Link(to) => out.extend([wire::UP, node.depth - self.nodes[*to as usize].depth]),
        }
    }
}
