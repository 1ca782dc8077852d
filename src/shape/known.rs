//! What the values of one type that were sent have shown of it: a tree of positions, which only ever grows.

use super::wire::{encode_length, encode_name, encode_number};
use super::{Leaf, MAX_DEPTH, MAX_NODES, name, wire};

/// A position: an index into the nodes. Parts stand behind what they are part of.
pub(super) type At = u32;

/// Stands for no position: what comes here need not be looked at, nor what is in it.
pub(super) const DONE: At = At::MAX;

/// From here on, a position is nothing but a leaf: see [`leaf`].
pub(super) const LEAVES: At = DONE - 64;

/// The position that stands for a leaf, once that is known.
pub(super) const fn leaf(leaf: Leaf) -> At {
    LEAVES + leaf as At
}

#[derive(Clone)]
pub(super) struct Known {
    /// Where the value itself stands.
    pub root: At,
    pub nodes: Vec<Node>,
}

#[derive(Clone)]
pub(super) struct Node {
    pub kind: Kind,
    /// Of a struct or enum.
    pub name: &'static str,
    /// The content of an option, the elements of a sequence, keys and values of a map; the fields of a struct; the runs of a
    /// tuple; the variants of an enum that were seen, in the order of their numbers.
    pub parts: Vec<Part>,
    /// A tuple or struct has been here to its end.
    pub sealed: bool,
    /// Values of several types may stand here, which only have the same name.
    shared: bool,
    /// The Rust type of what stands here. A type within itself is the same position again.
    ty: &'static str,
    parent: At,
    depth: u8,
}

#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Neighbouring elements of a tuple that are of one type; the number of a variant.
    pub number: u32,
    /// Of a field or variant; the type of a tuple's element.
    pub name: &'static str,
    pub at: At,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// No value has come here: an empty sequence, `None`.
    New,
    /// Beyond the limits, or different names each time: nothing is said of it.
    Cut,
    /// The elements of one list have different shapes.
    Mixed,
    Leaf(Leaf),
    /// As at this position, further up.
    Link(At),
    Option,
    Seq,
    Map,
    Tuple,
    Struct,
    Enum,
}

/// Whether all that has this name is of one type, as far as names tell. Behind `dyn` all types look the same, and so do the
/// fields of a type that `#[serde(serialize_with)]` writes. The content of a variant may have no type of its own.
pub(super) fn is_one_type(ty: &str) -> bool {
    !ty.is_empty() && !ty.contains("dyn ") && !ty.contains("__SerializeWith")
}

impl Known {
    pub(super) fn nothing() -> Known {
        let mut known = Known { root: 0, nodes: Vec::new() };
        known.push(Kind::New, 0, 0);
        known
    }

    pub(super) fn node(&self, at: At) -> &Node {
        &self.nodes[at as usize]
    }

    pub(super) fn node_mut(&mut self, at: At) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn push(&mut self, kind: Kind, parent: At, depth: u8) {
        self.nodes.push(Node { kind, name: "", parts: Vec::new(), sealed: false, shared: false, ty: "", parent, depth });
    }

    /// Adds a part, with a position of its own; `None` when there is no room.
    pub(super) fn add(&mut self, parent: At, place: usize, number: u32, name: &'static str) -> Option<At> {
        let at = self.nodes.len() as At;
        if self.nodes.len() == MAX_NODES {
            return None;
        }
        let depth = self.node(parent).depth + 1;
        self.push(if usize::from(depth) < MAX_DEPTH { Kind::New } else { Kind::Cut }, parent, depth);
        self.node_mut(parent).parts.insert(place, Part { number, name, at });
        Some(at)
    }

    /// One more element joins the last run of a tuple.
    pub(super) fn join(&mut self, tuple: At, ty: &'static str) -> Option<At> {
        let last = self.node_mut(tuple).parts.last_mut();
        let run = last.filter(|run| run.name == ty && is_one_type(ty) && run.number < u32::MAX)?;
        run.number += 1;
        let at = run.at;
        if at < LEAVES {
            self.node_mut(at).shared = true;
        }
        Some(at)
    }

    /// A value of the type called `ty` comes to a new position: it is looked at here, or where its type stands already.
    pub(super) fn enter(&mut self, at: At, ty: &'static str) -> At {
        let mut above = at;
        while above != 0 && is_one_type(ty) {
            above = self.node(above).parent;
            if self.node(above).ty == ty {
                self.node_mut(at).kind = Kind::Link(above);
                self.node_mut(above).shared = true;
                return above;
            }
        }
        self.node_mut(at).ty = ty;
        at
    }

    /// Whether all values that come here are of one type, however their `Serialize` writes them.
    pub(super) fn is_one_type_at(&self, mut at: At) -> bool {
        while at != 0 && !self.node(at).shared {
            at = self.node(at).parent;
        }
        !self.node(at).shared
    }

    /// Has leaves and links stand right where they are parts, so that no look at their nodes is needed.
    pub(super) fn finish(&mut self) {
        self.root = self.resolved(self.root);
        for node in 0..self.nodes.len() {
            for part in 0..self.nodes[node].parts.len() {
                self.nodes[node].parts[part].at = self.resolved(self.nodes[node].parts[part].at);
            }
        }
    }

    fn resolved(&self, at: At) -> At {
        match self.nodes.get(at as usize).map(|node| node.kind) {
            Some(Kind::Leaf(known)) => leaf(known),
            Some(Kind::Link(to)) => to,
            _ => at,
        }
    }

    /// Whether values can show nothing more.
    pub(super) fn is_complete(&self) -> bool {
        self.nodes.iter().all(|node| !matches!(node.kind, Kind::New | Kind::Enum))
    }

    /// The shape, as it travels.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(self.root, 0, &mut out);
        out
    }

    fn write(&self, at: At, depth: u8, out: &mut Vec<u8>) {
        if at >= LEAVES {
            return out.push((at - LEAVES) as u8);
        }
        let node = self.node(at);
        if node.depth != depth {
            // What stands further up is a part of itself.
            return out.extend([wire::UP, depth - node.depth]);
        }
        out.push(match node.kind {
            Kind::New | Kind::Cut => wire::UNKNOWN,
            Kind::Mixed => wire::MIXED,
            Kind::Leaf(leaf) => leaf as u8,
            Kind::Link(to) => return out.extend([wire::UP, depth - self.node(to).depth]),
            Kind::Option => wire::OPTION,
            Kind::Seq => wire::SEQ,
            Kind::Map => wire::MAP,
            Kind::Tuple => wire::TUPLE,
            Kind::Struct => wire::STRUCT,
            Kind::Enum => wire::ENUM,
        });
        if matches!(node.kind, Kind::Struct | Kind::Enum) {
            encode_name(&name(node.name), out);
        }
        if matches!(node.kind, Kind::Struct | Kind::Enum | Kind::Tuple) {
            encode_length(node.parts.len(), out);
        }
        if matches!(node.kind, Kind::New | Kind::Cut | Kind::Mixed) {
            return;
        }
        for part in &node.parts {
            if matches!(node.kind, Kind::Tuple | Kind::Enum) {
                encode_number(part.number.into(), out);
            }
            if matches!(node.kind, Kind::Struct | Kind::Enum) {
                encode_name(&name(part.name), out);
            }
            self.write(part.at, depth + 1, out);
        }
    }
}
