//! What the runs of a `Deserialize` have learned about a type, and what the next run should try.
//!
//! The nodes are positions in the type. A named type that stands at several positions is traced once and linked to,
//! which also closes recursive types into cycles. Every run synthesizes one value of the whole type; it heads for what
//! is not known yet, and elsewhere does what has worked before. A run that fails is no harm: what it saw on its way
//! stays known.

mod plan;
mod view;

use std::collections::HashMap;

use super::{Leaf, MAX_DEPTH, MAX_NODES};

/// Calls to a deserializer in all. A type of some dozens of parts and variants takes some hundreds.
const MAX_STEPS: usize = 16 * 1024;

/// Nodes while tracing. More than [`MAX_NODES`], because not all of them end up in the shape.
const MAX_POSITIONS: usize = 4 * MAX_NODES;

/// Deepest nesting of a run. Deeper than [`MAX_DEPTH`], because newtypes add no level to the shape.
const MAX_NESTING: usize = 2 * MAX_DEPTH;

/// Number of synthetic values that a type may refuse before tracing it stops: there are no more different ones.
const MAX_FAILS: u32 = 16;

/// Runs that bring nothing new before tracing ends. They make values up differently, in case something depends on them.
const MAX_IDLE: usize = 8;

/// As many when nothing is known to be missing.
const MAX_IDLE_AT_END: usize = 4;

/// Links and alternatives that are followed. Real types need two or three.
const MAX_HOPS: usize = 8;

pub(super) type NodeId = usize;

/// The position of the type itself.
pub(super) const ROOT: NodeId = 0;

/// What a `Deserialize` asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NodeKind {
    /// Not reached yet.
    New,
    /// Something that postcard cannot decode either, or that is too deep.
    Opaque,
    Leaf(Leaf),
    Option,
    Seq,
    Map,
    Tuple(usize),
    /// Name and fields. With `#[serde(alias)]` the aliases stand among the fields.
    Struct(&'static str, &'static [&'static str]),
    /// Name and variants, with aliases as above.
    Enum(&'static str, &'static [&'static str]),
    /// What is traced at another position.
    Link(NodeId),
}

/// The identity of a type, as far as it can be found without `'static`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeKey {
    visitor: &'static str,
    size: usize,
    name: &'static str,
    parts: &'static [&'static str],
}

impl NodeKey {
    /// The key of the type that `V` reads; `None` where `V` hides it.
    pub(super) fn of<V, T>(name: &'static str, parts: &'static [&'static str]) -> Option<NodeKey> {
        let visitor = std::any::type_name::<V>();
        // Behind `dyn Visitor` (erased-serde) all types look the same.
        (!visitor.contains("dyn ")).then_some(NodeKey { visitor, size: size_of::<T>(), name, parts })
    }
}

#[derive(Debug)]
struct GraphNode {
    kind: NodeKind,
    /// Positions of the parts, as far as they were reached. Map: key, value. Enum: the contents of the variants.
    children: Vec<NodeId>,
    /// Tuple, struct, enum: parts that were declared; tuple, struct: once visited, those that were asked for.
    count: usize,
    /// Tuple: so many leading elements share the first child, since their types are the same.
    shared: usize,
    /// Tuple: the type of the seed of the first element.
    seed: &'static str,
    tries: Vec<Tries>,
    /// Enum: the variant that worked first. It cannot contain the enum itself: the end of every recursion.
    base: Option<usize>,
    /// Taken when another run asks for another kind at the same position.
    alternative: Option<NodeId>,
    /// What stands here is not the same every time, in a way that alternatives do not show.
    varies: bool,
    /// The alternative that this run, or the last one that came here, asked for.
    current: NodeId,
    /// The visitor returned a value.
    visited: bool,
    /// The type that stands here was synthesized: after the visitor there may be a validation.
    accepted: bool,
    /// Synthetic values that were refused before one was accepted.
    fails: u32,
    /// A bit for each attempt whose values were refused here: they repeat after sixteen.
    refused: u16,
    /// Which values were presented last, and the first that were accepted.
    presented: MadeUp,
    works: Option<MadeUp>,
    /// So many calls are in progress here; two or more in a recursion.
    active: u32,
    /// There is something left to find out, here or below.
    live: bool,
    /// No value can be synthesized for this.
    doomed: bool,
}

/// Which synthetic values are presented: the attempt, and how many numbers were made up before in the run.
#[derive(Clone, Copy, Debug, Default)]
struct MadeUp {
    attempt: u32,
    numbers: u8,
}

impl MadeUp {
    fn bit(self) -> u16 {
        1 << (self.attempt % 16)
    }
}

/// What follows from a refusal.
enum AfterRefusal {
    /// The next run presents something else.
    NextAttempt,
    /// A run like this one would get further: it presents what was accepted before.
    Avoidable,
    /// Nothing new.
    Again,
}

#[derive(Clone, Debug, Default)]
struct Tries {
    count: u32,
    ok: bool,
    /// The type does not know this variant.
    absent: bool,
}

impl GraphNode {
    fn new(id: NodeId) -> GraphNode {
        GraphNode {
            kind: NodeKind::New,
            children: Vec::new(),
            count: 0,
            shared: 0,
            seed: "",
            tries: Vec::new(),
            base: None,
            alternative: None,
            varies: false,
            current: id,
            visited: false,
            accepted: false,
            fails: 0,
            refused: 0,
            presented: MadeUp::default(),
            works: None,
            active: 0,
            live: true,
            doomed: false,
        }
    }

    fn untested(&self) -> bool {
        !self.accepted && self.fails < MAX_FAILS
    }

    fn given_up(&self) -> bool {
        !self.accepted && self.fails >= MAX_FAILS
    }

    /// Notes that what was presented was refused.
    fn refuse(&mut self) -> AfterRefusal {
        let untested = self.untested();
        self.fails += u32::from(untested);
        let before = self.refused;
        self.refused |= self.presented.bit();
        if untested {
            AfterRefusal::NextAttempt
        } else if self.works.is_some() && before != self.refused {
            AfterRefusal::Avoidable
        } else {
            AfterRefusal::Again
        }
    }

    /// It has accepted some values and refused others.
    fn is_choosy(&self) -> bool {
        self.works.is_some() && self.refused != 0
    }

    /// Which values to present in place of these: what was accepted here, where these would be refused again. The run is for what
    /// is behind.
    fn instead_of(&self, made_up: MadeUp) -> Option<MadeUp> {
        self.works.filter(|_| self.refused & made_up.bit() != 0)
    }

    /// The child at `index` of a tuple, struct or enum, if a run has come there.
    fn child(&self, index: usize) -> Option<NodeId> {
        if index < self.shared { self.children.first() } else { self.children.get(index) }.copied()
    }
}

/// The state of a trace.
pub(super) struct Graph {
    nodes: Vec<GraphNode>,
    homes: HashMap<NodeKey, NodeId>,
    steps: usize,
    idle: usize,
    /// This run brought something new.
    progress: bool,
    /// Values that a part has refused are replaced by those that it has accepted. First all runs are made without: they show most.
    replaces: bool,
    /// The next run can get further with the same attempt.
    retry: bool,
    depth: usize,
    /// Refused values of the node and those above it: each time all of them are made up differently.
    attempt: u32,
    /// Numbers made up in this run.
    made_up: u8,
    /// The failure that is on its way up has been put down to a node already.
    blamed: bool,
}

/// What [`Graph::enter`] changed and [`Graph::leave`] puts back.
pub(super) struct EnteredNode {
    pub(super) id: NodeId,
    depth: usize,
    attempt: u32,
    presented: MadeUp,
    /// By how much the count of numbers was put back.
    put_back: u8,
}

impl Graph {
    pub(super) fn new() -> Graph {
        Graph {
            nodes: vec![GraphNode::new(ROOT)],
            homes: HashMap::new(),
            steps: 0,
            idle: 0,
            progress: true,
            replaces: false,
            retry: false,
            depth: 0,
            attempt: 0,
            made_up: 0,
            blamed: false,
        }
    }

    /// Prepares for another run; `false` when there is nothing more to find out, or no more to be spent.
    pub(super) fn begin_run(&mut self) -> bool {
        self.idle = if self.progress { 0 } else { self.idle + usize::from(!self.retry) };
        (self.progress, self.retry) = (false, false);
        self.survey();
        let enough = if self.nodes[ROOT].live { MAX_IDLE } else { MAX_IDLE_AT_END };
        if self.idle > enough && !self.replaces && self.nodes.iter().any(GraphNode::is_choosy) {
            (self.replaces, self.idle) = (true, 0);
        }
        self.attempt = self.idle as u32;
        self.made_up = 0;
        self.blamed = false;
        self.steps < MAX_STEPS && self.idle <= enough
    }

    /// Starts on what is asked for at a position: a call, a level deeper. `None` if it cannot be answered.
    pub(super) fn enter(&mut self, at: NodeId, key: Option<NodeKey>, kind: NodeKind) -> Option<EnteredNode> {
        let id = self.settle(at, key, kind);
        let Some(id) = id.filter(|_| kind != NodeKind::Opaque) else {
            self.blamed = true;
            return None;
        };
        let (depth, attempt) = (self.depth, self.attempt);
        self.depth += 1;
        let position = self.nodes[at].current;
        self.attempt += self.nodes[position].fails + if id == position { 0 } else { self.nodes[id].fails };
        let node = &mut self.nodes[id];
        let mut presented = MadeUp { attempt: self.attempt, numbers: self.made_up };
        let mut put_back = 0;
        if let Some(instead) = node.instead_of(presented).filter(|_| self.replaces) {
            put_back = presented.numbers.wrapping_sub(instead.numbers);
            presented = instead;
            (self.attempt, self.made_up) = (instead.attempt, instead.numbers);
        }
        node.active += 1;
        Some(EnteredNode { id, depth, attempt, presented, put_back })
    }

    /// Ends what [`enter`](Self::enter) began. A failure is put down to the innermost node that saw one.
    pub(super) fn leave(&mut self, entered: EnteredNode, ok: bool) {
        (self.depth, self.attempt) = (entered.depth, entered.attempt);
        self.made_up = self.made_up.wrapping_add(entered.put_back) % 32;
        let node = &mut self.nodes[entered.id];
        // In a recursion, what was presented last is that of an inner value.
        node.presented = entered.presented;
        node.active -= 1;
        if ok {
            self.progress |= !node.visited;
            node.visited = true;
        } else if !self.blamed {
            let refusal = node.refuse();
            self.note(refusal);
        }
        self.blamed = !ok;
    }

    fn note(&mut self, refusal: AfterRefusal) {
        self.progress |= matches!(refusal, AfterRefusal::NextAttempt);
        self.retry |= self.replaces && matches!(refusal, AfterRefusal::Avoidable);
    }

    /// Records whether the type at a position was synthesized. If not, and nothing below is to blame, a validation after
    /// the visitor refused the value.
    pub(super) fn judge(&mut self, at: NodeId, ok: bool) {
        let current = self.nodes[at].current;
        let node = &mut self.nodes[current];
        if ok {
            self.progress |= !node.accepted;
            node.accepted = true;
            node.works.get_or_insert(node.presented);
        } else if !self.blamed {
            let refusal = node.refuse();
            self.note(refusal);
        }
        self.blamed = !ok;
    }

    /// Goes through a newtype, which adds nothing to the shape: returns the position of what is inside. The way back is
    /// [`leave_newtype`](Self::leave_newtype).
    pub(super) fn enter_newtype(&mut self, at: NodeId, key: Option<NodeKey>) -> Option<NodeId> {
        let inside = if self.spend(at) { self.home(at, key) } else { None };
        match inside {
            Some(_) => self.depth += 1,
            None => self.blamed = true,
        }
        inside
    }

    pub(super) fn leave_newtype(&mut self) {
        self.depth -= 1;
    }

    fn home(&mut self, at: NodeId, key: Option<NodeKey>) -> Option<NodeId> {
        let Some(key) = key else { return Some(at) };
        match self.homes.get(&key) {
            Some(&home) if home != at => self.alternative(at, NodeKind::Link(home)).map(|_| home),
            Some(_) => Some(at),
            None => {
                // At a position that has been something else, others of this type would inherit the conflict.
                if self.nodes[at].kind == NodeKind::New {
                    self.homes.insert(key, at);
                }
                Some(at)
            }
        }
    }

    /// The node where `kind` is traced when it is asked for at `at`.
    fn settle(&mut self, at: NodeId, key: Option<NodeKey>, kind: NodeKind) -> Option<NodeId> {
        if !self.spend(at) {
            return None;
        }
        let Some(key) = key else {
            return self.alternative(at, kind);
        };
        match self.homes.get(&key) {
            Some(&home) if home != at => {
                self.alternative(at, NodeKind::Link(home))?;
                self.alternative(home, kind)
            }
            Some(_) => self.alternative(at, kind),
            None => {
                let home = self.alternative(at, kind)?;
                self.homes.insert(key, home);
                Some(home)
            }
        }
    }

    /// Counts a step. `false` beyond the limit.
    fn spend(&mut self, at: NodeId) -> bool {
        self.steps += 1;
        let too_deep = self.depth >= MAX_NESTING;
        if too_deep && self.nodes[at].kind == NodeKind::New {
            self.nodes[at].kind = NodeKind::Opaque;
            self.progress = true;
        }
        !too_deep && self.steps <= MAX_STEPS
    }

    /// The node of `kind` at a position, among those that were asked for there in other runs.
    fn alternative(&mut self, at: NodeId, kind: NodeKind) -> Option<NodeId> {
        let mut id = at;
        for _ in 0..MAX_HOPS {
            if self.nodes[id].kind == NodeKind::New {
                self.nodes[id].kind = kind;
                self.nodes[id].count = match kind {
                    NodeKind::Tuple(len) => len,
                    NodeKind::Struct(_, parts) | NodeKind::Enum(_, parts) => parts.len(),
                    _ => 0,
                };
                self.progress = true;
            }
            if self.nodes[id].kind == kind {
                self.nodes[at].current = id;
                return Some(id);
            }
            id = match self.nodes[id].alternative {
                Some(next) => next,
                None => {
                    self.nodes[id].varies = true;
                    let next = self.allocate()?;
                    self.nodes[id].alternative = Some(next);
                    next
                }
            };
        }
        None
    }

    fn allocate(&mut self) -> Option<NodeId> {
        if self.nodes.len() == MAX_POSITIONS {
            return None;
        }
        let id = self.nodes.len();
        self.nodes.push(GraphNode::new(id));
        Some(id)
    }

    /// The position of a part.
    pub(super) fn child(&mut self, id: NodeId, index: usize) -> Option<NodeId> {
        while self.nodes[id].children.len() <= index {
            let Some(child) = self.allocate() else {
                self.blamed = true;
                return None;
            };
            self.nodes[id].children.push(child);
        }
        Some(self.nodes[id].children[index])
    }

    /// The position of an element of a tuple. The elements of an array are one position, so that a long array costs no more
    /// than a short one.
    pub(super) fn element(&mut self, id: NodeId, index: usize, seed: &'static str) -> Option<NodeId> {
        let node = &mut self.nodes[id];
        if index == 0 {
            node.seed = seed;
        }
        // `PhantomData<T>` is the seed that reads a `T` and knows nothing else.
        let alike = node.seed == seed && seed.starts_with("core::marker::PhantomData<");
        if alike && index <= node.shared.max(1) && node.children.len() <= 1 {
            node.shared = node.shared.max(index + 1);
            return self.child(id, 0);
        }
        if node.children.len() == 1 {
            node.children.resize(node.shared.max(1), node.children[0]);
        }
        self.child(id, index)
    }

    /// Records that a tuple or struct took all it wanted, which was `count` parts.
    pub(super) fn asked_for(&mut self, id: NodeId, count: usize) {
        let node = &mut self.nodes[id];
        node.varies |= node.visited && node.count != count;
        node.count = count;
    }
}
