//! The receiving side of a link: messages in order, among them announcements of staged segments, which are read from the peer
//! first.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;

use super::limits::CREDITS;
use super::slab::Slab;
use super::wire::MessageContent;
use crate::memory::Slice;
use crate::transport::{LinkKey, PartialFrame, PayloadStatus, ReceiveTarget, Sink};

/// Something that is handled when everything before it has been.
enum InboxItem {
    Bytes(Vec<u8>),
    Payload(Vec<u8>),
    SourceGone,
    /// A staged segment, identified by its number: being read, or read already.
    Fetch {
        number: u64,
        payload: bool,
        read: Option<(Slab, usize)>,
    },
    Bye,
}

#[derive(Default)]
pub(super) struct VerbsInbox {
    partial: PartialFrame,
    /// Destination of the payload that comes next.
    receive_target: Option<ReceiveTarget<Slice>>,
    queue: VecDeque<InboxItem>,
}

/// What became of a message.
pub(super) enum ReceiveOutcome {
    On,
    /// It waits until everything before it has been handled.
    Waits,
    /// The link was closed because of its content.
    Closed,
    /// The peer closes the connection.
    Bye,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it sent {what}"))
}

impl VerbsInbox {
    /// Takes a message that is not a staged segment.
    pub(super) fn take(&mut self, key: LinkKey, content: &MessageContent, sink: &mut dyn Sink) -> io::Result<ReceiveOutcome> {
        if self.queue.is_empty() {
            return match content {
                MessageContent::Bytes(bytes) => self.feed(key, bytes, sink),
                MessageContent::Payload(bytes) => self.deliver(key, Some(bytes), sink),
                MessageContent::SourceGone => self.deliver(key, None, sink),
                MessageContent::Bye => Ok(ReceiveOutcome::Bye),
                _ => Ok(ReceiveOutcome::On),
            };
        }
        self.queue.push_back(match content {
            MessageContent::Bytes(bytes) => InboxItem::Bytes(bytes.to_vec()),
            MessageContent::Payload(bytes) => InboxItem::Payload(bytes.to_vec()),
            MessageContent::SourceGone => InboxItem::SourceGone,
            MessageContent::Bye => InboxItem::Bye,
            _ => return Ok(ReceiveOutcome::On),
        });
        if self.queue.len() > usize::from(CREDITS) + 1 {
            return Err(broken("more messages than it has credits for"));
        }
        Ok(ReceiveOutcome::Waits)
    }

    /// Number of items that wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Keeps the position of a staged segment, which is being read.
    pub(super) fn expect(&mut self, number: u64, payload: bool) {
        self.queue.push_back(InboxItem::Fetch { number, payload, read: None });
    }

    /// Staged segments that wait.
    pub(super) fn expected(&self) -> usize {
        self.queue.iter().filter(|item| matches!(item, InboxItem::Fetch { .. })).count()
    }

    /// A staged segment has been read.
    pub(super) fn fetched(&mut self, fetched: u64, stage: Slab, len: usize) {
        for item in &mut self.queue {
            if let InboxItem::Fetch { number, read, .. } = item
                && *number == fetched
            {
                *read = Some((stage, len));
                return;
            }
        }
    }

    /// Handles the items whose turn has come. `done` gets each staging buffer back.
    pub(super) fn deliver_ready(
        &mut self,
        key: LinkKey,
        sink: &mut dyn Sink,
        done: &mut dyn FnMut(Slab),
    ) -> io::Result<ReceiveOutcome> {
        while let Some(item) = self.queue.pop_front() {
            let outcome = match item {
                InboxItem::Fetch { read: None, .. } => {
                    self.queue.push_front(item);
                    return Ok(ReceiveOutcome::On);
                }
                InboxItem::Bytes(bytes) => self.feed(key, &bytes, sink)?,
                InboxItem::Payload(bytes) => self.deliver(key, Some(&bytes), sink)?,
                InboxItem::SourceGone => self.deliver(key, None, sink)?,
                InboxItem::Bye => ReceiveOutcome::Bye,
                InboxItem::Fetch { payload, read: Some((stage, len)), .. } => {
                    let outcome = {
                        // SAFETY: the read into it has ended, and nothing else is asked of the device with it.
                        let bytes = unsafe { stage.read(0, len) };
                        if payload { self.deliver(key, Some(bytes), sink) } else { self.feed(key, bytes, sink) }
                    };
                    done(stage);
                    outcome?
                }
            };
            if !matches!(outcome, ReceiveOutcome::On) {
                return Ok(outcome);
            }
        }
        Ok(ReceiveOutcome::On)
    }

    fn feed(&mut self, key: LinkKey, bytes: &[u8], sink: &mut dyn Sink) -> io::Result<ReceiveOutcome> {
        if self.receive_target.is_some() {
            return Err(broken("no payload where it had announced one"));
        }
        let Some((receive_target, behind)) = self.partial.offer(bytes, |bytes| sink.bytes(key, bytes)) else {
            return Ok(ReceiveOutcome::Closed);
        };
        if !behind.is_empty() {
            return Err(broken("bytes where it had announced a payload"));
        }
        self.receive_target = receive_target;
        Ok(ReceiveOutcome::On)
    }

    /// A payload has come; or none, because the memory it was to come from has been reclaimed.
    fn deliver(&mut self, key: LinkKey, bytes: Option<&[u8]>, sink: &mut dyn Sink) -> io::Result<ReceiveOutcome> {
        let receive_target = self.receive_target.take().ok_or_else(|| broken("a payload that it had not announced"))?;
        if bytes.is_some_and(|bytes| bytes.len() != receive_target.len) {
            return Err(broken("a payload of another length than it had announced"));
        }
        let status = match (&receive_target.memory, bytes) {
            (None, Some(_)) => PayloadStatus::Whole,
            (_, None) => PayloadStatus::SourceGone,
            (Some(target), Some(bytes)) if target.write(bytes) => PayloadStatus::Whole,
            (Some(_), Some(_)) => PayloadStatus::TargetGone,
        };
        sink.payload_done(key, status);
        Ok(ReceiveOutcome::On)
    }
}
