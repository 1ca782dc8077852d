//! What the provider keeps for one peer: messages that were posted and have not left.
//!
//! A provider takes as many messages as it is given, whether their receiver reads them or not, and the credit of a link is no
//! bound: a peer may grant it for what it has not read, and some messages take none. So the messages to each peer are numbered.
//! A completion reports that a message has left, which is when the system's socket or the device has it, and all that were posted
//! before it have left, too: messages to one peer leave in order. Messages that are copied when they are posted have no
//! completions, so every eighth one is posted like a long one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::limits::{MOST_KEPT, NOTED_EVERY};
use super::sys::EndpointName;

pub(super) struct Backlog {
    /// Identifies it at its port.
    pub id: u64,
    /// The peer.
    pub name: EndpointName,
    /// The number of the last message that was posted, and of the last that is known to have left.
    posted: AtomicU64,
    left: AtomicU64,
    /// A link waits for room.
    awaited: AtomicBool,
}

impl Backlog {
    pub(super) fn new(id: u64, name: EndpointName) -> Backlog {
        let (posted, left) = (AtomicU64::new(0), AtomicU64::new(0));
        Backlog { id, name, posted, left, awaited: AtomicBool::new(false) }
    }

    /// Messages that may not have left.
    pub(super) fn len(&self) -> u64 {
        self.posted.load(Ordering::SeqCst).saturating_sub(self.left.load(Ordering::SeqCst))
    }

    /// Whether a further message may be posted. If not, `note_left` will tell.
    pub(super) fn has_room(&self) -> bool {
        if self.len() < MOST_KEPT {
            return true;
        }
        // Looked at again: what leaves from now on finds that it is awaited.
        self.awaited.store(true, Ordering::SeqCst);
        self.len() < MOST_KEPT
    }

    /// The number of a message that is about to be posted.
    pub(super) fn begin(&self) -> u64 {
        self.posted.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// True for the numbers of messages that need a completion.
    pub(super) fn is_noted(number: u64) -> bool {
        number.is_multiple_of(NOTED_EVERY)
    }

    /// The provider did not take the message that was about to be posted: it is not connected to the peer, and so keeps nothing
    /// for it. (One that has no room is its own bound.)
    pub(super) fn busy(&self) {
        let posted = self.posted.fetch_sub(1, Ordering::SeqCst) - 1;
        self.left.fetch_max(posted, Ordering::SeqCst);
    }

    /// The message that was about to be posted can't be.
    pub(super) fn failed(&self) {
        self.posted.fetch_sub(1, Ordering::SeqCst);
    }

    /// A message has left, or was lost with the connection. True when a link waits for that.
    pub(super) fn note_left(&self, number: u64) -> bool {
        self.left.fetch_max(number, Ordering::SeqCst);
        self.len() < MOST_KEPT && self.awaited.swap(false, Ordering::SeqCst)
    }
}
