//! What is on its way out of a link chunk by chunk.

use std::collections::{HashMap, VecDeque};

use slotmap::SlotMap;

use super::Memory;
use super::hash::SeededHash;
use super::wire::Stream;

slotmap::new_key_type! {
    struct StreamId;
}

/// Bytes on their way out, chunk by chunk.
pub(super) struct OutStream<M> {
    pub kind: Stream,
    pub id: u64,
    pub memory: M,
    pub sent: usize,
    /// The exposed memory that is read, if it is a peer's pull.
    pub token: Option<u128>,
}

/// The streams of a link, which take turns. There may be many, and a peer ends those that it has asked for one by one, in
/// any order: so each is found by its number.
pub(super) struct Streams<M> {
    streams: SlotMap<StreamId, OutStream<M>>,
    numbers: HashMap<(Stream, u64), StreamId, SeededHash>,
    /// Whose turn it is. A stream that has ended leaves its place behind, until that is the first or there are too many of that
    /// sort.
    turns: VecDeque<StreamId>,
    /// How many of the streams are pulls of the peer.
    pulls: usize,
    /// Bytes of the answers. Each is kept whole until the last of it is handed out.
    answering: usize,
}

/// A piece of a stream.
pub(super) struct Chunk<M> {
    pub kind: Stream,
    pub id: u64,
    pub offset: usize,
    pub len: usize,
    pub memory: Option<M>,
}

/// So many places of streams that have ended are not worth looking for.
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
        // Where a peer gives a second call the number of one whose answer is on its way, it can name the first no more.
        self.numbers.insert(number, id);
    }

    /// The next chunk, of at most `most` bytes, of the stream whose turn it is. If there is nothing left of it then, it has
    /// ended.
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
            return Some(chunk);
        }
        None
    }

    /// Ends the stream of this number, if there is one.
    pub(super) fn end(&mut self, kind: Stream, number: u64) {
        // Mostly there is none at all.
        if self.streams.is_empty() {
            return;
        }
        if let Some(id) = self.numbers.get(&(kind, number)).copied() {
            self.remove(id);
            self.forget_turns();
        }
    }

    /// Ends all streams that are `doomed`.
    pub(super) fn end_where(&mut self, doomed: impl Fn(&OutStream<M>) -> bool) {
        let ids: Vec<StreamId> = self.streams.iter().filter(|(_, stream)| doomed(stream)).map(|(id, _)| id).collect();
        for id in ids {
            self.remove(id);
        }
        self.forget_turns();
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

    fn forget_turns(&mut self) {
        let Streams { streams, turns, .. } = self;
        if turns.len() > FEW + 2 * streams.len() {
            turns.retain(|id| streams.contains_key(*id));
        }
    }

    /// Bytes that have not been handed out.
    pub(super) fn unsent(&self) -> usize {
        self.streams.values().map(|stream| stream.memory.len() - stream.sent).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }

    /// The exposed memory that a pull of the peer reads.
    pub(super) fn pulled(&self, number: u64) -> Option<u128> {
        self.streams.get(*self.numbers.get(&(Stream::Pull, number))?)?.token
    }

    /// Pulls of the peer.
    pub(super) fn pulls(&self) -> usize {
        self.pulls
    }

    pub(super) fn answering(&self) -> usize {
        self.answering
    }
}
