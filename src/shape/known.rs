//! What the values of one type have shown of it: a tree of positions, which only grows.

use super::numbers::encode_number;
use super::wire::{encode_length, encode_name};
use super::{Leaf, MAX_DEPTH, MAX_NODES, name, wire};

/// A position: an index into the nodes. Parts have higher indices than their parents.
pub(super) type NodeIndex = u32;

/// No position: values here, and their parts, are not recorded.
pub(super) const DONE: NodeIndex = NodeIndex::MAX;

/// Positions from here on stand for leaves: see [`leaf`].
pub(super) const LEAVES: NodeIndex = DONE - 64;

/// The position that stands for a leaf, once that is known.
pub(super) const fn leaf(leaf: Leaf) -> NodeIndex {
    LEAVES + leaf as NodeIndex
}

#[derive(Clone)]
pub(super) struct KnownShape {
    /// The position of the value itself.
    pub root: NodeIndex,
    pub nodes: Vec<KnownNode>,
}

#[derive(Clone)]
pub(super) struct KnownNode {
    pub kind: KnownKind,
    /// The name of a struct or enum.
    pub name: &'static str,
    /// The content of an option, the elements of a sequence, keys and values of a map; the fields of a struct; the runs of a
    /// tuple; the variants of an enum that were seen, in the order of their numbers.
    pub parts: Vec<KnownPart>,
    /// A tuple or struct was encoded here completely, so its length is known.
    pub sealed: bool,
    /// See [`KnownShape::is_whole`].
    whole: bool,
    /// Values here may be of several types of the same name.
    shared: bool,
    /// The Rust type of the values here. A recursive type has the same position again.
    ty: &'static str,
    parent: NodeIndex,
    depth: u8,
}

#[derive(Clone, Copy)]
pub(super) struct KnownPart {
    /// Length of a run of a tuple's elements that are of one type; or the number of a variant.
    pub number: u32,
    /// The name of a field or variant; or the type of a tuple's element.
    pub name: &'static str,
    pub at: NodeIndex,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum KnownKind {
    /// No value was seen here: an empty sequence, `None`.
    New,
    /// Unknown: beyond the limits, or of contradicting values.
    Cut,
    /// The elements of one list have different shapes.
    Mixed,
    Leaf(Leaf),
    /// The same as this position, an ancestor.
    Link(NodeIndex),
    Option,
    Seq,
    Map,
    Tuple,
    Struct,
    Enum,
}

/// Compares names, first by address: equal literals mostly share their memory.
#[inline]
pub(super) fn same(a: &'static str, b: &'static str) -> bool {
    #[cold]
    fn equal(a: &str, b: &str) -> bool {
        a == b
    }
    std::ptr::eq(a, b) || equal(a, b)
}

/// The variant of this number among those that were seen.
#[inline]
pub(super) fn variant(variants: &[KnownPart], number: u32) -> Option<&KnownPart> {
    // It stands at its own number where those before it were all seen.
    match variants.get(number as usize) {
        Some(found) if found.number == number => Some(found),
        _ => variants.binary_search_by_key(&number, |variant| variant.number).ok().map(|place| &variants[place]),
    }
}

/// Whether all values of this name are of one type, as far as names show. Behind `dyn` all types look the same, and so do the
/// fields of a type that `#[serde(serialize_with)]` writes. The content of a variant may have no type of its own.
pub(super) fn is_one_type(ty: &str) -> bool {
    !ty.is_empty() && !ty.contains("dyn ") && !ty.contains("__SerializeWith")
}

impl KnownShape {
    pub(super) fn nothing() -> KnownShape {
        let mut known = KnownShape { root: 0, nodes: Vec::new() };
        known.push(KnownKind::New, 0, 0);
        known
    }

    pub(super) fn node(&self, at: NodeIndex) -> &KnownNode {
        &self.nodes[at as usize]
    }

    pub(super) fn node_mut(&mut self, at: NodeIndex) -> &mut KnownNode {
        &mut self.nodes[at as usize]
    }

    fn push(&mut self, kind: KnownKind, parent: NodeIndex, depth: u8) {
        let (sealed, whole, shared) = Default::default();
        self.nodes.push(KnownNode { kind, name: "", parts: Vec::new(), sealed, whole, shared, ty: "", parent, depth });
    }

    /// Adds a part with its own position; `None` beyond the limits.
    pub(super) fn add(&mut self, parent: NodeIndex, index: usize, number: u32, name: &'static str) -> Option<NodeIndex> {
        let at = self.nodes.len() as NodeIndex;
        if self.nodes.len() == MAX_NODES {
            return None;
        }
        let depth = self.node(parent).depth + 1;
        self.push(if usize::from(depth) < MAX_DEPTH { KnownKind::New } else { KnownKind::Cut }, parent, depth);
        self.node_mut(parent).parts.insert(index, KnownPart { number, name, at });
        Some(at)
    }

    /// Adds one more element to the last run of a tuple.
    pub(super) fn join(&mut self, tuple: NodeIndex, ty: &'static str) -> Option<NodeIndex> {
        let last = self.node_mut(tuple).parts.last_mut();
        let run = last.filter(|run| run.name == ty && is_one_type(ty) && run.number < u32::MAX)?;
        run.number += 1;
        let at = run.at;
        if at < LEAVES {
            self.node_mut(at).shared = true;
        }
        Some(at)
    }

    /// Enters a value of the type called `ty` at a new position. Returns that, or the ancestor with the same type.
    pub(super) fn enter(&mut self, at: NodeIndex, ty: &'static str) -> NodeIndex {
        let mut above = at;
        while above != 0 && is_one_type(ty) {
            above = self.node(above).parent;
            if self.node(above).ty == ty {
                self.node_mut(at).kind = KnownKind::Link(above);
                self.node_mut(above).shared = true;
                return above;
            }
        }
        self.node_mut(at).ty = ty;
        at
    }

    /// Whether all values here are of one Rust type, however their `Serialize` writes them.
    pub(super) fn is_one_type_at(&self, mut at: NodeIndex) -> bool {
        while at != 0 && !self.node(at).shared {
            at = self.node(at).parent;
        }
        !self.node(at).shared
    }

    /// Stores leaves and links directly in their parents' parts, so that encoding need not read their nodes; and what is whole.
    pub(super) fn finish(&mut self) {
        self.root = self.resolved(self.root);
        // Parts have higher indices than their parents, but for links.
        for node in (0..self.nodes.len()).rev() {
            for part in 0..self.nodes[node].parts.len() {
                self.nodes[node].parts[part].at = self.resolved(self.nodes[node].parts[part].at);
            }
            let KnownNode { kind, ref parts, sealed, .. } = self.nodes[node];
            let is_whole = |part: &KnownPart| part.at as usize > node && self.is_whole(part.at);
            self.nodes[node].whole = match kind {
                KnownKind::Tuple | KnownKind::Struct => sealed && parts.iter().all(is_whole),
                KnownKind::Enum => parts.iter().all(is_whole),
                KnownKind::Option => parts.iter().all(|part| self.is_new(part.at) || is_whole(part)),
                _ => false,
            };
        }
    }

    /// Whether [`elements`](super::elements) may encode values here: with no lists, maps or bytes within them, nor themselves again.
    #[inline]
    pub(super) fn is_whole(&self, at: NodeIndex) -> bool {
        match self.nodes.get(at as usize) {
            Some(node) => node.whole,
            // Others below are new.
            None => at >= LEAVES && at != DONE && at != leaf(Leaf::Bytes),
        }
    }

    /// Whether no value was seen here.
    #[inline]
    pub(super) fn is_new(&self, at: NodeIndex) -> bool {
        self.nodes.get(at as usize).is_some_and(|node| node.kind == KnownKind::New)
    }

    pub(super) fn resolved(&self, at: NodeIndex) -> NodeIndex {
        match self.nodes.get(at as usize).map(|node| node.kind) {
            Some(KnownKind::Leaf(known)) => leaf(known),
            Some(KnownKind::Link(to)) => to,
            _ => at,
        }
    }

    /// Whether further values can show nothing new.
    pub(super) fn is_complete(&self) -> bool {
        self.nodes.iter().all(|node| !matches!(node.kind, KnownKind::New | KnownKind::Enum))
    }

    /// The encoded shape.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(self.root, 0, &mut out);
        out
    }

    fn write(&self, at: NodeIndex, depth: u8, out: &mut Vec<u8>) {
        if at >= LEAVES {
            return out.push((at - LEAVES) as u8);
        }
        let node = self.node(at);
        if node.depth != depth {
            // An ancestor: a recursive type.
            return out.extend([wire::UP, depth - node.depth]);
        }
        out.push(match node.kind {
            KnownKind::New | KnownKind::Cut => wire::UNKNOWN,
            KnownKind::Mixed => wire::MIXED,
            KnownKind::Leaf(leaf) => leaf as u8,
            KnownKind::Link(to) => return out.extend([wire::UP, depth - self.node(to).depth]),
            KnownKind::Option => wire::OPTION,
            KnownKind::Seq => wire::SEQ,
            KnownKind::Map => wire::MAP,
            KnownKind::Tuple => wire::TUPLE,
            KnownKind::Struct => wire::STRUCT,
            KnownKind::Enum => wire::ENUM,
        });
        if matches!(node.kind, KnownKind::Struct | KnownKind::Enum) {
            encode_name(&name(node.name), out);
        }
        if matches!(node.kind, KnownKind::Struct | KnownKind::Enum | KnownKind::Tuple) {
            encode_length(node.parts.len(), out);
        }
        if matches!(node.kind, KnownKind::New | KnownKind::Cut | KnownKind::Mixed) {
            return;
        }
        for part in &node.parts {
            if matches!(node.kind, KnownKind::Tuple | KnownKind::Enum) {
                encode_number(part.number.into(), out);
            }
            if matches!(node.kind, KnownKind::Struct | KnownKind::Enum) {
                encode_name(&name(part.name), out);
            }
            self.write(part.at, depth + 1, out);
        }
    }
}
