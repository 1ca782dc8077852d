//! Converts the graph to a tree: the shape.

use super::{Graph, MAX_HOPS, MAX_STEPS, NodeId, NodeKind, ROOT};
use crate::shape::{ANY_NAME, Field, MAX_DEPTH, MAX_NAME, MAX_NODES, Name, Shape, Variant, name, push_run};

impl Graph {
    /// The shape that was found: down to the deepest level at which all of it fits into [`MAX_NODES`].
    pub(crate) fn into_shape(self) -> Shape {
        let mut shape = Shape::Unknown;
        for depth in 1..=MAX_DEPTH {
            let mut view = GraphView { graph: &self, depth, nodes_left: MAX_NODES - 1, cut: false, path: Vec::new() };
            match view.shape(ROOT) {
                Some(found) => shape = found,
                None => break,
            }
            if !view.cut {
                break;
            }
        }
        shape
    }
}

/// A graph as a tree of limited depth and size.
struct GraphView<'a> {
    graph: &'a Graph,
    depth: usize,
    nodes_left: usize,
    /// The limit of depth hid something.
    cut: bool,
    /// The nodes above.
    path: Vec<NodeId>,
}

impl GraphView<'_> {
    /// `None` if there are too many nodes.
    fn shape(&mut self, mut id: NodeId) -> Option<Shape> {
        for _ in 0..MAX_HOPS {
            let node = &self.graph.nodes[id];
            if node.varies {
                // The shape depends on the value.
                return Some(Shape::Unknown);
            }
            match node.kind {
                NodeKind::Link(home) => id = home,
                NodeKind::New | NodeKind::Opaque => return Some(Shape::Unknown),
                NodeKind::Leaf(leaf) => return Some(Shape::Leaf(leaf)),
                _ => return self.parts(id),
            }
        }
        Some(Shape::Unknown)
    }

    fn parts(&mut self, id: NodeId) -> Option<Shape> {
        if let Some(above) = self.path.iter().position(|&node| node == id) {
            return Some(Shape::Up((self.path.len() - above) as u8));
        }
        if self.path.len() == self.depth {
            self.cut = true;
            return Some(Shape::Unknown);
        }
        self.path.push(id);
        let shape = self.compound(id);
        self.path.pop();
        shape
    }

    /// A part, which counts against the limit here.
    fn part(&mut self, id: Option<NodeId>) -> Option<Shape> {
        self.nodes_left = self.nodes_left.checked_sub(1)?;
        id.map_or(Some(Shape::Unknown), |id| self.shape(id))
    }

    fn compound(&mut self, id: NodeId) -> Option<Shape> {
        let graph = self.graph;
        let node = &graph.nodes[id];
        Some(match node.kind {
            NodeKind::Option => Shape::Option(Box::new(self.part(node.child(0))?)),
            NodeKind::Seq => Shape::Seq(Box::new(self.part(node.child(0))?)),
            NodeKind::Map => Shape::Map(Box::new((self.part(node.child(0))?, self.part(node.child(1))?))),
            // Can't be distinguished from those that declare `usize::MAX` and read until nothing comes.
            NodeKind::Tuple(len) if len > MAX_STEPS && !node.visited => Shape::Unknown,
            NodeKind::Tuple(_) => {
                let mut runs = Vec::new();
                let mut index = 0;
                while index < node.count {
                    let child = node.child(index);
                    // Where no run has come, the declared length may be anything.
                    let end = child.map_or(node.count, |_| {
                        let differs = (index..node.count).find(|&i| node.child(i) != child);
                        differs.unwrap_or(node.count)
                    });
                    let count = u32::try_from(end - index).unwrap_or(u32::MAX);
                    let left = self.nodes_left;
                    let shape = self.part(child)?;
                    if push_run(&mut runs, count, shape) {
                        self.nodes_left = left;
                    }
                    index = end;
                }
                Shape::Tuple(runs)
            }
            NodeKind::Struct(full, names) => {
                // What comes after a part that cannot be synthesized was never asked for: the names left may be those of
                // fields or aliases.
                let reached = if node.visited { node.count } else { node.children.len() };
                let fields = (0..node.count).map(|index| {
                    let shape = self.part(node.child(index))?;
                    let name = window(names, index, reached);
                    Some(Field { name, shape })
                });
                Shape::Struct(name(full), fields.collect::<Option<_>>()?)
            }
            NodeKind::Enum(full, names) => {
                let exists = |index: &usize| !node.tries[*index].absent;
                let known = (0..node.tries.len()).rfind(exists).map_or(0, |last| last + 1);
                if known == 0 && !names.is_empty() {
                    return Some(Shape::Unknown);
                }
                let count = if node.tries.len() < names.len() { names.len() } else { known };
                let variants = (0..count).map(|index| {
                    let content = self.part(node.child(index))?;
                    Some(Variant { index: index as u32, name: window(names, index, known), content })
                });
                Shape::Enum(name(full), variants.collect::<Option<_>>()?)
            }
            // Without parts, and answered before.
            NodeKind::New | NodeKind::Opaque | NodeKind::Leaf(_) | NodeKind::Link(_) => Shape::Unknown,
        })
    }
}

/// The name of the part at `index`, when `names` lists the names and aliases of `parts` parts in their order: one of
/// those that leave enough for the parts before and after it.
fn window(names: &'static [&'static str], index: usize, parts: usize) -> Name {
    if index >= parts {
        return ANY_NAME.into();
    }
    if names.len() == parts {
        return name(names[index]);
    }
    let joined = names[index..=index + names.len() - parts].join("|");
    if joined.len() > MAX_NAME { ANY_NAME.into() } else { joined.into() }
}
