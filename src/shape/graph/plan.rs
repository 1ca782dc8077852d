//! Plans what the next run of a trace should try.

use super::{Graph, GraphNode, MAX_FAILS, NodeId, NodeKind, Tries};
use crate::shape::{MAX_DEPTH, MAX_NODES};

/// From here on runs synthesize small values (`None`, empty sequences), to come to an end.
const DEEP: usize = MAX_DEPTH;

/// Runs through a variant that has never worked before it is given up. More than [`MAX_FAILS`], for it may have to wait until
/// the other variants, which its content needs, are known.
const MAX_TRIES: u32 = 2 * MAX_FAILS;

impl Graph {
    /// Finds out, for all nodes, which are doomed and which are live.
    pub(super) fn survey(&mut self) {
        for node in &mut self.nodes {
            (node.live, node.doomed) = (false, false);
        }
        self.spread(|graph, id| !graph.nodes[id].doomed && graph.is_doomed(id), |node| node.doomed = true);
        self.spread(|graph, id| !graph.nodes[id].live && graph.is_live(id), |node| node.live = true);
    }

    /// Marks nodes until no more follow: the least fixed point, for there are cycles. Children mostly come after their parents,
    /// so that the reverse order takes a pass or two.
    fn spread(&mut self, follows: impl Fn(&Graph, NodeId) -> bool, mark: impl Fn(&mut GraphNode)) {
        let mut changed = true;
        while changed {
            changed = false;
            for id in (0..self.nodes.len()).rev() {
                if follows(self, id) {
                    mark(&mut self.nodes[id]);
                    changed = true;
                }
            }
        }
    }

    fn is_doomed(&self, id: NodeId) -> bool {
        let node = &self.nodes[id];
        let doomed = |id: &NodeId| self.nodes[*id].doomed;
        let below = match node.kind {
            NodeKind::New | NodeKind::Leaf(_) | NodeKind::Option | NodeKind::Seq | NodeKind::Map => false,
            NodeKind::Opaque => true,
            NodeKind::Link(home) => doomed(&home),
            NodeKind::Tuple(_) | NodeKind::Struct(..) => node.children.iter().any(doomed),
            NodeKind::Enum(..) => (0..node.count).all(|variant| {
                node.tries.get(variant).is_some_and(|tries| {
                    tries.absent || doomed(&node.children[variant]) || (!tries.ok && tries.count >= MAX_TRIES)
                })
            }),
        };
        (below || node.given_up()) && node.alternative.is_none_or(|alternative| doomed(&alternative))
    }

    fn is_live(&self, id: NodeId) -> bool {
        let node = &self.nodes[id];
        let live = |id: &NodeId| self.nodes[*id].live;
        let own = match node.kind {
            NodeKind::Opaque => false,
            NodeKind::New | NodeKind::Leaf(_) => node.untested(),
            NodeKind::Link(home) => node.untested() || live(&home),
            NodeKind::Option | NodeKind::Seq | NodeKind::Map => node.untested() || node.children.iter().any(live),
            NodeKind::Tuple(_) | NodeKind::Struct(..) => {
                // Nothing behind a doomed part is ever reached.
                let end = node.children.iter().position(|child| live(child) || self.nodes[*child].doomed);
                end.map_or(node.untested(), |end| live(&node.children[end]))
            }
            NodeKind::Enum(..) => !node.given_up() && (0..node.count).any(|variant| self.is_open(node, variant)),
        };
        own || node.alternative.is_some_and(|alternative| live(&alternative))
    }

    /// Whether a variant is worth a run.
    fn is_open(&self, node: &GraphNode, variant: usize) -> bool {
        if node.count > MAX_NODES && node.base.is_some() {
            // Its shape has no room for so many, and one is enough to go on.
            return false;
        }
        node.tries.get(variant).is_none_or(|tries| {
            let content = &self.nodes[node.children[variant]];
            let worthwhile = if tries.ok { content.live } else { tries.count < MAX_TRIES };
            worthwhile && !tries.absent && !content.doomed
        })
    }

    /// Whether the node is its own descendant in this run: time to come to an end.
    fn is_reentered(&self, id: NodeId) -> bool {
        self.nodes[id].active > 1
    }

    /// Whether this run should go there to find something out. When nothing came of that, every other run goes around
    /// it, to what may lie behind.
    fn is_worth_a_visit(&self, id: NodeId) -> bool {
        self.nodes[id].live && self.idle.is_multiple_of(2)
    }

    /// Whether an option should be `Some`.
    pub(crate) fn choose_some(&self, id: NodeId, inner: NodeId) -> bool {
        !self.is_reentered(id)
            && (self.is_worth_a_visit(inner)
                || (!self.nodes[inner].doomed && self.depth < DEEP && self.attempt.is_multiple_of(2)))
    }

    /// How many elements a sequence or map should have, one of whose parts is at each of `parts`.
    pub(crate) fn choose_length(&self, id: NodeId, parts: &[NodeId]) -> usize {
        let length = [1, 0, 2, 3, 4, 16, 8, 32][self.attempt as usize % 8];
        if self.is_reentered(id) {
            0
        } else if parts.iter().any(|&part| self.is_worth_a_visit(part)) {
            length.max(1)
        } else if self.depth >= DEEP || parts.iter().any(|&part| self.nodes[part].doomed) {
            0
        } else {
            length
        }
    }

    /// The variant that this run should take, with the position of its content.
    pub(crate) fn choose_variant(&mut self, id: NodeId) -> Option<(usize, NodeId)> {
        let chosen = self.pick_variant(&self.nodes[id]);
        let content = chosen.and_then(|variant| self.child(id, variant));
        let (Some(variant), Some(content)) = (chosen, content) else {
            self.blamed = true;
            return None;
        };
        let node = &mut self.nodes[id];
        if node.tries.len() <= variant {
            node.tries.resize(variant + 1, Tries::default());
        }
        let tries = &mut node.tries[variant];
        tries.count = tries.count.saturating_add(1);
        self.progress |= !tries.ok && tries.count <= MAX_TRIES;
        Some((variant, content))
    }

    fn pick_variant(&self, node: &GraphNode) -> Option<usize> {
        if node.active > 1 {
            return node.base;
        }
        let tried = |variant: &usize| node.tries.get(*variant).map_or(0, |tries| tries.count);
        let open = (0..node.count).filter(|&variant| self.is_open(node, variant)).min_by_key(tried);
        if open.is_some() && (self.idle.is_multiple_of(2) || node.base.is_none()) {
            return open;
        }
        // When runs bring nothing new, something else may depend on the variant taken here.
        let works: Vec<usize> = (0..node.tries.len()).filter(|&variant| node.tries[variant].ok).collect();
        if self.idle == 0 || works.is_empty() { node.base } else { Some(works[self.idle % works.len()]) }
    }

    /// Records that a variant was synthesized.
    pub(crate) fn variant_works(&mut self, id: NodeId, variant: usize) {
        let node = &mut self.nodes[id];
        node.tries[variant].ok = true;
        node.base.get_or_insert(variant);
    }

    /// Records that there is no variant of this index. The last ones are missing when there are aliases among the
    /// names.
    pub(crate) fn no_such_variant(&mut self, id: NodeId, variant: usize) {
        let absent = &mut self.nodes[id].tries[variant].absent;
        self.progress |= !*absent;
        *absent = true;
        self.blamed = true;
    }

    /// Which of the synthetic values a leaf should present.
    pub(crate) fn attempt(&self) -> usize {
        self.attempt as usize
    }

    /// A synthetic number. At first 1, which most validations accept: it is not zero, is its own product with others of
    /// its kind, is a day, a month and a length.
    pub(crate) fn number(&mut self) -> u8 {
        self.made_up = (self.made_up + 1) % 32;
        match self.attempt % 8 {
            0 => 1,
            1 => 2 + self.made_up,
            // In a run that takes what is optional, as tags may be 0 or 1.
            2 => 0,
            3 => 100 - self.made_up,
            4 => 2,
            5 => 4,
            6 => 12,
            _ => 100,
        }
    }
}
