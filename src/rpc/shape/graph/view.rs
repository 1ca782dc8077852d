//! The graph as a tree: the shape.

use super::{Graph, Id, Kind, MAX_HOPS, ROOT};
use crate::rpc::shape::{ANY_NAME, Field, MAX_DEPTH, MAX_NAME, MAX_NODES, Name, Shape, Variant, name, push_run};

impl Graph {
    /// The shape that was found: down to the deepest level at which all of it fits into
    /// [`MAX_NODES`].
    pub(crate) fn into_shape(self) -> Shape {
        let mut shape = Shape::Unknown;
        for depth in 1..=MAX_DEPTH {
            let mut view = View { graph: &self, depth, nodes_left: MAX_NODES - 1, cut: false, path: Vec::new() };
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
struct View<'a> {
    graph: &'a Graph,
    depth: usize,
    nodes_left: usize,
    /// The limit of depth hid something.
    cut: bool,
    /// The nodes above.
    path: Vec<Id>,
}

impl View<'_> {
    /// `None` if there are too many nodes.
    fn shape(&mut self, mut id: Id) -> Option<Shape> {
        for _ in 0..MAX_HOPS {
            let node = &self.graph.nodes[id];
            if node.alternative.is_some() {
                // Depends on the value.
                return Some(Shape::Unknown);
            }
            match node.kind {
                Kind::Link(home) => id = home,
                Kind::New | Kind::Opaque => return Some(Shape::Unknown),
                Kind::Leaf(leaf) => return Some(Shape::Leaf(leaf)),
                _ => return self.parts(id),
            }
        }
        Some(Shape::Unknown)
    }

    fn parts(&mut self, id: Id) -> Option<Shape> {
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

    /// A part, which is paid for here.
    fn part(&mut self, id: Option<Id>) -> Option<Shape> {
        self.nodes_left = self.nodes_left.checked_sub(1)?;
        id.map_or(Some(Shape::Unknown), |id| self.shape(id))
    }

    fn compound(&mut self, id: Id) -> Option<Shape> {
        let graph = self.graph;
        let node = &graph.nodes[id];
        Some(match node.kind {
            Kind::Option => Shape::Option(Box::new(self.part(node.child(0))?)),
            Kind::Seq => Shape::Seq(Box::new(self.part(node.child(0))?)),
            Kind::Map => Shape::Map(Box::new((self.part(node.child(0))?, self.part(node.child(1))?))),
            Kind::Tuple(_) => {
                let mut runs = Vec::new();
                let mut index = 0;
                while index < node.count {
                    let child = node.child(index);
                    let end = (index..node.count).find(|&i| node.child(i) != child).unwrap_or(node.count);
                    let left = self.nodes_left;
                    let shape = self.part(child)?;
                    if push_run(&mut runs, u32::try_from(end - index).ok()?, shape) {
                        self.nodes_left = left;
                    }
                    index = end;
                }
                Shape::Tuple(runs)
            }
            Kind::Struct(full, names) => {
                // What comes after a part that cannot be made up was never asked for.
                let reached = if node.visited { node.count } else { node.children.len() };
                let fields = (0..if node.visited { node.count } else { names.len() }).map(|index| {
                    let name = window(names, index, reached);
                    Some(Field { name, shape: self.part(node.child(index))? })
                });
                Shape::Struct(name(full), fields.collect::<Option<_>>()?)
            }
            Kind::Enum(full, names) => {
                let known = if node.count < names.len() { node.count } else { node.tries.len() };
                let variants = (0..node.count).map(|index| {
                    let content = self.part(node.child(index))?;
                    Some(Variant { index: index as u32, name: window(names, index, known), content })
                });
                Shape::Enum(name(full), variants.collect::<Option<_>>()?)
            }
            // Without parts, and answered before.
            Kind::New | Kind::Opaque | Kind::Leaf(_) | Kind::Link(_) => Shape::Unknown,
        })
    }
}

/// The name of the part at `index`, when `names` lists the names and aliases of `parts` parts in
/// their order: one of those that leave enough for the parts before and after it.
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
