//! What is sent: the bodies of messages, and the outgoing streams of a link, sent chunk by chunk.

use std::collections::{HashMap, VecDeque};

use slotmap::SlotMap;

use super::Memory;
use super::tables::SeededHash;
use super::wire::Stream;
use crate::payload::TrailingList;

slotmap::new_key_type! {
    struct StreamId;
}

/// The body of a message to be sent.
pub(crate) enum OutgoingBody<'a, M> {
    Small(&'a [u8]),
    /// With what it ends with, if that is a long list.
    Large(M, Option<TrailingList>),
}

impl<M: Memory> OutgoingBody<'_, M> {
    pub(crate) fn len(&self) -> usize {
        match self {
            OutgoingBody::Small(bytes) => bytes.len(),
            OutgoingBody::Large(memory, _) => memory.len(),
        }
    }

    pub(super) fn inline(&self) -> &[u8] {
        match self {
            OutgoingBody::Small(bytes) => bytes,
            OutgoingBody::Large(..) => &[],
        }
    }

    pub(super) fn list(&self) -> Option<TrailingList> {
        if let OutgoingBody::Large(_, list) = self { *list } else { None }
    }
}

/// An outgoing stream.
pub(super) struct OutStream<M> {
    pub kind: Stream,
    pub id: u64,
    pub memory: M,
    pub sent: usize,
    /// The exposed memory that it reads, if it is a pull of the peer.
    pub token: Option<u128>,
}

/// The streams of a link, which take turns. There may be many, and a peer may end those that it has asked for one by one, in
/// any order: so each is found by its number.
pub(super) struct Streams<M> {
    streams: SlotMap<StreamId, OutStream<M>>,
    numbers: HashMap<(Stream, u64), StreamId, SeededHash>,
    /// The order of the turns: the first is of a stream. Entries of streams that have ended are removed when they come first, or when
    /// there are too many of these.
    turns: VecDeque<StreamId>,
    /// How many of the streams are pulls of the peer.
    pub pulls: usize,
    /// Bytes of the answers. Each counts in full until the last of it is handed out.
    pub answering: usize,
}

/// A piece of a stream.
pub(super) struct Chunk<M> {
    pub kind: Stream,
    pub id: u64,
    pub offset: usize,
    pub len: usize,
    pub memory: Option<M>,
}

/// So many entries of ended streams are not worth a sweep.
const FEW: usize = 64;

impl<M> Default for Streams<M> {
    fn default() -> Self {
        Streams { streams: SlotMap::with_key(), numbers: HashMap::default(), turns: VecDeque::new(), pulls: 0, answering: 0 }
    }
}

impl<M: Memory> Streams<M> {
    pub(super) fn add(&mut self, stream: OutStream<M>) {
        match stream.kind {
            Stream::Pull => self.pulls += 1,
            Stream::Response => self.answering += stream.memory.len(),
            Stream::Push | Stream::Request => {}
        }
        let number = (stream.kind, stream.id);
        let id = self.streams.insert(stream);
        self.turns.push_back(id);
        // If a peer gives a second call the number of one whose answer is still being sent, it can no longer name the first.
        self.numbers.insert(number, id);
    }

    /// The next chunk, of at most `most` bytes, of the stream whose turn it is. The stream ends with its last chunk.
    pub(super) fn next(&mut self, most: usize) -> Option<Chunk<M>> {
        while let Some(id) = self.turns.pop_front() {
            let Some(stream) = self.streams.get_mut(id) else { continue };
            let offset = stream.sent;
            let len = most.min(stream.memory.len() - offset);
            let chunk = Chunk { kind: stream.kind, id: stream.id, offset, len, memory: stream.memory.part(offset, len) };
            stream.sent += len;
            if stream.sent < stream.memory.len() {
                self.turns.push_back(id);
            } else {
                self.remove(id);
            }
            self.sweep_turns();
            return Some(chunk);
        }
        None
    }

    /// How much is left of the stream whose turn it is.
    pub(super) fn next_len(&self) -> Option<usize> {
        let next = self.streams.get(*self.turns.front()?);
        next.map(|stream| stream.memory.len() - stream.sent)
    }

    /// Ends the stream of this number, if there is one.
    pub(super) fn end(&mut self, kind: Stream, number: u64) {
        // Most links have no streams.
        if self.streams.is_empty() {
            return;
        }
        if let Some(id) = self.numbers.get(&(kind, number)).copied() {
            self.remove(id);
            self.sweep_turns();
        }
    }

    /// Ends all streams that are `doomed`.
    pub(super) fn end_where(&mut self, doomed: impl Fn(&OutStream<M>) -> bool) {
        let ids: Vec<StreamId> = self.streams.iter().filter(|(_, stream)| doomed(stream)).map(|(id, _)| id).collect();
        for id in ids {
            self.remove(id);
        }
        self.sweep_turns();
    }

    fn remove(&mut self, id: StreamId) {
        let Some(stream) = self.streams.remove(id) else { return };
        let number = (stream.kind, stream.id);
        if self.numbers.get(&number) == Some(&id) {
            self.numbers.remove(&number);
        }
        match stream.kind {
            Stream::Pull => self.pulls -= 1,
            Stream::Response => self.answering -= stream.memory.len(),
            Stream::Push | Stream::Request => {}
        }
    }

    fn sweep_turns(&mut self) {
        let Streams { streams, turns, .. } = self;
        if turns.len() > FEW + 2 * streams.len() {
            turns.retain(|id| streams.contains_key(*id));
        }
        while turns.front().is_some_and(|id| !streams.contains_key(*id)) {
            turns.pop_front();
        }
    }

    /// Bytes that have not been handed out.
    pub(super) fn unsent(&self) -> usize {
        self.streams.values().map(|stream| stream.memory.len() - stream.sent).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }

    /// The exposed memory that a pull of the peer reads.
    pub(super) fn pulled(&self, number: u64) -> Option<u128> {
        self.streams.get(*self.numbers.get(&(Stream::Pull, number))?)?.token
    }
}
