//! What is on its way out of a link chunk by chunk.

use std::collections::{HashSet, VecDeque};

use super::Memory;
use super::hash::Numbers;
use super::wire::Stream;

/// Bytes on their way out, chunk by chunk.
pub(super) struct OutStream<M> {
    pub kind: Stream,
    pub id: u64,
    pub memory: M,
    pub sent: usize,
    /// The exposed memory that is read, if it is a peer's pull.
    pub token: Option<u128>,
}

/// The streams of a link, which take turns.
pub(super) struct Streams<M> {
    queue: VecDeque<OutStream<M>>,
    asked: Asked,
}

/// What the peer has asked for, of what is streamed.
#[derive(Default)]
struct Asked {
    /// The peer's numbers of its pulls, and of its calls whose answers are among the streams: there may be many, and a peer may
    /// give up what there is not again and again.
    pulls: HashSet<u64, Numbers>,
    responses: HashSet<u64, Numbers>,
    /// Bytes of the answers. Each is kept whole until the last of it is handed out.
    answering: usize,
}

impl<M> Default for Streams<M> {
    fn default() -> Self {
        Streams { queue: VecDeque::new(), asked: Asked::default() }
    }
}

impl Asked {
    fn note<M: Memory>(&mut self, stream: &OutStream<M>) {
        match stream.kind {
            Stream::Pull => drop(self.pulls.insert(stream.id)),
            Stream::Response => {
                self.responses.insert(stream.id);
                self.answering += stream.memory.len();
            }
            Stream::Push | Stream::Request => {}
        }
    }

    fn forget<M: Memory>(&mut self, stream: &OutStream<M>) {
        match stream.kind {
            Stream::Pull => drop(self.pulls.remove(&stream.id)),
            Stream::Response => {
                self.responses.remove(&stream.id);
                self.answering -= stream.memory.len();
            }
            Stream::Push | Stream::Request => {}
        }
    }
}

impl<M: Memory> Streams<M> {
    pub(super) fn add(&mut self, stream: OutStream<M>) {
        self.asked.note(&stream);
        self.queue.push_back(stream);
    }

    /// The stream whose turn it is: it comes back with [`Streams::put_back`].
    pub(super) fn take(&mut self) -> Option<OutStream<M>> {
        self.queue.pop_front()
    }

    /// A stream has had its turn. If there is nothing left of it, that was its last.
    pub(super) fn put_back(&mut self, stream: OutStream<M>) {
        if stream.sent < stream.memory.len() {
            self.queue.push_back(stream);
        } else {
            self.asked.forget(&stream);
        }
    }

    pub(super) fn drop_where(&mut self, mut doomed: impl FnMut(&OutStream<M>) -> bool) {
        let Streams { queue, asked } = self;
        queue.retain(|stream| {
            let ends = doomed(stream);
            if ends {
                asked.forget(stream);
            }
            !ends
        });
    }

    /// Bytes that have not been handed out.
    pub(super) fn unsent(&self) -> usize {
        self.queue.iter().map(|stream| stream.memory.len() - stream.sent).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn has_pull(&self, id: u64) -> bool {
        self.asked.pulls.contains(&id)
    }

    pub(super) fn has_response(&self, id: u64) -> bool {
        self.asked.responses.contains(&id)
    }

    /// Pulls of the peer.
    pub(super) fn pulls(&self) -> usize {
        self.asked.pulls.len()
    }

    pub(super) fn answering(&self) -> usize {
        self.asked.answering
    }
}
